"""Random traffic through a router while replicas are killed and restarted beneath it.

Checked: a valid request has its answer, whatever is restarted (SIGTERM, one replica after another); only what
a killed replica had, or was sent until the router knew, is lost, and every such stream ends within its time;
the same seeded request has the same text from every replica; a replica that came back is used again; at quiet
points nothing is in use on any of them, and their memory is flat.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.routed.fleet import Fleet, Replica
from bench.soak import traffic
from bench.soak.soak import engine_pid, rss_bytes
from bench.soak.traffic import Kinds, Lost, Traffic, Violation
from deltic.bench.gauges import QUIET_S, in_use

KINDS: Kinds = {
    traffic.streamed: 30,
    traffic.whole: 20,
    traffic.gone_stream: 14,
    traffic.gone_waiting: 8,
    traffic.again: 8,
}
"""What means the same through every router: errors and other routes are some routers' own."""

NOTICED_S = 4.0
"""So long after a kill a request may still be sent to the replica that is gone."""
DOWN_S = 3.0
"""A killed replica is started again after this."""


@dataclass
class RoutedSoak:
    """A run. `log` is told of every event."""

    fleet: Fleet
    traffic: Traffic
    seed: int
    timeout_s: float
    log: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    n_requests: int = 0
    n_lost: int = 0
    kills: list[dict[str, Any]] = field(default_factory=list)
    rolls: list[dict[str, Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """How what was lost ended."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    _forgiven_until: float = 0.0
    _is_over: bool = False
    _n_busy: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def violate(self, text: str) -> None:
        self.violations.append(f"{time.monotonic() - self.began:.1f} s: {text}")
        self.log(f"violation: {text}")

    async def client(self, number: int) -> None:
        """One request after another, paused at quiet points."""
        rng = random.Random(f"{self.seed} {number}")
        while not self._is_over:
            await self._open.wait()
            self.n_requests += 1
            self._n_busy += 1
            begin = time.monotonic()
            try:
                await traffic.one(self.traffic, KINDS, rng, self.timeout_s)
            except Violation as violation:
                broke_off = "without [DONE]" in str(violation)  # so may a router end what it cannot finish
                if broke_off and begin < self._forgiven_until:
                    self._lose(str(violation))
                else:
                    self.violate(str(violation))
            except Lost as lost:
                if begin < self._forgiven_until:
                    self._lose(str(lost))
                else:
                    self.violate(str(lost))
            finally:
                self._n_busy -= 1

    def _lose(self, text: str) -> None:
        self.n_lost += 1
        forms = {
            "error event": "error event",
            "HTTP 5": "HTTP 5xx",
            "broke": "broken off",
            "without [DONE]": "ended without [DONE]",
        }
        how = next((form for mark, form in forms.items() if mark in text), "no connection")
        self.lost[how] = self.lost.get(how, 0) + 1

    async def kill(self, replica: Replica, what: str) -> None:
        """A replica, or its engine process, is lost, and comes back."""
        before, n_busy, begin = dict(self.lost), self._n_busy, time.monotonic()
        self._forgiven_until = begin + NOTICED_S
        if what == "engine":
            replica.kill_engine()
            await asyncio.sleep(1.0)
        else:
            replica.kill()
            await asyncio.sleep(DOWN_S)
            replica.start()
        await replica.ready()
        ready_s = time.monotonic() - begin
        used_s = await self._used(replica)
        lost = {how: n for how, count in self.lost.items() if (n := count - before.get(how, 0))}
        self.kills.append({"what": what, "open": n_busy, "lost": lost, "ready_s": round(ready_s, 2), "used_s": used_s})
        self.log(f"killed: {self.kills[-1]}")

    async def roll(self) -> None:
        """An update: each replica is told to end, and started again, one after another."""
        begin, n_before = time.monotonic(), self.n_requests
        for replica in self.fleet.replicas:
            status = await replica.stop()
            if status != 0:
                self.violate(f"a replica ended with status {status} on SIGTERM")
            replica.start()
            await replica.ready()
            await self._used(replica)
        row = {"s": round(time.monotonic() - begin, 2), "requests": self.n_requests - n_before}
        self.rolls.append(row)
        self.log(f"rolling restart: {row}")

    async def _used(self, replica: Replica, within_s: float = 60.0) -> float | None:
        """Seconds until the router sends it something."""
        begin, before = time.monotonic(), (await replica.gauges()).get("prompt_tokens_total", 0.0)
        while time.monotonic() < begin + within_s:
            if (await replica.gauges()).get("prompt_tokens_total", 0.0) > before:
                return round(time.monotonic() - begin, 2)
            await asyncio.sleep(0.1)
        self.violate(f"a replica that is ready again was not used for {within_s:.0f} s")
        return None

    async def quiet(self) -> None:
        """Lets the traffic run out, looks whether everything is free, and measures memory."""
        self._open.clear()
        limit = time.monotonic() + self.timeout_s
        while self._n_busy and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        row: dict[str, Any] = {
            "s": round(time.monotonic() - self.began, 1),
            "requests": self.n_requests,
            "replicas": [],
        }
        for i, replica in enumerate(self.fleet.replicas):
            limit = time.monotonic() + QUIET_S
            while (left := in_use(await replica.gauges())) and time.monotonic() < limit:
                await asyncio.sleep(0.1)
            if left:
                self.violate(f"replica {i}: not free {QUIET_S:.0f} s after the last request: {left}")
            assert replica.server is not None
            pid = replica.server.process.pid
            engine = engine_pid(pid)
            row["replicas"].append(
                {"pid": pid, "server": rss_bytes(pid), "engine": rss_bytes(engine) if engine else None}
            )
        assert self.fleet.process is not None
        row["router"] = rss_bytes(self.fleet.process.pid)
        self.memory.append(row)
        self._open.set()

    async def run(self, minutes: float, n_clients: int, kill_every_s: float, roll_every_s: float) -> None:
        """Traffic for so long, with kills and restarts in turns; 0: none."""
        self._open.set()
        clients = [asyncio.create_task(self.client(number)) for number in range(n_clients)]
        rng, end = random.Random(self.seed), self.began + 60 * minutes
        due = {"kill": self.began + (kill_every_s or 1e9), "roll": self.began + (roll_every_s or 1e9)}
        quiet_every_s = min(60.0, 60 * minutes / 10)
        next_quiet = self.began + quiet_every_s
        while (here := time.monotonic()) < end:
            if here >= due["kill"]:
                await self.kill(rng.choice(self.fleet.replicas), ("replica", "engine")[len(self.kills) % 2])
                due["kill"] = time.monotonic() + kill_every_s
            elif here >= due["roll"]:
                await self.roll()
                due["roll"] = time.monotonic() + roll_every_s
            elif here >= next_quiet:
                await self.quiet()
                next_quiet = time.monotonic() + quiet_every_s
            await asyncio.sleep(0.2)
        self._is_over = True
        await asyncio.gather(*clients)
        await self.quiet()

    def report(self) -> dict[str, Any]:
        """Everything that was seen."""
        return {
            "minutes": round((time.monotonic() - self.began) / 60, 2),
            "requests": self.n_requests,
            "kinds": dict(sorted(self.traffic.counts.items())),
            "generated_tokens_checked": self.traffic.n_tokens,
            "kills": self.kills,
            "lost_to_kills": self.n_lost,
            "lost": self.lost,
            "rolling_restarts": self.rolls,
            "memory": self.memory,
            "violations": self.violations,
        }
