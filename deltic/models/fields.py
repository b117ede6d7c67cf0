"""Fields of a config.json, read one at a time, and the two errors that a checkpoint can raise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# No model comes near them; beyond, sizes could not be added up in 64 bits, and lists would not end.
MAX_SIZE, MAX_NUMBER, MAX_LAYERS = 2**31, 1e15, 4096


class CheckpointError(ValueError):
    """A checkpoint that is not there, damaged, or not what its config says; names the file or the tensor."""


class UnsupportedModelError(ValueError):
    """A config that this engine cannot run; names the field, what it says, and what would do. file: where it
    stands, where that is known (gguf_config.naming).
    """

    def __init__(self, field: str, found: object, supported: str, file: str = "") -> None:
        place = f"{file}: " if file else ""
        super().__init__(f"{place}config field {field!r}: found {found!r}; supported: {supported}")
        self.file = file
        self.field = field
        self.found = found
        self.supported = supported


def mending(path: Path) -> str:
    """What mends a damaged file. In the hub's cache a name is a link, and the file behind it in the way."""
    is_cached = path.is_symlink() and path.resolve().parent.name == "blobs"
    return f"delete {path.resolve()} and start again" if is_cached else "download it again"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is absent, broken or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); is this a checkpoint?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken JSON ({error}); {mending(path)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def positive_int(fields: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = default if fields.get(field) is None else fields[field]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MAX_SIZE:
        raise UnsupportedModelError(field, value, f"an integer of at least 1, below {MAX_SIZE}")
    return value


def positive_float(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = default if fields.get(field) is None else fields[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
        raise UnsupportedModelError(field, value, f"a number above 0, below {MAX_NUMBER:g}")
    return float(value)


def read_flag(fields: Mapping[str, Any], field: str, default: bool = False) -> bool:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModelError(field, value, "true or false")
    return value


def only(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if value not in allowed:
        raise UnsupportedModelError(name, value, " or ".join(repr(a) for a in allowed if a is not None))


def refuse_limits(limits: Iterable[tuple[str, Any, bool, str]], prefix: str = "") -> None:
    """Raises UnsupportedModelError for the first limit that does not hold: of each its field, what was found,
    whether it holds, and what is supported. prefix: of the fields.
    """
    for field, found, holds, supported in limits:
        if not holds:
            raise UnsupportedModelError(prefix + field, found, supported)


def json_table(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(name, value, "an object")
    return value
