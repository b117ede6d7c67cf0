/** Elements, and texts as people read them. */

export const $ = id => document.getElementById(id);

/** An element; children that are strings become text, never markup. */
export function el(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child != null));
  return node;
}
export const count = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;
export const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
export const bytes = value => value >= 1e9 ? `${number(value / 1e9, 1)} GB` : `${number(value / 1e6, 1)} MB`;

/** Shows words in an element, which is hidden where there are none. */
export function notice(id, words) {
  $(id).textContent = words;
  $(id).hidden = !words;
}
/** What went wrong; where a key is missing also where its field is. */
export const wordsOf = (error, where = "in the chat's settings") => error.message + (error.status === 401 ? ` There is a field for it ${where}.` : "");

export function copyButton(text) {
  return el("button", { class: "quiet", type: "button", click: async event => {
    const button = event.currentTarget, label = button.textContent;
    button.textContent = await copy(text()) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1200);
  } }, "Copy");
}
export async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* not there without HTTPS, except on localhost */ }
  const box = el("textarea", { class: "unseen" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}

/** Whether a finger points. There is no Shift+Enter then: Enter makes the new line. */
export const touched = matchMedia("(pointer: coarse)");
