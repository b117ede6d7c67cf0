"""Adapters on a GPU: the kernels against NumPy's sums, and whole requests: bits of rows with an adapter, and of those without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from deltic.config import ConfigError, EngineConfig
from deltic.engine.drafts import Drafter, Drafting
from deltic.engine.engine import Engine
from deltic.engine.messages import Request
from deltic.models.fields import CheckpointError
from deltic.models.qwen.adapters import Adapter, Delta
from deltic.models.qwen.gpu_adapters import AdapterBuffers, Sized, sizes
from deltic.models.qwen.shape import ModelShape
from deltic.ops.arrays import bfloat16
from deltic.ops.gpu.blocks import BLOCK, GROUP_ROWS, AdapterRows
from deltic.ops.gpu.lora import WORDS, Target, expand, gather, n_sums, shrink
from deltic.runtime import adapters as room
from deltic.runtime.build import build_runner
from deltic.runtime.gpu import adapters as store
from deltic.runtime.gpu.adapters import GpuAdapterMemory, adapter_bytes
from deltic.runtime.gpu.batch_slots import ADAPTER_ROWS, adapter_groups
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner
from tests.adapters import adapted
from tests.gpu.test_gpu_drafts import small_checkpoint
from tests.gpu.test_gpu_engine import Entry, answers, prompt, request
from tests.planned import settled
from tests.reference.model import forward
from tests.tiny import tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB


def terms(rng: np.random.Generator, k: int, rank: int, first: int, n: int, scale: float, n_matrices: int = 1) -> Delta:
    def values(*size: int) -> Any:
        return rng.normal(0, 0.5, size).astype(np.float32).astype(bfloat16)

    return Delta(first, values(n_matrices, rank, k), values(n_matrices, n, rank), scale)


def added(deltas: tuple[Delta, ...], x: Tensor, n: int) -> Tensor:
    """float64 [N, n]: what they add to the product with x, rounded where the kernels round."""
    found = torch.zeros(len(x), n, dtype=torch.float64)
    for delta in deltas:
        down, up = (torch.from_numpy(part[0].astype(np.float64)) for part in (delta.down, delta.up))
        v = (x.double().cpu() @ down.T * delta.scale).bfloat16().double()
        found[:, delta.first : delta.first + delta.n_rows] += v @ up.T
    return found


@dataclass
class Loaded:
    """One matrix's terms of several adapters on the device."""

    target: Target
    deltas: list[tuple[Delta, ...]]


def load(
    deltas: list[tuple[Delta, ...]], n: int, k: int, n_segments: int, rank: int, n_sums: int, device: str, monkeypatch: pytest.MonkeyPatch,
    name: str = "w",
) -> Loaded:  # fmt: skip
    monkeypatch.setattr(store, "sizes", lambda shape: {name: Sized(n, k)})
    monkeypatch.setattr(store, "n_segments", lambda name: n_segments)
    found = [Adapter(bytes(16), {name: of}, (), rank) for of in deltas]
    n_bytes = sum(adapter_bytes(one) for one in found)
    buffers = AdapterBuffers(
        torch.full((n_bytes // 2,), torch.nan, dtype=torch.bfloat16, device=device),
        torch.zeros((len(found), 1, WORDS), dtype=torch.int64, device=device),
        torch.full((n_sums,), torch.nan, device=device),
        None,
    )
    own = GpuAdapterMemory(None, buffers, torch.cuda.Stream() if device == "cuda" else None)  # type: ignore[arg-type]
    for i, one in enumerate(found):
        own.write(i, sum(map(adapter_bytes, found[:i])), one)
    return Loaded(Target(buffers.table[:, 0], buffers.arena, buffers.sums, n, k, n_segments, rank), deltas)


def groups(adapters: list[int], device: str) -> AdapterRows:
    """Of the rows of a decode, as the host puts them together."""
    parts = (torch.tensor(words, dtype=torch.int32, device=device) for words in adapter_groups(adapters, len(adapters)))
    who, row = parts
    return AdapterRows(who, row.view(-1, GROUP_ROWS), torch.tensor(adapters, dtype=torch.int32, device=device))


CASES = {
    "one term": (96, 64, [(0, 96, 3)]),
    "a fused matrix, of some rows": (200, 288, [(0, 130, 16), (130, 3, 17), (197, 3, 40)]),
    "a long sum": (40, 5216, [(8, 30, 5)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("are_blocks", [False, True])
def test_against_the_sums(case: str, are_blocks: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two adapters of which one has fewer terms, and rows without any; and each row alone has the bits that it has among others."""
    n, k, parts = CASES[case]
    rng = np.random.default_rng(1)
    deltas = [tuple(terms(rng, k, rank, first, rows, 0.5) for first, rows, rank in of) for of in (parts, parts[:1])]
    rank, n_segments = max(rank for _, _, rank in parts), len(parts)
    adapters = [0, -1, 1] if are_blocks else [1, 0, -1, *[0] * 17, -1]
    n_rows = len(adapters) * (BLOCK if are_blocks else 1)
    loaded = load(deltas, n, k, n_segments, rank, n_sums(n_rows, k, n_segments, rank, are_blocks), device, monkeypatch)
    x = torch.from_numpy(rng.normal(0, 1, (n_rows, k))).bfloat16().to(device)
    dtype = torch.bfloat16 if are_blocks else torch.float32
    before = torch.from_numpy(rng.normal(0, 1, (n_rows, n + 8))).to(dtype).to(device)

    def run(x: Tensor, out: Tensor, who: AdapterRows) -> Tensor:
        shrink(x, loaded.target, who)
        expand(out[:, :n], loaded.target, who)
        return out

    who = (
        AdapterRows(torch.tensor(adapters, dtype=torch.int32, device=device))
        if are_blocks
        else groups(adapters, device)
    )
    out = run(x, before.clone(), who)
    each = BLOCK if are_blocks else 1
    for i, adapter in enumerate(adapters):
        rows = slice(i * each, (i + 1) * each)
        if adapter < 0:
            assert torch.equal(out[rows], before[rows])
            continue
        expected = before[rows, :n].double().cpu() + added(deltas[adapter], x[rows], n)
        error = (out[rows, :n].double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < (0.01 if are_blocks else 0.004)
        assert torch.equal(out[rows, n:], before[rows, n:])
        if i < 4:
            alone = AdapterRows(who.adapter[i : i + 1]) if are_blocks else groups([adapter], device)
            assert torch.equal(run(x[rows].contiguous(), before[rows].clone(), alone), out[rows])


def test_of_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's terms, of drafted tokens and of rows of pictures, too."""
    rng, n_vocab, h = np.random.default_rng(2), 50, 96
    delta = terms(rng, n_vocab, 5, 0, h, 0.25)
    loaded = load([(delta,)], h, n_vocab, 1, 5, n_sums(64, 1, 1, 5, True), device, monkeypatch, "embed")

    def on(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def expected(tokens: list[int]) -> Tensor:
        one_hot = torch.eye(n_vocab, dtype=torch.float64)[tokens]
        return added((delta,), one_hot, h)

    def far(found: Tensor, wanted: Tensor) -> float:
        return float((found.double().cpu() - wanted).abs().max())

    who, out = groups([0, -1, 0, 0], device), torch.zeros(4, h, device=device)
    by_batch_slot = on(9, 30, 17)
    gather(by_batch_slot, loaded.target, who, 4, batch_slots=on(2, 0, 1, 1), drafts=(on(0, 0, 0, 1), on(0, 0, 0, 44)))
    expand(out, loaded.target, who, parts=1)
    assert not out[1].any() and far(out[[0, 2, 3]], expected([17, 30, 44])) < 1e-5
    tokens, out = [*range(50), *[0] * 14], torch.zeros(64, h, device=device)
    who = AdapterRows(on(0))
    gather(on(-3, *tokens[1:]), loaded.target, who, 64)
    expand(out, loaded.target, who, parts=1)
    assert not out[0].any() and far(out[1:], expected(tokens[1:])) < 1e-5


# Whole requests.

HAS_GPU = torch.cuda.is_available()
KINDS = ("dense", "moe", pytest.param("next", marks=pytest.mark.long))
N_TOKENS = 24 if HAS_GPU else 2
TOLERANCE = 0.06
"""Root of the mean square, where the largest error of tests/gpu/test_gpu_engine.py is 0.12."""
SCALES = {"qkv": 0.1, "o_proj": 0.05, "down": 0.05, "shared_down": 0.05, "lm_head": 0.04}
"""Of those whose terms would change little."""
MODULES = {
    "in_proj": ("qkv", "z", "b", "a"),
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "router": ("experts", "shared"),
}


def parts_of(shape: ModelShape, name: str, n: int) -> list[int]:
    """Rows of the modules that a matrix is made of."""
    kind = name.rpartition(".")[2].removeprefix("shared_")
    if kind == "in_proj":
        return [shape.conv_channels, shape.gdn_value_size, shape.gdn_n_v_heads, shape.gdn_n_v_heads]
    if kind == "qkv":
        kv = shape.n_kv_heads * shape.head_dim
        return [n - 2 * kv, kv, kv]
    return {"gate_up": [n // 2, n // 2], "router": [n - 1, 1]}.get(kind, [n])


@cache
def every_module(kind: str, seed: int) -> Adapter:
    return adapter_of(runner(kind).plan.shape, seed)


def adapter_of(shape: ModelShape, seed: int) -> Adapter:
    """An adapter of every module, of other ranks in each."""
    rng, found = np.random.default_rng(seed), {}
    for name, of in sizes(shape).items():
        deltas, first = [], 0
        for n in parts_of(shape, name, of.n):
            scale = SCALES.get(name.rpartition(".")[2], 0.02)
            deltas.append(terms(rng, of.k, int(rng.integers(1, 20)), first, n, scale, of.n_matrices))
            first += n
        found[name] = tuple(deltas)
    return Adapter(bytes([seed] * 16), found, (), 20)


@cache
def runner(kind: str, max_drafts: int = 0, max_loras: int = 3, quantize: str | None = None) -> GpuTextRunner:
    """With room for adapters, or without."""
    config = EngineConfig(
        model=str(small_checkpoint(kind)), quantize=quantize, max_drafts=max_drafts, max_num_seqs=24 if HAS_GPU else 3, max_model_len=512 if HAS_GPU else 192,
        max_step_tokens=256 if HAS_GPU else 128, n_pages=120 if HAS_GPU else 20, n_checkpoints=6, allow_lora_loading=max_loras > 0,
        max_loras=max_loras if max_loras else None, max_lora_rank=20 if max_loras else None, lora_gb=0.05 if max_loras else None,
    )  # fmt: skip
    found: GpuTextRunner = build_runner(config, lambda stage, done: None, Gpu())
    return found


def loaded(kind: str, max_drafts: int = 0, quantize: str | None = None) -> GpuTextRunner:
    """With the adapters of seeds 1 and 2."""
    found = runner(kind, max_drafts, quantize=quantize)
    assert found.adapters is not None
    for seed in (1, 2):
        adapter = every_module(kind, seed)
        if found.adapters.find(adapter.key) is None:
            assert found.adapters.load_now(adapter).error is None
    return found


def adapted_request(name: str, ids: list[int], seed: int, n_tokens: int) -> Request:
    """With the adapter of a seed; 0: without."""
    one = request(name, ids, n_tokens)
    one.adapter = bytes([seed] * 16) if seed else b""
    return one


def run(inner: GpuTextRunner, *asked: tuple[str, list[int], int], n_tokens: int = N_TOKENS) -> dict[str, list[Entry]]:
    """Answers of all at once: names, prompts and seeds of adapters."""
    engine = Engine(inner)
    for name, ids, seed in asked:
        engine.add(adapted_request(name, ids, seed, n_tokens))
    return answers(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_oracle(kind: str) -> None:
    """Prefill and decode of sequences with an adapter of every module; an oracle that lacks the terms of some is further away.

    The median row of the median sequence counts: of a mixture, a rounding can exchange two experts of nearly equal weight,
    and later rows read what that one wrote. Sequences without an adapter are as far away then (0.06, where most are at 0.03).
    """
    inner, adapter = loaded(kind), every_module(kind, 1)
    prompts = [prompt(seed, 62) for seed in ((3, 4, 5) if HAS_GPU else (3,))]
    found = run(inner, *((str(i), ids, 1) for i, ids in enumerate(prompts)))
    drawn = [found[f"{i}/0"] for i in range(len(prompts))]

    def error(deltas: dict[str, tuple[Delta, ...]]) -> float:
        weights, of_prompts = adapted(inner.model.weights, replace(adapter, deltas=deltas), "bfloat16"), list[float]()
        for ids, entries in zip(prompts, drawn, strict=True):
            tokens = ids + [entry[0] for entry in entries[:-1]]
            expected = forward(weights, inner.plan.shape, tokens, precision="bfloat16")[len(ids) - 1 :, :N_REAL_VOCAB]
            rows = zip(expected.log_softmax(-1), entries, strict=True)
            errors = [[value - float(row[token]) for token, value in entry[2]] for row, entry in rows]
            of_prompts.append(float(np.median([np.sqrt(np.mean(np.square(of_row))) for of_row in errors])))
        return float(np.median(of_prompts))

    whole = error(dict(adapter.deltas))
    assert whole < TOLERANCE
    for matrix in {name.rpartition(".")[2] for name in adapter.deltas}:
        some = {name: of for name, of in adapter.deltas.items() if name.rpartition(".")[2] != matrix}
        assert error(some) > 2 * whole, matrix


ASKED = [("a", prompt(4, 66 if HAS_GPU else 20), 1), ("b", prompt(5, 5), 0), ("c", prompt(6, 9), 2)]


LONG = (("dense", None), ("next", None), ("dense", "fp8"), ("moe", "fp8"), ("moe", "int4"))
ALL = [("moe", None), *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]


@pytest.mark.parametrize(("kind", "quantize"), ALL)
def test_among_others(kind: str, quantize: str | None) -> None:
    """Rows with an adapter have the bits that they have alone, rows without one those of a server that has none."""
    inner, asked = loaded(kind, quantize=quantize), ASKED
    if HAS_GPU:
        asked = [*asked, *((f"o{i}", prompt(100 + i, 1 + 29 * i % 140), i % 3) for i in range(21))]
    found = run(inner, *asked)
    for name, ids, seed in ASKED if HAS_GPU else ASKED[:2]:
        server = inner if seed else runner(kind, max_loras=0, quantize=quantize)
        assert found[f"{name}/0"] == run(server, (name, ids, seed))[f"{name}/0"]


def test_any_cut_and_a_hit() -> None:
    """P2 and P3."""
    inner, ids = loaded("dense"), prompt(7, 300 if HAS_GPU else 66)
    expected = run(inner, ("a", ids, 1), n_tokens=1)["a/0"]
    engine = Engine(inner)
    engine.scheduler.max_step_tokens = 64
    for name in ("a", "b"):
        engine.add(adapted_request(name, ids, 1, 1))
        assert answers(engine)[f"{name}/0"] == expected
    assert engine.cache.stats.n_hits == 1


@pytest.mark.long
def test_drafts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: of a token that is right and one that is not, beside a sequence without an adapter."""
    asked, n = [("a", prompt(8, 30), 1), ("b", prompt(9, 9), 0)], max(N_TOKENS, 3)
    expected = run(loaded("dense"), *asked, n_tokens=n)
    known = {len(ids): [entry[0] for entry in expected[f"{name}/0"]] for name, ids, _ in asked}
    inner, n_drafted = loaded("dense", max_drafts=2), 0

    def propose(self: Drafter, tokens: Any, most: int, forced: Any = ()) -> list[int]:
        nonlocal n_drafted
        n_prompt = max(n for n in known if n <= len(tokens))
        draft = [*known[n_prompt][len(tokens) - n_prompt :][:1], 7][:most]
        n_drafted += len(draft)
        return draft

    monkeypatch.setattr(Drafter, "propose", propose)
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)  # every row is worth it
    monkeypatch.setattr(Drafting, "_is_probe", lambda self, n: False)
    assert run(inner, *asked, n_tokens=n) == expected
    assert n_drafted > 1


# What surrounds it.


def test_what_is_planned_and_refused() -> None:
    """Room, and recordings, only where there are to be adapters; of a model in parts each part has the room."""
    plain, found = runner("moe", max_loras=0), runner("moe")
    assert not plain.workspace.adapters and plain.adapters is None
    made = {v: {key[1:] for key in found.recordings.made if key[0] == v} for v, _, _ in found.recordings.made}
    assert not [variant for variant, _, _ in plain.recordings.made if variant.startswith("adapted")]
    assert {name for name in plain.workspace.offsets} == set(found.workspace.offsets) - set(ADAPTER_ROWS)
    assert made["adapted prefill"] == made["prefill"] and made["adapted decode"] == made["decode"]
    assert found.plan.workspace["adapters"] == found.plan.adapters.n_bytes == 50_000_000
    config = EngineConfig(model=str(tiny_checkpoint("moe")), allow_lora_loading=True, lora_gb=0.05, max_loras=3)
    for n_gpus, n_parts in ((2, 1), (1, 2)):
        plan = settled(config, Gpu((), n_gpus, 2), 2 << 30)[1]
        assert plan.workspace["adapters"] == n_parts * 50_000_000 and plan.workspace["sums of adapters"] > 0


@pytest.mark.parametrize(
    "part", ["layers.0.input_norm.up", "norm.down", "layers.3.indexer.proj", "layers.1.ngrams.proj"]
)
def test_modules_that_a_gpu_does_not_reach_are_refused_by_name(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, and where a client loads an adapter: hyper-connections, the index and n-grams."""
    adapter = Adapter(
        bytes(16), {}, (("linear_attn.in_proj_qkv", "layers.0.in_proj", 0, 8), (f"of.{part}", part, 0, 8)), 8
    )
    with pytest.raises(CheckpointError, match=rf"^of\.{part}: hyper-connections.* --device cpu"):
        adapter_bytes(adapter)
    monkeypatch.setattr(room, "read_adapter", lambda path, shape: adapter)
    config = EngineConfig(model=str(small_checkpoint("moe")), lora=("a=/somewhere",))
    with pytest.raises(ConfigError, match=rf"--lora a=/somewhere: of\.{part}: hyper-connections"):
        settled(config, Gpu(), 2 << 30)


def test_terms_that_do_not_fit_are_refused() -> None:
    inner, adapter = runner("moe"), every_module("moe", 3)
    assert inner.adapters is not None
    lone = adapter.deltas["embed"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.in_proj"):
        inner.adapters.load_now(replace(adapter, deltas={"layers.0.in_proj": lone}))
    with pytest.raises(CheckpointError, match=r"layers\.9\.qkv"):
        inner.adapters.load_now(replace(adapter, deltas={"layers.9.qkv": lone}))
