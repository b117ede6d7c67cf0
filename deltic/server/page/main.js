/** The page, put together: its views, its menu, and the keys that hold everywhere. */

import "./answer.js";
import { call } from "./api.js";
import { newChat, openChat } from "./chats.js";
import { stopEditing } from "./composer.js";
import { $ } from "./dom.js";
import "./gauge.js";
import { hasLibrary } from "./library.js";
import { watch } from "./live.js";
import { chooseModel, ofModel, watchStart } from "./models.js";
import { apiKey, newSettings, settings, showSettings } from "./settings.js";
import { leave, openShelf, read } from "./shelf.js";
import "./speak.js";
import { on, running, runs, state, tell } from "./state.js";
import { recall, session } from "./store.js";
import { freshChat } from "./thread.js";

const VIEWS = ["chat", "speak", "library", "live"];
let mayWatch = true;
/** Shows the view of the address, or the first that this server has. */
function view() {
  const { kinds } = state, has = { chat: !kinds.size || kinds.has("text"), speak: kinds.has("speech"), library: hasLibrary(), live: mayWatch };
  const asked = location.hash.slice(1), shown = has[asked] ? asked : VIEWS.find(name => has[name]);
  for (const name of VIEWS) {
    const link = document.querySelector(`nav [href="#${name}"]`);
    $(name).hidden = name !== shown;
    link.hidden = !has[name];
    if (name === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.querySelector("nav").hidden = VIEWS.filter(name => has[name]).length === 1;
  $("menu").hidden = shown !== "chat";
  chooseModel();
  watch();
  tell("viewed");
}
/** The live view tells of all keys' requests, and not every key may see it. */
async function knock() {
  const error = await call(ofModel("live")).then(() => null, error => error);
  mayWatch = error?.status !== 403;
  if (!mayWatch && location.hash === "#live") location.hash = "#chat";
  view();
}
function showMenu(on) {
  document.body.classList.toggle("menu", on);
  $("menu").setAttribute("aria-expanded", on);
  $("menu").textContent = on ? "Close" : "Menu";
}

on("key", knock);
on("kinds", view);
on("cards", view);
on("opened", () => showMenu(false));
on("unknown-key", () => { showSettings(true); settings.key.focus(); });
$("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu")));

// Keys that hold everywhere; index.html lists them.

const KEYS = { KeyN: () => $("new").click(), KeyF: () => { showMenu(document.body.clientWidth <= 820); $("search").focus(); }, KeyS: () => $("settings-open").click(), KeyM: () => $("prompt").focus() };
document.addEventListener("keydown", event => {
  const isTyping = event.target.matches("input, select, textarea");
  if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code] && !$("chat").hidden) { event.preventDefault(); KEYS[event.code](); }
  if (event.key === "?" && !isTyping && !event.ctrlKey && !event.metaKey) $("keys").showModal();
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running()) running().controller.abort();
  else if (state.editing) stopEditing();
  else if (!$("settings").hidden) { showSettings(false); $("settings-open").focus(); }
  else if (document.body.classList.contains("menu")) { showMenu(false); $("menu").focus(); }
});
$("keys-open").addEventListener("click", () => $("keys").showModal());
$("keys-close").addEventListener("click", () => $("keys").close());
addEventListener("hashchange", view);
addEventListener("pagehide", () => { state.leaving = true; for (const run of runs.values()) { leave(run.chat, run.message); run.controller.abort(); } });
addEventListener("pageshow", event => { if (event.persisted && runs.size) location.reload(); else state.leaving = false; });

state.chat = freshChat(newSettings());
await openShelf();
const open = await read(String(recall(session, "deltic.open", "")));
open ? openChat(open) : newChat();
view();
watchStart();
if (apiKey()) knock();
