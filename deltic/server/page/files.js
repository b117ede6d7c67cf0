/** Files of a message that are no pictures: their text goes along. Text is read here, a PDF by the server. */

import { call } from "./api.js";
import { count, el, number } from "./dom.js";
import { fileLabel, filePart } from "./store.js";

const MAX_BYTES = 2_000_000; // of a text, more than a prompt can have

/** A file as a conversation shows it. */
export const fileCard = file => el("details", { class: "file" }, el("summary", {}, fileLabel(file)), el("pre", { tabindex: 0 }, file.text));

/** The part that a file becomes. Throws an error that says why there is none. */
export async function read(file) {
  if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) return readPdf(file);
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 1e6} MB. Send a part of it.`);
  const bytes = new Uint8Array(await file.arrayBuffer()), text = decoded(bytes);
  if (text == null) throw new Error(`${file.name} is no text. Files may be text and PDF, and pictures where the model sees.`);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return filePart(file.name, text);
}
async function readPdf(file) {
  const response = await call("pdf/text", { method: "POST", body: new Blob([file], { type: "application/pdf" }) }).catch(error => {
    throw new Error(`${file.name} ${error.message.replace(/^body: /, "was not read: ")}`);
  });
  const { pages, n_pages, unread } = await response.json();
  const note = pages.length < n_pages ? `the first ${number(pages.length)} of ${count(n_pages, "page")}` : count(n_pages, "page");
  const lacking = unread.length ? `; page ${unread.join(", ")} cannot be read` : "";
  const texts = pages.map((text, i) => n_pages > 1 ? `[Page ${i + 1}${unread.includes(i + 1) ? ": cannot be read" : ""}]\n${text}` : text);
  return filePart(file.name, texts.join("\n\n"), note + lacking);
}
/** Text in UTF-8 or UTF-16, or in what Windows had before; null for what is none. */
function decoded(bytes) {
  const marked = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2).join()];
  if (!marked && bytes.some(byte => byte < 9)) return null;
  for (const [encoding, fatal] of [[marked ?? "utf-8", true], ["windows-1252", false]]) {
    try { return new TextDecoder(encoding, { fatal }).decode(bytes).replaceAll("\r\n", "\n"); } catch { /* the next */ }
  }
}
