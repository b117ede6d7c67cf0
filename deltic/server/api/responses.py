"""The Responses API of OpenAI: /v1/responses, whole and as events, and what is kept of it.

A request becomes a Chat (responses_protocol.py) and goes the way of all chats; here its updates become
items.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.engine.messages import EngineInfo
from deltic.json_types import JsonObject
from deltic.server import transport
from deltic.server.api import responses_items
from deltic.server.api import responses_protocol as wire
from deltic.server.api.completions import Prepared, UpdateStream, chat_generation, check, prepare_chat
from deltic.server.api.protocol import handling_of
from deltic.server.api.responses_items import InputItem, ResponseStore, ResponseTurn, StoredResponse
from deltic.server.chat import answer
from deltic.server.chat.arguments import given_text, is_whole
from deltic.server.chat.generation import Generation
from deltic.server.chat.parser import Item, Items, Kind
from deltic.server.chat.picture_parts import Pictures, Sent
from deltic.server.chat.request import Chat
from deltic.server.chat.template import render
from deltic.server.errors import ApiError, bad_request
from deltic.server.limits import TICKET, Ticket, Usage
from deltic.server.listing import ListQuery, listing, query_of
from deltic.server.preparation import Preparation, prepared
from deltic.server.service import Service

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class ReadRequest(NamedTuple):
    """A request that was read."""

    request: wire.ResponsesRequest
    history: tuple[ResponseTurn, ...]
    """The history that it continues."""
    given: list[bytes]
    """Items of the request itself, references replaced by what they refer to."""
    items: list[tuple[str, InputItem]]
    """Items of the history and of the request, each with its path."""
    pictures: Pictures


async def create_response(service: Service, request: Request) -> ASGIApp:
    """OpenAI's Responses API."""
    info = service.admit()
    ticket: Ticket = request.scope[TICKET]
    async with Preparation(service, request) as preparation:
        read = await _read(service, ticket, preparation)
        chat, turn = await preparation.run(_prepare, service, read, info)
    asked, history = read.request, read.history
    del read  # its pictures are the engine's from now on, and large
    if ticket.is_batch and asked.store is None:
        # A batch's answers are in its file; stored, they would drive out those that people continue.
        asked.store = False
    response_id = request.scope["deltic.answer_id"] = f"resp_{secrets.token_hex(24)}"
    generation = chat_generation(service, chat, response_id, ticket)
    reply = ResponseAnswer(response_id, asked, service)

    async def end() -> End:
        """The end of the answer, which is kept then."""
        usage = generation.usage()
        done = reply.end(usage) if reply.n_bytes < transport.PART_BYTES else await asyncio.to_thread(reply.end, usage)
        if reply.is_stored:
            stored = StoredResponse(ticket.tenant, done.body, (*history, turn), ResponseTurn(done.items), reply.ends)
            service.server.responses.add(response_id, stored)
        return done

    if asked.stream:
        return ResponseStream(generation, reply, end)
    await transport.unless_disconnected(request.receive, generation.run(lambda updates: [*map(reply.add, updates)]))
    return transport.LargeResponse((await end()).body)


def _prepare(service: Service, read: ReadRequest, info: EngineInfo) -> tuple[Prepared, ResponseTurn]:
    """Prepares the chat and the turn to be kept, which is empty unless the response is to be. Raises
    ApiError.
    """
    chat = _fitted(service, read, lambda chat: prepare_chat(service, chat, info, read.pictures))
    return chat, responses_items.turn_of([] if read.request.store is False else read.given)


async def count_input_tokens(service: Service, request: Request) -> ASGIApp:
    """The length of the prompt that /v1/responses would make."""
    service.admit()

    def count(chat: Chat) -> int:
        check(service, chat)
        return len(render(service.template, chat, pictures=read.pictures).ids)

    async with Preparation(service, request) as preparation:
        read = await _read(service, request.scope[TICKET], preparation)
        n_tokens = await preparation.run(_fitted, service, read, count)
    return transport.json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


async def _read(service: Service, ticket: Ticket, preparation: Preparation) -> ReadRequest:
    """The request in a body, with what it continues and what it refers to. Raises ApiError."""
    asked, given = await preparation.run(_parsed, service, preparation, ticket.tenant)
    history = _history(service.server.responses, asked, ticket.tenant)
    # A few bytes may refer to many, and to the same ones again and again.
    size = max(preparation.size, sum(map(len, given))) + sum(turn.n_bytes() for turn in history)
    if size > service.server.max_body_mb * 1_000_000:
        message = f"the input and what it continues are larger than {service.server.max_body_mb:g} MB"
        raise ApiError(413, message, code="body_too_large")
    preparation.resize(size)
    items, sent = await preparation.run(_items, asked, history, given)
    if kinds := wire.left_out(asked):
        ticket.notes["tools_left_out"] = ",".join(kinds)
    pictures = await preparation.read_sent(sent, asked.mm_processor_kwargs, handling_of(asked))
    return ReadRequest(asked, history, given, items, pictures)


def _parsed(service: Service, preparation: Preparation, owner: str) -> tuple[wire.ResponsesRequest, list[bytes]]:
    """The body and its items. Raises ApiError."""
    asked = preparation.read(wire.ResponsesRequest)
    wire.check(asked, service.config.skip_hosted_tools)
    store, items = service.server.responses, wire.given_items(asked)
    return asked, [store.resolved(item, f"input[{i}]", owner) for i, item in enumerate(items)]


def _history(store: ResponseStore, asked: wire.ResponsesRequest, owner: str) -> tuple[ResponseTurn, ...]:
    """The turns that a request continues. Raises ApiError (400)."""
    if asked.store and not store.most:
        raise bad_request("store", "this server keeps no responses (--max-stored-responses 0)")
    if asked.previous_response_id is None:
        return ()
    stored = store.get(asked.previous_response_id, owner)
    if stored is None:
        raise ApiError(
            400,
            f"Previous response with id {asked.previous_response_id!r} not found: it was not stored, or is no longer "
            "held. Send the whole input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored.history


def _items(
    asked: wire.ResponsesRequest, history: tuple[ResponseTurn, ...], given: list[bytes]
) -> tuple[list[tuple[str, InputItem]], list[Sent]]:
    """Reads all items with their paths, and finds the pictures in them; tools among the items join those of
    the request.

    Raises ApiError (400).
    """
    old = [(f"previous_response_id ({item_id})", item) for turn in history for item_id, item in turn.items]
    new = [(f"input[{i}]", item) for i, item in enumerate(given)]
    items = [(path, responses_items.parse_item(item, path)) for path, item in (*old, *new)]
    wire.add_tools(asked, items)
    return items, wire.find_pictures(items)


def _fitted(service: Service, read: ReadRequest, work: Callable[[Chat], T]) -> T:
    """`work` on the chat of a request's items.

    With truncation "auto", on that of as many of the latest turns as the context holds. Raises ApiError.
    """
    asked, items = read.request, read.items

    def tried(items: list[tuple[str, InputItem]]) -> T:
        return work(wire.chat_of(asked, items, service.defaults))

    try:
        return tried(items)
    except ApiError as error:
        if asked.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        too_long = error
    n_settings, starts = wire.turn_starts(items)
    done: list[T] = []
    while starts:
        middle = len(starts) // 2
        try:
            done = [tried([*items[:n_settings], *items[starts[middle] :]])]
            starts = starts[:middle]
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            too_long, starts = error, starts[middle + 1 :]
    if not done:
        raise too_long
    return done[0]


class ReplayQuery(msgspec.Struct):
    """Query of a response that is held."""

    stream: Literal["true", "false"] | None = None
    """True: the events of the response, instead of its JSON."""
    starting_after: Annotated[int, Meta(ge=0, lt=10**9)] | None = None
    """Number of the last event that is known."""


async def get_response(service: Service, request: Request) -> ASGIApp:
    """A response that is held."""
    stored, query = _stored(service, request), query_of(request, ReplayQuery)
    if query.stream != "true":
        return transport.LargeResponse(stored.body)
    after = -1 if query.starting_after is None else query.starting_after

    def write() -> bytes:
        return _events_of(responses_items.opened(stored.body), stored.ends, after)

    written = await prepared(service, request, len(stored.body), write)
    return transport.LargeResponse(written, transport.EVENT_HEADERS)


async def delete_response(service: Service, request: Request) -> ASGIApp:
    """Lets go of a response; those that continue it stay."""
    stored, response_id = _stored(service, request), request.path_params["response_id"]
    service.server.responses.remove(response_id, stored.owner)
    return transport.json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(service: Service, request: Request) -> ASGIApp:
    """Refused: only background responses could be cancelled, and there are none."""
    _stored(service, request)
    raise bad_request(None, "there are no background responses to cancel. Close a running one's connection to end it.")


async def list_input_items(service: Service, request: Request) -> ASGIApp:
    """Lists the items that a response was made from, the newest first unless `order` is asc."""
    stored = _stored(service, request)
    items = [row for turn in stored.input for row in turn.items]
    return listing(query_of(request, ListQuery), items, msgspec.Raw)


def _stored(service: Service, request: Request) -> StoredResponse:
    """The response that the path names. Raises ApiError (404)."""
    response_id, ticket = request.path_params["response_id"], request.scope[TICKET]
    stored = service.server.responses.get(response_id, ticket.tenant)
    if stored is None:
        raise ApiError(404, f"Response with id {response_id!r} not found.", kind="invalid_request_error")
    return stored


_KINDS: dict[Kind, str] = {"text": "message", "thought": "reasoning", "call": "function_call"}
"""Types of items."""

_PARTS: dict[str, JsonObject] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
"""The one part that an item of this type has, empty."""

_TEXT_OF = {"function_call": "arguments", "custom_tool_call": "input"}
"""The field with what an item of this type says, which has no parts."""


def _event_name(item: JsonObject) -> str:
    """Name of the events that tell what an item says, without what happened to it."""
    if (field := _TEXT_OF.get(item["type"])) is not None:
        return f"response.{item['type']}_{field}"
    return f"response.{_PARTS[item['type']]['type']}"


class End(NamedTuple):
    """The end of a response."""

    events: bytes
    """Events at the end of the stream, if there are any."""
    body: bytes
    items: list[tuple[str, bytes]]
    """Items of the output: (id, JSON)."""


class Events:
    """The events of one response, which are counted."""

    def __init__(self, after: float = -1) -> None:
        """after: the number of the last one that is not written."""
        self.n = 0
        self._after = after

    def event(self, name: str, n: int = 1, **fields: object) -> bytes:
        """n: for how many it stands; it has the number of the last."""
        self.n += n
        if self.n - 1 <= self._after:
            return b""
        return transport.named_event(name, sequence_number=self.n - 1, **fields)

    def begun(self, index: int, item: JsonObject) -> bytes:
        """Events that begin an item. item: its JSON as it begins."""
        written = self.event("response.output_item.added", output_index=index, item=item)
        if (part := _PARTS.get(item["type"])) is not None:
            written += self.event("response.content_part.added", **_place(index, item), part=part)
        return written

    def ended(self, index: int, item: JsonObject) -> bytes:
        """Events that end an item. item: its JSON in the response."""
        place, name = _place(index, item), f"{_event_name(item)}.done"
        if (field := _TEXT_OF.get(item["type"])) is not None:
            written = self.event(name, **place, **{field: item[field]})
        else:
            (part,) = item["content"]
            fields = {field: part[field] for field in ("text", "logprobs") if field in part}
            written = self.event(name, **place, **fields)
            written += self.event("response.content_part.done", **place, part=part)
        return written + self.event("response.output_item.done", output_index=index, item=item)


def _place(index: int, item: JsonObject) -> JsonObject:
    """Fields of an event that say where something is added to item number `index`."""
    place = {"item_id": item["id"], "output_index": index}
    return place | {"content_index": 0} if item["type"] in _PARTS else place


class ResponseAnswer(Items):
    """A response as it grows: its items, and the events that tell of them, if it is streamed."""

    waits_for_calls = True

    def __init__(self, response_id: str, asked: wire.ResponsesRequest, service: Service) -> None:
        super().__init__()
        self.output: list[JsonObject] = []
        """The items that have ended, as the response has them."""
        self.ends: list[array[int]] = []
        """Ends of deltas, as in StoredResponse."""
        self.n_bytes = 0
        """Bytes of log-probabilities and text, more or less."""
        self.is_stored = asked.store is not False and bool(service.server.responses.most)
        self._plain = _echo(asked, service) | {"id": response_id, "model": service.model_name, "store": self.is_stored}
        self._called = {
            wire.flat_name(tool.name, space.name if space else None): (space.name if space else None, tool)
            for _, space, tool in wire.flat_tools(asked.tools)
        }
        """Tools, and their namespaces, by the names that the model has for them."""
        self._events = Events(-1 if asked.stream else math.inf)
        self._id, self._delta_start = "", b""
        """Id of the last item, and the beginning of its deltas' events."""
        self._n_said = 0
        """Characters of the last item."""
        self._logprobs: list[msgspec.Raw] = []
        """Log-probabilities of the last item's text."""
        self._wants_scores = wire.wants(asked, "message.output_text.logprobs")
        self._encrypts = wire.wants(asked, "reasoning.encrypted_content")
        self._pads = asked.stream_options is not None and bool(asked.stream_options.include_obfuscation)
        self._scores = answer.Scores()
        self._chat = answer.ChatAnswer(response_id, service.model_name, service.tokenizer)
        self._finish_reason = ""

    def begin(self) -> bytes:
        """The events before the first item."""
        return self._whole("response.created") + self._whole("response.in_progress")

    def add(self, update: answer.Update) -> bytes:
        """The events for an update."""
        if update.scores is not None and self._wants_scores:
            if self.items and not self.is_open("text"):
                self._scores = answer.Scores()  # no item shows the tokens between reasoning and message
            self._scores.extend(update.scores)
        self._finish_reason = update.finish_reason or self._finish_reason
        return self.take(update.delta)

    def end(self, usage: Usage) -> End:
        """Slow for a long one with log-probabilities."""
        written = b""
        is_cut = self._finish_reason == "length"
        if not is_cut and all(item.kind == "thought" for item in self.items):
            written = self.say("text", "")  # the model said nothing, which is an answer, too
        if self.is_open("text"):
            self._take_scores()
        written += self.close(is_cut)
        status = "incomplete" if is_cut else "completed"
        self._plain["status"] = status
        if is_cut:
            self._plain["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._plain["completed_at"] = int(time.time())
        self._plain["usage"] = _plain_usage(usage)
        items = [(item["id"], _encode(item)) for item in self.output]
        body = _encode(self._plain | {"output": [msgspec.Raw(item) for _, item in items]})
        written += self._events.event(f"response.{status}", response=msgspec.Raw(body))
        return End(written, body, items)

    def fail(self, error: ApiError) -> bytes:
        """The events of an error after the first update."""
        written = self.end_item(is_cut=True)
        kind = error.code or error.kind
        written += self._events.event("error", code=kind, message=error.message, param=error.param)
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._plain |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return written + self._whole("response.failed")

    def begun(self, item: Item) -> bytes:
        self._id = f"{responses_items.ID_PREFIXES[self._type(item)]}_{secrets.token_hex(24)}"
        self._n_said, self._logprobs = 0, []
        self.ends.append(array("I"))
        index, plain = len(self.output), self._plain_item(item, "in_progress")
        name = f"{_event_name(plain)}.delta"
        start = _encode({"type": name} | _place(index, plain))[:-1]
        self._delta_start = b'event: %s\ndata: %s,"delta":' % (name.encode(), start)
        return self._events.begun(index, plain)

    def _type(self, item: Item) -> str:
        tool = self._called.get(item.call.name or "", (None, None))[1] if item.call else None
        return "custom_tool_call" if isinstance(tool, wire.CustomTool) else _KINDS[item.kind]

    def grown(self, item: Item, text: str) -> bytes:
        if self._type(item) == "custom_tool_call":
            return b""  # a part of JSON; its text is told at the end
        return self._delta(item, text)

    def _delta(self, item: Item, text: str) -> bytes:
        scores = b',"logprobs":' + _encode(self._take_scores()) if item.kind == "text" else b""
        self._n_said += len(text)
        self.n_bytes += len(text)
        self.ends[-1].extend((self._n_said, len(self._logprobs)))
        delta = _encode(text) + scores
        if self._pads:
            delta += b',"obfuscation":"%s"' % answer.padding(len(delta))
        self._events.n += 1
        return b'%s%s,"sequence_number":%d}\n\n' % (self._delta_start, delta, self._events.n - 1)

    def ended(self, item: Item, is_cut: bool) -> bytes:
        is_cut = is_cut or (item.kind == "call" and not is_whole(item.text))
        plain = self._plain_item(item, "incomplete" if is_cut else "completed")
        written = self._delta(item, plain["input"]) if plain.get("input") else b""
        self.output.append(plain)
        return written + self._events.ended(len(self.output) - 1, plain)

    def _plain_item(self, item: Item, status: responses_items.Status) -> JsonObject:
        """The last item; one in progress as it is when it begins."""
        kind, text = self._type(item), item.text
        plain: JsonObject = {"id": self._id, "type": kind, "status": status}
        if item.call is not None:
            namespace, tool = self._called.get(item.call.name or "", (None, None))
            plain |= {"call_id": item.call.id, "name": tool.name if tool else item.call.name}
            if kind == "custom_tool_call":
                plain["input"] = given_text(text)
            else:
                plain["arguments"] = text
            return plain | {"namespace": namespace} if namespace else plain
        part, begins = _PARTS[kind] | {"text": text}, status == "in_progress"
        content = [] if begins else [part]
        if kind == "message":
            part["logprobs"] = self._logprobs
            return plain | {"role": "assistant", "content": content}
        sealed = {"encrypted_content": wire.encrypted(text)} if self._encrypts and not begins else {}
        return plain | {"summary": [], "content": content} | sealed

    def _take_scores(self) -> list[msgspec.Raw]:
        """Log-probabilities of what was added to the message, encoded once: they are in its part, too, which
        comes four times.
        """
        if not self._scores.entries:
            return []
        scores, self._scores = self._scores, answer.Scores()
        entries = self._chat.encoded(scores)
        self._logprobs += entries
        self.n_bytes += sum(map(len, entries))
        return entries

    def _whole(self, name: str) -> bytes:
        """An event that shows the response."""
        return self._events.event(name, response=self._plain | {"output": self.output})


def _events_of(response: JsonObject, ends: list[array[int]], after: int) -> bytes:
    """The events of a response that is complete behind the one of this number.

    They have the numbers that they had as the response was made; deltas that followed each other come as one,
    with the number of the last. ends: as of StoredResponse.
    """
    events = Events(after)
    begun: JsonObject = {"status": "in_progress", "output": []}
    begun |= dict.fromkeys(("completed_at", "incomplete_details", "usage"))
    written = [events.event(f"response.{name}", response=response | begun) for name in ("created", "in_progress")]
    for i, item in enumerate(response["output"]):
        field = _TEXT_OF.get(item["type"])
        empty: JsonObject = {"content": []} if field is None else {field: ""}
        written.append(events.begun(i, item | empty | {"status": "in_progress"}))
        if n := len(ends[i]) // 2:
            part = item["content"][0] if field is None else {"text": item[field]}
            n_seen = min(n, max(0, after + 1 - events.n))
            n_chars, n_scores = ends[i][2 * n_seen - 2 : 2 * n_seen] if n_seen else (0, 0)
            fields = {"delta": part["text"][n_chars:]}
            if "logprobs" in part:
                fields["logprobs"] = part["logprobs"][n_scores : ends[i][-1]]
            written.append(events.event(f"{_event_name(item)}.delta", n, **_place(i, item), **fields))
        written.append(events.ended(i, item))
    return b"".join([*written, events.event(f"response.{response['status']}", response=response)])


def _echo(asked: wire.ResponsesRequest, service: Service) -> dict[str, object]:
    """A response's fields before its first item: what was asked for, and what holds where nothing was."""
    defaults = service.defaults
    text_format = asked.text.format if asked.text else None
    reasoning = asked.reasoning or wire.Reasoning()
    return {
        "id": "",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": "",
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "temperature": defaults.temperature if asked.temperature is None else asked.temperature,
        "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": [tool for tool in asked.tools or () if not wire.is_left_out(tool)],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": defaults.top_p if asked.top_p is None else asked.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }


def _plain_usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "timing": usage.told_timing(),
    }


class ResponseStream(UpdateStream):
    """The events of a response. They begin with the first update, so that until then an error has a
    status."""

    def __init__(self, generation: Generation, reply: ResponseAnswer, end: Callable[[], Awaitable[End]]) -> None:
        super().__init__(generation, reply.add, reply.begin)
        self._reply = reply
        self._ended = end

    async def run(self) -> None:
        await super().run()
        self.write((await self._ended()).events)

    def last(self, error: ApiError | None) -> bytes:
        """Returns no mark of the end, but the event of an error: the last event is the end."""
        return b"" if error is None else self._reply.fail(error)
