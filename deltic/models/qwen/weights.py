"""Checkpoint names and packings, turned at load into the one layout that the forward pass knows.

Stored checkpoints differ by family, by exporter and by age: wrapped or flat names, fused or split
experts, interleaved (Next) or plain projections, one file or many. All of that ends here. Matrices are
put together one at a time from the memory-mapped files and packed at once, quantised when asked, so the
peak stays near the size of the packed weights. What was packed can be kept: models/packed.py.
Left out: checkpoints that are quantised already, the vision tower and the MTP head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

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
from deltic.models.qwen.shape import LINEAR_ATTENTION, ModelShape
from deltic.ops.matrix import Layout, Matrix

_WRAPPED_PREFIX = "model.language_model."
_FLAT_PREFIX = "model."


@dataclass
class Moe:
    """E experts of width M and one shared expert of width Ms. `gate_up` rows: gate, then up."""

    router: Matrix  # [E + 1, H]: a row an expert, then the gate of the shared expert
    gate_up: Matrix  # E of [2M, H]
    down: Matrix  # E of [H, M]
    shared_gate_up: Matrix  # [2Ms, H]
    shared_down: Matrix  # [H, Ms]


@dataclass
class GdnLayer:
    """A gated DeltaNet layer. `in_proj` rows: q | k | v | z | b | a, heads in order within each."""

    input_norm: Tensor  # [H] f32, zero-centred
    in_proj: Matrix  # [2Kd+2Vd+2Hv, H]
    conv: Tensor  # [C, conv_width] f32, the last tap meets the current token
    a_log: Tensor  # [Hv] f32
    dt_bias: Tensor  # [Hv] f32
    norm: Tensor  # [dv] f32, plain
    out_proj: Matrix  # [H, Vd]
    post_norm: Tensor  # [H] f32, zero-centred
    mlp: Mlp | Moe


@dataclass
class AttnLayer:
    """A gated attention layer. `qkv` rows: all query heads | all gates | k heads | v heads."""

    input_norm: Tensor  # [H] f32, zero-centred
    qkv: Matrix  # [2*nq*d + 2*nk*d, H]
    q_norm: Tensor  # [d] f32, zero-centred
    k_norm: Tensor  # [d] f32, zero-centred
    o_proj: Matrix  # [H, nq*d]
    post_norm: Tensor  # [H] f32, zero-centred
    mlp: Mlp | Moe


@dataclass
class Weights:
    """The text stack in the internal layout: packed matrices and float32 vectors. Tied: `lm_head is embed`."""

    embed: Matrix  # [V, H]
    norm: Tensor  # [H] f32, zero-centred
    lm_head: Matrix  # [V, H]
    layers: list[GdnLayer | AttnLayer]

    def named_parts(self) -> Iterator[tuple[str, Tensor | Matrix]]:
        """Everything with its path, such as `layers.3.mlp.gate_up`; a tied head is not repeated."""
        yield "embed", self.embed
        yield "norm", self.norm
        if self.lm_head is not self.embed:
            yield "lm_head", self.lm_head
        for i, layer in enumerate(self.layers):
            for owner, prefix in ((layer, f"layers.{i}."), (layer.mlp, f"layers.{i}.mlp.")):
                for f in dataclasses.fields(owner):
                    value = getattr(owner, f.name)
                    if isinstance(value, Tensor | Matrix):
                        yield prefix + f.name, value

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The memory of every part: float32 vectors, and the packed bytes of every matrix."""
        for name, part in self.named_parts():
            yield name, part.data if isinstance(part, Matrix) else part

    def replace(self, memory: dict[str, Tensor]) -> None:
        """Puts other memory, as bytes by the names of `named_tensors`, in the place of every part's."""
        tied = self.lm_head is self.embed
        replace_parts(self, dict(self.named_parts()), memory)
        if tied:
            self.lm_head = self.embed

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for _, t in self.named_tensors())


def weight_bytes(shape: ModelShape, quantize: str | None, layout: Layout = "strips") -> int:
    """Bytes of the loaded weights of a shape, known without loading anything."""
    return empty_weights(shape, quantize, shape.tie_word_embeddings, "meta", layout).n_bytes


def load_weights(
    path: str | Path,
    shape: ModelShape,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    n_threads: int = 1,
    device: str | None = None,
    layout: Layout = "strips",
) -> tuple[Weights, list[str]]:
    """Load a checkpoint directory, or one safetensors file, into the internal layout.

    Stored bf16, f16 and f32 are accepted; matrices become bf16, then what `quantize` says ("int8", "int4"), in the layout that the
    device's kernels read; norms and gates become float32. All of it on `device`, by default the CPU. The second result holds
    notices for the user: what was skipped or converted. Raises CheckpointError, naming the tensor, what was expected, what was
    found and the file, for a missing, unexpected, misshapen or quantised tensor and for a damaged or missing file.
    """
    path = Path(path)
    refuse_quantised(path if path.is_dir() else path.parent)
    headers = read_headers(path)
    prefix = _WRAPPED_PREFIX if any(n.startswith(_WRAPPED_PREFIX) for n in headers) else _FLAT_PREFIX
    tied = shape.tie_word_embeddings and "lm_head.weight" not in headers
    weights = empty_weights(shape, quantize, tied, device, layout)
    plan = list(_plan(weights, shape, prefix, headers))
    notices = check_plan(plan, headers, path)
    copy_parts(plan, Files(headers), progress, n_threads)
    if shape.tie_word_embeddings and not tied:
        if torch.equal(weights.embed.data, weights.lm_head.data):
            weights.lm_head = weights.embed
        else:
            notices.append("the config ties the embeddings, but a different lm_head.weight is stored: used")
    return weights, notices


def dummy_weights(
    shape: ModelShape,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    n_threads: int = 1,
    device: str | None = None,
    layout: Layout = "strips",
) -> Weights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter.

    Matrices have unit fan-in, so activations keep their magnitude, and are tiled from one block of a few
    million normals, since drawing each would take minutes at the large sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(DUMMY_BLOCK, generator=generator)
    scaled: dict[float, Tensor] = {}
    weights = empty_weights(shape, quantize, shape.tie_word_embeddings, device, layout)
    total, done, offset = weights.n_bytes, 0, 0
    for name, part in weights.named_parts():
        if isinstance(part, Tensor):
            values = torch.empty(part.shape)  # drawn on the CPU, so that every device gets the same
            _fill_dummy_vector(name.rpartition(".")[2], values, "layers" in name, generator)
            part.copy_(values)
            done += part.nbytes
        else:
            scale = 0.1 if name == "embed" else part.k**-0.5
            if scale not in scaled:
                scaled[scale] = (block * scale).to(device or "cpu", torch.bfloat16)
            offset = (offset + 7919 * 131) % DUMMY_BLOCK
            rows = torch.empty(part.data.shape[0] * part.n, part.k, dtype=torch.bfloat16, device=device)
            tile(rows.view(-1), scaled[scale], offset)
            part.pack(rows, n_threads)
            done += part.n_bytes
        if progress is not None:
            progress(done, total)
    return weights


def _fill_dummy_vector(field: str, tensor: Tensor, in_layer: bool, generator: torch.Generator) -> None:
    """Values as trained models have them: decays from a few tokens to thousands, norms near their rest."""
    if field == "a_log":
        tensor.uniform_(0.5, 4.0, generator=generator).log_()
    elif field == "dt_bias":  # inverse softplus of a log-uniform step
        tensor.uniform_(math.log(1e-3), math.log(0.3), generator=generator).exp_()
        tensor.add_(torch.log(-torch.expm1(-tensor)))
    elif field == "conv":
        tensor.normal_(0.0, 0.5, generator=generator)
    else:
        plain = field == "norm" and in_layer  # the gated norm; every other one is zero-centred
        tensor.normal_(1.0 if plain else 0.0, 0.1, generator=generator)


def empty_weights(
    shape: ModelShape,
    quantize: str | None,
    tied: bool,
    device: str | None = None,
    layout: Layout = "strips",
) -> Weights:
    """Uninitialised weights of the right sizes and formats."""
    h = shape.hidden_size

    def matrix(n: int, k: int, role: Role = "plain", n_matrices: int = 1) -> Matrix:
        return Matrix.empty(n, k, format_of(role, quantize, layout), n_matrices, device)

    def vector(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def feed_forward(is_last: bool) -> Mlp | Moe:
        down: Role = "sensitive" if is_last else "plain"
        f, e = shape.intermediate_size, shape.n_experts
        m, ms = shape.moe_intermediate_size, shape.shared_intermediate_size
        if not shape.is_moe:
            return Mlp(gate_up=matrix(2 * f, h), down=matrix(h, f, down))
        return Moe(
            router=matrix(e + 1, h, "kept"),
            gate_up=matrix(2 * m, h, n_matrices=e),
            down=matrix(h, m, down, e),
            shared_gate_up=matrix(2 * ms, h),
            shared_down=matrix(h, ms, down),
        )

    def layer(i: int, kind: str) -> GdnLayer | AttnLayer:
        mlp = feed_forward(i == shape.n_layers - 1)
        if kind == LINEAR_ATTENTION:
            return GdnLayer(
                input_norm=vector(h),
                in_proj=matrix(shape.gdn_in_proj_rows, h),
                conv=vector(shape.conv_channels, shape.conv_width),
                a_log=vector(shape.gdn_n_v_heads),
                dt_bias=vector(shape.gdn_n_v_heads),
                norm=vector(shape.gdn_v_dim),
                out_proj=matrix(h, shape.gdn_value_size),
                post_norm=vector(h),
                mlp=mlp,
            )
        return AttnLayer(
            input_norm=vector(h),
            qkv=matrix(shape.attn_qkv_rows, h),
            q_norm=vector(shape.head_dim),
            k_norm=vector(shape.head_dim),
            o_proj=matrix(h, shape.n_q_heads * shape.head_dim),
            post_norm=vector(h),
            mlp=mlp,
        )

    embed = matrix(shape.vocab_size, h, "sensitive")
    head = embed if tied else matrix(shape.vocab_size, h, "sensitive")
    return Weights(
        embed=embed,
        norm=vector(h),
        lm_head=head,
        layers=[layer(i, kind) for i, kind in enumerate(shape.layer_types)],
    )


def _plan(weights: Weights, shape: ModelShape, prefix: str, names: Collection[str]) -> Iterator[Stored]:
    """Every tensor the checkpoint must hold, those of one part together. `names` decides between the layouts that
    exporters use."""

    h, v = shape.hidden_size, shape.vocab_size
    yield Stored(f"{prefix}embed_tokens.weight", (v, h), weights.embed)
    yield Stored(f"{prefix}norm.weight", (h,), weights.norm)
    if weights.lm_head is not weights.embed:
        yield Stored("lm_head.weight", (v, h), weights.lm_head)
    for i, layer in enumerate(weights.layers):
        p = f"{prefix}layers.{i}."
        yield Stored(f"{p}input_layernorm.weight", (h,), layer.input_norm)
        yield Stored(f"{p}post_attention_layernorm.weight", (h,), layer.post_norm)
        if isinstance(layer, GdnLayer):
            yield from _plan_gdn(layer, shape, f"{p}linear_attn.")
        else:
            yield from _plan_attention(layer, shape, f"{p}self_attn.")
        if isinstance(layer.mlp, Moe):
            yield from _plan_moe(layer.mlp, shape, f"{p}mlp.", names)
        else:
            yield from plan_swiglu(layer.mlp.gate_up, layer.mlp.down, f"{p}mlp.")


def _plan_gdn(layer: GdnLayer, shape: ModelShape, p: str) -> Iterator[Stored]:
    h, hk, hv = shape.hidden_size, shape.gdn_n_k_heads, shape.gdn_n_v_heads
    kd, vd, c, w = shape.gdn_key_size, shape.gdn_value_size, shape.conv_channels, layer.in_proj
    q, k, v, z, b, a = in_order(kd, kd, vd, vd, hv, hv)
    if shape.family == "qwen3_next":
        yield Stored(f"{p}in_proj_qkvz.weight", (c + vd, h), w, (q, k, v, z), n_groups=hk)
        yield Stored(f"{p}in_proj_ba.weight", (2 * hv, h), w, (b, a), n_groups=hk)
    else:
        yield Stored(f"{p}in_proj_qkv.weight", (c, h), w, ((0, c),))
        yield Stored(f"{p}in_proj_z.weight", (vd, h), w, (z,))
        yield Stored(f"{p}in_proj_b.weight", (hv, h), w, (b,))
        yield Stored(f"{p}in_proj_a.weight", (hv, h), w, (a,))
    yield Stored(f"{p}conv1d.weight", (c, 1, shape.conv_width), layer.conv)
    yield Stored(f"{p}A_log", (hv,), layer.a_log)
    yield Stored(f"{p}dt_bias", (hv,), layer.dt_bias)
    yield Stored(f"{p}norm.weight", (shape.gdn_v_dim,), layer.norm)
    yield Stored(f"{p}out_proj.weight", (h, vd), layer.out_proj)


def _plan_attention(layer: AttnLayer, shape: ModelShape, p: str) -> Iterator[Stored]:
    h, d, w = shape.hidden_size, shape.head_dim, layer.qkv
    q_rows, kv_rows = shape.n_q_heads * d, shape.n_kv_heads * d
    q, gate, k, v = in_order(q_rows, q_rows, kv_rows, kv_rows)
    yield Stored(f"{p}q_proj.weight", (2 * q_rows, h), w, (q, gate), n_groups=shape.n_q_heads)
    yield Stored(f"{p}k_proj.weight", (kv_rows, h), w, (k,))
    yield Stored(f"{p}v_proj.weight", (kv_rows, h), w, (v,))
    yield Stored(f"{p}q_norm.weight", (d,), layer.q_norm)
    yield Stored(f"{p}k_norm.weight", (d,), layer.k_norm)
    yield Stored(f"{p}o_proj.weight", (h, q_rows), layer.o_proj)


def _plan_moe(moe: Moe, shape: ModelShape, p: str, names: Collection[str]) -> Iterator[Stored]:
    h, e, m = shape.hidden_size, shape.n_experts, shape.moe_intermediate_size
    yield Stored(f"{p}gate.weight", (e, h), moe.router, ((0, e),))
    yield Stored(f"{p}shared_expert_gate.weight", (1, h), moe.router, ((e, 1),))
    yield from plan_swiglu(moe.shared_gate_up, moe.shared_down, f"{p}shared_expert.")
    if f"{p}experts.0.gate_proj.weight" in names:
        for i in range(e):
            for name, first in (("gate", 2 * i * m), ("up", (2 * i + 1) * m)):
                yield Stored(f"{p}experts.{i}.{name}_proj.weight", (m, h), moe.gate_up, ((first, m),))
        for i in range(e):
            yield Stored(f"{p}experts.{i}.down_proj.weight", (h, m), moe.down, ((i * h, h),))
    else:
        yield Stored(f"{p}experts.gate_up_proj", (e, 2 * m, h), moe.gate_up)
        yield Stored(f"{p}experts.down_proj", (e, h, m), moe.down)
