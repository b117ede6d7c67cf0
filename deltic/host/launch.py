"""Structs that the host sends to the process that it starts: both sides know them, and neither loads the
other.
"""

from __future__ import annotations

import msgspec

from deltic.config import EngineConfig


class ModelLaunch(msgspec.Struct, frozen=True):
    """Model of a Launch."""

    name: str
    """Name for messages."""
    config: EngineConfig
    commands: str
    """Endpoint that the process binds; the client connects to it once the process is ready."""
    events: str
    """Endpoint that the client has bound."""
    topic: str | None = None
    """Topic of the model's cache events; None: nobody is told."""


class EventSockets(msgspec.Struct, frozen=True):
    """Sockets on which cache events of all models are told (`kv_events.py`)."""

    publish: str
    """Endpoint to bind."""
    replay: str | None = None
    """Endpoint to bind for readers who missed some; None: there is none."""


class Allowance(msgspec.Struct, frozen=True):
    """Memory in which a model is planned: what it may use where no other model is."""

    free_bytes: dict[str, int]
    """Free bytes of each device (cpu, cuda) while no model is loaded; of one left out what is free now."""
    limit_bytes: int | None = None
    """The most that all models together may take; None: the device's share of what is free."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The host's message to the process it starts, as JSON in its last argument."""

    models: list[ModelLaunch]
    """Models to serve, at least one."""
    parent_pid: int
    started_at: float
    """Wall clock at the start of the process, in seconds: how long Python took to get to work."""
    beat_s: float = 0.0
    """Seconds between two signs that a kernel runs; 0: nobody looks."""
    log_format: str = "text"
    kv_events: EventSockets | None = None
    """Sockets of the cache events; None: no model has a topic."""
    allowance: Allowance | None = None
    """Given: the process loads nothing. It writes what the model would need, and ends."""
