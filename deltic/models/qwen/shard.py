"""A model cut for tensor parallel: the shape of one of its parts, and what of a checkpoint belongs to it, as
views of the stored tensors, so that nothing else is read. Each of several GPUs runs one part, or more.

A part has a run of key heads of each DeltaNet layer, with their value heads, channels of the convolution,
states, b and a; a run of query heads with their key and value heads, which are copied where there are
fewer than parts; a run of the inner columns of each MLP and expert, or a run of whole experts where they
are dealt out; and a run of the head's rows. The first part has all of these from which a draft head
guesses. Embedding, norms, routers and the draft head's first matrix are whole in each. What comes out of
out_proj, o_proj and down are partial sums: those of all parts are added.

Inner columns are cut where the groups of a scale end, so a part may have more of them than another, or none
that are its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from deltic.models.fields import CheckpointError, refuse_limits
from deltic.models.qwen.shape import ModelShape
from deltic.models.stored import Derived, StoredTensor
from deltic.ops.arrays import Array
from deltic.ops.formats import OUTER, Quantised

Runs = tuple[tuple[int, int], ...]
"""Ranges of rows or columns, one behind another."""


def share(n: int, part: int, n_shards: int, unit: int = 1) -> tuple[int, int]:
    """A part's range of n, in whole units but at the end, as even as they allow."""
    units = -(-n // unit)
    begin, end = (min(n, units * i // n_shards * unit) for i in (part, part + 1))
    return begin, end


@dataclass(frozen=True)
class View(Derived):
    """Rows and columns of a stored tensor, as a tensor of this shape. columns None: all of them."""

    tensor: StoredTensor
    shape: tuple[int, ...]
    rows: Runs
    columns: Runs | None = None
    is_zero: bool = False
    """True if all values are 0 instead."""

    def read(self, begin: int, end: int) -> Array | Quantised:
        parts, at = [], 0
        for first, last in self.rows:
            n = last - first
            if at < end and begin < at + n:
                parts.append(self.tensor.read(first + max(begin - at, 0), first + min(end - at, n)))
            at += n
        quantised = [part for part in parts if isinstance(part, Quantised)]
        if quantised:
            found = Quantised.joined(quantised)
            found = found if self.columns is None else found.columns(self.columns)
            return found.zeroed() if self.is_zero else found
        k = self.tensor.shape[-1]
        values = np.concatenate([np.asarray(part).reshape(-1, k) for part in parts])
        if self.columns is not None:
            values = np.concatenate([values[:, first:last] for first, last in self.columns], axis=1)
        return np.zeros_like(values) if self.is_zero else values


def _size(runs: Runs) -> int:
    return sum(end - begin for begin, end in runs)


def _scaled(runs: Runs, by: int, first: int = 0) -> Runs:
    return tuple((first + begin * by, first + end * by) for begin, end in runs)


def inner_unit(shape: ModelShape) -> int:
    """Inner columns of an MLP that stay together: the groups of its down, as it is stored, and 32 at least,
    which kernels take at a time.
    """
    groups = [32]
    for name, format in shape.formats.items():
        if "down_proj" in name:
            groups.append(OUTER if format.scales.startswith("k") else format.group or 32)
    return math.lcm(*groups)


class Inner(NamedTuple):
    """Inner columns of a part. is_idle: there are fewer groups of them than parts, and these are another's,
    too: down is 0 here.
    """

    columns: Runs
    is_idle: bool


class Cuts:
    """Ranges that a part has of a model of this shape."""

    def __init__(self, shape: ModelShape, part: int, n_shards: int, *, are_dealt: bool = False) -> None:
        """are_dealt: whether experts are whole. Raises UnsupportedModelError where heads, or experts that are
        dealt out, cannot be shared out evenly.
        """
        self.whole, n = shape, n_shards

        def run(size: int, unit: int = 1) -> tuple[int, int]:
            return share(size, part, n, unit)

        kv = shape.n_kv_heads
        supported = f"a multiple of {n}, to be cut for {n} GPUs"
        refuse_limits(
            ("linear_num_key_heads", shape.gdn_n_k_heads, shape.gdn_n_k_heads % n == 0, supported),
            ("num_attention_heads", shape.n_q_heads, shape.n_q_heads % n == 0, supported),
            ("num_key_value_heads", kv, max(kv, n) % min(kv, n) == 0, supported),
            ("num_experts", shape.n_experts, not are_dealt or shape.n_experts % n == 0, supported),
        )
        self.keys: Runs = (run(shape.gdn_n_k_heads),)
        ratio = shape.gdn_n_v_heads // shape.gdn_n_k_heads
        if shape.tiled_value_heads:
            self.values: Runs = tuple(
                (j * shape.gdn_n_k_heads + a, j * shape.gdn_n_k_heads + b) for j in range(ratio) for a, b in self.keys
            )
        else:
            self.values = _scaled(self.keys, ratio)
        self.queries: Runs = (run(shape.n_q_heads),)
        self.kv: Runs = (run(kv) if kv >= n else (part * kv // n, part * kv // n + 1),)
        unit = inner_unit(shape)

        def inner(width: int) -> Inner:
            begin, end = run(width, unit)
            return Inner(((begin, end),), False) if begin < end else Inner(((0, min(width, unit)),), True)

        self.own_experts = run(shape.n_experts) if are_dealt else None
        """The experts that the part has whole. None: it has columns of each."""
        whole_width = Inner(((0, shape.moe_intermediate_size),), False)
        self.inner = inner(shape.intermediate_size)
        self.expert = whole_width if are_dealt else inner(shape.moe_intermediate_size)
        self.shared = inner(shape.shared_intermediate_size)
        self.is_idle = any(one.is_idle and _size(one.columns) for one in (self.inner, self.expert, self.shared))
        self.heads: tuple[Runs, ...] = tuple((share(shape.vocab_size, i, n, 16),) for i in range(n))
        """Rows of the head that each part has."""
        self.head = self.heads[part]

    @property
    def shape(self) -> ModelShape:
        """Shape of the part, as it is run."""
        return replace(
            self.whole,
            n_q_heads=_size(self.queries),
            n_kv_heads=_size(self.kv),
            gdn_n_k_heads=_size(self.keys),
            gdn_n_v_heads=_size(self.values),
            intermediate_size=_size(self.inner.columns),
            moe_intermediate_size=_size(self.expert.columns),
            shared_intermediate_size=_size(self.shared.columns),
            own_experts=self.own_experts,
            head_rows=_size(self.head),
            most_drafted=min(self.whole.most_drafted, _size(self.heads[0])),
            tie_word_embeddings=False,
        )

    def _channels(self) -> Runs:
        s = self.whole
        of_values = _scaled(self.values, s.gdn_v_dim, 2 * s.gdn_key_size)
        return (*_scaled(self.keys, s.gdn_k_dim), *_scaled(self.keys, s.gdn_k_dim, s.gdn_key_size), *of_values)

    def _rows(self) -> dict[str, Runs]:
        """Rows of the part by the end of a tensor's name."""
        s = self.whole
        a_group = 2 * s.gdn_k_dim + 2 * s.gdn_v_dim * (s.gdn_n_v_heads // s.gdn_n_k_heads)
        return {
            "linear_attn.in_proj_qkv.weight": self._channels(),
            "linear_attn.conv1d.weight": self._channels(),
            "linear_attn.in_proj_z.weight": _scaled(self.values, s.gdn_v_dim),
            "linear_attn.in_proj_b.weight": self.values,
            "linear_attn.in_proj_a.weight": self.values,
            "linear_attn.in_proj_qkvz.weight": _scaled(self.keys, a_group),
            "linear_attn.in_proj_ba.weight": _scaled(self.keys, 2 * (s.gdn_n_v_heads // s.gdn_n_k_heads)),
            "self_attn.q_proj.weight": _scaled(self.queries, 2 * s.head_dim),
            "self_attn.k_proj.weight": _scaled(self.kv, s.head_dim),
            "self_attn.v_proj.weight": _scaled(self.kv, s.head_dim),
            "lm_head.weight": self.head,
        }

    def _columns(self) -> dict[str, Runs]:
        s = self.whole
        return {
            "linear_attn.A_log": self.values,
            "linear_attn.dt_bias": self.values,
            "linear_attn.out_proj.weight": _scaled(self.values, s.gdn_v_dim),
            "self_attn.o_proj.weight": _scaled(self.queries, s.head_dim),
        }

    def of_matrix(self, name: str) -> tuple[Runs | None, Runs | None]:
        """Rows and columns that the part has of a matrix as it is run, by its name (`Weights.named_parts`).
        None: all of them; no columns: they are another part's, and zero here.
        """
        s, kind = self.whole, name.rpartition(".")[2]
        if kind == "in_proj":
            z, b = s.conv_channels, s.conv_channels + s.gdn_value_size
            gates = _scaled(self.values, 1, b) + _scaled(self.values, 1, b + s.gdn_n_v_heads)
            return (*self._channels(), *_scaled(self.values, s.gdn_v_dim, z), *gates), None
        if kind == "qkv":
            n_q, d = s.n_q_heads, s.head_dim
            of_heads = (self.queries, 0), (self.queries, n_q), (self.kv, 2 * n_q), (self.kv, 2 * n_q + s.n_kv_heads)
            return tuple(run for heads, first in of_heads for run in _scaled(heads, d, first * d)), None
        if kind.endswith(("gate_up", "down")):
            inner, width = self.inner, s.intermediate_size
            if s.is_moe:
                is_shared = kind.startswith("shared_")
                inner = self.shared if is_shared else self.expert
                width = s.shared_intermediate_size if is_shared else s.moe_intermediate_size
            if kind.endswith("down"):
                return None, () if inner.is_idle else inner.columns
            return (*inner.columns, *_scaled(inner.columns, 1, width)), None
        columns = {"out_proj": _scaled(self.values, s.gdn_v_dim), "o_proj": _scaled(self.queries, s.head_dim)}
        return self.head if kind == "lm_head" else None, columns.get(kind)

    def views(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors as they are loaded. A tied head is a tensor of its own."""
        found, rows, columns = dict[str, StoredTensor](), self._rows(), self._columns()
        for name, tensor in tensors.items():
            if (runs := _by_end(rows, name)) is not None:
                found[name] = _of_rows(tensor, runs)
            elif (runs := _by_end(columns, name)) is not None:
                found[name] = _of_columns(tensor, runs)
            else:
                found |= self._feed_forward(name, tensor)
        if "lm_head.weight" not in tensors:
            embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
            found["lm_head.weight"] = _of_rows(tensors[embedding], self.head)
        return found

    def _feed_forward(self, name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
        """The part's share of a tensor, by the name that it has there: none of another part's expert."""
        matched = re.search(
            r"\.mlp\.(shared_expert\.|experts\.(?:(\d+)\.)?)?(gate_up|gate|up|down)_proj(\.weight)?$", name
        )
        if not matched:
            return {name: tensor}
        where, part = matched[1] or "", matched[3]
        if where.startswith("experts.") and self.own_experts is not None:
            begin, end = self.own_experts
            if matched[2] is None:
                _, n, k = tensor.shape
                return {name: View(tensor, (end - begin, n, k), ((begin * n, end * n),))}
            i = int(matched[2])
            own = f"{name[: matched.start(2)]}{i - begin}{name[matched.end(2) :]}"
            return {own: tensor} if begin <= i < end else {}
        inner = self.shared if where == "shared_expert." else self.expert if where else self.inner
        if part == "down":
            return {name: replace(_of_columns(tensor, inner.columns), is_zero=inner.is_idle)}
        if part != "gate_up":
            return {name: _of_rows(tensor, inner.columns)}
        n_experts, height, k = tensor.shape  # gate, then up, of each
        ((first, last),) = inner.columns
        starts = [i * height + half for i in range(n_experts) for half in (0, height // 2)]
        runs = tuple((start + first, start + last) for start in starts)
        return {name: View(tensor, (n_experts, 2 * (last - first), k), runs)}


def whole(shape: ModelShape, cuts: Sequence[Cuts]) -> ModelShape:
    """The shape of a model, which may be cut; else `shape`."""
    return cuts[0].whole if cuts else shape


def deals_experts(shape: ModelShape, n_shards: int) -> bool:
    """Returns whether experts are better dealt out whole: a part would have no columns of its own of them."""
    fewer = -(-shape.moe_intermediate_size // inner_unit(shape)) < n_shards
    return shape.is_moe and fewer and shape.n_experts % n_shards == 0


def shares_told(cuts: Sequence[Cuts]) -> tuple[str, ...]:
    """Notices of parts whose shares of a feed-forward are not what one expects: for the log."""
    n_idle = sum(part.is_idle for part in cuts)
    wide = f"{n_idle} of {len(cuts)} parts have no columns of their own"
    if cuts and (own := cuts[0].own_experts) is not None:
        shared = f"; of the shared expert {wide}" if n_idle else ""
        return (
            f"experts are dealt out whole, {own[1]} of {cuts[0].whole.n_experts} to each of {len(cuts)} parts{shared}",
        )
    return (f"{wide} in some matrices: groups of scales are wide",) if n_idle else ()


def cut(
    shape: ModelShape, n_shards: int, *, are_even: bool = False, are_dealt: bool = False
) -> tuple[ModelShape, tuple[Cuts, ...]]:
    """The parts of a model, and a shape that has the most of all; of one part the model, and nothing.
    are_dealt: as `Cuts` takes it.

    Raises UnsupportedModelError as `Cuts`, CheckpointError where the parts differ but are to be even.
    """
    if n_shards == 1:
        return shape, ()
    cuts = tuple(Cuts(shape, part, n_shards, are_dealt=are_dealt) for part in range(n_shards))
    of_all = [
        (replace(one.shape, head_rows=0, own_experts=None), one.inner.is_idle, one.expert.is_idle, one.shared.is_idle)
        for one in cuts
    ]
    if are_even and any(of != of_all[0] for of in of_all):
        raise CheckpointError(
            f"--tp-invariant {n_shards}: the parts of this model differ, since columns of an MLP stay together by "
            f"{inner_unit(shape)}; give a smaller number"
        )
    largest = max((part.shape for part in cuts), key=lambda part: part.n_params)
    return replace(largest, head_rows=max(part.shape.head_rows for part in cuts)), cuts


def _by_end(of: Mapping[str, Runs], name: str) -> Runs | None:
    """The runs under the end of a tensor's name."""
    return next((runs for end, runs in of.items() if f".{name}".endswith(f".{end}")), None)


def _of_rows(tensor: StoredTensor, rows: Runs) -> View:
    """Makes a view of rows, of a tensor whose first dimension is its rows."""
    return View(tensor, (_size(rows), *tensor.shape[1:]), rows)


def _of_columns(tensor: StoredTensor, columns: Runs) -> View:
    *rows, _ = tensor.shape
    return View(tensor, (*rows, _size(columns)), ((0, math.prod(rows)),), columns)
