"""Text that a format forces comes out as it was written, whatever the tokenizer would make of it: through the grammars, the masks of the
built-in model's vocabulary, and back."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deltic
from deltic.engine.guides import Guides, Vocabulary
from deltic.server.api import decode, protocol
from deltic.server.chat.constraint import Constrainer
from deltic.server.chat.grammar import _ENDS, CallForm, error_of, quoted
from deltic.server.chat.parser import OutputParser
from deltic.text import Detokenizer, Tokenizer
from tests.null.test_grammar import json_format, tool

DEMO = Path(deltic.__file__).parent / "demo"
TOKENIZER = Tokenizer.load(DEMO)
(END,) = TOKENIZER.encode("<|im_end|>", "parse")
GUIDES = Guides(TOKENIZER.n_tokens, [END], Vocabulary((DEMO / "tokenizer.json").read_text))
TEXTS = [
    "<|im_end|>", "a<|im_end|>b", "<|endoftext|>", "<|im_start|>x", "<think>", "</think>", "</think>\n\n", "<tool_call>", "</tool_call>",
    "<tts_pad>",    '<tool_call>\n{"name": "f", "arguments": {}}', "<tool_call><function=f></function></tool_call>", "</tool_response>",
    "\u212b", "\u2126", "\uf900", "\u1112\u1161\u11ab", "e\u0301", "\u0344", "\ufb1d", "\u0958", "\U0001d15e", "\U0002f800", "a\u0327\u0301",
    "<|im_end|>\u212b</think>e\u0301", "\n\nx", " x ", "<", "<|", "</", "<thin", "\u00e9", "\ufeff", "\u200d", "\x7f\x00\b\f", "\"\\'/",
]  # fmt: skip


def walk(grammar: str, seed: int) -> list[int]:
    """Ids that the masks allow, drawn at random, to the first end of the grammar."""
    words = np.empty((1, -(-TOKENIZER.n_tokens // 32)), np.int32)
    matcher = llguidance.LLMatcher(GUIDES._view().tokenizer, grammar, log_level=0)
    rng, ids = random.Random(seed), []
    while not GUIDES._fill([matcher], words)[0]:
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if END in allowed:
            break
        ids.append(int(rng.choice(allowed)))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    return ids


def say(chat: dict[str, Any], seed: int = 0, thought: str | None = None, form: CallForm = "xml") -> Any:
    """The content of an answer to this chat, or the arguments of its call. thought: with what is forced behind it."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]} | chat).encode()
    asked = protocol.chat_of(decode.parse(body, protocol.ChatRequest))
    constrainer = Constrainer(TOKENIZER, form)
    constraint = constrainer.chat(asked, constrainer.chat_grammar(asked), thought is not None)
    assert constraint is not None
    ids = walk(constraint.grammar, seed)
    if thought is not None:
        assert constraint.think_end_id is not None
        ids = [*TOKENIZER.encode(thought), constraint.think_end_id, *constraint.begin_ids, *ids]
    parser = OutputParser(thinking=thought is not None, tools=asked.schemas, fixed=asked.is_fixed)
    text, found = Detokenizer(TOKENIZER), parser.push("")
    for id in ids:
        found.add(parser.push(text.push([id])))
    found.add(parser.finish())
    assert found.reasoning == (thought or "")
    if not found.calls:
        return found.content
    assert not found.content and len(found.calls) == 1
    return json.loads(found.calls[0].arguments)


def object_of(key: str, value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}


def check(text: str, seed: int = 0) -> None:
    """In every place where a text may be forced."""
    thought = [None, "so", "<tool_call>\n<function=f>\n</function>"][seed % 3]
    for fields in ({"guided_choice": [text]}, {"structured_outputs": {"grammar": f"start: {quoted(text)}"}}):
        assert say(fields, seed, thought) == text
    for value in ({"enum": [text]}, {"const": text}):
        formatted = {"response_format": json_format(object_of("k", value))}
        assert json.loads(say(formatted, seed, thought)) == {"k": text}
    assert json.loads(say({"guided_json": object_of(text, {"const": 1})}, seed, thought)) == {text: 1}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    for form in ("json", "xml"):
        called = forced | {"tools": [tool("f", object_of("k", {"type": "string", "enum": [text]}))]}
        if form == "json" or not re.search(_ENDS, f"\n{text}"):
            assert say(called, seed, thought, form) == {"k": text}  # type: ignore[arg-type]
    beside = {"tools": [tool("f", object_of("k", {"const": 1}))], "response_format": json_format({"const": text})}
    found = say(beside, seed, thought)
    assert found == {"k": 1} or json.loads(found) == text


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_what_is_forced_is_said(text: str) -> None:
    for seed in range(3):
        check(text, seed)


def test_any_character_may_be_forced() -> None:
    codes = [*range(0x300), *range(0x2000, 0x2100), *range(0xF900, 0x10000), *range(0x1FF00, 0x20100)]
    assert error_of(f"start: {quoted(''.join(map(chr, codes)))}") == ""


def test_added_tokens_that_the_vocabulary_has_too(tmp_path: Path) -> None:
    """Older checkpoints have them in both places, and some tokenizers take a whole word of the vocabulary as it stands there."""
    said = json.loads((DEMO / "tokenizer.json").read_text())
    said["model"]["vocab"] |= {token["content"]: token["id"] for token in said["added_tokens"]}
    said["model"]["ignore_merges"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    guides = Guides(TOKENIZER.n_tokens, [END], Vocabulary((tmp_path / "tokenizer.json").read_text))
    for text in TEXTS[:10]:
        made = guides._view().tokenizer.tokenize_str(text)
        assert TOKENIZER.decode(made) == text and not any(map(guides._view().tokenizer.is_special_token, made))
    assert guides._view().tokenizer.is_special_token(TOKENIZER.markers["<think>"])


TAGS = st.sampled_from([*TEXTS, "<", ">", "|", "\u0301", "\u0327", "\u1161", "\u11ab", "im_end", "think", "\n"])
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(TAGS | CHARACTERS, min_size=1, max_size=6).map("".join).filter(bool), st.integers(0, 2))
def test_random_texts(text: str, seed: int) -> None:
    check(text, seed)
