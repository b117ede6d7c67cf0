"""Token sequences as chat traffic makes them: much in common, then different.

A turn is a prompt with the offsets where its messages end, as a chat template gives them. No text and no tokenizer: a message
is random ids between a head and a foot. Everything follows from the random generator that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

FIRST_ID, LAST_ID = 20, 900
"""Ids of message contents; those below mark heads and feet, and belong to FakeRunner's specials."""

HEADS = {"system": 2, "user": 3, "assistant": 4}
FOOT = 5
THINK, UNTHINK = 6, 7

UGLY_LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 320, 449)
"""Around the boundaries of pages."""


@dataclass(frozen=True)
class Message:
    role: str
    content: tuple[int, ...]
    thinking: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One prompt, as a request brings it."""

    prompt_ids: list[int]
    boundaries: list[int]
    """Offsets at which messages end; empty for a raw prompt."""
    messages: tuple[Message, ...] = ()


def some_ids(rng: Random, n: int) -> list[int]:
    """`n` ids of a message's content."""
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(n)]


def render(messages: tuple[Message, ...]) -> Turn:
    """The prompt of a conversation, with the head of the answer. Thinking is shown after the last user message only."""
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    ids: list[int] = []
    boundaries = []
    for i, message in enumerate(messages):
        ids.append(HEADS[message.role])
        if message.thinking and i > last_user:
            ids += [THINK, *message.thinking, UNTHINK]
        ids += [*message.content, FOOT]
        boundaries.append(len(ids))
    return Turn([*ids, HEADS["assistant"]], boundaries, messages)


def follow_up(turn: Turn, answer: list[int], rng: Random, n_tokens: int, n_thinking: int = 0) -> Turn:
    """The next turn: the answer as it was drawn (its first n_thinking ids were thinking), and a user message."""
    said = Message("assistant", tuple(answer[n_thinking:]), tuple(answer[:n_thinking]))
    asked = Message("user", tuple(some_ids(rng, n_tokens)))
    return render((*turn.messages, said, asked))


def chat(rng: Random, *lengths: int, system: Message | None = None) -> Turn:
    """A conversation of one user message for each length, behind a system message."""
    system = system or Message("system", tuple(some_ids(rng, 300)))
    return render((system, *(Message("user", tuple(some_ids(rng, n))) for n in lengths)))


class Conversations:
    """An endless mix of prompts that grow out of each other, like the traffic of some clients at once."""

    def __init__(self, rng: Random, max_tokens: int, n_systems: int = 3) -> None:
        """max_tokens: of a prompt, from now on. n_systems: system prompts that the conversations share."""
        self._rng = rng
        self.max_tokens = max_tokens
        self._systems = [Message("system", tuple(some_ids(rng, rng.choice(UGLY_LENGTHS)))) for _ in range(n_systems)]
        self._recent: list[Turn] = []
        self._moves: list[Callable[[], Turn | None]] = [
            self._start, self._branch, self._branch, self._edit, self._truncate, self._repeat, self._repeat, self._raw,
        ]  # fmt: skip

    def answered(self, turn: Turn, answer: list[int]) -> None:
        """Tells that a turn was answered: the conversation may go on from there, or a raw prompt may continue it."""
        rng = self._rng
        if turn.messages:
            n_thinking = rng.choice([0, 0, len(answer) // 2])
            self._remember(follow_up(turn, answer, rng, rng.choice([1, 30, 64, 100]), n_thinking))
        else:
            self._remember(Turn([*turn.prompt_ids, *answer], []))

    def __iter__(self) -> Iterator[Turn]:
        return self

    def __next__(self) -> Turn:
        while True:
            turn = self._rng.choice(self._moves)()
            if turn is not None and 0 < len(turn.prompt_ids) <= self.max_tokens:
                self._remember(turn)
                return turn

    def _remember(self, turn: Turn) -> None:
        if len(turn.prompt_ids) <= self.max_tokens:
            self._recent = [*self._recent[-11:], turn]

    def _message(self, role: str) -> Message:
        return Message(role, tuple(some_ids(self._rng, self._rng.choice(UGLY_LENGTHS))))

    def _old(self, chat: bool = False) -> Turn | None:
        turns = [t for t in self._recent if t.messages or not chat]
        return self._rng.choice(turns) if turns else None

    def _start(self) -> Turn | None:
        """A new conversation with one of the system prompts."""
        return render((self._rng.choice(self._systems), self._message("user")))

    def _branch(self) -> Turn | None:
        """An old conversation goes on with another user message in the place of its last."""
        old = self._old(chat=True)
        return old and render((*old.messages[:-1], self._message("user")))

    def _edit(self) -> Turn | None:
        """One earlier message was edited in one place; what comes after it stays."""
        old = self._old(chat=True)
        if old is None:
            return None
        i = self._rng.randrange(len(old.messages))
        content = list(old.messages[i].content)
        if content:
            content[self._rng.randrange(len(content))] = self._rng.randint(FIRST_ID, LAST_ID)
        edited = replace(old.messages[i], content=tuple(content))
        return render((*old.messages[:i], edited, *old.messages[i + 1 :]))

    def _truncate(self) -> Turn | None:
        """An old conversation without its last messages, or a raw prompt cut anywhere."""
        old = self._old()
        if old is None:
            return None
        if old.messages:
            return render(old.messages[: self._rng.randrange(1, len(old.messages) + 1)])
        return Turn(old.prompt_ids[: self._rng.randrange(1, len(old.prompt_ids) + 1)], [])

    def _repeat(self) -> Turn | None:
        return self._old()

    def _raw(self) -> Turn | None:
        """A raw prompt of an ugly length, or any prompt with something behind it; its boundaries may be odd, or missing."""
        rng = self._rng
        old = self._old() if rng.random() < 0.6 else None
        ids = [*(old.prompt_ids if old else []), *some_ids(rng, rng.choice(UGLY_LENGTHS))]
        boundaries = sorted(rng.sample(range(1, len(ids) + 1), min(len(ids), rng.choice([0, 0, 3]))))
        return Turn(ids, boundaries)
