"""The joint schema head of a decision model (Cloudflare's Clef): a transformer of its own, which reads the
hidden states of a whole prompt and gives a logit for every option of every question.

The equations are those of JointSchemaHead, the published module of Cloudflare/clef and clef-flash
(Apache-2.0): options gather evidence from the prompt (evidence layers), fields, one a question, attend to
each other and to the prompt (decoder layers), and the logit of an option is

    scale_p cos(lexical, question + last) + sigmoid(gate) (scale_j cos(field, option) + MLP(field, option))

where `lexical` is the mean of the output embeddings of the option's tokens. Computed in float32 on the host's
CPU, on every device: it is a hundredth of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltic.models.fields import CheckpointError, UnsupportedModelError, positive_int, read_json
from deltic.models.mapped import MappedFiles, read_header
from deltic.ops.arrays import Array

WEIGHTS, CONFIG = "joint_head.safetensors", "joint_head_config.json"

Rows = Array
"""float32 [rows, width]."""

AT_ONCE = 512
"""Options that gather evidence at once: a bound on memory, and by the request alone."""

NORM_EPS, UNIT_EPS, COSINE_EPS = 1e-5, 1e-12, 1e-8
"""Bounds from below in torch's LayerNorm, normalize and cosine_similarity."""


class Span(NamedTuple):
    """Tokens [begin, end) of a prompt."""

    begin: int
    end: int


class SpannedQuestion(NamedTuple):
    """A question, by where its parts stand in the prompt."""

    kind: int
    """0: noul, 1: choice, 2: score."""
    instruction: Span
    options: Sequence[Span]


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head: joint_head_config.json."""

    hidden_size: int
    width: int
    routing_layers: int
    layers: int
    heads: int
    feedforward: int

    @classmethod
    def of(cls, directory: Path, hidden_size: int) -> HeadShape | None:
        """Reads that of a checkpoint; None: it has no such head. hidden_size: of its model. Raises
        CheckpointError, UnsupportedModelError.
        """
        files = [directory / name for name in (CONFIG, WEIGHTS)]
        if not any(file.is_file() for file in files):
            return None
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: not there, but the checkpoint has a joint head; download it again")
        fields = read_json(files[0])
        shape = cls(*(positive_int(fields, name) for name in cls.__dataclass_fields__))
        if shape.hidden_size != hidden_size:
            raise UnsupportedModelError("hidden_size", shape.hidden_size, f"{hidden_size}, as the model has", CONFIG)
        if shape.width % shape.heads:
            raise UnsupportedModelError("heads", shape.heads, f"a divisor of the width {shape.width}", CONFIG)
        return shape

    def parts(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a head: shapes by their names."""
        h, w, f = self.hidden_size, self.width, self.feedforward
        norms = {"hidden_norm": h, "option_summary_norm": w, "field_norm": w, "option_norm": w}
        linears = {"residual_scorer.0": (w, 4 * w), "residual_scorer.3": (1, w)}
        inputs = ("memory", "question", "option_question", "global", "option_context", "option_lexical")
        for i in range(self.routing_layers):
            p = f"evidence_layers.{i}."
            norms |= {f"{p}{name}_norm": w for name in ("query", "memory", "feedforward")}
            linears |= {f"{p}feedforward.0": (f, w), f"{p}feedforward.3": (w, f), f"{p}attention.out_proj": (w, w)}
            linears |= {f"{p}attention.in_proj": (3 * w, w)}
        for i in range(self.layers):
            p = f"layers.{i}."
            norms |= {f"{p}norm{n}": w for n in (1, 2, 3)}
            linears |= {f"{p}linear1": (f, w), f"{p}linear2": (w, f)}
            linears |= {f"{p}{name}.out_proj": (w, w) for name in ("self_attn", "multihead_attn")}
            linears |= {f"{p}{name}.in_proj": (3 * w, w) for name in ("self_attn", "multihead_attn")}
        found: dict[str, tuple[int, ...]] = {f"{name}_projection.weight": (w, h) for name in inputs}
        for name, size in norms.items():
            found |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
        for name, (n, k) in linears.items():
            join = "_" if name.endswith("in_proj") else "."
            found |= {f"{name}{join}weight": (n, k), f"{name}{join}bias": (n,)}
        scales = dict.fromkeys(("prior_logit_scale", "joint_logit_scale", "residual_gate"), ())
        return found | {"type_embedding.weight": (3, w)} | scales

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights, in float32."""
        return 4 * sum(math.prod(size) for size in self.parts().values())


class JointHead:
    """The weights of a head, and what it makes of a prompt."""

    def __init__(self, shape: HeadShape, weights: dict[str, Rows]) -> None:
        """weights: by the names of `HeadShape.parts`."""
        self.shape, self._w = shape, weights

    @classmethod
    def load(cls, directory: Path, shape: HeadShape) -> JointHead:
        """Reads a checkpoint's. Raises CheckpointError for what is not as its config says."""
        headers, files = read_header(directory / WEIGHTS)[0], MappedFiles()
        wanted = shape.parts()
        for name in wanted.keys() ^ headers.keys():
            said = "is missing" if name in wanted else "is not known"
            raise CheckpointError(f"{directory / WEIGHTS}: tensor {name!r} {said}; download it again")
        weights = {}
        for name, size in wanted.items():
            if headers[name].shape != size or headers[name].dtype not in ("BF16", "F16", "F32"):
                found = f"{headers[name].dtype} {list(headers[name].shape)}"
                raise CheckpointError(f"{directory / WEIGHTS}: tensor {name!r}: expected {list(size)}, found {found}")
            weights[name] = np.array(files.read(headers[name]), np.float32)
            if not np.isfinite(weights[name]).all():
                raise CheckpointError(f"{directory / WEIGHTS}: tensor {name!r} has values that are not finite")
        return cls(shape, weights)

    def logits(self, hidden: Rows, questions: Sequence[SpannedQuestion], lexical: Rows) -> list[Rows]:
        """The logits of each question's options.

        hidden: float32 [T, H], behind the final norm, of every token of the prompt. lexical: float32 [N, H],
        of all options in order: the mean of the output embeddings of its tokens.
        """
        w = self._w
        normed = self._norm("hidden_norm", hidden)
        memory, last = normed @ w["memory_projection.weight"].T, normed[-1]
        asked = np.stack([_mean(normed, question.instruction) for question in questions])
        context = np.stack([_mean(normed, span) for question in questions for span in question.options])
        counts = [len(question.options) for question in questions]
        owner = np.repeat(np.arange(len(questions)), counts)
        queries = context @ w["option_context_projection.weight"].T + lexical @ w["option_lexical_projection.weight"].T
        queries += (asked @ w["option_question_projection.weight"].T)[owner]
        options = self._gather(queries, memory)
        of = np.split(options, np.cumsum(counts)[:-1])
        fields = self._decode(asked, last, [question.kind for question in questions], of, memory)
        anchors = _unit(asked + last)
        prior = self._scale("prior_logit_scale") * (_unit(lexical) * anchors[owner]).sum(-1)
        options, field = self._norm("option_norm", options), fields[owner]
        lengths = [np.maximum(np.sqrt(np.square(rows).sum(-1)), COSINE_EPS) for rows in (field, options)]
        cosine = (field * options).sum(-1) / (lengths[0] * lengths[1])
        features = np.concatenate([field, options, field * options, np.abs(field - options)], -1)
        inner = _gelu(self._linear("residual_scorer.0", features))
        joint = self._scale("joint_logit_scale") * cosine + self._linear("residual_scorer.3", inner)[:, 0]
        gate = 1.0 / (1.0 + math.exp(-float(w["residual_gate"])))
        return np.split((prior + np.float32(gate) * joint).astype(np.float32), np.cumsum(counts)[:-1])

    def _gather(self, queries: Rows, memory: Rows) -> Rows:
        """Options behind the evidence layers; none sees another."""
        layers = [f"evidence_layers.{i}." for i in range(self.shape.routing_layers)]
        known = [self._keys(f"{p}attention", self._norm(f"{p}memory_norm", memory)) for p in layers]
        done = []
        for begin in range(0, len(queries), AT_ONCE):
            x = queries[begin : begin + AT_ONCE]
            for p, keys in zip(layers, known, strict=True):
                x = x + self._attend(f"{p}attention", self._norm(f"{p}query_norm", x), keys)
                inner = _gelu(self._linear(f"{p}feedforward.0", self._norm(f"{p}feedforward_norm", x)))
                x = x + self._linear(f"{p}feedforward.3", inner)
            done.append(x)
        return np.concatenate(done)

    def _decode(self, asked: Rows, last: Rows, kinds: list[int], of: list[Rows], memory: Rows) -> Rows:
        """Fields behind the decoder layers, and their norm. of: the options of each."""
        w = self._w
        fields = asked @ w["question_projection.weight"].T
        summaries = [
            _softmax(options @ field / math.sqrt(self.shape.width)) @ options
            for field, options in zip(fields, of, strict=True)
        ]
        fields = fields + self._norm("option_summary_norm", np.stack(summaries))
        fields = fields + w["global_projection.weight"] @ last + w["type_embedding.weight"][kinds]
        for i in range(self.shape.layers):
            p = f"layers.{i}."
            own = self._norm(f"{p}norm1", fields)
            fields = fields + self._attend(f"{p}self_attn", own, self._keys(f"{p}self_attn", own))
            keys = self._keys(f"{p}multihead_attn", memory)
            fields = fields + self._attend(f"{p}multihead_attn", self._norm(f"{p}norm2", fields), keys)
            inner = _gelu(self._linear(f"{p}linear1", self._norm(f"{p}norm3", fields)))
            fields = fields + self._linear(f"{p}linear2", inner)
        return self._norm("field_norm", fields)

    def _keys(self, name: str, rows: Rows) -> tuple[Rows, Rows]:
        """Keys and values of an attention, [heads, T, width / heads] each."""
        w, width = self._w, self.shape.width
        both = rows @ w[f"{name}.in_proj_weight"][width:].T + w[f"{name}.in_proj_bias"][width:]
        keys, values = both.reshape(len(rows), 2, self.shape.heads, -1).transpose(1, 2, 0, 3)
        return np.ascontiguousarray(keys), np.ascontiguousarray(values)

    def _attend(self, name: str, rows: Rows, known: tuple[Rows, Rows]) -> Rows:
        w, (keys, values) = self._w, known
        n, width = rows.shape
        queries = rows @ w[f"{name}.in_proj_weight"][:width].T + w[f"{name}.in_proj_bias"][:width]
        queries = queries.reshape(n, self.shape.heads, -1).transpose(1, 0, 2) / np.float32(math.sqrt(keys.shape[-1]))
        mixed = [_softmax(q @ k.T) @ v for q, k, v in zip(queries, keys, values, strict=True)]
        return self._linear(f"{name}.out_proj", np.stack(mixed, 1).reshape(n, width))

    def _linear(self, name: str, rows: Rows) -> Rows:
        product: Rows = rows @ self._w[f"{name}.weight"].T + self._w[f"{name}.bias"]
        return product

    def _norm(self, name: str, rows: Rows) -> Rows:
        centred = rows - rows.mean(-1, keepdims=True)
        scale = 1.0 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(NORM_EPS))
        normed: Rows = centred * scale * self._w[f"{name}.weight"] + self._w[f"{name}.bias"]
        return normed

    def _scale(self, name: str) -> np.float32:
        return np.float32(math.exp(min(float(self._w[name]), math.log(100.0))))


def _mean(rows: Rows, span: Span) -> Rows:
    mean: Rows = rows[span.begin : span.end].mean(0)
    return mean


def _unit(rows: Rows) -> Rows:
    unit: Rows = rows / np.maximum(np.sqrt(np.square(rows).sum(-1, keepdims=True)), np.float32(UNIT_EPS))
    return unit


def _softmax(scores: Rows) -> Rows:
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    shares: Rows = raised / raised.sum(-1, keepdims=True)
    return shares


def _gelu(rows: Rows) -> Rows:
    """x (1 + erf(x / sqrt 2)) / 2, with erf from Abramowitz and Stegun 7.1.26, within 1.5e-7."""
    size = np.abs(rows) * np.float32(math.sqrt(0.5))
    t = 1.0 / (1.0 + np.float32(0.3275911) * size)
    series: Any = np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + np.float32(factor)
    erf = 1.0 - series * t * np.exp(-size * size)
    made: Rows = rows * (1.0 + np.copysign(erf, rows)) * np.float32(0.5)
    return made
