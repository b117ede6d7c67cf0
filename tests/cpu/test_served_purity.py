"""Purity as a client sees it: the same request alone and among 31 random others gets the same answer, over HTTP.

Compared are whole choices: text, finish reason, and of every token its bytes (which name its id) and logprobs, as the JSON
says them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.served import STORY, Served

N_OTHERS = 31
LONG = 3000
"""Tokens of an answer that is still being written when the watched one is complete."""

WATCHED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 17, "frequency_penalty": 0.3},
}
TEXT = "once upon a time the red fox saw 17 snowy owls and said hello to all of them in Oslo"


@pytest.fixture(
    scope="module", params=[None, pytest.param("int8", marks=pytest.mark.long), "int4"], ids=["bf16", "int8", "int4"]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The built-in model, with room for all to run at once."""
    cache = tmp_path_factory.mktemp("cache")
    quantize = ["--quantize", request.param] if request.param else []
    running = Served("--max-num-seqs", "32", "--n-pages", "256", "--weights-cache", str(cache), *quantize)
    yield running
    running.close()
    assert [file.suffix for file in cache.iterdir()] == [".safetensors"], "packed for the next start"


def chat_fields(name: str) -> dict[str, Any]:
    return {"messages": STORY, "max_tokens": 40, "logprobs": True, "top_logprobs": 5, **WATCHED[name]}


def completion_fields(name: str) -> dict[str, Any]:
    prompt = f"{TEXT} " * 6
    return {"prompt": prompt, "max_tokens": 40, "logprobs": 3, "n": 2, **WATCHED[name]}


async def choices(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> list[Any]:
    """The choices of the answer to a chat (with messages) or a completion, as the JSON says them."""
    api: Any = client.chat.completions if "messages" in fields else client.completions
    answer = await api.create(model="built-in", **fields)
    return [choice.model_dump() for choice in answer.choices]


def other(generator: random.Random, long: bool) -> dict[str, Any]:
    """A random request: any length, filters, penalties, with or without logprobs."""
    words = " ".join(generator.choices(TEXT.split(), k=generator.randrange(1, 120)))
    fields: dict[str, Any] = {
        "max_tokens": LONG if long else generator.randrange(1, 60),
        "temperature": generator.choice([0.0, 0.7, 1.3]),
        "presence_penalty": generator.choice([0.0, 0.5]),
        "extra_body": {"ignore_eos": True, "top_k": generator.choice([0, 1, 20])},
    }
    if generator.random() < 0.5:
        logprobs = {"logprobs": True, "top_logprobs": 4} if generator.random() < 0.5 else {}
        return fields | {"messages": [{"role": "user", "content": words}]} | logprobs
    return fields | {"prompt": words, "logprobs": generator.choice([None, 2])}


async def among_others(served: Served, fields: dict[str, Any], seed: int) -> tuple[list[Any], int]:
    """The choices of a request that arrives among 31 random others, and how many of these it did not outlive."""
    generator = random.Random(seed)
    url, key = f"{served.process.url}/v1", served.process.api_key
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        crowd = [
            asyncio.create_task(choices(client, other(generator, long=i < N_OTHERS // 2))) for i in range(N_OTHERS)
        ]
        await asyncio.sleep(generator.uniform(0.0, 0.1))
        got = await choices(client, fields)
        n_open = sum(not task.done() for task in crowd)
        for task in crowd:
            task.cancel()
        for ended in await asyncio.gather(*crowd, return_exceptions=True):
            assert isinstance(ended, list | asyncio.CancelledError), ended
        return got, n_open


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("fields", [chat_fields, completion_fields], ids=["chat", "completion"])
def test_alone_and_among_others(served: Served, name: str, fields: Any) -> None:
    async def alone() -> list[Any]:
        url, key = f"{served.process.url}/v1", served.process.api_key
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
            return await choices(client, fields(name))

    expected = asyncio.run(alone())
    assert all(choice["logprobs"] for choice in expected)
    got, n_open = asyncio.run(among_others(served, fields(name), seed=len(str(expected))))
    assert n_open > N_OTHERS // 4, "it was alone at the end"
    assert got == expected
