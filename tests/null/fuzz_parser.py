"""Random texts of markup for the output parser: `python -m tests.null.fuzz_parser --n 1000000`.

Checks of each text, with words put in that occur nowhere else: the result is the same in one piece, character by
character, and in random pieces; every word comes out, once; calls that were not cut have JSON objects as arguments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import re
import time
from typing import Any

from deltic.server.chat.calls import AnswerDelta
from deltic.server.chat.parser import OutputParser

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "at": {"$ref": "#/$defs/place"},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "now": {},
}

TAGS = [
    "<think>", "</think>", "</think", "<tool_call>", "</function_invocation>", "</tool_call>", "<function=weather>", "<function=other>",
    '<function name="now">', "<function=now\n", "<function=", "<function==weather>", "</function>", "<parameter=city>", "<parameter=days>",
    '<parameter name="at">', "<parameter=new>", "<parameter=", "</parameter>",
]  # fmt: skip
TEXTS = [
    "\n",
    "\n",
    "\n\n",
    " ",
    ">",
    "<",
    "{",
    "}",
    '"',
    "\\",
    "42",
    "True",
    "null",
    "é😀",
    "```json\n",
    "```\n",
    "\r\n",
    "[",
]
SPACES = ["\n" * 64, " " * 65, " \n" * 130, "\n" * 300, " " * 300]
WHOLE = [
    "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=days>\n{}\n</parameter>\n<parameter=city>\n",
    '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>',
    '<tool_call>\n[{{"name": "now", "arguments": {{"a": ["{}"]}}}}, {{"name": "now"}}]\n</tool_call>',
    '{{"name": "now", "arguments": {{"a": "{}',
    "\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=now>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "thought {}\n</think>\n\n",
    '{{"x": "{}"}}',
    '{{"name": "now", "arguments": {{"a": "{}"}}}}',
]


def text_of(rng: random.Random) -> str:
    """A text of up to 14 fragments, with words `w0w`, `w1w`, ... in it."""
    words = (f"w{i}w" for i in itertools.count())
    pieces = []
    for _ in range(rng.randrange(1, rng.choice((4, 6, 15)))):
        kind = rng.random()
        if kind < 0.4:
            pieces.append(rng.choice(TAGS))
        elif kind < 0.6:
            pieces.append(rng.choice(TEXTS if rng.random() < 0.97 else SPACES))
        elif kind < 0.8:
            pieces.append(rng.choice(WHOLE).format(next(words)))
        else:
            pieces.append(next(words))
    text = "".join(pieces)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.1 else text


def parse(
    parts: list[str], thinking: bool = False, tools: Any = TOOLS, truncated: bool = False, fixed: bool = False
) -> tuple[AnswerDelta, bool]:
    """The whole answer, and whether its last call is open."""
    ids = itertools.count()
    parser = OutputParser(thinking=thinking, tools=tools, call_id=lambda: f"call_{next(ids)}", fixed=fixed)
    whole = AnswerDelta(calls=[])
    for part in parts:
        whole.add(parser.push(part))
    whole.add(parser.finish(truncated))
    assert parser.n_calls == len(whole.calls)
    assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
    assert all(call.id and call.name for call in whole.calls)
    return whole, parser.is_call_open


def cut(text: str, rng: random.Random) -> list[str]:
    at = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def check(text: str, rng: random.Random) -> AnswerDelta:
    """Raises AssertionError when the parser does not hold to its word for `text`."""
    thinking, truncated = rng.random() < 0.5, rng.random() < 0.2
    tools = TOOLS if rng.random() < 0.9 else None
    whole, is_open = parse([text], thinking, tools, truncated)
    for parts in (list(text), cut(text, rng)):
        assert parse(parts, thinking, tools, truncated) == (whole, is_open), parts
    said = whole.reasoning + whole.content
    for call in whole.calls:
        said += call.arguments
        if not (is_open and call is whole.calls[-1]):
            assert isinstance(json.loads(call.arguments), dict), call
    for word in words_of(CUT_TAG.sub("", text) if truncated else text):
        assert said.count(word) == text.count(word), (word, whole)
    return whole


CUT_TAG = re.compile(r"<parameter==?\w+$")
"""Is lost, with the name in it, where an answer was cut."""


def words_of(text: str) -> list[str]:
    return re.findall(r"w\d+w", text)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--n", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=1)
    options = arguments.parse_args()
    start = time.monotonic()
    seeds = range(options.seed, options.seed + options.n)
    with multiprocessing.Pool(options.jobs) as pool:
        counts = pool.imap_unordered(check_seeds, (seeds[at : at + 1000] for at in range(0, len(seeds), 1000)))
        n_characters, n_calls = map(sum, zip(*counts, strict=True))
    took = round(time.monotonic() - start, 1)
    print(json.dumps({"texts": options.n, "characters": n_characters, "calls": n_calls, "seconds": took}))


def check_seeds(seeds: range) -> tuple[int, int]:
    """Numbers of characters and of calls."""
    n_characters = n_calls = 0
    for seed in seeds:
        rng = random.Random(seed)
        text = text_of(rng)
        try:
            n_calls += len(check(text, rng).calls)
        except Exception:
            print(f"--seed {seed}: {text!r}", flush=True)
            raise
        n_characters += len(text)
    return n_characters, n_calls


if __name__ == "__main__":
    main()
