"""Agents' loops as their packages run them."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.served import Served


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_anthropic(served: Served, stream: bool) -> None:
    if not hasattr(anthropic, "beta_tool"):
        pytest.skip("this anthropic has no tool runner")
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather for a city.

        Args:
            city: The name of the city
        """
        asked.append(city)
        return "snowy, -7 degrees"

    with anthropic.Anthropic(base_url=served.process.url, api_key=served.process.api_key, max_retries=0) as client:
        runner: Any = client.beta.messages.tool_runner(
            model=served.model,
            max_tokens=300,
            tools=[get_weather],
            messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
            extra_body={"temperature": 0},
            stream=stream,
        )
        last = [(turn.get_final_message() if stream else turn) for turn in runner][-1]
    assert asked == ["Oslo"] and last.stop_reason == "end_turn" and "snowy" in last.content[-1].text


def test_two_steps_of_mini_swe_agent(served: Served, tmp_path: Any) -> None:
    """Its model and its environment, with the loop that its agent has: the built-in model makes no calls of its own accord, so the
    first is forced."""
    pytest.importorskip("minisweagent")
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    access = {"api_base": f"{served.process.url}/v1", "api_key": served.process.api_key}
    model = LitellmModel(
        model_name=f"openai/{served.model}", model_kwargs={**access, "temperature": 0, "max_tokens": 100}
    )
    environment = LocalEnvironment(cwd=str(tmp_path))
    messages: list[Any] = [
        {"role": "system", "content": "You work in a shell."},
        {"role": "user", "content": "List the files."},
    ]
    forced = {"type": "function", "function": {"name": "bash"}}
    for _ in range(2):
        message = model.query(messages, tool_choice=forced)
        actions = message["extra"]["actions"]
        assert actions
        results = [environment.execute(action) for action in actions]
        messages += [message, *model.format_observation_messages(message, results)]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
