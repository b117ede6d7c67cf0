/** A conversation as a tree. Each message knows the one before it (`up`), and a chat the last one that is seen (`leaf`). */

const fresh = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
export const freshChat = (settings = {}) => ({ id: fresh(), title: "", at: Date.now(), nodes: [], leaf: null, settings });

/** The messages that are seen, from the first on. */
export function path(chat) {
  const byId = new Map(chat.nodes.map(node => [node.id, node])), found = [];
  for (let node = byId.get(chat.leaf); node; node = byId.get(node.up)) found.push(node);
  return found.reverse();
}
/** Puts a message behind the last one that is seen. */
export function add(chat, message) {
  Object.assign(message, { id: fresh(), up: chat.leaf });
  chat.nodes.push(message);
  chat.leaf = message.id;
  return message;
}
/** The message and those that stand in its place. */
export const versions = (chat, message) => chat.nodes.filter(other => other.up === message.up);
/** Shows a message, and what was last said below it. */
export function show(chat, message) {
  for (let next = message; next; next = chat.nodes.findLast(node => node.up === next.id)) chat.leaf = next.id;
}
/** A chat of messages that follow each other. */
export function threadOf(messages, fields = {}) {
  const chat = Object.assign(freshChat(), fields);
  for (const message of messages) add(chat, message);
  return chat;
}
