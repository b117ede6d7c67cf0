/** The list of chats, and what is done with one: found, renamed, exported, deleted and taken back. */

import { forget } from "./answer.js";
import { $, el, notice } from "./dom.js";
import { newSettings } from "./settings.js";
import { asJson, asMarkdown, chatsIn, heads, isChat, read, remove, save } from "./shelf.js";
import { on, runs, state, tell } from "./state.js";
import { keep, session } from "./store.js";
import { freshChat } from "./thread.js";

const MOST_SHOWN = 200, UNDO_MS = 12_000;

export function openChat(next) {
  const chat = runs.get(next.id)?.chat ?? next; // what streams grows there, not in what was kept
  state.broken = isChat(chat) ? null : chat;
  state.chat = state.broken ? freshChat(newSettings()) : chat;
  keep(session, "deltic.open", chat.id);
  tell("opened");
  listChats();
}
export const newChat = () => openChat(freshChat(newSettings()));
async function openKept(id) {
  const found = await read(id);
  if (found) openChat(found);
}
export function listChats() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const isFound = head => words.every(word => head.text.includes(word) || head.title.toLowerCase().includes(word));
  const found = [...heads.values()].filter(isFound).sort((a, b) => b.at - a.at).slice(0, MOST_SHOWN);
  $("search").hidden = $("search").labels[0].hidden = !heads.size;
  $("none-found").hidden = !words.length || found.length > 0;
  const rows = found.map(({ id, title, unfinished }) => ({ id, title, isOpen: id === (state.broken ?? state.chat).id, mark: runs.has(id) ? "writing" : unfinished ? "unfinished" : "" }));
  showBar();
  const seen = JSON.stringify(rows);
  if ($("chats").seen === seen) return; // a click on what stays is not lost
  $("chats").seen = seen;
  $("chats").replaceChildren(...rows.map(({ id, title, isOpen, mark }) => {
    return el("li", { class: isOpen && "open" },
      el("button", { class: "open-chat", type: "button", title, "aria-current": isOpen && "true", click: () => isOpen || openKept(id) }, title),
      mark ? el("span", { class: "mark-run", title: mark === "unfinished" ? "Its answer was cut off; opened, it goes on" : "Its answer is being written" }, mark) : null,
      el("button", { class: "quiet", type: "button", "aria-label": `Delete “${title}”`, title: "Delete", click: () => drop(id, title) }, "×"));
  }));
}
let undo = null, forgetting = 0;
async function drop(id, title) {
  const wasOpen = id === (state.broken ?? state.chat).id, whole = runs.get(id)?.chat;
  forget(id);
  if (whole) await save(whole);
  const back = await remove(id);
  undo = async () => { await back(); if (wasOpen) openKept(id); };
  $("undo-words").textContent = `“${title}” is deleted.`;
  $("undone").hidden = false;
  clearTimeout(forgetting);
  forgetting = setTimeout(() => { $("undone").hidden = true; undo = null; }, UNDO_MS);
  if (wasOpen) newChat();
}
$("undo").addEventListener("click", async () => {
  $("undone").hidden = true;
  await undo?.();
  undo = null;
});

// Above the conversation: its title, and what is done with it.

function showBar() {
  $("bar").hidden = !state.chat.nodes.length;
  if (document.activeElement !== $("title")) $("title").value = state.chat.title;
}
$("title").addEventListener("change", () => {
  state.chat.title = $("title").value.trim().slice(0, 200) || state.chat.title;
  save(state.chat);
});
$("title").addEventListener("keydown", event => {
  if (event.key === "Escape") $("title").value = state.chat.title;
  if (event.key === "Escape" || event.key === "Enter") { event.preventDefault(); event.stopPropagation(); $("prompt").focus(); }
});
function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
const titleOf = chat => heads.get(chat.id)?.title ?? "chat";
const fileName = (title, kind) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat"}.${kind}`;
const exportJson = chat => download(asJson([chat]), fileName(titleOf(chat), "json"), "application/json");
$("export-json").addEventListener("click", () => exportJson(state.chat));
$("export-markdown").addEventListener("click", () => download(asMarkdown(state.chat), fileName(state.chat.title, "md"), "text/markdown"));
$("export-all").addEventListener("click", async () => {
  const all = (await Promise.all([...heads.keys()].map(read))).filter(Boolean);
  download(asJson(all), "deltic-chats.json", "application/json");
});
$("import").addEventListener("click", () => $("import-files").click());
$("import-files").addEventListener("change", async () => {
  let last = null;
  fail("");
  for (const file of $("import-files").files) {
    try {
      for (const chat of chatsIn(await file.text(), file.name)) await save(last = chat);
    } catch (error) {
      fail(error.message);
    }
  }
  $("import-files").value = "";
  if (last) openChat(last);
});
const fail = words => notice("chats-error", words);

on("kept", listChats);
on("running", listChats);
on("edited", listChats);
on("not-kept", fail);
on("export", exportJson);
on("delete", chat => drop(chat.id, titleOf(chat)));
on("changed-elsewhere", async id => { // another tab has gone on with what is seen here
  if (id !== state.chat.id || runs.has(id)) return;
  const now = await read(id);
  if (isChat(now) && now.id === state.chat.id) { state.chat = now; tell("refreshed"); }
});
$("search").addEventListener("input", listChats);
$("new").addEventListener("click", () => { newChat(); $("prompt").focus(); });
