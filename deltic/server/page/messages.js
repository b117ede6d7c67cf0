/** The conversation, drawn. An article belongs to its message and stays while that is seen. */

import { readButton } from "./aloud.js";
import { $, copyButton, el, number } from "./dom.js";
import { showEmpty } from "./empty.js";
import { fileCard } from "./files.js";
import { markdown } from "./markdown.js";
import { on, running, state, tell } from "./state.js";
import { filesOf, picturesOf, textOf } from "./store.js";
import { add, path, show, versions } from "./thread.js";
import { save } from "./shelf.js";

const articles = new WeakMap(); // by message
$("log").addEventListener("scroll", () => { state.follows = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60; });
/** Keeps the end in sight. */
function stick() {
  if (state.follows) $("log").scrollTop = $("log").scrollHeight;
}

export function showChat() {
  const log = $("log"), messages = path(state.chat);
  if (!messages.length) {
    state.broken ? showBroken(log) : showEmpty(log);
    return;
  }
  const turns = messages.filter(message => message.role !== "tool").map(message => {
    if (!articles.has(message)) articles.set(message, message.role === "user" ? userArticle(message) : el("article", { class: "turn" }, el("h2")));
    const turn = articles.get(message), isLast = message === messages.at(-1);
    if (message.role === "user") showVersions(turn.querySelector(".versions"), message);
    else if (turn.isLast !== isLast || turn.dataset.done !== "true") paint(turn, message, isLast, messages);
    else showVersions(turn.querySelector(".versions"), message);
    turn.isLast = isLast;
    return turn;
  });
  if (turns.length !== log.children.length || turns.some((turn, i) => log.children[i] !== turn)) log.replaceChildren(...turns);
  stick();
}
function showBroken(log) {
  const button = (words, what) => el("button", { type: "button", click: () => tell(what, state.broken) }, words);
  log.replaceChildren(el("p", { class: "error", role: "alert" }, "This chat cannot be shown: what the browser keeps of it is damaged, or another version of this page has written it."),
    el("p", { class: "buttons" }, button("Export it as it is", "export"), button("Delete", "delete")));
}
/** Draws what is new of an answer. */
export function drawAnswer(message) {
  const turn = articles.get(message);
  if (turn?.isConnected) paint(turn, message, turn.isLast, path(state.chat));
}

function userArticle(message) {
  const { content } = message;
  return el("article", { class: "turn user" },
    el("h2", {}, "You", el("span", { class: "versions" }), copyButton(() => textOf(content)), el("button", { class: "quiet", type: "button", click: () => tell("edit", message) }, "Edit")),
    el("div", { class: "said" }, el("div", { class: "pictures" }, ...picturesOf(content).map(picture)), ...filesOf(content).map(fileCard), textOf(content)));
}
/** ‹ 2/3 ›, where a message has other versions. */
function showVersions(place, message) {
  const all = versions(state.chat, message), at = all.indexOf(message), label = message.role === "user" ? "message" : "answer";
  const step = (to, sign, words) => el("button", { class: "quiet", type: "button", disabled: !all[to], "aria-label": words, title: words, click: () => {
    show(state.chat, all[to]);
    save(state.chat);
    showChat();
  } }, sign);
  place.replaceChildren(...(all.length < 2 ? [] : [step(at - 1, "‹", `Earlier version of the ${label}`), el("span", {}, `${at + 1}/${all.length}`), step(at + 1, "›", `Later version of the ${label}`)]));
}

/** Draws an answer into its article: at first, while it grows, and when it is done. */
function paint(turn, message, isLast, messages) {
  const { meta = {} } = message, growing = running()?.message === message;
  const isThinking = growing && !message.content && !message.tool_calls;
  turn.firstChild.textContent = meta.model || (growing && state.model) || "Answer"; // whoever said it, whatever is chosen now
  if (!turn.querySelector(".md")) {
    turn.append(el("details", { class: "thinking", open: isThinking, hidden: true }, el("summary"), el("div")), el("div", { class: "md" }), el("div", { class: "calls" }),
      el("div", { class: "foot" }));
    turn.querySelector("summary").addEventListener("click", () => { thinking.touched = true; });
  }
  const [thinking, text, calls, foot] = ["thinking", "md", "calls", "foot"].map(name => turn.querySelector(`:scope > .${name}`));
  turn.setAttribute("aria-busy", growing);
  turn.dataset.done = !growing;
  if (message.reasoning_content) {
    thinking.hidden = false;
    thinking.firstChild.textContent = isThinking ? "Thinking" : meta.thought_s ? `Thought for ${meta.thought_s.toFixed(1)} s` : "Thoughts";
    if (thinking.lastChild.textContent.length !== message.reasoning_content.length) thinking.lastChild.textContent = message.reasoning_content;
    if (!isThinking && !thinking.touched) thinking.open = false;
  }
  markdown(text, message.content, growing);
  text.classList.toggle("working", growing);
  if (message.tool_calls) calls.replaceChildren(...toolCalls(message, growing, messages, isLast));
  showFoot(foot, message, growing, isLast);
  stick();
}
function showFoot(foot, message, growing, isLast) {
  const { meta = {}, content } = message, told = figures(meta);
  turnError(foot, growing ? "" : meta.error);
  const action = (words, what) => el("button", { class: "quiet", type: "button", click: () => tell(what, message) }, words);
  const place = el("span", { class: "versions" });
  foot.replaceChildren(told ? el("span", { class: "figures" }, told) : "", place);
  if (growing) return;
  showVersions(place, message);
  const turn = foot.parentElement, canGoOn = isLast && content && ["length", "stopped"].includes(meta.finish);
  foot.append(el("span", { class: "buttons" }, content ? copyButton(() => content) : null, content ? readButton(turn) : null, content ? action("Edit", "edit") : null,
    canGoOn ? action("Continue", "go-on") : null, action(meta.error ? "Try again" : "Regenerate", "again")));
}
function turnError(foot, words) {
  const old = foot.parentElement.querySelector(":scope > .error:not(.aloud-error)");
  if (old?.textContent === words) return;
  old?.remove();
  if (words) foot.before(el("p", { class: "error", role: "alert" }, words));
}
function figures(meta) {
  const about = meta.exact ? "" : "about ";
  return [
    meta.finish && `finish: ${meta.finish}`,
    meta.tokens && `${about}${number(meta.tokens)} tokens`,
    meta.rate && `${about}${number(meta.rate, meta.rate < 100 ? 1 : 0)} tokens/s`,
    meta.ttft_ms && `first after ${number(meta.ttft_ms)} ms`,
    meta.prompt && `prompt ${number(meta.prompt)}, ${number(meta.cached ?? 0)} cached`,
  ].filter(Boolean).join(" · ");
}
function toolCalls(message, growing, messages, isLast) {
  const results = messages.filter(other => other.role === "tool");
  const asks = !growing && isLast && message.meta?.finish === "tool_calls";
  const boxes = [];
  const cards = message.tool_calls.map(call => {
    const result = results.find(other => other.tool_call_id === call.id);
    const box = asks ? el("textarea", { class: "code", rows: 2 }) : null;
    if (box) boxes.push([call.id, box]);
    return el("section", { class: "call" }, el("h3", {}, call.function.name), el("pre", {}, pretty(call.function.arguments)),
      result ? el("pre", { class: "result" }, result.content) : null,
      box && el("label", {}, "Its result, for the model to go on", box));
  });
  if (asks) cards.push(el("p", { class: "call-end" }, el("button", { type: "button", click: () => {
    for (const [id, box] of boxes) add(state.chat, { role: "tool", tool_call_id: id, content: box.value });
    tell("results");
  } }, boxes.length > 1 ? "Send results" : "Send result")));
  return cards;
}
function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

/** A picture of a message. */
export const picture = (url, i) => el("img", { src: url, alt: `Picture ${i + 1}` });

on("opened", () => { state.follows = true; showChat(); });
for (const name of ["edited", "refreshed"]) on(name, showChat);
for (const name of ["cards", "model"]) on(name, () => { if (!state.chat.nodes.length) showChat(); });
on("drawn", stick);
