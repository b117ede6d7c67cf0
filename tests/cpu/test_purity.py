"""Purity on the CPU: the logits and tokens of a sequence have the same bits whatever runs beside it.

Each property compares whole rows of float32 logits bit for bit, on tiny checkpoints of every kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache, partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltic.config import EngineConfig
from deltic.engine.loop import Engine
from deltic.engine.request import Request, SamplingParams
from deltic.engine.runner import Runner, build_runner
from deltic.ops.table import Program, usable_instruction_sets
from tests.tiny import tiny_checkpoint

KINDS = ("dense", "moe", "next")
relaxed = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def runner(kind: str, threads: int = 2) -> Runner:
    config = EngineConfig(
        model=str(tiny_checkpoint(kind)),
        max_num_seqs=8,
        max_model_len=512,
        max_step_tokens=320,
        threads=threads,
    )
    return build_runner(config, lambda stage, done: None)


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


class Recorder:
    """A runner that keeps the logits of every draw of one request, as the engine makes them."""

    def __init__(self, inner: Runner, watched: str) -> None:
        self.inner, self.watched = inner, watched
        self.info, self.max_logit_rows = inner.info, inner.max_logit_rows
        self.rows: list[torch.Tensor] = []

    def step(self, step):  # type: ignore[no-untyped-def]
        result = self.inner.step(step)
        row = 0
        drawn = {draw.chunk for draw in step.draws}
        for i, chunk in enumerate(step.chunks):
            n_rows = chunk.length if chunk.prompt_logprobs else int(i in drawn)
            if i in drawn and chunk.sequence.request.id == self.watched and chunk.sequence.index == 0:
                self.rows.append(self.inner.logits(row + n_rows)[-1].clone())
            row += n_rows
        return result


def run(
    inner: Runner, ids: list[int], others: Iterable[tuple[int, list[int], SamplingParams]] = (), *,
    n_tokens: int = 12, step_tokens: int | None = None, preempt_at: int | None = None, **params: object,
) -> tuple[list[int], torch.Tensor]:  # fmt: skip
    """Tokens and logits of one request; `others` join before the given step. preempt_at: evict it before that step."""
    recorder = Recorder(inner, "watched")
    engine = Engine(recorder)
    if step_tokens is not None:
        engine.scheduler.max_step_tokens = step_tokens
    arguments = {"temperature": 0.0, "ignore_eos": True, "max_tokens": n_tokens, **params}
    engine.add(Request(id="watched", prompt_ids=ids, params=SamplingParams(**arguments)))
    waiting = sorted(others, key=lambda other: other[0])
    tokens: list[int] = []
    n_steps = 0
    while engine.has_work():
        while waiting and waiting[0][0] <= n_steps:
            _, other, other_params = waiting.pop(0)
            engine.add(Request(id=f"other-{len(waiting)}", prompt_ids=other, params=other_params))
        if n_steps == preempt_at:
            for sequence in [*engine.scheduler._decodes, *engine.scheduler._prefills]:
                if sequence.request.id == "watched":
                    engine.scheduler._preempt(sequence)
        for output in engine.step():
            if output.id == "watched" and output.index == 0:
                tokens += output.token_ids
        n_steps += 1
    engine.check()
    return tokens, torch.stack(recorder.rows)


def assert_same_bits(a: tuple[list[int], torch.Tensor], b: tuple[list[int], torch.Tensor]) -> None:
    assert a[0] == b[0]
    assert torch.equal(a[1].view(torch.int32), b[1].view(torch.int32))


other_requests = st.lists(
    st.tuples(
        st.integers(0, 10),
        st.builds(prompt, st.integers(0, 999), st.integers(1, 200)),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 20),
            temperature=st.sampled_from([0.0, 1.0]),
            n=st.integers(1, 3),
            frequency_penalty=st.sampled_from([0.0, 0.5]),
            logprobs=st.sampled_from([None, 3]),
        ),
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(length=st.integers(1, 200), seed=st.integers(0, 99), others=other_requests)
def test_batch(kind: str, length: int, seed: int, others: list) -> None:
    """P1: alone or among others that come and go."""
    ids = prompt(seed, length)
    assert_same_bits(run(runner(kind), ids), run(runner(kind), ids, others))


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(length=st.integers(65, 330), step_tokens=st.sampled_from([64, 100, 128, 200, 320]))
def test_chunking(kind: str, length: int, step_tokens: int) -> None:
    """P2: any budget, hence any cut of the prompt at multiples of 64."""
    ids = prompt(length, length)
    assert_same_bits(run(runner(kind), ids, step_tokens=256), run(runner(kind), ids, step_tokens=step_tokens))


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(length=st.integers(1, 150), n_decoded=st.integers(1, 70))
def test_prefill_is_decode(kind: str, length: int, n_decoded: int) -> None:
    """Tokens decoded one by one give the bits that a prefill of the same text gives."""
    ids = prompt(length, length)
    tokens, rows = run(runner(kind), ids, n_tokens=n_decoded + 1)
    again, row = run(runner(kind), ids + tokens[:-1], n_tokens=1)
    assert again == tokens[-1:]
    assert torch.equal(row[0].view(torch.int32), rows[-1].view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(length=st.integers(1, 150), preempt_at=st.integers(1, 12), others=other_requests)
def test_preemption(kind: str, length: int, preempt_at: int, others: list) -> None:
    """P4: a sequence that loses its pages and state goes on with the same bits."""
    ids = prompt(length, length)
    tokens, rows = run(runner(kind), ids)
    tokens_again, rows_again = run(runner(kind), ids, others, preempt_at=preempt_at)
    assert tokens == tokens_again
    assert torch.equal(rows.view(torch.int32), rows_again.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_threads(kind: str) -> None:
    """Any number of threads."""
    ids = prompt(5, 150)
    assert_same_bits(run(runner(kind, 1), ids), run(runner(kind, 3), ids))


@pytest.mark.parametrize("library", usable_instruction_sets())
def test_every_instruction_set(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for the library chosen here holds for the others: batch, cut, and prefill as decode."""
    monkeypatch.setattr("deltic.engine.runner.Program", partial(Program, library=library))
    config = EngineConfig(model=str(tiny_checkpoint("moe")), max_num_seqs=4, max_model_len=512, threads=2)
    inner, ids = build_runner(config, lambda stage, done: None), prompt(3, 130)
    crowd = [(i, prompt(i, 40 * i + 9), SamplingParams(max_tokens=9)) for i in range(3)]
    tokens, rows = run(inner, ids)
    assert_same_bits((tokens, rows), run(inner, ids, crowd, step_tokens=100))
    again, row = run(inner, ids + tokens[:-1], n_tokens=1)
    assert again == tokens[-1:] and torch.equal(row[0].view(torch.int32), rows[-1].view(torch.int32))


@relaxed
@given(seed=st.integers(0, 2**63 - 1), others=other_requests)
def test_seeded_draws(seed: int, others: list) -> None:
    """P6: sampled tokens depend on logits, seed and position, not on the batch."""
    ids = prompt(seed % 1000, 70)
    sampled = {"seed": seed, "temperature": 0.9, "top_p": 0.95, "top_k": 40, "n_tokens": 20}
    assert_same_bits(run(runner("dense"), ids, **sampled), run(runner("dense"), ids, others, **sampled))
