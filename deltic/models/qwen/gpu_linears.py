"""The matrices of a model on a GPU, and the products of a forward with them: of few rows, and of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from deltic.models.qwen.gpu_adapters import Targets
from deltic.ops.arrays import front
from deltic.ops.gpu.blocks import AdapterRows, Drafts
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.experts import is_e4m3
from deltic.ops.gpu.fp8 import Fp8Rows, block_scales, room
from deltic.ops.gpu.linear import (
    WideScratch,
    e4m3_block,
    k_splits,
    narrow_linear,
    narrow_swiglu,
    silu_mul,
    silu_mul_rounded,
    wide_linear,
)
from deltic.ops.gpu.lora import ExpertTargets, expand, gather, shrink
from deltic.ops.matrix import Matrix


class Linears:
    """The matrices of a model by their names, and every product of a forward with one of them (but for the
    routed experts').

    A name is that of `named_parts`, such as `layers.3.mlp.gate_up`. Terms added to the product of one matrix
    belong here: those of adapters, where a step says which rows have one.
    """

    def __init__(self, parts: Iterable[tuple[str, Tensor | Matrix]], targets: Targets | None = None) -> None:
        """targets: to which adapters may add."""
        self.matrices = {name: part for name, part in parts if isinstance(part, Matrix)}
        self.blocks = {name: [block_scales(segment) for segment in w.segments] for name, w in self.matrices.items()}
        self._targets = targets

    @contextmanager
    def _adapted(self, name: str, x: Tensor, out: Tensor, who: AdapterRows | None) -> Iterator[None]:
        """Around a product: with what adapters add to its columns, out [N, M], of rows x [N, K]."""
        if who is None:
            yield
            return
        assert self._targets is not None
        target = self._targets[name]
        shrink(x, target, who)
        yield
        expand(out, target, who)

    def embedding(
        self,
        tokens: Tensor,
        residual: Tensor,
        who: AdapterRows | None,
        batch_slots: Tensor | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """residual [N, H] += what adapters add to the embeddings of tokens. batch_slots: of the rows, by
        which tokens are; drafts: of the rows, where some may be.
        """
        if who is None:
            return
        assert self._targets is not None
        target, of_rows = self._targets["embed"], None if drafts is None else (drafts.ahead, drafts.token)
        gather(tokens, target, who, len(residual), batch_slots=batch_slots, drafts=of_rows)
        expand(residual, target, who, parts=1)

    def experts(self, name: str, who: AdapterRows | None) -> tuple[ExpertTargets, AdapterRows] | None:
        """Targets that a mixture takes for rows with adapters, and these rows. name: how the names of its
        matrices begin.
        """
        if who is None:
            return None
        assert self._targets is not None
        return self._targets.experts(name), who

    def block_k(self, name: str, *, is_cut: bool = True) -> int:
        """Columns of a block of rows that are rounded for a product of few rows with a matrix (`round_rows`),
        cut along K or not; 0 where that has no e4m3.
        """
        w = self.matrices[name]
        return e4m3_block(w, k_splits(w.n, w.k) if is_cut else 1)

    def project(
        self, name: str, x: Tensor, out: Tensor, rows: Fp8Rows | None = None, who: AdapterRows | None = None
    ) -> None:
        """out = x W^T of few rows: x bfloat16 [N, K], out float32 [S, N, M] or bfloat16 [N, M] (see
        `narrow_linear`). who: which rows have adapters. Their terms are added to the first of S parts.
        """
        with self._adapted(name, x, out if out.ndim == 2 else out[0], who):
            narrow_linear(x, self.matrices[name], out, rows=rows, blocks=self.blocks[name][0])

    def partial(
        self, name: str, x: Tensor, flat: Tensor, rows: Fp8Rows | None = None, who: AdapterRows | None = None
    ) -> Tensor:
        """The partial sums of x W^T of few rows, float32 [S, N, M], in the front of `flat`."""
        w = self.matrices[name]
        out = front(flat, k_splits(w.n, w.k), x.shape[0], w.n)
        self.project(name, x, out, rows, who)
        return out

    def swiglu(
        self,
        name: str,
        x: Tensor,
        out: Tensor,
        gate_up: Tensor,
        rows: Fp8Rows | None = None,
        who: AdapterRows | None = None,
        down: str = "",
    ) -> Fp8Rows | None:
        """out = bfloat16(silu(gate) * up) of few rows: out bfloat16 [N, F], gate_up float32 [1, N, 2F].
        Returns `rows` for the product with `down` (see `narrow_swiglu`). Where rows have adapters it is two
        kernels, to the same bits.
        """
        w, blocks = self.matrices[name], self.blocks[name][0]
        if who is not None:
            self.project(name, x, gate_up, rows, who)
            silu_mul(gate_up[0], out)
            return None if rows is None else rows.rounded_by(0)
        block_k = self.block_k(down) if down and is_e4m3(self.matrices[down]) else 0
        return narrow_swiglu(x, w, out, gate_up=gate_up, rows=rows, blocks=blocks, block_k=block_k)

    def project_many(
        self, name: str, x: Tensor, out: Tensor, scratch: WideScratch | None = None, who: AdapterRows | None = None
    ) -> None:
        """out = x W^T of whole blocks of rows: x bfloat16 [T, K], out bfloat16 [T, M] (see `wide_linear`)."""
        with self._adapted(name, x, out, who):
            wide_linear(x, self.matrices[name], out, scratch=scratch, blocks=self.blocks[name])

    def down_many(
        self,
        name: str,
        up: Tensor,
        inner: Tensor,
        out: Tensor,
        scratch: WideScratch | None = None,
        who: AdapterRows | None = None,
    ) -> None:
        """out = (silu(gate) * up) W^T of whole blocks of rows: up bfloat16 [T, 2F], gate first; inner: a
        workspace, bfloat16 [T, F].
        """
        if who is not None:  # which read the bfloat16 rows
            silu_mul(up, inner)
            self.project_many(name, inner, out, scratch, who)
            return
        w = self.matrices[name]
        if scratch is not None and is_e4m3(w):
            rows = silu_mul_rounded(up, room(scratch.rows), w.k, k_block(w.k))
            scratch = replace(scratch, rows=rows)
        else:
            silu_mul(up, inner)
        wide_linear(inner, w, out, scratch=scratch, blocks=self.blocks[name])
