"""POST /pdf/text: the text of a PDF, page by page, for whoever wants to put it into a prompt.

A file is read by a process of its own (server/isolated.py), which alone imports pypdf. Bounds are on bytes,
pages, characters, time and memory. Pages that are pictures have no text; nothing is recognised in them.
"""

from __future__ import annotations

import io
import json
import signal
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deltic.server.errors import ApiError, bad_request
from deltic.server.isolated import Refused, answer, ask
from deltic.server.limits import TICKET, Ticket
from deltic.server.transport import read_body, unless_disconnected

if TYPE_CHECKING:  # the program starts sooner without it
    from deltic.server.service import Service

MAX_PDF_BYTES = 20_000_000
MAX_PAGES = 500
"""Pages that are read; of a longer file, the first."""
MAX_CHARACTERS = 2_000_000
"""Characters that are read, more than a prompt can have; of a longer file, the first pages."""
ENOUGH_S = 10.0
"""Seconds of a processor after which no other page is begun."""
PAGE_S = 8.0
"""Seconds of a processor after which a page is given up, and the next one begun."""
AGAIN_S = 0.5
"""Seconds of a processor after which such a page is told to end again: a destructor may have swallowed it."""
READ_S = 20.0
"""Seconds of a processor after which a file is given up: more than ENOUGH_S and PAGE_S together."""
READ_MEMORY = 1 << 30
"""Bytes of address space of the process that reads."""

PROGRAM = ("deltic.server.pdf",)


async def pdf_text(service: Service, request: Request) -> ASGIApp:
    """POST /pdf/text: the text of a PDF file, page by page.

    The body is the file. Pages that were not read, since there are too many, are counted in `n_pages` only. A
    page that cannot be read, or takes too long, has an empty text, and its number stands in `unread`.
    """
    if find_spec("pypdf") is None:
        message = "PDF files need a library that is not installed. Run: pip install 'deltic[pdf]'."
        raise ApiError(501, message, code="pdf_not_available")
    ticket: Ticket = request.scope[TICKET]
    most_mb = min(service.server.config.max_body_mb or MAX_PDF_BYTES / 1e6, MAX_PDF_BYTES / 1e6)
    data = await read_body(request, most_mb, is_json=False)

    async def read() -> bytes:
        with await service.server.documents.take(ticket.turns, 1):
            return await ask(PROGRAM, data, READ_S, "cannot be read: it is damaged, or no PDF.")

    try:
        made = await unless_disconnected(request.receive, read())
    except Refused as refused:
        raise bad_request("body", str(refused), "invalid_pdf") from None
    finally:
        ticket.drop_body()
    return Response(made, media_type="application/json")


def prepare() -> None:
    """Imports what files need."""
    import pypdf  # noqa: F401


def main() -> int:
    """A PDF in stdin; its text out of stdout, as JSON."""
    return answer(_read, limit_s=READ_S, memory=READ_MEMORY, most_bytes=MAX_PDF_BYTES)


class _TooLong(BaseException):
    """The end of a page's time: no `except Exception` of the library holds it."""


def _end_page(*_: object) -> None:
    raise _TooLong


def _read(data: bytes) -> bytes:
    """The text of a file's pages, as JSON. One that cannot be read, or takes over PAGE_S, is empty, and told
    by its number.

    Raises Refused.
    """
    import pypdf
    from pypdf.errors import DependencyError, PdfReadError

    if not data.lstrip()[:1024].count(b"%PDF-"):
        raise Refused("is no PDF. Send a PDF file as it is.")
    signal.signal(signal.SIGPROF, _end_page)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Refused("is encrypted. Remove its password first.")
        n_pages = len(reader.pages)
        pages, unread = list[str](), list[int]()
        n_characters, begun_s = 0, time.process_time()
        for number in range(1, min(n_pages, MAX_PAGES) + 1):
            try:
                signal.setitimer(signal.ITIMER_PROF, PAGE_S, AGAIN_S)
                try:
                    text = reader.pages[number - 1].extract_text()
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
            except DependencyError:
                raise
            except (Exception, _TooLong):  # whatever the library meets in a stranger's page
                unread.append(number)
                text = ""
            text = text.encode("utf-8", "replace").decode().replace("\0", "").strip()
            n_characters += len(text)
            if n_characters > MAX_CHARACTERS and pages:
                break
            pages.append(text[:MAX_CHARACTERS])
            if time.process_time() - begun_s > ENOUGH_S:
                break
    except DependencyError:
        raise Refused("is encrypted. Remove its password first.") from None
    except PdfReadError:
        raise Refused("cannot be read: it is damaged.") from None
    except MemoryError:
        raise Refused("needs too much memory to be read. Send fewer pages.") from None
    if unread and not any(pages):
        raise Refused("cannot be read: its pages are damaged, or take too long.")
    if not any(pages):
        raise Refused("has no text: its pages are pictures. Send them as pictures to a model that sees.")
    return json.dumps({"pages": pages, "n_pages": n_pages, "unread": unread}, ensure_ascii=False).encode()
