"""A tiny OpenAI endpoint on loopback, on asyncio alone, for tests of what talks to servers.

Words are tokens: n words in a prompt are n tokens (chat: 5 more); an answer is `w0 w1`, one event a word. Speech has
80 ms of silence for each token of max_new_tokens but the last, one piece each.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeOpenAI:
    """Use as a context manager; `url` is set inside. Behaviour can be changed while it runs."""

    refused: tuple[str, ...] = ()
    """Body fields answered 400."""
    token_s: float = 0.0
    """Time between events."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next requests, before 200 is the rule again; -1 drops the connection."""
    n_words: int = 8
    """Length of an answer when the request sets no limit."""
    most_words: int = 1 << 20
    """Length at which an answer ends by itself, whatever the request says of the end."""
    breaks_at: int = -1
    """The piece of a spoken answer before which the connection breaks."""
    late_factor: float = 1.0
    """How many times `token_s` the last piece of a spoken answer takes."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """What was asked."""
    n_open: int = 0
    max_open: int = 0
    n_disconnects: int = 0
    url: str = ""

    def __enter__(self) -> FakeOpenAI:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(5)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.partition("content-length:")[2].partition("\r\n")[0])
                data = await reader.readexactly(length)
                self.n_open += 1
                self.max_open = max(self.max_open, self.n_open)
                try:
                    await self._answer(head.split()[1], json.loads(data) if data else {}, writer)
                finally:
                    self.n_open -= 1
        except ConnectionError:
            self.n_disconnects += 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        def reply(status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            writer.write(f"HTTP/1.1 {status} X\r\nretry-after: 0\r\ncontent-length: {len(data)}\r\n\r\n".encode())
            writer.write(data)

        if path == "/v1/models":
            return reply(200, {"data": [{"id": "fake"}]})
        if path.partition("?")[0] == "/v1/audio/voices":
            return reply(200, {"voices": ["vivian", "ryan"]})
        if path == "/metrics":
            return reply(200, None)
        if "completions" not in path and path != "/v1/audio/speech":
            return reply(404, {"error": {"message": "no such page"}})
        self.bodies.append(body)
        status = self.statuses.pop(0) if self.statuses else 200
        refused = [name for name in self.refused if name in body]
        if status == -1:
            raise ConnectionAbortedError
        if refused or status != 200:
            message = f"{refused[0]}: not supported" if refused else "asked to fail"
            return reply(400 if refused else status, {"error": {"message": message}})
        if path == "/v1/audio/speech":
            return await self._speak(body, writer)
        chat = "messages" in body
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        n_words = body.get("max_tokens") or body.get("max_completion_tokens") or self.n_words
        reason, n_words = "stop" if n_words > self.most_words else "length", min(n_words, self.most_words)
        usage = {"prompt_tokens": len(text.split()) + 5 * chat, "completion_tokens": n_words}
        words = [f"w{i} " for i in range(n_words)]
        if not body.get("stream"):
            await asyncio.sleep(self.token_s * n_words)
            said = "".join(words)
            choice = {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
            return reply(200, {"choices": [choice | {"index": 0, "finish_reason": reason}], "usage": usage})
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
        events = [{"choices": [{"index": 0, "delta": {"content": w}} if chat else {"text": w}]} for w in words]
        if chat:
            events.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            thoughts = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
            events[1:1] = [{"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}] * bool(thoughts)
        events.append({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": reason}]})
        if body.get("stream_options"):
            events.append({"choices": [], "usage": usage})
        for event in [*(json.dumps(e).encode() for e in events), b"[DONE]"]:
            data = b"data: " + event + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            if self.token_s:
                await asyncio.sleep(self.token_s)
        writer.write(b"0\r\n\r\n")

    async def _speak(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        frames = [bytes(2 * 1920)] * (body.get("max_new_tokens", self.n_words + 1) - 1)
        is_wav, form = body["response_format"] == "wav", body.get("stream_format")
        n_bytes = 0xFFFFFFFF if form else sum(map(len, frames))
        head = struct.pack(
            "<4sI4s4sIHHIIHH4sI", b"RIFF", min(n_bytes + 36, 0xFFFFFFFF), b"WAVE", b"fmt ", 16, 1, 1, 24000, 48000, 2, 16,
            b"data", n_bytes,
        )  # fmt: skip
        pieces = [head, *frames] if is_wav else frames
        if not form:
            await asyncio.sleep(self.token_s * len(frames))
            data = b"".join(pieces)
            writer.write(f"HTTP/1.1 200 X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            return
        kind = "text/event-stream" if form == "sse" else "audio/pcm"
        writer.write(f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: {kind}\r\n\r\n".encode())
        if form == "sse":
            told = [{"type": "speech.audio.delta", "audio": base64.b64encode(p).decode()} for p in pieces]
            told.append({"type": "speech.audio.done", "usage": {"output_tokens": len(frames)}})
            pieces = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in told]
        for i, data in enumerate(pieces):
            if i == self.breaks_at:
                raise ConnectionAbortedError
            if self.token_s:
                await asyncio.sleep(self.token_s * (self.late_factor if i == len(pieces) - 1 else 1.0))
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
