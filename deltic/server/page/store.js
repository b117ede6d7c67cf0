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

/** What was written, and the URLs of what was shown, in a message's content. */
export const textOf = content => typeof content === "string" ? content : content.filter(part => part.type === "text").map(part => part.text).join("");
export const picturesOf = content => typeof content === "string" ? [] : content.filter(part => part.type === "image_url").map(part => part.image_url.url);
/** Pictures are too large for the browser's storage. */
const withoutPictures = saved => JSON.parse(JSON.stringify(saved, (_, value) =>
  value?.type === "image_url" ? { type: "text", text: "[A picture, which was not kept.] " } : value));

export function save(saved) {
  if (!saved.messages.length) return;
  const chats = [withoutPictures(saved), ...savedChats().filter(other => other.id !== saved.id)].slice(0, MAX_CHATS);
  while (chats.length && (JSON.stringify(chats).length > MAX_CHARACTERS || !keep(local, "deltic.chats", chats))) chats.pop();
  tell("kept");
}
