"""Decides what is to be run: once, by `build.settle`, from the settings, the device and the headers of a
checkpoint. A plan, the weights and a runner follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from deltic.config import ConfigError, EngineConfig
from deltic.engine.step import Progress
from deltic.models.dflash.shape import DrafterShape
from deltic.models.dflash.weights import DrafterWeights, dummy_drafter, load_drafter
from deltic.models.embedder import Embedder
from deltic.models.fields import read_json
from deltic.models.files import PACKED
from deltic.models.joint_head import HeadShape
from deltic.models.loading import Declaration, Store
from deltic.models.packed import check_packed
from deltic.models.qwen.ngram_table import (
    NgramTable,
    check_ngram_table,
    dummy_ngram_table,
    dummy_table_bytes,
    ngram_table_of,
)
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts, whole
from deltic.models.qwen.weights import AttnLayer, Weights, check_weights, dummy_weights, load_weights
from deltic.models.tensors import quantization_config
from deltic.models.tts import weights as tts
from deltic.models.tts.shape import SpeechShape
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import VisionWeights, dummy_vision, load_vision, picture_rules
from deltic.models.vocoder.encoder import VoiceEncoder
from deltic.models.vocoder.weights import check_vocoder_files, dummy_vocoder, load_vocoder
from deltic.ops.arrays import Array
from deltic.ops.kv_formats import KV_ALIASES, on_device
from deltic.runtime.adapters import NO_ADAPTERS, AdapterRoom

PartWeights = list[list[Weights]]
"""Weights of a language model: by GPU, those of each of its parts. A CPU has one part."""
Vision = tuple[VisionWeights, PictureRules]
"""A vision tower, and how the model wants its pictures."""
WHERE = {"cpu": "a CPU", "cuda": "a GPU"}


@dataclass(frozen=True)
class FoundDrafter:
    """A block drafter of a model, and where it is."""

    directory: Path
    shape: DrafterShape


class Shape(Protocol):
    """The properties of a model's shape that planning needs."""

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    def page_bytes(self, page_size: int = ..., /) -> int: ...


S = TypeVar("S", bound=Shape)


@dataclass(frozen=True, kw_only=True)
class Model(Generic[S]):
    """A model that is to be run."""

    config: EngineConfig
    """The settings that mean something here, with what was decided in the place of defaults: what matrices
    are rounded to, the tokens of a draft, the format of keys and values.
    """
    directory: Path
    """The checkpoint's directory or file; with --dummy the directory of the tokenizer and the template."""
    shape: S
    """Shape of the model; of one that is cut, the most that any part has."""
    n_real: int
    """Ids that can be drawn."""
    tower: VisionShape | None = None
    """The vision tower that is run; None: prompts have no pictures."""
    is_behind_tower: bool = False
    """True of further layers than those of the machine that may have one: they need the positions alone."""
    drafter: FoundDrafter | None = None
    """The block drafter that guesses tokens; None: there is none."""
    adapters: AdapterRoom = NO_ADAPTERS
    cuts: tuple[Cuts, ...] = ()
    """Parts of a model that is cut: each of several GPUs has one, or a run of them."""
    n_gpus: int = 1
    n_host_units: int | None = None
    """Units of the host's memory that all machines of the model have; None: as planned here."""
    notices: tuple[str, ...] = ()
    """Decisions that no setting names, for the log."""
    joint_head: HeadShape | None = None
    """The joint head of a decision model that is run."""
    embedder: Embedder | None = None
    """The way to a vector, of a model that makes those; None: it writes or speaks."""
    no_pictures: str = ""
    """Reason why a vision tower that is there is not run."""


@dataclass(frozen=True, kw_only=True)
class TextModel(Model[ModelShape]):
    """A language model."""

    def load(self, store: Store, progress: Progress, part: Cuts | None = None) -> tuple[Weights, list[str]]:
        """Weights from the checkpoint, or random ones, and notices. part: of a model that is cut."""
        shape, config, on_bytes = self.shape if part is None else part.shape, self.config, of_stage(progress, "weights")
        if config.dummy is not None:
            return dummy_weights(shape, config.seed, on_bytes, quantize=config.rounded, store=store), []
        return load_weights(self.directory, shape, on_bytes, quantize=config.rounded, store=store, cuts=part)

    def ngram_table(self) -> NgramTable | None:
        """The table of the n-gram embedding, of weights that are mapped."""
        if self.config.dummy is not None:
            return dummy_ngram_table(self.shape.ngrams, self.config.seed) if self.shape.ngrams else None
        return ngram_table_of(self.directory, self.shape.ngrams)

    def ngram_table_bytes(self, *, in_memory: bool = False) -> int:
        """Bytes of the table of n-grams in its files; in_memory: of its copy there, for GPUs. Of random
        weights, of one in bfloat16. 0: there is none.

        Raises CheckpointError as `check_files` does.
        """
        if self.shape.ngrams is None:
            return 0
        if self.config.dummy is not None:
            return 2 * self.shape.ngrams.n_params
        return check_ngram_table(self.directory, self.shape.ngrams, in_memory=in_memory)

    def ngram_copy_bytes(self) -> int:
        """Bytes of the host's memory that the copy of the table of n-grams takes: of random rows, which are
        those of one small part again and again, that part's.
        """
        if self.shape.ngrams is not None and self.config.dummy is not None:
            return dummy_table_bytes(self.shape.ngrams)
        return self.ngram_table_bytes(in_memory=True)

    def load_tower(self, store: Store) -> tuple[Vision | None, list[str]]:
        """Weights of the vision tower, if one is run, with how the model wants its pictures; and notices."""
        if self.tower is None:
            return None, [self.no_pictures] if self.no_pictures else []
        if self.config.dummy is not None:
            return (dummy_vision(self.tower, self.config.seed, store), PictureRules()), []
        weights, notices = load_vision(self.directory, self.tower, store=store)
        return (weights, picture_rules(self.directory)), notices

    def load_drafters(self, stores: Sequence[Store]) -> tuple[list[DrafterWeights], list[str]]:
        """Weights of the block drafter in each store, if there is one, random ones beside random ones; and
        notices.
        """
        if self.drafter is None:
            return [], []
        place, shape, quantize = self.drafter.directory, self.drafter.shape, self.config.rounded
        if self.config.dummy is not None:
            return [dummy_drafter(shape, self.config.seed, quantize, store) for store in stores], []
        loaded, notices = zip(*(load_drafter(place, shape, quantize, store) for store in stores), strict=True)
        return [*loaded], notices[0]

    def check_files(self, store: Store) -> None:
        """Raises what `load` does for the names, shapes and types of a checkpoint's tensors. Headers are
        read, and no weights.
        """
        if self.config.dummy is not None:
            return
        if (self.directory / PACKED).exists():
            check_packed(self.directory / PACKED, self.shape)
            self.ngram_table_bytes()
        else:
            check_weights(self.directory, whole(self.shape, self.cuts), self.config.rounded, store)
        self.load_drafters([store])


@dataclass(frozen=True, kw_only=True)
class SpeechModel(Model[SpeechShape]):
    """A speech model."""

    def load(self, store: Store, progress: Progress) -> tuple[tts.SpeechWeights, list[str]]:
        """Weights from the checkpoint, or random ones, and notices."""
        shape, config, on_bytes = self.shape, self.config, of_stage(progress, "weights")
        if config.dummy is not None:
            return tts.dummy_speech_weights(shape, config.seed, on_bytes, quantize=config.rounded, store=store), []
        return tts.load_speech_weights(self.directory, shape, on_bytes, quantize=config.rounded, store=store)

    def load_vocoder(self) -> dict[str, Array]:
        shape, config = self.shape.vocoder, self.config
        return load_vocoder(self.directory, shape) if config.dummy is None else dummy_vocoder(shape, config.seed)

    def check_files(self, store: Store) -> None:
        """Raises what `load` and `load_vocoder` do, as of `TextModel.check_files`."""
        if self.config.dummy is not None:
            return
        declared = Declaration(self.config.rounded, store)
        tts.declare_speech(declared, self.shape)
        tts.check_speech(self.directory, declared)
        check_vocoder_files(self.directory, self.shape.vocoder)
        if self.shape.variant == "base":
            VoiceEncoder.open(self.directory)


def of_stage(progress: Progress, stage: str) -> Callable[[int, int], None]:
    """Reports bytes done, and bytes in all, as the part of a stage that is done."""
    return lambda done, total: progress(stage, done / max(1, total))


def resolve_kv_cache(config: EngineConfig, directory: Path, device: str) -> tuple[str, tuple[str, ...]]:
    """The name of the format of keys and values (KV_FORMATS), and notices. directory: the checkpoint's.
    device: cpu or cuda. Raises ConfigError for a format that the device does not have.
    """
    asked, known = KV_ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype), on_device(device)
    if asked != "auto":
        if asked not in known:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype} is not for {WHERE[device]}, which has {', '.join(known)}"
            )
        return asked, ()
    if config.dummy is not None or not _wants_fp8(directory):
        return "bf16", ()
    if "fp8" in known:
        return "fp8", ("keys and values in fp8, as the checkpoint says",)
    said = (
        f"the checkpoint was made for keys and values in fp8, which {WHERE[device]} does not have: they are bf16; "
        "--kv-cache-dtype int8 takes half the memory"
    )
    return "bf16", (said,)


def _wants_fp8(directory: Path) -> bool:
    """Returns whether a checkpoint says that it was made for keys and values in 8-bit floats."""
    file = (directory if directory.is_dir() else directory.parent) / "config.json"
    scheme = quantization_config(read_json(file)).get("kv_cache_scheme") if file.exists() else None
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"


def largest_keys(weights: Weights, shape: ModelShape) -> dict[str, float]:
    """Returns a bound on the elements of the keys, by the name of the attention layer: a norm makes a head
    sqrt(d) long and multiplies it with 1 + w, rotation leaves pairs their length, and YaRN multiplies those.
    """
    layers = {f"layers.{i}": layer for i, layer in enumerate(weights.layers) if isinstance(layer, AttnLayer)}
    if weights.draft_head is not None:
        layers["draft head (MTP)"] = weights.draft_head.layer
    most = math.sqrt(shape.head_dim) * max(1.0, shape.rope_attention_factor)
    return {name: most * float(abs(1.0 + layer.k_norm).max()) for name, layer in layers.items()}


def check_keys(weights: Weights, shape: ModelShape) -> None:
    """Raises ConfigError where keys may be larger than the format can hold. weights: of the model, or of one
    of its parts, whose norms are whole.
    """
    most = shape.kv_format.largest_key
    if most is None:
        return
    for name, bound in largest_keys(weights, shape).items():
        if not bound <= most:
            raise ConfigError(
                f"--kv-cache-dtype {shape.kv_cache_dtype}: keys of {name} may be as large as {bound:.0f}, and it holds {most:.0f} "
                "at most; give --kv-cache-dtype fp8, whose keys have scales"
            )
