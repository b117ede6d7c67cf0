"""A model's files: their hashes, the index of their tensors, and the fields of their configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deltic.models.checkpoint import ALL_FILES
from deltic.models.embedder import embedder_in
from deltic.models.files import INDEX, open_tensors, read_headers
from deltic.models.gguf import is_gguf, open_gguf, tower_beside
from deltic.models.hub import digest, published_hash
from deltic.models.loading import COUNTED, Declaration, Planned
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shape import HOW_IT_RUNS, ModelShape
from deltic.models.qwen.weights import check_weights, declare_weights, has_head, unused_parts
from deltic.models.stored import StoredTensor, formats_of
from deltic.verify.page import Check, Tell

_LENIENT = {"eos_token_ids", "max_position_embeddings", "tie_word_embeddings"}
"""Fields that two exports of one model may say differently."""

_SIZES = ("family", "layer_types", "hidden_size", "vocab_size", "n_experts", "intermediate_size", "n_q_heads")
"""Fields that say which of the published models one is."""


@dataclass(frozen=True)
class Files:
    """A language model as its files have it."""

    path: Path
    """The directory, or the GGUF file."""
    name: str

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.path)

    @property
    def directory(self) -> Path:
        return self.path.parent if self.is_gguf else self.path

    @cached_property
    def shape(self) -> ModelShape:
        """The shape, without formats. Raises CheckpointError, UnsupportedModelError."""
        return ModelShape.from_directory(self.path)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by the names of the bfloat16 checkpoint. Raises CheckpointError."""
        return open_tensors(self.path, unused_parts(self.shape))

    @cached_property
    def plan(self) -> list[Planned]:
        """Parts of the weights, the embedding first, and the tensors that each is made of. Raises
        CheckpointError, UnsupportedModelError.
        """
        shape = dataclasses.replace(self.shape, formats=formats_of(self.tensors))
        if embedder_in(self.path) is not None and not has_head(self.path):
            # Nothing is drawn from what it gives.
            shape = dataclasses.replace(shape, tie_word_embeddings=True)
        tensors, tied, prefix, _ = check_weights(self.path, shape, None)
        declared = Declaration(None, COUNTED, shape.formats)
        declare_weights(declared, shape, tied, prefix, tensors)
        return declared.plan

    @property
    def prefix(self) -> str:
        """Beginning of the names of the language model's tensors. Raises what `plan` does."""
        return self.plan[0].stored[0].name.removesuffix("embed_tokens.weight")

    def all(self) -> list[Path]:
        """Every file of the model, by its name."""
        if self.is_gguf:
            return sorted({*open_gguf(self.path).files, *filter(None, [tower_beside(self.path)])})
        found = {file for pattern in ALL_FILES for file in self.path.rglob(pattern)}
        return sorted(
            file for file in found if not any(part.startswith(".") for part in file.relative_to(self.path).parts)
        )


def check_hashes(files: Files, check: Check, tell: Tell) -> None:
    """Hashes every file, and compares with what the hub said when it was downloaded."""
    found, paths = {}, files.all()
    total, done, n_known = sum(file.stat().st_size for file in paths) or 1, 0, 0
    for file in paths:
        n_bytes, expected = file.stat().st_size, published_hash(file)
        is_big = expected is None or len(expected) == 64

        name = str(file.relative_to(files.directory))

        def told(n: int, name: str = name, before: int = done) -> None:
            tell(f"hashing {name}", (before + n) / total)

        found[name] = hashed = digest(file, n_bytes, told, is_big=is_big)
        done += n_bytes
        n_known += expected is not None
        if expected is not None and hashed != expected:
            check.wrong(
                f"{name}: its {'SHA-256' if is_big else 'SHA-1 of git'} is {hashed}, and the hub said {expected}; the file "
                "changed on this disk: delete it and download it again"
            )
    check.figures = {"hashes": found}
    check.note(f"{len(found)} files of {total / 1e9:.2f} GB; the hub's hash is known of {n_known}")
    if not n_known:
        check.note("compare these SHA-256 with those on the page of each file on the hub")
    for name in (name for name in found if name.endswith((".safetensors", ".gguf"))):
        check.note(f"{name} {found[name]}")


def check_index(files: Files, check: Check) -> None:
    """Checks names, shapes, types and sizes of all tensors against the configuration and the index."""
    n = len(files.plan)
    check.note(f"{len(files.tensors)} tensors; names, shapes and types of {n} parts are those of the configuration")
    index = files.path / INDEX
    if files.is_gguf or not index.exists():
        return
    said, headers = json.loads(index.read_text(encoding="utf-8")), read_headers(files.path)
    listed, n_bytes = said["weight_map"], sum(header.end - header.begin for header in headers.values())
    for name in sorted(headers.keys() - listed.keys()):
        check.wrong(f"tensor {name!r} is in {headers[name].file.name}, and {INDEX} does not list it")
    total = said.get("metadata", {}).get("total_size")
    if total is not None and total != n_bytes:
        check.look(f"{INDEX} says that all tensors have {total} bytes, and they have {n_bytes}")
    elif total is not None:
        check.note(f"{INDEX} lists all of them, and their {n_bytes} bytes")


def check_configuration(files: Files, other: Files | None, check: Check) -> None:
    """Compares the fields of the configuration with another checkpoint's, and with the published model of
    these sizes.
    """
    shape, theirs = files.shape, {"--against": other.shape} if other is not None else {}
    sizes = [getattr(shape, name) for name in _SIZES]
    alike = [name for name, each in PUBLISHED.items() if [getattr(each, field) for field in _SIZES] == sizes]
    if alike:
        theirs[alike[0]] = PUBLISHED[alike[0]]
    if not theirs:
        check.skip(
            "no published model has these sizes. With --against CHECKPOINT the fields are compared with another's."
        )
    for whose, known in theirs.items():
        differing = _differing(shape, known)
        for name, (mine, yours) in differing.items():
            # A fine-tuned model may have other positions, ends or thetas on purpose.
            is_alike = name in _LENIENT or (whose != "--against" and name not in ("rms_norm_eps", "mrope_section"))
            tell = check.look if is_alike else check.wrong
            tell(f"{name} is {mine!r}, and {yours!r} in {whose}")
        if not differing:
            check.note(f"all fields are those of {whose}")


def _differing(shape: ModelShape, known: ModelShape) -> dict[str, tuple[object, object]]:
    names = [each.name for each in dataclasses.fields(ModelShape) if each.name not in HOW_IT_RUNS]
    pairs = {name: (getattr(shape, name), getattr(known, name)) for name in names}
    if {*shape.eos_token_ids} == {*known.eos_token_ids}:
        del pairs["eos_token_ids"]  # in another order
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
