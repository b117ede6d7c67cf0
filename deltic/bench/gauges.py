"""Gauges of what is in use, from a Deltic server's /metrics: 0 everywhere once the last request is over."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

from deltic.commands.endpoint import Endpoint, EndpointError

IDLE = ("sequences_running", "sequences_waiting", "pages_used", "state_slots_used")
"""Gauges of /metrics, each `deltic_<name>`, that are 0 when nothing runs."""
SOMETIMES = ("speech_streams_used", "key_requests_open")
"""Further ones, of a model that speaks and of a server with keys."""

QUIET_S = 10.0
"""Seconds after the last request in which everything must become free."""


def gauges(metrics: str) -> dict[str, float]:
    """Samples of a /metrics page that have no label but a model's or a key's, without the `deltic_` prefix.

    Of several models or keys the largest.
    """
    samples = re.findall(r'^deltic_(\w+){(?:model|key)="[^"]*"} (\S+)$', metrics, re.MULTILINE)
    return {name: float(value) for name, value in sorted(samples, key=lambda sample: float(sample[1]))}


def in_use(values: dict[str, float]) -> dict[str, float]:
    """Returns the gauges of IDLE and SOMETIMES that are not 0.

    One of IDLE that is missing is not a number.
    """
    held = {name: values.get(name, float("nan")) for name in IDLE} | {name: values.get(name, 0.0) for name in SOMETIMES}
    return {name: value for name, value in held.items() if value}


async def settled(endpoint: Endpoint, within_s: float) -> dict[str, float]:
    """The samples of /metrics as soon as nothing is `in_use`, or as they are after so many seconds."""
    limit = time.monotonic() + within_s
    while True:
        values: dict[str, float] = {}
        with contextlib.suppress(EndpointError):
            reply = await endpoint.open("GET", "/metrics")
            values = gauges((await reply.read()).decode())
        if not in_use(values) or time.monotonic() > limit:
            return values
        await asyncio.sleep(0.1)
