"""E7: from how many rows on does the vendor's bfloat16 product change the bits of a row, and do ours agree
with it?

Row 0 of torch.mm with 1 to 8,192 rows against 8,192, for every linear of three models, with and without the
library's leave to sum its K splits in bfloat16; and an unsplit Triton product, K in order, against it.
Decides where prefill may use the library without leaving the decode's bits.
`python -m bench.gpu.e7_cublas_rows`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.e3_tiles import multiply
from bench.gpu.experiment import DEVICE, run

MODELS = {
    "0.8B": {
        "in_proj": (8224, 1024),
        "qkv": (5120, 1024),
        "out_proj": (1024, 2048),
        "gate_up": (7168, 1024),
        "down": (1024, 3584),
        "lm_head": (248320, 1024),
    },
    "27B": {
        "in_proj": (16480, 5120),
        "qkv": (14336, 5120),
        "out_proj": (5120, 6144),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
        "lm_head": (248320, 5120),
    },
    "35B-A3B": {
        "in_proj": (12352, 2048),
        "qkv": (9216, 2048),
        "out_proj": (2048, 4096),
        "shared gate_up": (1024, 2048),
        "shared down": (2048, 512),
        "router": (257, 2048),
        "lm_head": (248320, 2048),
    },
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


def n_differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def unsplit(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T with K walked in order, rounded to bfloat16 once; w is padded to whole tiles of 64 rows."""
    m = w.shape[0]
    if m % 64:
        w = torch.nn.functional.pad(w, (0, 0, 0, -m % 64))
    return multiply(x, w, 64, 16, 64)[:, :m].bfloat16()


def model(row: Callable[..., None], linears: dict[str, tuple[int, int]]) -> None:
    for name, (m, k) in linears.items():
        try:
            w = torch.empty(m, k, dtype=torch.bfloat16, device=DEVICE).normal_(0, k**-0.5)
            highest = 1024 if m > 100_000 else 8192
            x = torch.randn(highest, k, device=DEVICE).bfloat16()
            ours = unsplit(x[:4].contiguous(), w)
            for reduced in (True, False):
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
                most = torch.mm(x, w.t())
                differing = {}
                for n in ROWS:
                    if n < highest:
                        count = n_differing(torch.mm(x[:n], w.t())[0], most[0])
                        if count:
                            differing[n] = count
                row(
                    linear=name,
                    shape=f"{m}x{k}",
                    bf16_sums=reduced,
                    differing_by_rows=differing or "none",
                    unsplit_against_most=n_differing(ours[0], most[0]),
                    rows_0_to_3=n_differing(ours, most[:4]),
                )
            del w, x, most
        except Exception as error:
            row(linear=name, failed=str(error).splitlines()[0][:160])
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def main() -> None:
    run("e7_cublas_rows", {name: partial(model, linears=linears) for name, linears in MODELS.items()})


if __name__ == "__main__":
    main()
