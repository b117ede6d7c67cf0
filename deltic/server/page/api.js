/** The server, asked. */

import { apiKey } from "./settings.js";

export class ServerError extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

export async function call(path, options = {}) {
  const isFile = options.body instanceof Blob || options.body instanceof FormData; // whose type the browser says
  const headers = isFile ? {} : { "content-type": "application/json" };
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(`The server cannot be reached (${error.message}).`, 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const words = typeof body.error === "string" ? body.error : body.error?.message; // Ollama's form, and the others'
  throw new ServerError(words ?? `The server answered with status ${response.status}.`, response.status);
}

/** The JSON of each line. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    const whole = (rest + (value ?? "")).split("\n");
    rest = done ? "" : whole.pop();
    for (const line of whole) if (line.trim()) yield JSON.parse(line);
    if (done) return;
  }
}

/** The JSON of each server-sent event, or of a comment its words, and when it was read: those that came together have the same time. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const at = performance.now();
    const blocks = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith(":")) yield [{ comment: block.slice(1).trim() }, at];
      const data = block.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield [JSON.parse(data), at];
    }
  }
}
