/** The page, put together: its views, its menu, and the keys that hold everywhere. */

import "./answer.js";
import { call } from "./api.js";
import { listChats } from "./chats.js";
import { stopEditing } from "./composer.js";
import { $ } from "./dom.js";
import { hasLibrary } from "./library.js";
import { watch } from "./live.js";
import { showChat } from "./messages.js";
import { chooseModel, ofModel, watchStart } from "./models.js";
import { apiKey, settings } from "./settings.js";
import "./speak.js";
import { on, running, runs, state, tell } from "./state.js";
import { freshChat, recall, save, savedChats, session } from "./store.js";

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
on("unknown-key", () => { showMenu(true); settings.key.focus(); });
$("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu")));
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  if (running()) running().controller.abort();
  else if (state.editing >= 0) stopEditing();
  else if (document.body.classList.contains("menu")) { showMenu(false); $("menu").focus(); }
});
addEventListener("hashchange", view);
addEventListener("pagehide", () => { state.leaving = true; for (const run of runs.values()) save(run.chat); });
addEventListener("pageshow", event => { if (event.persisted && runs.size) location.reload(); else state.leaving = false; });

state.chat = savedChats().find(saved => saved.id === recall(session, "deltic.open", null)) ?? freshChat();
listChats();
showChat();
view();
watchStart();
if (apiKey()) knock();
