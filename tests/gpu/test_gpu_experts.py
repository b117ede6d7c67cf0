"""Experts outside the GPU: the bits are those of a layer whose experts are all on it, whatever is in the slots, and the slots hold
what was used last.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.runtime import plan as planner
from deltic.runtime.build import build_runner, settle
from deltic.runtime.plan import make_plan
from tests.tiny import tiny_checkpoint

pytest.importorskip("triton")
from deltic.models.qwen.weights import Moe
from deltic.ops.contract import KernelError
from deltic.ops.geometry import Routing
from deltic.ops.gpu.expert_slots import (
    Counts,
    ExpertSlots,
    bring,
    expert_slots,
    parts_of,
    stage_bytes,
    stage_in,
    with_memory,
)
from deltic.ops.gpu.launch import allocate_in_host, allocate_on
from deltic.ops.gpu.moe_decode import moe_decode, moe_scratch
from deltic.ops.gpu.moe_prefill import moe_prefill, moe_prefill_scratch
from deltic.ops.gpu.weight import mapped_memory
from deltic.ops.matrix import Matrix
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests.gpu.test_gpu_engine import Entry, answers, prompt, request
from tests.gpu.test_gpu_moe import _blocks
from tests.gpu.test_gpu_moe_formats import HIDDEN, MIXES, N_EXPERTS, WIDTH, K, Layer

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
            memory = torch.full((stage_bytes(w.gate_up, w.down),), 255, dtype=torch.uint8, device=self.device)
            w, stage = self.weights, stage_in(memory, slots)
            if is_filled:
                stage.fill()
                stage = replace(stage, is_filled=True)
        out = torch.full((n, HIDDEN), float("nan"), device=self.device)
        blocks = _blocks([64] * (n // 64), self.device)
        moe_prefill(x, w, ROUTING, blocks=blocks, scratch=replace(scratch, stage=stage), out=out)
        return out


def slots_of(gate_up: Matrix, down: Matrix, n_slots: int, device: str) -> ExpertSlots:
    counts = Counts(torch.zeros(3, dtype=torch.int64, device=device), allocate_in_host("counts", (3,), torch.int64))
    return expert_slots(gate_up, down, n_slots, counts, allocate_on(device))


@pytest.mark.parametrize("mix", [FORMATS[0], *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS[1:])])
def test_bits_are_those_of_experts_on_the_gpu(device: str, mix: str) -> None:
    """With one slot, half of them and all, cold and warm, alone and in company, in a decode and in a prefill of either way."""
    layer = layer_of(mix, device)
    rows = layer.rows(3 if device == "cpu" else 24)
    steps = [rows[:1], rows, rows[:1]] if device == "cpu" else [rows[:1], rows[:5], rows, rows[3:4], rows[:1]]
    prompt = layer.rows(64)
    for n_slots in (1, N_EXPERTS // 2, N_EXPERTS):
        outside = Outside(layer, n_slots)
        for x in steps:
            # one row is routed as several are: in the interpreter another way has numpy's other bits
            expected = outside.decode(x, None) if device == "cuda" else outside.decode(x, all_in(outside))
            assert torch.equal(outside.decode(x, outside.slots), expected), (n_slots, len(x))
        for is_filled in (False, True) if n_slots != 1 or device == "cuda" else (True,):
            found = outside.prefill(prompt, outside.slots, is_filled)
            assert torch.equal(found, outside.prefill(prompt, None)), (n_slots, is_filled)


def all_in(outside: Outside) -> ExpertSlots:
    """Slots that hold every expert of the layer itself, in its order."""
    w = outside.layer.weights
    slots = slots_of(outside.weights.gate_up, outside.weights.down, N_EXPERTS, outside.device)
    for own, memory in zip(slots.parts, parts_of(w.gate_up, w.down), strict=True):
        own.copy_(memory)
    every = torch.arange(N_EXPERTS, dtype=torch.int32)
    slots.slot.copy_(every)
    slots.held.copy_(every)
    slots.where.copy_(slots.places[:, 1:] * every.to(slots.where.device))
    return slots


@pytest.mark.parametrize("n_slots", [1, 3, 5, 12])
def test_slots_hold_what_was_used_last(device: str, n_slots: int) -> None:
    """Against an ordered dictionary: what a step uses stays, then the slot goes that was used longest ago, the lower of equals.
    Bytes are where they are said to be, and the counts are right.
    """
    n_experts, generator = 12, torch.Generator().manual_seed(n_slots)
    w = layer_of("Q4_K", device).weights

    def twelve(m: Matrix) -> Matrix:
        (segment,) = m.segments
        memory = mapped_memory((n_experts, segment.data.shape[1]))
        memory.copy_(torch.randint(0, 256, memory.shape, generator=generator, dtype=torch.uint8))
        return with_memory(m, [memory])

    slots = slots_of(twelve(w.gate_up), twelve(w.down), n_slots, device)
    used: OrderedDict[int, tuple[int, int]] = OrderedDict((slot, (0, -1)) for slot in range(n_slots))  # step, expert
    n_here, n_fetched, units = 0, 0, sum(part.shape[1] for part in slots.parts) // 256
    for step in range(1, 13):
        needed = torch.randperm(n_experts, generator=generator)[: 1 + step % 4].sort().values.tolist()
        counters = torch.zeros(n_experts + 1, dtype=torch.int32, device=device)
        counters[needed] = 2
        bring(slots, counters)
        held = {expert: slot for slot, (_, expert) in used.items() if expert >= 0}
        for expert in needed:
            if expert in held:
                used[held[expert]] = step, expert
        missing = [expert for expert in needed if expert not in held]
        n_here, n_fetched = n_here + len(needed) - len(missing), n_fetched + len(missing)
        free = sorted((last, slot) for slot, (last, _) in used.items() if last < step)
        for expert, (_, slot) in zip(missing, free, strict=False):
            used[slot] = step, expert
        assert slots.held.tolist() == [expert for _, expert in used.values()]
        assert slots.counts.found.tolist() == slots.counts.seen.tolist() == [n_here, n_fetched, n_fetched * units]
        where = {expert: slot for slot, (_, expert) in used.items() if expert >= 0}
        assert slots.slot.tolist() == [where.get(expert, -1) for expert in range(n_experts)]
        for i, (own, home) in enumerate(zip(slots.parts, parts_of(*slots.home), strict=True)):
            for expert in range(n_experts):
                at = own[where[expert]] if expert in where else home[expert]
                assert own.data_ptr() + 256 * int(slots.where[i, expert]) == at.data_ptr()
                assert torch.equal(at.cpu(), home[expert])


def test_a_layer_has_one_slot_at_least_and_no_more_than_experts(device: str) -> None:
    w = layer_of("Q4_K", device).weights
    for n in (0, N_EXPERTS + 1):
        with pytest.raises(KernelError, match=f"1 to {N_EXPERTS} slots"):
            slots_of(w.gate_up, w.down, n, device)


@cache
def runner(expert_memory: float | None, n_drafts: int = 0) -> GpuTextRunner:
    config = EngineConfig(
        model=str(tiny_checkpoint("moe")), quantize="int4", max_num_seqs=8, max_model_len=512, max_step_tokens=384, n_pages=24,
        n_checkpoints=2, expert_memory=expert_memory, max_drafts=n_drafts,
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Gpu())


@pytest.mark.long
def test_answers_are_those_of_a_model_on_the_gpu(device: str) -> None:
    """A prompt whose prefill takes whole layers, one that does not, and decodes together; and what is counted."""
    prompts = [prompt(n, n) for n in ((260, 5) if device == "cpu" else (300, 5, 64, 130))]
    n_tokens = 2 if device == "cpu" else 24

    def ask(runner: GpuTextRunner) -> dict[str, list[Entry]]:
        engine = Engine(runner)
        for i, ids in enumerate(prompts):
            engine.add(request(f"{i}", ids, n_tokens))
        return answers(engine)

    few, all_here = runner(0.0), runner(None)
    assert few.plan.n_expert_slots == 1 and all_here.plan.n_expert_slots == 0
    assert few.plan.outside_bytes == all_here.plan.weight_bytes - few.plan.weight_bytes > 0
    assert ask(few) == ask(all_here)
    assert all_here.experts is None and few.experts is not None
    assert few.experts.n_bytes > few.experts.n_fetched > 0


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
    monkeypatch.setattr(planner, "free_memory_bytes", lambda: 10 * 10**9)
    with pytest.raises(ConfigError, match=r"GPUs read experts in the host's memory, 18.\d GB, and 10.0 GB are free"):
        planner.refuse_little_memory(plans[0])
    planner.refuse_little_memory(plans[4])
    dense = settle(EngineConfig(dummy="qwen3.5-4b", expert_memory=1.0, device="cuda"), gpu)
    with pytest.raises(ConfigError, match=r"--expert-memory 1.0: the model has no routed experts; leave it out"):
        make_plan(gpu.text, dense, 80 * 10**9, host_free_bytes=64 * 10**9)
