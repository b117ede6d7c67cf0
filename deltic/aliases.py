"""Short names of published models, as `qwen3.5:4b`, and the files on the hub that they stand for."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from deltic.config import BUILT_IN, ConfigError, EngineConfig, nearest

TABLE = Path(__file__).with_name("aliases.txt")
"""A model a line; its first line names the columns."""

_FORM = re.compile(r"[\w.-]+:[\w.-]+")


class Published(NamedTuple):
    """A line of the table."""

    names: tuple[str, ...]
    """Short names, that which is proposed first."""
    hub: str
    """owner/model, of a GGUF model with `:FILE.gguf`."""
    revision: str | None
    """Commit to which the bytes belong. None: the hub's default branch."""
    n_bytes: int | None
    """Bytes of the weights, a vision tower not counted. None: the hub knows them."""
    format: str
    shape: str
    """Published sizes, as --dummy names them."""


@functools.cache
def published() -> tuple[Published, ...]:
    """Reads the table."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    made = []
    for names, hub, revision, n_bytes, form, shape in (line.split(" | ") for line in lines):
        size = None if n_bytes == "-" else int(n_bytes)
        made.append(Published(tuple(names.split(", ")), hub, None if revision == "-" else revision, size, form, shape))
    return tuple(made)


def find(name: str) -> Published | None:
    """Finds the model of a short name, whatever its case. None: it is no short name."""
    return next((model for model in published() if name.strip().lower() in model.names), None)


def spelled_out(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Returns the name on the hub, and the revision, for a short name; any other name as it is, with the
    revision that was given. What is a path here stays one.

    Raises ConfigError for a name of this form that is none, with those that are like it.
    """
    if not name.strip():
        raise ConfigError("the name of the model is empty. Give a directory, a GGUF file or a name of the hub.")
    if name == BUILT_IN or "/" in name or Path(name).expanduser().exists():
        return name, revision
    if model := find(name):
        return model.hub, revision or model.revision
    known = [each for model in published() for each in model.names]
    family = name.lower().partition(":")[0]
    if _FORM.fullmatch(name) or any(each.startswith(f"{family}:") for each in known):
        near = [each for each in known if re.fullmatch(rf"{re.escape(family)}:[\w.]+", each)]
        hint = nearest(name.lower(), known if ":" in name else ())
        hint = hint or (f"There are {', '.join(near)}." if near else "")
        hint = f"{hint[:1].upper()}{hint[1:]} " if hint else ""
        raise ConfigError(
            f"{name}: no short name of a model. {hint}Any model of the hub is named owner/model or "
            "owner/model:Q4_K_M; deltic list --published has the short names."
        )
    return name, revision


def short_names(config: EngineConfig) -> tuple[str, ...]:
    """Returns the short name of the model on the hub that the settings name, if it has one."""
    for model in published():
        if (model.hub, model.revision) == (config.model, config.revision):
            return model.names[:1]
    return ()
