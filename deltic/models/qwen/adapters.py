"""LoRA adapters, read from PEFT's files and mapped to the rows of our matrices.

    y = W x + scale * up (down x)        (Hu et al. 2021, arXiv 2106.09685, section 4.1)

An adapter names the modules of the published code. Here several of them are one matrix, whose rows may lie in
another order (models/qwen/weights.py). So each of its terms becomes a `Delta` of a range of rows. What does
not map is an error that lists it: an adapter is applied whole or refused.

Known are Linears, embeddings and stacked experts (`target_parameters`), with rank and alpha patterns and
rsLoRA. Left out, and refused by name: DoRA, biases, whole weights (`modules_to_save`), and kinds that change
the model beside it. Source of names and sizes: PEFT 0.21, its LoRA layers and how it saves them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from deltic.models.fields import CheckpointError, read_json
from deltic.models.loading import COUNTED, Declaration, Planned
from deltic.models.mapped import Header, MappedFiles, read_header
from deltic.models.qwen.shape import ModelShape, all_stages
from deltic.models.qwen.shard import Cuts, Runs
from deltic.models.qwen.weights import declare_weights
from deltic.ops.arrays import Array, bfloat16, raw
from deltic.ops.matrix import Matrix

MAX_RANK = 256
EMBEDDING = "embed"
"""The matrix whose x is the one-hot row of an id, so that `down x` is a column."""

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ADVICE = "train or download the adapter again"
_REFUSED = (
    *("lora_bias", "fan_in_fan_out", "layer_replication", "trainable_token_indices", "use_qalora", "use_bdlora"),
    *("monteclora_config", "velora_config", "kasa_config", "arrow_config"),
)
"""Fields of a configuration that, where they are set, change what an adapter computes."""
_SHOWN = 5
"""Names in an error."""
_MOST_SCALE, _MOST_ALPHA = 1e6, 1e9
_ATOM = re.compile(r"(\\[.dw]|\[\^?[\w.-]+\]|[\w.-])([*+?]?)")
_MOST_WORK, _STEP = 300_000_000, 3000
"""Places in names that patterns may be tried at, a few seconds; and what a step costs besides."""


@dataclass(frozen=True)
class Delta:
    """Term that an adapter adds to some rows of a matrix: out[:, first : first + n] += scale *
    up (down x).
    """

    first: int
    down: Array  # bfloat16 [M, r, K], of each of M matrices: of experts, else 1
    up: Array  # bfloat16 [M, n, r]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.down.shape[1])

    @property
    def n_rows(self) -> int:
        return int(self.up.shape[1])

    def of_part(self, rows: Runs | None, columns: Runs | None) -> Delta | None:
        """The same of these rows and columns of the matrix, in order; None: it changes none of them."""
        if columns == ():
            return None
        delta = self
        if columns is not None:
            down = [self.down[:, :, begin:end] for begin, end in columns]
            delta = replace(delta, down=np.concatenate(down, axis=2))
        if rows is not None:
            of = np.concatenate([np.arange(begin, end) for begin, end in rows]) - self.first
            mine = np.flatnonzero((of >= 0) & (of < self.n_rows))
            if not len(mine):
                return None
            delta = replace(delta, first=int(mine[0]), up=self.up[:, of[mine]])
        return delta


@dataclass(frozen=True)
class Adapter:
    """An adapter in the terms of the forward."""

    key: bytes
    """Names its content: 16 bytes of hash."""
    deltas: Mapping[str, tuple[Delta, ...]]
    """Deltas by the matrix, as `Weights.named_parts` names it; `lm_head` and `embed`, whose x is the column
    of an id.
    """
    covers: tuple[tuple[str, str, int, int], ...]
    """Modules that the adapter changes, for people: name in the file, matrix, and rows there,
    [first, end).
    """
    rank: int
    """The largest."""

    def of_stage(self, shape: ModelShape) -> Adapter:
        """The terms of a stage's layers, by their names there; of a whole model's shape all."""
        found, end = {}, shape.first_layer + shape.n_layers
        for name, deltas in self.deltas.items():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                if shape.first_layer <= int(number) < end:
                    found[f"layers.{int(number) - shape.first_layer}.{rest}"] = deltas
            elif shape.embeds if name == EMBEDDING else shape.draws:
                found[name] = deltas
        return replace(self, deltas=found)

    def of_part(self, cuts: Cuts) -> Adapter:
        """The terms that a part of a model that is cut has: rows of `up`, or columns of `down`."""
        found = {}
        for name, deltas in self.deltas.items():
            of = cuts.of_matrix(name)
            if parts := tuple(part for delta in deltas if (part := delta.of_part(*of)) is not None):
                found[name] = parts
        return replace(self, deltas=found)


@dataclass(frozen=True)
class _Target:
    """The rows of a matrix that a module's weights are."""

    part: str
    first: int
    rows: Array  # int64 [n]: row first + i of the matrix is row rows[i] of the module's
    k: int
    n_matrices: int = 1
    matrix: int = 0
    """Number of the matrix among several, where it is not all of them."""
    is_all: bool = False


_MODULE = re.compile(r"^(?:base_model\.)?(?:model\.)*(?:language_model\.)?(?:model\.)?(.+)$")
_TERM = re.compile(r"^(.+?)\.lora_(embedding_)?([AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?$")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FROZEN = re.compile(r"(^|\.)(embed_tokens|lm_head)\.base_layer\.weight$")
"""The model's own weights, which PEFT saves beside the terms of an embedding or a head. They were not
trained.
"""
_STACKED = re.compile(r"\.experts(?:\.base_layer)*$")
_BESIDE = ("visual.", "mtp.")
"""Beginnings of the names of modules that are not the text model's: what PEFT's "all-linear" takes along."""


def read_adapter(path: Path, shape: ModelShape) -> Adapter:
    """The adapter in a directory of PEFT's, or in one safetensors file with its configuration beside it or in
    its metadata; shape: of a stage: the terms of its layers. Raises CheckpointError, of one line, for one
    that is damaged, of another kind or of another model.
    """
    try:
        return _read(path, all_stages(shape)).of_stage(shape)
    except (ArithmeticError, LookupError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error}); {_ADVICE}") from error


def _read(path: Path, shape: ModelShape) -> Adapter:
    file = path / _WEIGHTS if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        pickled = (path / "adapter_model.bin").exists()
        said = "weights are pickled: save them as safetensors" if pickled else f"no {_WEIGHTS} here"
        raise CheckpointError(f"{path}: {said}")
    if not file.is_file():
        raise CheckpointError(f"{path}: no such adapter")
    headers, metadata = read_header(file, _ADVICE)
    config = _config(file, metadata)
    terms, alphas = _terms(file, headers, shape)
    targets = _targets(shape, any(_EXPERT.search(name) for name in terms))
    reader = _Reader(file, MappedFiles(), config, alphas)
    beside = {name: terms.pop(name) for name in list(terms) if name.startswith(_BESIDE)}
    if changing := [name for name, (down, up, _) in beside.items() if reader.adds(name, down, up)]:
        raise CheckpointError(
            f"{file}: {listed(changing)}: changes the vision tower or the draft head, which adapters do not reach here; "
            "train it again with exclude_modules, or merge it into the model"
        )
    unknown = [name for name in terms if name not in targets and not _STACKED.search(name)]
    if unknown:
        raise CheckpointError(
            f"{file}: {listed(unknown)}: no such module in this model, or none that an adapter may change"
        )
    if not terms:
        raise CheckpointError(f"{file}: no lora_A and lora_B of the text model in it; is this an adapter?")
    named = [
        (_stacked(name, targets, down, up, file) if _STACKED.search(name) else name, down, up, is_embedding)
        for name, (down, up, is_embedding) in sorted(terms.items())
    ]
    reader.match([name for name, *_ in named])
    deltas: dict[str, list[Delta]] = {}
    covers = []
    split: dict[tuple[str, int, int], dict[int, Delta]] = {}  # experts' that are stored one by one
    for name, down, up, is_embedding in named:
        target = targets[name]
        if is_embedding != (target.part == EMBEDDING):
            raise CheckpointError(
                f"{file}: {name}: stored as {'an embedding' if is_embedding else 'a Linear'}, which it is not"
            )
        delta = reader.delta(name, target, down, up)
        covers.append((name, target.part, target.first, target.first + delta.n_rows))
        if target.n_matrices > 1 and not target.is_all:
            split.setdefault((target.part, target.first, target.n_matrices), {})[target.matrix] = delta
        else:
            deltas.setdefault(target.part, []).append(delta)
    for (part, first, n_matrices), experts in split.items():
        deltas.setdefault(part, []).append(_joined(first, n_matrices, experts))
    for part, found in deltas.items():
        found.sort(key=lambda delta: delta.first)
        for a, b in pairwise(found):
            if a.first + a.n_rows > b.first:
                raise CheckpointError(f"{file}: {part}: two modules change the same rows")
    ordered = {part: tuple(found) for part, found in sorted(deltas.items())}
    rank = max(delta.rank for found in ordered.values() for delta in found)
    return Adapter(_key(ordered), ordered, tuple(covers), rank)


def listed(names: list[str]) -> str:
    """Names for an error, the first few of many."""
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _config(file: Path, metadata: Mapping[str, str]) -> dict[str, object]:
    """adapter_config.json, or what the file itself says. Raises CheckpointError unless it is plain LoRA."""
    beside = file.parent / _CONFIG
    if beside.is_file():
        config = read_json(beside)
    else:
        try:
            config = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: its lora_adapter_metadata is no JSON ({error})") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{file}: its lora_adapter_metadata is no JSON object")
    if (kind := str(config.get("peft_type", "LORA"))).upper() != "LORA":
        raise CheckpointError(f"{file}: a {kind} adapter; only LoRA is applied")
    init = config.get("init_lora_weights")
    changes = isinstance(init, str) and re.match(r"(pissa|olora|corda|loftq|lora_ga)", init, re.IGNORECASE)
    refused = {
        "DoRA (use_dora)": config.get("use_dora"),
        "bias": config.get("bias") not in (None, "none"),
        "modules_to_save: merge them into the model": config.get("modules_to_save"),
        "alora_invocation_tokens (activated LoRA)": config.get("alora_invocation_tokens"),
        **{name: config.get(name) for name in _REFUSED},
        f"init_lora_weights={init}, which changes the model: save the adapter converted": changes,
    }
    for what, is_set in refused.items():
        if is_set:
            raise CheckpointError(f"{file}: {what} is not supported")
    return config


def _terms(
    file: Path, headers: Mapping[str, Header], shape: ModelShape
) -> tuple[dict[str, tuple[Header, Header, bool]], dict[str, Header]]:
    """Returns the two matrices of each module, and whether it is an embedding, and the alphas of modules that
    store one. Raises CheckpointError for any other tensor.
    """
    halves: dict[str, dict[str, Header]] = {}
    embeddings: set[str] = set()
    alphas: dict[str, Header] = {}
    other = []
    for stored, header in headers.items():
        if "lora_magnitude_vector" in stored:
            raise CheckpointError(f"{file}: {stored}: DoRA is not supported")
        if match := _TERM.match(stored):
            name = _module(match[1])
            if halves.setdefault(name, {}).setdefault(match[3], header) is not header:
                raise CheckpointError(f"{file}: {stored}: stored twice, under two names")
            if match[2]:
                embeddings.add(name)
        elif _FROZEN.search(stored) and header.shape == (shape.vocab_size, shape.hidden_size):
            continue
        elif stored.endswith(".alpha"):
            alphas[_module(stored.removesuffix(".alpha"))] = header
        else:
            other.append(stored)
    if other:
        raise CheckpointError(
            f"{file}: {listed(other)}: neither lora_A nor lora_B; whole weights and biases of an adapter are not supported"
        )
    lone = [name for name, both in halves.items() if len(both) != 2]
    if lone:
        raise CheckpointError(f"{file}: {listed(lone)}: lora_A or lora_B is missing; {_ADVICE}")
    return {name: (both["A"], both["B"], name in embeddings) for name, both in halves.items()}, alphas


def _module(name: str) -> str:
    """A module's name without what wraps the text model."""
    match = _MODULE.match(name)
    return match[1] if match else name


def _targets(shape: ModelShape, has_split_experts: bool) -> dict[str, _Target]:
    """Returns the targets by the names of all modules that an adapter may change, in every way that
    checkpoints name them.
    """
    found: dict[str, _Target] = {}
    p = "model.layers.{}.mlp.experts.0.gate_proj.weight"
    several = [p.format(i) for i in range(shape.n_layers)] if has_split_experts else []
    plain = [
        f"model.layers.{i}.linear_attn.in_proj_{name}.weight" for i in range(shape.n_layers) for name in ("qkv", "z")
    ]
    for names in (several, plain):
        declared = Declaration(None, COUNTED)
        weights = declare_weights(declared, shape, shape.tie_word_embeddings, names=names)
        names_of = {id(part): name for name, part in weights.named_parts()} | {id(weights.lm_head): "lm_head"}
        names_of[id(weights.embed)] = EMBEDDING
        for planned in declared.plan:
            part = names_of[id(planned.target)]
            if isinstance(planned.target, Matrix) and not part.startswith("draft_head."):
                for module, target in _of_part(part, planned):
                    found.setdefault(module, target)
        if shape.tie_word_embeddings:
            found["lm_head"] = _Target("lm_head", 0, np.arange(shape.vocab_size), shape.hidden_size)
    for i in range(shape.n_layers):
        _join(found, f"layers.{i}.mlp.", "gate_up_proj", ("gate_proj", "up_proj"))
        _join(found, f"layers.{i}.mlp.shared_expert.", "gate_up_proj", ("gate_proj", "up_proj"))
        _join(found, f"layers.{i}.linear_attn.", "in_proj_qkvz", ("in_proj_qkv", "in_proj_z"))
        _join(found, f"layers.{i}.linear_attn.", "in_proj_ba", ("in_proj_b", "in_proj_a"))
        if (ba := found.get(f"layers.{i}.linear_attn.in_proj_ba")) is not None:
            half = len(ba.rows) // 2
            for name, first in (("b", ba.first), ("a", ba.first + half)):
                found.setdefault(
                    f"layers.{i}.linear_attn.in_proj_{name}", _Target(ba.part, first, np.arange(half), ba.k)
                )
    return found


def _join(found: dict[str, _Target], prefix: str, fused: str, parts: tuple[str, str]) -> None:
    """The name of two modules as one, whose rows lie in order."""
    first, last = (found.get(prefix + name) for name in parts)
    if first is not None and last is not None:
        n = len(first.rows) + len(last.rows)
        found.setdefault(prefix + fused, _Target(first.part, first.first, np.arange(n), first.k))


def _of_part(part: str, planned: Planned) -> Iterator[tuple[str, _Target]]:
    """The modules whose weights are put together in a part."""
    matrix, stored = planned.target, planned.stored
    n_matrices = matrix.n_matrices
    all_in_one = n_matrices > 1 and len(stored) == 1
    for i in range(1 if all_in_one else n_matrices):
        at, rows = 0, dict[str, list[Array]]()
        first: dict[str, int] = {}
        for name, begin, end in planned.runs(n_matrices, i, 0, matrix.n):
            first.setdefault(name, at)
            rows.setdefault(name, []).append(np.arange(begin, end))
            at += end - begin
        for name, runs in rows.items():
            target = _Target(part, first[name], np.concatenate(runs), matrix.k, n_matrices, i, all_in_one)
            yield _module(name.removesuffix(".weight")), target


def _stacked(name: str, targets: Mapping[str, _Target], down: Header, up: Header, file: Path) -> str:
    """The name of `target_parameters`: PEFT does not store which of a layer's two stacks of experts a term is
    of, so that its sizes say it.
    """
    prefix = _STACKED.sub(".experts.", name)
    sizes = down.shape[-1:] + up.shape[:1]
    for parameter in ("gate_up_proj", "down_proj"):
        target = targets.get(prefix + parameter)
        if target is not None and sizes in ((target.k, len(target.rows)), (len(target.rows), target.k)):
            return prefix + parameter
    raise CheckpointError(
        f"{file}: {name}: no stack of experts in this model has terms of {list(down.shape)} and {list(up.shape)}"
    )


class _Names:
    """Names of modules, in which expressions are looked for without going back: what one costs grows with its
    length and theirs, whatever it says.

    All names are one text of lines. A step of an expression takes places in the text to those behind it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        lines = [start + name for name in names for start in ("", "model.", "model.language_model.")]
        text = np.frombuffer("\n".join([*lines, ""]).encode(), np.uint8)
        self._letters, self._text = np.unique(text, return_inverse=True)
        self._ends = np.flatnonzero(text == ord("\n"))
        self._begins = np.concatenate([[0], self._ends[:-1] + 1])
        self._starts = np.union1d(self._begins, np.flatnonzero(text == ord(".")) + 1)
        self._left = _MOST_WORK
        self._fitting: dict[str, Array] = {}
        self._expression, self._at = "", 0

    def find(self, expression: str) -> Array:
        """Returns for each name whether it ends in the expression, behind a dot or whole, as PEFT looks for
        it.

        Raises ValueError, which says what is not supported.
        """
        self._expression, self._at = expression, 0
        found = np.isin(self._ends, self._either(self._starts))
        if self._next:
            raise ValueError("a bracket that nothing opens")
        return np.asarray(found.reshape(-1, 3).any(axis=1))

    @property
    def _next(self) -> str:
        return self._expression[self._at : self._at + 1]

    def _pay(self, n: int) -> None:
        self._left -= n
        if self._left < 0:
            raise ValueError("too much for so many modules")

    def _either(self, starts: Array) -> Array:
        """Matches the alternatives that begin here, and returns where they end."""
        found = []
        while True:
            self._pay(len(starts))
            ends = starts
            while self._next not in ("", "|", ")"):
                ends = self._step(ends)
            found.append(ends)
            if self._next != "|":
                return np.unique(np.concatenate(found))
            self._at += 1

    def _step(self, starts: Array) -> Array:
        self._pay(_STEP + len(starts))
        first = self._next
        if first in "^$":
            self._at += 1
            return np.intersect1d(starts, self._begins if first == "^" else self._ends)
        if first == "(":
            self._at += 3 if self._expression.startswith("(?:", self._at) else 1
            ends = self._either(starts)
            if not self._next:
                raise ValueError("a bracket that nothing closes")
            self._at += 1
            return ends
        atom = _ATOM.match(self._expression, self._at)
        if atom is None:
            raise ValueError(f"{self._expression[self._at :][:20]!r}")
        self._at = atom.end()
        repeats = atom[2] in ("*", "+")
        self._pay(len(self._text) if repeats else 0)
        fits = self._fitting.get(atom[1])
        if fits is None:
            letters = self._letters.tolist()
            fits = np.array([c != ord("\n") and re.fullmatch(atom[1], chr(c)) is not None for c in letters])
            self._fitting[atom[1]] = fits
        behind = starts[fits[self._text[starts]]] + 1
        if not repeats:
            return np.union1d(starts, behind) if atom[2] else behind
        starts, stops = (starts if atom[2] == "*" else behind), np.flatnonzero(~fits[self._text])
        n, last = len(self._text) + 1, stops[np.searchsorted(stops, starts)]
        inside = np.bincount(starts, minlength=n + 1) - np.bincount(last + 1, minlength=n + 1)
        return np.flatnonzero(np.cumsum(inside) > 0)


@dataclass(frozen=True)
class _Reader:
    """Reads the terms of one file."""

    file: Path
    files: MappedFiles
    config: Mapping[str, Any]
    alphas: Mapping[str, Header]
    matched: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values that rank_pattern and alpha_pattern have for modules, by the modules' names."""

    def match(self, modules: Sequence[str]) -> None:
        """Finds the modules of each pattern; of several the first counts, as in PEFT. Raises
        CheckpointError.
        """
        names = _Names(modules)
        for pattern in ("rank_pattern", "alpha_pattern"):
            rules, said = self.config.get(pattern), self.matched.setdefault(pattern, {})
            for key, value in rules.items() if isinstance(rules, dict) else ():
                try:
                    found = names.find(key)
                except (ValueError, re.error) as error:
                    raise CheckpointError(
                        f"{self.file}: {_CONFIG}: {pattern} has {key[:80]!r}, an expression that is not supported: {error}"
                    ) from error
                for i in np.flatnonzero(found).tolist():
                    said.setdefault(modules[i], value)

    def adds(self, name: str, down: Header, up: Header) -> bool:
        """Returns whether a module's terms are not zero. Raises CheckpointError."""
        return all((raw(self._values(name, one)) & 0x7FFF).any() for one in (down, up))

    def delta(self, name: str, target: _Target, down: Header, up: Header) -> Delta:
        """Raises CheckpointError for sizes that are not the model's, and for what is not finite."""
        n, k, m = len(target.rows), target.k, target.n_matrices if target.is_all else 1
        if target.part == EMBEDDING:  # a term of the one-hot row of an id, [r, V]
            n, k = k, n
        if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or down.shape[0] % m:
            raise CheckpointError(
                f"{self.file}: {name}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit each other"
            )
        rank = down.shape[0] // m
        if not 1 <= rank <= MAX_RANK:
            raise CheckpointError(f"{self.file}: {name}: rank {rank}; from 1 to {MAX_RANK} can be applied")
        is_turned = target.is_all and (down.shape[1], up.shape[0]) == (n, k) != (k, n)
        if not is_turned and (down.shape[1], up.shape[0]) != (k, n):
            raise CheckpointError(
                f"{self.file}: {name}: changes a matrix of {[up.shape[0], down.shape[1]]}, where this model has {[n, k]}"
            )
        a, b = self._values(name, down), self._values(name, up)
        if target.is_all:  # PEFT's order: A [experts x r, in], B [out, r x experts]
            a, b = a.reshape(m, rank, -1), b.reshape(len(b), rank, m).transpose(2, 0, 1)
            if is_turned:  # of PEFT before 0.18, which took [experts, out, in] for [experts, in, out]
                a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        else:
            a, b = a[None], b[None]
        if target.part != EMBEDDING:
            b = b[:, target.rows]
        return Delta(target.first, np.ascontiguousarray(a), np.ascontiguousarray(b), self._scale(name, rank))

    def _values(self, name: str, header: Header) -> Array:
        """bfloat16."""
        if header.dtype not in ("BF16", "F16", "F32"):
            raise CheckpointError(f"{self.file}: {name}: stored as {header.dtype}; BF16, F16 or F32 can be read")
        values = self.files.read(header)
        with np.errstate(over="ignore"):
            values = values.astype(bfloat16)
        if not ((raw(values) & 0x7F80) != 0x7F80).all():
            raise CheckpointError(f"{self.file}: {name}: holds values that are not finite in bfloat16")
        return values

    def _scale(self, name: str, rank: int) -> float:
        """alpha / r, of rsLoRA alpha / sqrt(r) (Kalajdzievski 2023, arXiv 2312.03732)."""
        alpha = self.matched["alpha_pattern"].get(name, self.config.get("lora_alpha"))
        if name in self.alphas:
            (alpha,) = self._values(name, self.alphas[name]).reshape(-1)[:1].astype(float).tolist() or [None]
        said = self.matched["rank_pattern"].get(name, self.config.get("r"))
        if said is not None and said != rank:
            raise CheckpointError(f"{self.file}: {name}: rank {rank} is stored, and {_CONFIG} says {said}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -_MOST_ALPHA < alpha < _MOST_ALPHA:
            raise CheckpointError(f"{self.file}: {name}: lora_alpha is {alpha!r}; put its {_CONFIG} beside it")
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        if abs(scale) > _MOST_SCALE:
            raise CheckpointError(f"{self.file}: {name}: lora_alpha is {alpha!r}, which is too large")
        return scale


def _joined(first: int, n_matrices: int, experts: Mapping[int, Delta]) -> Delta:
    """The terms of experts that were stored one by one, as one; zeros for those that have none."""
    rank = max(delta.rank for delta in experts.values())
    one = next(iter(experts.values()))
    down = np.zeros((n_matrices, rank, one.down.shape[2]), bfloat16)
    up = np.zeros((n_matrices, one.n_rows, rank), bfloat16)
    scales = {delta.scale for delta in experts.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    for i, delta in experts.items():
        raw(down)[i, : delta.rank] = raw(delta.down)[0]
        of_up = delta.up[0] if scale == delta.scale else (delta.up[0].astype(np.float32) * delta.scale).astype(bfloat16)
        raw(up)[i, :, : delta.rank] = raw(of_up)
    if not np.isfinite(up.astype(np.float32)).all():
        raise CheckpointError("terms of experts are too large for their scales")
    return Delta(first, down, up, scale)


def _key(deltas: Mapping[str, tuple[Delta, ...]]) -> bytes:
    digest = blake2b(digest_size=16, person=b"deltic adapter")
    for part, found in sorted(deltas.items()):
        for delta in found:
            digest.update(f"{part} {delta.first} {delta.down.shape} {delta.up.shape} {delta.scale.hex()}\n".encode())
            digest.update(raw(delta.down).data)
            digest.update(raw(delta.up).data)
    return digest.digest()
