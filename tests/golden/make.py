"""Golden answers of the built-in model: greedy, with the distance of each token to the runner-up.

    python -m tests.golden.make

writes `answers.json` beside this file, on the best instruction set of this machine. Run it after a change of the
built-in model, of its template or, knowingly, of the arithmetic, and read the difference before you commit it.

The same `kernels` (instruction set, compiler, C library) give the same answers whole. Others may fuse or order a sum
differently, so they may prefer the other of two tokens that are almost as likely, and from there on tell another
story. `first_wrong` therefore accepts a first difference where the two were closer than CLOSE; `facts` is what has to
be true of an answer wherever it was computed.
"""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltic.engine.messages import SamplingParams
from deltic.llm import LLM
from deltic.llm_calls import Completion
from deltic.ops.cpu import program as table

PATH = Path(__file__).with_name("answers.json")

CLOSE = 0.2
"""Nats between the log-probabilities of the best two tokens, under which rounding may decide: twice the most by which
two instruction sets were seen to differ here."""

MAX_TOKENS = 200

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Case:
    """A conversation and what its answer must say whatever the instruction set: words, and the call if any."""

    messages: list[dict[str, Any]]
    words: tuple[str, ...] = ()
    call: tuple[str, dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


GREETING = {"role": "assistant", "content": "Nice to meet you, Nina."}
QUESTION = user("What is the weather in Rome?")
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 3, "conditions": "rainy"}'}

CASES = {
    "story": Case([user("Write a 60-word story about a rabbit.")], words=("rabbit",)),
    "sum": Case([user("What is 19 plus 23?")], words=("42",)),
    "thinking": Case([user("What is 19 plus 23?")], words=("42",), settings={"enable_thinking": True}),
    "talk": Case([user("My name is Nina."), GREETING, user("What is my name?")], words=("Nina",)),
    "tool call": Case([QUESTION], call=("get_weather", {"city": "Rome"}), tools=[WEATHER]),
    "tool result": Case([QUESTION, CALLED, RESULT], words=("Rome", " 3 ", "rainy"), tools=[WEATHER]),
}  # fmt: skip


def answer(llm: LLM, case: Case) -> Completion:
    """The greedy answer of `llm`, with the log-probabilities of the best two at each token."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    (completion,) = llm.chat(case.messages, params, tools=case.tools, **case.settings)
    return completion


def plain(completion: Completion) -> dict[str, Any]:
    """A completion as the file has it. `gaps`: nats from each token to the runner-up."""
    assert completion.logprobs is not None
    return {
        "content": completion.text,
        "reasoning": completion.reasoning,
        "calls": [[call["name"], json.loads(call["arguments"])] for call in completion.tool_calls],
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "gaps": [round(entry.top[0][1] - entry.top[1][1], 3) for entry in completion.logprobs],
    }


def facts(case: Case, said: dict[str, Any]) -> None:
    """Asserts what must be true of an answer (`content`, `reasoning`, `calls`, `finish_reason`) to `case`."""
    assert all(word in said["content"] for word in case.words), said
    assert said["calls"] == ([list(case.call)] if case.call else []), said
    assert bool(said["reasoning"]) == bool(case.settings.get("enable_thinking")), said
    assert said["finish_reason"] in ("stop", "tool_calls"), said


def first_wrong(golden: dict[str, Any], token_ids: list[int]) -> int | None:
    """Where `token_ids` leave the golden ones although the choice there was clear; None: nowhere."""
    pairs = zip(golden["token_ids"], token_ids, strict=False)
    differing = (i for i, (expected, found) in enumerate(pairs) if expected != found)
    first = next(differing, None)
    if first is None:
        n_golden = len(golden["token_ids"])
        return None if n_golden == len(token_ids) else min(n_golden, len(token_ids))
    return first if golden["gaps"][first] >= CLOSE else None


def load() -> dict[str, Any]:
    """`kernels` and `answers` by the names of CASES."""
    kept: dict[str, Any] = json.loads(PATH.read_text())
    return kept


def kernels(instruction_set: str) -> str:
    """What makes the last bits of an answer: instruction set, compiler (as the library says) and C library."""
    data = table.library_file(instruction_set).read_bytes()
    compilers = set(re.findall(rb"GCC: [ -~]+|clang version [ -~]+", data))
    named = sorted(compiler.decode() for compiler in compilers)
    return ", ".join([instruction_set, *named, " ".join(platform.libc_ver())])


def write(instruction_set: str, answers: dict[str, dict[str, Any]]) -> None:
    """One line for each field, so that a difference can be read."""
    lines = []
    for name, said in answers.items():
        fields = (f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in said.items())
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n  }")
    head = (
        f'{{\n "made_by": "python -m tests.golden.make",\n "kernels": "{kernels(instruction_set)}",\n "answers": {{\n'
    )
    PATH.write_text(head + ",\n".join(lines) + "\n }\n}\n")


def main() -> None:
    llm = LLM(max_model_len=1024, max_num_seqs=1)
    answers = {name: plain(answer(llm, case)) for name, case in CASES.items()}
    for name, case in CASES.items():
        facts(case, answers[name])
    write(table.instruction_set(), answers)
    for name, said in answers.items():
        print(f"{name}: {said['reasoning']!r} {said['content']!r} {said['calls']}")
    print(f"written to {PATH}")


if __name__ == "__main__":
    main()
