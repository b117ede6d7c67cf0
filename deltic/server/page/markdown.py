"""POST /page/markdown: texts of a model as nodes, of which the page makes elements.

Parsers of strangers' text can be made to take forever. So a process of its own draws them (drawing.py), with
little time and memory (server/isolated.py). It alone imports the libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deltic.server.errors import bad_request
from deltic.server.isolated import Refused, ask
from deltic.server.limits import TICKET, Ticket
from deltic.server.preparation import parsed
from deltic.server.transport import unless_disconnected

if TYPE_CHECKING:
    from deltic.server.service import Service

PROGRAM = ("deltic.server.page.drawing",)
MAX_TEXTS = 100
MAX_BYTES = 2_000_000
"""Bytes of all texts."""
DRAW_S = 2.0
"""Seconds of a processor that all texts together have."""
MEMORY = 1 << 30
"""Bytes of address space of the process that draws."""


class DrawRequest(msgspec.Struct, forbid_unknown_fields=True):
    texts: list[str]


async def draw(service: Service, request: Request) -> ASGIApp:
    """POST /page/markdown: the blocks of texts, for the page.

    `drawn` has a list for each text, whose items are the line that a block begins in and its node. `ms` is
    the time that it took of a processor.
    """
    asked = await parsed(service, request, DrawRequest)
    data = msgspec.json.encode(asked.texts)
    if len(asked.texts) > MAX_TEXTS or len(data) > MAX_BYTES:
        raise bad_request("texts", f"have at most {MAX_TEXTS} items and {MAX_BYTES} bytes. Send fewer at a time.")
    ticket: Ticket = request.scope[TICKET]
    ticket.hold_body(len(data))  # until it is drawn

    async def drawn() -> bytes:
        with await service.server.drawings.take(ticket.turns, 1):
            return await ask(PROGRAM, data, DRAW_S, "cannot be drawn. Show them as they are.")

    try:
        made = await unless_disconnected(request.receive, drawn())
    except Refused as refused:
        raise bad_request("texts", str(refused), "cannot_be_drawn") from None
    return Response(made, media_type="application/json")
