"""Requests for vectors: of a text, or ids, the prompt that an embedder reads; and the way out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from deltic.engine.messages import EngineInfo, Output, Pooling, Request, SamplingParams
from deltic.server.chat.answer import Update, WayOut
from deltic.server.chat.calls import AnswerDelta
from deltic.server.chat.request import context_limit
from deltic.server.errors import bad_request
from deltic.text import Tokenizer


class VectorOut(WayOut):
    """The way out of one prompt that is pooled."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.vector = b""
        """float32."""

    def push(self, output: Output) -> Update:
        self.vector, self.finish_reason = output.vector, output.finish_reason
        return Update(self.index, AnswerDelta(), finish_reason=self.finish_reason)


def vector_requests(
    tokenizer: Tokenizer,
    info: EngineInfo,
    given: Sequence[str | list[int]],
    dimensions: int | None = None,
    prompt_name: str | None = None,
    is_cut: bool = False,
) -> list[Request]:
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
    pooling = Pooling(
        mode=embedder.mode, is_normalised=embedder.is_normalised, n_dimensions=dimensions or embedder.size
    )
    params, request_id = SamplingParams(max_tokens=0, temperature=0.0), f"embd-{secrets.token_hex(16)}"
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
        requests.append(Request(id=f"{request_id}-{i}", prompt_ids=ids, params=params, pooling=pooling))
    return requests


def _too_long(name: str, n_tokens: str, limit: int) -> Exception:
    message = f"has {n_tokens} tokens, and this model reads {limit} at most. Send a shorter text."
    return bad_request(name, message, "context_length_exceeded")
