"""The operators of a CPU at a model's shapes, recorded one by one, for `bench/ops.py`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike

from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.models.loading import Role, format_of
from deltic.models.qwen.cpu_buffers import Activations, allocate_activations
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import weight_bytes
from deltic.ops.arrays import Array, bfloat16, copy, zeros
from deltic.ops.cpu.attention import attention, attn_prepare
from deltic.ops.cpu.dense import embed, linear, rms_norm, silu_mul
from deltic.ops.cpu.gdn import GdnMemory, gdn
from deltic.ops.cpu.moe import Experts, moe
from deltic.ops.cpu.program import Program
from deltic.ops.cpu.sample import logprobs, sample
from deltic.ops.formats import WeightFormat
from deltic.ops.geometry import PAGE_SIZE, AttentionWeights, GdnWeights, LogprobEntries, Routing
from deltic.ops.kv_formats import KvPages
from deltic.ops.matrix import Matrix, Segment
from deltic.runtime.cpu.batch import Batch
from deltic.runtime.cpu.sampler import DrawnIds, Sampler

MAX_DECODES = 64
CONTEXT = 1024
CACHE_BYTES = 256 << 20
"""Copies of a weight go on until they take this much, or as much as all weights of the model."""
MAX_COPIES = 256


@dataclass(frozen=True)
class Case:
    """An operator at one shape. `n_calls`: kernel calls in the program, over which the time is divided."""

    name: str
    size: str
    n_per_step: int
    program: Program
    n_calls: int
    n_bytes: Callable[[int], float]
    n_operations: Callable[[int], float]
    """Both by number of rows."""
    decodes_only: bool = False
    format: str = "bf16"
    """Of the weights that it multiplies with."""


class Workload:
    """Buffers of one layer of each kind, and the operators recorded over them."""

    def __init__(self, shape: ModelShape, max_rows: int, n_threads: int, quantize: str | None = None) -> None:
        self.shape = shape
        self.quantize = quantize
        self.weight_bytes = weight_bytes(shape, quantize)
        self.n_threads = n_threads
        self.n_seqs = min(MAX_DECODES, max_rows)
        n_tokens = CONTEXT + max_rows
        n_seq_pages = pages_for(n_tokens)
        self.batch = Batch(shape, max_rows, self.n_seqs, n_seq_pages, max_rows, allocate)
        self.sampler = Sampler(
            self.n_seqs, n_tokens, max_rows, DrawnIds(shape.vocab_size, shape.vocab_size, ()), n_threads, allocate
        )
        self.activations: Activations = allocate_activations(shape, max_rows, max_rows, allocate)
        for name in ("normed", "mixed", "query", "final", "proj", "logits"):
            _randomise(getattr(self.activations, name))
        n_pages = max(self.n_seqs * pages_for(CONTEXT + 1), n_seq_pages)
        self.pages = _matrix(n_pages, 2, shape.n_kv_heads, PAGE_SIZE, shape.head_dim)
        self.states = _floats(self.n_seqs, shape.gdn_n_v_heads, shape.gdn_k_dim, shape.gdn_v_dim)
        self.columns = zeros((self.n_seqs, 3, shape.conv_channels), bfloat16)
        windows = self.n_seqs, 1  # nothing is drafted
        self.window_columns = zeros((*windows, shape.conv_channels), bfloat16)
        self.window_gates = zeros((*windows, 2 * shape.gdn_n_v_heads), np.float32)

    def fill(self, n_rows: int) -> None:
        """Writes the step of `n_rows` decodes, or one chunk, into the buffers that the operators read."""
        params = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=1)
        is_decode = n_rows <= MAX_DECODES
        n_sequences, length = (n_rows, 1) if is_decode else (1, n_rows)
        step = Step()
        for i in range(n_sequences):
            tokens = array("i", range(1, CONTEXT + length + 1))
            n_pages = pages_for(len(tokens))
            sequence = Sequence(Request(id=str(i), prompt_ids=[], params=params), 0, 1, tokens, CONTEXT)
            sequence.pages = list(range(i * n_pages, (i + 1) * n_pages))
            sequence.batch_slot = sequence.state_slot = i
            step.chunks.append(Chunk(sequence, CONTEXT, length))
            step.draws.append(Draw(i, sequence))
        self.sampler.fill(step, self.batch.fill(step))
        # The head is timed over as many rows as the rest, though a chunk wants one.
        self.batch.inputs.n_logit_rows[...] = n_rows
        self.batch.inputs.logit_token[:n_rows] = np.arange(n_rows)

    def case(
        self,
        name: str,
        size: str,
        n_per_step: int,
        record: Callable[[Program], None],
        n_bytes: Callable[[int], float],
        n_operations: Callable[[int], float] = lambda m: 0.0,
        decodes_only: bool = False,
    ) -> Case:
        """An operator without weights worth copying."""
        program = Program(self.n_threads)
        record(program)
        return Case(name, size, n_per_step, program, 1, n_bytes, n_operations, decodes_only)

    def linear_case(self, what: str, n_out: int, n_in: int, n_per_step: int, role: Role = "plain") -> Case:
        """A linear over copies of its weight, each used once a run. role: of the weight, which decides the
        format.
        """
        format = format_of(role, self.quantize)
        weight = Segment.n_bytes_of(n_out, n_in, format, "panels")
        n_copies = max(1, min(MAX_COPIES, min(CACHE_BYTES, self.weight_bytes) // weight))
        program = Program(self.n_threads)
        n_rows = self.batch.inputs.n_tokens
        rows = self.activations.residual.shape[0]
        x, out = _matrix(rows, n_in), _floats(rows, n_out)
        first = _packed(n_out, n_in, format)
        for i in range(n_copies):
            one = first if i == 0 else _copied(first)
            linear(program, x, one, out, self.activations.packed, n_rows)
        return Case(
            "linear",
            f"{what} {n_out} x {n_in}",
            n_per_step,
            program,
            n_copies,
            lambda m: weight + m * (2 * n_in + 4 * n_out),
            lambda m: 2.0 * m * n_in * n_out,
            format=format.name,
        )

    def cases(self) -> Iterator[Case]:
        """Every operator of the CPU table, in the order of a step."""
        shape = self.shape
        h, v, layers = shape.hidden_size, shape.vocab_size, shape.n_layers
        yield from self._row_cases()
        yield self.linear_case("GDN in", shape.gdn_in_proj_rows, h, shape.n_gdn_layers)
        yield self._gdn_case()
        yield self.linear_case("GDN out", h, shape.gdn_value_size, shape.n_gdn_layers)
        yield self.linear_case("attention in", shape.attn_qkv_rows, h, shape.n_attn_layers)
        yield from self._attention_cases()
        yield self.linear_case("attention out", h, shape.n_q_heads * shape.head_dim, shape.n_attn_layers)
        inner = shape.shared_intermediate_size if shape.is_moe else shape.intermediate_size
        yield self.linear_case("gate, up", 2 * inner, h, layers)
        yield self.linear_case("down", h, inner, layers)
        if shape.is_moe:
            yield self.linear_case("router", shape.n_experts + 1, h, layers, "kept")
            yield self._moe_case()
        yield self.linear_case("head", v, h, 1, "sensitive")
        yield from self._sample_cases()

    def _row_cases(self) -> Iterator[Case]:
        shape, act, inputs = self.shape, self.activations, self.batch.inputs
        h, v, layers = shape.hidden_size, shape.vocab_size, shape.n_layers
        table = _packed(v, h, format_of("sensitive", self.quantize))
        a_row = table.n_bytes / v
        yield self.case(
            "embed",
            f"{v} x {h}",
            1,
            lambda p: embed(p, table, inputs.token_ids, act.residual, inputs.n_tokens),
            lambda m: m * (a_row + 4 * h),
        )
        weight = _floats(h)
        yield self.case(
            "rms_norm",
            f"{h}",
            2 * layers + 1,
            lambda p: rms_norm(p, act.residual, weight, 1e-6, act.normed, inputs.n_tokens),
            lambda m: 6.0 * m * h,
        )
        inner = shape.shared_intermediate_size if shape.is_moe else shape.intermediate_size
        rows = act.residual.shape[0]
        up, out = _floats(rows, 2 * inner), _matrix(rows, inner)
        yield self.case(
            "silu_mul", f"{inner}", layers, lambda p: silu_mul(p, up, out, inputs.n_tokens), lambda m: 10.0 * m * inner
        )

    def _gdn_case(self) -> Case:
        shape, inputs = self.shape, self.batch.inputs
        heads = shape.gdn_heads
        n_v, values, channels = heads.n_v, shape.gdn_value_size, shape.conv_channels
        weights = GdnWeights(_floats(4, channels), _floats(n_v), _floats(n_v), np.ones(heads.v_dim, np.float32))
        rows = self.activations.residual.shape[0]
        proj, out = _floats(rows, shape.gdn_in_proj_rows), _matrix(rows, values)
        state = n_v * heads.k_dim * heads.v_dim
        memory = GdnMemory(self.columns, self.states, self.window_columns, self.window_gates, layer=0)

        def record(program: Program) -> None:
            gdn(program, proj, heads, weights, 1e-6, inputs, memory, out)

        def n_bytes(m: int) -> float:
            n_sequences = m if m <= MAX_DECODES else 1
            rows = m * (4.0 * shape.gdn_in_proj_rows + 2 * values)
            return n_sequences * (8.0 * state + 12.0 * channels) + rows

        # A token and head: decay, S k, the rank-1 update, S q.
        size = f"{n_v} heads {heads.k_dim} x {heads.v_dim}"
        return self.case("gdn", size, shape.n_gdn_layers, record, n_bytes, lambda m: 7.0 * m * state)

    def _attention_cases(self) -> Iterator[Case]:
        shape, inputs = self.shape, self.batch.inputs
        heads = shape.heads
        rows = self.activations.residual.shape[0]
        q_size, kv_row = heads.n_q * heads.dim, 2 * heads.n_kv * heads.dim
        proj, query, out = _floats(rows, heads.row), _matrix(rows, q_size), _matrix(rows, q_size)
        cos, sin = (np.ones((CONTEXT + rows, shape.rotary_dim // 2), np.float32) for _ in range(2))
        norm, cache = _floats(heads.dim), KvPages(self.pages)
        size = f"{heads.n_q} / {heads.n_kv} heads {heads.dim}"
        yield self.case(
            "attn_prepare",
            size,
            shape.n_attn_layers,
            lambda p: attn_prepare(p, proj, heads, AttentionWeights(norm, norm, 1e-6, cos, sin), inputs, cache, query),
            lambda m: m * (4.0 * (heads.row - q_size) + 2 * q_size + 2 * kv_row),
        )

        def n_keys(m: int) -> float:
            """Keys that each row sees, summed over the rows."""
            return m * (CONTEXT + 1.0) if m <= MAX_DECODES else m * (CONTEXT + (m + 1) / 2)

        def n_bytes(m: int) -> float:
            n_read = m * (CONTEXT + 1) if m <= MAX_DECODES else CONTEXT + m
            return n_read * 2.0 * kv_row + m * 8.0 * q_size

        yield self.case(
            "attention",
            size,
            shape.n_attn_layers,
            lambda p: attention(p, query, proj, heads, inputs, cache, self.activations.attn_records, out),
            n_bytes,
            lambda m: 4.0 * q_size * n_keys(m),
        )

    def _moe_case(self) -> Case:
        shape, act = self.shape, self.activations
        assert act.moe is not None and act.router is not None and act.shared is not None
        router, shared, scratch = _randomise(act.router), act.shared, act.moe
        h, e, k, inner = (shape.hidden_size, shape.n_experts, shape.n_experts_per_tok, shape.moe_intermediate_size)
        format = format_of("plain", self.quantize)
        gate_up, down = _packed(2 * inner, h, format, e), _packed(h, inner, format, e)
        an_expert = (gate_up.n_bytes + down.n_bytes) / e

        def record(program: Program) -> None:
            experts = Experts(gate_up, down, Routing(k, shape.norm_topk_prob))
            moe(program, act.normed, router, experts, shared, act.residual, self.batch.inputs.n_tokens, scratch)

        def n_bytes(m: int) -> float:
            n_used = len(np.unique(np.argpartition(router[:m, :e], -k)[:, -k:]))
            return n_used * an_expert + m * (2.0 * h + 4 * e + 12 * h)

        size = f"{k} of {e} experts {inner} x {h}"
        program = Program(self.n_threads)
        record(program)
        return Case(
            "moe", size, shape.n_layers, program, 1, n_bytes, lambda m: 6.0 * m * k * inner * h, format=format.name
        )

    def _sample_cases(self) -> Iterator[Case]:
        v, s, logits = self.shape.vocab_size, self.sampler, self.activations.logits
        target = np.zeros(self.n_seqs, np.int32)
        yield self.case(
            "sample",
            f"{v}, top-k 20, top-p 0.95",
            1,
            lambda p: sample(p, logits, v, s.batch_slots, s.draws.inputs, s.scratch, target),
            lambda m: 4.0 * m * v,
            decodes_only=True,
        )
        row, n_top = np.arange(self.n_seqs, dtype=np.int32), np.full(self.n_seqs, 5, np.int32)
        logprob = _floats(self.n_seqs)
        top_ids, top = zeros((self.n_seqs, 20), np.int32), _floats(self.n_seqs, 20)
        entries = LogprobEntries(self.batch.inputs.n_tokens, row, target, n_top, logprob, top_ids, top)
        yield self.case(
            "logprobs",
            f"{v}, top 5",
            0,
            lambda p: logprobs(p, logits, v, entries),
            lambda m: 4.0 * m * v,
            decodes_only=True,
        )


def allocate(name: str, size: tuple[int, ...], dtype: DTypeLike) -> Array:
    return zeros(size, dtype)


def _floats(*size: int) -> Array:
    return zeros(size, np.float32)


def _matrix(*size: int) -> Array:
    """bfloat16, every byte written: memory that was never written is all one page of zeros to the system."""
    matrix = zeros(size, bfloat16)
    matrix.fill(0.01)
    return matrix


def _randomise(array: Array) -> Array:
    copy(array, np.random.default_rng(0).standard_normal(array.shape, np.float32))
    return array


def _packed(n: int, k: int, format: WeightFormat, n_matrices: int = 1) -> Matrix:
    return Matrix.empty(n, k, format, n_matrices=n_matrices).pack(_matrix(n_matrices * n, k))


def _copied(matrix: Matrix) -> Matrix:
    """The matrix in memory of its own."""
    data = zeros(matrix.whole.data.shape, np.uint8)
    data[:] = matrix.whole.data
    return replace(matrix, segments=(replace(matrix.whole, data=data),))
