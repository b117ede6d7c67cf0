"""Weights of talker and predictor: from the published names, or random, into the layout that
`models/tts/cpu.py` reads.

Matrices are packed and quantised as a language model's (models/qwen/weights.py). Tables are bfloat16 rows as
stored: a few rows of them are read in a step. Norms are kept zero-centred, as the operators take them: w - 1,
from which 1 + (w - 1) is w exactly for every bfloat16 |w| from 2^-16 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltic.models.files import check_plan, open_tensors
from deltic.models.loading import (
    COUNTED,
    HOST,
    Declaration,
    Parts,
    Progress,
    QwenLayer,
    Role,
    Store,
    Stored,
    copy_parts,
    fill_dummy,
)
from deltic.models.stored import StoredTensor
from deltic.models.tts.shape import DecoderShape, SpeechShape
from deltic.ops.arrays import Array
from deltic.ops.geometry import N_CODES, DeviceArray
from deltic.ops.matrix import Matrix

# models/vocoder/encoder.py reads it. A checkpoint trained from Base may still have it.
_SPEAKER_ENCODER = "speaker_encoder."
_PREDICTOR = "talker.code_predictor."


@dataclass
class Decoder(Parts):
    layers: list[QwenLayer]
    norm: DeviceArray  # [H] f32, zero-centred


@dataclass
class Projection:
    """x W^T + bias."""

    weight: Matrix  # [out, in]
    bias: DeviceArray  # [out] f32


@dataclass
class SpeechWeights(Parts):
    """h: the talker's width, p: the predictor's, th: the text table's; C codes of a codebook."""

    text_table: DeviceArray  # bf16 [text vocabulary, th]
    text_fc1: Projection  # [th, th]
    text_fc2: Projection  # [h, th]
    codec_table: DeviceArray  # bf16 [talker's vocabulary, h]
    code_tables: list[DeviceArray]  # 15 of bf16 [C, h]: of codes 1 to 15
    talker: Decoder
    head: Matrix  # [C + 1, h]: the codes, then end of speech
    predictor: Decoder
    code_heads: list[Matrix]  # 15 of [C, p]: of codes 1 to 15
    projection: Projection | None  # [p, h], where h is not p


def speech_weight_bytes(shape: SpeechShape, quantize: str | None, store: Store = COUNTED) -> int:
    """Bytes of the loaded weights of a shape, known without loading anything."""
    return empty_speech_weights(shape, quantize, store).n_bytes


def frame_bytes(shape: SpeechShape, quantize: str | None, store: Store = COUNTED) -> tuple[int, int]:
    """Bytes of matrices that a frame's codes read, for any number of frames at once: by the talker, and by
    the predictor."""
    weights = empty_speech_weights(shape, quantize, store)
    talker, predictor = (
        sum(part.n_bytes for _, part in decoder.named_parts() if isinstance(part, Matrix))
        for decoder in (weights.talker, weights.predictor)
    )
    once = sum(head.n_bytes for head in weights.code_heads)
    projected = weights.projection.weight.n_bytes if weights.projection is not None else 0
    return talker + weights.head.n_bytes, (N_CODES - 1) * (predictor + projected) + once


def empty_speech_weights(shape: SpeechShape, quantize: str | None, store: Store = COUNTED) -> SpeechWeights:
    """Uninitialised weights of the right sizes and formats.

    The text side stays bfloat16: it is read for few rows.
    """
    return declare_speech(Declaration(quantize, store), shape)


def declare_speech(d: Declaration, shape: SpeechShape) -> SpeechWeights:
    """The weights, and in d.plan every tensor that the checkpoint must hold."""
    h, p, th, n = (shape.talker.hidden_size, shape.predictor.hidden_size, shape.text_hidden_size, shape.n_codebook)
    stored, head = (shape.talker.vocab_size, h), "talker.codec_head.weight"
    return SpeechWeights(
        text_table=d.table("talker.model.text_embedding.weight", shape.text_vocab_size, th),
        text_fc1=_declare_projection(d, "talker.text_projection.linear_fc1.", th, th, "kept"),
        text_fc2=_declare_projection(d, "talker.text_projection.linear_fc2.", h, th, "kept"),
        codec_table=d.table("talker.model.codec_embedding.weight", *stored),
        head=d.matrix(
            h,
            Stored(head, (n,), shape=stored),
            Stored(head, (1,), first=shape.ids.codec_eos, shape=stored),
            role="sensitive",
        ),
        talker=_declare_decoder(d, "talker.model.", shape.talker),
        predictor=_declare_decoder(d, f"{_PREDICTOR}model.", shape.predictor),
        code_tables=[d.table(f"{_PREDICTOR}model.codec_embedding.{i}.weight", n, h) for i in range(N_CODES - 1)],
        code_heads=[
            d.matrix(p, Stored(f"{_PREDICTOR}lm_head.{i}.weight", (n,)), role="sensitive") for i in range(N_CODES - 1)
        ],
        projection=_declare_projection(d, f"{_PREDICTOR}small_to_mtp_projection.", p, h, "plain")
        if shape.has_projection
        else None,
    )


def _declare_projection(d: Declaration, p: str, n: int, k: int, role: Role) -> Projection:
    return Projection(weight=d.matrix(k, Stored(f"{p}weight", (n,)), role=role), bias=d.vector(f"{p}bias", n))


def _declare_decoder(d: Declaration, p: str, shape: DecoderShape) -> Decoder:
    h, inner, last = shape.hidden_size, shape.intermediate_size, shape.n_layers - 1
    return Decoder(
        norm=d.norm(f"{p}norm.weight", h),
        layers=[
            d.layer(f"{p}layers.{i}.", h, shape.heads, inner, "sensitive" if i == last else "plain")
            for i in range(shape.n_layers)
        ],
    )


def check_speech(directory: Path, d: Declaration) -> tuple[dict[str, StoredTensor], list[str]]:
    """The stored tensors of talker and predictor, and notices; what `load_speech_weights` raises. d: of
    `declare_speech`.
    """
    tensors = {
        name: tensor for name, tensor in open_tensors(directory).items() if not name.startswith(_SPEAKER_ENCODER)
    }
    return tensors, check_plan(d.plan, tensors, directory)


def load_speech_weights(
    directory: str | Path,
    shape: SpeechShape,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    store: Store = HOST,
) -> tuple[SpeechWeights, list[str]]:
    """Load talker and predictor of a checkpoint directory. The second result holds notices for the user.

    As `load_weights`.
    Raises CheckpointError, naming the tensor, what was expected, what was found and the file.
    """
    directory = Path(directory)
    parts = Declaration(quantize, store)
    weights = declare_speech(parts, shape)
    tensors, notices = check_speech(directory, parts)
    copy_parts(parts.plan, tensors, store, progress)
    return weights, notices


def dummy_speech_weights(
    shape: SpeechShape, seed: int, progress: Progress | None = None, *, quantize: str | None = None, store: Store = HOST
) -> SpeechWeights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter."""
    weights = empty_speech_weights(shape, quantize, store)
    fill_dummy(weights, seed, _dummy_vector, store, progress)
    return weights


def _dummy_vector(name: str, size: tuple[int, ...], generator: np.random.Generator) -> Array:
    return generator.normal(0.0, 0.1, size).astype(np.float32)
