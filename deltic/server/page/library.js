/** The models that this server has: which are loaded, what each takes, one more fetched, one deleted. */

import { call, lines } from "./api.js";
import { $, bytes, el, notice, number, wordsOf } from "./dom.js";
import { on, state, tell } from "./state.js";
import { keep, local, recall } from "./store.js";

const POLL_MS = 1500;
let timer = 0, pulling = null;

/** Draws the list, and again every now and then while somebody looks. */
async function look() {
  clearTimeout(timer);
  if ($("library").hidden || document.hidden) return;
  try {
    const [{ data: cards, may_pull }, { models: stored }] = await Promise.all(["v1/models", "api/tags"].map(async path => (await call(path)).json()));
    $("pull").hidden = !may_pull;
    $("library-closed").hidden = may_pull !== false;
    $("library-fixed").hidden = may_pull != null;
    show(cards, new Map(stored.map(model => [model.name.replace(/:latest$/, ""), model])));
    notice("library-error", "");
  } catch (error) {
    notice("library-error", wordsOf(error));
  }
  timer = setTimeout(look, POLL_MS);
}
function show(cards, stored) {
  const seen = JSON.stringify([cards, [...stored]]);
  if ($("library-list").seen === seen) return; // a button that has the focus keeps it
  $("library-list").seen = seen;
  $("library-list").replaceChildren(...cards.map(card => {
    const file = stored.get(card.id), { size, details = {} } = file ?? {};
    const facts = [
      card.parent && `adapter of ${card.parent}`, card.speech && `speaks, ${card.speech.task_type}`, size && bytes(size), details.parameter_size && `${details.parameter_size} parameters`,
      details.quantization_level || details.format, card.max_model_len && `context of ${number(card.max_model_len)} tokens`, card.input_modalities?.includes("image") && "sees pictures",
    ];
    return el("li", {}, el("div", {}, el("strong", {}, card.id), el("span", { class: "hint" }, ` ${facts.filter(Boolean).join(" · ")}`), el("p", { class: "hint" }, stateOf(card))),
      el("span", { class: "buttons" }, ...buttonsOf(card, size)));
  }));
}
function stateOf({ status }) {
  if (!status) return "loaded";
  if (status.failed) return `could not be loaded: ${status.message}`;
  if (status.value === "loading") return status.progress ? `loading, ${status.progress.stage} ${Math.round(status.progress.done * 100)} %` : "loading";
  return status.value === "unloaded" ? "on the disk; a message loads it" : status.value;
}
function buttonsOf({ id, status, parent, speech }, size) {
  const button = (name, click) => el("button", { type: "button", class: "quiet", "aria-label": `${name} ${id}`, click }, name);
  const ask = what => async event => {
    event.currentTarget.disabled = true;
    await call(`v1/models/${what}`, { method: "POST", body: JSON.stringify({ model: id }) }).then(() => notice("library-failed", ""), error => notice("library-failed", error.message));
    look();
  };
  return [
    button("Use", () => use(id, speech)),
    status && !parent && status.value === "unloaded" && button("Load", ask("load")),
    status && !parent && status.value === "loaded" && button("Unload", ask("unload")),
    status?.deletable && status.value !== "loading" && button("Delete", () => {
      $("doomed-id").textContent = id;
      $("doomed-bytes").textContent = size ? `, ${bytes(size)},` : "";
      $("doomed").showModal();
    }),
  ].filter(Boolean);
}
/** Deletes the model that was asked about: its files are gone then, and only a pull brings them back. */
async function drop() {
  $("doomed").close();
  const body = JSON.stringify({ model: $("doomed-id").textContent });
  await call("api/delete", { method: "DELETE", body }).then(() => notice("library-failed", ""), error => notice("library-failed", error.message));
  tell("pulled");
  look();
}
/** Chooses a model, and goes where one talks to it. */
function use(id, speaks) {
  const kind = [...$("models").options].find(option => option.value === id)?.dataset.kind;
  addEventListener("hashchange", () => { // when the view is there, it can be chosen
    if (![...$("models").options].some(option => option.value === id)) return;
    $("models").value = id;
    $("models").dispatchEvent(new Event("change"));
  }, { once: true });
  location.hash = speaks || kind === "speech" ? "#speak" : "#chat";
}

async function pull() {
  const name = $("pull-name").value.trim();
  if (!name || pulling) return;
  pulling = new AbortController();
  keep(local, "deltic.pull", name); // a download that was cut off goes on when it is asked for again
  showPull(`Asking for ${name}`);
  notice("library-failed", "");
  try {
    const response = await call("api/pull", { method: "POST", body: JSON.stringify({ model: name }), signal: pulling.signal });
    let last = "";
    for await (const { error, status, completed = 0, total } of lines(response)) {
      if (error) throw new Error(error);
      last = status;
      showPull(total ? `${status}: ${bytes(completed)} of ${bytes(total)}` : status, total ? completed / total : null);
    }
    if (last !== "success") throw new Error("The download was cut off. Pull it again, and it goes on where it stopped.");
    keep(local, "deltic.pull", "");
    $("pull-name").value = "";
    showPull(`${name} is there.`);
    tell("pulled");
  } catch (error) {
    if (pulling.signal.aborted) showPull(`Stopped. Pull ${name} again, and it goes on where it stopped.`);
    else { showPull(""); notice("library-failed", error.message); }
  }
  pulling = null;
  showPullButtons();
  look();
}
function showPull(words, done = null) {
  $("pull-now").textContent = words;
  $("pull-bar").hidden = done === null;
  if (done !== null) $("pull-bar").value = done;
  showPullButtons();
}
function showPullButtons() {
  $("pull-start").hidden = Boolean(pulling);
  $("pull-stop").hidden = !pulling;
}
/** Whether there is more than one model to tell of. */
export const hasLibrary = () => state.cards.length > 1 || state.cards.some(card => card.status);

$("pull-name").value = recall(local, "deltic.pull", "");
$("pull").addEventListener("submit", event => { event.preventDefault(); pull(); });
$("doomed-yes").addEventListener("click", drop);
$("doomed-no").addEventListener("click", () => $("doomed").close());
$("pull-stop").addEventListener("click", () => pulling?.abort());
document.addEventListener("visibilitychange", look);
on("viewed", look);
