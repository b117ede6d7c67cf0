"""Decoding of a body's JSON to a checked struct: what is forgiven, what is refused and how that is said.

Forgiven are null fields, at any depth, that a struct does not know, and at the top those whose value asks for
nothing (neutral.toml). msgspec says what is wrong with a value in a message; all that is read out of its
words stands in `fault_of`.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import msgspec

from deltic.json_types import JsonObject
from deltic.server.errors import UNKNOWN_FIELD, ApiError, bad_request

T = TypeVar("T")

NEUTRAL: dict[str, list[object]] = tomllib.loads(Path(__file__).with_name("neutral.toml").read_text())
"""Fields that are known and not supported, and their values, besides null, that ask for nothing."""

REFUSED: dict[str, JsonObject] = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())
"""Endpoints, and fields of other APIs than OpenAI's older ones, that are refused, and why."""

UNSUPPORTED = "not supported by this server. Leave it out."


class Fault(NamedTuple):
    """Fault that msgspec has found with a value."""

    kind: Literal["unknown", "missing", "only_false", "value"]
    """unknown, missing: the value has such a field, or lacks it; only_false: it is true, and may not be."""
    path: str
    """Path of the value, as `messages[0]`; "" for the whole."""
    field: str
    """Name of the field that is unknown or missing."""
    reason: str
    """Reason in msgspec's words."""


_PLACE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*?)`)?$", re.DOTALL)
_KINDS: tuple[tuple[Literal["unknown", "missing", "only_false"], re.Pattern[str]], ...] = (
    ("unknown", re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)),
    ("missing", re.compile(r"Object missing required field `(.*)`", re.DOTALL)),
    ("only_false", re.compile(r"Invalid enum value True()")),
)


def fault_of(error: msgspec.ValidationError) -> Fault:
    """Reads msgspec's message, which ends in the path of the value: ` - at `$.messages[0].role``."""
    match = _PLACE.match(str(error))
    reason, path = (match[1], match[2] or "") if match else (str(error), "")
    for kind, pattern in _KINDS:
        if named := pattern.fullmatch(reason):
            return Fault(kind, path, named[1], reason)
    return Fault("value", path, "", reason)


def parse(body: bytes, kind: type[T], note: Callable[[str], None] | None = None, path: str = "") -> T:
    """The JSON in a request's body as `kind`. note: takes the names of fields at its top that are not known,
    which are left out then. path: place of `body` in a larger one.

    Raises ApiError (400) naming the field at fault.
    """
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            value = msgspec.json.decode(body)
            if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                _drop_unasked(value, kind, note, path)
        try:
            return msgspec.json.decode(msgspec.json.encode(value), type=kind)
        except msgspec.ValidationError as error:
            kept: T = _without_null_fields(value, kind, path, error)
            return kept
    except msgspec.DecodeError as error:
        raise bad_request(path or None, f"the body is not valid JSON: {error}", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise bad_request(path or None, f"the body is not valid UTF-8: {error.reason}", "invalid_json") from None
    except RecursionError:
        raise bad_request(path or None, "the body is nested too deeply", "invalid_json") from None


@overload
def convert(value: object, kind: type[T], path: str, *, is_text: bool = ...) -> T: ...
@overload
def convert(value: object, kind: object, path: str, *, is_text: bool = ...) -> Any: ...
def convert(value: object, kind: object, path: str, *, is_text: bool = False) -> object:
    """A part of a request that was left as it is, as `kind`. is_text: numbers in it may be written as texts.

    Raises ApiError (400).
    """
    try:
        return msgspec.convert(value, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        return _without_null_fields(copy.deepcopy(value), kind, path, error)


def _drop_unasked(value: JsonObject, kind: type[msgspec.Struct], note: Callable[[str], None] | None, path: str) -> None:
    """Deletes fields that `kind` does not know and that ask for nothing, or, with `note`, whatever they ask
    for.

    Raises ApiError (400) for one of NEUTRAL that asks for something.
    """
    if not kind.__struct_config__.forbid_unknown_fields:
        return
    for name in [name for name in value if name not in kind.__struct_encode_fields__]:
        if value[name] is not None and value[name] not in NEUTRAL.get(name, ()):
            if note is None and name in NEUTRAL:
                place = f"{path}.{name}" if path else name
                raise bad_request(place, UNSUPPORTED, "unsupported_field")
            if note is None or name == kind.__struct_config__.tag_field:
                continue
            note(name)
        del value[name]


MAX_NULL_FIELDS = 32

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def _without_null_fields(value: object, kind: object, root: str, error: msgspec.ValidationError) -> Any:
    """`value` as `kind`, less fields that `kind` does not know and that are null: a client library's own
    structs have such, and they ask for nothing. `value` is changed. error: what was wrong so far. Raises
    ApiError (400).
    """
    for _ in range(MAX_NULL_FIELDS):
        fault = fault_of(error)
        if fault.kind != "unknown" or not _drop_nulls(value, _STEP.findall(fault.path), fault.field):
            break
        try:
            return msgspec.json.decode(msgspec.json.encode(value), type=kind)
        except msgspec.ValidationError as another:
            error = another
    raise _refusal(fault_of(error), root)


def _drop_nulls(value: object, steps: list[str], field: str) -> bool:
    """Deletes `field` where it is null: at this place, and at those that differ from it in an index only.

    Whether there was one.
    """
    if not steps:
        if not isinstance(value, dict) or value.get(field, 0) is not None:
            return False
        del value[field]
        return True
    if steps[0].startswith("["):
        items = value if isinstance(value, list) else []
        return any([_drop_nulls(item, steps[1:], field) for item in items])
    return isinstance(value, dict) and _drop_nulls(value.get(steps[0]), steps[1:], field)


_REFUSALS = {
    "unknown": (UNKNOWN_FIELD, "unknown_field"),
    "missing": ("is missing", "missing_field"),
    "only_false": (UNSUPPORTED, "unsupported_field"),
}


def _refusal(fault: Fault, root: str) -> ApiError:
    """The 400. root: the path of what was read."""
    path = f"{root}.{fault.path}" if root and fault.path and fault.path[0] != "[" else root + fault.path
    if fault.kind == "value":
        return bad_request(path or None, fault.reason[:1].lower() + fault.reason[1:], "invalid_value")
    return bad_request(".".join(filter(None, (path, fault.field))), *_REFUSALS[fault.kind])
