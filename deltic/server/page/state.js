/** What the modules of the page share, and how one tells the others that something has happened. */

export const state = {
  model: "",     // the model that the page is about
  cards: [],     // what the server says of each of its models
  kinds: new Set(), // "text" and "speech", as far as the server has models of it
  chat: null,    // the chat that is open
  broken: null,  // what is kept of a chat that was opened and cannot be shown; `chat` is a new one then
  editing: null, // the message that the next one is another version of
  pending: [],   // pictures and files of the next message: parts of its content
  follows: true, // whether the end of the conversation stays in sight
  leaving: false,
};

/** By the id of a chat: { chat, message, controller, now } of its answer that streams, seen or not. */
export const runs = new Map();
export const running = () => runs.get(state.chat.id);

const bell = new EventTarget();
/** Calls `then` with what was told, each time that `name` is. */
export const on = (name, then) => bell.addEventListener(name, event => then(event.detail));
export const tell = (name, detail) => bell.dispatchEvent(new CustomEvent(name, { detail }));
