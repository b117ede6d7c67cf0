/** The view of a model that speaks: a text, a voice, what was said, and voices that are cloned. */

import { call } from "./api.js";
import { $, el, notice, number, wordsOf } from "./dom.js";
import { ofModel } from "./models.js";
import { settings } from "./settings.js";
import { Speech, asWav, record, wav } from "./sound.js";
import { on, state, tell } from "./state.js";
import { keep, local, recall } from "./store.js";

const say = $("say").elements, clone = $("clone").elements;
const KEPT = ["voice", "language", "speed", "instructions", "more"];
const FORMATS = { wav: "WAV", mp3: "MP3", flac: "FLAC", opus: "Opus" };
const READ_AS_IT_IS = /\.(wav|flac|mp3|ogg|opus|aiff?)$/i; // by every server; of others this browser makes a WAV
const PLAIN_VOICE = "A clear, calm voice."; // where one must be described, and nobody did
let speech = null;

const kept = recall(local, "deltic.say", {});
for (const name of KEPT) if (kept[name] != null && say[name].tagName !== "SELECT") say[name].value = kept[name];
$("say").addEventListener("input", () => keep(local, "deltic.say", Object.fromEntries(KEPT.map(name => [name, say[name].value]))));

/** The card of the model that the view is about. */
export const spoken = () => state.cards.find(card => card.id === state.model && card.speech) ?? state.cards.find(card => card.speech);

/** Whether a model speaks, and has a voice to do so. */
export const canSpeak = () => Boolean(spoken() && (spoken().speech.voices.length || spoken().speech.task_type === "VoiceDesign"));

/** Fits the form to what the model can do. */
function showForm() {
  const card = spoken()?.speech;
  if (!card) return;
  const isDesign = card.task_type === "VoiceDesign", isBase = card.task_type === "Base";
  choose(say.voice, card.voices);
  choose(say.language, card.languages);
  say.voice.closest("label").hidden = !card.voices.length;
  const wishes = say.instructions.closest("label");
  wishes.hidden = !card.takes_instructions;
  say.instructions.required = isDesign;
  say.instructions.placeholder = isDesign ? "A warm, low voice of an old sailor, unhurried" : "Cheerful, as to a child";
  wishes.firstChild.textContent = isDesign ? "The voice, described " : "How to say it ";
  $("voices").hidden = !isBase;
  $("no-voice").hidden = !isBase || card.voices.length > 0;
  $("say-start").disabled = isBase && !card.voices.length;
  if (isBase) listVoices().catch(error => notice("clone-error", wordsOf(error, "below")));
}
function choose(list, values) {
  const was = list.value || recall(local, "deltic.say", {})[list.name];
  list.replaceChildren(...values.map(value => el("option", { value }, value)));
  if (values.includes(was)) list.value = was;
}

/** The body of a request for what the form says. A seed is drawn here if none is given, so that it can be told. */
export function speechBody(input) {
  const card = spoken(), can = card?.speech ?? {}, body = { input, model: card?.id ?? state.model };
  if (say.voice.value && can.task_type !== "VoiceDesign") body.voice = say.voice.value;
  if (say.language.value) body.language = say.language.value;
  const wish = say.instructions.value.trim() || (can.task_type === "VoiceDesign" ? PLAIN_VOICE : "");
  if (can.takes_instructions && wish) body.instructions = wish;
  if (say.speed.value && Number(say.speed.value) !== 1) body.speed = Number(say.speed.value);
  body.seed = say.seed.value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(say.seed.value);
  if (say.more.value.trim()) {
    try { Object.assign(body, JSON.parse(say.more.value)); } catch (error) { throw new Error(`More fields of the request: ${error.message}`); }
  }
  return body;
}

async function start() {
  if (speech || !say.text.value.trim() || $("say-start").disabled || !$("say").reportValidity()) return;
  notice("say-error", "");
  let article = null;
  try {
    speech = new Speech(speechBody(say.text.value), show);
    article = said(speech);
    show();
    await speech.run();
  } catch (error) {
    notice("say-error", wordsOf(error, "below"));
  }
  const mine = speech;
  speech = null;
  show();
  if (!spoken()) tell("key"); // it was loaded for this, and can say now which voices it has
  if (mine?.n) finish(article, mine); else article?.remove();
}
/** Shows how far the speech is, and the buttons for it. */
function show() {
  const held = [$("say-start"), $("say-stop")].includes(document.activeElement);
  $("say-start").hidden = Boolean(speech);
  $("say-stop").hidden = $("say-pause").hidden = !speech;
  if (held) $(speech ? "say-stop" : "say-start").focus();
  if (!speech) { $("say-now").textContent = ""; return; }
  $("say-pause").textContent = speech.isPaused ? "Go on" : "Pause";
  $("say-pause").disabled = !speech.n;
  $("say-now").textContent = !speech.n ? (speech.body.speed ? "Making it; at another speed it comes in one piece" : "Making the first sound")
    : `${seconds(speech.heard_s)} heard of ${seconds(speech.made_s)}${speech.finish ? "" : " so far"}`;
}
const seconds = value => `${value.toFixed(1)} s`;

// What was said, newest first, until the tab is closed.

function said({ body }) {
  const article = el("article", { class: "turn" }, el("h2", {}, [body.voice, body.language, body.instructions].filter(Boolean).join(" · ")),
    el("p", {}, body.input), el("div", { class: "foot" }));
  $("said").prepend(article);
  return article;
}
function finish(article, { samples, body, first_ms, made_ms, finish: reason, made_s }) {
  const url = URL.createObjectURL(wav(samples));
  const format = el("select", { "aria-label": "Format" }, ...Object.entries(FORMATS).filter(([value]) => value === "wav" || reason !== "stopped").map(([value, name]) => el("option", { value }, name)));
  const told = [seconds(made_s), first_ms && `first sound after ${number(first_ms)} ms`, made_ms && `made in ${seconds(made_ms / 1000)}`, `seed ${body.seed}`];
  if (reason !== "stop") told.push(reason === "length" ? "cut off at its longest" : "not all of it");
  article.lastChild.before(el("audio", { controls: true, src: url, preload: "metadata", "aria-label": body.input.slice(0, 80) }));
  const error = el("p", { class: "error", role: "alert", hidden: true });
  article.lastChild.replaceChildren(el("span", { class: "figures" }, told.filter(Boolean).join(" · ")), el("span", { class: "buttons" }, format,
    el("button", { class: "quiet", click: async event => {
      const button = event.currentTarget;
      button.disabled = true;
      error.hidden = true;
      try {
        download(format.value === "wav" ? url : URL.createObjectURL(await fileOf(body, format.value)), `speech-${body.seed}.${format.value}`);
      } catch (failed) {
        error.textContent = wordsOf(failed);
        error.hidden = false;
      }
      button.disabled = false;
    } }, "Download"),
    el("button", { class: "quiet", click: () => use(body) }, "Use again"),
    el("button", { class: "quiet", click: () => { URL.revokeObjectURL(url); article.remove(); } }, "Remove")));
  article.append(error);
}
/** The same sound in another form: by the same seed it is made again. */
async function fileOf(body, response_format) {
  return (await call("v1/audio/speech", { method: "POST", body: JSON.stringify({ ...body, response_format }) })).blob();
}
function download(href, name) {
  const link = el("a", { href, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
}
function use(body) {
  say.text.value = body.input;
  for (const name of ["voice", "language", "instructions", "speed", "seed"]) say[name].value = body[name] ?? "";
  say.text.focus();
}

// Voices that were cloned, and one more.

async function listVoices() {
  const { uploaded_voices: voices } = await (await call(ofModel("v1/audio/voices"))).json();
  $("voice-list").replaceChildren(...voices.map(voice => el("li", {}, el("div", {}, el("strong", {}, voice.name),
    el("span", { class: "hint" }, ` ${voice.kind === "embedding" ? "a speaker's vector" : voice.ref_text ? "with its transcript" : "without a transcript"} · ${voice.consent}`)),
    el("button", { class: "quiet", type: "button", "aria-label": `Delete the voice ${voice.name}`, click: () => removeVoice(voice.name) }, "Delete"))));
}
async function removeVoice(name) {
  if (!confirm(`Delete the voice “${name}”? It cannot be brought back without its recording.`)) return;
  try { await call(ofModel(`v1/audio/voices/${encodeURIComponent(name)}`), { method: "DELETE" }); } catch (error) { notice("clone-error", wordsOf(error, "below")); }
  tell("key"); // its card says which voices there are
}
let recorder = null, recorded = null, isSwitching = false;
async function toggleRecording() {
  if (isSwitching) return; // a second microphone would stay open
  notice("clone-error", "");
  isSwitching = true;
  const last = recorder;
  recorder = null;
  try {
    if (last) {
      recorded = await last.stop();
      clone.audio.value = "";
      $("recorded").src = URL.createObjectURL(recorded);
      $("recorded").hidden = false;
    } else {
      recorder = await record();
    }
  } catch (error) {
    notice("clone-error", error.name === "NotAllowedError" ? "The browser was not allowed to use the microphone." : error.message);
  }
  $("record").textContent = recorder ? "Stop recording" : "Record";
  isSwitching = false;
}
async function addVoice() {
  notice("clone-error", "");
  const file = clone.audio.files[0] ?? recorded;
  if (!file) return notice("clone-error", "Choose a recording of 1 to 30 s, or record one.");
  const form = new FormData();
  form.append("model", spoken().id);
  for (const name of ["name", "consent", "ref_text"]) if (clone[name].value.trim()) form.append(name, clone[name].value.trim());
  $("clone-start").disabled = true;
  try {
    // What this browser cannot decode, the server may.
    const sent = !file.name || READ_AS_IT_IS.test(file.name) ? file : await asWav(file).catch(() => file);
    form.append("audio_sample", sent, sent === file ? file.name ?? "recording.wav" : "recording.wav");
    await call("v1/audio/voices", { method: "POST", body: form });
    keep(local, "deltic.say", { ...recall(local, "deltic.say", {}), voice: clone.name.value });
    say.voice.replaceChildren();
    $("clone").reset();
    recorded = null;
    $("recorded").hidden = true;
    tell("key");
  } catch (error) {
    notice("clone-error", wordsOf(error, "below"));
  }
  $("clone-start").disabled = false;
}

$("say").addEventListener("submit", event => { event.preventDefault(); start(); });
$("say-stop").addEventListener("click", () => speech?.stop());
$("say-pause").addEventListener("click", async () => { await speech?.togglePause(); show(); });
say.text.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape") speech?.stop(); });
$("clone").addEventListener("submit", event => { event.preventDefault(); addVoice(); });
$("record").addEventListener("click", toggleRecording);
clone.audio.addEventListener("change", () => { recorded = null; $("recorded").hidden = true; });
$("say-key").addEventListener("change", () => {
  settings.key.value = $("say-key").value;
  settings.key.dispatchEvent(new Event("input", { bubbles: true }));
  settings.key.dispatchEvent(new Event("change"));
});
on("cards", showForm);
on("model", showForm);
