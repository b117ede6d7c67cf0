"""Loading weights: what every model shares, from safetensors files to packed matrices.

A model declares each part once (`Declaration`): sizes, format, and the stored tensors that fill it. From this
follow empty weights, their bytes, and the plan of loading: stored tensors are checked against the files, put
together one matrix at a time from mapped memory, and packed at once, so the peak stays near the size of the
packed weights. Left out: checkpoints that are quantised already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltic.models.fields import CheckpointError, read_json
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


# A mapped file counts as resident as far as it was read: map it afresh after this much.
_REMAP_BYTES = 1 << 28


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

    def named_parts(self) -> Iterator[tuple[str, Tensor | Matrix]]:
        """Every part with its path, such as `layers.3.mlp.gate_up`.

        One that is there twice, as a tied head, by its first only.
        """
        seen = set()
        for name, part in _walk("", self):
            if id(part) not in seen:
                seen.add(id(part))
                yield name, part

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The memory of every part: vectors and tables, and the packed bytes of every matrix."""
        for name, part in self.named_parts():
            yield name, _memory(part)

    def replace(self, memory: dict[str, Tensor]) -> None:
        """Puts other memory, as bytes by the names of `named_tensors`, in the place of every part's."""
        for name, part in list(self.named_parts()):
            flat = memory[name]
            new = (
                dataclasses.replace(part, data=flat.view(part.data.shape))
                if isinstance(part, Matrix)
                else flat.view(part.dtype).view(part.shape)
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
        return sum(tensor.nbytes for _, tensor in self.named_tensors())


def _walk(path: str, owner: Any) -> Iterator[tuple[str, Tensor | Matrix]]:
    if isinstance(owner, Tensor | Matrix):
        yield path, owner
    elif isinstance(owner, list):
        for i, item in enumerate(owner):
            yield from _walk(f"{path}.{i}", item)
    elif owner is not None:
        for each in dataclasses.fields(owner):
            yield from _walk(f"{path}.{each.name}".lstrip("."), getattr(owner, each.name))


def _memory(part: Tensor | Matrix) -> Tensor:
    return part.data if isinstance(part, Matrix) else part


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

    def place(self, source: Tensor, rows: Tensor) -> None:
        """Copies the stored tensor into its rows of a part, [all sizes together, K]."""
        source = source.reshape(self.n_groups, -1, rows.shape[1])
        start = self.first
        for target in rows.split(self.sizes):
            n = len(target) // self.n_groups
            target.view(self.n_groups, n, -1).copy_(source[:, start : start + n])
            start += n


@dataclass(frozen=True)
class Planned:
    """A part, and the stored tensors that it is put together from, in the order of its rows."""

    target: Tensor | Matrix
    stored: tuple[Stored, ...]
    minus: float = 0.0
    """What is subtracted from every value."""


class Declaration:
    """Makes the parts of a model's weights, uninitialised, each from the one place that says what it is:
    sizes, format, and the stored tensors that fill it, which `plan` keeps in the order of declaration. On the
    device "meta" a part has no memory.
    """

    def __init__(self, quantize: str | None, device: str | None = None, layout: Layout = "strips") -> None:
        self.quantize, self.device, self.layout = quantize, device, layout
        self.plan: list[Planned] = []

    def vector(self, name: str, *size: int, shape: tuple[int, ...] = (), minus: float = 0.0) -> Tensor:
        """float32 [size]. shape: as stored, where that is another."""
        target = torch.empty(size, dtype=torch.float32, device=self.device)
        self.plan.append(Planned(target, (Stored(name, size[:1], shape=shape or size),), minus))
        return target

    def table(self, name: str, n: int, k: int) -> Tensor:
        """bfloat16 [n, k], of which single rows are read."""
        target = torch.empty(n, k, dtype=torch.bfloat16, device=self.device)
        self.plan.append(Planned(target, (Stored(name, (n,), shape=(n, k)),)))
        return target

    def matrix(self, k: int, *stored: Stored, role: Role = "plain", n_matrices: int = 1) -> Matrix:
        """n_matrices of [n, k], of the rows of all that is stored."""
        n = sum(sum(one.sizes) for one in stored) // n_matrices
        target = Matrix.empty(n, k, format_of(role, self.quantize, self.layout), n_matrices, self.device)
        known = (dataclasses.replace(one, shape=one.shape or (sum(one.sizes), k)) for one in stored)
        self.plan.append(Planned(target, tuple(known)))
        return target

    def mlp(self, p: str, width: int, h: int, down: Role) -> Mlp:
        """SwiGLU under the prefix p; down: the role of that matrix."""
        return Mlp(
            gate_up=self.matrix(h, Stored(f"{p}gate_proj.weight", (width,)), Stored(f"{p}up_proj.weight", (width,))),
            down=self.matrix(width, Stored(f"{p}down_proj.weight", (h,)), role=down),
        )


@dataclass(frozen=True)
class Header:
    """What a file says about one tensor, known without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(path: Path) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for file, promised in checkpoint_files(path).items():
        with _opened(file) as handle:
            stored = set(handle.keys())
            for name in promised:
                if name not in stored:
                    raise CheckpointError(f"{file}: {_INDEX} lists tensor {name!r} here, but it is missing")
            for name in stored:
                if name in headers:
                    other = headers[name].file
                    raise CheckpointError(f"tensor {name!r} is stored twice: in {other} and in {file}")
                view = handle.get_slice(name)
                headers[name] = Header(file, tuple(view.get_shape()), str(view.get_dtype()))
    return headers


@dataclass
class Files:
    """The memory-mapped files, kept open while tensors are read from them."""

    headers: dict[str, Header]
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _handles: dict[Path, Any] = field(default_factory=dict)
    _n_read: int = 0

    def read(self, name: str) -> Tensor:
        header = self.headers[name]
        if self._n_read > _REMAP_BYTES:
            self.close()
        if header.file not in self._handles:
            self._handles[header.file] = self._open.enter_context(_opened(header.file))
        try:
            tensor: Tensor = self._handles[header.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(header.file, error) from error
        self._n_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        self._open.close()
        self._handles.clear()
        self._n_read = 0


def copy_parts(plan: list[Planned], files: Files, progress: Progress | None, n_threads: int) -> None:
    """Puts every part together in rows, those of a matrix in bfloat16, and packs it."""
    total, done = sum(_memory(part.target).nbytes for part in plan), 0
    for part in plan:
        target = part.target
        if isinstance(target, Matrix):
            rows = torch.empty(target.data.shape[0] * target.n, target.k, dtype=torch.bfloat16)
        else:
            rows = target.view(len(target), -1)
        sizes = [sum(stored.sizes) for stored in part.stored]
        for stored, own in zip(part.stored, rows.split(sizes), strict=True):
            stored.place(files.read(stored.name), own)
        if part.minus:
            rows -= part.minus
        if isinstance(target, Matrix):
            target.pack(rows, n_threads)
        done += _memory(target).nbytes
        if progress is not None:
            progress(done, total)
    files.close()


def fill_dummy(
    weights: Parts,
    seed: int,
    fill_vector: Callable[[str, Tensor, torch.Generator], None],
    progress: Progress | None,
    n_threads: int,
) -> None:
    """Random values, the same for the same seed on every device: for benches, where only sizes matter.

    Matrices have unit fan-in, so activations keep their magnitude, and are tiled from one block of a few
    million normals, since drawing each would take minutes at the large sizes. fill_vector: draws a vector,
    float32 on the CPU, of the part of this name.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_DUMMY_BLOCK, generator=generator)
    scaled: dict[float, Tensor] = {}
    total, done, offset = weights.n_bytes, 0, 0
    for name, part in weights.named_parts():
        memory = _memory(part)
        if isinstance(part, Tensor) and part.dtype == torch.float32:
            values = torch.empty(part.shape)
            fill_vector(name, values, generator)
            part.copy_(values)
        else:
            scale = part.k**-0.5 if isinstance(part, Matrix) and name != "embed" else 0.1
            if scale not in scaled:
                scaled[scale] = (block * scale).to(memory.device, torch.bfloat16)
            offset = (offset + 7919 * 131) % _DUMMY_BLOCK
            if isinstance(part, Matrix):
                size = (len(part.data) * part.n, part.k)
                rows = torch.empty(size, dtype=torch.bfloat16, device=memory.device)
                _tile(rows.view(-1), scaled[scale], offset)
                part.pack(rows, n_threads)
            else:
                _tile(part.view(-1), scaled[scale], offset)
        done += memory.nbytes
        if progress is not None:
            progress(done, total)


def _tile(flat: Tensor, block: Tensor, offset: int) -> None:
    n = min(flat.numel(), block.numel() - offset)
    flat[:n].copy_(block[offset : offset + n])
    for rest in torch.split(flat[n:], block.numel()):
        rest.copy_(block[: rest.numel()])


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


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The memory-mapped file; what goes wrong with it becomes a CheckpointError that names it."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: damaged or unreadable ({error}); download it again")


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
