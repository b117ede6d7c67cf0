"""The flags of each command, of the tables in flags.toml.

A setting of an engine, a model or a server is a `knob` in `config.py`, and becomes a flag by itself
(`add_flags`).

`deltic --help` waits for this file: it imports nothing heavy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tomllib
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from deltic.config import MEASURED, Config, EngineConfig, ModelConfig, ServerConfig, docstrings
from deltic.json_types import JsonObject

UNITS = {"dir": "DIR", "gb": "GB", "mb": "MB", "ms": "MS", "s": "SECONDS", "tokens": "TOKENS"}
"""Values of flags by the last word of their names, which is a unit."""

FOREIGN = Path(__file__).with_name("foreign_flags.txt")
"""Flags and commands of other servers, a line for each meaning, with what to give here."""


def advice(flag: str) -> str:
    """Says what to give here for a flag, or a command, of another server; empty where none of them has it."""
    for line in FOREIGN.read_text(encoding="utf-8").splitlines():
        flags, *_, hint = line.split(" | ")
        if flag in flags.split(", "):
            return hint
    return ""


def json_object(text: str) -> JsonObject:
    """Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _json_argument(text: str) -> JsonObject:
    """Raises ArgumentTypeError, which says what was expected."""
    try:
        return json_object(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid JSON object value: {text!r}") from None


def scalar(hint: type) -> tuple[type, bool]:
    """The type of a field's value, or of each of its values; and whether there may be several."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(h for h in get_args(hint) if h is not type(None))
    return get_origin(hint) or hint, False


def add_flags(parser: argparse.ArgumentParser, cls: type[Config], but: Sequence[str] = ()) -> None:
    """Adds a flag for each field of `cls` but those named; only flags that were given appear in the parsed
    namespace.
    """
    hints, texts = get_type_hints(cls), docstrings(cls.__module__)[cls.__name__]
    group = parser.add_argument_group(cls.__name__.removesuffix("Config").lower())
    for field in dataclasses.fields(cls):
        if field.name in but:
            continue
        (kind, many), about = scalar(hints[field.name]), field.metadata
        text, flag = texts[field.name].replace("%", "%%"), "--" + field.name.replace("_", "-")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        if field.default not in (None, ()):
            text += f" (default: {field.default})"
        action, nargs = ("extend", "+") if about.get("several") else ("append" if many else "store", None)
        choices = about.get("choices")
        group.add_argument(
            flag,
            type=_json_argument if kind is dict else kind,
            action=action,
            nargs=nargs,
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=about.get("metavar")
            or UNITS.get(flag.rpartition("-")[2])
            or (None if choices else kind.__name__.upper()),
            help=text,
        )


class _ModelOrPrompt(argparse.Action):
    """Takes a word with a space in it for a question: no model's name has one, but for a path that is
    there.
    """

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        is_prompt = self.dest == "prompt" or (any(map(str.isspace, values)) and not os.path.exists(values))
        if is_prompt and hasattr(namespace, "prompt"):
            parser.error(f"there are two questions, {namespace.prompt!r} and {values!r}. Give one.")
        setattr(namespace, "prompt" if is_prompt else "model", values)


SETTINGS: dict[str, type[Config]] = {
    "engine": EngineConfig,
    "model settings": ModelConfig,
    "server settings": ServerConfig,
}
"""Settings that a table includes, by their names there."""

_WORDS = {
    "int": int,
    "float": float,
    "switch": argparse.BooleanOptionalAction,
    "model or prompt": _ModelOrPrompt,
    "absent": argparse.SUPPRESS,
}
"""Words of flags.toml for arguments of argparse that are objects."""


@cache
def tables() -> dict[str, JsonObject]:
    """The tables of flags.toml, by their names."""
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))


def add_table(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the flags of a table of flags.toml, if there is one of this name."""
    parser.usage = tables().get(name, {}).get("usage")
    _add_rows(parser, parser, name)


def _add_rows(parser: argparse.ArgumentParser, into: argparse._ActionsContainer, name: str) -> None:
    """Adds the rows of a table. into: the parser or one of its groups."""
    for flag, row in tables().get(name, {}).items():
        if not isinstance(row, dict):  # of the whole command
            continue
        included = flag.removeprefix("*")
        if cls := SETTINGS.get(included):
            named = row.get("only", cls.__dataclass_fields__)
            taken = set(MEASURED if named == "measured" else named) - {"model", *row.get("but", ())}
            add_flags(parser, cls, [field for field in cls.__dataclass_fields__ if field not in taken])
        elif flag.startswith("*"):
            into = parser.add_argument_group(included) if row.get("group") else into
            _add_rows(parser, into, included)
        else:
            objects = {key: _WORDS[word] for key, word in row.items() if isinstance(word, str) and word in _WORDS}
            into.add_argument(*flag.split(), **row | objects)
