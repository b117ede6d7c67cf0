/** What the engine does at the moment. */

import { call } from "./api.js";
import { $, bytes, count, el, notice, number, wordsOf } from "./dom.js";
import { ofModel, showState } from "./models.js";
import { on, state } from "./state.js";

const POLL_MS = 1000, N_STEPS = 240, MAX_ROWS = 60;
/** What the server told last, its prefix tree, and the counters that the tree belongs to. */
export const seen = { told: null, tree: null, treeOf: "" };
let timer = 0, polling = false;

export async function watch() {
  clearTimeout(timer);
  if (polling || $("live").hidden || document.hidden) return; // it goes on when somebody looks again
  polling = true;
  const live = ofModel("live"), held = ofModel("cache");
  try {
    const now = await (await call(live)).json(), cache = JSON.stringify(now.stats.cache);
    // The tree is asked for only when it may have changed.
    const found = now.status === "ready" && cache !== seen.treeOf ? await (await call(held)).json() : null;
    if ($("models").hidden || state.model === now.model) { // else another one was chosen meanwhile
      if (found) { Object.assign(seen, { tree: found, treeOf: cache }); showTree(); }
      showLive(now, seen.told);
      seen.told = now;
      state.model = now.model;
      showState(now.status, now.status === "ready" ? "ready" : now.status === "failed" ? "down" : "");
    }
    notice("live-error", "");
  } catch (error) {
    notice("live-error", wordsOf(error));
  }
  polling = false;
  timer = setTimeout(watch, POLL_MS);
}
function showLive({ stats, steps, engine, uptime_s, n_restarts }, before) {
  const cache = stats.cache, seconds = before ? uptime_s - before.uptime_s : 0;
  const rate = name => seconds > 0 ? number(Math.max(0, stats[name] - before.stats[name]) / seconds) : "–";
  const sorted = steps.map(step => step[1]).sort((a, b) => a - b);
  const quantile = q => sorted.length ? number(sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))], 1) : "–";
  const tiles = [
    ["Answers at work", number(stats.n_running), engine && `of ${engine.max_num_seqs}`],
    ["Waiting for room", number(stats.n_waiting)],
    ["Written", rate("n_generated_tokens"), "tokens/s"],
    ["Read of prompts", rate("n_prompt_tokens"), "tokens/s"],
    ["Step, median", quantile(.5), "ms"],
    ...drafts(stats), ...experts(stats),
    ["From the cache", cache.n_lookup_tokens ? number(100 * cache.n_hit_tokens / cache.n_lookup_tokens) : "–", "% of prompts"],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, unit]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, unit ? el("small", {}, ` ${unit}`) : ""))));
  showBars(stats, engine);
  const mishaps = [[stats.n_preemptions, "preemption"], [n_restarts, "engine restart"]].filter(([n]) => n).map(([n, what]) => `, ${count(n, what)}`).join("");
  $("step-line").replaceChildren(`The last ${steps.length} of ${number(stats.n_steps)} steps, newest right; 99 % took at most ${quantile(.99)} ms${mishaps}.`,
    el("span", { class: "key" }), "writes answers (decode)", el("span", { class: "key prefill" }), "reads prompts, too (prefill)");
  drawSteps(steps);
}
function drafts({ drafted, accepted }) { // how many of those at a place were right, where there were any
  const places = Object.keys(drafted).sort((a, b) => a - b).slice(0, 4);
  const right = at => number(100 * (accepted[at] ?? 0) / drafted[at]);
  return places.length ? [["Drafts right", right(places[0]), ["%", ...places.slice(1).map(right)].join(", ")]] : [];
}
function experts({ experts }) { // of those that are outside the GPU, how many were in a slot there
  const n = experts ? experts.n_hits + experts.n_fetched : 0;
  return n ? [["Experts on the GPU", number(100 * experts.n_hits / n), "% of the chosen"]] : [];
}
function showBars(stats, engine) {
  const tiers = seen.tree?.tiers ?? {};
  // What running sequences use, and, paler, what the prefix tree keeps and gives up when they need it.
  const bars = [
    ["Texts", value => bytes(value * (engine?.page_bytes ?? 0)), stats.n_pages, stats.n_pages_used, stats.cache.n_pages, "Keys and values of what was read and written, in pages of 64 tokens"],
    ["States", value => bytes(value * (engine?.state_bytes ?? 0)), stats.n_slots, stats.n_slots_used, stats.cache.n_checkpoints, "Where answers at work stand, and places in earlier texts to start from"],
    ["Host memory", bytes, tiers.host?.bytes_total, tiers.host?.bytes_used], ["Disk", bytes, tiers.disk?.bytes_total, tiers.disk?.bytes_used],
  ].filter(bar => bar[2]);
  $("bars").replaceChildren(...bars.map(([name, say, total, used, kept, about]) => {
    const text = `${kept == null ? say(used) : `${say(used)} in use, ${say(kept)} kept,`} of ${say(total)}`;
    const fill = (part, kind) => { const node = el("div", { class: kind }); node.style.width = `${100 * part / total}%`; return node; };
    return el("div", { class: "bar", title: about }, el("p", {}, name, el("span", {}, text)),
      el("div", { role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": used, "aria-valuetext": text },
        fill(kept ?? 0, "kept"), fill(used, "used")));
  }));
}
function drawSteps(steps) {
  const width = $("steps").clientWidth, bar = width / N_STEPS, high = 54, pitch = high + 30;
  const rows = [["Milliseconds", 1], ["Prompt tokens computed", 3], ["Tokens drawn", 4]];
  const svg = el("svg:svg", { class: "drawn", role: "img", "aria-label": "Duration and tokens of the last steps", height: rows.length * pitch, viewBox: `0 0 ${width} ${rows.length * pitch}` });
  rows.forEach(([name, column], i) => {
    const bottom = i * pitch + high + 18, most = Math.max(...steps.map(step => step[column]), 0);
    const paths = { decode: "", prefill: "" };
    steps.forEach((step, k) => {
      const tall = most ? step[column] / most * high : 0, kind = column === 3 || (column === 1 && step[3]) ? "prefill" : "decode";
      if (tall) paths[kind] += `M${(width - (steps.length - k) * bar).toFixed(1)} ${bottom}v${-tall.toFixed(1)}h${Math.max(bar - .6, .4).toFixed(2)}V${bottom}z`;
    });
    svg.append(el("svg:text", { x: 0, y: bottom - high - 6 }, name), el("svg:text", { x: width, y: bottom - high - 6, "text-anchor": "end" }, `most ${number(most, 1)}`),
      el("svg:line", { class: "axis", x1: 0, x2: width, y1: bottom + .5, y2: bottom + .5 }),
      el("svg:path", { class: "decode", d: paths.decode }), el("svg:path", { class: "prefill", d: paths.prefill }));
  });
  $("steps").replaceChildren(svg);
}

/** The tree to scale: left to right a prompt's tokens, a block for each stretch between two checkpoints, as tall as its branches. */
function showTree() {
  const { checkpoints, counters, tiers, enabled } = seen.tree, nodes = checkpoints.map(told => ({ ...told, below: [], start: 0 }));
  const roots = [];
  for (const node of nodes) {
    if (node.above == null) { roots.push(node); continue; }
    node.start = nodes[node.above].tokens;
    nodes[node.above].below.push(node);
  }
  const full = Object.entries(tiers).filter(([, tier]) => tier.checkpoints || tier.pages);
  const said = full.map(([name, tier]) => `${count(tier.checkpoints, "checkpoint")} and ${count(tier.pages, "page")} on ${name}`);
  if (counters.n_checkpoints_evicted) said.push(`${number(counters.n_checkpoints_evicted)} evicted so far`);
  $("tree-line").replaceChildren(!enabled ? "The prefix cache is off." : said.join(", ") || "Nothing is kept yet.",
    ...full.flatMap(([name]) => [el("span", { class: `key ${name}` }), name]));
  // Rows are branches; those that were used most come first. What finds no row is counted.
  const order = [];
  let rows = 0, hidden = 0;
  const weigh = node => node.weight = node.below.reduce((sum, child) => sum + weigh(child), node.hits + node.tokens / 1e6);
  const place = node => {
    node.row = rows;
    order.push(node);
    node.below.sort((a, b) => b.weight - a.weight).forEach(child => rows < MAX_ROWS || child === node.below[0] ? place(child) : hidden++);
    if (!node.below.length) rows++;
    node.rows = Math.max(rows - node.row, 1);
  };
  roots.forEach(weigh);
  roots.sort((a, b) => b.weight - a.weight).forEach(root => rows < MAX_ROWS ? place(root) : hidden++);
  const width = $("tree").clientWidth, deepest = Math.max(...nodes.map(node => node.tokens), 1), scale = width / deepest;
  const high = rows <= 20 ? 22 : rows <= 36 ? 14 : 9, bottom = rows * high + 4;
  const svg = el("svg:svg", { class: "drawn", role: "img", "aria-label": `${nodes.length} checkpoints; the table below has each`, height: bottom + 18, viewBox: `0 0 ${width} ${bottom + 18}` });
  for (const node of order) {
    const x = node.start * scale, wide = Math.max((node.tokens - node.start) * scale, 2), tall = node.rows * high - 1;
    const label = node.hits ? `${number(node.tokens)} · ${number(node.hits)}×` : number(node.tokens);
    svg.append(el("svg:g", { class: `node ${node.tiers[0]} ${node.hits ? "" : "cold"}` },
      el("svg:title", {}, `${describe(node)}; ${node.hits} hits`),
      el("svg:rect", { x, y: node.row * high, width: wide, height: tall, rx: 2 }),
      high > 12 && wide > label.length * 7 + 8 ? el("svg:text", { x: x + 5, y: node.row * high + high / 2 + 4 }, label) : null));
  }
  for (const [at, anchor] of [[0, "start"], [.5, "middle"], [1, "end"]]) {
    svg.append(el("svg:text", { x: at * width, y: bottom + 14, "text-anchor": anchor }, at ? number(at * deepest) + (at === 1 ? " tokens" : "") : "0"));
  }
  $("tree").replaceChildren(...(nodes.length ? [svg] : []), hidden ? el("p", { class: "hint" }, `and ${number(hidden)} more branches`) : "");
  $("tree-table").hidden = !nodes.length;
  showTable(order);
}
const describe = node => `${number(node.tokens)} tokens, ${node.kind}, on ${node.tiers.join(" and ")}`;
function showTable(order) {
  if (!$("tree-table").open) return;
  const cell = text => el("td", {}, String(text));
  $("tree-table").lastElementChild.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...["Tokens", "Behind", "Kind", "Tiers", "Hits"].map(name => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...order.map(node => el("tr", {}, cell(number(node.tokens)), cell(number(node.start)), cell(node.kind), cell(node.tiers.join(", ")), cell(node.hits))))));
}

on("watch", watch);
on("model", () => Object.assign(seen, { told: null, tree: null, treeOf: "" }));
addEventListener("resize", () => { if (!$("live").hidden && seen.told) { drawSteps(seen.told.steps); if (seen.tree) showTree(); } });
document.addEventListener("visibilitychange", watch);
$("tree-table").addEventListener("toggle", () => { if (seen.tree) showTree(); });
