"""The engine's Constraint, made of the answer's form and the calls that a Chat asks for.

A grammar begins behind the thought, which may have a budget. With tools that may be called beside a JSON
format, the answer is the JSON or calls. Arguments follow the tool's schema wherever a call is constrained;
where that cannot be a grammar, those of a tool that is not strict are any, and a strict one is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from deltic.engine.messages import Constraint
from deltic.engine.turns import NamespaceShares
from deltic.server.chat import grammar
from deltic.server.chat.grammar import CallForm
from deltic.server.chat.request import Calls, Chat, Form, Sampling, StructuralTag, Tool, ToolGrammar
from deltic.server.chat.schema import MAX_PATTERN, GrammarError, clean
from deltic.server.errors import bad_request
from deltic.server.limits import asking
from deltic.text import Tokenizer

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
"""True where new grammars may be compiled, outside the event loop."""


class Constrainer:
    """Requests to constraints, for one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, form: CallForm | None) -> None:
        """form: of tool calls, in the model's chat template; None: it shows none that is known."""
        self._tokenizer = tokenizer
        self._form = form
        self._kept = NamespaceShares[str](N_KEPT)  # by hash of what was asked
        threading.stack_size(max(threading.stack_size(), grammar.STACK_BYTES))  # of threads begun from now on

    def chat_grammar(self, chat: Chat) -> str:
        """The grammar of a chat's answer, "" for none. Raises ApiError (400), NotInline."""
        asked, calls = chat.sampling.form, chat.calls
        if calls and not (asked or calls.must or calls.most or any(map(self._holds, calls.tools))):
            calls = None
        if chat.continue_final_message and (asked or (calls and calls.must)):
            raise bad_request("continue_final_message", "an answer whose form is fixed cannot begin in the request")
        return self._grammar(asked, calls)

    def chat(self, chat: Chat, text: str, thinking: bool) -> Constraint | None:
        """text: its `chat_grammar`; thinking: the prompt opened a thought. Raises ApiError (400)."""
        return self._with_words(self._formed(chat, text, thinking), chat.sampling)

    def _holds(self, tool: Tool) -> bool:
        """Returns whether a tool's calls are held to its schema or grammar, though none has to come."""
        takes_grammar = tool.function.grammar and self._form == "xml" and self._token("<tool_call>")
        return bool(tool.function.strict or takes_grammar)

    def _formed(self, chat: Chat, text: str, thinking: bool) -> Constraint | None:
        """text: the grammar. Raises ApiError (400)."""
        budget = chat.thinking_budget
        if not thinking or (budget is None and not text):
            return Constraint(grammar=text) if text else None
        end = self._tokenizer.encode("</think>", "parse")
        if len(end) != 1:
            asked = chat.sampling.form
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

    def completion(self, sampling: Sampling) -> Constraint | None:
        """Raises ApiError (400), NotInline."""
        text = self._grammar(sampling.form, None)
        return self._with_words(Constraint(grammar=text) if text else None, sampling)

    def _with_words(self, constraint: Constraint | None, sampling: Sampling) -> Constraint | None:
        """The constraint with what may and what may not be drawn anywhere. Raises ApiError (400)."""
        allowed, bad = sampling.allowed_token_ids, sampling.bad_words
        if allowed is not None and not allowed:
            raise bad_request("allowed_token_ids", "is empty, and an answer needs at least one. Leave it out.")
        if not allowed and not bad:
            return constraint
        bits = bytearray(max(allowed) // 8 + 1 if allowed else 0)
        for id in allowed or ():
            bits[id // 8] |= 1 << id % 8
        return msgspec.structs.replace(
            constraint or Constraint(), allowed=bytes(bits), bad_ids=tuple(self._bad_ids(bad))
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
                raise bad_request(f"bad_words[{i}]", "has no letters. Leave it out.")
            yield tuple(first)
            if spaced[0] != first[0] and len(spaced) == len(first):
                yield tuple(spaced)

    def _grammar(self, asked: Form | None, calls: Calls | None) -> str:
        """The grammar of an answer, "" for none."""
        if asked is None and calls is None:
            return ""
        if asked and calls and asked.kind != "json":
            raise bad_request(asked.path, "cannot be combined with tools. Set tool_choice to 'none'.")
        called = [(tool.path, tool.function) for tool in calls.tools] if calls else []
        written = msgspec.json.encode((asked, called, calls and (calls.must, calls.most)))
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

    def _build(self, asked: Form | None, calls: Calls | None) -> str:
        """Raises GrammarError."""
        if asked and asked.kind == "grammar":
            return _own_grammar(asked)
        text = self._text(asked, calls, checked=False)
        if grammar.error_of(text):  # seldom, so only now what it is
            text = self._text(asked, calls, checked=True)
            if message := grammar.error_of(text):
                raise GrammarError("tools" if calls else asked.path if asked else "", message)
        return text

    def _text(self, asked: Form | None, calls: Calls | None, checked: bool) -> str:
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

    def _tags(self, asked: Form, checked: bool) -> list[str]:
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
        for match in known.finditer(text):
            parts += [grammar.quoted(text[end : match.start()])] * (match.start() > end)
            parts.append(f"<[{self._tokenizer.markers[match[0]]}]>")
            end = match.end()
        return " ".join([*parts, *[grammar.quoted(text[end:])] * (len(text) > end)])

    def _calls(self, calls: Calls, checked: bool) -> grammar.CallRules:
        if self._form is None or not self._token("<tool_call>") or not self._token("</tool_call>"):
            raise GrammarError("tool_choice", "this model has no form of a tool call that can be constrained")
        tools = []
        for tool in calls.tools:
            asked = tool.function
            lark = _text_grammar(asked.grammar) if asked.grammar else ""
            tools.append(grammar.GrammarTool(asked.name, asked.parameters, asked.strict, tool.schema_path, lark))
        return grammar.CallRules(self._form, tools, self._token, checked)

    def _token(self, name: str) -> str:
        ids = self._tokenizer.encode(name, "parse")
        return f"<[{ids[0]}]>" if len(ids) == 1 else ""


def _format(asked: Form, checked: bool) -> str:
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


def _own_grammar(asked: Form) -> str:
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
    if match := _NOT_OURS.search(text):
        raise GrammarError(asked.path, f"not supported: {match.group()}")
    _check_size(asked.path, text)
    if message := grammar.error_of(text, own=False):
        raise GrammarError(asked.path, message if is_lark else f"written as Lark: {message}")
    return str(text)


_ACROSS_LINES = re.compile(r"\(\?[a-z]*s|\[\^(?![^\]]*\\n)|\\[sWD]")
"""Expressions of a terminal that take any line break, and so the end of the parameter, too."""


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
        return _own_grammar(Form("", "", "grammar", text))
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
