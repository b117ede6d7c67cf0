"""Offline calls that are awaited: they run together, may be left, and end with their AsyncLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deltic import AsyncLLM, SamplingParams
from deltic.config import ConfigError
from deltic.engine.engine import MAX_FAILURES
from deltic.llm import EngineStopped
from tests import fakes
from tests.null.test_llm import checkpoint, fake_runtime  # noqa: F401

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def run(checkpoint: Path, fake_runtime: None) -> Callable[..., None]:  # noqa: F811
    """Runs a function of an AsyncLLM that is open; nothing is left of it then."""

    def runs(work: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        async def go() -> None:
            async with AsyncLLM(str(checkpoint), n_pages=24, max_num_seqs=4, max_model_len=256) as llm:
                await work(llm)
                engine = llm.llm._engine
                for _ in range(500):
                    if not engine.scheduler.n_open:
                        break
                    await asyncio.sleep(0.01)
                assert not engine.scheduler.n_open and not llm._open and not llm.llm._calls

        asyncio.run(go())

    return runs


def test_calls_that_are_open_together_run_together(run: Any) -> None:
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    prompts = [[i, 20, 30 + i] for i in range(1, 9)]

    async def work(llm: AsyncLLM) -> None:
        answers = await asyncio.gather(*(llm.generate([prompt], params) for prompt in prompts))
        assert [a.token_ids for (a,) in answers] == [fakes.expected_tokens(prompt, params) for prompt in prompts]
        assert llm.llm._engine.n_steps < 4 * 12
        (chatted,) = await llm.chat(HI, max_tokens=3, temperature=0.0)
        assert chatted.text and await llm.generate([]) == []

    run(work)


def test_a_stream_says_what_the_whole_answer_is(run: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        (whole,) = await llm.chat(HI, seed=1, max_tokens=20, enable_thinking=True)
        pieces = [piece async for piece in llm.stream(HI, seed=1, max_tokens=20, enable_thinking=True)]
        assert "".join(piece.reasoning for piece in pieces) == whole.reasoning != ""
        assert pieces[-1].completion == whole and len(pieces) > 5

    run(work)


def test_who_leaves_ends_the_answer(run: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream("a", max_tokens=200, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        waiting = asyncio.create_task(llm.generate("b", max_tokens=200, ignore_eos=True))
        while not llm._open:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(work)


def test_errors_are_the_calls(run: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        going = asyncio.create_task(llm.generate("a", max_tokens=30, ignore_eos=True))
        for bad, said in (
            ({"temprature": 1}, "did you mean"),
            ({"temperature": -1}, "temperature"),
            ({"n": 9}, "n = 9"),
        ):
            with pytest.raises(ValueError, match=said):
                await llm.generate("b", **bad)
        assert len((await going)[0].token_ids) == 30

    run(work)


def test_an_engine_that_fails_ends_what_is_open(checkpoint: Path, fake_runtime: None) -> None:  # noqa: F811
    async def go() -> None:
        llm = AsyncLLM(str(checkpoint), n_pages=24, max_num_seqs=4, max_model_len=256)
        with pytest.raises(EngineStopped, match="not open"):
            await llm.generate("x")
        async with llm:
            for _ in range(MAX_FAILURES - 1):
                assert (await llm.generate([[fakes.POISON, 1]]))[0].finish_reason == "error"
            with pytest.raises(EngineStopped, match="in a row"):
                await llm.generate([[fakes.POISON, 1]])
        await llm.close()
        with pytest.raises(EngineStopped):
            await llm.generate("x")
        started = await AsyncLLM(str(checkpoint), n_pages=24, max_num_seqs=4, max_model_len=256).start()
        assert len(await started.generate("x", max_tokens=1)) == 1
        await started.close()

    asyncio.run(go())
    assert not [thread for thread in threading.enumerate() if thread.name == "deltic"]


def test_what_cannot_load_says_so(fake_runtime: None) -> None:  # noqa: F811
    async def go() -> None:
        async with AsyncLLM(thread=4):
            pass

    with pytest.raises(ConfigError, match="did you mean threads"):
        asyncio.run(go())


def test_what_was_closed_twice_starts_again(checkpoint: Path, fake_runtime: None) -> None:  # noqa: F811
    async def go() -> None:
        llm = AsyncLLM(str(checkpoint))
        for _ in range(2):
            await llm.start()
            assert (await asyncio.wait_for(llm.generate("a", SamplingParams(max_tokens=1)), 20))[0].token_ids
            await llm.close()
            await llm.close()

    asyncio.run(go())
