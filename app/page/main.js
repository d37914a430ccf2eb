// Starts the page: looks at the server once a second while it can be seen, and opens the chat.

import { openChat } from "./chat.js";
import { Instruments } from "./instruments.js";
import { getJson, look } from "./server.js";

const INTERVAL_MS = 1000;

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const $ = (id) => document.getElementById(id);

function showStatus(state, text) {
  const status = $("status");
  if (status.textContent === text) return;
  status.dataset.state = state;
  status.textContent = text;
}

async function watch() {
  const instruments = new Instruments();
  let isKnown = false;
  for (;;) {
    if (!document.hidden) {
      try {
        const seen = await look();
        showStatus(seen.state, seen.status);
        instruments.show(seen);
        if (!isKnown && seen.state === "ready") await Promise.all([showModel(), showSettings()]);
        isKnown = seen.state === "ready";
      } catch (error) {
        showStatus("lost", "no connection");
        isKnown = false; // another server may come back
        if (!(error instanceof TypeError)) console.error(error);
      }
    }
    await pause(INTERVAL_MS);
  }
}

async function showModel() {
  const models = await getJson("v1/models");
  if (!models) return;
  $("model").textContent = models.data[0].id;
  document.title = `${models.data[0].id} – mlxcel`;
}

/** What has been set comes first. */
async function showSettings() {
  const config = await getJson("v1/config");
  if (!config) return;
  const isDefault = (setting) => setting.source === "default";
  const rows = [...config.settings].sort((a, b) => isDefault(a) - isDefault(b));
  const table = $("settings").querySelector("tbody");
  table.replaceChildren();
  for (const setting of rows) {
    const row = table.insertRow();
    row.className = setting.source;
    for (const text of [setting.name, setting.value, setting.source]) row.insertCell().textContent = text;
  }
}

/** On a narrow screen one of the two halves is shown. */
function openViews() {
  const buttons = document.querySelectorAll("[data-show]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    });
  }
}

openViews();
openChat();
watch();
