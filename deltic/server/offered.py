"""Models that a server may load (on_demand.py): the settings and state of each, and which are on the disk."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltic.config import EngineConfig
from deltic.engine.events import Needs
from deltic.host.client import EngineClient
from deltic.host.supervisor import EngineHost
from deltic.models.checkpoint import speaks
from deltic.models.gguf import SUFFIX, set_name
from deltic.server.local_models import LocalModel, Removal, cache_folder, local_models, removal, why_not

CACHE = "cache"
"""Word of --models-from for the hub's cache."""

_DURATION = re.compile(r"(-?)((?:\d+(?:\.\d+)?(?:ms|s|m|h))+|\d+(?:\.\d+)?)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str | float) -> float:
    """Reads a time as Ollama has it, in seconds: 300, "300", "5m", "1h30m"; less than 0: for ever.

    Raises ValueError.
    """
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r}: expected a time, as 90s, 5m or 1h30m; 0: none; -1: for ever")
    if match[1]:
        return math.inf
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", match[2])
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(match[2])


@dataclass(eq=False)
class Offered:
    """Model that may be loaded, and its engine while it is."""

    names: tuple[str, ...]
    client: EngineClient
    config: EngineConfig
    """Settings as they were given; the client's have what was planned, too."""
    keep_s: float
    """Seconds for which it stays when nobody asks."""
    is_given: bool = False
    """True if the command line names it: it is loaded at the start, and stays unless memory is short."""
    is_found: bool = False
    """True if it is offered as long as it is on the disk."""
    short: tuple[str, ...] = ()
    """Short names, which requests may use and no list has."""
    kind: str = "text"
    """Kind of output that it makes: text or speech."""
    is_open: bool = False
    """True if routes know it: from its first load on."""
    host: EngineHost | None = None
    needs: Needs | None = None
    is_up: bool = False
    makes_way: bool = False
    """True if another waits for its memory: it takes no new requests, and is unloaded when it is idle."""
    n_users: int = 0
    """Requests that have it."""
    n_waiting: int = 0
    """Requests that wait until it takes them."""
    used_s: float = 0.0
    """Time of its last use (time.monotonic())."""
    failure: str = ""
    """Reason why the last load failed; empty: it did not."""
    attempt: asyncio.Future[None] | None = None
    """Result of the load that is asked for; None: it is not."""
    stays_asked: bool = False
    """True if it is loaded also when nobody waits for it any more."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def takes_requests(self) -> bool:
        return self.is_up and not self.makes_way and self.client.state != "failed"

    @property
    def is_busy(self) -> bool:
        """True if somebody would miss it now."""
        return bool(self.n_users or self.client.n_open or self.client.is_asked)

    @property
    def is_wanted(self) -> bool:
        """True if its load is to go on."""
        return bool(self.n_waiting or self.stays_asked)

    @property
    def is_cached(self) -> bool:
        """True if it was found in the hub's cache."""
        return self.is_found and Path(self.config.model).is_relative_to(cache_folder(self.config.download_dir))

    @property
    def expires_s(self) -> float:
        """Time at which it is unloaded if nobody asks (time.monotonic())."""
        return self.used_s + self.keep_s

    @property
    def state(self) -> str:
        """Returns unloaded, waiting (for its turn, or for memory), loading, loaded or unloading (it makes way
        once it is idle); failed: its engine has.
        """
        if self.client.state == "failed":
            return "failed"
        if self.is_up:
            return "unloading" if self.makes_way else "loaded"
        if self.attempt is None:
            return "unloaded"
        return "waiting" if self.host is None else "loading"

    def progress(self) -> str:
        """Says how far its load is."""
        if self.is_up:
            return "is loaded"
        if self.host is None:
            return "waits for its turn, or for others to make room"
        loading = self.client.loading
        return f"loads ({loading.stage}, {loading.done:.0%})" if loading else "loads"


class ModelsOnDisk:
    """Models in the places of --models-from."""

    def __init__(self, places: Iterable[str]) -> None:
        self._places = [None if place == CACHE else Path(place).expanduser() for place in places]
        self._refused: dict[Path, tuple[float, str]] = {}

    def find(self, common: EngineConfig) -> dict[str, tuple[EngineConfig, tuple[str, ...]]]:
        """Finds the models that can be served, by the names that requests have for them: settings, and short
        names. common: the settings of all. Raises CheckpointError for a directory that is none.
        """
        directories = [place for place in self._places if place is not None]
        there = local_models(common.download_dir, directories)
        configs = {}
        for model in there:
            is_cached = bool(model.files)
            if (is_cached and None not in self._places) or model.missing or self._why_not(model):
                continue
            name = model.name if is_cached else _below(model.path, directories)
            known = model.published_as
            configs[name] = _settings(model, common), known.names if known else ()
        return configs

    def removal(self, path: str, common: EngineConfig) -> Removal | None:
        """Prepares the deletion of the model at a path. None: it is not in the hub's cache."""
        there = (model for model in local_models(common.download_dir) if str(model.path) == path)
        return next((removal(model, common.download_dir) for model in there), None)

    def _why_not(self, model: LocalModel) -> str:
        changed_s = model.path.stat().st_mtime
        if self._refused.get(model.path, (0.0, ""))[0] != changed_s:
            self._refused[model.path] = changed_s, why_not(model.path)
        return self._refused[model.path][1]


def _settings(model: LocalModel, common: EngineConfig) -> EngineConfig:
    """Makes the settings of a model of the disk: those that are for all, without those of another kind."""
    config = replace(common, model=str(model.path))
    kind = "speech" if speaks(config) else "text"
    fields = type(config).__dataclass_fields__.values()
    foreign: dict[str, Any] = {f.name: f.default for f in fields if f.metadata.get("kind") not in (None, kind)}
    return replace(config, **foreign)


def _below(path: Path, directories: Iterable[Path]) -> str:
    """Names a model by its place below the directory that it was found in: where it is on this machine is
    nobody's business.
    """
    root = next(directory for directory in directories if path.is_relative_to(directory))
    name = path.name if path == root else str(path.relative_to(root))
    return set_name(name) if name.lower().endswith(SUFFIX) else name
