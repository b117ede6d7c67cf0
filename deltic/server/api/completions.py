"""Chats and completions of the OpenAI API, and what every other API of chats shares with them.

A body becomes a Chat or a Completion and a Generation, its updates become JSON. Another API
(server/api/responses.py, server/api/anthropic.py) makes a Chat of its own body, takes `prepare_chat` and
`chat_generation`, and writes its own events.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine import messages as engine
from deltic.server.api import protocol
from deltic.server.chat import answer
from deltic.server.chat import request as chats
from deltic.server.chat.gap import Filler
from deltic.server.chat.generation import Generation
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.picture_parts import PictureBounds, Pictures
from deltic.server.chat.request import Chat, Completion, Tool
from deltic.server.chat.template import Prompt, render
from deltic.server.errors import PromptTooLong, bad_request, naming
from deltic.server.limits import TICKET, Ticket, Usage
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import EventStream, LargeResponse, unless_disconnected
from deltic.text import SamplingDefaults, Tokenizer

MAX_HELD = 1000
"""Lots of updates that wait for the prompt before them to be written, until those of a client that does not
read are treated as any stream's.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat that was checked, rendered and encoded: what a generation is made of."""

    chat: Chat
    prompt: Prompt
    params: engine.SamplingParams


def prepare_chat(service: Service, chat: Chat, info: engine.EngineInfo, pictures: Pictures) -> Prepared:
    """Prepares a chat of any API for the engine. pictures: those of its messages.

    Slow for long ones, so it is a step of a Preparation. Raises ApiError.
    """
    with naming(chat.origin):
        check(service, chat)
        # Before the prompt: where it is new, it is compiled elsewhere, and this step begins anew there.
        grammar = service.constrainer.chat_grammar(chat)
        prompt, max_tokens = rendered(service, chat, info, pictures)
        params = chats.checked_params(chat, max_tokens, info, service.config)
        if constraint := service.constrainer.chat(chat, grammar, prompt.thinking):
            params = msgspec.structs.replace(params, constraint=constraint)
        return Prepared(chat, prompt, params)


def rendered(service: Service, chat: Chat, info: engine.EngineInfo, pictures: Pictures) -> tuple[Prompt, int]:
    """A checked chat's prompt, and the answer's longest length. Raises ApiError."""
    if info.pictures is None and chat.picture_bounds not in (None, PictureBounds()):
        raise bad_request("mm_processor_kwargs", "this server reads text only. Leave it out.", "unsupported_field")
    kept = chats.kept_tokens(chat.sampling, info, service.default_length)
    prompt = render(service.template, chat, chats.context_limit(info), kept, pictures)
    return prompt, chats.answer_length(chat, len(prompt.ids), info, service.default_length)


def chat_generation(service: Service, prepared: Prepared, request_id: str, ticket: Ticket) -> Generation:
    """The engine's request of a prepared chat, and the parsers of its answer; it begins with `run`.

    ticket: the HTTP request's, `request.scope[TICKET]`."""
    chat, prompt, params = prepared.chat, prepared.prompt, prepared.params
    if prompt.effort:
        ticket.notes["reasoning_effort"] = prompt.effort
    exact = bool(params.constraint and params.constraint.grammar)
    parsers = [
        OutputParser(thinking=prompt.thinking, tools=chat.schemas, fixed=chat.is_fixed, exact=exact)
        for _ in range(params.n)
    ]
    shown = chat.sampling.shown
    choices = [answer.Choice(i, service.tokenizer, shown, parser) for i, parser in enumerate(parsers)]
    sent = chats.engine_request(request_id, prompt.ids, params, chat.sampling, prompt.boundaries)
    sent.pictures = prompt.pictures
    return service.generation([sent], choices, ticket)


async def prepared_chat(
    service: Service, request: Request, info: engine.EngineInfo
) -> tuple[protocol.ChatRequest, Prepared]:
    """The chat that a body is, ready for the engine. Raises ApiError."""
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(protocol.ChatRequest)
        chat, pictures = await preparation.read_chat(protocol.chat_of, asked, service.defaults)
        return asked, await preparation.run(prepare_chat, service, chat, info, pictures)


async def chat_completions(service: Service, request: Request) -> ASGIApp:
    """POST /v1/chat/completions: an answer to a chat."""
    info = service.admit()
    asked, prepared = await prepared_chat(service, request, info)
    request_id = f"chatcmpl-{secrets.token_hex(16)}"
    answer_id = request.scope["deltic.answer_id"] = asked.rid or _named("chatcmpl-", asked) or request_id
    generation = chat_generation(service, prepared, request_id, request.scope[TICKET])
    extras = extras_of(service, asked, [prepared.prompt.ids], prepared.chat.tools)
    reply = answer.ChatAnswer(answer_id, service.model_name, service.tokenizer, extras)
    if asked.stream:
        reply.note(generation.usage())
        first = b"".join(map(reply.role_chunk, range(prepared.params.n)))
        return AnswerStream(generation, reply, first)
    messages = await unless_disconnected(request.receive, collect(generation, reply))
    extra: dict[str, object] = {}
    if generation.prompt_logprobs[0] is not None:
        extra["prompt_logprobs"] = answer.prompt_logprobs(generation.prompt_logprobs[0], service.tokenizer)
    return LargeResponse(reply.body(messages, generation.usage(), extra))


def check(service: Service, asked: Chat | Completion) -> None:
    """Raises ApiError: 404 for another model, 400 for a template that is not trusted."""
    service.check_model(asked.model)
    if isinstance(asked, Chat) and asked.chat_template and not service.config.trust_request_chat_template:
        message = "this server takes no templates of requests (--trust-request-chat-template)"
        raise bad_request("chat_template", message, "unsupported_field")


def _named(prefix: str, request: protocol.SamplingFields) -> str | None:
    """The id that a client gave its answer. The engine's is another: this one may come twice."""
    return f"{prefix}{request.request_id}" if request.request_id else None


def extras_of(
    service: Service, request: protocol.SamplingFields, prompts: list[list[int]], tools: list[Tool]
) -> answer.Extras:
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
        custom=frozenset(tool.function.name for tool in tools if tool.is_custom),
        fingerprint=service.fingerprint,
    )


class Echo:
    """The prompts of a completion that is to repeat them. Slow to make for long ones."""

    def __init__(self, asked: Completion, requests: list[engine.Request], tokenizer: Tokenizer) -> None:
        """requests: the engine's, one for each prompt."""
        has_scores = asked.sampling.shown.logprobs
        is_whole = not has_scores and asked.sampling.truncate_prompt_tokens is None
        self._ids = [sent.prompt_ids for sent in requests]
        self.texts = [
            prompt if isinstance(prompt, str) and is_whole else tokenizer.decode(ids, False)
            for prompt, ids in zip(asked.prompts, self._ids, strict=True)
        ]
        self._offsets = [answer.offsets(ids, tokenizer) for ids in self._ids] if has_scores else None

    def of(self, p: int, generation: Generation) -> tuple[str, answer.PromptScores | None]:
        """Text of prompt `p`, and the log-probabilities that came with the first of its answer."""
        entries = generation.prompt_logprobs[p]
        if self._offsets is None or entries is None:
            return self.texts[p], None
        return self.texts[p], answer.PromptScores(self._ids[p], entries, self._offsets[p])


END_OF_TEXT = "<|endoftext|>"
"""The prompt of a completion that has none."""


class CompletionRequest(protocol.SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[object] | None = None
    """Texts or token ids; None: the end of a text, behind which another begins."""
    suffix: str | None = None
    """The text behind the gap that the answer fills; "" asks for nothing."""
    echo: bool | None = None
    logprobs: chats.Count | None = None


def completion_of(request: CompletionRequest, info: engine.EngineInfo, defaults: SamplingDefaults) -> Completion:
    """The completion that a body asks for. Raises ApiError (400)."""
    sampling = protocol.sampling_of(request, defaults, max_tokens=protocol.longest(request), logprobs=request.logprobs)
    texts = prompts(request, info)
    if request.suffix:
        texts = [""] if request.prompt is None else texts
        if not all(isinstance(text, str) for text in texts):
            raise bad_request("suffix", "needs prompts that are texts. Leave it out, or send texts.")
        for field in ("echo", "truncate_prompt_tokens"):
            if getattr(request, field):
                raise bad_request(field, "has no meaning beside suffix. Leave it out.")
    return Completion(sampling, texts, request.model, bool(request.echo), suffix=request.suffix or "")


def prompts(request: CompletionRequest, info: engine.EngineInfo) -> list[str | list[int]]:
    """The prompts of a completion: each a text or ids. Raises ApiError (400)."""
    prompt = END_OF_TEXT if request.prompt is None else request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt", "is an empty list")
    texts = [entry for entry in prompt if isinstance(entry, str)]
    if len(texts) == len(prompt):
        return [*texts]
    if not any(isinstance(entry, list) for entry in prompt):
        return [token_ids("prompt", prompt, info)]
    return [token_ids(f"prompt[{i}]", entry, info) for i, entry in enumerate(prompt)]


def token_ids(param: str, ids: object, info: engine.EngineInfo) -> list[int]:
    """Ids that a client has sent in the field `param`. Raises ApiError (400)."""
    try:
        checked = msgspec.convert(ids, list[int])
    except msgspec.ValidationError:
        raise bad_request(param, "expected a text, a list of texts, token ids, or a list of token id lists") from None
    if checked and not 0 <= min(checked) <= max(checked) < info.vocab_size:
        raise bad_request(param, f"has an id outside the vocabulary, which goes from 0 to {info.vocab_size - 1}")
    return checked


async def completions(service: Service, request: Request) -> ASGIApp:
    """POST /v1/completions: how texts go on."""
    info = service.admit()
    asked, prepared = await prepared_completion(service, request, info)
    requests, echo = prepared.requests, prepared.echo
    n = requests[0].params.n
    tokenizer = service.tokenizer
    generation = completion_generation(service, prepared, request.scope[TICKET])
    answer_id = asked.rid or _named("cmpl-", asked) or requests[0].id.rpartition("-")[0]
    request.scope["deltic.answer_id"] = answer_id
    extras = extras_of(service, asked, [sent.prompt_ids for sent in requests], [])
    reply = answer.CompletionAnswer(answer_id, service.model_name, tokenizer, extras, asked.logprobs or 0, n)
    if asked.stream:
        return EchoStream(generation, reply, echo, n) if echo else AnswerStream(generation, reply)
    messages = await unless_disconnected(request.receive, collect(generation, reply))
    if echo is not None:
        for index, message in enumerate(messages):
            reply.put_prompt(message, *echo.of(index // n, generation))
    if asked.prompt_logprobs is not None:
        for index, message in enumerate(messages):
            entries = generation.prompt_logprobs[index // n]
            if entries is not None:
                message.prompt_logprobs = answer.prompt_logprobs(entries, tokenizer)
    return LargeResponse(reply.body(messages, generation.usage()))


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A completion that was checked and encoded."""

    completion: Completion
    requests: list[engine.Request]
    """Requests of the engine, one for each prompt."""
    echo: Echo | None


async def prepared_completion(
    service: Service, request: Request, info: engine.EngineInfo
) -> tuple[CompletionRequest, PreparedCompletion]:
    """The completion that a body is, ready for the engine. Raises ApiError."""

    def prepare(asked: CompletionRequest) -> PreparedCompletion:
        return prepare_completion(service, completion_of(asked, info, service.defaults), info)

    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(CompletionRequest)
        return asked, await preparation.run(prepare, asked)


def prepare_completion(service: Service, asked: Completion, info: engine.EngineInfo) -> PreparedCompletion:
    """Slow for long ones, so it is a step of a Preparation. Raises ApiError."""
    with naming(asked.origin):
        requests = _requests_of(service, asked, info)
        return PreparedCompletion(asked, requests, Echo(asked, requests, service.tokenizer) if asked.echo else None)


def completion_generation(service: Service, prepared: PreparedCompletion, ticket: Ticket) -> Generation:
    """Generation of a completion, as chat_generation makes that of a chat."""
    requests, echo, shown = prepared.requests, prepared.echo, prepared.completion.sampling.shown
    n = requests[0].params.n
    offsets = [len(echo.texts[index // n]) if echo else 0 for index in range(len(requests) * n)]
    choices = [answer.Choice(i, service.tokenizer, shown, offset=offset) for i, offset in enumerate(offsets)]
    return service.generation(requests, choices, ticket)


def encoded(service: Service, asked: Completion, info: engine.EngineInfo) -> Iterator[tuple[list[int], int]]:
    """Ids of each prompt, and its answer's longest length. Raises ApiError."""
    check(service, asked)
    most, n = info.max_num_seqs + service.config.max_queue, len(asked.prompts)
    if n * asked.sampling.params.n > most:
        raise bad_request("prompt", f"{n} prompts are more than can wait here. Send at most {most} sequences.")
    limit = chats.context_limit(info)
    kept = chats.kept_tokens(asked.sampling, info, service.default_length)
    filler = filler_of(service) if asked.suffix else None
    for prompt in asked.prompts:
        if not isinstance(prompt, str):
            ids = prompt[-(kept or 0) :]
        elif kept is not None:
            ids = service.tokenizer.encode_end(prompt, kept, "parse")
        elif (n_least := service.tokenizer.least_tokens(prompt + asked.suffix, limit)) >= limit:
            raise PromptTooLong("prompt", n_least, limit, at_least=True)
        elif filler is not None:
            ids = filler.whole(prompt, asked.suffix)
        else:
            ids = service.tokenizer.encode(prompt, "parse")
        yield ids, chats.answer_length(asked, len(ids), info, service.default_length)


def filler_of(service: Service, field: str = "suffix") -> Filler:
    """Returns the writer of this model's prompts with a gap. Raises ApiError (400) if it has none."""
    filler = Filler.of(service.tokenizer)
    if filler is None:
        message = f"{service.model_name!r} cannot fill a gap: its vocabulary has no <|fim_prefix|>. Leave it out."
        raise bad_request(field, message, "unsupported_field")
    return filler


def with_ends(params: engine.SamplingParams, filler: Filler) -> engine.SamplingParams:
    """Parameters of an answer that also ends where a gap does."""
    ends = () if params.ignore_eos else filler.ends
    return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))


def _requests_of(service: Service, asked: Completion, info: engine.EngineInfo) -> list[engine.Request]:
    """Requests of the engine, one for each prompt. Raises ApiError (400)."""
    request_id = f"cmpl-{secrets.token_hex(16)}"
    requests = []
    constraint = None
    for i, (ids, max_tokens) in enumerate(encoded(service, asked, info)):
        params = chats.checked_params(asked, max_tokens, info, service.config)
        if asked.suffix:
            params = with_ends(params, filler_of(service))
        if i == 0:  # it is the same for all prompts
            constraint = service.constrainer.completion(asked.sampling)
        if constraint:
            params = msgspec.structs.replace(params, constraint=constraint)
        requests.append(chats.engine_request(f"{request_id}-{i}", ids, params, asked.sampling, []))
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
        """add: writes an update. begin, end: write what stands before the first and behind the last."""
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
        self, generation: Generation, reply: answer.ChatAnswer | answer.CompletionAnswer, first: bytes = b""
    ) -> None:
        extras = reply.extras
        super().__init__(
            generation,
            self._counted if extras.running_usage or extras.timings else reply.chunks,
            lambda: first,
            lambda: reply.usage_chunk(generation.usage()) if extras.usage else b"",
        )
        self._reply = reply
        self._n_tokens: dict[int, int] = {}

    def _counted(self, update: answer.Update) -> bytes:
        """Chunks of an update, each with the counts up to it: several updates may have come together."""
        usage = self._generation.usage()
        self._n_tokens[update.index] = max(update.n_tokens, self._n_tokens.get(update.index, 0))
        usage.completion_tokens = sum(self._n_tokens.values())
        self._reply.note(usage)
        return self._reply.chunks(update)


class EchoStream(AnswerStream):
    """The chunks of a completion behind those of its prompts, which are made a few at a time: others go on
    meanwhile.
    """

    def __init__(self, generation: Generation, reply: answer.CompletionAnswer, echo: Echo, n: int) -> None:
        """n: choices of each prompt."""
        super().__init__(generation, reply)
        self._completion = reply
        self._echo = echo
        self._n = n
        self._waiting = set(range(generation.n_choices))
        """Choices whose prompt has not been written."""

    async def run(self) -> None:
        came: asyncio.Queue[list[answer.Update] | None] = asyncio.Queue()
        generating = asyncio.create_task(self._generation.run(came.put_nowait))
        generating.add_done_callback(lambda _: came.put_nowait(None))
        try:
            while (updates := await came.get()) is not None:
                for update in updates:
                    if update.index in self._waiting and update.progress is None:
                        self._waiting.remove(update.index)
                        text, scores = self._echo.of(update.index // self._n, self._generation)
                        for chunk in self._completion.prompt_chunks(update.index, text, scores):
                            self.write(chunk)
                            if came.qsize() < MAX_HELD:
                                await self.drained()
                    self._take([update])
            await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
        self.write_end()


async def collect(generation: Generation, reply: answer.ChatAnswer | answer.CompletionAnswer) -> list[answer.Message]:
    """The whole answer: a message for each choice."""
    messages = [answer.Message() for _ in range(generation.n_choices)]

    def take(updates: list[answer.Update]) -> None:
        for update in updates:
            messages[update.index].add(update)
            reply.keep(messages[update.index])

    await generation.run(take)
    return messages


async def computed(
    service: Service,
    request: Request,
    requests: list[engine.Request],
    outs: Sequence[answer.WayOut],
    at_once: int | None = None,
) -> Usage:
    """Has the engine do what ends in no text: vectors, and scores. What it took. Raises ApiError,
    ClientDisconnect.
    """
    generation = service.generation(requests, outs, request.scope[TICKET], at_once)
    if requests:
        await unless_disconnected(request.receive, generation.run(lambda updates: None))
    return generation.usage()
