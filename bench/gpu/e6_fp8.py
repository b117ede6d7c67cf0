"""E6: does this torch multiply block-scaled e4m3 (activations 1 x 128, weights 128 x 128) on this device, how fast, and does a
row keep its bits whatever the number of rows?

Through torch.nn.functional.scaled_mm; row-wise scales beside it, and bfloat16. Decides whether FP8 weights may use the
vendor's library in prefill, or need kernels of our own. `python -m bench.gpu.e6_fp8`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.gpu.experiment import DEVICE, graph_us, run, same_bits

SHAPES = ((12352, 2048), (2048, 4096), (34816, 5120), (5120, 17408))
ROWS = (1, 16, 64, 128, 512, 2048, 8192)
HIGHEST = 448.0
Quantised = tuple[torch.Tensor, torch.Tensor]


def quantise_rows(x: torch.Tensor) -> Quantised:
    """[T, K] to e4m3 and scales [T, K / 128], stored with the row index running fastest, as the library wants them."""
    groups = x.float().view(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-12) / HIGHEST
    q = (groups / scale[..., None]).to(torch.float8_e4m3fn).view(x.shape)
    return q, scale.t().contiguous().t()


def quantise_blocks(w: torch.Tensor) -> Quantised:
    """[M, K] to e4m3 and scales [ceil(M / 128), K / 128]."""
    m, k = w.shape
    padded = F.pad(w.float(), (0, 0, 0, -m % 128)).view(-1, 128, k // 128, 128)
    scale = padded.abs().amax((1, 3)).clamp(min=1e-12) / HIGHEST
    q = (padded / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(-1, k)[:m].contiguous()
    return q, scale


def blocks(x: Quantised, w: Quantised) -> torch.Tensor:
    kind = F.ScalingType  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined,no-any-return]
        x[0],
        w[0].t(),
        x[1],
        kind.BlockWise1x128,
        w[1].t(),
        kind.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def row_wise(x: torch.Tensor, w: torch.Tensor) -> tuple[Quantised, Quantised]:
    def one(a: torch.Tensor) -> Quantised:
        scale = a.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / HIGHEST
        return (a.float() / scale).to(torch.float8_e4m3fn), scale

    return one(x), one(w)


def speed(row: Callable[..., None], kind: str) -> None:
    for m, k in SHAPES:
        w = torch.randn(m, k, device=DEVICE).mul_(k**-0.5).bfloat16()
        x = torch.randn(ROWS[-1], k, device=DEVICE).bfloat16()
        exact = x[:64].float() @ w.float().t()
        reference: torch.Tensor | None = None
        for n in reversed(ROWS):
            try:
                if kind == "bfloat16":
                    call = lambda n=n, x=x, w=w: torch.mm(x[:n], w.t())  # noqa: E731
                elif kind == "1x128 by 128x128":
                    pair = quantise_rows(x[:n]), quantise_blocks(w)
                    call = lambda pair=pair: blocks(*pair)  # noqa: E731
                else:
                    (qx, sx), (qw, sw) = row_wise(x[:n], w)
                    call = lambda qx=qx, sx=sx, qw=qw, sw=sw: torch._scaled_mm(  # noqa: E731
                        qx, qw.t(), sx, sw.t(), out_dtype=torch.bfloat16
                    )
                y = call()
                y = y[0] if isinstance(y, tuple) else y
                reference = y[:1].clone() if reference is None else reference
                part = y[:64].float()
                error = float((part - exact[: part.shape[0]]).norm() / exact[: part.shape[0]].norm())
                us = graph_us(lambda call=call: [call() for _ in range(3)] and None, 3, 5)
                row(
                    shape=f"{m}x{k}", rows=n, us=round(us, 1), TFLOPs=round(2 * n * m * k / us / 1e6), GBps=round(m * k * (2 if kind == "bfloat16" else 1) / us / 1e3),
                    error=error, row0_as_8192=same_bits(y[:1], reference),
                )  # fmt: skip
            except Exception as error:
                row(shape=f"{m}x{k}", rows=n, failed=str(error).strip().splitlines()[0][:200])


def main() -> None:
    kinds = ("bfloat16", "1x128 by 128x128", "row-wise")
    run("e6_fp8", {kind: (lambda row, kind=kind: speed(row, kind)) for kind in kinds})


if __name__ == "__main__":
    main()
