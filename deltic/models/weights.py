"""Checkpoint names and packings, turned at load into the one layout that the forward pass knows.

Stored checkpoints differ by family, by exporter and by age: wrapped or flat names, fused or split
experts, interleaved (Next) or plain projections, one file or many. All of that ends here. Matrices are
put together one at a time from the memory-mapped files and packed at once, quantised when asked, so the
peak stays near the size of the packed weights. What was packed can be kept: models/packed.py.
Left out: checkpoints that are quantised already, the vision tower and the MTP head.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltic.models.shapes import LINEAR_ATTENTION, CheckpointError, ModelShape, read_json
from deltic.ops.matrix import FORMATS, ROWS, Matrix, MatrixFormat

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_INDEX = "model.safetensors.index.json"
_WRAPPED_PREFIX = "model.language_model."
_FLAT_PREFIX = "model."
_SKIPPED = {"vision": ("model.visual.", "visual."), "MTP": ("mtp.",)}
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.k_scale|\.v_scale)$")
_STORED_DTYPES = ("BF16", "F16", "F32")
# A mapped file counts as resident as far as it was read: map it afresh after this much.
_REMAP_BYTES = 1 << 28
DUMMY_BLOCK = 4_194_301  # prime, so that no two rows of a tiled matrix start at the same element


@dataclass
class Mlp:
    """SwiGLU of width F. `gate_up` rows: gate, then up."""

    gate_up: Matrix  # [2F, H]
    down: Matrix  # [H, F]


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


def replace_parts(weights: Any, parts: dict[str, Tensor | Matrix], memory: dict[str, Tensor]) -> None:
    """Puts other memory, as bytes, in the place of the parts', which are found in `weights` by the steps of their names."""
    for name, part in parts.items():
        flat, owner = memory[name], weights
        new = (
            dataclasses.replace(part, data=flat.view(part.data.shape))
            if isinstance(part, Matrix)
            else flat.view(part.dtype).view(part.shape)
        )
        *path, last = name.split(".")
        for step in path:
            owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
        if last.isdigit():
            owner[int(last)] = new
        else:
            setattr(owner, last, new)


def weight_bytes(shape: ModelShape, quantize: str | None) -> int:
    """Bytes of the loaded weights of a shape, known without loading anything."""
    return empty_weights(shape, quantize, shape.tie_word_embeddings, device="meta").n_bytes


@dataclass(frozen=True)
class Stored:
    """One checkpoint tensor, the part of the internal layout that it belongs to, and where its rows go there.

    The rows are `n_groups` equal groups, each holding a share of every range of rows, one after another:
    so Next interleaves q, k, v and z by key head, and every family interleaves query and gate by head.
    A plain tensor is one group with one range, by default all rows.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor | Matrix
    ranges: tuple[tuple[int, int], ...] = ()
    n_groups: int = 1
    first: int = 0
    """The first row of a group that is wanted."""

    def place(self, source: Tensor, rows: Tensor) -> None:
        """Copies the stored tensor into its rows of the target as [N, K], or as it is when it has no ranges."""
        if not self.ranges:
            rows.view(-1).copy_(source.reshape(-1))
            return
        source = source.reshape(self.n_groups, -1, rows.shape[1])
        start = self.first
        for first, n in self.ranges:
            target = rows[first : first + n].view(self.n_groups, -1, rows.shape[1])
            target.copy_(source[:, start : start + target.shape[1]])
            start += target.shape[1]


@dataclass(frozen=True)
class Header:
    """What a file says about one tensor, known without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(path: Path) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for file, promised in checkpoint_files(path).items():
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
                headers[name] = Header(file, tuple(view.get_shape()), str(view.get_dtype()))
    return headers


@dataclass
class Files:
    """The memory-mapped files, kept open while tensors are read from them."""

    headers: dict[str, Header]
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _handles: dict[Path, Any] = field(default_factory=dict)
    _n_read: int = 0

    def read(self, name: str) -> Tensor:
        header = self.headers[name]
        if self._n_read > _REMAP_BYTES:
            self.close()
        if header.file not in self._handles:
            self._handles[header.file] = self._open.enter_context(_opened(header.file))
        try:
            tensor: Tensor = self._handles[header.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(header.file, error) from error
        self._n_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        self._open.close()
        self._handles.clear()
        self._n_read = 0


def copy_parts(plan: list[Stored], files: Files, progress: Progress | None, n_threads: int) -> None:
    """Puts every part together in rows of bfloat16, and packs it."""
    sizes = {
        id(s.target): s.target.nbytes if isinstance(s.target, Tensor) else s.target.n_bytes for s in plan
    }
    total, done = sum(sizes.values()), 0
    for _, group in groupby(plan, key=lambda stored: id(stored.target)):
        stored = list(group)
        target = stored[0].target
        if isinstance(target, Matrix):
            rows = torch.empty(target.data.shape[0] * target.n, target.k, dtype=torch.bfloat16)
        else:
            rows = target
        for part in stored:
            part.place(files.read(part.name), rows)
        if isinstance(target, Matrix):
            target.pack(rows, n_threads)
        done += sizes[id(target)]
        if progress is not None:
            progress(done, total)
    files.close()


def load_weights(
    path: str | Path,
    shape: ModelShape,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    n_threads: int = 1,
    device: str | None = None,
) -> tuple[Weights, list[str]]:
    """Load a checkpoint directory, or one safetensors file, into the internal layout.

    Stored bf16, f16 and f32 are accepted; matrices become bf16, then what `quantize` says ("int8", "int4", or "rows", as a GPU
    reads them); norms and gates become float32. All of it on `device`, by default the CPU. The second result holds notices for the user: what was skipped or converted. Raises
    CheckpointError, naming the tensor, what was expected, what was found and the file, for a missing, unexpected,
    misshapen or quantised tensor and for a damaged or missing file.
    """
    path = Path(path)
    refuse_quantised(path if path.is_dir() else path.parent)
    headers = read_headers(path)
    prefix = _WRAPPED_PREFIX if any(n.startswith(_WRAPPED_PREFIX) for n in headers) else _FLAT_PREFIX
    tied = shape.tie_word_embeddings and "lm_head.weight" not in headers
    weights = empty_weights(shape, quantize, tied, device)
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
) -> Weights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter.

    Matrices have unit fan-in, so activations keep their magnitude, and are tiled from one block of a few
    million normals, since drawing each would take minutes at the large sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(DUMMY_BLOCK, generator=generator)
    scaled: dict[float, Tensor] = {}
    weights = empty_weights(shape, quantize, shape.tie_word_embeddings, device)
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


def tile(flat: Tensor, block: Tensor, offset: int) -> None:
    n = min(flat.numel(), block.numel() - offset)
    flat[:n].copy_(block[offset : offset + n])
    for rest in torch.split(flat[n:], block.numel()):
        rest.copy_(block[: rest.numel()])


def format_of(name: str, quantize: str | None) -> MatrixFormat:
    """Of the matrix in a field of this name. A router's near-ties decide which experts run, so it stays as it is; the head, whose errors nothing evens out any
    more, and the embedding, which is often the same matrix, keep 8 bits of int4."""
    if quantize == "rows":
        return ROWS
    if quantize is None or name == "router":
        return FORMATS["bf16"]
    return FORMATS["int8" if name in ("embed", "lm_head", "last down") else quantize]


def empty_weights(shape: ModelShape, quantize: str | None, tied: bool, device: str | None = None) -> Weights:
    """Uninitialised weights of the right sizes and formats."""
    h = shape.hidden_size

    def matrix(name: str, n: int, k: int, n_matrices: int = 1) -> Matrix:
        return Matrix.empty(n, k, format_of(name, quantize), n_matrices, device)

    def vector(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def feed_forward(is_last: bool) -> Mlp | Moe:
        down = "last down" if is_last else "down"
        f, e = shape.intermediate_size, shape.n_experts
        m, ms = shape.moe_intermediate_size, shape.shared_intermediate_size
        if not shape.is_moe:
            return Mlp(gate_up=matrix("gate_up", 2 * f, h), down=matrix(down, h, f))
        return Moe(
            router=matrix("router", e + 1, h),
            gate_up=matrix("gate_up", 2 * m, h, e),
            down=matrix(down, h, m, e),
            shared_gate_up=matrix("gate_up", 2 * ms, h),
            shared_down=matrix(down, h, ms),
        )

    def layer(i: int, kind: str) -> GdnLayer | AttnLayer:
        mlp = feed_forward(i == shape.n_layers - 1)
        if kind == LINEAR_ATTENTION:
            return GdnLayer(
                input_norm=vector(h),
                in_proj=matrix("in_proj", shape.gdn_in_proj_rows, h),
                conv=vector(shape.conv_channels, shape.conv_width),
                a_log=vector(shape.gdn_n_v_heads),
                dt_bias=vector(shape.gdn_n_v_heads),
                norm=vector(shape.gdn_v_dim),
                out_proj=matrix("out_proj", h, shape.gdn_value_size),
                post_norm=vector(h),
                mlp=mlp,
            )
        return AttnLayer(
            input_norm=vector(h),
            qkv=matrix("qkv", shape.attn_qkv_rows, h),
            q_norm=vector(shape.head_dim),
            k_norm=vector(shape.head_dim),
            o_proj=matrix("o_proj", h, shape.n_q_heads * shape.head_dim),
            post_norm=vector(h),
            mlp=mlp,
        )

    embed = matrix("embed", shape.vocab_size, h)
    head = embed if tied else matrix("lm_head", shape.vocab_size, h)
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


def in_order(*sizes: int) -> list[tuple[int, int]]:
    """Ranges (first row, rows) that follow one another."""
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


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


def plan_swiglu(gate_up: Matrix, down: Matrix, p: str) -> Iterator[Stored]:
    width, h = down.k, down.n
    gate, up = in_order(width, width)
    yield Stored(f"{p}gate_proj.weight", (width, h), gate_up, (gate,))
    yield Stored(f"{p}up_proj.weight", (width, h), gate_up, (up,))
    yield Stored(f"{p}down_proj.weight", (h, width), down)


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


def check_plan(plan: list[Stored], headers: dict[str, Header], path: Path) -> list[str]:
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
        if header.dtype != "BF16" and isinstance(stored.target, Matrix):
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


def checkpoint_files(path: Path) -> dict[Path, list[str]]:
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
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: damaged or unreadable ({error}); download it again")


def refuse_quantised(directory: Path) -> None:
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
