"""The official OpenAI client, sync and async, with all its helpers, against the built-in model on every door it knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pydantic
import pytest

from deltic.commands.endpoint import LocalServer
from tests.golden import make
from tests.served import Served

SUM = "What is 19 plus 23?"
WEATHER: Any = {"type": "function", "strict": False, **make.WEATHER["function"]}
ROME = "What is the weather in Rome?"


class Answer(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    weather: list[Literal["rain", "snow", "sun"]] = pydantic.Field(min_length=1, max_length=3)
    is_cold: bool


class GetWeather(pydantic.BaseModel):
    """Get the current weather for a city."""

    city: str


@asynccontextmanager
async def asynchronous(server: LocalServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


# Responses.


def test_response(client: openai.OpenAI, model: str) -> None:
    said = client.responses.create(model=model, input=SUM, temperature=0, instructions="Be brief.")
    assert "42" in said.output_text and said.status == "completed" and said.model == model
    assert said.usage and said.usage.total_tokens == said.usage.input_tokens + said.usage.output_tokens
    assert client.responses.retrieve(said.id).output_text == said.output_text
    (item,) = client.responses.input_items.list(said.id)
    assert item.type == "message" and item.content[0].text == SUM  # type: ignore[union-attr]
    counted = client.responses.input_tokens.count(model=model, input=SUM, instructions="Be brief.")
    assert counted.input_tokens == said.usage.input_tokens
    client.responses.delete(said.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(said.id)


def test_response_is_what_a_chat_says(client: openai.OpenAI, model: str) -> None:
    extra = {"top_k": 40, "seed": 7}
    chat = client.chat.completions.create(
        model=model, messages=[make.user(SUM)], extra_body=extra, reasoning_effort="low"
    ).choices[0]
    said = client.responses.create(model=model, input=SUM, extra_body=extra, reasoning={"effort": "low"})
    reasoning, message = said.output
    assert message.type == "message" and reasoning.type == "reasoning"
    assert said.output_text == chat.message.content
    assert reasoning.content and reasoning.content[0].text == chat.message.reasoning_content  # type: ignore[attr-defined]
    assert said.usage and 0 < said.usage.output_tokens_details.reasoning_tokens < said.usage.output_tokens


def test_response_stream(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "input": SUM, "temperature": 0, "reasoning": {"effort": "low"}}
    whole = client.responses.create(**fields)
    texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    events = list(client.responses.create(**fields, stream=True))
    for event in events:
        if event.type in texts:
            texts[event.type] += event.delta
    assert texts["response.output_text.delta"] == whole.output_text
    assert texts["response.reasoning_text.delta"] == whole.output[0].content[0].text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert final.output_text == whole.output_text and final.status == "completed"
    cut = list(client.responses.create(**fields, stream=True, max_output_tokens=4))[-1]
    assert cut.type == "response.incomplete" and cut.response.incomplete_details
    assert cut.response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("effort", ["none", "low"])
def test_function_call_round_trip(client: openai.OpenAI, model: str, stored: bool, effort: Any) -> None:
    """Whether the history is sent or kept here, it renders as the model wrote it, so the cache has all of it."""
    fields: dict[str, Any] = {
        "model": model, "temperature": 0, "tools": [WEATHER], "store": stored, "reasoning": {"effort": effort},
        "include": ["reasoning.encrypted_content"], "extra_body": {"cache_salt": f"{stored} {effort}"},
    }  # fmt: skip
    question: Any = {"role": "user", "content": ROME}
    with client.responses.stream(input=[question], **fields) as stream:
        for _ in stream:
            pass
        first = stream.get_final_response()
    *_, call = first.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Rome"}
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 3, "conditions": "rainy"}',
    }
    if stored:
        second = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    else:
        history = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        second = client.responses.create(input=[question, *history, result], **fields)
    assert "rainy" in second.output_text
    assert first.usage and second.usage
    cached = second.usage.input_tokens_details.cached_tokens
    n_known = first.usage.input_tokens + first.usage.output_tokens
    assert cached == (n_known - 1) // 64 * 64 > 0


def test_a_conversation_is_kept(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="My name is Nina.", temperature=0)
    second = client.responses.create(
        model=model, input="What is my name?", temperature=0, previous_response_id=first.id
    )
    assert "Nina" in second.output_text and second.previous_response_id == first.id
    listed = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed] == ["message"] * 3  # all pages
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input="And?", previous_response_id="resp_0")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(first.id)


def test_response_logprobs(client: openai.OpenAI, model: str) -> None:
    said = client.responses.create(
        model=model, input=SUM, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = said.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text" and part.logprobs
    assert "".join(entry.token for entry in part.logprobs) == said.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_parsed_response(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "input": ROME, "temperature": 0, "max_output_tokens": 400}
    said = client.responses.parse(text_format=Answer, **fields)
    assert isinstance(said.output_parsed, Answer)
    with client.responses.stream(text_format=Answer, **fields) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == said.output_parsed
    called = client.responses.parse(tools=[openai.pydantic_function_tool(GetWeather)], tool_choice="required", **fields)
    *_, call = called.output
    assert call.type == "function_call" and call.parsed_arguments
    named: Any = {"type": "function", "name": "get_weather"}
    forced = client.responses.create(
        model=model, input=SUM, tools=[WEATHER], tool_choice=named, temperature=0, max_output_tokens=100
    )
    assert forced.output[-1].type == "function_call" and forced.output[-1].name == "get_weather"


def test_responses_side_by_side(server: LocalServer, model: str) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        name = ("Nina", "Tom", "Anna", "Ben")[i % 4]
        first = await client.responses.create(model=model, input=f"My name is {name}.", temperature=0)
        events = await client.responses.create(
            model=model, input="What is my name?", temperature=0, previous_response_id=first.id, stream=True
        )
        text = ""
        async for event in events:
            if event.type == "response.output_text.delta":
                text += event.delta
        return text if name in text else f"{name} is not in: {text}"

    async def go() -> list[str]:
        async with asynchronous(server) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(12)))

    assert not [text for text in asyncio.run(go()) if "is not in" in text]


# Chats and completions.


def test_chat_helpers(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 400}
    parsed = client.chat.completions.parse(
        messages=[{"role": "user", "content": ROME}], response_format=Answer, **fields
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(
        messages=[{"role": "user", "content": ROME}], response_format=Answer, **fields
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds
    called = client.chat.completions.parse(
        messages=[{"role": "user", "content": ROME}],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        **fields,
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_chat_stream_helper(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=[{"role": "user", "content": ROME}], tools=[make.WEATHER], temperature=0,  # type: ignore[list-item]
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds and final.usage
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_completions_and_models(server: LocalServer, client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
    chunks = list(
        client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert client.models.retrieve(model).id == model

    async def go() -> str:
        async with asynchronous(server) as client:
            stream = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": SUM}], temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert "42" in asyncio.run(go())


def test_a_gap_is_filled(served: Served) -> None:
    """The tokens for it are the vocabulary's, and what files have in letters stays letters."""
    client, model = served.openai, served.model
    ask: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0}
    prefix, suffix = "Once upon a time there was a ", " who lived in a forest."
    filled = client.completions.create(prompt=prefix, suffix=suffix, **ask)
    same = client.completions.create(prompt=f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>", **ask)
    assert filled.usage and same.usage and filled.usage.prompt_tokens == same.usage.prompt_tokens
    assert filled.choices[0].text == same.choices[0].text
    infill = served.http.post("/infill", json={"input_prefix": prefix, "input_suffix": suffix, "n_predict": 12}).json()
    assert infill["content"] == filled.choices[0].text and infill["tokens_evaluated"] == filled.usage.prompt_tokens
    written = client.completions.create(prompt=f"{prefix}<|fim_middle|>", suffix=suffix, **ask)
    assert written.usage and written.usage.prompt_tokens > filled.usage.prompt_tokens + 1


# Errors.


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda client: client.responses.create(model="gpt", input="x"), openai.NotFoundError),
        (lambda client: client.chat.completions.create(model="gpt", messages=[make.user("x")]), openai.NotFoundError),
        (lambda client: client.models.retrieve("gpt"), openai.NotFoundError),
        (lambda client: client.responses.create(input="x", background=True), openai.BadRequestError),
        (lambda client: client.responses.create(input="x", tools=[{"type": "web_search"}]), openai.BadRequestError),
        (lambda client: client.responses.create(input="x " * 9000), openai.BadRequestError),
        (lambda client: client.responses.create(input="x", stream=True, temperature=-1), openai.BadRequestError),
        (lambda client: client.chat.completions.create(model=None, messages=[]), openai.BadRequestError),
        (lambda client: client.embeddings.create(model="gpt", input="x"), openai.NotFoundError),
        (lambda client: client.moderations.create(input="x"), openai.NotFoundError),
        (lambda client: client.files.list(), openai.NotFoundError),
        (lambda client: client.images.generate(prompt="x"), openai.NotFoundError),
        (lambda client: client.with_options(api_key="wrong").responses.create(input="x"), openai.AuthenticationError),
    ],
)  # fmt: skip
def test_errors_are_the_clients_own(
    client: openai.OpenAI, call: Callable[[openai.OpenAI], object], kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind) as caught:
        call(client)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] and caught.value.request_id
