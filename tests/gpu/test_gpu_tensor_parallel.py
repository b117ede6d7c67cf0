"""A model over several ranks: the tokens and log-probabilities of one rank are those of the others, and next to those of a model that
is whole. Off a GPU each rank is a process with an interpreter of its own (test_gpu_all_reduce.py says why)."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.models.dflash.weights import DrafterWeights
from deltic.models.qwen.shard import cut
from deltic.models.qwen.weights import Weights, dummy_weights, load_weights
from deltic.ops.gpu.launch import INTERPRETED, Levers, bound_levers
from deltic.ops.gpu.weight import DeviceStore
from deltic.runtime.build import build_runner
from deltic.runtime.gpu import buffers
from deltic.runtime.gpu.buffers import exchanges, gpu_workspace, meeting
from deltic.runtime.gpu.device import Gpu, TextOnGpu
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.model import Vision
from deltic.runtime.plan import TextPlan
from tests import tiny
from tests.cpu.test_reference import prompt
from tests.gpu.test_gpu_draft_head import drafted
from tests.gpu.test_gpu_drafts import SMALL
from tests.gpu.test_gpu_engine import without_syncs
from tests.heads import run, sequence
from tests.planned import planned, settled

N_RANKS = 2
interpreted = pytest.mark.skipif(not INTERPRETED, reason="ranks are processes of the interpreter here")
T = TypeVar("T")
SIZES = SMALL | {"HIDDEN": 128, "FFN": 128, "N_Q_HEADS": 4, "N_KV_HEADS": 2, "N_K_HEADS": 2, "K_DIM": 32, "V_DIM": 32}
"""Interpreted: what is cut in two has two heads of each kind, and little beside."""


@cache
def checkpoint(kind: str, **more: Any) -> Path:
    if not INTERPRETED:
        return tiny.tiny_checkpoint(kind, **more)
    with pytest.MonkeyPatch.context() as patch:
        tiny.set_sizes(patch, SIZES)
        return tiny.tiny_checkpoint(kind, seed=3, **more)


def config_of(kind: str, **more: Any) -> EngineConfig:
    settings = {"max_num_seqs": 3, "max_model_len": 192, "max_step_tokens": 128, "n_pages": 12, "n_checkpoints": 2}
    return EngineConfig(**({"model": str(checkpoint(kind)), "max_drafts": 0} | settings | more))


def plan_of(kind: str, n_gpus: int = N_RANKS, n_cuts: int | None = None, **more: Any) -> tuple[Path, TextPlan]:
    model, plan = settled(config_of(kind, **more), Gpu(n_gpus=n_gpus, n_cuts=n_cuts), 2 << 30)
    return model.directory, plan


def shared(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype).share_memory_()


class Answers(NamedTuple):
    """Tokens, log-probabilities and those of the prompt's tokens, by request."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompts: list[list[float]]


PROMPTS = {"a": [i * 7 % 250 for i in range(70)], "b": [3, 1, 4, 1, 5]}
"""One is long; they decode beside each other."""


def answers(
    engine: Engine, prompts: dict[str, list[int]] = PROMPTS, is_scored: bool = True, adapter: bytes = b""
) -> Answers:
    """is_scored: with log-probabilities of the prompts, for which these are computed even if the cache has them.
    adapter: of the first request.
    """
    found = {name: Answers([], [], []) for name in prompts}
    for name, ids in prompts.items():
        params = SamplingParams(
            max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=0 if is_scored else None
        )
        engine.add(Request(id=name, prompt_ids=ids, params=params, adapter=adapter if name == "a" else b""))
    while engine.has_work():
        with nullcontext() if is_scored else without_syncs():  # log-probabilities of prompts wait
            outputs = engine.step()
        for output in outputs:
            assert output.error is None
            of = found[output.id]
            of.tokens.append(output.token_ids)
            of.logprobs.append([entry.logprob for entry in output.logprobs or []])
            of.prompts.append([entry.logprob for entry in output.prompt_logprobs or [] if entry])
    return Answers(*([[*chain(*part)] for part in parts] for parts in zip(*found.values(), strict=True)))


def share_whole_parts(weights: Weights, first: Weights) -> None:
    """Gives random weights of a part those of the first that are no part: embedding and norms."""
    weights.embed, weights.norm = first.embed, first.norm
    for layer, of_first in zip(weights.layers, first.layers, strict=True):
        layer.input_norm, layer.post_norm = of_first.input_norm, of_first.post_norm


def of_ranks(
    directory: Path | None,
    plan: TextPlan,
    use: Callable[[GpuTextRunner], T],
    vision: Vision | None = None,
    drafter: DrafterWeights | None = None,
) -> T:
    """What each rank gives, in a process of its own, which is the same. directory: None for random weights. vision: a tower, which each
    rank runs for itself here. drafter: a block drafter, of each.
    """
    workspaces = [gpu_workspace(plan.of_gpu(i), shared) for i in range(plan.n_gpus)]
    in_host = None if bound_levers().peer else meeting(plan, shared, is_in_host=True)
    store, weights = DeviceStore("cpu", has_experts=not plan.n_expert_slots), []
    for i, cuts in enumerate(plan.cuts):  # here: in a process that was forked, torch's own threads fail at times
        if directory is None:
            weights.append(dummy_weights(cuts.shape, i, store=store))
            share_whole_parts(weights[-1], weights[0])
        else:
            weights.append(load_weights(directory, cuts.shape, quantize=plan.quantize, store=store, cuts=cuts)[0])
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()

    def of_rank(i: int) -> None:
        own = weights[i * plan.n_shards : (i + 1) * plan.n_shards]
        exchange = workspaces[i], exchanges(workspaces, plan.cuts, in_host)[i]
        try:
            queue.put((i, use(GpuTextRunner(plan.of_gpu(i), own, vision=vision, exchange=exchange, drafter=drafter))))
        except BaseException as error:
            queue.put((i, error))

    processes = [fork.Process(target=of_rank, args=(i,)) for i in range(plan.n_gpus)]
    for process in processes:
        process.start()
    found: dict[int, T] = {}
    try:
        for _ in processes:
            i, of = queue.get(timeout=240)
            assert not isinstance(of, BaseException), f"rank {i}: {of!r}"
            found[i] = of
    finally:
        for process in processes:
            process.join(10 if len(found) == len(processes) else 0)
            process.kill()
    assert all(one == found[0] for one in found.values())
    return found[0]


@interpreted
@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("dense", "bf16"),
        pytest.param("moe", "bf16", marks=pytest.mark.long),
        pytest.param("flash", "bf16", marks=pytest.mark.long),
        pytest.param("dense", "fp8", marks=pytest.mark.long),
    ],
)
def test_ranks_answer_as_one(kind: str, format: str) -> None:
    """With pages of bfloat16, or quantised ones, of each part."""
    directory, plan = plan_of(kind, 1, kv_cache_dtype=format)
    weights, _ = load_weights(directory, plan.shape, store=DeviceStore("cpu"))
    expected = answers(Engine(GpuTextRunner(plan, [weights])))
    directory, plan = plan_of(kind, kv_cache_dtype=format)
    with Levers(fused_sums=kind != "moe").bound():
        found = of_ranks(directory, plan, lambda runner: answers(Engine(runner)))
    check_next_to(found, expected, kind)
    directory, plan = plan_of(kind, 1, N_RANKS, kv_cache_dtype=format)  # one rank that has both parts
    assert of_ranks(directory, plan, lambda runner: answers(Engine(runner))) == found


@interpreted
def test_rows_in_e4m3_are_those_of_one_kernel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that reach each other's memory, or meet in the host's, where sums and logits go through in pieces."""
    monkeypatch.setattr(buffers, "SUM_ROWS", 48)
    monkeypatch.setattr(buffers, "HOST_LOGIT_ROWS", 1)
    found, short = [], {name: ids[:20] for name, ids in PROMPTS.items()}
    for given in (Levers(), Levers(fused_sums=False), Levers(peer=False)):
        directory, plan = plan_of("dense", quantize="fp8")
        with given.bound():
            found.append(of_ranks(directory, plan, lambda runner: answers(Engine(runner), short)))
    directory, plan = plan_of("dense", 1, N_RANKS, quantize="fp8")  # one rank that has both parts
    found.append(of_ranks(directory, plan, lambda runner: answers(Engine(runner), short)))
    assert found[0].tokens[0] and all(one == found[0] for one in found)


@pytest.mark.long
@interpreted
def test_four_parts_on_one_two_and_four_ranks() -> None:
    """With random weights of four key heads, and one key and value head, which all have."""
    _, whole = plan_of("dense", 1)
    shape = replace(
        whole.shape,
        layer_types=whole.shape.layer_types[2:4],
        gdn_n_k_heads=4,
        gdn_n_v_heads=8,
        n_q_heads=4,
        n_kv_heads=1,
    )
    largest, cuts = cut(shape, 4, are_even=True)
    found, short = [], {name: ids[:20] for name, ids in PROMPTS.items()}
    for n_gpus in (1, 2, 4):
        plan = planned(
            config_of("dense"),
            largest,
            TextOnGpu(Levers()),
            shape.vocab_size,
            2 << 30,
            1 << 30,
            cuts=cuts,
            n_gpus=n_gpus,
        )
        with Levers(fused_sums=n_gpus != 2, peer=n_gpus != 4).bound():
            found.append(of_ranks(None, plan, lambda runner: answers(Engine(runner), short)))
    assert found[0] == found[1] == found[2] and found[0].tokens[0]


class Guessed(NamedTuple):
    """Tokens of a sequence drawn one by one, of one whose drafts are guesses, the first two of these, and
    logits of the second.
    """

    plain: list[int]
    tokens: list[int]
    first: list[int]
    logits: list[float]


def guessed(runner: GpuTextRunner) -> Guessed:
    plain = sequence(prompt(40))
    run(runner, plain, 40)
    for _ in range(4):
        run(runner, plain, 1)
    of = sequence(prompt(40), batch_slot=1)
    run(runner, of, 40)
    first = guesses = run(runner, of, 1, 2)
    logits = runner.workspace.decode.logits[: runner.plan.shape.n_drafted].tolist()
    while len(of.tokens) < len(plain.tokens):
        guesses = drafted(runner, of, guesses, 2)
    return Guessed(plain.tokens.tolist(), of.tokens[: len(plain.tokens)].tolist(), first, logits)


@interpreted
@pytest.mark.long
@pytest.mark.parametrize(("kind", "peer"), [("dense", True), ("dense", False), ("flash", True)])
def test_ranks_guess_as_one(kind: str, peer: bool) -> None:
    directory = checkpoint(kind, has_mtp=True)
    config = replace(config_of(kind), model=str(directory), max_drafts=2)
    _, plan = settled(config, Gpu(), 2 << 30)
    weights, _ = load_weights(directory, plan.shape, store=DeviceStore("cpu"))
    _, joint = settled(config, Gpu(n_gpus=N_RANKS), 2 << 30)
    whole = replace(plan, shape=replace(plan.shape, most_drafted=joint.shape.n_drafted))  # that the first rank has
    expected = guessed(GpuTextRunner(whole, [weights]))
    with Levers(peer=peer).bound():
        found = of_ranks(directory, joint, guessed)
    assert found.tokens == found.plain and found.first[0] == expected.first[0]
    assert kind != "dense" or found.plain == expected.plain
    errors = [abs(x - y) for x, y in zip(found.logits, expected.logits, strict=True)]
    assert statistics.median(errors) < 0.02 and max(errors) < 0.1
    if peer:  # one rank that has both parts
        assert of_ranks(directory, settled(config, Gpu((), 1, N_RANKS), 2 << 30)[1], guessed) == found


def check_next_to(found: Answers, expected: Answers, kind: str) -> None:
    """Beside a whole model products are added in another order; a router may choose another expert at a
    near-tie.
    """
    errors = [abs(x - y) for of in zip(found.prompts, expected.prompts, strict=True) for x, y in zip(*of, strict=True)]
    assert len(errors) == 69 + 4 and statistics.median(errors) < 0.04
    assert max(errors) < (0.12 if kind == "dense" else 0.6)
    assert kind != "dense" or found.tokens == expected.tokens


@pytest.mark.skipif(torch.cuda.device_count() < N_RANKS, reason="there are not two GPUs")
@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_two_gpus_serve_a_model(kind: str, tmp_path: Path) -> None:
    def engine(n_gpus: int, **more: Any) -> Engine:
        device = Gpu(more.get("lever", ()), n_gpus, more.get("tp_invariant"))
        return Engine(build_runner(config_of(kind, **more), lambda stage, done: None, device))

    joint = engine(N_RANKS, cache_dir=tmp_path)
    found = answers(joint)
    assert answers(engine(N_RANKS, lever=("peer=off",))) == found
    check_next_to(found, answers(engine(1)), kind)
    assert answers(engine(1, tp_invariant=N_RANKS)) == found
    for name, i in (("a", 0), ("b", 1)):  # alone, and what the cache has of it
        again = answers(joint, {name: PROMPTS[name]}, is_scored=False)
        assert again.tokens == found.tokens[i : i + 1] and again.logprobs == found.logprobs[i : i + 1]
    joint.close(10.0)
    restarted = engine(N_RANKS, cache_dir=tmp_path)
    assert answers(restarted, is_scored=False).tokens == found.tokens
    assert restarted.stats().cache.read_bytes["disk"] > 0
