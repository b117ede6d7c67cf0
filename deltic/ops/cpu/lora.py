"""lora: what LoRA adapters add to the rows of a product, to an embedding, and to experts (csrc/lora.h).

    out[row] += up v,  v = bfloat16(scale * (down x)),  x the row's input in bfloat16, sums in float32

Every row has an adapter of its own or none. Rows of one adapter are multiplied together, and a row's bits do
not depend on them. What an adapter adds to a matrix is an entry in a table of addresses, so that a recorded
program finds adapters that were loaded since. A rank is filled up to a multiple of 16 with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deltic.ops.arrays import Array, bfloat16, raw
from deltic.ops.contract import check
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import Allocate, up_to
from deltic.ops.matrix import PANEL

MAX_TERMS = 4
"""Terms of one product: modules that are rows of one matrix."""

MAX_GROUP_ROWS = 64
"""Rows of the largest group. More rows of one adapter are several groups, so that threads share them."""

_RANK, _LINE = 16, 64
_WORDS = 3 + 5 * MAX_TERMS
"""Words of an entry (Entry in csrc/lora.h)."""


class Term(Protocol):
    """Rows [first, first + n) of a product += scale * up (down x), of each of M matrices."""

    @property
    def first(self) -> int: ...

    @property
    def down(self) -> Array:
        """bfloat16 [M, r, K]."""

    @property
    def up(self) -> Array:
        """bfloat16 [M, n, r]."""

    @property
    def scale(self) -> float: ...


@dataclass(frozen=True)
class AdapterRows:
    """Groups of a step's rows that have the same adapter. int32; G groups, T rows."""

    n_groups: Array
    begin: Array  # [G + 1] into `rows`
    rows: Array  # [T] those of an adapter one after another
    slot: Array  # [G] the adapter of each group
    slot_of: Array  # [T] of each row; -1: none

    def fill(self, slots: Array) -> None:
        """Sets the adapters of the first rows. slots: int32 [n], -1 for none."""
        self.slot_of[: len(slots)] = slots
        rows = np.flatnonzero(slots >= 0)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        begin, of = list[int](), list[int]()
        for i, slot in enumerate(slots[rows].tolist()):
            if not of or slot != of[-1] or i - begin[-1] == MAX_GROUP_ROWS:
                begin.append(i)
                of.append(slot)
        self.rows[: len(rows)], self.slot[: len(of)] = rows, of
        self.begin[: len(of) + 1] = [*begin, len(rows)]
        self.n_groups[...] = len(of)

    @property
    def arguments(self) -> tuple[Array, ...]:
        return self.n_groups, self.begin, self.rows, self.slot, self.slot_of


def adapter_rows(name: str, n_rows: int, allocate: Allocate) -> AdapterRows:
    """Allocates the groups for steps of up to n_rows rows."""

    def buffer(part: str, n: int) -> Array:
        return np.asarray(allocate(f"{name} {part}", (n,), np.int32))

    return AdapterRows(
        n_groups=buffer("count", 1)[0, ...],
        begin=buffer("begin", n_rows + 1),
        rows=buffer("rows", n_rows),
        slot=buffer("slots", n_rows),
        slot_of=buffer("slot of rows", n_rows),
    )


@dataclass(frozen=True)
class LoraScratch:
    """Workspaces for R rows of inputs up to K wide, and for ranks of up to `most` together."""

    packed: Array  # uint8 [R * max(K, most) * 2]
    u: Array  # float32 [R, most]
    v: Array  # bfloat16 [R, most]
    groups: Array  # int32 [4 R]: of experts

    @property
    def arguments(self) -> tuple[Array, Array, Array, int]:
        return self.packed, self.u, self.v, self.u.shape[1]


def lora_scratch(n_rows: int, widest: int, rank: int, allocate: Allocate) -> LoraScratch:
    """widest: of the inputs' widths; rank: the largest of one term."""
    most = MAX_TERMS * up_to(rank, _RANK)
    return LoraScratch(
        packed=allocate("adapters' rows in", (n_rows * max(widest, most) * 2,), np.uint8),
        u=allocate("adapters' sums", (n_rows, most), np.float32),
        v=allocate("adapters' rows between", (n_rows, most), bfloat16),
        groups=allocate("adapters' experts", (4 * n_rows,), np.int32),
    )


class Entries:
    """Terms that adapters add to one product: a column of the table. Keeps the table alive."""

    def __init__(self, table: Array, i: int) -> None:
        """table: int64 [slots, products, words]."""
        self.at = table[:, i]
        self.step = table.shape[1] * table.shape[2]

    @property
    def arguments(self) -> tuple[Array, int]:
        return self.at, self.step


def make_table(n_slots: int, n_products: int, allocate: Allocate) -> Array:
    """Entries of adapters that add nothing, int64 [n_slots, n_products, words]."""
    return np.asarray(allocate("adapters' table", (n_slots, n_products, _WORDS), np.int64))


def lora(program: Program, x: Array, out: Array, entries: Entries, rows: AdapterRows, scratch: LoraScratch) -> None:
    """out[m] += what the adapter of row m adds to its product. x: bfloat16 [T, K]; out: float32 [T, N]."""
    check("lora", x.dtype == bfloat16 and out.dtype == np.float32, "bfloat16 x, float32 out")
    check("lora", x.flags.c_contiguous and out.flags.c_contiguous, "contiguous tensors")
    check("lora", scratch.packed.nbytes >= x.shape[0] * x.shape[1] * 2, f"room for {x.shape[0]} rows")
    program.call(
        "deltic_lora", x, x.shape[1], out, out.shape[1], *rows.arguments, *entries.arguments, *scratch.arguments
    )


def lora_embed(
    program: Program, token_ids: Array, out: Array, entries: Entries, rows: AdapterRows, scratch: LoraScratch
) -> None:
    """out[t] += what the adapter of token t adds to its embedding; nothing where the id is below 0.

    token_ids: int32 [T]; out: float32 [T, H].
    """
    check("lora", token_ids.dtype == np.int32 and out.dtype == np.float32, "int32 ids, float32 out")
    program.call(
        "deltic_lora_embed", token_ids, out, out.shape[1], *rows.arguments, *entries.arguments, *scratch.arguments
    )


def terms_bytes(terms: Sequence[Term]) -> int:
    """Bytes that `put_terms` needs."""
    return sum(up_to(n_bytes, _LINE) for n_bytes in _sizes(terms))


def _sizes(terms: Sequence[Term]) -> list[int]:
    m, _, k = terms[0].down.shape
    ranks = [up_to(term.down.shape[1], _RANK) for term in terms]
    return [2 * m * sum(ranks) * k] + [
        2 * m * up_to(term.up.shape[1], PANEL) * rank for term, rank in zip(terms, ranks, strict=True)
    ]


def put_terms(terms: Sequence[Term], memory: Array, is_embedding: bool = False) -> Array:
    """Packs what an adapter adds to one product into memory, uint8 [terms_bytes]. Returns its entry, int64
    [words], for the table. is_embedding: K is the vocabulary, and a row of `down` is read at a time.
    """
    check("lora", 1 <= len(terms) <= MAX_TERMS, f"at most {MAX_TERMS} terms of one product, found {len(terms)}")
    m, _, k = terms[0].down.shape
    down_bytes, *up_bytes = _sizes(terms)
    ranks = [up_to(term.down.shape[1], _RANK) for term in terms]
    down = memory[:down_bytes].view(bfloat16)
    if is_embedding:
        check("lora", len(terms) == 1, "one term of an embedding")
        columns = raw(down).reshape(k, ranks[0])
        columns[...] = 0
        columns[:, : terms[0].down.shape[1]] = raw(terms[0].down)[0].T
    else:
        at, of_matrix = 0, raw(down).reshape(m, sum(ranks) * k)
        for term, rank in zip(terms, ranks, strict=True):
            _pack(term.down, of_matrix[:, at : at + rank * k], rank, k)
            at += rank * k
    entry = np.zeros(_WORDS, np.int64)
    entry[:3] = down.ctypes.data, sum(ranks), len(terms)
    begin = up_to(down_bytes, _LINE)
    for i, (term, rank, n_bytes) in enumerate(zip(terms, ranks, up_bytes, strict=True)):
        n = term.up.shape[1]
        up = raw(memory[begin : begin + n_bytes].view(bfloat16)).reshape(m, -1)
        _pack(term.up, up, up_to(n, PANEL), rank)
        entry[3 + 5 * i : 7 + 5 * i] = up.ctypes.data, term.first, n, rank
        entry[7 + 5 * i] = np.float64(term.scale).view(np.int64)
        begin += up_to(n_bytes, _LINE)
    return entry


def _pack(values: Array, out: Array, n: int, k: int) -> None:
    """Strips of bfloat16 (csrc/format.h) of matrices that are filled up with zeros: values [M, rows,
    columns], out uint16 [M, n * k]. In NumPy, since the kernels' threads may be busy with a step.
    """
    rows, columns = values.shape[1:]
    panels = out.reshape(len(values), n // PANEL, k // 2, PANEL, 2)
    for i, one in enumerate(raw(values)):
        if (rows, columns) != (n, k):
            whole = np.zeros((n, k), np.uint16)
            whole[:rows, :columns] = one
            one = whole
        panels[i] = one.reshape(n // PANEL, PANEL, k // 2, 2).transpose(0, 2, 1, 3)
