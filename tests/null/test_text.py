"""Tokenizer, incremental detokenizer, stop strings: nothing lost, nothing split, no matter how the ids are cut."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from deltic.models.checkpoint import DEMO
from deltic.text import (
    PRE_TOKENIZERS,
    TRUSTED,
    Detokenizer,
    IncrementalEncoder,
    StopMatcher,
    Tokenizer,
    TokenizerError,
    UnreadableText,
    _is_boundary,
)
from tests.fake_engine import ADDED, SPECIAL, byte_alphabet, byte_tokenizer

TOKENIZER = byte_tokenizer()
BUILT_IN = Tokenizer.load(DEMO)
IDS = st.lists(st.one_of(st.integers(0, 270), st.sampled_from(list("é€😀".encode()))), max_size=40)


def cut(draw: st.DataObject, items: list[int] | str) -> list:
    at = sorted(draw.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[a:b] for a, b in zip([0, *at], [*at, len(items)], strict=True)]


@given(IDS, st.booleans(), st.data())
def test_incremental_detokenizer_equals_the_whole_decode(ids: list[int], skip: bool, data: st.DataObject) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip)
    texts = [detokenizer.push(part) for part in cut(data, ids)]
    assert "".join(texts) + detokenizer.flush() == TOKENIZER.decode(ids, skip)


@given(st.lists(st.integers(0, 264), max_size=40), st.booleans())
def test_decode_equals_the_library_s(ids: list[int], skip: bool) -> None:
    assert TOKENIZER.decode(ids, skip) == TOKENIZER._backend.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=60))
def test_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@cache
def merging(marks: bool) -> Tokenizer:
    """A tokenizer of the family that merges a lot."""
    said = "the don't DON'T we'll 'round 123 3.14 ... !!\n\n \n\t你好，世界。こんにちは、नमस्ते दोस्त। é à naïve <think> 한국어 ½ a\u0301b"
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZERS[marks]), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([split, bytes_of]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [" ".join(said[i : i + n] for i in range(0, len(said), n)) for n in (2, 3, 5, 11, 200)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts * 3, trainer)
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in ADDED])
    return Tokenizer(backend)


PIECES = st.one_of(
    st.text(max_size=3),
    st.sampled_from(
        ["the", " the", " don't", "'ll ", "'", "DON'T", "12", " 3.14", "\n", "\r\n", "  ", " \n ", "\t", "!", "!!\n", "...", '"', "你好", "，",
         "世界。", "नमस्ते", "。\n", "e", "\u0301", "\u1100", "\u1161", "\u11a8", "\u212b", "\u0344", "<think>", "</thi", "nk>", "<|im_", "end|>",
         "<|im_end|>", "<tool_call>", " <", "\u00a0", "\u3000", "\u200d", "👩", "½", "\u0600", "\x1c", "\x85", "\ufffd", "\u037e", "\u1885"]
    ),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=30).map("".join), st.sampled_from(["built-in", "marks", "none", "bytes"]), st.data())
def test_incremental_ids_are_those_of_the_whole_text(text: str, name: str, data: st.DataObject) -> None:
    tokenizer = {"built-in": BUILT_IN, "bytes": TOKENIZER}.get(name) or merging(name == "marks")
    encoder = IncrementalEncoder(tokenizer)
    given_out = [encoder.push(part) for part in cut(data, text)]
    ids = [i for part in given_out for i in part]
    assert ids + encoder.flush() == tokenizer.encode(text.rstrip())
    # What was given out does not depend on what comes behind.
    other = data.draw(PIECES)
    assert ids == tokenizer.encode(text + other + ".")[: len(ids)]


def test_where_text_is_cut() -> None:
    def pushed(tokenizer: Tokenizer, text: str) -> list[str]:
        encoder = IncrementalEncoder(tokenizer)
        return [tokenizer.decode(ids) for c in text if (ids := encoder.push(c))] + [tokenizer.decode(encoder.flush())]

    tokenizer = merging(False)
    assert pushed(tokenizer, "Hello, world! It's 5 o'clock.\n\nYes ") == [
        "Hello", ",", " world", "!", " It", "'s", " 5", " o", "'clock", ".\n\n", "Yes", ""
    ]  # fmt: skip
    assert pushed(tokenizer, "你好，世界今天。“好”") == ["你好", "，世界今天", "。“好", "”"]
    assert pushed(tokenizer, "a <think> b<x") == ["a", " <think>", " b", "<x"]
    assert pushed(tokenizer, "apple\nx\t1\t2.5\r\n- y+\n\n  z") == [
        "apple", "\n", "x", "\t1", "\t2", ".", "5", "\r\n", "-", " y", "+\n\n  z"
    ]  # fmt: skip
    assert pushed(tokenizer, "a  b   c") == ["a", "  b", "   c"]


@pytest.mark.parametrize("marks", [False, True])
def test_no_token_crosses_a_cut(marks: bool) -> None:
    """Of all characters, some; the rule was held against every one."""
    split = pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZERS[marks]), "isolated")
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]

    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in split.pre_tokenize_str(normalizers.NFC().normalize_str(text))]

    places = [(c, " ") for c in characters[:: 997 - marks]] + [("a", c) for c in characters[:0x3100:7]]
    places += [(c, a) for c in characters[:: 1499 - marks] for a in "\t5\n"]
    places += [(b, c) for c in characters[:: 1499 - marks] for b in "\n\r5a"]
    places += [("\u0958", a) for a in ",\n<"] + [("a", c) for c in "<=>+|^`$"]
    places += [(c, "，") for c in [*characters[: 0x2000 : 11 + marks], "\u1885", "\u1886"]]
    n = 0
    for before, after in places:
        if _is_boundary(before, after):
            n += 1
            for right in (after, after + "s", after + " ", after + "\n", after + "\u0301", after + "\u0338"):
                left = f"'{before}"
                assert pieces(left + right) == pieces(left) + pieces(right), (before, right)
    assert n > 500


def test_another_tokenizer_gives_nothing_out_early() -> None:
    backend = tokenizers.Tokenizer.from_str(merging(False)._backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = IncrementalEncoder(Tokenizer(backend))
    assert encoder.push("Hello, world! ") == encoder.push("Yes.") == []
    assert encoder.flush() == Tokenizer(backend).encode("Hello, world! Yes.")


def test_characters_are_never_split() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push([byte]) for byte in "a€😀".encode()] == ["a", "", "", "€", "", "", "", "😀"]
    assert detokenizer.push("€".encode()[:2]) == "" and detokenizer.flush() == "\ufffd"
    assert detokenizer.push(b"b") == "b" and detokenizer.flush() == ""


def test_special_tokens_are_skipped_and_added_ones_stay() -> None:
    ids = [*b"a", 258, 263, *b"b", 264]
    assert TOKENIZER.decode(ids) == "a<think>b</think>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "a<|im_end|><think>b</think>"
    assert TOKENIZER.decode([999_999, -1]) == "\ufffd\ufffd"


def test_only_trusted_literals_become_special_ids() -> None:
    assert TOKENIZER.encode("<|im_end|>") == list(b"<|im_end|>")
    assert TOKENIZER.encode("a<|im_end|>b", "parse") == [97, 258, 98]
    assert TOKENIZER.encode(f"<|im_end|>{TRUSTED}<|im_end|>", "trusted") == [*b"<|im_end|>", 258]
    assert TOKENIZER.encode("<think>") == [263]
    assert TOKENIZER.trust("x<|im_start|>y") == f"x{TRUSTED}<|im_start|>y"


def test_token_bytes_of_the_built_in_tokenizer() -> None:
    tokenizer = Tokenizer.load(DEMO)
    text = "Write a 100-word story about a fox. Größe 😀\n"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.token_bytes(tokenizer.encode("<|im_end|>", "parse")[0]) == b"<|im_end|>"
    assert tokenizer.n_tokens == tokenizer._backend.get_vocab_size()


@given(st.text(st.sampled_from("ab \u1fbe\u0308\u0341\u212b\u1100\u1161\u11a8é€😀"), max_size=60))
def test_a_text_has_at_least_the_tokens_its_size_tells(text: str) -> None:
    for tokenizer in (TOKENIZER, BUILT_IN):
        assert tokenizer.least_tokens(text, 0) <= len(tokenizer.encode(text))
    assert TOKENIZER.least_tokens(TRUSTED + "<|im_end|>", 0) == 1


def test_the_size_of_a_text_tells_enough() -> None:
    assert BUILT_IN.least_tokens("a" * 10**6, 0) > 10**6 / 64
    assert BUILT_IN.least_tokens("é" * 10**6, 0) > 10**6 / 64 / 4


def test_vocabulary_and_merges_without_a_tokenizer_json(tmp_path: Path) -> None:
    vocabulary = dict(byte_alphabet()) | {"ab": 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    added = {str(257 + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}
    added |= {str(260 + i): {"content": token, "special": False} for i, token in enumerate(ADDED)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab<think><|im_end|>", "parse") == [256, 264, 259]
    assert tokenizer.n_tokens == 266
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"300": {"content": "<x>", "special": True}}})
    )
    with pytest.raises(TokenizerError, match="should have id 300"):
        Tokenizer.load(tmp_path)


def test_unusable_tokenizers_say_why(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer(backend)


def stopped(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(map(matcher.push, parts))
    return text + ("" if matcher.matched else matcher.flush()), matcher.matched


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "matched"),
    [
        (["END"], ["abcE", "N", "Dxyz"], "abc", "END"),
        (["END"], ["abcE", "Nd"], "abcENd", None),
        (["aab"], ["aaa", "ab"], "aa", "aab"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["bc", "abc"], ["xabc"], "x", "abc"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        ([], ["abc"], "abc", None),
    ],
)
def test_stop_strings(stops: list[str], parts: list[str], shown: str, matched: str | None) -> None:
    assert stopped(stops, parts) == (shown, matched)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.text("abc", max_size=30), st.data())
def test_stop_strings_do_not_depend_on_the_cuts(stops: list[str], text: str, data: st.DataObject) -> None:
    shown, matched = stopped(stops, cut(data, text))
    assert (shown, matched) == stopped(stops, list(text))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    assert shown == (text[: min(ends)[0] + min(ends)[1]] if ends else text)


@settings(max_examples=50)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=20))
def test_as_little_as_possible_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_text_has_the_ids_that_it_has_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded in pieces, here of a few characters."""
    tokenizer = Tokenizer.load(DEMO)
    draw = random.Random(seed)
    words = [
        "one",
        " two",
        "  ",
        "\n\n",
        "12345678901234567890",
        ", ",
        "<think>",
        "é",
        "e\u0301",
        "中文，",
        " ‘a’ ",
        "it's",
        "\t x",
        "!!!",
    ]
    text = "".join(draw.choice(words) for _ in range(3000))
    whole = tokenizer.encode(text)
    monkeypatch.setattr("deltic.text.PIECE_CHARACTERS", draw.choice((7, 30, 200)))
    pieces = list(tokenizer.encode_pieces(text))
    assert [i for ids in pieces for i in ids] == whole and len(pieces) > 20


def test_a_text_that_cannot_be_cut_is_refused() -> None:
    tokenizer = Tokenizer.load(DEMO)
    for text in ("a" * 2_000_000, " " * 2_000_000):
        with pytest.raises(UnreadableText, match="Break it up"):
            tokenizer.encode(text)
    assert len(tokenizer.encode("1234567890" * 20_000)) == 200_000


def test_a_tokenizer_that_nobody_knows_reads_no_text_that_takes_long() -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER._backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert len(Tokenizer(backend).encode("one two " * 100_000)) == 800_000
    with pytest.raises(UnreadableText, match="Break it up"):
        Tokenizer(backend).encode("one two " * 200_000)


@pytest.mark.parametrize(
    "line", ["apple\nbanana\n", "apple\tbanana\n", '{"a":"b","c":"d"}\n', "Größe\r\nMaß\r\n", "!!!\n???\n"]
)
def test_long_lists_and_tables_are_read(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.text.MOST_UNCUT", 70_000)
    text = line * (200_000 // len(line))
    cuts = [BUILT_IN.last_cut(text[at : at + 64]) for at in range(0, len(text) - 64, 5_003)]
    assert min(cuts) > 0
    n = sum(map(len, BUILT_IN.encode_pieces(text)))
    assert n == len(BUILT_IN.encode(line)) * (len(text) // len(line))


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join), st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_the_ends_of_a_text_have_the_ids_of_the_whole(text: str, n: int, size: int, marks: bool) -> None:
    text = text.replace("<think>", f"{TRUSTED}<|im_start|>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltic.text.PIECE_CHARACTERS", size)
        for tokenizer in (merging(marks), TOKENIZER):
            assert tokenizer.encode_end(text, n, "trusted") == tokenizer.encode(text, "trusted")[-n:]
            plain = text.replace(TRUSTED, "")
            assert tokenizer.encode_end(plain, n, "parse") == tokenizer.encode(plain, "parse")[-n:]
            assert tokenizer.encode_start(text, n, "trusted") == tokenizer.encode(text, "trusted")[:n]
            assert tokenizer.encode_start(plain, n, "parse") == tokenizer.encode(plain, "parse")[:n]


def test_only_one_end_of_a_long_text_is_read() -> None:
    began_s = time.process_time()
    assert BUILT_IN.encode_end("one two " * 2_000_000, 5, "parse") == BUILT_IN.encode("one two " * 9)[-5:]
    assert BUILT_IN.encode_start("one two " * 2_000_000, 5, "parse") == BUILT_IN.encode("one two " * 9)[:5]
    assert time.process_time() - began_s < 1
    with pytest.raises(UnreadableText, match="Break it up"):
        BUILT_IN.encode_end("a" * 3_000_000, 5, "parse")
