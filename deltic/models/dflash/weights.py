"""The weights of a block drafter: from its checkpoint, in the names of z-lab, DeepSpec and `speculators`.

Embedding and head are the target's; copies of them are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deltic.models.dflash.shape import DrafterShape
from deltic.models.files import Skipped, check_plan, open_tensors
from deltic.models.loading import (
    COUNTED,
    HOST,
    Counted,
    Declaration,
    Parts,
    QwenLayer,
    Store,
    Stored,
    copy_parts,
    fill_dummy,
)
from deltic.models.stored import StoredTensor, formats_of
from deltic.ops.arrays import Array
from deltic.ops.geometry import DeviceArray
from deltic.ops.matrix import Matrix

_TARGETS = {
    "embedding and head": ("embed_tokens.", "lm_head.", "model.embed_tokens."),
    "training": ("verifier_", "model.verifier_", "t2d", "d2t"),
}
"""Parts that are not read, and how their names begin."""


@dataclass
class BlockConv:
    """Convolutions within a block, before and behind a mixer or feed-forward: of tap j a row's coefficient is
    base[side, j] and, one value a group of channels, that of projection's product with the row that goes in.
    """

    base: DeviceArray  # [2 * taps, H] f32: of the side before, then behind
    projection: Matrix  # [2 * taps * H / group, H]


@dataclass
class DrafterLayer(QwenLayer):
    """A Qwen3 layer, in DFlash 2 with convolutions around its mixer and its feed-forward."""

    attn_conv: BlockConv | None = None
    mlp_conv: BlockConv | None = None


@dataclass
class Selector:
    """Scores of pairs of tokens (DFlash 2): <predecessor[a] * projection h, successor[b]>."""

    predecessor: DeviceArray  # [V, rank] bf16
    successor: DeviceArray  # [V, rank] bf16
    projection: Matrix  # [rank, H]


@dataclass
class Markov:
    """Terms that the token before adds to the logits (DSpark): after before[a]."""

    before: DeviceArray  # [V, rank] bf16
    after: Matrix  # [V, rank]


@dataclass
class Confidence:
    """The logit of a guess's chance to be right (DSpark)."""

    weight: DeviceArray  # [H] f32, or [H + rank] where it reads the token before
    bias: DeviceArray  # [1] f32


@dataclass
class DrafterWeights(Parts):
    """A block drafter in the internal layout."""

    fc: Matrix  # [H, n_features * H]
    hidden_norm: DeviceArray  # [H] f32, zero-centred
    layers: list[DrafterLayer]
    norm: DeviceArray  # [H] f32
    selector: Selector | None = None
    markov: Markov | None = None
    confidence: Confidence | None = None


def declare_drafter(d: Declaration, shape: DrafterShape) -> DrafterWeights:
    """Declares the weights."""
    h, rank = shape.hidden_size, shape.selector_rank or shape.markov_rank
    weights = DrafterWeights(
        fc=d.matrix(len(shape.target_layer_ids) * h, Stored("fc.weight", (h,))),
        hidden_norm=d.norm("hidden_norm.weight", h),
        layers=[_declare_layer(d, shape, f"layers.{i}.") for i in range(shape.n_layers)],
        norm=d.norm("norm.weight", h),
    )
    if shape.selector_rank:
        s = "candidate_selector."
        weights.selector = Selector(
            predecessor=d.table(f"{s}predecessor_codebook", shape.vocab_size, rank),
            successor=d.table(f"{s}successor_codebook", shape.vocab_size, rank),
            projection=d.matrix(h, Stored(f"{s}hidden_projection.weight", (rank,)), role="kept"),
        )
    if shape.markov_rank:
        m = "markov_head.markov_w"
        before = d.table(f"{m}1.weight", shape.vocab_size, rank)
        weights.markov = Markov(before, d.matrix(rank, Stored(f"{m}2.weight", (shape.vocab_size,))))
    if shape.has_confidence:
        width, c = h + rank * shape.confidence_sees_token, "confidence_head.proj."
        weight = d.vector(f"{c}weight", width, shape=(1, width))
        weights.confidence = Confidence(weight, d.vector(f"{c}bias", 1))
    return weights


def _declare_layer(d: Declaration, shape: DrafterShape, p: str) -> DrafterLayer:
    plain = d.layer(p, shape.hidden_size, shape.heads, shape.intermediate_size, "plain")
    layer = DrafterLayer(**vars(plain))
    if shape.conv_taps:
        layer.attn_conv = _declare_conv(d, shape, f"{p}attention_conv.")
        layer.mlp_conv = _declare_conv(d, shape, f"{p}mlp_conv.")
    return layer


def _declare_conv(d: Declaration, shape: DrafterShape, p: str) -> BlockConv:
    h, taps = shape.hidden_size, shape.conv_taps
    projection = Stored(f"{p}kernel_projection.weight", (2 * taps * h // shape.conv_group,))
    return BlockConv(
        base=d.vector(f"{p}base_kernel", 2 * taps, h, shape=(2, taps, h)),
        projection=d.matrix(h, projection, role="kept"),
    )


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """Opens what is stored, by names without the prefix that some have."""
    return {name.removeprefix("model."): tensor for name, tensor in open_tensors(directory, _TARGETS).items()}


def stored_drafter(directory: Path) -> DrafterShape:
    """The shape of a drafter's checkpoint, with the formats of what is stored quantised. Raises
    CheckpointError, UnsupportedModelError.
    """
    shape = DrafterShape.from_directory(directory)
    if not any(directory.glob("*.safetensors")):
        return shape  # a configuration alone: of random weights
    return replace(shape, formats=formats_of(_stored(directory)))


def drafter_bytes(shape: DrafterShape, quantize: str | None, store: Store = COUNTED) -> int:
    """Bytes of the loaded weights, known without loading anything."""
    return declare_drafter(Declaration(quantize, store, shape.formats), shape).n_bytes


def load_drafter(
    directory: Path, shape: DrafterShape, quantize: str | None, store: Store = HOST
) -> tuple[DrafterWeights, list[str]]:
    """Loads a drafter's checkpoint; gives notices, too. With a store that counts nothing is read but
    headers. Raises CheckpointError as a model's loader.
    """
    tensors = _stored(directory)
    declared = Declaration(quantize, store, shape.formats)
    weights = declare_drafter(declared, shape)
    notices = check_plan(declared.plan, tensors, directory, _TARGETS)
    if not isinstance(store, Counted):
        copy_parts(declared.plan, tensors, store, None)
    return weights, [f"draft model: {notice}" for notice in notices if not isinstance(notice, Skipped)]


def dummy_drafter(shape: DrafterShape, seed: int, quantize: str | None, store: Store = HOST) -> DrafterWeights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter."""

    def vector(name: str, size: tuple[int, ...], generator: np.random.Generator) -> Array:
        rest = 0.5 if name.endswith("base") else 0.0
        return generator.normal(rest, 0.1, size).astype(np.float32)

    weights = declare_drafter(Declaration(quantize, store, shape.formats), shape)
    fill_dummy(weights, seed, vector, store, None)
    return weights
