"""Drafts on a GPU change nothing but the time: tokens and log-probabilities with and without them, bit for bit; nor does a draft
head, which guesses behind some of the steps.

Random schedules (tests/drafted.py) on models smaller than those of other tests. Planted faults show that the comparison would see a
token too many, a state that has seen what was not accepted, or not what was, and inputs of rejected rows in the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from deltic.config import ConfigError, EngineConfig, without_foreign
from deltic.engine.drafts import Drafting
from deltic.engine.engine import Engine
from deltic.engine.step import Chunk, Step, StepResult
from tests import tiny
from tests.drafted import Answers, Schedule, Sizes
from tests.gpu.test_gpu_engine import without_syncs

pytest.importorskip("triton")
from deltic.models.qwen import gpu as qwen_gpu
from deltic.ops.gpu.blocks import Rows, StateSlots, window_rows
from deltic.ops.gpu.fp8 import Operand
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.batch_slots import BatchSlots
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner

HAS_GPU = torch.cuda.is_available()
SMALL = {"HIDDEN": 64, "FFN": 64, "N_Q_HEADS": 2, "N_KV_HEADS": 1, "N_K_HEADS": 1, "K_DIM": 16, "V_DIM": 16}
SMALL |= {"N_EXPERTS": 4, "EXPERT_WIDTH": 32, "SHARED_WIDTH": 32}
SIZES = Sizes() if HAS_GPU else Sizes(3, 16, (58, 61), 4, abort_at=8, preempts=0.12)
"""Interpreted: so that few tokens pass the end of a page."""
FEW = Sizes(1, 24, (61,), 3, preempts=0.0)
MAX_DRAFTS = 4
"""So no step has more than 16 rows: with more the tile is another, which changes bits of NumPy's products (but none on a GPU)."""


@cache
def small_checkpoint(kind: str) -> Path:
    """With a draft head; its steps take a third of the time of those of other tests, interpreted."""
    if HAS_GPU:
        return tiny.tiny_checkpoint(kind, has_mtp=True)
    with pytest.MonkeyPatch.context() as patch:
        tiny.set_sizes(patch, SMALL)
        return tiny.tiny_checkpoint(kind, has_mtp=True, seed=1)


@cache
def build(kind: str, max_drafts: int = MAX_DRAFTS, format: str = "bf16") -> GpuTextRunner:
    kind, _, states = kind.partition(", ")
    config = EngineConfig(
        model=str(small_checkpoint(kind)), state_dtype="bfloat16" if states else "float32", max_drafts=max_drafts,
        max_num_seqs=6 if HAS_GPU else 3, max_model_len=512 if HAS_GPU else 192, max_step_tokens=128, n_pages=30,
        n_checkpoints=6, kv_cache_dtype=format,
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Gpu())


@cache
def truth(kind: str, seed: int, sizes: Sizes, format: str = "bf16") -> Answers:
    with pytest.MonkeyPatch.context() as patch:
        answers, engine = Schedule(seed, ("1",), sizes=sizes).run(build(kind, 0, format), patch)
    assert engine.stats().n_drafted == 0
    return answers


def drafted(
    kind: str, seed: int, sizes: Sizes, patch: pytest.MonkeyPatch, format: str = "bf16"
) -> tuple[Answers, Engine, int]:
    """With guesses of the head asked for at random. Gives how many it made, too."""
    plan, rng, runner, n_guessed = Drafting.plan, Random(seed), build(kind, format=format), 0
    step_of = runner.step

    def counted(step: Step) -> StepResult:
        nonlocal n_guessed
        with without_syncs():
            result = step_of(step)
        n_guessed += sum(map(len, result.guesses))
        return result

    patch.setattr(runner, "step", counted)

    def guessing(self: Drafting, step: Step) -> None:
        ran_ahead = any(draw.sequence.runs_ahead for draw in step.draws)
        plan(self, step)
        most = rng.choice((0, 1, 3))
        if ran_ahead or not most or not all(chunk.is_decode for chunk in step.chunks):
            return
        step.runs_ahead = False
        for draw in step.draws:
            draw.n_guesses, draw.sequence.runs_ahead = rng.randrange(1 + most), False

    patch.setattr(Drafting, "plan", guessing)
    answers, engine = Schedule(seed, ("1",), truth(kind, seed, sizes, format), sizes).run(runner, patch)
    return answers, engine, n_guessed


@pytest.mark.parametrize(
    ("kind", "seed", "sizes"),
    [
        pytest.param("dense", 131, SIZES, marks=pytest.mark.long),
        ("next", 7, SIZES if HAS_GPU else FEW),
        pytest.param("flash", 7, SIZES if HAS_GPU else FEW, marks=pytest.mark.long),
        pytest.param("dense, bfloat16 states", 7, SIZES if HAS_GPU else FEW, marks=pytest.mark.long),
    ],
)
def test_drafts_change_no_bit(kind: str, seed: int, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    found, engine, n_guessed = drafted(kind, seed, sizes, monkeypatch)
    stats = engine.stats()
    assert n_guessed > 5, "the head has guessed"
    assert stats.n_drafted > stats.n_accepted > 5 and (stats.n_preemptions > 0 or sizes is FEW)
    assert found == truth(kind, seed, sizes)


@pytest.mark.long
@pytest.mark.parametrize("format", [pytest.param("fp8", marks=pytest.mark.long), "turboquant_k8v4"])
def test_drafts_change_no_bit_of_quantised_keys_and_values(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES if HAS_GPU else FEW
    found, engine, n_guessed = drafted("dense", 7, sizes, monkeypatch, format)
    stats = engine.stats()
    assert n_guessed > 3 and stats.n_drafted > stats.n_accepted > 5
    assert found == truth("dense", 7, sizes, format)


# Faults.

Patch = pytest.MonkeyPatch


def one_too_many(patch: Patch) -> None:
    """A token is taken whose row does not belong to it."""
    accepted = Chunk.accepted
    patch.setattr(Chunk, "accepted", lambda self, drawn: drawn[: len(accepted(self, drawn)) + 1])


def not_redone(patch: Patch) -> None:
    """The state never sees the tokens of a window."""
    rows = BatchSlots.rows
    patch.setattr(
        BatchSlots, "rows", lambda self, chunks, n: rows(self, [replace(chunk, n_redo=0) for chunk in chunks], n)
    )


def _beside(patch: Patch, spoil: Callable[..., None]) -> None:
    """Behind each mixer with drafts something else happens: spoil gets what the mixer does, and its rows' lengths."""
    mixer = qwen_gpu.gdn_decode

    def gdn_decode(*given: Any, rows: Rows, **more: Any) -> None:
        mixer(*given, rows=rows, **more)
        if rows.drafts is not None:
            spoil(lambda **other: mixer(*given, **{"rows": rows, **more, **other}), rows, **more)

    patch.setattr(qwen_gpu, "gdn_decode", gdn_decode)


def committed_early(patch: Patch) -> None:
    """The state has seen the first row of a draft before it is redone."""

    def spoil(mixer: Callable[..., None], rows: Rows, out: Operand, **_: Any) -> None:
        assert rows.drafts is not None
        state_slot = torch.where(rows.drafts.length > 1, rows.state_slot, -1)
        mixer(rows=replace(rows, state_slot=state_slot, drafts=None), out=Operand(out.rows.clone()))

    _beside(patch, spoil)


def columns_not_rolled_back(patch: Patch) -> None:
    """The convolution goes on behind rows that were not accepted."""

    def spoil(mixer: Callable[..., None], rows: Rows, memory: StateSlots, **_: Any) -> None:
        windows = memory.windows
        assert rows.drafts is not None and windows is not None
        for i, length in enumerate(rows.drafts.length.tolist()):
            window, end = windows.columns[rows.batch_slot[i]], int(rows.position[i])
            for j in range(1, 4) if length > 1 else ():
                window[(end - j) % len(window)] = window[(end + length - j) % len(window)]

    _beside(patch, spoil)


@pytest.mark.long
@pytest.mark.skipif(HAS_GPU, reason="recorded steps cannot be changed")
@pytest.mark.parametrize(
    "fault", [one_too_many, not_redone, committed_early, columns_not_rolled_back], ids=lambda f: f.__name__
)
def test_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found, _, _ = drafted("dense", 19, FEW, monkeypatch)
    assert found != truth("dense", 19, FEW)


# What surrounds it.


def test_what_is_planned_and_refused() -> None:
    """Rows, windows and the draft head are counted; by default there are no drafts; speech has none."""
    plain, found = build("dense", 0), build("dense")
    shape = found.plan.shape
    assert plain.info.max_drafts == 0 and plain.info.n_lookahead == 1 and plain.workspace.decode.windows is None
    assert found.info.max_drafts == MAX_DRAFTS and found.info.n_lookahead == 1
    assert found.info.has_draft_head and found.model.weights.draft_head is not None
    assert not plain.info.has_draft_head and plain.model.weights.draft_head is None and plain.draft_head is None
    assert (
        found.plan.page_bytes == 2 * plain.plan.page_bytes == found.memory[0].pages[0].nbytes
    )  # one layer, and the head's
    assert found.plan.weight_bytes > plain.plan.weight_bytes
    assert found.plan.workspace["guesses"] == (1 + MAX_DRAFTS) * found.plan.n_decode_rows * 4
    assert found.info.notices == plain.info.notices == []
    sizes, of_head = found.recordings.row_sizes, ("draft keys", "first guess", "next guess")
    made = {kind: [n for variant, n, _ in reversed(found.recordings.made) if variant == kind] for kind in of_head}
    assert made == dict.fromkeys(of_head, sizes)
    n = found.plan.max_num_seqs
    assert found.plan.n_decode_rows == n + min(64, n * MAX_DRAFTS) == sizes[-1]
    n_bytes = n * shape.n_gdn_layers * window_rows(1 + MAX_DRAFTS) * shape.conv_channels * 2
    assert found.plan.workspace["window columns"] == n_bytes
    with pytest.raises(ConfigError, match=r"--max-drafts 4 is for a text model"):
        without_foreign(EngineConfig(max_drafts=4), "cuda", "speech")
