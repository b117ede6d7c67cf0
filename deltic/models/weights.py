"""Checkpoint names and packings, turned at load into the one layout that the forward pass knows.

Stored checkpoints differ by family, by exporter and by age: wrapped or flat names, fused or split
experts, interleaved (Next) or plain projections, one file or many. All of that ends here. Tensors are
copied one at a time from the memory-mapped files straight into their place, so the peak stays near the
size of the weights. Left out: quantised checkpoints, the vision tower and the MTP head.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltic.models.shapes import LINEAR_ATTENTION, CheckpointError, ModelShape, read_json

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_INDEX = "model.safetensors.index.json"
_WRAPPED_PREFIX = "model.language_model."
_FLAT_PREFIX = "model."
_SKIPPED = {"vision": ("model.visual.", "visual."), "MTP": ("mtp.",)}
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.k_scale|\.v_scale)$")
_STORED_DTYPES = ("BF16", "F16", "F32")
# A mapped file counts as resident as far as it was read: map it afresh after this much.
_REMAP_BYTES = 1 << 28
_DUMMY_BLOCK = 4_194_301  # prime, so that no two rows of a tiled matrix start at the same element


@dataclass
class Mlp:
    """SwiGLU of width F. `gate_up` rows: gate, then up."""

    gate_up: Tensor  # [2F, H] bf16
    down: Tensor  # [H, F] bf16


@dataclass
class Moe:
    """E experts of width M and one shared expert of width Ms. `gate_up` rows: gate, then up."""

    router: Tensor  # [E, H] bf16
    gate_up: Tensor  # [E, 2M, H] bf16
    down: Tensor  # [E, H, M] bf16
    shared_gate_up: Tensor  # [2Ms, H] bf16
    shared_down: Tensor  # [H, Ms] bf16
    shared_gate: Tensor  # [H] bf16


@dataclass
class GdnLayer:
    """A gated DeltaNet layer. `in_proj` rows: q | k | v | z | b | a, heads in order within each."""

    input_norm: Tensor  # [H] f32, zero-centred
    in_proj: Tensor  # [2Kd+2Vd+2Hv, H] bf16
    conv: Tensor  # [C, conv_width] f32, the last tap meets the current token
    a_log: Tensor  # [Hv] f32
    dt_bias: Tensor  # [Hv] f32
    norm: Tensor  # [dv] f32, plain
    out_proj: Tensor  # [H, Vd] bf16
    post_norm: Tensor  # [H] f32, zero-centred
    mlp: Mlp | Moe


@dataclass
class AttnLayer:
    """A gated attention layer. `qkv` rows: all query heads | all gates | k heads | v heads."""

    input_norm: Tensor  # [H] f32, zero-centred
    qkv: Tensor  # [2*nq*d + 2*nk*d, H] bf16
    q_norm: Tensor  # [d] f32, zero-centred
    k_norm: Tensor  # [d] f32, zero-centred
    o_proj: Tensor  # [H, nq*d] bf16
    post_norm: Tensor  # [H] f32, zero-centred
    mlp: Mlp | Moe


@dataclass
class Weights:
    """The text stack in the internal layout: contiguous CPU tensors. Tied: `lm_head is embed`."""

    embed: Tensor  # [V, H] bf16
    norm: Tensor  # [H] f32, zero-centred
    lm_head: Tensor  # [V, H] bf16
    layers: list[GdnLayer | AttnLayer]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its path, such as `layers.3.mlp.gate_up`; a tied head is not repeated."""
        yield "embed", self.embed
        yield "norm", self.norm
        if self.lm_head is not self.embed:
            yield "lm_head", self.lm_head
        for i, layer in enumerate(self.layers):
            for owner, prefix in ((layer, f"layers.{i}."), (layer.mlp, f"layers.{i}.mlp.")):
                for field in dataclasses.fields(owner):
                    value = getattr(owner, field.name)
                    if isinstance(value, Tensor):
                        yield prefix + field.name, value

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for _, t in self.named_tensors())


@dataclass(frozen=True)
class _Stored:
    """One checkpoint tensor and where its rows go.

    The rows are `n_groups` equal groups, each holding a share of every part, one part after another:
    so Next interleaves q, k, v and z by key head, and every family interleaves query and gate by head.
    A plain tensor is one group with one part. Parts are views into the internal layout.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]
    n_groups: int = 1

    @property
    def n_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def place(self, source: Tensor) -> None:
        source = source.view(self.n_groups, -1, *self.shape[1:])
        start = 0
        for part in self.parts:
            target = part.view(self.n_groups, -1, *self.shape[1:])
            target.copy_(source[:, start : start + target.shape[1]])
            start += target.shape[1]


@dataclass(frozen=True)
class _Header:
    """What a file says about one tensor, known without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _read_headers(path: Path) -> dict[str, _Header]:
    headers: dict[str, _Header] = {}
    for file, promised in _list_files(path).items():
        with _opened(file) as handle:
            stored = set(handle.keys())
            for name in promised:
                if name not in stored:
                    raise CheckpointError(f"{file}: {_INDEX} lists tensor {name!r} here, but it is missing")
            for name in stored:
                if name in headers:
                    other = headers[name].file
                    raise CheckpointError(f"tensor {name!r} is stored twice: in {other} and in {file}")
                view = handle.get_slice(name)
                headers[name] = _Header(file, tuple(view.get_shape()), str(view.get_dtype()))
    return headers


def _copy(plan: list[_Stored], headers: dict[str, _Header], progress: Progress | None) -> None:
    """Copy every planned tensor into its place, file by file."""
    by_file: dict[Path, list[_Stored]] = {}
    for stored in plan:
        by_file.setdefault(headers[stored.name].file, []).append(stored)
    total, done = sum(s.n_bytes for s in plan), 0
    for file, group in by_file.items():
        for batch in _batches(group):
            with _opened(file) as handle:
                for stored in batch:
                    stored.place(handle.get_tensor(stored.name))
                    done += stored.n_bytes
                    if progress is not None:
                        progress(done, total)


def load_weights(
    path: str | Path, shape: ModelShape, progress: Progress | None = None
) -> tuple[Weights, list[str]]:
    """Load a checkpoint directory, or one safetensors file, into the internal layout.

    Stored bf16, f16 and f32 are accepted; matrices become bf16, norms and gates float32. The second
    result holds notices for the user: what was skipped or converted. Raises CheckpointError, naming the
    tensor, what was expected, what was found and the file, for a missing, unexpected, misshapen or
    quantised tensor and for a damaged or missing file.
    """
    path = Path(path)
    _refuse_quantised(path if path.is_dir() else path.parent)
    headers = _read_headers(path)
    prefix = _WRAPPED_PREFIX if any(n.startswith(_WRAPPED_PREFIX) for n in headers) else _FLAT_PREFIX
    tied = shape.tie_word_embeddings and "lm_head.weight" not in headers
    weights = _allocate(shape, tied)
    plan = list(_plan(weights, shape, prefix, headers))
    notices = _check_plan(plan, headers, path)
    _copy(plan, headers, progress)
    if shape.tie_word_embeddings and not tied:
        if torch.equal(weights.embed, weights.lm_head):
            weights.lm_head = weights.embed
        else:
            notices.append("the config ties the embeddings, but a different lm_head.weight is stored: used")
    return weights, notices


def dummy_weights(shape: ModelShape, seed: int = 0, progress: Progress | None = None) -> Weights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter.

    Matrices have unit fan-in, so activations keep their magnitude, and are tiled from one block of a few
    million normals, since drawing each would take minutes at the large sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_DUMMY_BLOCK, generator=generator)
    scaled: dict[float, Tensor] = {}
    weights = _allocate(shape, shape.tie_word_embeddings)
    total, done, offset = weights.n_bytes, 0, 0
    for name, tensor in weights.named_tensors():
        if tensor.dtype == torch.float32:
            _fill_dummy_vector(name.rpartition(".")[2], tensor, "layers" in name, generator)
        else:
            scale = 0.1 if name == "embed" else tensor.shape[-1] ** -0.5
            if scale not in scaled:
                scaled[scale] = (block * scale).to(torch.bfloat16)
            offset = (offset + 7919 * 131) % _DUMMY_BLOCK
            _tile(tensor.view(-1), scaled[scale], offset)
        done += tensor.nbytes
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


def _tile(flat: Tensor, block: Tensor, offset: int) -> None:
    n = min(flat.numel(), block.numel() - offset)
    flat[:n].copy_(block[offset : offset + n])
    for rest in torch.split(flat[n:], block.numel()):
        rest.copy_(block[: rest.numel()])


def _allocate(shape: ModelShape, tied: bool) -> Weights:
    """Uninitialised weights of the right sizes."""
    h = shape.hidden_size

    def matrix(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16)

    def vector(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32)

    def feed_forward() -> Mlp | Moe:
        f, e = shape.intermediate_size, shape.n_experts
        m, ms = shape.moe_intermediate_size, shape.shared_intermediate_size
        if not shape.is_moe:
            return Mlp(gate_up=matrix(2 * f, h), down=matrix(h, f))
        return Moe(
            router=matrix(e, h),
            gate_up=matrix(e, 2 * m, h),
            down=matrix(e, h, m),
            shared_gate_up=matrix(2 * ms, h),
            shared_down=matrix(h, ms),
            shared_gate=matrix(h),
        )

    def layer(kind: str) -> GdnLayer | AttnLayer:
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
                mlp=feed_forward(),
            )
        return AttnLayer(
            input_norm=vector(h),
            qkv=matrix(shape.attn_qkv_rows, h),
            q_norm=vector(shape.head_dim),
            k_norm=vector(shape.head_dim),
            o_proj=matrix(h, shape.n_q_heads * shape.head_dim),
            post_norm=vector(h),
            mlp=feed_forward(),
        )

    embed = matrix(shape.vocab_size, h)
    head = embed if tied else matrix(shape.vocab_size, h)
    return Weights(embed=embed, norm=vector(h), lm_head=head, layers=[layer(k) for k in shape.layer_types])


def _plan(weights: Weights, shape: ModelShape, prefix: str, names: Collection[str]) -> Iterator[_Stored]:
    """Every tensor the checkpoint must hold. `names` decides between the layouts that exporters use."""

    def plain(name: str, target: Tensor) -> _Stored:
        return _Stored(name, tuple(target.shape), (target,))

    yield plain(f"{prefix}embed_tokens.weight", weights.embed)
    yield plain(f"{prefix}norm.weight", weights.norm)
    if weights.lm_head is not weights.embed:
        yield plain("lm_head.weight", weights.lm_head)
    for i, layer in enumerate(weights.layers):
        p = f"{prefix}layers.{i}."
        yield plain(f"{p}input_layernorm.weight", layer.input_norm)
        yield plain(f"{p}post_attention_layernorm.weight", layer.post_norm)
        if isinstance(layer, GdnLayer):
            yield from _plan_gdn(layer, shape, f"{p}linear_attn.")
        else:
            yield from _plan_attention(layer, shape, f"{p}self_attn.")
        if isinstance(layer.mlp, Moe):
            yield from _plan_moe(layer.mlp, shape, f"{p}mlp.", names)
        else:
            yield from _plan_swiglu(layer.mlp.gate_up, layer.mlp.down, f"{p}mlp.")


def _plan_gdn(layer: GdnLayer, shape: ModelShape, p: str) -> Iterator[_Stored]:
    h, hk, hv = shape.hidden_size, shape.gdn_n_k_heads, shape.gdn_n_v_heads
    kd, vd, c = shape.gdn_key_size, shape.gdn_value_size, shape.conv_channels
    q, k, v, z, b, a = torch.split(layer.in_proj, [kd, kd, vd, vd, hv, hv])
    if shape.family == "qwen3_next":
        yield _Stored(f"{p}in_proj_qkvz.weight", (c + vd, h), (q, k, v, z), n_groups=hk)
        yield _Stored(f"{p}in_proj_ba.weight", (2 * hv, h), (b, a), n_groups=hk)
    else:
        yield _Stored(f"{p}in_proj_qkv.weight", (c, h), (layer.in_proj[:c],))
        yield _Stored(f"{p}in_proj_z.weight", (vd, h), (z,))
        yield _Stored(f"{p}in_proj_b.weight", (hv, h), (b,))
        yield _Stored(f"{p}in_proj_a.weight", (hv, h), (a,))
    yield _Stored(f"{p}conv1d.weight", (c, 1, shape.conv_width), (layer.conv,))
    yield _Stored(f"{p}A_log", (hv,), (layer.a_log,))
    yield _Stored(f"{p}dt_bias", (hv,), (layer.dt_bias,))
    yield _Stored(f"{p}norm.weight", (shape.gdn_v_dim,), (layer.norm,))
    yield _Stored(f"{p}out_proj.weight", (h, vd), (layer.out_proj,))


def _plan_attention(layer: AttnLayer, shape: ModelShape, p: str) -> Iterator[_Stored]:
    h, d = shape.hidden_size, shape.head_dim
    q_rows, kv_rows = shape.n_q_heads * d, shape.n_kv_heads * d
    q, gate, k, v = torch.split(layer.qkv, [q_rows, q_rows, kv_rows, kv_rows])
    yield _Stored(f"{p}q_proj.weight", (2 * q_rows, h), (q, gate), n_groups=shape.n_q_heads)
    yield _Stored(f"{p}k_proj.weight", (kv_rows, h), (k,))
    yield _Stored(f"{p}v_proj.weight", (kv_rows, h), (v,))
    yield _Stored(f"{p}q_norm.weight", (d,), (layer.q_norm,))
    yield _Stored(f"{p}k_norm.weight", (d,), (layer.k_norm,))
    yield _Stored(f"{p}o_proj.weight", (h, q_rows), (layer.o_proj,))


def _plan_swiglu(gate_up: Tensor, down: Tensor, p: str) -> Iterator[_Stored]:
    width, h = gate_up.shape[0] // 2, gate_up.shape[1]
    yield _Stored(f"{p}gate_proj.weight", (width, h), (gate_up[:width],))
    yield _Stored(f"{p}up_proj.weight", (width, h), (gate_up[width:],))
    yield _Stored(f"{p}down_proj.weight", (h, width), (down,))


def _plan_moe(moe: Moe, shape: ModelShape, p: str, names: Collection[str]) -> Iterator[_Stored]:
    h = shape.hidden_size
    yield _Stored(f"{p}gate.weight", (shape.n_experts, h), (moe.router,))
    yield _Stored(f"{p}shared_expert_gate.weight", (1, h), (moe.shared_gate,))
    yield from _plan_swiglu(moe.shared_gate_up, moe.shared_down, f"{p}shared_expert.")
    if f"{p}experts.0.gate_proj.weight" in names:
        for e in range(shape.n_experts):
            yield from _plan_swiglu(moe.gate_up[e], moe.down[e], f"{p}experts.{e}.")
    else:
        yield _Stored(f"{p}experts.gate_up_proj", tuple(moe.gate_up.shape), (moe.gate_up,))
        yield _Stored(f"{p}experts.down_proj", tuple(moe.down.shape), (moe.down,))


def _check_plan(plan: list[_Stored], headers: dict[str, _Header], path: Path) -> list[str]:
    """Compare what is stored with what is needed, before anything is read; returns notices for the user."""
    converted: Counter[str] = Counter()
    for stored in plan:
        header = headers.get(stored.name)
        if header is None:
            raise CheckpointError(
                f"{path}: tensor {stored.name!r} is missing; expected shape {list(stored.shape)}. "
                "Is the download complete, and is the config that of this checkpoint?"
            )
        where = f"{header.file}: tensor {stored.name!r}"
        if header.shape != stored.shape:
            raise CheckpointError(
                f"{where} has the wrong shape: expected {list(stored.shape)} by config.json, found {list(header.shape)}; "
                "configuration and weights do not belong together, get both anew"
            )
        if header.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{where} has the wrong dtype: expected {', '.join(_STORED_DTYPES)}, found {header.dtype}"
            )
        if header.dtype != "BF16" and stored.parts[0].dtype == torch.bfloat16:
            converted[header.dtype] += 1

    skipped: Counter[str] = Counter()
    unexpected = []
    for name in sorted(set(headers).difference(s.name for s in plan)):
        part = next((part for part, prefixes in _SKIPPED.items() if name.startswith(prefixes)), None)
        if part is not None:
            skipped[part] += 1
        elif not _IGNORED.search(name):
            unexpected.append(name)
    if unexpected:
        first = ", ".join(repr(n) for n in unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
        raise CheckpointError(
            f"{headers[unexpected[0]].file}: {len(unexpected)} unexpected tensors: {first}. "
            "The config does not describe this checkpoint, or it is quantised or holds an adapter."
        )
    notices = [f"skipped {n} {part} tensors: only the text stack is run" for part, n in skipped.items()]
    return notices + [f"converted {n} matrices from {dtype} to BF16" for dtype, n in converted.items()]


def _list_files(path: Path) -> dict[Path, list[str]]:
    """The files of a checkpoint, each with the names that the index promises in it."""
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory or safetensors file")
    index = path / _INDEX
    if not index.exists():
        single = path / "model.safetensors"
        found = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path}: no *.safetensors file here, and no other format is supported")
        return {file: [] for file in found}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files, found {weight_map!r}")
    promised: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r} must map to a file name, found {file!r}")
        promised.setdefault(path / file, []).append(name)
    for file in promised:
        if not file.exists():
            raise CheckpointError(f"{file}: {_INDEX} lists this shard, but it is missing; download it again")
    return promised


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The memory-mapped file; what goes wrong with it becomes a CheckpointError that names it."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or unreadable ({error}); download it again") from error


def _batches(group: list[_Stored]) -> Iterator[list[_Stored]]:
    batch: list[_Stored] = []
    n_bytes = 0
    for stored in group:
        batch.append(stored)
        n_bytes += stored.n_bytes
        if n_bytes >= _REMAP_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _refuse_quantised(directory: Path) -> None:
    config_file = directory / "config.json"
    if not config_file.exists():
        return
    config = read_json(config_file)
    for fields in (config, config.get("text_config") or {}):
        quantisation = fields.get("quantization_config")
        if quantisation:
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
            raise CheckpointError(
                f"{config_file}: the checkpoint is quantised (quant_method {method!r}), "
                "which is not supported; use the bfloat16 release of this model"
            )
