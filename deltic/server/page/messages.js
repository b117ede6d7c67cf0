/** The conversation, drawn. */

import { readButton } from "./aloud.js";
import { $, copyButton, el, number, touched } from "./dom.js";
import { fileCard } from "./files.js";
import { markdown } from "./markdown.js";
import { on, running, state, tell } from "./state.js";
import { filesOf, picturesOf, textOf } from "./store.js";

$("log").addEventListener("scroll", () => { state.follows = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60; });

export function showChat() {
  const log = $("log"), { messages } = state.chat;
  if (!messages.length) {
    log.replaceChildren(el("div", { class: "empty" }, el("strong", {}, "Ask something."),
      touched.matches ? "Enter makes a new line, Send sends." : "Enter sends, Shift+Enter makes a new line, Escape stops an answer."));
    return;
  }
  const lastUser = messages.findLastIndex(message => message.role === "user");
  const turns = [];
  messages.forEach((message, i) => {
    if (message.role === "user") {
      turns.push(el("article", { class: "turn user" }, el("h3", {}, "You", copyButton(() => textOf(message.content)),
        i === lastUser ? el("button", { class: "quiet", click: () => tell("edit", i) }, "Edit") : null),
        el("div", { class: "said" }, el("div", { class: "pictures" }, ...picturesOf(message.content).map(picture)), ...filesOf(message.content).map(fileCard), textOf(message.content))));
    } else if (message.role === "assistant") {
      const results = messages.slice(i + 1).filter(other => other.role === "tool");
      const turn = el("article", { class: "turn" }, el("h3"));
      paint(turn, message, running() && i === messages.length - 1, results, i === messages.length - 1);
      turns.push(turn);
    }
  });
  log.replaceChildren(...turns);
  if (state.follows) log.scrollTop = log.scrollHeight;
}

/** Draws an answer into its article: at first, while it grows, and when it is done. */
export function paint(turn, message, growing, results = [], isLast = true) {
  const { meta = {} } = message;
  const isThinking = growing && !message.content && !message.tool_calls;
  turn.firstChild.textContent = meta.model || (growing && state.model) || "Answer"; // whoever said it, whatever is chosen now
  if (!turn.querySelector(".md")) {
    turn.append(el("details", { class: "thinking", open: isThinking, hidden: true }, el("summary"), el("div")), el("div", { class: "md" }), el("div", { class: "calls" }),
      el("div", { class: "foot" }));
    turn.querySelector("summary").addEventListener("click", () => { thinking.touched = true; });
  }
  const [thinking, text, calls, foot] = ["thinking", "md", "calls", "foot"].map(name => turn.querySelector(`:scope > .${name}`));
  turn.setAttribute("aria-busy", Boolean(growing));
  if (message.reasoning_content) {
    thinking.hidden = false;
    thinking.firstChild.textContent = isThinking ? "Thinking" : meta.thought_s ? `Thought for ${meta.thought_s.toFixed(1)} s` : "Thoughts";
    thinking.lastChild.textContent = message.reasoning_content;
    if (!isThinking && !thinking.touched) thinking.open = false;
  }
  markdown(text, message.content, Boolean(growing));
  text.classList.toggle("working", Boolean(growing));
  if (message.tool_calls) calls.replaceChildren(...toolCalls(message, growing, results, isLast));
  const told = figures(meta);
  foot.replaceChildren(told ? el("span", { class: "figures" }, told) : "");
  if (!growing) {
    if (meta.error && !turn.querySelector(".error")) foot.before(el("p", { class: "error", role: "alert" }, meta.error));
    foot.append(el("span", { class: "buttons" }, message.content ? copyButton(() => message.content) : null, message.content ? readButton(turn) : null,
      isLast ? el("button", { class: "quiet", click: () => tell("again") }, meta.error ? "Try again" : "Regenerate") : null));
  }
  if (state.follows) $("log").scrollTop = $("log").scrollHeight;
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
function toolCalls(message, growing, results, isLast) {
  const asks = !growing && isLast && !results.length && message.meta.finish === "tool_calls";
  const boxes = [];
  const cards = message.tool_calls.map(call => {
    const result = results.find(other => other.tool_call_id === call.id);
    const box = asks ? el("textarea", { class: "code", rows: 2 }) : null;
    if (box) boxes.push([call.id, box]);
    return el("section", { class: "call" }, el("h4", {}, call.function.name), el("pre", {}, pretty(call.function.arguments)),
      result ? el("pre", { class: "result" }, result.content) : null,
      box && el("label", {}, "Its result, for the model to go on", box));
  });
  if (asks) cards.push(el("p", { class: "call-end" }, el("button", { click: () => {
    state.chat.messages.push(...boxes.map(([id, box]) => ({ role: "tool", tool_call_id: id, content: box.value })));
    tell("results");
  } }, boxes.length > 1 ? "Send results" : "Send result")));
  return cards;
}
function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

/** A picture of a message. */
export const picture = (url, i) => el("img", { src: url, alt: `Picture ${i + 1}` });

on("opened", showChat);
