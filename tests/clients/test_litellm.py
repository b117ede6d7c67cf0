"""litellm, by each provider that leads to a server of one's own: an agent's loop, and a history that is too long."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden import make
from tests.served import Served

litellm = pytest.importorskip("litellm")

QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}


def ask(served: Served, provider: str, **fields: Any) -> Any:
    base = served.process.url + ("" if provider == "anthropic" else "/v1")
    given = {"model": f"{provider}/{served.model}", "api_base": base, "api_key": served.process.api_key}
    return litellm.completion(**given, temperature=0, max_tokens=300, num_retries=0, **fields)


@pytest.mark.parametrize("provider", ["openai", "custom_openai", "hosted_vllm", "litellm_proxy", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_gives_back_the_message_as_the_library_made_it(served: Served, provider: str, stream: bool) -> None:
    messages: list[Any] = [QUESTION]
    said = ask(served, provider, messages=messages, tools=[make.WEATHER], stream=stream)
    if stream:
        said = litellm.stream_chunk_builder(list(said), messages=messages)
    message = said.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and "Oslo" in call.function.arguments
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "snowy, -7 degrees"}]
    answer = ask(served, provider, messages=messages, tools=[make.WEATHER]).choices[0]
    assert answer.finish_reason == "stop" and "snowy" in answer.message.content
    messages += [answer.message.model_dump(), {"role": "user", "content": "Thanks."}]
    assert ask(served, provider, messages=messages).choices[0].message.content


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_history_that_is_too_long_is_known_as_that(served: Served, provider: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(served, provider, messages=[{"role": "user", "content": "word " * 6000}])
