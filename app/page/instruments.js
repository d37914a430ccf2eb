// What the server is doing: readouts, strip charts, slots, block pool and prefix cache, from /slots and /metrics.

import { Chart } from "./chart.js";
import { bytes, count, percent, rate, rateMark, seconds, secondsMark } from "./numbers.js";

const WINDOW_S = 180;
// A slot's tokens are counted over a few seconds: over one, a slow model's rate would jump.
const ITL_SPAN_S = 2.5;
const MOST_ROWS = 16;

const $ = (id) => document.getElementById(id);

export class Instruments {
  constructor() {
    this.history = []; // what was seen in the last minutes, each with its point on the charts
    this.decode = new Chart($("decode-chart"), "decode", rate, rateMark, WINDOW_S, { least: 10 });
    this.prefill = new Chart($("prefill-chart"), "prefill", rate, rateMark, WINDOW_S, { least: 100 });
    this.ttft = new Chart($("ttft-chart"), "ttft", seconds, secondsMark, WINDOW_S, { least: 0.1, joins: true });
    this.itl = new Chart($("itl-chart"), "itl", seconds, secondsMark, WINDOW_S, { least: 0.01 });
  }

  /** Take in what `look` has seen, and show it. */
  show(seen) {
    const last = this.history.at(-1);
    if (last && hasRestarted(last, seen)) this.history = [];
    this.history = this.history.filter(({ at }) => seen.at - at <= WINDOW_S);
    const before = this.history.findLast(({ at }) => seen.at - at >= ITL_SPAN_S) ?? this.history[0];
    const gaps = tokenGaps(before, seen);
    seen.point = { at: seen.at, ...rates(this.history.at(-1), seen), itl: mean(gaps.values()) };
    this.history.push(seen);
    this.showOff(seen);
    this.showSlots(seen, gaps);
    if (seen.metrics) {
      this.showMetrics(seen);
      showBlocks(seen.metrics);
    }
    this.showCharts(seen);
  }

  showOff({ slots, metrics }) {
    const off = [slots ? "" : "/slots", metrics ? "" : "/metrics"].filter(Boolean);
    $("off").hidden = !off.length;
    $("off").textContent = `This server does not give ${off.join(" and ")}: what they would tell is not shown.`;
  }

  showMetrics({ metrics, point }) {
    read("decode", point.decode === null ? "–" : rate(point.decode));
    read("prefill", point.prefill === null ? "–" : rate(point.prefill));
    const first = this.history.find((seen) => seen.metrics).metrics;
    const ttft = meanOf(first, metrics, "mlxcel_request_ttft_seconds");
    read("ttft", ttft === null ? "–" : seconds(ttft));
    read("queue", count(metrics.get("mlxcel_queue_depth")));
    const [live, all] = ["live", "allocated"].map((name) => metrics.get(`mlxcel_cache_pool_paged_blocks_${name}`));
    read("pool", all ? percent(live / all) : "–");
    const num = metrics.get("mlxcel_slots");
    read("slots", num ? `${num - metrics.get("mlxcel_slots_available")} / ${num}` : "–");
  }

  showSlots({ slots, point }, gaps) {
    if (!slots) return;
    read("itl", point.itl === null ? "–" : seconds(point.itl));
    const isLong = slots.length > MOST_ROWS;
    const shown = (isLong ? slots.filter((slot) => slot.is_processing) : slots).slice(0, MOST_ROWS);
    const list = $("slot-list");
    while (list.children.length > shown.length) list.lastChild.remove();
    while (list.children.length < shown.length) list.append(slotRow());
    shown.forEach((slot, index) => fillSlot(list.children[index], slot, gaps.get(slot.id)));
  }

  showCharts({ at, metrics, point }) {
    const points = this.history.map((seen) => seen.point);
    const first = this.history.find((seen) => seen.metrics)?.metrics;
    this.decode.show(points, at, point.decode === null ? "" : rate(point.decode));
    this.prefill.show(points, at, point.prefill === null ? "" : rate(point.prefill));
    const halves = [0.5, 0.95].map((share) => metrics && quantile(first, metrics, "mlxcel_request_ttft_seconds", share));
    const isKnown = typeof halves[0] === "number";
    this.ttft.show(points, at, isKnown ? `p50 ${seconds(halves[0])}, p95 ${seconds(halves[1])}` : "no request has ended");
    this.itl.show(points, at, point.itl === null ? "nobody decodes" : `${seconds(point.itl)} now`);
  }
}

function hasRestarted(last, seen) {
  const name = "mlxcel_batch_sequences_started_total";
  return last.metrics && seen.metrics && seen.metrics.get(name) < last.metrics.get(name);
}

/** Tokens a second since the last look, and the mean TTFT of the requests that have ended since. Null: not known. */
function rates(last, seen) {
  if (!last?.metrics || !seen.metrics) return { decode: null, prefill: null, ttft: null };
  const per = (name) => (seen.metrics.get(name) - last.metrics.get(name)) / (seen.at - last.at);
  return {
    decode: per("mlxcel_batch_decode_tokens_total"),
    prefill: per("mlxcel_batch_prefill_tokens_total"),
    ttft: meanOf(last.metrics, seen.metrics, "mlxcel_request_ttft_seconds"),
  };
}

/** Seconds from token to token of each slot that went on decoding one request since `before`, by the slot's id. */
function tokenGaps(before, seen) {
  const gaps = new Map();
  if (!before?.slots || !seen.slots) return gaps;
  for (const slot of seen.slots) {
    const then = before.slots.find(({ id }) => id === slot.id);
    const isSame = slot.is_processing && then?.is_processing && then.id_task === slot.id_task;
    const num = isSame ? decoded(slot) - decoded(then) : 0;
    if (num > 0 && decoded(then) > 0) gaps.set(slot.id, (seen.at - before.at) / num);
  }
  return gaps;
}

const decoded = (slot) => slot.next_token[0].n_decoded;

function mean(values) {
  const all = [...values];
  return all.length ? all.reduce((sum, value) => sum + value, 0) / all.length : null;
}

/** The mean of what a histogram has counted between two looks. */
function meanOf(first, last, name) {
  const since = (part) => last.get(`${name}_${part}`) - first.get(`${name}_${part}`);
  return since("count") > 0 ? since("sum") / since("count") : null;
}

/** The value that `share` of what was counted between two looks is under, read off between two bounds. */
function quantile(first, last, name, share) {
  const buckets = [...last.keys()]
    .filter((series) => series.startsWith(`${name}_bucket{`))
    .map((series) => [Number(/le="([\d.]+)"/.exec(series)?.[1] ?? Infinity), last.get(series) - first.get(series)]);
  const wanted = share * buckets.at(-1)[1];
  if (!wanted) return null;
  let [low, below] = [0, 0];
  for (const [bound, num] of buckets) {
    if (num >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / (num - below);
    [low, below] = [bound, num];
  }
  return low;
}

function read(id, text) {
  const [number, ...unit] = text.split(" ");
  const place = $(id);
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  const small = document.createElement("small");
  small.textContent = unit.join(" ");
  place.replaceChildren(number, " ", small);
}

function slotRow() {
  const row = document.createElement("li");
  const part = (tag, name) => {
    const node = document.createElement(tag);
    node.className = name;
    row.append(node);
    return node;
  };
  part("span", "number");
  const bar = part("div", "bar");
  bar.append(document.createElement("i"), document.createElement("i"));
  part("span", "figures");
  return row;
}

/** The bar has the prompt and then the answer, each as far as it has come, over all that the slot may hold of them. */
function fillSlot(row, slot, gap) {
  const [number, bar, figures] = row.children;
  row.className = slot.is_processing ? "busy" : "";
  number.textContent = slot.id;
  if (!slot.is_processing) {
    fill(bar, 0, 0);
    figures.textContent = "free";
    return;
  }
  const { n_decoded: num, n_remain: rest } = slot.next_token[0];
  const all = slot.n_prompt_tokens + num + rest;
  fill(bar, slot.n_prompt_tokens_processed / all, num / all);
  const isRead = slot.n_prompt_tokens_processed >= slot.n_prompt_tokens;
  const prompt = `${isRead ? "" : `${count(slot.n_prompt_tokens_processed)} of `}${count(slot.n_prompt_tokens)} read`;
  figures.textContent = isRead ? `${prompt}, ${count(num)} written${gap ? `, ${rate(1 / gap)}` : ""}` : prompt;
}

function fill(bar, first, second) {
  bar.children[0].style.width = `${first * 100}%`;
  bar.children[1].style.width = `${second * 100}%`;
}

function showBlocks(metrics) {
  const pool = (name) => metrics.get(`mlxcel_cache_pool_paged_${name}`) ?? 0;
  const cache = (name) => metrics.get(`mlxcel_prompt_cache_${name}`) ?? 0;
  const [live, all, size] = [pool("blocks_live"), pool("blocks_allocated"), pool("block_size")];
  if (!all) return;
  const cached = Math.round((cache("bytes") / pool("bytes_reserved")) * all) || 0;
  fill($("pool-bar"), live / all, cached / all);
  $("pool-figures").textContent =
    `${count(live)} of ${count(all)} blocks in use, ${count(cached)} free and still known; ` +
    `${count(size)} tokens each, ${bytes(pool("bytes_reserved"))} in all`;

  const missed = ["cold", "short"].map((reason) => cache(`misses_total{reason="${reason}"}`)).reduce((a, b) => a + b);
  const hits = cache("hits_total");
  const share = hits + missed ? percent(hits / (hits + missed)) : "–";
  read("hits", share);
  $("prefix-figures").textContent =
    `${count(hits)} of ${count(hits + missed)} prompts began with what was there; ` +
    `${count(cache("prefix_tokens_reused_total"))} tokens were not computed again`;

  const build = [...metrics.keys()].find((series) => series.startsWith("mlxcel_build_info")) ?? "";
  const label = (name) => new RegExp(`${name}="([^"]*)"`).exec(build)?.[1] ?? "";
  $("build").textContent = `mlxcel ${label("version")}, settings ${label("fingerprint")}`;
}
