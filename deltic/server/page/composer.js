/** The message that is being written, with its pictures and files. */

import { answer } from "./answer.js";
import { $, el, notice, touched } from "./dom.js";
import { read } from "./files.js";
import { picture } from "./messages.js";
import { seesPictures } from "./models.js";
import { save } from "./shelf.js";
import { on, running, state, tell } from "./state.js";
import { fileLabel, filesOf, isFile, keep, session, textOf } from "./store.js";
import { add, path } from "./thread.js";

function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
function send(text) {
  const parts = state.pending, { chat, editing } = state;
  state.broken = null; // it begins a new chat
  if (editing) chat.leaf = editing.up; // what was said stays as another version
  stopEditing();
  showPending([]);
  chat.title ||= text.trim().replace(/\s+/g, " ").slice(0, 80) || filesOf(parts)[0]?.name || "Picture";
  chat.at = Date.now();
  keep(session, "deltic.open", chat.id);
  if (editing?.role === "assistant") {
    add(chat, { role: "assistant", content: text, meta: { model: editing.meta?.model, finish: "edited" } });
    save(chat);
    tell("edited");
    return;
  }
  add(chat, { role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
  answer();
}
function edit(message) {
  running()?.controller.abort();
  state.editing = message;
  $("editing").hidden = false;
  $("editing").firstElementChild.textContent = message.role === "user" ? "Editing a message. What it was stays as another version." : "Editing an answer. What it was stays as another version.";
  $("prompt").value = textOf(message.content);
  showPending(attachedTo(message.content));
  fit();
  $("prompt").focus();
}
export function stopEditing() {
  if (state.editing) { $("prompt").value = ""; showPending([]); }
  state.editing = null;
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
/** Pictures and files of a message. */
const attachedTo = content => typeof content === "string" ? [] : content.filter(part => part.type !== "text" || isFile(part));
function showPending(parts) {
  state.pending = parts;
  notice("file-error", "");
  $("pictures").replaceChildren(...parts.map((part, i) => {
    const [file] = filesOf([part]), label = file ? `Remove the file ${file.name}` : `Remove picture ${i + 1}`;
    return el("button", { type: "button", title: "Remove", "aria-label": label, class: file && "attached", click: () => showPending(state.pending.toSpliced(i, 1)) },
      file ? `${fileLabel(file)} ×` : picture(part.image_url.url, i));
  }));
}
let n_read = 0; // lots of files that are being read: a message waits for its own
async function addFiles(files) {
  const failed = [];
  n_read += 1;
  for (const file of files) {
    const isPicture = file.type.startsWith("image/") && file.type !== "image/svg+xml";
    $("reading").hidden = isPicture;
    $("reading").textContent = `Reading ${file.name}`;
    try {
      if (isPicture && !seesPictures()) throw new Error(`${file.name} is a picture, and this model reads text only.`);
      const part = isPicture ? { type: "image_url", image_url: { url: await dataUrl(file) } } : await read(file);
      showPending([...state.pending, part]);
    } catch (error) {
      failed.push(error.message);
    }
  }
  n_read -= 1;
  $("reading").hidden = !n_read;
  if (failed.length) notice("file-error", failed.join(" "));
}
function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function submit() {
  const text = $("prompt").value;
  if (running() || n_read || (!text.trim() && !state.pending.length)) return;
  $("prompt").value = "";
  state.follows = true;
  send(text);
  fit();
}
$("compose").addEventListener("submit", event => { event.preventDefault(); submit(); });
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("paste", event => {
  if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return; // a cell of a table is both
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
  const last = path(state.chat).findLast(message => message.role === "user");
  if (event.key === "ArrowUp" && !event.target.value && last) { event.preventDefault(); edit(last); }
});
$("stop").addEventListener("click", () => running()?.controller.abort());
$("cancel").addEventListener("click", () => { stopEditing(); $("prompt").focus(); });
on("edit", edit);
on("example", text => { $("prompt").value = text; fit(); $("prompt").focus(); });
on("opened", () => { stopEditing(); setRunning(Boolean(running())); });
on("running", () => setRunning(Boolean(running())));
if (touched.matches) $("prompt").setAttribute("enterkeyhint", "enter");
