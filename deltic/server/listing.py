"""Lists that are answered a page at a time, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request

from deltic.server.api import decode
from deltic.server.errors import bad_request
from deltic.server.transport import LargeResponse

Query = TypeVar("Query", bound=Struct)
Row = TypeVar("Row")


class ListQuery(Struct, kw_only=True):
    """Query of a list."""

    limit: Annotated[int, Meta(ge=1, le=100)] | None = None
    """Entries of a page."""
    order: Literal["asc", "desc"] | None = None
    """The newest first (desc), or the oldest."""
    after: str | None = None
    """Id of the last entry of the page before."""


def query_of(request: Request, kind: type[Query]) -> Query:
    """Reads the query of a request. Raises ApiError (400), which names the parameter at fault."""
    return decode.convert(dict(request.query_params), kind, "", is_text=True)


def listing(
    query: ListQuery, rows: Sequence[tuple[str, Row]], show: Callable[[Row], object], default: int = 20
) -> LargeResponse:
    """Answers with a page of a list. rows: id and entry of each, in the order in which they were made; show:
    makes the JSON of an entry, as it is sent; default: entries of a page. Raises ApiError (400).
    """
    ordered = list(rows) if query.order == "asc" else list(reversed(rows))
    if query.after is not None:
        places = [i for i, (row_id, _) in enumerate(ordered) if row_id == query.after]
        if not places:
            raise bad_request("after", f"{query.after!r} is not in the list")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: query.limit or default]
    return LargeResponse(
        {
            "object": "list",
            "data": (show(row) for _, row in page),
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": len(ordered) > len(page),
        }
    )
