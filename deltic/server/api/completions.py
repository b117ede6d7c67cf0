"""Chats and completions of the OpenAI API, and what every other door into a chat shares with them.

A body becomes a checked struct and a Generation, its updates become JSON. A door of another form
(server/api/responses.py, server/api/anthropic.py) makes a ChatRequest of its own body, takes `prepare_chat`
and `chat_generation`, and writes its own events.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine import messages as engine
from deltic.server.api import decode, protocol
from deltic.server.chat import answer
from deltic.server.chat.constraint import is_custom, is_fixed
from deltic.server.chat.generation import Generation
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.picture_parts import PictureBounds, Pictures
from deltic.server.chat.template import Prompt, render
from deltic.server.errors import PromptTooLong, bad_request, naming
from deltic.server.limits import TICKET, Ticket
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import EventStream, LargeResponse, unless_disconnected
from deltic.text import Tokenizer

MAX_HELD = 1000
"""Pieces that wait for the prompt before them to be written, until those of a client that does not read are
treated as any stream's.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat that was checked, rendered and encoded: what a generation is made of."""

    chat: protocol.ChatRequest
    prompt: Prompt
    params: engine.SamplingParams
    tools: dict[str, dict[str, Any]] | None
    """Schemas of the tools that may be called; None: no calls are looked for."""
    is_fixed: bool
    """Whether a grammar makes all that is behind the thought."""


def prepare_chat(service: Service, chat: protocol.ChatRequest, info: engine.EngineInfo, pictures: Pictures) -> Prepared:
    """Any door's chat, as a ChatRequest, on its way to the engine. pictures: those of its messages.

    Slow for long ones, so it is a step of a Preparation. Raises ApiError.
    """
    with naming(decode.older_names(chat)):
        check(service, chat)
        # Before the prompt: where it is new, it is compiled elsewhere, and this step begins anew there.
        grammar = service.constrainer.chat_grammar(chat)
        prompt, tools, max_tokens = rendered(service, chat, info, pictures)
        params = protocol.sampling_params(chat, max_tokens, info, service.defaults, service.config)
        if constraint := service.constrainer.chat(chat, grammar, prompt.thinking):
            params = msgspec.structs.replace(params, constraint=constraint)
        return Prepared(chat, prompt, params, tools, is_fixed(chat))


def rendered(
    service: Service, chat: protocol.ChatRequest, info: engine.EngineInfo, pictures: Pictures
) -> tuple[Prompt, dict[str, dict[str, Any]] | None, int]:
    """A checked chat's prompt, the schemas of the tools that the answer may call, and the answer's longest
    length. Raises ApiError.
    """
    if info.pictures is None and chat.mm_processor_kwargs not in (None, PictureBounds()):
        raise bad_request("mm_processor_kwargs", "this server reads text only; leave it out", "unsupported_field")
    kept = protocol.kept_tokens(chat, info, service.default_length)
    prompt, tools = render(service.template, chat, protocol.context_limit(info), kept, pictures)
    return prompt, tools, protocol.answer_length(chat, len(prompt.ids), info, service.default_length)


def chat_generation(service: Service, prepared: Prepared, request_id: str, ticket: Ticket) -> Generation:
    """The engine's request of a prepared chat, and the parsers of its answer; it begins with `run`.

    ticket: the HTTP request's, `request.scope[TICKET]`."""
    chat, prompt, params = prepared.chat, prepared.prompt, prepared.params
    if prompt.effort:
        ticket.notes["reasoning_effort"] = prompt.effort
    shown = _shown(chat, logprobs=params.logprobs is not None, hides_thought=chat.include_reasoning is False)
    exact = bool(params.constraint and params.constraint.grammar)
    parsers = [
        OutputParser(thinking=prompt.thinking, tools=prepared.tools, fixed=prepared.is_fixed, exact=exact)
        for _ in range(params.n)
    ]
    choices = [answer.Choice(i, service.tokenizer, shown, parser) for i, parser in enumerate(parsers)]
    sent = engine_request(request_id, prompt.ids, params, chat, prompt.boundaries)
    sent.pictures = prompt.pictures
    return Generation(service.client, service.metrics, [sent], choices, ticket, service.adapter)


def _shown(asked: protocol.Sampling, **more: bool) -> answer.Shown:
    """more: what only chats, or only completions, say of it."""
    return answer.Shown(
        stops=protocol.stop_strings(asked),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        skip_special_tokens=asked.skip_special_tokens is not False,
        includes_stop=bool(asked.include_stop_str_in_output),
        gives_ids=bool(asked.return_token_ids),
        gives_text=asked.detokenize is not False,
        **more,
    )


async def prepared_chat(service: Service, request: Request, info: engine.EngineInfo) -> Prepared:
    """The chat that a body is, ready for the engine. Raises ApiError."""
    async with Preparation(service, request) as preparation:
        chat = await preparation.parse(protocol.ChatRequest)
        decode.take_functions(chat)
        pictures = await preparation.read_pictures(chat)
        return await preparation.run(prepare_chat, service, chat, info, pictures)


async def chat_completions(service: Service, request: Request) -> ASGIApp:
    """POST /v1/chat/completions: an answer to a chat."""
    info = service.admit()
    prepared = await prepared_chat(service, request, info)
    chat = prepared.chat
    request_id = f"chatcmpl-{secrets.token_hex(16)}"
    answer_id = request.scope["deltic.answer_id"] = chat.rid or _named("chatcmpl-", chat) or request_id
    generation = chat_generation(service, prepared, request_id, request.scope[TICKET])
    extras = extras_of(service, chat, [prepared.prompt.ids])
    said = answer.ChatAnswer(answer_id, service.model_name, service.tokenizer, extras)
    if chat.stream:
        said.note(generation.usage())
        first = b"".join(map(said.role_chunk, range(prepared.params.n)))
        return AnswerStream(generation, said, first)
    messages = await unless_disconnected(request.receive, collect(generation, said))
    extra: dict[str, Any] = {}
    if generation.prompt_logprobs[0] is not None:
        extra["prompt_logprobs"] = answer.prompt_logprobs(generation.prompt_logprobs[0], service.tokenizer)
    return LargeResponse(said.body(messages, generation.usage(), extra))


def check(service: Service, request: protocol.ChatRequest | protocol.CompletionRequest) -> None:
    """Refuses what neither API may ask. Raises ApiError (400, 404)."""
    service.check_model(request.model)
    decode.settle(request)
    protocol.stop_strings(request)
    if getattr(request, "chat_template", None) and not service.config.trust_request_chat_template:
        said = "this server takes no templates of requests (--trust-request-chat-template)"
        raise bad_request("chat_template", said, "unsupported_field")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "only for a stream; set stream to true")


def engine_request(
    request_id: str,
    prompt_ids: list[int],
    params: engine.SamplingParams,
    asked: protocol.Sampling,
    boundaries: list[int],
) -> engine.Request:
    """The engine's Request for one prompt. boundaries: token offsets at which its messages end."""
    return engine.Request(
        id=request_id,
        prompt_ids=prompt_ids,
        params=params,
        priority=asked.priority or 0,
        boundaries=boundaries,
        cache_salt=asked.cache_salt or "",
        use_cache=asked.cache_prompt is not False,
    )


def _named(prefix: str, request: protocol.Sampling) -> str | None:
    """The id that a client gave its answer. The engine's is another: this one may come twice."""
    return f"{prefix}{request.request_id}" if request.request_id else None


def extras_of(service: Service, request: protocol.Sampling, prompts: list[list[int]]) -> answer.Extras:
    """prompts: their ids."""
    options = request.stream_options or protocol.StreamOptions()
    usage = bool(options.include_usage or (request.usage and request.usage.include))
    return answer.Extras(
        usage=usage,
        running_usage=usage and bool(options.continuous_usage_stats),
        timings=bool(request.timings_per_token),
        padding=bool(options.include_obfuscation),
        prompts=prompts if request.return_token_ids else None,
        names_ids=bool(request.return_tokens_as_token_ids),
        tier=request.service_tier is not None,
        older_calls=bool(getattr(request, "functions", None)),
        custom=frozenset(tool["custom"]["name"] for tool in getattr(request, "tools", None) or () if is_custom(tool)),
        fingerprint=service.fingerprint,
    )


class Echo:
    """The prompts of a completion that is to repeat them. Slow to make for long ones."""

    def __init__(
        self,
        asked: protocol.CompletionRequest,
        prompts: list[str | list[int]],
        requests: list[engine.Request],
        tokenizer: Tokenizer,
    ) -> None:
        """requests: those of `prompts`."""
        has_scores = asked.logprobs is not None
        is_whole = not has_scores and asked.truncate_prompt_tokens is None
        self._ids = [sent.prompt_ids for sent in requests]
        self.texts = [
            prompt if isinstance(prompt, str) and is_whole else tokenizer.decode(ids, False)
            for prompt, ids in zip(prompts, self._ids, strict=True)
        ]
        self._offsets = [answer.offsets(ids, tokenizer) for ids in self._ids] if has_scores else None

    def of(self, p: int, generation: Generation) -> tuple[str, answer.PromptScores | None]:
        """Text of prompt `p`, and the log-probabilities that came with the first of its answer."""
        entries = generation.prompt_logprobs[p]
        if self._offsets is None or entries is None:
            return self.texts[p], None
        return self.texts[p], answer.PromptScores(self._ids[p], entries, self._offsets[p])


async def completions(service: Service, request: Request) -> ASGIApp:
    """POST /v1/completions: how texts go on."""
    info = service.admit()
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(protocol.CompletionRequest)
        requests, echo = await preparation.run(_prepare, service, asked, info)
    n = requests[0].params.n
    tokenizer = service.tokenizer
    generation = completion_generation(service, asked, requests, echo, request.scope[TICKET])
    answer_id = asked.rid or _named("cmpl-", asked) or requests[0].id.rpartition("-")[0]
    request.scope["deltic.answer_id"] = answer_id
    extras = extras_of(service, asked, [sent.prompt_ids for sent in requests])
    said = answer.CompletionAnswer(answer_id, service.model_name, tokenizer, extras, asked.logprobs or 0, n)
    if asked.stream:
        return EchoStream(generation, said, echo, n) if echo else AnswerStream(generation, said)
    messages = await unless_disconnected(request.receive, collect(generation, said))
    if echo is not None:
        for index, message in enumerate(messages):
            said.put_prompt(message, *echo.of(index // n, generation))
    if asked.prompt_logprobs is not None:
        for index, message in enumerate(messages):
            entries = generation.prompt_logprobs[index // n]
            if entries is not None:
                message.prompt_logprobs = answer.prompt_logprobs(entries, tokenizer)
    return LargeResponse(said.body(messages, generation.usage()))


def _prepare(
    service: Service, asked: protocol.CompletionRequest, info: engine.EngineInfo
) -> tuple[list[engine.Request], Echo | None]:
    """Raises ApiError."""
    prompts = prompts_of(service, asked, info)
    requests = requests_of(service, asked, prompts, info)
    return requests, Echo(asked, prompts, requests, service.tokenizer) if asked.echo else None


def completion_generation(
    service: Service,
    asked: protocol.CompletionRequest,
    requests: list[engine.Request],
    echo: Echo | None,
    ticket: Ticket,
) -> Generation:
    """As chat_generation, of a completion's prompts. requests: those of `requests_of`."""
    n = requests[0].params.n
    shown = _shown(asked, logprobs=asked.logprobs is not None, is_silent=asked.max_tokens == 0)
    offsets = [len(echo.texts[index // n]) if echo else 0 for index in range(len(requests) * n)]
    choices = [answer.Choice(i, service.tokenizer, shown, offset=offset) for i, offset in enumerate(offsets)]
    return Generation(service.client, service.metrics, requests, choices, ticket, service.adapter)


def prompts_of(service: Service, asked: protocol.CompletionRequest, info: engine.EngineInfo) -> list[str | list[int]]:
    """The prompts of a completion that may be asked. Raises ApiError."""
    check(service, asked)
    prompts = protocol.prompts(asked, info)
    most = info.max_num_seqs + service.config.max_queue
    if len(prompts) * (asked.n or 1) > most:
        raise bad_request(
            "prompt", f"{len(prompts)} prompts are more than can wait here; send at most {most} sequences"
        )
    return prompts


def encoded(
    service: Service, asked: protocol.CompletionRequest, prompts: list[str | list[int]], info: engine.EngineInfo
) -> Iterator[tuple[list[int], int]]:
    """Of each prompt its ids, and its answer's longest length. Raises ApiError (400)."""
    limit = protocol.context_limit(info)
    kept = protocol.kept_tokens(asked, info, service.default_length)
    for prompt in prompts:
        if not isinstance(prompt, str):
            ids = prompt[-(kept or 0) :]
        elif kept is not None:
            ids = service.tokenizer.encode_end(prompt, kept, "parse")
        elif (n := service.tokenizer.least_tokens(prompt, limit)) >= limit:
            raise PromptTooLong("prompt", n, limit, at_least=True)
        else:
            ids = service.tokenizer.encode(prompt, "parse")
        yield ids, protocol.answer_length(asked, len(ids), info, service.default_length)


def requests_of(
    service: Service, asked: protocol.CompletionRequest, prompts: list[str | list[int]], info: engine.EngineInfo
) -> list[engine.Request]:
    """One request of the engine for each prompt. Raises ApiError (400)."""
    request_id = f"cmpl-{secrets.token_hex(16)}"
    requests = []
    constraint = None
    for i, (ids, max_tokens) in enumerate(encoded(service, asked, prompts, info)):
        params = protocol.sampling_params(asked, max_tokens, info, service.defaults, service.config)
        if i == 0:  # it is the same for all prompts
            constraint = service.constrainer.completion(asked)
        if constraint:
            params = msgspec.structs.replace(params, constraint=constraint)
        requests.append(engine_request(f"{request_id}-{i}", ids, params, asked, []))
    return requests


class UpdateStream(EventStream):
    """Writes a generation's updates as they come."""

    def __init__(
        self,
        generation: Generation,
        add: Callable[[answer.Update], bytes],
        begin: Callable[[], bytes] = bytes,
        end: Callable[[], bytes] = bytes,
    ) -> None:
        """add: of what an update adds. begin, end: of what goes before the first and behind the last."""
        super().__init__()
        self._generation = generation
        self._add = add
        self._begin = begin
        self._end = end

    async def run(self) -> None:
        await self._generation.run(self._take)
        self.write_end()

    def write_end(self) -> None:
        if chunk := self._end():
            self.write(chunk)

    def _take(self, updates: list[answer.Update]) -> None:
        begin, self._begin = self._begin, bytes
        if chunk := begin() + b"".join(map(self._add, updates)):
            self.write(chunk)


class AnswerStream(UpdateStream):
    """The chunks of an answer: `first` goes before the first update, the usage after the last."""

    def __init__(
        self, generation: Generation, said: answer.ChatAnswer | answer.CompletionAnswer, first: bytes = b""
    ) -> None:
        extras = said.extras
        super().__init__(
            generation,
            self._counted if extras.running_usage or extras.timings else said.chunks,
            lambda: first,
            lambda: said.usage_chunk(generation.usage()) if extras.usage else b"",
        )
        self._said = said
        self._n_tokens: dict[int, int] = {}

    def _counted(self, update: answer.Update) -> bytes:
        """Its chunks, each with the counts up to it: several updates may have come together."""
        usage = self._generation.usage()
        self._n_tokens[update.index] = max(update.n_tokens, self._n_tokens.get(update.index, 0))
        usage.completion_tokens = sum(self._n_tokens.values())
        self._said.note(usage)
        return self._said.chunks(update)


class EchoStream(AnswerStream):
    """The chunks of a completion behind those of its prompts, which are made a few at a time: others go on
    meanwhile.
    """

    def __init__(self, generation: Generation, said: answer.CompletionAnswer, echo: Echo, n: int) -> None:
        """n: choices of each prompt."""
        super().__init__(generation, said)
        self._completion = said
        self._echo = echo
        self._n = n
        self._held = deque[answer.Update]()
        """Pieces that came and have not been written."""
        self._waiting = set(range(generation.n_choices))
        """Choices whose prompt has not been."""
        self._writing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            await self._generation.run(self._hold)
        except asyncio.CancelledError:
            if self._writing is not None:
                self._writing.cancel()
            raise
        finally:
            if self._writing is not None:
                await self._writing
        self.write_end()

    def _hold(self, updates: list[answer.Update]) -> None:
        self._held += updates
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_held())

    async def _write_held(self) -> None:
        while self._held:
            update = self._held.popleft()
            if update.index in self._waiting:
                self._waiting.remove(update.index)
                text, scores = self._echo.of(update.index // self._n, self._generation)
                for chunk in self._completion.prompt_chunks(update.index, text, scores):
                    self.write(chunk)
                    if len(self._held) < MAX_HELD:
                        await self.drained()
            self._take([update])
        self._writing = None


async def collect(generation: Generation, said: answer.ChatAnswer | answer.CompletionAnswer) -> list[answer.Message]:
    """The whole answer, which `said` will write: a message for each choice."""
    messages = [answer.Message() for _ in range(generation.n_choices)]

    def take(updates: list[answer.Update]) -> None:
        for update in updates:
            messages[update.index].add(update)
            said.keep(messages[update.index])

    await generation.run(take)
    return messages
