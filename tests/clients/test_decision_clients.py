"""Clients of decisions and rerank against the application over a fake engine: `openai`, `langchain-openai`, `typesafe-sdk`, `cohere`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fake_engine import FakeEngineClient, make_app, served

QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "billing", "instructions": "It is about money."},
    {"type": "choice", "name": "team", "instructions": "Who?", "choices": [{"value": "billing"}, {"value": True}]},
    {"type": "score", "name": "anger", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "angry"}]},
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = FakeEngineClient()
    engine.score = lambda ids, id: -float(id % 7)
    with served(make_app(engine)) as url:
        yield url


def test_the_openai_client_decides(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    if not hasattr(client, "decisions"):
        pytest.skip("this openai has no decisions")
    for given in ("Money!", [{"role": "user", "content": [{"type": "input_text", "text": "Money!"}]}]):
        decision = client.decisions.create(model="fake", input=given, questions=QUESTIONS, prompt_cache_key="a")
        predicate, choice, score = decision.answers
        assert predicate.type == "predicate" and 0 < predicate.probability < 1 and predicate.name == "billing"
        assert choice.type == "choice" and choice.choice in ("billing", True)
        assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
        assert score.type == "score" and 0 < score.score < 1 and [each.value for each in score.probabilities] == [0, 1]
        assert decision.usage.input_tokens == decision.usage.total_tokens > 0 == decision.usage.output_tokens
    with pytest.raises(openai.BadRequestError, match="questions"):
        client.decisions.create(model="fake", input="x", questions=[])


def test_langchain_decides(url: str) -> None:
    decisions = pytest.importorskip("langchain_openai.decisions")
    model = decisions.OpenAIDecisions(model="fake", base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {
        "billing": decisions.Predicate(instructions="It is about money."),
        "team": decisions.Choice(instructions="Who?", choices={"billing": "money", "sales": None}),
        "anger": decisions.Score(instructions="How angry?", levels=["calm", "angry"]),
    }
    response = model.invoke({"input": "Money!", "questions": asked})
    assert set(response.answers) == set(asked) and response.choices["team"].choice in ("billing", "sales")
    assert 0 < response.predicates["billing"].probability < 1 and 0 < response.scores["anger"].score < 1


def test_the_sdk_of_typesafe_asks_and_reads_errors(url: str) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    asked = {
        "billing": sdk.Noul(instructions="Is it about money?"),
        "team": sdk.Choice(instructions="Who?", criteria={"billing": "money", "sales": None}),
        "anger": sdk.Score(instructions="How angry?", criteria=["calm", "angry"]),
    }
    with sdk.TypeSafeClient(api_key="none", base_url=url) as client:
        result = client.system_one({"message": "Money!"}, asked, model="fake")
        assert 0 < result.nouls["billing"].noul < 1 and result.choices["team"].choice in ("billing", "sales")
        assert result.scores["anger"].legend and 0 < result.scores["anger"].score < 1
        with pytest.raises(sdk.TypeSafeAPIError, match="no model 'other'"):
            client.system_one("x", asked, model="other")


def test_cohere_reranks(url: str) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=url)
    response = client.rerank(model="fake", query="q", documents=["a", "b", "c"], top_n=2)
    assert [result.index for result in response.results] == [0, 1]
