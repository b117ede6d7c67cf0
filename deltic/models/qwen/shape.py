"""Reads a model's geometry from a checkpoint's config.json, or takes it from a published name.

Everything that later code sizes by (pools, kernels, plans) comes from one frozen `ModelShape`, so a
config is judged once, here. A config this engine cannot run exactly is refused, never approximated.
Source of the rules: the Hugging Face configs of Qwen3-Next, Qwen3.5 and Qwen3.6 and the model classes
that read them. Nothing here imports torch: the HTTP process and the planner use it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.models.fields import (
    MAX_LAYERS,
    CheckpointError,
    OtherModelError,
    UnsupportedModelError,
    at_most,
    multiple,
    only,
    positive_float,
    positive_int,
    read_flag,
    read_json,
    refuse_limits,
    within,
)
from deltic.models.gguf import is_gguf
from deltic.models.gguf_config import document, naming
from deltic.models.qwen.ngrams import NgramShape, read_ngrams
from deltic.models.yarn import SCALING_FIELDS, YarnScaling, n_positions, rope_fields, rotary_frequencies, yarn_scaling
from deltic.ops.geometry import PAGE_SIZE, AttentionHeads, GdnHeads, IndexHeads
from deltic.ops.kv_formats import KV_FORMATS, KvFormat

if TYPE_CHECKING:
    from deltic.ops.formats import WeightFormat  # brings numpy, which the HTTP process has no use for

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

N_DRAFTED = 32768
"""Ids that a draft head may guess, the first ones. Ids of a byte-pair tokenizer are in the order in which
pairs were merged, so these are the most frequent tokens. Its product with all of them would be most of what
a guess costs.
"""

BF16_BYTES = 2
F32_BYTES = 4

_FAMILY_OF_ARCHITECTURE = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5Model": "qwen3_5",
    "Qwen3_5TextModel": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeModel": "qwen3_5_moe",
    "Qwen3_5MoeTextModel": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3NextModel": "qwen3_next",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    "Qwen4ExpModel": "qwen4_exp",
    "Qwen4ExpTextModel": "qwen4_exp",
}
# Only the outermost model_type is trusted: re-saved files carry the outer name in nested configs.
_FAMILY_OF_MODEL_TYPE = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Geometry of the text stack of one gated-DeltaNet hybrid. Sizes count elements unless named bytes."""

    family: str  # "qwen3_5" | "qwen3_5_moe" | "qwen3_next" | "qwen4_exp"
    vocab_size: int  # rows of the embedding, padding rows included
    hidden_size: int
    layer_types: tuple[str, ...]  # LINEAR_ATTENTION or FULL_ATTENTION, one a layer
    first_layer: int = 0  # number of the first of these in the model of which a stage has a run
    model_layer_types: tuple[str, ...] = ()  # of that model; (): all layers are here
    embeds: bool = True  # the embedding is here, in front of the first layer
    draws: bool = True  # the norm and the head are here, behind the last layer
    rms_norm_eps: float
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int  # the first rotary_dim dims of each head rotate
    rope_theta: float
    yarn: YarnScaling | None = None
    mrope_section: tuple[int, ...] | None = None
    gdn_n_k_heads: int
    gdn_n_v_heads: int
    gdn_k_dim: int  # per head
    gdn_v_dim: int  # per head
    tiled_value_heads: bool = False  # order of value heads, as GGUF files of qwen35 have it; see GdnHeads
    conv_width: int
    intermediate_size: int = 0  # 0 for MoE
    n_experts: int = 0  # 0 for dense
    n_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    own_experts: tuple[int, int] | None = None
    """The run of experts that a part of a model has (models/qwen/shard.py). None: all."""
    norm_topk_prob: bool = True
    n_streams: int = 1
    """Residual streams. Several are mixed before each block and written to behind it (hyper-connections)."""
    stream_rank: int = 0  # of the mix
    sigmoid_gate: bool = False
    """True if the gate of DeltaNet's norm is a sigmoid, not SiLU."""
    index: IndexHeads | None = None
    """The index that says which keys attention reads. None: all of them."""
    ngrams: NgramShape | None = None
    """The n-gram embedding. None: there is none."""
    head_rows: int = 0
    """Rows of the head, where it is a part of one (models/qwen/shard.py). 0: all of the vocabulary."""
    most_drafted: int = N_DRAFTED
    """Ids that a draft head may guess, at most."""
    shares_experts: bool = False
    """True if all layers have the experts of the first: random ones, where those of each layer do not fit."""
    keeps_hidden: bool = False
    """True if a step keeps the hidden states of all its rows behind the final norm: an embedder's."""
    feature_layers: tuple[int, ...] = ()
    """Layers behind which a step keeps its rows' residual stream, for a block drafter (models/dflash)."""
    has_draft_head: bool = False
    """True if the draft head (MTP) is run: an attention layer more, whose keys and values are in pages."""
    model_drafts: bool = False
    """True of a stage whose model has a draft head: that is behind the last layers, and reads embeddings."""
    kv_cache_dtype: str = "bf16"
    """Format of the keys and values in pages: a name of KV_FORMATS."""
    state_dtype: str = "float32"
    """Type in which recurrent states are kept: float32 or bfloat16."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    formats: Mapping[str, WeightFormat] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Formats of the matrices that are stored quantised, by the names of their tensors (models/stored.py)."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
    ) -> ModelShape:
        """Read a parsed config.json (nested or flat) and, if there is one, generation_config.json.

        Raises UnsupportedModelError for any field that is missing, malformed, or not supported.
        """
        family = _family(config)
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise UnsupportedModelError("text_config", nested, "an object")
        text: Mapping[str, object] = config if nested is None else nested
        _refuse_variants(family, text)

        head_dim = positive_int(text, "head_dim")
        rope = rope_fields(text, "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
        rotary_dim = int(head_dim * positive_float(rope, "partial_rotary_factor", 0.25))
        max_positions = positive_int(text, "max_position_embeddings")
        yarn = yarn_scaling(rope, max_positions)
        shape = cls(
            family=family,
            vocab_size=positive_int(text, "vocab_size"),
            hidden_size=positive_int(text, "hidden_size"),
            layer_types=_layer_types(family, text),
            rms_norm_eps=positive_float(text, "rms_norm_eps", 1e-6),
            n_q_heads=positive_int(text, "num_attention_heads"),
            n_kv_heads=positive_int(text, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=positive_float(rope, "rope_theta"),
            yarn=yarn,
            mrope_section=_mrope_section(rope, rotary_dim),
            gdn_n_k_heads=positive_int(text, "linear_num_key_heads"),
            gdn_n_v_heads=positive_int(text, "linear_num_value_heads"),
            gdn_k_dim=positive_int(text, "linear_key_head_dim"),
            gdn_v_dim=positive_int(text, "linear_value_head_dim"),
            tiled_value_heads=read_flag(text, "tiled_value_heads"),
            conv_width=positive_int(text, "linear_conv_kernel_dim", 4),
            tie_word_embeddings=any([read_flag(fields, "tie_word_embeddings") for fields in (config, text)]),
            max_position_embeddings=n_positions(max_positions, yarn),
            eos_token_ids=_eos_token_ids(generation_config, text, config),
            **_feed_forward(family, text),
            **(flash_next(text) if family == "qwen4_exp" else {}),
        )
        _check_geometry(shape)
        return shape

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelShape:
        """Read config.json and generation_config.json of a checkpoint directory, or the metadata of a GGUF
        file.

        Raises CheckpointError if config.json is absent or either is broken, UnsupportedModelError for a
        field that is missing, malformed or not supported.
        """
        path = Path(directory)
        with naming(path):
            if is_gguf(path):
                return cls.from_config(*(document(path, f"{name}.json") for name in ("config", "generation_config")))
            if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
                raise CheckpointError(f"{path}: a LoRA adapter; give its model, and --lora NAME={path}")
            generation, config = path / "generation_config.json", read_json(path / "config.json")
            return cls.from_config(config, read_json(generation) if generation.exists() else None)

    def scaled(self, rope: Mapping[str, object]) -> ModelShape:
        """Returns the shape with these fields of rope_parameters in place of the checkpoint's scaling of
        positions: rope_type (yarn, or default for none), factor, original_max_position_embeddings and the
        others of YaRN. Other fields of rope_parameters may be there as the model has them.

        Raises UnsupportedModelError for a field that is not one of them, or is out of its range.
        """
        section = None if self.mrope_section is None else list(self.mrope_section)
        own: dict[str, object] = {
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
        }
        own |= {"mrope_section": section, "mrope_interleaved": True}
        for name, value in rope.items():
            if name in own and value != own[name]:
                raise UnsupportedModelError(name, value, f"{own[name]}, as the model has it")
            if name not in SCALING_FIELDS and name not in own:
                raise UnsupportedModelError(name, value, f"fields of it are {', '.join(SCALING_FIELDS)}")
        made_for = self.max_position_embeddings if self.yarn is None else self.yarn.original_max_position_embeddings
        yarn = yarn_scaling(rope, made_for)
        return dataclasses.replace(self, yarn=yarn, max_position_embeddings=n_positions(made_for, yarn))

    @property
    def n_layers(self) -> int:
        return len(self.layer_types)

    @property
    def n_gdn_layers(self) -> int:
        return self.layer_types.count(LINEAR_ATTENTION)

    @property
    def n_attn_layers(self) -> int:
        return self.layer_types.count(FULL_ATTENTION)

    @property
    def stream_size(self) -> int:
        """Width of all residual streams of a token."""
        return self.n_streams * self.hidden_size

    @property
    def n_drafted(self) -> int:
        """Ids that the draft head may guess."""
        return min(self.most_drafted, self.vocab_size)

    @property
    def n_kv_layers(self) -> int:
        """Attention layers whose keys and values a page holds: the draft head's is the last."""
        return self.n_attn_layers + self.has_draft_head

    @property
    def is_moe(self) -> bool:
        return self.n_experts > 0

    @property
    def gdn_key_size(self) -> int:
        """Kd: width of q, and of k, over all key heads of a DeltaNet layer."""
        return self.gdn_n_k_heads * self.gdn_k_dim

    @property
    def heads(self) -> AttentionHeads:
        """Heads of an attention layer, as the operators know them."""
        return AttentionHeads(self.n_q_heads, self.n_kv_heads, self.head_dim)

    @property
    def gdn_heads(self) -> GdnHeads:
        """Heads of a DeltaNet layer, as the operators know them."""
        n_k, n_v = self.gdn_n_k_heads, self.gdn_n_v_heads
        return GdnHeads(n_k, n_v, self.gdn_k_dim, self.gdn_v_dim, self.tiled_value_heads, self.sigmoid_gate)

    @property
    def gdn_value_size(self) -> int:
        """Vd: width of v, and of z, over all value heads of a DeltaNet layer."""
        return self.gdn_n_v_heads * self.gdn_v_dim

    @property
    def conv_channels(self) -> int:
        """C = 2*Kd + Vd: the q, k and v channels that pass through the convolution."""
        return 2 * self.gdn_key_size + self.gdn_value_size

    @property
    def gdn_in_proj_rows(self) -> int:
        """Rows of the one DeltaNet input projection, in the order q | k | v | z | b | a."""
        return self.conv_channels + self.gdn_value_size + 2 * self.gdn_n_v_heads

    @property
    def attn_qkv_rows(self) -> int:
        """Rows of the one attention input projection: query heads | gates | k heads | v heads."""
        return 2 * (self.n_q_heads + self.n_kv_heads) * self.head_dim

    @property
    def recurrent_state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states: [Hv, dk, dv] a DeltaNet layer."""
        size = BF16_BYTES if self.state_dtype == "bfloat16" else F32_BYTES
        return self.n_gdn_layers * self.gdn_n_v_heads * self.gdn_k_dim * self.gdn_v_dim * size

    @property
    def conv_state_bytes(self) -> int:
        """Bytes of one sequence's convolution windows: bfloat16 [C, conv_width-1] a DeltaNet layer."""
        return self.n_gdn_layers * self.conv_channels * (self.conv_width - 1) * BF16_BYTES

    @property
    def ngram_state_bytes(self) -> int:
        """Bytes of one sequence's window of the n-gram embedding's convolution: bfloat16 [window, streams *
        H].
        """
        return 0 if self.ngrams is None else self.ngrams.window * self.stream_size * BF16_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot."""
        return self.recurrent_state_bytes + self.conv_state_bytes + self.ngram_state_bytes

    @property
    def kv_format(self) -> KvFormat:
        return KV_FORMATS[self.kv_cache_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, and of its part of the index, over all attention layers, the
        draft head's too.
        """
        n_bytes = self.n_kv_heads * self.kv_format.head_bytes(self.head_dim)
        if self.index is not None:
            n_bytes += self.index.page_rows * self.index.dim * BF16_BYTES // PAGE_SIZE
        return self.n_kv_layers * n_bytes

    def page_bytes(self, page_size: int = PAGE_SIZE) -> int:
        """Bytes of one page of `page_size` tokens over all attention layers."""
        return page_size * self.kv_bytes_per_token

    @property
    def n_params(self) -> int:
        """Parameters of the text stack. A tied embedding counts once. Vision, MTP and the table of
        n-grams are not included.
        """
        return self._n_matrix_params + self._n_float32_params

    @property
    def n_active_params(self) -> int:
        """Parameters that one token's forward reads. Embedding and head count in full, once each. Of experts
        that are dealt out, the part that falls on these.
        """
        own = len(experts_of(self))
        idle = own - own * self.n_experts_per_tok // max(self.n_experts, 1)
        return self.n_params - self.n_layers * idle * 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def _n_matrix_params(self) -> int:
        h = self.hidden_size
        embed = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        gdn = (self.gdn_in_proj_rows + self.gdn_value_size) * h
        attn = (self.attn_qkv_rows + self.n_q_heads * self.head_dim) * h
        if self.is_moe:
            expert = len(experts_of(self)) * self.moe_intermediate_size + self.shared_intermediate_size
            ffn = (self.n_experts + 3 * expert + 1) * h
        else:
            ffn = 3 * self.intermediate_size * h
        if self.index is not None:
            attn += self.index.row * h
        mixed = 0 if self.ngrams is None else (self.stream_size + h) * self.ngrams.width
        if self.n_streams > 1:
            n_blocks = 2 * self.n_layers
            mixed += ((n_blocks + 1) * 2 * self.stream_rank + n_blocks * self.n_streams) * self.stream_size
        return embed + self.n_gdn_layers * gdn + self.n_attn_layers * attn + self.n_layers * ffn + mixed

    @property
    def _n_float32_params(self) -> int:
        norms = (2 * self.n_layers + 1) * self.stream_size
        gdn = self.conv_channels * self.conv_width + 2 * self.gdn_n_v_heads + self.gdn_v_dim
        if self.ngrams is not None:
            norms += (3 + self.ngrams.conv_width) * self.stream_size
        attn = 2 * self.head_dim + (0 if self.index is None else 2 * self.index.dim)
        return norms + self.n_gdn_layers * gdn + self.n_attn_layers * attn

    @property
    def rope_attention_factor(self) -> float:
        """Multiplies both cos and sin; 1.0 without YaRN."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def inv_freq(self) -> list[float]:
        """Rotary angles per position, rotary_dim/2 float64 values."""
        return rotary_frequencies(self.rotary_dim, self.rope_theta, self.yarn)


HOW_IT_RUNS = {
    *("shares_experts", "formats", "tiled_value_heads", "has_draft_head", "kv_cache_dtype", "state_dtype"),
    *("head_rows", "most_drafted", "feature_layers", "first_layer", "model_layer_types", "embeds", "draws"),
    "model_drafts",
}
"""Fields of a shape that say how a model is stored or run, not what it is."""


def experts_of(shape: ModelShape) -> range:
    """Returns the numbers of the experts that a part has: all, unless they are dealt out."""
    return range(*(shape.own_experts or (0, shape.n_experts)))


def n_gdn_before(shape: ModelShape) -> int:
    """DeltaNet layers of the model in front of a stage: states in 16 bits are rounded by a layer's number."""
    return shape.model_layer_types[: shape.first_layer].count(LINEAR_ATTENTION)


def stage_of(shape: ModelShape, begin: int, end: int) -> ModelShape:
    """The shape of layers [begin, end) of a model, as one of several machines runs them."""
    types = shape.layer_types
    return dataclasses.replace(
        shape,
        layer_types=types[begin:end],
        first_layer=begin,
        model_layer_types=types,
        embeds=begin == 0,
        draws=end == len(types),
        has_draft_head=shape.has_draft_head and end == len(types),
        model_drafts=shape.has_draft_head,
    )


def all_stages(shape: ModelShape) -> ModelShape:
    """The shape of the model of which a stage has a run of layers; of another model its own."""
    if not (types := shape.model_layer_types):
        return shape
    whole = dataclasses.replace(shape, layer_types=types, first_layer=0, model_layer_types=(), embeds=True, draws=True)
    return dataclasses.replace(whole, has_draft_head=shape.model_drafts, model_drafts=False)


def _family(config: Mapping[str, object]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list | tuple):
        raise UnsupportedModelError("architectures", architectures, "a list of names")
    for name in architectures:
        if isinstance(name, str) and name in _FAMILY_OF_ARCHITECTURE:
            return _FAMILY_OF_ARCHITECTURE[name]
    if architectures:
        raise OtherModelError("architectures", architectures, ", ".join(_FAMILY_OF_ARCHITECTURE))
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILY_OF_MODEL_TYPE:
        raise OtherModelError("model_type", model_type, ", ".join(_FAMILY_OF_MODEL_TYPE))
    return _FAMILY_OF_MODEL_TYPE[model_type]


def _refuse_variants(family: str, text: Mapping[str, object]) -> None:
    """Fields that may be absent, but that change the mathematics when they hold anything else."""
    known: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", "swish"),
        "output_gate_type": ("silu", "swish", *(("sigmoid",) if family == "qwen4_exp" else ())),
        "attn_output_gate": (True,),
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "linear_conv_kernel_dim": (4,),
    }
    for field, allowed in known.items():
        only(text, field, (None, *allowed))


def _layer_types(family: str, text: Mapping[str, object]) -> tuple[str, ...]:
    n_layers = positive_int(text, "num_hidden_layers")
    refuse_limits(at_most("num_hidden_layers", n_layers, MAX_LAYERS))
    types = text.get("layer_types")
    if types is None:
        interval = positive_int(text, "full_attention_interval", 4)
        types = [FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(n_layers)]
    known = (LINEAR_ATTENTION, FULL_ATTENTION)
    if family == "qwen4_exp" and isinstance(types, list | tuple):
        types = [
            FULL_ATTENTION if t == "indexed_attention" else t for t in types
        ]  # as files and the published code say it
    if not isinstance(types, list | tuple) or any(t not in known for t in types):
        raise UnsupportedModelError("layer_types", types, f"a list of {' and '.join(known)}")
    if len(types) != n_layers:
        raise UnsupportedModelError("layer_types", f"{len(types)} layers", f"{n_layers}, which num_hidden_layers says")
    if set(types) != set(known):
        raise UnsupportedModelError("layer_types", sorted(set(types)), "a hybrid, with layers of both types")
    return tuple(types)


def _mrope_section(rope: Mapping[str, Any], rotary_dim: int) -> tuple[int, ...] | None:
    section = rope.get("mrope_section")
    if section is None:
        return None
    are_ints = isinstance(section, list | tuple) and all(type(n) is int for n in section)
    if not are_ints or len(section) != 3 or sum(section) != rotary_dim // 2:
        supported = f"three integers that add up to {rotary_dim // 2}"
        raise UnsupportedModelError("mrope_section", section, supported)
    if not read_flag(rope, "mrope_interleaved", True):
        raise UnsupportedModelError("mrope_interleaved", False, "true")
    return tuple(section)


def _feed_forward(family: str, text: Mapping[str, object]) -> dict[str, Any]:
    if family == "qwen3_5" or (family == "qwen3_next" and text.get("num_experts") == 0):
        if text.get("num_experts"):
            raise UnsupportedModelError("num_experts", text["num_experts"], "absent in a dense architecture")
        return {"intermediate_size": positive_int(text, "intermediate_size")}
    n_experts = positive_int(text, "num_experts")
    n_used = positive_int(text, "num_experts_per_tok")
    fits = n_used <= n_experts
    refuse_limits(("num_experts_per_tok", n_used, fits, f"at most num_experts = {n_experts}"))
    return {
        "n_experts": n_experts,
        "n_experts_per_tok": n_used,
        "moe_intermediate_size": positive_int(text, "moe_intermediate_size"),
        "shared_intermediate_size": positive_int(text, "shared_expert_intermediate_size"),
        # Qwen3.5 has no such field and always renormalises.
        "norm_topk_prob": family in ("qwen3_5", "qwen3_5_moe") or read_flag(text, "norm_topk_prob", True),
    }


def flash_next(text: Mapping[str, object]) -> dict[str, Any]:
    """The fields of what Qwen3.8-Flash-Next has besides: streams, index, n-grams, the gate."""
    n_streams = positive_int(text, "hc_count", 4)
    names = ("indexer_n_heads", "indexer_head_dim", "indexer_compress_ratio", "indexer_budget")
    index = IndexHeads(*(positive_int(text, name) for name in names))
    refuse_limits(
        within("hc_count", n_streams, 2, MAX_STREAMS),
        ("indexer_kv_heads", text.get("indexer_kv_heads"), text.get("indexer_kv_heads") == 1, "1"),
        ("indexer_compress_ratio", index.ratio, PAGE_SIZE % index.ratio == 0, f"a divisor of {PAGE_SIZE}"),
        multiple("indexer_budget", index.budget, index.ratio),
    )
    linear = [i for i, kind in enumerate(_layer_types("qwen4_exp", text)) if kind == LINEAR_ATTENTION]
    return {
        "n_streams": n_streams,
        "stream_rank": positive_int(text, "hc_lowrank", 320),
        "sigmoid_gate": text.get("output_gate_type") == "sigmoid",
        "index": index,
        "ngrams": read_ngrams(text, _eos_token_ids(text), linear),
    }


MAX_STREAMS = 8
"""Residual streams: the published model has 4."""

MAX_END_IDS = 512
"""Half of what the sampler can ban of a sequence: the rest is for the request's own stop_token_ids."""


def _eos_token_ids(*sources: Mapping[str, object] | None) -> tuple[int, ...]:
    """Every end id that any file names, those of the generation config first."""
    ids: list[int] = []
    for source in sources:
        value = (source or {}).get("eos_token_id")
        if value is None:
            continue
        for token in value if isinstance(value, list | tuple) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UnsupportedModelError("eos_token_id", value, "a token id or a list of token ids")
            if token not in ids:
                ids.append(token)
    if len(ids) > MAX_END_IDS:
        raise UnsupportedModelError("eos_token_id", f"{len(ids)} ids", f"at most {MAX_END_IDS}")
    return tuple(ids)


def _check_geometry(shape: ModelShape) -> None:
    widths = (
        ("hidden_size", shape.hidden_size),
        ("intermediate_size", shape.intermediate_size),
        ("moe_intermediate_size", shape.moe_intermediate_size),
        ("shared_expert_intermediate_size", shape.shared_intermediate_size),
        ("num_attention_heads * head_dim", shape.n_q_heads * shape.head_dim),
        ("linear_num_value_heads * linear_value_head_dim", shape.gdn_value_size),
    )
    refuse_limits(*(multiple(name, width, 32) for name, width in widths))
    if shape.index is not None:
        fits = shape.index.dim % 32 == 0 and shape.index.dim >= shape.rotary_dim
        supported = f"a multiple of 32, at least the {shape.rotary_dim} that rotate"
        limits = [("indexer_head_dim", shape.index.dim, fits, supported), multiple("hc_lowrank", shape.stream_rank, 32)]
        refuse_limits(*limits)
    n_q, n_kv, n_v, n_k = shape.n_q_heads, shape.n_kv_heads, shape.gdn_n_v_heads, shape.gdn_n_k_heads
    rotary, dim = shape.rotary_dim, shape.head_dim
    rotates = 2 <= rotary <= dim and rotary % 2 == 0
    even = f"one that makes an even number of rotary dims, 2 to head_dim = {dim}"
    is_tiled, ends = shape.tiled_value_heads, shape.eos_token_ids
    known = all(i < shape.vocab_size for i in ends)
    refuse_limits(
        ("num_attention_heads", n_q, n_q % n_kv == 0, f"a multiple of num_key_value_heads = {n_kv}"),
        ("linear_num_value_heads", n_v, n_v % n_k == 0, f"a multiple of linear_num_key_heads = {n_k}"),
        ("partial_rotary_factor", rotary / dim, rotates, even),
        ("tiled_value_heads", is_tiled, not is_tiled or n_v != n_k, "false where there are as many key heads"),
        ("eos_token_id", ends, known, f"ids below {shape.vocab_size}"),
    )
