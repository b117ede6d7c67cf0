/** Which model the page is about, and how far the server is. */

import { call } from "./api.js";
import { $, el } from "./dom.js";
import { on, state, tell } from "./state.js";
import { keep, recall, session } from "./store.js";

let starting = 0;
export async function watchStart() {
  clearTimeout(starting);
  try {
    const response = await fetch("ready", { cache: "no-store" });
    const body = await response.json();
    listModels(body.models ?? {});
    state.kinds = new Set([body.kind, ...Object.values(body.models ?? {}).map(model => model.kind)].filter(Boolean));
    tell("kinds");
    if ($("models").hidden) state.model = body.model ?? state.model;
    const loading = body.loading ? `${body.loading.stage} ${Math.round(body.loading.done * 100)} %` : body.status;
    showState(response.ok ? "ready" : loading ?? body.error?.message, response.ok ? "ready" : "");
    if (response.ok) {
      tell("ready");
      return askWhatItSees();
    }
  } catch {
    showState("no server", "down");
  }
  starting = setTimeout(watchStart, 1000);
}
/** Of a server with several models: which one it is about. Those that speak have no chats, and others do not speak. */
export function listModels(models) {
  const names = Object.keys(models), list = $("models");
  if (list.length !== names.length) {
    list.replaceChildren(...names.map(name => el("option", { value: name, "data-kind": models[name].kind }, name)));
    list.value = recall(session, "deltic.model", names[0]);
    list.hidden = !names.length;
  }
  chooseModel();
}
export function chooseModel() {
  const list = $("models"), options = [...list.options];
  const unfit = $("chat").hidden ? $("speak").hidden ? "" : "text" : "speech";
  for (const option of options) option.disabled = option.dataset.kind === unfit;
  if (options.length && (list.selectedOptions[0]?.disabled ?? true))
    list.value = (options.find(option => !option.disabled) ?? options[0]).value; // all may speak
  if (options.length && state.model !== list.value) {
    state.model = list.value;
    tell("model");
    showPlaceholder();
    showPick();
  }
}
async function askWhatItSees() {
  const json = path => call(path).then(response => response.json());
  const [cards, files] = await Promise.all([json("v1/models").then(body => body.data, () => []), json("api/tags").then(body => body.models, () => [])]);
  const byName = new Map(files.map(file => [file.name.replace(/:latest$/, ""), file]));
  state.cards = cards.map(card => ({ ...card, ...(byName.has(card.id) && { bytes: byName.get(card.id).size, details: byName.get(card.id).details }) }));
  listAdapters(state.cards.filter(card => card.parent).map(card => card.id));
  showPick();
  tell("cards");
}
/** Adapters are chosen as models are. */
function listAdapters(names) {
  const list = $("models"), known = [...list.options].map(option => option.value);
  if (!known.length && names.length) names = [state.model, ...names];
  const added = names.filter(name => !known.includes(name));
  if (!added.length) return;
  list.append(...added.map(name => el("option", { value: name, "data-kind": "text" }, name)));
  list.value = recall(session, "deltic.model", state.model);
  list.hidden = false;
  chooseModel();
}
/** What the server says of the model. */
export const cardOf = () => state.cards.find(card => card.id === state.model) ?? state.cards[0];
export const seesPictures = () => Boolean(cardOf()?.input_modalities?.includes("image"));
/** The button's dialogue shows the files that the model can be given. */
function showPick() {
  const kinds = ["text/*", ".pdf", ".md", ".csv", ".json", ".jsonl", ".yaml", ".toml", ".xml", ".log", ".py", ".js", ".ts", ".c", ".cpp", ".h", ".rs", ".go", ".java", ".sh", ".sql", ".tex"];
  $("files").accept = [...(seesPictures() ? ["image/*"] : []), ...kinds].join();
}
export const ofModel = path => $("models").hidden ? path : `${path}?model=${encodeURIComponent(state.model)}`;
export function showState(text, kind) {
  $("state").className = kind;
  $("state").firstChild.textContent = $("state").title = kind === "ready" && $("models").hidden ? state.model : text;
  showPlaceholder();
}
function showPlaceholder() {
  $("prompt").placeholder = state.model ? `Message ${state.model}` : "Message";
}

on("key", askWhatItSees);
on("lost", watchStart);
on("pulled", watchStart);
$("models").addEventListener("change", () => {
  keep(session, "deltic.model", $("models").value);
  chooseModel();
  tell("watch");
});
