"""The vision tower on a CPU: its weights from checkpoints, its tokens against the reference, and its bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.vision.cpu import Grid, VisionForward, VisionTower, allocate_vision, check_vision_kernels
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import (
    VisionWeights,
    dummy_vision,
    empty_vision,
    load_vision,
    stored_tower,
    stored_vision_shape,
)
from deltic.ops.arrays import Array, zeros
from deltic.ops.cpu.program import usable_instruction_sets
from tests.cpu.grid import grid
from tests.reference import vision as oracle
from tests.tensors import tensor_of
from tests.tiny_quantised import fp8_block, fp8_row, gptq, int_quantised, pack_quantised
from tests.tiny_vision import PUBLISHED, TINY, random_tower, tower_of, vision_config

GRIDS: list[Grid] = [(1, 4, 6), (2, 6, 34), (1, 2, 2)]

SETS = usable_instruction_sets()
every_set = pytest.mark.parametrize("library", grid(SETS, SETS[:1], pytest.mark.long))


def shape_of(sizes: dict[str, Any]) -> VisionShape:
    return VisionShape.from_config({"vision_config": vision_config(sizes)})


def write(
    path: Path, tensors: dict[str, Tensor], sizes: dict[str, Any], prefix: str = "model.visual.", **more: Any
) -> Path:
    """A checkpoint of a tower, and of a tensor of the language model."""
    path.mkdir(exist_ok=True)
    named = {prefix + name: value.contiguous() for name, value in tensors.items()}
    save_file(named | {"lm_head.weight": torch.zeros(2, 32)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"vision_config": vision_config(sizes)} | more))
    return path


@cache
def loaded(name: str) -> tuple[VisionShape, VisionWeights, dict[str, Tensor]]:
    import tempfile

    sizes = TINY[name]
    tensors = random_tower(sizes)
    with tempfile.TemporaryDirectory() as folder:
        weights, notices = load_vision(write(Path(folder), tensors, sizes), shape_of(sizes))
    assert not notices
    return shape_of(sizes), weights, tensors


def allocated(name: str, size: tuple[int, ...], dtype: Any) -> Array:
    """Poisoned."""
    array = zeros(size, dtype)
    array.view(np.uint8 if size else dtype).fill(255 if size else -1)
    return array


def forward_of(
    shape: VisionShape, weights: VisionWeights, n_rows: int = 128, n_threads: int = 2, library: str | None = None
) -> VisionForward:
    buffers = allocate_vision(shape, 512, 5, n_rows, allocated)
    return VisionForward(VisionTower(shape, weights, buffers), n_threads, library)


def pictures(grids: Sequence[Grid], seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.uniform(-1, 1, (int(np.prod(grid)), 1536)).astype(np.float32) for grid in grids]


def encoded(
    forward: VisionForward, patches: list[Array], grids: Sequence[Grid], n_rows: int | None = None
) -> list[Tensor]:
    """Tokens of each picture."""
    for _ in forward.run(patches, grids, None if n_rows is None else lambda stage, left: n_rows):
        pass
    ends = np.cumsum([len(some) // 4 for some in patches])
    return [
        tensor_of(forward.buffers.tokens[end - len(some) // 4 : end].copy())
        for some, end in zip(patches, ends, strict=True)
    ]


@every_set
@pytest.mark.parametrize("name", TINY)
def test_tokens_are_those_of_the_reference(name: str, library: str) -> None:
    shape, weights, tensors = loaded(name)
    patches = pictures(GRIDS)
    for some, frame, found in zip(
        patches, GRIDS, encoded(forward_of(shape, weights, library=library), patches, GRIDS), strict=True
    ):
        rounded = oracle.tower(torch.from_numpy(some), frame, tensors, tower_of(TINY[name]), "bfloat16")
        exact = oracle.tower(torch.from_numpy(some), frame, tensors, tower_of(TINY[name]))
        # What another order of sums moves is rounded on, so that the bound is that of a few roundings, not of sums.
        assert (found - rounded).abs().max() < 0.03 and (found - rounded).abs().mean() < 0.003
        assert (found - exact).abs().mean() < 0.01 * exact.abs().mean() + 0.005


@every_set
@pytest.mark.parametrize("name", TINY)
def test_no_bit_depends_on_pieces_pictures_or_threads(name: str, library: str) -> None:
    shape, weights, _ = loaded(name)
    patches = pictures(GRIDS)
    expected = encoded(forward_of(shape, weights, 512, library=library), patches, GRIDS)
    for n_rows, piece, n_threads in ((512, 36, 1), (64, 64, 3), (12, 7, 2)):
        forward = forward_of(shape, weights, n_rows, n_threads, library)
        for frame, some, whole in zip(GRIDS, patches, expected, strict=True):
            assert torch.equal(encoded(forward, [some], [frame], piece)[0], whole), "alone"
        for order in ([2, 0, 1], [1, 2], [0, 2, 2, 0]):  # each forward has pictures in front of it
            some = encoded(forward, [patches[i] for i in order], [GRIDS[i] for i in order], piece)
            for i, found in zip(order, some, strict=True):
                assert torch.equal(found, expected[i])


def test_a_video_is_its_frames() -> None:
    """A frame does not see another."""
    shape, weights, _ = loaded("heads of 64")
    forward, (patches,) = forward_of(shape, weights), pictures([(2, 6, 34)])
    whole = encoded(forward, [patches], [(2, 6, 34)])[0]
    frames = encoded(forward, [patches[:204], patches[204:]], [(1, 6, 34)] * 2)
    assert torch.equal(torch.cat(frames), whole)


@pytest.mark.long
def test_a_published_shape() -> None:
    sizes, grid = PUBLISHED, (1, 8, 6)
    tensors = random_tower(sizes)
    weights = weights_of(tensors, sizes)
    patches = pictures([grid])
    found = encoded(forward_of(shape_of(sizes), weights), patches, [grid])[0]
    exact, rounded = (
        oracle.tower(torch.from_numpy(patches[0]), grid, tensors, tower_of(sizes), precision)
        for precision in ("float32", "bfloat16")
    )
    error, expected = (found - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm()
    assert error < 1.2 * expected < 0.03, (error, expected)


def weights_of(tensors: dict[str, Tensor], sizes: dict[str, Any], **more: Any) -> VisionWeights:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), tensors, sizes, **more)
        return load_vision(path, shape_of(sizes))[0]


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
def test_loading(tmp_path: Path, prefix: str) -> None:
    """Every tensor arrives, in both forms of names; what is stored in float32 is converted with a notice."""
    sizes = TINY["heads of 72"]
    tensors = random_tower(sizes)
    tensors["blocks.1.attn.proj.weight"] = tensors["blocks.1.attn.proj.weight"].float()
    path = write(tmp_path, tensors, sizes, prefix)
    weights, notices = load_vision(path, shape_of(sizes))
    assert notices == ["converted 1 matrices from F32 to BF16"]
    pairs = {
        "patch_embed.proj": weights.patch,
        "blocks.0.attn.qkv": weights.blocks[0].qkv,
        "blocks.1.attn.proj": weights.blocks[1].proj,
        "blocks.1.mlp.linear_fc1": weights.blocks[1].fc1,
        "blocks.0.mlp.linear_fc2": weights.blocks[0].fc2,
        "merger.linear_fc1": weights.merge1,
        "merger.linear_fc2": weights.merge2,
    }
    for name, part in pairs.items():
        values = tensor_of(part.weight.unpack()[0])
        stored = tensors[f"{name}.weight"].float().flatten(1)
        assert torch.equal(values[:, : stored.shape[1]], stored) and not values[:, stored.shape[1] :].any()
        assert torch.equal(tensor_of(part.bias), tensors[f"{name}.bias"].float())
    assert torch.equal(tensor_of(weights.norm.weight), tensors["merger.norm.weight"].float())
    assert torch.equal(tensor_of(weights.positions), tensors["pos_embed.weight"])
    assert weights.n_bytes == empty_vision(shape_of(sizes)).n_bytes
    assert weights.formats().keys() == {"bf16"}


LAYOUTS = {
    "fp8": fp8_block,
    "fp8-row": fp8_row,
    "int8": int_quantised,
    "int4": partial(pack_quantised, group=32),
    "gptq": partial(gptq, group=32),
}


def quantised_tower(path: Path, layout: str) -> tuple[dict[str, Any], VisionShape, dict[str, Tensor]]:
    """Writes a tower whose largest products are quantised; its sizes, its shape, and the weights that are meant."""
    sizes = TINY["heads of 64"] | ({} if layout in ("fp8", "fp8-row", "int8") else {"intermediate_size": 352})
    tensors = random_tower(sizes)
    meant = dict(tensors)
    for name in [
        name
        for name in tensors
        if name.startswith("blocks.") and name.endswith(("qkv.weight", "fc1.weight", "fc2.weight"))
    ]:
        parts, meant[name] = LAYOUTS[layout](tensors.pop(name).float())
        tensors |= {f"{name.removesuffix('weight')}{role}": value for role, value in parts.items()}
    method = {"gptq": "gptq", "fp8": "fp8"}.get(layout, "compressed-tensors")
    said = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False} if layout == "gptq" else {}
    config = {"quant_method": method} | said
    shape = stored_vision_shape(write(path, tensors, sizes, quantization_config=config))
    assert shape == shape_of(sizes)
    return sizes, shape, meant


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_tower_keeps_its_format(tmp_path: Path, layout: str) -> None:
    """Also fc2, whose columns are padded to a multiple of 32 where they are none."""
    sizes, shape, meant = quantised_tower(tmp_path, layout)
    weights, _ = load_vision(tmp_path, shape)
    assert len(weights.formats()) == 2 and len(shape.formats) == 6
    for i, block in enumerate(weights.blocks):
        for name, part in (("attn.qkv", block.qkv), ("mlp.linear_fc1", block.fc1), ("mlp.linear_fc2", block.fc2)):
            expected = meant[f"blocks.{i}.{name}.weight"].float()
            assert torch.equal(tensor_of(part.weight.unpack()[0])[:, : expected.shape[1]], expected)
    patches, grid = pictures([(1, 4, 6)]), (1, 4, 6)
    found = encoded(forward_of(shape, weights), patches, [grid])[0]
    expected = oracle.tower(torch.from_numpy(patches[0]), grid, meant, tower_of(sizes), "bfloat16")
    error = (found - expected).norm() / expected.norm()
    assert error < (0.01 if layout.startswith("fp8") else 0.05), error


def test_what_is_missing_or_does_not_belong(tmp_path: Path) -> None:
    sizes = TINY["heads of 64"]
    tensors = random_tower(sizes)

    def refused(changed: dict[str, Tensor], said: str) -> None:
        with pytest.raises(CheckpointError, match=said):
            load_vision(write(tmp_path, changed, sizes), shape_of(sizes))

    refused({}, "no vision tower here")
    refused({n: t for n, t in tensors.items() if n != "blocks.1.norm2.bias"}, r"blocks\.1\.norm2\.bias' is missing")
    refused(tensors | {"deepstack_merger_list.0.norm.weight": torch.zeros(4)}, "unexpected")
    refused(tensors | {"blocks.0.mlp.linear_fc2.weight": torch.zeros(192, 352)}, r"expected \[192, 336\]")
    refused(tensors | {"patch_embed.proj.weight": torch.zeros(192, 1536)}, r"expected \[192, 3, 2, 16, 16\]")
    assert stored_tower(write(tmp_path, {}, sizes)) == {} and stored_vision_shape(tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", 0),
        ("depth", 5000),
        ("patch_size", 14),
        ("temporal_patch_size", 1),
        ("spatial_merge_size", 4),
        ("in_channels", 1),
        ("hidden_act", "gelu"),
        ("deepstack_visual_indexes", [5, 11]),
        ("num_position_embeddings", 2300),
        ("num_heads", 5),
        ("num_heads", "3"),
        ("hidden_size", None),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", {"rope_theta": -1}),
        ("rope_parameters", [1]),
    ],
)
def test_configs_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=field if field != "rope_parameters" else "rope"):
        shape_of(TINY["heads of 64"] | {field: value})


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 216}, {"intermediate_size": 100}, {"out_hidden_size": 40}, {"num_heads": 1}]
)
def test_sizes_that_the_kernels_do_not_take(sizes: dict[str, int]) -> None:
    shape = shape_of(TINY["heads of 64"] | sizes)
    with pytest.raises(UnsupportedModelError, match="vision_config"):
        check_vision_kernels(shape)


def test_published_sizes_are_taken() -> None:
    for h, width in ((768, 3072), (1024, 4096), (1152, 4304)):
        shape = shape_of(
            {
                "depth": 1,
                "hidden_size": h,
                "num_heads": h // 64 if h < 1152 else 16,
                "intermediate_size": width,
                "out_hidden_size": 2048,
            }
        )
        check_vision_kernels(shape)
        assert shape.head_dim == (72 if h == 1152 else 64) and shape.inner_size % 32 == 0


def test_what_does_not_fit() -> None:
    shape = shape_of(TINY["heads of 64"])
    forward = forward_of(shape, dummy_vision(shape))
    for grids, said in (
        ([(1, 3, 2)], "multiples of 2"),
        ([(1, 2, 258)], "room for 512"),
        ([(1, 2, 2)] * 6, "in 5"),
        ([(0, 2, 2)], "multiples"),
    ):
        with pytest.raises(ValueError, match=said):
            next(forward.run(pictures(grids), grids))
    with pytest.raises(ValueError, match="of a grid"):
        next(forward.run(pictures([(1, 2, 4)]), [(1, 2, 2)]))
    with pytest.raises(ValueError, match="a token has 4"):
        next(forward.run(pictures([(1, 2, 2)]), [(1, 2, 2)], lambda stage, left: 3))
