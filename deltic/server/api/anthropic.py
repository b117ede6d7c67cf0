"""Anthropic's Messages API, for agents that speak no other: POST /v1/messages and /v1/messages/count_tokens.

A body becomes a Chat (server/api/anthropic_protocol.py), so that there is one way to the engine; the
answer's updates become content blocks here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from deltic.server.api.anthropic_protocol import CountTokensRequest, MessagesRequest, chat_of, signature
from deltic.server.api.completions import UpdateStream, chat_generation, prepare_chat
from deltic.server.chat.answer import Update
from deltic.server.chat.arguments import given_arguments
from deltic.server.chat.generation import Generation
from deltic.server.chat.parser import Item, Items
from deltic.server.chat.request import Chat
from deltic.server.chat.template import render
from deltic.server.errors import ApiError, PromptTooLong
from deltic.server.limits import TICKET, Usage
from deltic.server.preparation import Preparation
from deltic.server.service import Service
from deltic.server.transport import json_response, named_event, unless_disconnected

PING_S = 10.0
"""A stream that has said nothing for as long says `ping`: a long prompt, or a thought that is not shown."""

_encode = msgspec.json.Encoder().encode


async def messages(service: Service, request: Request) -> ASGIApp:
    """POST /v1/messages: an answer to messages, in Anthropic's form."""
    info = service.admit()
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(MessagesRequest)
        chat, pictures = await preparation.read_chat(_chat, service, asked)
        with _in_own_words():
            prepared = await preparation.run(prepare_chat, service, chat, info, pictures)
        del pictures  # they are the engine's from now on, and large
    message_id = request.scope["deltic.answer_id"] = f"msg_{secrets.token_hex(16)}"
    generation = chat_generation(service, prepared, message_id, request.scope[TICKET])
    reply = MessageAnswer(
        message_id,
        service.model_name,
        silent=asked.max_tokens == 0,
        clipped=prepared.params.max_tokens < asked.max_tokens,
        omits=asked.thinking is not None and asked.thinking.display == "omitted",
    )
    if asked.stream:
        return MessageStream(generation, reply, request.scope["deltic.request_id"])
    await unless_disconnected(request.receive, generation.run(lambda updates: [*map(reply.events, updates)]))
    return json_response(reply.body(generation.usage()))


async def count_tokens(service: Service, request: Request) -> ASGIApp:
    """POST /v1/messages/count_tokens: how many tokens a prompt has."""
    async with Preparation(service, request) as preparation:
        asked = await preparation.parse(CountTokensRequest)
        chat, pictures = await preparation.read_chat(_chat, service, asked)
        service.check_model(chat.model)
        with _in_own_words():
            prompt = await preparation.run(render, service.template, chat, pictures=pictures)
    return json_response({"input_tokens": len(prompt.ids)})


def _chat(service: Service, asked: CountTokensRequest) -> Chat:
    """Raises ApiError (400)."""
    template = service.template
    thinks = None if template and "enable_thinking" in template.defaults else False
    return chat_of(asked, template.variables if template else set(), thinks, service.defaults)


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Agents shorten their history when they read `prompt is too long`."""
    try:
        yield
    except PromptTooLong as error:
        message = f"prompt is too long: {error.n_prompt} tokens > {error.limit - 1} maximum"
        raise ApiError(400, message, param=error.param, code=error.code) from None


PING = named_event("ping")
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":%s}}\n\n'
)
_DELTA_NAMES = {
    "text": (b"text_delta", b"text"),
    "thought": (b"thinking_delta", b"thinking"),
    "call": (b"input_json_delta", b"partial_json"),
    "signature": (b"signature_delta", b"signature"),
}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class MessageAnswer(Items):
    """An answer as it grows: its content blocks so far, and the events that say what was added to them."""

    def __init__(self, message_id: str, model: str, *, silent: bool, clipped: bool, omits: bool) -> None:
        """silent: nothing is shown. clipped: the context leaves less than max_tokens. omits: no thoughts are
        shown.
        """
        super().__init__()
        self._silent = silent
        self._clipped = clipped
        self._omits = omits
        self._head: dict[str, object] = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._stopped: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def start(self, usage: Usage) -> bytes:
        """The first event; the model has said something by now, so that the cached tokens are known."""
        message = self._head | {"content": []} | self._stopped
        return named_event("message_start", message=message | {"usage": self._usage(usage)}) + PING

    def events(self, update: Update) -> bytes:
        """Takes what comes next."""
        written = b"" if self._silent else self.take(update.delta)
        if update.finish_reason is not None:
            written += self.close()
            reason = _STOP_REASONS[update.finish_reason]
            if reason == "end_turn" and isinstance(update.stop, str):
                reason = "stop_sequence"
                self._stopped["stop_sequence"] = update.stop
            if reason == "max_tokens" and self._clipped:
                reason = "model_context_window_exceeded"
            self._stopped["stop_reason"] = reason
        return written

    def end(self, usage: Usage) -> bytes:
        return named_event("message_delta", delta=self._stopped, usage=self._usage(usage))

    def body(self, usage: Usage) -> bytes:
        """The whole answer."""
        content = [self._block(item) for item in self.items]
        return _encode(self._head | {"content": content} | self._stopped | {"usage": self._usage(usage)})

    def begun(self, item: Item) -> bytes:
        index = len(self.items) - 1
        return named_event("content_block_start", index=index, content_block=self._block(item))

    def grown(self, item: Item, text: str) -> bytes:
        return b"" if self._omits and item.kind == "thought" else self._delta(item.kind, text)

    def ended(self, item: Item, is_cut: bool) -> bytes:
        signed = b""
        if item.kind == "thought":
            signed = self._delta("signature", signature(item.text, self._omits))
        return signed + named_event("content_block_stop", index=len(self.items) - 1)

    def _delta(self, kind: str, text: str) -> bytes:
        return _DELTA % (len(self.items) - 1, *_DELTA_NAMES[kind], _encode(text))

    def _block(self, item: Item) -> dict[str, object]:
        """A block with what was said so far."""
        text = item.text
        if item.kind == "text":
            return {"type": "text", "text": text}
        if item.call is None:
            signed = signature(text, self._omits) if text else ""
            return {"type": "thinking", "thinking": "" if self._omits else text, "signature": signed}
        call_id = f"toolu_{(item.call.id or '').removeprefix('call_')}"
        # Of a call that was cut off, what can be read; the stop reason tells of it.
        given = given_arguments(text) or {}
        return {"type": "tool_use", "id": call_id, "name": item.call.name, "input": given}

    def _usage(self, usage: Usage) -> dict[str, object]:
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": 0 if self._silent else usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": "standard",
        }


class MessageStream(UpdateStream):
    """The events of an answer."""

    def __init__(self, generation: Generation, reply: MessageAnswer, request_id: str) -> None:
        usage = generation.usage
        super().__init__(generation, reply.events, lambda: reply.start(usage()), lambda: reply.end(usage()))
        self._request_id = request_id
        self._quiet = True
        """True if nothing was sent since the last look at the clock."""

    async def run(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._ping)
        try:
            await super().run()
        finally:
            self._timer.cancel()

    def write(self, chunk: bytes) -> None:
        self._quiet = False
        super().write(chunk)

    def _ping(self) -> None:
        if self._quiet:
            self.write(PING)
        self._quiet = True
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def last(self, error: ApiError | None) -> bytes:
        if error is None:
            return named_event("message_stop")
        return b"event: error\ndata: " + error.anthropic_body(self._request_id) + b"\n\n"
