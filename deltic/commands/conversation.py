"""A conversation with a model over the OpenAI API: its messages and settings, and answers as they come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from deltic.commands.endpoint import DONE, Endpoint, HttpReply, error_message
from deltic.json_types import JsonObject
from deltic.logs import counted


@dataclass
class StreamedAnswer:
    """The answer so far."""

    reasoning: str = ""
    content: str = ""
    n_tokens: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None
    usage: JsonObject | None = None
    """Counts that came at the end."""
    progress: JsonObject | None = None
    """The last `prompt_progress`."""
    error: str | None = None

    def speed(self) -> str:
        """The line under an answer."""
        if self.first_s is None:
            return "no text"
        parts = [counted(self.n_tokens, "token"), f"first after {self.first_s:.2f} s"]
        if self.n_tokens > 1 and self.seconds > self.first_s:
            parts.insert(1, f"{(self.n_tokens - 1) / (self.seconds - self.first_s):.1f} tok/s")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return " · ".join(parts)

    def reading(self) -> str:
        """The line before an answer: what the server does."""
        total, processed = ((self.progress or {}).get(name) for name in ("total", "processed"))
        if not isinstance(total, int) or not isinstance(processed, int) or total < 1:
            return "waiting"
        return f"reading the prompt: {processed / total:.0%} of {total:,} tokens"


@dataclass
class Conversation:
    """Messages and settings, and how an answer is asked for."""

    endpoint: Endpoint
    model: str
    system: str | None = None
    think: bool | None = None
    sampling: JsonObject = field(default_factory=dict)
    messages: list[JsonObject] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    """URLs of those that the next message will have."""
    videos: list[str] = field(default_factory=list)
    """Videos of the next message, like `pictures`."""
    wants_progress: bool = True
    """Ask how much of the prompt is computed, until a server says that it does not know the field."""

    @property
    def history(self) -> list[JsonObject]:
        """The messages, the system's first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def message(self, text: str) -> JsonObject:
        """The user's next."""
        parts: list[JsonObject] = [{"type": "image_url", "image_url": {"url": url}} for url in self.pictures]
        parts += [{"type": "video_url", "video_url": {"url": url}} for url in self.videos]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}

    def body(self) -> JsonObject:
        """The request for the next answer."""
        body: JsonObject = {
            "model": self.model,
            "messages": self.history,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.wants_progress:
            body["return_progress"] = True
        if self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think}
        return body | self.sampling

    async def ask(self, answer: StreamedAnswer) -> AsyncGenerator[tuple[str, str], None]:
        """Yields ("reasoning" | "content", text) as it comes, and before that ("progress", "") as the prompt
        is computed; fills `answer`, its `error` too.
        """
        begin = time.perf_counter()
        try:
            reply = await self._opened(answer)
            if reply is None:
                return
            async with contextlib.aclosing(reply.events()) as events:
                async for arrival, payload in events:
                    if payload == DONE:
                        continue
                    event = json.loads(payload)
                    if event.get("error"):
                        answer.error = error_message(event, 200)
                    if event.get("prompt_progress"):
                        answer.progress = event["prompt_progress"]
                        yield "progress", ""
                    if event.get("usage"):
                        answer.usage = event["usage"]
                        answer.n_tokens = event["usage"].get("completion_tokens") or answer.n_tokens
                    for choice in event.get("choices") or ():
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                        for kind, text in _pieces(choice.get("delta") or {}):
                            answer.seconds = arrival - begin
                            answer.first_s = answer.seconds if answer.first_s is None else answer.first_s
                            answer.n_tokens += 1  # until the usage, at the end, says better
                            setattr(answer, kind, getattr(answer, kind) + text)
                            yield kind, text
        except ValueError as error:  # EndpointError is one
            answer.error = str(error)

    async def _opened(self, answer: StreamedAnswer) -> HttpReply | None:
        """Sends the request. Returns its stream; None if there is none, which `answer` says. Raises
        EndpointError.
        """
        reply = await self.endpoint.open("POST", "/v1/chat/completions", self.body())
        if reply.status == 200:
            return reply
        data = await reply.read()
        if self.wants_progress and reply.status in (400, 422) and b"return_progress" in data:
            self.wants_progress = False
            return await self._opened(answer)
        with contextlib.suppress(ValueError):
            body = json.loads(data)
            answer.error = error_message(body, reply.status)
            if isinstance(body, dict) and (body.get("error") or {}).get("code") == "context_length_exceeded":
                answer.error = "the conversation no longer fits the model's context; /clear starts a new one"
        answer.error = answer.error or f"HTTP {reply.status}"
        return None


def _pieces(delta: JsonObject) -> list[tuple[str, str]]:
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    pieces = [("reasoning", reasoning)] if reasoning else []
    return pieces + ([("content", delta["content"])] if delta.get("content") else [])
