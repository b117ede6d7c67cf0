"""Loading weights: what every model shares, from safetensors files to packed matrices.

A model declares each part once (`Declaration`): sizes, and the stored tensors that fill it, whose formats it
keeps. From this follow empty weights, their bytes, and the plan of loading: stored tensors are checked
against the files, and put together from mapped memory a block of rows at a time, on several threads. A block
is packed at once, so the peak stays near the size of the packed weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from deltic.models.fields import CheckpointError, read_json
from deltic.models.gguf import is_gguf, open_gguf
from deltic.models.gguf_config import in_metadata, n_trunk_layers
from deltic.models.gguf_tensors import name_in_file, tower_name_in_file
from deltic.models.gguf_tensors import stored_tensors as tensors_of_gguf
from deltic.models.layouts import Plain
from deltic.models.mapped import Header, MappedFiles, read_header
from deltic.models.stored import StoredTensor, formats_of, one_name
from deltic.models.tensors import quantization_config
from deltic.models.tensors import stored_tensors as tensors_of_files
from deltic.ops.arrays import Array, bfloat16, copy, nothing, raw, zeros
from deltic.ops.formats import BLOCK_ROWS, WEIGHT_FORMATS, Quantised, WeightFormat
from deltic.ops.matrix import PANEL, Layout, Matrix, Segment

Progress = Callable[[int, int], None]  # bytes done, bytes in all


Role = Literal["plain", "sensitive", "kept"]
"""Role of a matrix: the precision it may lose when weights are quantised.

A plain one takes the precision that is asked for. A sensitive one keeps 8 bits of int4, and 16 of fp8: the
head and the last layer's `down`, whose errors nothing evens out any more, and the embedding, which is often
the head. One that is kept stays as stored: a router, whose near-ties decide which experts run, and what is
read for few rows.
"""


INDEX = "model.safetensors.index.json"
"""The file that says where each tensor is."""

PACKED = "packed.safetensors"
"""The weights of a packed model (packed.py)."""


_SIZED_BY = (
    (r"linear_attn\.", "linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim"),
    (r"self_attn\.(q|o)_", "num_attention_heads, head_dim"),
    (r"self_attn\.", "num_key_value_heads, head_dim"),
    (r"shared_expert\.", "shared_expert_intermediate_size"),
    (r"experts\.", "num_experts, moe_intermediate_size"),
    (r"mlp\.gate\.", "num_experts"),
    (r"(gate|up|down)_proj\.", "intermediate_size"),
    (r"^(lm_head|model\.(language_model\.)?embed_tokens)\.", "vocab_size"),
)
"""The fields of config.json that size tensors of a language model, beside hidden_size, by their names."""


_MLX = (
    "an MLX checkpoint (mlx-community, LM Studio), whose tensors are stored in another way; give the model that it was "
    "made of, or a GGUF file of it"
)

_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.k_scale|\.v_scale)$")


_STORED_DTYPES = ("BF16", "F16", "F32")


_PLAIN: Mapping[str, WeightFormat] = MappingProxyType({})
"""The formats of a checkpoint that holds nothing quantised."""

Unused = Mapping[str, tuple[str, ...]]
"""Parts of a model that may be stored and are not run, with the prefixes of their names."""

_ALL_USED: Unused = MappingProxyType({})

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


class Skipped(str):
    """A notice of the tensors of a part of a model that is stored and not run."""

    part: str

    def __new__(cls, part: str, n: int) -> Skipped:
        notice = super().__new__(cls, f"skipped {n} {part} tensors: only the text stack is run")
        notice.part = part
        return notice

    @classmethod
    def read(cls, notice: str) -> str:
        """The notice from its text: a Skipped if it is one."""
        found = re.fullmatch(r"skipped (\d+) (\w+) tensors: only the text stack is run", notice)
        return notice if found is None else cls(found[2], int(found[1]))


def without_skipped(notices: list[str], part: str) -> list[str]:
    """The notices but those of a part that was skipped and is not missed."""
    return [notice for notice in notices if not (isinstance(notice, Skipped) and notice.part == part)]


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

    def named_parts(self) -> Iterator[tuple[str, Any | Matrix]]:
        """Every part with its path, such as `layers.3.mlp.gate_up`.

        One that is there twice, as a tied head, by its first only.
        """
        seen = set()
        for name, part in _walk("", self):
            if id(part) not in seen:
                seen.add(id(part))
                yield name, part

    def named_memory(self) -> Iterator[tuple[str, Any]]:
        """The memory of every part: vectors and tables, and the packed bytes of every segment of a matrix,
        which has a number of its own where there are several.
        """
        for name, part in self.named_parts():
            if isinstance(part, Matrix):
                for i, segment in enumerate(part.segments):
                    yield name if len(part.segments) == 1 else f"{name}.{i}", segment.data
            else:
                yield name, part

    def experts(self) -> dict[str, Any]:
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


def _walk(path: str, owner: object) -> Iterator[tuple[str, Any | Matrix]]:
    if isinstance(owner, list):
        for i, item in enumerate(owner):
            yield from _walk(f"{path}.{i}", item)
    elif dataclasses.is_dataclass(owner) and not isinstance(owner, Matrix):
        for each in dataclasses.fields(owner):
            yield from _walk(f"{path}.{each.name}".lstrip("."), getattr(owner, each.name))
    elif owner is not None:
        yield path, owner


def transposed(part: Any) -> Any:
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

    def put(self, part: Any | Segment, rows: Array | Quantised, first: int = 0) -> None:
        """Stores rows on the host, [rows, k], in a vector or table, or packed in a segment: bfloat16,
        quantised as the segment's format says, or in that format. first: where in the segment, at whole
        panels; of several matrices: as many rows for each.
        """

    def tile(self, part: Any | Segment, block: Array, offset: int) -> None:
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
        rows = rows if isinstance(rows, Quantised) else _rows(rows, part.k)
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


def _rows(values: Array, k: int) -> Array:
    return values.reshape(-1, k)


@dataclass(frozen=True)
class Planned:
    """A part, and the stored tensors that it is put together from, in the order of its rows."""

    target: Any | Matrix
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


def _identity(path: Path) -> tuple[object, ...]:
    """Identifies the files of a checkpoint, so that changed ones are read anew."""
    files = sorted(path.glob("*.safetensors*")) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.exists()]
    return tuple((file, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in stats)


def read_headers(path: Path) -> dict[str, Header]:
    """Reads the headers of all files of a checkpoint. They are kept until a file changes, or
    `forget_headers`, since a start asks for them several times. Raises CheckpointError.
    """
    return dict(_headers_of(path, _identity(path)))


def forget_headers() -> None:
    """Frees what `read_headers` keeps: a model that is loaded needs none."""
    _headers_of.cache_clear()


@lru_cache(maxsize=2)  # a speech model has two directories
def _headers_of(path: Path, identity: tuple[object, ...]) -> Mapping[str, Header]:
    headers: dict[str, Header] = {}
    for file, promised in checkpoint_files(path).items():
        found, metadata = read_header(file)
        if metadata.get("format") == "mlx":
            raise CheckpointError(f"{file}: {_MLX}")
        for name in promised:
            if name not in found:
                raise CheckpointError(f"{file}: {INDEX} lists tensor {name!r} here, but it is missing")
        for name in found.keys() & headers.keys():
            raise CheckpointError(f"tensor {name!r} is stored twice: in {headers[name].file} and in {file}")
        headers |= found
    return MappingProxyType(headers)


def open_tensors(path: Path, unused: Unused = _ALL_USED) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, a directory or a file, by the names of its bfloat16 release.

    Those of unused parts may be in formats that are not supported; of safetensors they are as in the files.
    Raises CheckpointError.
    """
    prefixes = tuple(prefix for each in unused.values() for prefix in each)
    if is_gguf(path):
        return tensors_of_gguf(open_gguf(path), prefixes)
    config = (path if path.is_dir() else path.parent) / "config.json"
    headers, files = read_headers(path), MappedFiles()
    skipped = {name: headers.pop(name) for name in list(headers) if name.startswith(prefixes)}
    said = read_json(config) if config.exists() else {}
    if isinstance(of_mlx := said.get("quantization"), Mapping):
        bits, group = of_mlx.get("bits"), of_mlx.get("group_size")
        raise CheckpointError(f"{config}: quantization: {bits!r} bits in groups of {group!r}: {_MLX}")
    found = tensors_of_files(headers, said)
    method = quantization_config(said).get("quant_method")
    if method in ("fp8", "awq", "gptq") and all(tensor.format is None for tensor in found.values()):
        raise CheckpointError(f"{config}: quantization_config.quant_method is {method!r}, and no tensor is quantised")
    return found | {name: Plain(files, name, header) for name, header in skipped.items()}


def open_part(path: Path, prefixes: tuple[str, ...]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files whose names begin so, and nothing of the others.

    Raises CheckpointError.
    """
    config = (path if path.is_dir() else path.parent) / "config.json"
    headers = {name: header for name, header in read_headers(path).items() if name.startswith(prefixes)}
    return tensors_of_files(headers, read_json(config) if headers and config.exists() else {})


def stored_formats(directory: Path, unused: Unused = _ALL_USED) -> dict[str, WeightFormat]:
    """The formats of a model's quantised tensors (`stored.formats_of`), in a packed model too.

    Raises CheckpointError.
    """
    packed = directory / PACKED
    if not packed.exists():
        return formats_of(open_tensors(directory, unused))
    _, metadata = read_header(packed)
    try:
        return {name: WEIGHT_FORMATS[format] for name, format in json.loads(metadata.get("formats", "{}")).items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{packed}: packed in formats that are not known here ({error}); it must be packed again"
        ) from error


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
            values = _rows(values, segment.k)
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


def _n_bytes(part: Any | Matrix) -> int:
    n: int = part.n_bytes if isinstance(part, Matrix) else part.nbytes
    return n


def fill_dummy(
    weights: Parts,
    seed: int,
    draw_vector: Callable[[str, tuple[int, ...], np.random.Generator], Array],
    store: Store,
    progress: Progress | None,
) -> None:
    """Random values, the same for the same seed on every device: for benches, where only sizes matter.

    Matrices have unit fan-in, so activations keep their magnitude, and are tiled from one block of a few
    million normals, since drawing each would take minutes at the large sizes. draw_vector: float32 values of
    the part of this name, of this size.
    """
    generator = np.random.default_rng(seed)
    block = generator.standard_normal(_DUMMY_BLOCK, np.float32)
    scaled: dict[float, Array] = {}
    total, done, offset = weights.n_bytes, 0, 0
    for name, part in weights.named_parts():
        if not isinstance(part, Matrix) and part.itemsize == 4:
            store.put(part, draw_vector(name, tuple(part.shape), generator))
        else:
            scale = part.k**-0.5 if isinstance(part, Matrix) and name != "embed" else 0.1
            if scale not in scaled:
                scaled[scale] = (block * np.float32(scale)).astype(bfloat16)
            for one in part.segments if isinstance(part, Matrix) else (part,):
                offset = (offset + 7919 * 131) % _DUMMY_BLOCK
                store.tile(one, scaled[scale], offset)
        done += _n_bytes(part)
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


def _names_of(path: Path) -> tuple[Callable[[str], str], str, Callable[..., str]]:
    """Returns texts for messages: how a file names a tensor of the bfloat16 checkpoint, what says its size,
    and in which fields. For a missing one they say also where its layer comes from.
    """

    def said_by(name: str, is_missing: bool = False) -> str:
        if not name.startswith(("model.", "lm_head.", "mtp.")):
            return ""
        fields = next((f"{fields}, " for pattern, fields in _SIZED_BY if re.search(pattern, name)), "") + "hidden_size"
        fields = f"num_hidden_layers, layer_types, full_attention_interval, {fields}" if is_missing else fields
        return f" ({in_metadata(fields, path) if is_gguf(path) else fields})"

    if not is_gguf(path):
        return str, "config.json", said_by
    model = open_gguf(path)
    is_tower = model.get("general.architecture") == "clip"
    called = tower_name_in_file if is_tower else partial(name_in_file, n_layers=n_trunk_layers(model))
    return called, "metadata", said_by


def check_plan(
    plan: list[Planned], tensors: Mapping[str, StoredTensor], path: Path, unused: Unused = _ALL_USED
) -> list[str]:
    """Compares what is stored with what is needed, before anything is read. Returns notices for the user."""
    converted: Counter[str] = Counter()
    called, config, said_by = _names_of(path)
    needed = [(stored, part.target) for part in plan for stored in part.stored]
    for stored, target in needed:
        tensor = tensors.get(stored.name)
        if tensor is None:
            raise CheckpointError(
                f"{path}: tensor {called(stored.name)!r} is missing; expected shape {list(stored.shape)}. "
                f"Is the download complete, and is the {config} that of this checkpoint{said_by(stored.name, True)}?"
            )
        if tensor.shape != stored.shape:
            raise CheckpointError(
                f"{tensor.where} has the wrong shape: expected {list(stored.shape)} by {config}{said_by(stored.name)}, "
                f"found {list(tensor.shape)}; configuration and weights do not belong together, get both anew"
            )
        taken = [segment.format for segment in target.segments] if isinstance(target, Matrix) else []
        if tensor.dtype not in _STORED_DTYPES and tensor.format not in taken:
            raise CheckpointError(
                f"{tensor.where} has the wrong dtype: expected {', '.join(_STORED_DTYPES)}, found {tensor.dtype}"
            )
        if tensor.format is None and tensor.dtype != "BF16" and isinstance(target, Matrix):
            converted[tensor.dtype] += 1

    skipped: Counter[str] = Counter()
    unexpected = []
    for name in sorted(set(tensors).difference(stored.name for stored, _ in needed)):
        part = next((part for part, prefixes in unused.items() if name.startswith(prefixes)), None)
        if part is not None:
            skipped[part] += 1
        elif not _IGNORED.search(name):
            unexpected.append(name)
    if unexpected:
        first = ", ".join(repr(called(n)) for n in unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
        raise CheckpointError(
            f"{tensors[unexpected[0]].where}: {len(unexpected)} unexpected tensors: {first}. "
            f"The {config} does not describe this checkpoint{said_by(unexpected[0], True)}, or it holds an adapter."
        )
    told = [f"converted {n} matrices from {dtype} to BF16" for dtype, n in converted.items()]
    return [*(Skipped(part, n) for part, n in skipped.items()), *told]


def checkpoint_files(path: Path) -> dict[Path, list[str]]:
    """The files of a checkpoint, each with the names that the index promises in it."""
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory or safetensors file")
    index = path / INDEX
    if not index.exists():
        single = path / "model.safetensors"
        found = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path}: no *.safetensors file here, and no other format is supported")
        return {file: [] for file in found}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files, found {weight_map!r}")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: tensor {name!r} must map to a file name, found {file!r}")
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {names[0]!r} must map to a file name, found {file!r}")
        if not (path / file).exists():
            raise CheckpointError(f"{path / file}: {INDEX} lists this shard, but it is missing; download it again")
    return {path / file: names for file, names in by_file.items()}
