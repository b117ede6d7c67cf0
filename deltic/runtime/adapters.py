"""The LoRA adapters of a served model: read and put in place beside the steps, each in a slot.

A thread of its own reads a file and writes the device's memory. The engine's thread decides, between two
steps, which slot and bytes an adapter gets, and opens the slot when all of it is there. An adapter that is
dropped stays until no sequence has it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltic.config import ConfigError, EngineConfig
from deltic.engine.events import AdapterLoaded
from deltic.engine.messages import LoadAdapter
from deltic.engine.mirror import AskedAdapter, DroppedAdapter, Errand, Machines
from deltic.engine.step import HeldAdapter
from deltic.machine import be_nice
from deltic.models.fields import CheckpointError
from deltic.models.qwen.adapters import Adapter, read_adapter
from deltic.models.qwen.shape import ModelShape

log = logging.getLogger("deltic.engine")

DEFAULT_LORAS, DEFAULT_RANK, DEFAULT_GB = 8, 64, 1.0
"""Room for adapters that clients load, where settings do not say."""


@dataclass(frozen=True)
class AdapterRoom:
    """Room for LoRA adapters; by default there is none."""

    n: int = 0
    """Limit of adapters that are loaded at once."""
    rank: int = 0
    """The largest rank."""
    n_bytes: int = 0
    """Bytes for all of them."""


NO_ADAPTERS = AdapterRoom()

_Command = LoadAdapter | AskedAdapter


class AdapterMemory(Protocol):
    """A device's memory for adapters, `room.n_bytes` long, and its slots."""

    def bytes_of(self, adapter: Adapter) -> int: ...

    def write(self, slot: int, begin: int, adapter: Adapter) -> None:
        """Puts an adapter at a byte of the memory. It runs in another thread than the steps, which read
        other bytes meanwhile.
        """

    def open(self, slot: int) -> None:
        """Makes what was written the slot's: rows may have it from the next step on."""

    def clear(self, slot: int) -> None:
        """The slot's adapter adds nothing any more, and its bytes may be written."""


@dataclass(slots=True, eq=False)
class _Loaded(HeldAdapter):
    """An adapter in its slot."""

    key: bytes = b""
    begin: int = 0
    n_bytes: int = 0
    rank: int = 0
    n_loads: int = 1
    """Loads that were not dropped; at 0 it goes when no sequence has it."""
    is_open: bool = False
    others: Errand | None = None
    """Answers of the model's other machines, which have it in the same slot."""


class Adapters:
    """The adapters of one model. All methods are for the engine's thread."""

    def __init__(self, shape: ModelShape, room: AdapterRoom, memory: AdapterMemory) -> None:
        self._shape, self._room, self._memory = shape, room, memory
        self._loaded: dict[int, _Loaded] = {}  # by slot
        self._work: deque[tuple[_Command, Future[tuple[Adapter, int]] | Future[None], _Loaded | None]] = deque()
        self._pool = ThreadPoolExecutor(1, "adapters", initializer=be_nice)
        self.machines: Machines | None = None
        """Machines with further layers of the model, once they are there."""

    @property
    def is_waiting(self) -> bool:
        """Returns whether a load is under way."""
        return bool(self._work)

    @property
    def has_work(self) -> bool:
        """True if `poll` would do something now."""
        if not self._work or not self._work[0][1].done():
            return False
        one = self._work[0][2]
        return one is None or one.others is None or one.others.is_done

    def find(self, key: bytes) -> _Loaded | None:
        """The adapter of a key, if requests may have it."""
        return next((one for one in self._loaded.values() if one.key == key and one.n_loads and one.is_open), None)

    def load(self, command: _Command) -> None:
        """Begins to load; `poll` answers, in the order of the commands. An AskedAdapter has its slot, which
        is free.
        """
        self._work.append((command, self._pool.submit(self._read, Path(command.path)), None))

    def load_now(self, source: Path | Adapter) -> AdapterLoaded:
        """Loads before there are steps. Raises CheckpointError."""
        command = LoadAdapter(source.key.hex() if isinstance(source, Adapter) else str(source))
        self._work.append((command, self._pool.submit(self._read, source), None))
        while self.is_waiting:
            with contextlib.suppress(Exception):  # `poll` says it
                self._work[0][1].result()
            if self.machines is not None and not self.has_work:
                self.machines.hear(0.1)
            for answer in self.poll():
                if answer.error is not None:
                    raise CheckpointError(answer.error)
                return answer
        raise AssertionError("a load ends in an answer")

    def drop(self, key: bytes) -> None:
        """Takes back one load; what is not known is left alone."""
        one = next((one for one in self._loaded.values() if one.key == key and one.n_loads), None)
        if one is not None:
            one.n_loads -= 1
            self._free()

    def drop_slot(self, slot: int) -> None:
        """Takes back what the engine's machine has asked for."""
        if slot in self._loaded:
            self._loaded[slot].n_loads = 0
            self._free()

    def poll(self) -> list[AdapterLoaded]:
        """Goes on with what has been read or written. Gives answers."""
        answers = []
        while self.has_work:
            command, done, one = self._work.popleft()
            try:
                result = done.result()
                if one is None:
                    assert result is not None
                    answer = self._place(command, *result)
                else:
                    if one.others is not None and one.others.error is not None:
                        raise ConfigError(one.others.error)
                    self._memory.open(one.adapter_slot)
                    one.is_open = True
                    answer = _answer(command, one)
            except Exception as error:  # whatever a file does, requests go on
                if not isinstance(error, CheckpointError | ConfigError):
                    log.exception("the adapter %s could not be loaded", command.path)
                answer = AdapterLoaded(command.path, error=str(error) or type(error).__name__, number=command.number)
                if one is not None:
                    one.n_loads = 0
            if answer is not None:
                answers.append(answer)
        self._free()
        return answers

    def close(self, timeout_s: float) -> None:
        """Leaves what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, source: Path | Adapter) -> tuple[Adapter, int]:
        """An adapter and its bytes, in the pool's thread: those of a part of it are copied to be counted."""
        adapter = source if isinstance(source, Adapter) else read_adapter(source, self._shape)
        return adapter, self._memory.bytes_of(adapter)

    def _place(self, command: _Command, adapter: Adapter, n_bytes: int) -> AdapterLoaded | None:
        """Gives an adapter its place and begins to write it; an answer if that is all. Raises ConfigError
        where there is no room, and for another one than was asked for.
        """
        asked = command if isinstance(command, AskedAdapter) else None
        if asked is not None and asked.key != adapter.key:
            raise ConfigError(f"{command.path}: is another adapter here; give all machines the same files")
        known = next((one for one in self._loaded.values() if one.key == adapter.key and one.n_loads), None)
        # An engine that asks for a slot has the old one still in use.
        if known is not None and asked is None:
            known.n_loads += 1
            return _answer(command, known)
        self._free()
        room = self._room
        if adapter.rank > room.rank:
            raise ConfigError(
                f"{command.path}: rank {adapter.rank}; this server has room for {room.rank}: --max-lora-rank"
            )
        slot = next((i for i in range(room.n) if i not in self._loaded), None) if asked is None else asked.adapter_slot
        if slot is None:
            raise ConfigError(
                f"{command.path}: {room.n} adapters are loaded; unload one, or start with more --max-loras"
            )
        begin = self._gap(n_bytes)
        if begin is None:
            left = room.n_bytes - sum(one.n_bytes for one in self._loaded.values())
            raise ConfigError(
                f"{command.path}: takes {n_bytes / 1e9:.3f} GB, and {left / 1e9:.3f} GB are left for adapters; unload one, or start"
                " with more --lora-gb"
            )
        one = _Loaded(slot, key=adapter.key, begin=begin, n_bytes=n_bytes, rank=adapter.rank)
        self._loaded[slot] = one
        if self.machines is not None:
            one.others = self.machines.ask(AskedAdapter(command.path, adapter.key, slot))
        self._work.appendleft((command, self._pool.submit(self._memory.write, slot, begin, adapter), one))
        return None

    def _gap(self, n_bytes: int) -> int | None:
        """Finds where so many bytes are free."""
        at = 0
        for one in sorted(self._loaded.values(), key=lambda one: one.begin):
            if one.begin - at >= n_bytes:
                return at
            at = max(at, one.begin + one.n_bytes)  # a stage's part of an adapter may be empty
        return at if self._room.n_bytes - at >= n_bytes else None

    def _free(self) -> None:
        """Clears the slots of what was dropped and has no sequence."""
        writing = {one.adapter_slot for _, _, one in self._work if one is not None}
        for slot, one in list(self._loaded.items()):
            if not one.n_loads and not one.n_sequences and slot not in writing:
                self._memory.clear(slot)
                del self._loaded[slot]
                if self.machines is not None:
                    self.machines.tell(DroppedAdapter(slot))


def _answer(command: _Command, one: _Loaded) -> AdapterLoaded:
    return AdapterLoaded(command.path, one.key, one.rank, one.n_bytes, number=command.number)


def given_adapters(config: EngineConfig, shape: ModelShape) -> dict[str, Adapter]:
    """Reads the adapters of --lora. Raises ConfigError, which names the flag, for one that
    cannot be applied.
    """
    found = {}
    for name, path in config.adapters.items():
        try:
            found[name] = read_adapter(path, shape)
        except CheckpointError as error:
            raise ConfigError(f"--lora {name}={path}: {error}") from error
    return found


def adapter_room(config: EngineConfig, given: Mapping[str, Adapter], bytes_of: Callable[[Adapter], int]) -> AdapterRoom:
    """Room for adapters, by the settings and by those of --lora. Raises ConfigError where these do not fit in
    it.
    """
    if not given and not config.allow_lora_loading:
        for name in ("max_loras", "max_lora_rank", "lora_gb"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: there are no adapters; give --lora or --allow-lora-loading, too"
                )
        return NO_ADAPTERS
    sizes = dict[bytes, int]()
    for name, adapter in given.items():
        try:
            sizes[adapter.key] = bytes_of(adapter)
        except CheckpointError as error:
            raise ConfigError(f"--lora {name}={config.adapters[name]}: {error}") from error
    more = config.allow_lora_loading
    n = len(sizes) + (DEFAULT_LORAS if more else 0) if config.max_loras is None else config.max_loras
    most = max((adapter.rank for adapter in given.values()), default=1)
    rank = max(most, DEFAULT_RANK if more else 1) if config.max_lora_rank is None else config.max_lora_rank
    needed = sum(sizes.values())
    n_bytes = needed + int(DEFAULT_GB * 1e9) * more if config.lora_gb is None else int(config.lora_gb * 1e9)
    if len(sizes) > n:
        raise ConfigError(f"--max-loras {n}: --lora gives {len(sizes)}")
    if most > rank:
        raise ConfigError(f"--max-lora-rank {rank}: an adapter of --lora has rank {most}")
    if needed > n_bytes:
        raise ConfigError(f"--lora-gb {config.lora_gb}: those of --lora need {needed / 1e9:.3f}")
    return AdapterRoom(n, rank, n_bytes)
