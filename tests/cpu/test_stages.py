"""One model on several machines: stages of layers, whose answers are one machine's, to the bit."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.engine.step import Step, StepResult
from deltic.models.qwen.shape import stage_of
from deltic.ops.arrays import Array
from deltic.runtime.build import settle_text
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.runtime.fit import make_plan
from tests.tiny import tiny_checkpoint

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 512,
    "max_step_tokens": 128,
    "threads": 2,
    "n_pages": 9,
    "n_checkpoints": 4,
    "cache_host_gb": 0.0,
    "max_drafts": 4,
}


class Chain:
    """Stages in one process, each of which hands its rows to the next."""

    def __init__(self, stages: list[Runner]) -> None:
        self.stages, first = stages, stages[0]
        self.info, self.max_logit_rows, self.tiers = first.info, first.max_logit_rows, first.tiers
        self.pictures = self.adapters = self.replays = self.experts = None
        self.rows: list[Array] = []
        for stage in stages:
            stage.neighbours = self

    def is_busy(self) -> bool:
        return False

    def step(self, step: Step) -> StepResult:
        self.now, self.rows = step, []
        return self.stages[0].step(step)

    def receive(self, rows: Array) -> None:
        rows[:] = self.rows[-1]

    def pass_on(self, rows: Array) -> StepResult:
        self.rows.append(rows.copy())
        return self.stages[len(self.rows)].step(self.now)


def runner_of(config: EngineConfig, begin: int, end: int) -> Runner:
    """A runner of some layers."""
    device = Cpu()
    model = settle_text(config, device)
    if (begin, end) != (0, model.shape.n_layers):
        model = replace(model, shape=stage_of(model.shape, begin, end))
    plan = make_plan(device.text, model, 1 << 33)
    weights, _ = device.text_weights(model, plan, lambda stage, done: None)
    return device.text_runner(plan, weights, None, lambda stage, done: None)


def requests() -> list[Request]:
    """Requests with everything that a step of text may carry: company, drafts, several sequences, log-probabilities."""
    generator, every = random.Random(5), []
    for i in range(10):
        ids = generator.choices(range(256), k=generator.choice([1, 63, 64, 65, 150, 200]))
        if i % 3 == 0:
            ids = ids[:7] + [7] * 150  # and so it goes on, so that drafts are right
        params = SamplingParams(
            max_tokens=generator.choice([1, 9, 90]),
            temperature=generator.choice([0.0, 1.0]),
            seed=i,
            n=2 if i == 4 else 1,
            repetition_penalty=1.1 if i == 5 else 1.0,
            logit_bias={7: 100.0} if i % 3 == 0 else {},
            logprobs=3,
            prompt_logprobs=2 if i in (2, 6) else None,
            ignore_eos=i % 2 == 0,
        )
        every.append(Request(id=str(i), prompt_ids=ids, params=params))
    return every


def answers(runner: Any, rounds: int = 2) -> list[dict[tuple[str, int], list[Output]]]:
    """What the requests are answered, all together; the second time from the prefix cache."""
    engine, found = Engine(runner), []
    for _ in range(rounds):
        outputs: dict[tuple[str, int], list[Output]] = {}
        for request in requests():
            engine.add(request)
        for n in itertools.count():
            if n in (6, 14, 30):
                for sequence in [*engine.scheduler._decodes, *engine.scheduler._prefills][1:3]:
                    engine.scheduler._preempt(sequence)
            for output in engine.step():
                outputs.setdefault((output.id, output.index), []).append(output)
            if not engine.has_work():
                break
        engine.check()
        found.append(outputs)
    stats = engine.stats()
    assert stats.n_preemptions and stats.cache.n_hit_tokens and sum(stats.accepted.values()), stats
    return found


def said(outputs: dict[tuple[str, int], list[Output]]) -> dict[tuple[str, int], Any]:
    """Tokens, log-probabilities as they were computed, and how it ended."""
    return {
        key: (
            [token for output in each for token in output.token_ids],
            [entry for output in each for entry in output.logprobs or ()],
            [list(output.prompt_logprobs) for output in each if output.prompt_logprobs is not None],
            each[-1].finish_reason,
        )
        for key, each in outputs.items()
    }


KINDS: dict[str, dict[str, Any]] = {"dense": {}, "dense tied": {"tied": True}, "moe": {}, "next": {}}


@pytest.mark.parametrize("n_stages", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_run_apart_are_the_model(name: str, n_stages: int) -> None:
    """Two and three stages of 12 layers, of which the one between has neither embedding nor head."""
    checkpoint = tiny_checkpoint(name.partition(" ")[0], n_layers=12, **KINDS[name])
    config = EngineConfig(model=str(checkpoint), **SETTINGS)
    bounds = [12 * i // n_stages for i in range(n_stages + 1)]
    alone = runner_of(config, 0, 12)
    stages = [runner_of(config, *span) for span in itertools.pairwise(bounds)]
    assert sum(stage.plan.weight_bytes for stage in stages) < alone.plan.weight_bytes * 1.1
    expected = answers(alone)
    for found, wanted in zip(answers(Chain(stages)), expected, strict=True):
        assert said(found) == said(wanted)


def test_random_weights_of_stages_are_the_models() -> None:
    config = EngineConfig(dummy="qwen3.5-0.8b", quantize="int8", **SETTINGS)
    device, found = Cpu(), {}
    shape = settle_text(config, device).shape
    for begin, end in ((0, 24), (0, 4), (4, 8), (20, 24)):
        model = replace(settle_text(config, device), shape=shape if end == 24 else stage_of(shape, begin, end))
        weights, _ = model.load(device.store(make_plan(device.text, model, 1 << 34)), lambda stage, done: None)
        for name, memory in weights.named_memory():
            field, _, rest = name.partition(".")
            number, _, part = rest.partition(".")
            named = f"layers.{int(number) + begin}.{part}" if field == "layers" else name
            if end == 24:
                found[named] = memory
            elif memory.nbytes:
                assert np.array_equal(found[named], memory), named
