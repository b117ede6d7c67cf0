"""Memory plans stay what they were, refusals and their words among them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deltic.config import ConfigError, EngineConfig
from deltic.models.qwen.ngram_table import ngram_table_of
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.weights import empty_weights
from deltic.models.vision.shape import VisionShape
from deltic.ops.gpu.launch import Levers
from deltic.runtime import fit
from deltic.runtime import plan as planner
from deltic.runtime.build import build_runner, settle, settle_text, where_experts_are
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.fit import make_plan
from deltic.runtime.gpu import device as gpu
from deltic.runtime.model import TextModel
from deltic.runtime.plan import DECODERS_BYTES, TextPlan
from deltic.server.chat import pictures, videos
from deltic.server.chat.picture_parts import N_DECODING
from tests.planned import planned
from tests.plans import GOLDEN, all_plans
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import tiny_gguf


def test_plans_are_those_that_were_kept() -> None:
    """Where one is to change: python -m tests.plans, and read the difference."""
    kept, found = json.loads(GOLDEN.read_text()), all_plans()
    assert found.keys() == kept.keys()
    changed = {case: (kept[case], line) for case, line in found.items() if line != kept[case]}
    assert not changed


def test_the_largest_picture_is_halved_before_anything_else() -> None:
    shape, tower = published_shape("qwen3.5-0.8b"), VisionShape.published("qwen3.5-0.8b", 1024)

    def plan(gigabytes: float, **settings: Any) -> TextPlan:
        config = EngineConfig(dummy="qwen3.5-0.8b", **settings)
        return planned(config, shape, Cpu.text, shape.vocab_size, int(gigabytes * 1e9), tower=tower)

    wide, tight = plan(20), plan(4.3)
    assert wide.max_picture_tokens == 4096 and wide.tower_bytes > 2e8
    assert tight.max_picture_tokens < 4096 and tight.max_model_len == wide.max_model_len
    with pytest.raises(ConfigError, match=r"--max-picture-tokens 200000 does not fit .* give at most [0-9]+"):
        plan(4.7, max_picture_tokens=200_000)


def test_pixels_that_wait_are_in_the_plan() -> None:
    shape, tower = published_shape("qwen3.5-0.8b"), VisionShape.published("qwen3.5-0.8b", 1024)

    def plan(gigabytes: float, **settings: Any) -> TextPlan:
        config = EngineConfig(dummy="qwen3.5-0.8b", quantize="int8", **settings)
        return planned(config, shape, Cpu.text, shape.vocab_size, int(gigabytes * 1e9), tower=tower)

    assert plan(20).workspace["vision pixels that wait"] == plan(20).pixel_bytes == 4 * 32768 * 3072
    assert plan(4).total_bytes < 0.8 * 4e9 and plan(4).max_model_len == 32768
    assert "vision pixels that wait" not in plan(20, max_picture_tokens=0).workspace
    assert plan(20, max_num_seqs=64).pixel_bytes == 8 * 32768 * 3072


def test_decoders_of_pictures_have_room_before_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert N_DECODING * max(pictures.DECODE_MEMORY, videos.DECODE_MEMORY) == DECODERS_BYTES
    shape, tower = published_shape("qwen3.5-0.8b"), VisionShape.published("qwen3.5-0.8b", 1024)

    def plan(kind: Any, gigabytes: float, host: float | None = None, **settings: Any) -> TextPlan:
        config = EngineConfig(dummy="qwen3.5-0.8b", max_num_seqs=8, **settings)
        free, of_host = int(gigabytes * 1e9), None if host is None else int(host * 1e9)
        return planned(config, shape, kind, shape.vocab_size, free, of_host, tower=tower)

    roomy = plan(Cpu.text, 18, max_model_len=262144)
    assert roomy.budget_bytes <= 18 * 10**9 - DECODERS_BYTES
    assert plan(Cpu.text, 4.3).n_checkpoints > 0  # where there is little, both are served
    assert plan(Cpu.text, 20, memory_gb=19).budget_bytes == 19 * 10**9
    on_gpu = gpu.TextOnGpu(Levers())
    assert plan(on_gpu, 80, 8, cache_host_gb=1.5).host_bytes > 1.4e9
    assert plan(on_gpu, 80, 8, cache_host_gb=4.0, max_picture_tokens=0).host_bytes > 3.9e9
    with pytest.raises(ConfigError, match=r"8\.0 GB that are free, and what decoders of pictures leave: 1\.5 GB"):
        plan(on_gpu, 80, 8, cache_host_gb=2.0)
    assert plan(on_gpu, 80, 4, cache_host_gb=0.0).host_bytes == plan(on_gpu, 80, 4).host_bytes == 0
    monkeypatch.setattr(planner, "DECODERS_BYTES", 0)
    assert plan(Cpu.text, 18, max_model_len=262144).budget_bytes > roomy.budget_bytes + 10**9


def test_an_embedding_goes_to_the_host_before_anything_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is small; a step reads single rows of it. A head that is the embedding is read whole."""

    def plan(name: str, gigabytes: float, **settings: Any) -> TextPlan:
        config = EngineConfig(dummy=name, device="cuda", max_drafts=0, **settings)
        shape = published_shape(name)
        return planned(config, shape, gpu.TextOnGpu(Levers()), shape.vocab_size, int(gigabytes * 1e9), 10**10)

    wide, tight = plan("qwen3.5-27b", 84), plan("qwen3.5-27b", 83)
    assert (wide.table_bytes, tight.table_bytes) == (0, 248_320 * 5120 * 2)
    assert tight.weight_bytes == wide.weight_bytes - tight.table_bytes
    assert (tight.max_num_seqs, tight.max_model_len) == (128, 32768), "so nothing is halved"
    small = plan("qwen3.5-27b", 61, max_model_len=65536)
    assert small.max_num_seqs < 8 and small.max_step_tokens == 1024, "sequences go below 8 before a context is refused"
    assert plan("qwen3.5-0.8b", 5).max_num_seqs < 128 and not plan("qwen3.5-0.8b", 5).table_bytes
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: 10**9)
    fit.refuse_little_memory(wide)
    with pytest.raises(ConfigError, match=r"GPUs read the embedding in the host's memory, 2.5 GB, and 1.0 GB are free"):
        fit.refuse_little_memory(tight)


def test_the_table_of_n_grams_is_planned_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU reads it: beside it the host tier has less, and where it does not fit nothing is loaded. A CPU reads
    the files.
    """
    path, settings = tiny_checkpoint("flash"), {"max_num_seqs": 4, "max_model_len": 128, "max_step_tokens": 64}
    config = EngineConfig(model=str(path), n_pages=8, **settings)  # type: ignore[arg-type]
    device = gpu.Gpu()
    model = settle(config, device)
    assert isinstance(model, TextModel) and model.shape.ngrams is not None
    n_bytes = 2 * model.shape.ngrams.n_params

    def plan(host_bytes: int, model: TextModel = model) -> TextPlan:
        return make_plan(device.text, model, 2 << 30, host_bytes)

    assert plan(10**9).ngram_bytes == n_bytes
    assert plan(2 * plan(10**9).host_bytes + n_bytes).host_bytes == plan(10**9).host_bytes > 0
    assert plan(2 * plan(10**9).host_bytes + n_bytes - 2).host_bytes == 0
    monkeypatch.setattr(fit, "free_memory_bytes", lambda: n_bytes - 1)
    monkeypatch.setattr(gpu, "INTERPRETED", True)
    monkeypatch.setattr(device, "begin_compiling", lambda plan: pytest.fail("it was loaded"))
    with pytest.raises(
        ConfigError, match=r"GPUs read the table of n-grams in the host's memory, .* GB, .* take --device cpu"
    ):
        build_runner(config, lambda stage, done: None, device)
    blocks = settle(EngineConfig(model=str(tiny_gguf("flash", "Q8_0")), **settings), device)  # type: ignore[arg-type]
    assert isinstance(blocks, TextModel) and plan(10**9, blocks).ngram_bytes == n_bytes > blocks.ngram_table_bytes()
    in_files = settle(config, Cpu())
    assert isinstance(in_files, TextModel) and make_plan(Cpu.text, in_files, 10**9).ngram_bytes == 0
    random = EngineConfig(dummy="qwen3.8-flash-next", device="cuda")
    shape = published_shape("qwen3.8-flash-next")
    assert planned(random, shape, device.text, shape.vocab_size, 10**12, 10**11).ngram_bytes == (1 << 16) * 320


def test_the_table_of_n_grams_is_copied_once_for_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copying is told of, and a second runner of the same weights takes the same copy."""
    config = EngineConfig(model=str(tiny_checkpoint("flash")), max_num_seqs=4, max_model_len=128, tensor_parallel=2)
    device = gpu.Gpu(n_gpus=2)
    model = settle(config, device)
    assert isinstance(model, TextModel)
    plan, told, given = make_plan(device.text, model, 2 << 30, 10**9), list[tuple[str, float]](), list[Any]()
    weights = [[empty_weights(cuts.shape, None, False)] for cuts in plan.cuts]
    for (part,) in weights:
        part.ngram_table = ngram_table_of(model.directory, model.shape.ngrams)
    monkeypatch.setattr(gpu, "ParallelRunner", lambda plan, devices, weights, *rest: given.append(weights))
    for _ in range(2):
        gpu.text_runner(plan, device.devices, weights, lambda stage, done: told.append((stage, done)))
    tables = {id(part.ngram_table) for of_all in given for (part,) in of_all}
    assert len(tables) == 1 and given[0][0][0].ngram_table.is_reachable
    assert told == [("table of n-grams", 1.0)]


def test_a_small_card_gives_sequences_and_prompts_memory_before_slots_of_experts() -> None:
    """The larger the card, the longer are sequences and the less is brought; docs/gpu.md has the table."""
    device, told = gpu.Gpu(), (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    model = settle(EngineConfig(dummy="qwen3.6-35b-a3b", quantize="int4", device="cuda"), device)
    plans = {
        tenths: make_plan(device.text, model, tenths * 10**8, 64 * 10**9)
        for tenths in (50, 55, 60, 70, 80, 120, 160, 200)
    }
    least = 0.0
    for tenths, plan in reversed(plans.items()):
        n_steps = -(-8192 // plan.max_step_tokens)
        token, prompt = planner.brought(plan, 1), n_steps * planner.brought(plan, plan.max_step_tokens)
        assert plan.max_model_len == 32768 and prompt + 256 * token >= least
        least = prompt + 256 * token
        sizes = f"{plan.n_expert_slots} | 32,768 | {plan.max_num_seqs} | {plan.max_step_tokens:,}"
        assert (
            tenths < 60
            or tenths == 70
            or f"| {tenths // 10} | {sizes} | {token / 1e9:.2f} | {prompt / 1e9:.1f} |\n" in told
        )
    (said,) = where_experts_are(plans[160])
    assert said.startswith("experts are in the host's memory, 102 of 256 of each layer on the GPU, too")
    asked = EngineConfig(dummy="qwen3.6-35b-a3b", quantize="int4", device="cuda", expert_memory=10.0)
    with pytest.raises(ConfigError, match=r"--expert-memory 10 does not fit into 10\..*; give at most [0-9.]+$"):
        make_plan(device.text, settle(asked, device), 12 * 10**9, 64 * 10**9)


@pytest.mark.parametrize("length", [65536, 131072])
def test_what_fits_on_a_card_fits_on_a_larger_one(length: int) -> None:
    """Experts go outside for what is asked for, too."""
    device, fitting = gpu.Gpu(), []
    model = settle_text(
        EngineConfig(dummy="qwen3.5-35b-a3b", device="cuda", max_model_len=length), device, "ud-q4_k_xl"
    )
    for gb in (10, 16, 22, 24, 26, 32):
        plan = make_plan(device.text, model, gb * 10**9, 64 * 10**9)
        fitting.append(plan.n_expert_slots)
    assert fitting[-1] == 0 and fitting[0] > 0 and not where_experts_are(plan)


def test_what_fits_is_what_the_documents_say() -> None:
    """Contexts of files in UD-Q4_K_XL on cards of 16, 24 and 32 GB; a page more is not planned."""
    device, told = gpu.Gpu(), (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()

    def plan_on(name: str, gb: float, **settings: Any) -> TextPlan | None:
        config = EngineConfig(dummy=f"qwen3.5-{name.lower()}", device="cuda", **settings)
        try:
            plan = make_plan(device.text, settle_text(config, device, "ud-q4_k_xl"), int(gb * 1e9), 64 * 10**9)
        except ConfigError:
            return None
        return plan if plan.n_expert_slots == 0 or not settings else None

    rows = re.findall(
        r"^\| (27B|35B-A3B) \| ([0-9.]+) \| ([0-9,]+), ([0-9]+)(?:; (\d+) of 256 experts)? \| (.*) \|$",
        told,
        re.MULTILINE,
    )
    assert len(rows) == 5
    for name, free, context, sequences, slots, longest in rows:
        plan = plan_on(name, float(free))
        assert plan is not None and f"{plan.max_model_len:,} {plan.max_num_seqs}" == f"{context} {sequences}"
        assert plan.n_expert_slots == int(slots or 0)
        for length, more in zip(longest.split(" | "), ({}, {"kv_cache_dtype": "fp8"}, {"max_drafts": 4}), strict=True):
            n = 0 if length == "–" else int(length.replace(",", ""))
            assert not n or plan_on(name, float(free), max_num_seqs=1, max_model_len=n, **more)
            assert n == 262144 or not plan_on(name, float(free), max_num_seqs=1, max_model_len=n + 64, **more)
