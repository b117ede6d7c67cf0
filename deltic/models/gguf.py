"""GGUF files: what their headers say, and which files are one model.

A file is a header (metadata by key, then name, type, shape and offset of each tensor) and the tensors'
bytes. A model is one file, or the set `NAME-00001-of-0000N.gguf`, whose first file has the metadata. What
the metadata means is in models/gguf_config.py, what the tensors are in models/gguf_tensors.py.

The file is mapped. Strings and arrays are decoded when they are asked for: a vocabulary is most of a
header. No count in a file is believed before it fits into the file. No numpy: the HTTP process reads the
metadata.

Source: llama.cpp's docs (gguf.md) and gguf.cpp, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from deltic.models.fields import CheckpointError, mending

SUFFIX = ".gguf"

VERSIONS = (2, 3)

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
"""ggml's types by number: name, weights of a block, bytes of a block."""

PLAIN = ("F32", "F16", "BF16")
QUANTISED = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0", "Q2_0", "Q1_0",
)  # fmt: skip
"""The types that are read."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS, _MAX_DIMS = 1 << 16, 1 << 18, 1 << 24, 4
"""Far above any model; what would keep a loop busy over a file of zeros."""

_SHARD = re.compile(r"(?P<name>.+)-(?P<nth>\d{5})-of-(?P<n>\d{5})", re.IGNORECASE)

_NO_MODEL = re.compile(r"mmproj|imatrix|^mtp-", re.IGNORECASE)
"""Names of GGUF files that lie beside a model and are none: its vision tower, statistics, a draft head."""

_TOWER_TYPES = ("bf16", "f16", "f32")
"""Types of a vision tower, as its file's name says them. The first that is there is taken."""


class Value(NamedTuple):
    """Position of a value of the metadata. kind: type of a scalar, or of an array's elements. n: elements of
    an array. None for a scalar.
    """

    kind: int
    n: int | None
    begin: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its bytes are [begin, end) of the file, its rows, of shape[-1] weights each, whole blocks."""

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    """Shape as the bfloat16 checkpoint has it: ggml counts the other way round."""
    begin: int
    end: int

    @property
    def where(self) -> str:
        """Name of the tensor and its file, for messages."""
        return f"{self.file}: tensor {self.name!r}"


@dataclass
class Header:
    """Header of one file."""

    file: Path
    data: mmap.mmap | bytes
    values: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)

    def get(self, key: str, default: object = None) -> object:
        """The value of a key: a number, bool, str, or a list of one of them. Raises CheckpointError for text
        that is not UTF-8.
        """
        if (value := self.values.get(key)) is None:
            return default
        if value.kind != _STRING:
            read = struct.unpack_from(
                f"<{1 if value.n is None else value.n}{_SCALARS[value.kind]}", self.data, value.begin
            )
            numbers = [_decimal(x) for x in read] if value.kind == 6 else list(read)
            return numbers[0] if value.n is None else numbers
        texts, at, length = [], value.begin, struct.Struct("<Q").unpack_from
        try:
            for _ in range(1 if value.n is None else value.n):
                (n_bytes,) = length(self.data, at)
                texts.append(self.data[at + 8 : at + 8 + n_bytes].decode())
                at += 8 + n_bytes
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.file}: the text of {key!r} is not UTF-8 ({error}); {mending(self.file)}"
            ) from error
        return texts[0] if value.n is None else texts


@dataclass(frozen=True)
class Gguf:
    """A model: the headers of its files, the first with the metadata."""

    headers: tuple[Header, ...]

    @property
    def file(self) -> Path:
        """The first."""
        return self.headers[0].file

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(header.file for header in self.headers)

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key of the metadata, as of `Header`."""
        return self.headers[0].get(key, default)

    @functools.cached_property
    def tensors(self) -> dict[str, GgufTensor]:
        """Tensors of all files, by name. Raises CheckpointError for one that is there twice."""
        found: dict[str, GgufTensor] = {}
        for header in self.headers:
            for name in header.tensors.keys() & found.keys():
                raise CheckpointError(f"tensor {name!r} is stored twice: in {found[name].file} and in {header.file}")
            found |= header.tensors
        return found


def _decimal(x: float) -> float:
    """The shortest decimal number that a float32 may have been: 1e-6, not what it was rounded to."""
    if math.isfinite(x):
        raw = struct.pack("<f", x)
        for digits in range(6, 9):
            if struct.pack("<f", number := float(f"{x:.{digits}g}")) == raw:
                return number
    return x


class _CutShort(CheckpointError):
    """A file that ends in its header."""


class _Cursor:
    """Reads a header on, and ends at the end of the file with a CheckpointError."""

    def __init__(self, file: Path, data: mmap.mmap | bytes, n_bytes: int | None = None) -> None:
        """n_bytes: of the file, where the data are its beginning."""
        self.file, self.data, self.at = file, data, 0
        self.n_bytes = len(data) if n_bytes is None else n_bytes

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}; {mending(self.file)}")

    def skip(self, n_bytes: int) -> int:
        """Steps over n_bytes, and returns where they begin."""
        if n_bytes > len(self.data) - self.at:
            where = f"{n_bytes} bytes at {self.at} are not in its {len(self.data)}"
            raise _CutShort(f"{self.file}: cut short: {where}; {mending(self.file)}")
        begin, self.at = self.at, self.at + n_bytes
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, most: int) -> int:
        n: int = self.number("Q")
        if n > most:
            raise self.fail(f"damaged: {n} {what}")
        return n

    def text(self, most: int = 1 << 16) -> str:
        """A key or a name."""
        n = self.count("bytes in a name", most)
        begin = self.skip(n)
        try:
            return self.data[begin : begin + n].decode()
        except UnicodeDecodeError:
            raise self.fail(f"damaged: a name at {begin} is not UTF-8") from None

    def value(self, key: str) -> Value:
        """The next value of the metadata, passed over."""
        kind, n = self.number("I"), None
        if kind == _ARRAY:
            kind, n = self.number("I"), self.count(f"values in {key!r}", _MAX_ITEMS)
        begin = self.at
        if kind in _SCALARS:
            self.skip((1 if n is None else n) * struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING:
            data, size, at = self.data, len(self.data), begin
            n_strings, length = 1 if n is None else n, struct.Struct("<Q").unpack_from
            if n_strings > (self.n_bytes - at) // 8:
                raise self.fail(f"damaged: {n_strings} strings in {key!r}")
            for _ in range(n_strings):
                if at + 8 > size:
                    break
                at += 8 + length(data, at)[0]
            self.skip(at - begin)
        else:
            raise self.fail(f"damaged: {key!r} has a value of the unknown kind {kind}")
        return Value(kind, n, begin)


def _read_header(file: Path) -> Header:
    """Raises CheckpointError."""
    try:
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CheckpointError(f"{file}: cannot be read ({error}); {mending(file)}") from error
    cursor, header = _Cursor(file, data), Header(file, data)
    infos = _walk(cursor, header)
    alignment = header.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise cursor.fail(f"damaged: an alignment of {alignment!r}, which is no power of two")
    data_begin = -(-cursor.at // alignment) * alignment
    for name, number, shape, offset in infos:
        tensor = _tensor(file, name, number, shape, data_begin + offset)
        if offset % alignment or tensor.end > len(data):
            end = f"{tensor.end} of {len(data)} bytes; the download is not complete, or the file is damaged"
            raise cursor.fail(f"tensor {name!r} is at {tensor.begin} to {end}")
        if name in header.tensors:
            raise cursor.fail(f"damaged: tensor {name!r} is there twice")
        header.tensors[name] = tensor
    return header


def has_header(file: Path, start: bytes, n_bytes: int) -> bool:
    """Returns whether the beginning of a file of n_bytes has its whole header, or a header that is damaged
    there.
    """
    cursor = _Cursor(file, start, n_bytes)
    try:
        _walk(cursor, Header(file, start))
    except _CutShort:
        return False
    except CheckpointError:
        pass  # who reads the file says what is wrong
    return True


def _walk(cursor: _Cursor, header: Header) -> list[tuple[str, int, tuple[int, ...], int]]:
    """Puts the values of the metadata into the header, and leaves the cursor behind what is known of tensors,
    which is given. Raises CheckpointError.
    """
    file, data = cursor.file, cursor.data
    if data[:4] != b"GGUF":
        raise cursor.fail(f"not a GGUF file: it begins with {data[:4]!r}")
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        big_endian = " (its bytes are in the other order)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(
            f"{file}: GGUF version {version}{big_endian} is not supported, {' and '.join(map(str, VERSIONS))} are; "
            "convert the model anew with a current llama.cpp"
        )
    n_tensors, n_keys = cursor.count("tensors", _MAX_TENSORS), cursor.count("keys", _MAX_KEYS)
    for _ in range(n_keys):
        key = cursor.text()
        if key in header.values:
            raise cursor.fail(f"damaged: the key {key!r} is there twice")
        header.values[key] = cursor.value(key)
    return [_tensor_info(cursor) for _ in range(n_tensors)]


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, ggml type, shape and offset of the next tensor."""
    name, n_dims = cursor.text(), cursor.number("I")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.fail(f"damaged: tensor {name!r} has {n_dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(n_dims))[::-1]
    if min(shape) < 1:
        raise cursor.fail(f"damaged: tensor {name!r} has the shape {list(shape)}")
    return name, cursor.number("I"), shape, cursor.number("Q")


def _tensor(file: Path, name: str, number: int, shape: tuple[int, ...], begin: int) -> GgufTensor:
    where = f"{file}: tensor {name!r}"
    if number not in TYPES:
        raise CheckpointError(f"{where} has the unknown ggml type {number}; supported: {', '.join(PLAIN + QUANTISED)}")
    kind, block, n_bytes = TYPES[number]
    if shape[-1] % block:
        raise CheckpointError(
            f"{where}: rows of {shape[-1]} weights are not whole blocks of {block}, as {kind} has them"
        )
    return GgufTensor(file, name, kind, shape, begin, begin + math.prod(shape) // block * n_bytes)


def is_gguf(path: Path) -> bool:
    """Returns whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def open_gguf(path: Path) -> Gguf:
    """The model of a file: of all files of its set, whichever is given. Raises CheckpointError."""
    first, *others = shards(path)
    try:
        stat = first.stat()
    except OSError as error:
        raise CheckpointError(f"{first}: cannot be read ({error.strerror}); is this a checkpoint?") from error
    return _open((first, *others), (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@functools.lru_cache(maxsize=8)
def _open(files: tuple[Path, ...], identity: tuple[int, ...]) -> Gguf:
    """identity: of the first file, so that another one is read anew."""
    model = Gguf(tuple(_read_header(file) for file in files))
    n_files = model.get("split.count", 0) or 1
    if n_files != len(files):
        raise CheckpointError(
            f"{model.file}: the first of {n_files!r} files by its header (split.count), but {len(files)} are named like "
            "it; give all of them the names that they had, NAME-00001-of-0000N.gguf and so on"
        )
    for nth, header in enumerate(model.headers):
        if nth and header.get("split.no") != nth:
            raise CheckpointError(
                f"{header.file}: number {header.get('split.no')} of its set (split.no), not {nth}; it was renamed"
            )
    n_tensors = model.get("split.tensors.count", len(model.tensors))
    if n_tensors != len(model.tensors):
        raise CheckpointError(
            f"{model.file}: {n_tensors} tensors in its set by its header (split.tensors.count), but the files have {len(model.tensors)}"
        )
    return model


def shards(path: Path) -> list[Path]:
    """The files of the set that a file is of, in their order. Raises CheckpointError for missing ones."""
    match = _SHARD.fullmatch(path.stem)
    n = int(match["n"]) if match else 0
    if match is None or not 0 < int(match["nth"]) <= n:
        return [path]
    files = [path.with_name(f"{match['name']}-{nth:05}{path.stem[-9:]}{path.suffix}") for nth in range(1, n + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{path}: of its {n} files are missing: {', '.join(missing[:3])}{more}; download them")
    return files


def set_name(file: str) -> str:
    """The path of a GGUF file without its suffix and its number in a set: the same for all files of a
    model.
    """
    stem = file[: -len(SUFFIX)]
    match = _SHARD.fullmatch(stem)
    return match["name"] if match else stem


def models_among(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among paths of files, each with its files in their order, by their `set_name`."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(SUFFIX) and not _NO_MODEL.search(file.rpartition("/")[2]):
            found.setdefault(set_name(file), []).append(file)
    return found


def gguf_in(directory: Path) -> Path | None:
    """The first file of the GGUF model in a directory; None: there is none.

    Raises CheckpointError where there are several.
    """
    found = models_among(file.name for file in directory.glob("*") if file.is_file())
    if len(found) > 1:
        names = ", ".join(files[0] for files in found.values())
        raise CheckpointError(f"{directory}: {len(found)} GGUF models: {names}; give the file of one of them")
    return next((directory / files[0] for files in found.values()), None)


def tower_beside(path: Path) -> Path | None:
    """The vision tower of a GGUF model: of the files in its folder with `mmproj` in their names the one in
    BF16, else in F16, F32, or anything, by their names; of several such the first. A tower's own file is
    itself. None: there is none.
    """
    if "mmproj" in path.name.lower():
        return path
    name = tower_among(file.name for file in path.parent.iterdir() if is_gguf(file))
    return path.with_name(name) if name else None


def tower_among(names: Iterable[str]) -> str | None:
    """The one of these files of a folder that `tower_beside` gives."""

    def rank(name: str) -> int:
        words = re.split("[^a-z0-9]", name.lower())
        return next((i for i, type in enumerate(_TOWER_TYPES) if type in words), len(_TOWER_TYPES))

    found = (name for name in names if "mmproj" in name.lower() and name.lower().endswith(SUFFIX))
    return min(sorted(found), key=rank, default=None)


def chosen(name: str, files: Iterable[str], quant: str) -> list[str]:
    """The files of the GGUF model of these bits, as `Q4_K_M`, in a repository on the hub; "": Q4_K_M, or
    else the first that is there.

    The bits are looked for in names of files and folders, whatever their case. Of several models the one
    with the shortest name is taken, which has nothing else in it (UD-Q4_K_M). quant may also be the name of a
    model's file, or its path. Raises CheckpointError, with what there is.
    """
    found = models_among(files)
    if quant.lower().endswith(SUFFIX):
        file = next(
            (f for f in sorted(found, key=len) if f == set_name(quant) or f.endswith("/" + set_name(quant))), None
        )
        if file is not None:
            return found[file]
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(quant or 'Q4_K_M')}(?![a-z0-9_])", re.IGNORECASE)
    fitting = [model for model in found if wanted.search(model)]
    if fitting:
        return found[min(fitting, key=len)]
    if found and not quant:
        return next(iter(found.values()))
    there = f"there are {', '.join(found)}" if found else "there is no GGUF file"
    raise CheckpointError(
        f"{name}: has no GGUF file {'' if quant.lower().endswith(SUFFIX) else 'of '}{quant or 'any bits'}; {there}, on the hub or, "
        "offline, in the cache"
    )
