"""How fast is attention of a decode, by the format of keys and values, next to what the memory gives?

One launch is that of one layer: q and k normed and rotated, the new token written, all keys read. Its bytes
are those of the pages, the roof is them over the read bandwidth of the same run. Pages are cold: a graph
walks through layers and through pages as the table of a busy server has them, until the second-level cache
does not hold them. `cached` says where it may hold some: where the pool, which is bounded, is small, or has
fewer pages than the rows of a launch, so that they share them. Between two launches stands a
small kernel, whose own time is taken off: attention neither runs beside itself nor starts behind a kernel
that lets it start early.

Each variant is another way to run the same (`Splits`). `same` says whether it gives the bits of `plain`;
those of `other bits` are not asked to. Kernels are compiled first, by all cores.
`python -m bench.gpu.attention [--heads 24,4,256] [--n N,...] [--context T,...] [--variant "NAME;..."]
[--seconds S] [--out DIR]`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.gpu.experiment import DEVICE, graph_us, parser, run, same_bits
from deltic.engine.cache.cache import pages_for
from deltic.machine import n_usable_cpus
from deltic.ops.geometry import PAGE_SIZE, AttentionHeads, AttentionWeights
from deltic.ops.gpu.attention_decode import SPLITS, Splits, attention_decode, attention_scratch
from deltic.ops.gpu.blocks import Rows
from deltic.ops.gpu.fp8 import Operand
from deltic.ops.gpu.launch import Levers, allocate_on
from deltic.ops.gpu.roofs import GpuRoofs
from deltic.ops.kv_formats import KV_FORMATS, KvFormat, KvPages, on_device
from deltic.runtime.gpu.compile import Compilation, collecting, fix_keys

POOL_BYTES, N_LAYERS = 36 << 30, 16
COLD_BYTES, MOST_LAUNCHES = 192 << 20, 96
LENGTHS = 512, 4096
"""As the recordings of an engine have them, and its longest."""
VARIANTS = {
    "plain": SPLITS,
    "3 stages": replace(SPLITS, num_stages=3),
    "8 warps": replace(SPLITS, num_warps=8),
    "512 programs": replace(SPLITS, programs=512),
    "2048 programs": replace(SPLITS, programs=2048),
    "a split a program": replace(SPLITS, programs=1 << 30),
    "other bits: 4 tiles": replace(SPLITS, few_tiles=4),
    "other bits: 2 tiles from the first": replace(SPLITS, few=1, few_tiles=2),
}


@dataclass(frozen=True)
class World:
    """Pages of all layers in one format, in a pool that is as large for each."""

    heads: AttentionHeads
    format: KvFormat
    pages: Tensor
    cos: Tensor
    norm: Tensor

    @classmethod
    def made(cls, heads: AttentionHeads, format: KvFormat, max_len: int, device: str = DEVICE) -> World:
        n_bytes = format.layer_bytes(heads.n_kv, heads.dim)
        n = POOL_BYTES // (N_LAYERS * n_bytes) if device == DEVICE else 8
        if format.is_plain:
            pages = torch.empty((n, N_LAYERS, 2, heads.n_kv, PAGE_SIZE, heads.dim), dtype=torch.bfloat16, device=device)
            pages.normal_()
        else:  # small codes and scales, none of them negative
            pages = torch.randint(0, 64, (n, N_LAYERS, n_bytes), dtype=torch.uint8, device=device)
        angles = torch.arange(max_len, device=device)[:, None] * 0.01 + torch.arange(32, device=device)
        return cls(heads, format, pages, angles.cos(), torch.zeros(heads.dim, device=device))

    def launches(self, n: int, context: int, max_len: int, splits: Splits) -> tuple[list[Callable[[], None]], Tensor]:
        """What starts attention of n rows with so many keys, in pages of their own as far as there are; and
        its output.
        """
        heads, device, n_pages = self.heads, self.pages.device, pages_for(context)
        n_bytes = n * context * heads.n_kv * self.format.head_bytes(heads.dim)
        n_launches = max(1, min(MOST_LAUNCHES, -(-COLD_BYTES // n_bytes)))
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(self.pages), generator=generator)
        proj = torch.randn((1, n, heads.row), generator=generator).to(device)
        batch_slot = torch.arange(n, dtype=torch.int32, device=device)
        rows = Rows(batch_slot, batch_slot, torch.full_like(batch_slot, context - 1))
        scratch = attention_scratch(heads, n, max_len, allocate_on(device), splits)
        out = torch.zeros((n, heads.n_q * heads.dim), dtype=torch.bfloat16, device=device)

        weights = AttentionWeights(self.norm, self.norm, 1e-6, self.cos, self.cos)

        def launch(i: int) -> Callable[[], None]:
            first = i // N_LAYERS * n * n_pages
            ids = order[(torch.arange(n * n_pages) + first) % len(order)].view(n, n_pages)
            table, pages = ids.to(torch.int32).to(device), self.pages[:, i % N_LAYERS]
            return lambda: attention_decode(
                proj, heads, weights, rows=rows, cache=KvPages(pages, self.format, table), scratch=scratch, max_len=max_len, out=Operand(out),
            )  # fmt: skip

        return [launch(i) for i in range(n_launches)], out


def compiled(heads: AttentionHeads, formats: list[KvFormat], variants: list[str]) -> None:
    """All kernels, by all cores; those that cannot be are left to whoever starts them."""
    fix_keys()
    with collecting() as jobs:
        for format in formats:
            world = World.made(heads, format, LENGTHS[0], "meta")
            for name in variants:
                world.launches(8, 130, LENGTHS[0], VARIANTS[name])[0][0]()
    compilation = Compilation(min(16, n_usable_cpus()))
    compilation.give(list(jobs))
    print(compilation.wait(lambda stage, done: None), *compilation.errors[:3], sep="\n", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@Levers().bound()
@Levers().bound()
@Levers().bound()
def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--heads", type=numbers, default=[24, 4, 256], metavar="Q,KV,DIM", help="default: 24,4,256, 27B's"
    )
    flags.add_argument("--n", type=numbers, default=[1, 8, 32, 64, 128], metavar="N,...")
    flags.add_argument("--context", type=numbers, default=[152, 256, 1024, 4096, 32768, 131072], metavar="T,...")
    flags.add_argument("--variant", type=lambda text: text.split(";"), default=[*VARIANTS], metavar="NAME;...")
    flags.add_argument("--seconds", type=float, default=200.0, help="no point of another variant is begun later")
    arguments = flags.parse_args()
    heads, longest, begin = AttentionHeads(*arguments.heads), max(arguments.context) + PAGE_SIZE, time.monotonic()
    formats = [KV_FORMATS[name] for name in on_device("cuda")]
    compiled(heads, formats, arguments.variant)
    roofs, spare = GpuRoofs.measured(), torch.zeros(4096, device=DEVICE)
    torch.cuda.empty_cache()

    def small() -> None:
        spare.add_(1.0)

    def spaced(launches: list[Callable[[], None]]) -> Callable[[], None]:
        def step() -> None:
            for launch in launches:
                small()
                launch()

        return step

    small_us = graph_us(spaced([lambda: None] * 64), 64)
    worlds = {format.name: World.made(heads, format, longest) for format in formats}

    def point(variant: str, format: KvFormat, n: int, context: int) -> dict[str, Any]:
        max_len = next((length for length in LENGTHS if context <= length), longest)
        world, splits = worlds[format.name], VARIANTS[variant]
        launches, _ = world.launches(n, context, max_len, splits)
        us = graph_us(spaced(launches), len(launches), 5) - small_us
        n_bytes = n * context * heads.n_kv * format.head_bytes(heads.dim)
        held = min(n_bytes * len(launches), world.pages.nbytes // N_LAYERS * min(N_LAYERS, len(launches)))
        return {
            "us": round(us, 2), "mb": round(n_bytes / 1e6, 2), "roof": round(n_bytes / roofs.read / us * 1e6, 3),
            "cached": n * pages_for(context) > len(world.pages)
            or held < 2 * torch.cuda.get_device_properties(0).L2_cache_size,
        }  # fmt: skip

    def bits(row: Callable[..., None]) -> None:
        for format in formats:
            for variant in arguments.variant:
                same = []
                for n, context, max_len in ((64, 200, 512), (8, 3000, 4096), (2, longest - PAGE_SIZE, longest)):
                    found = []
                    for name in ("plain", variant):
                        launches, out = worlds[format.name].launches(n, context, max_len, VARIANTS[name])
                        for _ in range(2):  # where pages are shared the second reads what the first wrote
                            launches[0]()
                        found.append(out)
                    same.append(same_bits(*found) and bool(found[0].isfinite().all()))
                row(variant=variant, format=format.name, same=same)

    def times(row: Callable[..., None]) -> None:
        row(read=round(roofs.read / 1e12, 3), small_us=round(small_us, 2), device=torch.cuda.get_device_name())
        for variant in arguments.variant:
            for context in arguments.context:
                for n in arguments.n:
                    for format in formats:
                        if variant == "plain" or time.monotonic() - begin < arguments.seconds:
                            row(
                                variant=variant,
                                n=n,
                                context=context,
                                format=format.name,
                                **point(variant, format, n, context),
                            )

    run("attention", {"bits": bits, "times": times}, arguments)


if __name__ == "__main__":
    main()
