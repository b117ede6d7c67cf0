"""A gap in a text, and what fills it: `suffix` of completions and of Ollama's, and llama.cpp's /infill."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deltic.config import ServerConfig
from deltic.engine.messages import Output
from deltic.server.app import create_app
from deltic.server.chat.gap import Filler, GapChoice, OtherFile
from deltic.server.chat.request import Shown
from deltic.server.service import Server
from tests.fake_engine import END, TEMPLATE, FakeEngineClient, byte_tokenizer, make_app, saying, served, service_of

PREFIX, MIDDLE, SUFFIX, PAD, PROJECT, FILE = range(265, 271)
ENDS = {265, 266, 267, 268, 269, 270, 256}

VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\nf()\n", "prompt": "    ret", "n_predict": 128,
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "x.py"}], "stop": [], "n_indent": 4, "top_k": 40,
    "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "model": "",
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_per_second", "truncated", "tokens_cached"],
}  # fmt: skip
"""What llama.vim sends."""


@pytest.fixture(scope="module")
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture(scope="module")
def url(engine: FakeEngineClient) -> Iterator[str]:
    server = Server(ServerConfig())
    server.add(service_of(server, engine, "fake", TEMPLATE, tokenizer=byte_tokenizer(fills=True)))
    with served(create_app(server)) as url:
        yield url


@pytest.fixture(autouse=True)
def anew(engine: FakeEngineClient) -> None:
    engine.answer = saying("urn 1")
    engine.batch = 1


def infill(url: str, status: int = 200, **fields: Any) -> Any:
    response = httpx.post(f"{url}/infill", json={"input_prefix": "a(", "input_suffix": ")"} | fields)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def test_what_llama_vim_sends_and_reads(engine: FakeEngineClient, url: str) -> None:
    said = infill(url, **VIM)
    assert said.keys() == set(VIM["response_fields"]) and said["content"] == "urn 1" and said["truncated"] is False
    request = engine.requests[-1]
    assert byte_tokenizer(fills=True).decode(request.prompt_ids, False) == (
        "<|repo_name|>myproject\n<|file_sep|>x.py\nx = 1\n<|file_sep|>filename\n"
        "<|fim_prefix|>def f():\n    ret<|fim_suffix|>\nf()\n<|fim_middle|>"
    )
    assert set(request.params.stop_token_ids) == ENDS and request.boundaries == [request.prompt_ids.index(PREFIX)]
    assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0, 40, 128)
    assert infill(url, **VIM | {"n_predict": 0, "input_prefix": "", "input_suffix": "", "response_fields": [""]}) == {}


def test_the_whole_answer(engine: FakeEngineClient, url: str) -> None:
    said = infill(url, n_predict=5, seed=-1, return_tokens=True)
    assert (said["content"], said["stop_type"], said["stop"], said["tokens"]) == ("urn 1", "limit", True, [*b"urn 1"])
    assert (
        said["prompt"] == "<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>"
        and said["generation_settings"]["n_ctx"] == 1024
    )
    assert said["tokens_evaluated"] == 6 and said["timings"]["predicted_n"] == 5 and said["system_fingerprint"]
    assert infill(url, stop=["rn"])["stopping_word"] == "rn" and infill(url)["stop_type"] == "eos"
    several = infill(url, n_cmpl=2)
    assert [choice["index"] for choice in several] == [0, 1] and engine.requests[-1].params.temperature == 1


def test_a_stream(url: str) -> None:
    text = httpx.post(f"{url}/infill", json={"input_prefix": "a(", "input_suffix": ")", "stream": True}).text
    *first, last = [json.loads(block.removeprefix("data: ")) for block in text.split("\n\n")[:-1]]
    assert "".join(chunk["content"] for chunk in (*first, last)) == "urn 1" and not any(
        chunk["stop"] for chunk in first
    )
    assert last["stop"] and last["stop_type"] == "eos" and last["tokens_predicted"] == 6
    body = {"input_prefix": "a(", "input_suffix": ")", "stream": True, "return_progress": True}
    told = json.loads(httpx.post(f"{url}/infill", json=body).text.split("\n\n")[0].removeprefix("data: "))
    assert told["prompt_progress"]["total"] == 6 and told["content"] == ""


def test_the_time_is_over_at_a_line_s_end(engine: FakeEngineClient, url: str) -> None:
    engine.answer = saying("one\ntwo\nthree")
    said = infill(url, t_max_predict_ms=-1)
    assert said["content"] == "one\ntwo\nthree"
    choice = GapChoice(0, byte_tokenizer(), Shown(), most_s=1e-9)
    said = "".join(choice.push(Output("r", token_ids=[byte])).delta.content for byte in b"one\n")
    assert said == "one\n" and choice.finish_reason == "length"


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n    b\n\n    c\nd", "a\n    b\n\n    c"),
        ("a\n  b", "a"),
        ("a\n    b\n", "a\n    b\n"),
        ("a\n\t\t\t\tb\n", "a\n\t\t\t\tb\n"),
        ("\n", "\n"),
    ],
)
def test_a_line_that_stands_out_ends_the_answer(text: str, shown: str, size: int) -> None:
    choice, said, ids = GapChoice(0, byte_tokenizer(), Shown(), indent=4), "", [*text.encode(), END]
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        output = Output("r", token_ids=part, finish_reason="stop" if END in part else None, stop_token_id=END)
        said += choice.push(output).delta.content
        if choice.finish_reason is not None:
            break
    assert said == shown and choice.finish_reason == ("length" if shown != text else "stop")


def test_what_does_not_fit_is_left_out_and_said() -> None:
    filler = Filler.of(byte_tokenizer(fills=True))
    assert filler is not None
    decode = filler.tokenizer.decode
    for room in (4, 5, 9, 40, 1000):
        cut = filler.fitting("x" * 100, "y" * 100, [], room)
        assert len(cut.ids) == min(room, 203) and cut.is_cut == (room < 203)
        n_suffix = decode(cut.ids).count("y")
        assert n_suffix == (100 if room == 1000 else (room - 3) // 4)
    assert decode(filler.fitting("x" * 100, "y" * 9, [], 40).ids).count("y") == 9
    others = [OtherFile("a", "old"), OtherFile("b", "new")]
    some = filler.fitting("x", "y", others, 36)
    assert some.is_cut and "new" in decode(some.ids) and "old" not in decode(some.ids) and len(some.ids) <= 36
    assert filler.fitting("x", "y", others, 10).ids == filler.whole("x", "y")
    assert not filler.fitting("x", "y", others, 100).is_cut
    began_s = time.process_time()
    assert filler.fitting("x", "y", [OtherFile("a", "<|file_sep|>" * 10**6)], 100).is_cut
    assert time.process_time() - began_s < 1, "what cannot fit is not encoded"


def test_a_file_that_has_such_tokens_in_letters() -> None:
    filler = Filler.of(byte_tokenizer(fills=True))
    assert filler is not None
    text = "a <|fim_middle|> b <|im_end|>"
    ids = filler.whole(text, text)
    assert [ids.count(id) for id in (PREFIX, SUFFIX, MIDDLE, END)] == [1, 1, 1, 0]
    assert filler.tokenizer.decode(ids, False) == f"<|fim_prefix|>{text}<|fim_suffix|>{text}<|fim_middle|>"


def test_suffix_of_a_completion(engine: FakeEngineClient, url: str) -> None:
    def complete(status: int = 200, **fields: Any) -> Any:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a(", "suffix": ")"} | fields)
        assert response.status_code == status, response.text
        return response.json() if status == 200 else response.json()["error"]["param"]

    assert complete()["choices"][0] == {"index": 0, "text": "urn 1", "logprobs": None, "finish_reason": "stop"}
    request = engine.requests[-1]
    assert request.prompt_ids == [PREFIX, *b"a(", SUFFIX, *b")", MIDDLE] and set(request.params.stop_token_ids) == ENDS
    complete(ignore_eos=True, max_tokens=3)
    assert not engine.requests[-1].params.stop_token_ids
    complete(suffix="")
    assert engine.requests[-1].prompt_ids == [*b"a("]
    complete(prompt=None)
    assert engine.requests[-1].prompt_ids == [PREFIX, SUFFIX, *b")", MIDDLE], "the gap is at the beginning"
    assert complete(400, prompt=[1, 2]) == "suffix" and complete(400, echo=True) == "echo"
    assert complete(400, truncate_prompt_tokens=3) == "truncate_prompt_tokens"
    assert complete(400, suffix="x" * 2000) == "prompt"


def test_suffix_of_ollama(engine: FakeEngineClient, url: str) -> None:
    body = {"model": "fake", "prompt": "a(", "suffix": ")", "stream": False}
    assert httpx.post(f"{url}/api/generate", json=body).json()["response"] == "urn 1"
    assert engine.requests[-1].prompt_ids == [PREFIX, *b"a(", SUFFIX, *b")", MIDDLE]
    assert "insert" in httpx.post(f"{url}/api/show", json={"model": "fake"}).json()["capabilities"]
    error = httpx.post(f"{url}/api/generate", json=body | {"system": "x"}).json()["error"]
    assert error.startswith("system: has no meaning beside suffix")


def test_what_is_refused(url: str) -> None:
    assert infill(url, 400, n=2, n_cmpl=3)["param"] == "n_cmpl"
    assert infill(url, 400, n_cmpl=20)["param"] == "n_cmpl"
    assert infill(url, 400, request_id="x")["param"] == "request_id"
    assert infill(url, 400, input_extra=[{"filename": "x"}])["param"] == "input_extra[0].text"
    assert infill(url, 400, lora=[{"id": 0, "scale": 1}])["param"] == "lora"
    assert infill(url, 404, model="other")["code"] == "model_not_found"
    response = httpx.post(f"{url}/infill", json={"input_prefix": "a"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "input_suffix"


def test_a_vocabulary_that_cannot_say_it(engine: FakeEngineClient) -> None:
    with served(make_app(engine)) as url:
        error = infill(url, 400)
        assert error["message"].startswith(
            "input_prefix: 'fake' cannot fill a gap: its vocabulary has no <|fim_prefix|>."
        )
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a(", "suffix": ")"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "suffix"
        assert "insert" not in httpx.post(f"{url}/api/show", json={"model": "fake"}).json()["capabilities"]
