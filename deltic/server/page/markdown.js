/** Markdown, the part of it that models write. Everything becomes elements and text nodes. */

import { copyButton, el } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([^`]*)$/, ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const MATH = /^\s*(?:\\\[|\$\$\s*$)/; // a formula of several lines; it is shown as it was written
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/, QUOTE = /^ {0,3}> ?/, TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Draws `text` in `into`, whose blocks that did not change stay: so a selection outlives the next token. */
export function markdown(into, text, depth = 0) {
  blocks(text).forEach((source, i) => {
    const old = into.children[i];
    if (old?.source === source) return;
    const node = block(source, depth);
    node.source = source;
    old ? old.replaceWith(node) : into.append(node);
  });
}
/** The text, cut into blocks. */
function blocks(text) {
  const found = [];
  let lines = [], kind = "", fence = "", formula = "";
  const end = () => { if (lines.length) found.push(lines.join("\n")); lines = []; kind = ""; };
  for (const line of text.split("\n")) {
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "")) { fence = ""; if (kind === "fence") end(); }
      continue;
    }
    if (formula) {
      lines.push(line);
      if (line.includes(formula)) { formula = ""; if (kind === "math") end(); }
      continue;
    }
    const closer = line.trim().startsWith("$$") ? "$$" : "\\]", isMath = MATH.test(line) && !line.trim().slice(2).includes(closer);
    const opens = FENCE.exec(line), isInList = kind === "list" && (!line.trim() || /^\s/.test(line));
    const next = isInList ? "list" : opens ? "fence" : isMath ? "math" : !line.trim() ? "" : HEADING.test(line) || RULE.test(line) ? "line"
      : QUOTE.test(line) ? "quote" : ITEM.test(line) ? "list" : line.includes("|") ? "table" : "text";
    // A lazy line belongs to what stands above it.
    const goesOn = next === kind ? next !== "list" || !isOtherList(lines[0], line) : next === "text" && (kind === "table" || (kind === "list" && lines.at(-1).trim()));
    if (!goesOn || next === "line") end();
    if (!next) continue;
    kind ||= next;
    lines.push(line);
    if (opens) fence = opens[1];
    else if (isMath) formula = closer;
  }
  end();
  return found;
}
/** Whether an item starts a list of the other kind, beside the one that `head` began. */
function isOtherList(head, line) {
  const [, indent, mark] = ITEM.exec(head), item = ITEM.exec(line);
  return item && item[1].length <= indent.length && /\d/.test(mark) !== /\d/.test(item[2]);
}
function block(source, depth) {
  if (depth > 8 || source.length > 100_000) return el("p", {}, source); // nobody reads it; nor may it take forever
  const lines = source.split("\n"), [line] = lines;
  const fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) {
    const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
    const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    return el("figure", {}, el("figcaption", {}, el("span", {}, fence[2].trim()), copyButton(() => code)), el("pre", { tabindex: 0 }, el("code", {}, code)));
  }
  if (lines.length > 1 && MATH.test(line)) return el("p", { class: "math" }, source);
  if (heading) return el(`h${Math.min(heading[1].length + 1, 4)}`, {}, ...inline(heading[2]));
  if (RULE.test(line)) return el("hr");
  if (QUOTE.test(line)) {
    const quote = el("blockquote", { class: "md" });
    markdown(quote, lines.map(quoted => quoted.replace(QUOTE, "")).join("\n"), depth + 1);
    return quote;
  }
  if (ITEM.test(line)) return list(lines, depth + 1);
  if (lines.length > 1 && TABLE_RULE.test(lines[1])) {
    const row = (text, cell) => el("tr", {}, ...text.trim().replace(/^\||\|$/g, "").split("|").map(part => el(cell, {}, ...inline(part.trim()))));
    return el("div", { class: "table" }, el("table", {}, el("thead", {}, row(line, "th")), el("tbody", {}, ...lines.slice(2).map(text => row(text, "td")))));
  }
  return el("p", {}, ...inline(source));
}
function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line);
  }
  const start = parseInt(mark, 10);
  return el(isNaN(start) ? "ul" : "ol", { start: start > 1 ? start : null }, ...items.map(([head, ...rest]) => {
    const indents = rest.filter(text => text.trim()).map(text => /^\s*/.exec(text)[0].length);
    const cut = Math.min(...indents, 99);
    const below = rest.map(text => text.slice(cut)).join("\n").trim();
    const item = el("li", {}, ...inline(head));
    // Lines that only wrap stay in the sentence; lists and code below the item are blocks of their own.
    blocks(below).forEach((source, i) => {
      const node = block(source, depth);
      i === 0 && node.tagName === "P" ? item.append(" ", ...node.childNodes) : item.append(node);
    });
    return item;
  }));
}
const INLINE = /(`+)([^`]|[^`][^]{0,2000}?[^`])\1(?!`)|\*\*(?=\S)([^]{0,2000}?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*]{0,2000}[^\s*])\*(?!\w)|(?<!\w)_(?=[^\s_])([^_]{0,2000}[^\s_])_(?!\w)|~~(?=\S)([^]{0,2000}?\S)~~|\[([^\[\]]{1,500})\]\((https?:\/\/[^\s()]{1,2000}(?:\([^\s()]*\)[^\s()]*)?)\)|(\\\([^]{0,2000}?\\\)|\\\[[^]{0,2000}?\\\]|\$\$[^$]{1,2000}\$\$|\$(?=[^\s$])[^$\n]{0,500}?[^\s$\\]\$(?!\d))|\\([!-/:-@[-`{-~])/;
function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    if (match.index) nodes.push(text.slice(0, match.index));
    const [, , code, bold, star, underscore, struck, label, href, math, escaped] = match;
    if (code != null) nodes.push(el("code", {}, code.replace(/^ (.*) $/, "$1")));
    else if (bold != null) nodes.push(el("strong", {}, ...inline(bold)));
    else if (star != null || underscore != null) nodes.push(el("em", {}, ...inline(star ?? underscore)));
    else if (struck != null) nodes.push(el("s", {}, ...inline(struck)));
    else if (href != null) nodes.push(el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, label));
    else if (math != null) nodes.push(el("span", { class: "math" }, math));
    else nodes.push(escaped);
  }
  if (text) nodes.push(text);
  return nodes;
}
