"""OpenAI's Agents SDK against the application over a fake engine, by each API that it speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.fake_engine import FakeEngineClient, make_app, saying, served
from tests.null.test_responses import CALL

agents = pytest.importorskip("agents")

SETTINGS = {
    "parallel_tool_calls": True, "tool_choice": "auto", "verbosity": "low", "truncation": "auto", "store": False,
    "include_usage": True, "prompt_cache_retention": "24h",
}  # fmt: skip
"""All that may be asked of either API, beside an effort."""


@pytest.mark.parametrize("model", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_with_a_tool(model: str, stream: bool) -> None:
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "snowy, -7 degrees"

    engine = FakeEngineClient()
    engine.answer = lambda request, index: saying("hm\n</think>\n\n" + ("Done." if asked else CALL))(request, index)

    async def go(url: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            effort = openai.types.shared.Reasoning(effort="high", summary="auto")
            agent = agents.Agent(
                name="Helper", instructions="Be brief.", tools=[agents.function_tool(weather)],
                model=getattr(agents, model)("fake", openai_client=client),
                model_settings=agents.ModelSettings(**SETTINGS, reasoning=effort),
            )  # fmt: skip
            session: Any = agents.SQLiteSession("a")
            for text in ("Paris?", "Thanks."):
                if stream:
                    done = agents.Runner.run_streamed(agent, text, session=session)
                    async for _ in done.stream_events():
                        pass
                else:
                    done = await agents.Runner.run(agent, text, session=session)
            return str(done.final_output)

    with served(make_app(engine)) as url:
        assert asyncio.run(go(url)) == "Done."
    assert asked == ["Paris"] and len(engine.requests) == 3
