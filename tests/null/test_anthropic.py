"""Anthropic's Messages API over a fake engine: what becomes of a body, the form of answers, events and errors."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import anthropic
import httpx
import hypothesis
import jsonschema
import msgspec
import pytest
from hypothesis import strategies as st

from deltic.server.api import anthropic as door
from deltic.server.api import decode
from deltic.server.api.anthropic import MessageAnswer
from deltic.server.api.anthropic_protocol import CountTokensRequest, MessagesRequest, chat_of, signature
from deltic.server.chat.answer import Update
from deltic.server.chat.calls import AnswerDelta, CallDelta
from deltic.server.chat.messages import settled, template_messages
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.request import NO_DEFAULTS, Chat
from deltic.server.errors import ApiError
from deltic.server.limits import Usage
from tests.fake_engine import TEMPLATE, FakeEngineClient, byte_tokenizer, make_app, named_events, saying, served
from tests.null.test_http import post

HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = [
    {
        "name": "weather",
        "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 300, "messages": HELLO} | fields


def send(engine: FakeEngineClient | None = None, config: Any = None, **fields: Any) -> httpx.Response:
    return post(engine or FakeEngineClient(), "/v1/messages", asked(**fields), **(config or {}))


def chat(variables: set[str] | None = None, **fields: Any) -> Chat:
    body = json.dumps(asked(**fields)).encode()
    return chat_of(decode.parse(body, MessagesRequest), variables or set(), False, NO_DEFAULTS)


def told(**fields: Any) -> list[dict[str, Any]]:
    """The chat's messages, as the template gets them."""
    return template_messages(chat(**fields).messages)


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message of an error, whose form is checked."""
    body = response.json()
    assert response.status_code == status, response.text
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return str(body["error"]["message"])


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, pings left out."""
    return [event for event in named_events(response) if event["type"] != "ping"]


# The way in.


def test_what_becomes_of_the_fields() -> None:
    got = chat(
        stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=7, metadata={"user_id": "u"},
        service_tier="auto", cache_control={"type": "ephemeral"}, stream=True,
        tools=[WEATHER[0] | {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}, "defer_loading": False,
                             "eager_input_streaming": True, "allowed_callers": ["direct"], "input_examples": [{"city": "Rome"}]}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )  # fmt: skip
    sampling, params = got.sampling, got.sampling.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (sampling.max_tokens, sampling.shown.stops, sampling.form) == (300, ["a", "b"], None)
    assert got.calls is not None and (got.calls.must, got.calls.most) == (False, 1)
    schema = WEATHER[0]["input_schema"] | {"examples": [{"city": "Rome"}]}
    function = {"name": "weather", "description": "of a city", "parameters": schema, "strict": True}
    assert [tool.shown for tool in got.tools] == [{"type": "function", "function": function}]
    assert got.settings == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [({"type": "any"}, (True, None)), ({"type": "none"}, None), ({"type": "tool", "name": "weather"}, (True, 1))],
)
def test_tool_choice(choice: Any, allowed: Any) -> None:
    calls = chat(tools=WEATHER, tool_choice=choice).calls
    assert allowed == (calls and (calls.must, calls.most))


def test_thinking_effort_format_and_kept_thoughts() -> None:
    assert chat(thinking={"type": "disabled"}).settings == {"enable_thinking": False}
    assert chat(thinking={"type": "adaptive", "display": "summarized"}).settings == {"enable_thinking": True}
    assert chat(thinking={"type": "enabled", "budget_tokens": 5}).thinking_budget == 5
    off = {"enable_thinking": False}
    assert chat(output_config={"effort": "high"}).settings == off | {"reasoning_effort": "high"}
    form = chat(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}).sampling.form
    assert form and (form.path, form.kind, form.value) == ("output_config.format.schema", "json", {"type": "object"})
    one: Any = {"edits": [{"type": "clear_thinking_20251015"}]}
    assert chat({"preserve_thinking"}, context_management=one).settings == off
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert chat(context_management=keep).settings == off
    kept = chat({"preserve_thinking"}, context_management=keep).settings
    assert kept == off | {"preserve_thinking": True}


def test_system_blocks_and_the_line_that_is_not_for_us() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    blocks = [{"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in (line % "1a2b3", "A", "B")]
    assert told(system=blocks)[0] == {"role": "system", "content": "A\n\nB"}
    assert told(system=f"{line % 'ffff0'}\nA")[0] == {"role": "system", "content": "A"}
    assert [m["role"] for m in told(system=line % "00000")] == ["user"]


def test_system_messages_in_the_middle_are_reminders() -> None:
    first = {"role": "system", "content": "be brief"}
    late = {"role": "system", "content": [{"type": "text", "text": "plan mode"}]}
    assert settled(told(system="A", messages=[first, *HELLO, late]), False, False) == [
        {"role": "system", "content": "A\n\nbe brief"},
        {"role": "user", "content": "hello\n\n<system-reminder>\nplan mode\n</system-reminder>"},
    ]


def test_history_comes_back_as_the_model_wrote_it() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "whatever"}
    call = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "weather",
        "input": {"city": "Paris"},
        "caller": {"type": "direct"},
    }
    other = call | {"id": "toolu_2", "input": {"city": "Rome"}}
    says = {"type": "text", "text": "I look.", "citations": None}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "warm"}]},
        {"type": "text", "text": "<system-reminder>\nbe kind\n</system-reminder>"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True},
        {"type": "text", "text": "and?"},
    ]
    got = told(
        messages=[*HELLO, {"role": "assistant", "content": [hidden, thought, says, call, other]},
                  {"role": "user", "content": results}, {"role": "user", "content": "now"}]
    )  # fmt: skip
    assert got[1]["reasoning_content"] == "hm" and got[1]["content"] == "I look."
    assert [c["function"]["arguments"] for c in got[1]["tool_calls"]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert got[2:] == [
        {"role": "tool", "content": "Error: no such city", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "warm\n\n<system-reminder>\nbe kind\n</system-reminder>", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "and?\n\nnow"},
    ]  # fmt: skip


def test_many_results_take_no_time() -> None:
    ids = [str(i) for i in range(20_000)]
    calls = [{"type": "tool_use", "id": i, "name": "weather", "input": {}} for i in ids]
    results = [{"type": "tool_result", "tool_use_id": i, "content": i} for i in reversed(ids)]
    asked = [*HELLO, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    before_s = time.process_time()
    got = chat(messages=asked).messages
    assert time.process_time() - before_s < 3
    assert [message.content for message in got[2:]] == ids


def test_hidden_thoughts_come_back_in_their_signature() -> None:
    def reasoning(text: str, signed: str) -> Any:
        block = {"type": "thinking", "thinking": text, "signature": signed}
        return told(messages=[*HELLO, {"role": "assistant", "content": [block]}, *HELLO])[1].get("reasoning_content")

    assert reasoning("", signature("héhé", hidden=True)) == "héhé"
    assert reasoning("mine", signature("", hidden=False)) == "mine"
    for foreign in ("", "no base64", "Zm9yZWlnbg==", "ZGVsdGljOv8="):
        assert reasoning("", foreign) is None


def test_a_last_message_of_the_assistant_goes_on() -> None:
    engine = FakeEngineClient()
    turns = [
        *HELLO,
        {"role": "assistant", "content": "The "},
        {"role": "assistant", "content": [{"type": "text", "text": "answer"}]},
    ]
    assert send(engine, messages=turns).status_code == 200
    assert byte_tokenizer().decode(engine.requests[0].prompt_ids, False).endswith("assistant\nThe answer")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
        ({"n": 2}, "n: unknown field"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: is an empty string"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c1"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": WEATHER, "tool_choice": {"type": "tool", "name": "wether"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: is missing"),
        ({"tools": [*WEATHER, *WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER[0] | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"system": [IMAGE]}, "system[0].type: 'image'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type: 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: is missing"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
         "messages[0].content[0].content[0].type: 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [1]}]}]},
         "messages[0].content[0].content[0]: expected `object`"),
        ({"tools": [WEATHER[0] | {"allowed_callers": 1}]}, "tools[0].allowed_callers: expected"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "messages[0].content"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(fields: dict[str, Any], named: str) -> None:
    engine = FakeEngineClient()
    assert named in refused(send(engine, **fields))
    assert not engine.requests


def test_what_a_coding_agent_sends() -> None:
    """All that is usual at once; the prompts of two turns begin alike."""
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    engine = FakeEngineClient()
    for cch in ("8f2a1", "04bd7"):
        body = asked(
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.9; cch={cch};"},
                {"type": "text", "text": "You are a coding agent."} | ephemeral,
            ],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\ntoday\n</system-reminder>"},
                                             {"type": "text", "text": "fix it"} | ephemeral]},
                {"role": "system", "content": "agents: none"},
            ],
            tools=[WEATHER[0] | {"eager_input_streaming": True, "defer_loading": True} | ephemeral],
            thinking={"type": "adaptive", "display": "omitted"}, output_config={"effort": "xhigh"}, stream=True,
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            metadata={"user_id": '{"device_id": "d"}'},
        )  # fmt: skip
        headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "a,b", "user-agent": "agent/2"}
        assert events(post(engine, "/v1/messages?beta=true", body, headers))[-1]["type"] == "message_stop"
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


# The way out.


def test_answer() -> None:
    engine = FakeEngineClient(saying("Hm.\n</think>\n\nLook:\n\n" + CALL))
    engine.cached_tokens = 8
    body = send(engine, tools=WEATHER, thinking={"type": "adaptive"}).json()
    assert body["id"].startswith("msg_") and (body["type"], body["role"], body["model"]) == (
        "message",
        "assistant",
        "fake",
    )
    thought, text, call = body["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": signature("", hidden=False)}
    assert text == {"type": "text", "text": "Look:"}
    assert call["id"].startswith("toolu_") and (call["name"], call["input"]) == ("weather", {"city": "Paris"})
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    usage = body["usage"]
    assert usage["input_tokens"] + 8 == len(engine.requests[0].prompt_ids)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (8, 0)
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_events(batch: int) -> None:
    engine = FakeEngineClient(saying(f"Hm.\n</think>\n\nLook:\n\n{CALL}\n{CALL}"))
    engine.batch, engine.cached_tokens = batch, 8
    got = events(send(engine, stream=True, tools=WEATHER, thinking={"type": "adaptive"}))
    start, *blocks, delta, stop = got
    assert start["message"]["content"] == [] and start["message"]["usage"]["cache_read_input_tokens"] == 8
    assert start["message"]["stop_reason"] is None
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and stop == {"type": "message_stop"}
    assert (
        delta["usage"]["output_tokens"] == len(byte_tokenizer().encode(f"Hm.\n</think>\n\nLook:\n\n{CALL}\n{CALL}")) + 1
    )
    shown: list[dict[str, str]] = []
    is_open = False
    for event in blocks:
        kind = event["type"].removeprefix("content_block_")
        assert event["index"] == len(shown) - (kind != "start") and is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            shown.append({"type": event["content_block"]["type"]})
        elif kind == "delta":
            name, value = next((k, v) for k, v in event["delta"].items() if k != "type")
            assert event["delta"]["type"] == f"{name.replace('partial', 'input')}_delta"
            shown[-1][name] = shown[-1].get(name, "") + value
    call = {"type": "tool_use", "partial_json": '{"city": "Paris"}'}
    signed = signature("", hidden=False)
    assert shown == [
        {"type": "thinking", "thinking": "Hm.", "signature": signed}, {"type": "text", "text": "Look:"}, call, call,
    ]  # fmt: skip


def test_thoughts_that_are_not_shown() -> None:
    engine = FakeEngineClient(saying("Hm.\n</think>\n\nYes"))
    fields: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
    block = {"type": "thinking", "thinking": "", "signature": signature("Hm.", hidden=True)}
    assert send(engine, **fields).json()["content"] == [block, {"type": "text", "text": "Yes"}]
    streamed = events(send(engine, stream=True, **fields))
    assert [e["delta"] for e in streamed if e.get("index") == 0 and "delta" in e] == [
        {"type": "signature_delta", "signature": block["signature"]}
    ]


@pytest.mark.parametrize(
    ("text", "end", "fields", "stopped", "content"),
    [
        ("Hello", True, {}, ("end_turn", None), "Hello"),
        ("Hello", True, {"max_tokens": 3}, ("max_tokens", None), "Hel"),
        ("Hello", True, {"stop_sequences": ["x", "lo"]}, ("stop_sequence", "lo"), "Hel"),
        ("a" * 2000, True, {"max_tokens": 5000}, ("model_context_window_exceeded", None), None),
        ("", True, {}, ("end_turn", None), ""),
        ("Hello", True, {"max_tokens": 0}, ("max_tokens", None), ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stops(
    text: str, end: bool, fields: dict[str, Any], stopped: tuple[str, str | None], content: str | None, stream: bool
) -> None:  # fmt: skip
    response = send(FakeEngineClient(saying(text, end)), stream=stream, **fields)
    if stream:
        got = events(response)
        said, shown = got[-2]["delta"], "".join(e["delta"].get("text", "") for e in got[1:-2] if "delta" in e)
    else:
        said = response.json()
        shown = "".join(block["text"] for block in said["content"])
    assert (said["stop_reason"], said["stop_sequence"]) == stopped
    assert content is None or shown == content


def test_a_call_that_is_cut_off() -> None:
    whole = send(FakeEngineClient(saying(CALL)), tools=WEATHER, max_tokens=60).json()
    assert whole["stop_reason"] == "max_tokens" and whole["content"][0]["input"].keys() <= {"city"}


def pieces_of(*deltas: AnswerDelta) -> tuple[list[str], list[dict[str, Any]]]:
    """Types and places of the events of some pieces, and the blocks of the whole answer."""
    said = MessageAnswer("msg_1", "m", silent=False, clipped=False, omits=False)
    pieces = [Update(0, delta) for delta in deltas]
    pieces[-1].finish_reason = "stop"
    written = b"".join(map(said.events, pieces)).decode()
    data = [json.loads(line[6:]) for line in written.split("\n") if line.startswith("data: ")]
    whole = json.loads(said.body(Usage(0, 0, 0, 0)))["content"]
    return [f"{e['type'].removeprefix('content_block_')} {e['index']}" for e in data], whole


def test_text_inside_a_call_waits_for_its_end() -> None:
    kinds, whole = pieces_of(
        AnswerDelta(calls=[CallDelta(0, "call_1", "f", '{"a": ')]), AnswerDelta(content="junk"),
        AnswerDelta(calls=[CallDelta(0, arguments="1}"), CallDelta(1, "call_2", "g", "{}")]), AnswerDelta(content="done"),
    )  # fmt: skip
    assert kinds == [
        "start 0", "delta 0", "delta 0", "stop 0", "start 1", "delta 1", "stop 1", "start 2", "delta 2", "stop 2",
        "start 3", "delta 3", "stop 3",
    ]  # fmt: skip
    assert [block["type"] for block in whole] == ["tool_use", "text", "tool_use", "text"]
    assert (whole[0]["id"], whole[0]["input"], whole[1]["text"]) == ("toolu_1", {"a": 1}, "junk")


FRAGMENTS = (
    "</think>", "\n\n", "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>", "</parameter>",
    "Paris", '{"name": "weather", "arguments": {}}', CALL, "words ", "é", "\n", "<function=other>", "<parameter=n>", "7",
)  # fmt: skip


@hypothesis.settings(max_examples=300, deadline=None, database=None)
@hypothesis.given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data(), omits=st.booleans())
def test_the_events_of_any_text_add_up_to_the_whole_answer(
    fragments: list[str], data: st.DataObject, omits: bool
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser = OutputParser(thinking=data.draw(st.booleans()), tools={"weather": WEATHER[0]["input_schema"]})
    said = MessageAnswer("msg_1", "m", silent=False, clipped=False, omits=omits)
    written = b"".join(
        said.events(Update(0, parser.push(text[a:b]))) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)
    )
    written += said.events(Update(0, parser.finish(), finish_reason="stop"))
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in (json.loads(line[6:]) for line in written.decode().split("\n") if line.startswith("data: ")):
        kind = event["type"].removeprefix("content_block_")
        assert event["index"] == len(blocks) - (kind != "start") and is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(event["content_block"])
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif kind == "delta":
            name, value = next((k, v) for k, v in event["delta"].items() if k != "type")
            blocks[-1]["input" if name == "partial_json" else name] += value
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    assert json.loads(said.body(Usage(0, 0, 0, 0)))["content"] == blocks


@pytest.mark.parametrize(
    ("text", "read"), [('{"a": "x', {"a": "x"}), ('{"a": 1', {"a": 1}), ('{"a": [1', {"a": [1]}), ("", {})]
)
def test_input_of_a_call_without_an_end(text: str, read: Any) -> None:
    assert pieces_of(AnswerDelta(calls=[CallDelta(0, "call_1", "f", text)]))[1][0]["input"] == read


def test_a_quiet_stream_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PING_S", 0.05)
    engine = FakeEngineClient()
    engine.hold = True
    with served(make_app(engine)) as url, httpx.stream("POST", f"{url}/v1/messages", json=asked(stream=True)) as stream:
        lines = stream.iter_lines()
        assert [next(lines) for _ in range(6)] == ["event: ping", 'data: {"type":"ping"}', ""] * 2
        engine.hold = False
        assert "event: message_stop" in list(lines)


def test_count_tokens() -> None:
    engine = FakeEngineClient()
    body = {
        "model": "fake",
        "messages": HELLO,
        "system": "x" * 9000,
        "tools": WEATHER,
        "thinking": {"type": "adaptive"},
    }
    counted = post(engine, "/v1/messages/count_tokens", body)
    assert counted.status_code == 200 and not engine.requests
    send(engine, **body | {"system": "x"})
    assert counted.json() == {"input_tokens": len(engine.requests[0].prompt_ids) + 8999}
    assert "max_tokens" in refused(post(engine, "/v1/messages/count_tokens", body | {"max_tokens": 1}))
    refused(post(engine, "/v1/messages/count_tokens", body | {"model": "claude"}), 404)


# Errors.


def test_error_kinds() -> None:
    def kind(response: httpx.Response, status: int) -> str:
        refused(response, status)
        return str(response.json()["error"]["type"])

    assert kind(send(model="claude-sonnet"), 404) == "not_found_error"
    assert "This server has 'fake'" in send(model="claude-sonnet").json()["error"]["message"]
    assert kind(send(config={"api_key": ("k",)}), 401) == "authentication_error"
    assert kind(post(FakeEngineClient(), "/v1/messages", b"{"), 400) == "invalid_request_error"
    assert kind(send(system="x" * 2000, config={"max_body_mb": 0.001}), 413) == "request_too_large"
    assert kind(post(FakeEngineClient(), "/v1/messages/batches", {}), 404) == "not_found_error"
    busy = FakeEngineClient()
    busy.max_open = 0
    response = send(busy)
    assert kind(response, 529) == "overloaded_error" and response.headers["retry-after"] == "7"
    down = FakeEngineClient()
    down.state = "restarting"
    assert kind(send(down), 503) == "api_error"
    assert refused(send(system="x" * 2000)) == "prompt is too long: 2040 tokens > 1023 maximum"


def test_both_forms_of_a_key() -> None:
    for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
        assert post(FakeEngineClient(), "/v1/messages", asked(), headers, api_key=("k",)).status_code == 200
    for headers in ({"x-api-key": "other"}, {"authorization": "Basic k"}):
        assert post(FakeEngineClient(), "/v1/messages", asked(), headers, api_key=("k",)).status_code == 401


def test_an_error_in_the_middle_of_a_stream() -> None:
    engine = FakeEngineClient()
    engine.die_after = 2
    got = events(send(engine, stream=True))
    assert got[-1]["type"] == "error" and got[-1]["error"]["type"] == "api_error" and got[-1]["request_id"]
    assert got[-2]["type"] == "content_block_delta"


def test_no_template_and_a_template_that_refuses() -> None:
    assert "chat template" in refused(send(config={"template": None}))
    refusing = TEMPLATE + "{{ raise_exception('not that') }}"
    assert "not that" in refused(send(config={"template": refusing}))


# The official client.


def test_client() -> None:
    engine = FakeEngineClient(saying("Hm.\n</think>\n\nLook:\n\n" + CALL))
    with served(make_app(engine, api_key=("k",))) as url:
        client: Any = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
        fields: Any = {
            "model": "fake",
            "max_tokens": 300,
            "messages": HELLO,
            "tools": WEATHER,
            "thinking": {"type": "adaptive"},
        }
        with client.messages.stream(**fields) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"thinking", "text", "signature", "input_json", "message_stop"} <= kinds
        whole = client.beta.messages.create(**fields, betas=["interleaved-thinking-2025-05-14"])
        assert [b.type for b in final.content] == [b.type for b in whole.content] == ["thinking", "text", "tool_use"]
        assert final.usage.output_tokens == whole.usage.output_tokens
        n_tokens = client.messages.count_tokens(model="fake", messages=HELLO).input_tokens
        assert n_tokens == 30 and client.models.list().data[0].id == "fake"
        # The answer given back, as the client has it, and then a result.
        result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "warm"}
        client.messages.create(
            **fields
            | {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": final.content},
                    {"role": "user", "content": [result]},
                ]
            }
        )
        assert CALL in byte_tokenizer().decode(engine.requests[-1].prompt_ids, False)
        with pytest.raises(anthropic.NotFoundError, match="This server has"):
            client.messages.create(**fields | {"model": "claude"})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="x").messages.create(**fields)
        engine.max_open = 0
        with pytest.raises(anthropic.InternalServerError) as raised:
            client.messages.create(**fields)
        assert raised.value.status_code == 529 and raised.value.type == "overloaded_error" and raised.value.request_id


def test_leaving_a_stream_aborts() -> None:
    engine = FakeEngineClient(saying("a" * 500))
    engine.token_s = 0.005
    with served(make_app(engine)) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with client.messages.stream(model="fake", max_tokens=600, messages=HELLO) as stream:
            next(iter(stream.text_stream))
        deadline = time.monotonic() + 5
        while engine.n_open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert engine.aborts


def test_bodies_of_any_shape_are_answered() -> None:
    """Random JSON under the API's own names becomes a chat or a 400."""
    leaf: Any = st.sampled_from(
        [None, True, 0, -1, 0.5, "", "text", "user", "assistant", "tool_use", "tool_result", "enabled", [], {}]
    )
    names = st.sampled_from(
        ["type", "text", "content", "role", "id", "name", "input", "tool_use_id", "input_schema", "thinking"]
    )
    value = st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=8
    )
    fields = st.sampled_from([*MessagesRequest.__struct_fields__])

    @hypothesis.settings(max_examples=300, deadline=None, database=None)
    @hypothesis.given(st.dictionaries(fields, value, max_size=3))
    def check(given: dict[str, Any]) -> None:
        with contextlib.suppress(ApiError, msgspec.ValidationError):
            chat_of(msgspec.convert(asked() | given, MessagesRequest), set(), False, NO_DEFAULTS)

    check()
    assert set(CountTokensRequest.__struct_fields__) < set(MessagesRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "wrong"),
    [
        ("bash_20250124", "bash", {"command": "ls"}, {"command": 1}),
        ("bash_20250124", "bash", {"restart": True}, {"restart": "yes"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
         {"command": "undo_edit", "path": "/a"}),
        ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/a"}, {"command": "view"}),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}, {"command": "forget"}),
    ],
)  # fmt: skip
def test_tools_that_the_client_runs_have_a_schema(kind: str, name: str, arguments: Any, wrong: Any) -> None:
    marks = {"cache_control": {"type": "ephemeral"}} | ({"max_characters": 9} if "0728" in kind else {})
    tool = chat(tools=[{"type": kind, "name": name} | marks]).tools[0].shown["function"]
    assert tool["name"] == name and tool["description"]
    jsonschema.validate(arguments, tool["parameters"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, tool["parameters"])
    engine = FakeEngineClient(saying("ok"), max_model_len=4096)
    reply = send(engine, tools=[{"type": kind, "name": name, "strict": True}])
    assert reply.status_code == 200, reply.text
    assert engine.requests[-1].params.constraint is not None
