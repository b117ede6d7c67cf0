"""Page at `/` for a person who looks at this server, and the numbers behind its second half at `/live`.

The page is one file with its own script and style; it asks nobody but this server, and holds nothing that a
key protects. Its policy names that script and that style by their hashes, and forbids to turn text into
markup, so that whatever a model writes stays text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deltic import __version__
from deltic.server.errors import ApiError
from deltic.server.service import Service

PAGE = Path(__file__).with_name("page.html").read_bytes()


def _policy(page: bytes) -> str:
    """The Content-Security-Policy of a page with one script and one style."""

    def hash_of(tag: bytes) -> str:
        (inline,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hash_of(b'script')}; style-src {hash_of(b'style')}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


HEADERS = {
    "content-security-policy": _policy(PAGE),
    "etag": f'"{hashlib.sha256(PAGE).hexdigest()[:32]}"',
    # A browser may keep it, but asks again each time: a newer server has another page.
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def answered(request: Request) -> Response:
    """The page, unless the browser has it."""
    if HEADERS["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=HEADERS)
    return Response(PAGE, headers=HEADERS, media_type="text/html")


async def page(service: Service, request: Request) -> ASGIApp:
    """The page for a browser: a chat, and what the engine does at the moment."""
    if service.speech is not None:
        message = f"{service.model_name!r} speaks, and the page is a chat; POST a text to /v1/audio/speech"
        raise ApiError(404, message, code="unsupported_model")
    return answered(request)


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
