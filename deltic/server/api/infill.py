"""llama.cpp's `/infill`, by which editors (llama.vim, llama.vscode) have code completed: a file with a gap,
and pieces of others.

A body becomes a Completion of ids, and goes the way of all. What does not fit the context is left out, as
llama.cpp does: other files first, then what is far from the gap; `truncated` says so. Unless a temperature or
several answers are asked for, the most likely token is drawn, so the same text gets the same proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine.messages import EngineInfo
from deltic.server.api import completions, protocol
from deltic.server.chat.answer import Message, Update
from deltic.server.chat.gap import GapChoice, GapPrompt, OtherFile
from deltic.server.chat.generation import Generation
from deltic.server.chat.request import Completion, Count, context_limit
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET, Ticket, Usage
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import LargeResponse, unless_disconnected

LEAST_PROMPT = 8
"""Tokens of the context that a prompt has at least, however long an answer was asked for."""

_encode = msgspec.json.Encoder().encode


class ExtraFile(Struct):
    """A piece of another file. Editors send more of it, as when it was taken, which says nothing here."""

    text: str
    filename: str | None = None


class InfillRequest(protocol.SamplingFields):
    """POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None
    """Text behind `input_prefix`: what of the line stands before the cursor."""
    n_indent: Count | None = None
    """Number of blanks before each line but the first: the answer ends before a line that has fewer."""
    n_cmpl: protocol.Positive | None = None
    """Answers; the body is a list of them, if there are several."""
    t_max_predict_ms: Annotated[int, Meta(le=2**31 - 1)] | None = None
    """Time since the first token after which an answer that has a whole line ends."""
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    """Fields that the answer has, as `content` or `timings/prompt_n`; None or []: all."""
    # Carry no promise about the answer.
    t_max_prompt_ms: int | None = None
    id_slot: int | None = None
    samplers: list[str] | str | None = None
    """Order of llama.cpp's samplers. This server has its own, and no sampler that is called `infill`."""


_UNUSED = (
    "truncate_prompt_tokens", "prompt_logprobs", "stream_options", "usage", "return_tokens_as_token_ids",
    "request_id", "rid", "timings_per_token",
)  # fmt: skip
"""Fields that completions have, and answers of this form have no place for."""


class Gap(Struct, frozen=True):
    """A checked request for what fills a gap."""

    prompt: GapPrompt
    prepared: completions.PreparedCompletion
    indent: int
    most_s: float
    fields: list[str] | None


async def infill(service: Service, request: Request) -> ASGIApp:
    """POST /infill: what fills a gap in a text, in llama.cpp's form."""
    info = service.admit()
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(InfillRequest)
        gap = await preparation.run(prepared_gap, service, asked, info)
    request.scope["deltic.answer_id"] = gap.prepared.requests[0].id.rpartition("-")[0]
    answer = GapAnswer(service, gap, info)
    generation = answer.generation(request.scope[TICKET])
    if asked.stream:
        return GapStream(generation, answer)
    messages = [Message() for _ in answer.choices]

    def take(updates: list[Update]) -> None:
        for update in updates:
            messages[update.index].add(update)

    await unless_disconnected(request.receive, generation.run(take))
    bodies = [answer.body(index, message, generation.usage()) for index, message in enumerate(messages)]
    return LargeResponse(_encode(bodies if len(bodies) > 1 else bodies[0]))


def prepared_gap(service: Service, asked: InfillRequest, info: EngineInfo) -> Gap:
    """Slow for long texts, so it is a step of a Preparation. Raises ApiError (400)."""
    filler = completions.filler_of(service, "input_prefix")
    n_most = protocol.longest(asked)
    limit = context_limit(info)
    for field in _UNUSED:
        if getattr(asked, field) is not None:
            raise bad_request(field, "has no meaning for /infill. Leave it out.", "unsupported_field")
    room = max(LEAST_PROMPT, limit - min(limit // 2, 2**31 if n_most is None else n_most) - 1)
    others = [OtherFile(extra.filename or "tmp", extra.text) for extra in asked.input_extra or ()]
    prompt = filler.fitting(asked.input_prefix + (asked.prompt or ""), asked.input_suffix, others, min(room, limit - 1))
    completion = _completion(service, asked, prompt, limit if n_most is None else n_most)
    prepared = completions.prepare_completion(service, completion, info)
    for sent in prepared.requests:
        sent.params = completions.with_ends(sent.params, filler)
        sent.boundaries = [prompt.n_others] if prompt.n_others else []
    most_s = max(0, asked.t_max_predict_ms or 0) / 1e3
    return Gap(prompt, prepared, asked.n_indent or 0, most_s, asked.response_fields or None)


def _completion(service: Service, asked: InfillRequest, prompt: GapPrompt, n_most: int) -> Completion:
    """Raises ApiError (400)."""
    if asked.n is not None and asked.n_cmpl not in (None, asked.n):
        raise bad_request("n_cmpl", "contradicts n. Give one of the two.")
    n = asked.n_cmpl or asked.n
    settled = msgspec.structs.replace(
        asked,
        n=n,
        seed=None if asked.seed == -1 else asked.seed,
        temperature=0.0 if asked.temperature is None and n in (None, 1) else asked.temperature,
        return_token_ids=asked.return_tokens or asked.return_token_ids,
    )
    sampling = protocol.sampling_of(settled, service.defaults, max_tokens=n_most, logprobs=None)
    return Completion(sampling, [prompt.ids], asked.model or None, origin={"n": "n_cmpl", "max_tokens": "n_predict"})


class GapAnswer:
    """Text that fills a gap, whole (`body`) or in chunks, in llama.cpp's form."""

    def __init__(self, service: Service, gap: Gap, info: EngineInfo) -> None:
        self._service = service
        self._gap = gap
        self._n_context = context_limit(info)
        sampling, n = gap.prepared.completion.sampling, gap.prepared.requests[0].params.n
        bounds = sampling.shown, gap.indent, gap.most_s
        self.choices = [GapChoice(i, service.tokenizer, *bounds) for i in range(n)]

    def generation(self, ticket: Ticket) -> Generation:
        """The engine's request and this answer's choices; it begins with `run`."""
        return self._service.generation(self._gap.prepared.requests, self.choices, ticket)

    def body(self, index: int, message: Message, usage: Usage) -> dict[str, object]:
        """The whole answer of one choice, or the fields of it that were asked for."""
        fields = self._fields(index, "".join(message.content), message, usage)
        return fields if self._gap.fields is None else _chosen(fields, self._gap.fields)

    def chunk(self, update: Update, usage: Usage) -> bytes:
        """The chunk of an update; the last one of a choice has the counts."""
        content, choice = update.delta.content, self.choices[update.index]
        if update.finish_reason is None:
            if not content and update.progress is None:
                return b""
            tokens = {"tokens": update.token_ids, "stop": False}
            counts = {"tokens_predicted": choice.n_tokens, "tokens_evaluated": len(self._gap.prompt.ids)}
            progress = {} if update.progress is None else {"prompt_progress": update.progress}
            fields: dict[str, object] = {"index": update.index, "content": content} | tokens | counts | progress
        else:
            end = Message()
            end.finish_reason, end.stop, end.token_ids = update.finish_reason, update.stop, update.token_ids
            fields = self._fields(update.index, content, end, usage)
        if self._gap.fields is not None:
            fields = _chosen(fields, self._gap.fields)
        return b"data: " + _encode(fields) + b"\n\n"

    def _fields(self, index: int, content: str, end: Message, usage: Usage) -> dict[str, object]:
        """end: why and how the choice ended."""
        choice, prompt, service = self.choices[index], self._gap.prompt, self._service
        word = end.stop if isinstance(end.stop, str) else ""
        ended = "limit" if end.finish_reason == "length" else "word" if word else "eos"
        return {
            "index": index,
            "content": content,
            "tokens": end.token_ids,
            "stop": True,
            "model": service.model_name,
            "system_fingerprint": service.fingerprint,
            "tokens_predicted": choice.n_tokens,
            "tokens_evaluated": len(prompt.ids),
            "generation_settings": self._settings(),
            "prompt": service.tokenizer.decode(prompt.ids, False),
            "has_new_line": choice.has_new_line,
            "truncated": prompt.is_cut,
            "stop_type": ended,
            "stopping_word": word,
            "tokens_cached": usage.cached_tokens,
            "timings": usage.timings(),
        }

    def _settings(self) -> dict[str, object]:
        params = self._gap.prepared.requests[0].params
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
        return {name: getattr(params, name) for name in names} | {
            "n_ctx": self._n_context,
            "n_predict": params.max_tokens,
            "n_indent": self._gap.indent,
            "t_max_predict_ms": round(self._gap.most_s * 1e3),
            "repeat_penalty": params.repetition_penalty,
            "stop": self._gap.prepared.completion.sampling.shown.stops,
        }


def _chosen(fields: dict[str, object], names: Sequence[str]) -> dict[str, object]:
    """The named fields that there are; `a/b` is field b of field a."""
    chosen = {}
    for name in names:
        value: object = fields
        for step in name.split("/"):
            value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            chosen[name] = value
    return chosen


_MISSING = object()


class GapStream(completions.UpdateStream):
    """The chunks of what fills a gap."""

    def __init__(self, generation: Generation, answer: GapAnswer) -> None:
        super().__init__(generation, lambda update: answer.chunk(update, generation.usage()))

    def last(self, error: ApiError | None) -> bytes:
        """llama.cpp ends this stream without a word."""
        return b"" if error is None else super().last(error)
