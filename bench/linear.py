"""Products with packed matrices, by format, rows and instruction set:
`python -m bench.linear --instructions amx --threads 16`.

The weights are as many copies as no longer fit into the caches (a few for many rows, which take long enough).
Prints bytes of weights and operations a second, medians of 7, beside the read bandwidth, and the error
against float32 products. One thread's time is that of its processor, without what others had.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from deltic.machine import n_usable_cpus
from deltic.ops.arrays import bfloat16, zeros
from deltic.ops.cpu.dense import linear
from deltic.ops.cpu.program import Program, instruction_set, usable_instruction_sets
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.matrix import Matrix, row_bytes
from deltic.roofs import beyond_caches, read_bandwidth
from tests.quantised_rows import random_rows

SHAPES = ((6144, 1024), (1024, 3584))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--rows", default="1,2,4,8,16,32,512")
    parser.add_argument("--instructions", default=instruction_set(), choices=usable_instruction_sets())
    parser.add_argument("--threads", type=int, default=n_usable_cpus())
    arguments = parser.parse_args()
    draw = np.random.default_rng(0).standard_normal
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(
        f"{arguments.instructions}, {arguments.threads} threads, reads {read_bandwidth(arguments.threads) / 1e9:.1f} GB/s"
    )
    for name in arguments.formats.split(","):
        for n, k in SHAPES:
            one = Matrix.empty(n, k, WEIGHT_FORMATS[name])
            if name in ("bf16", "int8", "int4"):
                values = draw((n, k), np.float32) * np.float32(k**-0.5)
                one.pack(values.astype(bfloat16), arguments.threads)
            else:
                one.whole.pack(random_rows(name, n, k), arguments.threads)
            cold = zeros((beyond_caches() // one.n_bytes, 1, one.n_bytes), np.uint8)
            cold[:] = one.whole.data
            copies = [replace(one, segments=(replace(one.whole, data=data),)) for data in cold]
            for rows in map(int, arguments.rows.split(",")):
                used = copies if rows < 64 else copies[:6]
                x, out = draw((rows, k), np.float32).astype(bfloat16), zeros((rows, n), np.float32)
                workspace = zeros((rows * row_bytes(k),), np.uint8)
                program = Program(arguments.threads, library=arguments.instructions)
                for matrix in used:
                    linear(program, x, matrix, out, workspace, np.array(rows, np.int32))
                times = []
                for _ in range(8):
                    begin = clock()
                    program.run()
                    times.append(clock() - begin)
                took = statistics.median(times[1:]) / len(used)
                expected = x.astype(np.float32) @ one.unpack()[0].T
                error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
                rate, operations = one.n_bytes / took / 1e9, 2 * rows * n * k / took / 1e9
                print(
                    f"{name:7} [{n}, {k}] x {rows:3}: {rate:6.1f} GB/s {operations:7.0f} Gop/s, error {error:.0e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
