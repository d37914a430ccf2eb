// The chat: one conversation, kept in this page only. Answers stream, and can be stopped.

import { render } from "./markdown.js";
import { count, rate, seconds } from "./numbers.js";
import { call } from "./server.js";

const $ = (id) => document.getElementById(id);

let messages = []; // what was said so far, as the server takes it
let running = null; // the AbortController of the answer under way

export function openChat() {
  const [form, question] = [$("composer"), $("question")];
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else ask();
  });
  question.addEventListener("keydown", (event) => {
    // While an input method composes a character, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) ask();
  });
  question.addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !$("key").open) running?.abort();
  });
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("talk").replaceChildren($("blank"));
    $("blank").hidden = false;
    question.focus();
  });
  if (matchMedia("(pointer: fine)").matches) question.focus(); // elsewhere it would bring up a keyboard
}

/** The field is as high as what is written in it. */
function fit() {
  const { style } = $("question");
  style.height = "auto";
  style.height = `${$("question").scrollHeight}px`;
}

async function ask() {
  const text = $("question").value.trim();
  if (!text) return;
  $("question").value = "";
  fit();
  $("blank").hidden = true;
  const asked = { role: "user", content: text };
  const conversation = messages; // another one may have begun before the answer is there
  append("p", "asked").textContent = text;
  const answer = new Answer();
  running = new AbortController();
  $("send").textContent = "Stop";
  try {
    await receive(await call("v1/chat/completions", request(asked, running.signal)), answer);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.fail(error.message);
  } finally {
    running = null;
    $("send").textContent = "Send";
    answer.close();
  }
  // An answer that broke off is part of what was said; one that never began is not, and neither is its question: that
  // comes back to be asked again.
  if (answer.text) conversation.push(asked, { role: "assistant", content: answer.text });
  else if (answer.finish === "failed" && !$("question").value) {
    $("question").value = text;
    fit();
  }
}

function request(asked, signal) {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? null : Number($(id).value)); // null: absent
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, asked],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true },
  };
  return { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
}

/** Read a stream of events to its end. Throws what the server says went wrong. */
async function receive(response, answer) {
  if (!response.ok) {
    const said = await response.json().catch(() => null); // a proxy may answer in a way of its own
    throw new Error(said?.error?.message ?? `the server answered with status ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) answer.take(JSON.parse(line.slice("data: ".length)));
    }
  }
}

/** One answer on the page: its reasoning, its text, and a line of figures. */
class Answer {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.finish = null;
    this.num = 0; // pieces, about as many as tokens, until the server has told
    this.began = performance.now();
    this.node = append("article", "answer");
    this.node.setAttribute("aria-busy", "true"); // read out when it is complete, and not piece by piece
    this.thought = part(this.node, "details", "thought");
    part(this.thought, "summary").textContent = "Reasoning";
    part(this.thought, "p");
    this.thought.hidden = true;
    this.said = part(this.node, "div", "said");
    this.foot = part(this.node, "p", "foot");
    this.foot.textContent = "waiting for a slot";
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (content || reasoning) {
      this.first ??= performance.now();
      this.num += 1;
      this.text += content ?? "";
      this.reasoning += reasoning ?? "";
    }
    this.finish = choice?.finish_reason ?? this.finish;
    this.timings = event.timings ?? this.timings;
    this.frame ??= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.frame = null;
    const talk = $("talk");
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 48;
    render(this.text, this.said);
    this.thought.hidden = !this.reasoning;
    this.thought.lastChild.textContent = this.reasoning;
    this.foot.textContent = this.figures();
    if (isAtEnd) talk.scrollTop = talk.scrollHeight; // who has scrolled up is left alone
  }

  figures() {
    if (!this.first) return this.finish ?? "reading the prompt";
    const spent = (performance.now() - this.first) / 1000;
    const { predicted_n: num = this.num, predicted_per_second: speed = this.num / spent } = this.timings ?? {};
    const facts = [this.finish, `${count(num)} tokens`, Number.isFinite(speed) && speed > 0 && rate(speed)];
    facts.push(`first after ${seconds((this.first - this.began) / 1000)}`);
    if (this.timings?.cache_n) facts.push(`${count(this.timings.cache_n)} prompt tokens from the cache`);
    return facts.filter(Boolean).join(" · ");
  }

  fail(reason) {
    this.finish = "failed";
    part(this.node, "p", "failure").textContent = reason;
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.paint();
    this.node.setAttribute("aria-busy", "false");
  }
}

function part(parent, tag, name = "") {
  const node = document.createElement(tag);
  node.className = name;
  parent.append(node);
  return node;
}

function append(tag, name) {
  const node = part($("talk"), tag, name);
  $("talk").scrollTop = $("talk").scrollHeight;
  return node;
}
