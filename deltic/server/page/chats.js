/** The list of chats, and which one is open. */

import { forget } from "./answer.js";
import { $, el } from "./dom.js";
import { on, runs, state, tell } from "./state.js";
import { freshChat, keep, local, savedChats, session } from "./store.js";

export function openChat(next) {
  state.chat = runs.get(next.id)?.chat ?? next; // what streams grows there, not in what was saved
  keep(session, "deltic.open", state.chat.id);
  tell("opened");
  listChats();
}
export function listChats() {
  $("chats").replaceChildren(...savedChats().map(saved => el("li", { class: saved.id === state.chat.id && "open" },
    el("button", { class: "open-chat", "aria-current": saved.id === state.chat.id && "true", click: () => saved.id !== state.chat.id && openChat(saved) }, saved.title),
    el("button", { class: "quiet", "aria-label": `Delete “${saved.title}”`, title: "Delete", click: () => {
      forget(saved.id);
      keep(local, "deltic.chats", savedChats().filter(other => other.id !== saved.id));
      saved.id === state.chat.id ? openChat(freshChat()) : listChats();
    } }, "×"))));
}

on("kept", listChats);
addEventListener("storage", listChats);
$("new").addEventListener("click", () => { openChat(freshChat()); $("prompt").focus(); });
