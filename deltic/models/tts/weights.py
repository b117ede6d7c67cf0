"""Weights of talker and predictor: from the published names, or random, into the layout that `models/tts/cpu.py` reads.

Matrices are packed and quantised as a language model's (models/qwen/weights.py). Tables are bfloat16 rows as stored: a few rows of
them are read in a step. Norms are kept zero-centred, as the operators take them: w - 1, from which 1 + (w - 1) is w exactly for
every bfloat16 |w| from 2^-16 on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deltic.models.loading import (
    DUMMY_BLOCK,
    Files,
    Mlp,
    Progress,
    Role,
    Stored,
    check_plan,
    copy_parts,
    format_of,
    in_order,
    plan_swiglu,
    read_headers,
    refuse_quantised,
    replace_parts,
    tile,
)
from deltic.models.tts.shape import DecoderShape, SpeechShape
from deltic.ops.geometry import N_CODES
from deltic.ops.matrix import Layout, Matrix

_SPEAKER_ENCODER = (
    "speaker_encoder."  # read by models/vocoder/encoder.py; what was trained from Base may still have it
)
_PREDICTOR = "talker.code_predictor."


@dataclass
class DecoderLayer:
    """A Qwen3 layer. `qkv` rows: query heads | k heads | v heads."""

    input_norm: Tensor  # [H] f32, zero-centred
    qkv: Matrix  # [(nq + 2 nk) d, H]
    q_norm: Tensor  # [d] f32, zero-centred
    k_norm: Tensor  # [d] f32, zero-centred
    o_proj: Matrix  # [H, nq d]
    post_norm: Tensor  # [H] f32, zero-centred
    mlp: Mlp


@dataclass
class Decoder:
    layers: list[DecoderLayer]
    norm: Tensor  # [H] f32, zero-centred


@dataclass
class Projection:
    """x W^T + bias."""

    weight: Matrix  # [out, in]
    bias: Tensor  # [out] f32


@dataclass
class SpeechWeights:
    """h: the talker's width, p: the predictor's, th: the text table's; C codes of a codebook."""

    text_table: Tensor  # bf16 [text vocabulary, th]
    text_fc1: Projection  # [th, th]
    text_fc2: Projection  # [h, th]
    codec_table: Tensor  # bf16 [talker's vocabulary, h]
    code_tables: list[Tensor]  # 15 of bf16 [C, h]: of codes 1 to 15
    talker: Decoder
    head: Matrix  # [C + 1, h]: the codes, then end of speech
    predictor: Decoder
    code_heads: list[Matrix]  # 15 of [C, p]: of codes 1 to 15
    projection: Projection | None  # [p, h], where h is not p

    def named_parts(self) -> Iterator[tuple[str, Tensor | Matrix]]:
        """Everything with its path, such as `talker.layers.3.mlp.gate_up`."""
        return _parts("", self)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The memory of every part."""
        for name, part in self.named_parts():
            yield name, part.data if isinstance(part, Matrix) else part

    def replace(self, memory: dict[str, Tensor]) -> None:
        """Puts other memory, as bytes by the names of `named_tensors`, in the place of every part's."""
        replace_parts(self, dict(self.named_parts()), memory)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named_tensors())


def _parts(path: str, owner: Any) -> Iterator[tuple[str, Tensor | Matrix]]:
    if isinstance(owner, Tensor | Matrix):
        yield path, owner
    elif isinstance(owner, list):
        for i, item in enumerate(owner):
            yield from _parts(f"{path}.{i}", item)
    elif owner is not None:
        for field in dataclasses.fields(owner):
            yield from _parts(f"{path}.{field.name}".lstrip("."), getattr(owner, field.name))


def speech_weight_bytes(shape: SpeechShape, quantize: str | None, layout: Layout = "strips") -> int:
    """Bytes of the loaded weights of a shape, known without loading anything."""
    return empty_speech_weights(shape, quantize, "meta", layout).n_bytes


def frame_bytes(shape: SpeechShape, quantize: str | None) -> tuple[int, int]:
    """Bytes of matrices that a frame's codes read, for any number of frames at once: by the talker, and by the predictor."""
    weights = empty_speech_weights(shape, quantize, device="meta")
    talker, predictor = (
        sum(part.n_bytes for _, part in _parts("", decoder) if isinstance(part, Matrix))
        for decoder in (weights.talker, weights.predictor)
    )
    once = sum(head.n_bytes for head in weights.code_heads)
    projected = weights.projection.weight.n_bytes if weights.projection is not None else 0
    return talker + weights.head.n_bytes, (N_CODES - 1) * (predictor + projected) + once


def empty_speech_weights(
    shape: SpeechShape, quantize: str | None, device: str | None = None, layout: Layout = "strips"
) -> SpeechWeights:
    """Uninitialised weights of the right sizes and formats. The text side stays bfloat16: it is read for few rows."""
    h, p, th, n = (
        shape.talker.hidden_size, shape.predictor.hidden_size, shape.text_hidden_size, shape.n_codebook,
    )  # fmt: skip

    def matrix(n: int, k: int, role: Role = "plain") -> Matrix:
        return Matrix.empty(n, k, format_of(role, quantize, layout), device=device)

    def vector(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def table(rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=torch.bfloat16, device=device)

    def projection(out: int, width: int, role: Role = "plain") -> Projection:
        return Projection(matrix(out, width, role), vector(out))

    def decoder(d: DecoderShape) -> Decoder:
        return Decoder(
            [_empty_layer(d, i == d.n_layers - 1, matrix, vector) for i in range(d.n_layers)],
            vector(d.hidden_size),
        )

    return SpeechWeights(
        text_table=table(shape.text_vocab_size, th),
        text_fc1=projection(th, th, "kept"),
        text_fc2=projection(h, th, "kept"),
        codec_table=table(shape.talker.vocab_size, h),
        code_tables=[table(n, h) for _ in range(N_CODES - 1)],
        talker=decoder(shape.talker),
        head=matrix(n + 1, h, "sensitive"),
        predictor=decoder(shape.predictor),
        code_heads=[matrix(n, p, "sensitive") for _ in range(N_CODES - 1)],
        projection=projection(p, h) if shape.has_projection else None,
    )


class _EmptyMatrix(Protocol):
    def __call__(self, n: int, k: int, role: Role = "plain") -> Matrix: ...


def _empty_layer(
    d: DecoderShape, is_last: bool, matrix: _EmptyMatrix, vector: Callable[[int], Tensor]
) -> DecoderLayer:
    h, f = d.hidden_size, d.intermediate_size
    return DecoderLayer(
        input_norm=vector(h),
        qkv=matrix(d.qkv_rows, h),
        q_norm=vector(d.head_dim),
        k_norm=vector(d.head_dim),
        o_proj=matrix(h, d.q_rows),
        post_norm=vector(h),
        mlp=Mlp(matrix(2 * f, h), matrix(h, f, "sensitive" if is_last else "plain")),
    )


def load_speech_weights(
    directory: str | Path,
    shape: SpeechShape,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    n_threads: int = 1,
    device: str | None = None,
    layout: Layout = "strips",
) -> tuple[SpeechWeights, list[str]]:
    """Load talker and predictor of a checkpoint directory; the second result holds notices for the user. As `load_weights`.

    Raises CheckpointError, naming the tensor, what was expected, what was found and the file.
    """
    directory = Path(directory)
    refuse_quantised(directory)
    headers = {
        name: header
        for name, header in read_headers(directory).items()
        if not name.startswith(_SPEAKER_ENCODER)
    }
    weights = empty_speech_weights(shape, quantize, device, layout)
    plan = list(plan_of_tensors(weights, shape))
    notices = check_plan(plan, headers, directory)
    copy_parts(plan, Files(headers), progress, n_threads)
    for name, part in weights.named_parts():
        if isinstance(part, Tensor) and name.endswith("norm"):
            part -= 1
    return weights, notices


def plan_of_tensors(weights: SpeechWeights, shape: SpeechShape) -> Iterator[Stored]:
    """Every tensor the checkpoint must hold, those of one part together."""
    h, p, th, n = (
        shape.talker.hidden_size, shape.predictor.hidden_size, shape.text_hidden_size, shape.n_codebook,
    )  # fmt: skip
    vocab = shape.talker.vocab_size
    yield Stored("talker.model.text_embedding.weight", (shape.text_vocab_size, th), weights.text_table)
    yield from _plan_projection("talker.text_projection.linear_fc1.", weights.text_fc1)
    yield from _plan_projection("talker.text_projection.linear_fc2.", weights.text_fc2)
    yield Stored("talker.model.codec_embedding.weight", (vocab, h), weights.codec_table)
    head = "talker.codec_head.weight"
    yield Stored(head, (vocab, h), weights.head, ((0, n),))
    yield Stored(head, (vocab, h), weights.head, ((n, 1),), first=shape.ids.codec_eos)
    yield from _plan_decoder("talker.model.", weights.talker, shape.talker)
    yield from _plan_decoder(f"{_PREDICTOR}model.", weights.predictor, shape.predictor)
    for i, table in enumerate(weights.code_tables):
        yield Stored(f"{_PREDICTOR}model.codec_embedding.{i}.weight", (n, h), table)
    for i, matrix in enumerate(weights.code_heads):
        yield Stored(f"{_PREDICTOR}lm_head.{i}.weight", (n, p), matrix)
    if weights.projection is not None:
        yield from _plan_projection(f"{_PREDICTOR}small_to_mtp_projection.", weights.projection)


def _plan_projection(p: str, part: Projection) -> Iterator[Stored]:
    yield Stored(f"{p}weight", (part.weight.n, part.weight.k), part.weight)
    yield Stored(f"{p}bias", (part.weight.n,), part.bias)


def _plan_decoder(prefix: str, decoder: Decoder, d: DecoderShape) -> Iterator[Stored]:
    h, kv = d.hidden_size, d.n_kv_heads * d.head_dim
    q_rows, k_rows, v_rows = in_order(d.q_rows, kv, kv)
    yield Stored(f"{prefix}norm.weight", (h,), decoder.norm)
    for i, layer in enumerate(decoder.layers):
        p = f"{prefix}layers.{i}."
        yield Stored(f"{p}input_layernorm.weight", (h,), layer.input_norm)
        yield Stored(f"{p}post_attention_layernorm.weight", (h,), layer.post_norm)
        for name, rows in (("q", q_rows), ("k", k_rows), ("v", v_rows)):
            yield Stored(f"{p}self_attn.{name}_proj.weight", (rows[1], h), layer.qkv, (rows,))
        yield Stored(f"{p}self_attn.q_norm.weight", (d.head_dim,), layer.q_norm)
        yield Stored(f"{p}self_attn.k_norm.weight", (d.head_dim,), layer.k_norm)
        yield Stored(f"{p}self_attn.o_proj.weight", (h, d.q_rows), layer.o_proj)
        yield from plan_swiglu(layer.mlp.gate_up, layer.mlp.down, f"{p}mlp.")


def dummy_speech_weights(
    shape: SpeechShape,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    n_threads: int = 1,
    device: str | None = None,
    layout: Layout = "strips",
) -> SpeechWeights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(DUMMY_BLOCK, generator=generator)
    weights = empty_speech_weights(shape, quantize, device, layout)
    scaled: dict[float, Tensor] = {}
    total, done, offset = weights.n_bytes, 0, 0
    for _, part in weights.named_parts():
        if isinstance(part, Tensor) and part.dim() == 1:  # norms and biases
            part.copy_(torch.randn(part.shape, generator=generator) * 0.1)
        else:
            scale = 0.1 if isinstance(part, Tensor) else part.k**-0.5
            if scale not in scaled:
                scaled[scale] = (block * scale).to(device or "cpu", torch.bfloat16)
            offset = (offset + 7919 * 131) % DUMMY_BLOCK
            size = part.shape if isinstance(part, Tensor) else (part.n, part.k)
            rows = torch.empty(size, dtype=torch.bfloat16, device=device)
            tile(rows.view(-1), scaled[scale], offset)
            if isinstance(part, Tensor):
                part.copy_(rows)
            else:
                part.pack(rows, n_threads)
        done += part.nbytes if isinstance(part, Tensor) else part.n_bytes
        if progress is not None:
            progress(done, total)
    return weights
