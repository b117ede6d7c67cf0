r"""Chat on the way out: a stream of text split into reasoning, content and tool calls.

The result does not depend on how the text is cut. Nothing is lost: what looks like a call and turns out not to be one
comes out as content. White space next to the markers belongs to the format and is dropped.

Forms understood: `<think>…</think>` first (or opened by the prompt); then, when the request has tools,

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>    (Qwen3.5, Coder)
    <tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>                                       (Hermes; Next)

The first is streamed: its name when the first parameter shows that it is a call, string values as they come, others
when complete, converted by the tool's JSON schema. `</parameter>`, `</function>`, `<tool_call>` may be missing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from deltic.text import held_back

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_OUTSIDE_STRING = re.compile(r'[^"<\\]*')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_CALL_OPENERS = ("<tool_call>", "<function=")
_CALL_OPENER = re.compile("|".join(_CALL_OPENERS))
_CALL_END = "</tool_call>"
_AFTER_NAME = ("<parameter=", "</function>")
_IN_FUNCTION = ("<parameter=", "</function>", "</tool_call>", *_CALL_OPENERS)
_VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>", "\n</tool_call>")
_MAX_VALUE_END = max(map(len, _VALUE_ENDS))
_MAX_TAG = 300
"""Characters that an unfinished `<function=…` or `<parameter=…` tag may have before it is taken for text."""


class CallDelta(msgspec.Struct):
    """A piece of a tool call: id and name with its first piece, JSON text of the arguments in all."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct):
    """What some text added to the message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add(self, other: Delta) -> None:
        self.reasoning += other.reasoning
        self.content += other.content
        for call in other.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """The parser of one sequence's answer. `push` text, then `finish` once; each returns what became certain."""

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """thinking: the prompt opened `<think>`. tools: name to JSON schema of the arguments; None: no calls."""
        self._tools = tools
        self._call_id = call_id
        self._text = ""
        self._final = False
        self._truncated = False
        self._advance: Callable[[], bool] = self._reasoning_start if thinking else self._opening
        self._delta = Delta()
        self.n_calls = 0
        self.is_call_open = False
        """Whether the answer was cut inside a call, which has arguments that are not complete."""
        self._gap = ""  # white space before a candidate call
        self._scanned = 0  # part of a JSON candidate, or of a value, known not to end it
        self._in_string = False  # what `_scanned` ends in
        self._schema: Mapping[str, Any] = {}
        self._n_arguments = 0
        self._value_schema: Any = None
        self._streams_value = False
        self._value_begun = False

    @property
    def in_reasoning(self) -> bool:
        return self._advance in (self._reasoning, self._reasoning_start)

    def push(self, text: str) -> Delta:
        self._text += text
        while self._advance():
            pass
        delta, self._delta = self._delta, Delta()
        return delta

    def finish(self, truncated: bool = False) -> Delta:
        """truncated: something else than the model ended the answer, so an open call stays open."""
        self._final = True
        self._truncated = truncated
        return self.push("")

    # Each state consumes from `_text` and returns whether to go on (True: another state, or more of the same).

    def _to(self, state: Callable[[], bool], consumed: int) -> bool:
        self._text = self._text[consumed:]
        self._advance = state
        return True

    def _opening(self) -> bool:
        text = self._text.lstrip()
        if text.startswith("<think>"):
            self._text = text
            return self._to(self._reasoning_start, len("<think>"))
        if not self._final and "<think>".startswith(text):
            return False
        return self._to(self._content, 0)

    def _reasoning_start(self) -> bool:
        self._text = self._text.lstrip("\n")
        return bool(self._text) and self._to(self._reasoning, 0)

    def _reasoning(self) -> bool:
        end = self._text.find("</think>")
        if end >= 0:
            self._delta.reasoning += self._text[:end].rstrip("\n")
            return self._to(self._after_reasoning, end + len("</think>"))
        if self._final:
            self._delta.reasoning += self._text
            self._text = ""
            return False
        shown = self._text[: len(self._text) - held_back(self._text, "</think>")].rstrip("\n")
        self._delta.reasoning += shown
        self._text = self._text[len(shown) :]
        return False

    def _after_reasoning(self) -> bool:
        self._text = self._text.lstrip("\n")
        return bool(self._text) and self._to(self._content, 0)

    def _content(self) -> bool:
        if self._tools is None:
            self._delta.content += self._text
            self._text = ""
            return False
        opener = _CALL_OPENER.search(self._text)
        if opener:
            at = opener.start()
            shown = self._text[:at].rstrip()
            self._delta.content += shown
            self._gap = self._text[len(shown) : at]
            return self._to(self._call, at)
        if self._final:
            if self._text.strip() or not self.n_calls:
                self._delta.content += self._text
            self._text = ""
            return False
        n_held = max(held_back(self._text, opener) for opener in _CALL_OPENERS)
        shown = self._text[: len(self._text) - n_held].rstrip()
        self._delta.content += shown
        self._text = self._text[len(shown) :]
        return False

    def _call(self) -> bool:
        """`_text` starts with a call's opener: decide which form it has, or that it is none."""
        text = self._text.removeprefix("<tool_call>").lstrip()
        if text.startswith("{"):
            self._scanned = len(self._text) - len(text)
            self._in_string = False
            return self._to(self._json_call, 0)
        if not text.startswith("<function="):
            return self._wait_or_reject("<function=".startswith(text))
        end = text.find(">")
        if end < 0:
            return self._wait_or_reject(len(text) < _MAX_TAG and "\n" not in text)
        name = text[len("<function=") : end].strip()
        body = text[end + 1 :].lstrip()
        if not _NAME.fullmatch(name):
            return self._reject()
        if not body.startswith(_AFTER_NAME):
            return self._wait_or_reject(any(tag.startswith(body) for tag in _AFTER_NAME))
        self._open_call(name)
        return self._to(self._function, len(self._text) - len(body))

    def _wait_or_reject(self, possible: bool) -> bool:
        return False if possible and not self._final else self._reject()

    def _reject(self) -> bool:
        """Not a call: its opener is content, and what follows is looked at afresh."""
        opener = next(opener for opener in _CALL_OPENERS if self._text.startswith(opener))
        self._delta.content += self._gap + opener
        return self._to(self._content, len(opener))

    def _open_call(self, name: str, arguments: str = "") -> None:
        assert self._tools is not None
        self._schema = self._tools.get(name, {})
        self._n_arguments = 0
        self._delta.calls.append(CallDelta(self.n_calls, self._call_id(), name, arguments))
        self.n_calls += 1

    def _argue(self, text: str) -> None:
        """Adds JSON text to the open call's arguments."""
        calls = self._delta.calls
        if calls and calls[-1].index == self.n_calls - 1:
            calls[-1].arguments += text
        else:
            calls.append(CallDelta(self.n_calls - 1, arguments=text))

    def _json_call(self) -> bool:
        """Up to `</tool_call>` outside of JSON's strings, or to what JSON does not have there.

        Reads each character once for a candidate. Of two candidates one is inside a string where the other is not,
        and what opens the next (`<`) rejects the latter: so all candidates together cost no more than the text is long.
        """
        text = self._text
        while True:
            scan = _IN_STRING if self._in_string else _OUTSIDE_STRING
            found = scan.match(text, self._scanned)
            assert found
            at = self._scanned = found.end()
            if not text.startswith('"', at):
                break
            self._in_string = not self._in_string
            self._scanned += 1
        rest = "" if self._in_string else text[at : at + len(_CALL_END)]
        if rest != _CALL_END and _CALL_END.startswith(rest):  # it may still come
            if not self._final:
                return False
            rest, at = "", len(text)
        call = _read_call(text[len("<tool_call>") : at]) if rest in ("", _CALL_END) else None
        if call is None:
            return self._reject()
        self._open_call(*call)
        return self._to(self._content, at + len(rest))

    def _function(self) -> bool:
        """Between the parameters of a call."""
        text = self._text = self._text.lstrip()
        tag = next((tag for tag in _IN_FUNCTION if text.startswith(tag)), None)
        if tag == "<parameter=":
            end = text.find(">")
            if 0 <= end <= _MAX_TAG:
                return self._open_value(text[len(tag) : end].strip(), end + 1)
            if len(text) <= _MAX_TAG and not self._final:
                return False
            tag = None
        if tag == "</function>":
            self._close_call()
            return self._to(self._closing, len(tag))
        if tag is not None:
            self._close_call()
            return self._to(self._content, len(tag) if tag == "</tool_call>" else 0)
        if not self._final and any(tag.startswith(text) for tag in _IN_FUNCTION):
            return False
        if not text:
            self._end_call()
            return False
        self._delta.content += text[0]
        return self._to(self._junk, 1)

    def _junk(self) -> bool:
        """Text inside a call that belongs to no parameter: content, up to the next tag."""
        end = self._text.find("<")
        junk = self._text if end < 0 else self._text[:end]
        self._delta.content += junk
        if end < 0 and not self._final:
            self._text = ""
            return False
        return self._to(self._function, len(junk))

    def _open_value(self, key: str, consumed: int) -> bool:
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._value_schema = schema
        self._streams_value = value_types(schema, self._schema) == {"string"}
        self._value_begun = False
        self._scanned = 0
        prefix = ", " if self._n_arguments else "{"
        self._argue(f"{prefix}{_json(key)}: " + ('"' if self._streams_value else ""))
        self._n_arguments += 1
        return self._to(self._value, consumed)

    def _value(self) -> bool:
        at, end = _earliest(self._text, _VALUE_ENDS, max(0, self._scanned - _MAX_VALUE_END))
        if at >= 0:
            self._end_value(self._text[:at], closed=True)
            return self._to(self._function, at + (len(end) if end.endswith("</parameter>") else 1))
        n_shown = len(self._text) - max(held_back(self._text, end) for end in _VALUE_ENDS)
        if self._final:
            self._end_value(self._text[:n_shown], closed=not self._truncated)
            self._end_call()
            self._advance, self._text = self._content, ""
        elif self._streams_value:
            self._argue(_json(self._begin_value(self._text[:n_shown]))[1:-1])
            self._text = self._text[n_shown:]
        else:
            self._scanned = len(self._text)
        return False

    def _end_value(self, text: str, closed: bool) -> None:
        raw = self._begin_value(text)
        if self._streams_value:
            self._argue(_json(raw)[1:-1] + ('"' if closed else ""))
        else:
            self._argue(_json(convert(raw, self._value_schema, self._schema)) if closed else raw)

    def _begin_value(self, text: str) -> str:
        """Drops the one newline that the format has before a value."""
        if text and not self._value_begun:
            self._value_begun = True
            return text.removeprefix("\n")
        return text

    def _close_call(self) -> None:
        self._argue("}" if self._n_arguments else "{}")

    def _end_call(self) -> None:
        """The answer ends inside a call: by the model, who may leave out the end, or by something else."""
        self.is_call_open = self._truncated
        if not self._truncated:
            self._close_call()

    def _closing(self) -> bool:
        text = self._text.lstrip()
        if text.startswith("</tool_call>"):
            return self._to(self._content, len(self._text) - len(text) + len("</tool_call>"))
        if "</tool_call>".startswith(text) and not self._final:
            return False
        return self._to(self._content, 0)


def _earliest(text: str, markers: tuple[str, ...], start: int) -> tuple[int, str]:
    """Position and name of the marker that comes first in `text[start:]`; (-1, "") when there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    return min(found, default=(-1, ""))


def _read_call(body: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a Hermes call, None for what is not one."""
    try:
        call = msgspec.json.decode(body)
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return name, _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def value_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, through `$ref` and unions; empty when it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return value_types(target, root, depth + 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types = {entry for entry in declared if isinstance(entry, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(union)
        for part in parts if isinstance(parts, list) else []:
            types |= value_types(part, root, depth + 1)
    if not types and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        return {"string"}
    return types


def convert(raw: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A parameter's text as the value its schema asks for; text that does not fit stays a string.

    Scalars come as Python or as JSON writes them: `True` and `true`, `None` and `null`.
    """
    types = value_types(schema, root)
    if types == {"string"}:
        return raw
    text = raw.strip()
    if text in ("None", "null"):
        return None if not types or "null" in types or "string" not in types else raw
    if types <= {"string", "null"} and types:
        return raw
    if text.lower() in ("true", "false") and (not types or "boolean" in types):
        return text.lower() == "true"
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return raw
    if isinstance(value, str) or (types and not any(_is(value, kind) for kind in types)):
        return raw
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return int(value)
    return value


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind == "number":
        return isinstance(value, int | float)
    return {dict: "object", list: "array", type(None): "null"}.get(type(value)) == kind
