"""Qwen3-TTS: geometry and ids, from a checkpoint's JSON files or by a published name, and the ids of prompt
rows.

A prompt of the talker is a list of rows, each a sum of a text vector and a codec vector. A row is named by
one integer, so that a prompt is a list of ids as for any other model, and the prefix tree finds equal rows.
The id does not say whose voice a row has: that belongs into `Request.prefix_scope`.

A drawn token is a code of codebook 0, or `SpeechShape.end_id`. No torch: the HTTP process reads this, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deltic.models.fields import (
    MAX_LAYERS,
    Limit,
    UnsupportedModelError,
    at_most,
    json_table,
    only,
    positive_float,
    positive_int,
    read_flag,
    read_json,
    refuse_limits,
)
from deltic.models.gguf_config import naming
from deltic.models.qwen.shape import BF16_BYTES
from deltic.models.vocoder.shape import MAX_REF_FRAMES, VocoderShape, vocoder_shape
from deltic.ops.geometry import N_CODES, PAGE_SIZE, AttentionHeads

ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
VARIANTS = ("base", "custom_voice", "voice_design")
N_CONTROL = 1024
"""Ids at the end of the talker's vocabulary that are not codes."""

N_SIDE = 4096
"""Codec sides of a row."""
NO_SIDE = 0
FRAME = N_SIDE - MAX_REF_FRAMES
"""FRAME + r: the sum of the 16 embeddings of the voice's reference frame r."""
SPEAKER = FRAME - 1
"""The voice's speaker vector."""
NO_TEXT = -1


def codec_side(codec_id: int) -> int:
    """The side of a row with an id of the talker's vocabulary."""
    return 1 + codec_id


def row_id(text_id: int = NO_TEXT, side: int = NO_SIDE) -> int:
    """The id of a row: text_id of the text vocabulary, or NO_TEXT; side: NO_SIDE, codec_side(id), SPEAKER or
    FRAME + r.
    """
    return (text_id + 1) * N_SIDE + side


def split_row(row: Any) -> tuple[Any, Any]:
    """(text id or NO_TEXT, side) of a row's id, or of each of an array."""
    return row // N_SIDE - 1, row % N_SIDE


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Talker or predictor: a Qwen3 decoder with per-head norms of q and k and plain rotation of the whole
    head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def qkv_rows(self) -> int:
        """Rows of the one projection q | k | v."""
        return (self.n_q_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def heads(self) -> AttentionHeads:
        """Heads as the operators know them: without gates."""
        return AttentionHeads(self.n_q_heads, self.n_kv_heads, self.head_dim, is_gated=False)

    @property
    def q_rows(self) -> int:
        return self.n_q_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Parameters of all layers' matrices."""
        per_layer = self.qkv_rows + self.q_rows + 3 * self.intermediate_size
        return self.n_layers * per_layer * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self.n_layers * 2 * self.n_kv_heads * self.head_dim * BF16_BYTES

    def inv_freq(self) -> list[float]:
        """Angles per position, head_dim / 2 of them."""
        return [self.rope_theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)]


@dataclass(frozen=True, kw_only=True)
class SpeechSampling:
    """generation_config.json: how codes are drawn where a request does not say. Temperature 0: greedy."""

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0
    max_new_tokens: int = 2048


@dataclass(frozen=True, kw_only=True)
class SpeechIds:
    """Ids with a meaning: of the text vocabulary, then of the talker's."""

    im_start: int = 151644
    im_end: int = 151645
    assistant: int = 77091
    tts_pad: int = 151671
    tts_bos: int = 151672
    tts_eos: int = 151673
    codec_pad: int = 2148
    codec_bos: int = 2149
    codec_eos: int = 2150
    codec_think: int = 2154
    codec_nothink: int = 2155
    codec_think_bos: int = 2156
    codec_think_eos: int = 2157


_TEXT_IDS = {name: f"{name}_token_id" for name in ("im_start", "im_end", "assistant", "tts_pad", "tts_bos", "tts_eos")}
_CODEC_IDS = {
    name: f"{name}_id"
    for name in ("codec_pad", "codec_bos", "codec_think", "codec_nothink", "codec_think_bos", "codec_think_eos")
} | {"codec_eos": "codec_eos_token_id"}
"""Fields of config.json, and of its talker_config, that say the ids."""


@dataclass(frozen=True, kw_only=True)
class SpeechShape:
    """Shape of a Qwen3-TTS checkpoint (12.5 frames a second, 16 codes a frame)."""

    variant: str  # one of VARIANTS
    size: str  # tts_model_size: "0b6" | "1b7"
    talker: DecoderShape
    predictor: DecoderShape
    vocoder: VocoderShape
    text_vocab_size: int
    text_hidden_size: int
    max_position_embeddings: int
    ids: SpeechIds
    languages: Mapping[str, int] = field(default_factory=dict)
    """Lower-case name -> id in the talker's vocabulary.

    The dialects, which only speakers have, not among them.
    """
    dialects: Mapping[str, int] = field(default_factory=dict)
    speakers: Mapping[str, int] = field(default_factory=dict)
    """Lower-case name -> id in the talker's vocabulary."""
    speaker_dialects: Mapping[str, str] = field(default_factory=dict)
    """Speaker -> its dialect, for those that have one."""
    sampling: SpeechSampling = field(default_factory=SpeechSampling)

    @classmethod
    def from_directory(cls, directory: str | Path) -> SpeechShape:
        """Read config.json, generation_config.json and speech_tokenizer/config.json.

        Raises CheckpointError for a file that is absent or broken, UnsupportedModelError for a field that is
        missing, malformed or not supported.
        """
        directory = Path(directory)
        generation = directory / "generation_config.json"
        with naming(directory / "speech_tokenizer"):
            vocoder = read_json(directory / "speech_tokenizer" / "config.json")
            vocoder_shape(vocoder)
        with naming(directory):
            config, said = read_json(directory / "config.json"), read_json(generation) if generation.exists() else {}
            return cls.from_config(config, vocoder, said)

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], tokenizer: Mapping[str, object], generation: Mapping[str, object]
    ) -> SpeechShape:
        """Makes what from_directory does, from the parsed files."""
        variant = config.get("tts_model_type")
        if variant not in VARIANTS:
            raise UnsupportedModelError("tts_model_type", variant, ", ".join(VARIANTS))
        only(config, "tokenizer_type", (None, "qwen3_tts_tokenizer_12hz"))
        talker = json_table(config, "talker_config")
        predictor = json_table(talker, "code_predictor_config")
        only(talker, "num_code_groups", (N_CODES,))
        only(predictor, "num_code_groups", (None, N_CODES))
        languages = _ids(talker, "codec_language_id")
        spoken = json_table(talker, "spk_is_dialect", may_lack=True)
        dialect_of = {name: dialect for name, dialect in spoken.items() if isinstance(dialect, str)}
        names = {name for name in languages if name.endswith("_dialect")} | set(dialect_of.values())
        for speaker, dialect in dialect_of.items():
            if dialect not in languages:
                raise UnsupportedModelError(f"spk_is_dialect.{speaker}", dialect, "a name of codec_language_id")
        shape = cls(
            variant=variant,
            size=str(config.get("tts_model_size") or ""),
            talker=_decoder(talker),
            predictor=_decoder(predictor),
            vocoder=vocoder_shape(tokenizer),
            text_vocab_size=positive_int(talker, "text_vocab_size"),
            text_hidden_size=positive_int(talker, "text_hidden_size"),
            max_position_embeddings=positive_int(talker, "max_position_embeddings"),
            ids=SpeechIds(
                **{name: _id(config, key) for name, key in _TEXT_IDS.items()},
                **{name: _id(talker, key) for name, key in _CODEC_IDS.items()},
            ),
            languages={name.lower(): i for name, i in languages.items() if name not in names},
            dialects={name.lower(): i for name, i in languages.items() if name in names},
            speakers={name.lower(): i for name, i in _ids(talker, "spk_id").items()},
            speaker_dialects={name.lower(): dialect.lower() for name, dialect in dialect_of.items()},
            sampling=_sampling(generation),
        )
        _check(shape)
        return shape

    @property
    def n_codebook(self) -> int:
        """Codes of a codebook: 2048."""
        return self.predictor.vocab_size

    @property
    def end_id(self) -> int:
        """The drawn token that ends an utterance. Those below it are codes."""
        return self.n_codebook

    @property
    def n_drawn(self) -> int:
        """Ids that can be drawn: rows of the head that are kept."""
        return self.n_codebook + 1

    @property
    def n_prompt_ids(self) -> int:
        """Ids of rows are below this number."""
        return (self.text_vocab_size + 1) * N_SIDE

    @property
    def has_projection(self) -> bool:
        """True if the talker's vectors are projected to the predictor's width."""
        return self.talker.hidden_size != self.predictor.hidden_size

    @property
    def takes_instructions(self) -> bool:
        return self.variant == "voice_design" or (self.variant == "custom_voice" and self.size != "0b6")

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot: the talker's last normed output, which the predictor starts from."""
        return self.talker.hidden_size * BF16_BYTES

    def page_bytes(self, page_size: int = PAGE_SIZE) -> int:
        return page_size * self.talker.kv_bytes_per_token

    @property
    def n_params(self) -> int:
        """Parameters of talker and predictor, text table included, norms and biases not."""
        h, p, th = self.talker.hidden_size, self.predictor.hidden_size, self.text_hidden_size
        text = self.text_vocab_size * th + th * th + h * th
        codes = (2 * self.talker.vocab_size + (N_CODES - 1) * self.n_codebook) * h
        heads = (N_CODES - 1) * self.n_codebook * p + (p * h if self.has_projection else 0)
        return text + codes + heads + self.talker.layer_params + self.predictor.layer_params

    def language_id(self, language: str | None, speaker: str | None = None) -> int | None:
        """The id that stands for a language in a prompt; None: none.

        `language`: any case, None or "auto": left to the model. A speaker's dialect takes the place of "auto"
        and of Chinese. Raises KeyError for an unknown name.
        """
        name = (language or "auto").lower()
        dialect = self.speaker_dialects.get((speaker or "").lower())
        if dialect is not None and name in ("auto", "chinese"):
            return self.dialects[dialect]
        return None if name == "auto" else self.languages[name]


def is_speech(directory: str | Path) -> bool:
    """Returns whether config.json in a directory is that of a speech model.

    False without one. Raises CheckpointError for a broken one.
    """
    file = Path(directory) / "config.json"
    return file.exists() and is_speech_config(read_json(file))


def is_speech_config(config: Mapping[str, object]) -> bool:
    architectures = config.get("architectures")
    return (isinstance(architectures, list | tuple) and ARCHITECTURE in architectures) or config.get(
        "model_type"
    ) == "qwen3_tts"


def _id(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnsupportedModelError(name, value, "an id")
    return value


def _ids(fields: Mapping[str, object], name: str) -> dict[str, int]:
    table = json_table(fields, name, may_lack=True)
    return {str(key): _id(table, key) for key in table}


def _decoder(fields: Mapping[str, object]) -> DecoderShape:
    only(fields, "hidden_act", (None, "silu"))
    only(fields, "attention_bias", (None, False))
    if read_flag(fields, "use_sliding_window"):
        raise UnsupportedModelError("use_sliding_window", True, "false")
    # The three position rows of the talker's rope are equal, so its interleaved sections are plain rotation.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = json_table(fields, name, may_lack=True)
    only({"rope_type": rope.get("rope_type", rope.get("type"))}, "rope_type", (None, "default", "mrope"))
    theta = fields if fields.get("rope_theta") is not None else rope
    shape = DecoderShape(
        vocab_size=positive_int(fields, "vocab_size"),
        hidden_size=positive_int(fields, "hidden_size"),
        intermediate_size=positive_int(fields, "intermediate_size"),
        n_layers=positive_int(fields, "num_hidden_layers"),
        n_q_heads=positive_int(fields, "num_attention_heads"),
        n_kv_heads=positive_int(fields, "num_key_value_heads"),
        head_dim=positive_int(fields, "head_dim"),
        rms_norm_eps=positive_float(fields, "rms_norm_eps", 1e-6),
        rope_theta=positive_float(theta, "rope_theta"),
    )
    is_shared = shape.n_q_heads % shape.n_kv_heads == 0
    supported = f"a multiple of num_key_value_heads = {shape.n_kv_heads}"
    refuse_limits(
        at_most("num_hidden_layers", shape.n_layers, MAX_LAYERS),
        ("num_attention_heads", shape.n_q_heads, is_shared, supported),
    )
    return shape


def _sampling(generation: Mapping[str, object]) -> SpeechSampling:
    default = SpeechSampling()
    given: dict[str, Any] = {}
    for name in ("top_k", "subtalker_top_k", "max_new_tokens"):
        if generation.get(name) is not None:
            given[name] = _id(generation, name)
    for name in ("temperature", "top_p", "repetition_penalty", "subtalker_temperature", "subtalker_top_p"):
        if generation.get(name) is not None:
            given[name] = positive_float(generation, name)
    if not read_flag(generation, "do_sample", True):
        given["temperature"] = 0.0
    if not read_flag(generation, "subtalker_dosample", True):
        given["subtalker_temperature"] = 0.0
    return replace(default, **given)


def _check(shape: SpeechShape) -> None:
    vocab, codes = shape.talker.vocab_size, shape.n_codebook
    n_texts, n_found, ids = shape.text_vocab_size, shape.vocoder.codebook_size, shape.ids
    limits: list[Limit] = [
        ("vocab_size", vocab, vocab == codes + N_CONTROL, f"the predictor's {codes} and {N_CONTROL} control ids"),
        ("vocab_size", vocab, codec_side(vocab) <= SPEAKER, f"at most {SPEAKER - 1}"),
        ("codebook_size", n_found, n_found == codes, f"the predictor's {codes}"),
        ("text_vocab_size", n_texts, shape.n_prompt_ids < 2**31, f"at most {2**31 // N_SIDE - 2}"),
    ]
    for name, key in _TEXT_IDS.items():
        limits.append((key, i := getattr(ids, name), i < n_texts, f"an id below {n_texts}"))
    for name, key in _CODEC_IDS.items():
        limits.append((key, i := getattr(ids, name), codes <= i < vocab, f"an id from {codes} to {vocab - 1}"))
    for key, table in (("codec_language_id", {**shape.languages, **shape.dialects}), ("spk_id", shape.speakers)):
        limits += [(f"{key}.{name}", i, i < vocab, f"an id below {vocab}") for name, i in table.items()]
    has_speakers = shape.variant != "custom_voice" or bool(shape.speakers)
    limits.append(("spk_id", {}, has_speakers, "the speakers of a custom_voice model"))
    refuse_limits(*limits)


_LANGUAGES = dict(chinese=2055, english=2050, german=2053, italian=2070, portuguese=2071) | dict(
    spanish=2054, japanese=2058, korean=2064, french=2061, russian=2069
)
_DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
_SPEAKERS = dict(
    serena=3066, vivian=3065, uncle_fu=3010, ryan=3061, aiden=2861, ono_anna=2873, sohee=2864, eric=2875, dylan=2878
)


def _published(variant: str, size: str, hidden_size: int) -> SpeechShape:
    predictor = DecoderShape(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=3072,
        n_layers=5,
        n_q_heads=16,
        n_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    )
    has_speakers = variant == "custom_voice"
    return SpeechShape(
        variant=variant,
        size=size,
        talker=replace(
            predictor, vocab_size=3072, hidden_size=hidden_size, intermediate_size=3 * hidden_size, n_layers=28
        ),
        predictor=predictor,
        vocoder=VocoderShape(),
        text_vocab_size=151936,
        text_hidden_size=2048,
        max_position_embeddings=32768,
        ids=SpeechIds(),
        languages=_LANGUAGES,
        dialects=_DIALECTS,
        speakers=_SPEAKERS if has_speakers else {},
        speaker_dialects={"eric": "sichuan_dialect", "dylan": "beijing_dialect"} if has_speakers else {},
        sampling=SpeechSampling(max_new_tokens=8192),
    )


PUBLISHED_SPEECH: dict[str, SpeechShape] = {
    "qwen3-tts-0.6b": _published("custom_voice", "0b6", 1024),
    "qwen3-tts-0.6b-base": _published("base", "0b6", 1024),
    "qwen3-tts-1.7b": _published("custom_voice", "1b7", 2048),
    "qwen3-tts-1.7b-base": _published("base", "1b7", 2048),
    "qwen3-tts-1.7b-design": _published("voice_design", "1b7", 2048),
}
