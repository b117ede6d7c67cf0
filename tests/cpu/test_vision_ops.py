"""The vision tower's operators, at every compiled instruction set this machine runs, against tests/reference/vision.py; and that
neither the piece, nor other frames, nor threads touch a bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.models.rotary import rotary_tables
from deltic.ops.contract import KernelError
from deltic.ops.cpu import vision
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.ops.cpu.vision import Frames, PatchKeys, key_starts
from deltic.ops.geometry import up_to
from tests.cpu.grid import grid
from tests.reference import vision as oracle
from tests.tensors import array_of, on_tensors

layer_norm, bias_gelu, bias_rows, patch_rows, patch_keys, patch_attention = map(
    on_tensors,
    (
        vision.layer_norm,
        vision.bias_gelu,
        vision.bias_rows,
        vision.patch_rows,
        vision.patch_keys,
        vision.patch_attention,
    ),
)

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
SETS = usable_instruction_sets()
GRIDS = [(2, 2), (6, 34), (2, 2), (26, 8), (2, 14)]
"""Frames of 4 patches, and of more than a tile of keys, more than a task of queries."""


@pytest.fixture(params=grid(SETS, SETS[:1], pytest.mark.long))
def program(request: pytest.FixtureRequest) -> Program:
    torch.manual_seed(0)
    return Program(2, library=request.param)


def count(n: int) -> Tensor:
    return torch.tensor(n, dtype=I32)


def poison(*size: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(size, float("nan"), dtype=dtype)


def frames_of(grids: list[tuple[int, int]], n_spare: int = 1) -> Frames:
    """n_spare: frames that there is room for, and that are not in use."""
    sizes = np.array([rows * columns for rows, columns in grids])
    spare = np.full(n_spare, -7, np.int32)
    return Frames(
        n=np.array(len(grids), np.int32),
        start=np.concatenate(([0], np.cumsum(sizes), spare)).astype(np.int32),
        grid=np.array([*grids, *((-7, -7) for _ in range(n_spare))], np.int32),
        key_start=np.concatenate((key_starts(sizes), spare)).astype(np.int32),
        merge=2,
    )


def memory_of(frames: Frames, heads: int, dim: int) -> PatchKeys:
    n, padded = int(frames.n), up_to(dim, 32)
    n_patches, n_keys = int(frames.start[n]), int(frames.key_start[n])
    sizes = (n_patches, heads, padded), (heads, n_keys, padded), (heads, n_keys, dim)
    return PatchKeys(*(array_of(poison(*size, dtype=BF16)) for size in sizes))


@pytest.mark.parametrize("width", [16, 208, 1152])
def test_layer_norm(program: Program, width: int) -> None:
    x, w, b, out = torch.randn(9, width) * 3 + 1, torch.randn(width), torch.randn(width), poison(5, width, dtype=BF16)
    layer_norm(program, x, w, b, 1e-6, out, begin=count(3), n_rows=count(4))
    program.run()
    expected = F.layer_norm(x, (width,), w, b, 1e-6)[3:7]
    torch.testing.assert_close(out[:4].float(), expected, rtol=2**-8, atol=1e-5)
    assert out[4:].isnan().all()


@pytest.mark.parametrize("exact", [False, True])
def test_bias_gelu(program: Program, exact: bool) -> None:
    x, bias, out = torch.linspace(-30, 30, 6 * 336).view(6, 336), torch.randn(336), poison(6, 352, dtype=BF16)
    bias_gelu(program, x, bias, out, n_rows=count(5), exact=exact)
    program.run()
    expected = F.gelu((x + bias).double(), approximate="none" if exact else "tanh")[:5]
    torch.testing.assert_close(out[:5, :336].double(), expected, rtol=2**-8, atol=1e-6)
    assert (out[:5, 336:] == 0).all() and out[5:].isnan().all()


@pytest.mark.parametrize("add", [False, True])
def test_bias_rows(program: Program, add: bool) -> None:
    x, bias, out = torch.randn(4, 48), torch.randn(48), torch.randn(9, 48)
    before = out.clone()
    bias_rows(program, x, bias, out, begin=count(2), n_rows=count(3), add=add)
    program.run()
    expected = before.clone()
    expected[2:5] = (before[2:5] if add else 0) + (x + bias)[:3]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("side", [7, 48])
def test_patch_rows(program: Program, side: int) -> None:
    h, frames = 48, frames_of(GRIDS)
    n = int(frames.start[len(GRIDS)])
    x, bias, table = torch.randn(n, h), torch.randn(h), torch.randn(side * side, h).to(BF16)
    out = poison(n + 3, h)
    for begin, stop in ((0, 9), (9, 300), (300, n)):
        patch_rows(program, x[begin:stop], bias, table, frames, out, begin=count(begin), n_rows=count(stop - begin))
    program.run()
    positions = [oracle.position_embedding(table.float(), *grid, 2) for grid in GRIDS]
    torch.testing.assert_close(out[:n], x + bias + torch.cat(positions), rtol=1e-6, atol=2e-6)
    assert out[n:].isnan().all()


def tables(dim: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of n places."""
    return rotary_tables([oracle.THETA ** (-2.0 * i / (dim // 2)) for i in range(dim // 4)], n)


def attended(
    program: Program, qkv: Tensor, bias: Tensor, grids: list[tuple[int, int]], dim: int, cuts: list[int]
) -> Tensor:
    """Keys, then attention, each piece by piece; cuts: where pieces end."""
    frames, heads, n = frames_of(grids), qkv.shape[1] // (3 * dim), len(qkv)
    memory, out = memory_of(frames, heads, dim), poison(n, heads * dim, dtype=BF16)
    cos, sin = tables(dim, 64)
    pieces = list(zip([0, *cuts], [*cuts, n], strict=True))
    for begin, stop in pieces:
        where = {"begin": count(begin), "n_rows": count(stop - begin)}
        patch_keys(program, qkv[begin:stop].contiguous(), bias, frames, (cos, sin), memory, **where)
    for begin, stop in pieces:
        where = {"begin": count(begin), "n_rows": count(stop - begin)}
        patch_attention(program, memory, frames, out[begin:stop], **where)
    program.run()
    return out


def expected_attention(qkv: Tensor, bias: Tensor, grids: list[tuple[int, int]], dim: int) -> Tensor:
    q, k, v = (qkv + bias).view(len(qkv), 3, -1, dim).unbind(1)
    place = torch.cat([oracle.coordinates(*grid, 2) for grid in grids])
    q, k = oracle.rotate(q, place), oracle.rotate(k, place)
    sizes = [rows * columns for rows, columns in grids]
    parts = (oracle.attention(*part, "bfloat16") for part in zip(*(x.split(sizes) for x in (q, k, v)), strict=True))
    return torch.cat(list(parts)).flatten(1)


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 72), (2, 16), (1, 128), (2, 40)])
def test_attention(program: Program, heads: int, dim: int) -> None:
    n = sum(rows * columns for rows, columns in GRIDS)
    qkv, bias = torch.randn(n, 3 * heads * dim) * 1.5, torch.randn(3 * heads * dim) * 0.2
    out = attended(program, qkv, bias, GRIDS, dim, [])
    torch.testing.assert_close(out.float(), expected_attention(qkv, bias, GRIDS, dim), rtol=2**-7, atol=6e-3)


def test_attention_to_one_patch_alone(program: Program) -> None:
    """Scores of thousands: weights of 0 and 1, and maxima that grow from tile to tile."""
    grids, dim = [(20, 30)], 64
    qkv, bias = torch.randn(600, 3 * dim), torch.zeros(3 * dim)
    qkv[:, : 2 * dim] *= torch.linspace(1, 60, 600)[:, None]
    out = attended(program, qkv, bias, grids, dim, [])
    assert out.isfinite().all()
    torch.testing.assert_close(out.float(), expected_attention(qkv, bias, grids, dim), rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("dim", [64, 72])
def test_neither_pieces_nor_neighbours_nor_threads_touch_a_bit(program: Program, dim: int) -> None:
    n, width = sum(rows * columns for rows, columns in GRIDS), 3 * 2 * dim
    qkv, bias = torch.randn(n, width), torch.randn(width) * 0.2
    expected = attended(program, qkv, bias, GRIDS, dim, [])
    for n_threads, cuts in ((1, [1, 2, 50, 51, 207, 208, 400]), (3, [4, 130, 301]), (2, list(range(16, n, 16)))):
        other = Program(n_threads, library=program.instruction_set)
        assert torch.equal(attended(other, qkv, bias, GRIDS, dim, cuts).view(torch.int16), expected.view(torch.int16))
    at = 0
    for rows, columns in GRIDS:
        part = slice(at, at + rows * columns)
        alone = attended(
            Program(2, library=program.instruction_set), qkv[part].contiguous(), bias, [(rows, columns)], dim, []
        )
        assert torch.equal(alone.view(torch.int16), expected[part].view(torch.int16))
        at = part.stop


def test_a_frame_of_the_largest_picture(program: Program) -> None:
    """65,536 patches, of which some rows are attended: the first, the last, and some across two tasks and tiles."""
    grids, dim, n = [(256, 256)], 16, 1 << 16
    qkv, bias, frames = torch.randn(n, 3 * dim), torch.randn(3 * dim), frames_of([(256, 256)])
    memory, (cos, sin) = memory_of(frames, 1, dim), tables(dim, 256)
    patch_keys(program, qkv, bias, frames, (cos, sin), memory, begin=count(0), n_rows=count(n))
    places, outs = [(0, 3), (40_000, 130), (n - 5, 5)], []
    for begin, rows in places:
        outs.append(poison(rows, dim, dtype=BF16))
        patch_attention(program, memory, frames, outs[-1], begin=count(begin), n_rows=count(rows))
    program.run()
    q, k, v = (x.squeeze(1) for x in (qkv + bias).view(n, 3, 1, dim).unbind(1))
    place = oracle.coordinates(*grids[0], 2)
    q, k = (oracle.rotate(x[:, None], place)[:, 0].bfloat16().float() for x in (q, k))
    for (begin, rows), out in zip(places, outs, strict=True):
        weights = (q[begin : begin + rows] @ k.T * dim**-0.5).softmax(-1)
        torch.testing.assert_close(out.float(), weights @ v.bfloat16().float(), rtol=2**-7, atol=2e-3)


def test_what_the_contracts_exclude() -> None:
    program, frames = Program(1), frames_of(GRIDS)
    for heads, dim in ((1, 60), (1, 136)):
        with pytest.raises(KernelError, match="heads"):
            patch_attention(
                program,
                memory_of(frames, heads, dim),
                frames,
                poison(4, heads * dim, dtype=BF16),
                begin=count(0),
                n_rows=count(4),
            )
    with pytest.raises(KernelError, match="one width"):
        bias_gelu(program, poison(4, 40), poison(40), poison(4, 40, dtype=BF16), n_rows=count(1), exact=True)
    with pytest.raises(KernelError, match="square"):
        patch_rows(
            program,
            poison(4, 16),
            poison(16),
            poison(50, 16, dtype=BF16),
            frames,
            poison(4, 16),
            begin=count(0),
            n_rows=count(1),
        )
