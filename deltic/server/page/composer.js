/** The message that is being written, and its pictures. */

import { answer } from "./answer.js";
import { $, el, touched } from "./dom.js";
import { picture } from "./messages.js";
import { on, running, state } from "./state.js";
import { keep, picturesOf, save, session, textOf } from "./store.js";

function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
function send(text) {
  if (running() || (!text.trim() && !state.pending.length)) return;
  const parts = state.pending.map(url => ({ type: "image_url", image_url: { url } }));
  if (state.editing >= 0) state.chat.messages.length = state.editing;
  stopEditing();
  showPending([]);
  state.chat.title ||= text.trim().replace(/\s+/g, " ").slice(0, 80) || "Picture";
  state.chat.messages.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
  keep(session, "deltic.open", state.chat.id);
  save(state.chat);
  answer();
}
export function edit(index) {
  running()?.controller.abort();
  state.editing = index;
  $("editing").hidden = false;
  $("prompt").value = textOf(state.chat.messages[index].content);
  showPending(picturesOf(state.chat.messages[index].content));
  fit();
  $("prompt").focus();
}
export function stopEditing() {
  if (state.editing >= 0) { $("prompt").value = ""; showPending([]); }
  state.editing = -1;
  $("editing").hidden = true;
  fit();
}
function setRunning(on) {
  // The focus goes from one button to the other with them.
  const held = document.activeElement === $("send") || document.activeElement === $("stop");
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (held) $(on ? "stop" : "send").focus();
}
function showPending(urls) {
  state.pending = urls;
  $("pictures").replaceChildren(...urls.map((url, i) =>
    el("button", { type: "button", title: "Remove", "aria-label": `Remove picture ${i + 1}`, click: () => showPending(state.pending.toSpliced(i, 1)) }, picture(url, i))));
}
async function addFiles(files) {
  for (const file of [...files].filter(file => file.type.startsWith("image/"))) {
    const reader = new FileReader();
    const read = new Promise(done => { reader.onloadend = done; });
    reader.readAsDataURL(file);
    await read;
    if (reader.result) showPending([...state.pending, reader.result]);
  }
}

function submit() {
  const text = $("prompt").value;
  if (running() || (!text.trim() && !state.pending.length)) return;
  $("prompt").value = "";
  state.follows = true;
  send(text);
  fit();
}
$("compose").addEventListener("submit", event => { event.preventDefault(); submit(); });
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("paste", event => {
  if (![...event.clipboardData.files].some(file => file.type.startsWith("image/"))) return;
  event.preventDefault();
  addFiles(event.clipboardData.files);
});
$("pick").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => { await addFiles($("files").files); $("files").value = ""; $("prompt").focus(); });
$("talk").addEventListener("dragover", event => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
$("talk").addEventListener("drop", event => {
  if (!event.dataTransfer.files.length) return; // a text, which goes where it was dropped
  event.preventDefault();
  addFiles(event.dataTransfer.files);
});
$("prompt").addEventListener("keydown", event => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey && !touched.matches) { event.preventDefault(); submit(); }
  const last = state.chat.messages.findLastIndex(message => message.role === "user");
  if (event.key === "ArrowUp" && !event.target.value && last >= 0) { event.preventDefault(); edit(last); }
});
$("stop").addEventListener("click", () => running()?.controller.abort());
$("cancel").addEventListener("click", () => { stopEditing(); $("prompt").focus(); });
on("edit", edit);
on("opened", () => { stopEditing(); setRunning(Boolean(running())); });
on("running", () => setRunning(Boolean(running())));
if (touched.matches) $("prompt").setAttribute("enterkeyhint", "enter");
