"""A small language for random text: `[this|that|]` picks one alternative, `{name}` fills in a value.

Alternatives nest and may be empty. A frame is compiled once; expanding it costs one random number an alternative.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

Node = str | tuple["Choice | Slot | str", ...]

# after `!"` and `?"` the sentence goes on ("Look!" she said), after `."` it does not
_SENTENCE_START = re.compile(r"(^|[.!?] |\.\" |\n)([a-z])")
_SPACES = re.compile(r" {2,}")


class Slot(str):
    """The name of a value to fill in."""


class Choice(tuple[tuple[object, ...], ...]):
    """Alternatives, each a sequence of parts."""


def parse(frame: str) -> tuple[object, ...]:
    """Compile a frame; raises ValueError for an unbalanced bracket."""
    parts, end = _parse_until(frame, 0, "")
    if end != len(frame):
        raise ValueError(f"unbalanced bracket at {end} in frame: {frame}")
    return parts[0]


def _parse_until(text: str, at: int, closing: str) -> tuple[list[tuple[object, ...]], int]:
    options: list[tuple[object, ...]] = []
    parts: list[object] = []
    literal = ""

    def flush() -> None:
        nonlocal literal
        if literal:
            parts.append(literal)
        literal = ""

    while at < len(text):
        c = text[at]
        if c == "[":
            flush()
            inner, at = _parse_until(text, at + 1, "]")
            parts.append(Choice(inner))
        elif c == "{":
            flush()
            end = text.index("}", at)
            parts.append(Slot(text[at + 1 : end]))
            at = end + 1
        elif c == "|" and closing:
            flush()
            options.append(tuple(parts))
            parts = []
            at += 1
        elif c == closing or c == "]":
            if not closing:
                return options, at
            flush()
            return [*options, tuple(parts)], at + 1
        else:
            literal += c
            at += 1
    if closing:
        raise ValueError(f"bracket not closed in frame: {text}")
    flush()
    return [*options, tuple(parts)], at


_compiled = lru_cache(maxsize=None)(parse)


def _emit(parts: Sequence[object], rng: Random, values: Mapping[str, str], out: list[str]) -> None:
    for part in parts:
        if type(part) is Choice:
            _emit(part[int(rng.random() * len(part))], rng, values, out)
        elif type(part) is Slot:
            out.append(values[part])
        else:
            out.append(part)  # type: ignore[arg-type]


def expand(frame: str, rng: Random, values: Mapping[str, str] | None = None) -> str:
    """One random expansion; KeyError names a slot without a value."""
    out: list[str] = []
    _emit(_compiled(frame), rng, values or {}, out)
    return _SPACES.sub(" ", "".join(out))


def prose(frame: str, rng: Random, values: Mapping[str, str]) -> str:
    """`expand`, then a capital letter at each sentence's start."""
    return _SENTENCE_START.sub(lambda m: m[1] + m[2].upper(), expand(frame, rng, values))


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith(("uni", "eu")) else "a ") + noun
