"""Experts whose weights are in any format: decode and prefill against float64 of the values that the weights stand for, and bits
that neighbours cannot change.

The float64 of the operands: weights rounded as ops/gpu/operands.py says, activations to bfloat16 and, beside e4m3, to that. What is left is what a sum next to a rounding border does to an activation: as in test_gpu_moe.py, whose tolerance this is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deltic.models.qwen.weights import Moe
from deltic.ops.arrays import bfloat16
from deltic.ops.contract import KernelError
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.geometry import Routing
from deltic.ops.gpu.fp8 import fp8_rows
from deltic.ops.gpu.moe_decode import MoeTiles, moe_decode, moe_scratch
from deltic.ops.gpu.moe_prefill import moe_prefill, moe_prefill_scratch
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix
from tests.gpu.matrices import e4m3_rows, in_rows
from tests.gpu.test_gpu_moe import _blocks, _close
from tests.quantised_rows import operands, random_rows
from tests.reference.layers import linear, route


@dataclass(frozen=True)
class Mix:
    """Formats of gate_up (two: of gate, and of up) and down of the routed experts and of the shared one, and its width."""

    gate_up: str
    down: str
    shared_gate_up: str = ""
    shared_down: str = ""
    shared: int = 64

    @property
    def formats(self) -> tuple[str, str, str, str]:
        return self.gate_up, self.down, self.shared_gate_up or self.gate_up, self.shared_down or self.down


SAME = ["fp8", "fp8-row", "int4-g128-bfloat16", "int4-g32-bfloat16.zero", "Q4_K", "Q6_K", "Q8_0", "NVFP4", "MXFP4"]
MIXES = {
    **{name: Mix(name, name) for name in SAME},
    "a narrower shared expert": Mix("fp8", "fp8", shared=32),
    "a shared expert in bf16": Mix("NVFP4", "NVFP4", "bf16", "bf16", 32),
    "routed experts in bf16": Mix("bf16", "bf16", "fp8-row", "Q6_K"),
    "gate and up apart": Mix("Q4_K Q5_K", "Q6_K", "Q8_0", "Q8_0"),
    "all apart": Mix("Q4_K Q5_K", "IQ4_XS", "Q4_K Q5_K", "IQ4_XS"),
    "codebooks": Mix("IQ2_XXS IQ1_M", "IQ3_S", "Q1_0", "TQ2_0"),
    "bf16 apart": Mix("bf16 fp8", "bf16", "fp8 bf16", "bf16", 32),
}
HIDDEN, N_EXPERTS, K, WIDTH = (2048, 64, 8, 512) if torch.cuda.is_available() else (256, 6, 3, 64)
SCALE = WIDTH // 64


class Layer:
    """Random weights of a mix, and their values."""

    def __init__(self, mix: Mix, device: str) -> None:
        self.device, self.shared = device, mix.shared * SCALE
        self.generator = torch.Generator(device).manual_seed(0)
        self.seed = 0
        sizes = [
            (2 * WIDTH, HIDDEN, N_EXPERTS),
            (HIDDEN, WIDTH, N_EXPERTS),
            (2 * self.shared, HIDDEN, 1),
            (HIDDEN, self.shared, 1),
        ]
        made = [self.matrix(names.split(), *size) for names, size in zip(mix.formats, sizes, strict=True)]
        self.router = self.random(N_EXPERTS + 1, HIDDEN).mul_(HIDDEN**-0.5)
        self.weights = Moe(in_rows(self.router), *(w for w, _ in made))
        self.values = [values for _, values in made]

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def matrix(self, names: list[str], n: int, k: int, n_matrices: int) -> tuple[Matrix, Tensor]:
        """float64 of the operands, too."""
        store, rows = DeviceStore(self.device), n // len(names)
        w = Matrix.empty(n, k, [(rows, WEIGHT_FORMATS[name]) for name in names], "rows", n_matrices, store.empty)
        found = []
        for segment in w.segments:
            for i in range(n_matrices):
                self.seed += 1
                if segment.format.name == "bf16":
                    values = self.random(rows, k).mul_(k**-0.5).cpu()
                    store.put(segment.one(i), values.view(torch.int16).numpy().view(bfloat16))
                else:
                    drawn = random_rows(segment.format.name, rows, k, self.seed)
                    store.put(segment.one(i), drawn)
                    values = torch.from_numpy(operands(drawn))
                found.append(values.double())
        values = torch.stack(found).view(len(names), n_matrices, rows, k).transpose(0, 1).reshape(n_matrices, n, k)
        return w, values.to(self.device)

    def rows(self, n: int) -> Tensor:
        return self.random(n, HIDDEN).mul_(2)

    def parts(self, x: Tensor) -> Tensor:
        """[k + 1, N, H] float32: what each slot and the shared expert add."""
        gate_up, down, shared_gate_up, shared_down = self.values
        w = self.weights
        routed, shared = (
            [_rounds(m) for m in (w.gate_up, w.down)],
            [_rounds(m) for m in (w.shared_gate_up, w.shared_down)],
        )
        weights, ids = route(x.float(), self.router[:-1], K, True, "bfloat16")
        parts = torch.zeros(K + 1, *x.shape, device=x.device)
        for expert in ids.unique().tolist():
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            parts[slots, rows] = weights[rows, slots, None] * _swiglu(x[rows], gate_up[expert], down[expert], *routed)
        gate = torch.sigmoid(linear(x.float(), self.router[-1:], "bfloat16"))
        parts[-1] = gate * _swiglu(x, shared_gate_up[0], shared_down[0], *shared)
        return parts

    def decode(self, x: Tensor, tiles: MoeTiles | None = None, is_rounded: bool = False) -> Tensor:
        n = x.shape[0]
        out = torch.full((K + 1, n, HIDDEN), float("nan"), device=self.device)
        slots = torch.arange(n, dtype=torch.int32, device=self.device)
        codes = fp8_rows("codes", n, HIDDEN, self.allocate) if is_rounded else None
        scratch = replace(moe_scratch(n, N_EXPERTS, K, WIDTH, self.shared, self.allocate), x8=codes)
        moe_decode(x, self.weights, Routing(K, True), row_slot=slots, scratch=scratch, out=out, tiles=tiles)
        return out

    def prefill(self, x: Tensor, n_tokens: list[int]) -> Tensor:
        out = torch.full(x.shape, float("nan"), device=self.device)
        scratch = moe_prefill_scratch(len(x), HIDDEN, N_EXPERTS, K, WIDTH, self.shared, self.allocate, has_e4m3=True)
        blocks = _blocks(n_tokens, self.device)
        moe_prefill(x, self.weights, Routing(K, True), blocks=blocks, scratch=scratch, out=out)
        return out

    def allocate(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        bad = (
            0
            if "counters" in name
            else float("nan")
            if dtype.is_floating_point
            else 77
            if dtype == torch.uint8
            else 123_456_789
        )
        return torch.full(size, bad, dtype=dtype, device=self.device)


def _rounds(w: Matrix) -> list[bool]:
    """Whether rows are rounded to e4m3 for each segment."""
    return [segment.format.codes == "e4m3" for segment in w.segments]


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor, rounds_x: list[bool], rounds_act: list[bool]) -> Tensor:
    gate, up = (
        (e4m3_rows(x) if rounds else x.double()) @ w.T
        for rounds, w in zip([rounds_x[0], rounds_x[-1]], gate_up.chunk(2, 0), strict=True)
    )
    act = (torch.nn.functional.silu(gate) * up).bfloat16()
    return ((e4m3_rows(act) if rounds_act[0] else act.double()) @ down.T).float()


@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(mix, id=name, marks=() if name in ("NVFP4", "all apart", "codebooks") else pytest.mark.long)
        for name, mix in MIXES.items()
    ],
)
def test_experts_in_every_format(device: str, mix: Mix) -> None:
    """Decode and prefill are the reference; a row has the bits it has alone, among others, in its block and in a chunk."""
    layer = Layer(mix, device)
    counts = (160, 128, 33, 16, 4, 2, 1) if device == "cuda" else (5, 2, 1)
    x = layer.rows(64)[:5] if device == "cpu" else layer.rows(counts[0])
    expected, found = layer.parts(x), layer.decode(x)
    # a Hopper adds 8-bit products with 13 bits below the largest, which of random codes is as large as all others
    coarse = device == "cuda" and any(any(_rounds(m)) for m in (layer.weights.gate_up, layer.weights.down))
    _close(found, expected, 0.03 if coarse else 0.01)
    assert torch.equal(layer.decode(x, is_rounded=True), found), "rounded before"
    for n in counts[1:]:
        assert torch.equal(layer.decode(x[-n:].contiguous(), is_rounded=n < 4), found[:, -n:]), n
    blocks = [5] if device == "cpu" else [64, 64, 32]
    padded = torch.cat([x, layer.rows(64 * len(blocks) - len(x))])
    many = layer.prefill(padded, blocks)
    _close(many[: len(x)], expected.sum(0), 0.03 if coarse else 0.02)
    if device == "cuda":
        assert torch.equal(layer.prefill(padded[64:128], [64]), many[64:128])
        assert torch.equal(layer.prefill(padded[:64], [9])[:9], many[:9])


def test_pieces_of_other_rows_are_refused(device: str) -> None:
    layer = Layer(MIXES["gate and up apart"], device)
    layer.weights.gate_up = Matrix.empty(
        2 * WIDTH, HIDDEN, [(32, WEIGHT_FORMATS["Q4_K"]), (2 * WIDTH - 32, WEIGHT_FORMATS["Q5_K"])], "rows", N_EXPERTS,
        DeviceStore(device).empty,
    )  # fmt: skip
    with pytest.raises(KernelError, match=r"moe: .*gate and up, each in one format"):
        layer.decode(layer.rows(1))
