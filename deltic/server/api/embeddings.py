"""POST /v1/embeddings: vectors of texts, by a model that is an embedder. /api/embed and /api/embeddings of
Ollama's API (ollama.py) go the same way.
"""

from __future__ import annotations

import base64
import secrets
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine import messages as engine
from deltic.server.api.completions import computed, token_ids
from deltic.server.chat.answer import Update, WayOut
from deltic.server.chat.calls import AnswerDelta
from deltic.server.chat.request import context_limit
from deltic.server.errors import bad_request
from deltic.server.limits import Usage
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import LargeResponse
from deltic.text import Tokenizer

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


class VectorOut(WayOut):
    """The way out of one prompt that is pooled."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.vector = b""
        """float32."""

    def push(self, output: engine.Output) -> Update:
        self.vector, self.finish_reason = output.vector, output.finish_reason
        return Update(self.index, AnswerDelta(), finish_reason=self.finish_reason)


def vector_requests(
    tokenizer: Tokenizer,
    info: engine.EngineInfo,
    given: Sequence[str | list[int]],
    dimensions: int | None = None,
    prompt_name: str | None = None,
    is_cut: bool = False,
) -> list[engine.Request]:
    """Requests of the engine, one for each text or list of ids. Texts get the model's prompt, and what its
    tokenizer puts around a text.

    is_cut: the ends of texts that are too long are left out. Raises ApiError (400).
    """
    embedder = info.embedder
    assert embedder is not None
    if dimensions is not None and not 1 <= dimensions <= embedder.size:
        raise bad_request("dimensions", f"{dimensions} is not from 1 to {embedder.size}, which a vector has here")
    if prompt_name is not None and prompt_name not in embedder.prompts:
        known = ", ".join(map(repr, embedder.prompts)) or "none"
        raise bad_request("prompt_name", f"{prompt_name!r} is not known. The model has {known}.")
    before = embedder.prompts.get(embedder.default_prompt if prompt_name is None else prompt_name, "")
    limit = min(context_limit(info), embedder.max_tokens or info.max_model_len)
    begin, end = tokenizer.ends
    room = limit - len(begin) - len(end)
    pooling = engine.Pooling(
        mode=embedder.mode, is_normalised=embedder.is_normalised, n_dimensions=dimensions or embedder.size
    )
    params, request_id = engine.SamplingParams(max_tokens=0, temperature=0.0), f"embd-{secrets.token_hex(16)}"
    requests = []
    for i, each in enumerate(given):
        name = f"input[{i}]" if len(given) > 1 else "input"
        ids = [*each]
        if isinstance(each, str):
            if not is_cut and (n_least := tokenizer.least_tokens(before + each, room + 1)) > room:
                raise _too_long(name, f"at least {n_least + len(begin) + len(end)}", limit)
            text = before + each
            ids = tokenizer.encode_start(text, room, "parse") if is_cut else tokenizer.encode(text, "parse")
            ids = [*begin, *ids, *end]
        if not ids:
            raise bad_request(name, "is empty. A vector needs at least one token.")
        if len(ids) > limit:
            raise _too_long(name, str(len(ids)), limit)
        requests.append(engine.Request(id=f"{request_id}-{i}", prompt_ids=ids, params=params, pooling=pooling))
    return requests


def _too_long(name: str, n_tokens: str, limit: int) -> Exception:
    message = f"has {n_tokens} tokens, and this model reads {limit} at most. Send a shorter text."
    return bad_request(name, message, "context_length_exceeded")
