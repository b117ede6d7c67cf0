"""The vision tower of a GGUF model: the same as the safetensors checkpoint that its file was made of.

The names are those of the published gguf package; tests/tiny_mmproj.py writes the file as llama.cpp's converter does.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import VisionWeights, load_vision, stored_tower, stored_vision_shape
from tests.cpu.test_vision_tower import encoded, forward_of, pictures, shape_of, weights_of
from tests.tensors import tensor_of
from tests.tiny_gguf import tiny_gguf
from tests.tiny_mmproj import converted, type_in_file, write_mmproj
from tests.tiny_vision import TINY, random_tower

SIZES = TINY["heads of 64"]
GRID = (1, 4, 6)


def loaded(path: Path) -> tuple[VisionShape, VisionWeights, list[str]]:
    shape = stored_vision_shape(path)
    assert shape is not None
    return (shape, *load_vision(path, shape))


def same(a: VisionWeights, b: VisionWeights) -> bool:
    """To the bit."""
    one, other = dict(a.named_memory()), dict(b.named_memory())
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("type", ["BF16", "F32", "F16"])
def test_plain_values_are_those_of_safetensors(tmp_path: Path, name: str, type: str) -> None:
    sizes, tensors = TINY[name], random_tower(TINY[name])
    shape, weights, notices = loaded(write_mmproj(tmp_path / f"mmproj-{type}.gguf", tensors, sizes, type))
    assert shape == shape_of(sizes) and not shape.formats
    assert notices == [
        f"converted {1 if type == 'BF16' else 11} matrices from {'F16' if type == 'F16' else 'F32'} to BF16"
    ]
    if type == "F16":  # bfloat16 values near 0 are no float16
        rounded = {n: t.half().bfloat16() for n, t in tensors.items() if t.dim() > 1 and n != "pos_embed.weight"}
        assert not all(torch.equal(t, tensors[n]) for n, t in rounded.items())
        tensors = tensors | rounded
    expected = weights_of(tensors, sizes)
    assert same(weights, expected)
    patches = pictures([GRID])
    tokens = [encoded(forward_of(shape, each), patches, [GRID])[0] for each in (weights, expected)]
    assert torch.equal(*tokens) and tokens[0].abs().max() > 0.1


def test_patches_of_two_frames_are_joined(tmp_path: Path) -> None:
    """In every type that they may have, and from any row on."""
    tensors = random_tower(SIZES)
    whole = tensors["patch_embed.proj.weight"].reshape(-1, 16)
    for type in ("F32", "F16", "BF16"):

        def pick(name: str, shape: tuple[int, ...], other: str, type: str = type) -> str:
            return type if "patch_embd.weight" in name else type_in_file(name, shape, other)

        path = write_mmproj(tmp_path / f"mmproj-{type}.gguf", tensors, SIZES, pick=pick)
        patches = stored_tower(path)["patch_embed.proj.weight"]
        assert (patches.shape, patches.dtype, patches.format) == ((192, 3, 2, 16, 16), type, None)
        values = whole.half().float() if type == "F16" else whole.float()
        for begin, end in ((0, len(whole)), (96, 192), (5, 6), (15, 49), (31, 33), (len(whole) - 1, len(whole))):
            assert np.array_equal(np.asarray(patches.read(begin, end), np.float32), values[begin:end].numpy())


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q5_1"])
def test_a_quantised_tower_keeps_its_format(tmp_path: Path, type: str) -> None:
    """But fc2, whose rows of 336 are no whole blocks and are float16 in the file."""
    tensors = random_tower(SIZES)
    shape, weights, notices = loaded(write_mmproj(tmp_path / f"mmproj-{type}.gguf", tensors, SIZES, type))
    assert {format.name for format in shape.formats.values()} == {type} and len(shape.formats) == 2 * 3 + 2
    assert weights.formats().keys() == {type, "bf16"}
    assert notices == ["converted 1 matrices from F32 to BF16", "converted 2 matrices from F16 to BF16"]
    kind = gguf.GGMLQuantizationType[type]

    def meant(name: str) -> Tensor:
        values = tensors[f"{name}.weight"].float().numpy()
        if values.shape[1] % 32:
            return tensors[f"{name}.weight"].half().bfloat16().float()
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))

    found = {"merger.linear_fc1": weights.merge1, "merger.linear_fc2": weights.merge2}
    for i, block in enumerate(weights.blocks):
        found |= {f"blocks.{i}.attn.qkv": block.qkv, f"blocks.{i}.attn.proj": block.proj}
        found |= {f"blocks.{i}.mlp.linear_fc1": block.fc1, f"blocks.{i}.mlp.linear_fc2": block.fc2}
    changed: dict[str, Tensor] = {}
    for name, part in found.items():
        values, expected = tensor_of(part.weight.unpack()[0]), meant(name)
        assert torch.equal(values[:, : expected.shape[1]], expected) and not values[:, expected.shape[1] :].any()
        assert torch.equal(tensor_of(part.bias), tensors[f"{name}.bias"].float())
        changed[f"{name}.weight"] = expected
    patches = pictures([GRID])
    tokens = encoded(forward_of(shape, weights), patches, [GRID])[0]
    plain = weights_of(tensors | changed, SIZES)
    expected = encoded(forward_of(shape_of(SIZES), plain), patches, [GRID])[0]
    error = (tokens - expected).norm() / expected.norm()
    assert error < 0.05, error


def test_the_tower_lies_beside_the_model(tmp_path: Path) -> None:
    model = Path(shutil.copy(tiny_gguf("dense"), tmp_path / "model-Q8_0.gguf"))
    assert stored_tower(model) == {} and stored_vision_shape(model) is None
    with pytest.raises(CheckpointError, match=r"model-Q8_0\.gguf: no vision tower beside this file; put the mmproj"):
        load_vision(model, shape_of(SIZES))
    tensors = random_tower(SIZES)
    for type in ("Q8_0", "BF16"):
        write_mmproj(tmp_path / f"mmproj-{type}.gguf", tensors, SIZES, type)
    shape, weights, _ = loaded(model)
    assert shape == shape_of(SIZES) and same(weights, weights_of(tensors, SIZES))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("general.architecture", "qwen35", r"general\.architecture is 'qwen35', expected 'clip'.*get the mmproj file"),
        ("clip.projector_type", "gemma3", "projector_type is 'gemma3', expected 'qwen3vl_merger'.*get the mmproj file"),
        ("clip.projector_type", None, "projector_type is None, expected 'qwen3vl_merger'"),
        ("clip.use_gelu", False, "use_gelu is False, expected True"),
        ("clip.vision.patch_size", 14, "patch_size is 14, expected 16"),
        ("clip.vision.spatial_merge_size", 4, "spatial_merge_size is 4, expected 2"),
        ("clip.vision.attention.layer_norm_epsilon", 1e-5, "layer_norm_epsilon is 1e-05, expected 1e-06"),
        ("clip.vision.is_deepstack_layers", [False, True], "deepstack layers .*not supported; use a model of Qwen3.5"),
        ("clip.vision.is_deepstack_layers", True, "has deepstack layers"),
        ("clip.vision.block_count", None, r"the metadata has no clip\.vision\.block_count; an integer"),
        ("clip.vision.block_count", "2", r"the metadata says '2' for clip\.vision\.block_count"),
        ("clip.vision.block_count", 3, r"mmproj-BF16\.gguf: tensor 'v\.blk\.2\.ln1\.weight' is missing"),
        ("clip.vision.block_count", 1, "'v.blk.1.*unexpected tensors"),
        ("clip.vision.block_count", 2**31 - 1, r"'clip\.vision\.block_count': found 2147483647; supported: at most"),
        ("clip.vision.attention.head_count", 7, r"'clip\.vision\.attention\.head_count': found 7"),
        (
            "clip.vision.embedding_length",
            96,
            r"'v\.patch_embd\.weight' has the wrong shape: expected \[96, 3, 2, 16, 16\]",
        ),
        ("clip.vision.projection_dim", 64, r"'mm\.2\.weight' has the wrong shape: expected \[64, 768\]"),
        ("clip.vision.feed_forward_length", 2**30, r"'v\.blk\.0\.ffn_up\.weight' has the wrong shape"),
    ],
)
def test_a_file_of_another_tower(tmp_path: Path, key: str, value: Any, complaint: str) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    path = write_mmproj(tmp_path / "mmproj-BF16.gguf", random_tower(SIZES), SIZES, change=change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=complaint):
        loaded(path)


def other(name: str, value: Tensor | None) -> dict[str, Tensor]:
    """A tiny tower's tensors in the file, with one that is another or missing."""
    tensors = converted(random_tower(SIZES), SIZES["depth"])
    tensors.pop(name, None)
    return tensors if value is None else tensors | {name: value}


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("v.blk.1.ln2.bias", None, r"mmproj\.gguf: tensor 'v\.blk\.1\.ln2\.bias' is missing; expected shape \[192\]"),
        ("v.position_embd.weight", None, r"has no tensor 'v\.position_embd\.weight'"),
        (
            "v.position_embd.weight",
            torch.zeros(2300, 192),
            "'num_position_embeddings': found 2300; supported: a square",
        ),
        ("v.position_embd.weight", torch.zeros(192, 2304), "'num_position_embeddings': found 192"),
        ("v.patch_embd.weight", None, r"expected tensors .*weight\.1', of one shape .* get the file anew"),
        ("v.patch_embd.weight.1", None, "expected tensors 'v.patch_embd.weight' and"),
        ("v.patch_embd.weight.1", torch.zeros(192, 3, 8, 16), "of one shape of four sizes"),
        ("v.patch_embd.weight.1", torch.zeros(192, 768), "of one shape of four sizes"),
        ("v.blk.0.attn_qkv.weight", torch.zeros(192, 576), r"'v\.blk\.0\.attn_qkv\.weight' has the wrong shape"),
        ("v.blk.0.ln1.weight", torch.zeros(1, 192), r"'v\.blk\.0\.ln1\.weight' has the wrong shape"),
        ("v.deepstack.1.norm.weight", torch.zeros(768), r"'v\.deepstack\.1\.norm\.weight' is not of a vision tower"),
        ("v.blk.00.ln1.weight", torch.zeros(192), r"'v\.blk\.00\.ln1\.weight' is not of a vision tower"),
        (
            "v.blk.0.ffn_gate.weight",
            torch.zeros(336, 192),
            "is not of a vision tower of Qwen3.5 or later; get the mmproj",
        ),
        ("pos_embed.weight", torch.zeros(2304, 192), r"'pos_embed\.weight' is not of a vision tower"),
    ],
)
def test_tensors_that_are_missing_or_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Tensor | None, complaint: str
) -> None:
    monkeypatch.setattr("tests.tiny_mmproj.converted", lambda tensors, n_blocks: other(name, value))
    path = write_mmproj(tmp_path / "mmproj.gguf", {}, SIZES)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=complaint):
        loaded(path)


def test_types_that_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"

    def change(writer: gguf.GGUFWriter) -> None:
        odd = np.zeros((4, 292), np.uint8)
        writer.add_tensor("v.blk.2.attn_qkv.weight", odd, raw_dtype=gguf.GGMLQuantizationType.Q8_K)

    with pytest.raises(CheckpointError, match=r"'v\.blk\.2\.attn_qkv\.weight' is quantised as Q8_K, which is not"):
        loaded(write_mmproj(path, random_tower(SIZES), SIZES, change=change))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="the download is not complete, or the file is damaged"):
        loaded(path)
