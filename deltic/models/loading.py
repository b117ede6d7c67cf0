"""Loading weights: what every model shares, from safetensors files to packed matrices.

A model declares each part once (`Declaration`): sizes, format, and the stored tensors that fill it. From this
follow empty weights, their bytes, and the plan of loading: stored tensors are checked against the files, put
together one matrix at a time from mapped memory, and packed at once, so the peak stays near the size of the
packed weights. Left out: checkpoints that are quantised already.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike

from deltic.models.fields import CheckpointError, read_json
from deltic.models.mapped import Header, MappedFiles, read_header
from deltic.ops.arrays import Array, bfloat16, copy, nothing, zeros
from deltic.ops.contract import check
from deltic.ops.matrix import FORMATS, ROWS, Layout, Matrix, MatrixFormat

Progress = Callable[[int, int], None]  # bytes done, bytes in all


Role = Literal["plain", "sensitive", "kept"]
"""How much a matrix may lose when weights are quantised.

A plain one takes the precision that is asked for. A sensitive one keeps 8 bits of int4: the head and the last
layer's `down`, whose errors nothing evens out any more, and the embedding, which is often the head. One that
is kept stays as stored: a router, whose near-ties decide which experts run, and what is read for few rows.
"""


_INDEX = "model.safetensors.index.json"


_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.k_scale|\.v_scale)$")


_STORED_DTYPES = ("BF16", "F16", "F32")


_DUMMY_BLOCK = 4_194_301  # prime, so that no two rows of a tiled matrix start at the same element


@dataclass
class Mlp:
    """SwiGLU of width F. `gate_up` rows: gate, then up."""

    gate_up: Matrix  # [2F, H]
    down: Matrix  # [H, F]


class Parts:
    """Weights of a model, as a base of dataclasses: vectors, tables and packed matrices, in further
    dataclasses and lists.
    """

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
        """The memory of every part: vectors and tables, and the packed bytes of every matrix."""
        for name, part in self.named_parts():
            yield name, _memory(part)

    def replace(self, memory: dict[str, Array]) -> None:
        """Puts other memory, as bytes by the names of `named_memory`, in the place of every part's."""
        for name, part in list(self.named_parts()):
            flat = memory[name]
            new = (
                dataclasses.replace(part, data=flat.reshape(part.data.shape))
                if isinstance(part, Matrix)
                else flat.view(part.dtype).reshape(part.shape)
            )
            owner: Any = self
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


def _walk(path: str, owner: Any) -> Iterator[tuple[str, Any | Matrix]]:
    if isinstance(owner, list):
        for i, item in enumerate(owner):
            yield from _walk(f"{path}.{i}", item)
    elif dataclasses.is_dataclass(owner) and not isinstance(owner, Matrix):
        for each in dataclasses.fields(owner):
            yield from _walk(f"{path}.{each.name}".lstrip("."), getattr(owner, each.name))
    elif owner is not None:
        yield path, owner


def _memory(part: Any | Matrix) -> Any:
    return part.data if isinstance(part, Matrix) else part


def transposed(part: Any) -> Any:
    """The transpose of a table, in memory of its own."""
    return np.ascontiguousarray(part.T) if isinstance(part, np.ndarray) else part.T.contiguous()


class Store(Protocol):
    """Where weights live: what makes their memory, and puts values into it."""

    @property
    def layout(self) -> Layout:
        """Of the matrices."""

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Uninitialised memory of a part."""

    def put(self, part: Any | Matrix, rows: Array) -> None:
        """Stores rows, [all rows, k] on the host, in the part, a matrix packed."""

    def tile(self, part: Any | Matrix, block: Array, offset: int) -> None:
        """Fills a bfloat16 part with a block of values on the host, again and again, at first from offset
        on.
        """


@dataclass(frozen=True)
class Host:
    """Host memory, for the CPU's kernels."""

    n_threads: int = 1
    layout: Layout = "strips"

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Array:
        return zeros(size, dtype)

    def put(self, part: Any | Matrix, rows: Array) -> None:
        if isinstance(part, Matrix):
            part.pack(rows, self.n_threads)
        else:
            copy(part.reshape(rows.shape), rows)

    def tile(self, part: Any | Matrix, block: Array, offset: int) -> None:
        n = len(part.data) * part.n * part.k if isinstance(part, Matrix) else part.size
        flat = np.empty(n, bfloat16)
        at = min(n, len(block) - offset)
        copy(flat[:at], block[offset : offset + at])
        for begin in range(at, n, len(block)):
            copy(flat[begin : begin + len(block)], block[: n - begin])
        self.put(part, flat)


class Counted(Host):
    """Nowhere: weights without memory, of which sizes are asked. To put values there is a ValueError."""

    def empty(self, size: tuple[int, ...], dtype: DTypeLike) -> Array:
        return nothing(size, dtype)


HOST = Host()
COUNTED, COUNTED_ROWS = Counted(), Counted(layout="rows")


@dataclass(frozen=True)
class Stored:
    """One checkpoint tensor, and the rows of a part that it fills: `sizes` rows each, one range after
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
    """As stored; (): [all rows, K]."""

    def place(self, source: Array, rows: Array) -> None:
        """Copies the stored tensor into its rows of a part, [all sizes together, K]."""
        source = source.reshape(self.n_groups, -1, rows.shape[1])
        start, begin = self.first, 0
        for size in self.sizes:
            n, target = size // self.n_groups, rows[begin : begin + size]
            copy(target.reshape(self.n_groups, n, -1), source[:, start : start + n])
            start, begin = start + n, begin + size


@dataclass(frozen=True)
class Planned:
    """A part, and the stored tensors that it is put together from, in the order of its rows."""

    target: Any | Matrix
    stored: tuple[Stored, ...]
    dtype: DTypeLike = bfloat16
    """Of its rows, before they are packed."""
    minus: float = 0.0
    """What is subtracted from every value."""

    @property
    def n_rows(self) -> int:
        return sum(sum(stored.sizes) for stored in self.stored)


class Declaration:
    """Makes the parts of a model's weights, uninitialised, each from the one place that says what it is:
    sizes, format, and the stored tensors that fill it, which `plan` keeps in the order of declaration.
    """

    def __init__(self, quantize: str | None, store: Store) -> None:
        self.quantize, self.store = quantize, store
        self.plan: list[Planned] = []

    def vector(self, name: str, *size: int, shape: tuple[int, ...] = (), minus: float = 0.0) -> Any:
        """float32 [size]. shape: as stored, where that is another."""
        target = self.store.empty(size, np.float32)
        self.plan.append(Planned(target, (Stored(name, size[:1], shape=shape or size),), np.float32, minus))
        return target

    def table(self, name: str, n: int, k: int) -> Any:
        """bfloat16 [n, k], of which single rows are read."""
        target = self.store.empty((n, k), bfloat16)
        self.plan.append(Planned(target, (Stored(name, (n,), shape=(n, k)),)))
        return target

    def matrix(self, k: int, *stored: Stored, role: Role = "plain", n_matrices: int = 1) -> Matrix:
        """n_matrices of [n, k], of the rows of all that is stored."""
        n = sum(sum(one.sizes) for one in stored) // n_matrices
        format = format_of(role, self.quantize, self.store.layout)
        target = Matrix.empty(n, k, format, n_matrices, self.store.empty)
        known = (dataclasses.replace(one, shape=one.shape or (sum(one.sizes), k)) for one in stored)
        self.plan.append(Planned(target, tuple(known)))
        return target

    def mlp(self, p: str, width: int, h: int, down: Role) -> Mlp:
        """SwiGLU under the prefix p; down: the role of that matrix."""
        return Mlp(
            gate_up=self.matrix(h, Stored(f"{p}gate_proj.weight", (width,)), Stored(f"{p}up_proj.weight", (width,))),
            down=self.matrix(width, Stored(f"{p}down_proj.weight", (h,)), role=down),
        )


def read_headers(path: Path) -> dict[str, Header]:
    """Of all files of a checkpoint. Raises CheckpointError."""
    headers: dict[str, Header] = {}
    for file, promised in checkpoint_files(path).items():
        found, _ = read_header(file)
        for name in promised:
            if name not in found:
                raise CheckpointError(f"{file}: {_INDEX} lists tensor {name!r} here, but it is missing")
        for name in found.keys() & headers.keys():
            raise CheckpointError(f"tensor {name!r} is stored twice: in {headers[name].file} and in {file}")
        headers |= found
    return headers


def copy_parts(plan: list[Planned], headers: dict[str, Header], store: Store, progress: Progress | None) -> None:
    """Puts every part together in rows, those of a matrix in bfloat16, and stores it."""
    files = MappedFiles()
    total, done = sum(_memory(part.target).nbytes for part in plan), 0
    for part in plan:
        target, n = part.target, part.n_rows
        width = target.k if isinstance(target, Matrix) else math.prod(target.shape[1:])
        in_place = isinstance(target, np.ndarray)
        rows: Array = target.reshape(n, width) if in_place else np.empty((n, width), part.dtype)  # type: ignore[union-attr]
        begin = 0
        for stored in part.stored:
            end = begin + sum(stored.sizes)
            stored.place(files.read(headers[stored.name]), rows[begin:end])
            begin = end
        if part.minus:
            rows -= np.float32(part.minus)
        if not in_place:
            store.put(target, rows)
        done += _memory(target).nbytes
        if progress is not None:
            progress(done, total)


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
            offset = (offset + 7919 * 131) % _DUMMY_BLOCK
            store.tile(part, scaled[scale], offset)
        done += _memory(part).nbytes
        if progress is not None:
            progress(done, total)


def format_of(role: Role, quantize: str | None, layout: Layout = "strips") -> MatrixFormat:
    """The format of a matrix of this role. quantize: the precision asked for, None: as stored.

    Raises KernelError for a precision that the layout does not have.
    """
    if layout == "rows":
        check("weights", quantize is None, f"bfloat16: there are no rows in {quantize}")
        return ROWS
    if quantize is None or role == "kept":
        return FORMATS["bf16"]
    return FORMATS["int8" if role == "sensitive" else quantize]


def check_plan(
    plan: list[Planned],
    headers: dict[str, Header],
    path: Path,
    unused: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[str]:
    """Compare what is stored with what is needed, before anything is read; returns notices for the user.

    unused: parts of the model that may be stored and are not run, with the prefixes of their names.
    """
    converted: Counter[str] = Counter()
    needed = [(stored, part.target) for part in plan for stored in part.stored]
    for stored, target in needed:
        header = headers.get(stored.name)
        if header is None:
            raise CheckpointError(
                f"{path}: tensor {stored.name!r} is missing; expected shape {list(stored.shape)}. "
                "Is the download complete, and is the config that of this checkpoint?"
            )
        where = f"{header.file}: tensor {stored.name!r}"
        if header.shape != stored.shape:
            raise CheckpointError(
                f"{where} has the wrong shape: expected {list(stored.shape)} by config.json, found {list(header.shape)}; "
                "configuration and weights do not belong together, get both anew"
            )
        if header.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{where} has the wrong dtype: expected {', '.join(_STORED_DTYPES)}, found {header.dtype}"
            )
        if header.dtype != "BF16" and isinstance(target, Matrix):
            converted[header.dtype] += 1

    skipped: Counter[str] = Counter()
    unexpected = []
    for name in sorted(set(headers).difference(stored.name for stored, _ in needed)):
        part = next((part for part, prefixes in unused.items() if name.startswith(prefixes)), None)
        if part is not None:
            skipped[part] += 1
        elif not _IGNORED.search(name):
            unexpected.append(name)
    if unexpected:
        first = ", ".join(repr(n) for n in unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
        raise CheckpointError(
            f"{headers[unexpected[0]].file}: {len(unexpected)} unexpected tensors: {first}. "
            "The config does not describe this checkpoint, or it is quantised or holds an adapter."
        )
    notices = [f"skipped {n} {part} tensors: only the text stack is run" for part, n in skipped.items()]
    return notices + [f"converted {n} matrices from {dtype} to BF16" for dtype, n in converted.items()]


def checkpoint_files(path: Path) -> dict[Path, list[str]]:
    """The files of a checkpoint, each with the names that the index promises in it."""
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory or safetensors file")
    index = path / _INDEX
    if not index.exists():
        single = path / "model.safetensors"
        found = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path}: no *.safetensors file here, and no other format is supported")
        return {file: [] for file in found}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files, found {weight_map!r}")
    promised: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r} must map to a file name, found {file!r}")
        promised.setdefault(path / file, []).append(name)
    for file in promised:
        if not file.exists():
            raise CheckpointError(f"{file}: {_INDEX} lists this shard, but it is missing; download it again")
    return promised


def refuse_quantised(directory: Path) -> None:
    config_file = directory / "config.json"
    if not config_file.exists():
        return
    config = read_json(config_file)
    for fields in (config, config.get("text_config") or {}):
        quantisation = fields.get("quantization_config")
        if quantisation:
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
            raise CheckpointError(
                f"{config_file}: the checkpoint is quantised (quant_method {method!r}), "
                "which is not supported; use the bfloat16 release of this model"
            )
