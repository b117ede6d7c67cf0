/** Answers that stream, and what is asked for them. */

import { ServerError, call, events } from "./api.js";
import { number } from "./dom.js";
import { drawAnswer, showChat } from "./messages.js";
import { requestBody } from "./settings.js";
import { isElsewhere, isUnfinished, save } from "./shelf.js";
import { on, running, runs, state, tell } from "./state.js";
import { add, path } from "./thread.js";

const SAVE_MS = 3000;   // between two times that a growing answer is kept
const WAITS_MS = 700;   // an answer that has not begun by then waits in the queue

/** Ends the answer of a chat, which nobody keeps. */
export function forget(id) {
  const run = runs.get(id);
  runs.delete(id);
  run?.controller.abort();
}

/** Streams an answer to the chat as it is seen, or the rest of one. */
export async function answer(rest = null) {
  const mine = state.chat, controller = new AbortController();
  const run = { chat: mine, controller, message: rest, now: () => "" };
  const messages = wire(path(mine));
  const message = run.message = rest ?? add(mine, { role: "assistant", content: "", meta: {} }), meta = message.meta;
  const goesOn = rest ? { continue_final_message: true, add_generation_prompt: false } : {};
  const begun = performance.now();
  let first = 0, last = 0, atFirst = 0, usage = null, progress = null, sign = "";
  for (const name of ["finish", "error"]) delete meta[name];
  if (rest) Object.assign(meta, { exact: false, tokens: 0 });
  runs.set(mine.id, run);
  mine.at = Date.now();
  if (state.chat === mine) showChat();
  const draw = () => { if (state.chat === mine) drawAnswer(message); };
  const take = (event, at) => {
    if (event.error) throw new Error(event.error.message ?? String(event.error));
    usage = event.usage ?? usage;
    sign = event.comment ?? sign; // how far the load of the model is, where that is waited for
    progress = event.prompt_progress ?? progress;
    meta.model ||= event.model;
    const choice = event.choices?.find(choice => choice.index === 0), delta = choice?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (thought || delta.content || delta.tool_calls) {
      last = at;
      first ||= at;
      meta.tokens = (meta.tokens ?? 0) + 1; // about, until the usage says
      if (at === first) atFirst = meta.tokens;
    }
    if (thought) message.reasoning_content = (message.reasoning_content ?? "") + thought;
    if (message.reasoning_content && !thought && !meta.thought_s && (delta.content || delta.tool_calls)) meta.thought_s = (last - begun) / 1000;
    message.content += delta.content ?? "";
    for (const piece of delta.tool_calls ?? []) {
      const call = (message.tool_calls ??= [])[piece.index] ??= { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } };
      call.function.arguments += piece.function?.arguments ?? "";
    }
    meta.finish = choice?.finish_reason ?? meta.finish;
  };
  const figure = () => {
    if (first) meta.ttft_ms = first - begun;
    if (usage) Object.assign(meta, { exact: true, tokens: usage.completion_tokens, prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens });
    if (last - first > 50) meta.rate = (meta.tokens - atFirst) / (last - first) * 1000; // sooner, it would be the browser's
  };
  run.now = () => {
    if (first) return `${message.content || message.tool_calls ? "Writing" : "Thinking"}${meta.rate ? ` · ${number(meta.rate, meta.rate < 100 ? 1 : 0)} tokens/s` : ""}`;
    if (progress) return reading(progress);
    return performance.now() - begun > WAITS_MS ? sign || "Waiting for its turn" : "";
  };
  tell("running");
  let waiting = false, kept = begun;
  try {
    const body = JSON.stringify({ ...requestBody(messages, mine.settings), ...goesOn });
    save(mine, true);
    const response = await call("v1/chat/completions", { method: "POST", body, signal: controller.signal });
    for await (const [event, at] of events(response)) {
      take(event, at);
      if (waiting) continue;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        if (runs.get(mine.id) !== run) return;
        figure();
        draw();
        if (performance.now() - kept > SAVE_MS) {
          kept = performance.now();
          save(mine, true);
        }
      });
    }
    if (!meta.finish) throw new Error("The connection broke in the middle of the answer.");
  } catch (error) {
    if (state.leaving) return; // what was kept goes on when the page is there again
    if (controller.signal.aborted) meta.finish = "stopped";
    else meta.error = error.message;
    if (error instanceof ServerError) tell("lost");
    if (error.status === 401) tell("unknown-key");
  }
  controller.abort(); // nothing of it may go on, whatever went wrong
  figure();
  if (runs.get(mine.id) !== run) return; // the chat was deleted
  runs.delete(mine.id);
  tell("running");
  save(mine);
  if (state.chat === mine) showChat();
}
/** How far the prompt is, in words. */
function reading({ total, cache, processed, time_ms }) {
  const part = total > cache ? (processed - cache) / (total - cache) : 1;
  const left_s = part > .05 && part < 1 ? time_ms / part * (1 - part) / 1000 : 0;
  const left = left_s > 90 ? `, about ${number(left_s / 60)} minutes left` : left_s > 5 ? `, about ${number(left_s)} s left` : "";
  return `Reading the prompt ${Math.round(100 * part)} %${left}`;
}
/** An answer that was cut off, as its page was left, goes on where it is opened again. */
let isReady = false;
function resume() {
  if (!isReady || running() || !isUnfinished(state.chat) || isElsewhere(state.chat.id)) return;
  const last = path(state.chat).at(-1);
  if (last.content && !last.tool_calls) answer(last);
  else again(last);
}
/** Answers once more; the earlier answer stays as another version. One that has nothing goes. */
function again(message) {
  if (running()) return;
  const { chat } = state;
  chat.leaf = message.up;
  if (!message.content && !message.reasoning_content && !message.tool_calls) chat.nodes.splice(chat.nodes.indexOf(message), 1);
  answer();
}

/** What the API is sent: no figures, no call that was not finished, no answer that never came. */
function wire(messages) {
  return messages.map(({ meta, id, up, ...message }) => {
    if (meta?.finish !== "tool_calls") delete message.tool_calls;
    return message;
  }).filter(message => message.role !== "assistant" || message.content || message.reasoning_content || message.tool_calls);
}

on("again", again);
on("go-on", answer);
on("results", () => answer());
on("ready", () => { isReady = true; resume(); });
on("opened", resume);
