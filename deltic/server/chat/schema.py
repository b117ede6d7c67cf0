"""JSON schemas of requests, before they become grammars: what is in them is enforced, or they are refused.

A schema is rebuilt from the keywords that the grammar engine enforces. Annotations are dropped, and a
`format` that it does not know is one, as in JSON Schema; any other keyword is an error, so that none is
passed over in silence. Properties keep their order: grammar.py makes it that of the answer's keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from deltic.json_types import JsonObject

Schema = JsonObject | bool

MAX_DEPTH = 40
"""Levels of schemas in schemas."""
MAX_LEVELS = 1000
"""Levels of schemas in schemas, with those that references lead to, each once: the engine follows them by
recursion, and each level takes up to 5 kB of its stack.
"""
MAX_MULTIPLE = 20_000
"""The most that multipleOf may be, in units of its last decimal place; of several, their least common
multiple: an automaton has a state for each remainder.
"""
MAX_LEAST = 65_536
"""The most that minLength and minItems may ask for: an answer has no room for more."""
MAX_OPTIONAL = 400
"""Optional properties of one object; the engine follows all that may come next side by side."""
MAX_PATTERN = 4096
"""Characters of a pattern."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANNOTATIONS = _words(
    "title description default examples example deprecated readOnly writeOnly $comment $schema $id discriminator "
    "contentEncoding contentMediaType contentSchema externalDocs markdownDescription enumDescriptions"
)
_FORMATS = _words("date-time time date duration email hostname ipv4 ipv6 uuid uri")
_SCHEMA = _words("items additionalProperties additionalItems")
_SCHEMA_LISTS = _words("anyOf oneOf allOf prefixItems")
_SCHEMA_MAPS = _words("properties patternProperties $defs definitions")
_LEAVES = _words(
    "type const enum required pattern format $ref minimum maximum exclusiveMinimum exclusiveMaximum multipleOf "
    "minLength maxLength minItems maxItems minProperties maxProperties"
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DEFS = ("$defs", "definitions")


class GrammarError(ValueError):
    """A schema that cannot be a grammar.

    path: where in the request, below the field that holds it (".properties.x").
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


def clean(schema: object) -> Schema:
    """The schema with nothing in it but what is enforced. Raises GrammarError."""
    cleaned = _clean(schema, "", 0)
    _check_levels(cleaned)
    return cleaned


def _check_levels(root: Schema) -> None:
    """Raises GrammarError for a schema whose references lead too deep, or with too large a multipleOf."""
    n_levels, seen = 0, {""}
    waiting: list[Schema | None] = [root]
    numerator, least, most = 1, 0, 1  # of the common multiple; its denominator, and that of all

    def depth(part: Schema) -> int:
        nonlocal numerator, least, most
        if isinstance(part, bool):
            return 1
        if "multipleOf" in part:
            value = Fraction(str(part["multipleOf"]))
            numerator = math.lcm(numerator, value.numerator)
            least, most = math.gcd(least, value.denominator), math.lcm(most, value.denominator)
            if numerator * most > MAX_MULTIPLE * least:
                raise GrammarError("", f"the least multiple of all multipleOf may be at most {MAX_MULTIPLE}")
        reference = part.get("$ref", "")
        if reference not in seen:
            seen.add(reference)
            waiting.append(target_of(reference, root))
        inside = {key: value for key, value in part.items() if key not in DEFS}
        return 1 + max((depth(below) for _, below in children(inside)), default=0)

    while waiting:
        part = waiting.pop()
        n_levels += MAX_DEPTH if part is None else depth(part)
        if n_levels > MAX_LEVELS:
            raise GrammarError("", f"may have at most {MAX_LEVELS} levels, together with all that references lead to")


def _clean(schema: object, path: str, depth: int) -> Schema:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(path, "expected a schema: an object, true or false")
    if depth > MAX_DEPTH:
        raise GrammarError(path, f"schemas may be nested at most {MAX_DEPTH} deep")
    kept: JsonObject = {}
    for key, value in schema.items():
        at = f"{path}.{key}"
        if (key in _SCHEMA_LISTS or key == "items") and isinstance(value, list) and value:
            kept[key] = [_clean(part, f"{at}[{i}]", depth + 1) for i, part in enumerate(value)]
        elif key in _SCHEMA:
            kept[key] = _clean(value, at, depth + 1)
        elif key in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise GrammarError(at, "expected an object")
            kept[key] = {name: _clean(part, f"{at}.{name}", depth + 1) for name, part in value.items()}
        elif key in _LEAVES:
            _check_leaf(key, value, at)
            if key != "format" or value in _FORMATS:
                kept[key] = value
        elif key in _SCHEMA_LISTS:
            raise GrammarError(at, "expected a list of schemas that is not empty")
        elif key not in _ANNOTATIONS and not key.startswith("x-"):
            raise GrammarError(at, "this keyword is not supported. Leave it out.")
        elif key == "$id" and depth:
            raise GrammarError(at, "only a whole schema may have an $id")
    required, properties = kept.get("required", []), kept.get("properties", {})
    if len(properties.keys() - set(required)) > MAX_OPTIONAL:
        raise GrammarError(f"{path}.properties", f"may have at most {MAX_OPTIONAL} that are not required")
    return kept


def _check_leaf(key: str, value: Any, at: str) -> None:
    if key == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise GrammarError(at, "expected a list of names")
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        if not all(isinstance(kind, str) for kind in kinds):
            raise GrammarError(at, "expected the name of a type, or a list of them")
        if odd := [kind for kind in kinds if kind not in _TYPES]:
            raise GrammarError(at, f"{odd[0]!r} is no type. Give one of {', '.join(_TYPES)}.")
    if key == "enum" and not (isinstance(value, list) and value):
        raise GrammarError(at, "expected a list of values that is not empty")
    if key in ("pattern", "format", "$ref") and not isinstance(value, str):
        raise GrammarError(at, "expected a string")
    if key == "pattern" and len(value) > MAX_PATTERN:
        raise GrammarError(at, f"may have at most {MAX_PATTERN} characters")
    if key == "multipleOf" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise GrammarError(at, "expected a number above 0")
    if key == "$ref" and not value.startswith("#"):
        raise GrammarError(at, "only references inside the schema are followed (#/$defs/NAME)")
    if key[:3] in ("min", "max") and key not in ("minimum", "maximum"):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise GrammarError(at, "expected a whole number from 0 on")
        if key.startswith("min") and value > MAX_LEAST:
            raise GrammarError(at, f"may be at most {MAX_LEAST}")
        if key == "minProperties" and value > 1:
            raise GrammarError(at, "may be at most 1. Name what must be there in required.")


def children(schema: JsonObject) -> Iterator[tuple[str, Schema]]:
    """Schemas inside a schema, with their paths below it: definitions first, since others fail with them."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in DEFS):
        if key in _SCHEMA_MAPS:
            yield from ((f".{key}.{name}", part) for name, part in value.items())
        elif (key in _SCHEMA_LISTS or key == "items") and isinstance(value, list):
            yield from ((f".{key}[{i}]", part) for i, part in enumerate(value))
        elif key in _SCHEMA:
            yield f".{key}", value


def target_of(reference: str, root: Schema) -> Schema | None:
    """The target of a reference made of plain names; None for any other."""
    target: object = root
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part) if isinstance(target, dict) else None
    return target if isinstance(target, dict | bool) else None
