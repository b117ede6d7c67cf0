"""Constrained sequences in the engine, with the fake runner: what is drawn, who waits for whom, and what fails."""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from deltic.engine import guides
from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.guides import Guide, Guides, Vocabulary
from deltic.engine.messages import Constraint, Output, Request, SamplingParams
from deltic.engine.step import Step, StepResult
from tests.fake_engine import byte_tokenizer
from tests.fakes import EOS, NAN, VOCAB_SIZE, FakeRunner, expected_tokens
from tests.waiting import wait_for

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "ages": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 4}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip
COMPACT = {"whitespace_flexible": False}
GRAMMAR = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=COMPACT)  # type: ignore[arg-type]
WORD = llguidance.LLMatcher.grammar_from_lark("start: /[a-z]{400}/")
THINK_END = 264
"""`</think>` of the byte tokenizer."""


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_tokenizer()._backend.to_str())
    return path


@pytest.fixture(params=["cpu", "gpu"])
def engine(request: Any, tokenizer_file: Path) -> Iterator[Engine]:
    gpu = request.param == "gpu"
    runner = FakeRunner(gpu=gpu, n_lookahead=int(gpu))
    made = Engine(runner, vocabulary=Vocabulary(tokenizer_file.read_text))
    if gpu:  # masks are made here or there
        coin = random.Random(0)
        made.guides._is_busy = lambda: coin.random() < 0.5
    yield made
    made.close(0)


def request(id: str = "a", n_prompt: int = 10, constraint: Constraint | None = None, **params: Any) -> Request:
    params = {"seed": 1, "max_tokens": 200, "ignore_eos": True, "constraint": constraint} | params
    prompt = [20 + (ord(id[0]) * 31 + 7 * i) % 900 for i in range(n_prompt)]
    return Request(id=id, prompt_ids=prompt, params=SamplingParams(**params))


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[Output]]:
    for r in requests:
        engine.add(r)
    found: dict[tuple[str, int], list[Output]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault((output.id, output.index), []).append(output)
    engine.check()
    return found


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def is_idle(engine: Engine) -> bool:
    """Collects what workers have done; returns whether that was all."""
    engine.guides.collect([], 0.0)
    return engine.guides.n_busy == 0


def test_answers_follow_their_grammar(engine: Engine) -> None:
    """Without an eos: an answer that is complete has stopped. n > 1, and what is drawn alone is drawn beside others."""
    constraint = Constraint(grammar=GRAMMAR)
    requests = [request(f"{i}", 30 * i + 1, constraint, seed=i, n=1 + i % 3) for i in range(8)]
    free = [request(f"f{i}", 20 * i + 1, seed=i, max_tokens=40) for i in range(4)]
    found = run(engine, *requests, *free)
    for r in requests:
        for index in range(r.params.n):
            outputs = found[r.id, index]
            answer = json.loads(bytes(ids(outputs)))
            assert answer.keys() == {"name", "ages"} and set(answer["ages"]) <= {1, 22, 333}
            assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_token_id is None
            assert not outputs[-1].token_ids
    for r in free:
        assert ids(found[r.id, 0]) == expected_tokens(r.prompt_ids, r.params)
    assert engine.guides.n_busy == 0
    for r in requests:
        alone = run(engine, r)
        assert all(ids(alone[key]) == ids(found[key]) for key in alone)


def test_pages_may_be_short(tokenizer_file: Path) -> None:
    """Whatever is preempted and computed again, the guide goes on where it was."""
    for gpu in (False, True):
        drawn = []
        for n_pages in (256, 14):
            runner = FakeRunner(n_pages=n_pages, gpu=gpu, n_lookahead=int(gpu), max_model_len=640)
            made = Engine(runner, vocabulary=Vocabulary(tokenizer_file.read_text))
            constraint = Constraint(grammar=WORD, think_end_id=THINK_END, think_budget=30, close_ids=(THINK_END,))
            drawn.append(run(made, *(request(f"{i}", 100, constraint, max_tokens=180) for i in range(6))))
            made.close(0)
        assert made.scheduler.n_preemptions > 0
        assert {k: ids(v) for k, v in drawn[0].items()} == {k: ids(v) for k, v in drawn[1].items()}


@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_not_finite_is_drawn_again_and_no_mask_is_to_blame(tokenizer_file: Path, gpu: bool) -> None:
    constraint = Constraint(grammar=WORD, think_end_id=THINK_END, think_budget=30, close_ids=(THINK_END,))
    asked = [request(f"{i}", 100, constraint, max_tokens=80, n=1 + i % 2) for i in range(3)]
    drawn = []
    for spoil_at in (-1, 20, 50):
        runner = FakeRunner(gpu=gpu, n_lookahead=int(gpu))
        made, was, n_steps = Engine(runner, vocabulary=Vocabulary(tokenizer_file.read_text)), runner.step, 0

        def step(step: Step, runner: Any = runner, was: Any = was, spoil_at: int = spoil_at) -> StepResult:
            nonlocal n_steps
            n_steps += 1
            if n_steps == spoil_at:
                runner.states = [NAN] * len(runner.states)
            return was(step)  # type: ignore[no-any-return]

        runner.step = step  # type: ignore[method-assign]
        drawn.append({key: ids(outputs) for key, outputs in run(made, *asked).items()})
        assert (made.stats().n_recomputed > 0) == (spoil_at > 0)
        made.close(0)
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_thought_is_free_and_then_closed(engine: Engine) -> None:
    closing = {"close_ids": (10, THINK_END), "begin_ids": (10, 10)}
    free = expected_tokens(request().prompt_ids, request().params)
    for budget in (0, 1, 5):
        constraint = Constraint(grammar=GRAMMAR, think_end_id=THINK_END, think_budget=budget, **closing)
        tokens = ids(run(engine, request(constraint=constraint))["a", 0])
        assert tokens[: budget + 4] == [*free[:budget], 10, THINK_END, 10, 10]
        assert json.loads(bytes(tokens[budget + 4 :]))
    # The model closes it by itself, before the budget is used up, or without one; with a grammar and without.
    for budget in (None, 50):
        constraint = Constraint(
            grammar=GRAMMAR, think_end_id=free[6], think_budget=budget, close_ids=(free[6],), begin_ids=(10,)
        )
        tokens = ids(run(engine, request(constraint=constraint))["a", 0])
        assert tokens[:8] == [*free[:7], 10] and json.loads(bytes(tokens[8:]))
    constraint = Constraint(think_end_id=THINK_END, think_budget=5, **closing)
    found = run(engine, request(constraint=constraint, max_tokens=30), request("b", max_tokens=30))
    tokens = ids(found["a", 0])
    assert tokens[:9] == [*free[:5], 10, THINK_END, 10, 10] and len(tokens) == 30
    if engine.info.n_lookahead:  # a thought runs ahead, and so does what is free behind it
        assert engine.runner.n_ran_ahead > 40  # type: ignore[attr-defined]


def test_an_answer_does_not_end_inside_its_thought(engine: Engine) -> None:
    """Where a grammar is to follow; without one it may."""
    stop = expected_tokens(request().prompt_ids, request().params)[3]
    for grammar in (GRAMMAR, ""):
        constraint = Constraint(grammar=grammar, think_end_id=THINK_END, think_budget=8, close_ids=(THINK_END,))
        found: list[Guide] = []
        original = FakeRunner.step

        def step(runner: FakeRunner, planned: Any, found: Any = found, original: Any = original) -> Any:
            found += [draw.sequence.guide.bans_end for draw in planned.draws]
            return original(runner, planned)

        engine.runner.step = step.__get__(engine.runner)  # type: ignore[method-assign]
        run(engine, request(constraint=constraint, max_tokens=12, stop_token_ids=(stop,)))
        assert found[:3] == [bool(grammar)] * 3 and not any(found[8:])


def test_ends_as_ever(engine: Engine) -> None:
    """max_tokens; a stop token; an eos where the grammar lets one through, also if it is to be ignored."""
    outputs = run(engine, request(constraint=Constraint(grammar=GRAMMAR), max_tokens=3))["a", 0]
    assert len(ids(outputs)) == 3 and outputs[-1].finish_reason == "length"
    outputs = run(engine, request(constraint=Constraint(grammar=GRAMMAR), stop_token_ids=(ord("n"),)))["a", 0]
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_token_id == ord("n")
    letters = Constraint(grammar=llguidance.LLMatcher.grammar_from_lark("start: /a*/"))
    for ignore in (False, True):
        outputs = run(engine, request(constraint=letters, ignore_eos=ignore))["a", 0]
        tokens = ids(outputs)
        assert set(tokens[:-1]) <= {ord("a")} and tokens[-1] == EOS and outputs[-1].finish_reason == "stop"
    nothing = Constraint(grammar=llguidance.LLMatcher.grammar_from_lark('start: ""'))
    outputs = run(engine, request(constraint=nothing))["a", 0]
    assert not ids(outputs) and outputs[-1].finish_reason == "stop"


def test_a_borrowed_tokenizer_may_end_elsewhere(tokenizer_file: Path) -> None:
    """As with random weights: the ends of the model are none of its ids."""
    runner = FakeRunner()
    runner.info.eos_token_ids = [500, 999]
    engine = Engine(runner, vocabulary=Vocabulary(tokenizer_file.read_text))
    words = Constraint(grammar=llguidance.LLMatcher.grammar_from_lark("start: /[ab]*/"))
    for ignore in (False, True):
        for seed in range(5):
            tokens = ids(run(engine, request(constraint=words, ignore_eos=ignore, seed=seed))["a", 0])
            assert set(tokens[:-1]) <= {ord("a"), ord("b")} and tokens[-1] in (500, 999)
    engine.close(0)


def spin(seconds: float) -> None:
    """Uses a processor."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_tenants_take_turns_with_slow_masks(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has many slow guides holds up his own: another's slow one waits for those that are being made, and its own turn."""
    original, waits, started = Guides._do, dict[str, list[int]](), 0
    made = Engine(FakeRunner(), vocabulary=Vocabulary(tokenizer_file.read_text))

    def slow(guides: Guides, job: list[Guide], tokens: list[int], words: Any) -> None:
        nonlocal started
        if tokens and len(job) == 1:
            started += 1
            asked = job[0].sequence.request
            waits.setdefault(asked.tenant, []).append(started - given[asked.id])
        spin(0.002 + 0.001 * len(job))
        original(guides, job, tokens, words)

    give, given = Guides._give, dict[str, int]()

    def note(guides: Guides, job: list[Guide], tokens: list[list[int]]) -> None:
        for guide in job:
            given[guide.sequence.request.id] = started
        give(guides, job, tokens)

    monkeypatch.setattr(Guides, "_do", slow)
    monkeypatch.setattr(Guides, "_give", note)
    monkeypatch.setattr("deltic.engine.guides.SLOW_S", 0.001)
    monkeypatch.setattr("deltic.engine.guides.N_WORKERS", 1)
    many = [request(f"{i}", constraint=Constraint(grammar=WORD), max_tokens=60) for i in range(7)]
    one = request("o", constraint=Constraint(grammar=WORD), max_tokens=60)
    for r in many:
        r.tenant = "many"
    one.tenant = "one"
    run(made, *many, one)
    made.close(0)
    assert statistics.median(waits["one"]) <= 2 < statistics.median(waits["many"])


def test_the_collector_may_close_an_engine_in_a_thread_that_looks_for_work(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was dropped in a cycle is closed by whoever allocates next, a queue that holds its lock included."""
    made = Engine(FakeRunner(), vocabulary=Vocabulary(tokenizer_file.read_text))
    run(made, request("a", constraint=Constraint(grammar=WORD)))
    threads = list(made.guides._threads)
    assert {thread.name for thread in threads} == {"grammar"}
    allocate, worker = threading._allocate_lock, list[str]()  # type: ignore[attr-defined]

    def collect() -> Any:
        if threading.current_thread() in threads and not worker:
            worker.append("here")
            made.close(0)
        return allocate()

    monkeypatch.setattr(threading, "_allocate_lock", collect)
    for n in range(len(threads)):  # a job that nobody waits for: its worker looks for the next one then
        made.guides._todo.put((0, -n, ([], [])))
    for thread in threads:
        thread.join(10)
    assert worker and not any(thread.is_alive() for thread in threads)


def test_who_is_slow_sits_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a mask nor a grammar that takes long holds up the others' tokens, or the prompt behind it; who was in one job with it,
    once."""
    original, n_others, n_in_job, ended = Guides._do, 0, [], []

    def slow(guides: Guides, job: list[Guide], tokens: list[int], words: Any) -> None:
        if any(guide.sequence.request.id == "s" for guide in job):
            n_in_job.append(len(job))
            until, deadline = n_others + 30, time.monotonic() + 20
            while n_others < until and "f" not in ended and time.monotonic() < deadline:
                time.sleep(0.001)
            spin(0.002)
        original(guides, job, tokens, words)

    monkeypatch.setattr(Guides, "_do", slow)
    monkeypatch.setattr("deltic.engine.guides.SLOW_S", 0.001)
    engine.guides._is_busy = lambda: False  # nobody waits for a device
    engine.add(request("s", 150, Constraint(grammar=GRAMMAR), max_tokens=3))
    engine.add(request("f", 300, max_tokens=150))
    engine.add(request("g", 10, Constraint(grammar=WORD), max_tokens=150))
    n_before = []
    while engine.has_work():
        for output in engine.step():
            if output.id == "s" and output.token_ids:
                n_before.append(n_others)
            n_others += output.id != "s"
            ended += [output.id] * (output.finish_reason is not None)
    engine.check()
    assert len(n_before) == 3 and n_before[0] >= 30 and n_before[2] >= 90, n_before
    assert n_in_job[0] == n_in_job[2] == 1, "it had a job to itself, once it was known to be slow"


@pytest.mark.parametrize("was_slow", [False, True])
def test_a_mask_is_waited_for_as_long_as_a_step_is_worth(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, was_slow: bool
) -> None:
    """Behind a step of a second, 20 ms are nothing: also for a guide that was in a slow job, and is tried alone."""
    original = Guides._do

    def slow(guides: Guides, job: list[Guide], tokens: list[list[int]], words: Any) -> None:
        time.sleep(0.02 if tokens else 0.0)
        original(guides, job, tokens, words)
        for guide in job:
            guide.n_alone = 2 * was_slow  # and one less behind this job

    monkeypatch.setattr(Guides, "_do", slow)
    engine.guides._is_busy = lambda: False  # nobody waits for a device
    engine.add(request("g", 10, Constraint(grammar=WORD), max_tokens=20))
    n_drawn = 0
    while engine.has_work():
        n_drawn += len(engine.step())
        if n_drawn and engine.guides.n_busy:
            engine.scheduler.take_masks(1.0)
            assert engine.guides.n_busy == 0
    assert n_drawn > 5


def test_what_is_wrong_harms_nobody_else(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(engine, request("x", constraint=Constraint(grammar="no grammar"), n=2), request("f", max_tokens=5))
    for index in range(2):
        (output,) = found["x", index]
        assert output.finish_reason == "error" and "Expected token" in (output.error or "")
    assert found["f", 0][-1].finish_reason == "length"
    for start, n_tokens in (("T", 0), ('"x" T', 1)):
        never = llguidance.LLMatcher.grammar_from_lark(f"start: {start}\nT: /ab/ & /ac/")
        *drawn, output = run(engine, request("x", constraint=Constraint(grammar=never)))["x", 0]
        assert len(drawn) == n_tokens and "no text can match" in (output.error or "")

    original = Guides._fill

    def empty(guides: Guides, matchers: Any, words: Any) -> list[bool]:
        result = original(guides, matchers, words)
        words[:] = 0
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Guides, "_fill", empty)
        word = Constraint(grammar=llguidance.LLMatcher.grammar_from_lark("start: /[b-d]+/"))
        found = run(engine, request("x", constraint=word), request("f", max_tokens=5))
    assert "leave no token" in (found["x", 0][-1].error or "") and found["f", 0][-1].finish_reason == "length"

    class Panic(BaseException):
        """As a panic of the library is."""

    def fail(*_: Any) -> None:
        raise Panic("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Guides, "_do", fail)
        found = run(engine, request("x", constraint=Constraint(grammar=GRAMMAR)), request("f", max_tokens=5))
    assert "broken" in (found["x", 0][-1].error or "") and found["f", 0][-1].finish_reason == "length"
    assert json.loads(bytes(ids(run(engine, request("y", constraint=Constraint(grammar=GRAMMAR)))["y", 0])))


BOMBS = {
    "empty": "",
    "no rule": "%ignore / /",
    "nothing": "start: T\nT: /a/ & /b/",
    "itself": "start: start",
    "a rule that is missing": "start: x",
    "endless terminal": "start: T\nT: T",
    "states": "start: /(a|b)*a(a|b){200}(a|b){200}(a|b){200}/",
    "repetitions": "start: x{1000}\nx: y{1000}\ny: z{1000}\nz: /a|b/",
    "ambiguous": 'start: x\nx: x x x x | "a" | ""',
    "brackets": "start: " + "(" * 100_000,
    "not text": "\x00\ud7ff" * 1000,
}


TAKEN = "empty", "states", "repetitions", "ambiguous"
"""Those of which some text may follow, within what the library allows."""


@pytest.mark.parametrize("what", BOMBS)
def test_a_grammar_that_explodes_is_its_own_request_s_error(what: str, tokenizer_file: Path) -> None:
    """Beside drafts, of which some end where a mask is missing: who has no grammar, or a good one, draws what it draws alone."""
    runner = FakeRunner(max_drafts=4, head=random.Random(1))
    engine = Engine(runner, vocabulary=Vocabulary(tokenizer_file.read_text))
    free = request("f", max_tokens=40)
    good = request("g", 20, Constraint(grammar=GRAMMAR))
    alone = ids(run(engine, good)["g", 0])
    bomb = Constraint(grammar=BOMBS[what], think_end_id=THINK_END, think_budget=3, close_ids=(THINK_END,))
    bombs = [
        request(f"x{i}", 10 + i, bomb if i else Constraint(grammar=BOMBS[what]), max_tokens=30, n=1 + i)
        for i in range(2)
    ]
    found = run(engine, *bombs, free, good)
    assert ids(found["f", 0]) == expected_tokens(free.prompt_ids, free.params)
    assert ids(found["g", 0]) == alone
    for i, n in ((0, 1), (1, 2)):
        for index in range(n):
            last = found[f"x{i}", index][-1]
            ends = last.finish_reason, bool(last.error)
            assert ends == ("error", True) or (what in TAKEN and ends in (("stop", False), ("length", False))), last
    large = Constraint(grammar="start: T\nT: /" + "a" * 10_000_000 + "/")
    with pytest.raises(RequestError, match="characters, and may have 300000"):
        engine.add(request("large", constraint=large))
    wait_for(lambda: is_idle(engine))  # a worker may have a mask that nobody waits for any more
    assert engine.stats().n_drafted > 0 and not engine.has_work()
    engine.close(0)


def bits(ids: Iterable[int]) -> bytes:
    """As Constraint.allowed has them."""
    wanted = set(ids)
    return bytes(sum((8 * i + k in wanted) << k for k in range(8)) for i in range(max(wanted) // 8 + 1))


def test_only_what_is_allowed(engine: Engine) -> None:
    some = Constraint(allowed=bits([*range(40, 60), 900]))
    vowels = Constraint(
        allowed=bits(b"aeiou"), grammar=WORD, think_end_id=THINK_END, think_budget=5, close_ids=(7, THINK_END)
    )
    requests = [request("a", constraint=some, n=2), request("b", constraint=vowels, max_tokens=90)]
    found = run(engine, *requests, request("f", max_tokens=50))
    for index in range(2):
        tokens = ids(found["a", index])
        assert set(tokens) <= {*range(40, 60), 900} and len(set(tokens)) > 5 and len(tokens) == 200
    tokens = ids(found["b", 0])
    assert set(tokens) - set(b"aeiou") == {7, THINK_END} and tokens[5:7] == [7, THINK_END]
    assert ids(found["f", 0]) == expected_tokens(request("f").prompt_ids, request("f", max_tokens=50).params)
    for r in requests:
        assert all(ids(outputs) == ids(found[key]) for key, outputs in run(engine, r).items())
    nothing = Constraint(allowed=bits([5]), bad_ids=((5,),))
    (output,) = run(engine, request(constraint=nothing))["a", 0]
    assert "allowed_token_ids" in (output.error or "")
    assert run(engine, request())["a", 0][-1].error is None


def test_bad_words(engine: Engine) -> None:
    """Only its last id, and only where the others were drawn just before; what the prompt ends with does not count."""
    free = expected_tokens(request().prompt_ids, request().params)
    a, b, c = free[:3]
    others = ((free[9], free[7]), (request().prompt_ids[-1], a), (b, a, c), (*free[:9], 5))
    assert ids(run(engine, request(constraint=Constraint(bad_ids=others)))["a", 0]) == free
    for bad in ((a, b), (b,)):
        tokens = ids(run(engine, request(constraint=Constraint(bad_ids=(*others, bad))))["a", 0])
        assert tokens[0] == a and tokens[1] != b and tokens[1:] != free[1:]
        assert not any(tuple(tokens[i : i + len(bad)]) == bad for i in range(len(tokens)))
    tokens = ids(run(engine, request(constraint=Constraint(bad_ids=((a, b, c),))))["a", 0])
    assert tokens[:2] == [a, b] and tokens[2] != c
    no_ab = Constraint(grammar=WORD, bad_ids=(*((byte,) for byte in b"bcdefgh"), tuple(b"ij")))
    text = bytes(ids(run(engine, request(constraint=no_ab))["a", 0]))
    assert text.isalpha() and not set(text) & set(b"bcdefgh") and b"ij" not in text and b"i" in text


def test_bad_words_where_pages_are_short() -> None:
    for gpu in (False, True):
        drawn = []
        for n_pages in (256, 14):
            runner = FakeRunner(n_pages=n_pages, gpu=gpu, n_lookahead=int(gpu), max_model_len=640)
            made = Engine(runner)
            few = Constraint(allowed=bits(range(30, 40)), bad_ids=((31, 32), (32, 31), (35, 36, 37), (39,)))
            drawn.append(run(made, *(request(f"{i}", 100, few, max_tokens=180, n=1 + i % 2) for i in range(5))))
            made.close(0)
        assert made.scheduler.n_preemptions > 0
        assert {k: ids(v) for k, v in drawn[0].items()} == {k: ids(v) for k, v in drawn[1].items()}
        for outputs in drawn[0].values():
            text = bytes(ids(outputs))
            assert not any(bad in text for bad in (b"\x1f\x20", b"\x20\x1f", b"\x23\x24\x25", b"\x27"))


def test_refused_at_once(engine: Engine) -> None:
    for constraint, words in (
        (Constraint(think_end_id=VOCAB_SIZE), "constraint has a token id"),
        (Constraint(begin_ids=(-1,)), "constraint has a token id"),
        (Constraint(bad_ids=((5, VOCAB_SIZE),)), "constraint.bad_ids has a token id"),
        (Constraint(bad_ids=((),)), "without ids"),
        (Constraint(think_end_id=5, think_budget=3), "close_ids"),
        (Constraint(think_end_id=5, think_budget=-3, close_ids=(5,)), "think_budget"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.add(request(constraint=constraint))
    with pytest.raises(RequestError, match="no tokenizer"):
        Engine(FakeRunner()).add(request(constraint=Constraint(grammar=GRAMMAR)))
    without = Engine(FakeRunner(), vocabulary=Vocabulary(Path("/nowhere/tokenizer.json").read_text))
    (output,) = run(without, request(constraint=Constraint(grammar=GRAMMAR)))["a", 0]
    assert "/nowhere/tokenizer.json" in (output.error or "")


def test_an_abort_frees_everything(engine: Engine) -> None:
    def n_guides() -> int:
        gc.collect()
        return sum(type(thing) is Guide for thing in gc.get_objects())

    before = n_guides()
    for n_steps in (0, 1, 2, 9):
        engine.add(request("a", 150, Constraint(grammar=WORD), n=3))
        for _ in range(n_steps):
            engine.step()
        assert {o.finish_reason for o in engine.abort("a")} == {"abort"}
        engine.check()
    deadline = time.monotonic() + 5
    while engine.guides.n_busy and time.monotonic() < deadline:
        engine.scheduler.take_masks(0.001)
    assert engine.guides.n_busy == 0 and not engine.has_work()
    assert n_guides() == before


def test_nothing_is_done_for_who_is_gone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiling(monkeypatch)
    with engine.guides._compiled._lock:  # the workers stand still
        for i in range(12):
            engine.add(request(f"{i}", constraint=Constraint(grammar=GRAMMAR + " " * i)))
            engine.abort(f"{i}")
    deadline = time.monotonic() + 5
    while engine.guides.n_busy and time.monotonic() < deadline:
        engine.scheduler.take_masks(0.001)
    assert engine.guides.n_busy == 0 and len(compiled) <= 1


def compiling(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled from now on, in their order."""
    compiled, original = list[str](), Guides._compile

    def compile(guides: Guides, grammar: str) -> Any:
        compiled.append(grammar)
        return original(guides, grammar)

    monkeypatch.setattr(Guides, "_compile", compile)
    return compiled


def of_key(name: str, id: str, grammar: str) -> Request:
    asked = request(id, constraint=Constraint(grammar=grammar), max_tokens=2)
    asked.tenant = asked.namespace = name
    return asked


def test_grammars_are_compiled_in_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiling(monkeypatch)
    with engine.guides._compiled._lock:  # those who compile stand still
        for i in range(20):
            engine.add(of_key("a", f"a{i}", GRAMMAR + " " * i))
        while engine.guides._starts[0].qsize() > 19:
            time.sleep(0.001)
        engine.add(of_key("b", "b", GRAMMAR + " " * 50))
    run(engine)
    assert compiled.index(GRAMMAR + " " * 50) == 1 and len(compiled) == 21


def test_a_short_grammar_does_not_wait_for_long_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiling(monkeypatch)
    monkeypatch.setattr(guides, "LONG_GRAMMAR", len(GRAMMAR) + 10)
    with engine.guides._compiled._lock:
        for i in range(11, 15):
            engine.add(of_key("a", f"a{i}", GRAMMAR + " " * i))
        engine.add(of_key("a", "b", GRAMMAR))
    run(engine)
    assert compiled.index(GRAMMAR) <= 1 and len(compiled) == 5


def test_no_namespace_learns_or_loses_grammars(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled already takes less time, and so tells who asked for it."""
    monkeypatch.setattr(engine.guides._compiled, "_room", 4)
    compiled = compiling(monkeypatch)
    for name in "abab":
        run(engine, of_key(name, name, GRAMMAR))
    assert len(compiled) == 2
    for i in range(1, 9):
        run(engine, of_key("a", "a", GRAMMAR + " " * i))
    run(engine, of_key("b", "b", GRAMMAR))
    assert len(compiled) == 10 and len(engine.guides._compiled) == 4


def test_the_end_waits_for_the_threads(tokenizer_file: Path) -> None:
    """Python crashes when it ends while one of them is in the library."""
    program = f"""
import llguidance
from pathlib import Path
from deltic.engine.engine import Engine
from deltic.engine.guides import Vocabulary
from tests.fakes import FakeRunner
from tests.null.test_constraint import Constraint, request
inner = {{"properties": {{f"q{{i}}": {{"type": "string", "pattern": "^[a-z]{{1,20}}[0-9]*$"}} for i in range(40)}}}}
schema = {{"properties": {{f"p{{i}}": {{"type": "array", "items": inner}} for i in range(40)}}}}
grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
engine = Engine(FakeRunner(), vocabulary=Vocabulary(Path({str(tokenizer_file)!r}).read_text))
for i in range(8):
    engine.add(request(f"{{i}}", constraint=Constraint(grammar=grammar + " " * i)))
engine.step()
engine.close(0)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_the_vocabulary_is_there_before_the_first_grammar(tokenizer_file: Path) -> None:
    """It is read once, in a thread that begins before the engine is built; what goes wrong is said by the first grammar."""
    n_read = 0

    def read() -> str:
        nonlocal n_read
        n_read += 1
        return tokenizer_file.read_text()

    runner = FakeRunner()
    vocabulary = Vocabulary(read)
    vocabulary.begin(lambda: (runner.info.vocab_size, runner.info.eos_token_ids))
    engine = Engine(runner, vocabulary=vocabulary)
    engine.guides.prepare()
    assert n_read == 1
    run(engine, request(constraint=Constraint(grammar=GRAMMAR)))
    assert n_read == 1
    broken = Vocabulary(Path("/nowhere/tokenizer.json").read_text)
    broken.begin(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    for without in (Guides(9, [0], None), Guides(9, [0], Vocabulary(Path("/nowhere/tokenizer.json").read_text))):
        without.prepare()
        without.prepare()
