/** What a chat shows before its first message: what the model is, and what one may ask. */

import { copyButton, el, touched } from "./dom.js";
import { cardOf } from "./models.js";
import { tell } from "./state.js";

const TOY = ["What is 19 plus 23?", "Write a 100-word story about a fox.", "What is the capital of France?"];
const TEXT = [
  "Explain how a transistor works, to a person who knows what a switch is.",
  "Write a Python function that finds duplicate files in a folder, with a test.",
  "Derive the formula for the roots of a quadratic equation, step by step.",
  "Plan a week of dinners for two, and put what is to buy into a table.",
];
const SEEN = ["What is in this picture?", "Read the text in this picture and give it as Markdown."];
const REAL = ["deltic pull qwen3.5:4b", "deltic serve qwen3.5:4b"];

export function showEmpty(log) {
  const card = cardOf(), isToy = card?.details?.source === "built-in";
  const examples = isToy ? TOY : [...TEXT, ...(card?.input_modalities?.includes("image") ? SEEN : [])];
  log.replaceChildren(el("div", { class: "empty" }, el("strong", {}, "Ask something."),
    el("p", {}, touched.matches ? "Enter makes a new line, Send sends." : "Enter sends, Shift+Enter makes a new line, Escape stops an answer."),
    isToy ? el("div", { class: "toy", role: "note" },
      el("p", {}, "This is the built-in toy: a tiny model that shows how things work. It knows sums, a few facts and small stories. For a real one, run:"),
      ...REAL.map(line => el("p", { class: "line" }, el("code", {}, line), copyButton(() => line)))) : null,
    el("ul", { class: "examples", "aria-label": "Examples" }, ...examples.map(text => el("li", {}, el("button", { type: "button", click: () => tell("example", text) }, text))))));
}
