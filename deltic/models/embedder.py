"""An embedder: a checkpoint with the files of sentence-transformers, which say how its hidden states become
one vector.

modules.json lists what runs one after another. Known are Transformer (the model itself), Pooling and
Normalize; config_sentence_transformers.json has the prompts, sentence_bert_config.json the longest text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltic.models.fields import CheckpointError, UnsupportedModelError, only, positive_int, read_flag, read_json

MODULES = "modules.json"

_MODES = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "last": "last", "lasttoken": "last"}
"""Supported poolings, by their names in a Pooling's config.json: behind `pooling_mode_`, or alone."""


@dataclass(frozen=True)
class Embedder:
    """The way from a text to its vector."""

    mode: str
    """The hidden state behind the final norm that is taken: of the "last" token or of the first ("cls"), or
    the "mean" of all.
    """
    is_normalised: bool
    """True if a vector has length 1."""
    max_tokens: int = 0
    """Tokens of the longest text; 0: as many as the model takes."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that stand before a text, by their names."""
    default_prompt: str = ""
    """Name of the prompt that is used where none is named; "": none is."""


def embedder_in(directory: Path) -> Embedder | None:
    """Reads the files of an embedder; None: there are none. Raises CheckpointError for broken files,
    UnsupportedModelError for a module or a field that is not supported.
    """
    if not (directory / MODULES).is_file():
        return None
    kinds = {}
    for module in _list_in(directory / MODULES):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind in kinds or kind not in ("Transformer", "Pooling", "Normalize") or (kind == "Transformer" and path):
            supported = "a Transformer in the directory itself, a Pooling, then perhaps a Normalize"
            raise UnsupportedModelError("type", module.get("type"), supported, str(directory / MODULES))
        kinds[kind] = directory / path
    if [*kinds][:2] != ["Transformer", "Pooling"]:
        supported = "Transformer, Pooling, and perhaps Normalize"
        raise UnsupportedModelError("type", ", ".join(kinds), supported, str(directory / MODULES))
    about, limits = (
        _fields(directory / f"{name}.json") for name in ("config_sentence_transformers", "sentence_bert_config")
    )
    only(limits, "do_lower_case", (None, False))
    prompts = about.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise UnsupportedModelError("prompts", prompts, "texts by their names")
    default = about.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise UnsupportedModelError("default_prompt_name", default, " or ".join(prompts) or "null")
    most = limits.get("max_seq_length")
    return Embedder(
        mode=_mode(kinds["Pooling"] / "config.json", bool(prompts)),
        is_normalised="Normalize" in kinds,
        max_tokens=0 if most is None else positive_int(limits, "max_seq_length"),
        prompts=dict(prompts),
        default_prompt=default,
    )


def _mode(file: Path, has_prompts: bool) -> str:
    """The mode of a Pooling. has_prompts: a mean leaves them out where `include_prompt` says so."""
    fields, begin = read_json(file), "pooling_mode_"
    named = fields.get("pooling_mode")
    asked = (
        [named]
        if isinstance(named, str)
        else [name for name in fields if name.startswith(begin) and read_flag(fields, name)]
    )
    modes = [_MODES.get(name.removeprefix(begin)) for name in asked]
    if len(modes) != 1 or modes[0] is None:
        supported = "one of lasttoken, mean and cls"
        raise UnsupportedModelError("pooling_mode", ", ".join(asked), supported, str(file))
    if modes[0] != "last" and has_prompts:
        only(fields, "include_prompt", (None, True))
    return modes[0]


def _fields(file: Path) -> Mapping[str, Any]:
    return read_json(file) if file.is_file() else {}


def _list_in(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file}: expected a list of modules; download it again")
    return modules
