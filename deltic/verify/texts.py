"""Texts and chats: whether the tokenizer and the chat template do what others' do."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deltic.models.gguf import is_gguf
from deltic.models.gguf_config import document, read_settings
from deltic.server.chat.template import ChatTemplate
from deltic.server.errors import ApiError
from deltic.text import Tokenizer, n_alike
from deltic.verify.page import Check

_GIVEN = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
TEXTS: dict[str, str] = _GIVEN["texts"]
"""Texts by their languages."""
CHATS: list[dict[str, Any]] = _GIVEN["chats"]
"""Chats: name, messages, and perhaps tools and enable_thinking."""

AROUND = 24
"""Characters before and behind a difference that are shown."""


@dataclass(frozen=True)
class Wording:
    """Tokenizer and chat template of a checkpoint."""

    path: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def of(cls, path: Path) -> Wording:
        """Raises TokenizerError and what reading a GGUF file does."""
        tokenizer = Tokenizer.load(path)
        return cls(path, tokenizer, ChatTemplate.load(path, tokenizer))

    @cached_property
    def ids(self) -> dict[str, list[int]]:
        """Ids of TEXTS."""
        return {name: self.tokenizer.encode(text) for name, text in TEXTS.items()}

    @cached_property
    def prompts(self) -> dict[str, list[int]]:
        """Ids of CHATS, of those that the template takes."""
        found = {}
        for chat in CHATS if self.template is not None else ():
            try:
                found[chat["name"]] = self._rendered(chat)
            except ApiError:
                continue
        return found

    def _rendered(self, chat: dict[str, Any]) -> list[int]:
        assert self.template is not None
        settings = {name: chat[name] for name in ("enable_thinking",) if name in chat}
        return self.template.render([*chat["messages"]], chat.get("tools"), settings=settings).ids

    def written(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @cached_property
    def rules(self) -> tuple[dict[str, int], list[list[str]]]:
        """Vocabulary and merges."""
        model = read_settings(self.path / "tokenizer.json").get("model", {})
        merges = [each.split(" ") if isinstance(each, str) else list(each) for each in model.get("merges", [])]
        return model.get("vocab", {}), merges


def differing(mine: str, theirs: str) -> str:
    """Shows where two texts part."""
    at = n_alike(mine, theirs)
    cut = slice(max(0, at - AROUND), at + AROUND)
    return f"at character {at}: {mine[cut]!r} here, {theirs[cut]!r} there"


def check_ids(wording: Wording, theirs: Mapping[str, Sequence[int]], whose: str, check: Check) -> None:
    """Compares the ids of texts, by their names."""
    n_wrong = 0
    for name, ids in theirs.items():
        mine = wording.ids[name]
        if mine != list(ids):
            n_wrong += 1
            at = n_alike(mine, ids)
            check.wrong(
                f"{name}: token {at} is {_token(wording, mine, at)} here, and {_token(wording, ids, at)} by {whose}"
            )
    if theirs and not n_wrong:
        check.note(f"{sum(map(len, theirs.values()))} ids of {len(theirs)} texts are those of {whose}")


def _token(wording: Wording, ids: Sequence[int], at: int) -> str:
    return f"{ids[at]} ({wording.written(ids[at : at + 1])!r})" if at < len(ids) else "none"


def check_rules(wording: Wording, other: Wording, whose: str, check: Check) -> None:
    """Compares vocabulary and merges, which texts may not show."""
    (mine, merges), (theirs, others) = wording.rules, other.rules
    if not mine or not theirs:
        return
    changed = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    for name in changed[:3]:
        check.wrong(f"the vocabulary has {name!r} as {mine.get(name)}, and {whose} as {theirs.get(name)}")
    if merges != others:
        at = n_alike(merges, others)
        check.wrong(
            f"merge {at} is {merges[at : at + 1]}, and {others[at : at + 1]} of {whose}; there are {len(merges)} and {len(others)}"
        )
    if not changed and merges == others:
        check.note(f"{len(mine)} tokens and {len(merges)} merges are those of {whose}")


def check_prompts(wording: Wording, theirs: Mapping[str, str | Sequence[int]], whose: str, check: Check) -> None:
    """Compares renderings, as texts or as ids, by the names of the chats."""
    n_wrong, shared = 0, wording.prompts.keys() & theirs.keys()
    for name in sorted(shared):
        there = theirs[name]
        mine = wording.written(wording.prompts[name])
        other = there if isinstance(there, str) else wording.written(there)
        if mine != other:
            n_wrong += 1
            check.wrong(f"{name}: rendered otherwise than by {whose}, {differing(mine, other)}")
        elif not isinstance(there, str) and list(there) != wording.prompts[name]:
            n_wrong += 1
            check.wrong(f"{name}: the same text as by {whose}, in other tokens")
    if shared and not n_wrong:
        check.note(f"{len(shared)} chats are rendered as by {whose}")


def published_wording(wording: Wording) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The ids of texts, and renderings of chats, by transformers. Raises ImportError where it is not
    installed.

    The tokenizer of a GGUF file goes through the same library here and there, so that its texts are left
    out.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    ids, template = {}, None
    if is_gguf(wording.path):
        said = document(wording.path, "tokenizer_config.json")
        template = said.get("chat_template")
        if isinstance(template, list):
            template = next((each["template"] for each in template if each["name"] == "default"), None)
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(json.dumps(document(wording.path, "tokenizer.json")))
        names = {name: text for name, text in said.items() if name.endswith("_token")}
        theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    else:
        theirs = AutoTokenizer.from_pretrained(wording.path, local_files_only=True)
        ids = {name: theirs.encode(text, add_special_tokens=False) for name, text in TEXTS.items()}
    prompts = {}
    for chat in CHATS:
        if chat["name"] in wording.prompts:
            settings = {name: chat[name] for name in ("enable_thinking",) if name in chat}
            settings |= {"tools": chat.get("tools"), "chat_template": template, "add_generation_prompt": True}
            prompts[chat["name"]] = str(theirs.apply_chat_template(chat["messages"], tokenize=False, **settings))
    return ids, prompts
