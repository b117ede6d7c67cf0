"""Numbers behind the page's live view, at `/live`."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deltic import __version__
from deltic.server.service import Service


async def live(service: Service, request: Request) -> ASGIApp:
    """Tells what the engine does at the moment.

    Its gauges and counters, and the last steps: [seconds ago, ms, sequences running, prompt tokens, generated
    tokens].
    """
    client, now_s = service.client, time.monotonic()
    fields = {
        "model": service.model_name,
        "version": __version__,
        **service.status(),
        "uptime_s": round(time.time() - service.server.started_s, 3),
        "n_restarts": client.n_restarts,
        "engine": client.info,
        "stats": msgspec.structs.asdict(client.stats) | {"cache": msgspec.structs.asdict(client.stats.cache)},
        "steps": [[round(now_s - at_s, 3), *rest] for at_s, *rest in client.recent_steps],
    }
    return Response(msgspec.json.encode(fields), headers={"cache-control": "no-store"}, media_type="application/json")
