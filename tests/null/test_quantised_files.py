"""Quantised safetensors files: what is read is what the publishers' packages say that they mean, to the bit.

Formulas of the layouts are in tests/tiny_quantised.py. Here the package compressed-tensors is the oracle for its own
layouts and for AutoAWQ's; it rounds to the dtype of the scales (bfloat16), so that values are compared after that
rounding. GPTQ's, AutoRound's and ModelOpt's packages are too heavy to be installed for tests: their formulas stand in
tiny_quantised.py, and gave the same bits as GPTQModel 7.7, auto-round 0.16 and nvidia-modelopt 0.47.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltic.models.fields import CheckpointError
from deltic.models.files import open_tensors, read_headers
from deltic.models.mapped import Header
from deltic.models.stored import StoredTensor
from deltic.models.tensors import stored_tensors
from deltic.ops.formats import Quantised
from tests import tiny_quantised as tiny
from tests.tensors import array_of
from tests.tiny import tiny_checkpoint
from tests.tiny_quantised import RECIPES, Layout, Tensors, meaning_of, tiny_quantised

GPTQ = RECIPES["gptq"].config
AWQ = RECIPES["awq"].config

LAYOUTS: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "fp8": (tiny.fp8_block, {}, "fp8"),
    "fp8-float32": (partial(tiny.fp8_block, dtype=torch.float32), {}, "fp8"),
    "fp8-compressed": (partial(tiny.fp8_block, scale="weight_scale"), {}, "fp8"),
    "fp8-row": (tiny.fp8_row, {}, "fp8-row"),
    "fp8-row-float16": (partial(tiny.fp8_row, dtype=torch.float16), {}, "fp8-row"),
    "fp8-tensor": (tiny.fp8_tensor, {}, "fp8-row"),
    "w4-g32": (partial(tiny.pack_quantised, group=32), {}, "int4-g32-bfloat16"),
    "w4-g64-zero": (partial(tiny.pack_quantised, group=64, symmetric=False), {}, "int4-g64-bfloat16.zero"),
    "w4-g128-float16": (partial(tiny.pack_quantised, dtype=torch.float16), {}, "int4-g128-float16"),
    "w4-g256": (partial(tiny.pack_quantised, group=256, symmetric=False), {}, "int4-g128-bfloat16.zero"),
    "w4-channel": (partial(tiny.pack_quantised, group=0), {}, "int4-g128-bfloat16"),
    "w8-g32-zero": (partial(tiny.pack_quantised, bits=8, group=32, symmetric=False), {}, "int8-g32-bfloat16.zero"),
    "w8-channel": (partial(tiny.pack_quantised, bits=8, group=0), {}, "int8-g128-bfloat16"),
    "int8": (tiny.int_quantised, {}, "int8-g128-bfloat16"),
    "int8-zero": (partial(tiny.int_quantised, symmetric=False), {}, "int8-g128-bfloat16.zero"),
    "int8-float32": (partial(tiny.int_quantised, dtype=torch.float32), {}, "int8"),
    "awq": (tiny.awq, AWQ, "int4-g128-float16.zero"),
    "awq-g32-symmetric": (
        partial(tiny.awq, group=32, symmetric=True),
        AWQ | {"zero_point": False, "group_size": 32},
        "int4-g32-float16",
    ),
    "gptq": (tiny.gptq, GPTQ, "int4-g128-float16"),
    "gptq-channel": (partial(tiny.gptq, group=0), GPTQ | {"group_size": -1}, "int4-g128-float16"),
    "gptq-zero": (
        partial(tiny.gptq, symmetric=False, group=32),
        GPTQ | {"sym": False, "group_size": 32},
        "int4-g32-float16.zero",
    ),
    "gptq-rules": (tiny.gptq, GPTQ | {"dynamic": {"+:.*down.*": {"sym": False}}}, "int4-g128-float16.zero"),
    "gptq-v2": (
        partial(tiny.gptq, symmetric=False, version=2, dtype=torch.bfloat16),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        "int4-g128-bfloat16.zero",
    ),
    "gptq-int8": (partial(tiny.gptq, bits=8), GPTQ | {"bits": 8}, "int8-g128-float16"),
    "gptq-int8-zero": (
        partial(tiny.gptq, bits=8, symmetric=False),
        GPTQ | {"sym": False, "bits": 8},
        "int8-g128-float16.zero",
    ),
    "auto-round": (tiny.auto_round, RECIPES["auto-round"].config, "int4-g128-float16"),
    "auto-round-zero": (
        partial(tiny.gptq, symmetric=False, version=2),
        {"quant_method": "auto-round", "packing_format": "auto_round", "sym": False},
        "int4-g128-float16.zero",
    ),
    "nvfp4": (tiny.nvfp4, {}, "NVFP4"),
    "nvfp4-modelopt": (partial(tiny.nvfp4, publisher="modelopt"), {}, "NVFP4"),
    "mxfp4": (tiny.mxfp4, {}, "MXFP4"),
    "mxfp4-modelopt": (partial(tiny.mxfp4, name="weight"), {}, "MXFP4"),
}


def weights(*shape: int, seed: int = 0) -> Tensor:
    """Those of a row all of one sign, too: codes of zero at both ends."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 16
    w.view(-1, shape[-1])[:3] = w.view(-1, shape[-1])[:3].abs()
    w.view(-1, shape[-1])[3:5] = -w.view(-1, shape[-1])[3:5].abs()
    return w.to(torch.bfloat16)


def stored(path: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> dict[str, StoredTensor]:
    """The tensors of a file with these."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return stored_tensors(read_headers(path), {"quantization_config": config or {}})


def matrix(path: Path, parts: Tensors, config: dict[str, Any] | None = None) -> StoredTensor:
    """The one matrix of these parts."""
    (tensor,) = stored(path, {f"m.x.{name}": part for name, part in parts.items()}, config).values()
    return tensor


def read(tensor: StoredTensor, begin: int = 0, end: int | None = None) -> Quantised:
    rows = tensor.read(begin, int(np.prod(tensor.shape[:-1])) if end is None else end)
    assert isinstance(rows, Quantised)
    return rows


def check_arrays(rows: Quantised, n: int, k: int) -> None:
    """What the contract of Quantised says of sizes and dtypes."""
    sizes, dtypes = rows.format.sizes(k), rows.format.dtypes
    assert rows.codes.shape == (n, k) and rows.codes.dtype == np.uint8
    for part, size, dtype in zip((rows.scale, rows.least, rows.outer), sizes, dtypes, strict=True):
        assert (part is None) == (size is None)
        if part is not None and size is not None:
            assert part.shape == (n, *size) and part.dtype == dtype


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_published_formula(tmp_path: Path, name: str) -> None:
    layout, config, format = LAYOUTS[name]
    parts, values = layout(weights(200, 512))
    tensor = matrix(tmp_path, parts, config)
    assert tensor.shape == (200, 512) and tensor.format is not None and tensor.dtype == tensor.format.name == format
    rows = read(tensor)
    check_arrays(rows, 200, 512)
    assert np.array_equal(rows.values(), values.numpy())


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranges_of_rows(tmp_path: Path, name: str) -> None:
    layout, config, _ = LAYOUTS[name]
    parts, values = layout(weights(264, 512))
    tensor = matrix(tmp_path, parts, config)
    for begin, end in ((0, 1), (7, 8), (5, 21), (127, 130), (256, 264), (263, 264), (8, 16), (9, 9)):
        rows = read(tensor, begin, end)
        check_arrays(rows, end - begin, 512)
        assert np.array_equal(rows.values(), values[begin:end].numpy()), (begin, end)


@pytest.mark.parametrize("name", ["fp8", "fp8-compressed", "fp8-row", "fp8-tensor"])
@pytest.mark.parametrize("shape", [(1, 128), (130, 136), (100, 100), (384, 129)])
def test_fp8_of_sizes_that_fill_no_whole_block(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    parts, values = LAYOUTS[name][0](weights(*shape))
    assert np.array_equal(read(matrix(tmp_path, parts)).values(), values.numpy())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_rows_that_fill_no_whole_words(tmp_path: Path, bits: int) -> None:
    parts, values = tiny.pack_quantised(weights(13, 100), bits=bits, group=0, symmetric=False)
    assert np.array_equal(read(matrix(tmp_path, parts)).values(), values.numpy())


def test_a_scale_for_each_row_of_a_block(tmp_path: Path) -> None:
    w = weights(70, 300)
    scales = torch.rand(70, 3) / 100 + 0.01
    codes, values = tiny._e4m3(w, scales, 1, 128)
    tensor = matrix(tmp_path, {"weight": codes, "weight_scale": scales})
    assert tensor.dtype == "fp8-group" and np.array_equal(read(tensor).values(), values.numpy())


def test_blocks_of_modelopt(tmp_path: Path) -> None:
    parts, values = tiny.fp8_block(weights(256, 384), "weight_scale", torch.float32)
    parts["weight_scale"] = parts["weight_scale"][:, None, :, None]
    assert np.array_equal(read(matrix(tmp_path, parts)).values(), values.numpy())


def test_names_and_plain_tensors(tmp_path: Path) -> None:
    """What is not quantised goes through as stored; scales of activations and of the cache belong to nothing."""
    plain = {
        "a.A_log": torch.randn(6),
        "a.conv1d.weight": weights(16, 1, 4),
        "a.norm.weight": weights(1, 64)[0].half(),
        "a.scalar": torch.tensor(2.0),
        "experts.gate_up_proj": weights(2, 6, 8),
        "visual.counter": torch.tensor([3]),
    }
    unused = {"a.self_attn.k_proj.k_scale": torch.ones(1), "a.self_attn.v_scale": torch.ones(1)}
    tensors = stored(tmp_path, plain | unused)
    assert set(tensors) == set(plain)
    for name, value in plain.items():
        tensor, expected = tensors[name], array_of(value)
        assert tensor.format is None and tensor.shape == value.shape and name in tensor.where
        rows = expected.reshape(-1, value.shape[-1] if value.ndim else 1)
        assert np.array_equal(tensor.read(0, len(rows)), rows) and tensor.read(0, 1).dtype == expected.dtype
        assert np.array_equal(tensor.read(len(rows) - 1, len(rows)), rows[-1:])
    assert {tensors[name].dtype for name in plain} == {"F32", "BF16", "F16", "I64"}


STACKS: dict[str, tuple[Callable[[Tensor], tuple[Tensors, Tensor]], dict[str, str]]] = {
    "fp8": (tiny.fp8_block, {"weight": "", "weight_scale_inv": "_scale_inv"}),
    "fp8-row": (tiny.fp8_row, {"weight": "", "weight_scale": "_weight_scale"}),
    "nvfp4": (
        tiny.nvfp4,
        {
            "weight_packed": "_packed",
            "weight_scale": "_scale",
            "weight_global_scale": "_global_scale",
            "input_global_scale": "_input_global_scale",
        },
    ),
    "nvfp4-modelopt": (
        partial(tiny.nvfp4, publisher="modelopt"),
        {
            "weight": "",
            "weight_scale": "_weight_scale",
            "weight_scale_2": "_weight_scale_2",
            "input_scale": "_input_scale",
        },
    ),
    "mxfp4": (tiny.mxfp4, {"weight_packed": ".weight_packed", "weight_scale": ".weight_scale"}),
    "w4": (
        partial(tiny.pack_quantised, group=32),
        {"weight_packed": "_packed", "weight_scale": "_scale", "weight_shape": "_shape"},
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacked_experts(tmp_path: Path, name: str) -> None:
    """Experts in one tensor, as some publishers keep them, with what belongs to them under the stack's name."""
    layout, names = STACKS[name]
    parts, values = layout(weights(3, 160, 256))
    stack = "l.mlp.experts.gate_up_proj"
    tensors = stored(tmp_path, {stack + names[part]: tensor for part, tensor in parts.items()})
    assert list(tensors) == [stack] and tensors[stack].shape == (3, 160, 256)
    flat = values.reshape(480, 256).numpy()
    assert np.array_equal(read(tensors[stack]).values(), flat)
    for begin, end in ((150, 170), (479, 480), (160, 320)):
        assert np.array_equal(read(tensors[stack], begin, end).values(), flat[begin:end])


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_scales_of_gate_and_up_in_a_stack(tmp_path: Path, shape: tuple[int, ...]) -> None:
    parts, _ = tiny.nvfp4(weights(3, 160, 256), "modelopt")
    scale = torch.rand(shape) + 0.5
    stack = "l.experts.gate_up_proj"
    tensors = {stack: parts["weight"], f"{stack}_scale": parts["weight_scale"], f"{stack}_scale_2": scale}
    (tensor,) = stored(tmp_path, tensors).values()
    rows = read(tensor)
    assert rows.outer is not None
    assert np.array_equal(rows.outer[:, 0], scale.expand(3, 2).reshape(-1).repeat_interleave(80).numpy())


def compressed(**fields: Any) -> Any:
    """A scheme of compressed-tensors, which the tests that use it need."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(dynamic=False, **fields))


def group(bits: int, size: int, symmetric: bool) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric} | strategy


PACKAGE: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    **{
        f"int{bits}-{size}-{symmetric}": (
            "pack-quantized",
            partial(tiny.pack_quantised, bits=bits, group=size, symmetric=symmetric),
            group(bits, size, symmetric),
        )
        for bits in (4, 8)
        for size in (32, 128, 0)
        for symmetric in (True, False)
    },
    "int8": ("int-quantized", tiny.int_quantised, group(8, 0, True)),
    "int8-zero": ("int-quantized", partial(tiny.int_quantised, symmetric=False), group(8, 0, False)),
    "fp8": (
        "float-quantized",
        partial(tiny.fp8_block, scale="weight_scale"),
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "fp8-row": ("float-quantized", tiny.fp8_row, {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        tiny.nvfp4,
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": tiny.E4M3},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        tiny.mxfp4,
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
}


@pytest.mark.parametrize("name", PACKAGE)
def test_compressed_tensors_reads_the_same(tmp_path: Path, name: str) -> None:
    format, layout, fields = PACKAGE[name]
    scheme = compressed(**fields)
    from compressed_tensors.compressors import BaseCompressor

    parts, _ = layout(weights(264, 512))
    package = BaseCompressor.get_value_from_registry(format).decompress(dict(parts), scheme)["weight"]
    assert package.dtype == torch.bfloat16
    ours = torch.from_numpy(read(matrix(tmp_path, parts)).values()).to(torch.bfloat16)
    assert torch.equal(ours, package)


@pytest.mark.parametrize("name", PACKAGE)
def test_what_compressed_tensors_writes(tmp_path: Path, name: str) -> None:
    """From its own quantisation, with scales and zeros of ours; and it is the tensors that tiny_quantised.py makes."""
    format, layout, fields = PACKAGE[name]
    scheme = compressed(**fields)
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(format)
    w = weights(264, 512).float() * 1.0001  # few lie in the middle between two codes
    ours, _ = layout(w)
    state = {"weight": w, "weight_scale": ours["weight_scale"]}
    if name == "nvfp4":
        state |= {"weight_scale": ours["weight_scale"].float(), "weight_global_scale": ours["weight_global_scale"]}
    elif name == "mxfp4":
        state["weight_scale"] = torch.exp2(ours["weight_scale"].float() - 127)
    elif not fields.get("symmetric", True):
        bits = fields["num_bits"]
        zero = tiny._integers(w, bits, fields.get("group_size") or 512, False, torch.bfloat16)[2]
        state["weight_zero_point"] = (zero - (1 << (bits - 1))).to(torch.int8)
    parts = compressor.compress(state, scheme)
    assert {part: (t.dtype, t.shape) for part, t in parts.items()} == {
        part: (t.dtype, t.shape) for part, t in ours.items() if part != "input_global_scale"
    }
    package = compressor.decompress(dict(parts), scheme)["weight"]
    values = torch.from_numpy(read(matrix(tmp_path, parts)).values())
    assert torch.equal(values.to(package.dtype), package)
    different = (values != torch.from_numpy(read(matrix(tmp_path, ours)).values())).float().mean()
    assert different < 1e-3


def test_compressed_tensors_unpacks_autoawq_the_same(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    parts, _ = tiny.awq(weights(264, 512))
    converter = AutoAWQConverter(group_size=128, ignore=(), targets=())
    package = converter.process({f"m.x.{name}": part for name, part in parts.items()})
    awq, theirs = read(matrix(tmp_path, parts, AWQ)), read(*stored(tmp_path, package).values())
    assert awq.format == theirs.format
    for part in ("codes", "scale", "least"):
        assert np.array_equal(getattr(awq, part), getattr(theirs, part))


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("dense", recipe) for recipe in RECIPES]
    + [("moe", recipe) for recipe in ("qwen-fp8", "gptq", "nvfp4-modelopt", "mixed-nvfp4")]
    + [("next", "awq-compressed")],
)
def test_published_mixes(kind: str, recipe: str) -> None:
    made = tiny_quantised(kind, recipe, shards=2)
    config = json.loads((made.path / "config.json").read_text())
    tensors = stored_tensors(read_headers(made.path), config)
    source = read_headers(tiny_checkpoint(kind, experts="split"))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {name: h.shape for name, h in source.items()}
    assert {name for name, tensor in tensors.items() if tensor.format} == set(made.values)
    for name, values in made.values.items():
        assert np.array_equal(read(tensors[name]).values(), values.numpy()), name
    meaning = stored_tensors(read_headers(meaning_of(kind, recipe)), {})
    for name, tensor in meaning.items():
        rows = int(np.prod(tensor.shape[:-1]))
        expected = tensor.read(0, rows)
        found = tensors[name].read(0, rows)
        assert np.array_equal(found.values() if isinstance(found, Quantised) else found, expected), name


def test_codes_are_views_and_memory_follows_the_rows(tmp_path: Path) -> None:
    w = weights(4096, 1024)
    fp8 = matrix(tmp_path, tiny.fp8_block(w)[0])
    codes = read(fp8).codes
    assert not codes.flags.owndata and not codes.flags.writeable
    for layout, config in ((tiny.awq, AWQ), (tiny.gptq, GPTQ), (tiny.pack_quantised, {}), (tiny.nvfp4, {})):
        tensor = matrix(tmp_path, layout(w)[0], config)
        read(tensor, 0, 8)
        tracemalloc.start()
        read(tensor, 1000, 1064)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 6 * 64 * 1024, layout  # bytes of the codes that were asked for


def test_thousands_of_experts_take_no_time(tmp_path: Path) -> None:
    """30,720 matrices, as a model of 35B has them, of four and of three tensors each."""
    parts, _ = tiny.pack_quantised(weights(512, 256), group=32, symmetric=False)
    save_file(parts, tmp_path / "model.safetensors")
    packed = read_headers(tmp_path)
    fp8 = tmp_path / "fp8.safetensors"
    headers: dict[str, Header] = {}
    for i in range(15_360):
        headers |= {f"l.{i}.x.{part}": header for part, header in packed.items()}
        headers[f"l.{i}.y.weight"] = Header(fp8, (512, 2048), "F8_E4M3", 0, 512 * 2048)
        headers[f"l.{i}.y.weight_scale_inv"] = Header(fp8, (4, 16), "BF16", 0, 128)
        headers[f"l.{i}.y.input_scale"] = Header(fp8, (), "F32", 0, 4)
    start = time.process_time()
    tensors = stored_tensors(headers, {})
    assert time.process_time() - start < 6  # .3 s
    assert len(tensors) == 30_720


def without(name: str) -> Callable[[Tensors], None]:
    return lambda parts: parts.__delitem__(name)


def to(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda parts: parts.update({name: change(parts[name])})


def more(**others: Tensor) -> Callable[[Tensors], None]:
    return lambda parts: parts.update(others)


def put(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.float().clone()
        changed.view(-1)[0] = value
        return changed.to(tensor.dtype)

    return change


CUT: Callable[[Tensor], Tensor] = lambda tensor: tensor[1:]  # noqa: E731
ONE = torch.ones(1)

DAMAGED: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "fp8 without scale": ("fp8", without("weight_scale_inv"), "no weight_scale_inv or weight_scale"),
    "scale without fp8": ("fp8", without("weight"), "has no weights beside it"),
    "two scales": ("fp8", more(weight_scale=ONE), "two scales"),
    "blocks of another size": ("fp8", to("weight_scale_inv", CUT), "128 x 128"),
    "a scale of integers": ("fp8", to("weight_scale_inv", lambda s: s.int()), "expected BF16 or F16 or F32"),
    "mxfp8": ("fp8-row", lambda p: p.update(weight_scale=torch.ones(264, 16, dtype=torch.uint8)), "MXFP8"),
    "a scale beside bfloat16": ("fp8-row", to("weight", lambda w: w.bfloat16()), "does not belong beside"),
    "e5m2": ("fp8-row", to("weight", lambda w: w.to(torch.float8_e5m2)), "F8_E5M2, which is not supported"),
    "zeros of fp8": ("fp8-row", more(weight_zero_point=ONE), "does not belong beside"),
    "fp8 of one dimension": ("fp8-row", to("weight", lambda w: w.reshape(-1)), "wrong shape"),
    "no scale": ("w4-g32", without("weight_scale"), "has no weight_scale beside it"),
    "no shape": ("w4-g32", without("weight_shape"), "has no weight_shape beside it"),
    "a shape of others": ("w4-g32", to("weight_shape", lambda s: s + 64), r"says \[328, 576\]"),
    "3 bits": ("w4-g32", lambda p: p.update(weight_packed=p["weight_packed"][:, :48]), "3 bits a weight"),
    "no whole bits": ("w4-g32", lambda p: p.update(weight_packed=p["weight_packed"][:, :50]), "not what weight_shape"),
    "groups of 16": (
        "w4-g32",
        lambda p: p.update(weight_scale=p["weight_scale"].repeat(1, 2)),
        "groups of 16; supported are groups of 32, 64",
    ),
    "5 groups": ("w4-g32", lambda p: p.update(weight_scale=p["weight_scale"][:, :5]), "5 groups of its 512"),
    "scales of fewer rows": ("w4-g32", to("weight_scale", CUT), "wrong shape"),
    "zeros of fewer rows": ("w4-g64-zero", to("weight_zero_point", CUT), "wrong shape"),
    "zeros in bytes": ("w4-g64-zero", to("weight_zero_point", lambda z: z.char()), "expected I32, found I8"),
    "float32 of int4": ("w4-g32", to("weight_scale", lambda s: s.float()), "F32 beside int4"),
    "an order": ("w4-g32", more(weight_g_idx=torch.arange(512).flip(0).int() // 32), "orders columns"),
    "no qzeros": ("awq", without("qzeros"), "has no qzeros beside it"),
    "no scales": ("gptq", without("scales"), "has no scales beside it"),
    "no qweight": ("gptq", without("qweight"), "has no weights beside it"),
    "AWQ's GEMV": ("awq", to("qweight", lambda q: q.T), "AWQ's GEMM layout"),
    "qzeros of other groups": ("awq", to("qzeros", CUT), "wrong shape"),
    "2 bits": ("gptq", lambda p: p.update(qzeros=p["qzeros"][:, :16]), "wrong shape|2 bits"),
    "desc_act": ("gptq", to("g_idx", lambda g: g.flip(0)), "orders columns by activation"),
    "zeros of a symmetric one": ("gptq", to("qzeros", lambda z: z + 1), "says that it is symmetric"),
    "g_idx of others": ("gptq", to("g_idx", CUT), "wrong shape"),
    "both": ("gptq", more(weight=ONE.bfloat16()), "stored twice"),
    "no global scale": ("nvfp4", without("weight_global_scale"), "has no weight_scale_2 beside it"),
    "global scales of others": ("nvfp4", to("weight_global_scale", lambda s: s.repeat(3)), "expected 1 values"),
    "a global scale in bfloat16": ("nvfp4", to("weight_global_scale", lambda s: s.bfloat16()), "expected F32"),
    "no group scale": ("nvfp4-modelopt", without("weight_scale"), "has no weight_scale beside it"),
    "INT4 of ModelOpt": ("nvfp4-modelopt", to("weight_scale", lambda s: s.float()), "expected F8_E4M3 or U8"),
    "swizzled scales": ("nvfp4", to("weight_scale", lambda s: s.reshape(-1)), "wrong shape"),
    "global scale of MXFP4": ("mxfp4", more(weight_global_scale=ONE), "does not belong beside"),
    "scaled inputs": ("nvfp4-modelopt", more(pre_quant_scale=ONE), "AWQ of ModelOpt"),
    "NaN of a weight": ("fp8", to("weight", put(float("nan"))), "weights that are not numbers"),
    "NaN of a weight of a row": (
        "fp8-row",
        to("weight", lambda w: (w.view(torch.uint8) | 255).view(w.dtype)),
        "not numbers",
    ),
    "NaN of a block": ("fp8", to("weight_scale_inv", put(float("nan"))), "not finite"),
    "inf of a group": ("w4-g32", to("weight_scale", put(float("inf"))), "not finite"),
    "NaN of a column": ("awq", to("scales", put(float("nan"))), "not finite"),
    "NaN in e4m3": ("nvfp4", to("weight_scale", put(float("nan"))), "not finite"),
    "NaN in e8m0": ("mxfp4", to("weight_scale", put(255)), "not finite"),
    "divided by 0": ("nvfp4", to("weight_global_scale", put(0)), "not finite"),
    "NaN of the tensor": ("nvfp4-modelopt", to("weight_scale_2", put(float("nan"))), "not finite"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_refusals_name_file_and_tensor(tmp_path: Path, name: str) -> None:
    layout, damage, message = DAMAGED[name]
    make, config, _ = LAYOUTS[layout]
    parts, _ = make(weights(264, 512))
    damage(parts)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(matrix(tmp_path, parts, config))
    assert "model.safetensors: tensor 'm.x." in str(caught.value) and "\n" not in str(caught.value)


CONFIGS = {
    "rotations": ("w4-g32", {"transform_config": {"config_groups": {"u": {"apply": []}}}}, "rotated activations"),
    "a scale that divides": ("fp8", {"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "divides"),
    "planes": ("gptq", GPTQ | {"checkpoint_format": "gptq_p"}, "format 'gptq_p' in config.json"),
    "another packing": (
        "auto-round",
        {"quant_method": "auto-round", "packing_format": "x"},
        "format 'x' in config.json",
    ),
    "mx_int4": ("mxfp4", {"quant_method": "auto-round", "data_type": "mx_int"}, "holds mx_int"),
    "asymmetric without zeros": ("w4-g32", RECIPES["awq-compressed"].config, "has no weight_zero_point"),
    "desc_act without order": ("auto-round", GPTQ | {"desc_act": True}, "has no g_idx"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_change_the_meaning(tmp_path: Path, name: str) -> None:
    layout, config, message = CONFIGS[name]
    parts, _ = LAYOUTS[layout][0](weights(264, 512))
    with pytest.raises(CheckpointError, match=message) as caught:
        matrix(tmp_path, parts, config)
    assert str(tmp_path) in str(caught.value)


def test_desc_act_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    parts, _ = tiny.gptq(weights(264, 512))
    matrix(tmp_path, parts, GPTQ | {"desc_act": True})
    with pytest.raises(CheckpointError, match="orders columns by activation"):
        matrix(tmp_path, parts | {"g_idx": parts["g_idx"].flip(0)}, GPTQ | {"desc_act": True})


def test_gptq_without_qzeros_is_what_its_config_says(tmp_path: Path) -> None:
    for bits in (4, 8):
        parts, values = tiny.gptq(weights(264, 512), bits=bits)
        del parts["qzeros"]
        assert np.array_equal(read(matrix(tmp_path, parts, GPTQ | {"bits": bits})).values(), values.numpy())


FIELDS: list[tuple[str, str, str, Any]] = [
    *(("fp8", "qwen-fp8", *change) for change in (
        ("weight_block_size", [64, 64]), ("weight_block_size", [128, 64]), ("weight_block_size", None), ("fmt", "e5m2"),
        ("quant_method", "gptq"), ("quant_method", "hqq"), ("quant_method", "bitsandbytes"), ("activation_scheme", "static"),
        ("modules_to_not_convert", ["re:(a|aa)+$"]),
    )),
    *(("fp8-row", "fp8-dynamic", *change) for change in (
        ("weights.num_bits", 4), ("weights.type", "int"), ("weights.symmetric", False), ("weights.strategy", "tensor"),
        ("format", "pack-quantized"), ("quant_method", "awq"), ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("weights.dynamic", True), ("kv_cache_scheme", {"num_bits": 8, "type": "float"}), ("quantization_status", "frozen"),
    )),
    *(("fp8-compressed", "fp8-block", *change) for change in (
        ("weights.block_structure", [64, 64]), ("weights.strategy", "channel"), ("weights.strategy", "tensor"),
    )),
    ("fp8-tensor", "fp8-modelopt", "quant_algo", "NVFP4"), ("fp8-tensor", "fp8-modelopt", "quant_algo", "W8A8_SQ"),
    *(("w4-g128", "w4a16", *change) for change in (
        ("weights.group_size", 64), ("weights.num_bits", 8), ("weights.num_bits", 3), ("weights.type", "float"),
        ("weights.symmetric", False), ("weights.strategy", "channel"), ("weights.actorder", "group"),
        ("weights.actorder", "static"), ("format", "int-quantized"), ("format", "float-quantized"), ("ignore", []),
        ("targets", ["re:(a|aa)+$"]), ("weights.observer", "mse"), ("version", "0.1"),
    )),
    *(("awq", "awq", *change) for change in (
        ("bits", 3), ("bits", 8), ("group_size", 64), ("group_size", -1), ("zero_point", False), ("version", "gemv"),
        ("quant_method", "hqq"), ("quant_method", "gptq"), ("modules_to_not_convert", ["x"]),
    )),
    *(("gptq", "gptq", *change) for change in (
        ("bits", 8), ("bits", 3), ("group_size", 32), ("sym", False), ("desc_act", True), ("checkpoint_format", "gptq_v2"),
        ("pack_dtype", "int64"), ("lm_head", True), ("true_sequential", False), ("dynamic", {"+:x": {"bits": 8}}),
        ("quant_method", "awq"),
    )),
    *(("auto-round", "auto-round", *change) for change in (
        ("bits", 2), ("group_size", 32), ("data_type", "nv_fp"), ("packing_format", "auto_round:auto_awq"),
        ("extra_config", {"lm_head": {"bits": 8}}), ("sym", False),
    )),
    *(("nvfp4", "nvfp4", *change) for change in (
        ("weights.num_bits", 8), ("weights.type", "int"), ("weights.group_size", 32), ("weights.strategy", "channel"),
        ("format", "mxfp4-pack-quantized"),
    )),
    ("mxfp4", "mxfp4", "weights.group_size", 16), ("mxfp4", "mxfp4", "format", "nvfp4-pack-quantized"),
    ("nvfp4-modelopt", "nvfp4-modelopt", "quant_algo", "FP8"),
]  # fmt: skip
"""A layout, the recipe whose config describes it, and a field with another value that it may have."""


MEANINGLESS = {
    "activation_scheme",
    "modules_to_not_convert",
    "kv_cache_scheme",
    "quantization_status",
    "ignore",
    "targets",
}
MEANINGLESS |= {"weights.dynamic", "weights.observer", "lm_head", "true_sequential", "dynamic", "extra_config"}
"""Fields that say nothing of how a matrix is stored, or what names say."""
HARMLESS = [
    ("weight_block_size", None),
    ("weights.actorder", "static"),
    ("version", "0.1"),
    ("sym", False),
    ("desc_act", True),
]
"""Values that the same tensors may have as well."""


@pytest.mark.parametrize(("layout", "recipe", "field", "value"), FIELDS, ids=str)
def test_a_field_that_contradicts_the_tensors_is_named(
    tmp_path: Path, layout: str, recipe: str, field: str, value: Any
) -> None:
    """The same weights come out, or a line with the field: half of one download is not read as the other."""
    config = json.loads(json.dumps(RECIPES[recipe].config))
    parts, _ = LAYOUTS["w4-channel" if layout == "w4-g128" else layout][0](weights(264, 512))
    if layout == "w4-g128":
        parts, _ = tiny.pack_quantised(weights(264, 512))
    expected = read(matrix(tmp_path, parts, config)).values()
    place = config["config_groups"]["group_0"] if field == "targets" or field.startswith("weights.") else config
    place = place["weights"] if field.startswith("weights.") else place
    place[field.rpartition(".")[2]] = value
    try:
        found = read(matrix(tmp_path, parts, config)).values()
    except CheckpointError as error:
        said = {"checkpoint_format": "sym", "zero_point": "sym"}.get(field, field.rpartition(".")[2])
        assert said in str(error) and str(tmp_path) in str(error) and "\n" not in str(error)
    else:
        assert field in MEANINGLESS or (field, value) in HARMLESS
        np.testing.assert_array_equal(found, expected)


def test_a_config_of_quantised_weights_beside_others(tmp_path: Path) -> None:
    save_file({"model.norm.weight": ONE.bfloat16()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match=r"quant_method is 'fp8', and no tensor is quantised"):
        open_tensors(tmp_path)


def test_an_mlx_checkpoint_is_named(tmp_path: Path) -> None:
    for tensors in ({"x.weight": ONE.bfloat16()}, {"x.weight": ONE.to(torch.uint32), "x.scales": ONE}):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
        with pytest.raises(CheckpointError, match=r"model\.safetensors: an MLX checkpoint .* or a GGUF file of it"):
            open_tensors(tmp_path)


def test_an_mlx_checkpoint_is_named_by_its_config(tmp_path: Path) -> None:
    """Whatever saved its files again."""
    save_file({"x.weight": ONE.to(torch.uint32), "x.scales": ONE, "x.biases": -ONE}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}))
    with pytest.raises(CheckpointError, match=r"config\.json: quantization: 4 bits in groups of 64: an MLX checkpoint"):
        open_tensors(tmp_path)


def test_a_method_that_is_not_known(tmp_path: Path) -> None:
    """Is refused by name, whatever the tensors look like."""
    with pytest.raises(CheckpointError, match=r"config\.json: quant_method 'vptq' is not supported"):
        stored(tmp_path, {"x.indices": ONE}, {"quant_method": "vptq"})
    stored(tmp_path, {"x.weight": ONE}, {"quant_method": "fp8"})
    parts, _ = tiny.fp8_row(weights(8, 128))
    assert matrix(tmp_path, parts, {"quant_method": "fbgemm_fp8"}).dtype == "fp8-row"
    packed = {"weight": torch.ones(64, 1, dtype=torch.uint8), "weight.absmax": ONE}
    with pytest.raises(CheckpointError, match=r"'m.x.weight.absmax' belongs to bitsandbytes, which is not supported"):
        matrix(tmp_path, packed)
    with pytest.raises(CheckpointError, match=r"quant_method 'bitsandbytes' is not supported"):
        matrix(tmp_path, packed, {"quant_method": "bitsandbytes"})


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda t: t.reshape(-1),
    "deep": lambda t: t[None, None, None],
    "stacked": lambda t: t[None],
    "turned": lambda t: t.T if t.ndim == 2 else t,
    "short": lambda t: t[:1] if t.ndim else t,
    "empty": lambda t: t[:0] if t.ndim else t,
    "no columns": lambda t: t[..., :0] if t.ndim else t,
    "scalar": lambda t: t.reshape(-1)[0],
    "odd": lambda t: t[..., :-1] if t.ndim else t,
    "bytes": lambda t: t.clone(memory_format=torch.contiguous_format).view(torch.uint8) if t.ndim else t,
    "long": lambda t: t.float().nan_to_num().long(),
    "float": lambda t: t.float(),
    "half": lambda t: t.half(),
    "int8": lambda t: t.float().nan_to_num().char(),
    "filled": lambda t: torch.full_like(t.float(), -1).to(t.dtype),
    "zero": lambda t: torch.zeros_like(t),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_damaged_parts_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """Each part of each layout in every wrong shape and type, and absent: an answer, or the one error."""
    layout, config, _ = LAYOUTS[name]
    parts, _ = layout(weights(40, 256))
    for part in parts:
        for what, change in [("absent", None), *CHANGES.items()]:
            changed = dict(parts)
            if change is None:
                del changed[part]
            else:
                changed[part] = change(parts[part])
            try:
                for tensor in stored(tmp_path, {f"m.x.{n}": t for n, t in changed.items()}, config).values():
                    rows = tensor.read(0, int(np.prod(tensor.shape[:-1])))
                    if isinstance(rows, Quantised):
                        check_arrays(rows, *rows.codes.shape)
                        rows.values()
            except CheckpointError as error:
                assert "tensor 'm.x." in str(error), (part, what)


@pytest.mark.parametrize(
    "config",
    [
        {"config_groups": 3},
        {"config_groups": {"a": 3, "b": {"weights": 3}}},
        {"dynamic": [1], "extra_config": {"x": 1}, "bits": "four", "sym": None},
        {"transform_config": 3, "weight_scale_semantics": [1], "data_type": 7},
        {"quant_method": ["gptq"], "checkpoint_format": ["x"]},
    ],
)
def test_configs_of_anything(tmp_path: Path, config: dict[str, Any]) -> None:
    for layout in ("fp8", "w4-g32", "gptq", "awq", "mxfp4"):
        parts, _ = LAYOUTS[layout][0](weights(40, 256))
        try:
            read(matrix(tmp_path, parts, config))
        except CheckpointError as error:
            assert "checkpoint_format" in str(error) or "config.json" in str(error)
