"""The scheduler and its books, driven by the fake runner, which checks the memory it is given at every draw.

Cost of the host side, for one decode of a step of N: `python tests/null/test_scheduler.py`.
"""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deltic.engine.cache.cache import Cache
from deltic.engine.checks import RequestError
from deltic.engine.cost import StepLoad
from deltic.engine.messages import Output, Request, SamplingParams, TokenLogprob
from deltic.engine.scheduler import Scheduler
from deltic.engine.step import Step, StepResult
from deltic.ops.geometry import PAGE_SIZE
from tests.fakes import EOS, NAN, FakeRunner, expected_tokens


class Bench:
    """A scheduler with its runner; `outputs` by (id, index)."""

    def __init__(self, runner: FakeRunner, max_itl_ms: float | None = None) -> None:
        self.runner = runner
        cache = Cache(runner.info, runner.tiers)
        self.scheduler = Scheduler(cache, runner.info, runner.max_logit_rows, max_itl_ms)
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.steps: list[list[tuple[str, int, int]]] = []
        """For each step its chunks: request id, start, length."""

    def add(self, id: str, n_prompt: int, priority: int = 0, **params: object) -> list[int]:
        """Queues a request with a prompt that no other has; the prompt."""
        prompt = [20 + (sum(map(ord, id)) * 31 + 7 * i) % 900 for i in range(n_prompt)]
        params = {"seed": 1, "ignore_eos": True} | params
        request = Request(id=id, prompt_ids=prompt, params=SamplingParams(**params), priority=priority)
        self.scheduler.add(request)
        return prompt

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            history = self.outputs.setdefault((output.id, output.index), [])
            assert not history or history[-1].finish_reason is None, "an output after the last"
            history.append(output)

    def step(self) -> Step | None:
        step = self.scheduler.plan()
        if step is not None:
            self.steps.append([(c.sequence.request.id, c.start, c.length) for c in step.chunks])
            self.take(self.scheduler.commit(step, self.runner.step(step)))
            self.scheduler.check()
        return step

    def run(self, n_most: int = 10_000) -> None:
        for _ in range(n_most):
            if self.step() is None:
                break
        assert self.scheduler.n_open == 0, f"not done after {n_most} steps"
        assert self.scheduler.cache.n_pages_used == self.scheduler.cache.n_slots_used == 0

    def tokens(self, id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[id, index] for token in output.token_ids]

    def reason(self, id: str, index: int = 0) -> str | None:
        return self.outputs[id, index][-1].finish_reason

    def seeds(self, id: str) -> dict[int, int]:
        return {s.index: s.seed for s in self.scheduler.sequences() if s.request.id == id}


def test_one_request_from_prompt_to_length() -> None:
    bench = Bench(FakeRunner())
    prompt = bench.add("a", 100, max_tokens=70)
    bench.run()
    assert bench.tokens("a") == expected_tokens(prompt, SamplingParams(max_tokens=70, seed=1, ignore_eos=True))
    assert bench.reason("a") == "length"
    assert len(bench.steps) == 70
    assert bench.scheduler.n_generated_tokens == 70 and bench.scheduler.n_prompt_tokens == 100


def test_progress_of_a_prompt_is_told_to_who_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(FakeRunner(max_step_tokens=128))
    prompt = bench.add("quiet", 300, max_tokens=2)
    bench.run()
    assert all(output.n_read is None for output in bench.outputs["quiet", 0])
    assert not bench.scheduler.reading.begun
    for id in ("new", "again"):
        ids = prompt if id == "again" else [*range(20, 320)]
        params = SamplingParams(max_tokens=2, n=2, seed=1, ignore_eos=True)
        bench.scheduler.add(Request(id=id, prompt_ids=ids, params=params, wants_progress=True))
        bench.step()
        (begun,) = bench.scheduler.reading.begun
        bench.run()
        told = [output for output in bench.outputs[id, 0] if output.n_read is not None]
        n_cached = 256 if id == "again" else 0
        assert [output.n_read for output in told] == ([300] if n_cached else [128, 256, 300])
        assert {output.cached_tokens for output in told} == {n_cached}
        assert not any(output.token_ids or output.finish_reason for output in told)
        assert begun.request.id == id and [o.n_read for o in bench.scheduler.reading.begin()] == [begun.n_computed]
        assert all(output.n_read is None for output in bench.outputs[id, 1])
        assert bench.tokens(id) and bench.tokens(id, 1)
    assert not caplog.messages
    monkeypatch.setattr("deltic.engine.reading.LOG_S", 0.0)
    with caplog.at_level("INFO", "deltic.engine"):
        bench.add("long", 1000, max_tokens=1)
        bench.run()
    assert caplog.messages[0] == "request long: 128 of 1000 tokens of the prompt are computed (13 %) after 0 s"
    assert len(caplog.messages) == 7  # the last chunk is told by the answer
    with caplog.at_level("INFO", "deltic.engine"):
        for id in ("one", "two"):
            params = SamplingParams(max_tokens=1, seed=1)
            bench.scheduler.add(Request(id=id, prompt_ids=[*range(20, 320)], params=params, tenant=id, use_cache=False))
        bench.run()
    assert "(43 %) after 0 s; 1 prompt beside it" in caplog.messages[7]


def test_stop_ids_eos_and_ignore_eos() -> None:
    bench = Bench(FakeRunner())
    prompt = bench.add("free", 5, max_tokens=50)
    bench.run()
    third = bench.tokens("free")[2]
    first = bench.tokens("free").index(third)
    bench.scheduler.add(
        Request(id="stop", prompt_ids=prompt, params=SamplingParams(max_tokens=50, seed=1, stop_token_ids=(third,)))
    )
    bench.run()
    assert bench.tokens("stop") == bench.tokens("free")[: first + 1]
    assert bench.reason("stop") == "stop" and bench.outputs["stop", 0][-1].stop_token_id == third
    # Find a seed that meets eos early; the same one with ignore_eos runs on.
    seed = next(s for s in range(1000) if expected_tokens(prompt, SamplingParams(seed=s, max_tokens=20))[-1] == EOS)
    for id, ignore_eos in (("eos", False), ("on", True)):
        params = SamplingParams(max_tokens=20, seed=seed, ignore_eos=ignore_eos)
        bench.scheduler.add(Request(id=id, prompt_ids=prompt, params=params))
    bench.run()
    assert bench.reason("eos") == "stop" and bench.outputs["eos", 0][-1].stop_token_id == EOS
    assert bench.tokens("eos")[-1] == EOS
    assert bench.reason("on") == "length" and len(bench.tokens("on")) == 20


def test_prompt_only() -> None:
    bench = Bench(FakeRunner())
    bench.add("a", 130, max_tokens=0, prompt_logprobs=2)
    bench.run()
    (output,) = bench.outputs["a", 0]
    assert output.token_ids == [] and output.finish_reason == "length"
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 130


def test_prefill_is_cut_on_the_grid_beside_decodes() -> None:
    bench = Bench(FakeRunner(max_step_tokens=200))
    bench.add("d", 10, max_tokens=20)
    bench.step()
    bench.add("p", 500, max_tokens=2)
    bench.run()
    assert bench.steps[1] == [("d", 10, 1), ("p", 0, 192)]  # 199 are left
    assert bench.steps[2] == [("d", 11, 1), ("p", 192, 192)]
    assert bench.steps[3] == [("d", 12, 1), ("p", 384, 116)]
    assert bench.steps[4] == [("d", 13, 1), ("p", 500, 1)]


def test_decodes_cannot_starve_a_prefill() -> None:
    bench = Bench(FakeRunner(max_step_tokens=4, max_num_seqs=8))
    for i in range(6):
        bench.add(f"d{i}", 1, max_tokens=60)
    for _ in range(7):
        bench.step()
    bench.add("p", 150, max_tokens=1)
    bench.run()
    chunks = [chunk for step in bench.steps for chunk in step if chunk[0] == "p"]
    assert chunks == [("p", 0, 64), ("p", 64, 64), ("p", 128, 22)]
    # Each step since has all the decodes too.
    assert all(sum(c[0] != "p" for c in s) == 6 for s in bench.steps if any(c[0] == "p" for c in s))


def test_first_come_first_served_within_a_priority() -> None:
    bench = Bench(FakeRunner(max_num_seqs=1))
    for id, priority in (("first", 0), ("late", 1), ("second", 0), ("urgent", -1)):
        bench.add(id, 70, priority, max_tokens=2)
    bench.run()
    order = list(dict.fromkeys(step[0][0] for step in bench.steps))
    assert order == ["urgent", "first", "second", "late"]


def test_short_prompts_share_a_step_and_do_not_overtake() -> None:
    bench = Bench(FakeRunner(max_step_tokens=128))
    bench.add("a", 100, max_tokens=1)
    bench.add("b", 100, max_tokens=1)  # 28 tokens are left, less than a cut: it waits
    bench.add("c", 10, max_tokens=1)  # would fit, but b was first
    bench.run()
    assert bench.steps == [[("a", 0, 100)], [("b", 0, 100), ("c", 0, 10)]]


def test_n_shares_the_prefill() -> None:
    bench = Bench(FakeRunner())
    prompt = bench.add("a", 150, n=3, max_tokens=5)
    seeds = bench.seeds("a")
    step = bench.step()
    assert step is not None
    assert bench.steps == [[("a", 0, 150)]] and len(step.draws) == 3
    assert len(step.slot_copies) == 2 and len(step.page_copies) == 2
    assert bench.scheduler.cache.n_pages_used == 2 + 3  # two full ones shared, a partial one each
    bench.run()
    for index in range(3):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        assert bench.tokens("a", index) == expected_tokens(prompt, params, seeds[index])
    assert len(set(seeds.values())) == 3 and seeds[0] == 1
    assert len({tuple(bench.tokens("a", i)) for i in range(3)}) == 3


def test_n_with_a_prompt_of_whole_pages_copies_none() -> None:
    bench = Bench(FakeRunner())
    bench.add("a", 128, n=2, max_tokens=3)
    step = bench.step()
    assert step is not None and step.page_copies == [] and bench.scheduler.cache.n_pages_used == 2
    bench.run()


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("n_steps", [0, 1, 3, 5])
def test_abort_of_one_of_n_at_any_time(index: int, n_steps: int) -> None:
    bench = Bench(FakeRunner(max_step_tokens=64))
    prompt = bench.add("a", 200, n=3, max_tokens=5)  # four chunks
    seeds = bench.seeds("a")
    for _ in range(n_steps):
        bench.step()
    bench.take(bench.scheduler.abort("a", index))
    assert bench.reason("a", index) == "abort"
    bench.scheduler.check()
    bench.run()
    # What was computed before is not computed again.
    n_prefill = sum(length for step in bench.steps for _, start, length in step if start < 200)
    assert n_prefill == 200
    for other in {0, 1, 2} - {index}:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        assert bench.tokens("a", other) == expected_tokens(prompt, params, seeds[other])


def test_abort_frees_at_once() -> None:
    bench = Bench(FakeRunner(max_num_seqs=2))
    bench.add("a", 200, max_tokens=50, n=2)
    bench.add("b", 10, max_tokens=2)
    for _ in range(3):
        bench.step()
    assert ("b", 0) not in bench.outputs
    bench.take(bench.scheduler.abort("a"))
    assert bench.scheduler.cache.n_pages_used == bench.scheduler.cache.n_slots_used == 0
    bench.step()
    assert len(bench.tokens("b")) == 1
    bench.take(bench.scheduler.abort("never heard of"))
    bench.take(bench.scheduler.abort("b", 7))
    bench.run()
    assert bench.reason("b") == "length"


def test_preempted_sequences_do_not_change() -> None:
    bench = Bench(FakeRunner(n_pages=7, max_num_seqs=4, max_model_len=448))
    prompts = {id: bench.add(id, 60, max_tokens=130) for id in "abcd"}
    bench.run()
    assert bench.scheduler.n_preemptions > 0
    for id, prompt in prompts.items():
        params = SamplingParams(max_tokens=130, seed=1, ignore_eos=True)
        assert bench.tokens(id) == expected_tokens(prompt, params)
    # The first was never the one to make way: one chunk for the prompt, one for each further token.
    assert sum(chunk[0] == "a" for step in bench.steps for chunk in step) == 130


def test_preemption_takes_the_lowest_priority_then_the_youngest() -> None:
    bench = Bench(FakeRunner(n_pages=3, max_num_seqs=3, max_model_len=192))
    bench.add("low", 60, priority=5, max_tokens=10)
    bench.add("old", 60, max_tokens=10)
    bench.add("young", 60, max_tokens=10)
    for _ in range(6):
        bench.step()
    assert [chunk[0] for chunk in bench.steps[-1]] == ["old"]
    bench.run()
    ended = [id for id, _ in sorted(bench.outputs, key=lambda k: list(bench.outputs).index(k))]
    assert set(ended) == {"low", "old", "young"}


def test_preempted_prefill_gives_back_its_siblings_slots() -> None:
    bench = Bench(FakeRunner(n_pages=6, max_num_seqs=4, max_model_len=384, max_step_tokens=64))
    bench.add("old", 60, max_tokens=200)
    for _ in range(3):
        bench.step()
    prompt = bench.add("young", 300, n=3, max_tokens=2)
    seeds = bench.seeds("young")
    while not bench.scheduler.n_preemptions:
        bench.step()
    assert bench.scheduler.cache.n_slots_used == 1
    bench.run()
    for index in range(3):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert bench.tokens("young", index) == expected_tokens(prompt, params, seeds[index])


def test_prefill_starts_only_when_its_whole_prompt_fits() -> None:
    bench = Bench(FakeRunner(n_pages=10, max_model_len=640, max_step_tokens=128))
    bench.add("a", 250, max_tokens=6)  # 4 pages, and none more
    bench.add("b", 250, max_tokens=6)
    bench.add("c", 250, max_tokens=6)  # of its 4 pages only 2 are free until a ends
    bench.run()
    first = next(i for i, step in enumerate(bench.steps) if any(id == "c" for id, _, _ in step))
    assert all(id != "a" for step in bench.steps[first:] for id, _, _ in step)
    assert bench.scheduler.n_preemptions == 0


def test_siblings_without_a_page_start_over() -> None:
    bench = Bench(FakeRunner(n_pages=4, max_num_seqs=4, max_model_len=256))
    prompt = bench.add("a", 140, n=4, max_tokens=20)
    seeds = bench.seeds("a")
    bench.run()
    for index in range(4):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert bench.tokens("a", index) == expected_tokens(prompt, params, seeds[index])


def test_prompt_logprobs_respect_the_rows_and_come_once() -> None:
    runner = FakeRunner(max_num_seqs=4, max_logit_rows=80, n_pages=12)
    bench = Bench(runner)
    bench.add("d", 4, max_tokens=30)
    bench.add("a", 300, max_tokens=3, prompt_logprobs=1, n=2)
    prompt = bench.add("b", 90, max_tokens=3, prompt_logprobs=0)
    bench.run()
    for id, index in (("a", 0), ("b", 0)):
        first, *rest = bench.outputs[id, index]
        assert first.prompt_logprobs is not None and all(o.prompt_logprobs is None for o in rest)
    entries = list(bench.outputs["b", 0][0].prompt_logprobs or ())
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
    assert len(bench.outputs["a", 0][0].prompt_logprobs or []) == 300
    assert all(output.prompt_logprobs is None for output in bench.outputs["a", 1])


def test_preempted_prefill_collects_its_prompt_logprobs_anew() -> None:
    bench = Bench(FakeRunner(n_pages=6, max_num_seqs=2, max_model_len=384, max_step_tokens=64))
    bench.add("old", 60, max_tokens=200)
    bench.step()
    prompt = bench.add("young", 300, max_tokens=2, prompt_logprobs=0)
    bench.run()
    assert bench.scheduler.n_preemptions > 0
    entries = bench.outputs["young", 0][0].prompt_logprobs
    assert entries is not None and [e and e.token_id for e in entries] == [None, *prompt[1:]]


def test_logprobs_of_drawn_tokens() -> None:
    bench = Bench(FakeRunner())
    bench.add("a", 4, max_tokens=3, logprobs=2)
    bench.run()
    for output in bench.outputs["a", 0]:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert len(output.logprobs[0].top) == 2


@pytest.mark.parametrize(
    ("n_prompt", "params", "words"),
    [
        (0, {}, "empty"),
        (3, {"n": 9}, "n = 9"),
        (512, {"max_tokens": 1}, "max_model_len is 512"),
        (513, {"max_tokens": 0}, "max_model_len is 512"),
        (300, {"max_tokens": 200}, "8 pages"),
    ],
)
def test_what_cannot_run_alone_is_refused(n_prompt: int, params: dict[str, int], words: str) -> None:
    bench = Bench(FakeRunner(n_pages=7, max_model_len=512))
    with pytest.raises(RequestError, match=words):
        bench.add("a", n_prompt, **params)
    assert bench.scheduler.n_open == 0 and bench.scheduler.plan() is None


def test_max_tokens_is_clipped_to_the_context() -> None:
    bench = Bench(FakeRunner(max_model_len=100))
    bench.add("a", 90, max_tokens=1000)
    bench.run()
    assert len(bench.tokens("a")) == 10 and bench.reason("a") == "length"


def test_an_id_in_use_is_refused() -> None:
    bench = Bench(FakeRunner())
    bench.add("a", 5)
    with pytest.raises(RequestError, match="in use"):
        bench.add("a", 5)
    bench.run()
    bench.add("a", 5)
    bench.scheduler.abort("a")


def test_limits_without_progress_are_refused() -> None:
    def schedule(n_slots: int, max_logit_rows: int) -> None:
        info = FakeRunner(n_pages=4, n_slots=n_slots, max_num_seqs=8, max_step_tokens=64, max_model_len=64).info
        Scheduler(Cache(info), info, max_logit_rows)

    with pytest.raises(ValueError, match="slots"):
        schedule(7, 100)
    with pytest.raises(ValueError, match="max_logit_rows"):
        schedule(8, 71)


def test_a_failed_step_frees_its_sequences_and_leaves_the_others() -> None:
    bench = Bench(FakeRunner(max_num_seqs=3))
    bench.add("a", 100, n=3, max_tokens=5)
    prompt = bench.add("b", 10, max_tokens=5)
    step = bench.scheduler.plan()
    assert step is not None
    outputs = bench.scheduler.fail(step, "broken")
    assert {(o.id, o.index, o.finish_reason, o.error) for o in outputs} == {
        ("a", i, "error", "broken") for i in range(3)
    }
    bench.scheduler.check()
    bench.run()
    assert bench.tokens("b") == expected_tokens(prompt, SamplingParams(max_tokens=5, seed=1, ignore_eos=True))


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 30),
            "n_prompt": st.sampled_from([1, 5, 63, 64, 65, 128, 140, 200]),
            "max_tokens": st.integers(0, 130),
            "n": st.integers(1, 4),
            "priority": st.integers(0, 1),
            "prompt_logprobs": st.sampled_from([None, None, 0]),
            "ignore_eos": st.booleans(),
        }
    ),
    min_size=1,
    max_size=8,
)
ABORTS = st.dictionaries(
    st.integers(0, 60), st.tuples(st.integers(0, 7), st.sampled_from([None, 0, 1, 2, 3])), max_size=6
)


@pytest.mark.parametrize("gpu", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    aborts=ABORTS,
    n_pages=st.integers(6, 14),
    max_num_seqs=st.integers(4, 6),
    max_step_tokens=st.sampled_from([1, 64, 100, 256]),
    max_itl_ms=st.sampled_from([None, 1.0]),
    spoils=st.dictionaries(st.integers(0, 60), st.integers(0, 5), max_size=4),
)
def test_everything_ends_and_the_books_balance(
    requests: list[dict[str, int]],
    aborts: dict[int, tuple[int, int | None]],
    n_pages: int,
    max_num_seqs: int,
    max_step_tokens: int,
    max_itl_ms: float | None,
    spoils: dict[int, int],
    gpu: bool,
) -> None:
    """Whatever comes, in pools that are far too small: one last output each, the tokens of a run alone."""
    if gpu:
        max_step_tokens = -(-max_step_tokens // PAGE_SIZE) * PAGE_SIZE
    runner = FakeRunner(
        n_pages=n_pages, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens, max_model_len=384, gpu=gpu,
        n_lookahead=int(gpu),
    )  # fmt: skip
    bench = Bench(runner, max_itl_ms)
    prompts: dict[str, list[int]] = {}
    seeds: dict[tuple[str, int], int] = {}
    params: dict[str, SamplingParams] = {}
    pending = sorted(enumerate(requests), key=lambda item: item[1]["at"])
    for t in range(5000):
        while pending and pending[0][1]["at"] <= t:
            i, spec = pending.pop(0)
            given_params = {k: spec[k] for k in ("max_tokens", "n", "prompt_logprobs", "ignore_eos")}
            id = f"r{i}"
            prompts[id] = bench.add(id, spec["n_prompt"], spec["priority"], **given_params)
            params[id] = SamplingParams(**given_params)
            seeds |= {(id, index): seed for index, seed in bench.seeds(id).items()}
        if t in aborts:
            i, index = aborts[t]
            bench.take(bench.scheduler.abort(f"r{i}", index))
            bench.scheduler.check()
        running = [s for s in bench.scheduler._decodes if s.start_slot is None]
        if t in spoils and running:
            runner.states[running[spoils[t] % len(running)].state_slot or 0] = NAN
        step = bench.step()
        if step is not None:
            bench.scheduler.observe(step, 1e-4 * step.n_tokens)
        elif not pending:
            break
    bench.run(n_most=1)
    assert set(bench.outputs) == set(seeds)
    for (id, index), seed in seeds.items():
        expected = expected_tokens(prompts[id], params[id], seed)
        got = bench.tokens(id, index)
        if bench.reason(id, index) in ("abort", "error"):
            assert got == expected[: len(got)]
            assert bench.reason(id, index) == "abort" or len(spoils) > 1, "it is tried twice"
        else:
            assert got == expected
            logprobs = [o.prompt_logprobs for o in bench.outputs[id, index] if o.prompt_logprobs is not None]
            if params[id].prompt_logprobs is not None and index == 0:
                assert [e and e.token_id for e in logprobs[0]] == [None, *prompts[id][1:]]
            else:
                assert not logprobs


def test_step_target_bounds_prefill_beside_decodes_only() -> None:
    bench = Bench(FakeRunner(max_step_tokens=512), max_itl_ms=20.0)
    bench.add("a", 300, max_tokens=60)
    for _ in range(20):
        step = bench.step()
        assert step is not None
        bench.scheduler.observe(step, 0.010 + 0.00005 * step.n_tokens)
    bench.add("b", 1000, max_tokens=1)
    bench.run()
    assert bench.steps[0] == [("a", 0, 300)]
    chunks = [length for step in bench.steps for id, _, length in step if id == "b" and len(step) > 1]
    assert chunks and max(chunks) <= 192  # 10 ms at 0.05 ms


@pytest.mark.parametrize(
    ("per_step_s", "tenant", "is_cpu", "most"),
    [
        (0.0005, "theirs", True, 64),
        (0.003, "theirs", True, 192),  # shorter steps would compute far fewer tokens a second
        (0.0005, "", True, 384),
        (0.0005, "theirs", False, 384),
    ],
)
def test_beside_another_owner_s_decodes_a_chunk_is_short_where_that_costs_little(
    per_step_s: float, tenant: str, is_cpu: bool, most: int
) -> None:
    """The answer beside it waits for steps of 7 ms, not of 45, and the prompt ends as soon."""
    bench = Bench(FakeRunner(max_step_tokens=512, gpu=not is_cpu), max_itl_ms=45.0)
    cost = bench.scheduler.cost
    assert cost is not None
    cost.curve = [(0, per_step_s), (64, per_step_s + 0.0064), (512, per_step_s + 0.0512)]
    bench.add("a", 10, max_tokens=60)
    bench.step()
    for i in range(2):  # together they have no more
        prompt = [50 + i] * 1152
        bench.scheduler.add(Request(id=f"b{i}", prompt_ids=prompt, params=SamplingParams(max_tokens=1), tenant=tenant))
    bench.run()
    beside = [sum(n for id, _, n in step if id != "a") for step in bench.steps if len(step) > 1 and step[0][0] == "a"]
    assert max(beside) == most


@pytest.mark.parametrize(
    ("tenant", "n", "is_cpu", "least", "most"),
    [
        ("theirs", 1, True, 0.4, 0.6),
        ("theirs", 3, True, 0.8, 1.0),  # who has more sequences open is not who is held up
        ("", 1, True, 0.8, 1.0),
        ("theirs", 1, False, 0.8, 1.0),
    ],
)
def test_beside_another_owner_s_decodes_prompts_have_half_of_the_time(
    tenant: str, n: int, is_cpu: bool, least: float, most: float
) -> None:
    """An answer takes twice as long as alone, and a step, however many prompts there are; the time is the estimate's."""
    bench = Bench(FakeRunner(max_step_tokens=512, max_model_len=9000, n_pages=400, gpu=not is_cpu), max_itl_ms=45.0)
    cost = bench.scheduler.cost
    assert cost is not None
    cost.curve = [(0, 0.001), (64, 0.0074), (512, 0.0522)]
    bench.add("a", 10, max_tokens=60, n=n)
    bench.step()
    for i in range(2):
        prompt = [50 + i] * 8000
        bench.scheduler.add(Request(id=f"b{i}", prompt_ids=prompt, params=SamplingParams(max_tokens=1), tenant=tenant))
    spent = {True: 0.0, False: 0.0}
    while bench.reason("a") is None:
        step = bench.step()
        assert step is not None
        seconds = cost.seconds(StepLoad.of(step.chunks, bench.runner.info.block_size))
        bench.scheduler.observe(step, seconds)
        spent[not step.chunks[-1].is_decode] += seconds
    assert least <= spent[True] / sum(spent.values()) <= most


@pytest.mark.parametrize(
    ("drawn", "params", "taken", "reason"),
    [
        ([7, 8, 9], {}, [7, 8, 9], None),
        ([7, EOS, 9], {"ignore_eos": False}, [7, EOS], "stop"),
        ([7, 8, 9], {"stop_token_ids": (8,)}, [7, 8], "stop"),
        ([7, 8, 9], {"max_tokens": 3}, [7, 8], "length"),
        ([7, 8, 9], {"max_tokens": 4}, [7, 8, 9], "length"),
        ([7, 8, 9], {"min_tokens": 9, "max_tokens": 2}, [7], "length"),
    ],
)
def test_a_draw_may_give_several_tokens(
    drawn: list[int], params: dict[str, object], taken: list[int], reason: str | None
) -> None:
    """They are taken in order, up to the end of the sequence; all but the last are computed."""
    bench = Bench(FakeRunner())
    bench.add("a", 10, **{"max_tokens": 50, "logprobs": 0} | params)
    bench.step()
    (sequence,), step = bench.scheduler.sequences(), bench.scheduler.plan()
    assert step is not None and sequence.n_generated == 1
    entries = [TokenLogprob(token, -1.0, []) for token in drawn]
    (output,) = bench.scheduler.commit(step, StepResult([drawn[:]], [entries], {}))
    assert output.token_ids == taken and output.finish_reason == reason
    assert [entry.token_id for entry in output.logprobs or []] == taken
    assert sequence.tokens[-len(taken) :].tolist() == taken
    assert bench.scheduler.n_generated_tokens == 1 + len(taken)
    bench.scheduler.check()
    if reason is None:
        step = bench.scheduler.plan()
        assert step is not None and (step.chunks[0].start, step.chunks[0].length) == (10 + len(taken), 1)
    else:
        assert bench.scheduler.n_open == 0 and bench.scheduler.cache.n_pages_used == 0


def test_a_page_that_a_draw_passes_is_kept() -> None:
    bench = Bench(FakeRunner(n_lookahead=2))
    bench.add("a", PAGE_SIZE - 2, max_tokens=50)
    bench.step()
    (sequence,), step = bench.scheduler.sequences(), bench.scheduler.plan()
    assert step is not None
    bench.scheduler.commit(step, StepResult([[7, 8, 9]], [None], {}))
    assert sequence.n_computed == PAGE_SIZE + 1 and bench.scheduler.cache.store.count().n_pages == 1
    bench.scheduler.check()


def time_host_side(n: int, n_steps: int = 500) -> float:
    """Seconds of plan and commit for one decode in a step of `n`."""
    runner = FakeRunner(n_pages=32 * n, max_num_seqs=n, max_model_len=2048)
    bench = Bench(runner)
    for i in range(n):
        bench.add(str(i), 64, max_tokens=1900)
    while len(bench.scheduler._decodes) < n:
        bench.step()
    spent = 0.0
    for _ in range(n_steps):
        start = time.perf_counter()
        step = bench.scheduler.plan()
        spent += time.perf_counter() - start
        assert step is not None and len(step.draws) == n
        result = StepResult([[7] for _ in range(n)], [None] * n, {})
        start = time.perf_counter()
        bench.scheduler.commit(step, result)
        spent += time.perf_counter() - start
    return spent / n_steps / n


if __name__ == "__main__":
    for n in (1, 8, 32, 128):
        print(f"N = {n:3}: {time_host_side(n) * 1e6:5.2f} us")
