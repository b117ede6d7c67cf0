"""From the answer's form, as a request asks for it, to the engine's Constraint.

`response_format`; vLLM's `structured_outputs` and its older `guided_*`; `grammar` and `json_schema` of
llama.cpp, `regex` and `ebnf` of SGLang; `tool_choice`, `parallel_tool_calls` and strict tools; a budget for
the thought. A grammar begins behind the thought. With tools that may be called beside a JSON format, the
answer is the JSON or calls. Arguments follow the tool's schema wherever a call is constrained; where that
cannot be a grammar, those of a tool that is not strict are any, and a strict one is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax
from msgspec import Meta, Struct

from deltic.engine.messages import Constraint
from deltic.engine.turns import Shares
from deltic.server.api import decode, protocol
from deltic.server.api.messages import ToolName
from deltic.server.chat import grammar
from deltic.server.chat.grammar import CallForm
from deltic.server.chat.schema import MAX_PATTERN, GrammarError, clean
from deltic.server.errors import bad_request
from deltic.server.limits import asking
from deltic.text import Tokenizer

ANY = {"type": "object"}
MAX_OWN_GRAMMAR = 16_384
"""Characters of a grammar that a request brings, and of all its terminals, written out."""
_TERMINAL = re.compile(r"(?ms)^([A-Z_][A-Z0-9_]*)(?:\[[^\]\n]*\])?\s*:(.*?)(?=^[\w\-]+(?:\[[^\]\n]*\])?\s*:|^%|\Z)")
_NAME = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")
_NOT_OURS = re.compile(r"(?m)<\[[\d^*]|^\w+\[[^\]\n]*(temperature|stop)\b")
"""Token ids, and options of a rule that ask for more than a mask."""

MAX_BAD = 65_536
"""Characters of a request's bad words."""
MAX_ASKED = 1_000_000
"""Bytes of tools and format from which a grammar is made."""
N_KEPT = 64
"""Grammars that are kept: an agent sends the same tools with every request."""


class NotInline(Exception):
    """Work that would take too long in the event loop's thread."""


class NewGrammar(NotInline):
    """A grammar is to be compiled, which may take long and has no parts, where others wait for it."""


compiles: ContextVar[bool] = ContextVar("compiles", default=True)
"""Whether new grammars may be compiled here, outside the event loop."""


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    """Changes nothing: the answer follows the schema."""


class TagStructure(Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True
    """Of the JSON between them."""


class StructuralTag(Struct, forbid_unknown_fields=True):
    """As in vLLM: the text is free, but each trigger in it starts a structure that begins with it."""

    structures: Annotated[list[TagStructure], Meta(min_length=1, max_length=128)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=128)]
    type: Literal["structural_tag"] = "structural_tag"


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None
    """Of a json_object, as llama.cpp has it."""


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """As in vLLM: one of them."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class Format(Struct):
    """The form of the answer.

    path: of the field that asks for it; kind: json (a schema), regex, choice, grammar, tag.
    """

    path: str
    kind: str
    value: Any


class ToolGrammar(Struct, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: str


class ToolFunction(Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    grammar: ToolGrammar | None = None
    """Of its one parameter `input`, of a tool that takes a text; enforced where it can be, and shown."""


class Tool(Struct, forbid_unknown_fields=True):
    function: ToolFunction
    type: Literal["function"] = "function"
    cache_control: Any = None
    """A mark of Anthropic's prompt cache, which gateways leave here; so is the function's.

    The model is not shown it.
    """


class AnyText(Struct, tag="text", forbid_unknown_fields=True):
    """No constraint."""


class TextOf(Struct, tag="grammar", forbid_unknown_fields=True):
    grammar: ToolGrammar


class Custom(Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: AnyText | TextOf | None = None


class CustomTool(Struct, forbid_unknown_fields=True):
    """A tool that takes a text. The model has it as a function with one parameter, `input`."""

    custom: Custom
    type: Literal["custom"]
    cache_control: Any = None


_TEXT_ONLY = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "All that the tool is given, as it is."}},
    "required": ["input"],
}
"""The parameters of a custom tool."""


def text_function(name: str, description: str | None, grammar: ToolGrammar | None) -> dict[str, Any]:
    """The function that a custom tool is to the model."""
    function = {"name": name} | ({"description": description} if description else {}) | {"parameters": _TEXT_ONLY}
    if grammar is not None:
        function["grammar"] = {"syntax": grammar.syntax, "definition": grammar.definition}
    return function


def functions_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """A chat's tools, all of them functions. Raises ApiError (400)."""
    functions = []
    for i, tool in enumerate(tools or ()):
        if is_custom(tool):
            custom = decode.convert(tool, CustomTool, f"tools[{i}]").custom
            grammar = custom.format.grammar if isinstance(custom.format, TextOf) else None
            tool = {"type": "function", "function": text_function(custom.name, custom.description, grammar)}
        functions.append(tool)
    return functions


def is_custom(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "custom"


class Named(Struct, forbid_unknown_fields=True):
    name: str


class OneTool(Struct, tag="function", forbid_unknown_fields=True):
    function: Named


class OneCustom(Struct, tag="custom", forbid_unknown_fields=True):
    custom: Named


class AllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[OneTool | OneCustom]


class SomeTools(Struct, tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: AllowedTools


class Calls(Struct):
    """The tools that an answer may call, with their places in the request.

    most: how many calls; None for any number.
    """

    tools: list[tuple[str, ToolFunction]]
    must: bool
    most: int | None


def calls_of(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None = None) -> Calls | None:
    """None: there are no tools, or none may be called. Raises ApiError (400)."""
    functions: dict[str, tuple[str, ToolFunction]] = {}
    for i, tool in enumerate(decode.convert(functions_of(tools), list[Tool], "tools")):
        name, path = tool.function.name, f"tools[{i}].{'custom' if tools and is_custom(tools[i]) else 'function'}"
        if name in functions:
            raise bad_request(f"{path}.name", f"{name!r} is the name of an earlier tool, too")
        functions[name] = (path, tool.function)
    most = 1 if parallel is False else None
    must, names = choice == "required", list(functions)
    if isinstance(choice, dict):
        asked = decode.convert(choice, OneTool | OneCustom | SomeTools, "tool_choice")
        if isinstance(asked, SomeTools):
            names, path = [_named(tool) for tool in asked.allowed_tools.tools], "allowed_tools"
            must = asked.allowed_tools.mode == "required"
        else:
            names, must, most, path = [_named(asked)], True, 1, choice["type"]
        if (unknown := next((name for name in names if name not in functions), None)) is not None:
            raise bad_request(f"tool_choice.{path}", f"{unknown!r} is not the name of one of the tools")
    elif choice not in (None, "auto", "none", "required"):
        raise bad_request("tool_choice", "expected 'auto', 'none', 'required', or an object that names a function")
    if must and not names:
        raise bad_request("tool_choice", "asks for a call, and there are no tools")
    if not names or choice == "none":
        return None
    return Calls([functions[name] for name in dict.fromkeys(names)], must, most)


def _named(tool: OneTool | OneCustom) -> str:
    return tool.function.name if isinstance(tool, OneTool) else tool.custom.name


def tool_schemas(tools: list[dict[str, Any]] | None, choice: Any = None) -> dict[str, dict[str, Any]] | None:
    """Name to schema of the arguments, of the tools that the answer may call; None when it may call none.

    Raises ApiError (400).
    """
    calls = calls_of(tools, choice)
    return {tool.name: tool.parameters or {} for _, tool in calls.tools} if calls else None


def thinking_budget(chat: protocol.ChatRequest) -> int | None:
    """Tokens that the thought may have. Raises ApiError (400)."""
    inner = (chat.chat_template_kwargs or {}).get("thinking_budget")
    if inner is None or inner == chat.thinking_budget:
        return chat.thinking_budget
    if chat.thinking_budget is not None:
        raise bad_request("thinking_budget", "contradicts chat_template_kwargs.thinking_budget; give one of the two")
    budget: int = decode.convert(inner, protocol.Count, "chat_template_kwargs.thinking_budget")
    return budget


class Constrainer:
    """Requests to constraints, for one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, form: CallForm | None) -> None:
        """form: of tool calls, in the model's chat template; None: it shows none that is known."""
        self._tokenizer = tokenizer
        self._form = form
        self._kept = Shares[str](N_KEPT)  # by hash of what was asked
        threading.stack_size(max(threading.stack_size(), grammar.STACK_BYTES))  # of threads begun from now on

    def chat_grammar(self, chat: protocol.ChatRequest) -> str:
        """The grammar of a chat's answer, "" for none. Raises ApiError (400), NotInline."""
        asked = asked_format(chat)
        calls = calls_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        is_free = not (asked or (calls and (calls.must or calls.most)))
        if calls and is_free and not any(tool.strict or self._takes(tool.grammar) for _, tool in calls.tools):
            calls = None
        if chat.continue_final_message and (asked or (calls and calls.must)):
            raise bad_request("continue_final_message", "an answer whose form is fixed cannot begin in the request")
        return self._grammar(asked, calls)

    def chat(self, chat: protocol.ChatRequest, text: str, thinking: bool) -> Constraint | None:
        """text: its `chat_grammar`; thinking: the prompt opened a thought. Raises ApiError (400)."""
        return self._with_words(self._formed(chat, text, thinking), chat)

    def _takes(self, text: ToolGrammar | None) -> bool:
        """Whether a text in a call can be held to its grammar."""
        return text is not None and self._form == "xml" and bool(self._token("<tool_call>"))

    def _formed(self, chat: protocol.ChatRequest, text: str, thinking: bool) -> Constraint | None:
        """text: the grammar. Raises ApiError (400)."""
        budget = thinking_budget(chat)
        if not thinking or (budget is None and not text):
            return Constraint(grammar=text) if text else None
        end = self._tokenizer.encode("</think>", "parse")
        if len(end) != 1:
            asked = asked_format(chat)
            param = "thinking_budget" if budget is not None else asked.path if asked else "tool_choice"
            raise bad_request(param, "not supported: this model's vocabulary has no token that ends a thought")
        gap = tuple(self._tokenizer.encode("\n\n"))
        close = (*self._tokenizer.encode("\n"), *end)
        return Constraint(
            grammar=text,
            think_end_id=end[0],
            think_budget=budget,
            close_ids=() if budget is None else close if text else close + gap,
            begin_ids=gap if text else (),
        )

    def completion(self, request: protocol.CompletionRequest) -> Constraint | None:
        """Raises ApiError (400), NotInline."""
        text = self._grammar(asked_format(request), None)
        return self._with_words(Constraint(grammar=text) if text else None, request)

    def _with_words(self, constraint: Constraint | None, request: protocol.Sampling) -> Constraint | None:
        """The constraint with what may and what may not be drawn anywhere. Raises ApiError (400)."""
        allowed, bad = request.allowed_token_ids, request.bad_words
        if allowed is not None and not allowed:
            raise bad_request("allowed_token_ids", "is empty, and an answer needs at least one; leave it out")
        if not allowed and not bad:
            return constraint
        bits = bytearray(max(allowed) // 8 + 1 if allowed else 0)
        for id in allowed or ():
            bits[id // 8] |= 1 << id % 8
        return msgspec.structs.replace(
            constraint or Constraint(), allowed=bytes(bits), bad_ids=tuple(self._bad_ids(bad or []))
        )

    def _bad_ids(self, words: list[str]) -> Iterator[tuple[int, ...]]:
        """The ids of bad words, as in vLLM: each word as it begins a text, and after a space where that gives
        another token.
        """
        if sum(map(len, words)) > MAX_BAD:
            raise bad_request("bad_words", f"may have at most {MAX_BAD} characters together")
        for i, word in enumerate(words):
            first, spaced = (self._tokenizer.encode(before + word.lstrip(), "parse") for before in ("", " "))
            if not first or not word.strip():
                raise bad_request(f"bad_words[{i}]", "has no letters; leave it out")
            yield tuple(first)
            if spaced[0] != first[0] and len(spaced) == len(first):
                yield tuple(spaced)

    def _grammar(self, asked: Format | None, calls: Calls | None) -> str:
        """The grammar of an answer, "" for none."""
        if asked is None and calls is None:
            return ""
        if asked and calls and asked.kind != "json":
            raise bad_request(asked.path, "cannot be combined with tools; set tool_choice to 'none'")
        written = msgspec.json.encode((asked, calls))
        path = asked.path if asked else "tools"
        if len(written) > MAX_ASKED:
            raise bad_request(path, f"too large: has {len(written)} bytes, and may have {MAX_ASKED}")
        namespace, key = asking().namespace, hashlib.sha256(written).digest()
        text = self._kept.get(namespace, key)
        if text is None:
            if in_event_loop() or not compiles.get():
                raise NewGrammar
            try:
                text = self._build(asked, calls)
            except GrammarError as error:
                raise bad_request(error.path or "tools", error.message) from None
            except RecursionError:
                raise bad_request(path, "nested too deeply") from None
            self._kept.put(namespace, key, text)
        return text

    def _build(self, asked: Format | None, calls: Calls | None) -> str:
        """Raises GrammarError."""
        if asked and asked.kind == "grammar":
            return _own_grammar(asked)
        text = self._text(asked, calls, checked=False)
        if grammar.error_of(text):  # seldom, so only now what it is
            text = self._text(asked, calls, checked=True)
            if message := grammar.error_of(text):
                raise GrammarError("tools" if calls else asked.path if asked else "", message)
        return text

    def _text(self, asked: Format | None, calls: Calls | None, checked: bool) -> str:
        rules: list[str] = []
        starts = []
        if asked and not (calls and calls.must):
            rules += self._tags(asked, checked) if asked.kind == "tag" else [f"format: {_format(asked, checked)}"]
            starts.append("format")
        if calls:
            built = self._calls(calls, checked)
            some = built.call if calls.most else f'{built.call} ("\\n" {built.call})*'
            starts.append(some if asked or calls.must else f"{built.text()} ({some})?")
            rules += built.rules
        return "\n".join([f"start: {' | '.join(starts)}", *rules])

    def _tags(self, asked: Format, checked: bool) -> list[str]:
        """The rules of a StructuralTag. Raises GrammarError."""
        tag: StructuralTag = asked.value
        excluded = "|".join(map(re.escape, tag.triggers))
        known = re.compile("|".join(map(re.escape, self._tokenizer.markers)) or "(?!)")
        bodies: dict[str, list[str]] = {}
        for i, part in enumerate(tag.structures):
            path = f"{asked.path}.structures[{i}]"
            triggers = [trigger for trigger in dict.fromkeys(tag.triggers) if part.begin.startswith(trigger)]
            if len(triggers) != 1:
                raise GrammarError(f"{path}.begin", "expected to begin with one of the triggers, and with no other")
            try:
                schema = clean(part.schema)
                if checked:
                    grammar.check_schema(schema, grammar.PRETTY)
                inner = grammar.json_rule(schema, grammar.PRETTY)
            except GrammarError as error:
                raise GrammarError(f"{path}.schema{error.path}", error.message) from None
            rest = self._literal(part.begin.removeprefix(triggers[0]), known)
            bodies.setdefault(triggers[0], []).append(f"{rest} {inner} {self._literal(part.end, known)}")
        if unused := [trigger for trigger in tag.triggers if trigger not in bodies]:
            raise GrammarError(f"{asked.path}.triggers", f"no structure begins with {unused[0]!r}")
        rules = [f"TEXT: /(?s:.*)/ & ~/{llguidance.regex_to_lark(f'(?s:.*)({excluded})(?s:.*)', 'd')}/"]
        for i, (trigger, some) in enumerate(bodies.items()):
            marker = known.search(trigger)
            if marker and marker.start():
                raise GrammarError(f"{asked.path}.triggers", f"{marker[0]} must be where {trigger!r} begins")
            head = f"TEXT {self._literal(trigger, known)}" if marker else f"head{i}"
            rules += [] if marker else [f"HEAD{i}: TEXT {grammar.quoted(trigger)}", f"head{i}[lazy]: HEAD{i}"]
            rules += [f"body{i}_{j}: {body}" for j, body in enumerate(some)]
            rules.append(f"tag{i}: {head} ({' | '.join(f'body{i}_{j}' for j in range(len(some)))})")
        return [f"format: ({' | '.join(f'tag{i}' for i in range(len(bodies)))})* TEXT", *rules]

    def _literal(self, text: str, known: re.Pattern[str]) -> str:
        """A text in a rule; what a model writes as one token (`<tool_call>`) is that."""
        parts, end = [], 0
        for found in known.finditer(text):
            parts += [grammar.quoted(text[end : found.start()])] * (found.start() > end)
            parts.append(f"<[{self._tokenizer.markers[found[0]]}]>")
            end = found.end()
        return " ".join([*parts, *[grammar.quoted(text[end:])] * (len(text) > end)])

    def _calls(self, calls: Calls, checked: bool) -> grammar.Calls:
        if self._form is None or not self._token("<tool_call>") or not self._token("</tool_call>"):
            raise GrammarError("tool_choice", "this model has no form of a tool call that can be constrained")
        tools = [
            grammar.Tool(
                tool.name,
                tool.parameters,
                bool(tool.strict),
                f"{path}.parameters",
                _text_grammar(tool.grammar) if tool.grammar else "",
            )
            for path, tool in calls.tools
        ]
        return grammar.Calls(self._form, tools, self._token, checked)

    def _token(self, name: str) -> str:
        ids = self._tokenizer.encode(name, "parse")
        return f"<[{ids[0]}]>" if len(ids) == 1 else ""


def is_fixed(chat: protocol.ChatRequest) -> bool:
    """Whether a grammar makes all that is behind the thought: a format, or calls that are to come.

    Raises ApiError (400).
    """
    if asked_format(chat) is not None:
        return True
    calls = calls_of(chat.tools, chat.tool_choice)
    return calls is not None and calls.must


def asked_format(request: protocol.Sampling) -> Format | None:
    """The answer's form; None for free text. Raises ApiError (400)."""
    found = [*_response_format(request.response_format), *_structured(request)]
    for other in found[1:]:
        if (other.kind, other.value) != (found[0].kind, found[0].value):
            path = re.sub(r"^(response_format).*", r"\1", found[0].path)
            raise bad_request(other.path, f"excludes {path}; give one of the two")
    return found[0] if found else None


def _response_format(value: Any) -> Iterator[Format]:
    if value is None:
        return
    if isinstance(value, dict) and value.get("type") == "structural_tag":
        yield Format("response_format", "tag", decode.convert(value, StructuralTag, "response_format"))
        return
    asked = decode.convert(value, ResponseFormat, "response_format")
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        said = "is missing" if asked.json_schema is None else "belongs to the type json_schema only"
        raise bad_request("response_format.json_schema", said)
    if asked.schema is not None and asked.type != "json_object":
        raise bad_request("response_format.schema", "belongs to the type json_object")
    if asked.json_schema is not None:
        schema = asked.json_schema.schema
        yield Format("response_format.json_schema.schema", "json", ANY if schema is None else schema)
    elif asked.type == "json_object":
        path = "response_format" if asked.schema is None else "response_format.schema"
        yield Format(path, "json", ANY if asked.schema is None else asked.schema)


def _structured(request: protocol.Sampling) -> Iterator[Format]:
    given = {f"guided_{kind}": getattr(request, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
    given |= {name: getattr(request, name) or None for name in ("grammar", "ebnf", "regex")}
    given["json_schema"] = request.json_schema
    if request.structured_outputs is not None:
        asked = decode.convert(request.structured_outputs, StructuredOutputs, "structured_outputs")
        given |= {f"structured_outputs.{name}": getattr(asked, name) for name in asked.__struct_fields__}
    for path, value in given.items():
        if value is None or value is False:
            continue
        kind = re.split("[_.]", path)[-1]
        kind = {"ebnf": "grammar", "schema": "json"}.get(kind, kind)
        if kind == "object":
            kind, value = "json", ANY
        if kind in ("json", "tag") and isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise bad_request(path, f"is not valid JSON: {error}") from None
        if kind == "tag":
            value = decode.convert(value, StructuralTag, path)
        yield Format(path, kind, value)


def _format(asked: Format, checked: bool) -> str:
    """The body of the rule. checked: compiled by itself. Raises GrammarError."""
    try:
        if asked.kind == "json":
            schema = clean(asked.value)
            if checked:
                grammar.check_schema(schema, grammar.PRETTY)
            return grammar.json_rule(schema, grammar.PRETTY)
        if asked.kind == "choice":
            if not asked.value or not all(asked.value):
                raise GrammarError("", "expected texts to choose from, none of them empty")
            # A regular expression: the parser has a limit for rules side by side.
            pattern = llguidance.regex_to_lark("|".join(map(re.escape, asked.value)), "d")
            if checked and (message := grammar.error_of(f"start: /{pattern}/")):
                raise GrammarError("", message)
            return f"/{pattern}/"
        if len(asked.value) > MAX_PATTERN:
            raise GrammarError("", f"may have at most {MAX_PATTERN} characters")
        if not asked.value:
            raise GrammarError("", "is empty")
        body = f"/{llguidance.regex_to_lark(asked.value, 'd')}/"
        if checked and (message := grammar.error_of(f"start: {body}")):
            raise GrammarError("", message)
        return body
    except GrammarError as error:
        raise GrammarError(asked.path + error.path, error.message) from None


def _own_grammar(asked: Format) -> str:
    """A request's own grammar, in Lark's form or llama.cpp's, as Lark. Raises GrammarError."""
    if len(asked.value) > MAX_OWN_GRAMMAR:
        raise GrammarError(asked.path, f"may have at most {MAX_OWN_GRAMMAR} characters")
    is_lark = is_lark_syntax(asked.value)
    if not is_lark and "::=" not in asked.value:
        raise GrammarError(asked.path, "is neither Lark, which has a rule `start:`, nor GBNF, which has `root ::=`")
    try:
        text = any_to_lark(asked.value)
    except Exception as error:  # the library's own kind, and RecursionError
        raise GrammarError(asked.path, f"cannot be read as GBNF: {error}") from None
    if found := _NOT_OURS.search(text):
        raise GrammarError(asked.path, f"not supported: {found.group()}")
    _check_size(asked.path, text)
    if message := grammar.error_of(text, own=False):
        raise GrammarError(asked.path, message if is_lark else f"written as Lark: {message}")
    return str(text)


_ACROSS_LINES = re.compile(r"\(\?[a-z]*s|\[\^(?![^\]]*\\n)|\\[sWD]")
"""In a terminal, what takes any line break, and so the end of the parameter, too."""


def _text_grammar(given: ToolGrammar) -> str:
    """A tool's grammar as Lark, "" for one that cannot be enforced within a call."""
    text = given.definition
    try:
        if given.syntax == "regex":
            if len(text) > MAX_PATTERN:
                return ""
            text = f"start: /{llguidance.regex_to_lark(text, 'd')}/"
        if _ACROSS_LINES.search(text):
            return ""
        return _own_grammar(Format("", "grammar", text))
    except Exception:  # the library's own kinds for what is no regular expression, too
        return ""


def _check_size(path: str, text: str) -> None:
    """Raises GrammarError for terminals that are long when written out: the time to compile one is the square
    of that.
    """
    bodies: dict[str, str] = dict(_TERMINAL.findall(text))
    known: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in known:
            body = bodies.get(name, "")
            known[name] = MAX_PATTERN + 1  # of one that holds itself
            known[name] = len(body) + sum(map(size, _NAME.findall(body)))
        return known[name]

    for name in bodies:
        if size(name) > MAX_PATTERN:
            raise GrammarError(path, f"{name}, written out, may have at most {MAX_PATTERN} characters")
    if sum(known.values()) > MAX_OWN_GRAMMAR:
        raise GrammarError(path, f"its terminals, written out, may have at most {MAX_OWN_GRAMMAR} characters")


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
