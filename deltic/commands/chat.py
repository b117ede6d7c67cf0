"""`deltic chat`: a conversation in the terminal, streamed, over the OpenAI API.

Ctrl-C ends the answer, not the program: the connection is closed, and the server frees the request. Ctrl-D
leaves. Escape codes used: bold, dim, reset. Control characters that a model writes never reach the terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from deltic.commands.endpoint import (
    DONE,
    Endpoint,
    EndpointError,
    ServerFailed,
    asked_model,
    error_message,
    own_server,
    picture_url,
    reached,
)
from deltic.json_types import JsonObject
from deltic.logs import counted

HELP = """\
/help               this list
/clear              forget the conversation
/system [TEXT]      set the system message, or remove it; forgets the conversation
/image FILE         add a picture to the next message; without FILE, drop what was added
/video FILE         add a video to the next message; without FILE, drop what was added
/think on|off|auto  thinking before the answer; auto leaves it to the model
/save [FILE]        write the conversation as JSON
/quit               leave (also Ctrl-D); Ctrl-C ends an answer early
A line ending in \\ goes on; pasted lines stay together."""

BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class StreamedAnswer:
    """The answer so far."""

    reasoning: str = ""
    content: str = ""
    n_tokens: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None
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

    def message(self, text: str) -> JsonObject:
        """The user's next."""
        parts: list[JsonObject] = [{"type": "image_url", "image_url": {"url": url}} for url in self.pictures]
        parts += [{"type": "video_url", "video_url": {"url": url}} for url in self.videos]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}

    def body(self) -> JsonObject:
        """The request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: JsonObject = {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think}
        return body | self.sampling

    async def ask(self, answer: StreamedAnswer) -> AsyncGenerator[tuple[str, str], None]:
        """Yields ("reasoning" | "content", text) as it comes; fills `answer`, its `error` too."""
        begin = time.perf_counter()
        try:
            reply = await self.endpoint.open("POST", "/v1/chat/completions", self.body())
            if reply.status != 200:
                data = await reply.read()
                with contextlib.suppress(ValueError):
                    body = json.loads(data)
                    answer.error = error_message(body, reply.status)
                    if isinstance(body, dict) and (body.get("error") or {}).get("code") == "context_length_exceeded":
                        answer.error = "the conversation no longer fits the model's context; /clear starts a new one"
                answer.error = answer.error or f"HTTP {reply.status}"
                return
            async with contextlib.aclosing(reply.events()) as events:
                async for arrival, payload in events:
                    if payload == DONE:
                        continue
                    event = json.loads(payload)
                    if event.get("error"):
                        answer.error = error_message(event, 200)
                    if event.get("usage"):
                        answer.n_tokens = event["usage"].get("completion_tokens") or answer.n_tokens
                    for choice in event.get("choices") or ():
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                        for kind, text in _pieces(choice.get("delta") or {}):
                            answer.seconds = arrival - begin
                            answer.first_s = answer.seconds if answer.first_s is None else answer.first_s
                            answer.n_tokens += 1  # until the usage, at the end, says better
                            setattr(answer, kind, getattr(answer, kind) + text)
                            yield kind, text
        except (EndpointError, ValueError) as error:
            answer.error = str(error)


def _pieces(delta: JsonObject) -> list[tuple[str, str]]:
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    pieces = [("reasoning", reasoning)] if reasoning else []
    return pieces + ([("content", delta["content"])] if delta.get("content") else [])


class Screen:
    """Screen on which answers are written; without a terminal, plain text."""

    def __init__(self) -> None:
        self._styled = sys.stdout.isatty()
        self._kind = ""

    def style(self, code: str) -> None:
        """Switches the style, on a terminal."""
        if self._styled:
            sys.stdout.write(code)

    def piece(self, kind: str, text: str) -> None:
        """A piece of the answer; thinking is dimmed and set off by an empty line."""
        if kind != self._kind:
            if self._kind == "reasoning":
                self.style(RESET)
                sys.stdout.write("\n\n")
            if kind == "reasoning":
                self.style(DIM)
            text = text.lstrip("\n")
            self._kind = kind
        sys.stdout.write(CONTROL.sub("", text))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line that is not the model's."""
        self.style(RESET + DIM)
        sys.stdout.write(CONTROL.sub("", text))
        self.style(RESET)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def end(self) -> None:
        """The answer is over."""
        self._kind = ""
        self.style(RESET)
        sys.stdout.write("\n")


def answer(runner: asyncio.Runner, conversation: Conversation, screen: Screen, text: str) -> bool:
    """Runs a turn: asks, prints, and keeps the answer. What Ctrl-C cut short stays as far as it came. Returns
    whether there was no error.
    """
    conversation.messages.append(conversation.message(text))
    got = StreamedAnswer()

    async def turn() -> None:
        async with contextlib.aclosing(conversation.ask(got)) as pieces:
            async for kind, piece in pieces:
                screen.piece(kind, piece)

    stopped = False
    try:
        runner.run(turn())
    except KeyboardInterrupt:
        stopped = True
    screen.end()
    if got.error:
        screen.note(f"error: {got.error}")
    else:
        screen.note(got.speed() + (" · stopped" if stopped else ""))
    if got.content:
        conversation.messages.append({"role": "assistant", "content": got.content})
        conversation.pictures.clear()
        conversation.videos.clear()
    else:
        conversation.messages.pop()  # a question without an answer would confuse the next turn
    return not got.error


def command(conversation: Conversation, line: str) -> str | None:
    """Carries out a `/command`; returns what to say about it, None to leave."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/quit", "/exit"):
        return None
    if name == "/clear":
        conversation.messages.clear()
        return "forgotten"
    if name == "/system":
        conversation.system = rest or None
        conversation.messages.clear()
        return "system message set" if rest else "no system message"
    if name in ("/image", "/video"):
        noun = {"/image": "picture", "/video": "video"}[name]
        added = conversation.videos if noun == "video" else conversation.pictures
        if not rest:
            added.clear()
            return f"no {noun}s"
        try:
            added.append(picture_url(rest))
        except EndpointError as error:
            return str(error)
        return f"the next message has {counted(len(added), noun)}"
    if name == "/think" and rest in ("on", "off", "auto"):
        conversation.think = {"on": True, "off": False, "auto": None}[rest]
        return f"thinking: {rest}"
    if name == "/save":
        path = Path(rest or time.strftime("deltic-chat-%Y%m%d-%H%M%S.json"))
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        try:
            text = json.dumps(system + conversation.messages, indent=1, ensure_ascii=False) + "\n"
            path.write_bytes(text.encode("utf-8", "replace"))  # half a surrogate pair becomes a question mark
        except (OSError, ValueError) as error:
            return f"cannot write {path}: {error}"
        return f"saved to {path}"
    return HELP


def read_message(prompt: str) -> str:
    """Reads a message from the keyboard; raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C.

    A line ending in a backslash goes on. Pasted newlines come within one line from readline's bracketed
    paste.
    """
    text = input(prompt)
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input("… ")
    return text.strip()


def talk(conversation: Conversation, runner: asyncio.Runner) -> bool:
    """Reads and answers until the user leaves. Whether all went well, or somebody saw that it did not."""
    screen, went_well = Screen(), True
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing, history and bracketed paste for input())
        prompt = f"\001{BOLD}\002> \001{RESET}\002" if sys.stdout.isatty() else "> "
        screen.note(f"{conversation.model} · /help for commands, Ctrl-D to leave")
    while True:
        try:
            text = read_message(prompt)
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            continue
        if text.startswith("/"):
            reply = command(conversation, text)
            if reply is None:
                break
            screen.note(reply)
        elif text:
            went_well &= answer(runner, conversation, screen, text)
    return went_well or sys.stdin.isatty()


def chat(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command: talks to the server at --url, or to one it starts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal cannot show becomes a question mark
    model = str(getattr(arguments, "model", ""))
    if " " in model and not (arguments.url or Path(model).exists()):
        hint = "a question is typed once it runs, or piped: echo 'Hello' | deltic chat"
        print(f"deltic: {model!r} is taken for a model, and no model has a space in its name; {hint}", file=sys.stderr)
        return 2
    sampling = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    try:
        with asyncio.Runner() as runner, own_server(arguments, server_arguments) as server:
            endpoint = runner.run(reached(arguments, server))
            conversation = Conversation(
                endpoint,
                runner.run(asked_model(arguments, endpoint)),
                system=arguments.system,
                think=arguments.think,
                sampling={key: value for key, value in sampling.items() if value is not None},
                pictures=[*map(picture_url, arguments.image)],
                videos=[*map(picture_url, arguments.video)],
            )
            return 0 if talk(conversation, runner) else 1
    except (EndpointError, ServerFailed) as error:
        print(f"deltic: {error}", file=sys.stderr)
        return 1
