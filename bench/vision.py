"""A picture through the vision tower on a CPU, with random weights, beside the multiply peak of the same run.

    python -m bench.vision --tower 0.8b --side 512 --piece 512

--side: pixels of a square picture; --piece: patches that a stage takes at once (default: all).
Multiplications are counted as two operations, of linears and attention; "peak" is the share of what the
kernels' inner tile multiplies a second on operands in the first-level cache, the best of a measurement before
and one after. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from deltic.bench.provenance import code, machine, now
from deltic.machine import n_usable_cpus
from deltic.models.vision.cpu import TOKEN, VisionForward, VisionTower, allocate_vision
from deltic.models.vision.shape import PATCH_SIZE, PATCH_WIDTH, VisionShape
from deltic.models.vision.weights import dummy_vision
from deltic.ops.arrays import zeros
from deltic.roofs import multiply_peak

TOWERS = {
    "0.8b": VisionShape(depth=12, hidden_size=768, n_heads=12, intermediate_size=3072, out_hidden_size=1024),
    "4b": VisionShape(depth=24, hidden_size=1024, n_heads=16, intermediate_size=4096, out_hidden_size=2560),
    "27b": VisionShape(depth=27, hidden_size=1152, n_heads=16, intermediate_size=4304, out_hidden_size=5120),
}


def n_operations(shape: VisionShape, n: int) -> tuple[int, int]:
    """Of the linears, and of attention, for a picture of n patches."""
    h, merged = shape.hidden_size, shape.merged_size
    a_patch = PATCH_WIDTH * h + shape.depth * (4 * h * h + 2 * h * shape.intermediate_size)
    a_token = merged * (merged + shape.out_hidden_size)
    return 2 * (n * a_patch + n // TOKEN * a_token), 4 * shape.depth * n * n * h


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=TOWERS, default="0.8b")
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--piece", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=n_usable_cpus())
    options = parser.parse_args()
    shape, rows = TOWERS[options.tower], options.side // PATCH_SIZE
    n, n_threads = rows * rows, options.threads
    piece = min(options.piece or n, n)
    buffers = allocate_vision(shape, n, 1, piece, lambda name, size, dtype: zeros(size, dtype))
    forward = VisionForward(VisionTower(shape, dummy_vision(shape), buffers), n_threads)
    patches = np.random.default_rng(0).uniform(-1, 1, (n, PATCH_WIDTH)).astype(np.float32)
    before, times, longest = multiply_peak(n_threads), [], []
    for _ in range(options.runs):
        ticks = [time.perf_counter()]
        for _ in forward.run([patches], [(1, rows, rows)]):
            ticks.append(time.perf_counter())
        times.append(ticks[-1] - ticks[0])
        longest.append(max(np.diff(ticks)))
    peak = max(before, multiply_peak(n_threads))
    linears, attention = n_operations(shape, n)
    rate = (linears + attention) / min(times)
    print(
        f"{options.tower}, {options.side} x {options.side}, {n // TOKEN} tokens: {min(times) * 1e3:.0f} ms "
        f"({min(times) * 1e3:.0f} to {max(times) * 1e3:.0f}), pieces of at most {min(longest) * 1e3:.0f} ms; "
        f"{(linears + attention) / 1e9:.0f} Gop, of which {attention / 1e9:.0f} attention; {rate / 1e9:.0f} of "
        f"{peak / 1e9:.0f} Gop/s: {rate / peak:.0%} of peak"
    )
    told = {
        "tower": options.tower,
        "side": options.side,
        "piece": piece,
        "threads": n_threads,
        "ms": [1e3 * t for t in times],
    }
    told |= {"longest_ms": 1e3 * min(longest), "gop_s": rate / 1e9, "peak_gop_s": peak / 1e9}
    print(
        json.dumps(
            told
            | {
                "instruction_set": forward.stages[0].instruction_set,
                "machine": machine(),
                "code": code(),
                "at": now().isoformat(),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
