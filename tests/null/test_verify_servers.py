"""`deltic verify --against URL`: how each kind of server is asked, with stand-ins on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltic.__main__ import main
from deltic.commands.endpoint import Endpoint, EndpointError
from deltic.verify import servers
from deltic.verify.bits import N_TIMED, check_logprobs, check_speed
from deltic.verify.page import Check
from deltic.verify.servers import ask
from deltic.verify.texts import CHATS, TEXTS

IDS = {"english": [5, 9, 200, 31], "code": [1, 2]}


def chance(id: int) -> float:
    """The log-probability of a token, wherever it stands."""
    return -0.01 * id - 0.5


def written(body: dict[str, Any]) -> str:
    return " ".join(message["content"] for message in body["messages"]) + str(body.get("chat_template_kwargs", ""))


@dataclass
class StandIn:
    """A server of one kind, as far as it is asked."""

    kind: str
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    spoilt: tuple[int, ...] = ()
    """Answers with log-probabilities of prompts that begin with these have another form."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.bodies.append((path, body))
        is_llama = self.kind == "llamacpp"
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "owned_by": self.kind}]}
        if path == "/tokenize" and is_llama:
            assert body["add_special"] is False
            return 200, {"tokens": list(body["content"].encode())}
        if path == "/tokenize" and "prompt" in body:
            return 200, {"tokens": list(body["prompt"].encode()), "count": 1}
        if path == "/tokenize" and self.kind != "sglang":
            return 200, {"tokens": list(written(body).encode())}
        if path == "/apply-template" and is_llama:
            return 200, {"prompt": written(body)}
        if (body.get("input_ids") or body.get("prompt") or [None])[0] in self.spoilt:
            return 200, {"choices": [{}], "meta_info": {}, "completion_probabilities": []}
        if path == "/completion" and is_llama:
            ((id, bias),) = body["logit_bias"]
            assert bias > 100 and body["n_probs"] == 1 and body["n_predict"] == 1
            return 200, {
                "completion_probabilities": [{"id": id, "token": "", "logprob": chance(id), "top_logprobs": []}]
            }
        if path == "/generate" and self.kind == "sglang":
            assert body["return_logprob"] is True and body["logprob_start_len"] == 0
            told = [[None, body["input_ids"][0], None], *([chance(id), id, None] for id in body["input_ids"][1:])]
            return 200, {"text": "", "meta_info": {"input_token_logprobs": told}}
        if path == "/v1/completions" and self.kind in ("vllm", "deltic"):
            entries = [{str(id): {"logprob": chance(id)}, "7": {"logprob": -0.1}} for id in body["prompt"][1:]]
            return 200, {"choices": [{"text": "", "prompt_logprobs": [None, *entries]}]}
        return 404, {"error": {"message": f"no {path}"}}


@contextmanager
def standing(server: StandIn) -> Iterator[str]:
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            assert self.headers["Authorization"] == "Bearer sk-1"
            status, answer = server.answer(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()


@pytest.mark.parametrize("kind", servers.KINDS)
def test_each_kind_is_asked_in_its_own_form(kind: str) -> None:
    server = StandIn(kind)
    with standing(server) as url:
        answers = ask(url, "sk-1", None, IDS, lambda stage, done: None)
    assert answers.kind == servers.KINDS[kind] and answers.model == "m"
    assert answers.logprobs == {name: [chance(id) for id in ids[1:]] for name, ids in IDS.items()}
    assert answers.ids == {name: list(text.encode()) for name, text in TEXTS.items()}
    if kind == "sglang":  # one that renders no chats
        assert not answers.prompts and len(answers.refused) == len(CHATS)
        assert "no /tokenize" in answers.refused[0]
    else:
        assert answers.prompts.keys() == {chat["name"] for chat in CHATS} and not answers.refused
        said = answers.prompts["without thinking"]
        text = said if isinstance(said, str) else bytes(said).decode()
        assert text == "Say hello.{'enable_thinking': False}"
    asked = [body for path, body in server.bodies if path == "/completion"]
    assert [body["prompt"] for body in asked] == ([[5], [5, 9], [5, 9, 200], [1]] if kind == "llamacpp" else [])


@pytest.mark.parametrize("kind", servers.KINDS)
def test_one_answer_in_another_form_leaves_the_others(kind: str) -> None:
    with standing(StandIn(kind, spoilt=(5,))) as url:
        answers = ask(url, "sk-1", None, IDS, lambda stage, done: None)
    assert answers.logprobs == {"code": [chance(2)]} and answers.ids.keys() == TEXTS.keys()
    assert answers.refused[-1].startswith("it does not tell the log-probabilities of 'english': /")
    assert "does not have the form" in answers.refused[-1]


def test_an_unknown_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Endpoint] = []
    monkeypatch.setattr(Endpoint, "close", lambda self: closed.append(self))
    with standing(StandIn("somebody")) as url, pytest.raises(EndpointError, match=r"a server of 'somebody'.*vLLM"):
        ask(url, "sk-1", None, IDS, lambda stage, done: None)
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("distance", "verdict"), [(0.01, "ok"), (0.2, "look"), (2.0, "wrong"), (float("nan"), "wrong")]
)
def test_log_probabilities_that_are_far_are_named(distance: float, verdict: str) -> None:
    theirs = {name: [chance(id) for id in ids[1:]] for name, ids in IDS.items()}
    mine = {"english": theirs["english"], "code": [theirs["code"][0] - distance]}
    check = Check("one")
    check_logprobs(mine, theirs, "vLLM", check)
    assert check.verdict == verdict
    assert check.said[0].startswith("code: log-probabilities differ by " if verdict != "ok" else "4 tokens of 2 texts")
    check = Check("one")
    check_logprobs({"code": []}, {"code": theirs["code"]}, "vLLM", check)
    assert check.verdict == "wrong" and "0 log-probabilities here, and 1 by vLLM" in check.said[0]


def test_several_tokens_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with drafts. A step takes a second here; the first two are the prefill."""
    steps, now = list[int](), 0.0

    def step() -> list[Any]:
        nonlocal now
        now += 1.0
        return [SimpleNamespace(error=None, token_ids=[0] * n)] if (n := steps.pop(0)) else []

    engine: Any = SimpleNamespace(
        add=lambda request: steps.extend([0, 1, 31, 0, N_TIMED - 32]), has_work=lambda: bool(steps), step=step
    )
    monkeypatch.setattr("deltic.verify.bits.time.perf_counter", lambda: now)
    check = Check("speed")
    check_speed(engine, [1, 2], 21.0, check, lambda stage, done: None)
    assert check.figures["decode"] == [(N_TIMED - 1) / 3] * 3 and check.verdict == "ok"


def test_a_place_for_the_page_is_looked_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "a-file"
    taken.write_text("")
    assert main(["verify", "--out", str(taken)]) == 2
    told = capsys.readouterr()
    assert not told.out and "Give a directory to write to." in told.err and "Traceback" not in told.err
