"""Embedding, norm and linears of the GPU backend against the oracle, and the equality of bits they promise.

Off a GPU the values are small multiples of 1/8, so that every sum is exact in any order: the interpreter's matrix product is
numpy's, whose order follows the shape. There equality of bits shows that indices, masks and roundings agree; on a GPU the
values are normal and it shows the order of the sums too.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from deltic.ops.contract import KernelError
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu import linear as linear_module
from deltic.ops.gpu import norm as norm_module
from deltic.ops.gpu.blocks import BatchState, Rows
from deltic.ops.gpu.chip import HOPPER
from deltic.ops.gpu.fp8 import Wide
from deltic.ops.gpu.launch import Levers
from deltic.ops.gpu.linear import (
    Narrow,
    k_splits,
    narrow_config,
    narrow_linear,
    narrow_swiglu,
    product,
    silu_mul,
    vendor_pays,
    wide_config,
    wide_linear,
)
from deltic.ops.gpu.norm import add_norm, begin_decode, embed
from deltic.ops.matrix import Matrix
from tests.gpu.matrices import in_rows
from tests.reference.layers import linear, rms_norm

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EPS = 1e-6

# Weights (rows, K) of the three models: in_proj, qkv, out_proj, o_proj, gate_up, down; of 35B-A3B without its experts. Of speech: qkv,
# o_proj, gate_up, down of the talker of 1.7B, and of its predictor, with a head and the projection between them.
SHAPES = {
    "0.8B": ((8224, 1024), (5120, 1024), (1024, 2048), (1024, 2048), (7168, 1024), (1024, 3584)),
    "27B": ((16480, 5120), (14336, 5120), (5120, 6144), (5120, 6144), (34816, 5120), (5120, 17408)),
    "27B over 2": ((8240, 5120), (7168, 5120), (5120, 3072), (5120, 3072), (17408, 5120), (5120, 8704)),
    "27B over 8": ((2060, 5120), (2048, 5120), (5120, 768), (5120, 768), (4352, 5120), (5120, 2176)),
    "35B-A3B over 2": ((6176, 2048), (4608, 2048), (2048, 2048), (2048, 2048)),
    "35B-A3B": ((12352, 2048), (9216, 2048), (2048, 4096), (2048, 4096)),
    "talker": ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),
    "predictor": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (2048, 1024)),
}


def poisoned(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, device=device, dtype=dtype)


def values(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if device == "cpu":
        return (torch.randint(-8, 9, shape, generator=generator) / 8).to(dtype)
    return torch.randn(shape, generator=generator).to(device, dtype)


def close(out: Tensor, expected: Tensor, k: int) -> None:
    """Float32 sums of k products in some order: relative to the size of a sum, k products of about 1, 1e-5 is ample."""
    torch.testing.assert_close(out.float(), expected.float(), rtol=1e-5, atol=1e-5 * k**0.5)


def rounded_close(out: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """One rounding to bfloat16, of a value that differs in float32's last bits: at most the next bfloat16."""
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-7, atol=atol)


# ---- embedding and norm


def test_begin_decode(device: str) -> None:
    n_batch_slots, width, vocab = 5, 96 if device == "cpu" else 5120, 40
    table = values(vocab, width, device=device)
    integers = dict(device=device, dtype=torch.int32)
    rows_batch_slot = torch.tensor([3, -1, 0, 4], **integers)
    last_token = torch.tensor([7, -1, -1, 39, -1], **integers)
    position = torch.tensor([70, 9, 9, 0, 12], **integers)
    state_slot = torch.tensor([2, 9, 9, 5, 1], **integers)
    done = torch.tensor([0, 0, 0, 0, 1], **integers)
    rows = Rows(*(torch.full((4,), -77, **integers) for _ in range(3)))
    residual = poisoned(4, width, device=device)
    assert n_batch_slots == len(state_slot)
    batch_slots = BatchState(last_token, position, state_slot, done, page_table=state_slot)
    begin_decode(rows_batch_slot, batch_slots, in_rows(table), rows=rows, residual=residual)
    assert rows.batch_slot.tolist() == [3, 0, 0, 4]
    assert rows.state_slot.tolist() == [5, -1, 2, -1]
    assert rows.position.tolist() == [0, 0, 70, 12]
    assert torch.equal(residual, table.float()[[39, 0, 7, 0]])
    shift = torch.tensor([-3, 9, 9, 0, -5], **integers)
    behind = dataclasses.replace(rows, angle_shift=torch.full((4,), -77, **integers))
    begin_decode(
        rows_batch_slot,
        dataclasses.replace(batch_slots, angle_shift=shift),
        in_rows(table),
        rows=behind,
        residual=residual,
    )
    assert behind.angle_shift is not None and behind.angle_shift.tolist() == [0, 0, -3, -5]


def test_embed(device: str) -> None:
    table = values(50, 544, device=device)
    residual = poisoned(3, 544, device=device)
    embed(torch.tensor([49, 0, 13], device=device, dtype=torch.int32), in_rows(table), residual)
    assert torch.equal(residual, table.float()[[49, 0, 13]])


def test_rows_of_pictures(device: str) -> None:
    """An id below 0 names one; without pictures it is padding."""
    table, pictures = values(50, 544, device=device), values(7, 544, device=device, seed=5)
    w = in_rows(table)
    ids = torch.tensor([49, -1, 13, -7, 0], device=device, dtype=torch.int32)
    residual, expected = poisoned(5, 544, device=device), poisoned(5, 544, device=device)
    embed(ids, w, residual, pictures)
    embed(ids, w, expected)
    assert torch.equal(residual[[0, 2, 4]], expected[[0, 2, 4]])
    assert torch.equal(residual[[1, 3]], pictures.float()[[0, 6]])
    assert torch.equal(expected[[1, 3]], expected[[4, 4]])


@pytest.mark.parametrize(
    ("n", "width", "n_partials", "dtype"),
    [(1, 96, 0, torch.float32), (3, 512, 1, torch.bfloat16), (5, 1056, 2, torch.float32), (2, 2560, 11, torch.float32)],
)
def test_add_norm(device: str, n: int, width: int, n_partials: int, dtype: torch.dtype) -> None:
    residual = torch.randn(n, width).to(device)
    partials = torch.randn(n_partials, n, width).to(device, dtype) if n_partials else None
    w = (torch.randn(width) / 8).to(device)
    expected = residual.clone()
    for s in range(n_partials):
        assert partials is not None
        expected += partials[s].float()
    out, updated = poisoned(n, width, device=device, dtype=torch.bfloat16), residual.clone()
    add_norm(updated, partials, w, EPS, out)
    assert torch.equal(updated, expected)
    rounded_close(out, rms_norm(expected, w, EPS))

    # some rows, in another order; the residual stays
    rows = torch.tensor([n - 1, 0, n - 1], device=device, dtype=torch.int32)
    some, kept = poisoned(3, width, device=device, dtype=torch.bfloat16), residual.clone()
    add_norm(kept, partials, w, EPS, some, rows=rows)
    assert torch.equal(some, out[rows.long()]) and torch.equal(kept, residual)

    # a row alone
    alone = poisoned(1, width, device=device, dtype=torch.bfloat16)
    own = None if partials is None else partials[:, -1:].contiguous()
    last = residual[-1:].contiguous()
    add_norm(last, own, w, EPS, alone)
    assert torch.equal(alone[0], out[-1])


def test_the_norm_does_not_see_how_many_warps_it_has(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    residual, w = torch.randn(4, 1056).to(device), torch.randn(1056).to(device)
    results = []
    for warps in (1, 2, 4, 8):
        monkeypatch.setattr(norm_module, "norm_warps", lambda n, width, warps=warps: warps)
        out = poisoned(4, 1056, device=device, dtype=torch.bfloat16)
        add_norm(residual, None, w, EPS, out)
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)


# ---- narrow


@pytest.mark.parametrize(
    ("n", "m", "k", "splits"), [(1, 64, 128, 1), (3, 100, 160, 1), (17, 72, 256, 2), (2, 257, 512, 4)]
)
def test_narrow_linear(device: str, n: int, m: int, k: int, splits: int) -> None:
    x, w = values(n, k, device=device), values(m, k, device=device, seed=1)
    out = poisoned(splits, n, m, device=device)
    narrow_linear(x, in_rows(w), out)
    width = k // splits
    for s in range(splits):
        part = slice(s * width, (s + 1) * width)
        close(out[s], linear(x[:, part], w[:, part], "bfloat16"), width)
    for row in (0, n - 1):
        alone = poisoned(splits, 1, m, device=device)
        narrow_linear(x[row : row + 1].contiguous(), in_rows(w), alone)
        assert torch.equal(alone[:, 0], out[:, row])
    if splits == 1:
        rounded = poisoned(n, m, device=device, dtype=torch.bfloat16)
        narrow_linear(x, in_rows(w), rounded)
        assert torch.equal(rounded, out[0].bfloat16())


def test_a_projection_in_two_parts(device: str) -> None:
    x, w = values(2, 128, device=device), values(80, 128, device=device, seed=1)
    whole, parts = poisoned(2, 2, 80, device=device), poisoned(2, 2, 80, device=device)
    narrow_linear(x, in_rows(w), whole)
    narrow_linear(x, in_rows(w[48:]), parts[:, :, 48:])
    assert parts[:, :, :48].isnan().all()
    narrow_linear(x, in_rows(w[:48]), parts[:, :, :48])
    assert torch.equal(parts, whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_row_does_not_see_its_neighbours(device: str) -> None:
    """Not even where they are not finite: rows not in use hold anything."""
    x, w = values(5, 128, device=device), values(96, 128, device=device, seed=1)
    clean, dirty = poisoned(1, 5, 96, device=device), poisoned(1, 5, 96, device=device)
    narrow_linear(x, in_rows(w), clean)
    x[1], x[4] = torch.nan, torch.inf
    narrow_linear(x, in_rows(w), dirty)
    assert torch.equal(clean[:, [0, 2, 3]], dirty[:, [0, 2, 3]])


@pytest.mark.parametrize("config", [Narrow(64, 32, 4, 2), Narrow(64, 128, 4, 3), Narrow(128, 64, 8, 3)])
def test_configurations_do_not_change_bits(device: str, config: Narrow) -> None:
    x, w = values(2, 256, device=device), values(200, 256, device=device, seed=1)
    expected, out = poisoned(2, 2, 200, device=device), poisoned(2, 2, 200, device=device)
    narrow_linear(x, in_rows(w), expected)
    narrow_linear(x, in_rows(w), out, config=config)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("n", "m", "k"), [(1, 64, 128), (19, 80, 96), (4, 208, 256)])
def test_swiglu_is_a_linear_and_silu_mul(device: str, n: int, m: int, k: int) -> None:
    x, w = values(n, k, device=device), values(m, k, device=device, seed=1)
    sums = poisoned(1, n, m, device=device)
    narrow_linear(x, in_rows(w), sums)
    expected, out, apart = (poisoned(n, m // 2, device=device, dtype=torch.bfloat16) for _ in range(3))
    silu_mul(sums[0], expected)
    narrow_swiglu(x, in_rows(w), out)
    assert torch.equal(out, expected)
    with Levers(silu_epilogue=False).bound():
        narrow_swiglu(x, in_rows(w), apart, gate_up=torch.full_like(sums, torch.nan))
    assert torch.equal(apart, expected)
    gate, up = linear(x, w, "bfloat16").chunk(2, -1)
    rounded_close(out, torch.nn.functional.silu(gate) * up, atol=1e-3)  # where up is nearly 0 and gate is not


@pytest.mark.parametrize(("n", "m"), [(1, 128), (5, 256), (40, 384)])
def test_the_first_rows_of_a_weight(device: str, n: int, m: int) -> None:
    """What a draft head takes of the model's: the bits of the whole product, and nothing beside them."""
    x, w = values(n, 128, device=device), values(400, 128, device=device, seed=1)
    whole, both = poisoned(1, n, 400, device=device), poisoned(1, n + 1, m, device=device)
    narrow_linear(x, in_rows(w), whole)
    narrow_linear(x, in_rows(w), both[:, :n])
    assert torch.equal(both[:, :n], whole[..., :m]) and both[:, n].isnan().all()
    with pytest.raises(KernelError, match="out"):
        narrow_linear(x, in_rows(w), whole[..., : m - 28])


def test_what_is_refused(device: str) -> None:
    x, w = values(2, 128, device=device), values(64, 128, device=device)
    with pytest.raises(KernelError, match="slices"):
        narrow_linear(x, in_rows(w), poisoned(8, 2, 64, device=device))
    with pytest.raises(KernelError, match="blocks of 64"):
        wide_linear(x, in_rows(w), poisoned(2, 64, device=device))


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_a_format_without_a_kernel_is_refused(device: str, format: str) -> None:
    w, few, many = Matrix.empty(64, 128, WEIGHT_FORMATS[format]), 2, 64
    refused = f"no kernel for {format} in panels$"
    with pytest.raises(KernelError, match=f"linear: .*{refused}"):
        narrow_linear(values(few, 128, device=device), w, poisoned(1, few, 64, device=device))
    inner = poisoned(few, 32, device=device, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=f"linear: .*{refused}"):
        narrow_swiglu(values(few, 128, device=device), w, inner)
    with pytest.raises(KernelError, match=f"linear: .*{refused}"):
        wide_linear(values(many, 128, device=device), w, poisoned(many, 64, device=device))
    with pytest.raises(KernelError, match=f"linear: .*{refused}"):
        product(values(few, 128, device=device), w)
    ids = torch.zeros(few, device=device, dtype=torch.int32)
    with pytest.raises(KernelError, match=f"embed: .*{refused}"):
        embed(ids, w, poisoned(few, 128, device=device))
    with pytest.raises(KernelError, match=f"embed: .*{refused}"):
        rows, residual = Rows(ids, ids, ids), poisoned(few, 128, device=device)
        begin_decode(ids, BatchState(ids, ids, ids, ids, ids), w, rows=rows, residual=residual)


def test_product_is_a_linear(device: str) -> None:
    x, w = values(3, 96, device=device), values(40, 96, device=device, seed=1)
    close(product(x, in_rows(w)), linear(x, w, "bfloat16"), 96)


def test_splits_follow_the_shape() -> None:
    for shapes in SHAPES.values():
        for m, k in shapes:
            splits = k_splits(m, k)
            assert splits & (splits - 1) == 0 and k % (splits * 64) == 0
            with Levers(split_k=False).bound():
                assert k_splits(m, k) == 1
    assert [k_splits(m, k) for m, k in SHAPES["0.8B"]] == [1, 2, 8, 8, 1, 8]


@pytest.mark.parametrize(("sms", "shared"), [(132, 227 * 1024), (108, 163 * 1024), (142, 99 * 1024)])
def test_configurations_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch, sms: int, shared: int) -> None:
    monkeypatch.setattr(linear_module, "chip", lambda: dataclasses.replace(HOPPER, n_sms=sms, shared_bytes=shared))
    for shapes in SHAPES.values():
        for m, k in shapes:
            for splits in {1, k_splits(m, k)}:
                for n in (1, 8, 16, 24, 48, 64, 96, 128, 256, 512, 1088):
                    c = narrow_config(n, m, k // splits, splits)
                    tokens = min(max(16, 1 << (n - 1).bit_length()), 128)
                    assert c.num_stages * c.block_k * (c.block_m + tokens) * 2 <= shared
                    assert k // splits % c.block_k == 0


# ---- wide


@pytest.mark.parametrize(
    ("t", "m", "k", "dtype"),
    [(64, 72, 96, torch.bfloat16), (192, 257, 128, torch.float32), (128, 64, 64, torch.bfloat16)],
)
def test_wide_linear(device: str, t: int, m: int, k: int, dtype: torch.dtype) -> None:
    x, w = values(t, k, device=device), values(m, k, device=device, seed=1)
    out, sums = poisoned(t, m, device=device, dtype=dtype), poisoned(1, t, m, device=device)
    wide_linear(x, in_rows(w), out)
    narrow_linear(x, in_rows(w), sums)
    assert torch.equal(out, sums[0].to(dtype))
    close(sums[0], linear(x, w, "bfloat16"), k)


def test_wide_config_gives_every_sm_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "chip", lambda: dataclasses.replace(HOPPER, n_sms=132, shared_bytes=227 * 1024))
    assert wide_config(8192, 8224) == Wide(128, 256, 8, 3)
    assert wide_config(64, 1024) == Wide(64, 64, 4, 5)
    assert vendor_pays(8192, 1024) and not vendor_pays(1024, 1024) and not vendor_pays(512, 34816)


def test_silu_mul_of_bfloat16(device: str) -> None:
    gate_up = values(3, 2 * 1100, device=device)
    out = poisoned(3, 1100, device=device, dtype=torch.bfloat16)
    silu_mul(gate_up, out)
    gate, up = gate_up.float().chunk(2, -1)
    rounded_close(out, torch.nn.functional.silu(gate) * up)


# ---- real shapes, the order of real sums


@needs_gpu
@pytest.mark.parametrize("model", list(SHAPES))
def test_bits_do_not_follow_the_batch(model: str) -> None:
    for m, k in SHAPES[model]:
        w = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) / 32
        x = torch.randn(1088, k, device="cuda", dtype=torch.bfloat16)
        for splits in [k_splits(m, k)]:
            expected = poisoned(splits, 1088, m, device="cuda")
            narrow_linear(x, in_rows(w), expected)
            close(expected.sum(0), x.float() @ w.float().T, k)
            for n in (1, 4, 16, 24, 48, 64, 96, 128, 256, 384, 512, 768, 1024):
                out = poisoned(splits, n, m, device="cuda")
                narrow_linear(x[:n], in_rows(w), out)
                assert torch.equal(out, expected[:, :n]), (m, k, splits, n)


@needs_gpu
@pytest.mark.parametrize("model", list(SHAPES))
def test_narrow_wide_and_vendor_agree(model: str) -> None:
    for m, k in SHAPES[model]:
        w = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) / 32
        x = torch.randn(8192, k, device="cuda", dtype=torch.bfloat16)
        narrow = poisoned(128, m, device="cuda", dtype=torch.bfloat16)
        narrow_linear(x[:128], in_rows(w), narrow)
        ours = poisoned(8192, m, device="cuda", dtype=torch.bfloat16)
        wide_linear(x, in_rows(w), ours, config=Wide(128, 256, 8, 3))
        assert torch.equal(ours[:128], narrow), (m, k)
        for t in (64, 192, 1024, 2048, 4096, 8192):
            out = poisoned(t, m, device="cuda", dtype=torch.bfloat16)
            wide_linear(x[:t], in_rows(w), out)
            assert torch.equal(out, ours[:t]), (m, k, t, vendor_pays(t, m))
