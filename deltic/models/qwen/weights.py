"""Checkpoint names and packings, turned at load into the one layout that the forward pass knows.

Stored checkpoints differ by family, by exporter and by age: wrapped or flat names, fused or split
experts, interleaved (Next) or plain projections, one file or many. All of that ends here, but for
names in GGUF files (models/gguf_tensors.py). Matrices are put together one at a time from the
memory-mapped files and packed at once, quantised when asked, so the peak stays near the size of the
packed weights. What was packed can be kept: models/packed.py.
Left out: the vision tower (models/vision).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.models.files import PACKED, check_plan, open_tensors, stored_formats, without_skipped
from deltic.models.loading import (
    COUNTED,
    COUNTED_ROWS,
    HOST,
    Declaration,
    Mlp,
    Parts,
    Progress,
    Role,
    Store,
    Stored,
    copy_parts,
    fill_dummy,
    transposed,
)
from deltic.models.mapped import read_header
from deltic.models.qwen.ngram_table import NgramTable, check_ngram_table, dummy_ngram_table, ngram_table_of
from deltic.models.qwen.shape import LINEAR_ATTENTION, ModelShape, all_stages, experts_of
from deltic.models.qwen.shard import Cuts
from deltic.models.stored import Beside, StoredTensor, formats_of, in_ngram_table, one_name
from deltic.ops.arrays import Array
from deltic.ops.formats import WEIGHT_FORMATS, WeightFormat
from deltic.ops.geometry import DeviceArray, GdnWeights
from deltic.ops.matrix import Layout, Matrix

_FLAT_PREFIX = "model."
_PREFIXES = ("model.language_model.", "language_model.", "", _FLAT_PREFIX)
"""Beginnings of the names of a checkpoint. Those in the middle: of a model saved without its head."""

UNUSED = {"vision": ("model.visual.", "visual."), "MTP": ("mtp.",)}
"""Parts that are not run, and how their names begin. MTP: unless the shape has a draft head."""

_HEAD = "mtp."
_UNREAD = "hyper_connection_mixer.block_inject_weight.weight"
"""Name of what files may have of a connection that writes nothing."""

DRAFT_HEAD = "draft_head."
"""Beginning of the names of the draft head's tensors, and of its parts."""


@dataclass
class Moe:
    """E experts of width M and one shared expert of width Ms. `gate_up` rows: gate, then up. A part of a
    model may have a run of the experts, from the first on.
    """

    router: Matrix  # [E + 1, H]: a row an expert, then the gate of the shared expert
    gate_up: Matrix  # E of [2M, H]
    down: Matrix  # E of [H, M]
    shared_gate_up: Matrix  # [2Ms, H]
    shared_down: Matrix  # [H, Ms]
    first: int = 0


@dataclass
class HyperConnection:
    """Reads a block's input from S residual streams, and says how its output is written to each (a
    hyper-connection):

        n = norm(x), of each stream;  m = sigmoid(up silu(W n / S));  input = mean over streams of m n
        x += 2 sigmoid(V n / S) output, a factor a stream

    W and V are the rows of `down`. The one in front of the head only reads, and has no V. Source:
    transformers, models/qwen4_exp.
    """

    norm: DeviceArray  # [S*H] f32, zero-centred
    down: Matrix  # [R + S, S*H], or [R, S*H]
    up: Matrix  # [S*H, R]


@dataclass
class Indexer:
    """The index of an attention layer (ops.geometry.IndexHeads). `proj` rows: query heads, then the key."""

    proj: Matrix  # [(n_q + 1) * dim, H]
    q_norm: DeviceArray  # [dim] f32, zero-centred
    k_norm: DeviceArray  # [dim] f32, zero-centred


@dataclass
class Ngrams:
    """The n-gram embedding of a layer, without its table (models/qwen/ngrams.py). `proj` rows: a key a
    stream, then the value. Norms are of each stream.
    """

    proj: Matrix  # [S*H + H, E]
    key_norm: DeviceArray  # [S*H] f32, zero-centred
    query_norm: DeviceArray  # [S*H] f32, zero-centred
    conv_norm: DeviceArray  # [S*H] f32, zero-centred
    conv: DeviceArray  # [S*H, conv_width] f32, the last tap meets the current token


@dataclass
class GdnLayer:
    """A gated DeltaNet layer. `in_proj` rows: q | k | v | z | b | a, heads in order within each."""

    input_norm: DeviceArray  # [H] f32, zero-centred; of several streams a HyperConnection
    in_proj: Matrix  # [2Kd+2Vd+2Hv, H]
    conv: DeviceArray  # [C, conv_width] f32, the last tap meets the current token
    a_log: DeviceArray  # [Hv] f32
    dt_bias: DeviceArray  # [Hv] f32
    norm: DeviceArray  # [dv] f32, plain
    out_proj: Matrix  # [H, Vd]
    post_norm: DeviceArray  # [H] f32, zero-centred; of several streams a HyperConnection
    mlp: Mlp | Moe
    ngrams: Ngrams | None = None


@dataclass
class AttnLayer:
    """A gated attention layer. `qkv` rows: all query heads | all gates | k heads | v heads."""

    input_norm: DeviceArray  # [H] f32, zero-centred; of several streams a HyperConnection
    qkv: Matrix  # [2*nq*d + 2*nk*d, H]
    q_norm: DeviceArray  # [d] f32, zero-centred
    k_norm: DeviceArray  # [d] f32, zero-centred
    o_proj: Matrix  # [H, nq*d]
    post_norm: DeviceArray  # [H] f32, zero-centred; of several streams a HyperConnection
    mlp: Mlp | Moe
    indexer: Indexer | None = None


@dataclass
class DraftHead:
    """Guesses the token after the next (MTP): n = norm(layer(fc [norm(embedding) | norm(hidden)])), and then
    the model's own head. The hidden state is that behind the final norm; of several streams it is each of
    them, in front of what the head reads, normed as one row, and a token has a row of fc for each.
    """

    embedding_norm: DeviceArray  # [H] f32, zero-centred, as all of them
    hidden_norm: DeviceArray  # [S*H] f32
    fc: Matrix  # [H, 2H]
    layer: AttnLayer
    norm: DeviceArray  # [H] f32; of several streams a HyperConnection


@dataclass
class Weights(Parts):
    """The text stack in the internal layout: packed matrices and float32 vectors.

    Tied: `lm_head is embed`.
    """

    embed: Matrix  # [V, H]
    norm: DeviceArray  # [H] f32, zero-centred; of several streams a HyperConnection
    lm_head: Matrix  # [V, H]
    layers: list[GdnLayer | AttnLayer]
    draft_head: DraftHead | None = None

    def __post_init__(self) -> None:
        self.ngram_table: NgramTable | None = None
        """The table of the n-gram embedding: no part, since it stays in its files."""

    def gdn(self) -> dict[int, GdnWeights]:
        """Returns what the operators read of each DeltaNet layer, by its number."""
        layers = [(i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, GdnLayer)]
        return {i: GdnWeights(transposed(g.conv), g.a_log, g.dt_bias, g.norm) for i, g in layers}

    def replace(self, memory: dict[str, Array]) -> None:
        """Replaces the parts, as every model's weights do. A tied head stays tied."""
        tied = self.lm_head is self.embed
        super().replace(memory)
        if tied:
            self.lm_head = self.embed


def stored_shape(directory: Path, shape: ModelShape, drafts: bool = False) -> ModelShape:
    """The shape with the formats of what the checkpoint holds quantised. drafts: with its draft head, if it
    has one that can be run. Raises CheckpointError.
    """
    if drafts and (directory / PACKED).exists():
        names, _ = read_header(directory / PACKED)
        shape = dataclasses.replace(shape, has_draft_head=any(name.startswith(DRAFT_HEAD) for name in names))
    elif drafts:
        drafting = dataclasses.replace(shape, has_draft_head=True)
        with contextlib.suppress(CheckpointError):  # of the head; any other comes again below
            tensors = _stored_tensors(directory, drafting)
            drafting = dataclasses.replace(drafting, formats=formats_of(tensors))
            if not any(name.startswith(_HEAD) for name in tensors):
                return dataclasses.replace(drafting, has_draft_head=False)
            if _holds_draft_head(drafting, tensors):
                return drafting
    return dataclasses.replace(shape, formats=stored_formats(directory, UNUSED))


def _stored_tensors(path: Path, shape: ModelShape) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, without the table of n-grams; a draft head's two first matrices as one."""
    tensors = {name: one for name, one in open_tensors(path, unused_parts(shape)).items() if not in_ngram_table(name)}
    if shape.n_streams > 1:
        for name in [name for name in tensors if name.endswith(_UNREAD)]:
            del tensors[name]
        halves = [tensors[name] for part in ("embedding", "hidden") if (name := f"{_HEAD}fc_{part}.weight") in tensors]
        if len(halves) == 2 and all(half.format is None for half in halves):
            tensors = {name: one for name, one in tensors.items() if not name.startswith(f"{_HEAD}fc_")}
            tensors[f"{_HEAD}fc.weight"] = Beside(*halves)
    return tensors


def has_head(directory: Path) -> bool:
    """Returns whether a checkpoint has an output embedding of its own. Raises CheckpointError."""
    packed = directory / PACKED
    return any(
        "lm_head." in name for name in (read_header(packed)[0] if packed.exists() else open_tensors(directory, UNUSED))
    )


def _holds_draft_head(shape: ModelShape, tensors: Mapping[str, StoredTensor]) -> bool:
    """Returns whether all of a draft head is there, and nothing else of one."""
    declared = Declaration(None, COUNTED, shape.formats)
    _declare_draft_head(declared, shape, tensors)
    wanted = {one.name: one.shape for part in declared.plan for one in part.stored}
    return wanted == {name: tensor.shape for name, tensor in tensors.items() if name.startswith(_HEAD)}


def unused_parts(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """UNUSED, as of this shape."""
    return {part: names for part, names in UNUSED.items() if part != "MTP" or not shape.has_draft_head}


def weight_bytes(shape: ModelShape, quantize: str | None, store: Store = COUNTED) -> int:
    """Bytes of the loaded weights of a shape, known without loading anything."""
    return _weight_bytes(shape, quantize, store.layout, tuple(shape.formats.items()))


@functools.lru_cache(maxsize=64)
def _weight_bytes(shape: ModelShape, quantize: str | None, layout: Layout, *formats: object) -> int:
    """formats: those of the shape, which are no part of what makes two shapes equal."""
    store = COUNTED if layout == "panels" else COUNTED_ROWS
    return empty_weights(shape, quantize, shape.tie_word_embeddings, store).n_bytes


def check_weights(
    path: str | Path, shape: ModelShape, quantize: str | None, store: Store = COUNTED, cuts: Cuts | None = None
) -> tuple[Mapping[str, StoredTensor], bool, str, list[str]]:
    """Checks what `load_weights` would load, without loading; of a stage, all of its model's. Returns what is
    stored, whether the head is the embedding, how the names begin, and the notices.
    """
    shape = all_stages(shape)
    path, unused = Path(path), unused_parts(shape)
    tensors: Mapping[str, StoredTensor] = _stored_tensors(path, shape)
    if shape.ngrams is not None:
        check_ngram_table(path, shape.ngrams)
    if cuts is not None:
        tensors = cuts.views(tensors)
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in tensors), _FLAT_PREFIX)
    tied = shape.tie_word_embeddings and "lm_head.weight" not in tensors
    checked = Declaration(quantize, COUNTED if store.layout == "panels" else COUNTED_ROWS, shape.formats)
    declare_weights(checked, shape, tied, prefix, tensors)
    notices = check_plan(checked.plan, tensors, path, unused)
    if not shape.has_draft_head and _holds_draft_head(shape, tensors):
        notices = without_skipped(notices, "MTP")  # drafts are off: it is not missed
    return tensors, tied, prefix, notices


def load_weights(
    path: str | Path,
    shape: ModelShape,
    progress: Progress | None = None,
    *,
    quantize: str | None = None,
    store: Store = HOST,
    cuts: Cuts | None = None,
) -> tuple[Weights, list[str]]:
    """Load a checkpoint directory, or one safetensors or GGUF file, into the internal layout.

    Matrices that are stored quantised keep their format, by shape.formats. Those in bf16, f16 and f32
    become bf16, then what `quantize` says ("int8", "int4"), in the layout that the device's kernels read;
    norms and gates become float32. The store says where. cuts: of a part of the model, with its shape.
    The second result holds notices for the user: what was skipped or converted. Raises CheckpointError,
    naming the tensor, what was expected, what was found and the file, for a missing, unexpected or
    misshapen tensor and for a damaged or missing file.
    """
    path = Path(path)  # what is wrong is told before memory is taken
    tensors, tied, prefix, notices = check_weights(path, shape, quantize, store, cuts)
    parts = Declaration(quantize, store, shape.formats)
    weights = declare_weights(parts, shape, tied, prefix, tensors)
    copy_parts(parts.plan, tensors, store, progress)
    weights.ngram_table = ngram_table_of(path, shape.ngrams)
    if shape.tie_word_embeddings and not tied and cuts is None and shape.embeds and shape.draws:
        embed, head = weights.embed.whole, weights.lm_head.whole
        if embed.format == head.format and (embed.data == head.data).all():
            weights.lm_head = weights.embed
        else:
            notices.append("the config ties the embeddings, but a different lm_head.weight is stored: used")
    return weights, notices


def active_weights(weights: Weights, shape: ModelShape) -> dict[str, int]:
    """Weights that one token is multiplied with, by the name of their format."""
    found: Counter[str] = Counter()
    for name, part in weights.named_parts():
        if name.startswith(DRAFT_HEAD):
            continue  # it guesses, and is not part of what a token costs
        if isinstance(part, Matrix) and (part is not weights.embed or part is weights.lm_head):
            n_matrices = shape.n_experts_per_tok if part.n_matrices > 1 else 1
            for segment in part.segments:
                found[segment.format.name] += n_matrices * segment.n * segment.k
    return dict(found)


def dummy_weights(
    shape: ModelShape, seed: int, progress: Progress | None = None, *, quantize: str | None = None, store: Store = HOST
) -> Weights:
    """Random weights of a shape, the same for the same seed, also of a stage's: for benches, where only sizes
    matter.
    """
    weights = whole = empty_weights(shape, quantize, shape.tie_word_embeddings, store)
    own = None
    if shape.model_layer_types:
        whole = empty_weights(all_stages(shape), quantize, shape.tie_word_embeddings)
        own = {_in_model(name, shape): part for name, part in weights.named_parts()}
    fill_dummy(whole, seed, _dummy_vector, store, progress, own)
    if shape.ngrams is not None:
        weights.ngram_table = dummy_ngram_table(shape.ngrams, seed)
    return weights


def _in_model(name: str, shape: ModelShape) -> str:
    """The name that a part of a stage has in its model."""
    return re.sub(r"^layers\.(\d+)", lambda found: f"layers.{int(found[1]) + shape.first_layer}", name)


_OF_DENSE = (
    (r"layers\.([0-6]|5[7-9]|6[0-3])\.mlp\.down|in_proj_qkv|lm_head", "Q6_K"),
    (r"layers\.([7-9]|1\d|2[0-8])\.mlp\.down|\.[kvo]_proj", "Q5_K"),
    (r"out_proj|mtp\.fc", "Q8_0"),
    (r"", "Q4_K"),
)
_OF_MIXTURE = (
    (r"layers\.3[6-9]\.mlp\.experts\.\*\.down", "Q6_K"),
    (r"experts\.\*\.down|layers\.39\.mlp\.experts", "Q5_K"),
    (r"experts", "Q4_K"),
    (r"", "Q8_0"),
)
MIXES = {"ud-q4_k_xl": {False: _OF_DENSE, True: _OF_MIXTURE}}
"""Files with several types, by whether a model has experts: the first pattern that a tensor's name has is
what counts.

ud-q4_k_xl: Unsloth's UD-Q4_K_XL of Qwen3.6-27B and 35B-A3B. Which kinds of tensors of 35B have which type,
how many of 27B have which, and the sizes of both files are public. Which layers have the larger types is made
up.
"""


def dummy_formats(shape: ModelShape, name: str) -> dict[str, WeightFormat]:
    """The formats of random weights, by `one_name`: all projections in one of WEIGHT_FORMATS, as most
    published files have them, or all matrices but routers and the DeltaNet's b and a as in one of MIXES.
    """
    layers = [(f"{_FLAT_PREFIX}layers.{i}.", kind) for i, kind in enumerate(shape.layer_types)]
    matrices = [f"{_FLAT_PREFIX}embed_tokens.weight", "lm_head.weight"] if name in MIXES else []
    if shape.has_draft_head:
        layers.append((f"{_HEAD}layers.0.", ""))
        matrices += [f"{_HEAD}fc.weight"] if name in MIXES else []
    gdn = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")]
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    mlps = ("experts.*.", "shared_expert.") if shape.is_moe else ("",)
    mlp = [f"mlp.{which}{part}_proj" for which in mlps for part in ("gate", "up", "down")]
    for p, kind in layers:
        matrices += [f"{p}{part}.weight" for part in (gdn if kind == LINEAR_ATTENTION else attention) + mlp]
    rules = MIXES[name][shape.is_moe] if name in MIXES else (("", name),)
    return {one: WEIGHT_FORMATS[next(f for pattern, f in rules if re.search(pattern, one))] for one in matrices}


def _dummy_vector(name: str, size: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Values as trained models have them: decays from a few tokens to thousands, norms near their rest."""
    field = name.rpartition(".")[2]
    if field == "a_log":
        values = np.log(generator.uniform(0.5, 4.0, size))
    elif field == "dt_bias":  # inverse softplus of a log-uniform step
        steps = np.exp(generator.uniform(math.log(1e-3), math.log(0.3), size))
        values = steps + np.log(-np.expm1(-steps))
    elif field == "conv":
        values = generator.normal(0.0, 0.5, size)
    else:
        plain = field == "norm" and "layers" in name  # the gated norm; every other one is zero-centred
        values = generator.normal(1.0 if plain else 0.0, 0.1, size)
    return values.astype(np.float32)


def empty_weights(shape: ModelShape, quantize: str | None, tied: bool, store: Store = COUNTED) -> Weights:
    """Uninitialised weights of the right sizes and formats."""
    declared = SharedExperts if shape.shares_experts else Declaration
    return declare_weights(declared(quantize, store, shape.formats), shape, tied)


class SharedExperts(Declaration):
    """Makes the experts of all layers one time: those of the first."""

    def matrix(self, k: int, *stored: Stored, role: Role = "plain", n_matrices: int = 1) -> Matrix:
        alike = [part.target for part in self.plan if isinstance(part.target, Matrix) and part.target.k == k]
        n = sum(sum(one.sizes) for one in stored) // n_matrices
        shared = next((one for one in alike if one.n_matrices == n_matrices > 1 and one.n == n), None)
        return shared or super().matrix(k, *stored, role=role, n_matrices=n_matrices)


def declare_weights(
    d: Declaration, shape: ModelShape, tied: bool, prefix: str = _FLAT_PREFIX, names: Collection[str] = ()
) -> Weights:
    """The weights. names: of the stored tensors, which decide between the layouts that exporters use. Of a
    stage: an embedding and a head that are not read there have no rows.
    """
    h, v, last = shape.hidden_size, shape.vocab_size, all_stages(shape).n_layers - 1
    embed = lm_head = Matrix(0, h, ())
    if shape.embeds or shape.has_draft_head or (tied and shape.draws):
        embed = d.matrix(h, Stored(f"{prefix}embed_tokens.weight", (v,)), role="sensitive")
    norm = _declare_norm(d, shape, f"{prefix}norm.weight", f"{prefix}hyper_connection_mixer.", injects=False)
    head = Stored("lm_head.weight", (shape.head_rows or v,))
    if shape.draws:
        lm_head = embed if tied else d.matrix(h, head, role="sensitive")
    layers: list[GdnLayer | AttnLayer] = []
    for i, kind in enumerate(shape.layer_types, shape.first_layer):
        p = f"{prefix}layers.{i}."
        down: Role = "sensitive" if i == last else "plain"
        if kind == LINEAR_ATTENTION:
            layers.append(gdn := _declare_gdn(d, shape, p, down, names))
            if shape.ngrams is not None and shape.ngrams.layer == i:
                gdn.ngrams = _declare_ngrams(d, shape, f"{p}ple.")
        else:
            layers.append(_declare_attention(d, shape, p, down, names))
    draft_head = _declare_draft_head(d, shape, names) if shape.has_draft_head else None
    return Weights(embed=embed, norm=norm, lm_head=lm_head, layers=layers, draft_head=draft_head)


def _declare_norm(d: Declaration, shape: ModelShape, name: str, p: str, *, injects: bool = True) -> object:
    """Declares what makes a block's input: a norm of this name, or of several streams the connection whose
    names begin with p.
    """
    h, rank = shape.stream_size, shape.stream_rank
    if shape.n_streams == 1:
        return d.vector(name, h)
    down = [Stored(f"{p}input_mix_weight_down.weight", (rank,))]
    if injects:
        down.append(Stored(f"{p}block_inject_weight.weight", (shape.n_streams,)))
    return HyperConnection(
        norm=d.vector(f"{p}hc_norm.weight", h),
        down=d.matrix(h, *down, role="kept"),
        up=d.matrix(rank, Stored(f"{p}input_mix_weight_up.weight", (h,)), role="kept"),
    )


def _declare_ngrams(d: Declaration, shape: ModelShape, p: str) -> Ngrams:
    ngrams, h = shape.ngrams, shape.stream_size
    assert ngrams is not None
    key, value = Stored(f"{p}key_proj.weight", (h,)), Stored(f"{p}value_proj.weight", (shape.hidden_size,))
    return Ngrams(
        proj=d.matrix(ngrams.width, key, value),
        key_norm=d.vector(f"{p}norm_key.weight", h),
        query_norm=d.vector(f"{p}norm_query.weight", h),
        conv_norm=d.vector(f"{p}norm_conv.weight", h),
        conv=d.vector(f"{p}conv1d.weight", h, ngrams.conv_width, shape=(h, 1, ngrams.conv_width)),
    )


def _declare_draft_head(d: Declaration, shape: ModelShape, names: Collection[str]) -> DraftHead:
    h = shape.hidden_size
    return DraftHead(
        embedding_norm=d.vector(f"{_HEAD}pre_fc_norm_embedding.weight", h),
        hidden_norm=d.vector(f"{_HEAD}pre_fc_norm_hidden.weight", shape.stream_size),
        fc=d.matrix(2 * h, Stored(f"{_HEAD}fc.weight", (h,))),
        layer=_declare_attention(d, shape, f"{_HEAD}layers.0.", "plain", names),
        norm=_declare_norm(d, shape, f"{_HEAD}norm.weight", f"{_HEAD}hyper_connection_mixer.", injects=False),
    )


def _declare_gdn(d: Declaration, shape: ModelShape, p: str, down: Role, names: Collection[str]) -> GdnLayer:
    h, c, hv, m = shape.hidden_size, shape.conv_channels, shape.gdn_n_v_heads, f"{p}linear_attn."
    kd, vd = shape.gdn_key_size, shape.gdn_value_size
    qkv, z, b, a = (
        Stored(f"{m}in_proj_{name}.weight", (n,)) for name, n in (("qkv", c), ("z", vd), ("b", hv), ("a", hv))
    )
    projections = [qkv, z, b, a]
    if shape.family == "qwen3_next":
        ba = Stored(f"{m}in_proj_ba.weight", (hv, hv), n_groups=shape.gdn_n_k_heads)
        qkvz = Stored(f"{m}in_proj_qkvz.weight", (kd, kd, vd, vd), n_groups=shape.gdn_n_k_heads)
        in_gguf = any(part.name in names or one_name(part.name) in d.formats for part in (qkv, z))
        projections = [qkv, z, ba] if in_gguf else [qkvz, ba]
    return GdnLayer(
        input_norm=_declare_norm(d, shape, f"{p}input_layernorm.weight", f"{p}attn_hyper_connection."),
        post_norm=_declare_norm(d, shape, f"{p}post_attention_layernorm.weight", f"{p}mlp_hyper_connection."),
        in_proj=d.matrix(h, *projections),
        conv=d.vector(f"{m}conv1d.weight", c, shape.conv_width, shape=(c, 1, shape.conv_width)),
        a_log=d.vector(f"{m}A_log", hv),
        dt_bias=d.vector(f"{m}dt_bias", hv),
        norm=d.vector(f"{m}norm.weight", shape.gdn_v_dim),
        out_proj=d.matrix(vd, Stored(f"{m}out_proj.weight", (h,))),
        mlp=_declare_feed_forward(d, shape, f"{p}mlp.", down, names),
    )


def _declare_attention(d: Declaration, shape: ModelShape, p: str, down: Role, names: Collection[str]) -> AttnLayer:
    h, m, dim = shape.hidden_size, f"{p}self_attn.", shape.head_dim
    q, kv = shape.n_q_heads * dim, shape.n_kv_heads * dim
    return AttnLayer(
        input_norm=_declare_norm(d, shape, f"{p}input_layernorm.weight", f"{p}attn_hyper_connection."),
        post_norm=_declare_norm(d, shape, f"{p}post_attention_layernorm.weight", f"{p}mlp_hyper_connection."),
        qkv=d.matrix(
            h,
            Stored(f"{m}q_proj.weight", (q, q), n_groups=shape.n_q_heads),
            Stored(f"{m}k_proj.weight", (kv,)),
            Stored(f"{m}v_proj.weight", (kv,)),
        ),
        q_norm=d.vector(f"{m}q_norm.weight", dim),
        k_norm=d.vector(f"{m}k_norm.weight", dim),
        o_proj=d.matrix(q, Stored(f"{m}o_proj.weight", (h,))),
        mlp=_declare_feed_forward(d, shape, f"{p}mlp.", down, names),
        indexer=None if shape.index is None else _declare_indexer(d, shape, f"{m}indexer.", names),
    )


def _declare_indexer(d: Declaration, shape: ModelShape, p: str, names: Collection[str]) -> Indexer:
    assert shape.index is not None
    proj = [Stored(f"{p}index_qk_proj.weight", (shape.index.row,))]
    query, key = (
        Stored(f"{p}{part}_proj.weight", (n * shape.index.dim,)) for part, n in (("q", shape.index.n_q), ("k", 1))
    )
    if any(part.name in names or one_name(part.name) in d.formats for part in (query, key)):  # in GGUF
        proj = [query, key]
    return Indexer(
        proj=d.matrix(shape.hidden_size, *proj, role="kept"),
        q_norm=d.vector(f"{p}q_layernorm.weight", shape.index.dim),
        k_norm=d.vector(f"{p}k_layernorm.weight", shape.index.dim),
    )


def _declare_feed_forward(d: Declaration, shape: ModelShape, p: str, down: Role, names: Collection[str]) -> Mlp | Moe:
    h, e, m = shape.hidden_size, len(experts_of(shape)), shape.moe_intermediate_size
    if not shape.is_moe:
        return d.mlp(p, shape.intermediate_size, h, down)
    router = d.matrix(
        h, Stored(f"{p}gate.weight", (shape.n_experts,)), Stored(f"{p}shared_expert_gate.weight", (1,)), role="kept"
    )
    shared = d.mlp(f"{p}shared_expert.", shape.shared_intermediate_size, h, down)
    first = [f"{p}experts.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    if any(name in names or one_name(name) in d.formats for name in first):
        experts = [f"{p}experts.{i}." for i in range(e)]
        gate_up = [Stored(f"{x}{name}_proj.weight", (m,)) for x in experts for name in ("gate", "up")]
        downs = [Stored(f"{x}down_proj.weight", (h,)) for x in experts]
    else:
        gate_up = [Stored(f"{p}experts.gate_up_proj", (e * 2 * m,), shape=(e, 2 * m, h))]
        downs = [Stored(f"{p}experts.down_proj", (e * h,), shape=(e, h, m))]
    return Moe(
        router=router,
        gate_up=d.matrix(h, *gate_up, n_matrices=e),
        down=d.matrix(m, *downs, role=down, n_matrices=e),
        shared_gate_up=shared.gate_up,
        shared_down=shared.down,
        first=experts_of(shape).start,
    )
