"""`deltic chat`: a conversation in the terminal, streamed, over the OpenAI API; or one question, answered
alone.

Ctrl-C ends the answer: the connection is closed, and the server frees the request. A conversation goes on
then, and Ctrl-D leaves it. Escape codes used: bold, dim, reset. Control characters that a model writes never
reach the terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from deltic.commands.conversation import Conversation, StreamedAnswer
from deltic.commands.endpoint import EndpointError, asked_model, error_message, own_server, picture_url, reached
from deltic.config import ConfigError, nearest
from deltic.json_types import JsonObject
from deltic.logs import counted, printable

HELP = """\
/help                 this list
/regen                answer the last question again
/clear                forget the conversation
/system [TEXT]        set the system message, or remove it; forgets the conversation
/set [NAME [VALUE]]   set how tokens are drawn, as /set temperature 0.2; without VALUE, as the model has it; alone, tell
/model [NAME]         go on with another model of the server; alone, list them
/image FILE           add a picture to the next message; without FILE, drop what was added
/video FILE           add a video to the next message; without FILE, drop what was added
/think on|off|auto    thinking before the answer; auto leaves it to the model
/think show|hide      whether the thought is written
/save [FILE]          write the conversation as JSON
/load FILE            go on with a conversation that was saved
/quit                 leave (also Ctrl-D); Ctrl-C ends an answer early
A line ending in \\ goes on, pasted lines stay together, and a message between \"\"\" and \"\"\" has any number of lines."""

SETTINGS = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int, "max_tokens": int,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float, "thinking_budget": int,
    "reasoning_effort": str, "stop": str,
}  # fmt: skip
"""Fields of a request that /set knows, and the types of their values."""

BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"

WAIT_S = 0.5
"""Seconds without an answer after which a terminal is told what the server does."""

HISTORY_LINES = 1000


class Screen:
    """Screen on which answers are written; without a terminal, plain text."""

    def __init__(self, shows_thought: bool = True) -> None:
        self.shows_thought = shows_thought
        self._styled = sys.stdout.isatty()
        self._kind = ""

    def style(self, code: str) -> None:
        """Switches the style, on a terminal."""
        if self._styled:
            sys.stdout.write(code)

    def piece(self, kind: str, text: str) -> None:
        """A piece of the answer; thinking is dimmed and set off by an empty line."""
        if kind == "reasoning" and not self.shows_thought:
            return
        if kind != self._kind:
            if self._kind == "reasoning":
                self.style(RESET)
                sys.stdout.write("\n\n")
            if kind == "reasoning":
                self.style(DIM)
            text = text.lstrip("\n")
            self._kind = kind
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line that is not the model's."""
        self.style(RESET + DIM)
        sys.stdout.write(printable(text))
        self.style(RESET)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def end(self) -> None:
        """The answer is over."""
        self._kind = ""
        self.style(RESET)
        sys.stdout.write("\n")
        sys.stdout.flush()


@contextlib.contextmanager
def sign_of_life(answer: StreamedAnswer) -> Iterator[Callable[[], None]]:
    """A line in stderr, if that is a terminal, that says what the server does, from WAIT_S on.

    Yields what is called at each event: it writes the line anew, and removes it once there is a text.
    """
    from rich.console import Console

    status = Console(stderr=True).status(answer.reading())
    if not status.console.is_terminal:
        yield lambda: None
        return
    timer = asyncio.get_running_loop().call_later(WAIT_S, status.start)

    def tell() -> None:
        if answer.first_s is None:
            status.update(answer.reading())
        else:
            timer.cancel()
            status.stop()

    try:
        yield tell
    finally:
        timer.cancel()
        status.stop()


def stream(runner: asyncio.Runner, conversation: Conversation, screen: Screen | None) -> StreamedAnswer:
    """Asks for the next answer, and writes it as it comes. What Ctrl-C cut short has `finish_reason`
    "interrupted".
    """
    got = StreamedAnswer()

    async def turn() -> None:
        with sign_of_life(got) as tell:
            async with contextlib.aclosing(conversation.ask(got)) as pieces:
                async for kind, piece in pieces:
                    tell()
                    if screen is not None:
                        screen.piece(kind, piece)

    try:
        runner.run(turn())
    except KeyboardInterrupt:
        got.finish_reason = "interrupted"
    return got


def answer(runner: asyncio.Runner, conversation: Conversation, screen: Screen, text: str | None) -> bool:
    """Runs a turn: asks, prints, and keeps the answer. What Ctrl-C cut short stays as far as it came. text:
    None to answer the last question again. Returns whether there was no error.
    """
    before = conversation.messages[:]
    if text is not None:
        conversation.messages.append(conversation.message(text))
    else:
        while conversation.messages[-1]["role"] != "user":
            conversation.messages.pop()
    got = stream(runner, conversation, screen)
    screen.end()
    if got.error:
        screen.note(f"error: {got.error}")
    else:
        screen.note(got.speed() + (" · stopped" if got.finish_reason == "interrupted" else ""))
    if got.content:
        conversation.messages.append({"role": "assistant", "content": got.content})
        conversation.pictures.clear()
        conversation.videos.clear()
    else:
        conversation.messages[:] = before  # a question without an answer would confuse the next turn
    return not got.error


def answer_once(runner: asyncio.Runner, conversation: Conversation, arguments: argparse.Namespace, prompt: str) -> int:
    """Writes the answer to one question and nothing else, or with --json one object; the exit status."""
    conversation.messages.append(conversation.message(prompt))
    shows_thought = arguments.show_thinking and sys.stdout.isatty()
    screen = None if arguments.json else Screen(shows_thought)
    got = stream(runner, conversation, screen)
    if screen is not None:
        screen.end()
    else:
        names = ("content", "reasoning", "finish_reason", "usage", "error")
        told = {"model": conversation.model} | {name: getattr(got, name) for name in names}
        print(json.dumps(told, ensure_ascii=False))
    if got.finish_reason == "interrupted":
        return 130
    if got.error:
        print(f"deltic: {printable(got.error)}", file=sys.stderr)
    elif got.finish_reason == "length" and screen is not None:
        print("deltic: the answer was cut at the token limit; raise --max-tokens", file=sys.stderr)
    return 1 if got.error else 0


# Commands. Each takes the conversation and what stands behind its name, and returns what to say.


def clear(conversation: Conversation, rest: str) -> str:
    conversation.messages.clear()
    return "forgotten"


def system(conversation: Conversation, text: str) -> str:
    conversation.system = text or None
    conversation.messages.clear()
    return "system message set" if text else "no system message"


def _added(files: list[str], noun: str, name: str) -> str:
    if not name:
        files.clear()
        return f"no {noun}s"
    try:
        files.append(picture_url(name))
    except EndpointError as error:
        return str(error)
    return f"the next message has {counted(len(files), noun)}"


def think(conversation: Conversation, word: str) -> str:
    if word not in ("on", "off", "auto"):
        return "/think takes on, off, auto, show or hide"
    conversation.think = {"on": True, "off": False, "auto": None}[word]
    return f"thinking: {word}"


def set_sampling(conversation: Conversation, text: str) -> str:
    name, _, value = text.removeprefix("parameter ").strip().partition(" ")
    if not name:
        known = conversation.sampling.items()
        return ", ".join(f"{name} {value}" for name, value in known) or f"as the model has it; {', '.join(SETTINGS)}"
    if name not in SETTINGS:
        return f"{name}: {nearest(name, SETTINGS) or 'there is ' + ', '.join(SETTINGS)}"
    kind, value = SETTINGS[name], value.strip()
    if not value:
        conversation.sampling.pop(name, None)
        return f"{name}: as the model has it"
    try:
        made = kind(value)
        if isinstance(made, float) and not math.isfinite(made):
            raise ValueError
        conversation.sampling[name] = made
    except ValueError:
        return f"{name}: {value!r} is not {'a whole number' if kind is int else 'a number'}"
    return f"{name}: {conversation.sampling[name]}"


def save(conversation: Conversation, name: str) -> str:
    path = Path(name or time.strftime("deltic-chat-%Y%m%d-%H%M%S.json")).expanduser()
    try:
        text = json.dumps(conversation.history, indent=1, ensure_ascii=False) + "\n"
        path.write_bytes(text.encode("utf-8", "replace"))  # half a surrogate pair becomes a question mark
    except (OSError, ValueError) as error:
        return f"cannot write {path}: {error}"
    return f"saved to {path}"


def load(conversation: Conversation, name: str) -> str:
    path = Path(name).expanduser()
    try:
        messages = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot read {path}: {error}"
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        return f"{path} is no conversation: /save writes one, a JSON list of messages"
    first, *others = messages
    conversation.system = first["content"] if first["role"] == "system" else None
    conversation.messages[:] = others if first["role"] == "system" else messages
    return f"{counted(len(conversation.messages), 'message')} of {path}"


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    text, kinds = value.get("content"), str if value.get("role") == "system" else str | list
    return value.get("role") in ("system", "user", "assistant", "tool") and isinstance(text, kinds)


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/clear": clear,
    "/system": system,
    "/image": lambda conversation, name: _added(conversation.pictures, "picture", name),
    "/video": lambda conversation, name: _added(conversation.videos, "video", name),
    "/think": think,
    "/set": set_sampling,
    "/save": save,
    "/load": load,
}
LEAVE = ("/quit", "/exit", "/bye")


def command(conversation: Conversation, line: str) -> str | None:
    """Carries out a `/command`; returns what to say about it, None to leave."""
    name, _, rest = line.partition(" ")
    if name in LEAVE:
        return None
    carry_out = COMMANDS.get(name)
    return carry_out(conversation, rest.strip()) if carry_out else HELP


async def switch(conversation: Conversation, name: str) -> str:
    """Goes on with another model of the server; without a name, lists them. Raises EndpointError."""
    endpoint = conversation.endpoint
    if not name:
        status, body = await endpoint.json("GET", "/v1/models")
        try:
            names = [str(card["id"]) for card in body["data"]]
        except (TypeError, LookupError):
            return f"the server lists no models: {error_message(body, status)}"
        return "\n".join(f"{'*' if each == conversation.model else ' '} {each}" for each in names)
    status, body = await endpoint.json("GET", f"/v1/models/{urllib.parse.quote(name, safe='/:')}")
    if status != 200:
        return error_message(body, status)
    conversation.model = name
    return f"model: {name}"


def read_message(prompt: str) -> tuple[str, bool]:
    """Reads a message from the keyboard; the second value is True if it may be a command. Raises EOFError at
    Ctrl-D, KeyboardInterrupt at Ctrl-C.

    A line ending in a backslash goes on, and so does a message that begins with three quotes, to the next
    three. Pasted newlines come within one line from readline's bracketed paste.
    """
    text = input(prompt)
    if text.lstrip().startswith('"""'):
        text = text.lstrip()[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + input("… ")
        return text.rstrip()[:-3].strip("\n"), False
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input("… ")
    return text.strip(), text.startswith("/")


@contextlib.contextmanager
def line_history(is_kept: bool) -> Iterator[None]:
    """Editing and history of what is typed, while the block runs. is_kept: in a file, for the next time."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME", "")
    file = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "deltic" / "chat_history"
    if is_kept:
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
    n_before = readline.get_current_history_length()
    try:
        yield
    finally:
        n_new = readline.get_current_history_length() - n_before
        if is_kept and n_new > 0:
            with contextlib.suppress(OSError):
                file.parent.mkdir(0o700, parents=True, exist_ok=True)
                file.touch(0o600)
                readline.set_history_length(HISTORY_LINES)
                readline.append_history_file(n_new, file)


def talk(conversation: Conversation, runner: asyncio.Runner, screen: Screen) -> None:
    """Reads and answers until the user leaves."""
    prompt = f"\001{BOLD}\002> \001{RESET}\002" if sys.stdout.isatty() else "> "
    screen.note(f"{conversation.model} · /help for commands, Ctrl-D to leave")
    while True:
        try:
            text, is_command = read_message(prompt)
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            continue
        name, _, rest = text.partition(" ")
        if not is_command:
            if text:
                answer(runner, conversation, screen, text)
        elif name == "/regen":
            if any(message["role"] == "user" for message in conversation.messages):
                answer(runner, conversation, screen, None)
            else:
                screen.note("there is no question yet")
        elif name == "/model":
            try:
                screen.note(runner.run(switch(conversation, rest.strip())))
            except (EndpointError, KeyboardInterrupt) as error:
                screen.note(str(error))
        elif name == "/think" and rest.strip() in ("show", "hide"):
            screen.shows_thought = rest.strip() == "show"
            screen.note(f"thoughts: {'written' if screen.shows_thought else 'not written'}")
        else:
            reply = command(conversation, text)
            if reply is None:
                break
            screen.note(reply)


def asked_prompt(arguments: argparse.Namespace) -> str | None:
    """The one question: from the command line, with what comes through a pipe behind it; None where somebody
    types. Raises ConfigError.
    """
    given = getattr(arguments, "prompt", None)
    if sys.stdin is not None and sys.stdin.isatty():  # None: it was closed
        if arguments.json and given is None:
            raise ConfigError("--json is for one question. Give it: deltic chat --json 'Why is the sky blue?'")
        return given
    piped = "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8", "replace").strip("\n")
    if not (prompt := "\n\n".join(filter(None, (given, piped)))):
        model = getattr(arguments, "model", None)
        told = f". {model!r} is the MODEL; a question of one word goes behind -p" if model else ""
        raise ConfigError(f"there is no question, neither on the command line nor in what is piped in{told}")
    return prompt


def chat(arguments: argparse.Namespace, server_arguments: list[str]) -> int:
    """The command: talks to the server at --url, or to one it starts. Raises ConfigError, EndpointError,
    ServerFailed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal cannot show becomes a question mark
    prompt = asked_prompt(arguments)
    sampling: JsonObject = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    pictures, videos = [*map(picture_url, arguments.image)], [*map(picture_url, arguments.video)]
    with asyncio.Runner() as runner, own_server(arguments, server_arguments) as server:
        endpoint = runner.run(reached(arguments, server))
        conversation = Conversation(
            endpoint,
            runner.run(asked_model(arguments, endpoint)),
            system=arguments.system,
            think=arguments.think,
            sampling={key: value for key, value in sampling.items() if value is not None},
            pictures=pictures,
            videos=videos,
        )
        if prompt is not None:
            return answer_once(runner, conversation, arguments, prompt)
        with line_history(arguments.history):
            talk(conversation, runner, Screen(arguments.show_thinking))
        return 0
