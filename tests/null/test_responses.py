"""The Responses API over a fake engine: what the answers and events look like, what is kept, what is refused."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageCustomToolCall

from deltic.server.api import responses
from deltic.server.api import responses_protocol as wire
from deltic.server.api.responses_items import (
    CallItem,
    MessageItem,
    ResponseStore,
    ResponseTurn,
    StoredResponse,
    parse_item,
    turn_of,
)
from deltic.server.chat.messages import AssistantMessage, settled, template_messages
from deltic.server.chat.request import NO_DEFAULTS, Form
from deltic.server.errors import ApiError
from tests.fake_engine import FakeEngineClient, byte_tokenizer, make_app, named_events, saying, served

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THINK = {"enable_thinking": True}


class Door:
    """A server over a fake engine, and a client of it."""

    def __init__(self, url: str, engine: FakeEngineClient) -> None:
        self.engine = engine
        self.http = httpx.Client(base_url=url, timeout=10)

    def post(self, status: int = 200, /, **body: Any) -> dict[str, Any]:
        reply = self.http.post("/v1/responses", json={"input": "hello"} | body)
        assert reply.status_code == status, reply.text
        said: dict[str, Any] = reply.json()
        return said if status == 200 else said["error"]

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The events, which must be counted."""
        reply = self.http.post("/v1/responses", json={"input": "hello", "stream": True} | body)
        assert reply.status_code == 200, reply.text
        events = named_events(reply)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events

    def prompt(self) -> str:
        """The last prompt, special tokens as in the template."""
        return byte_tokenizer().decode(self.engine.requests[-1].prompt_ids, False)


@pytest.fixture(scope="module")
def server() -> Iterator[Door]:
    engine = FakeEngineClient()
    with served(make_app(engine)) as url:
        yield Door(url, engine)


@pytest.fixture
def door(server: Door) -> Door:
    """The same server for all, its engine as new."""
    vars(server.engine).update(vars(FakeEngineClient()))
    return server


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Names of the events, repeated ones once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id", "encrypted_content")}
        for item in output
    ]


# Answers.


def test_an_answer(door: Door) -> None:
    door.engine.cached_tokens = 8
    said = door.post(instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    assert said["object"] == "response" and said["status"] == "completed" and said["model"] == "fake"
    assert said["id"].startswith("resp_") and said["completed_at"] >= said["created_at"]
    (message,) = said["output"]
    assert message["id"].startswith("msg_") and message["role"] == "assistant"
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert (said["temperature"], said["instructions"], said["metadata"]) == (0.5, "Be kind.", {"a": "b"})
    n_prompt = len(door.engine.requests[0].prompt_ids)
    assert said["usage"] == {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt + 6,
        "timing": said["usage"]["timing"],
    }
    assert door.prompt().startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n")


def test_events_of_reasoning_text_and_a_call(door: Door) -> None:
    door.engine.answer = saying(f"Hm.\n</think>\n\nI look.\n\n{CALL}")
    events = door.stream(tools=[WEATHER], **THINK)
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = events[-1]["response"]
    assert without_ids(done["output"]) == [
        {"type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "status": "completed", "name": "weather", "arguments": '{"city": "Paris"}'},
    ]  # fmt: skip
    assert done["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    for index, item in enumerate(done["output"]):
        own = [event for event in events if event.get("output_index") == index and event["type"] != "response.created"]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if index == 2 else item["content"][0]["text"])
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] == item
    prefixes = [item["id"].partition("_")[0] for item in done["output"]]
    assert prefixes == ["rs", "msg", "fc"] and done["output"][2]["call_id"].startswith("call_")


@pytest.mark.parametrize("batch", [1, 2, 7, 1000])
def test_the_stream_and_the_whole_agree_however_tokens_come(door: Door, batch: int) -> None:
    door.engine.answer, door.engine.batch = saying(f"Hm.\n</think>\n\nI look.\n\n{CALL}\n{CALL}"), batch
    whole = door.post(tools=[WEATHER], **THINK)
    streamed = door.stream(tools=[WEATHER], **THINK)[-1]["response"]
    assert without_ids(whole["output"]) == without_ids(streamed["output"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"] + 2 * ["function_call"]
    assert len({item["id"] for item in whole["output"]}) == 4
    assert whole.keys() == streamed.keys()


def test_an_answer_that_was_cut_is_incomplete(door: Door) -> None:
    door.engine.answer = saying(CALL)
    n_tokens = byte_tokenizer().encode(CALL).index(ord("P")) + 2
    events = door.stream(tools=[WEATHER], max_output_tokens=n_tokens)
    assert events[-1]["type"] == "response.incomplete"
    said = events[-1]["response"]
    assert said["incomplete_details"] == {"reason": "max_output_tokens"} and said["completed_at"] is None
    assert without_ids(said["output"]) == [
        {"type": "function_call", "status": "incomplete", "name": "weather", "arguments": '{"city": "Pa'}
    ]
    stopped = door.post(tools=[WEATHER], stop="ris")
    assert (stopped["status"], stopped["output"][0]["status"]) == ("completed", "incomplete")
    # what there is of the call is what the next turn's prompt has
    door.post(previous_response_id=said["id"])
    assert '"city": "Pa"' in door.prompt() or ">\nPa\n<" in door.prompt()


def test_a_model_that_says_nothing_has_an_empty_message(door: Door) -> None:
    door.engine.answer = saying("Hm.\n</think>\n\n")
    assert [item["type"] for item in door.post(**THINK)["output"]] == ["reasoning", "message"]


def test_logprobs_are_those_of_the_message(door: Door) -> None:
    include = ["message.output_text.logprobs"]
    door.engine.answer = saying("Hm.\n</think>\n\nHey")
    events = door.stream(include=include, top_logprobs=2, **THINK)
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["H", "e", "y"]
    assert [top["token"] for top in part["logprobs"][0]["top_logprobs"]] == ["H", "A"]
    streamed = [
        entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]
    ]
    assert streamed == part["logprobs"]
    door.engine.answer = saying("a<b")  # what could have been a tag is held back
    part = door.post(include=include)["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "<", "b"]
    assert door.post(top_logprobs=2)["output"][0]["content"][0]["logprobs"] == []


def test_errors_before_and_after_the_first_event(door: Door) -> None:
    door.engine.die_after = 0
    reply = door.http.post("/v1/responses", json={"input": "hello", "stream": True})
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_unavailable"
    door.engine.state, door.engine.die_after = "ready", 3
    events = door.stream()
    assert [event["type"] for event in events[-3:]] == [
        "response.output_item.done", "error", "response.failed",
    ]  # fmt: skip
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert failed["output"][0]["status"] == "incomplete"
    assert events[-2]["code"] == "engine_unavailable"
    door.engine.state = "ready"
    assert door.http.get(f"/v1/responses/{failed['id']}").status_code == 404


def test_a_client_that_leaves_ends_its_response(door: Door) -> None:
    door.engine.answer, door.engine.token_s = saying("x" * 500), 0.01
    with door.http.stream("POST", "/v1/responses", json={"input": "hello", "stream": True}) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 5
    while not door.engine.aborts:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Input.


def test_items_become_messages(door: Door) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []}, {"type": "refusal", "refusal": " Or not."},
        ]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "developer", "content": "Now shout."},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    asked = msgspec.json.decode(
        msgspec.json.encode({"input": items, "instructions": "Be kind."}), type=wire.ResponsesRequest
    )
    parsed = [(f"input[{i}]", parse_item(item, "")) for i, item in enumerate(wire.given_items(asked))]
    chat = wire.chat_of(asked, parsed, NO_DEFAULTS)  # type: ignore[arg-type]
    assert settled(template_messages(chat.messages), False, False) == [
        {"role": "system", "content": "Be kind.\n\nBe short."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": "I look. Or not.", "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
                {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {
            "role": "tool", "tool_call_id": "call_2",
            "content": "rain\n\n<system-reminder>\nNow shout.\n</system-reminder>",
        },
        {"role": "user", "content": "And?"},
    ]  # fmt: skip


def test_reasoning_comes_back_in_any_of_its_forms(door: Door) -> None:
    door.engine.answer = saying("Hm.\n</think>\n\nHey")
    (item, _) = door.post(include=["reasoning.encrypted_content"], **THINK)["output"]

    def thought(**fields: Any) -> str | None:
        given = msgspec.json.encode({"type": "reasoning", "summary": []} | fields)
        messages = wire.Messages(None)
        messages.add(parse_item(given, "x"), "x")
        messages.add(MessageItem(role="assistant", content="Hey"), "x")
        (message,) = messages.whole()
        assert isinstance(message, AssistantMessage) and message.content == "Hey"
        return message.reasoning_content

    assert thought(content=item["content"]) == "Hm."
    assert thought(encrypted_content=item["encrypted_content"]) == "Hm."
    assert thought(summary=[{"type": "summary_text", "text": "Hm."}]) == "Hm."
    assert thought(encrypted_content="gAAAAforeign") is None
    with pytest.raises(ApiError) as caught:
        thought(encrypted_content=wire.THOUGHT + "???")
    assert caught.value.param == "x.encrypted_content"


def test_the_request_reaches_the_engine(door: Door) -> None:
    door.post(top_k=7, seed=3, min_p=0.1, max_output_tokens=5, top_p=0.5, cache_salt="s", stop=["x"], priority=2)
    sent = door.engine.requests[-1]
    params = sent.params
    assert (params.top_k, params.seed, params.min_p, params.max_tokens, params.top_p) == (7, 3, 0.1, 5, 0.5)
    assert (sent.cache_salt, sent.priority) == ("s", 2)
    door.post(tools=[WEATHER | {"strict": False, "description": "d"}], tool_choice="auto", text={})
    assert '"function": {"name": "weather", "description": "d", "parameters"' in door.prompt()
    door.post(tools=[WEATHER], tool_choice="none")
    assert "weather" not in door.prompt()
    door.post(reasoning={"effort": "high", "summary": "auto"})
    assert door.prompt().endswith("<think>\n")
    door.post(reasoning={"effort": "none"})
    assert door.prompt().endswith("</think>\n\n")


def test_functions_of_a_namespace(door: Door) -> None:
    """Agents send the functions of a tool server so, and know a call by its namespace."""
    named = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}
    door.engine.answer = saying(CALL.replace("weather", "mcp__sky__weather"))
    said = door.post(tools=[WEATHER, named])
    assert '{"name": "mcp__sky__weather", "description": "The sky.", "parameters"' in door.prompt()
    (call,) = said["output"]
    assert (call["namespace"], call["name"]) == ("mcp__sky", "weather")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    door.post(tools=[WEATHER, named], previous_response_id=said["id"], input=[result])
    assert "<function=mcp__sky__weather>" in door.prompt()
    wrong = named | {"tools": [WEATHER | {"strict": True, "parameters": {"type": "x"}}]}
    assert door.post(400, tools=[WEATHER, wrong])["param"] == "tools[1].tools[0].parameters.type"
    assert door.post(400, tools=[WEATHER, named, named])["param"] == "tools[2].tools[0].name"


HELLO = MessageItem(role="user", content="x")


def test_what_a_request_asks_for() -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": {}} for name in "fg"]
    named: Any = {"type": "function", "name": "f"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice, most in ((named, 1), (allowed, None)):
        asked = msgspec.convert({"input": "x", "tools": tools, "tool_choice": choice}, wire.ResponsesRequest)
        calls = wire.chat_of(asked, [("input[0]", HELLO)], NO_DEFAULTS).calls
        assert calls and [tool.function.name for tool in calls.tools] == ["f"]
        assert (calls.must, calls.most) == (True, most)
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    body = {"input": "x", "text": text, "reasoning": {"context": "all_turns"}}
    asked = msgspec.json.decode(msgspec.json.encode(body), type=wire.ResponsesRequest)
    chat = wire.chat_of(asked, [("input[0]", HELLO)], NO_DEFAULTS)
    assert chat.sampling.form == Form("text.format", "text.format.schema", "json", {"type": "object"})
    assert chat.settings == {"preserve_thinking": True}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": ["x"]}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]}, "input[0].content[0].y"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{]"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f g", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
        ({"input": [{"id": "msg_0"}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "custom", "name": "x y"}]}, "tools[1].name"),
        ({"tools": [WEATHER, {"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[1].format.syntax"),
        ({"tools": [{"type": "Not a kind"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "custom", "name": "weather"}]}, "tools[1].name"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}, {"role": "user", "content": "x"}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"strict": True, "parameters": {"type": "x"}}]}, "tools[0].parameters.type"),
        ({"tools": [{"type": "function", "name": "x y"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"defer_loading": 1}]}, "tools[0].defer_loading"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "most"}}, "text.verbosity"),
        ({"access_programs": {}}, "access_programs"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "none"}, "enable_thinking": True}, "reasoning.effort"),
        ({"include": ["everything"]}, "include[0]"),
        ({"truncation": "some"}, "truncation"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n_predict": 0}, "n_predict"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text.format.schema.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"service_tier": "cheap"}, "service_tier"),
        ({"temperature": -1}, "temperature"),
        ({"colour": 1}, "colour"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(door: Door, body: dict[str, Any], param: str) -> None:
    error = door.post(400, **body)
    assert error["param"] == param and error["message"].startswith((f"{param}: ", "Previous response"))


def test_false_asks_for_nothing(door: Door) -> None:
    door.post(response_format=False, return_token_ids=False, background=False)


def test_hosted_tools_are_left_out_where_the_server_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngineClient()
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation", "output_format": "png"}]
    with served(make_app(engine, skip_hosted_tools=True)) as url, caplog.at_level("INFO", "deltic.server"):
        door = Door(url, engine)
        plain = door.post(tools=[WEATHER])
        prompt = door.prompt()
        for stream in (False, True):
            tools = [hosted[0], WEATHER, hosted[1]]
            said = door.stream(tools=tools)[-1]["response"] if stream else door.post(tools=tools)
            assert said["tools"] == plain["tools"] and door.prompt() == prompt, "as if they had not been sent"
        assert door.post(tools=hosted)["tools"] == []
        for choice in ("required", {"type": "web_search"}):
            assert door.post(400, tools=hosted, tool_choice=choice)["param"].startswith("tool_choice")
        wrong = door.post(400, tools=[hosted[0], WEATHER | {"strict": True, "parameters": {"type": "x"}}])
        assert wrong["param"] == "tools[1].parameters.type"
    assert 'tools_left_out="web_search,image_generation"' in caplog.text


PATCH: dict[str, Any] = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" LF "+" /[a-z]+/ LF\n%import common.LF'},
}  # fmt: skip
PATCHED = (
    "<tool_call>\n<function=apply_patch>\n<parameter=input>\n*** Begin\n+a\n\n</parameter>\n</function>\n</tool_call>"
)


def test_custom_tools(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """To the model a function of one text, to the client a custom tool."""
    door.engine.answer = saying(PATCHED)
    said = door.post(tools=[PATCH, WEATHER])
    (item,) = said["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin\n+a\n",
        "completed",
    )
    assert item["id"].startswith("ctc_") and "arguments" not in item and said["tools"] == [PATCH, WEATHER]
    assert '"name": "apply_patch"' in door.prompt() and "*** Begin" in door.prompt()
    grammar = door.engine.requests[-1].params.constraint
    assert grammar and "%lark" in grammar.grammar, "its grammar is enforced"
    events = door.stream(tools=[PATCH])
    name = "response.custom_tool_call_input"
    assert [e["delta"] for e in events if e["type"] == f"{name}.delta"] == [item["input"]]
    assert [e["input"] for e in events if e["type"] == f"{name}.done"] == [item["input"]]
    stored = events[-1]["response"]["id"]
    again = named_events(door.http.get(f"/v1/responses/{stored}?stream=true"))
    assert [e["type"] for e in again] == [e["type"] for e in events] and again[-1] == events[-1]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    door.post(tools=[PATCH], previous_response_id=stored, input=[result])
    assert "<parameter=input>\n*** Begin\n+a\n\n</parameter>" in door.prompt() and "done" in door.prompt()
    door.post(tools=[PATCH, WEATHER], tool_choice={"type": "custom", "name": "apply_patch"})
    inside = {"type": "namespace", "name": "mcp__a", "tools": [PATCH]}
    door.engine.answer = saying(PATCHED.replace("=apply", "=mcp__a__apply"))
    (item,) = door.post(tools=[inside])["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "mcp__a", "apply_patch")


CHAT_PATCH = {
    "type": "custom",
    "custom": {
        "name": PATCH["name"], "description": PATCH["description"],
        "format": {"type": "grammar", "grammar": {name: PATCH["format"][name] for name in ("syntax", "definition")}},
    },
}  # fmt: skip
CHAT_WEATHER = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "parameters")}}


def chat(door: Door, status: int = 200, **body: Any) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "hello"}], "tools": [CHAT_PATCH, CHAT_WEATHER]} | body
    reply = door.http.post("/v1/chat/completions", json=asked)
    assert reply.status_code == status, reply.text
    return reply


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_custom_tools_of_a_chat(door: Door, batch: int) -> None:
    """To the model the functions of a response, to the client calls of a text, whole and streamed."""
    door.engine.answer, door.engine.batch = saying(f"x{PATCHED}\n{CALL}\n{PATCHED}"), batch
    door.post(tools=[PATCH, WEATHER])
    prompt, params = door.prompt(), door.engine.requests[-1].params
    choice = ChatCompletion.model_validate(chat(door).json(), strict=True).choices[0]
    assert door.prompt() == prompt and door.engine.requests[-1].params.constraint == params.constraint
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    patch, weather, again = choice.message.tool_calls
    assert isinstance(patch, ChatCompletionMessageCustomToolCall) and weather.type == "function"
    assert (patch.custom.name, patch.custom.input) == ("apply_patch", "*** Begin\n+a\n") and patch.id != again.id
    blocks = chat(door, stream=True, n=2).text.split("\n\n")[:-2]
    told: list[list[dict[str, Any]]] = [[], []]
    for chunk in (msgspec.json.decode(block.removeprefix("data: ")) for block in blocks):
        for part in chunk["choices"]:
            told[part["index"]] += part["delta"].get("tool_calls", [])
    for calls in told:
        customs = [call for call in calls if "custom" in call]
        begun, said_whole = {"name": "apply_patch", "input": ""}, {"input": patch.custom.input}
        assert [call["custom"] for call in customs] == [begun, said_whole] * 2
        assert [call["index"] for call in customs] == [0, 0, 2, 2]
        assert [call.get("type") for call in customs] == ["custom", None] * 2
        assert "".join(call["function"]["arguments"] for call in calls if "function" in call) == '{"city": "Paris"}'
    said = choice.message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in said["tool_calls"]]
    chat(door, messages=[{"role": "user", "content": "hello"}, said, *results])
    assert door.prompt().count("<parameter=input>\n*** Begin\n+a\n\n</parameter>") == 2


def test_a_custom_call_of_a_chat_that_was_cut(door: Door) -> None:
    door.engine.answer = saying(PATCHED)
    for stream in (False, True):
        asked = {"max_tokens": PATCHED.index("+a") + 1, "stream": stream}
        text = chat(door, **asked).text
        assert '"input":"*** Begin\\n' in text and '"length"' in text and "arguments" not in text


def test_tool_choice_of_custom_tools_in_a_chat(door: Door) -> None:
    named = {"type": "custom", "custom": {"name": "apply_patch"}}
    door.engine.answer = saying(PATCHED)
    for own, of_responses in (
        (named, {"type": "custom", "name": "apply_patch"}),
        ("required", "required"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
        ),
    ):
        chat(door, tool_choice=own)
        door.post(tools=[PATCH, WEATHER], tool_choice=of_responses)
        forms = [request.params.constraint for request in door.engine.requests[-2:]]
        assert forms[0] == forms[1] and forms[0] and ("weather" in forms[0].grammar) == (own == "required")
    for body, param in (
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "x y"}}]}, "tools[0].custom.name"),
        ({"tools": [CHAT_WEATHER, {"type": "custom", "custom": {"name": "weather"}}]}, "tools[1].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]}, "tools[0].custom.format.grammar"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.custom"),
        ({"tool_choice": {"type": "custom", "function": {"name": "apply_patch"}}}, "tool_choice.function"),
    ):  # fmt: skip
        assert chat(door, 400, **body).json()["error"]["param"] == param
    asked = msgspec.json.decode(chat(door).request.content)
    assert door.http.post("/tokenize", json=asked).json()["tokens"] == door.engine.requests[-1].prompt_ids


@pytest.mark.parametrize("definition", ["start: /(?s:.+)/", "start: /[^x]+/", "no grammar", "start: missing"])
def test_a_grammar_that_cannot_be_enforced_is_shown(door: Door, definition: str) -> None:
    tool = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": definition}}
    door.engine.answer = saying(PATCHED)
    assert door.post(tools=[tool])["output"][0]["type"] == "custom_tool_call"
    assert definition in door.prompt()
    constraint = door.engine.requests[-1].params.constraint
    assert constraint is None or "%lark" not in constraint.grammar


def test_tools_of_an_item(door: Door) -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [PATCH, WEATHER, {"type": "tool_search"}]}
    door.engine.answer = saying(CALL)
    said = door.post(input=[item, {"role": "user", "content": "x"}], tools=[WEATHER])
    assert said["tools"] == [WEATHER, PATCH] and said["output"][0]["name"] == "weather"
    assert door.prompt().count('"name": "weather"') == 1 and "apply_patch" in door.prompt()
    door.post(input="and?", previous_response_id=said["id"])
    assert "apply_patch" in door.prompt(), "as the items before it"


def test_kinds_of_tools_that_no_model_here_knows(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    old = [{"type": f"local_shell_call{end}", "call_id": "c", "action": {"command": ["ls"]}} for end in ("", "_output")]
    odd = [{"type": "local_shell"}, {"type": "tool_search", "execution": "client"}]
    with caplog.at_level("INFO", "deltic.server"):
        said = door.post(input=[*old, {"role": "user", "content": "x"}], tools=[*odd, WEATHER])
        assert said["tools"] == [WEATHER] and "local_shell" not in door.prompt()
        door.post()  # a request has its line in the log before the connection's next is read
    assert 'tools_left_out="local_shell,tool_search"' in caplog.text


def test_refusals_are_in_this_doors_words(door: Door) -> None:
    assert "Leave it out" in door.post(400, background=True)["message"]
    two = door.post(400, text={"format": {"type": "json_object"}}, guided_regex="a")
    assert (two["param"], "excludes text.format." in two["message"]) == ("guided_regex", True)
    assert not door.engine.requests


def test_what_asks_for_nothing_is_accepted(door: Door) -> None:
    door.post(
        n=1, background=False, truncation="disabled", service_tier="auto", user="u", prompt_cache_key="k",
        prompt_cache_retention="24h", client_metadata={"a": "b"}, safety_identifier="s", conversation=None, include=[],
        text={"format": {"type": "text"}, "verbosity": "medium"}, max_tool_calls=None, tools=[], store=True,
        reasoning={"effort": None, "summary": "detailed", "context": "auto"}, parallel_tool_calls=True,
    )  # fmt: skip
    assert door.post(404, model="gpt")["param"] == "model"
    long = door.post(400, input="x" * 2000)
    assert (long["param"], long["code"]) == ("input", "context_length_exceeded")


def test_input_tokens(door: Door) -> None:
    counted = door.http.post("/v1/responses/input_tokens", json={"input": "hello", "tools": [WEATHER]}).json()
    used = door.post(tools=[WEATHER])["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}


# What is kept.


def test_a_response_is_continued(door: Door) -> None:
    door.engine.answer = saying(f"I look.\n\n{CALL}")
    first = door.post(tools=[WEATHER], instructions="Be kind.", input=[{"role": "user", "content": "Weather?"}])
    told = door.engine.requests[-1].prompt_ids + byte_tokenizer().encode(f"I look.\n\n{CALL}")
    door.engine.answer = saying("Sunny.")
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "sunny"}
    second = door.stream(tools=[WEATHER], instructions="Be brief.", previous_response_id=first["id"], input=[output])[
        -1
    ]["response"]
    assert second["previous_response_id"] == first["id"]
    prompt = door.prompt()
    assert "Be brief." in prompt and "Be kind." not in prompt  # instructions are each request's own
    assert prompt.index("Weather?") < prompt.index("I look.") < prompt.index("sunny")
    third = door.post(previous_response_id=second["id"], input="Thanks", store=False)
    assert door.prompt().count("<|im_start|>") == 6 and "Sunny." in door.prompt()
    assert not third["store"] and door.http.get(f"/v1/responses/{third['id']}").status_code == 404
    # Sending it all gives the same prompt.
    shown = door.http.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}).json()
    continued = door.prompt()
    door.post(input=[*shown["data"], *second["output"], {"role": "user", "content": "Thanks"}])
    assert door.prompt() == continued and told


def test_responses_are_shown_and_deleted(door: Door) -> None:
    said = door.post(input=[{"role": "user", "content": str(i)} for i in range(5)])
    path = f"/v1/responses/{said['id']}"
    assert door.http.get(path).json() == said
    listed = door.http.get(f"{path}/input_items", params={"limit": 2}).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["4", "3"] and listed["has_more"]
    assert listed["data"][0]["id"] == listed["first_id"] and listed["data"][0]["type"] == "message"
    after = {"after": listed["last_id"], "order": "desc"}
    rest = door.http.get(f"{path}/input_items", params=after).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"] and not rest["has_more"]
    for wrong in ({"limit": "0"}, {"limit": "9" * 5000}, {"limit": "x"}, {"order": "up"}, {"after": "msg_0"}):
        reply = door.http.get(f"{path}/input_items", params=wrong)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == next(iter(wrong))
    cancelled = door.http.post(f"{path}/cancel", headers={"content-type": "application/json"})
    assert cancelled.status_code == 400 and "background" in cancelled.json()["error"]["message"]
    reference = [{"type": "item_reference", "id": said["output"][0]["id"]}, {"role": "user", "content": "?"}]
    door.post(input=reference, store=False)
    assert "<|im_start|>assistant\nHello<|im_end|>" in door.prompt()
    assert door.http.delete(path).json() == {"id": said["id"], "object": "response", "deleted": True}
    gone = door.http.get(path)
    assert gone.status_code == 404 and gone.json()["error"]["type"] == "invalid_request_error"
    assert door.http.delete(path).status_code == 404
    assert door.post(400, input=reference)["code"] == "item_not_found"
    error = door.post(400, previous_response_id=said["id"])
    assert error["code"] == "previous_response_not_found"


def test_a_response_that_is_held_is_streamed_again(door: Door) -> None:
    door.engine.answer = saying('Hm.\n</think>\n\nHey<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    include = ["message.output_text.logprobs"]
    live = door.stream(tools=[WEATHER], include=include, top_logprobs=1, **THINK)
    merged = [live[0]]
    for event in live[1:]:
        if event["type"].endswith(".delta") and event["type"] == merged[-1]["type"]:
            joined = {name: merged[-1][name] + event[name] for name in ("delta", "logprobs") if name in event}
            merged[-1] = event | joined
        else:
            merged.append(event)
    response_id = live[-1]["response"]["id"]
    path = f"/v1/responses/{response_id}"
    again = named_events(door.http.get(path, params={"stream": "true"}))
    assert again == merged and {"reasoning", "message", "function_call"} == {
        item["type"] for item in again[-1]["response"]["output"]
    }
    for n in range(len(live)):  # wherever a stream broke, what is missing comes, and once only
        rest = named_events(door.http.get(path, params={"stream": "true", "starting_after": n}))
        assert [event["sequence_number"] for event in rest] == [
            event["sequence_number"] for event in merged if event["sequence_number"] > n
        ]
        for field in ("delta", "logprobs"):
            for kind in ("output_text", "reasoning_text", "function_call_arguments"):
                whole, got = (
                    [
                        item
                        for event in events
                        if event["type"] == f"response.{kind}.delta"
                        for item in event.get(field, ())
                    ]
                    for events in (live, [*live[: n + 1], *rest])
                )
                assert got == whole
    for name, value in (("starting_after", "x"), ("starting_after", "-1"), ("stream", "maybe")):
        wrong = door.http.get(path, params={"stream": "true"} | {name: value})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name
    client = openai.OpenAI(base_url=f"{door.http.base_url}/v1", api_key="k", max_retries=0)
    kinds = [event.type for event in client.responses.retrieve(response_id, stream=True)]
    assert kinds == [event["type"] for event in again]


def test_a_server_that_keeps_nothing() -> None:
    engine = FakeEngineClient()
    with served(make_app(engine, max_stored_responses=0)) as url:
        door = Door(url, engine)
        said = door.post()
        assert not said["store"] and door.http.get(f"/v1/responses/{said['id']}").status_code == 404
        assert door.post(400, store=True)["param"] == "store"


def test_keys_do_not_see_each_other() -> None:
    engine = FakeEngineClient()
    with served(make_app(engine, api_key=("a=one", "b=two"))) as url:
        door = Door(url, engine)
        door.http.headers["authorization"] = "Bearer one"
        said = door.post()
        path = f"/v1/responses/{said['id']}"
        assert door.http.get(path).status_code == 200
        door.http.headers["authorization"] = "Bearer two"
        assert door.http.get(path).status_code == 404 and door.http.delete(path).status_code == 404
        door.post(400, previous_response_id=said["id"])
        door.post(400, input=[{"id": said["output"][0]["id"]}])


@pytest.mark.parametrize(
    "item", [{"type": "reasoning"}, {"type": "web_search_call"}, {"role": "assistant", "content": "a"}]
)
def test_the_id_of_an_item_is_a_text(door: Door, item: dict[str, Any]) -> None:
    """It is kept under it; one that is none was an error after the answer, and its bytes counted for ever."""
    question = {"role": "user", "content": "x"}
    door.post(input=[item | {"id": "a"}, question])
    assert door.post(400, input=[item | {"id": [1]}, question])["param"] == "input[0].id"


def stored(name: str, *turns: ResponseTurn, size: int = 100) -> StoredResponse:
    return StoredResponse("", b"x" * size, turns, ResponseTurn([(f"out_{name}", b"y" * size)]))


def test_the_store_is_bounded_and_counts_right() -> None:
    store = ResponseStore(3)
    turns: tuple[ResponseTurn, ...] = ()
    for name in "abcde":
        entry = stored(name, *turns, ResponseTurn([(f"in_{name}", b"z" * 50)]))
        store.add(name, entry)
        turns = entry.history
    assert len(store) == 3 and store.get("b", "") is None
    # What later ones continue stays, and can be referred to.
    assert store.item("in_a", "") == b"z" * 50 and store.item("out_a", "") is not None
    found = store.get("c", "")
    assert found is not None and len(found.history) == 6
    store.add("f", stored("f"))  # "d" has not been used for longest
    assert store.get("d", "") is None and store.get("c", "") is not None
    for name in ("c", "e", "f"):
        store.remove(name, "")
    assert (len(store), store.n_bytes, store.item("in_a", "")) == (0, 0, None)
    small = ResponseStore(10, max_bytes=2500)
    for name in "abcd":
        small.add(name, stored(name))
    assert small.n_bytes <= 2500 and small.get("a", "") is None and small.get("d", "") is not None
    small.add("huge", stored("huge", size=5000))
    assert len(small) == 0 == small.n_bytes


def test_another_key_s_many_responses_throw_none_away() -> None:
    def of(owner: str, name: str, size: int = 100) -> StoredResponse:
        return StoredResponse(owner, b"x" * size, (), ResponseTurn([(f"out_{name}", b"y")]))

    store = ResponseStore(20, max_bytes=100_000)
    assert store.item("a", "nobody") is None and not store._own, "a thread looks while the event loop goes through them"
    for i in range(10):
        store.add(f"b{i}", of("b", f"b{i}"))
    for i in range(1010):
        store.add(f"a{i}", of("a", f"a{i}", size=100 if i < 500 else 20_000))
    assert all(store.get(f"b{i}", "b") and store.item(f"out_b{i}", "b") for i in range(10))
    assert len(store) <= 20 and store.n_bytes <= 100_000 and store.get("a1009", "a") and store.get("a0", "a") is None
    assert store.get("a1009", "b") is None and store.item("out_a1009", "b") is None
    for i in range(10, 30):  # and b does not push a out for more than its half
        store.add(f"b{i}", of("b", f"b{i}"))
    assert store.get("a1009", "a") and store.get("b29", "b")


def test_many_items_take_no_time() -> None:
    n = 60_000
    store = ResponseStore(3)
    store.add("a", stored("a", ResponseTurn([(str(i), b"{}") for i in range(n)])))
    messages = wire.Messages(None)
    before_s = time.thread_time()
    for i in range(n):
        assert store.item(str(i), "") == b"{}"
        messages.add(CallItem(call_id="1", name="weather", arguments="{}"), "")
    assert time.thread_time() - before_s < 3
    (message,) = messages.whole()
    assert isinstance(message, AssistantMessage) and len(message.tool_calls or ()) == n


def test_references_do_not_make_a_body_larger_than_allowed() -> None:
    engine = FakeEngineClient(max_model_len=100_000, n_pages=2000)
    with served(make_app(engine, max_body_mb=0.02)) as url:
        door = Door(url, engine)
        said = door.post(input=[{"role": "user", "id": "msg_a", "content": "x" * 9000}])
        door.post(input=[{"id": "msg_a"}] * 2)
        refused = door.post(413, input=[{"id": "msg_a"}] * 3)
        assert refused["code"] == "body_too_large"
        door.post(413, input=[{"id": "msg_a"}] * 2, previous_response_id=said["id"])


def test_a_long_input_is_made_ready_to_be_kept_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(items: list[bytes]) -> ResponseTurn:
        threads.append(threading.current_thread().name)
        return turn_of(items)

    monkeypatch.setattr(responses.responses_items, "turn_of", noted)
    engine = FakeEngineClient(max_model_len=100_000, n_pages=2000)
    with served(make_app(engine)) as url:
        door = Door(url, engine)
        door.post(input=[{"role": "user", "id": "msg_a", "content": "x" * 10_000}])
        door.post(input=[{"id": "msg_a"}])
    assert len(threads) == 2 and all(name.startswith("prepare") for name in threads)


# Other doors.


@pytest.mark.parametrize(
    "path",
    ["audio/transcriptions", "images/generations", "moderations", "uploads", "assistants",
     "threads/x/runs", "fine_tuning/jobs", "responses/compact"],
)  # fmt: skip
def test_doors_that_are_not_there_say_so(door: Door, path: str) -> None:
    reply = door.http.post(f"/v1/{path}", json={})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert "the models here write or speak. This server" in message
    assert path != "moderations" or "/v1/decisions" in message


def test_what_the_guide_says_is_refused_is(server: Door) -> None:
    whole = " ".join((Path(__file__).parents[2] / "docs/agents.md").read_text().split())
    guide = whole.partition("## The OpenAI Responses API")[2]
    told = guide.partition("Refused by name:")[2].partition(" files,")[2].partition(" Codex ")[0]
    fields = re.findall(r"`([^`]+)`", told)
    assert len(fields) > 3
    for field in fields:
        assert server.post(400, **{field: True})["param"] == field
