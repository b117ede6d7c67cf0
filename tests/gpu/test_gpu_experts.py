"""Experts outside the GPU: the bits are those of a layer whose experts are all on it, whatever is in the slots, and the slots hold
what was used last.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.runtime import fit
from deltic.runtime.build import build_runner, settle
from deltic.runtime.fit import make_plan
from tests import tiny
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import tiny_quantised

pytest.importorskip("triton")
from deltic.models.qwen.gpu_experts import slot_bytes
from deltic.models.qwen.weights import Moe
from deltic.ops.contract import KernelError
from deltic.ops.geometry import Routing
from deltic.ops.gpu import moe_decode as moe_decode_module
from deltic.ops.gpu import weight
from deltic.ops.gpu.expert_slots import (
    Counts,
    ExpertSlots,
    Stage,
    bring,
    expert_slots,
    parts_of,
    stage_in,
    stage_memory,
    with_memory,
)
from deltic.ops.gpu.launch import allocate_in_host, allocate_on
from deltic.ops.gpu.moe_decode import moe_decode, moe_scratch
from deltic.ops.gpu.moe_prefill import moe_prefill, moe_prefill_scratch
from deltic.ops.gpu.weight import mapped_memory
from deltic.ops.matrix import Matrix
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.plan import brought
from tests.gpu.test_gpu_drafts import SMALL, small_checkpoint
from tests.gpu.test_gpu_engine import HAS_GPU, Entry, answers, prompt, request
from tests.gpu.test_gpu_lora import adapter_of
from tests.gpu.test_gpu_moe import _blocks
from tests.gpu.test_gpu_moe_formats import HIDDEN, MIXES, N_EXPERTS, WIDTH, K, Layer
from tests.gpu.test_gpu_quantised_engine import k_m

FORMATS = ["int4-g128-bfloat16", "fp8", "Q4_K", "NVFP4", "gate and up apart", "routed experts in bf16"]
ROUTING = Routing(K, True)


@cache
def layer_of(mix: str, device: str) -> Layer:
    return Layer(MIXES[mix], device)


def in_host(w: Matrix) -> Matrix:
    """The same matrices in memory of the host."""
    memory = [mapped_memory(segment.data.shape) for segment in w.segments]
    for to, segment in zip(memory, w.segments, strict=True):
        to.copy_(segment.data)
    return with_memory(w, memory)


class Outside:
    """A layer's weights with its routed experts in the host's memory, and its slots."""

    def __init__(self, layer: Layer, n_slots: int) -> None:
        self.layer, self.device, w = layer, layer.device, layer.weights
        self.weights = Moe(w.router, in_host(w.gate_up), in_host(w.down), w.shared_gate_up, w.shared_down)
        self.slots = slots_of(self.weights.gate_up, self.weights.down, n_slots, layer.device)

    def decode(self, x: Tensor, slots: ExpertSlots | None) -> Tensor:
        """With the slots, or None: as the layer is on the GPU."""
        n = len(x)
        scratch = moe_scratch(n, N_EXPERTS, K, WIDTH, self.layer.shared, allocate_on(self.device))
        out = torch.full((K + 1, n, HIDDEN), float("nan"), device=self.device)
        row_slot = torch.arange(n, dtype=torch.int32, device=self.device)
        w = self.layer.weights if slots is None else self.weights
        moe_decode(x, w, ROUTING, row_slot=row_slot, scratch=replace(scratch, expert_slots=slots), out=out)
        return out

    def prefill(self, x: Tensor, slots: ExpertSlots | None, is_filled: bool = False) -> Tensor:
        n = len(x)
        scratch = moe_prefill_scratch(
            n, HIDDEN, N_EXPERTS, K, WIDTH, self.layer.shared, allocate_on(self.device), has_e4m3=True
        )
        w, stage = self.layer.weights, None
        if slots is not None:
            w, stage = self.weights, stage_of(slots)
            if is_filled:
                stage.fill()
                stage = replace(stage, is_filled=True)
        out = torch.full((n, HIDDEN), float("nan"), device=self.device)
        blocks = _blocks([64] * (n // 64), self.device)
        moe_prefill(x, w, ROUTING, blocks=blocks, scratch=replace(scratch, stage=stage), out=out)
        return out


def slots_of(gate_up: Matrix, down: Matrix, n_slots: int, device: str) -> ExpertSlots:
    counts = Counts(torch.zeros(4, dtype=torch.int64, device=device), allocate_in_host("counts", (4,), torch.int64))
    return expert_slots(gate_up, down, n_slots, counts, allocate_on(device))


def stage_of(slots: ExpertSlots) -> Stage:
    """With poison in it."""
    return stage_in(stage_memory([slots.home], allocate_on(slots.slot.device)).fill_(255), slots)


@pytest.mark.parametrize("mix", [FORMATS[0], *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS[1:])])
def test_bits_are_those_of_experts_on_the_gpu(device: str, mix: str) -> None:
    """With one slot, half of them and all, cold and warm, alone and in company, in a decode and in a prefill of either way."""
    layer = layer_of(mix, device)
    rows = layer.rows(3 if device == "cpu" else 24)
    steps = [rows[:1], rows, rows[:1]] if device == "cpu" else [rows[:1], rows[:5], rows, rows[3:4], rows[:1]]
    prompt = layer.rows(64)
    all_here = Outside(layer, N_EXPERTS).slots
    for n_slots in (1, N_EXPERTS // 2, N_EXPERTS):
        outside = Outside(layer, n_slots)
        for x in steps:
            # one row is routed as several are: in the interpreter another way has numpy's other bits
            expected = outside.decode(x, None if device == "cuda" else all_here)
            assert torch.equal(outside.decode(x, outside.slots), expected), (n_slots, len(x))
        for is_filled in (False, True) if n_slots != 1 or device == "cuda" else (True,):
            found = outside.prefill(prompt, outside.slots, is_filled)
            assert torch.equal(found, outside.prefill(prompt, None)), (n_slots, is_filled)


def twelve_experts(device: str, generator: torch.Generator, n_slots: int) -> ExpertSlots:
    """Slots of a layer of random bytes."""
    w = layer_of("Q4_K", device).weights

    def twelve(m: Matrix) -> Matrix:
        (segment,) = m.segments
        memory = mapped_memory((12, segment.data.shape[1]))
        memory.copy_(torch.randint(0, 256, memory.shape, generator=generator, dtype=torch.uint8))
        return with_memory(m, [memory])

    return slots_of(twelve(w.gate_up), twelve(w.down), n_slots, device)


@pytest.mark.parametrize("n_slots", [1, 3, 5, 12])
def test_slots_hold_what_was_used_last(device: str, n_slots: int) -> None:
    """Against an ordered dictionary: what a step uses stays, then the slot goes that was used longest ago, the lower of equals.
    Bytes are where they are said to be, and the counts are right.
    """
    n_experts, generator = 12, torch.Generator().manual_seed(n_slots)
    slots = twelve_experts(device, generator, n_slots)
    used: OrderedDict[int, tuple[int, int]] = OrderedDict((slot, (0, slot)) for slot in range(n_slots))  # step, expert
    n_here, n_fetched, units = 0, 0, sum(part.shape[1] for part in slots.parts) // 256
    for step in range(1, 13):
        needed = torch.randperm(n_experts, generator=generator)[: 1 + step % 4].sort().values.tolist()
        counters = torch.zeros(n_experts + 1, dtype=torch.int32, device=device)
        counters[needed] = 2
        bring(slots, counters)
        held = {expert: slot for slot, (_, expert) in used.items()}
        for expert in needed:
            if expert in held:
                used[held[expert]] = step, expert
        missing = [expert for expert in needed if expert not in held]
        n_here, n_fetched = n_here + len(needed) - len(missing), n_fetched + len(missing)
        free = sorted((last, slot) for slot, (last, _) in used.items() if last < step)
        for expert, (_, slot) in zip(missing, free, strict=False):
            used[slot] = step, expert
        assert slots.held.tolist() == [expert for _, expert in used.values()]
        assert slots.counts.found.tolist() == slots.counts.seen.tolist() == [n_here, n_fetched, n_fetched * units, 0]
        where = {expert: slot for slot, (_, expert) in used.items()}
        assert slots.slot.tolist() == [where.get(expert, -1) for expert in range(n_experts)]
        for i, (own, home) in enumerate(zip(slots.parts, parts_of(*slots.home), strict=True)):
            for expert in range(n_experts):
                at = own[where[expert]] if expert in where else home[expert]
                assert own.data_ptr() + 256 * int(slots.where[i, expert]) == at.data_ptr()
                assert torch.equal(at.cpu(), home[expert])


@pytest.mark.parametrize("n_slots", [1, 5, 12])
def test_a_stage_gets_what_is_in_no_slot(device: str, n_slots: int) -> None:
    """And nothing else, before and behind decodes; places are right, what came is counted, and slots stay as they are."""
    slots = twelve_experts(device, torch.Generator().manual_seed(n_slots), n_slots)
    units, n_staged = sum(part.shape[1] for part in slots.parts) // 256, 0
    for step in range(3):
        counters = torch.zeros(13, dtype=torch.int32, device=device)
        counters[torch.tensor([2, 7, 9, 11]) - step] = 3
        if step:
            bring(slots, counters)
        before, held = [slots.used.tolist(), slots.slot.tolist()], slots.held.tolist()
        for given in (None, counters):
            stage = stage_of(slots)
            stage.fill(given)
            come = [e for e in range(12) if e not in held and (given is None or int(given[e]) > 0)]
            n_staged += len(come) * units
            assert slots.counts.found.tolist()[3] == slots.counts.seen.tolist()[3] == n_staged
            for i, (own, to, home) in enumerate(zip(slots.parts, stage.parts, parts_of(*slots.home), strict=True)):
                for expert in range(12):
                    at = own[held.index(expert)] if expert in held else to[expert]
                    assert own.data_ptr() + 256 * int(stage.where[i, expert]) == at.data_ptr()
                    assert torch.equal(
                        to[expert].cpu(), home[expert] if expert in come else torch.full_like(home[0], 255)
                    )
        assert [slots.used.tolist(), slots.slot.tolist()] == before and slots.held.tolist() == held
    assert (n_staged == 0) == (n_slots == 12)


def test_a_layer_has_one_slot_at_least_and_no_more_than_experts(device: str) -> None:
    w = layer_of("Q4_K", device).weights
    for n in (0, N_EXPERTS + 1):
        with pytest.raises(KernelError, match=f"1 to {N_EXPERTS} slots"):
            slots_of(w.gate_up, w.down, n, device)


def test_memory_of_the_host_is_unlocked_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gets the same address next would be refused, and the pages would stay locked."""
    locked = dict[int, int]()

    class Runtime:
        def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
            assert address not in locked
            locked[address] = n_bytes
            return 0 if n_bytes < 1 << 20 else 712

        def cudaHostUnregister(self, address: int) -> int:
            assert ctypes.string_at(address, 1) == b"\7", "it is still there"
            del locked[address]
            return 0

    monkeypatch.setattr(weight, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    for _ in range(3):
        memory = mapped_memory((2, 4096))
        memory.fill_(7)
        assert locked == {memory.data_ptr(): 8192} and memory.shape == (2, 4096)
        rest = memory[1]
        del memory
        assert len(locked) == 1 and bool((rest == 7).all()), "a view of it is left"
        del rest
        assert not locked
    with pytest.raises(MemoryError, match=r"0\.0 GB of the host's memory cannot be mapped for the GPU \(712\)"):
        mapped_memory((1, 1 << 20))


# Whole models.


@cache
def without_a_head() -> Path:
    """A small mixture whose drafts are those of n-grams."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.set_sizes(patch, SMALL)
        return tiny_checkpoint("moe", seed=2)


DRAFTS: dict[str, Any] = {"max_drafts": 4}
LORA: dict[str, Any] = {"allow_lora_loading": True, "max_loras": 2, "max_lora_rank": 20, "lora_gb": 0.05}
MODELS: dict[str, tuple[Callable[[], Path], dict[str, Any]]] = {
    "int4": (lambda: tiny_checkpoint("moe"), {"quantize": "int4"}),
    "guesses of a draft head": (lambda: small_checkpoint("moe"), DRAFTS),
    "drafts of n-grams": (without_a_head, DRAFTS),
    "adapters": (lambda: small_checkpoint("moe"), LORA),
    "Flash-Next": (lambda: tiny_checkpoint("flash"), {}),
    "GGUF": (lambda: tiny_gguf("moe", k_m), {}),
    "NVFP4": (lambda: tiny_quantised("moe", "nvfp4").path, {}),
    "FP8": (lambda: tiny_quantised("moe", "qwen-fp8").path, {}),
}
"""Checkpoints, and settings beside the memory of experts."""
SHORT = ("drafts of n-grams", "adapters")
"""Those that are no long tests: what starts other kernels, on a small model."""


@cache
def runner(name: str, share: float | None) -> GpuTextRunner:
    """With slots for this share of the experts, one at least. None: with all experts on the GPU, and without drafts."""
    path, settings = MODELS[name]
    gb = None
    if share is not None:
        here = runner(name, None)
        gb = share * here.plan.shape.n_experts * slot_bytes(here.model.weights) / 1e9
    settings = {key: value for key, value in settings.items() if share is not None or key not in DRAFTS}
    config = EngineConfig(
        model=str(path()), max_num_seqs=8, max_model_len=512, max_step_tokens=384, n_pages=30, n_checkpoints=2, expert_memory=gb, **settings
    )  # fmt: skip
    found: GpuTextRunner = build_runner(config, lambda stage, done: None, Gpu())
    for seed in (1, 2) if found.adapters is not None else ():
        assert found.adapters.load_now(adapter_of(found.plan.shape, seed)).error is None
    return found


def ask(
    runner: GpuTextRunner, prompts: list[list[int]], n_tokens: int, **params: Any
) -> tuple[dict[str, list[Entry]], Engine]:
    """Answers of all at once; where there are adapters, of one without and of one with each."""
    engine = Engine(runner)
    for i, ids in enumerate(prompts):
        one = request(f"{i}", ids, n_tokens, **params)
        one.adapter = bytes([i % 3] * 16) if runner.adapters is not None and i % 3 else b""
        engine.add(one)
    return answers(engine), engine


@pytest.fixture
def in_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one row routed as several are, as where experts are outside: in the interpreter another way has numpy's other bits."""
    if not HAS_GPU:
        tiles = moe_decode_module.moe_tiles
        monkeypatch.setattr(moe_decode_module, "moe_tiles", lambda n, w: replace(tiles(n, w), alone=False))


@pytest.mark.long
def test_answers_are_those_of_a_model_on_the_gpu(in_lists: None) -> None:
    """A prompt whose prefill takes whole layers, one that does not, and decodes together; and what is counted."""
    prompts = [prompt(n, n) for n in ((300, 5, 64, 130) if HAS_GPU else (260, 5))]
    few, all_here = runner("int4", 0.0), runner("int4", None)
    assert few.plan.n_expert_slots == 1 and all_here.plan.n_expert_slots == 0
    assert few.plan.outside_bytes == all_here.plan.weight_bytes - few.plan.weight_bytes > 0
    n_tokens = 24 if HAS_GPU else 2
    assert few.experts is not None
    before = few.experts.n_prefill_bytes
    assert ask(few, prompts, n_tokens)[0] == ask(all_here, prompts, n_tokens)[0]
    assert all_here.experts is None and few.experts is not None
    assert few.experts.n_bytes > few.experts.n_fetched > 0
    n_bytes = few.experts.n_prefill_bytes - before
    assert n_bytes == (few.plan.shape.n_experts - 1) * slot_bytes(few.model.weights) or (HAS_GPU and n_bytes > 0), (
        "one step"
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in MODELS]
)
def test_what_else_a_model_has_keeps_its_answers(name: str, in_lists: None) -> None:
    """Drafts, which share what their rows bring; adapters; other models and formats; warm and cold slots."""
    prompts = [prompt(n, n) for n in ((300, 5, 64, 130) if HAS_GPU else (20, 5))]
    drafts, n_tokens = "max_drafts" in MODELS[name][1], 24 if HAS_GPU else 2
    if drafts:
        n_tokens = max(n_tokens, 10)
    bias = {"logit_bias": {7: 6.0}} if drafts else {}  # an answer that repeats is drafted
    expected, _ = ask(runner(name, None), prompts, n_tokens, **bias)
    for share in (0.0, 0.7) if HAS_GPU else (0.7,):
        outside = runner(name, share)
        assert 0 < outside.plan.n_expert_slots < outside.plan.shape.n_experts
        found, engine = ask(outside, prompts, n_tokens, **bias)
        assert found == expected
        assert not drafts or engine.stats().n_drafted > 0
        assert outside.experts is not None and outside.experts.n_fetched > 0


def test_a_plan_leaves_outside_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 35B on cards of 6 to 40 GB: the smaller the card, the fewer slots, and none too many."""
    gpu, plans = Gpu(), []
    model = settle(EngineConfig(dummy="qwen3.6-35b-a3b", quantize="int4", device="cuda"), gpu)
    for gb in (6, 8, 12, 16, 40):
        plan = make_plan(gpu.text, model, gb * 10**9, host_free_bytes=64 * 10**9)
        assert plan.total_bytes - plan.host_bytes <= plan.budget_bytes and plan.max_model_len >= 4096
        plans.append(plan)
    slots = [plan.n_expert_slots for plan in plans]
    assert 0 < slots[0] < slots[1] < slots[2] < slots[3] < 256 and slots[4] == 0 == plans[4].outside_bytes
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: 10 * 10**9)
    with pytest.raises(
        ConfigError, match=r"GPUs read the embedding and experts in the host's memory, 18.\d GB, and 10.0 GB are free"
    ):
        fit.refuse_little_memory(plans[0])
    fit.refuse_little_memory(plans[4])
    dense = settle(EngineConfig(dummy="qwen3.5-4b", expert_memory=1.0, device="cuda"), gpu)
    with pytest.raises(ConfigError, match=r"--expert-memory 1.0: the model has no routed experts; leave it out"):
        make_plan(gpu.text, dense, 80 * 10**9, host_free_bytes=64 * 10**9)


def test_each_of_several_gpus_has_slots_for_its_part() -> None:
    """Twice as many in the same memory; the host has all parts, and each GPU's link brings its own."""
    plans = []
    for more, gpu in (({}, Gpu()), ({"tensor_parallel": 2}, Gpu((), 2)), ({"tp_invariant": 2}, Gpu((), 1, 2))):
        config = EngineConfig(dummy="qwen3.6-35b-a3b", quantize="int4", expert_memory=4.0, device="cuda", **more)
        plans.append(make_plan(gpu.text, settle(config, gpu), 80 * 10**9, host_free_bytes=64 * 10**9))
        assert plans[-1].workspace["expert slots"] <= 4e9 < plans[-1].workspace["expert slots"] * 1.02
    one, two, parts = plans
    assert one.outside_bytes == pytest.approx(two.outside_bytes, rel=0.01) and two.outside_bytes == parts.outside_bytes
    assert two.n_expert_slots == pytest.approx(2 * one.n_expert_slots, abs=2)
    assert parts.n_expert_slots == pytest.approx(one.n_expert_slots, abs=2)
    assert brought(parts, 8192) == pytest.approx(brought(one, 8192), rel=0.03)
    away = 1 - two.n_expert_slots / 256
    assert brought(two, 8192) == pytest.approx(two.outside_bytes / 2 * away)
