/** What the browser keeps. Storage may be forbidden or full; the page then forgets, and works. */

import { number } from "./dom.js";

export function recall(area, key, otherwise) {
  try { return JSON.parse(area()[key]) ?? otherwise; } catch { return otherwise; }
}
export function keep(area, key, value) {
  try { area()[key] = JSON.stringify(value); return true; } catch { return false; }
}
export const local = () => localStorage, session = () => sessionStorage;

// A message is what the API calls one. `id`, `up` and `meta`, our own, are left out when it is sent.

const FILE_HEAD = /^<file name="([^"\n]*)"([^\n>]*)>\n/;

/** The part of a message's content that is a file: a text that says so. */
export const filePart = (name, text, note = "") => ({ type: "text", text: `<file name="${name.replace(/["\n<>]/g, "'")}"${note && ` note="${note}"`}>\n${text}\n</file>\n\n` });
export const isFile = part => part.type === "text" && FILE_HEAD.test(part.text);
export const filesOf = content => typeof content === "string" ? [] : content.filter(isFile).map(({ text }) => {
  const [head, name, more] = FILE_HEAD.exec(text);
  return { name, note: /note="([^"]*)"/.exec(more)?.[1] ?? "", text: text.slice(head.length).replace(/\n<\/file>\n*$/, "") };
});
export const fileLabel = ({ name, note, text }) => `${name} · ${note || `${number(text.length)} characters`}`;

/** What was written, and the URLs of what was shown, in a message's content. */
export const textOf = content => typeof content === "string" ? content : content.filter(part => part.type === "text" && !isFile(part)).map(part => part.text).join("");
export const picturesOf = content => typeof content === "string" ? [] : content.filter(part => part.type === "image_url").map(part => part.image_url.url);
