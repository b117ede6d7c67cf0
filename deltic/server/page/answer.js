/** Answers that stream, and what is asked for them. */

import { ServerError, call, events } from "./api.js";
import { $ } from "./dom.js";
import { paint, showChat } from "./messages.js";
import { requestBody } from "./settings.js";
import { on, running, runs, state, tell } from "./state.js";
import { save } from "./store.js";

/** Ends the answer of a chat, which nobody keeps. */
export function forget(id) {
  const run = runs.get(id);
  runs.delete(id);
  run?.controller.abort();
}

/** Streams an answer to the chat as it stands, or the rest of one. */
export async function answer(rest = null) {
  const mine = state.chat, controller = new AbortController(), run = { chat: mine, controller };
  runs.set(mine.id, run);
  const message = rest ?? { role: "assistant", content: "", meta: {} }, meta = message.meta;
  const goesOn = rest ? { continue_final_message: true, add_generation_prompt: false } : {};
  const begun = performance.now();
  let first = 0, last = 0, atFirst = 0, usage = null;
  let body;
  const messages = wire(mine.messages);
  if (!rest) mine.messages.push(message);
  showChat();
  const draw = growing => { if (state.chat === mine) paint($("log").lastElementChild, message, growing); };
  tell("running");
  const take = (event, at) => {
    if (event.error) throw new Error(event.error.message ?? String(event.error));
    usage = event.usage ?? usage;
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
  let waiting = false;
  try {
    body = JSON.stringify({ ...requestBody(messages), ...goesOn });
    const response = await call("v1/chat/completions", { method: "POST", body, signal: controller.signal });
    for await (const [event, at] of events(response)) {
      take(event, at);
      if (!waiting) {
        waiting = true;
        requestAnimationFrame(() => { waiting = false; if (runs.get(mine.id) === run) { figure(); draw(true); } });
      }
    }
    if (!meta.finish) throw new Error("The connection broke in the middle of the answer.");
  } catch (error) {
    if (state.leaving) return; // what was saved goes on when the page is there again
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
  draw(false);
}
/** An answer that a reload has cut off goes on. */
let resumed = false;
function resume() {
  const last = state.chat.messages.at(-1), isFirst = !resumed;
  resumed = true;
  if (!isFirst || running() || last?.role !== "assistant" || !last.meta || last.meta.finish || last.meta.error) return;
  if (last.content && !last.tool_calls) answer(last);
  else again();
}
export function again() {
  if (running()) return;
  if (state.chat.messages.at(-1).role === "assistant") state.chat.messages.pop();
  answer();
}

/** What the API is sent: no figures, no call that was not finished, no answer that never came. */
function wire(messages) {
  return messages.map(({ meta, ...message }) => {
    if (meta?.finish !== "tool_calls") delete message.tool_calls;
    return message;
  }).filter(message => message.role !== "assistant" || message.content || message.reasoning_content || message.tool_calls);
}

on("again", again);
on("results", () => answer());
on("ready", resume);
