"""Finds a model's files: the built-in model, a checkpoint directory, a GGUF file, a hub name, or a shape
without any. A GGUF file stands wherever a directory does: what would be in its files is in its metadata.

Imports no torch: the HTTP process finds the tokenizer and the template here, the engine process the weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from deltic.config import BUILT_IN, ConfigError, EngineConfig
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.gguf import gguf_in, is_gguf, open_gguf, set_name
from deltic.models.gguf_config import document, highest_id
from deltic.models.hub import download, hub_name, is_hub_name, wanted_of
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import ModelShape
from deltic.models.tts.shape import PUBLISHED_SPEECH, SpeechShape, is_speech

DEMO = Path(__file__).parent.parent / "demo"
"""The built-in model. Random weights borrow its tokenizer and template."""


TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "speech_tokenizer/config.json",
)
"""The files of a checkpoint that the HTTP process reads."""

ALL_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def n_real_ids(config: EngineConfig, directory: Path, shape: ModelShape) -> int:
    """Ids that mean something: rows of the embedding past the tokenizer's last id are padding and are never
    drawn.

    A dummy has no tokenizer of its own, and its sampler is to work as hard as the real one's: all ids. Raises
    CheckpointError, also for a --tokenizer with more ids than the model has.
    """
    vocab_size = shape.vocab_size
    if config.tokenizer is not None:
        directory = tokenizer_directory(config)
    elif config.dummy is not None:
        return vocab_size
    try:
        if is_gguf(directory):
            highest = highest_id(open_gguf(directory))
        else:
            file = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_TokenizerFile)
            highest = max([*file.model.vocab.values(), *(token.id for token in file.added_tokens)], default=-1)
    except OSError:
        return vocab_size
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{directory / 'tokenizer.json'}: not a tokenizer file ({error})") from None
    if highest < 0:
        return vocab_size
    if config.tokenizer is not None and highest >= vocab_size:
        raise CheckpointError(
            f"--tokenizer {config.tokenizer}: has ids up to {highest}, but the model's vocabulary has {vocab_size}; it is of another "
            "model"
        )
    return vocab_size if config.dummy is not None else min(vocab_size, highest + 1)


def drawable_ids(config: EngineConfig) -> tuple[int, tuple[int, ...]]:
    """Returns the number of ids a text model draws from, and the ids that end its texts.

    Raises as `locate` and `n_real_ids`.
    """
    directory, shape = locate(config)
    return n_real_ids(config, directory, shape), shape.eos_token_ids


def resolve_model(
    name_or_path: str | Path,
    files: tuple[str, ...] = ALL_FILES,
    revision: str | None = None,
    download_dir: Path | None = None,
) -> Path:
    """The local directory (or single safetensors or GGUF file) of a model: a path as it is, else a hub
    download of `files`, at `revision`, into `download_dir`. Of a directory with a GGUF model and no
    safetensors: its file.

    Raises CheckpointError if the path does not exist, or the hub has no such model or cannot be reached.
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"{name}: --revision is of a name on the hub, and this is a path here; leave it out")
        has_other = not path.is_dir() or next(path.glob("*.safetensors"), None) is not None
        return (None if has_other else gguf_in(path)) or path
    if not is_hub_name(name):
        raise CheckpointError(
            f"{name}: no such directory or file, and not a hub name of the form owner/model or owner/model:Q4_K_M; deltic doctor "
            "names some"
        )
    return download(wanted_of(name, files, revision, download_dir))


def model_directory(config: EngineConfig, files: tuple[str, ...] = ALL_FILES) -> Path:
    """The directory, or GGUF file, of the model that is neither built in nor a dummy. Raises
    CheckpointError.
    """
    return resolve_model(config.model, files, config.revision, config.download_dir)


def model_name(config: EngineConfig) -> str:
    """The name in /v1/models when none is given: the directory's, the GGUF file's, the hub's, or the
    shape's.
    """
    if config.dummy is not None:
        return config.dummy
    path = Path(config.model)
    if is_gguf(path):
        return set_name(path.name)
    if not path.is_dir():
        return str(hub_name(config.model) or config.model)
    snapshots, repository = path.resolve().parent, path.resolve().parent.parent.name
    if snapshots.name == "snapshots" and repository.startswith("models--"):  # in the cache of the hub
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.resolve().name


def text_directory(config: EngineConfig) -> Path:
    """The directory, or GGUF file, with the model's generation defaults. Raises CheckpointError."""
    if config.dummy is not None or config.model == BUILT_IN:
        return DEMO
    return model_directory(config, TEXT_FILES)


def tokenizer_directory(config: EngineConfig) -> Path:
    """The directory, or GGUF file, with the tokenizer and the chat template. Raises CheckpointError."""
    if config.tokenizer is None:
        return text_directory(config)
    directory = resolve_model(config.tokenizer, TEXT_FILES, None, config.download_dir)
    if not is_gguf(directory) and not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"--tokenizer {config.tokenizer}: has no tokenizer.json")
    return directory


def tokenizer_json(config: EngineConfig) -> str:
    """The text of the tokenizer's tokenizer.json. Raises CheckpointError, UnsupportedModelError, OSError."""
    directory = tokenizer_directory(config)
    if is_gguf(directory):
        return msgspec.json.encode(document(directory, "tokenizer.json")).decode()
    return (directory / "tokenizer.json").read_text(encoding="utf-8")


def locate(config: EngineConfig) -> tuple[Path, ModelShape]:
    """The directory, or GGUF file, of the configured model (of the text files, for a dummy) and its shape.

    Raises CheckpointError or UnsupportedModelError.
    """
    if config.dummy is not None:
        try:
            return DEMO, _as_asked(published_shape(config.dummy), config)
        except UnsupportedModelError as error:
            known = f"{error.supported}, {', '.join(PUBLISHED_SPEECH)}"
            raise UnsupportedModelError(error.field, error.found, known) from None
    directory = DEMO if config.model == BUILT_IN else model_directory(config)
    return directory, _as_asked(ModelShape.from_directory(directory), config)


def _as_asked(shape: ModelShape, config: EngineConfig) -> ModelShape:
    """Applies the configuration to a shape. Raises ConfigError for a --rope-scaling that is none."""
    shape = replace(shape, state_dtype=config.state_dtype)
    if config.rope_scaling is None:
        return shape
    try:
        return shape.scaled(config.rope_scaling)
    except UnsupportedModelError as error:
        raise ConfigError(f"--rope-scaling: {error}") from None


def speaks(config: EngineConfig) -> bool:
    """Returns whether the configured model is a speech model. Raises CheckpointError."""
    if config.dummy is not None:
        return config.dummy.lower() in PUBLISHED_SPEECH
    return config.model != BUILT_IN and is_speech(model_directory(config, TEXT_FILES))


def locate_speech(config: EngineConfig) -> tuple[Path, SpeechShape]:
    """Does what `locate` does, for a model that speaks."""
    if config.dummy is not None:
        return DEMO, PUBLISHED_SPEECH[config.dummy.lower()]
    directory = model_directory(config)
    return directory, SpeechShape.from_directory(directory)
