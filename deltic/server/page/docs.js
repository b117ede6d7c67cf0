/** The page at /docs: what /openapi.json says, to be read and tried. */

import { $, copyButton, el } from "./dom.js";

// The page at / keeps it so, until the tab is closed.
$("key").value = JSON.parse(sessionStorage["deltic.key"] ?? '""');
$("key").form.addEventListener("submit", event => event.preventDefault());
const about = $("about");
let schemas = {}, model = null;

start().catch(error => { about.textContent = `The document cannot be shown: ${error.message}. Load the page again.`; });

async function start() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the server answered with status ${response.status}`);
  const told = await response.json();
  schemas = told.components.schemas;
  // A name that the examples may have; where a key is missing it stays what the document says.
  fetch("v1/models", { headers: keyed() }).then(answer => answer.ok ? answer.json() : null).then(models => { model = models?.data[0]?.id; }, () => null);
  about.replaceChildren(...paragraphs(told.info.description), el("p", {}, `Version ${told.info.version}.`));
  for (const tag of told.tags) {
    const routes = [];
    for (const [path, row] of Object.entries(told.paths))
      for (const [method, operation] of Object.entries(row))
        if (operation.tags.includes(tag.name)) routes.push({ method: method.toUpperCase(), path, operation });
    if (!routes.length) continue;
    const section = el("section", {}, el("h2", {}, tag.name), el("p", {}, tag.description));
    const links = el("nav", { "aria-label": tag.name }, el("h2", {}, tag.name));
    for (const route of routes) {
      section.append(folded(route));
      links.append(el("a", { href: `#${route.operation.operationId}` }, el("b", {}, route.method), route.path));
    }
    $("routes").append(section);
    $("list").append(links);
  }
  $("find").addEventListener("input", find);
  addEventListener("hashchange", open);
  open();
}

/** A route, whose inside is made when it is opened: all of them together would be a hundred thousand elements. */
function folded(route) {
  const { method, path, operation } = route;
  const summary = el("summary", {}, el("code", {}, `${method} ${path}`), el("span", {}, ...marked(operation.summary)));
  const box = el("details", { class: "route", id: operation.operationId, toggle: () => {
    if (box.open && box.children.length === 1) box.append(inside(route));
  } }, summary);
  box.dataset.words = words(route).toLowerCase();
  return box;
}

/** What Find looks in: the path, the texts, and the names of the fields of the body. */
function words({ method, path, operation }) {
  const body = Object.values(operation.requestBody?.content ?? {})[0]?.schema;
  const fields = body ? Object.keys(whole(body).properties ?? {}) : [];
  return [method, path, operation.summary, operation.description ?? "", ...fields].join(" ");
}

function find() {
  const wanted = $("find").value.trim().toLowerCase();
  for (const box of document.querySelectorAll("details.route")) {
    const hides = !box.dataset.words.includes(wanted);
    box.hidden = hides;
    document.querySelector(`aside a[href="#${box.id}"]`).hidden = hides;
  }
  for (const part of document.querySelectorAll("aside nav")) part.hidden = !part.querySelector("a:not([hidden])");
  for (const part of document.querySelectorAll("#routes section")) part.hidden = !part.querySelector("details:not([hidden])");
}

function open() {
  const box = location.hash.length > 1 && $(location.hash.slice(1));
  if (box instanceof HTMLDetailsElement) {
    box.open = true;
    box.scrollIntoView();
  }
}

function inside({ method, path, operation }) {
  const box = el("div", {}, ...paragraphs(operation.description ?? ""));
  if (operation.parameters) {
    box.append(el("h3", {}, "In the path and the query"), list(operation.parameters.map(each =>
      field(each.name, each.schema, each.required, each.description))));
  }
  const [kind, body] = Object.entries(operation.requestBody?.content ?? {})[0] ?? [];
  if (body) box.append(el("h3", {}, kind === "application/json" ? "Body" : `Body (${kind})`), shape(body.schema));
  box.append(el("h3", {}, "Answer"));
  const { 200: good, ...bad } = operation.responses;
  for (const [type, { schema }] of Object.entries(good.content)) {
    box.append(el("p", {}, el("code", {}, type), ` ${streams(type)}`));
    if (schema && Object.keys(schema).length) box.append(shape(schema));
  }
  const errors = Object.entries(bad);
  if (errors.length) {
    box.append(el("details", {}, el("summary", {}, "Errors"), list(errors.map(([status, { description }]) =>
      el("li", {}, el("code", {}, status), ` ${description}`)))));
  }
  box.append(el("h3", {}, "Try it"), trial(method, path, operation, kind, body));
  return box;
}

const streams = type => ({
  "text/event-stream": "where a stream is asked for; the data of each event:",
  "application/x-ndjson": "each line:",
})[type] ?? "";

const paragraphs = text => text.split("\n\n").filter(Boolean).map(part => el("p", {}, ...marked(part)));

/** `code` and **bold**, of the Markdown that there is. */
function marked(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).filter(Boolean).map(part =>
    part.startsWith("`") ? el("code", {}, part.slice(1, -1))
      : part.startsWith("**") ? el("b", {}, part.slice(2, -2)) : part);
}

/** A schema without a reference. */
const whole = schema => schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
const list = items => el("ul", { class: "fields" }, ...items);

/** The structs in a schema: itself, those it chooses from, or those of its list. */
function structs(schema) {
  const found = whole(schema);
  if (found.properties) return [found];
  const parts = found.anyOf ?? found.oneOf ?? (found.items ? [found.items] : []);
  const values = found.additionalProperties;
  return [...parts, ...(values && typeof values === "object" ? [values] : [])].flatMap(structs);
}

/** What a schema looks like, in a few words. */
function kind(schema) {
  const found = whole(schema);
  if (found.enum) return found.enum.map(value => JSON.stringify(value)).join(" | ");
  if (found.const !== undefined) return JSON.stringify(found.const);
  const parts = found.anyOf ?? found.oneOf;
  if (parts) return [...new Set(parts.map(kind))].join(" | ");
  if (found.type === "array") return found.items ? `[${kind(found.items)}]` : "[…]";
  if (found.properties) return found.title;
  if (found.type === "object") return "object";
  const least = found.minimum ?? found.exclusiveMinimum, most = found.maximum ?? found.exclusiveMaximum;
  const isTold = (least !== undefined || most !== undefined) && !(Math.abs(most) > 2 ** 53);
  const bounds = isTold ? ` ${least ?? ""}…${most ?? ""}` : "";
  return `${found.type ?? "any"}${bounds}`;
}

function shape(schema) {
  const found = structs(schema);
  if (!found.length) return el("p", { class: "kind" }, kind(schema));
  if (found.length === 1) return fields(found[0]);
  return list(found.map(each => el("li", {}, el("details", {
    toggle: event => { if (event.currentTarget.open && event.currentTarget.children.length === 1) event.currentTarget.append(fields(each)); },
  }, el("summary", {}, el("code", {}, each.properties.type?.enum?.[0] ?? each.title), ` ${each.description ?? ""}`)))));
}

function fields(struct) {
  const must = new Set(struct.required);
  return list(Object.entries(struct.properties).map(([name, schema]) =>
    field(name, schema, must.has(name), schema.description)));
}

/** One field; what is inside it is made when it is opened, since schemas may contain themselves. */
function field(name, schema, must, text) {
  // That a field which may be left out may be null, too, goes without saying.
  const looks = must ? kind(schema) : kind(schema).replace(/ \| null$/, "");
  const head = [el("code", {}, name), " ", el("span", { class: "kind" }, looks), must ? el("span", { class: "must" }, " required") : null];
  const note = text ? el("p", {}, ...marked(text)) : null;
  if (!structs(schema).length) return el("li", {}, ...head, note);
  const box = el("details", { toggle: () => { if (box.open && box.children.length === 1) box.append(shape(schema)); } },
    el("summary", {}, ...head));
  return el("li", {}, note ? el("div", {}, box, note) : box);
}

/** A form that sends a request to this server, and the same as a line for a shell. */
function trial(method, path, operation, type, body) {
  const inputs = (operation.parameters ?? []).map(each => [each, el("input", { autocomplete: "off", spellcheck: "false" })]);
  const text = type === "application/json" ? el("textarea", { rows: 8, spellcheck: "false" }) : null;
  if (text) text.value = JSON.stringify({ ...body.example, ...(model && body.example?.model ? { model } : {}) }, null, 2);
  const said = el("pre", { hidden: true, tabindex: 0, "aria-label": "Answer" }), state = el("p", { role: "status" });
  const address = () => {
    let where = path.slice(1);
    const query = new URLSearchParams();
    for (const [each, input] of inputs) {
      if (each.in === "path") where = where.replace(`{${each.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(each.name, input.value);
    }
    return new URL(where + (query.size ? `?${query}` : ""), document.baseURI).href;
  };
  const shell = () => ["curl", method === "GET" ? null : `-X ${method}`, quoted(address()),
    $("key").value ? "-H 'Authorization: Bearer '$KEY" : null,
    text ? `-H 'Content-Type: application/json' -d ${quoted(text.value)}` : null].filter(Boolean).join(" ");
  if (type && !text) return el("p", {}, "This body is a form; send it with ", el("code", {}, "curl -F"), ".");
  let running = null;
  const button = el("button", { class: "main" }, "Send");
  return el("form", { submit: async event => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    running = new AbortController();
    button.textContent = "Stop";
    try { await send(address(), { method, signal: running.signal }, text?.value, said, state); }
    catch (error) { state.textContent = error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}.`; }
    running = null;
    button.textContent = "Send";
  } },
    ...inputs.map(([each, input]) => el("label", {}, each.name, input)),
    text ? el("label", {}, "Body", text) : null,
    el("div", { class: "row" }, button, relabelled(copyButton(shell), "Copy as curl")), state, said);
}

function relabelled(button, label) {
  button.textContent = label;
  return button;
}
const quoted = text => `'${text.replaceAll("'", `'\\''`)}'`;

/** The headers of a request, with the key if there is one. */
const keyed = () => $("key").value ? { authorization: `Bearer ${$("key").value}` } : {};

async function send(address, options, body, said, state) {
  const headers = keyed(), began = performance.now();
  if (body !== undefined) headers["content-type"] = "application/json";
  state.textContent = "Waiting for the answer.";
  const response = await fetch(address, { ...options, headers, body, cache: "no-store" });
  const type = response.headers.get("content-type") ?? "";
  said.hidden = false;
  said.textContent = "";
  if (!/json|text|javascript/.test(type)) {
    said.textContent = `${(await response.blob()).size} bytes of ${type}`;
  } else if (type.startsWith("application/json")) {
    const text = await response.text();
    try { said.textContent = JSON.stringify(JSON.parse(text), null, 2); } catch { said.textContent = text; }
  } else {
    for (const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
      const { value, done } = await reader.read();
      if (done) break;
      said.append(value);
    }
  }
  state.textContent = `Status ${response.status} after ${Math.round(performance.now() - began)} ms.`;
}
