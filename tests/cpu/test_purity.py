"""Purity on the CPU: the logits and tokens of a sequence have the same bits whatever runs beside it.

Each property compares whole rows of float32 logits bit for bit, on tiny checkpoints of every kind in every format.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.runtime.build import build_runner
from deltic.runtime.cpu import text as runner_module
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.grid import grid
from tests.spoilt import every_byte, spoil, spoil_before_each_run
from tests.tiny import tiny_checkpoint

KINDS = ("dense", "moe", "next", "flash")
FORMATS = (None, "int8", "int4")
KV = {("next", None): "int8", ("flash", "int8"): "k8v4", ("dense", "int8"): "k8v4", ("moe", "int4"): "int8"}
"""Formats of keys and values, by model; of the others bf16."""
EVERY_MODEL = (*product(KINDS, FORMATS), ("next, bfloat16 states", "int8"))
FEW = (("dense", None), ("flash", None), ("dense", "int8"), ("moe", "int4"), ("next, bfloat16 states", "int8"))
"""Every kind, every format and every format of keys and values."""
every_model = pytest.mark.parametrize(("kind", "quantize"), grid(EVERY_MODEL, FEW, pytest.mark.long))
SETS = usable_instruction_sets()
EVERY_KERNEL = [*product(SETS, FORMATS)]
relaxed = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))


def build(kind: str, quantize: str | None, threads: int = 2, weights_cache: Path | None = None) -> Runner:
    kind, _, states = kind.partition(", ")
    config = EngineConfig(
        model=str(tiny_checkpoint(kind)),
        state_dtype="bfloat16" if states else "float32",
        quantize=quantize,
        kv_cache_dtype=KV.get((kind, quantize), "auto"),
        weights_cache=weights_cache,
        max_num_seqs=8,
        max_model_len=512,
        max_step_tokens=320,
        threads=threads,
    )
    return build_runner(config, lambda stage, done: None, Cpu())


@cache
def runner(kind: str, quantize: str | None) -> Runner:
    return build(kind, quantize)


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


class Recorder:
    """A runner that keeps the logits of every draw of one request, as the engine makes them."""

    def __init__(self, inner: Runner, watched: str) -> None:
        self.inner, self.watched = inner, watched
        self.info, self.max_logit_rows, self.tiers = inner.info, inner.max_logit_rows, inner.tiers
        self.pictures, self.adapters, self.replays = inner.pictures, inner.adapters, inner.replays
        self.experts = inner.experts
        self.rows: list[Array] = []

    def is_busy(self) -> bool:
        return self.inner.is_busy()

    def step(self, step):  # type: ignore[no-untyped-def]
        result = self.inner.step(step)
        row = 0
        drawn = {draw.chunk for draw in step.draws}
        for i, chunk in enumerate(step.chunks):
            n_rows = chunk.length if chunk.prompt_logprobs else int(i in drawn)
            if i in drawn and chunk.sequence.request.id == self.watched and chunk.sequence.index == 0:
                self.rows.append(self.inner.logits(row + n_rows)[-1].copy())
            row += n_rows
        return result


def run(
    inner: Runner, ids: list[int], others: Iterable[tuple[int, list[int], SamplingParams]] = (), *,
    n_tokens: int = 12, step_tokens: int | None = None, preempt_at: int | None = None,
    after: Iterable[list[int]] = (), **params: object,
) -> tuple[list[int], Array]:  # fmt: skip
    """Tokens and logits of one request; `others` join before the given step. preempt_at: evict it before that step.
    after: prompts that were served before, and are in the prefix cache."""
    recorder = Recorder(inner, "watched")
    engine = Engine(recorder)
    if step_tokens is not None:
        engine.scheduler.max_step_tokens = step_tokens
    for i, earlier in enumerate(after):
        engine.add(Request(id=f"earlier-{i}", prompt_ids=earlier, params=SamplingParams(temperature=0.0)))
        while engine.has_work():
            engine.step()
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
    return tokens, np.stack(recorder.rows)


def assert_same_bits(a: tuple[list[int], Array], b: tuple[list[int], Array]) -> None:
    assert a[0] == b[0]
    assert np.array_equal(a[1].view(np.int32), b[1].view(np.int32))


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


class DirectCalls(Program):
    """A program that is no list: every kernel call is a program of its own, run one after another."""

    def __init__(self, *settings: object, **more: object) -> None:
        super().__init__(*settings, **more)
        self.one = partial(Program, *settings, **more)
        self.calls: list[Program] = []

    def call(self, kernel: str, *arguments: Array | int | float | None) -> None:
        one = self.one()
        one.call(kernel, *arguments)
        self.calls.append(one)

    def run(self) -> None:
        for one in self.calls:
            one.run()


@every_model
@relaxed
@given(length=st.integers(1, 200), seed=st.integers(0, 99), others=other_requests)
def test_batch(kind: str, quantize: str | None, length: int, seed: int, others: list) -> None:
    """P1: alone or among others that come and go."""
    ids, inner = prompt(seed, length), runner(kind, quantize)
    assert_same_bits(run(inner, ids), run(inner, ids, others))


@every_model
@relaxed
@given(length=st.integers(65, 330), step_tokens=st.sampled_from([64, 100, 128, 200, 320]))
def test_chunking(kind: str, quantize: str | None, length: int, step_tokens: int) -> None:
    """P2: any budget, hence any cut of the prompt at multiples of 64."""
    ids, inner = prompt(length, length), runner(kind, quantize)
    assert_same_bits(run(inner, ids, step_tokens=256), run(inner, ids, step_tokens=step_tokens))


@every_model
@relaxed
@given(length=st.integers(65, 330), n_known=st.integers(65, 330), others=other_requests)
def test_cache(kind: str, quantize: str | None, length: int, n_known: int, others: list) -> None:
    """P3: hit or miss. What else there is to a prefix cache: test_prefix.py."""
    ids, inner = prompt(length, length), runner(kind, quantize)
    cold = run(inner, ids)
    assert_same_bits(cold, run(inner, ids, others, after=[ids[:n_known]]))
    assert_same_bits(cold, run(inner, ids, after=[ids[:n_known], ids + cold[0], ids]))


@every_model
@relaxed
@given(length=st.integers(1, 150), n_decoded=st.integers(1, 70))
def test_prefill_is_decode(kind: str, quantize: str | None, length: int, n_decoded: int) -> None:
    """Tokens decoded one by one give the bits that a prefill of the same text gives."""
    ids, inner = prompt(length, length), runner(kind, quantize)
    tokens, rows = run(inner, ids, n_tokens=n_decoded + 1)
    assert_same_bits((tokens[-1:], rows[-1:]), run(inner, ids + tokens[:-1], n_tokens=1))


@every_model
@relaxed
@given(length=st.integers(1, 150), preempt_at=st.integers(1, 12), others=other_requests)
def test_preemption(kind: str, quantize: str | None, length: int, preempt_at: int, others: list) -> None:
    """P4: a sequence that loses its pages and state goes on with the same bits."""
    ids, inner = prompt(length, length), runner(kind, quantize)
    assert_same_bits(run(inner, ids), run(inner, ids, others, preempt_at=preempt_at))


@every_model
@relaxed
@given(seed=st.integers(0, 2**63 - 1), others=other_requests)
def test_seeded_draws(kind: str, quantize: str | None, seed: int, others: list) -> None:
    """P6: sampled tokens depend on logits, seed and position, not on the batch."""
    ids, inner = prompt(seed % 1000, 70), runner(kind, quantize)
    sampled = {"seed": seed, "temperature": 0.9, "top_p": 0.95, "top_k": 40, "n_tokens": 20}
    assert_same_bits(run(inner, ids, **sampled), run(inner, ids, others, **sampled))


@every_model
def test_threads(kind: str, quantize: str | None) -> None:
    """Any number of threads, also of those that packed the weights."""
    ids = prompt(5, 150)
    expected = run(runner(kind, quantize), ids)
    for threads in (1, 3):
        assert_same_bits(run(build(kind, quantize, threads), ids), expected)


@every_model
def test_recorded_step_is_its_calls(kind: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing passes from one kernel to the next but by the memory that both were given."""
    monkeypatch.setattr(runner_module, "Program", DirectCalls)
    direct = build(kind, quantize)
    assert isinstance(direct.program, DirectCalls) and len(direct.program.calls) > 20
    ids, crowd = prompt(7, 150), [(i, prompt(i, 30 * i + 1), SamplingParams(max_tokens=7)) for i in range(3)]
    assert_same_bits(run(runner(kind, quantize), ids, crowd), run(direct, ids, crowd))


@every_model
@every_byte
def test_what_nobody_has_written_is_not_read(
    kind: str, quantize: str | None, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages and state slots before their first owner; before each step, what it has between its inputs and its draws."""
    spoilt = build(kind, quantize)
    spoil(spoilt.memory, byte)
    spoil_before_each_run(spoilt.program, spoilt.workspace.activations, byte)
    spoil_before_each_run(spoilt.program, spoilt.workspace.sampler.scratch, byte, but=("counts",))
    ids, crowd = (
        prompt(9, 150),
        [(i, prompt(i, 60 * i + 1), SamplingParams(max_tokens=9, logprobs=3)) for i in range(4)],
    )
    sampled = {"seed": 5, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5}
    assert_same_bits(run(runner(kind, quantize), ids, crowd, **sampled), run(spoilt, ids, crowd, **sampled))
    assert "not finite" not in caplog.text, "an answer was computed anew"


@every_model
def test_mapped_weights_are_the_loaded_ones(
    kind: str, quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start from packed weights on disk gives the bits of the start that packed them."""
    build(kind, quantize, weights_cache=tmp_path)
    monkeypatch.delattr("deltic.runtime.model.load_weights")
    mapped, ids = build(kind, quantize, weights_cache=tmp_path), prompt(8, 130)
    assert_same_bits(run(runner(kind, quantize), ids), run(mapped, ids))


@pytest.mark.parametrize(
    ("library", "quantize"), grid(EVERY_KERNEL, [(SETS[-1], None), (SETS[-1], "int8")], pytest.mark.long)
)
def test_every_instruction_set(library: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for the library chosen here holds for the others: batch, cut, and prefill as decode."""
    monkeypatch.setattr(runner_module, "Program", partial(Program, library=library))
    inner, ids = build("moe", quantize), prompt(3, 130)
    crowd = [(i, prompt(i, 40 * i + 9), SamplingParams(max_tokens=9)) for i in range(3)]
    tokens, rows = run(inner, ids)
    assert_same_bits((tokens, rows), run(inner, ids, crowd, step_tokens=100))
    assert_same_bits((tokens[-1:], rows[-1:]), run(inner, ids + tokens[:-1], n_tokens=1))
