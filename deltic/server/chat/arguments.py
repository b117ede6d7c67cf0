"""A call's arguments: what models write between Hermes' tags, and the text of a function form's parameter, as
JSON.

The reading is lenient where it is clear what was meant, and gives nothing back where it is not.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from functools import partial

import jiter
import msgspec

from deltic.json_types import JsonObject

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
"""Names that a tool may have."""


def is_whole(text: str) -> bool:
    """Returns whether JSON text of a call's arguments has its end: a stop string or a limit may cut it."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def given_arguments(text: str) -> JsonObject | None:
    """Arguments that a client gives back in the history; of a call that was cut short, as far as they go.

    None: no JSON object.
    """
    if not text.strip():
        return {}
    try:
        # The same decoder as the body's: no lone surrogate gets through.
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        try:
            value = jiter.from_json(text.encode())
        except ValueError as error:
            if not str(error).startswith("EOF"):
                return None
            value = jiter.from_json(text.encode(), partial_mode="trailing-strings")
    return value if isinstance(value, dict) else None


def given_text(arguments: str) -> str:
    """Text of a call of a custom tool, in JSON text of its arguments as the model's function has them; of
    one that was cut short, as far as it goes.
    """
    text = (given_arguments(arguments) or {}).get("input", arguments)
    return text if isinstance(text, str) else arguments


def read_calls(body: str, name: str | None, complete: bool) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON text) of what is between Hermes' tags, None for what is not calls.

    name: of the function that `body` is the arguments of. complete: the text was not cut.
    """
    calls = []
    for value in _read_objects(body, complete) or ():
        value = {"name": name, "arguments": value} if name is not None else value
        call = value["function"] if isinstance(value.get("function"), dict) else value
        called, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            read = _read_objects(arguments, complete=False) if arguments.strip() else [{}]
            arguments = read[0] if read else 0
        if arguments is None and call.keys() - _ABOUT_CALLS:
            return None  # they would be lost
        if not isinstance(called, str) or not NAME.fullmatch(called) or not isinstance(arguments, dict | None):
            return None
        calls.append((called, to_json(arguments or {})))
    return calls


_ABOUT_CALLS = frozenset({"name", "type", "id", "arguments", "parameters"})


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_LARGEST = sys.float_info.max
_MOST_DIGITS = 300
"""Characters up to which a whole number is read as it is."""


def _finite(text: str) -> float:
    return min(max(float(text), -_LARGEST), _LARGEST)


def _whole(text: str) -> float:
    return int(text) if len(text) <= _MOST_DIGITS else _finite(text)


_decoder = partial(json.JSONDecoder, parse_float=_finite, parse_int=_whole, parse_constant=_refuse)
"""Decoder that takes a number too large for any client (`8E47366`) for the largest there is."""
_LENIENT, _STRICT = _decoder(strict=False), _decoder()
_BETWEEN_OBJECTS = re.compile(r"[\s,\[\]}]*")


def _read_objects(body: str, complete: bool) -> list[JsonObject] | None:
    """Reads one JSON object, a list, or several objects; None for what is neither.

    Strings may have newlines in them, brackets may be too many or, in a text that is complete, too few; and
    there may be what Python writes for JSON.
    """
    try:
        value = msgspec.json.decode(body)
        values = value if isinstance(value, list) else [value]
        return values if all(isinstance(value, dict) for value in values) else None
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    plain = _PYTHON.sub(_as_json, body)
    for missing in ("", "}", "}}") if complete else ("",):
        text, at, values = plain + missing, 0, []
        try:
            while (at := _skip(text, at)) < len(text):
                value, at = _LENIENT.raw_decode(text, at)
                values.append(value)
            to_json(values).encode()  # raises for a lone surrogate, which nobody could send
        except (ValueError, RecursionError):
            continue
        return values if all(isinstance(value, dict) for value in values) else None
    return None


_PYTHON = re.compile(
    r""""[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'|\\.|\b(?:True|False|None)\b|,(?=\s*[}\]])""", re.DOTALL
)
_JSON_OF = {"True": "true", "False": "false", "None": "null", ",": ""}


def _as_json(match: re.Match[str]) -> str:
    """A string, a word of Python's, or a comma before a bracket, as JSON has it."""
    text = match[0]
    if not text.startswith("'"):
        return _JSON_OF.get(text, text)
    return '"' + re.sub(r"(?s)\\.|\"", lambda quote: {"\\'": "'", '"': '\\"'}.get(quote[0], quote[0]), text[1:-1]) + '"'


def _skip(text: str, at: int) -> int:
    match = _BETWEEN_OBJECTS.match(text, at)
    assert match
    return match.end()


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# Values of the function form, which are text, by the tool's schema.


def schema_of(key: str, schema: JsonObject) -> object:
    """The schema of a tool's parameter."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def value_types(schema: object, root: JsonObject) -> set[str]:
    """The JSON types that a schema allows, through `$ref` and unions; empty when it does not say."""
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        declared = part.get("type")
        declared = declared if isinstance(declared, list) else [declared]
        named = {kind for kind in declared if isinstance(kind, str)}
        choices = part.get("enum", [part["const"]] if "const" in part else None)
        if not named and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            named = {"string"}
        types |= named
        waiting += [entry for union in _UNIONS if isinstance(part.get(union), list) for entry in part[union]]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: object = root
            for name in reference[2:].split("/"):
                name = name.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            waiting.append(target)
    return types


_UNIONS = ("anyOf", "oneOf", "allOf")


def convert(raw: str, schema: object, root: JsonObject) -> object:
    """A parameter's text as the value its schema asks for; text that does not fit stays a string.

    Scalars come as Python or as JSON writes them: `True` and `true`, `None` and `null`; so do objects and
    arrays where the schema asks for them. A number in quotes is a number where no string is allowed.
    """
    types = value_types(schema, root)
    if types == {"string"}:
        return raw
    text = raw.strip()
    if text in ("None", "null"):
        return None if not types or "null" in types or "string" not in types else raw
    if types and types <= {"string", "null"}:
        return raw
    if text.lower() in ("true", "false") and (not types or "boolean" in types):
        return text.lower() == "true"
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        value = _large(text)
        if value is None:
            value = _python(text) if types & {"object", "array"} and text.startswith(("{", "[")) else raw
    if isinstance(value, str):
        inner = convert(value, schema, root) if types and "string" not in types and value != raw else value
        return raw if isinstance(inner, str) else inner
    if types and not any(_is(value, kind) for kind in types):
        return raw
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return int(value)
    return value


def _large(text: str) -> object:
    """The value of JSON that has a number too large for most decoders; None for what is no number, object or
    array.
    """
    if not text.startswith(tuple("-0123456789[{")):
        return None
    try:
        value = _STRICT.decode(text)
        to_json(value).encode()
    except (ValueError, RecursionError):
        return None
    return value


_MAX_LITERAL = 20_000
"""Characters; Python takes some microseconds for one."""


def _python(text: str) -> object:
    """The value of a Python literal (`{'a': None}`).

    The text of what is none, has no JSON, or is long to read.
    """
    if len(text) > _MAX_LITERAL:
        return text
    try:
        value = ast.literal_eval(text)
        to_json(value).encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind == "number":
        return isinstance(value, int | float)
    return {dict: "object", list: "array", type(None): "null"}.get(type(value)) == kind
