"""A tensor of a checkpoint, however its files hold it: plain values, or quantised rows with their scales.

What reads a kind of files (models/tensors.py: safetensors; models/gguf_tensors.py: GGUF) gives these by the
names of the bfloat16 checkpoint, such as `model.layers.3.mlp.down_proj.weight`, so that a model's weights
(models/qwen/weights.py) know one set of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.ops.arrays import Array
from deltic.ops.formats import Quantised, WeightFormat


class StoredTensor(Protocol):
    """Tensor of a checkpoint. Nothing is read of it before `read`."""

    @property
    def where(self) -> str:
        """Name for messages: the file, and the name that the tensor has in it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: as the bfloat16 checkpoint's tensor, whatever is packed."""

    @property
    def format(self) -> WeightFormat | None:
        """Format of quantised weights. None: plain values."""

    @property
    def dtype(self) -> str:
        """Type of plain values as safetensors names it ("BF16", "F16", "F32"), else the format's name."""

    def read(self, begin: int, end: int) -> Array | Quantised:
        """Rows [begin, end) of all [rows, K]: the last dimension is K, those before it are rows; of one
        dimension: one row. Plain values keep their dtype. Raises CheckpointError for a file that cannot be
        read, and for scales that are not finite.
        """


class Derived:
    """A StoredTensor, as far as it is what another tensor is: a base of those that read one otherwise."""

    tensor: StoredTensor

    @property
    def where(self) -> str:
        return self.tensor.where

    @property
    def format(self) -> WeightFormat | None:
        return self.tensor.format

    @property
    def dtype(self) -> str:
        return self.tensor.dtype


_NGRAM_TABLE = ".ple.ple_embedding.", "per_layer_token_embd."
"""Parts of the names of the tensors of a table of n-grams, in safetensors or in GGUF."""


def in_ngram_table(name: str) -> bool:
    """Returns whether a tensor is of a table of n-grams, which is no weight of the model
    (qwen/ngram_table.py).
    """
    return any(part in name for part in _NGRAM_TABLE)


class Beside:
    """A StoredTensor: the columns of one that holds plain values, then those of another with as many rows."""

    format = None

    def __init__(self, *parts: StoredTensor) -> None:
        self._parts, self.where = parts, parts[0].where
        self.shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
        self.dtype = parts[0].dtype

    def read(self, begin: int, end: int) -> Array:
        """Reads rows as every StoredTensor does."""
        parts = (np.asarray(part.read(begin, end)) for part in self._parts)
        return np.concatenate([part.reshape(end - begin, -1) for part in parts], axis=1)


_EXPERT = re.compile(r"\.experts\.\d+\.")


def one_name(name: str) -> str:
    """The name under which all that has one format is known: experts without their number, and the names of
    a wrapped checkpoint as those of a flat one.
    """
    return _EXPERT.sub(".experts.*.", name.replace("model.language_model.", "model.", 1))


def formats_of(tensors: Mapping[str, StoredTensor]) -> dict[str, WeightFormat]:
    """The formats of the tensors that are quantised, by `one_name`.

    Raises CheckpointError where experts of one layer have several: they are multiplied together.
    """
    formats: dict[str, WeightFormat | None] = {}
    for name, tensor in tensors.items():
        if in_ngram_table(name):
            continue
        first = formats.setdefault(one_name(name), tensor.format)
        if first != tensor.format:
            kinds = " and ".join(sorted({f.name if f else "16 bits" for f in (first, tensor.format)}))
            raise CheckpointError(
                f"{tensor.where}: experts of one layer are stored as {kinds}; only one format a layer is run"
            )
    return {name: format for name, format in formats.items() if format is not None}
