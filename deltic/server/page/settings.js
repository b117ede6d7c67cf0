/** Settings of the requests. */

import { $ } from "./dom.js";
import { state, tell } from "./state.js";
import { keep, local, recall, session } from "./store.js";

export const settings = $("settings").elements;
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const KEPT = ["system", "thinking", "more", ...NUMBERS];
for (const [name, value] of Object.entries(recall(local, "deltic.settings", {}))) if (KEPT.includes(name)) settings[name].value = value;
settings.key.value = recall(session, "deltic.key", "");
$("settings").addEventListener("input", () => {
  keep(local, "deltic.settings", Object.fromEntries(KEPT.map(name => [name, settings[name].value])));
  keep(session, "deltic.key", settings.key.value);
});
settings.key.addEventListener("change", () => tell("key"));
$("settings").addEventListener("submit", event => event.preventDefault());

export const apiKey = () => settings.key.value;

/** The body of a request. What was left empty is the server's to decide. */
export function requestBody(messages) {
  let more = {};
  if (settings.more.value.trim()) {
    try { more = JSON.parse(settings.more.value); } catch (error) { throw new Error(`More fields of the request: ${error.message}`); }
  }
  const body = { ...more };
  if (state.model) body.model = state.model;
  const system = settings.system.value.trim() ? [{ role: "system", content: settings.system.value }] : [];
  body.messages = [...system, ...messages];
  for (const name of NUMBERS) if (settings[name].value !== "") body[name] = Number(settings[name].value);
  const thinking = settings.thinking.value;
  if (thinking === "on" || thinking === "off") body.enable_thinking = thinking === "on";
  else if (thinking) body.reasoning_effort = thinking;
  return { ...body, stream: true, stream_options: { include_usage: true } };
}
