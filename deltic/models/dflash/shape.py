"""Reads the geometry of a block drafter from its config.json: DFlash, DFlash 2 and DSpark heads.

A drafter is a few Qwen3 layers over a target model's hidden states (Chen, Liang, Liu 2026, "DFlash",
arXiv:2602.06036). Its own fields stand at the top, in `dflash_config` or in `dspark_config`; a file of
`speculators` has those of the layers in `transformer_layer_config`. What would change the guesses and is not
supported is refused, though no answer could be wrong by it: it would be slow without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.models.fields import (
    MAX_LAYERS,
    UnsupportedModelError,
    only,
    positive_float,
    positive_int,
    read_flag,
    read_json,
    refuse_limits,
)
from deltic.models.gguf_config import naming
from deltic.models.qwen.shape import FULL_ATTENTION, ModelShape
from deltic.models.yarn import YarnScaling, rope_fields, rotary_frequencies, yarn_scaling
from deltic.ops.geometry import MAX_GROUP, MAX_HEAD_DIM, PAGE_SIZE, AttentionHeads

if TYPE_CHECKING:
    from deltic.ops.formats import WeightFormat

_SLIDING = "sliding_attention"
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    "Qwen3DSparkModel": "dspark",
}
DRAFT_MODEL = "draft_model"
"""The folder of a model that may hold its block drafter."""
MAX_BLOCK = 32
"""Rows of a block, at most: no published one has more than 16."""
LEAST_CHANCE = 0.25
"""Chance of a guess, as the drafter sees it, below which its block ends."""


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Geometry of a block drafter. Sizes count elements."""

    hidden_size: int
    """Width of the target, whose embedding and head it shares."""
    vocab_size: int
    n_layers: int
    intermediate_size: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnScaling | None = None
    windows: tuple[int, ...]
    """Windows by layer: a row sees keys less than so many positions away; 0: all."""
    are_causal: tuple[bool, ...]
    """True by layer if a row of a block does not see the rows behind it."""
    target_layer_ids: tuple[int, ...]
    """Layers of the target behind which the residual stream is read."""
    block_size: int
    """Rows of a block, at most: the last token, and masks."""
    mask_token_id: int
    guesses_at_anchor: bool = False
    """True if a row guesses the token behind it, the first row, too (DSpark); else a mask stands for the
    token that it guesses.
    """
    conv_taps: int = 0
    """Taps of the convolutions within a block, around each mixer and feed-forward (DFlash 2); 0: none."""
    conv_group: int = 0
    """Channels that share a kernel's own part."""
    selector_rank: int = 0
    """Width of the selector's codebooks (DFlash 2); 0: there is none."""
    selector_top_k: int = 0
    markov_rank: int = 0
    """Rank of the term of the previous token (DSpark); 0: there is none."""
    has_confidence: bool = False
    """True if a head says how likely each guess is right (DSpark)."""
    confidence_sees_token: bool = False
    """True if that head reads the previous token's row of the Markov term, too."""
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0
    """Bound of the logits, by a tanh; 0: none."""
    formats: Mapping[str, WeightFormat] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Formats of the matrices that are stored quantised."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DrafterShape:
        """Reads a parsed config.json. Raises UnsupportedModelError for a field that is missing, malformed or
        not supported.
        """
        kind = _kind(config)
        layers = config.get("transformer_layer_config")
        text: Mapping[str, object] = layers if isinstance(layers, Mapping) else config
        own = dict(config)
        for name in ("dflash_config", "dspark_config"):
            fields = config.get(name)
            own |= fields if isinstance(fields, Mapping) else {}
        only({"hidden_act": text.get("hidden_act", "silu")}, "hidden_act", ("silu", "swish"))
        only({"attention_bias": text.get("attention_bias") or False}, "attention_bias", (False,))
        only({"is_neox_style": own.get("is_neox_style", True)}, "is_neox_style", (True,))
        for name in ("attention_sink_bias", "add_swa_attention_sink_bias"):
            only({name: own.get(name) or False}, name, (False,))
        n_layers, vocab_size = positive_int(text, "num_hidden_layers"), positive_int(text, "vocab_size")
        refuse_limits(("num_hidden_layers", n_layers, n_layers <= MAX_LAYERS, f"at most {MAX_LAYERS}"))
        only({"draft_vocab_size": own.get("draft_vocab_size") or vocab_size}, "draft_vocab_size", (vocab_size,))
        windows = _windows(text, own, n_layers)
        hidden_size, n_q_heads = positive_int(text, "hidden_size"), positive_int(text, "num_attention_heads")
        rope = _rope(text)
        shape = cls(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            n_layers=n_layers,
            intermediate_size=positive_int(text, "intermediate_size"),
            n_q_heads=n_q_heads,
            n_kv_heads=positive_int(text, "num_key_value_heads", n_q_heads),
            head_dim=positive_int(text, "head_dim", hidden_size // n_q_heads),
            rms_norm_eps=positive_float(text, "rms_norm_eps", 1e-6),
            rope_theta=positive_float(rope, "rope_theta", 1e6),
            yarn=yarn_scaling(rope, positive_int(text, "max_position_embeddings", 32768)),
            windows=windows,
            are_causal=_are_causal(own, windows, kind),
            target_layer_ids=_target_layers(own),
            block_size=positive_int(own, "block_size", 16),
            mask_token_id=_mask_token(own, vocab_size),
            guesses_at_anchor=read_flag(own, "sample_from_anchor", kind == "dspark"),
            **(_second_version(own, hidden_size) if kind == "dflash2" else {}),
            **(_markov(own) if kind == "dspark" else {}),
            embedding_scale=positive_float(own, "input_embedding_scale", 1.0),
            output_multiplier=positive_float(own, "output_multiplier", 1.0),
            softcap=positive_float(own, "final_logit_softcapping") if own.get("final_logit_softcapping") else 0.0,
        )
        shape._check()
        return shape

    @classmethod
    def from_directory(cls, directory: Path) -> DrafterShape:
        """Reads config.json of a drafter's directory. Raises CheckpointError if it is absent or broken, and
        UnsupportedModelError, which names the file.
        """
        config = read_json(directory / "config.json")
        with naming(directory):
            return cls.from_config(config)

    def _check(self) -> None:
        (group, rest), dim = divmod(self.n_q_heads, self.n_kv_heads), self.head_dim
        refuse_limits(
            ("num_attention_heads", self.n_q_heads, not rest and group > 0, "a multiple of num_key_value_heads"),
            ("num_attention_heads / num_key_value_heads", group, group <= MAX_GROUP, f"at most {MAX_GROUP}"),
            ("head_dim", dim, dim % 32 == 0 and dim <= MAX_HEAD_DIM, f"a multiple of 32, at most {MAX_HEAD_DIM}"),
            ("hidden_size", self.hidden_size, self.hidden_size % 32 == 0, "a multiple of 32"),
            ("intermediate_size", self.intermediate_size, self.intermediate_size % 32 == 0, "a multiple of 32"),
            ("block_size", self.block_size, 2 <= self.block_size <= MAX_BLOCK, f"2 to {MAX_BLOCK}"),
        )

    def check_target(self, target: ModelShape) -> None:
        """Raises UnsupportedModelError where the drafter is not of a model of this shape."""
        layers = list(self.target_layer_ids)
        last = target.n_layers - 2  # behind the last one others read what is normed; no published head does
        refuse_limits(
            ("hidden_size", self.hidden_size, self.hidden_size == target.hidden_size, f"{target.hidden_size}, as of the model"),
            ("vocab_size", self.vocab_size, self.vocab_size == target.vocab_size, f"{target.vocab_size}, as of the model"),
            ("hc_count", target.n_streams, target.n_streams == 1, "1: what a drafter reads of several streams is not known"),
            ("target_layer_ids", layers, max(layers) <= last, f"layers of the model, 0 to {last}"),
            prefix="draft model: ",
        )  # fmt: skip

    @property
    def most_guesses(self) -> int:
        """Tokens that one block guesses, at most."""
        return self.block_size - (not self.guesses_at_anchor)

    @property
    def is_walked(self) -> bool:
        """True if a guess depends on the one before it in its block."""
        return self.selector_rank > 0 or self.markov_rank > 0 or self.has_confidence

    @property
    def n_conv_kernels(self) -> int:
        """Values that a row has of its own for the convolutions around a mixer or feed-forward."""
        return 2 * self.conv_taps * (self.hidden_size // self.conv_group) if self.conv_taps else 0

    @property
    def heads(self) -> AttentionHeads:
        return AttentionHeads(self.n_q_heads, self.n_kv_heads, self.head_dim, is_gated=False)

    @property
    def page_bytes(self) -> int:
        """Bytes of the bfloat16 keys and values of a page's tokens over all layers."""
        return PAGE_SIZE * self.n_layers * self.n_kv_heads * self.head_dim * 2 * 2

    @property
    def rope_attention_factor(self) -> float:
        """Multiplies both cos and sin; 1.0 without YaRN."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def inv_freq(self) -> list[float]:
        """Rotary angles a position, head_dim / 2 float64 values."""
        return rotary_frequencies(self.head_dim, self.rope_theta, self.yarn)


def is_drafter(directory: Path) -> bool:
    """Returns whether a directory holds a block drafter. Raises CheckpointError for a broken config.json."""
    file = directory / "config.json"
    return file.is_file() and _kind_of_architecture(read_json(file)) is not None


def _kind_of_architecture(config: Mapping[str, object]) -> str | None:
    names = config.get("architectures")
    known = (_ARCHITECTURES.get(name) for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    return next(filter(None, known), None)


def _kind(config: Mapping[str, object]) -> str:
    kind = config.get("speculators_model_type")
    if kind not in ("dflash", "dflash2", "dspark"):
        kind = _kind_of_architecture(config)
    if kind is None:
        supported = f"a block drafter: {', '.join(_ARCHITECTURES)}"
        raise UnsupportedModelError("architectures", config.get("architectures"), supported)
    return str(kind)


def _rope(text: Mapping[str, object]) -> dict[str, object]:
    rope = rope_fields(text, "rope_theta", "partial_rotary_factor")
    by_type = [key for key, value in rope.items() if isinstance(value, Mapping)]
    refuse_limits(("rope_parameters", by_type, not by_type, "one rotation for all layers"))
    only({"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}, "partial_rotary_factor", (1.0,))
    return rope


def _windows(text: Mapping[str, object], own: Mapping[str, object], n_layers: int) -> tuple[int, ...]:
    types, forced = text.get("layer_types"), read_flag(own, "use_swa")
    if types is None:
        types = [_SLIDING if forced else FULL_ATTENTION] * n_layers
    if not isinstance(types, list) or any(name not in (_SLIDING, FULL_ATTENTION) for name in types):
        raise UnsupportedModelError("layer_types", types, f"a list of {FULL_ATTENTION} and {_SLIDING}")
    if len(types) != n_layers:
        raise UnsupportedModelError("layer_types", f"{len(types)} layers", f"{n_layers}, as num_hidden_layers says")
    if forced and _SLIDING not in types:
        types = [_SLIDING] * n_layers
    if _SLIDING not in types:
        return (0,) * n_layers
    fields = {"sliding_window": own.get("swa_window_size") or text.get("sliding_window")}
    window = positive_int(fields, "sliding_window")
    return tuple(window if name == _SLIDING else 0 for name in types)


def _are_causal(own: Mapping[str, object], windows: tuple[int, ...], kind: str) -> tuple[bool, ...]:
    """Reads what says so; else layers with a window are (but for DFlash 2 of speculators)."""
    for name in ("is_causal", "causal"):
        if own.get(name) is not None:
            return (read_flag(own, name),) * len(windows)
    if "sliding_window_non_causal" in own or own.get("speculators_model_type") is not None:
        is_free = read_flag(own, "sliding_window_non_causal", kind == "dflash2")
        return tuple(window > 0 and not is_free for window in windows)
    return tuple(window > 0 for window in windows)


def _target_layers(own: Mapping[str, object]) -> tuple[int, ...]:
    """Layers whose outputs are read. `speculators` counts what comes in, one further."""
    name = "target_layer_ids" if own.get("target_layer_ids") is not None else "aux_hidden_state_layer_ids"
    ids, first = own.get(name), int(name != "target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(id) is not int or id < first for id in ids):
        raise UnsupportedModelError(name, ids, f"a list of layers from {first} on")
    if len(set(ids)) < len(ids):
        raise UnsupportedModelError(name, ids, "each layer once")
    return tuple(id - first for id in ids)


def _mask_token(own: Mapping[str, object], vocab_size: int) -> int:
    id = own.get("mask_token_id")
    if type(id) is not int or not 0 <= id < vocab_size:
        raise UnsupportedModelError("mask_token_id", id, f"an id below {vocab_size}")
    return id


def _second_version(own: Mapping[str, object], hidden_size: int) -> dict[str, Any]:
    group, rank = positive_int(own, "conv_group_size"), positive_int(own, "selector_rank")
    taps, top_k = positive_int(own, "conv_kernel_size"), positive_int(own, "selector_top_k")
    refuse_limits(
        ("conv_group_size", group, hidden_size % group == 0 and group % 16 == 0, "a multiple of 16 that divides hidden_size"),
        ("conv_kernel_size", taps, 2 <= taps <= 4, "2 to 4"),
        ("selector_top_k", top_k, top_k <= 64, "at most 64"),
        ("selector_rank", rank, rank % 32 == 0, "a multiple of 32"),
    )  # fmt: skip
    return {"conv_taps": taps, "conv_group": group, "selector_rank": rank, "selector_top_k": top_k}


def _markov(own: Mapping[str, object]) -> dict[str, Any]:
    rank = positive_int(own, "markov_rank") if own.get("markov_rank") else 0
    only({"markov_head_type": own.get("markov_head_type", "vanilla")}, "markov_head_type", ("vanilla",))
    refuse_limits(("markov_rank", rank, rank % 32 == 0, "a multiple of 32"))
    has_confidence, sees = (read_flag(own, name) for name in ("enable_confidence_head", "confidence_head_with_markov"))
    refuse_limits(("confidence_head_with_markov", sees, rank > 0 or not sees, "false where markov_rank is 0"))
    return {"markov_rank": rank, "has_confidence": has_confidence, "confidence_sees_token": has_confidence and sees}
