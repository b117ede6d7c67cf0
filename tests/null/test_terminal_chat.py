"""`deltic chat`: a conversation that is typed, and one question that is answered alone."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltic.__main__ import main, parser
from deltic.commands.chat import SETTINGS, command, read_message
from deltic.commands.conversation import Conversation, StreamedAnswer
from deltic.commands.endpoint import Endpoint
from deltic.server.api.protocol import ChatRequest
from tests.fake_engine import FakeEngineClient, make_app, served
from tests.fake_openai import FakeOpenAI

HELLO = {"role": "user", "content": "hello"}


class Typed:
    """Lines that somebody types in a terminal, then Ctrl-D."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", self._read)
        self._lines: Iterator[str] = iter(())

    def __call__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def _read(self, prompt: str = "") -> str:
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Typed(monkeypatch)


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def conversation(*messages: dict[str, object]) -> Conversation:
    return Conversation(Endpoint("http://x"), "m", messages=list(messages))


# A conversation.


def test_it_streams_keeps_the_conversation_and_obeys_commands(typed: Typed, capsys, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    typed("/system Be brief.", "/think on", "hello\\", "you", "again", f"/save {saved}", "/nonsense", "/quit", "no")
    with FakeOpenAI(n_words=3) as server:
        assert main(["chat", "--url", server.url, "--temperature", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "hm\n\nw0 w1 w2 \n3 tokens" in out, "thinking, an empty line, the answer, its speed"
    assert "/help" in out, "an unknown command shows the help"
    first, second = server.bodies
    assert [m["content"] for m in first["messages"]] == ["Be brief.", "hello\nyou"]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert first["temperature"] == 0.5
    assert len(json.loads(saved.read_text())) == 5


def test_a_failed_turn_is_taken_back(typed: Typed, capsys) -> None:
    typed("one", "two")
    with FakeOpenAI(statuses=[500]) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert "error: asked to fail (HTTP 500)" in capsys.readouterr().out
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


def test_an_answer_is_made_again(typed: Typed, capsys) -> None:
    typed("/regen", "one", "/regen", "two")
    with FakeOpenAI(n_words=2, statuses=[200, 500]) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert "there is no question yet" in capsys.readouterr().out
    roles = [[m["role"] for m in body["messages"]] for body in server.bodies]
    assert roles == [["user"], ["user"], ["user", "assistant", "user"]], "the old answer stays where a new one fails"


def test_a_block_has_any_number_of_lines(typed: Typed) -> None:
    typed('"""first', "", "  /think on", 'last"""', '"""/one"""', '"""', "a", '"""', "/help")
    assert read_message("> ") == ("first\n\n  /think on\nlast", False)
    assert read_message("> ") == ("/one", False)
    assert read_message("> ") == ("a", False)
    assert read_message("> ") == ("/help", True)


def test_sampling_is_set_told_and_taken_back() -> None:
    talked = conversation(HELLO)
    assert command(talked, "/set temperature 0.2") == "temperature: 0.2"
    assert command(talked, "/set parameter top_k 40") == "top_k: 40"
    assert command(talked, "/set stop END") == "stop: END"
    assert command(talked, "/set") == "temperature 0.2, top_k 40, stop END"
    body = talked.body()
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.2, 40, "END")
    assert command(talked, "/set temperature") == "temperature: as the model has it"
    assert "temperature" not in talked.body()
    assert command(talked, "/set seed x") == "seed: 'x' is not a whole number"
    assert command(talked, "/set min_p x") == "min_p: 'x' is not a number"
    assert command(talked, "/set min_p nan") == "min_p: 'nan' is not a number", "JSON has none"
    assert command(talked, "/set temprature 1") == "temprature: did you mean temperature?"
    assert "there is temperature, top_p" in (command(talked, "/set mirostat 1") or "")
    assert set(SETTINGS) <= set(ChatRequest.__struct_fields__)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    talked = conversation(HELLO, {"role": "assistant", "content": "Hi"})
    talked.system = "Be brief."
    file, bad = tmp_path / "chat.json", tmp_path / "bad.json"
    assert command(talked, f"/save {file}") == f"saved to {file}"
    other = conversation()
    assert command(other, f"/load {file}") == f"2 messages of {file}"
    assert (other.system, other.messages) == (talked.system, talked.messages)
    for text in ("{", "{}", "[]", "[1]", '[{"role": "user"}]', '[{"role": "x", "content": ""}]', "[" * 100_000):
        bad.write_text(text)
        said = command(other, f"/load {bad}") or ""
        assert said.startswith((f"cannot read {bad}", f"{bad} is no conversation")), text
    assert (command(other, "/load") or "").startswith("cannot read")
    assert other.messages == talked.messages, "nothing is lost"


def test_another_model_is_taken_if_there_is_one(typed: Typed, capsys) -> None:
    typed("/model", "/model nobody", "/model fake", "hello")
    with served(make_app(engine := FakeEngineClient())) as url:
        assert main(["chat", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "* fake" in out and "nobody" in out and "model: fake" in out and len(engine.requests) == 1
    assert engine.requests[0].wants_progress


def test_half_a_surrogate_pair_can_be_saved(tmp_path: Path) -> None:
    talked = conversation({"role": "user", "content": "gr\udcfc\u00df"})
    assert command(talked, f"/save {tmp_path / 'chat.json'}") == f"saved to {tmp_path / 'chat.json'}"
    assert json.loads((tmp_path / "chat.json").read_text("utf-8"))[0]["content"] == "gr?\u00df"
    assert "cannot write" in (command(talked, f"/save {tmp_path}") or "")


def test_think_switches_and_clear_forgets() -> None:
    talked = conversation(HELLO)
    for word, value in (("on", True), ("off", False), ("auto", None)):
        assert command(talked, f"/think {word}") == f"thinking: {word}"
        assert talked.think is value
    assert command(talked, "/think aloud") == "/think takes on, off, auto, show or hide"
    assert command(talked, "/clear") == "forgotten"
    assert talked.messages == []
    assert command(talked, "/quit") is command(talked, "/bye") is None


def test_thoughts_are_hidden(typed: Typed, capsys) -> None:
    typed("/think on", "/think hide", "one", "/think show", "two")
    with FakeOpenAI(n_words=1) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out.count("hm\n\nw0") == 1


def interrupt_when_asked(server: FakeOpenAI) -> None:
    def interrupt() -> None:
        while not server.bodies:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        server.n_words = 2  # after the interrupt, or the first answer could end by itself

    threading.Thread(target=interrupt).start()


def test_ctrl_c_ends_the_answer_only(typed: Typed, capsys, interruptible) -> None:
    typed("long", "short")
    with FakeOpenAI(token_s=0.01, n_words=1000) as server:
        interrupt_when_asked(server)
        assert main(["chat", "--url", server.url]) == 0
    assert "stopped" in capsys.readouterr().out
    assert server.n_disconnects == 1, "the server sees the client gone"
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["user", "assistant", "user"]


# One question.


@pytest.mark.parametrize(
    ("words", "piped", "asked"),
    [
        (["why is the sky blue"], b"", "why is the sky blue"),
        (["-p", "why"], b"", "why"),
        (["m", "why"], b"", "why"),
        ([], b"why?\n", "why?"),
        (["sum this up:"], b"\none\ntwo\n", "sum this up:\n\none\ntwo"),
        (["what is this"], b"\xff\xfe", "what is this\n\n\ufffd\ufffd"),
    ],
)
def test_a_question_is_answered_alone(monkeypatch, capsys, words: list[str], piped: bytes, asked: str) -> None:
    pipe(monkeypatch, piped)
    with FakeOpenAI(n_words=3) as server:
        assert main(["chat", "--url", server.url, "--think", *words]) == 0
    got = capsys.readouterr()
    assert got.out == "w0 w1 w2 \n", "without thought, prompt and speed"
    (body,) = server.bodies
    assert [message["content"] for message in body["messages"]] == [asked]
    assert body["model"] == ("m" if "m" in words else "fake")


def test_an_answer_as_json(monkeypatch, capsys) -> None:
    pipe(monkeypatch, b"")
    with FakeOpenAI(n_words=2, statuses=[200, 500]) as server:
        assert main(["chat", "--url", server.url, "--think", "--json", "tell me"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {
            "model": "fake", "content": "w0 w1 ", "reasoning": "hm", "finish_reason": "length",
            "usage": {"prompt_tokens": 7, "completion_tokens": 2}, "error": None,
        }  # fmt: skip
        assert main(["chat", "--url", server.url, "--json", "tell me"]) == 1
        assert json.loads(capsys.readouterr().out)["error"] == "asked to fail (HTTP 500)"


def test_the_exit_status_tells_how_it_went(monkeypatch, capsys, interruptible, tmp_path: Path) -> None:
    pipe(monkeypatch, b"")
    with FakeOpenAI(statuses=[500], token_s=0.01, n_words=1000) as server:
        url = ["chat", "--url", server.url]
        assert main([*url, "tell me"]) == 1
        assert capsys.readouterr() == ("\n", "deltic: asked to fail (HTTP 500)\n")
        assert main([*url, "--image", str(tmp_path / "none.png"), "what is this"]) == 1
        assert main(url) == 2
        assert "there is no question" in capsys.readouterr().err
        assert main([*url, "hello"]) == 2
        assert "'hello' is the MODEL; a question of one word goes behind -p" in capsys.readouterr().err
        server.bodies.clear()
        interrupt_when_asked(server)
        assert main([*url, "tell me"]) == 130
        capsys.readouterr()
        assert main([*url, "tell me"]) == 0
        assert "cut at the token limit" in capsys.readouterr().err
    for wrong in (["a b", "c d"], ["-p", "a", "b c"]):
        with pytest.raises(SystemExit) as left:
            parser().parse_args(["chat", *wrong])
        assert left.value.code == 2 and "there are two questions" in capsys.readouterr().err


def test_the_input_may_be_closed(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with FakeOpenAI(n_words=1) as server:
        assert main(["chat", "--url", server.url, "tell me"]) == 0
        assert main(["chat", "--url", server.url]) == 2
    assert capsys.readouterr().out == "w0 \n"


def test_json_is_for_a_question(typed: Typed, capsys) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--json"]) == 2
    assert "--json is for one question" in capsys.readouterr().err


def test_a_path_with_a_space_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    given = vars(parser().parse_args(["chat", str(tmp_path / "my model")]))
    assert given["model"] == str(tmp_path / "my model") and "prompt" not in given
    assert vars(parser().parse_args(["chat", "why? " * 2000]))["prompt"] == "why? " * 2000


# A sign of life.


def test_a_server_that_knows_no_progress_is_asked_without() -> None:
    with FakeOpenAI(n_words=1, refused=("return_progress",)) as server:
        talked = Conversation(Endpoint(server.url), "m", messages=[HELLO])

        async def ask() -> list[tuple[str, str]]:
            return [piece for _ in range(2) async for piece in talked.ask(StreamedAnswer())]

        assert asyncio.run(ask()) == [("content", "w0 ")] * 2
    assert ["return_progress" in body for body in server.bodies] == [True, False, False]


def test_the_line_before_an_answer() -> None:
    answer = StreamedAnswer()
    assert answer.reading() == "waiting"
    answer.progress = {"total": 12000, "cache": 0, "processed": 4560, "time_ms": 12}
    assert answer.reading() == "reading the prompt: 38% of 12,000 tokens"
    answer.progress = {"total": None}
    assert answer.reading() == "waiting"


def until(terminal: int, words: str, seen: str = "") -> str:
    """What a terminal shows, up to these words."""
    deadline_s = time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < deadline_s and select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 65536).decode("utf-8", "replace")
    return seen


def test_in_a_terminal(tmp_path: Path) -> None:
    """A line tells of the prompt while it is computed, lines are kept, and Ctrl-D leaves."""
    engine = FakeEngineClient()
    engine.hold = True
    master, slave = pty.openpty()
    with served(make_app(engine)) as url:
        child = subprocess.Popen(
            [sys.executable, "-m", "deltic", "chat", "--url", url],
            stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"},
            start_new_session=True,
        )  # fmt: skip
        try:
            until(master, "> ")
            os.write(master, b"hello\n")
            until(master, "reading the prompt: 100%")
            engine.hold = False
            seen = until(master, "first after")
            until(master, "> ", seen.rpartition("first after")[2])
            os.write(master, b"\x04")
            assert child.wait(60) == 0
        finally:
            engine.hold = False
            child.kill()
            child.wait()
            os.close(master)
            os.close(slave)
    assert "Hello" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    history = tmp_path / "deltic" / "chat_history"
    assert "hello" in history.read_text() and history.stat().st_mode & 0o077 == 0
