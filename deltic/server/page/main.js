/** The page, put together: its views, its menu, and the keys that hold everywhere. */

import "./answer.js";
import { call } from "./api.js";
import { listChats } from "./chats.js";
import { stopEditing } from "./composer.js";
import { $ } from "./dom.js";
import { watch } from "./live.js";
import { showChat } from "./messages.js";
import { chooseModel, ofModel, watchStart } from "./models.js";
import { apiKey, settings } from "./settings.js";
import { on, running, runs, state } from "./state.js";
import { freshChat, recall, save, savedChats, session } from "./store.js";

function view() {
  const isLive = location.hash === "#live";
  $("live").hidden = !isLive;
  $("chat").hidden = $("menu").hidden = isLive;
  for (const link of document.querySelectorAll("nav a")) {
    if ((link.hash === "#live") === isLive) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  chooseModel();
  watch();
}
/** The live view tells of all keys' requests, and not every key may see it. */
async function knock() {
  const error = await call(ofModel("live")).then(() => null, error => error);
  document.querySelector("nav").hidden = error?.status === 403;
  if (error?.status === 403 && location.hash === "#live") location.hash = "#chat";
}
function showMenu(on) {
  document.body.classList.toggle("menu", on);
  $("menu").setAttribute("aria-expanded", on);
  $("menu").textContent = on ? "Close" : "Menu";
}

on("key", knock);
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
