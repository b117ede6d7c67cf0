"""Scores of branches on a CPU: the bits of the same tokens as a prompt of their own, alone, in company, warm and after a restart."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deltic import LLM, AsyncLLM
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Branch, Request, SamplingParams
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.grid import grid
from tests.tiny import tiny_checkpoint

Scores = dict[tuple[str, int], list[tuple[int, str]]]
"""Of each sequence: ids, and their log-probabilities to the last bit."""

KINDS = ("dense", "moe", "next")


def build(kind: str, **settings: Any) -> Runner:
    sizes = {"max_num_seqs": 8, "max_model_len": 512, "max_step_tokens": 320, "threads": 2}
    config = EngineConfig(model=str(tiny_checkpoint(kind)), **sizes | settings)
    return build_runner(config, lambda stage, done: None, Cpu())


cached = cache(build)


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


def scored(id: str, seed: int, n_prompt: int, n: int = 4) -> Request:
    """A request with n branches: labels of one token, of several that begin alike, and one without a token of its own."""
    rng, branches = random.Random(seed), [Branch([], [(0, i) for i in range(26)])]
    for i in range(1, n):
        ids = prompt(seed * 100 + i, rng.randrange(1, 70))
        branches.append(Branch(ids, [(k, ids[k]) for k in range(len(ids) - 2, len(ids)) if k >= 0] or [(1, 7)]))
        if i % 2:
            branches[-1] = Branch(ids, [(len(ids), rng.randrange(256)) for _ in range(rng.choice((2, 63)))])
    params = SamplingParams(max_tokens=0, temperature=0.0, n=n)
    return Request(id=id, prompt_ids=prompt(seed, n_prompt), params=params, branches=branches)


def run(engine: Engine, requests: list[Request], preempt_at: int = -1) -> Scores:
    found: Scores = {}
    for request in requests:
        engine.add(request)
    n_steps = 0
    while engine.has_work():
        if n_steps == preempt_at:
            for sequence in [*engine.scheduler._prefills, *engine.scheduler._decodes]:
                engine.scheduler._preempt(sequence)
        for output in engine.step():
            assert output.error is None, output.error
            if output.prompt_logprobs is not None:
                entries = [(entry.token_id, entry.logprob.hex()) for entry in output.prompt_logprobs if entry]
                found[output.id, output.index] = entries
        engine.check()
        n_steps += 1
    return found


def alone(runner: Runner, request: Request) -> Scores:
    return run(Engine(runner), [request])


@pytest.mark.parametrize("kind", grid(KINDS, ("dense", "next"), pytest.mark.long))
@pytest.mark.parametrize("n_prompt", [1, 65, 200])
def test_scores_are_those_of_a_prompt(kind: str, n_prompt: int) -> None:
    """Each has the bits of the log-probability that a prompt of the same tokens tells of its last one."""
    runner, request = cached(kind), scored("a", n_prompt, n_prompt)
    found = alone(runner, request)
    for index, branch in enumerate(request.branches):
        assert [id for id, _ in found["a", index]] == [id for _, id in branch.scored]
        for (n, id), (_, value) in list(zip(branch.scored, found["a", index], strict=True))[-3:]:
            whole = [*request.prompt_ids, *branch.ids[:n], id]
            plain = Request(id="p", prompt_ids=whole, params=SamplingParams(max_tokens=0, prompt_logprobs=0))
            assert run(Engine(runner), [plain])["p", 0][-1] == (id, value)


@pytest.mark.parametrize("kind", grid(KINDS, ("dense", "moe"), pytest.mark.long))
def test_company_cuts_and_preemption_change_no_bit(kind: str) -> None:
    runner = cached(kind)
    requests = [scored(str(seed), seed, n) for seed, n in enumerate((200, 130, 64, 3, 300))]
    requests += [scored("again", 0, 200)]
    expected: Scores = {}
    for request in requests:
        expected |= alone(runner, request)
    chat = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    others = [Request(id=f"c{i}", prompt_ids=prompt(i, 150), params=chat, tenant="other") for i in range(4)]
    for step_tokens, preempt_at in ((320, -1), (64, 4)):
        engine = Engine(runner)
        engine.scheduler.max_step_tokens = step_tokens
        for warmth in ("cold", "warm"):
            found = run(engine, [*others, *requests], preempt_at)
            assert {key: found[key] for key in expected} == expected, (step_tokens, preempt_at, warmth)


def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    request = scored("a", 9, 400)
    expected = alone(cached("dense"), request)
    for n_cached in (0, 384):
        engine = Engine(build("dense", cache_dir=tmp_path))
        engine.add(request)
        outputs = [output for _ in range(200) if engine.has_work() for output in engine.step()]
        assert outputs[0].cached_tokens == n_cached
        told = {(o.id, o.index): [(e.token_id, e.logprob.hex()) for e in o.prompt_logprobs or () if e] for o in outputs}
        assert told == expected
        engine.close(30.0)


def test_in_python_awaited_and_not() -> None:
    """Labels of several tokens and of one: the sums are those of a prompt's own log-probabilities, for any number of questions."""
    ends = [" Paris", " London", " a town of bread and butter"]
    questions: list[dict[str, Any]] = [{"type": "predicate", "instructions": f"Is it number {i}?"} for i in range(40)]
    questions += [{"type": "choice", "instructions": "Which?", "choices": [{"value": f"n{i}"} for i in range(30)]}]
    with LLM(progress=False) as llm:
        (found,) = llm.score("The capital of France is", ends)
        for end, logprob in zip(ends, found.logprobs, strict=True):
            (whole,) = llm.generate(f"The capital of France is{end}", max_tokens=1, prompt_logprobs=0, progress=False)
            n = len(llm.tokenizer.encode("The capital of France is"))
            assert sum(entry.logprob for entry in (whole.prompt_logprobs or [])[n:] if entry) == pytest.approx(
                logprob, abs=1e-9
            )
        assert sum(found.probabilities) == pytest.approx(1)
        together = llm.decide("A text about 17.", questions)
        assert together[16:18] + together[-1:] == [
            llm.decide("A text about 17.", [q])[0] for q in (*questions[16:18], questions[-1])
        ]
        for wrong in ({"temperature": 1.0}, {"lora": "none"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                llm.score("a", [" b"], **wrong)
        with pytest.raises(ValueError, match="Invalid value"):
            llm.decide("a", [{"type": "box"}])
        with pytest.raises(ValueError, match="a token each"):
            llm.score("a", [""])

    async def awaited() -> list[Any]:
        async with AsyncLLM(progress=False) as llm:
            return await asyncio.gather(
                llm.score("The capital of France is", ends), llm.decide("A text about 17.", questions)
            )

    assert asyncio.run(awaited()) == [[found], together]
