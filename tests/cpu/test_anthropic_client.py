"""The official `anthropic` client against `deltic serve` with the built-in model: what an agent does in a day."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import httpx
import pydantic
import pytest

from tests.golden import make
from tests.served import STORY, Served
from tests.waiting import wait_for

WEATHER: Any = {
    "name": "get_weather",
    "description": make.WEATHER["function"]["description"],
    "input_schema": make.WEATHER["function"]["parameters"],
}


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    """Untyped, since a block of an answer could be many things. After each test all pages and slots are free."""
    key = served.process.api_key
    with anthropic.Anthropic(base_url=served.process.url, api_key=key, max_retries=0, timeout=60) as made:
        yield made
    wait_for(served.is_empty)


def fields(served: Served, *messages: Any, **more: Any) -> Any:
    """Arguments of the client, which has no `temperature` any more."""
    greedy = {"temperature": 0}
    return {"model": served.model, "max_tokens": 300, "messages": list(messages), "extra_body": greedy} | more


def test_the_answer_is_the_one_of_a_chat(served: Served, client: Any) -> None:
    chat = served.chat(STORY, temperature=0, max_tokens=300).choices[0]
    message = client.messages.create(**fields(served, *STORY))
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == chat.message.content
    assert (message.stop_reason, message.model, message.role) == ("end_turn", served.model, "assistant")
    with client.messages.stream(**fields(served, *STORY)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    whole, streamed = message.usage, final.usage
    assert streamed.output_tokens == whole.output_tokens and streamed.input_tokens == whole.input_tokens
    counted = client.messages.count_tokens(model=served.model, messages=STORY).input_tokens
    assert counted == whole.input_tokens  # shorter than a page: nothing is cached


def test_an_agent_with_a_tool_thinks_calls_and_reads_the_result(served: Served, client: Any) -> None:
    """What is given back is what the model wrote, so the second turn starts behind the first one's answer."""
    question = ask("What is the weather in Oslo?")
    settings: Any = {"tools": [WEATHER], "thinking": {"type": "adaptive"}, "system": "You help travellers."}
    while True:  # until the answer is certain to fill a page of 64 tokens
        n_prompt = client.messages.count_tokens(model=served.model, messages=[question], **settings).input_tokens
        if n_prompt % 64 > 40:
            break
        settings["system"] += " Be kind."
    with client.messages.stream(**fields(served, question, **settings)) as stream:
        first = stream.get_final_message()
    *before, call = first.content
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert first.stop_reason == "tool_use" and call.id.startswith("toolu_")
    assert [block.type for block in before] == ["thinking"] and before[0].thinking
    result: Any = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "snowy, -7 degrees"}],
    }
    turns: Any = (question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]})
    second = client.messages.create(**fields(served, *turns, **settings))
    assert second.stop_reason == "end_turn"
    said = second.content[-1].text
    assert all(word in said for word in ("Oslo", "snowy", "-7"))
    n_first = n_prompt + first.usage.output_tokens
    assert (second.usage.cache_read_input_tokens or 0) >= n_first // 64 * 64 > n_prompt


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking(served: Served, client: Any, display: Any) -> None:
    question = ask("What is 19 plus 23?")
    plain = client.messages.create(**fields(served, question))
    assert [block.type for block in plain.content] == ["text"] and "42" in plain.content[0].text
    thinking: Any = {"type": "adaptive", "display": display}
    thought = client.messages.create(**fields(served, question, thinking=thinking))
    assert [block.type for block in thought.content] == ["thinking", "text"] and "42" in thought.content[1].text
    assert bool(thought.content[0].thinking) == (display == "summarized") and thought.content[0].signature
    details = thought.usage.output_tokens_details
    assert details and 0 < details.thinking_tokens < thought.usage.output_tokens
    with client.messages.stream(**fields(served, question, thinking=thinking)) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0] == thought.content[0] and streamed.content[1].text == thought.content[1].text


def test_a_budget_ends_the_thought(served: Served, client: Any) -> None:
    question = ask("What is 19 plus 23?")
    free = client.messages.create(**fields(served, question, thinking={"type": "adaptive"}))
    short = client.messages.create(**fields(served, question, thinking={"type": "enabled", "budget_tokens": 4}))
    assert [block.type for block in short.content] == ["thinking", "text"]
    assert len(short.content[0].thinking) < len(free.content[0].thinking)
    assert free.content[0].thinking.startswith(short.content[0].thinking)


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_a_call_that_must_come(served: Served, client: Any, thinking: Any) -> None:
    hello = ask("Hello! How are you?")
    other = WEATHER | {"name": "get_time", "strict": True, "input_examples": [{"city": "Rome"}]}
    for choice, names in (
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "get_time"}),
        ({"type": "tool", "name": "get_time"}, {"get_time"}),
    ):
        message = client.messages.create(
            **fields(served, hello, tools=[WEATHER, other], tool_choice=choice, thinking=thinking)
        )
        (call,) = (block for block in message.content if block.type == "tool_use")
        assert call.name in names and set(call.input) == {"city"} and message.stop_reason == "tool_use"


def test_an_answer_of_a_given_form(served: Served, client: Any) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Oslo", "Rome"]
        degrees: Annotated[int, pydantic.Field(ge=-50, le=50)]
        windy: bool

    message = client.messages.parse(**fields(served, ask("How is the weather in Oslo?"), output_format=Weather))
    assert isinstance(message.parsed_output, Weather)
    bad: Any = {"format": {"type": "json_schema", "schema": {"type": "objec"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(**fields(served, ask("Hello"), output_config=bad))


def test_stops_and_prefill(served: Served, client: Any) -> None:
    whole = client.messages.create(**fields(served, *STORY)).content[0].text
    at = len(whole) // 2
    stopped = client.messages.create(**fields(served, *STORY, stop_sequences=["never written", whole[at : at + 9]]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", whole[at : at + 9])
    assert whole.startswith(stopped.content[0].text)
    short = client.messages.create(**fields(served, *STORY) | {"max_tokens": 5})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 5)
    end = whole.index(".") + 1  # where a token ends
    going_on = client.messages.create(**fields(served, *STORY, {"role": "assistant", "content": whole[:end]}))
    assert whole[:end] + going_on.content[0].text == whole


def test_errors_are_the_clients_own(served: Served, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="This server has"):
        client.messages.create(**fields(served, *STORY) | {"model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**fields(served, *STORY))
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
        client.messages.create(**fields(served, {"role": "user", "content": [image]}))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 4095 maximum"):
        client.messages.create(**fields(served, ask("word " * 9000)))
    body = {"model": served.model, "max_tokens": 9, "messages": [], "stream": True}
    reply = served.http.post("/v1/messages", json=body)
    assert reply.status_code == 400 and reply.json()["type"] == "error"


def test_streams_that_are_left_free_their_memory(served: Served, client: Any) -> None:
    """Some at their first token, some at once, among others that are to end as alone."""
    alone = client.messages.create(**fields(served, *STORY)).content[0].text
    headers = {"x-api-key": served.process.api_key, "content-type": "application/json"}
    told = {"messages": [ask("Tell me a long story. " * 30)], "max_tokens": 3000, "stream": True}
    endless = json.dumps({"model": served.model} | told)

    async def leave(http: httpx.AsyncClient, n_chunks: int) -> None:
        async with http.stream("POST", "/v1/messages", content=endless) as stream:
            assert stream.status_code == 200
            chunks = stream.aiter_bytes()
            for _ in range(n_chunks):
                await anext(chunks, None)

    async def go() -> str:
        key, url = served.process.api_key, served.process.url
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            leaving = [leave(http, i % 3) for i in range(12)]
            async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=60) as other:
                message, *_ = await asyncio.gather(other.messages.create(**fields(served, *STORY)), *leaving)
        return str(message.content[0].text)

    assert asyncio.run(go()) == alone
    wait_for(served.is_empty)
