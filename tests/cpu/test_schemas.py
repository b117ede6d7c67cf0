"""Constrained answers of the built-in model, over HTTP: whatever it would have said, what it says is valid.

TEST_SCHEMAS=1000 is the soak: that many random schemas instead of 24.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from deltic.commands.endpoint import LocalServer
from tests.null.test_forced_text import object_of
from tests.null.test_grammar import json_format, random_object, tool, writable
from tests.served import MAX_NUM_SEQS, Served

N_SCHEMAS = int(os.environ.get("TEST_SCHEMAS", "24"))
ASK: Any = [{"role": "user", "content": "Tell me about a cat. Answer as JSON."}]
CITY: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Cat(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=30)
    colours: list[Literal["black", "white", "red"]] = pydantic.Field(max_length=3)
    owner: str | None = pydantic.Field(max_length=8)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    running = Served("--n-pages", "200")
    yield running
    running.close()


def check(value: Any, schema: Any) -> None:
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def answers(server: LocalServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The server's answers to chats, some at once."""

    async def go() -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {server.api_key}"}
        gate = asyncio.Semaphore(MAX_NUM_SEQS)
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as http:

            async def one(body: dict[str, Any]) -> dict[str, Any]:
                async with gate:
                    response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, (response.text, body)
                answer: dict[str, Any] = response.json()
                return answer

            return list(await asyncio.gather(*map(one, bodies)))

    return asyncio.run(go())


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_answer_is_valid(server: LocalServer, thinking: bool, temperature: float) -> None:
    rng = random.Random(7)
    schemas = [random_object(rng, bounded=True) for _ in range(N_SCHEMAS // 2)]
    bodies = [
        {
            "messages": ASK, "enable_thinking": thinking, "temperature": temperature, "seed": i, "max_tokens": 2000,
            "response_format": {"type": "json_schema", "json_schema": {"name": "cat", "schema": schema, "strict": True}},
        } | ({"thinking_budget": 24} if thinking else {})
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    for answer, schema in zip(answers(server, bodies), schemas, strict=True):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", (choice, schema)
        check(json.loads(choice["message"]["content"]), schema)
        if thinking:
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 24 + 3


@pytest.mark.parametrize("thinking", [False, True])
def test_every_forced_call_is_valid(server: LocalServer, thinking: bool) -> None:
    rng = random.Random(8)
    found = (random_object(rng, bounded=True) for _ in range(10 * N_SCHEMAS))
    schemas = [schema for schema in found if writable(schema)][: N_SCHEMAS // 2]
    bodies = [
        {
            "messages": ASK, "enable_thinking": thinking, "temperature": 1.2, "seed": i, "max_tokens": 2000,
            "thinking_budget": 24, "tool_choice": "required", "parallel_tool_calls": False,
            "tools": [CITY, {"type": "function", "function": {"name": "cat", "parameters": schema, "strict": True}}],
        }
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    for answer, schema in zip(answers(server, bodies), schemas, strict=True):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls", (choice, schema)
        (call,) = choice["message"]["tool_calls"]
        expected = {"cat": schema, "weather": CITY["function"]["parameters"]}[call["function"]["name"]]
        check(json.loads(call["function"]["arguments"]), expected)


FORCED = [
    "<|im_end|>", "a<|im_end|>b<|endoftext|>", "<|im_start|>x", "<think>", "</think>\n\nx", "<tool_call>", "<tool_call><function=f></function></tool_call>",
    "\u212b\uf900", "\u1112\u1161\u11ab e\u0301", "\n\n x",
]  # fmt: skip


@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_forced_is_said_as_it_was_written(server: LocalServer, thinking: bool) -> None:
    """Though the tokenizer would take it for a special token, or normalise it, and the parser for a tag."""
    bodies = []
    for i, text in enumerate(FORCED):
        whole = {
            "messages": ASK, "enable_thinking": thinking, "temperature": 1.2, "seed": i, "n": 2, "thinking_budget": 8,
            "skip_special_tokens": i % 2 == 0, "logprobs": i % 3 == 0, "max_tokens": 400,
        }  # fmt: skip
        called = {
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "tools": [tool("f", object_of("k", {"enum": [text]}), strict=True)],
        }
        bodies += [
            whole | {"guided_choice": [text]},
            whole | {"response_format": json_format(object_of(text, {"const": text}))},
            whole | called,
        ]
    for i, answer in enumerate(answers(server, bodies)):
        for choice in answer["choices"]:
            message, text = choice["message"], FORCED[i // 3]
            assert bool(message.get("reasoning_content")) <= thinking
            if i % 3 == 0:
                assert message["content"] == text and choice["finish_reason"] == "stop"
            elif i % 3 == 1:
                assert json.loads(message["content"]) == {text: text}
            else:
                (call,) = message["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"k": text} and not message["content"]


def test_what_is_forced_at_the_other_doors(served: Served) -> None:
    schema = object_of("k", {"enum": ["</think><tool_call>e\u0301<|im_end|>"]})
    told = {"model": served.model, "input": ASK, "max_output_tokens": 400}
    asked = told | {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    response = served.http.post("/v1/responses", json=asked).raise_for_status().json()
    check(json.loads(response["output"][-1]["content"][0]["text"]), schema)
    anthropic = {"model": served.model, "messages": ASK, "max_tokens": 400}
    formatted = anthropic | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = served.http.post("/v1/messages", json=formatted).raise_for_status().json()
    check(json.loads(message["content"][-1]["text"]), schema)
    tools = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
    message = served.http.post("/v1/messages", json=anthropic | tools).raise_for_status().json()
    check(message["content"][-1]["input"], schema)
    text = "<|im_end|></think>\u2126"
    for stream in (False, True):
        body = {"prompt": "a", "guided_choice": [text], "stream": stream, "max_tokens": 60}
        answer = served.http.post("/v1/completions", json=body).raise_for_status()
        if stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text
        else:
            assert answer.json()["choices"][0]["text"] == text


def test_words_that_may_and_may_not_come(served: Served) -> None:
    def say(**fields: Any) -> list[dict[str, Any]]:
        body = {"messages": ASK, "enable_thinking": False, "max_tokens": 40} | fields
        choices: list[dict[str, Any]] = served.http.post("/v1/chat/completions", json=body).json()["choices"]
        return choices

    def ids_of(text: str) -> list[int]:
        tokens: list[int] = served.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        return tokens

    two = [ids_of("a")[0], ids_of("b")[0]]
    for choice in say(allowed_token_ids=two, n=3, temperature=2.0, seed=1, logprobs=True):
        assert set(choice["message"]["content"]) == {"a", "b"} and choice["finish_reason"] == "length"
    (plain,) = say(temperature=0, logprobs=True, top_logprobs=2)
    words = plain["message"]["content"].split()
    banned = {"temperature": 0, "bad_words": [words[0], words[1]], "logprobs": True, "top_logprobs": 2}
    (other,) = say(**banned)
    assert not {words[0], words[1]} & set(other["message"]["content"].split())
    assert say(**banned)[0]["message"] == other["message"]
    first, second = (choice["logprobs"]["content"][0]["top_logprobs"] for choice in (plain, other))
    assert first == second  # they are the model's own
    for choice in say(guided_choice=["a", "b"], bad_words=["a"], n=4, temperature=2.0):
        assert choice["message"]["content"] == "b"
    answer = served.http.post(
        "/v1/completions", json={"prompt": "a", "guided_choice": ["yes"], "allowed_token_ids": two, "max_tokens": 5}
    )
    assert "leave no token" in answer.json()["error"]["message"]
    for thinking in (False, True):
        (told,) = say(enable_thinking=thinking, thinking_budget=4, allowed_token_ids=two, max_tokens=20)
        assert set(told["message"]["content"]) == {"a", "b"} or set(told["message"]["content"]) < {"a", "b"}
        assert set(told["message"].get("reasoning_content") or "a") <= {"a", "b"}


def test_parse(client: openai.OpenAI, model: str) -> None:
    for extra in ({}, {"enable_thinking": True, "thinking_budget": 10}):
        answer = client.chat.completions.parse(
            model=model, messages=ASK, response_format=Cat, temperature=1.0, seed=1, n=4, extra_body=extra
        )
        assert len(answer.choices) == 4
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Cat)


def test_named_required_and_strict(client: openai.OpenAI, model: str) -> None:
    schema = CITY["function"]["parameters"]
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    for choice in choices:
        answer = client.chat.completions.create(
            model=model, messages=ASK, tools=[CITY], tool_choice=choice, temperature=1.3, seed=4, n=2, max_tokens=400,
            parallel_tool_calls=False,
        )  # fmt: skip
        for got in answer.choices:
            assert got.message.tool_calls and len(got.message.tool_calls) == 1 and not got.message.content
            call = got.message.tool_calls[0]
            assert call.type == "function" and call.function.name == "weather"
            check(json.loads(call.function.arguments), schema)
    ask: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    chunks = client.chat.completions.create(model=model, messages=ask, tools=[CITY], stream=True, temperature=0)
    pieces = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(piece.arguments or "" for piece in pieces if piece)
    if pieces:
        check(json.loads(arguments), schema)


def test_stop_strings_and_length_end_an_answer_as_ever(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, stop=['"age"'], response_format={"type": "json_schema", "json_schema": {
            "name": "cat", "schema": Cat.model_json_schema()}}, n=2,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content and choice.message.content.strip().startswith("{")
        assert '"age"' not in choice.message.content
    cut = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=2, response_format={"type": "json_object"}, n=2
    )
    assert {choice.finish_reason for choice in cut.choices} == {"length"}


def test_regex_choice_grammar_and_completions(client: openai.OpenAI, model: str) -> None:
    for extra, allowed in (
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, {"aa", "ab", "ba", "bb"}),
        ({"guided_grammar": 'root ::= "x" ("1" | "2")'}, {"x1", "x2"}),
    ):
        answer = client.chat.completions.create(model=model, messages=ASK, n=4, temperature=2.0, extra_body=extra)
        assert {choice.message.content for choice in answer.choices} <= allowed
        text = client.completions.create(model=model, prompt=["a", "b"], temperature=2.0, extra_body=extra)
        assert {choice.text for choice in text.choices} <= allowed


def test_structural_tags(served: Served) -> None:
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "o", "schema": {"const": 1}, "end": "!"}],
        "triggers": ["o"],
    }
    for thinking in (False, True):
        body = {"messages": ASK, "n": 3, "max_tokens": 40, "temperature": 1.0, "seed": 1, "enable_thinking": thinking}
        body |= {"thinking_budget": 3, "response_format": tags}
        answer = served.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert any("o1!" in text for text in texts)
        assert all(re.fullmatch(r"(?s:([^o]|o1!)*(o1?)?)", text) for text in texts), texts


def test_budget_of_a_thought(client: openai.OpenAI, model: str) -> None:
    for budget in (0, 1, 5):
        answer = client.chat.completions.create(
            model=model, messages=ASK, temperature=1.0, max_tokens=60,
            extra_body={"enable_thinking": True, "thinking_budget": budget},
        )  # fmt: skip
        assert answer.usage and answer.usage.completion_tokens_details
        assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= budget + 3
        assert answer.choices[0].message.content
