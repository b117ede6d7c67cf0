"""Ollama's API over a fake engine: what becomes of a body, lines and whole answers, errors, and what there is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from deltic.config import EngineConfig
from deltic.host.client import EngineFailed
from deltic.models.checkpoint import DEMO
from deltic.models.qwen.shape import ModelShape
from deltic.server.api import decode
from deltic.server.api import ollama_protocol as wire
from deltic.server.api.ollama import LinesAnswer
from deltic.server.chat.answer import ChatAnswer, Message, Update
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.request import NO_DEFAULTS
from deltic.server.errors import ApiError
from deltic.server.limits import Usage
from tests.fake_engine import FakeEngineClient, byte_tokenizer, saying
from tests.null.test_anthropic import CALL
from tests.null.test_http import WEATHER, client_of, get, post

HELLO: Any = [{"role": "user", "content": "hello"}]
TIMES = {"queue_ms": 1.5, "prefill_ms": 2.0, "decode_ms": 0.0, "total_ms": 3.5}


def chat(engine: FakeEngineClient | None = None, config: Any = None, **fields: Any) -> Any:
    body = {"model": "fake", "messages": HELLO} | fields
    return post(engine or FakeEngineClient(), "/api/chat", body, **(config or {}))


def generate(engine: FakeEngineClient | None = None, **fields: Any) -> Any:
    return post(engine or FakeEngineClient(), "/api/generate", {"model": "fake", "prompt": "hello"} | fields)


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    *rows, rest = response.text.split("\n")
    assert rest == ""
    return [json.loads(row) for row in rows]


def refused(response: Any, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return str(response.json()["error"])


def test_a_chat_comes_in_lines_unless_asked_for_whole() -> None:
    *told, last = lines(chat())
    assert [line["message"] for line in told] == [{"role": "assistant", "content": c} for c in "Hello"]
    assert all(line["model"] == "fake" and line["done"] is False for line in told)
    assert all(line["created_at"].endswith("Z") for line in told)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] == 6 and last["prompt_eval_count"] > 10
    durations = [last[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration", "load_duration")]
    assert all(isinstance(ns, int) and ns > 0 for ns in durations)
    whole = chat(stream=False)
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"] == {"role": "assistant", "content": "Hello"}
    assert whole.json().keys() == last.keys()


def test_thoughts_and_calls_are_told_whole() -> None:
    engine = FakeEngineClient(saying(f"hm\n</think>\n\nLook.\n{CALL}"))
    said = chat(engine, think=True, tools=WEATHER, stream=False).json()
    assert (said["message"]["thinking"].strip(), said["message"]["content"].strip()) == ("hm", "Look.")
    (call,) = said["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
    assert said["done_reason"] == "stop"
    streamed = lines(chat(engine, think=True, tools=WEATHER))
    told = next(c for line in streamed for c in line["message"].get("tool_calls", ()))
    assert told["function"] == call["function"]
    # The history comes back, with what a library adds to it; results have names and no ids.
    history = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call | {"type": "function"}], "extra": 1},
        {"role": "tool", "tool_name": "weather", "content": "fine"},
    ]
    chat(engine, messages=history, tools=WEATHER, stream=False)
    prompt = byte_tokenizer().decode(engine.requests[-1].prompt_ids, False)
    assert "<parameter=city>\nParis" in prompt and "fine" in prompt


@pytest.mark.parametrize(
    ("think", "thinks"), [(True, True), ("high", True), (False, False), ("", False), (None, False)]
)
def test_think(think: Any, thinks: bool) -> None:
    engine = FakeEngineClient()
    assert chat(engine, think=think, stream=False).status_code == 200
    assert byte_tokenizer().decode(engine.requests[0].prompt_ids, False).endswith("<think>\n") == thinks


def test_options_reach_the_engine() -> None:
    engine = FakeEngineClient()
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["x"], "repeat_penalty": 1.5,
        "presence_penalty": 0.25, "frequency_penalty": 0.75, "num_ctx": 512, "num_gpu": 99, "num_thread": 4, "mirostat": 0,
        "typical_p": 1.0, "num_keep": 4, "num_batch": 512, "main_gpu": 0, "use_mmap": True, "repeat_last_n": -1,
    }  # fmt: skip
    assert chat(engine, options=options, keep_alive="5m", stream=False).status_code == 200
    got = engine.requests[0].params
    assert (got.max_tokens, got.temperature, got.top_k, got.top_p, got.min_p) == (7, 0.5, 3, 0.9, 0.1)
    assert (got.seed, got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (5, 1.5, 0.25, 0.75)
    chat(engine, options={"num_predict": -1, "seed": -1, "repeat_penalty": 1.2, "repeat_last_n": 0}, stream=False)
    got = engine.requests[1].params
    assert (got.max_tokens + len(engine.requests[1].prompt_ids), got.seed) == (1024, None)
    assert got.repetition_penalty == 1.0, "it counts no tokens"


def test_num_ctx_bounds_prompt_and_answer() -> None:
    engine = FakeEngineClient(lambda request, index: [65] * 2000)
    assert chat(engine, options={"num_ctx": 128}, stream=False).json()["done_reason"] == "length"
    sent = engine.requests[0]
    assert len(sent.prompt_ids) + sent.params.max_tokens == 128
    said = refused(chat(options={"num_ctx": 16}))
    assert "maximum context length is 16 tokens" in said
    assert chat(options={"num_ctx": 131072}, stream=False).status_code == 200, "there is no more than there is"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"odd": 1}}, "options.odd"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"stop": [""]}}, "options.stop[0]"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images: this server reads text only"),
        ({"format": "yaml"}, "format: expected 'json'"),
        ({"format": {"type": "string", "pattern": "("}}, "format"),
        ({"think": "hard"}, "think"),
        ({"truncate": True}, "truncate: a prompt that is too long is refused"),
        ({"odd": 1}, "odd: unknown field"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [], "keep_alive": 0}, "keep_alive: 0"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(fields: Any, said: str) -> None:
    assert said in refused(chat(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"suffix": "x"}, "suffix: 'fake' cannot fill a gap: its vocabulary has no <|fim_prefix|>."),
        ({"template": "{{ .Prompt }}"}, "template: the model's own"),
        ({"context": [1, 2]}, "context: ids of an earlier answer"),
        ({"images": ["aGk="]}, "images: this server reads text only"),
        ({"raw": True, "system": "x"}, "system: has no meaning with raw"),
        ({"raw": True, "think": True}, "think: has no meaning with raw"),
        ({"prompt": "x" * 2000}, "your messages have"),
    ],
)
def test_what_generate_refuses(fields: Any, said: str) -> None:
    assert said in refused(generate(**fields))


def test_generate_with_a_system_prompt_raw_and_empty() -> None:
    engine = FakeEngineClient()
    assert (
        generate(engine, system="Be brief.", suffix="", context=[], images=[], stream=False).json()["response"]
        == "Hello"
    )
    assert byte_tokenizer().decode(engine.requests[0].prompt_ids, False).startswith("<|im_start|>system\nBe brief.")
    assert "".join(line["response"] for line in lines(generate(engine))) == "Hello"
    said = generate(engine, raw=True, stream=False, options={"num_predict": 3}).json()
    assert (said["response"], said["done_reason"]) == ("Hel", "length")
    assert byte_tokenizer().decode(engine.requests[-1].prompt_ids, False) == "hello"
    generate(engine, raw=True, stream=False)
    assert engine.requests[-1].params.max_tokens == 1024 - 5, "any number, and not the 16 of completions"
    n_sent = len(engine.requests)
    for empty in (generate(engine, prompt=""), chat(engine, messages=[])):
        assert (empty.json()["done"], empty.json()["done_reason"]) == (True, "load")
    assert len(engine.requests) == n_sent


def test_formats_are_enforced() -> None:
    engine = FakeEngineClient(saying('{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for kind in ("json", schema, {}):
        assert chat(engine, format=kind, stream=False).status_code == 200
        assert engine.requests[-1].params.constraint is not None
    chat(engine, format="", stream=False)
    assert engine.requests[-1].params.constraint is None


def test_log_probabilities() -> None:
    told = chat(logprobs=True, top_logprobs=2, stream=False).json()["logprobs"]
    assert told[0] | {"top_logprobs": 0} == {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": 0}
    assert len(told[0]["top_logprobs"]) == 2
    assert len(generate(raw=True, logprobs=True, stream=False).json()["logprobs"]) == 5
    assert "logprobs" not in chat(stream=False).json()


def test_an_answer_goes_on_where_the_last_message_ends() -> None:
    engine = FakeEngineClient()
    chat(engine, messages=[*HELLO, {"role": "assistant", "content": "Well, "}], stream=False)
    assert byte_tokenizer().decode(engine.requests[0].prompt_ids, False).endswith("assistant\nWell, ")


def test_names_with_and_without_a_tag() -> None:
    assert chat(model="fake:latest", stream=False).json()["model"] == "fake:latest"
    assert "'other'" in refused(chat(model="other"), 404)
    assert "'fake:8b'" in refused(chat(model="fake:8b"), 404)
    assert refused(post(FakeEngineClient(), "/api/show", {"name": "other:latest"}), 404)


def test_errors_have_their_form() -> None:
    assert "not valid JSON" in refused(post(FakeEngineClient(), "/api/chat", b"{"))
    full = FakeEngineClient()
    full.max_open = 0
    assert "queue is full" in refused(chat(full), 429)
    for path in ("/x/api/chat", "/api/chat/"):
        assert "no model" in refused(post(FakeEngineClient(), path, {"model": "other"}, root_path="/x"), 404)
    assert "API key" in refused(chat(config={"api_key": ("k",)}), 401)
    dying = FakeEngineClient()
    dying.die_after = 2
    *_, last = chat(dying).text.splitlines()
    assert json.loads(last)["error"].startswith("the engine process ended")
    assert "no embeddings" in refused(post(FakeEngineClient(), "/api/embed", {}), 404)
    assert "no embeddings" in refused(post(FakeEngineClient(), "/api/embeddings", {}), 404)
    assert "was started with" in refused(post(FakeEngineClient(), "/api/create", {"model": "x"}), 404)
    assert "was started with" in refused(post(FakeEngineClient(), "/api/pull", {"model": "x"}), 404)

    async def delete() -> Any:
        async with client_of(FakeEngineClient()) as client:
            return await client.request("DELETE", "/api/delete", json={"model": "fake"})

    assert "delete no models" in refused(asyncio.run(delete()), 403)


def test_a_model_that_is_served_can_be_pulled() -> None:
    """Programs pull before they ask."""
    *told, last = lines(post(FakeEngineClient(), "/api/pull", {"model": "fake:latest"}))
    assert told[0]["status"] == "pulling manifest" and last == {"status": "success"}
    whole = post(FakeEngineClient(), "/api/pull", {"name": "fake", "stream": False, "insecure": True})
    assert whole.json() == {"status": "success"}


def test_a_request_waits_while_the_model_loads() -> None:
    async def go() -> None:
        engine = FakeEngineClient()
        is_asked, loaded, engine.state = asyncio.Event(), asyncio.Event(), "starting"

        async def ready() -> Any:
            is_asked.set()
            await loaded.wait()
            return engine.info

        engine.ready = ready  # type: ignore[method-assign]
        async with client_of(engine, max_body_mb=0.01) as client:
            body = {"model": "fake", "messages": HELLO, "stream": False}
            waiting = asyncio.create_task(client.post("/api/chat", json=body))
            await is_asked.wait()
            assert not waiting.done() and not engine.requests
            long = {"model": "fake", "prompt": "x" * 9500}
            refusal = await client.post("/api/generate", json=long)
            assert refusal.status_code == 503, "no room for more"
            assert (await client.post("/v1/completions", json=long)).status_code == 503, "as OpenAI's clients know it"
            engine.state = "ready"
            loaded.set()
            assert (await waiting).json()["message"]["content"] == "Hello"

    asyncio.run(go())


def test_a_model_that_never_loads_is_an_error() -> None:
    async def failing() -> Any:
        engine.state, engine.failure = "failed", "no room"
        raise EngineFailed("no room")

    engine = FakeEngineClient()
    engine.state, engine.ready = "starting", failing  # type: ignore[method-assign]
    assert refused(chat(engine), 503) == "the engine is failed"


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_sizes_of_a_gguf_model(kind: str) -> None:
    pytest.importorskip("torch")  # it writes the model
    pytest.importorskip("gguf")
    from tests.tiny_gguf import tiny_gguf

    engine, path = FakeEngineClient(), tiny_gguf(kind, "Q8_0")
    engine.config = EngineConfig(model=str(path))
    shape = ModelShape.from_directory(path)
    (card,) = get(engine, "/api/tags").json()["models"]
    (running,) = get(engine, "/api/ps").json()["models"]
    shown = post(engine, "/api/show", {"model": "fake"}).json()
    arch = {"dense": "qwen35", "moe": "qwen35moe", "next": "qwen3next"}[kind]
    assert card["size"] == running["size"] == path.stat().st_size and running["size_vram"] == 0
    assert card["details"] == running["details"] == shown["details"]
    told = {name: card["details"][name] for name in ("format", "family", "families", "parameter_size")}
    assert told == {
        "format": "gguf",
        "family": arch,
        "families": [arch],
        "parameter_size": f"{shape.n_params / 1e6:.2f}M",
    }
    assert card["details"]["quantization_level"]
    about = shown["model_info"]
    assert about["general.architecture"] == arch and about["general.parameter_count"] == shape.n_params
    assert about[f"{arch}.context_length"] == 1024


def test_sizes_of_other_models() -> None:
    engine = FakeEngineClient(on_gpu=True)
    engine.config = EngineConfig()
    (card,) = get(engine, "/api/ps").json()["models"]
    assert card["size"] == card["size_vram"] == sum(file.stat().st_size for file in DEMO.glob("*.safetensors")) > 0
    assert card["details"]["format"] == "safetensors" and card["details"]["family"] == "qwen35"
    engine.config = EngineConfig(dummy="qwen3.5-4b")
    (card,) = get(engine, "/api/tags").json()["models"]
    assert card["details"]["parameter_size"] == "4.2B" and card["size"] > 8e9
    engine.config = EngineConfig(model="/has/gone")
    assert get(engine, "/api/tags").json()["models"][0]["details"]["family"] == "qwen"


def test_an_answer_of_one_token_took_time() -> None:
    engine = FakeEngineClient()
    engine.token_s = 0.02
    whole = chat(engine, stream=False, options={"num_predict": 1}).json()
    assert whole["eval_count"] == 1 and whole["eval_duration"] > 1e6


def test_a_plain_curl_is_answered_and_a_foreign_page_is_not() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` declares
    bodies = {
        "/api/chat": {"model": "fake", "messages": HELLO},
        "/api/generate": {"model": "fake", "prompt": "hello"},
        "/api/show": {"model": "fake"},
    }
    for path, body in bodies.items():
        raw = json.dumps(body).encode()
        for kind in (form, {"content-type": ""}):
            assert post(FakeEngineClient(), path, raw, kind).status_code == 200, (path, kind)
        foreign = post(FakeEngineClient(), path, raw, form | {"origin": "https://evil.example"})
        assert "may not send" in refused(foreign, 403)
        assert post(FakeEngineClient(), path, raw, form | {"origin": "null"}).status_code == 403


def test_what_there_is() -> None:
    async def go() -> None:
        async with client_of(FakeEngineClient()) as client:
            (card,) = (await client.get("/api/tags")).json()["models"]
            assert card["name"] == card["model"] == "fake:latest"
            assert (await client.get("/api/ps")).json()["models"][0]["context_length"] == 1024
            assert (await client.get("/api/version")).json() == {"version": wire.API_VERSION}
            shown = (await client.post("/api/show", json={"model": card["name"]})).json()
            assert shown["capabilities"] == ["completion", "tools", "thinking"]
            family = shown["model_info"]["general.architecture"]
            assert shown["model_info"][f"{family}.context_length"] == 1024
            assert (await client.head("/")).status_code == 200, "programs look whether it is there"

    asyncio.run(go())
    for precision in ("bf16", "int4-symmetric"):  # as the engine says: a packed model brings its own
        shown = post(FakeEngineClient(precision=precision), "/api/show", {"model": "fake"}).json()
        assert shown["details"]["quantization_level"] == precision.upper()
    assert get(FakeEngineClient(), "/api/version", api_key=("k",)).status_code == 200
    assert get(FakeEngineClient(), "/api/tags", api_key=("k",)).status_code == 401


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(
        st.sampled_from(["hm", "</think>", "\n\n", "Look ", CALL, "<tool_call>\n<function=weather>\n<parameter=city>\nRo"]),
        max_size=6,
    ),
    st.integers(1, 9),
    st.booleans(),
)  # fmt: skip
def test_a_stream_and_a_whole_answer_say_the_same(parts: list[str], size: int, thinking: bool) -> None:
    parser = OutputParser(thinking=thinking, tools={"weather": {}}, call_id=iter(map(str, range(99))).__next__)
    said = LinesAnswer("m", is_chat=True, scored=ChatAnswer("ollama-1", "m", byte_tokenizer()))
    text = "".join(parts)
    updates = [Update(0, parser.push(text[start : start + size])) for start in range(0, len(text), size)]
    updates.append(Update(0, parser.finish(truncated=False), finish_reason="stop"))
    streamed = b"".join(map(said.lines, updates))
    kept = Message()
    for update in updates:
        kept.add(update)
    whole = msgspec.json.decode(said.body(kept, Usage(1, 2, 0, 0, TIMES)))["message"]
    told = [json.loads(line)["message"] for line in streamed.splitlines()]
    assert whole["content"] == "".join(message["content"] for message in told)
    assert whole.get("thinking", "") == "".join(message.get("thinking", "") for message in told)
    assert whole.get("tool_calls", []) == [call for message in told for call in message.get("tool_calls", [])]
    assert all(isinstance(call["function"]["arguments"], dict) for call in whole.get("tool_calls", []))


def test_fields_of_a_chat_are_called_as_here() -> None:
    asked = decode.parse(
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"options":{"stop":"a"}}', wire.OllamaChatRequest
    )
    assert wire.chat_of(asked, NO_DEFAULTS).sampling.shown.stops == ["a"]
    with pytest.raises(ApiError, match=r"options\.num_ctx"):
        decode.parse(b'{"model":"m","options":{"num_ctx":-1}}', wire.OllamaChatRequest)
