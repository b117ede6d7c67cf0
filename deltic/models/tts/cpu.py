"""Qwen3-TTS: the predictor's passes and the talker, recorded as one program of operators.

A step has D frames (decodes) and, behind them, rows of prompts. Its program is: project the texts that some
row needs; for the frames, the 15 passes of the predictor, from what the talker left in the state slot and
from code 0, each ending in a draw; sum their embeddings; then all rows through the talker, whose last normed
row of each sequence goes back into its state slot and to the head.

Rounding points are those of models/qwen/cpu.py: residual stream, norms, softmax and logits are float32, the
inputs of linears, q and the pages bfloat16. Source: the reference package qwen-tts 0.1.1 and the published
checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.models.fields import multiple, refuse_limits
from deltic.models.qwen.cpu import Linears
from deltic.models.rotary import rotary_tables
from deltic.models.tts.shape import DecoderShape, SpeechShape
from deltic.models.tts.weights import Decoder, SpeechWeights
from deltic.ops.arrays import Array, bfloat16, front
from deltic.ops.cpu.attention import AttentionInputs, attention, attn_prepare
from deltic.ops.cpu.dense import gather, rms_norm, silu_mul
from deltic.ops.cpu.program import Program
from deltic.ops.cpu.sample import BatchParameters, DrawInputs, DrawScratch, sample
from deltic.ops.cpu.speech import add_bias, code_rows, keep_rows, talker_rows
from deltic.ops.geometry import MAX_GROUP, MAX_HEAD_DIM, N_CODES, PAGE_SIZE, Allocate, AttentionWeights, DeviceArray
from deltic.ops.kv_formats import KvPages

PAD_ROW = 0
"""Row of `SpeechActivations.text_rows` with the projection of the pad text, which stays there.

A step's own texts follow.
"""


@dataclass(frozen=True)
class SpeechInputs:
    """A step's inputs of the forward, in buffers that keep their addresses. int32.

    The frames' rows are the first D of T.
    """

    rows: AttentionInputs
    n_frames: Array
    n_first_rows: Array  # 2 D: the predictor's first pass has two rows a frame
    n_texts: Array
    text_ids: Array  # [T]
    text_row: Array  # [T] row of `text_rows`, -1 for none
    side: Array  # [T] as in ops/cpu/speech.py, talker_rows
    voice_rows: Array  # float32 [T, h]
    code0: Array  # [batch_slots]
    state_slot: Array  # [S] of the state
    last_row: Array  # [S] of each sequence


@dataclass(frozen=True)
class PredictorDraws:
    """Draws of codes 1 to 15. Parameters by batch slot. `draws[i]` and `codes[i]` are of code i + 1."""

    batch_slots: BatchParameters
    draws: list[DrawInputs]
    scratch: DrawScratch
    codes: Array  # int32 [15, D]


@dataclass(frozen=True)
class SpeechMemory:
    """pages: bfloat16 [n_pages, layers, 2, nk, 64, d]; past: bfloat16 [n_slots, h], the talker's last normed
    row of a sequence.
    """

    pages: DeviceArray
    past: DeviceArray


@dataclass(frozen=True)
class DecoderActivations:
    """Buffers of all layers of a decoder, one set, T rows long."""

    residual: Array  # float32 [T, H]
    normed: Array  # bfloat16 [T, H]
    proj: Array  # float32, flat
    mixed: Array  # bfloat16, flat
    query: Array  # bfloat16, flat
    records: Array  # float32 [n, d + 16]
    packed: Array  # uint8: rows of a linear's input as its kernel reads them


@dataclass(frozen=True)
class SpeechActivations:
    """Every buffer between inputs and draws."""

    talker: DecoderActivations
    predictor: DecoderActivations
    text_in: Array  # bfloat16 [T, th]
    text_hidden: Array  # float32 [T, th]
    text_act: Array  # bfloat16 [T, th]
    text_rows: Array  # float32 [1 + T, h]: the pad's, then the step's
    code_in: Array | None  # bfloat16 [2 D, h]: what the projection reads
    predictor_pages: Array  # bfloat16 [D, layers, 2, nk, 64, d]
    code_final: Array  # bfloat16 [D, p]
    code_logits: Array  # float32 [D, C]
    final: Array  # bfloat16 [S, h]
    logits: Array  # float32 [S, C + 1]


def check_speech_kernels(shape: SpeechShape) -> None:
    """Raises UnsupportedModelError for a geometry that the kernels cannot run."""
    refuse_limits(multiple("text_hidden_size", shape.text_hidden_size, 32))
    for prefix, d in (("", shape.talker), ("code_predictor_config.", shape.predictor)):
        fits = d.n_q_heads // d.n_kv_heads <= MAX_GROUP
        refuse_limits(
            multiple("head_dim", d.head_dim, 32, MAX_HEAD_DIM),
            ("num_attention_heads", d.n_q_heads, fits, f"at most {MAX_GROUP} a key head"),
            multiple("hidden_size", d.hidden_size, 32),
            multiple("intermediate_size", d.intermediate_size, 32),
            prefix=prefix,
        )


def allocate_speech(
    shape: SpeechShape, n_rows: int, n_seqs: int, max_len: int, allocate: Allocate
) -> SpeechActivations:
    """Every buffer of a forward of up to n_rows rows and n_seqs sequences of at most max_len rows."""
    f32, bf16 = np.float32, bfloat16
    h, p, th, t = (shape.talker.hidden_size, shape.predictor.hidden_size, shape.text_hidden_size, n_rows)
    d, n = shape.predictor, shape.n_codebook
    return SpeechActivations(
        talker=_allocate_decoder("", shape.talker, t, max_len, max(th, h), allocate),
        predictor=_allocate_decoder("predictor ", d, 2 * n_seqs, N_CODES, max(h, p), allocate),
        text_in=allocate("text in", (t, th), bf16),
        text_hidden=allocate("text hidden", (t, th), f32),
        text_act=allocate("text act", (t, th), bf16),
        text_rows=allocate("text rows", (1 + t, h), f32),
        code_in=allocate("code in", (2 * n_seqs, h), bf16) if shape.has_projection else None,
        predictor_pages=allocate("predictor pages", (n_seqs, d.n_layers, 2, d.n_kv_heads, PAGE_SIZE, d.head_dim), bf16),
        code_final=allocate("code final", (n_seqs, p), bf16),
        code_logits=allocate("code logits", (n_seqs, n), f32),
        final=allocate("final", (n_seqs, h), bf16),
        logits=allocate("logits", (n_seqs, n + 1), f32),
    )


def _allocate_decoder(
    name: str, d: DecoderShape, t: int, max_len: int, other_width: int, allocate: Allocate
) -> DecoderActivations:
    """other_width: the widest input of `packed` outside the layers."""
    f32, bf16 = np.float32, bfloat16
    h, f = d.hidden_size, d.intermediate_size
    heads = d.heads
    widest = max(h, f, d.q_rows, other_width)
    return DecoderActivations(
        residual=allocate(f"{name}residual", (t, h), f32),
        normed=allocate(f"{name}normed", (t, h), bf16),
        proj=allocate(f"{name}projections", (t * max(heads.row, 2 * f),), f32),
        mixed=allocate(f"{name}mixed", (t * max(d.q_rows, f),), bf16),
        query=allocate(f"{name}queries", (t * d.q_rows,), bf16),
        records=allocate(f"{name}attention records", heads.records_size(max_len), f32),
        packed=allocate(f"{name}packed rows", (t * widest * 2,), np.uint8),
    )


class _Layers:
    """The layers of a decoder over its rows."""

    def __init__(self, name: str, shape: DecoderShape, weights: Decoder, linears: Linears, max_len: int) -> None:
        """name: of the decoder among the weights."""
        self.name, self.shape, self.weights, self.heads = name, shape, weights, shape.heads
        self.linears = linears
        self.cos, self.sin = rotary_tables(shape.inv_freq(), max_len)

    def record(self, program: Program, inputs: AttentionInputs, pages: Array, act: DecoderActivations) -> None:
        """act.residual[:n_rows] through all layers. pages: [n, layers, 2, nk, 64, d]."""
        eps, n_rows, heads = self.shape.rms_norm_eps, inputs.n_tokens, self.heads
        project = self.linears.project
        proj = front(act.proj, len(act.residual), heads.row)
        query = front(act.query, len(act.residual), self.shape.q_rows)
        mixed = front(act.mixed, len(act.residual), self.shape.q_rows)
        up = front(act.proj, len(act.residual), 2 * self.shape.intermediate_size)
        inner = front(act.mixed, len(act.residual), self.shape.intermediate_size)
        for i, layer in enumerate(self.weights.layers):
            name = f"{self.name}.layers.{i}."
            rms_norm(program, act.residual, layer.input_norm, eps, act.normed, n_rows)
            project(program, f"{name}qkv", act.normed, proj, act.packed, n_rows)
            weights, cache = AttentionWeights(layer.q_norm, layer.k_norm, eps, self.cos, self.sin), KvPages(pages[:, i])
            attn_prepare(program, proj, heads, weights, inputs, cache, query)
            attention(program, query, proj, heads, inputs, cache, act.records, mixed)
            project(program, f"{name}o_proj", mixed, act.residual, act.packed, n_rows, add=True)
            rms_norm(program, act.residual, layer.post_norm, eps, act.normed, n_rows)
            project(program, f"{name}mlp.gate_up", act.normed, up, act.packed, n_rows)
            silu_mul(program, up, inner, n_rows)
            project(program, f"{name}mlp.down", inner, act.residual, act.packed, n_rows, add=True)


class Tts:
    """The weights in the form the operators read, and the recording of a forward over given buffers."""

    def __init__(self, shape: SpeechShape, weights: SpeechWeights, max_len: int) -> None:
        self.shape, self.weights = shape, weights
        self.linears = Linears(weights.named_parts())
        self.talker = _Layers("talker", shape.talker, weights.talker, self.linears, max_len)
        self.predictor = _Layers("predictor", shape.predictor, weights.predictor, self.linears, N_CODES)

    def record(
        self, program: Program, step: SpeechInputs, memory: SpeechMemory, draws: PredictorDraws, act: SpeechActivations
    ) -> None:
        """Appends the whole forward: rows and code 0 of each frame to draws.codes and act.logits[:S]."""
        w, talker, rows = self.weights, act.talker, step.rows
        self.record_texts(program, step, act, act.text_rows[PAD_ROW + 1 :])
        self._record_frames(program, step, memory, draws, act)
        sources = step.side, step.text_row, w.codec_table, step.voice_rows, act.text_rows
        talker_rows(program, *sources, talker.residual, rows.n_tokens)
        self.talker.record(program, rows, memory.pages, talker)
        eps = self.shape.talker.rms_norm_eps
        rms_norm(program, talker.residual, w.talker.norm, eps, act.final, rows.n_seqs, rows=step.last_row)
        keep_rows(program, act.final, step.state_slot, memory.past, rows.n_seqs)
        self.linears.project(program, "head", act.final, act.logits, talker.packed, rows.n_seqs)

    def record_texts(self, program: Program, inputs: SpeechInputs, act: SpeechActivations, out: Array) -> None:
        """out[m] = the projection of text id m of the step: fc2(SiLU(fc1(x)))."""
        w, n, project = self.weights, inputs.n_texts, self.linears.project
        gather(program, w.text_table, inputs.text_ids, act.text_in, n)
        project(program, "text_fc1.weight", act.text_in, act.text_hidden, act.talker.packed, n)
        add_bias(program, act.text_hidden, w.text_fc1.bias, n, silu_out=act.text_act)
        project(program, "text_fc2.weight", act.text_act, out, act.talker.packed, n)
        add_bias(program, out, w.text_fc2.bias, n)

    def _record_frames(
        self, program: Program, step: SpeechInputs, memory: SpeechMemory, draws: PredictorDraws, act: SpeechActivations
    ) -> None:
        """The residual codes of the frames. The sums of their 16 embeddings go into the talker's first
        rows.
        """
        w, a, eps = self.weights, act.predictor, self.shape.predictor.rms_norm_eps
        n_frames, n_seqs = step.n_frames, act.predictor_pages.shape[0]
        sums = act.talker.residual[:n_seqs]
        into = a.residual if act.code_in is None else act.code_in
        for i in range(N_CODES - 1):
            n_rows = n_frames if i else step.n_first_rows
            if i == 0:
                kept = {"past": memory.past, "state_slot": step.state_slot}
                code_rows(program, step.code0, w.codec_table, sums, n_frames, rows=into, **kept)
            else:
                code_rows(program, draws.codes[i - 1], w.code_tables[i - 1], sums, n_frames, rows=into)
            if w.projection is not None:
                self.linears.project(program, "projection.weight", into, a.residual, a.packed, n_rows)
                add_bias(program, a.residual, w.projection.bias, n_rows)
            rows = _pass_rows(i, n_frames, n_rows, n_seqs)
            self.predictor.record(program, rows, act.predictor_pages, a)
            last = None if i else np.arange(1, 2 * n_seqs, 2, dtype=np.int32)
            rms_norm(program, a.residual, w.predictor.norm, eps, act.code_final, n_frames, rows=last)
            self.linears.project(program, f"code_heads.{i}", act.code_final, act.code_logits, a.packed, n_frames)
            drawn = draws.batch_slots, draws.draws[i], draws.scratch, draws.codes[i]
            sample(program, act.code_logits, self.shape.n_codebook, *drawn)
        code_rows(program, draws.codes[-1], w.code_tables[-1], sums, n_frames)

    def frame_embeddings(self, codes: Array) -> Array:
        """float32 [R, h]: the sum of the 16 embeddings of each frame of codes, int [R, 16]."""
        tables = [self.weights.codec_table, *self.weights.code_tables]
        total = np.zeros((len(codes), self.shape.talker.hidden_size), np.float32)
        for table, column in zip(tables, codes.T, strict=True):
            total += table[column].astype(np.float32)
        return total


def _pass_rows(i: int, n_frames: Array, n_rows: Array, n_seqs: int) -> AttentionInputs:
    """The rows of pass i.

    Frame m has page m for itself: positions 0 and 1 in the first pass, i + 1 in the others.
    """
    each = np.arange(n_seqs, dtype=np.int32)
    return AttentionInputs(
        n_tokens=n_rows,
        n_seqs=n_frames,
        positions=np.full(n_seqs, i + 1, np.int32) if i else np.tile(np.array([0, 1], np.int32), n_seqs),
        token_batch_slot=each if i else each.repeat(2),
        seq_start=np.arange(n_seqs + 1, dtype=np.int32) * (1 if i else 2),
        seq_context=np.full(n_seqs, i + 1 if i else 0, np.int32),
        batch_slot=each,
        page_table=each[:, None],
    )
