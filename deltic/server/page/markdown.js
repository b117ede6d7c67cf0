/** A model's text, drawn. The server says of what a text consists (drawing.py); only tags that are known here become elements. */

import { call } from "./api.js";
import { copyButton, el } from "./dom.js";
import { on, tell } from "./state.js";

const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "hr", "thead", "tbody", "tr", "th", "td", "code", "em", "strong", "s", "br", "span"]);
const ATTRIBUTES = new Set(["class", "start"]);
const MATH = "http://www.w3.org/1998/Math/MathML";
const MATH_TAGS = new Set(["math", "mrow", "mi", "mo", "mn", "mtext", "mspace", "ms", "mfrac", "msqrt", "mroot", "mstyle", "merror", "mpadded",
  "mphantom", "mfenced", "menclose", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none", "mtable", "mtr", "mtd"]);
const MATH_ATTRIBUTES = new Set(["display", "alttext", "mathvariant", "stretchy", "fence", "form", "separator", "accent", "accentunder", "minsize", "maxsize",
  "lspace", "rspace", "width", "height", "depth", "linethickness", "displaystyle", "scriptlevel", "columnalign", "notation", "movablelimits", "largeop", "symmetric"]);

/** An element of a node. A tag that is not known gives its nodes alone. */
function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [tag, told, ...below] = node, nodes = below.map(build);
  if (MATH_TAGS.has(tag)) {
    const made = document.createElementNS(MATH, tag);
    for (const [name, value] of Object.entries(told)) if (MATH_ATTRIBUTES.has(name)) made.setAttribute(name, value);
    made.append(...nodes);
    return made;
  }
  if (/^h[1-6]$/.test(tag)) return el(`h${Math.min(Number(tag[1]) + 2, 6)}`, {}, ...nodes); // below the page's own
  if (tag === "figure") {
    const code = el("code", {}, ...nodes);
    return el("figure", {}, el("figcaption", {}, el("span", {}, told.title), copyButton(() => code.textContent)), el("pre", { tabindex: 0 }, code));
  }
  if (tag === "table") return el("div", { class: "table", tabindex: 0 }, el("table", {}, ...nodes));
  if (tag === "a") {
    const href = String(told.href);
    return /^(https?|mailto):/i.test(href) ? el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...nodes) : el("span", {}, ...nodes);
  }
  if (tag === "input") return el("input", { type: "checkbox", disabled: true, checked: told.checked === true, "aria-label": told.checked ? "done" : "to do" });
  const made = TAGS.has(tag) ? el(tag) : document.createDocumentFragment();
  if (TAGS.has(tag)) for (const [name, value] of Object.entries(told)) if (ATTRIBUTES.has(name)) made.setAttribute(name, value);
  made.append(...nodes);
  return made;
}

// What is asked for in the same moment is one request.

const MOST_TEXTS = 20, MOST_DRAWN = 400;
const drawn = new Map(); // by text: the blocks of whole texts, those that were used last at the end
let waiting = [];
function ask(text) {
  return new Promise((done, failed) => {
    waiting.push({ text, done, failed });
    if (waiting.length === 1) setTimeout(next);
  });
}
function next() {
  send(waiting.splice(0, MOST_TEXTS));
  if (waiting.length) setTimeout(next);
}
/** Whether the server will not draw it, however often it is asked: it is too large, or too hard. */
const isRefusal = error => error.status === 400 || error.status === 413;
async function send(now) {
  try {
    const response = await call("page/markdown", { method: "POST", body: JSON.stringify({ texts: now.map(each => each.text) }) });
    const told = await response.json();
    now.forEach((each, i) => each.done([told.drawn[i], told.ms]));
  } catch (error) {
    if (isRefusal(error) && now.length > 1) { // each alone: most can be drawn
      for (const each of now) await send([each]);
      return;
    }
    for (const each of now) each.failed(error);
  }
}

on("ready", () => ask(" ").catch(() => {})); // the server starts what draws, before there is an answer

// A text that grows is asked for from the last block on, which alone may still change.

const LEAST_MS = 200, FORK_MS = 7, SHARE = 40; // of the server's time a fortieth at most; a fork takes some that it does not count
const LATE_MS = 1200;             // then what is not drawn yet is shown as it was written
const AGAIN_MS = 3000;
const drawings = new WeakMap();
const near = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    go(drawings.get(target));
  }
}, { rootMargin: "600px" });

/** Draws `text` in `into`, now or when it is near what is seen. Blocks that did not change stay, so a selection outlives the next token. */
export function markdown(into, text, growing = false) {
  let drawing = drawings.get(into);
  if (!drawing) drawings.set(into, drawing = { into, text: "", growing, base: 0, fixed: 0, shown: 0, at: performance.now(), busy: false, timer: 0, whole: null, refused: false });
  if (drawing.text === text && drawing.growing === growing && drawing.whole === text) return;
  if (drawing.growing && !growing) drawing.refused = false; // the whole may be drawn where a part of it was not
  Object.assign(drawing, { text, growing });
  if (!growing) { // the end is not waited for
    clearTimeout(drawing.timer);
    drawing.timer = 0;
  }
  if (!text) { into.replaceChildren(); return; }
  into.dataset.drawn = false;
  if (!growing && drawn.has(text)) put(drawing, text, drawn.get(text));
  else if (growing || drawing.shown) go(drawing);
  else { rest(drawing, 0); near.observe(into); }
  if (growing && performance.now() - drawing.at > LATE_MS) rest(drawing, drawing.shown);
}
function go(drawing) {
  if (!drawing.busy && !drawing.timer && !drawing.refused) draw(drawing);
}
async function draw(drawing) {
  if (!drawing.growing && drawn.has(drawing.text)) { put(drawing, drawing.text, drawn.get(drawing.text)); return; }
  const { text, growing } = drawing, base = growing ? drawing.base : 0, source = text.slice(base);
  drawing.busy = true;
  let wait = LEAST_MS, failed = false;
  try {
    const [blocks, ms] = await ask(source);
    wait = Math.max(wait, SHARE * (ms + FORK_MS));
    if (growing && drawing.growing) putMore(drawing, base, source, blocks);
    else if (!growing) {
      drawn.delete(text);
      drawn.set(text, blocks);
      if (drawn.size > MOST_DRAWN) drawn.delete(drawn.keys().next().value);
      put(drawing, text, blocks);
    }
  } catch (error) {
    rest(drawing, drawing.shown);
    drawing.refused = isRefusal(error) && drawing.growing === growing; // what cannot be drawn stays as it was written
    failed = true;
    if (!growing) drawing.into.dataset.drawn = true; // as far as can be
  }
  drawing.busy = false;
  if (drawing.refused || !drawing.into.isConnected) return;
  const more = drawing.text !== text || drawing.growing !== growing;
  if (more && !drawing.growing && !failed) go(drawing);
  else if (more || failed) drawing.timer = setTimeout(() => { drawing.timer = 0; go(drawing); }, failed ? AGAIN_MS : wait);
}
function put(drawing, text, blocks) {
  replace(drawing.into, 0, blocks);
  drawing.into.dataset.drawn = true;
  Object.assign(drawing, { whole: text, shown: text.length, base: 0, fixed: 0 });
}
/** All blocks but the last are done for good. */
function putMore(drawing, base, source, blocks) {
  replace(drawing.into, drawing.fixed, blocks);
  drawing.shown = base + source.length;
  drawing.at = performance.now();
  if (blocks.length < 2) return;
  const before = source.split("\n").slice(0, blocks.at(-1)[0]).join("\n").length + 1;
  drawing.base = base + before;
  drawing.fixed += blocks.length - 1;
}
function replace(into, from, blocks) {
  blocks.forEach(([, node], i) => {
    const key = JSON.stringify(node), old = into.children[from + i];
    if (old?.key === key) return;
    const made = build(node);
    made.key = key;
    old ? old.replaceWith(made) : into.append(made);
  });
  while (into.children.length > from + blocks.length) into.lastElementChild.remove();
  tell("drawn");
}
/** Shows what is not drawn as it was written. */
function rest(drawing, from) {
  const { into, text } = drawing;
  let tail = into.lastElementChild?.classList.contains("raw") ? into.lastElementChild : null;
  if (from >= text.length) { tail?.remove(); return; }
  if (!tail) into.append(tail = el("p", { class: "raw" }));
  tail.textContent = text.slice(from);
}
