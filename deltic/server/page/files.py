"""Page at `/` for a person who looks at this server: its files, and what a browser may do with them.

There is no build step. index.html loads page.css and main.js, whose modules import each other. They stand
below a path that has the hash of all, so a browser keeps them for good and never mixes two versions. The page
asks nobody but this server, and holds nothing that a key protects. Its policy takes scripts and styles from
this server alone and forbids to turn text into markup, so that whatever a model writes stays text.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from deltic import __version__
from deltic.server.errors import ApiError
from deltic.server.service import Service

MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript"}
FILES = {path.name: path.read_bytes() for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in MEDIA_TYPES}
"""Files that the page loads, by name."""

_PAGES = [Path(__file__).with_name(name).read_bytes() for name in ("index.html", "docs.html")]
VERSION = hashlib.sha256(b"".join([*_PAGES, *FILES.values()])).hexdigest()[:32]
INDEX, DOCS = (page.replace(b"VERSION", VERSION.encode()) for page in _PAGES)
ASSETS = "/page/{version}/{name}"
"""The path of what the page loads."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; media-src blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
HEADERS = {
    "content-security-policy": POLICY,
    "etag": f'"{VERSION}"',
    # A browser may keep it, but asks again each time: a newer server has another page.
    "cache-control": "no-cache",
    **SAFE,
}


def index(request: Request, html: bytes = INDEX) -> Response:
    """The page, or another, unless the browser has it."""
    if HEADERS["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=HEADERS)
    return Response(html, headers=HEADERS, media_type="text/html")


def file(version: str, name: str) -> Response:
    """A file that the page loads.

    One of another version is sent, too, while a server is replaced by a newer one, but not kept. Raises
    ApiError (404).
    """
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name!r}; load / again", code="not_found")
    kept = "public, max-age=31536000, immutable" if version == VERSION else "no-store"
    media_type = MEDIA_TYPES[Path(name).suffix]
    return Response(FILES[name], headers={"cache-control": kept, **SAFE}, media_type=media_type)


def is_of_page(path: str) -> bool:
    return path in ("", "/") or path.startswith("/page/")


def page_response(path: str, request: Request) -> Response:
    """Returns what a path of the page gives. Raises ApiError (404)."""
    _, _, rest = path.partition("/page/")
    return file(*rest.split("/", 1)) if "/" in rest else index(request)


async def page(service: Service, request: Request) -> ASGIApp:
    """The page for a browser: a chat, speech, and what the engine does at the moment."""
    return index(request)


async def docs(service: Service, request: Request) -> ASGIApp:
    """GET /docs: this API, to be read and tried in a browser."""
    # The links of the page are relative, so a slash at the end would be one too many.
    if request.scope.get("raw_path", b"").endswith(b"/"):
        return RedirectResponse("../docs")
    return index(request, DOCS)


async def page_file(service: Service, request: Request) -> ASGIApp:
    """Gives a script or style of the page."""
    return file(request.path_params["version"], request.path_params["name"])


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
