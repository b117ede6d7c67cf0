"""Models that requests bring to the server's disk and take from it (/api/pull and /api/delete, as Ollama has
them), and load and unload by hand (/models/load, /models/unload, as llama.cpp's router has them).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from deltic.aliases import spelled_out
from deltic.json_types import JsonObject
from deltic.models.hub import Progress, is_hub_name
from deltic.server.api import ollama_protocol as wire
from deltic.server.api.ollama import LINES
from deltic.server.downloads import fetched
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET, Ticket
from deltic.server.offered import CACHE
from deltic.server.on_demand import OnDemand, lets_change
from deltic.server.preparation import parsed
from deltic.server.service import Service
from deltic.server.transport import json_response

TELL_S = 0.5
"""Seconds between two lines about a download, at least."""


async def pull(service: Service, request: Request) -> ASGIApp:
    """POST /api/pull: fetches a model of the hub, with --allow-pull; tells how far it is."""
    asked = await parsed(service, request, wire.PullRequest)
    name = asked.model or asked.name
    try:
        is_there = service.server.known(name) is not None
    except ApiError:  # and not loaded
        is_there = True
    lines = _there() if is_there else _fetched(_puller(service, name, request.scope[TICKET]), name)
    if asked.stream is not False:
        return StreamingResponse(_encoded(lines), media_type=LINES)
    async for line in lines:
        last = line
    if "error" in last:
        raise ApiError(502, str(last["error"]), code="pull_failed")
    return json_response(last)


async def delete(service: Service, request: Request) -> ASGIApp:
    """DELETE /api/delete: deletes the files of a model, with --allow-pull. It is unloaded first.

    Files that another model needs are kept. A model that loads or answers is not deleted (409).
    """
    asked = await parsed(service, request, wire.DeleteRequest)
    message = (
        "clients of this server delete no models. Start it with --models-from cache --allow-pull, or use deltic rm."
    )
    on_demand = _changer(service, request.scope[TICKET], ApiError(403, message, code="not_allowed"))
    await on_demand.delete(await on_demand.find(asked.model or asked.name))
    return Response()


def _changer(service: Service, ticket: Ticket, refusal: ApiError) -> OnDemand:
    """Returns the models of a server whose clients may fetch and delete some. Raises ApiError: the refusal of
    another server; 403 for who may not.
    """
    on_demand, config = service.server.on_demand, service.config
    if on_demand is None or CACHE not in config.models_from or not config.allow_pull:
        raise refusal
    if not lets_change(config, ticket):
        name = ticket.account.name if ticket.account else ""
        message = f"key {name!r} may not fetch or delete models for all. Use an administrator's."
        raise ApiError(403, message, code="not_an_admin")
    return on_demand


def _puller(service: Service, name: str, ticket: Ticket) -> OnDemand:
    """Raises ApiError: 404 where no model is fetched, 403 for who may not, 400 for a name that is none of the
    hub.
    """
    message = (
        f"no model {name!r} here, and this server fetches none: it serves what it was started with, or what deltic pull has "
        "fetched. Start it with --models-from cache --allow-pull to let clients fetch models."
    )
    on_demand = _changer(service, ticket, ApiError(404, message, code="model_not_found"))
    try:
        known = is_hub_name(spelled_out(name)[0])
    except ValueError as error:
        raise bad_request("model", str(error)) from None
    if not known:
        raise bad_request("model", f"{name!r} is no name on the hub: owner/model, owner/model:Q4_K_M, or a short name.")
    return on_demand


async def _there() -> AsyncIterator[JsonObject]:
    for status in ("pulling manifest", "verifying sha256 digest", "success"):
        yield {"status": status}


async def _fetched(on_demand: OnDemand, name: str) -> AsyncIterator[JsonObject]:
    """Yields Ollama's lines about a download, which ends when nobody reads them. Begun again it goes on."""
    model, revision = spelled_out(name)
    config = dataclasses.replace(on_demand.common, model=model, revision=revision)
    last, told = Progress(0, 0), asyncio.Event()

    def tell(_: str, progress: Progress) -> None:
        nonlocal last
        last = progress
        told.set()

    yield {"status": "pulling manifest"}
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"  # programs show a bar for each
    fetching = asyncio.create_task(fetched(config, asyncio.Event(), tell))
    try:
        while not fetching.done():
            await asyncio.wait((fetching,), timeout=TELL_S)
            if told.is_set():
                told.clear()
                sizes: JsonObject = {"total": last.total_bytes, "completed": last.done_bytes}
                yield {"status": f"pulling {model}", "digest": digest} | sizes
        fetching.result()
        await on_demand.look(now=True)
        if on_demand.called(name) is None:
            yield {"error": f"{name} was fetched, and cannot be served here. deltic list says why."}
            return
        yield {"status": "verifying sha256 digest"}
        yield {"status": "success"}
    except (ValueError, OSError) as error:
        yield {"error": str(error)}
    finally:
        fetching.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await fetching


async def _encoded(lines: AsyncIterator[JsonObject]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield msgspec.json.encode(line) + b"\n"


class LoadRequest(Struct, forbid_unknown_fields=True):
    """Body of POST /models/load and /models/unload."""

    model: Annotated[str, Meta(min_length=1)]


async def load_model(service: Service, request: Request) -> ASGIApp:
    """POST /v1/models/load: has a model loaded; the answer does not wait for it, GET /v1/models tells."""
    on_demand = _on_demand(service)
    model = await on_demand.find((await parsed(service, request, LoadRequest)).model)
    on_demand.load(model)
    return json_response({"success": True})


async def unload_model(service: Service, request: Request) -> ASGIApp:
    """POST /v1/models/unload: has a model unloaded once it is idle."""
    on_demand = _on_demand(service)
    on_demand.keep(await on_demand.find((await parsed(service, request, LoadRequest)).model), 0.0)
    return json_response({"success": True})


def _on_demand(service: Service) -> OnDemand:
    """Raises ApiError (400) where models stay."""
    if service.server.on_demand is None:
        message = "the models of this server stay loaded. Start it with --models-from to have them come and go."
        raise ApiError(400, message, code="models_stay")
    return service.server.on_demand
