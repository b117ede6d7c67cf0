/** Settings of the requests. */

import { $, el } from "./dom.js";
import { save } from "./shelf.js";
import { on, state, tell } from "./state.js";
import { keep, local, recall, session } from "./store.js";

export const settings = $("settings").elements;
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const KEPT = ["system", "thinking", "more", ...NUMBERS];
const written = () => Object.fromEntries(KEPT.map(name => [name, settings[name].value]).filter(([, value]) => value !== ""));
const fill = values => { for (const name of KEPT) settings[name].value = values[name] ?? ""; };
settings.key.value = recall(session, "deltic.key", "");
/** What a new chat begins with: what was set in an empty one. */
export const newSettings = () => ({ ...recall(local, "deltic.settings", {}) });
let saving = 0;
function take() {
  const { chat } = state;
  chat.settings = written();
  if (!chat.nodes.length) keep(local, "deltic.settings", chat.settings);
  clearTimeout(saving);
  saving = setTimeout(keepNow, 400, chat);
  unsaved = chat;
}
let unsaved = null;
function keepNow() {
  if (unsaved) save(unsaved);
  unsaved = null;
}
$("settings").addEventListener("input", event => {
  if (event.target === settings.key) keep(session, "deltic.key", settings.key.value);
  else if (KEPT.includes(event.target.name)) take();
});
settings.key.addEventListener("change", () => tell("key"));
$("settings").addEventListener("submit", event => event.preventDefault());

export const apiKey = () => settings.key.value;

/** The body of a request with the settings of a chat. What was left empty is the server's to decide. */
export function requestBody(messages, set) {
  let more = {};
  if (set.more?.trim()) {
    try { more = JSON.parse(set.more); } catch (error) { throw new Error(`More fields of the request: ${error.message}`); }
  }
  const body = { ...more };
  if (state.model) body.model = state.model;
  const system = set.system?.trim() ? [{ role: "system", content: set.system }] : [];
  body.messages = [...system, ...messages];
  for (const name of NUMBERS) if (set[name]) body[name] = Number(set[name]);
  if (set.thinking === "on" || set.thinking === "off") body.enable_thinking = set.thinking === "on";
  else if (set.thinking) body.reasoning_effort = set.thinking;
  return { ...body, stream: true, stream_options: { include_usage: true }, return_progress: true };
}

// Presets: settings with a name.

const presets = () => recall(local, "deltic.presets", {});
function listPresets(chosen = "") {
  const names = Object.keys(presets()).sort();
  settings.preset.replaceChildren(el("option", { value: "" }, names.length ? "choose" : "none yet"), ...names.map(name => el("option", {}, name)));
  settings.preset.value = chosen;
  $("preset-delete").hidden = !chosen;
}
settings.preset.addEventListener("change", () => {
  const chosen = presets()[settings.preset.value];
  $("preset-delete").hidden = !chosen;
  if (!chosen) return;
  fill(chosen);
  take();
});
$("preset-save").addEventListener("click", () => {
  const name = settings.preset_name.value.trim();
  if (!name) { settings.preset_name.focus(); return; }
  keep(local, "deltic.presets", { ...presets(), [name]: written() });
  settings.preset_name.value = "";
  listPresets(name);
});
$("preset-delete").addEventListener("click", () => {
  const { [settings.preset.value]: gone, ...others } = presets();
  keep(local, "deltic.presets", others);
  listPresets();
});
$("settings-clear").addEventListener("click", () => { fill({}); take(); });

export function showSettings(on) {
  document.body.classList.toggle("set", on);
  $("settings").hidden = !on;
  $("settings-open").setAttribute("aria-expanded", on);
}
$("settings-open").addEventListener("click", () => { showSettings($("settings").hidden); if (!$("settings").hidden) settings.system.focus(); });
$("settings-close").addEventListener("click", () => { showSettings(false); $("settings-open").focus(); });
on("opened", () => { keepNow(); fill(state.chat.settings ?? {}); });
listPresets();
