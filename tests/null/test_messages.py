"""The history of a chat: what a model or a library wrote is read as far as it is known, what a person wrote to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltic.server.api import anthropic_protocol, decode, protocol
from deltic.server.api import responses_protocol as responses
from deltic.server.api.responses_items import parse_item
from deltic.server.chat.messages import template_messages
from deltic.server.chat.request import NO_DEFAULTS
from deltic.server.errors import ApiError

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SHOWN_CALL = CALL | {"function": {"name": "f", "arguments": {"x": 1}}}


def told(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What a chat's template gets of these, behind a greeting."""
    body = json.dumps({"messages": [HELLO, *messages]}).encode()
    return template_messages(decode.parse(body, protocol.ChatRequest).messages)[1:]


def refusal(make: Any, *given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(*given)
    assert caught.value.status == 400
    return caught.value


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


ADDED = {
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}],
    "reasoning_details": [{"type": "reasoning.text", "text": "t"}],
    "annotations": [{"type": "url_citation"}],
    "index": 0,
    "x": 1,
}


def test_what_a_library_added_to_an_answer_is_ignored() -> None:
    call = CALL | {"index": 0, "extra_content": {"google": {}}, "async": False}
    call["function"] = CALL["function"] | {"strict": True}
    given = said("Hello.", tool_calls=[call], reasoning={"effort": "low"}, **ADDED)
    assert told(given) == [said("Hello.", tool_calls=[SHOWN_CALL])]
    empty = CALL | {"function": {"name": "f", "arguments": None}}
    shown = SHOWN_CALL | {"function": {"name": "f", "arguments": {}}}
    assert told(said(None, tool_calls=[empty])) == [said("", tool_calls=[shown])]
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    assert told(result | {"is_error": False, "metadata": {}}) == [result]
    parts = [{"type": "text", "text": "r", "annotations": {}}, {"type": "text", "text": "s"}]
    assert told(result | {"content": parts}) == [result | {"content": "rs"}]
    assert told(result | {"content": None}) == [result | {"content": ""}]


def test_parts_of_an_answer_that_are_no_text_are_ignored() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}
    parts = [thought, {"type": "output_text", "text": "a", "annotations": []}, {"type": "image_url"}]
    assert told(said(parts)) == [said("a")]


@pytest.mark.parametrize(
    "given",
    [
        said(None, refusal="I cannot."),
        said([{"type": "refusal", "refusal": "I cannot."}]),
        said([{"type": "refusal", "refusal": "I cannot."}], refusal="I cannot."),
    ],
)
def test_a_refusal_is_what_the_assistant_said(given: dict[str, Any]) -> None:
    assert told(given) == [said("I cannot.")]


@pytest.mark.parametrize("kind", [[], {}, None, 7])
def test_a_part_whose_type_is_no_word_is_ignored(kind: Any) -> None:
    parts = [{"type": kind, "text": "a"}, {"type": "text", "text": "b"}]
    assert told(said(parts)) == [said("b")]


def test_an_answer_may_be_empty() -> None:
    assert told({"role": "assistant"}, said(None), said([])) == [said("")] * 3
    assert told(said(None, audio={"id": "a"}, refusal="no")) == [said("no")]
    assert refusal(told, said(None, audio={"id": "a"})).param == "messages[1].audio"


def test_older_and_custom_forms_of_a_call() -> None:
    older = said(None, function_call=CALL["function"])
    result = {"role": "function", "name": "f", "content": "r"}
    assert told(older, result) == [
        said("", tool_calls=[SHOWN_CALL | {"id": None}]),
        {"role": "tool", "name": "f", "content": "r"},
    ]
    custom = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "ls"}}
    shown = SHOWN_CALL | {"function": {"name": "f", "arguments": {"input": "ls"}}}
    assert told(said(None, tool_calls=[custom])) == [said("", tool_calls=[shown])]
    error = refusal(told, said(None, tool_calls=[{"id": "1", "type": "function"}]))
    assert error.param == "messages[1].tool_calls[0].function"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (HELLO | {"x": 1}, "messages[1].x"),
        ({"role": "system", "content": "", "x": 1}, "messages[1].x"),
        ({"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}, "messages[1].content[0].x"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": ""}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "tool", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "tool", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
    ],
)
def test_what_a_person_wrote_is_read_to_the_letter(message: dict[str, Any], param: str) -> None:
    assert refusal(told, message).param == param


def test_a_mark_of_the_cache_asks_for_nothing() -> None:
    assert told(HELLO | {"cache_control": {"type": "ephemeral"}}) == [HELLO]


def items(*given: dict[str, Any]) -> list[dict[str, Any]]:
    """What a template gets of items of a response's input."""
    asked = responses.ResponsesRequest()
    parsed: Any = [
        (f"input[{i}]", parse_item(json.dumps(item).encode(), f"input[{i}]")) for i, item in enumerate(given)
    ]
    return template_messages(responses.chat_of(asked, parsed, NO_DEFAULTS).messages)


def test_items_of_a_model_may_have_further_fields() -> None:
    text = {"type": "output_text", "text": "a", "x": 1}
    message = said([text, {"type": "output_image"}], type="message", status="new", x=1)
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "new", "x": 1}
    result = {"type": "function_call_output", "call_id": "1", "output": "r", "x": 1}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t", "x": 1}], "x": 1}
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert items(HELLO, thought, search, message, call, result) == [
        HELLO,
        said("a", reasoning_content="t", tool_calls=calls),
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    assert refusal(items, HELLO | {"x": 1}).param == "input[0].x"
    assert refusal(items, {"type": "compaction", "encrypted_content": "x"}).param == "input[0].type"


def test_custom_calls_of_a_response() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "ls"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "r"}
    shown = SHOWN_CALL | {"function": {"name": "f", "arguments": {"input": "ls"}}}
    assert items(HELLO, call, result)[1:] == [
        said("", tool_calls=[shown]),
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]


def blocks(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What a template gets of messages of Anthropic's."""
    body = json.dumps({"model": "m", "messages": [HELLO, *messages], "max_tokens": 1}).encode()
    asked = decode.parse(body, anthropic_protocol.MessagesRequest)
    return template_messages(anthropic_protocol.chat_of(asked, set(), False, NO_DEFAULTS).messages)[1:]


def test_blocks_of_a_model_may_have_further_fields_and_types() -> None:
    content = [
        {"type": "thinking", "thinking": "t", "signature": "s", "x": 1},
        {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "2", "content": []},
        {"type": "text", "text": "a", "x": 1},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}, "x": 1},
    ]
    message = said(content, id="msg_1", type="message", stop_reason="tool_use", usage={})
    text = {"type": "text", "text": "r", "x": 1}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text], "x": 1}]}
    assert blocks(message, result) == [
        said("a", reasoning_content="t", tool_calls=[SHOWN_CALL]),
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    assert refusal(blocks, HELLO | {"x": 1}).param == "messages[1].x"
    person = {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}
    assert refusal(blocks, person).param == "messages[1].content[0].x"
