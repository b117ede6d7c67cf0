"""The API as clients see it: the real `openai` client and plain HTTP against the application over a fake engine."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import httpx
import msgspec
import openai
import pytest

from deltic.engine.events import Loading
from deltic.engine.messages import Output, Request, TokenLogprob
from deltic.models.checkpoint import DEMO
from deltic.server import transport
from deltic.server.api import decode
from deltic.server.chat import grammar
from deltic.server.chat.answer import Choice, Scores, Shown
from deltic.server.limits import INLINE_BYTES
from deltic.server.service import TRIM_S, Server
from deltic.text import Tokenizer
from tests.fake_engine import END, FakeEngineClient, byte_tokenizer, make_app, n_held, saying, served
from tests.waiting import until, wait_for

HELLO: Any = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}
WEATHER: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


@asynccontextmanager
async def client_of(engine: FakeEngineClient, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """In-process: fine for all but streams (the transport collects them)."""
    transport = httpx.ASGITransport(make_app(engine, **config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
        yield client


def post(
    engine: FakeEngineClient, path: str, body: Any, headers: dict[str, str] | None = None, **config: Any
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(engine, **config) as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body, headers=JSON | (headers or {}))
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(go())


def get(engine: FakeEngineClient, path: str, headers: dict[str, str] | None = None, **config: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(engine, **config) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(go())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must be well-formed to the letter."""
    assert response.status_code == 200 and response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(chunk.startswith("data: {") for chunk in chunks)
    return [json.loads(chunk[6:]) for chunk in chunks]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# Answers.


def test_openai_client_chat(engine: FakeEngineClient, live: str) -> None:
    engine.cached_tokens = 8
    client = openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="fake", messages=HELLO, seed=3)
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == len(engine.requests[0].prompt_ids)
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 8
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage and usage.completion_tokens == 6
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 8
    assert [set(u.timing) for u in (answer.usage, usage)] == [{"queue_ms", "prefill_ms", "decode_ms", "total_ms"}] * 2
    assert len({chunk.id for chunk in chunks}) == 1


def test_openai_client_completion(engine: FakeEngineClient, live: str) -> None:
    client = openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=3)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(i, "Hel", "length") for i in range(4)]
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)
    stream = client.completions.create(model="fake", prompt=[[97], [98]], stream=True, echo=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "aHello", 1: "bHello"}


def test_openai_client_tool_call(engine: FakeEngineClient, live: str) -> None:
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    engine.answer = saying("I look.\n\n" + call)
    client = openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)
    choice = client.chat.completions.create(model="fake", messages=HELLO, tools=WEATHER).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert choice.message.tool_calls
    function = choice.message.tool_calls[0].function  # type: ignore[union-attr]
    assert (function.name, json.loads(function.arguments)) == ("weather", {"city": "Paris"})
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(model="fake", messages=HELLO, tools=WEATHER, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.index == 0 and delta.function
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert (name, json.loads(arguments), reason) == ("weather", {"city": "Paris"}, "tool_calls")
    answered = [*HELLO, choice.message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "sunny"}]
    engine.answer = saying("Sunny.")
    again = client.chat.completions.create(model="fake", messages=answered, tools=WEATHER)
    assert again.choices[0].message.content == "Sunny."
    plain = client.chat.completions.create(model="fake", messages=HELLO, tools=WEATHER, tool_choice="none")
    assert plain.choices[0].message.tool_calls is None
    assert b'"name": "weather"' not in bytes(i for i in engine.requests[-1].prompt_ids if i < 256)


CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "arguments"),
    [
        ({"stop": "ris"}, "stop", '{"city": "Pa'),
        ({"stop": "</parameter>"}, "stop", '{"city": "Paris'),
        ({"stop_token_ids": [ord("s")]}, "stop", '{"city": "Pari'),
        ({"max_tokens": byte_tokenizer().encode(CALL).index(ord("P")) + 2}, "length", '{"city": "Pa'),
        ({"stop": "</tool_call>"}, "tool_calls", '{"city": "Paris"}'),
        ({"stop": "nothing"}, "tool_calls", '{"city": "Paris"}'),
    ],
)
def test_a_call_that_was_cut_is_not_presented_as_complete(
    engine: FakeEngineClient, fields: dict[str, Any], reason: str, arguments: str, stream: bool
) -> None:
    def answer(request: Request, index: int) -> list[int]:
        ids = [*byte_tokenizer().encode(CALL), END]
        ends = [ids.index(i) + 1 for i in request.params.stop_token_ids if i in ids]
        return ids[: min(ends, default=len(ids))]

    engine.answer = answer
    body = {"messages": HELLO, "tools": WEATHER, "stream": stream} | fields
    response = post(engine, "/v1/chat/completions", body)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert "".join(delta["function"]["arguments"] for delta in deltas) == arguments
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [reason]
    else:
        choice = response.json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        assert choice["finish_reason"] == reason


def test_reasoning_is_told_apart_and_counted(engine: FakeEngineClient) -> None:
    engine.answer = saying("Hm.\n</think>\n\nYes.")
    answer = post(engine, "/v1/chat/completions", {"messages": HELLO, "enable_thinking": True}).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    body = {"messages": HELLO, "reasoning_effort": "high", "stream": True}
    deltas = [c["choices"][0]["delta"] for c in events(post(engine, "/v1/chat/completions", body))]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content") or "" for d in deltas) == "Yes."


def test_n_choices_are_streamed_by_index(engine: FakeEngineClient) -> None:
    engine.answer = lambda request, index: [*b"abc"[: index + 1], END]
    chunks = events(post(engine, "/v1/chat/completions", {"messages": HELLO, "n": 3, "stream": True}))
    texts = ["", "", ""]
    roles, reasons = [], {}
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        roles += [choice["index"]] * ("role" in choice["delta"])
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["a", "ab", "abc"] and roles == [0, 1, 2] and reasons == dict.fromkeys(range(3), "stop")


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_sequence_and_are_not_shown(engine: FakeEngineClient, batch: int, stream: bool) -> None:
    engine.answer, engine.batch = saying("one two three four"), batch
    body = {"prompt": "x", "stop": ["three", "nothing"], "max_tokens": 50, "n": 2, "stream": stream}
    response = post(engine, "/v1/completions", body)
    if stream:
        texts = {0: "", 1: ""}
        for chunk in events(response):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert chunk["choices"][0]["finish_reason"] in (None, "stop")
        assert texts == {0: "one two ", 1: "one two "}
    else:
        assert [c["text"] for c in response.json()["choices"]] == ["one two "] * 2
        assert [c["finish_reason"] for c in response.json()["choices"]] == ["stop"] * 2
    if batch < 100:
        assert sorted(engine.aborts) == [(engine.requests[0].id, 0), (engine.requests[0].id, 1)]


def test_characters_are_whole_in_every_chunk(engine: FakeEngineClient) -> None:
    engine.answer = saying("é€😀!")
    chunks = events(post(engine, "/v1/completions", {"prompt": "x", "stream": True}))
    assert [c["choices"][0]["text"] for c in chunks] == ["é", "€", "😀", "!", ""]
    engine.answer = lambda request, index: [*"€".encode()[:2], END]
    assert post(engine, "/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == "\ufffd"


def test_chat_logprobs(engine: FakeEngineClient) -> None:
    engine.answer = lambda request, index: [0xC3, 0xA9, END]
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 3}
    content = post(engine, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -2.0, -9999.0]
    chunks = events(post(engine, "/v1/chat/completions", body | {"stream": True}))
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


def test_completion_logprobs_and_echo(engine: FakeEngineClient) -> None:
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 2}
    choice = post(engine, "/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "abHe"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "H", "e"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "text_offset": [0, 1, 2, 3],
        "top_logprobs": [None, {"b": -0.5}, {"H": -0.5}, {"e": -0.5}],
    }
    scored = post(engine, "/v1/completions", body | {"max_tokens": 0}).json()
    assert scored["choices"][0]["text"] == "ab" and scored["choices"][0]["finish_reason"] == "length"
    assert scored["choices"][0]["logprobs"]["tokens"] == ["a", "b"] and scored["usage"]["completion_tokens"] == 0
    streamed = events(post(engine, "/v1/completions", body | {"stream": True}))
    assert [t for c in streamed for t in c["choices"][0]["logprobs"]["tokens"]] == ["a", "b", "H", "e"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_long_prompt_is_echoed_in_several_chunks(engine: FakeEngineClient, n: int) -> None:
    prompt = "".join(map(chr, range(ord("a"), ord("z")))) * 6
    body = {"prompt": [prompt, "\u00e9" * 100], "logprobs": 2, "echo": True, "max_tokens": 2, "n": n}
    wholes = post(engine, "/v1/completions", body).json()["choices"]
    chunks = events(post(engine, "/v1/completions", body | {"stream": True}))
    for whole in wholes:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == whole["index"]]
        assert len(parts) > 3 and max(len(part["logprobs"]["tokens"]) for part in parts) == 64
        assert "".join(part["text"] for part in parts) == whole["text"]
        for name, told in whole["logprobs"].items():
            assert [entry for part in parts for entry in part["logprobs"][name]] == told


def test_long_prompts_are_decoded_for_their_echo_beside_the_event_loop(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    decode = Tokenizer.decode

    def noted(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        threads.append(threading.current_thread().name)
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    body = {"prompt": [[97] * 1000] * 4, "echo": True, "max_tokens": 0}
    assert post(engine, "/v1/completions", body).json()["choices"][3]["text"] == "a" * 1000
    assert len(threads) == 4 and all(name.startswith("prepare") for name in threads)


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["twin"], "one two three"),
        ("aé€b", ["é€"], "a"),
        ("aé€b", ["€"], "aé"),
        ("ab", ["a"], ""),
    ],
)
def test_stop_strings_do_not_leak_through_logprobs(
    engine: FakeEngineClient, said: str, stop: list[str], shown: str, batch: int
) -> None:
    engine.answer, engine.batch = saying(said), batch
    body = {"prompt": "x", "stop": stop, "logprobs": 1, "max_tokens": 50}
    chat = {"messages": HELLO, "stop": stop, "logprobs": True, "max_tokens": 50}
    bytes_of: Callable[[Any], bytes] = lambda content: bytes(b for entry in content for b in entry["bytes"])  # noqa: E731
    plain = post(engine, "/v1/chat/completions", chat).json()["choices"][0]
    assert plain["message"]["content"] == shown and bytes_of(plain["logprobs"]["content"]) == shown.encode()
    whole = post(engine, "/v1/completions", body).json()["choices"][0]
    assert whole["text"] == shown
    lists = whole["logprobs"]
    assert len({len(entries) for entries in lists.values()}) == 1
    assert len(lists["tokens"]) == len(shown.encode())
    assert all(offset < len(shown) for offset in lists["text_offset"])
    text, streamed = "", []
    for chunk in events(post(engine, "/v1/completions", body | {"stream": True})):
        choice = chunk["choices"][0]
        text += choice["text"]
        streamed += zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True)
        assert all(offset < len(text) for offset, _ in streamed), "a token before its text"
    assert streamed == list(zip(lists["text_offset"], lists["tokens"], strict=True))


def test_a_token_that_reaches_into_a_stop_string_is_scored() -> None:
    """It begins in the text that is shown; those after it are dropped."""
    tokenizer = Tokenizer.load(DEMO)
    ids = tokenizer.encode(" elephant story")
    choice = Choice(0, tokenizer, Shown(stops=[tokenizer.decode(ids[1:])], logprobs=True))
    whole = Choice(0, tokenizer, Shown(stops=[tokenizer.decode(ids)[2:]], logprobs=True))
    output = Output("r", 0, ids, [TokenLogprob(i, -1.0) for i in ids])
    assert (choice.push(output).scores, choice.finish_reason) == (Scores(ids[:1], output.logprobs[:1], [0]), "stop")
    piece = whole.push(output)
    assert piece.delta.content == " e" and piece.scores and piece.scores.token_ids == ids[:1]


def test_prompt_logprobs(engine: FakeEngineClient) -> None:
    body = {"prompt": "ab", "prompt_logprobs": 2}
    entries = post(engine, "/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    chat = post(engine, "/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"][1]["117"]["rank"] is None


def test_stop_tokens_are_counted_and_not_shown(engine: FakeEngineClient) -> None:
    engine.answer = lambda request, index: list(b"ab.")
    body = {"prompt": "x", "stop_token_ids": [ord(".")], "logprobs": 0}
    answer = post(engine, "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "ab" and answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


def test_continue_final_message(engine: FakeEngineClient) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "continue_final_message": True}
    assert post(engine, "/v1/chat/completions", body).status_code == 200
    assert engine.requests[0].prompt_ids[-4:] == list(b"Once")
    assert engine.requests[0].boundaries and engine.requests[0].prompt_ids[engine.requests[0].boundaries[0]] == 257
    error = error_of(post(engine, "/v1/chat/completions", body | {"messages": HELLO}))
    assert error["param"] == "continue_final_message"


# Other routes.


def test_models(engine: FakeEngineClient) -> None:
    card = get(engine, "/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 1024)
    assert get(engine, "/v1/models/fake").json()["id"] == "fake"
    assert error_of(get(engine, "/v1/models/other"))["code"] == "model_not_found"
    response = post(engine, "/v1/completions", {"prompt": "x", "model": "other"})
    assert response.status_code == 404 and error_of(response)["param"] == "model"


def test_tokenize_and_detokenize(engine: FakeEngineClient) -> None:
    told = post(engine, "/tokenize", {"prompt": "aé<|im_end|>", "return_token_strs": True}).json()
    assert told["tokens"] == [97, 0xC3, 0xA9, 258] and told["count"] == 4 and told["max_model_len"] == 1024
    assert told["token_strs"][3] == "<|im_end|>"
    assert post(engine, "/tokenize", {"prompt": "<|im_end|>", "parse_special_tokens": False}).json()["count"] == 10
    chat = post(engine, "/tokenize", {"messages": HELLO}).json()["tokens"]
    post(engine, "/v1/chat/completions", {"messages": HELLO})
    assert engine.requests[0].prompt_ids == chat
    assert post(engine, "/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "aé<|im_end|>"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": WEATHER}, "tools"),
        ("/tokenize", {"messages": HELLO, "parse_special_tokens": False}, "parse_special_tokens"),
        ("/tokenize", {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("/detokenize", {"tokens": [272]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ):
        assert error_of(post(engine, path, body))["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": WEATHER},
        {"tools": WEATHER, "tool_choice": "none"},
    ],
)
def test_tokenize_renders_a_chat_as_the_chat_does(engine: FakeEngineClient, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO} | fields
    tokens = post(engine, "/tokenize", body).json()["tokens"]
    post(engine, "/v1/chat/completions", body)
    assert engine.requests[0].prompt_ids == tokens


def test_states_of_the_engine(engine: FakeEngineClient) -> None:
    assert get(engine, "/health").status_code == get(engine, "/ready").status_code == 200
    engine.state, engine.loading = "starting", Loading("weights", 0.4)
    assert get(engine, "/ready").json()["loading"] == {"stage": "weights", "done": 0.4}
    for state in ("starting", "restarting", "failed", "stopped"):
        engine.state = state  # type: ignore[assignment]
        assert get(engine, "/health").status_code == get(engine, "/ready").status_code == 503
        assert get(engine, "/health").json()["status"] == state
        response = post(engine, "/v1/chat/completions", {"messages": HELLO})
        assert response.status_code == 503 and response.headers["retry-after"]
        assert error_of(response)["code"] == "engine_unavailable"
    assert get(engine, "/v1/models").status_code == 200
    assert get(engine, "/version").json()["version"]


def test_metrics_count(engine: FakeEngineClient) -> None:
    async def go() -> str:
        async with client_of(engine) as client:
            await client.post("/v1/completions", json={"prompt": "x", "n": 2})
            await client.post("/v1/completions", json={"prompt": 3})
            await client.get("/nowhere")
            return (await client.get("/metrics")).text

    text = asyncio.run(go())
    for line in (
        'deltic_sequences_finished_total{finish_reason="stop",model="fake"} 2.0',
        'deltic_http_responses_total{code="400",route="/v1/completions"} 1.0',
        'deltic_http_responses_total{code="404",route="other"} 1.0',
        'deltic_time_to_first_token_seconds_count{model="fake"} 2.0',
        'deltic_inter_token_latency_seconds_count{model="fake"} 10.0',
        'deltic_generation_length_tokens_sum{model="fake"} 12.0',
        'deltic_pages{model="fake"} 64.0',
    ):
        assert line in text, line


# The prefix cache.


@pytest.mark.parametrize("batch", [1, 9])
def test_cached_tokens_are_counted_once_for_each_prompt(engine: FakeEngineClient, batch: int) -> None:
    engine.cached_tokens, engine.batch = 64, batch
    asked = {"prompt": ["a" * 70, "b" * 80], "n": 3}
    usage = post(engine, "/v1/completions", asked).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (150, {"cached_tokens": 128})
    streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
    counted = events(post(engine, "/v1/completions", streamed))[-1]["usage"]
    assert counted | {"timing": usage["timing"]} == usage
    chat = post(engine, "/v1/chat/completions", {"messages": HELLO, "n": 2}).json()
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


def test_usage_says_where_the_time_went(engine: FakeEngineClient) -> None:
    engine.token_s = 0.01
    streamed = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    for usage in (
        post(engine, "/v1/chat/completions", {"messages": HELLO}).json()["usage"],
        events(post(engine, "/v1/completions", streamed))[-1]["usage"],
        post(engine, "/v1/completions", {"prompt": "a", "max_tokens": 0}).json()["usage"],
    ):
        *parts, total = (usage["timing"][f"{name}_ms"] for name in ("queue", "prefill", "decode", "total"))
        assert sum(parts) == pytest.approx(total, abs=0.3) and min(parts) >= 0
        assert parts[1] >= 9 and (parts[2] >= 40 or not usage["completion_tokens"])


def test_salt_and_opting_out_reach_the_engine(engine: FakeEngineClient) -> None:
    fields = {"cache_salt": "tenant 7", "cache_prompt": False}
    for given in (fields, {"cache_prompt": True, "cache_salt": None}, {"prompt_cache_key": "k"}):
        assert post(engine, "/v1/chat/completions", {"messages": HELLO} | given).status_code == 200
        assert post(engine, "/v1/completions", {"prompt": ["a", "b"]} | given).status_code == 200
    sent = [(request.cache_salt, request.use_cache) for request in engine.requests]
    assert sent == [("tenant 7", False)] * 3 + [("", True)] * 6


def test_what_the_cache_holds_is_shown_and_emptied(engine: FakeEngineClient) -> None:
    held = engine.cache
    assert get(engine, "/cache").json() == held and held["checkpoints"]
    assert get(engine, "/cache/reset").status_code == 405
    response = post(engine, "/cache/reset", {"directory": "/"})
    assert response.status_code == 400 and error_of(response)["param"] == "directory"
    assert get(engine, "/cache").json() == held
    emptied = held | {"checkpoints": []}
    assert post(engine, "/cache/reset", b"").json() == emptied
    assert post(engine, "/cache/reset", {}).json() == emptied == get(engine, "/cache").json()


def test_an_engine_that_cannot_tell_of_its_cache(engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.service.CACHE_ANSWER_S", 0.02)
    engine.cache_s = 5.0
    for response, said in ((get(engine, "/cache"), "answer"), (post(engine, "/cache/reset", {}), "It will empty")):
        assert response.status_code == 504 and response.headers["retry-after"]
        assert error_of(response)["code"] == "engine_timeout" and said in error_of(response)["message"]
    engine.state = "restarting"
    for response in (get(engine, "/cache"), post(engine, "/cache/reset", {})):
        assert response.status_code == 503 and error_of(response)["code"] == "engine_unavailable"


# Refusals.


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
def test_router_errors(engine: FakeEngineClient, method: str, path: str, status: int, code: str) -> None:
    async def go() -> httpx.Response:
        async with client_of(engine) as client:
            return await client.request(method, path)

    response = asyncio.run(go())
    assert response.status_code == status and error_of(response)["code"] == code
    assert status != 405 or response.headers["allow"]


def test_malformed_bodies(engine: FakeEngineClient) -> None:
    for body in (b"", b"{", b'{"messages": [}', b"\xff\xfe", b"[" * 100_000, b'{"messages": NaN}'):
        response = post(engine, "/v1/chat/completions", body)
        assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"
    nested: Any = "x"
    for _ in range(400):
        nested = {"a": nested}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested}}]
    response = post(engine, "/v1/chat/completions", {"messages": HELLO, "tools": tools})
    assert response.status_code in (200, 400)


def test_prompt_too_long(engine: FakeEngineClient) -> None:
    response = post(engine, "/v1/completions", {"prompt": "x" * 1500})
    error = error_of(response)
    assert response.status_code == 400 and "1500" in error["message"] and "1024" in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    long = [{"role": "user", "content": "x" * 100_000}]
    assert error_of(post(engine, "/v1/chat/completions", {"messages": long}))["param"] == "messages"


def test_a_prompt_that_is_certainly_too_long_is_not_encoded(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer._encode
    sizes: list[int] = []

    def noted(self: Tokenizer, text: str) -> list[int]:
        sizes.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode", noted)
    long = "x" * 160_000  # the longest token, <tool_response>, has 16 bytes
    for path, body in (
        ("/v1/completions", {"prompt": ["a", long]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
    ):
        error = error_of(post(engine, path, body))
        assert error["code"] == "context_length_exceeded"
        assert "at least 100" in error["message"] and "1024" in error["message"]
    assert sizes == [1]


def test_no_chat_template(engine: FakeEngineClient) -> None:
    response = post(engine, "/v1/chat/completions", {"messages": HELLO}, template=None)
    assert response.status_code == 400 and "chat template" in error_of(response)["message"]


def test_api_keys(engine: FakeEngineClient) -> None:
    keys = {"api_key": ("secret", "other")}
    for given in (b"", b"Bearer wrong", b"Basic secret", b"Bearer \xff", b"Bearer secret x", b"secret"):
        headers: Any = {"authorization": given} if given else {}
        response = post(engine, "/v1/completions", {"prompt": "x"}, headers, **keys)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    for key in ("secret", "other"):
        headers = {"authorization": f"Bearer {key}"}
        assert post(engine, "/v1/completions", {"prompt": "x"}, headers, **keys).status_code == 200
        assert get(engine, "/v1/models", headers, **keys).status_code == 200
    for path in ("/v1/models", "/metrics", "/cache"):
        assert get(engine, path, **keys).status_code == 401
    assert post(engine, "/cache/reset", {}, **keys).status_code == 401
    for path in ("/health", "/ready", "/version"):
        assert get(engine, path, **keys).status_code == 200


def test_body_limit(engine: FakeEngineClient) -> None:
    big = json.dumps({"prompt": "x" * 20_000}).encode()

    async def go(declared: bool) -> httpx.Response:
        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(big), 1000):
                yield big[start : start + 1000]

        async with client_of(engine, max_body_mb=0.01) as client:
            return await client.post("/v1/completions", content=big if declared else parts(), headers=JSON)

    for declared in (True, False):
        response = asyncio.run(go(declared))
        assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"


def test_a_web_page_cannot_drive_a_server_without_keys(engine: FakeEngineClient) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", ""):
        response = post(engine, "/v1/completions", body, {"content-type": kind})
        assert response.status_code == 415 and error_of(response)["code"] == "unsupported_media_type", kind
        assert post(engine, "/tokenize", body, {"content-type": kind}).status_code == 415
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert post(engine, "/v1/completions", body, {"content-type": kind}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"):
        for path in ("/v1/models", "/metrics", "/health", "/version"):
            response = get(engine, path, {"host": host})
            assert response.status_code == 403 and error_of(response)["code"] == "host_not_allowed", host
        assert post(engine, "/v1/completions", body, {"host": host}).status_code == 403
    for host in (
        "localhost",
        "localhost:8000",
        "LOCALHOST:1",
        "127.0.0.1:8000",
        "127.0.0.2",
        "[::1]:8000",
        "[::1]",
        "localhost.",
        "chat.localhost:8000",
        "0.0.0.0:8000",  # rebinding needs a name
    ):
        assert get(engine, "/v1/models", {"host": host}).status_code == 200, host
    assert len(engine.requests) == 2
    # With a key, or on an address that others can reach by any name, Host says nothing.
    key = {"authorization": "Bearer secret", "host": "evil.example", "content-type": "text/plain"}
    assert post(engine, "/v1/completions", body, key, api_key=("secret",)).status_code == 200
    assert get(engine, "/v1/models", {"host": "name.example"}, host="0.0.0.0").status_code == 200


def test_a_path_cannot_write_into_the_log(
    engine: FakeEngineClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "find", lambda self, name: 1 / 0)
    with caplog.at_level(logging.INFO, "deltic.server"):
        assert get(engine, "/v1/models/a%0D%1B[2Kforged").status_code == 500
        assert get(engine, "/v1/models/a%0Aforged").status_code == 404
    said = "".join(record.getMessage() for record in caplog.records)
    assert r"\r\x1b[2Kforged" in said and said.isprintable()


def test_what_is_polled_writes_no_line_into_the_log(engine: FakeEngineClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deltic.server"):
        for path in ("/health", "/v1/models", "/api/tags"):
            assert get(engine, path).status_code == 200
    assert not [record for record in caplog.records if "GET" in record.getMessage()]


def test_the_log_has_both_ids_of_a_request(engine: FakeEngineClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deltic.server"):
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
            for stream in (False, True):
                response = post(engine, path, body | {"stream": stream}, {"x-request-id": "mine"})
                answer = events(response)[0] if stream else response.json()
                assert caplog.records[-1].getMessage().endswith(f" mine {answer['id']}")
                assert engine.requests[-1].id.startswith(answer["id"])


def test_request_id_is_echoed(engine: FakeEngineClient) -> None:
    assert get(engine, "/health", {"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(get(engine, "/health", {"x-request-id": "a b"}).headers["x-request-id"]) == 32
    assert len(get(engine, "/nowhere").headers["x-request-id"]) == 32


def test_cors_is_off_unless_allowed(engine: FakeEngineClient) -> None:
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in get(engine, "/health", origin).headers
    allowed = get(engine, "/health", origin, cors_origin=("https://a.example",))
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"


def test_an_error_inside_is_a_500_body(engine: FakeEngineClient) -> None:
    def broken(request: Request) -> Any:
        raise RuntimeError("private")

    engine.submit = broken  # type: ignore[method-assign]
    response = post(engine, "/v1/completions", {"prompt": "x"})
    assert response.status_code == 500 and "private" not in response.text
    assert error_of(response)["type"] == "server_error" and response.headers["x-request-id"]


def test_more_prompts_than_can_ever_wait(engine: FakeEngineClient) -> None:
    response = post(engine, "/v1/completions", {"prompt": ["a"] * 11, "n": 2}, max_queue=4)
    assert response.status_code == 400 and "at most 20" in error_of(response)["message"]


# The engine's end of things.


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue(engine: FakeEngineClient, stream: bool) -> None:
    engine.max_open = 1
    body = {"prompt": ["a", "b"], "stream": stream}
    response = post(engine, "/v1/completions", body)
    assert response.status_code == 429 and response.headers["retry-after"] == "7"
    assert error_of(response)["code"] == "queue_full"
    assert engine.aborts == [(engine.requests[0].id, None)]  # the prompt that had a place does not keep it


@pytest.mark.parametrize(("state", "status"), [("ready", 429), ("starting", 503), ("failed", 503)])
def test_what_cannot_run_is_refused_before_its_body_is_read(engine: FakeEngineClient, state: Any, status: int) -> None:
    engine.state, engine.max_open = state, 0

    async def go(path: str) -> httpx.Response:
        async def parts() -> AsyncIterator[bytes]:
            pytest.fail("the body was read")
            yield b""

        async with client_of(engine) as client:
            return await client.post(path, content=parts(), headers=JSON)

    for path in ("/v1/completions", "/v1/chat/completions"):
        response = asyncio.run(go(path))
        assert response.status_code == status and response.headers["retry-after"]
        assert error_of(response)["code"] == ("queue_full" if status == 429 else "engine_unavailable")


def test_large_bodies_that_wait_are_bounded_and_left_when_their_client_has_gone(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    go_on = threading.Event()
    parse = decode.parse

    def slow(body: bytes, kind: Any) -> Any:
        if len(body) > INLINE_BYTES:
            begun.append(len(body))
            go_on.wait(5)
        return parse(body, kind)

    monkeypatch.setattr(decode, "parse", slow)
    app = make_app(engine, max_body_mb=0.03)

    async def go(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=10) as client:
            body = {"prompt": "x", "metadata": {"a": "x" * 12_000}}

            def ask(n: int) -> list[asyncio.Task[httpx.Response]]:
                return [asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(n)]

            first = ask(1)
            await until(lambda: begun)
            waiting = ask(3)
            await until(lambda: n_held(app) == 4)
            refused = await ask(1)[0]
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert error_of(refused)["code"] == "too_many_large_requests"
            assert (await client.post(f"{url}/v1/completions", json={"prompt": "small"})).status_code == 200
            for task in waiting:
                task.cancel()
            await until(lambda: n_held(app) == 1)
            last = ask(1)
            await until(lambda: n_held(app) == 2)
            go_on.set()
            return [(await task).status_code for task in first + last]

    with served(app) as url:
        assert asyncio.run(go(url)) == [200, 200]
    assert len(begun) == 2, "the bodies of clients that had left were worked on"
    wait_for(lambda: not any(app.state.server.worker._sizes.values()))


def test_a_new_grammar_holds_up_no_request_without_one(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    error_of_grammar = grammar.error_of

    def slow(text: str, own: bool = True) -> str:
        begun.set()
        go_on.wait(5)
        return error_of_grammar(text, own)

    monkeypatch.setattr(grammar, "error_of", slow)

    async def go(url: str) -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            for padding in ("", "x" * 12_000):  # what is taken in the event loop, and what is not
                begun.clear()
                go_on.clear()
                schema = {"type": "object", "properties": {f"a{len(padding)}": {"type": "string"}}}
                body = {"prompt": "x", "structured_outputs": {"json": schema}, "metadata": {"a": padding}}
                formed = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
                while not begun.is_set():
                    await asyncio.sleep(0.002)
                free = {"prompt": "x", "metadata": {"a": "x" * 12_000}}
                assert (await client.post(f"{url}/v1/completions", json=free)).status_code == 200
                assert not formed.done()
                go_on.set()
                assert (await formed).status_code == 200

    with served(make_app(engine)) as url:
        asyncio.run(go(url))


class Counted(bytes):
    """A body; how many of them there are."""

    n = 0

    def __init__(self, body: bytes) -> None:
        Counted.n += 1

    def __del__(self) -> None:
        Counted.n -= 1


def test_bodies_of_clients_that_have_gone_are_forgotten_at_once(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited, and that of an error that nobody hears of: the garbage collector comes seldom."""
    begun, go_on = threading.Event(), threading.Event()
    parse = decode.parse

    def slow(body: bytes, kind: Any) -> Any:
        begun.set()
        go_on.wait(10)
        return parse(body, kind)

    async def read(*given: Any) -> Counted:
        return Counted(await transport.read_body(*given))

    monkeypatch.setattr(decode, "parse", slow)
    monkeypatch.setattr("deltic.server.preparation.read_body", read)
    body = {"prompt": "x", "max_tokens": -1, "metadata": {"a": "x" * INLINE_BYTES}}

    async def go(url: str) -> None:
        async with httpx.AsyncClient(timeout=0.5) as client:
            asked = [client.post(f"{url}/v1/completions", json=body) for _ in range(3)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, httpx.ReadTimeout) for answer in answers)

    gc.disable()
    try:
        with served(make_app(engine)) as url:
            asyncio.run(go(url))
            assert begun.is_set() and Counted.n
            go_on.set()
            wait_for(lambda: not Counted.n)
    finally:
        gc.enable()


def test_memory_is_given_back_once_the_work_for_a_client_that_has_gone_ends(
    engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, trimmed = threading.Event(), threading.Event(), threading.Event()
    parse = decode.parse

    def slow(body: bytes, kind: Any) -> Any:
        begun.set()
        go_on.wait(5)
        return parse(body, kind)

    monkeypatch.setattr(decode, "parse", slow)
    monkeypatch.setattr("deltic.server.service._trim", lambda pad: trimmed.set())

    async def leave(url: str) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"prompt": "x", "metadata": {"a": "x" * 1_000_000}}
            asked = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await until(begun.is_set)
            asked.cancel()

    with served(make_app(engine)) as url:
        asyncio.run(leave(url))
        time.sleep(2 * TRIM_S)
        trimmed.clear()
        go_on.set()
        assert trimmed.wait(30)


def test_bodies_that_are_still_read_are_bounded(engine: FakeEngineClient) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "metadata": {"a": "x" * 25_000}}).encode()
    sockets: list[socket.socket] = []

    def sends(url: str, n_bytes: int, length: bool = True) -> socket.socket:
        port = httpx.URL(url).port
        assert port is not None
        sockets.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        said = f"Content-Length: {len(body)}" if length else "Transfer-Encoding: chunked"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{said}\r\n\r\n"
        piece = body[:n_bytes] if length else b"%x\r\n%s\r\n" % (n_bytes, body[:n_bytes])
        sockets[-1].sendall(head.encode() + piece)
        return sockets[-1]

    with served(app := make_app(engine, max_body_mb=0.03)) as url:
        first, second = sends(url, 24_000), sends(url, 24_000)
        wait_for(lambda: app.state.server.worker._sizes.total() == 48_000)
        for refused in (sends(url, 24_000, length=False), sends(url, 0)):
            assert refused.recv(100).startswith(b"HTTP/1.1 429"), "it grows too large, or says so before it comes"
        second.close()
        first.sendall(body[24_000:])
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: not app.state.server.worker._sizes.total())
    for one in sockets:
        one.close()


def test_a_body_of_brackets_is_refused_and_text_full_of_them_is_not(engine: FakeEngineClient) -> None:
    n = transport.MAX_CONTAINERS
    brackets = b'{"prompt": "x", "metadata": {"a": [' + b"[]," * n + b"0]}}"
    error = error_of(post(engine, "/v1/completions", brackets))
    assert error["code"] == "too_many_containers" and str(n) in error["message"]
    text = b'{"prompt": "x", "metadata": {"a": "' + rb"[{\"\\" * n + b'"}}'
    assert post(engine, "/v1/completions", text).status_code == 200


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_containers_are_counted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "COUNTED_BYTES", size)
    draw = random.Random(size)

    def text() -> str:
        return "".join(draw.choices('a"\\[{]\n', k=draw.randrange(6)))

    def value(depth: int) -> tuple[Any, int]:
        """And how many containers it has."""
        if depth > 4 or draw.random() < 0.3:
            return text(), 0
        parts = [value(depth + 1) for _ in range(draw.randrange(4))]
        plain: Any = [part for part, _ in parts]
        if draw.random() < 0.5:
            plain = {f"{i}{text()}": part for i, part in enumerate(plain)}
        return plain, 1 + sum(n for _, n in parts)

    for _ in range(100):
        plain, n = value(0)
        assert asyncio.run(transport._n_outside(bytearray(json.dumps(plain).encode()), b"[{", 10**9)) == n


@pytest.mark.parametrize("stream", [False, True])
def test_engine_death_before_the_first_token(engine: FakeEngineClient, stream: bool) -> None:
    engine.die_after = 0
    response = post(engine, "/v1/chat/completions", {"messages": HELLO, "stream": stream})
    assert response.status_code == 503 and "SIGKILL" in error_of(response)["message"]


def test_engine_death_in_a_stream(engine: FakeEngineClient, live: str) -> None:
    engine.die_after, engine.token_s = 2, 0.01
    response = httpx.post(f"{live}/v1/chat/completions", json={"messages": HELLO, "stream": True})
    *chunks, last, rest = response.text.split("\n\n")
    assert len(chunks) >= 2 and rest == ""
    assert "SIGKILL" in json.loads(last.removeprefix("data: "))["error"]["message"]
    engine.state = "ready"
    client = openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="SIGKILL"):
        list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    assert engine.n_open == 0


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(engine: FakeEngineClient, live: str, stream: bool, hold: bool) -> None:
    """Waiting for the first token, or in the middle of the answer."""
    engine.hold, engine.token_s = hold, 0.01
    engine.answer = lambda request, index: [97] * 1000

    async def go() -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            body = {"prompt": ["x", "y"], "max_tokens": 1000, "stream": stream, "n": 2}
            task = asyncio.create_task(client.post(f"{live}/v1/completions", json=body))
            while len(engine.requests) < 2:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)
            assert engine.n_open == 4
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())
    wait_for(lambda: engine.n_open == 0, 5)  # whole answers take 10 s
    assert sorted(engine.aborts) == sorted((request.id, None) for request in engine.requests)
    assert (
        'deltic_sequences_finished_total{finish_reason="abort",model="fake"} 4.0' in httpx.get(f"{live}/metrics").text
    )


def test_a_client_that_reads_late_gets_all(engine: FakeEngineClient) -> None:
    """Its stream is written to the socket until that is full, and kept from then on."""
    engine.info = msgspec.structs.replace(engine.info, max_model_len=10_000)
    text = "".join(f"{i} " for i in range(900))
    engine.answer = saying(text)
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, "n": 8}).encode()
    with served(make_app(engine)) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: client.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0)
        head = "POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: engine.requests and engine.n_open == 0)
        data = b""
        while part := client.recv(1 << 20):
            data += part
    chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    texts = [""] * 8
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [text] * 8 and b"data: [DONE]" in data


def test_many_streams_at_once_each_get_their_own(engine: FakeEngineClient, live: str) -> None:
    engine.answer = lambda request, index: [*bytes(request.prompt_ids).upper() * 20, END]
    results: dict[str, str] = {}

    def ask(text: str) -> None:
        body = {"prompt": text, "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{live}/v1/completions", json=body, timeout=20) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        results[text] = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    threads = [threading.Thread(target=ask, args=(f"prompt{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {f"prompt{i}": f"PROMPT{i}" * 20 for i in range(20)}


def test_draining_refuses_new_requests_and_finishes_old_ones(engine: FakeEngineClient) -> None:
    app = make_app(engine)
    with served(app) as url:
        engine.hold = True
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=10))
        )
        thread.start()
        wait_for(lambda: engine.requests)
        app.state.server.draining = True
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "shutting down" in error_of(refused)["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        engine.hold = False
        thread.join()
        assert answers[0].json()["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize("path", ["/v1/models/", "/models", "/models/", "/v1/models/fake/", "/models/fake", "/health/"])
def test_paths_as_some_clients_write_them(engine: FakeEngineClient, path: str) -> None:
    answer = get(engine, path)
    assert answer.status_code == 200
    same = get(engine, path.rstrip("/").replace("/v1", "").replace("/models", "/v1/models"))
    # Of another server, which may have been started in the next second.
    assert re.sub(rb"\d+", b"", answer.content) == re.sub(rb"\d+", b"", same.content)


def test_paths_without_their_version_are_answered(engine: FakeEngineClient) -> None:
    body = {"messages": HELLO}
    for path in ("/chat/completions", "/chat/completions/", "/v1/chat/completions/"):
        assert post(engine, path, body).json()["choices"][0]["message"]["content"] == "Hello"
    assert post(engine, "/completions", {"prompt": "a"}).status_code == 200
    assert (
        post(engine, "/messages", {"messages": HELLO}).json()["type"] == "error"
    )  # what max_tokens is, it wants to know
    assert "makes no embeddings" in post(engine, "/embeddings", {}).json()["error"]["message"]
    assert get(engine, "/nothing").status_code == 404


def test_head_is_answered_as_get(engine: FakeEngineClient, live: str) -> None:
    for path in ("/health", "/v1/models/", "/models"):
        answer = httpx.head(live + path)
        assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize("path", ["/v1/models/x", "/v1/nothing", "/v1/embeddings", "/tokenize"])
def test_anthropic_clients_get_errors_in_their_form_on_every_route(engine: FakeEngineClient, path: str) -> None:
    answer = get(engine, path, headers={"anthropic-version": "2023-06-01"}).json()
    assert answer["type"] == "error" and answer.keys() == {"type", "error", "request_id"}
    assert "type" not in get(engine, path).json()


def test_json_in_pieces_is_json() -> None:
    value = {
        "a": [], "b": {}, "c": iter([]), "d": iter([1, None, {"x": [1]}]), "e": "é\"\n" * 20_000, "f": [{"g": iter([1])}, {"h": 2}],
        "i": list(range(5000)), "j": transport.EncodedArray([b"1,2", b"3"]), "k": None, "l": [["a"], ["b"]], "m": transport.EncodedArray(),
    }  # fmt: skip
    pieces = list(transport.json_pieces(value))
    assert json.loads(b"".join(pieces)) == value | {
        "c": [], "d": [1, None, {"x": [1]}], "f": [{"g": [1]}, {"h": 2}], "j": [1, 2, 3], "m": [],
    }  # fmt: skip
    assert max(map(len, pieces)) < 200_000


def test_a_large_answer_is_made_as_it_is_sent(engine: FakeEngineClient, live: str) -> None:
    """No part of it holds up others for long; what it took is given back."""
    assert engine.info
    engine.info.max_model_len, engine.info.n_pages = 10_000, 1_000
    engine.answer, engine.batch = lambda request, index: [*b"a" * 3000, END], 500
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "n": 4}
    answer = httpx.post(f"{live}/v1/chat/completions", json=asked, timeout=60)
    assert "content-length" not in answer.headers and len(answer.content) > 2_000_000
    for choice in answer.json()["choices"]:
        assert len(choice["logprobs"]["content"]) == 3000
        assert [entry["token"] for entry in choice["logprobs"]["content"][5]["top_logprobs"]] == ["a", "A", "B"]
    assert "content-length" in httpx.post(f"{live}/v1/chat/completions", json={"messages": HELLO}).headers


def test_a_large_answer_lets_others_have_their_turn_where_its_client_reads_fast() -> None:
    n_parts, n_turns = 20, 0

    async def send(message: Any) -> None:
        """Waits for nothing."""

    async def others() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    async def go() -> None:
        task = asyncio.create_task(others())
        response = transport.LargeResponse(bytes(transport.PART_BYTES * n_parts))
        await response({}, None, send)  # type: ignore[arg-type]
        task.cancel()

    asyncio.run(go())
    assert n_turns >= n_parts


@pytest.mark.parametrize("more", [{}, {"nosuch": 1}])
def test_a_large_request_that_was_refused_is_forgotten_at_once(live: str, more: dict[str, Any]) -> None:
    """No ring of frames, errors and futures holds it until the interpreter looks for rings."""
    body = {"messages": HELLO * 3000} | more
    gc.collect()
    gc.disable()
    try:
        assert httpx.post(f"{live}/v1/chat/completions", json=body, timeout=60).status_code == 400
        time.sleep(0.2)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        held = [one.f_code.co_qualname for one in gc.garbage if isinstance(one, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not held


def test_a_large_text_is_encoded_and_decoded_in_pieces(engine: FakeEngineClient, live: str) -> None:
    text = "one two 12 " * 40_000
    answer = httpx.post(f"{live}/tokenize", json={"prompt": text}, timeout=60).json()
    assert answer["count"] == len(answer["tokens"]) == len(text) and bytes(answer["tokens"]) == text.encode()
    back = httpx.post(f"{live}/detokenize", json={"tokens": answer["tokens"]}, timeout=60).json()
    assert back["prompt"] == text


def test_a_body_of_numbers_is_refused_and_text_full_of_commas_is_not(engine: FakeEngineClient) -> None:
    error = error_of(post(engine, "/detokenize", b'{"tokens": [' + b"1," * 1_000_001 + b"1]}"))
    assert error["code"] == "too_many_values" and "several requests" in error["message"]
    assert post(engine, "/tokenize", b'{"prompt": "' + b",a" * 1_100_000 + b'"}').status_code == 200
    assert post(engine, "/detokenize", b'{"tokens": [' + b"65," * 50_000 + b"65]}").json()["prompt"] == "A" * 50_001


@pytest.mark.usefixtures("no_collections")
def test_no_large_answer_holds_the_event_loop(engine: FakeEngineClient) -> None:
    """The loop's own CPU time between two of its turns: on a loaded machine waits say nothing."""
    assert engine.info
    engine.info.max_model_len, engine.info.n_pages = 10_000, 1_000
    engine.answer, engine.batch = lambda request, index: [*b"a" * 4000, END], 20
    app = make_app(engine)
    longest_s = 0.0
    tasks = []

    async def turn() -> None:
        nonlocal longest_s
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            last_s, before_s = time.thread_time(), last_s
            longest_s = max(longest_s, last_s - before_s)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        if not tasks:
            tasks.append(asyncio.create_task(turn()))
        await app(scope, receive, send)

    watched.state = app.state  # type: ignore[attr-defined]
    with served(watched) as url:
        httpx.get(f"{url}/health")
        asked: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "n": 8}
        longest_s = 0.0
        for path, body in (
            ("/v1/chat/completions", asked),
            ("/v1/completions", {"prompt": "a", "logprobs": 3, "n": 8, "max_tokens": 4000}),
            ("/tokenize", {"prompt": "one two " * 200_000}),
            ("/detokenize", {"tokens": [65] * 500_000}),
        ):
            assert len(httpx.post(url + path, json=body, timeout=120).content) > 400_000
            assert longest_s < 0.1, path
