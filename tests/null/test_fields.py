"""Fields of requests that other servers know: each is honoured, declined in the answer, or ignored where it asks for nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from deltic.config import EngineConfig
from deltic.server.api.completions import AnswerStream
from deltic.server.chat.answer import ChatAnswer, Extras, Update
from deltic.server.chat.calls import AnswerDelta
from deltic.server.limits import Usage
from deltic.text import Tokenizer
from tests.fake_engine import END, TEMPLATE, FakeEngineClient, byte_tokenizer, make_app, saying, served

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture(scope="module")
def url(engine: FakeEngineClient) -> Iterator[str]:
    with served(make_app(engine)) as url:
        yield url


@pytest.fixture(autouse=True)
def anew(engine: FakeEngineClient) -> None:
    engine.answer = saying("Hello")
    engine.batch = 1


def chat(url: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    return post(f"{url}/v1/chat/completions", status, {"messages": HELLO} | fields)


def completion(url: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    return post(f"{url}/v1/completions", status, {"prompt": "hello"} | fields)


def post(url: str, status: int, body: dict[str, Any]) -> Any:
    response = httpx.post(url, json=body)
    assert response.status_code == status, response.text
    if body.get("stream") and status == 200:
        *blocks, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(block.removeprefix("data: ")) for block in blocks]
    return response.json() if status == 200 else response.json()["error"]


def test_fields_of_local_servers(engine: FakeEngineClient, url: str) -> None:
    """What LM Studio, llama.cpp and their clients send by habit."""
    for ask in (chat, completion):
        ask(url, ttl=300, min_keep=0, reasoning_format="auto", repeat_last_n=64)
        for fields, penalty in (({"repeat_last_n": -1}, 1.2), ({"repeat_last_n": 0}, 1.0), ({}, 1.2)):
            ask(url, repeat_penalty=1.2, **fields)
            assert engine.requests[-1].params.repetition_penalty == penalty
        # A new grammar: the body is prepared again, in another thread.
        schema = {"name": "x", "schema": {"type": "object", "properties": {ask.__name__: {}}}}
        form = {"type": "json_schema", "json_schema": schema}
        ask(url, repeat_penalty=1.2, repeat_last_n=0, response_format=form)
        assert engine.requests[-1].params.repetition_penalty == 1.0
        assert ask(url, 400, repeat_penalty=1.2, repeat_last_n=64)["param"] == "repeat_last_n"
        assert ask(url, 400, min_keep=5)["param"] == "min_keep"
        assert ask(url, 400, reasoning_format="none")["param"] == "reasoning_format"
    assert chat(url, 400, max_completion_tokens=0)["param"] == "max_completion_tokens"
    assert chat(url, 400, max_tokens=0)["param"] == "max_tokens"
    for body in ({"prompt": "a"}, {"messages": HELLO}):
        for adds in (True, False):
            plain = post(f"{url}/tokenize", 200, body)["tokens"]
            assert post(f"{url}/tokenize", 200, body | {"add_special_tokens": adds})["tokens"] == plain


def test_marks_of_a_prefix_cache_ask_for_nothing(engine: FakeEngineClient, url: str) -> None:
    """The prompt is that without them; OpenAI's and Anthropic's, on either API of OpenAI's."""
    marks = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}, "cache_control": {"type": "ephemeral"}}
    options = {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_key": "k"}
    for path, field, kind in (("chat/completions", "messages", "text"), ("responses", "input", "input_text")):
        for mark in ({}, marks):
            said = {"role": "user", "content": [{"type": kind, "text": "hello"} | mark]}
            post(f"{url}/v1/{path}", 200, {field: [said]} | (options if mark else {}))
        plain, marked = (request.prompt_ids for request in engine.requests[-2:])
        assert plain == marked


FINGERPRINTED: list[dict[str, Any]] = [
    {"tp_invariant": 2},
    {"tp_invariant": 2, "expert_parallel": True},
    {"state_dtype": "bfloat16"},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
    {"quantize_rest": "int8"},
    {"model": "org/name", "revision": "v2"},
]


def test_a_fingerprint_in_answers(url: str) -> None:
    for ask in (chat, completion):
        prints = {ask(url)["system_fingerprint"], *(chunk["system_fingerprint"] for chunk in ask(url, stream=True))}
        assert len(prints) == 1
    clients = [FakeEngineClient(precision="int4")]
    for settings in FINGERPRINTED:
        clients.append(FakeEngineClient())
        clients[-1].config = EngineConfig(**settings)
    for client in clients:
        with served(make_app(client)) as other:
            found = chat(other)["system_fingerprint"]
        assert found not in prints
        prints.add(found)


def test_usage_in_every_chunk(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (chat, completion):
        chunks = ask(url, stream=True, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) >= 6
        assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
        assert chunks[-1]["choices"] == [] and chunks[-2]["choices"]
    plain = chat(url, stream=True, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in plain)
    assert chat(url, stream=True, usage={"include": True})[-1]["usage"]["completion_tokens"] == 6


def test_counts_are_those_up_to_a_chunk_however_pieces_come() -> None:
    class Together:
        """A generation whose updates come all at once."""

        def usage(self) -> Usage:
            return Usage(3, 9, 0, 0, {"prefill_ms": 1.0, "decode_ms": 1.0})

    said = ChatAnswer("a", "m", byte_tokenizer(), Extras(usage=True, running_usage=True))
    stream: Any = AnswerStream(Together(), said)  # type: ignore[arg-type]
    updates = [Update(0, AnswerDelta(content="a"), n_tokens=1), Update(1, AnswerDelta(content="b"), n_tokens=1)]
    updates += [
        Update(0, AnswerDelta(content="c"), n_tokens=4),
        Update(0, AnswerDelta(), finish_reason="stop", n_tokens=5),
    ]
    told = b"".join(map(stream._counted, updates)).decode().split("\n\n")[:-1]
    counts = [json.loads(block[6:])["usage"]["completion_tokens"] for block in told]
    assert counts == [1, 2, 5, 6]


def test_chunks_are_padded(url: str) -> None:
    for ask in (chat, completion):
        chunks = ask(url, stream=True, stream_options={"include_obfuscation": True})
        said = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"] is None]
        assert len({len(json.dumps(chunk, separators=(",", ":"))) for chunk in said[1:]}) == 1
        assert len({chunk["obfuscation"] for chunk in said}) > 1
    body = {"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}}
    text = httpx.post(f"{url}/v1/responses", json=body).text
    deltas = [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if ".delta" in block[:40]]
    assert deltas and all("obfuscation" in delta for delta in deltas)


def test_timings_in_the_form_of_llama_cpp(url: str) -> None:
    told = chat(url, timings_per_token=True)["timings"]
    assert (told["predicted_n"], told["cache_n"]) == (6, 0) and told["prompt_n"] > 0
    chunks = chat(url, stream=True, timings_per_token=True, stream_options={"include_usage": True})
    assert chunks[-2]["timings"]["predicted_n"] == 6 and chunks[-2]["usage"] is None
    assert "timings" not in chat(url)


def test_progress_of_the_prompt_in_the_form_of_llama_cpp(engine: FakeEngineClient, url: str) -> None:
    engine.cached_tokens = 2
    for ask in (chat, completion):
        chunks = ask(url, stream=True, return_progress=True, stream_options={"include_usage": True})
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        n = len(engine.requests[-1].prompt_ids)
        assert [(each["total"], each["cache"], each["processed"]) for each in told] == [
            (n, 2, max(2, part)) for part in (0, n // 2, n)
        ]
        assert all(each.keys() == {"total", "cache", "processed", "time_ms"} and each["time_ms"] >= 0 for each in told)
        text = [choice.get("text") or choice.get("delta", {}).get("content") for c in chunks for choice in c["choices"]]
        assert "".join(filter(None, text)) == "Hello"
        assert not any("prompt_progress" in chunk for chunk in ask(url, stream=True))
        error = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "return_progress": True}).json()["error"]
        assert error["param"] == "return_progress" and "stream" in error["message"]


def test_progress_of_each_prompt_stands_before_its_echo(url: str) -> None:
    chunks = completion(url, prompt=["ab", "cdef"], echo=True, logprobs=1, stream=True, return_progress=True)
    told = [(c["choices"][0]["index"], c["prompt_progress"]["total"]) for c in chunks if "prompt_progress" in c]
    assert sorted(told) == [(0, 2)] * 3 + [(1, 4)] * 3
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)]
    assert texts == ["abHello", "cdefHello"]


def test_progress_does_not_disturb_programs(url: str) -> None:
    """The deltas of an answer put together, as the openai package does it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    asked = client.chat.completions.stream(model="fake", messages=messages, extra_body={"return_progress": True})
    with asked as stream:
        whole = stream.get_final_completion().choices[0].message
    assert (whole.role, whole.content) == ("assistant", "Hello")


@pytest.mark.parametrize("batch", [1, 10])
def test_token_ids(engine: FakeEngineClient, url: str, batch: int) -> None:
    engine.batch = batch
    drawn, prompt = [*b"Hello", END], [*b"hello"]
    whole = chat(url, return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == drawn
    assert whole["prompt_token_ids"] == engine.requests[-1].prompt_ids
    chunks = chat(url, return_token_ids=True, stream=True)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == drawn
    assert "token_ids" not in chat(url)["choices"][0]
    two = completion(url, prompt=["hello", "x"], n=2, return_token_ids=True)["choices"]
    assert [choice["prompt_token_ids"] for choice in two] == [prompt, prompt, [*b"x"], [*b"x"]]
    assert all(choice["token_ids"] == drawn for choice in two)
    chunks = completion(url, return_token_ids=True, stream=True)
    firsts = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert firsts == [prompt] + [None] * (len(chunks) - 1)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == drawn


def test_ids_without_text(url: str) -> None:
    only = {"return_token_ids": True, "detokenize": False}
    for ask in (chat, completion):
        choice = ask(url, **only)["choices"][0]
        assert choice["token_ids"] == [*b"Hello", END]
        assert not (choice.get("text") or choice.get("message", {}).get("content"))
    scores = completion(url, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert scores["tokens"][0] == "token_id:72" and "token_id:72" in scores["top_logprobs"][0]
    scores = chat(url, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert scores["content"][0]["token"] == "token_id:72"


@pytest.mark.parametrize("batch", [1, 10])
def test_a_stop_string_is_shown_where_it_is_asked_for(engine: FakeEngineClient, url: str, batch: int) -> None:
    engine.batch = batch
    with_stop = {"stop": "ll", "include_stop_str_in_output": True}
    assert completion(url, **with_stop)["choices"][0]["text"] == "Hell"
    assert completion(url, stop="ll")["choices"][0]["text"] == "He"
    assert chat(url, **with_stop)["choices"][0]["message"]["content"] == "Hell"
    scores = completion(url, logprobs=0, **with_stop)["choices"][0]["logprobs"]
    assert scores["tokens"] == list("Hell")
    engine.answer = lambda request, index: [*b"Hello"]
    for ask in (chat, completion):
        choice = ask(url, stop_token_ids=[111], include_stop_str_in_output=True)["choices"][0]
        assert "Hello" in (choice.get("text"), choice.get("message", {}).get("content"))


@pytest.mark.parametrize("given", [{"stop": "ll"}, {"stop_token_ids": [111]}, {}])
def test_what_stopped_an_answer_is_told(engine: FakeEngineClient, url: str, given: dict[str, Any]) -> None:
    """As vLLM has it: the string, or the id of the request's own; nothing where the model ended it."""
    engine.answer = lambda request, index: [*b"Hello"]
    for ask in (chat, completion):
        whole = ask(url, **given)["choices"][0]
        assert whole.get("stop_reason") == (given.get("stop") or given.get("stop_token_ids", [None])[0])
        chunks: Any = ask(url, stream=True, **given)
        last = [chunk["choices"][0] for chunk in chunks if chunk["choices"]][-1]
        assert last["finish_reason"] and last.get("stop_reason") == whole.get("stop_reason")


def test_prompts_are_cut_at_their_beginning(engine: FakeEngineClient, url: str) -> None:
    completion(url, prompt="hello", truncate_prompt_tokens=3)
    assert engine.requests[-1].prompt_ids == [*b"llo"]
    assert completion(url, truncate_prompt_tokens=3, echo=True)["choices"][0]["text"] == "lloHello"
    completion(url, prompt="x" * 9000, truncate_prompt_tokens=-1, max_tokens=24)
    assert len(engine.requests[-1].prompt_ids) == 1000
    for unbounded in ({}, {"n_predict": -1}, {"max_tokens": 1024}, {"max_tokens": 90_000}):
        completion(url, prompt="x" * 9000, truncate_prompt_tokens=-1, **unbounded)
        assert len(engine.requests[-1].prompt_ids) == 1024 - 16
    chat(url, messages=[*HELLO, {"role": "assistant", "content": "x" * 9000}, *HELLO], truncate_prompt_tokens=40)
    sent = engine.requests[-1]
    assert len(sent.prompt_ids) == 40 and sent.prompt_ids[-1:] == byte_tokenizer().encode("\n")
    assert sent.boundaries and all(0 < at < 40 for at in sent.boundaries)
    chat(url, messages=HELLO * 3)
    whole = engine.requests[-1].prompt_ids
    chat(url, messages=HELLO * 3, truncate_prompt_tokens=20)
    assert engine.requests[-1].prompt_ids == whole[-20:]
    for wrong in (0, 1024):
        assert completion(url, 400, truncate_prompt_tokens=wrong)["param"] == "truncate_prompt_tokens"


def test_only_the_end_of_a_prompt_that_is_cut_is_encoded(
    engine: FakeEngineClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer._encode_piece

    def counted(self: Tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode_piece", counted)
    said = "one two " * 250_000
    completion(url, prompt=said, truncate_prompt_tokens=5)
    assert engine.requests[-1].prompt_ids == [*b" two "]
    chat(url, messages=[{"role": "user", "content": said}, *HELLO], truncate_prompt_tokens=100)
    assert len(engine.requests[-1].prompt_ids) == 100 and engine.requests[-1].boundaries
    assert sum(encoded) < 400_000


def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_look_for(url: str) -> None:
    for error in (
        chat(url, 400, messages=[{"role": "user", "content": "x" * 3000}]),
        chat(url, 400, messages=[{"role": "user", "content": "x" * 90000}]),
        completion(url, 400, prompt="x" * 3000),
    ):
        assert "this model's maximum context length is 1024 tokens. however, your" in error["message"].lower()
        assert error["code"] == "context_length_exceeded"


def test_a_completion_without_a_prompt_begins_a_text(engine: FakeEngineClient, url: str) -> None:
    for body in ({}, {"prompt": None}):
        post(f"{url}/v1/completions", 200, body)
        assert engine.requests[-1].prompt_ids == [256]


def test_fields_under_other_names(engine: FakeEngineClient, url: str) -> None:
    chat(url, n_predict=3, repeat_penalty=1.2, best_of=1, num_ctx=1000, keep_alive="5m")
    params = engine.requests[-1].params
    assert (params.max_tokens, params.repetition_penalty) == (3, 1.2)
    completion(url, n_predict=-1, n=2, best_of=2)
    assert engine.requests[-1].params.max_tokens == 1019
    assert chat(url, request_id="abc")["id"] == "chatcmpl-abc"
    assert chat(url, rid="abc")["id"] == completion(url, rid="abc")["id"] == "abc"
    assert completion(url, request_id="abc", stream=True)[0]["id"] == "cmpl-abc"


def test_thinking_in_other_words(engine: FakeEngineClient, url: str) -> None:
    engine.answer = saying("Hm.\n</think>\n\nHi")
    shown = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}
    for fields in (
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"reasoning": {"effort": "max"}},
        {"reasoning": {"enabled": True}},
        {"reasoning_effort": "max"},
    ):
        message = chat(url, **fields)["choices"][0]["message"]
        assert {name: text.strip() for name, text in message.items()} == shown
    for fields in (
        {"reasoning": {"enabled": True, "exclude": True}},
        {"enable_thinking": True, "include_reasoning": False},
    ):
        whole = chat(url, **fields)
        assert "reasoning_content" not in whole["choices"][0]["message"]
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert "reasoning_content" not in json.dumps(chat(url, stream=True, **fields))
    engine.answer = saying("Hi")
    assert chat(url, thinking={"type": "disabled"})["choices"][0]["message"]["content"] == "Hi"


def test_wishes_that_are_declined(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    for tier in ("flex", "priority", "scale", "fast"):
        assert chat(url, service_tier=tier)["service_tier"] == "default"
        assert chat(url, service_tier=tier, stream=True)[1]["service_tier"] == "default"
    assert "service_tier" not in chat(url)
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, verbosity="low", store=True, prompt_cache_retention="24h",
        prediction={"type": "content", "content": "Hello"}, extra_body={"prompt_cache_options": {"mode": "explicit"}},
    )  # fmt: skip
    assert answer.choices[0].message.content == "Hello"
    response = client.responses.create(
        model="fake", input="x", service_tier="priority", text={"verbosity": "low"}, max_tool_calls=3, top_logprobs=2,
        include=["web_search_call.action.sources", "file_search_call.results"], reasoning={"effort": "max"},
        prompt_cache_retention="24h", extra_body={"prompt_cache_options": {"mode": "explicit"}},
    )  # fmt: skip
    assert (response.service_tier, response.text.verbosity, response.max_tool_calls) == ("default", "medium", 3)


def test_marks_of_a_cache_are_not_shown_to_the_model(engine: FakeEngineClient, url: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    prompts = []
    for marks in ({}, {"cache_control": {"type": "ephemeral"}}):
        chat(url, tools=[tool | marks | {"function": tool["function"] | marks}])
        prompts.append(engine.requests[-1].prompt_ids)
    assert prompts[0] == prompts[1]


def test_documents_and_verbosity_reach_a_template_that_reads_them(url: str) -> None:
    assert chat(url, 400, documents=[{"text": "a"}])["param"] == "documents"
    engine = FakeEngineClient()
    shows = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ verbosity or '' }}|"
    with served(make_app(engine, shows)) as other:
        chat(other, documents=[{"text": "ab"}], verbosity="low")
        assert bytes(engine.requests[-1].prompt_ids) == b"ablow|"


def test_a_template_of_the_requests(url: str) -> None:
    own = "{{ messages[0].content }}{{ bos_token or '' }}!"
    assert "--trust-request-chat-template" in chat(url, 400, chat_template=own)["message"]
    engine = FakeEngineClient()
    with served(make_app(engine, TEMPLATE, trust_request_chat_template=True)) as trusting:
        chat(trusting, chat_template=own)
        assert bytes(engine.requests[-1].prompt_ids) == b"hello!"
        chat(trusting, chat_template="<|im_end|>{{ messages[0].content }}")
        assert engine.requests[-1].prompt_ids == [END, *b"hello"]
        assert chat(trusting, 400, chat_template="{% if %}")["param"] == "chat_template"
        for hostile in (
            "{{ 'a' * 3000000000 }}",
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "{{ 1 / 0 }}",
            "{{ missing.of.it }}",
        ):
            assert chat(trusting, 400, chat_template=hostile)["param"] in ("chat_template", "messages")


def test_truncation_drops_the_oldest_turns(engine: FakeEngineClient, url: str) -> None:
    def turn(i: int) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": f"q{i}"},
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": "x" * 200},
        ]

    items = [{"role": "developer", "content": "Rule."}, *(item for i in range(8) for item in turn(i))]
    body = {"input": [*items, {"role": "user", "content": "last"}], "instructions": "Be brief."}
    assert post(f"{url}/v1/responses", 400, body)["code"] == "context_length_exceeded"
    told = post(f"{url}/v1/responses", 200, body | {"truncation": "auto"})
    assert told["truncation"] == "auto"
    prompt = byte_tokenizer().decode(engine.requests[-1].prompt_ids)
    assert "Be brief." in prompt and "Rule." in prompt and "last" in prompt
    kept = [i for i in range(8) if f"q{i}" in prompt]
    assert kept == list(range(kept[0], 8)) and 2 <= len(kept) < 8 and len(prompt) > 700
    alone = {"input": "x" * 3000, "truncation": "auto"}
    assert post(f"{url}/v1/responses", 400, alone)["code"] == "context_length_exceeded"


def test_fields_of_anthropic_that_nothing_shows_of(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
    extra = {
        "thread": {"type": "create"}, "inference_geo": "eu", "diagnostics": {"previous_message_id": None},
        "user_profile_id": "u", "workspace_id": "w", "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "fallbacks": "default", "compaction": None,
    }  # fmt: skip
    said = client.messages.create(model="fake", max_tokens=9, messages=HELLO, extra_body=extra)
    assert said.content[0].text == "Hello"
    with pytest.raises(anthropic.NotFoundError, match="Send the whole history"):
        held = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
        client.messages.create(model="fake", max_tokens=9, messages=HELLO, extra_body=held)
    for wrong in ({"thread": {"type": "held"}}, {"compaction": {"type": "summarize"}}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            client.messages.create(model="fake", max_tokens=9, messages=HELLO, extra_body=wrong)


def test_unknown_fields_pass_where_the_server_is_told_so(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert chat(url, 400, colour="secret")["param"] == "colour"
    with (
        caplog.at_level(logging.WARNING, "deltic.server"),
        served(make_app(FakeEngineClient(), strict_fields="off")) as lenient,
    ):
        for _ in range(3):
            assert chat(lenient, colour="secret", echo=True, size=None)["choices"]
        post(f"{lenient}/v1/messages", 200, {"model": "fake", "max_tokens": 9, "messages": HELLO, "colour": 1})
        post(f"{lenient}/v1/responses", 200, {"input": "x", "colour": 1})
        post(f"{lenient}/tokenize", 200, {"prompt": "x", "colour": 1})
        post(f"{lenient}/api/chat", 200, {"model": "fake", "messages": HELLO, "stream": False, "colour": 1})
        assert chat(lenient, 400, temperature="hot", colour=1)["param"] == "temperature"
        assert chat(lenient, 400, messages=[HELLO[0] | {"x": 1}])["param"] == "messages[0].x"
        counts = httpx.get(f"{lenient}/metrics").text
    told = [record.getMessage() for record in caplog.records if "strict-fields" in record.getMessage()]
    assert len(told) == 6 and "'colour'" in told[0] and "secret" not in "".join(told)
    assert 'deltic_unknown_fields_total{route="/v1/chat/completions"} 7.0' in counts
    assert 'deltic_unknown_fields_total{route="/v1/messages"} 1.0' in counts


def test_functions_of_the_older_form(engine: FakeEngineClient, url: str) -> None:
    engine.answer = saying('Hm.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    fields = {"functions": [{"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}]}
    choice = chat(url, **fields, function_call="auto")["choices"][0]
    called = choice["message"].pop("function_call")
    assert (called["name"], json.loads(called["arguments"])) == ("f", {"x": 1})
    assert choice["message"] == {"role": "assistant", "content": "Hm."}
    assert choice["finish_reason"] == "function_call"
    chunks = [chunk["choices"][0] for chunk in chat(url, stream=True, **fields)]
    parts = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert [part["name"] for part in parts if "name" in part] == ["f"]
    assert json.loads("".join(part["arguments"] for part in parts)) == {"x": 1}
    assert chunks[-1]["finish_reason"] == "function_call"
    assert engine.requests[-1].params.constraint is not None  # one call at most
    assert chat(url, function_call="none", functions=[])["choices"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    forced = [{"tool_choice": "required"}, {"tool_choice": tools[0]}, {"function_call": {"name": "f"}}]
    for given in ({"functions": [{"name": "f"}]}, {"tools": tools}):
        for choice in forced:
            chat(url, **given, **choice)
            assert engine.requests[-1].params.constraint
        for choice in ({"tool_choice": "none"}, {"function_call": "none"}):
            chat(url, **given, **choice)
            assert not engine.requests[-1].params.constraint
        both = chat(url, 400, function_call="none", tool_choice="required", **given)
        assert both["param"] == "function_call" and "tool_choice" in both["message"]
        assert chat(url, 400, tool_choice="always", **given)["param"] == "tool_choice"
    for wrong, param in (
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [{"name": "f g"}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ):
        assert chat(url, 400, **wrong)["param"] == param


def test_the_tool_runner_of_anthropic_s_client(engine: FakeEngineClient, url: str) -> None:
    call = '<tool_call>{"name": "double", "arguments": {"x": 2}}</tool_call>'
    texts = iter([call, call, "It is 4."])
    engine.answer = lambda request, index: [*byte_tokenizer().encode(next(texts)), END]

    @anthropic.beta_tool
    def double(x: int) -> str:
        """Twice a number.

        Args:
            x: The number.
        """
        return str(2 * x)

    client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
    runner = client.beta.messages.tool_runner(model="fake", max_tokens=99, tools=[double], messages=HELLO)
    assert runner.until_done().content[0].text == "It is 4."
    assert "4" in byte_tokenizer().decode(engine.requests[-1].prompt_ids)
