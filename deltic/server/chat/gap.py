"""Filling in the middle: a text with a gap becomes a prompt, and what fills it has bounds of its own.

The family's vocabulary has tokens for it (Qwen2.5-Coder's technical report). A file is `<|fim_prefix|>`, what
is before the gap, `<|fim_suffix|>`, what is behind it, `<|fim_middle|>`; the answer follows. Other files of
the project come first, each behind `<|file_sep|>` and its name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deltic.engine.messages import Output
from deltic.server.chat.answer import Choice, Update
from deltic.server.chat.request import Shown
from deltic.text import Tokenizer

PREFIX, SUFFIX, MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
PROJECT, FILE = "<|repo_name|>", "<|file_sep|>"
ENDS = (PREFIX, SUFFIX, MIDDLE, "<|fim_pad|>", PROJECT, FILE, "<|endoftext|>")
"""Tokens that end what fills a gap: the model goes on to another place with them."""

_WRITTEN = re.compile(r"(?<=<)(?=\|(?:fim_prefix|fim_suffix|fim_middle|fim_pad|repo_name|file_sep)\|>)")
"""The second character of such a token where a text has it in letters: between the two it is cut."""

TOKEN_CHARACTERS = 16
"""Characters of a token of code, at most, by and large: how much of a long text is worth a look."""


@dataclass(frozen=True)
class OtherFile:
    """A piece of another file, which tells the model of the project."""

    name: str
    text: str


@dataclass(frozen=True)
class GapPrompt:
    """The ids of a text with a gap."""

    ids: list[int]
    is_cut: bool = False
    """True if parts were left out, so that it fits."""
    n_others: int = 0
    """Number of ids of the other files, which come first."""


@dataclass(frozen=True)
class Filler:
    """Writes prompts of a vocabulary that has the tokens for a gap."""

    tokenizer: Tokenizer
    ids: dict[str, int]
    """Ids of the tokens that there are."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Filler | None:
        """Returns None where the vocabulary lacks a token that every gap needs."""
        known = {literal: tokenizer.added_id(literal) for literal in ENDS}
        ids = {literal: id for literal, id in known.items() if id is not None}
        return cls(tokenizer, ids) if {PREFIX, SUFFIX, MIDDLE} <= ids.keys() else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return tuple(self.ids.values())

    def whole(self, before: str, behind: str) -> list[int]:
        """The ids of a file of any size, with a gap between `before` and `behind`. Raises UnreadableText."""
        return self._gap(self._encoded(before), self._encoded(behind))

    def fitting(self, before: str, behind: str, others: Sequence[OtherFile], room: int) -> GapPrompt:
        """Makes a prompt of at most `room` ids (4 or more). Where not all fits, it has the last of the other
        files, and of the file itself three parts before the gap for one behind it. Raises UnreadableText.
        """
        left = room - 3
        most = room * TOKEN_CHARACTERS
        start, end = self._encoded(before[-most:]), self._encoded(behind[:most])
        is_cut = max(len(before), len(behind)) > most or len(start) + len(end) > left
        if len(start) + len(end) > left:
            n_end = min(len(end), max(left // 4, left - len(start)))
            start, end = start[len(start) - min(len(start), left - n_end) :], end[:n_end]
        files, is_short = self._files(others, left - len(start) - len(end)) if others else ([], False)
        return GapPrompt(files + self._gap(start, end), is_cut or is_short, len(files))

    def _gap(self, start: list[int], end: list[int]) -> list[int]:
        return [self.ids[PREFIX], *start, self.ids[SUFFIX], *end, self.ids[MIDDLE]]

    def _files(self, others: Sequence[OtherFile], room: int) -> tuple[list[int], bool]:
        """The last of the other files that fit, and whether some did not. The first words are llama.cpp's,
        which has no names for project and file either.
        """
        head = self._behind(PROJECT, "myproject\n")
        tail = self._behind(FILE, "filename\n")
        left = room - len(head) - len(tail)
        taken: list[list[int]] = []
        for other in reversed(others):
            text = f"{other.name}\n{other.text}"
            if self.tokenizer.least_tokens(text, max(1, left)) > left:  # without the work, if it is long
                break
            ids = self._behind(FILE, text)
            if len(ids) > left:
                break
            taken.append(ids)
            left -= len(ids)
        if not taken:
            return [], True
        return [*head, *(id for ids in reversed(taken) for id in ids), *tail], len(taken) < len(others)

    def _behind(self, literal: str, text: str) -> list[int]:
        """A token, if there is such, and a text."""
        return [*([self.ids[literal]] if literal in self.ids else []), *self._encoded(text)]

    def _encoded(self, text: str) -> list[int]:
        """The ids of a text, in which nothing is a token for gaps, however it is written."""
        return [id for part in _WRITTEN.split(text) for id in self.tokenizer.encode(part)]


class GapChoice(Choice):
    """Way out of a sequence that fills a gap: it ends before a line that stands out too far, and at the first
    line's end when its time is over, where it has such bounds.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, shown: Shown, indent: int = 0, most_s: float = 0.0) -> None:
        """indent: blanks that each line but the first has, or more. most_s: seconds since the first token,
        after which an answer that has a whole line ends; 0: any number.
        """
        super().__init__(index, tokenizer, shown)
        self._indent = indent
        self._most_s = most_s
        self._began_s: float | None = None
        self._held = ""
        """The last line's end and the white space behind it: shown when something stands there."""
        self.has_new_line = False

    def push(self, output: Output) -> Update:
        """Takes the next output of this sequence. A bound that is met sets `finish_reason`."""
        now_s = time.monotonic()
        self._began_s = now_s if self._began_s is None else self._began_s
        update = super().push(output)
        delta = update.delta
        is_over = False
        if self._indent:
            delta.content, is_over = self._indented(self._held + delta.content)
            if self.finish_reason is not None and not is_over:
                delta.content += self._held
        self.has_new_line = self.has_new_line or "\n" in delta.content
        if self.finish_reason is None and self.has_new_line and self._most_s:
            is_over = is_over or now_s - self._began_s > self._most_s
        if is_over:
            self.finish_reason = update.finish_reason = "length"
            update.stop = None
        return update

    def _indented(self, text: str) -> tuple[str, bool]:
        """Returns what may be shown of a text, what was held included, and whether a line stands out."""
        at = text.find("\n")
        while at >= 0:
            body = next((i for i in range(at, len(text)) if not text[i].isspace()), None)
            if body is None:
                self._held = text[at:]
                return text[:at], False
            if body - text.rfind("\n", at, body) - 1 < self._indent:
                self._held = ""
                return text[:at], True
            at = text.find("\n", body)
        self._held = ""
        return text, False
