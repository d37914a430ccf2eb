// Talks to the server that the page came from: with the API key where it wants one.

const STORED = "mlxcel-key";

let key = sessionStorage.getItem(STORED);
let asking = null;

/** `fetch` with the key. A server that wants another one is asked again once the person has given it. */
export async function call(path, options = {}) {
  const used = key;
  const headers = { ...options.headers };
  if (used !== null) headers.authorization = `Bearer ${latin(used)}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status !== 401) return response;
  if (used === key) await (asking ??= askForKey(used !== null));
  return call(path, options);
}

/** The body of a GET, or null where the server does not give it. */
export async function getJson(path) {
  const response = await call(path);
  return response.ok ? response.json() : null;
}

/** Everything that is polled. `slots` and `metrics` are null where they are turned off. Rejects without a server. */
export async function look() {
  const [health, slots, metrics] = await Promise.all([
    call("health"),
    getJson("slots"),
    call("metrics").then((response) => (response.ok ? response.text() : null)),
  ]);
  const body = await health.json();
  const status = health.ok ? "ready" : body.error.message.toLowerCase();
  return {
    at: performance.now() / 1000,
    state: health.ok ? "ready" : "waiting",
    status,
    slots,
    metrics: metrics === null ? null : parseExposition(metrics),
  };
}

/** Prometheus text as a map from series, `name{label="value"}`, to its number. */
function parseExposition(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const space = line.lastIndexOf(" ");
    if (space > 0 && line[0] !== "#") series.set(line.slice(0, space), Number(line.slice(space + 1)));
  }
  return series;
}

function askForKey(wasRefused) {
  const dialog = document.getElementById("key");
  const input = document.getElementById("key-value");
  document.getElementById("key-refused").hidden = !wasRefused;
  input.value = "";
  dialog.oncancel = (event) => event.preventDefault();
  dialog.onclose = () => asking && dialog.showModal(); // there is nothing to see without a key
  dialog.showModal();
  return new Promise((done) => {
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      key = input.value.trim();
      sessionStorage.setItem(STORED, key);
      asking = null;
      dialog.close();
      done();
    };
  });
}

/** A header holds bytes, and scripts may only write those below 256 as characters: so UTF-8, byte by byte. */
function latin(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}
