/** The chats that this browser keeps, in IndexedDB. Where that is forbidden, they are there until the page is left. */

import { tell } from "./state.js";
import { count } from "./dom.js";
import { fileLabel, filesOf, keep, local, picturesOf, recall, textOf } from "./store.js";
import { add, freshChat, path, threadOf } from "./thread.js";

const SEARCHED = 200_000; // characters of a chat that a search looks at
const BEAT_MS = 8000;     // an answer that another tab writes is saved more often than that
const LEFT = "deltic.left.";

/** What the list of chats shows, by id: { id, title, at, text, unfinished, beat }. */
export const heads = new Map();
const here = new Map(); // whole chats, where there is no database
let database = null;
const channel = new BroadcastChannel("deltic");

const done = request => new Promise((ok, failed) => {
  request.onsuccess = () => ok(request.result);
  request.onerror = () => failed(request.error);
});
const stored = name => database.transaction(name).objectStore(name);

export async function openShelf() {
  try {
    const opening = indexedDB.open("deltic", 1);
    opening.onupgradeneeded = () => { for (const name of ["heads", "chats"]) opening.result.createObjectStore(name, { keyPath: "id" }); };
    database = await done(opening);
    for (const head of await done(stored("heads").getAll())) heads.set(head.id, { ...head, title: String(head.title || "Chat"), text: String(head.text ?? "") });
  } catch {
    database = null;
  }
  const older = [recall(local, "deltic.chats", [])].flat().filter(told => Array.isArray(told?.messages) && told.messages.every(isMessage)); // an older page's
  for (const { messages, ...fields } of older.toReversed()) await save(threadOf(messages, fields));
  try { delete localStorage["deltic.chats"]; } catch { /* forbidden */ }
  await takeLeft();
}
/** A chat, or nothing. */
export async function read(id) {
  return here.get(id) ?? (database ? done(stored("chats").get(id)).catch(() => undefined) : undefined);
}
/** Whether the last message is an answer that was cut off. */
export function isUnfinished(chat) {
  const last = path(chat).at(-1);
  return last?.role === "assistant" && Boolean(last.meta) && !last.meta.finish && !last.meta.error;
}
/** Whether another tab writes it at the moment. */
export const isElsewhere = id => Date.now() - (heads.get(id)?.beat ?? 0) < BEAT_MS;

/** Keeps a chat. `beat`: true while its answer grows. */
export async function save(chat, beat = false) {
  if (!chat.nodes.length) return;
  const text = chat.nodes.map(node => textOf(node.content ?? "")).join("\n").slice(0, SEARCHED).toLowerCase();
  heads.set(chat.id, { id: chat.id, title: chat.title, at: chat.at, text, unfinished: isUnfinished(chat), beat: beat ? Date.now() : 0 });
  tell("kept");
  await write(chat);
}
async function write(chat) {
  if (!database) { here.set(chat.id, chat); return; }
  try {
    const changing = database.transaction(["heads", "chats"], "readwrite");
    changing.objectStore("heads").put(heads.get(chat.id));
    changing.objectStore("chats").put(chat);
    await new Promise((ok, failed) => {
      changing.oncomplete = ok;
      changing.onabort = changing.onerror = () => failed(changing.error);
    });
    channel.postMessage(chat.id);
  } catch (error) {
    here.set(chat.id, chat);
    tell("not-kept", error?.name === "QuotaExceededError" ? "The browser has no room left for chats. Export and delete some." : `This chat is not kept: ${error?.message ?? error}.`);
  }
}
/** Forgets a chat. Gives what puts it back. */
export async function remove(id) {
  const chat = await read(id), head = heads.get(id);
  heads.delete(id);
  here.delete(id);
  tell("kept");
  if (database) {
    const changing = database.transaction(["heads", "chats"], "readwrite");
    for (const name of ["heads", "chats"]) changing.objectStore(name).delete(id);
    changing.oncomplete = () => channel.postMessage(id);
  }
  return () => {
    if (!chat || !head) return null;
    heads.set(id, head);
    tell("kept");
    return write(chat);
  };
}

// A page that is left has no time for the database: what an answer had by then is written at once.

export function leave(chat, message) {
  keep(local, LEFT + chat.id, message);
}
async function takeLeft() {
  const left = (() => { try { return Object.keys(localStorage).filter(key => key.startsWith(LEFT)); } catch { return []; } })();
  for (const key of left) {
    const message = recall(local, key, null), chat = await read(key.slice(LEFT.length));
    delete localStorage[key];
    if (!isChat(chat) || !isMessage(message)) continue;
    const node = chat.nodes.find(other => other.id === message.id);
    node ? Object.assign(node, message) : (chat.nodes.push(message), chat.leaf = message.id);
    await save(chat);
  }
}
channel.onmessage = async ({ data: id }) => {
  const head = await done(stored("heads").get(id)).catch(() => undefined);
  head ? heads.set(id, head) : heads.delete(id);
  tell("kept");
  tell("changed-elsewhere", id);
};

// Files of chats.

const ROLES = new Set(["user", "assistant", "tool", "system"]);
const META = { model: "string", finish: "string", error: "string", exact: "boolean", tokens: "number", rate: "number", ttft_ms: "number", thought_s: "number", prompt: "number", cached: "number" };
/** All chats that are kept, or one, as the text of a file. */
export const asJson = chats => JSON.stringify({ deltic_chats: 1, chats }, null, 1);
/** The messages of a chat that are seen, for people: with the system prompt, and the names of files in place of their texts. */
export function asMarkdown(chat) {
  const block = (role, who, text) => `<!-- ${role} -->\n**${who}**\n\n${text}\n`, { system } = chat.settings ?? {};
  const blocks = path(chat).map(({ role, content, meta }) => {
    const attached = filesOf(content).map(fileLabel), n = picturesOf(content).length;
    if (n) attached.push(count(n, "picture"));
    const list = attached.length ? `${attached.map(words => `- ${words}\n`).join("")}\n` : "";
    return block(role, role === "user" ? "You" : meta?.model ?? role, list + textOf(content));
  });
  return [`# ${chat.title}\n`, ...(system?.trim() ? [block("system", "System prompt", system)] : []), ...blocks].join("\n");
}
/** The chats in a file of JSON, of this page's or with `messages` as the API has them, or in one of Markdown. Throws an error for any other. */
export function chatsIn(text, name) {
  if (!/^\s*[[{]/.test(text)) return [fromMarkdown(text, name)];
  let told;
  try { told = JSON.parse(text); } catch (error) { throw new Error(`${name} is no JSON: ${error.message}.`); }
  const list = Array.isArray(told) && told[0]?.role ? [{ messages: told }] : [told.chats ?? told].flat();
  return list.map(each => fromJson(each, name));
}
const isText = value => typeof value === "string";
/** A chat of what the page knows. It has ids of its own: a message follows an earlier one, or none. */
function fromJson(told, name) {
  const given = told?.nodes ?? told?.messages;
  if (!Array.isArray(given) || !given.every(isMessage)) throw new Error(`${name} has no chats: each has messages with a role and a content.`);
  const said = given.filter(message => message.role !== "system"), system = given.filter(message => message.role === "system").map(message => textOf(message.content)).join("\n\n");
  const settings = Object.fromEntries(Object.entries(told.settings ?? {}).filter(([, value]) => isText(value)));
  const chat = freshChat(system ? { ...settings, system } : settings), ids = new Map();
  chat.title = isText(told.title) && told.title ? told.title.slice(0, 200) : name.replace(/\.\w+$/, "");
  for (const message of said) {
    if (told.nodes) chat.leaf = ids.get(message.up) ?? null;
    ids.set(message.id, add(chat, kept(message)).id);
  }
  chat.leaf = ids.get(told.leaf) ?? chat.leaf;
  return chat;
}
function isMessage(told) {
  const { role, content, tool_calls } = told ?? {};
  const isPart = part => (part?.type === "text" && isText(part.text)) || (part?.type === "image_url" && isText(part.image_url?.url));
  return ROLES.has(role) && (content == null || isText(content) || (Array.isArray(content) && content.every(isPart)))
    && (!tool_calls || (Array.isArray(tool_calls) && tool_calls.every(call => isText(call?.id) && isText(call.function?.name) && isText(call.function.arguments))));
}
/** Whether the page can show what is kept: chats of other versions of it may be other. A message follows an earlier one, or one that is gone. */
export function isChat(told) {
  const { id, title, nodes, settings = {} } = told ?? {};
  if (!isText(id) || !isText(title) || !Array.isArray(nodes) || !nodes.every(isMessage) || !(settings instanceof Object)) return false;
  const places = new Map(nodes.map((node, i) => [node.id, i]));
  return nodes.every(({ id, up, role, content, meta }, i) => isText(id) && !(places.get(up) >= i) && (isText(content) || (role === "user" && content))
    && Object.entries(META).every(([name, type]) => meta?.[name] == null || typeof meta[name] === type));
}
/** The message with what the page draws, of the types that it has here. An answer is done: no request goes out by itself. */
function kept({ role, content, reasoning_content, tool_calls, tool_call_id, meta }) {
  const message = { role, content: role === "user" ? content ?? "" : textOf(content ?? "") };
  if (isText(reasoning_content)) message.reasoning_content = reasoning_content;
  if (isText(tool_call_id)) message.tool_call_id = tool_call_id;
  if (role !== "assistant") return message;
  if (tool_calls?.length) message.tool_calls = tool_calls;
  const figures = Object.entries(meta ?? {}).filter(([name, value]) => typeof value === META[name]);
  message.meta = { finish: tool_calls?.length ? "tool_calls" : meta ? "stopped" : "stop", ...Object.fromEntries(figures) };
  return message;
}
function fromMarkdown(text, name) {
  const parts = text.split(/^<!-- (system|user|assistant|tool) -->\n\*\*(.*)\*\*\n/m), messages = [];
  for (let i = 1; i < parts.length; i += 3) messages.push({ role: parts[i], content: parts[i + 2].trim(), ...(parts[i] === "assistant" ? { meta: { model: parts[i + 1], finish: "stop" } } : {}) });
  const said = messages.filter(message => message.role !== "system"), system = messages.find(message => message.role === "system")?.content;
  if (!said.length) throw new Error(`${name} has no chat: one that was exported here has <!-- user --> before each message.`);
  return threadOf(said, { title: /^# (.+)$/m.exec(parts[0])?.[1] ?? name, settings: system ? { system } : {} });
}
