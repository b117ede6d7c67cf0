"""The agent trace: the same for the same seed, and reuse that is never more than the oracle allows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agent import QUICK, summarise
from bench.agent_replay import Replay, ReplayOptions
from bench.agent_trace import BACK_SHARES, PAGE_SIZE, Conversation, Oracle, Trace, Writer
from bench.prefix import fit_ttft
from bench.prefix import summarise as summarise_prefix
from deltic.engine.engine import Engine
from deltic.server.chat.template import ChatTemplate
from tests.fake_engine import TEMPLATE, byte_tokenizer
from tests.fakes import FakeRunner

pytestmark = pytest.mark.long

MAX_TOKENS = 1500
TRACE = Trace(len, seed=1, n_turns=12, max_tokens=MAX_TOKENS)


def played(trace: Trace, number: int) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """The messages of each request of a session, and how its turns began."""
    conversation = Conversation(trace, number, trace.system())
    requests, kinds = [], []
    while (turn := conversation.next_turn()) is not None:
        requests.append(list(conversation.messages))
        kinds.append(turn.kind)
        conversation.answered()
    return requests, kinds


def test_a_session_is_the_same_again_and_unlike_the_others() -> None:
    assert played(TRACE, 0) == played(TRACE, 0)
    assert played(TRACE, 0) != played(TRACE, 1)
    assert played(TRACE, 0)[0][0][0] == played(TRACE, 1)[0][0][0]  # the system message


def test_going_back_takes_messages_away() -> None:
    seen = set()
    for number in range(40):
        requests, kinds = played(TRACE, number)
        for i in range(1, len(kinds)):
            before, after = requests[i - 1], requests[i]
            if kinds[i] == "next":
                assert after[: len(before)] == before and len(after) == len(before) + 2
            elif kinds[i] == "regenerate":
                assert after == before
            else:
                assert len(after) <= len(before) and after != before
                assert after[:1] == before[:1]
            seen.add(kinds[i])
    assert seen == {"next", *BACK_SHARES}


def test_texts_are_as_long_as_asked() -> None:
    writer = Writer("x", lambda text: len(text.split()))
    for kind in ("prose", "code", "log", "listing"):
        n = len(writer.text(kind, 200).split())
        assert 200 <= n < 230


@given(st.data())
def test_the_oracle_is_the_longest_common_prefix(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=5 * PAGE_SIZE)
    alike = [0] * data.draw(st.integers(0, 3 * PAGE_SIZE))  # random lists alone would hardly share a page
    known = [alike + data.draw(ids) for _ in range(data.draw(st.integers(0, 4)))]
    prompt = alike + data.draw(ids)
    oracle = Oracle()
    for one in known:
        oracle.add(one)

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    most = len(prompt) - 1
    lengths = [common(prompt, one) for one in known]
    exact = max((min(n, most) for n in lengths), default=0)
    paged = max((min(n, most) // PAGE_SIZE * PAGE_SIZE for n in lengths), default=0)
    assert oracle.longest(prompt) == (paged, exact)


@pytest.mark.parametrize("own", [False, True])
def test_a_replay_reuses_no_more_than_was_there(own: bool) -> None:
    tokenizer = byte_tokenizer()
    template = ChatTemplate({"default": TEMPLATE}, tokenizer)
    trace = Trace(lambda text: len(tokenizer.encode(text)), seed=3, n_turns=8, max_tokens=3000)
    runner = FakeRunner(n_pages=400, max_num_seqs=2, max_model_len=3000)
    rows = Replay(Engine(runner), tokenizer, template, trace, ReplayOptions(n_parallel=2, own=own)).run(3)
    assert {row["session"] for row in rows} == {0, 1, 2}
    assert [row["turn"] for row in rows if row["session"] == 0] == list(range(sum(r["session"] == 0 for r in rows)))
    for row in rows:
        assert row["cached_tokens"] <= row["best_waiting_tokens"] < row["prompt_tokens"] < 3000
        assert row["best_tokens"] <= row["best_exact_tokens"] < row["best_tokens"] + PAGE_SIZE
        assert 0 < row["ttft_s"] <= row["total_s"]
    done = summarise(rows)
    assert done["n_requests"] == len(rows) and 0.3 < done["best_reuse"] < 1
    assert sum(done["lost_tokens"].values()) == done["best_tokens"] - done["cached_tokens"]


def test_the_fit_finds_what_a_turn_costs() -> None:
    points = [
        (new, total, 0.1 + new * 2e-3 + total * 1e-6)
        for new, total in ((50, 100), (80, 300), (20, 900), (64, 2000), (9, 9))
    ]
    fit = fit_ttft(points)
    assert fit is not None
    assert fit["b_s_per_new"] == pytest.approx(2e-3) and fit["c_s_per_total"] == pytest.approx(1e-6)
    assert fit["total_share"] < 0.01
    assert fit_ttft(points[:3]) is None
    assert fit_ttft([(total, total, seconds) for _, total, seconds in points]) is None


def test_items_are_judged_by_their_medians() -> None:
    rows = [{"item": "system", "value": value} for value in (0.1, 0.2, 0.9)]
    rows += [{"item": "restart", "value": None}]
    system, restart = summarise_prefix(rows)
    assert system["met"] and system["median"] == 0.2 and system["max"] == 0.9
    assert not restart["met"] and restart["median"] is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the real engine needs torch")
def test_the_quick_size_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.agent", "--quick", "--threads", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = tmp_path.glob("agent-built-in-*.json")
    result = json.loads(path.read_text())
    assert path.with_suffix(".png").stat().st_size > 10_000
    runs = {run["label"]: run for run in result["runs"]}
    assert runs["all"]["n_requests"] == QUICK["sessions"] * QUICK["turns"]
    assert runs["off"]["cached_tokens"] == 0
    # What was asked does not depend on the engine.
    asked = [{(row["session"], row["turn"], row["prompt_tokens"]) for row in run["rows"]} for run in runs.values()]
    assert all(one == asked[0] for one in asked)
    assert len(result["cold"]) == 1
