"""The `ollama` package against the application over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_engine import FakeEngineClient, make_app, saying, served
from tests.null.test_anthropic import CALL

ollama = pytest.importorskip("ollama")


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"fine in {city}"


def test_the_package_lists_shows_chats_and_generates() -> None:
    with served(make_app(FakeEngineClient())) as url:
        client = ollama.Client(url)
        name = client.list().models[0].model
        assert "tools" in client.show(name).capabilities
        assert client.ps().models[0].model == name
        said = client.chat(name, [{"role": "user", "content": "hello"}], options={"num_predict": 5})
        assert (said.message.content, said.done_reason, said.eval_count) == ("Hello", "length", 5)
        pieces = list(client.chat(name, [{"role": "user", "content": "hello"}], stream=True, keep_alive="5m"))
        assert "".join(piece.message.content for piece in pieces) == "Hello"
        assert pieces[-1].done and pieces[-1].total_duration > 0
        assert client.generate(name, "hello", system="Be brief.").response == "Hello"
        assert "".join(piece.response for piece in client.generate(name, "hello", stream=True)) == "Hello"
        assert client.generate(name).done_reason == "load"


def test_the_package_calls_tools_and_thinks() -> None:
    with served(make_app(FakeEngineClient(saying(f"hm\n</think>\n\n{CALL}")))) as url:
        client = ollama.Client(url)
        messages: list[Any] = [{"role": "user", "content": "Paris?"}]
        said = client.chat("fake", messages, tools=[weather], think=True)
        assert said.message.thinking.strip() == "hm"
        (call,) = said.message.tool_calls
        assert weather(**call.function.arguments) == "fine in Paris"
        messages += [said.message, {"role": "tool", "tool_name": "weather", "content": "fine"}]
        assert client.chat("fake", messages, tools=[weather]).done


def test_the_package_reads_our_errors() -> None:
    with served(make_app(FakeEngineClient())) as url:
        client = ollama.Client(url)
        with pytest.raises(ollama.ResponseError, match="no model 'other'") as caught:
            client.chat("other", [{"role": "user", "content": "x"}])
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="makes no embeddings"):
            client.embed("fake", "x")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        assert client.chat("fake", [{"role": "user", "content": "x"}], format=schema).message.content == "Hello"
