"""What the ranks of a model load is, put together again, what one machine loads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.files import open_tensors
from deltic.models.qwen.adapters import Delta
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import ModelShape, experts_of
from deltic.models.qwen.shard import Cuts, Runs, cut, deals_experts, share, shares_told
from deltic.models.qwen.weights import (
    UNUSED,
    AttnLayer,
    GdnLayer,
    Mlp,
    Moe,
    Weights,
    dummy_formats,
    load_weights,
    stored_shape,
)
from deltic.ops.arrays import Array
from deltic.ops.contract import KernelError
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.matrix import Matrix
from tests.quantised_rows import random_rows
from tests.tiny import set_sizes, tiny_checkpoint
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import tiny_quantised

MODELS = {
    "dense": lambda: tiny_checkpoint("dense"),
    "tied": lambda: tiny_checkpoint("dense", tied=True),
    "with a draft head": lambda: tiny_checkpoint("dense", has_mtp=True),
    "moe": lambda: tiny_checkpoint("moe"),
    "experts by name": lambda: tiny_checkpoint("moe", experts="split"),
    "next": lambda: tiny_checkpoint("next"),
    "fp8": lambda: tiny_quantised("dense", "qwen-fp8").path,
    "fp8, fewer blocks than ranks": lambda: tiny_quantised("moe", "qwen-fp8").path,
    "fp8 by rows": lambda: tiny_quantised("moe", "fp8-dynamic").path,
    "int4 with zeros": lambda: tiny_quantised("dense", "awq-compressed").path,
    "gguf, tiled heads": lambda: tiny_gguf("dense", "Q8_0"),
    "gguf moe": lambda: tiny_gguf("moe", "Q8_0"),
}


def values(w: Matrix) -> Array:
    """float32 [n_matrices, n, k]."""
    return np.concatenate([segment.unpack() for segment in w.segments], axis=1)


def by_head(rows: Array, shape: ModelShape) -> Array:
    """Rows of value heads, [key heads, value heads of each, rest]."""
    n_k, n_v = shape.gdn_n_k_heads, shape.gdn_n_v_heads
    if shape.tiled_value_heads:
        return rows.reshape(n_v // n_k, n_k, -1).swapaxes(0, 1)
    return rows.reshape(n_k, n_v // n_k, -1)


def gdn_parts(layer: GdnLayer, shape: ModelShape) -> dict[str, Array]:
    """Everything that is shared out, heads first."""
    kd, vd, hv, n_k = shape.gdn_key_size, shape.gdn_value_size, shape.gdn_n_v_heads, shape.gdn_n_k_heads
    q, k, v, z, b, a = np.split(values(layer.in_proj)[0], np.cumsum([kd, kd, vd, vd, hv]))
    conv_q, conv_k, conv_v = np.split(layer.conv, [kd, 2 * kd])
    keys = {"q": q, "k": k, "conv q": conv_q, "conv k": conv_k}
    of_values = {"v": v, "z": z, "b": b, "a": a, "conv v": conv_v, "a_log": layer.a_log, "dt_bias": layer.dt_bias}
    of_values["out_proj"] = np.ascontiguousarray(values(layer.out_proj)[0].T)
    found = {name: rows.reshape(n_k, -1) for name, rows in keys.items()}
    return found | {name: by_head(rows, shape) for name, rows in of_values.items()}


def attention_parts(layer: AttnLayer, shape: ModelShape) -> dict[str, Array]:
    n_q, n_kv, d = shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    q, gate, k, v = np.split(values(layer.qkv)[0], np.cumsum([n_q * d, n_q * d, n_kv * d]))
    o = np.ascontiguousarray(values(layer.o_proj)[0].T)
    found = {name: rows.reshape(n_q, -1) for name, rows in (("q", q), ("q-gate", gate), ("o", o))}
    return found | {"kv " + name: rows.reshape(n_kv, -1) for name, rows in (("k", k), ("v", v))}


def inner_parts(gate_up: Matrix, down: Matrix) -> dict[str, Array]:
    """Inner columns first, experts behind them."""
    gate, up = np.split(values(gate_up), 2, axis=1)
    return {"gate": gate.swapaxes(0, 1), "up": up.swapaxes(0, 1), "down": values(down).transpose(2, 0, 1)}


def parts(weights: Weights, shape: ModelShape) -> dict[str, Array]:
    found = {"head": values(weights.lm_head)[0]}
    layers = [*weights.layers, *([weights.draft_head.layer] if weights.draft_head else [])]
    for i, layer in enumerate(layers):
        is_gdn = isinstance(layer, GdnLayer)
        of_layer = gdn_parts(layer, shape) if is_gdn else attention_parts(layer, shape)
        mlp = layer.mlp
        if isinstance(mlp, Mlp):
            of_layer |= inner_parts(mlp.gate_up, mlp.down)
        else:
            of_layer |= inner_parts(mlp.gate_up, mlp.down)
            of_layer |= {f"shared {n}": p for n, p in inner_parts(mlp.shared_gate_up, mlp.shared_down).items()}
        found |= {f"{i} {name}": part for name, part in of_layer.items()}
    return found


def wholes(weights: Weights) -> dict[str, Array]:
    """What every rank has all of."""
    found = {"embed": values(weights.embed), "norm": weights.norm}
    for i, layer in enumerate(weights.layers):
        found |= {f"{i} input norm": layer.input_norm, f"{i} post norm": layer.post_norm}
        found |= {f"{i} norm": layer.norm} if isinstance(layer, GdnLayer) else {f"{i} q norm": layer.q_norm}
        if not isinstance(layer.mlp, Mlp):
            found[f"{i} router"] = values(layer.mlp.router)
    return found


def loaded(path: Path) -> tuple[ModelShape, Weights]:
    shape = stored_shape(path, ModelShape.from_directory(path), drafts=True)
    return shape, load_weights(path, shape)[0]


def is_idle(rank: dict[str, Array], part: str) -> bool:
    """Whether the part is of inner columns that another rank has, too: they add nothing here."""
    name, _, end = part.rpartition(" ")
    return end in ("gate", "up", "down") and not rank[f"{name} down"].any()


def named(weights: Weights) -> dict[str, Array]:
    """Matrices as they are run."""
    parts = [*weights.named_parts(), ("embed", weights.embed), ("lm_head", weights.lm_head)]
    return {name: values(part) for name, part in parts if isinstance(part, Matrix)}


def of_part(matrix: Array, rows: Runs | None, columns: Runs | None) -> Array:
    """Rows and columns of [n_matrices, n, k]."""
    if rows is not None:
        matrix = np.concatenate([matrix[:, begin:end] for begin, end in rows], axis=1)
    if columns:
        matrix = np.concatenate([matrix[:, :, begin:end] for begin, end in columns], axis=2)
    return matrix


def check_matrices(whole: Weights, part: Weights, cuts: Cuts) -> None:
    """What `of_matrix` says is what the part has; and so it is of an adapter, with terms of some rows and of all. No adapter is for
    experts that are dealt out.
    """
    rng, of_whole = np.random.default_rng(0), named(whole)
    assert named(part).keys() == of_whole.keys()
    for name, found in named(part).items():
        if cuts.own_experts is not None and len(of_whole[name]) > 1:
            assert np.array_equal(found, of_whole[name][slice(*cuts.own_experts)])
            continue
        rows, columns = cuts.of_matrix(name)
        m, n, k = of_whole[name].shape
        expected = of_part(of_whole[name], rows, columns)
        assert (not found.any()) if columns == () else np.array_equal(found, expected), name
        for first, n_rows in ((0, n), (n // 3, n // 2)):
            size = (m, 3, k), (m, n_rows, 3)
            delta = Delta(first, *(rng.integers(-9, 9, one).astype(np.float32) for one in size), scale=1.0)
            added = np.zeros((m, n, k), np.float32)
            added[:, first : first + n_rows] = delta.up @ delta.down
            wanted, of = of_part(added, rows, columns), delta.of_part(rows, columns)
            if of is None:
                assert columns == () or not wanted.any()
                continue
            made = np.zeros_like(wanted)
            made[:, of.first : of.first + of.n_rows] = of.up @ of.down
            assert np.array_equal(made, wanted), name


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_have_the_model_between_them(name: str, n_ranks: int) -> None:
    path = MODELS[name]()
    shape, whole = loaded(path)
    if shape.gdn_n_k_heads % n_ranks or shape.n_q_heads % n_ranks:
        pytest.skip(f"{shape.gdn_n_k_heads} key heads, {shape.n_q_heads} query heads")
    ranks = []
    for i in range(n_ranks):
        cuts = Cuts(shape, i, n_ranks)
        weights = load_weights(path, cuts.shape, cuts=cuts)[0]
        ranks.append(parts(weights, cuts.shape))
        for part, expected in wholes(whole).items():
            assert np.array_equal(wholes(weights)[part], expected), part
        check_matrices(whole, weights, cuts)
    check_whole(ranks, parts(whole, shape), shape.n_kv_heads)


def check_whole(
    ranks: list[dict[str, Array]], whole: dict[str, Array], n_kv_heads: int, are_dealt: bool = False
) -> None:
    """What ranks have between them is the model."""
    n_ranks = len(ranks)
    for part, expected in whole.items():
        found = [rank[part] for rank in ranks if not is_idle(rank, part)]
        if " kv " in part and n_kv_heads < n_ranks:
            assert all(len(one) == 1 for one in found)
            found = found[:: n_ranks // n_kv_heads]
        is_expert = are_dealt and " shared " not in part and part.rpartition(" ")[2] in ("gate", "up", "down")
        assert np.array_equal(np.concatenate(found, axis=1 if is_expert else 0), expected), part


EIGHT = {"HIDDEN": 128, "N_K_HEADS": 8, "K_DIM": 32, "N_Q_HEADS": 8, "SHARED_WIDTH": 256}
DEALT = {
    "bf16": lambda: tiny_checkpoint("moe", seed=8, has_mtp=True),
    "by name": lambda: tiny_checkpoint("moe", seed=8, experts="split"),
    "gguf": lambda: tiny_gguf("moe", "Q8_0", seed=8),
} | {
    f"{name}": partial(lambda name: tiny_quantised("moe", name, seed=8).path, name)
    for name in ("qwen-fp8", "w4a16", "nvfp4", "awq-compressed")
}


@pytest.mark.parametrize("n_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", DEALT)
def test_experts_are_dealt_out(name: str, n_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in the order of ranks; nothing else changes. Only a rank's own are read."""
    set_sizes(monkeypatch, EIGHT)
    for module in ("tiny", "tiny_config"):
        monkeypatch.setattr(f"tests.{module}.n_v_heads_of", lambda kind: 8)
    path = DEALT[name]()
    (shape, whole), ranks = loaded(path), list[dict[str, Array]]()
    _, cuts = cut(shape, n_ranks, are_dealt=True)
    for i, part in enumerate(cuts):
        n = shape.n_experts // n_ranks
        assert part.own_experts == (i * n, i * n + n) and len(experts_of(part.shape)) == n
        assert 0 < part.shape.n_active_params <= shape.n_active_params
        weights = load_weights(path, part.shape, cuts=part)[0]
        ranks.append(parts(weights, part.shape))
        check_matrices(whole, weights, part)
        moes = [layer.mlp for layer in weights.layers]
        assert all(isinstance(moe, Moe) and (moe.first, moe.down.n_matrices) == (i * n, n) for moe in moes)
        names = {name for name in part.views(open_tensors(path, UNUSED)) if ".experts." in name}
        assert not any(f".experts.{n}." in name for name in names), names
    check_whole(ranks, parts(whole, shape), shape.n_kv_heads, are_dealt=True)


def test_inner_columns_are_cut_where_groups_end() -> None:
    assert [share(512, i, 4, 128) for i in range(4)] == [(0, 128), (128, 256), (256, 384), (384, 512)]
    assert [share(512, i, 8, 128) for i in range(8)] == [
        *((0, 0), (0, 128), (128, 128), (128, 256), (256, 256), (256, 384), (384, 384), (384, 512))
    ]
    assert [share(17_408 // 2 + 64, i, 2, 128) for i in range(2)] == [(0, 4352), (4352, 8768)]
    rows = random_rows("int4-g32-bfloat16.zero", 3, 128, 0)
    cut = rows.columns(((32, 64), (96, 128)))
    assert np.array_equal(cut.values(), np.concatenate([rows.values()[:, 32:64], rows.values()[:, 96:]], axis=1))
    with pytest.raises(KernelError, match="multiples of 32, not at 48"):
        rows.columns(((0, 48),))


@pytest.mark.parametrize("name", [name for name in WEIGHT_FORMATS if name != "bf16"])
def test_columns_of_every_format(name: str) -> None:
    rows = random_rows(name, 5, 768, 1)
    cut = rows.columns(((256, 512), (512, 768)))
    assert np.array_equal(cut.values(), rows.values()[:, 256:])
    assert not cut.zeroed().values().any()


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"linear_num_key_heads.*a multiple of 3, to be cut for 3 GPUs"):
        Cuts(published_shape("qwen3.5-27b"), 0, 3)
    whole = published_shape("qwen3.5-35b-a3b")
    in_blocks = replace(whole, formats=dummy_formats(whole, "fp8"))
    assert len(cut(in_blocks, 4, are_even=True)[1]) == 4
    with pytest.raises(CheckpointError, match=r"--tp-invariant 8: .* columns of an MLP stay together by 128"):
        cut(in_blocks, 8, are_even=True)  # 512 columns of an expert
    shape = Cuts(published_shape("qwen3.5-27b"), 1, 8).shape
    assert (shape.gdn_n_k_heads, shape.gdn_n_v_heads, shape.n_q_heads, shape.n_kv_heads) == (2, 6, 3, 1)
    assert shape.intermediate_size * 8 == 17_408 and shape.head_rows * 8 == shape.vocab_size
    idle = [part.is_idle for part in cut(in_blocks, 8)[1]]
    assert sum(idle) == 4 and not any(part.is_idle for part in cut(whole, 8)[1])


def test_who_deals_experts_out() -> None:
    """Where parts would have no columns of their own. It is told, and so is what is left of the shared expert."""
    shapes = {name: published_shape(name) for name in ("qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b")}
    in_blocks = {name: replace(shape, formats=dummy_formats(shape, "fp8")) for name, shape in shapes.items()}
    for name, shape in in_blocks.items():
        assert [deals_experts(shape, n) for n in (1, 2, 4, 8)] == [False, False, False, name == "qwen3.5-35b-a3b"]
        assert not deals_experts(shapes[name], 8) and not deals_experts(published_shape("qwen3.5-27b"), 8)
    told = shares_told(cut(in_blocks["qwen3.5-35b-a3b"], 8, are_dealt=True)[1])
    assert told == (
        "experts are dealt out whole, 32 of 256 to each of 8 parts; of the shared expert 4 of 8 parts have no columns of their own",
    )
    with pytest.raises(UnsupportedModelError, match=r"num_experts.*256.*a multiple of 3"):
        Cuts(replace(shapes["qwen3.5-35b-a3b"], gdn_n_k_heads=3, n_q_heads=3, n_kv_heads=3), 0, 3, are_dealt=True)
