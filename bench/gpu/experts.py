"""How fast are the experts of one layer, next to what the memory gives?

35B-A3B's: the router, the lists, gate_up and down, in decodes of n rows and in prefills of so many, with
random weights and rows, so that experts are chosen evenly. A decode is shown with the bytes of the experts
that its rows chose and of the shared one, as a share of the read bandwidth of the same run. Weights are cold:
a graph walks through layers of 0.8 GB (of fp8). A cut is a decode with one field of `MoeTiles` changed; its
bits are compared with the default's. `python -m bench.gpu.experts [--format fp8] [--n N,...]
[--cut NAME=VALUE ...] [--prefill T,...] [--lever NAME=off ...] [--out DIR]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.experiment import DEVICE, graph_us, parser, run, same_bits
from deltic.ops.arrays import bfloat16
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.geometry import Routing
from deltic.ops.gpu.blocks import BLOCK, Blocks
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.fp8 import Fp8Rows, fp8_rows, round_rows
from deltic.ops.gpu.launch import allocate_on, parse_levers
from deltic.ops.gpu.moe_decode import MoeTiles, moe_decode, moe_scratch, moe_tiles
from deltic.ops.gpu.moe_prefill import moe_prefill, moe_prefill_scratch
from deltic.ops.gpu.roofs import GpuRoofs
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix

N_LAYERS = 3


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture, and a format of its experts."""

    format: str
    hidden: int = 2048
    n_experts: int = 256
    n_per_token: int = 8
    width: int = 512

    @property
    def is_e4m3(self) -> bool:
        return WEIGHT_FORMATS[self.format].codes == "e4m3"

    def layer(self, device: str) -> SimpleNamespace:
        """Random weights (`MoeWeights`)."""
        store, h, m, n = DeviceStore(device), self.hidden, self.width, self.n_experts

        def matrix(rows: int, k: int, count: int, name: str = self.format) -> Matrix:
            w = Matrix.empty(rows, k, WEIGHT_FORMATS[name], "rows", count, store.empty)
            block = (np.random.default_rng(0).standard_normal(4_194_301, np.float32) * k**-0.5).astype(bfloat16)
            for i in range(count):
                store.tile(w.whole.one(i), block, i * 7919 * k % len(block) // k * k)
            return w

        return SimpleNamespace(
            router=matrix(n + 1, h, 1, "bf16"), gate_up=matrix(2 * m, h, n), down=matrix(h, m, n),
            shared_gate_up=matrix(2 * m, h, 1), shared_down=matrix(h, m, 1), first=0,
        )  # fmt: skip


class Layers:
    """Layers, rows, and workspaces of up to `most` rows."""

    def __init__(self, mixture: Mixture, most: int, device: str = DEVICE) -> None:
        self.mixture, self.device = mixture, device
        self.layers = [mixture.layer(device) for _ in range(N_LAYERS)]
        self.x = torch.randn((most, mixture.hidden), generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
        self.routing = Routing(mixture.n_per_token, True)

    def rounded(self, n: int) -> Fp8Rows:
        """The first n rows in e4m3, as the norm in front leaves them."""
        rows, block = fp8_rows("rows", n, self.mixture.hidden, allocate_on(self.device)), k_block(self.mixture.hidden)
        round_rows(self.x[:n], rows, block)
        return rows.rounded_by(block)

    def decode(self, n: int, **cut: Any) -> tuple[Callable[[], None], Tensor, Tensor]:
        """What starts a decode of n rows in all layers; its output, and the pairs of each expert."""
        m = self.mixture
        scratch = moe_scratch(n, m.n_experts, m.n_per_token, m.width, m.width, allocate_on(self.device))
        if m.is_e4m3:
            scratch = replace(scratch, x8=self.rounded(n))
        out = torch.zeros((m.n_per_token + 1, n, m.hidden), device=self.device)
        row_slot = torch.arange(n, dtype=torch.int32, device=self.device)

        def step() -> None:
            for w in self.layers:
                tiles: MoeTiles | None = replace(moe_tiles(n, w), **cut) if cut else None
                moe_decode(self.x[:n], w, self.routing, row_slot=row_slot, scratch=scratch, out=out, tiles=tiles)

        return step, out, scratch.counters[: m.n_experts]

    def prefill(self, t: int) -> Callable[[], None]:
        """What starts a prefill of t rows in all layers."""
        m = self.mixture
        scratch = moe_prefill_scratch(
            t, m.hidden, m.n_experts, m.n_per_token, m.width, m.width, allocate_on(self.device), has_e4m3=m.is_e4m3
        )
        if m.is_e4m3:
            scratch = replace(scratch, x8=self.rounded(t))
        n = torch.full((t // BLOCK,), BLOCK, dtype=torch.int32, device=self.device)
        blocks, out = Blocks(n, *(torch.zeros_like(n) for _ in range(8))), torch.zeros_like(self.x[:t])

        def step() -> None:
            for w in self.layers:
                moe_prefill(self.x[:t], w, self.routing, blocks=blocks, scratch=scratch, out=out)

        return step


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def cut_of(text: str) -> dict[str, int]:
    name, value = text.split("=")
    return {name: int(value)}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--format", default="fp8", choices=tuple(WEIGHT_FORMATS), metavar="NAME", help="default: fp8")
    flags.add_argument("--n", type=numbers, default=[1, 4, 16, 64, 128, 256, 512], metavar="N,...")
    flags.add_argument("--prefill", type=numbers, default=[512, 8192], metavar="T,...", help="multiples of 64")
    flags.add_argument(
        "--cut", type=cut_of, action="append", default=[], metavar="NAME=VALUE", help="such as block_n=32"
    )
    flags.add_argument("--lever", action="append", default=[], metavar="NAME=off")
    arguments = flags.parse_args()
    with parse_levers(tuple(arguments.lever)).bound():
        bench(arguments)


def bench(arguments: argparse.Namespace) -> None:
    roofs = GpuRoofs.measured()
    torch.cuda.empty_cache()
    mixture = Mixture(arguments.format)
    layers = Layers(mixture, max([*arguments.n, *arguments.prefill]))
    expert = layers.layers[0].gate_up.n_bytes // mixture.n_experts + layers.layers[0].down.n_bytes // mixture.n_experts

    def decodes(row: Callable[..., None]) -> None:
        for n in arguments.n:
            step, expected, pairs = layers.decode(n)
            for cut in [{}, *arguments.cut]:
                if cut:
                    step, out, pairs = layers.decode(n, **cut)
                us = graph_us(step, N_LAYERS)
                used = int((pairs > 0).sum()) if n > 1 else mixture.n_per_token
                same = {"cut": cut, "same": same_bits(out, expected)} if cut else {}
                rate = (used + 1) * expert / us * 1e6
                row(n=n, us=us, experts=used, TB_s=rate / 1e12, share=rate / roofs.read, **same)

    def prefills(row: Callable[..., None]) -> None:
        for t in arguments.prefill:
            row(t=t, us=graph_us(layers.prefill(t), N_LAYERS))

    run("experts", {"decode": decodes, "prefill": prefills}, arguments)


if __name__ == "__main__":
    main()
