"""Loading weights: what every model shares, from safetensors files to packed matrices.

A model names its stored tensors and their place (`Stored`); here they are checked against the files, put together one
matrix at a time from mapped memory, and packed at once, so the peak stays near the size of the packed weights.
Left out: checkpoints that are quantised already, the vision tower and the MTP head.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltic.models.fields import CheckpointError, read_json
from deltic.ops.contract import check
from deltic.ops.matrix import FORMATS, ROWS, Layout, Matrix, MatrixFormat

Progress = Callable[[int, int], None]  # bytes done, bytes in all


Role = Literal["plain", "sensitive", "kept"]
"""How much a matrix may lose when weights are quantised. A plain one takes the precision that is asked for. A sensitive one keeps 8
bits of int4: the head and the last layer's `down`, whose errors nothing evens out any more, and the embedding, which is often the
head. One that is kept stays as stored: a router, whose near-ties decide which experts run, and what is read for few rows."""


_INDEX = "model.safetensors.index.json"


_SKIPPED = {"vision": ("model.visual.", "visual."), "MTP": ("mtp.",)}


_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.k_scale|\.v_scale)$")


_STORED_DTYPES = ("BF16", "F16", "F32")


# A mapped file counts as resident as far as it was read: map it afresh after this much.
_REMAP_BYTES = 1 << 28


DUMMY_BLOCK = 4_194_301  # prime, so that no two rows of a tiled matrix start at the same element


@dataclass
class Mlp:
    """SwiGLU of width F. `gate_up` rows: gate, then up."""

    gate_up: Matrix  # [2F, H]
    down: Matrix  # [H, F]


def replace_parts(weights: Any, parts: dict[str, Tensor | Matrix], memory: dict[str, Tensor]) -> None:
    """Puts other memory, as bytes, in the place of the parts', which are found in `weights` by the steps of their names."""
    for name, part in parts.items():
        flat, owner = memory[name], weights
        new = (
            dataclasses.replace(part, data=flat.view(part.data.shape))
            if isinstance(part, Matrix)
            else flat.view(part.dtype).view(part.shape)
        )
        *path, last = name.split(".")
        for step in path:
            owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
        if last.isdigit():
            owner[int(last)] = new
        else:
            setattr(owner, last, new)


@dataclass(frozen=True)
class Stored:
    """One checkpoint tensor, the part of the internal layout that it belongs to, and where its rows go there.

    The rows are `n_groups` equal groups, each holding a share of every range of rows, one after another:
    so Next interleaves q, k, v and z by key head, and every family interleaves query and gate by head.
    A plain tensor is one group with one range, by default all rows.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor | Matrix
    ranges: tuple[tuple[int, int], ...] = ()
    n_groups: int = 1
    first: int = 0
    """The first row of a group that is wanted."""

    def place(self, source: Tensor, rows: Tensor) -> None:
        """Copies the stored tensor into its rows of the target as [N, K], or as it is when it has no ranges."""
        if not self.ranges:
            rows.view(-1).copy_(source.reshape(-1))
            return
        source = source.reshape(self.n_groups, -1, rows.shape[1])
        start = self.first
        for first, n in self.ranges:
            target = rows[first : first + n].view(self.n_groups, -1, rows.shape[1])
            target.copy_(source[:, start : start + target.shape[1]])
            start += target.shape[1]


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


def copy_parts(plan: list[Stored], files: Files, progress: Progress | None, n_threads: int) -> None:
    """Puts every part together in rows of bfloat16, and packs it."""
    sizes = {
        id(s.target): s.target.nbytes if isinstance(s.target, Tensor) else s.target.n_bytes for s in plan
    }
    total, done = sum(sizes.values()), 0
    for _, group in groupby(plan, key=lambda stored: id(stored.target)):
        stored = list(group)
        target = stored[0].target
        if isinstance(target, Matrix):
            rows = torch.empty(target.data.shape[0] * target.n, target.k, dtype=torch.bfloat16)
        else:
            rows = target
        for part in stored:
            part.place(files.read(part.name), rows)
        if isinstance(target, Matrix):
            target.pack(rows, n_threads)
        done += sizes[id(target)]
        if progress is not None:
            progress(done, total)
    files.close()


def tile(flat: Tensor, block: Tensor, offset: int) -> None:
    n = min(flat.numel(), block.numel() - offset)
    flat[:n].copy_(block[offset : offset + n])
    for rest in torch.split(flat[n:], block.numel()):
        rest.copy_(block[: rest.numel()])


def format_of(role: Role, quantize: str | None, layout: Layout = "strips") -> MatrixFormat:
    """The format of a matrix of this role. quantize: the precision asked for, None: as stored. Raises KernelError for a precision
    that the layout does not have."""
    if layout == "rows":
        check("weights", quantize is None, f"bfloat16: there are no rows in {quantize}")
        return ROWS
    if quantize is None or role == "kept":
        return FORMATS["bf16"]
    return FORMATS["int8" if role == "sensitive" else quantize]


def in_order(*sizes: int) -> list[tuple[int, int]]:
    """Ranges (first row, rows) that follow one another."""
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def plan_swiglu(gate_up: Matrix, down: Matrix, p: str) -> Iterator[Stored]:
    width, h = down.k, down.n
    gate, up = in_order(width, width)
    yield Stored(f"{p}gate_proj.weight", (width, h), gate_up, (gate,))
    yield Stored(f"{p}up_proj.weight", (width, h), gate_up, (up,))
    yield Stored(f"{p}down_proj.weight", (h, width), down)


def check_plan(plan: list[Stored], headers: dict[str, Header], path: Path) -> list[str]:
    """Compare what is stored with what is needed, before anything is read; returns notices for the user."""
    converted: Counter[str] = Counter()
    for stored in plan:
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
        if header.dtype != "BF16" and isinstance(stored.target, Matrix):
            converted[header.dtype] += 1

    skipped: Counter[str] = Counter()
    unexpected = []
    for name in sorted(set(headers).difference(s.name for s in plan)):
        part = next((part for part, prefixes in _SKIPPED.items() if name.startswith(prefixes)), None)
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
