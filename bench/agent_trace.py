"""Conversations of coding agents, made from a seed, and the most of them that a prefix cache could reuse.

A trace stands for what an engine gets from tools that write code: a few sessions share one system prompt and
one list of tools; a session is a loop of answers with a tool call, tool results of very different lengths
(most short, some whole files), and now and then a word of the user's. Some turns go back: the same request
again, an earlier message edited, or turns undone. A thinking session's thoughts stay in the prompt until the
user speaks again; then the template drops them.

What a session says depends on the seed and on its number only, never on time or on what the model answered,
so two runs with recorded answers send the same prompts. All sizes are for sessions of FULL_SIZE tokens and
shrink with a smaller limit.

`Oracle` knows what could have been reused: an upper bound for any prefix cache on this trace, in this order.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltic.ops.geometry import PAGE_SIZE

FULL_SIZE = 30_000
"""Tokens of the longest prompt that the sizes below are made for."""
SYSTEM_TOKENS, TOOLS_TOKENS = 1200, 1800
"""Shared by all sessions."""
TOOLS = ("read_file", "bash", "edit_file", "search", "list_files", "write_file", "fetch", "plan")
ANSWER_TOKENS = (70.0, 0.8, 8, 500)
"""Median, sigma of the logarithm, least and most, as of RESULT_TOKENS."""
RESULT_TOKENS = (180.0, 1.1, 10, 1500)
FILE_TOKENS = (2000, 4000)
FILE_SHARE = 0.1
"""Of the tool results; the others are RESULT_TOKENS long."""
USER_SHARE = 0.12
"""Of the turns end with a word of the user's instead of a tool result."""
THINKING_SHARE = 0.5
"""Of the sessions have thinking switched on."""
BACK_SHARES = {"regenerate": 0.04, "edit": 0.04, "undo": 0.03}
"""Of the turns begin by going back."""

Message = dict[str, Any]
Count = Callable[[str], int]
"""Tokens of a text."""

_WORDS = {
    "noun": "cache page slot state tree node token prompt session request batch step kernel buffer queue socket parser "
    "schema config field index offset chunk window layer weight table lookup handler worker stream event cursor result",
    "verb": "load save read write parse check find take drop merge split copy build resolve render flush retry count",
    "adjective": "empty shared stale first last cold warm missing pending broken nested large local recent idle",
    "link": "the a this because when before after so that which and then only if without under with",
}
_NOUNS, _VERBS, _ADJECTIVES, _LINKS = (words.split() for words in _WORDS.values())


class Writer:
    """Texts of a wanted length, made of plausible words and code."""

    def __init__(self, seed: str, count: Count) -> None:
        self.random = random.Random(seed)
        self._count = count

    def text(self, kind: str, n_tokens: int) -> str:
        """Lines of `kind` ("prose", "code", "log" or "listing"), of at least n_tokens in all and a line more
        at the most.
        """
        line = {"prose": self._prose, "code": self._code, "log": self._log, "listing": self._listing}[kind]
        lines: list[str] = []
        n = 0
        while n < n_tokens:
            lines.append(line())
            n += self._count(lines[-1] + "\n")
        return "\n".join(lines)

    def _name(self) -> str:
        pick = self.random.choice
        return pick(("{v}_{n}", "{n}_{m}", "{a}_{n}", "n_{n}s", "{v}_{a}_{n}")).format(
            v=pick(_VERBS), n=pick(_NOUNS), m=pick(_NOUNS), a=pick(_ADJECTIVES)
        )

    def path(self) -> str:
        """Of a source file."""
        pick = self.random.choice
        return f"src/{pick(_NOUNS)}/{self._name()}.{pick(('py', 'py', 'ts', 'rs', 'md'))}"

    def _prose(self) -> str:
        pick = self.random.choice
        words = [pick(pick((_LINKS, _NOUNS, _VERBS, _ADJECTIVES))) for _ in range(self.random.randint(6, 16))]
        return " ".join(words).capitalize() + "."

    def _code(self) -> str:
        r, name = self.random, self._name
        forms = (
            f"def {name()}(self, {name()}: int, {name()}: str = '') -> {r.choice(('None', 'int', 'bool'))}:",
            f"    {name()} = self.{name()}.{r.choice(_VERBS)}({name()}, {r.randint(0, 4096)})",
            f"    if {name()} is None or len({name()}) > {r.randint(1, 99)}:",
            f"        raise ValueError(f'{r.choice(_ADJECTIVES)} {r.choice(_NOUNS)}: {{{name()}}}')",
            f"    for {r.choice('ijkn')}, {r.choice(_NOUNS)} in enumerate(self.{name()}):",
            f"        {name()}[{r.choice(_NOUNS)!r}] += {r.random():.3f}",
            f"    return {name()} // {r.randint(2, 64)}  # {r.choice(_ADJECTIVES)} {r.choice(_NOUNS)}s only",
        )
        return r.choice(forms)

    def _log(self) -> str:
        r = self.random
        time = f"{r.randint(0, 23):02}:{r.randint(0, 59):02}:{r.randint(0, 59):02}.{r.randint(0, 999):03}"
        level = r.choice(("INFO", "INFO", "DEBUG", "WARN"))
        return f"{time} {level} {r.choice(_NOUNS)}: {r.choice(_VERBS)} {self._name()} took {r.randint(1, 900)} ms"

    def _listing(self) -> str:
        return f"-rw-r--r-- 1 dev dev {self.random.randint(40, 90_000):6} {self.path()}"


@dataclass(frozen=True)
class Trace:
    """What all sessions share. `max_tokens`: of the longest prompt with its answer."""

    count: Count
    seed: int = 0
    n_turns: int = 40
    max_tokens: int = FULL_SIZE

    @property
    def scale(self) -> float:
        return min(1.0, self.max_tokens / FULL_SIZE)

    def system(self) -> str:
        """The system message of every session."""
        return "You are a careful engineer. " + Writer(f"{self.seed} system", self.count).text(
            "prose", round(SYSTEM_TOKENS * self.scale)
        )

    def tools(self) -> list[dict[str, Any]]:
        """The functions that every session may call, as /v1/chat/completions takes them."""
        writer, tools = Writer(f"{self.seed} tools", self.count), []
        names = TOOLS[: max(1, round(len(TOOLS) * self.scale))]
        for name in names:
            function = {
                "name": name,
                "description": writer.text("prose", round(TOOLS_TOKENS * self.scale / len(names)) - 60),
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                    "required": ["path"],
                },
            }
            tools.append({"type": "function", "function": function})
        return tools


@dataclass(frozen=True)
class Turn:
    """One request of a session, and what the trace says happens after it."""

    number: int
    kind: str
    """"next", or how it goes back: see BACK_SHARES."""
    n_answer: int
    """Tokens the model is to answer."""
    seed: int
    answer: Message
    """What the recorded session answered."""
    then: list[Message]
    """The tool's result, or the user's next word."""


@dataclass
class Conversation:
    """One session: its messages so far, and the turns to come.

    Sizes and places depend on the trace's seed only.
    """

    trace: Trace
    number: int
    system: str
    messages: list[Message] = field(default_factory=list)
    thinking: bool = False

    def __post_init__(self) -> None:
        self._writer = Writer(f"{self.trace.seed} session {self.number}", self.trace.count)
        self._random = self._writer.random
        self._n_turns = 0
        self._requests: list[int] = []
        """How many messages each request that was not taken back had."""
        self._turn: Turn | None = None
        self.thinking = self._random.random() < THINKING_SHARE
        self.messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self._scaled_text("prose", 120)},
        ]

    def next_turn(self) -> Turn | None:
        """Brings `messages` to where the next request is made; None when the session is over."""
        if self._n_turns == self.trace.n_turns:
            return None
        kind = self._go_back()
        self._requests.append(len(self.messages))
        self._turn = self._make_turn(kind)
        self._n_turns += 1
        return self._turn

    def answered(self, message: Message | None = None) -> None:
        """The last turn's request was answered: with the recorded message, or with `message`."""
        assert self._turn is not None
        self.messages += [message or self._turn.answer, *self._turn.then]

    def _go_back(self) -> str:
        """Takes back an earlier request, sometimes, and what came after it."""
        chance, n = self._random.random(), len(self._requests)
        for kind, share in BACK_SHARES.items():
            chance -= share
            if chance < 0 and n >= 2:
                least, most = {"regenerate": (1, 1), "edit": (1, 4), "undo": (2, 4)}[kind]
                n_back = self._random.randint(least, min(most, n))
                del self.messages[self._requests[-n_back] :], self._requests[-n_back:]
                last = self.messages[-1]
                if kind == "edit":
                    self.messages[-1] = last | {"content": self._scaled_text("prose", 90)}
                elif kind == "undo":
                    self.messages[-1:] = ([] if last["role"] == "user" else [last]) + [self._user()]
                return kind
        return "next"

    def _make_turn(self, kind: str) -> Turn:
        r = self._random
        n_answer = self._length(ANSWER_TOKENS)
        answer: Message = {"role": "assistant"}
        n_left = n_answer
        if self.thinking:
            answer["reasoning_content"] = self._text("prose", n_left // 2)
            n_left -= n_left // 2
        if r.random() < USER_SHARE:
            return Turn(
                self._n_turns,
                kind,
                n_answer,
                r.getrandbits(32),
                answer | {"content": self._text("prose", n_left)},
                [self._user()],
            )
        is_file = r.random() < FILE_SHARE
        name = "read_file" if is_file else r.choice(("bash", "search", "edit_file", "list_files"))
        arguments = {"path": self._writer.path(), "text": self._text("code", n_left // 2)}
        id = f"call_{self.number}_{self._n_turns}"
        call = {"name": name, "arguments": json.dumps(arguments)}
        answer |= {
            "content": self._text("prose", n_left // 4),
            "tool_calls": [{"id": id, "type": "function", "function": call}],
        }
        if is_file:
            content = self._scaled_text("code", r.randint(*FILE_TOKENS))
        else:
            content = self._text(r.choice(("log", "listing", "code")), self._length(RESULT_TOKENS))
        result = {"role": "tool", "tool_call_id": id, "content": content}
        return Turn(self._n_turns, kind, n_answer, r.getrandbits(32), answer, [result])

    def _user(self) -> Message:
        return {"role": "user", "content": self._scaled_text("prose", self._random.choice((12, 30, 80)))}

    def _scaled_text(self, kind: str, n_tokens: int) -> str:
        """As long as n_tokens are at full size."""
        return self._text(kind, round(n_tokens * self.trace.scale))

    def _text(self, kind: str, n_tokens: int) -> str:
        return self._writer.text(kind, max(1, n_tokens))

    def _length(self, about: tuple[float, float, int, int]) -> int:
        """Tokens, drawn from a distribution with a long tail."""
        median, sigma, least, most = about
        drawn = self._random.lognormvariate(math.log(median), sigma)
        return max(least, round(min(drawn, most) * self.trace.scale))


@dataclass
class _Block:
    """A page boundary of a known prompt: the pages that come next, and the rests that fill no page."""

    pages: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    rests: set[tuple[int, ...]] = field(default_factory=set)


class Oracle:
    """Token ids that were computed, and how much of a new prompt begins like one of them."""

    def __init__(self) -> None:
        self._root = _Block()

    def add(self, ids: Sequence[int]) -> None:
        """These were computed, from the first to the last."""
        block = self._root
        for start in range(0, len(ids), PAGE_SIZE):
            page = tuple(ids[start : start + PAGE_SIZE])
            if len(page) < PAGE_SIZE:
                block.rests.add(page)
            else:
                block = block.pages.setdefault(page, _Block())

    def longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The most of `prompt` that could be reused: in whole pages, and to the token.

        Its last token is always computed: what follows is drawn from its logits.
        """
        block, n = self._root, 0
        while (below := block.pages.get(tuple(prompt[n : n + PAGE_SIZE]))) is not None:
            block, n = below, n + PAGE_SIZE
        rest = prompt[n : n + PAGE_SIZE]
        others = itertools.chain(block.pages, block.rests)
        n_more = max((_n_common(rest, other) for other in others), default=0)
        most = len(prompt) - 1
        return min(n, most // PAGE_SIZE * PAGE_SIZE), min(n + n_more, most)


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
