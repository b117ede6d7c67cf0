"""The soak finds answers that are wrong or other than before, and a short run of everything at once breaks no promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.soak.features import NAMES, chosen
from bench.soak.traffic import TOOLS, Answered, Violation
from deltic.bench.gauges import IDLE, gauges, in_use

ASKED: dict[str, Any] = {"stream": False, "max_tokens": 50, "tools": TOOLS, "tool_choice": "required"}
USAGE = {"completion_tokens": 5}


def answered(arguments: str, reason: str = "tool_calls", name: str = "weather") -> Answered:
    """A whole answer with a call."""
    found = Answered(usage=USAGE)
    call = {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}
    scores = {"content": [{"token": "a", "logprob": -0.5}]}
    message = {"content": "So", "reasoning_content": "hm", "tool_calls": [call]}
    found.add({"index": 0, "message": message, "logprobs": scores, "finish_reason": reason})
    return found


def test_an_answer_is_the_same_whole_and_streamed() -> None:
    whole, streamed = answered('{"city": "Rio"}'), Answered()
    calls: list[Any] = [{"index": 0, "id": "y", "function": {"name": "weather", "arguments": ""}}]
    calls += [{"index": 0, "function": {"arguments": part}} for part in ('{"city"', ': "Rio"}')]
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "S"}, {"content": "o"}]
    for delta in (*deltas, *({"tool_calls": [call]} for call in calls)):
        streamed.add({"index": 0, "delta": delta})
    streamed.add({"index": 0, "delta": {}, "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "tool_calls"})
    assert (streamed.said(), streamed.scores) == (whole.said(), whole.scores)
    whole.check(ASKED)
    assert answered('{"city": "Bern"}').said() != whole.said()


@pytest.mark.parametrize(
    "wrong",
    [
        answered('{"city": "Paris"}'),
        answered('{"city": "Rio"}', name="nobody"),
        answered('{"city": "Rio"}', reason="stop"),
        answered('{"expression": "7 * 6"}'),
        answered('{"city": "Rio"'),
    ],
)
def test_a_call_of_no_tool_is_found(wrong: Answered) -> None:
    with pytest.raises((Violation, ValueError, LookupError)):  # `one` takes all of these for a violation
        wrong.check(ASKED)


def test_a_model_that_is_free_may_call_what_it_was_not_given() -> None:
    """The built-in model was trained with tools of its own."""
    free = {name: value for name, value in ASKED.items() if name != "tool_choice"}
    answered('{"to": "Fern"}', name="send_email").check(free)
    with pytest.raises(ValueError, match="delimiter"):
        answered('{"to": "Fern"', name="send_email").check(free)


def test_what_one_of_several_models_or_keys_has_is_in_use() -> None:
    page = "".join(f'deltic_{name}{{model="{model}"}} 0\n' for name in IDLE for model in "abc")
    assert in_use(gauges(page)) == {}
    page = page.replace('pages_used{model="b"} 0', 'pages_used{model="b"} 3')
    assert in_use(
        gauges(page + 'deltic_key_requests_open{key="alice"} 1\ndeltic_key_requests_open{key="bob"} 0\n')
    ) == {"pages_used": 3.0, "key_requests_open": 1.0}


def test_names_of_features() -> None:
    assert (chosen(""), chosen("apis,keys"), chosen("all")) == ([], ["apis", "keys"], [*NAMES])
    with pytest.raises(ValueError, match="--with moon"):
        chosen("keys,moon")


@pytest.mark.long
def test_seconds_of_everything_at_once_break_no_promise(tmp_path: Path) -> None:
    """`make soak` runs the same for half an hour."""
    command = [sys.executable, "-m", "bench.soak", "--with", "all", "--minutes", "0.4", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.stdout, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, line["violations"]) == (0, 0), done.stdout
    report = json.loads(Path(line["file"]).read_text())
    assert report["with"] == ",".join(NAMES)
    seen = ("with pictures", "with an adapter", "with a grammar", "of another model", "stored", "messages", "ollama")
    assert {name: report["kinds"].get(name, 0) for name in seen if not report["kinds"].get(name)} == {}
