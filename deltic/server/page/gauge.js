/** Below the message: how far the answer is, how full the context is; and in the settings, what the model is. */

import { $, bytes, el, number } from "./dom.js";
import { cardOf } from "./models.js";
import { on, running, state } from "./state.js";
import { path } from "./thread.js";

const LOOK_MS = 250;
let timer = 0;

function showNow() {
  clearTimeout(timer);
  const run = running();
  $("now").textContent = run?.now() ?? "";
  if (run) timer = setTimeout(showNow, LOOK_MS);
  showGauge();
}
/** Tokens of the conversation, as the last answer tells, of those that the model can have. */
function showGauge() {
  const meta = path(state.chat).findLast(message => message.meta?.prompt)?.meta, most = cardOf()?.max_model_len;
  const used = meta ? meta.prompt + (meta.tokens ?? 0) : 0, part = most ? Math.min(used / most, 1) : 0;
  $("gauge").hidden = !used || !most;
  if ($("gauge").hidden) return;
  $("gauge").replaceChildren(el("span", {}, `${number(used)} of ${number(most)} tokens`), el("span", { class: part > .85 ? "tube full" : "tube", "aria-hidden": "true" }, el("span")));
  $("gauge").querySelector(".tube > span").style.width = `${100 * part}%`;
  $("gauge").title = part > .85 ? "The context is nearly full: begin a new chat, or edit an earlier message." : "How full the model's context is with this conversation";
}
function showCard() {
  const card = cardOf(), { details = {} } = card ?? {};
  const rows = [
    ["Model", card?.id], ["From", details.source === "built-in" ? "this package: a toy" : details.source], ["Size", card?.bytes && bytes(card.bytes)],
    ["Parameters", details.parameter_size], ["Format", [details.format, details.quantization_level].filter(Boolean).join(", ")],
    ["Context", card?.max_model_len && `${number(card.max_model_len)} tokens`], ["Sees pictures", card && (card.input_modalities?.includes("image") ? "yes" : "no")],
    ["Adapter of", card?.parent],
  ].filter(([, value]) => value);
  $("card").replaceChildren(...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

for (const name of ["running", "opened", "edited"]) on(name, showNow);
for (const name of ["cards", "model"]) on(name, () => { showCard(); showGauge(); });
