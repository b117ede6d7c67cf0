"""Where a model's files are: the built-in model, a checkpoint directory, a hub name, or a shape without any.

Imports no torch: the HTTP process finds the tokenizer and the template here, the engine process the weights.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from deltic.config import BUILT_IN, EngineConfig
from deltic.models.shapes import CheckpointError, ModelShape, published_shape, resolve_model

DEMO = Path(__file__).parent.parent / "demo"
"""The built-in model; random weights borrow its tokenizer and template."""


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def n_real_ids(directory: Path, vocab_size: int) -> int:
    """Ids that mean something: rows of the embedding past the tokenizer's last id are padding and are never drawn."""
    try:
        file = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except OSError:
        return vocab_size
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{directory / 'tokenizer.json'}: not a tokenizer file ({error})") from None
    highest = max(
        [*file.model.vocab.values(), *(token.id for token in file.added_tokens)], default=vocab_size - 1
    )
    return min(vocab_size, highest + 1)


def locate(config: EngineConfig) -> tuple[str, Path, ModelShape]:
    """Name, directory of the text files (tokenizer, template) and shape of the configured model.

    Raises CheckpointError, UnsupportedModelError, or ConfigError for an unknown dummy shape.
    """
    if config.dummy is not None:
        return f"dummy-{config.dummy.lower()}", DEMO, published_shape(config.dummy)
    if config.model == BUILT_IN:
        return "deltic-demo", DEMO, ModelShape.from_directory(DEMO)
    directory = resolve_model(config.model)
    return Path(config.model).name or config.model, directory, ModelShape.from_directory(directory)
