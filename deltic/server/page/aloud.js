/** Answers read aloud by a model of this server that speaks, and messages dictated to this browser. */

import { $, el, notice } from "./dom.js";
import { Speech } from "./sound.js";
import { canSpeak, speechBody } from "./speak.js";
import { on } from "./state.js";

const MAX_PIECE = 500; // characters that are spoken in one go
let reading = null;    // { button, speech } of the answer that is read

/** A button to read what `article` shows. It is there while a model speaks. */
export const readButton = article => el("button", { class: "quiet aloud", type: "button", click: event => toggle(event.currentTarget, article) }, "Read aloud");

async function toggle(button, article) {
  const was = reading?.button;
  stopReading();
  if (was === button) return;
  const mine = reading = { button, speech: null };
  button.textContent = "Stop reading";
  article.querySelector(".aloud-error")?.remove();
  const seed = Math.floor(Math.random() * 2 ** 31); // one voice for all of it
  try {
    for (const piece of pieces(article.querySelector(".md"))) {
      if (reading !== mine) return;
      mine.speech = new Speech({ ...speechBody(piece), seed });
      await mine.speech.run();
    }
  } catch (error) {
    article.append(el("p", { class: "error aloud-error", role: "alert" }, error.message));
  }
  if (reading === mine) stopReading();
}
function stopReading() {
  if (!reading) return;
  reading.button.textContent = "Read aloud";
  const { speech } = reading;
  reading = null;
  speech?.stop();
}

/** The text of an answer, without code and formulas, in pieces that end where sentences do. */
export function pieces(shown) {
  const copy = shown.cloneNode(true);
  for (const silent of copy.querySelectorAll("figure, pre, .math, math, button")) silent.remove();
  for (const block of copy.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, td, th, tr, blockquote")) block.append("\n");
  const found = [""];
  for (const line of copy.textContent.split("\n").map(line => line.replace(/\s+/g, " ").trim()).filter(Boolean)) {
    for (const sentence of line.match(/.{1,500}?(?:[.!?。！？:;](?=\s|$)|$)|.{1,500}/gu) ?? []) {
      if (found.at(-1).length + sentence.length > MAX_PIECE) found.push("");
      found[found.length - 1] += `${found.at(-1) && " "}${sentence.trim()}`;
    }
  }
  return found.filter(Boolean);
}

// Dictation. No model here hears; the browser may.

const LISTENING = "Listening. This browser recognises speech, and may send the sound to its maker; the server does not hear.";
const WHY = {
  "not-allowed": "The browser was not allowed to use the microphone.", "service-not-allowed": "This browser recognises no speech here.",
  "audio-capture": "There is no microphone.", network: "This browser recognises speech by its maker's servers, and cannot reach them.",
};
const recognition = () => globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;
let listening = null;

function dictate() {
  if (listening) return listening.stop();
  const box = $("prompt"), before = box.value.slice(0, box.selectionStart), after = box.value.slice(box.selectionEnd);
  const space = before && !/\s$/.test(before) ? " " : "";
  let told = "";
  listening = new (recognition())();
  Object.assign(listening, { continuous: true, interimResults: true, lang: navigator.language });
  listening.onresult = event => {
    told = [...event.results].map(result => result[0].transcript).join("");
    box.value = `${before}${space}${told}${after}`;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  };
  listening.onerror = event => { if (event.error !== "aborted" && event.error !== "no-speech") showDictation(WHY[event.error] ?? `The browser's recognition failed: ${event.error}.`); };
  listening.onend = () => {
    listening = null;
    $("dictate").textContent = "Dictate";
    if ($("dictation").textContent === LISTENING) showDictation("");
    box.focus();
    box.setSelectionRange(before.length + space.length + told.length, before.length + space.length + told.length);
  };
  listening.start();
  $("dictate").textContent = "Done";
  showDictation(LISTENING);
}
const showDictation = words => notice("dictation", words);

$("dictate").hidden = !recognition();
$("dictate").addEventListener("click", dictate);
on("cards", () => document.body.classList.toggle("speaks", canSpeak()));
on("opened", stopReading);
