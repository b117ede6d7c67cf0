"""Prompts with pictures on a GPU, or on its kernels interpreted: as a CPU answers them, and purity (P1 to P4) over whole requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Picture, Request
from deltic.models.qwen.published import published_shape
from deltic.models.rotary import PromptPositions
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import empty_vision
from tests.cpu.test_picture_prompts import picture, request
from tests.planned import planned
from tests.tiny import tiny_checkpoint

pytest.importorskip("triton")
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests.gpu.test_gpu_engine import HAS_GPU, LOGPROB_TOLERANCE, Entry, answers, needs_gpu
from tests.gpu.test_gpu_engine import _note as note

N_TOKENS = 24 if HAS_GPU else 3
KINDS = ("dense", "moe") if HAS_GPU else ("dense",)
DRAFTED = 60
LONG = "A long text before the picture, so that it is on another page. " * 3

Part = str | Picture


@cache
def runner(kind: str, device: str = "cuda", max_drafts: int = 0) -> Any:
    config = EngineConfig(
        model=str(tiny_checkpoint(kind, has_tower=True, has_mtp=True)), max_num_seqs=4, max_model_len=512,
        max_step_tokens=256, n_pages=40, n_checkpoints=12, cache_host_gb=0.1, max_picture_tokens=80,
        max_drafts=max_drafts, **({"threads": 1} if device == "cpu" else {}),
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Gpu() if device == "cuda" else Cpu())


def asked(name: str, *parts: Part, n_tokens: int = N_TOKENS, **params: Any) -> Request:
    return request(name, *parts, max_tokens=n_tokens, logprobs=10, **params)


def alone(kind: str, *parts: Part, device: str = "cuda", **params: Any) -> list[Entry]:
    engine = Engine(runner(kind, device))
    engine.add(asked("a", *parts, **params))
    found: list[Entry] = answers(engine)["a/0"]
    return found


def farthest(found: list[Entry], expected: list[Entry]) -> float:
    """The largest difference of the likeliest ids' log-probabilities, as long as both draw the same."""
    most = 0.0
    for (token, logprob, top), (other, other_logprob, other_top) in zip(found, expected, strict=True):
        values, others = dict(top), dict(other_top)
        most = max([most, *(abs(values[i] - others[i]) for i in list(others)[:3] if i in values)])
        if token != other:
            break
        most = max(most, abs(logprob - other_logprob))
    return most


PROMPTS: dict[str, list[Part]] = {
    "a": [LONG[:50], picture(8, 9, 2), "What ", picture(2, 4, 6, 2), "is it?"],
    "b": [LONG[:50], picture(8, 9, 2), "What ", picture(2, 4, 6, 2), "do you see?" + LONG[:70], picture(2, 2, 3), "!"],
    "text": ["Say something. " * (6 if HAS_GPU else 2)],
}
"""With pictures over the end of a page, a pair of frames, and a prefix in common."""


@cache
def expected(kind: str, name: str) -> list[Entry]:
    return alone(kind, *PROMPTS[name])


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_cpu(kind: str) -> None:
    """Within the tolerance of the oracle, which a CPU keeps, too (tests/cpu/test_picture_prompts.py compares it with it); of a mixture
    twice that, since either may send a token to another expert where two are nearly as likely.
    """
    parts = PROMPTS["a"]
    found, meant = expected(kind, "a"), alone(kind, *parts, device="cpu")
    assert farthest(found, meant) < LOGPROB_TOLERANCE * (2 if kind == "moe" else 1)
    other = [part if isinstance(part, str) else picture(part.rows, part.columns, 40, part.n_frames) for part in parts]
    blind = alone(kind, *other, n_tokens=1, device="cpu")
    assert blind[0][0] != found[0][0] or farthest(blind, found[:1]) > 2 * LOGPROB_TOLERANCE, "the picture matters"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_company_cuts_cache_or_preemption(kind: str) -> None:
    engine = Engine(runner(kind))
    engine.scheduler.max_step_tokens = 64
    for name in ("text", "a"):
        engine.add(asked(name, *PROMPTS[name]))
    if HAS_GPU:
        engine.add(asked("other", "See ", picture(4, 5, 8), "!"))
    found: dict[str, list[Entry]] = {}
    while not (decoding := [s for s in engine.scheduler._decodes if s.request.id == "a"]):
        assert engine.has_work()
        for output in engine.step():
            note(found, output)
    engine.scheduler._preempt(decoding[0])
    for name, entries in answers(engine).items():
        found[name] = found.get(name, []) + entries
    assert engine.scheduler.n_preemptions == 1
    assert found["a/0"] == expected(kind, "a") and found["text/0"] == expected(kind, "text")
    assert engine.pictures is not None and engine.pictures.n_encoded == 2 + HAS_GPU
    engine.add(asked("b", *PROMPTS["b"]))
    assert answers(engine)["b/0"] == expected(kind, "b")
    assert engine.cache.stats.n_hits and engine.pictures.n_encoded == 3 + HAS_GPU, "the pictures of the prefix were not"
    engine.close(0)


def test_angles_behind_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode stands where the prompt ends, which is not where its tokens end."""
    meant = expected("dense", "a")
    monkeypatch.setattr(PromptPositions, "shift", 0)
    wrong = alone("dense", *PROMPTS["a"], n_tokens=2)
    assert wrong[0] == meant[0] and wrong[1] != meant[1]


@needs_gpu
def test_drafts_change_no_bit() -> None:
    """P5: drafted rows, and those of the head, stand behind the pictures, too."""
    parts: list[Part] = ["Say it again: again again again ", picture(3, 5), " again again again again again"]
    meant = alone("dense", *parts, n_tokens=DRAFTED)
    engine = Engine(runner("dense", max_drafts=4))
    engine.add(asked("a", *parts, n_tokens=DRAFTED))
    assert answers(engine)["a/0"] == meant
    assert engine.scheduler.drafting.drafted


def test_the_largest_picture_shrinks_first() -> None:
    """Where memory is tight, before fewer sequences run."""
    kind = Gpu().text
    shape, tower = published_shape("qwen3.5-0.8b"), VisionShape.published("0.8b", 1024)
    plans = [planned(EngineConfig(model=""), shape, kind, 1000, gb << 30, 0, tower=tower) for gb in (24, 5)]
    assert [(plan.max_picture_tokens, plan.max_step_tokens) for plan in plans] == [(16384, 8192), (4096, 8192)]
    assert plans[0].max_num_seqs > plans[1].max_num_seqs > 8 and plans[0].tower_bytes == empty_vision(tower).n_bytes


def test_what_is_planned_and_said() -> None:
    made = runner("dense")
    assert isinstance(made, GpuTextRunner) and made.info.pictures is not None
    assert made.info.pictures.max_tokens == 80 and made.pictures is made.tower is not None
    w, plan = made.workspace, made.plan
    assert w.vision is not None and w.picture_rows is not None and len(w.vision.residual) == 512
    assert len(w.picture_rows) == 64 * plan.n_picture_blocks == 64 * made.pictures.n_blocks
    assert (
        plan.workspace["pictures"] == w.picture_rows.nbytes and plan.workspace["vision keys"] == w.vision.memory.nbytes
    )
    assert made.tower.forward.weights.n_bytes == plan.tower_bytes


@needs_gpu
def test_text_is_the_same_without_a_tower() -> None:
    """Angles by axis, and rows of pictures, change no bit of a text."""
    kind = "dense"
    config = EngineConfig(
        model=str(tiny_checkpoint(kind, has_tower=True, has_mtp=True)), max_num_seqs=4, max_model_len=512,
        max_step_tokens=256, n_pages=40, n_checkpoints=12, max_picture_tokens=0, max_drafts=0,
    )  # fmt: skip
    blind = build_runner(config, lambda stage, done: None, Gpu())
    assert blind.pictures is None and blind.workspace.decode.rows.angle_shift is None
    engine = Engine(blind)
    engine.add(asked("a", LONG[:90]))
    assert answers(engine)["a/0"] == alone(kind, LONG[:90])


@needs_gpu
def test_a_picture_that_is_not_finite() -> None:
    """It is encoded once more."""
    made = runner("dense")
    parts: list[Part] = ["See ", picture(3, 5, 11), "?"]
    meant = alone("dense", *parts)
    engine = Engine(made)
    engine.add(asked("a", *parts))
    found: list[Output] = []
    assert engine.pictures is not None
    while engine.has_work():
        n = engine.pictures.n_encoded
        found += engine.step()
        if (n, engine.pictures.n_encoded) == (0, 1):
            made.workspace.picture_rows.fill_(torch.nan)
    assert engine.stats().n_recomputed == 1 and engine.pictures.n_encoded == 2
    entries = [(e.token_id, e.logprob, tuple(e.top)) for output in found for e in output.logprobs or []]
    assert entries == meant and not any(output.error for output in found)
