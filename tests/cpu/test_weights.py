"""Loading: every stored layout ends in the same internal tensors, and every fault is named."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltic.models.checkpoint import resolve_model
from deltic.models.fields import CheckpointError
from deltic.models.files import Skipped, without_skipped
from deltic.models.loading import COUNTED_ROWS, Mlp
from deltic.models.qwen.published import PUBLISHED, published_shape
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import (
    AttnLayer,
    GdnLayer,
    Moe,
    Weights,
    dummy_formats,
    dummy_weights,
    empty_weights,
    load_weights,
    weight_bytes,
)
from deltic.ops.matrix import Matrix
from tests.plain import rows
from tests.tensors import tensor_of
from tests.tiny import tiny_checkpoint


def load(path: Path) -> tuple[Weights, list[str], ModelShape]:
    shape = ModelShape.from_directory(path)
    weights, notices = load_weights(path, shape)
    return weights, notices, shape


def assert_same(a: Weights, b: Weights) -> None:
    assert [n for n, _ in a.named_memory()] == [n for n, _ in b.named_memory()]
    for (name, x), (_, y) in zip(a.named_memory(), b.named_memory(), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {"layout": "flat"}),
        ("dense", {"shards": 3}),
        ("dense", {"extras": True}),
        ("dense", {"dtype": torch.float32}),
        ("moe", {"experts": "split"}),
        ("moe", {"experts": "split", "layout": "flat", "shards": 2, "extras": True}),
        ("next", {"experts": "fused", "shards": 2}),
    ],
    ids=str,
)
def test_every_stored_layout_loads_to_the_same_tensors(kind: str, options: dict[str, Any]) -> None:
    assert_same(load(tiny_checkpoint(kind, **options))[0], load(tiny_checkpoint(kind))[0])


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_sizes_are_those_that_the_shape_predicts(kind: str) -> None:
    weights, notices, shape = load(tiny_checkpoint(kind))
    assert notices == []
    assert weights.n_bytes == weight_bytes(shape, None)
    sizes = [p.n_matrices * p.n * p.k if isinstance(p, Matrix) else p.size for _, p in weights.named_parts()]
    assert sum(sizes) == shape.n_params
    assert all(t.flags.c_contiguous for _, t in weights.named_memory())
    assert [isinstance(layer, AttnLayer) for layer in weights.layers] == [False, False, False, True]
    assert all(isinstance(layer.mlp, Moe if shape.is_moe else Mlp) for layer in weights.layers)


def test_query_and_gate_are_taken_apart_by_head() -> None:
    path = tiny_checkpoint("dense")
    weights, _, shape = load(path)
    stored = load_file(path / "model.safetensors")["model.language_model.layers.3.self_attn.q_proj.weight"]
    layer, d = weights.layers[3], shape.head_dim
    assert isinstance(layer, AttnLayer)
    qkv = rows(layer.qkv)
    for head in range(shape.n_q_heads):
        query = stored[2 * d * head : 2 * d * head + d]
        gate = stored[2 * d * head + d : 2 * d * (head + 1)]
        assert torch.equal(qkv[d * head : d * (head + 1)], query)
        assert torch.equal(qkv[d * (shape.n_q_heads + head) :][:d], gate)


def test_next_projections_are_taken_apart_by_key_head() -> None:
    path = tiny_checkpoint("next")
    weights, _, shape = load(path)
    stored = load_file(path / "model.safetensors")
    qkvz = stored["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    ba = stored["model.layers.0.linear_attn.in_proj_ba.weight"]
    layer = weights.layers[0]
    assert isinstance(layer, GdnLayer)
    in_proj = rows(layer.in_proj)
    kd, vd, hv, d = shape.gdn_key_size, shape.gdn_value_size, shape.gdn_n_v_heads, shape.gdn_v_dim
    block, repeat = 2 * d + 2 * (hv // shape.gdn_n_k_heads) * d, hv // shape.gdn_n_k_heads
    # key head 1, second value head of its group
    head = repeat + 1
    assert torch.equal(in_proj[d : 2 * d], qkvz[block : block + d])
    assert torch.equal(in_proj[kd + d : kd + 2 * d], qkvz[block + d : block + 2 * d])
    assert torch.equal(in_proj[2 * kd + head * d :][:d], qkvz[block + 3 * d : block + 4 * d])
    z = qkvz[block + 2 * d + repeat * d + d :][:d]
    assert torch.equal(in_proj[2 * kd + vd + head * d :][:d], z)
    assert torch.equal(in_proj[2 * kd + 2 * vd + head], ba[2 * repeat + 1])
    assert torch.equal(in_proj[2 * kd + 2 * vd + hv + head], ba[2 * repeat + repeat + 1])


def test_tied_head_is_the_embedding_itself() -> None:
    weights, _, shape = load(tiny_checkpoint("dense", tied=True))
    assert weights.lm_head is weights.embed
    assert weights.n_bytes == weight_bytes(shape, None)
    assert load(tiny_checkpoint("dense"))[0].lm_head is not load(tiny_checkpoint("dense"))[0].embed


def test_vision_and_mtp_are_skipped_with_a_notice() -> None:
    notices = load(tiny_checkpoint("dense", extras=True))[1]
    assert [n.split(":")[0] for n in notices] == ["skipped 3 vision tensors", "skipped 2 MTP tensors"]
    assert [(n.part, n) for n in map(Skipped.read, map(str, notices)) if isinstance(n, Skipped)] == [
        ("vision", notices[0]),
        ("MTP", notices[1]),
    ]
    assert without_skipped([*notices, "vision tensors are mentioned"], "vision") == [
        notices[1],
        "vision tensors are mentioned",
    ]


def test_float_checkpoints_are_converted_with_a_notice() -> None:
    for dtype, name in ((torch.float32, "F32"), (torch.float16, "F16")):
        weights, notices, _ = load(tiny_checkpoint("dense", dtype=dtype))
        assert weights.embed.whole.format.name == "bf16"
        assert len(notices) == 1 and f"from {name} to BF16" in notices[0]


def test_single_file_and_progress() -> None:
    path = tiny_checkpoint("dense")
    seen: list[tuple[int, int]] = []
    shape = ModelShape.from_directory(path)
    weights, _ = load_weights(path / "model.safetensors", shape, lambda *at: seen.append(at))
    assert_same(weights, load(path)[0])
    assert seen == sorted(seen)
    assert seen[-1] == (weight_bytes(shape, None),) * 2


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint with some stored tensors replaced, renamed or left out (None)."""

    def edit(kind: str = "dense", /, tied: bool = False, **changes: Tensor | None) -> Path:
        path = tmp_path / kind
        shutil.copytree(tiny_checkpoint(kind, layout="flat", tied=tied), path)
        tensors = load_file(path / "model.safetensors")
        for name, value in changes.items():
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
        save_file(tensors, path / "model.safetensors")
        return path

    return edit


A_LOG = "model.layers.0.linear_attn.A_log"
UP = "model.layers.2.mlp.up_proj.weight"


def test_missing_tensor(edited: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=rf"'{A_LOG}' is missing; expected shape \[6\]"):
        load(edited(**{A_LOG: None}))


def test_missing_head_of_an_untied_model(edited: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        load(edited(**{"lm_head.weight": None}))


def test_stored_head_of_a_tied_model(edited: Callable[..., Path]) -> None:
    """Equal to the embedding it is shared; different it is used, because that is what was stored."""
    embed = rows(load(tiny_checkpoint("dense", tied=True))[0].embed)
    weights, notices, _ = load(edited(tied=True, **{"lm_head.weight": embed.clone()}))
    assert weights.lm_head is weights.embed and notices == []


def test_different_stored_head_of_a_tied_model(edited: Callable[..., Path]) -> None:
    head = torch.ones(512, 256, dtype=torch.bfloat16)
    weights, notices, _ = load(edited(tied=True, **{"lm_head.weight": head}))
    assert torch.equal(rows(weights.lm_head), head)
    assert "lm_head.weight" in notices[0]


def test_wrong_shape(edited: Callable[..., Path]) -> None:
    fault = (
        r"model\.safetensors: tensor '.*up_proj.*' has the wrong shape: expected \[512, 256\] by config.json .*, found"
    )
    with pytest.raises(CheckpointError, match=fault):
        load(edited(**{UP: torch.zeros(3, 4, dtype=torch.bfloat16)}))


@pytest.mark.parametrize(
    ("name", "dtype", "fault"),
    [
        (UP, torch.int8, "has no weight_scale beside it"),
        (UP, torch.int32, "holds I32, which is not supported"),
        ("model.norm.weight", torch.int32, "holds I32, which is not supported"),
        ("model.layers.0.linear_attn.A_log", torch.int32, "wrong dtype: expected BF16, F16, F32, found I32"),
    ],
)
def test_wrong_dtype(edited: Callable[..., Path], name: str, dtype: torch.dtype, fault: str) -> None:
    size = {UP: (512, 256), "model.norm.weight": (256,)}.get(name, (6,))
    with pytest.raises(CheckpointError, match=rf"'{name}'.*{fault}"):
        load(edited(**{name: torch.zeros(size, dtype=dtype)}))


def test_unexpected_tensors_are_listed_and_buffers_ignored(edited: Callable[..., Path]) -> None:
    extra = {f"model.layers.0.mlp.lora_{i}.weight": torch.zeros(1) for i in range(7)}
    extra["model.rotary_emb.inv_freq"] = torch.zeros(32)
    fault = r"7 unexpected tensors: 'model\.layers\.0\.mlp\.lora_0.*\.\.\."
    with pytest.raises(CheckpointError, match=fault):
        load(edited(**extra))


@pytest.mark.parametrize("nested", [False, True])
def test_a_method_that_is_not_known_is_refused(tmp_path: Path, nested: bool) -> None:
    """So is one that is known and always leaves tensors of its own, where all are plain; of others these decide."""
    path = tmp_path / "dense"
    shutil.copytree(tiny_checkpoint("dense"), path)
    config = json.loads((path / "config.json").read_text())
    said = (config["text_config"] if nested else config).setdefault("quantization_config", {})
    said["quant_method"] = "bitsandbytes"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quant_method 'bitsandbytes' is not supported"):
        load(path)
    said["quant_method"] = "fp8"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"config\.json: quantization_config\.quant_method is 'fp8', and no tensor"
    ):
        load(path)
    said["quant_method"] = "modelopt"
    (path / "config.json").write_text(json.dumps(config))
    assert set(load(path)[0].formats()) == {"bf16"}


def copied(tmp_path: Path, **options: Any) -> Path:
    path = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint("dense", **options), path)
    return path


@pytest.mark.parametrize("keep", [0, 5, 4000, -100])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    file = copied(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or unreadable"):
        load(file.parent)


def test_missing_shard(tmp_path: Path) -> None:
    path = copied(tmp_path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: .*missing"):
        load(path)


def test_shards_without_an_index_are_all_read(tmp_path: Path) -> None:
    path = copied(tmp_path, shards=3)
    (path / "model.safetensors.index.json").unlink()
    assert_same(load(path)[0], load(tiny_checkpoint("dense"))[0])


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    path = copied(tmp_path, shards=3)
    (path / "model.safetensors.index.json").unlink()
    with safe_open(path / "model-00001-of-00003.safetensors", framework="pt") as file:
        save_file({(name := next(iter(file.keys()))): file.get_tensor(name)}, path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"stored twice: in .*model-00001.* and in .*more"):
        load(path)


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ("{", "broken JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "'weight_map' must map"),
        ('{"weight_map": {"x": "../model.safetensors"}}', "must map to a file name"),
        ('{"weight_map": {"x": "model.safetensors"}}', "lists tensor 'x' here"),
    ],
)
def test_broken_index(tmp_path: Path, index: str, fault: str) -> None:
    path = copied(tmp_path)
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=fault):
        load(path)


def test_config_absent_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        ModelShape.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"config\.json: broken JSON"):
        ModelShape.from_directory(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    shape = PUBLISHED["qwen3.5-0.8b"]
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        load_weights(tmp_path, shape)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_weights(tmp_path / "absent", shape)


def test_dummy_weights_are_the_right_size_repeatable_and_sane() -> None:
    shape = ModelShape.from_directory(tiny_checkpoint("moe"))
    weights, again, other = dummy_weights(shape, 0), dummy_weights(shape, 0), dummy_weights(shape, seed=1)
    assert_same(weights, again)
    assert weights.embed.whole.data.tobytes() != other.embed.whole.data.tobytes()
    assert weights.n_bytes == weight_bytes(shape, None)
    for name, part in weights.named_parts():
        tensor = rows(part) if isinstance(part, Matrix) else tensor_of(part)
        assert tensor.float().isfinite().all(), name
        if tensor.dtype == torch.bfloat16 and tensor.numel() > 10_000:
            scale = 0.1 if name == "embed" else tensor.shape[-1] ** -0.5
            assert tensor.float().std().item() == pytest.approx(scale, rel=0.05), name
            assert len(tensor.flatten(0, -2).unique(dim=0)) == tensor.flatten(0, -2).shape[0], name


def test_the_precision_of_a_matrix_is_that_of_its_role() -> None:
    shape = ModelShape.from_directory(tiny_checkpoint("moe"))
    sensitive = {"embed", "lm_head", "layers.3.mlp.down", "layers.3.mlp.shared_down"}
    for quantize in (None, "int8", "int4", "int4-symmetric"):
        for name, part in empty_weights(shape, quantize, tied=False).named_parts():
            if isinstance(part, Matrix):
                is_kept = quantize is None or name.endswith("router")
                precision = "bf16" if is_kept else "int8" if name in sensitive else quantize
                assert (part.whole.layout, part.whole.format.name) == ("panels", precision), name
    rows_of = empty_weights(shape, None, tied=False, store=COUNTED_ROWS)
    parts = [part.whole for _, part in rows_of.named_parts() if isinstance(part, Matrix)]
    assert {(part.layout, part.format.name) for part in parts} == {("rows", "bf16")}
    names = {name: part for name, part in empty_weights(shape, "fp8", tied=False, store=COUNTED_ROWS).named_parts()}
    assert names["layers.0.mlp.gate_up"].whole.format.name == "fp8" and names["embed"].whole.format.name == "bf16"


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model(tmp_path / "absent")
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def snapshot_download(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/offline":
            raise LocalEntryNotFoundError("no connection")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/model") == tmp_path
    assert "*.safetensors" in asked[0][1]
    with pytest.raises(CheckpointError, match=r"owner/offline: .*hub cannot be reached"):
        resolve_model("owner/offline")


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "qwen3.5-27b"])
def test_random_weights_in_one_format(name: str) -> None:
    """Projections are in it, also those of a draft head; what published files leave in 16 bits is not."""
    shape = replace(published_shape(name), has_draft_head=True)
    weights = empty_weights(replace(shape, formats=dummy_formats(shape, "Q4_K")), None, tied=False)
    formats = {part: {s.format.name for s in m.segments} for part, m in weights.named_parts() if isinstance(m, Matrix)}
    plain = {part for part, names in formats.items() if names == {"bf16"}}
    routers = {part for part in formats if part.endswith(".router")}
    assert plain == {"embed", "lm_head", "draft_head.fc"} | routers
    mixed = {part for part, names in formats.items() if names == {"Q4_K", "bf16"}}
    assert mixed == {part for part in formats if part.endswith(".in_proj")}, "the DeltaNet's b and a"
    assert all(names == {"Q4_K"} for part, names in formats.items() if part not in plain | mixed)


@pytest.mark.parametrize(
    ("name", "n_bytes", "counts"),
    [
        ("qwen3.5-27b", 17_612_564_704, {"Q8_0": 48, "Q4_K": 221, "Q5_K": 70, "Q6_K": 63}),
        ("qwen3.5-35b-a3b", 22_360_456_160, {"Q8_0": 252, "Q4_K": 78, "Q5_K": 38, "Q6_K": 4}),
    ],
)
def test_random_weights_in_the_types_of_a_published_file(name: str, n_bytes: int, counts: dict[str, int]) -> None:
    """They take what the file takes beside its 11 MB of names and vocabulary; what has no type is in 32 bits there."""
    block = {"Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "bf16": (1, 4)}
    shape = published_shape(name)
    formats = dummy_formats(shape, "ud-q4_k_xl")
    assert Counter(format.name for format in formats.values()) == counts
    weights, held = empty_weights(replace(shape, formats=formats), None, tied=False), 0.0
    for _, part in weights.named_parts():
        if isinstance(part, Matrix):
            sizes = (
                part.n_matrices * s.n * s.k / block[s.format.name][0] * block[s.format.name][1] for s in part.segments
            )
            held += sum(sizes)
        else:
            held += 4 * math.prod(part.shape)
    assert abs(held + 11e6 - n_bytes) < 1e6
