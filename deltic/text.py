"""Text on both sides of the engine: tokenizer, incremental detokenizer, stop strings, and how a checkpoint
wants its tokens drawn.

The tokenizer itself is the `tokenizers` library; this file decides which text may become a special token,
turns ids into bytes one by one, and finds stop strings in a stream. It imports no torch and holds no request
state of its own.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tokenizers
from msgspec import Meta, Struct
from tokenizers import decoders, models, normalizers, pre_tokenizers

from deltic.config import ConfigError, ModelConfig
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.gguf import is_gguf
from deltic.models.gguf_config import PATTERNS, document, read_settings

# The library's own threads would take the engine's cores, and complain when the engine process is started
# again.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TRUSTED = "\udcff"
"""Put before a special token's literal to say that it is meant.

A lone surrogate: no valid JSON or UTF-8 holds one, so no user can write it.
"""

_MOST_BYTES_COMPOSED = 4
"""NFC shortens no text by more than this: 3.5 times (U+1FBE U+0308 U+0341, 7 bytes, to U+0390, 2)."""

pause: ContextVar[Callable[[int], None]] = ContextVar("pause", default=lambda n: None)
"""Called between the parts of what may take long, with the size of the last. Others go first there."""

PIECE_CHARACTERS = 16_384
"""Characters of a longer text that are encoded at once."""

MOST_UNCUT = 1_000_000
"""Characters without a place where a token is certain to end: longer than any real word or white space."""

UNKNOWN_TOKEN = "\N{REPLACEMENT CHARACTER}".encode()
"""The text of an id that names no token (padding rows of the embedding; random weights draw them)."""

Specials = Literal["parse", "trusted", "text"]


class TokenizerError(ValueError):
    """A checkpoint whose tokenizer, chat template or generation_config.json cannot be used.

    The message says what is wrong or missing and what would work.
    """


class UnreadableText(TokenizerError):
    """A text that the tokenizer's library gives up on."""


class Tokenizer:
    """Byte-level BPE of one checkpoint: text to ids, ids to text, id to bytes.

    Added tokens that are not special (`<think>`, `<tool_call>`) are single ids wherever they are written, and
    they stay in decoded text. Special ones (`<|im_end|>`) become ids only where the caller says so.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises TokenizerError when the vocabulary is not byte-level: ids could not be turned into bytes."""
        decoder = backend.decoder
        if not isinstance(decoder, decoders.ByteLevel) and '"ByteLevel"' not in repr(decoder):
            kind = type(decoder).__name__
            raise TokenizerError(f"expected a byte-level BPE tokenizer, found the decoder {kind}")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # the library leaves special literals alone; `_split` finds them
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._id_of_special = {self._added[token_id]: token_id for token_id in self.special_ids}
        self.n_tokens: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """Number of ids up to the largest that names a token; the model's vocabulary may be padded beyond it.
        """
        self._bytes: list[bytes | None] = [None] * self.n_tokens
        self.whole_texts: tuple[dict[int, str], dict[int, str]] = ({}, {})
        """Texts of ids that are whole characters, as far as they were needed; without and with special tokens
        skipped.
        """
        literals = sorted(map(re.escape, self._id_of_special), key=len, reverse=True)
        self._literal = re.compile("|".join(literals)) if literals else None
        self._trusted = re.compile(f"{TRUSTED}({'|'.join(literals)})") if literals else None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Loads `tokenizer.json`, or `vocab.json` and `merges.txt`; or a GGUF file.

        Raises TokenizerError; of a GGUF file also CheckpointError and UnsupportedModelError.
        """
        try:
            if is_gguf(directory):
                return cls(_from_gguf(directory))
            if (directory / "tokenizer.json").exists():
                return cls(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")))
            if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
                return cls(_from_vocabulary(directory))
        except (TokenizerError, CheckpointError, UnsupportedModelError):
            raise
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise TokenizerError(
                f"{directory / 'tokenizer.json'} cannot be read ({error}). Get the tokenizer's files anew."
            ) from error
        raise TokenizerError(
            f"{directory}: no tokenizer.json and no vocab.json with merges.txt. Give a checkpoint that has one, as "
            "deltic serve Qwen/Qwen3.5-0.8B downloads it."
        )

    def encode(self, text: str, specials: Specials = "text") -> list[int]:
        """Token ids of `text` (str without lone surrogates, except TRUSTED).

        specials: "parse" makes every special literal its id (a prompt that the caller wrote whole), "trusted"
        only those behind TRUSTED (a rendered chat), "text" none (content). The rest is encoded between them.
        """
        ids: list[int] = []
        for some in self.encode_pieces(text, specials):
            ids += some
        return ids

    def encode_pieces(self, text: str, specials: Specials = "text") -> Iterator[list[int]]:
        """Yields the ids of `encode`, a few thousand at a time: of a long text the library would keep a
        hundred times its size, and the interpreter stand still while its ids become Python's. Raises
        UnreadableText.
        """
        pattern = {"parse": self._literal, "trusted": self._trusted, "text": None}[specials]
        end = 0
        for match in pattern.finditer(text) if pattern else ():
            yield from self._encode(text[end : match.start()])
            yield [self._id_of_special[match.group().removeprefix(TRUSTED)]]
            end = match.end()
        yield from self._encode((text[end:] if end else text).replace(TRUSTED, ""))

    def _encode(self, text: str) -> Iterator[list[int]]:
        """The ids of a text without special tokens: at once if it is short, else between places where tokens
        are certain to end.
        """
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = min(start + PIECE_CHARACTERS, len(text))
            cut = self.last_cut(text[start:end])
            while cut < 0 and end < len(text):
                _check_uncut(end - start)
                # Of what was looked at before, the last character is looked at once more.
                begin, end = end - 1, min(end + PIECE_CHARACTERS, len(text))
                if (last := self.last_cut(text[begin:end])) >= 0:
                    cut = begin - start + last
            if cut < 0:
                break
            yield self._encode_piece(text[start : start + cut])
            pause.get()(cut)
            start += cut
        if start < len(text):
            yield self._encode_piece(text[start:] if start else text)

    def encode_start(self, text: str, n: int, specials: Specials = "text") -> list[int]:
        """The first `n` ids of `encode(text, specials)`: of a long text no more is read than they take.

        Raises UnreadableText.
        """
        ids: list[int] = []
        for some in self.encode_pieces(text, specials):
            ids += some
            if len(ids) >= n:
                break
        return ids[:n]

    def encode_end(self, text: str, n: int, specials: Specials) -> list[int]:
        """The last `n` ids of `encode(text, specials)`: of a long text no more is read than they take.

        Raises UnreadableText.
        """
        pieces: list[list[int]] = []
        n_ids, start = 0, len(text)
        while start and n_ids < n:
            end = start
            start = max(0, end - PIECE_CHARACTERS)
            while start:
                begin = max(0, start - PIECE_CHARACTERS)
                if (cut := self.last_cut(text[begin : start + 1])) >= 0:
                    start = begin + cut
                    break
                _check_uncut(end - begin)
                start = begin
            pieces.append(self.encode(text[start:end], specials))
            n_ids += len(pieces[-1])
        return [id for piece in reversed(pieces) for id in piece][-n:]

    def _encode_piece(self, text: str) -> list[int]:
        # A batch of one: unlike `encode` it lets other threads run meanwhile, and it computes no offsets.
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise UnreadableText(
                "the tokenizer cannot read this text. It may have too much white space in one place, or too long a run of one "
                "kind of character."
            ) from error
        return ids

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer's post-processor puts before and behind a text. An embedder was trained with
        them.
        """
        plain, whole = (self._backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        begin = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:begin], whole[begin + len(plain) :]

    def special_id(self, literal: str) -> int | None:
        """The id of a special token; None: there is no such."""
        return self._id_of_special.get(literal)

    def added_id(self, literal: str) -> int | None:
        """The id of an added token, special or not; None: there is no such."""
        return self._id_of_special.get(literal, self.markers.get(literal))

    def trust(self, text: str) -> str:
        """`text` (a template's source) with TRUSTED before each special literal."""
        return self._literal.sub(lambda match: TRUSTED + match.group(), text) if self._literal else text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for: a part of a character, perhaps."""
        if not 0 <= token_id < self.n_tokens:
            return UNKNOWN_TOKEN
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return UNKNOWN_TOKEN
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()

    def least_tokens(self, text: str, limit: int) -> int:
        """A number of tokens that `text` has at least, from its size alone: cheap, where encoding is not.

        For texts that may be much longer than `limit` tokens: 0 for others, and at most 1 when the tokenizer
        may drop text, so that its size says nothing.
        """
        text = text.replace(TRUSTED, "")
        n_bytes = len(text.encode("utf-8", "surrogatepass"))
        if n_bytes < 8 * limit:  # encoding is quick enough, and the longest token need not be found
            return 0
        shrinks = 1 if text.isascii() or self._backend.normalizer is None else _MOST_BYTES_COMPOSED
        return -(-n_bytes // (shrinks * self._max_token_bytes))

    @cached_property
    def _keeps_text(self) -> bool:
        """True if nothing of a text is dropped: it is normalised by NFC at most, and no added token takes
        white space with it.
        """
        added = self._backend.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        return not strips and isinstance(self._backend.normalizer, normalizers.NFC | None)

    @cached_property
    def added_characters(self) -> frozenset[str]:
        """Characters of the added tokens."""
        return frozenset("".join(self._added.values()))

    @cached_property
    def markers(self) -> dict[str, int]:
        """Ids of the added tokens that are not special, by their text (`<tool_call>`)."""
        return {text: id for id, text in self._added.items() if id not in self.special_ids}

    @cached_property
    def has_known_cuts(self) -> bool:
        """True if text is cut by one of the family's patterns, and nothing else is done to it that looks
        across a cut.
        """
        stage = self._backend.pre_tokenizer
        match json.loads(stage.__getstate__()) if stage is not None else None:
            case {
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ]
            }:
                return self._keeps_text and regex in PRE_TOKENIZERS.values()
        return False

    def last_cut(self, text: str) -> int:
        """The last place before which the tokens of `text` are those of any text that begins with it; -1:
        there is none.
        """
        if not self.has_known_cuts:
            return -1
        # An added token that were cut would have both characters.
        places = (i for i in range(len(text) - 1, 0, -1) if _is_boundary(text[i - 1], text[i]))
        return next((i for i in places if not self.added_characters.issuperset(text[i - 1 : i + 1])), -1)

    @cached_property
    def _max_token_bytes(self) -> int:
        """Bytes of the longest token, or of any text where text may be dropped.

        Takes 0.1 s for a large vocabulary.
        """
        if not self._keeps_text:
            return sys.maxsize
        # One character of the byte-level alphabet is one byte; of an added token, it may be more.
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=1)
        return max(longest, *(len(content.encode()) for content in self._added.values()), 1)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the rest for U+0100 and up, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()

PRE_TOKENIZERS = {False: PATTERNS["qwen2"], True: PATTERNS["qwen35"]}
"""The family's, by whether combining marks count as letters."""


def _from_vocabulary(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of the family from the two files of older checkpoints and their tokenizer_config.json."""
    settings = read_settings(directory / "tokenizer_config.json")
    # Qwen3.5 and later count combining marks as letters; Next and before do not.
    model_type = str(read_settings(directory / "config.json").get("model_type", ""))
    marks = model_type.startswith(("qwen3_5", "qwen4_exp"))
    regex = settings.get("pretokenize_regex") or PRE_TOKENIZERS[marks]
    vocabulary, merges = str(directory / "vocab.json"), str(directory / "merges.txt")
    backend = tokenizers.Tokenizer(models.BPE.from_file(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    added = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for token_id, entry in added:
        token = tokenizers.AddedToken(entry["content"], special=entry.get("special", False), normalized=False)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(entry["content"]) != int(token_id):
            raise TokenizerError(
                f"{directory}: added token {entry['content']!r} should have id {token_id}, but the vocabulary before it "
                f"gives {backend.token_to_id(entry['content'])}; vocab.json does not belong to tokenizer_config.json"
            )
    return backend


def _from_gguf(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file's metadata."""
    fields = document(file, "tokenizer.json")
    backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(fields).decode())
    for token in fields["added_tokens"]:
        if (id := backend.token_to_id(token["content"])) != token["id"]:
            raise TokenizerError(
                f"{file}: the added token {token['content']!r} should have id {token['id']}, but behind the vocabulary it gets "
                f"{id}. Give another file, or --tokenizer."
            )
    return backend


class IncrementalEncoder:
    """Text to ids as it comes: all of `push` and `flush` together are the ids of the whole text without the
    white space at its end, for any cut.

    What is given out no further text can change: it is encoded up to the last place where the family's
    pre-tokenizer cuts whatever follows, once. With another pre-tokenizer nothing comes before `flush`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[str] = []

    def push(self, text: str) -> list[int]:
        """The ids that are certain now."""
        last = self._held[-1][-1:] if self._held else ""
        cut = self._tokenizer.last_cut(last + text) - len(last)
        if cut < 0:
            self._held += [text] * bool(text)
            return []
        ready = "".join([*self._held, text[:cut]])
        self._held = [text[cut:]]
        return self._tokenizer.encode(ready)

    def flush(self) -> list[int]:
        """The ids of what is left, at the end of the text."""
        rest, self._held = "".join(self._held).rstrip(), []
        return self._tokenizer.encode(rest)


def _is_ever(character: str, kind: str) -> bool:
    """Returns whether a character is of a major category in Unicode 3.2 and in Python's: then it is in the
    library's, whatever that is.
    """
    return unicodedata.ucd_3_2_0.category(character)[0] == unicodedata.category(character)[0] == kind


def _check_uncut(n: int) -> None:
    """Raises UnreadableText where too many characters have no place for a cut."""
    if n > MOST_UNCUT:
        reason = f"it has no place in {MOST_UNCUT} characters where the tokenizer is sure to cut it"
        raise UnreadableText(f"the text cannot be read in pieces: {reason}. Break it up.")


DIGITS = frozenset("0123456789")


def _is_boundary(before: str, after: str) -> bool:
    """Returns whether it is certain that a token of the family's ends between two characters, whatever stands
    around them: where a line begins with something visible; between that and a space, a tab or a digit;
    behind a digit, which is a token of its own, before ASCII; and behind a letter before a line's end,
    punctuation or a symbol. NFC composes none of them with what is before it.
    """
    if before in "\r\n" or after in " \t" or after in DIGITS:
        seen = after if before in "\r\n" else before
        return seen.isprintable() and seen != " "  # no other white space is printable
    if before in DIGITS:
        return after.isascii()
    is_end = after in "\r\n" or _is_ever(after, "P") or _is_ever(after, "S")
    # NFC makes some letters two characters, of which the second is a mark (U+0958).
    return is_end and _is_ever(before, "L") and unicodedata.is_normalized("NFC", before + after)


class Detokenizer:
    """Ids to text as they come, for one sequence: `push(a) + push(b) + flush()` equals `decode(a + b)`, for
    any cut.

    Bytes that could still become a character are held back, at most three; each id costs O(1).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._whole_texts = tokenizer.whole_texts[skip_special_tokens]
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now."""
        alone = len(ids) == 1 and not self._held
        if alone and (known := self._whole_texts.get(ids[0])) is not None:
            return known
        data = self._held + b"".join([self._token_bytes(i) for i in ids if i not in self._skipped])
        text, n_read = codecs.utf_8_decode(data, "replace", False)
        self._held = data[n_read:]
        if alone and not self._held:
            self._whole_texts[ids[0]] = text
        return text

    def flush(self) -> str:
        """The text left at the end: U+FFFD for a character that was cut off, else nothing."""
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text


class StopMatcher:
    """Finds the first stop string to be completed in a stream of text; neither it nor any part of it is
    emitted, unless it is to be.

    Read character by character, the stop string that ends first wins, so the result does not depend on the
    cuts; of two that end together the longer wins. Text that may be the beginning of a stop string is held
    back.
    """

    def __init__(self, stops: Sequence[str], includes: bool = False) -> None:
        """includes: the stop string that was found is emitted, too."""
        self._stops = tuple(stop for stop in stops if stop)
        self._includes = includes
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; once set, nothing more is emitted."""

    def push(self, text: str) -> str:
        """The text that may be shown now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at, self.matched = min(ends)
            self._held = ""
            return text[: end if self._includes else at]
        n_held = max(held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """The text held back, at the end of a stream that no stop string ended."""
        text, self._held = self._held, ""
        return text


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class SamplingDefaults(Struct, frozen=True):
    """Default sampling values, from the checkpoint's generation_config.json or from the operator."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100.0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The operator's only: what a checkpoint says of this is meant for another program's answers."""

    @classmethod
    def load(cls, directory: Path, about: ModelConfig | None = None) -> SamplingDefaults:
        """about: --generation-config and --override-generation-config. directory: the checkpoint's.

        Raises TokenizerError, a ValueError, for a value of another type; CheckpointError; ConfigError.
        """
        about = about or ModelConfig()
        path = _generation_config(about.generation_config, directory)
        shipped = {} if path is None else read_settings(path)
        values = {name: shipped[name] for name in _SHIPPED if shipped.get(name) is not None}
        if shipped.get("do_sample") is False:
            values["temperature"] = 0.0
        override = about.override_generation_config or {}
        if unknown := override.keys() - set(cls.__struct_fields__):
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"--override-generation-config: {min(unknown)!r} is none of {known}")
        try:
            msgspec.convert(override, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--override-generation-config: {error}") from error
        try:
            return msgspec.convert(values | override, cls)
        except msgspec.ValidationError as error:
            raise TokenizerError(f"{path}: {error}") from error


GENERATION_CONFIG = "generation_config.json"

_SHIPPED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _generation_config(source: str, directory: Path) -> Path | None:
    """The file that --generation-config means; directory: the checkpoint's. Raises ConfigError."""
    if source == "auto":
        return directory / GENERATION_CONFIG
    if source in ("none", "vllm"):  # the latter is vLLM's word for it
        return None
    path = Path(source) / GENERATION_CONFIG if Path(source).is_dir() else Path(source)
    if not path.exists():
        raise ConfigError(f"--generation-config {source}: there is no file {path}. Give auto, none, or a path.")
    return path


def n_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of items, as ids or characters, with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
