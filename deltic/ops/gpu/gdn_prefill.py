"""gdn_prefill: the gated DeltaNet mixer between its two projections, for blocks of 64 tokens, on matrix
units.

The chunked form of `tests.reference.layers.chunk_gdn` (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464), a
chunk being a block, in four kernels:

1. keys:   causal convolution, SiLU, l2-norm of q and k; one program for each block and head, and one for a
           block's gates.
2. solve:  convolution and SiLU of v, A = strict_lower(beta K K^T D), T = (I + A)^-1, U = T beta V and
           W = T beta e^G K; one for each block and value head.
3. scan:   V' = U - W S and S <- e^{G_last} S + V'^T (e^{G_last - G} K), block after block, S in float32
           registers; one for each segment, value head and tile of value rows. The rows of S are independent:
           S is [dv, dk], as in memory.
4. output: O = e^G Q S^T + (Q K^T D) V', gated RMSNorm; also the columns of the final and snapshot state
slots,
           which no later kernel reads.

Operands of matrix products are bfloat16 (K, V, U, W, V', T, S are rounded once each), sums float32. A itself
and what inverts it are float32 and multiplied as float16: against exact products that changes U and W by less
than the rounding of T does, where bfloat16 at this place is several times worse with keys that are alike. S
is never rounded on its own way; where states are kept in bfloat16, behind every block (ops/gpu/rounding.py).

Purity: a value depends on its block's tokens, the three before them and S before the block. Shapes of tiles,
warps and the order of every sum are constants of the model, so neither the number of blocks nor where a
segment starts can change a bit. S in registers is what a store and a load would give. Tokens
behind the end of a block are finite, with beta = 0 and no decay: their rows of U, W and V' are exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from deltic.ops.contract import check
from deltic.ops.geometry import Allocate, GdnHeads, GdnWeights
from deltic.ops.gpu.blocks import BLOCK, Blocks, StateSlots
from deltic.ops.gpu.chip import chip
from deltic.ops.gpu.gdn_prefill_kernels import gdn_keys, gdn_output, gdn_scan, gdn_solve
from deltic.ops.gpu.launch import INTERPRETED, launch, next_power_of_2

_SCAN_ROWS = 32
"""Rows of S in one program.

A scan is a chain: smaller programs take less time for a block, and use more multiprocessors (one segment of
128 blocks, H200: 165 to 173 us, with 64 rows 198 to 210).
"""


@dataclass(frozen=True)
class GdnScratch:
    """Buffers that one layer hands from kernel to kernel. The same buffers serve every layer.

    DK, DV: dk, dv padded to a power of 2. B blocks. bfloat16, but for the last four.
    """

    qk: Tensor  # [B, 2 Hk, 64, DK] q normalised and scaled, k normalised
    w: Tensor  # [B, Hv, 64, DK]
    u: Tensor  # [B, Hv, DV, 64] U transposed; the scan replaces it by V' transposed
    state: Tensor  # [B, Hv, DV, DK] S before each block
    decay: Tensor  # [B, Hv, 64] float32: G, the running sum of the decay's logarithm to base 2 in the block
    fade: Tensor  # [B, Hv, 64] float32: 2^(G_last - G), for the scan, whose every instruction is waited for
    beta: Tensor  # [B, Hv, 64] float32
    reach: Tensor  # [B, Hv, 64] float32: beta 2^G


def gdn_scratch(heads: GdnHeads, n_blocks: int, allocate: Allocate) -> GdnScratch:
    """Workspaces for n_blocks blocks; allocate(name, shape, dtype) makes each of them, contiguous. Nothing
    needs to be in them.
    """
    n_k, n_v, bf16 = heads.n_k, heads.n_v, torch.bfloat16
    k_pad, v_pad = _padded(heads.k_dim), _padded(heads.v_dim)
    return GdnScratch(
        qk=allocate("gdn q k", (n_blocks, 2 * n_k, BLOCK, k_pad), bf16),
        w=allocate("gdn w", (n_blocks, n_v, BLOCK, k_pad), bf16),
        u=allocate("gdn u", (n_blocks, n_v, v_pad, BLOCK), bf16),
        state=allocate("gdn state", (n_blocks, n_v, v_pad, k_pad), bf16),
        decay=allocate("gdn decay", (n_blocks, n_v, BLOCK), torch.float32),
        fade=allocate("gdn fade", (n_blocks, n_v, BLOCK), torch.float32),
        beta=allocate("gdn beta", (n_blocks, n_v, BLOCK), torch.float32),
        reach=allocate("gdn reach", (n_blocks, n_v, BLOCK), torch.float32),
    )


def gdn_prefill(
    proj: Tensor, heads: GdnHeads, weights: GdnWeights, eps: float, *, blocks: Blocks, memory: StateSlots,
    scratch: GdnScratch, out: Tensor,
) -> None:
    """proj bfloat16 [64 B, >= 2Kd+2Vd+2Hv] (q|k|v|z|b|a) -> out bfloat16 [64 B, Hv dv]; states go from state
    slot to state slot.

    scratch is for at least B blocks. Rows of out behind the
    end of a block, and of blocks not in use, become 0. A snapshot is taken at the end of its block, in full.

    The next kernels start on what the scan has left after chunk_blocks(B) blocks, beside its going on, on a
    second stream. Bits are the same.

    dk, dv: multiples of 16, at most 128; Hv a multiple of Hk. Raises KernelError where shapes do not fit.
    What blocks says changes from step to step and is not checked.
    """
    n_blocks, n_segments = len(blocks.n), len(blocks.state_slot)
    n_k, n_v, k_dim, v_dim, n_channels = heads.n_k, heads.n_v, heads.k_dim, heads.v_dim, heads.channels
    columns, states, layer = memory.columns, memory.states, memory.layer
    _check(proj, heads, weights, blocks, memory, scratch, out)
    k_pad, v_pad = _padded(k_dim), _padded(v_dim)
    rows = min(_SCAN_ROWS, v_pad)
    sizes = dict(HK=n_k, HV=n_v, DK=k_dim, DV=v_dim, C=n_channels, BK=k_pad, BV=v_pad, TILED=heads.tiled)
    source = (proj, proj.stride(0), weights.conv, columns, columns.stride(0))
    where = (blocks.n, blocks.position, blocks.block_segment, blocks.segment_begin, blocks.start_slot)
    gates = (scratch.decay, scratch.fade, scratch.beta, scratch.reach)
    launch(
        gdn_keys, (2 * n_k + 1, n_blocks), *source, *where, weights.a_log, weights.dt_bias, scratch.qk, *gates,
        **sizes, HEADS=next_power_of_2(n_v), SCALE=k_dim**-0.5, num_warps=8, num_stages=1, **_limit(64),
    )
    chunk = chunk_blocks(n_blocks)
    lanes = _Lanes(proj.device, 0 < chunk < n_blocks)
    pdl = not lanes.apart  # a kernel that waits for one of another stream waits for its end
    size = chunk if lanes.apart else n_blocks
    chunks = [(begin, min(begin + size, n_blocks)) for begin in range(0, n_blocks, size)]

    def solve(begin: int, end: int) -> None:
        launch(
            gdn_solve, (n_v, end - begin), begin, *source, *where,
            scratch.qk, scratch.decay, scratch.beta, scratch.reach, scratch.w, scratch.u,
            **sizes, pdl=pdl, num_warps=4, num_stages=1, **_limit(128),
        )

    def scan(begin: int, end: int) -> None:
        launch(
            gdn_scan, (n_v * (v_pad // rows), n_segments),
            layer, blocks.n, blocks.position, blocks.snapshot, blocks.segment_begin, blocks.start_slot,
            blocks.state_slot, begin, end, scratch.qk, scratch.w, scratch.u, scratch.u, scratch.decay, scratch.fade,
            scratch.state, states, states.stride(0),
            **sizes, ROWS=rows, pdl=pdl, num_warps=4, num_stages=_scan_stages(rows, k_pad),
        )

    def output(begin: int, end: int) -> None:
        launch(
            gdn_output, (n_v, end - begin), begin, proj, proj.stride(0), columns, columns.stride(0),
            *where, blocks.snapshot, blocks.state_slot, scratch.qk, scratch.u, scratch.decay, scratch.state,
            weights.norm, eps, out, out.stride(0),
            **sizes, SIGMOID=heads.sigmoid_gate, pdl=pdl, num_warps=8, num_stages=2,
        )

    solve(*chunks[0])
    lanes.mark()
    for bounds, following in zip(chunks, [*chunks[1:], None], strict=True):
        with lanes.beside():
            scan(*bounds)
        if following is not None:
            solve(*following)
            lanes.mark()
        lanes.join()
        output(*bounds)


def chunk_blocks(n_blocks: int) -> int:
    """Blocks of a chunk, 0 for one chunk of all.

    Two chunks save 8 to 16 % of a prompt of 8192 tokens, and cost 7 % of 16 short ones (H200).
    """
    return 0 if INTERPRETED or n_blocks < 32 else (n_blocks + 1) // 2


class _Lanes:
    """Streams of a layer, two of them: the scan of a chunk runs beside the solving of the next one, and
    beside the output of the one before.

    The scan of few segments keeps few multiprocessors busy, and its time is that of its longest chain. It has
    priority: its programs need much room at once, for which they would else wait. No bit depends on this.
    Joined by events, so that a recording holds both. The second stream is made once for a device.
    """

    streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device, apart: bool) -> None:
        self.apart = apart
        self.main: torch.cuda.Stream | None = None
        if apart and device.type == "cuda":
            if device not in self.streams:
                self.streams[device] = torch.cuda.Stream(device, priority=-1)
            self.side = self.streams[device]
            self.main = torch.cuda.current_stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Kernels started here run after those before and beside those that follow, until `join`."""
        if self.main is None:
            yield
            return
        self.side.wait_event(self.ready)
        with torch.cuda.stream(self.side):
            yield
        self.end = self.side.record_event()

    def mark(self) -> None:
        """The next kernels beside wait for those so far."""
        if self.main is not None:
            self.ready = self.main.record_event()

    def join(self) -> None:
        """Makes what follows run after the last kernels beside."""
        if self.main is not None:
            self.main.wait_event(self.end)


def _limit(registers: int) -> dict[str, int]:
    """Registers of a thread, so that four programs fit into a multiprocessor.

    As measured on Hopper; on others `gdn_solve` would put 150 to 200 bytes a thread into memory.
    """
    return {"maxnreg": registers} if chip().is_hopper else {}


def _padded(dim: int) -> int:
    """The width of a tile: a power of 2, at least 64.

    Triton 3.6 makes wrong code of `gdn_solve` with narrower ones: W is right in the first 16 tokens of a
    block only (H200; 16 keys, and 32 keys beside 64 values).
    """
    return max(64, next_power_of_2(dim))


def _scan_stages(rows: int, k_pad: int) -> int:
    """Blocks whose operands are on their way while one is computed, at most 3: what shared memory holds."""
    return chip().stages(2 * BLOCK * (2 * k_pad + rows), 3, beside=4 * rows * k_pad)  # W, K and U


def _check(
    proj: Tensor, heads: GdnHeads, weights: GdnWeights, blocks: Blocks, memory: StateSlots, scratch: GdnScratch,
    out: Tensor
) -> None:
    columns, states = memory.columns, memory.states
    n_rows, channels, n_v, k_dim, v_dim = BLOCK * len(blocks.n), heads.channels, heads.n_v, heads.k_dim, heads.v_dim
    n_out, bf16 = n_v * v_dim, torch.bfloat16
    expect = partial(check, "gdn_prefill")
    expect(k_dim % 16 == v_dim % 16 == 0 and max(k_dim, v_dim) <= 128, "dk, dv % 16 == 0 and at most 128")
    expect(n_v % heads.n_k == 0, "Hv % Hk == 0")
    is_wide = len(proj) == n_rows and proj.shape[1] >= channels + n_out + 2 * n_v
    expect(proj.dtype == bf16 and is_wide and proj.stride(1) == 1, "proj bfloat16 [64 B, >= 2Kd+2Vd+2Hv]")
    expect(out.dtype == bf16 and out.shape == (n_rows, n_out) and out.stride(1) == 1, "out bfloat16 [64 B, Hv dv]")
    expect(weights.conv.shape == (4, channels) and weights.conv.dtype == torch.float32, "conv float32 [4, C]")
    is_ring = columns.shape[1:] == (4, channels) and columns[0].is_contiguous()
    expect(columns.dtype == bf16 and is_ring, "columns bfloat16 [state_slots, 4, C]")
    is_state = states.shape[1:] == (n_v, v_dim, k_dim) and states[0].is_contiguous()
    expect(states.dtype in (torch.float32, bf16) and is_state, "states float32 or bfloat16 [state_slots, Hv, dv, dk]")
    expect(len(scratch.qk) >= len(blocks.n), "scratch for as many blocks")
