/** What the browser keeps. Storage may be forbidden or full; the page then forgets, and works. */

import { tell } from "./state.js";

export function recall(area, key, otherwise) {
  try { return JSON.parse(area()[key]) ?? otherwise; } catch { return otherwise; }
}
export function keep(area, key, value) {
  try { area()[key] = JSON.stringify(value); return true; } catch { return false; }
}
export const local = () => localStorage, session = () => sessionStorage;

// Chats. A message is what the API calls one; `meta`, our own, is left out when it is sent.

const MAX_CHATS = 40, MAX_CHARACTERS = 2_000_000;
export const freshChat = () => ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", messages: [] });
export const savedChats = () => recall(local, "deltic.chats", []);

const FILE_HEAD = /^<file name="([^"\n]*)"([^\n>]*)>\n/;

/** The part of a message's content that is a file: a text that says so. */
export const filePart = (name, text, note = "") => ({ type: "text", text: `<file name="${name.replace(/["\n<>]/g, "'")}"${note && ` note="${note}"`}>\n${text}\n</file>\n\n` });
export const isFile = part => part.type === "text" && FILE_HEAD.test(part.text);
export const filesOf = content => typeof content === "string" ? [] : content.filter(isFile).map(({ text }) => {
  const [head, name, more] = FILE_HEAD.exec(text);
  return { name, note: /note="([^"]*)"/.exec(more)?.[1] ?? "", text: text.slice(head.length).replace(/\n<\/file>\n*$/, "") };
});

/** What was written, and the URLs of what was shown, in a message's content. */
export const textOf = content => typeof content === "string" ? content : content.filter(part => part.type === "text" && !isFile(part)).map(part => part.text).join("");
export const picturesOf = content => typeof content === "string" ? [] : content.filter(part => part.type === "image_url").map(part => part.image_url.url);
/** Pictures are too large for the browser's storage, and so are long files. */
const MAX_FILE_CHARACTERS = 100_000;
const withoutPictures = saved => JSON.parse(JSON.stringify(saved, (_, value) =>
  value?.type === "image_url" ? { type: "text", text: "[A picture, which was not kept.] " }
    : value?.type === "text" && value.text?.length > MAX_FILE_CHARACTERS && isFile(value) ? filePart(filesOf([value])[0].name, "[This file was not kept.]", "not kept") : value));

export function save(saved) {
  if (!saved.messages.length) return;
  const chats = [withoutPictures(saved), ...savedChats().filter(other => other.id !== saved.id)].slice(0, MAX_CHATS);
  while (chats.length && (JSON.stringify(chats).length > MAX_CHARACTERS || !keep(local, "deltic.chats", chats))) chats.pop();
  tell("kept");
}
