"""Embedders on a GPU: vectors have the same bits in any company, however their prompts are cut, and whatever the cache has."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests.cpu.test_embedder import prompt, request, runner, vectors
from tests.cpu.test_joint_head import decider, decision
from tests.cpu.test_joint_head import runner as joint_runner
from tests.tiny import tiny_embedder


@cache
def gpu_runner(kind: str, mode: str) -> GpuTextRunner:
    config = EngineConfig(
        model=str(tiny_embedder(kind, mode)), max_num_seqs=4, max_model_len=256, max_step_tokens=128, n_pages=24, n_checkpoints=8,
        cache_host_gb=0.2,
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Gpu())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "mode"), [("dense", "lasttoken"), pytest.param("moe", "mean_tokens", marks=pytest.mark.long)]
)
def test_vectors_have_the_same_bits_in_any_company(kind: str, mode: str) -> None:
    own, ids = gpu_runner(kind, mode), prompt(1, 150)
    alone = vectors(Engine(own), [request("a", ids, mode)])["a"]
    others = [request(f"b{i}", prompt(i + 7, 30 + 50 * i), mode) for i in range(2)]
    engine = Engine(own)
    assert vectors(engine, [others[0], request("a", ids, mode), others[1]])["a"] == alone, "in company"
    assert vectors(engine, [request("a", ids, mode)])["a"] == alone, "warm"
    cut = Engine(own)
    cut.scheduler.max_step_tokens = 64
    assert vectors(cut, [request("a", ids, mode)])["a"] == alone, "in chunks"
    ours, theirs = (
        np.frombuffer(vector, np.float32)
        for vector in (alone, vectors(Engine(runner(kind, mode)), [request("a", ids, mode)])["a"])
    )
    assert ours @ theirs > 0.99, "as a CPU's, but for what is rounded"


@pytest.mark.long
def test_decisions_of_a_joint_head_have_the_same_bits_in_any_company() -> None:
    config = EngineConfig(
        model=str(decider()), max_num_seqs=4, max_model_len=1536, max_step_tokens=1024, n_pages=64, n_checkpoints=8, cache_host_gb=0.2
    )  # fmt: skip
    own = build_runner(config, lambda stage, done: None, Gpu())
    engine = Engine(own)
    alone = vectors(engine, [decision(engine, "The server is down!")])["a"]
    assert vectors(engine, [decision(engine, "x" * 40, "b"), decision(engine, "The server is down!")])["a"] == alone
    theirs = vectors(Engine(joint_runner()), [decision(engine, "The server is down!")])["a"]
    assert np.corrcoef(np.frombuffer(alone, np.float32), np.frombuffer(theirs, np.float32))[0, 1] > 0.9
