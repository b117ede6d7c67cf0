"""POST /v1/embeddings: vectors of texts, by a model that is an embedder. /api/embed and /api/embeddings of
Ollama's API (ollama.py) go the same way.
"""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine import messages as engine
from deltic.server.api.completions import computed, token_ids
from deltic.server.chat.vectors import VectorOut, vector_requests
from deltic.server.errors import bad_request
from deltic.server.limits import Usage
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import LargeResponse

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI has it."""


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: str | list[object]
    """A text, token ids, or a list of texts or of token ids."""
    model: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Elements of a vector, from its front; all of them unless it is given."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers (float), or float32, little-endian, in base64."""
    prompt_name: str | None = None
    """The checkpoint's prompt that stands before each text; its default one unless it is given."""
    user: str | None = None
    safety_identifier: str | None = None


async def embeddings(service: Service, request: Request) -> ASGIApp:
    """POST /v1/embeddings: vectors of texts."""
    info = service.admit(vectors=True)

    def prepare(asked: EmbeddingRequest) -> list[engine.Request]:
        given = _inputs(asked.input, info)
        return vector_requests(service.tokenizer, info, given, asked.dimensions, asked.prompt_name)

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(EmbeddingRequest)
        service.check_model(asked.model)
        requests = await preparation.run(prepare, asked)
    vectors, usage = await vectors_of(service, request, requests, info)
    write = in_base64 if asked.encoding_format == "base64" else numbers
    items = ({"object": "embedding", "index": i, "embedding": write(vector)} for i, vector in enumerate(vectors))
    counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return LargeResponse({"object": "list", "data": items, "model": service.model_name, "usage": counts})


def _inputs(given: str | list[object], info: engine.EngineInfo) -> list[str | list[int]]:
    """Texts, or ids, of an `input`. Raises ApiError (400)."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("input", "is an empty list")
    if isinstance(given[0], int):
        return [token_ids("input", given, info)]
    check_number(len(given))
    return [each if isinstance(each, str) else token_ids(f"input[{i}]", each, info) for i, each in enumerate(given)]


def check_number(n: int) -> None:
    """Raises ApiError (400) for more texts than one request may have."""
    if n > MAX_INPUTS:
        raise bad_request("input", f"has {n} entries. Send at most {MAX_INPUTS} at once.")


async def vectors_of(
    service: Service, request: Request, requests: list[engine.Request], info: engine.EngineInfo
) -> tuple[list[bytes], Usage]:
    """Vectors, float32, in the order of the requests, and what they took. As many are in the engine at once
    as it can run.

    Raises ApiError, ClientDisconnect.
    """
    request.scope["deltic.answer_id"] = requests[0].id.rpartition("-")[0] if requests else "-"
    outs = [VectorOut(i) for i in range(len(requests))]
    usage = await computed(service, request, requests, outs, info.max_num_seqs)
    return [out.vector for out in outs], usage


def numbers(vector: bytes) -> msgspec.Raw:
    """JSON of a float32 vector."""
    return msgspec.Raw(msgspec.json.encode(array("f", vector).tolist()))


def in_base64(vector: bytes) -> str:
    """The bytes of a float32 vector as text."""
    return base64.b64encode(vector).decode()
