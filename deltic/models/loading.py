"""Loading weights: what every model shares, from safetensors files to packed matrices.

A model declares each part once (`Declaration`): sizes, and the stored tensors that fill it, whose formats it
keeps. From this follow empty weights, their bytes, and the plan of loading: stored tensors, which files.py
checks, are put together from mapped memory a block of rows at a time, on several threads. A block
is packed at once, so the peak stays near the size of the packed weights.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from deltic.models.fields import CheckpointError
from deltic.models.stored import StoredTensor, one_name
from deltic.ops.arrays import Array, bfloat16, copy, nothing, raw, zeros
from deltic.ops.formats import BLOCK_ROWS, WEIGHT_FORMATS, Quantised, WeightFormat
from deltic.ops.geometry import AttentionHeads, DeviceArray
from deltic.ops.matrix import PANEL, Layout, Matrix, Segment

Progress = Callable[[int, int], None]  # bytes done, bytes in all

Role = Literal["plain", "sensitive", "kept"]
"""Role of a matrix: the precision it may lose when weights are quantised.

A plain one takes the precision that is asked for. A sensitive one keeps 8 bits of int4, and 16 of fp8: the
head and the last layer's `down`, whose errors nothing evens out any more, and the embedding, which is often
the head. One that is kept stays as stored: a router, whose near-ties decide which experts run, and what is
read for few rows.
"""

_PLAIN: Mapping[str, WeightFormat] = MappingProxyType({})
"""The formats of a checkpoint that holds nothing quantised."""

_BLOCK: dict[Layout, int] = {"panels": 1 << 20, "rows": 1 << 22}
"""Weights that a thread reads and packs at a time, larger in between: on a CPU they stay in its caches, for
a GPU they are worth the calls.
"""

_UNIT: dict[Layout, int] = {"panels": PANEL, "rows": BLOCK_ROWS}
"""Rows that stay together: of a panel, and of what --quantize fp8 rounds by blocks."""

_LEAST_ON_DISK = 1 << 20
"""Bytes of a part from which on `OnDisk` has it on the disk."""

_MOST_THREADS = 8
"""Threads that read, at most: Python's lock keeps more of them waiting."""

_DUMMY_BLOCK = 4_194_301  # prime, so that no two rows of a tiled matrix start at the same element


@dataclass
class Mlp:
    """SwiGLU of width F. `gate_up` rows: gate, then up."""

    gate_up: Matrix  # [2F, H]
    down: Matrix  # [H, F]


@dataclass
class QwenLayer:
    """A Qwen3 layer. `qkv` rows: all query heads | k heads | v heads."""

    input_norm: DeviceArray  # [H] f32, zero-centred, as all of them
    qkv: Matrix  # [(nq + 2 nk) d, H]
    q_norm: DeviceArray  # [d] f32
    k_norm: DeviceArray  # [d] f32
    o_proj: Matrix  # [H, nq d]
    post_norm: DeviceArray  # [H] f32
    mlp: Mlp


class Share(NamedTuple):
    """Size of the matrices that have one format."""

    n_weights: int
    n_bytes: int


def shares_text(formats: Mapping[str, Share]) -> str:
    """Describes the formats for people: their shares of the bytes of the matrices, and bits a weight."""
    n_weights, n_bytes = (sum(part) for part in zip(*formats.values(), strict=True))
    parts = {name: round(100 * share.n_bytes / n_bytes) for name, share in formats.items()}
    said = ", ".join(f"{name} {part or 'under 1'} %" for name, part in parts.items())
    return f"{said}; {8 * n_bytes / n_weights:.2f} bits a weight"


class Parts:
    """Weights of a model, as a base of dataclasses: vectors, tables and packed matrices, in further
    dataclasses and lists.
    """

    def formats(self) -> dict[str, Share]:
        """Shares by the name of the format, the one of most bytes first."""
        found: dict[str, Share] = {}
        segments = (segment for _, part in self.named_parts() if isinstance(part, Matrix) for segment in part.segments)
        for segment in segments:
            n_weights, n_bytes = found.get(segment.format.name, (0, 0))
            n_weights += segment.n_matrices * segment.n * segment.k
            found[segment.format.name] = Share(n_weights, n_bytes + segment.data.nbytes)
        return dict(sorted(found.items(), key=lambda item: -item[1].n_bytes))

    def named_parts(self) -> Iterator[tuple[str, DeviceArray | Matrix]]:
        """Every part with its path, such as `layers.3.mlp.gate_up`.

        One that is there twice, as a tied head, by its first only.
        """
        seen = set()
        for name, part in _walk("", self):
            if id(part) not in seen:
                seen.add(id(part))
                yield name, part

    def named_memory(self) -> Iterator[tuple[str, DeviceArray]]:
        """The memory of every part: vectors and tables, and the packed bytes of every segment of a matrix,
        which has a number of its own where there are several.
        """
        for name, part in self.named_parts():
            if isinstance(part, Matrix):
                for i, segment in enumerate(part.segments):
                    yield name if len(part.segments) == 1 else f"{name}.{i}", segment.data
            else:
                yield name, part

    def experts(self) -> dict[str, DeviceArray]:
        """The memory of matrices of which there are several, of routed experts, as of `named_memory`."""
        several = {name for name, part in self.named_parts() if isinstance(part, Matrix) and part.n_matrices > 1}
        memory = self.named_memory()
        return {name: part for name, part in memory if name in several or name.rpartition(".")[0] in several}

    def replace(self, memory: dict[str, Array]) -> None:
        """Puts other memory, as bytes by the names of `named_memory`, in the place of every part's."""
        flat = iter(list(memory[name] for name, _ in self.named_memory()))
        for name, part in list(self.named_parts()):
            new: object
            if isinstance(part, Matrix):
                segments = (dataclasses.replace(p, data=next(flat).reshape(p.data.shape)) for p in part.segments)
                new = dataclasses.replace(part, segments=tuple(segments))
            else:
                new = next(flat).view(part.dtype).reshape(part.shape)
            owner: object = self
            *path, last = name.split(".")
            for step in path:
                owner = owner[int(step)] if isinstance(owner, list) else getattr(owner, step)
            if isinstance(owner, list):
                owner[int(last)] = new
            else:
                setattr(owner, last, new)

    @property
    def n_bytes(self) -> int:
        return sum(memory.nbytes for _, memory in self.named_memory())


def _walk(path: str, owner: object) -> Iterator[tuple[str, DeviceArray | Matrix]]:
    if isinstance(owner, list):
        for i, item in enumerate(owner):
            yield from _walk(f"{path}.{i}", item)
    elif dataclasses.is_dataclass(owner) and not isinstance(owner, Matrix):
        for each in dataclasses.fields(owner):
            yield from _walk(f"{path}.{each.name}".lstrip("."), getattr(owner, each.name))
    elif owner is not None and not isinstance(owner, int):
        yield path, owner


def transposed(part: DeviceArray) -> DeviceArray:
    """The transpose of a table, in memory of its own."""
    return np.ascontiguousarray(part.T) if isinstance(part, np.ndarray) else part.T.contiguous()


class Store(Protocol):
    """Memory in which weights live. It makes room for them, and puts values into it."""

    @property
    def layout(self) -> Layout:
        """Layout of the matrices."""

    @property
    def n_threads(self) -> int:
        """Threads that may put values at once."""

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> object:
        """Uninitialised memory of a part."""

    def put(self, part: DeviceArray | Segment, rows: Array | Quantised, first: int = 0) -> None:
        """Stores rows on the host, [rows, k], in a vector or table, or packed in a segment: bfloat16,
        quantised as the segment's format says, or in that format. first: where in the segment, at whole
        panels; of several matrices: as many rows for each.
        """

    def tile(self, part: DeviceArray | Segment, block: Array, offset: int) -> None:
        """Fills a bfloat16 part, or a segment that is made of such, with a block of values on the host, again
        and again, at first from offset on.
        """


@dataclass(frozen=True)
class Host:
    """Host memory, for the CPU's kernels."""

    n_threads: int = 1
    layout: Layout = "panels"

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Array:
        return zeros(size, dtype)

    def put(self, part: Array | Segment, rows: Array | Quantised, first: int = 0) -> None:
        if not isinstance(part, Segment):
            assert not isinstance(rows, Quantised)
            copy(part.reshape(rows.shape), rows)
            return
        rows = rows if isinstance(rows, Quantised) else rows.reshape(-1, part.k)
        n = len(rows) // part.n_matrices
        for i in range(part.n_matrices):
            some = slice(i * n, (i + 1) * n)
            own = rows.take(some) if isinstance(rows, Quantised) else rows[some]
            part.one(i).rows(first, first + n).pack(own, self.n_threads)

    def tile(self, part: Array | Segment, block: Array, offset: int) -> None:
        n = part.n_matrices * part.n * part.k if isinstance(part, Segment) else part.size
        flat = np.empty(n, bfloat16)
        at = min(n, len(block) - offset)
        copy(flat[:at], block[offset : offset + at])
        for begin in range(at, n, len(block)):
            copy(flat[begin : begin + len(block)], block[: n - begin])
        self.put(part, flat)


@dataclass(frozen=True)
class OnDisk(Host):
    """Memory that is files without a name in a directory: the system takes it where it needs memory, and so
    more can be packed than it has.
    """

    directory: Path = Path()

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Raises OSError where the disk has no room."""
        n_bytes = math.prod(size) * np.dtype(dtype).itemsize
        if n_bytes < _LEAST_ON_DISK:
            return super().empty(size, dtype)
        with tempfile.TemporaryFile(dir=self.directory) as file:
            os.posix_fallocate(file.fileno(), 0, n_bytes)  # a full disk would end the process later
            mapped = mmap.mmap(file.fileno(), n_bytes)
        return np.frombuffer(mapped, np.uint8).view(dtype).reshape(size)


class Counted(Host):
    """Nowhere: weights without memory, of which sizes are asked. To put values there is a ValueError."""

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Array:
        return nothing(size, dtype)


HOST = Host()
COUNTED, COUNTED_ROWS = Counted(), Counted(layout="rows")


@dataclass(frozen=True)
class Stored:
    """Tensor of a checkpoint, and the rows of a part that it fills: `sizes` rows each, one range after
    another.

    Its own rows are `n_groups` equal groups, each holding a share of every range: so Next interleaves q, k, v
    and z by key head, and every family interleaves query and gate by head. A plain tensor is one group with
    one range.
    """

    name: str
    sizes: tuple[int, ...]
    n_groups: int = 1
    first: int = 0
    """The first row of a group that is wanted."""
    shape: tuple[int, ...] = ()
    """Shape as stored. (): [all rows, K]."""

    def runs(self, i: int, n_matrices: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of the tensor's rows that are rows [begin, end) of a part; of a tensor of several matrices
        those of matrix i.
        """
        if self.n_groups == 1:
            first = self.first + i * (sum(self.sizes) // n_matrices)
            yield first + begin, first + end
            return
        height, first, at = math.prod(self.shape[:-1]) // self.n_groups, self.first, 0
        for size in self.sizes:
            share, row = size // self.n_groups, max(begin, at)
            while row < min(end, at + size):
                group, within = divmod(row - at, share)
                n, start = min(share - within, end - row), group * height + first + within
                yield start, start + n
                row += n
            first, at = first + share, at + size


@dataclass(frozen=True)
class Planned:
    """A part, and the stored tensors that it is put together from, in the order of its rows."""

    target: DeviceArray | Matrix
    stored: tuple[Stored, ...]
    """Tensors of the part. For several matrices: all of the first one, then all of the next, or one that
    holds all of them.
    """
    dtype: DTypeLike = bfloat16
    """Type of the rows, before they are packed."""
    minus: float = 0.0
    """Number that is subtracted from every value."""

    def runs(self, n_matrices: int, i: int, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Names of stored tensors and ranges of their rows: together rows [begin, end) of matrix i."""
        in_one = max(1, len(self.stored) // n_matrices)
        shared = n_matrices if in_one == len(self.stored) else 1  # matrices in one stored tensor
        at = 0
        for one in self.stored if shared > 1 else self.stored[i * in_one : (i + 1) * in_one]:
            n = sum(one.sizes) // shared
            if at < end and begin < at + n:
                for run in one.runs(i if shared > 1 else 0, shared, max(begin - at, 0), min(end - at, n)):
                    yield one.name, *run
            at += n


class Declaration:
    """Makes the parts of a model's weights, uninitialised, each from the one place that says what it is:
    sizes, format, and the stored tensors that fill it, which `plan` keeps in the order of declaration.
    """

    def __init__(self, quantize: str | None, store: Store, formats: Mapping[str, WeightFormat] = _PLAIN) -> None:
        """formats: of the tensors that are stored quantised (`stored.formats_of`)."""
        self.quantize, self.store, self.formats = quantize, store, formats
        self.plan: list[Planned] = []

    def vector(self, name: str, *size: int, shape: tuple[int, ...] = (), minus: float = 0.0) -> object:
        """float32 [size]. shape: as stored, where that is another."""
        target = self.store.empty(size, np.float32)
        self.plan.append(Planned(target, (Stored(name, size[:1], shape=shape or size),), np.float32, minus))
        return target

    def table(self, name: str, n: int, k: int) -> object:
        """bfloat16 [n, k], of which single rows are read."""
        target = self.store.empty((n, k), bfloat16)
        self.plan.append(Planned(target, (Stored(name, (n,), shape=(n, k)),)))
        return target

    def matrix(self, k: int, *stored: Stored, role: Role = "plain", n_matrices: int = 1) -> Matrix:
        """n_matrices of [n, k], of the rows of all that is stored: those that are quantised in their format,
        the others in that of the role.
        """
        n = sum(sum(one.sizes) for one in stored) // n_matrices
        asked = format_of(role, self.quantize)
        runs: list[tuple[int, WeightFormat]] = []
        in_one = stored[: max(1, len(stored) // n_matrices)]
        for one in in_one:
            rows = sum(one.sizes) * len(stored) // len(in_one) // n_matrices
            format = self.formats.get(one_name(one.name), asked)
            if runs and runs[-1][1] == format:
                rows += runs.pop()[0]
            runs.append((rows, format))
        target = Matrix.empty(n, k, runs, self.store.layout, n_matrices, self.store.empty)
        known = (
            one if one.shape else Stored(one.name, one.sizes, one.n_groups, one.first, (sum(one.sizes), k))
            for one in stored
        )
        self.plan.append(Planned(target, tuple(known)))
        return target

    def mlp(self, p: str, width: int, h: int, down: Role) -> Mlp:
        """SwiGLU under the prefix p; down: the role of that matrix."""
        return Mlp(
            gate_up=self.matrix(h, Stored(f"{p}gate_proj.weight", (width,)), Stored(f"{p}up_proj.weight", (width,))),
            down=self.matrix(width, Stored(f"{p}down_proj.weight", (h,)), role=down),
        )

    def norm(self, name: str, size: int) -> object:
        """A norm that is stored as 1 and more: float32 [size], zero-centred."""
        return self.vector(name, size, minus=1.0)

    def layer(self, p: str, h: int, heads: AttentionHeads, width: int, down: Role) -> QwenLayer:
        """A Qwen3 layer under the prefix p, with a feed-forward of this width; down: as of `mlp`."""
        q, kv, m = heads.n_q * heads.dim, heads.n_kv * heads.dim, f"{p}self_attn."
        return QwenLayer(
            input_norm=self.norm(f"{p}input_layernorm.weight", h),
            qkv=self.matrix(h, *(Stored(f"{m}{x}_proj.weight", (n,)) for x, n in (("q", q), ("k", kv), ("v", kv)))),
            q_norm=self.norm(f"{m}q_norm.weight", heads.dim),
            k_norm=self.norm(f"{m}k_norm.weight", heads.dim),
            o_proj=self.matrix(q, Stored(f"{m}o_proj.weight", (h,))),
            post_norm=self.norm(f"{p}post_attention_layernorm.weight", h),
            mlp=self.mlp(f"{p}mlp.", width, h, down),
        )


def copy_parts(
    plan: list[Planned], tensors: Mapping[str, StoredTensor], store: Store, progress: Progress | None
) -> None:
    """Puts every part together, a matrix a block at a time, and stores it."""
    total, done = sum(_n_bytes(part.target) for part in plan), 0
    for n_bytes in _done(
        (job for part in plan for job in _jobs(part, tensors, store)), min(store.n_threads, _MOST_THREADS)
    ):
        done += n_bytes
        if progress is not None:
            progress(done, total)


def _done(jobs: Iterable[Callable[[], int]], n_threads: int) -> Iterator[int]:
    """Yields what jobs give, in their order. Some more jobs than the threads are made at a time."""
    waiting = deque[Future[int]]()
    with ThreadPoolExecutor(n_threads, "load") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > 2 * n_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _jobs(part: Planned, tensors: Mapping[str, StoredTensor], store: Store) -> Iterator[Callable[[], int]]:
    """Yields jobs. A job reads and stores a block of the part, and returns its bytes there."""
    target = part.target
    if not isinstance(target, Matrix):
        yield partial(_copy_values, part, tensors, store)
        return
    top = 0
    for segment in target.segments:
        n_rows = _BLOCK[segment.layout] // segment.k
        unit = _UNIT[segment.layout]
        step, together = max(n_rows // unit, 1) * unit, max(n_rows // segment.n, 1)
        for i in range(0, segment.n_matrices, together):
            some = dataclasses.replace(segment, data=segment.data[i : i + together])
            for begin in range(0, segment.n, step):
                end = min(begin + step, segment.n)
                runs = [
                    run
                    for one in range(i, i + some.n_matrices)
                    for run in part.runs(target.n_matrices, one, top + begin, top + end)
                ]
                yield partial(_copy_rows, some, begin, end, runs, tensors, store)
        top += segment.n


def _copy_rows(
    segment: Segment,
    begin: int,
    end: int,
    runs: list[tuple[str, int, int]],
    tensors: Mapping[str, StoredTensor],
    store: Store,
) -> int:
    """Stores rows [begin, end) of each matrix of a segment. Returns their part of its bytes."""
    found = [tensors[name].read(*run) for name, *run in runs]
    quantised = [rows for rows in found if isinstance(rows, Quantised)]
    if quantised:
        store.put(segment, Quantised.joined(quantised), begin)
    else:
        rows, at = np.empty((segment.n_matrices * (end - begin), segment.k), bfloat16), 0
        for values in found:
            assert not isinstance(values, Quantised)
            values = values.reshape(-1, segment.k)
            copy(rows[at : at + len(values)], values)
            at += len(values)
        if segment.format.scales != "none" and (raw(rows) & 0x7FFF).max(initial=0) >= 0x7F80:
            raise CheckpointError(
                f"{tensors[runs[0][0]].where} has values that are not finite in bfloat16, and {segment.format.name} has none such; get "
                "the checkpoint anew"
            )
        store.put(segment, rows, begin)
    n_bytes: int = segment.data.nbytes
    return n_bytes * end // segment.n - n_bytes * begin // segment.n


def _copy_values(part: Planned, tensors: Mapping[str, StoredTensor], store: Store) -> int:
    """Stores a vector or table. Returns its bytes."""
    (stored,), target = part.stored, part.target
    assert not isinstance(target, Matrix)
    size = sum(stored.sizes), math.prod(target.shape[1:])
    in_place = isinstance(target, np.ndarray)
    rows: Array = target.reshape(size) if in_place else np.empty(size, part.dtype)
    found = tensors[stored.name].read(0, math.prod(stored.shape[:-1]))
    assert not isinstance(found, Quantised)  # check_plan
    copy(rows, found.reshape(size))
    if part.minus:
        rows -= np.float32(part.minus)
    if not in_place:
        store.put(target, rows)
    return _n_bytes(target)


def _n_bytes(part: DeviceArray | Matrix) -> int:
    n: int = part.n_bytes if isinstance(part, Matrix) else part.nbytes
    return n


def fill_dummy(
    weights: Parts,
    seed: int,
    draw_vector: Callable[[str, tuple[int, ...], np.random.Generator], Array],
    store: Store,
    progress: Progress | None,
    own: Mapping[str, DeviceArray | Matrix] | None = None,
) -> None:
    """Random values, the same for the same seed on every device: for benches, where only sizes matter.

    Matrices have unit fan-in, so activations keep their magnitude, and are tiled from one block of a few
    million normals, since drawing each would take minutes at the large sizes. draw_vector: float32 values of
    the part of this name, of this size. own: the parts that are filled, of weights that are not all here.
    """
    generator = np.random.default_rng(seed)
    block = generator.standard_normal(_DUMMY_BLOCK, np.float32)
    scaled: dict[float, Array] = {}
    named = dict(weights.named_parts())
    own = named if own is None else own
    total, done, offset = sum(map(_n_bytes, own.values())), 0, 0
    for name, part in named.items():
        here = own.get(name)
        if not isinstance(part, Matrix) and part.itemsize == 4:
            values = draw_vector(name, tuple(part.shape), generator)
            if here is not None:
                assert not isinstance(here, Matrix)
                store.put(here, values)
        else:
            scale = part.k**-0.5 if isinstance(part, Matrix) and name != "embed" else 0.1
            if scale not in scaled:
                scaled[scale] = (block * np.float32(scale)).astype(bfloat16)
            targets = () if here is None else here.segments if isinstance(here, Matrix) else (here,)
            for i in range(len(part.segments) if isinstance(part, Matrix) else 1):
                offset = (offset + 7919 * 131) % _DUMMY_BLOCK
                if targets:
                    store.tile(targets[i], scaled[scale], offset)
        done += 0 if here is None else _n_bytes(here)
        if progress is not None:
            progress(done, total)


def format_of(role: Role, quantize: str | None) -> WeightFormat:
    """The format of a matrix of this role that is stored in 16 or 32 bits. quantize: the precision asked for,
    None: bfloat16.
    """
    if quantize is None or role == "kept":
        return WEIGHT_FORMATS["bf16"]
    if role == "sensitive":
        return WEIGHT_FORMATS["bf16" if quantize == "fp8" else "int8"]
    return WEIGHT_FORMATS[quantize]
