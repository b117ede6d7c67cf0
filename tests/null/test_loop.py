"""The engine in this process."""

from __future__ import annotations

from typing import Any

import pytest

from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams
from deltic.engine.step import RunnerLostError, Step, StepResult
from tests import fakes
from tests.fakes import POISON, FakeRunner, expected_tokens


def request(id: str = "a", n_prompt: int = 10, **params: Any) -> Request:
    return Request(
        id=id,
        prompt_ids=[20 + i % 900 for i in range(n_prompt)],
        params=SamplingParams(**{"seed": 1, "ignore_eos": True} | params),
    )


def drain(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    engine.check()
    return outputs


def test_requests_run_in_process() -> None:
    engine = Engine(FakeRunner())
    requests = [request(str(i), 50 * i + 1, max_tokens=20 + i) for i in range(12)]
    for r in requests:
        engine.add(r)
    assert engine.stats().n_waiting == 12
    outputs = drain(engine)
    for r in requests:
        mine = [o for o in outputs if o.id == r.id]
        assert [t for o in mine for t in o.token_ids] == expected_tokens(r.prompt_ids, r.params)
        assert [o.finish_reason for o in mine[:-1]] == [None] * (len(mine) - 1)
    stats = engine.stats()
    assert stats.n_running == stats.n_waiting == stats.n_pages_used == stats.n_slots_used == 0
    assert stats.n_generated_tokens == sum(20 + i for i in range(12)) and stats.n_steps > 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": float("inf")}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
        ({"stop_token_ids": (1,) * 1024}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"top_k": 2**31}, "top_k"),
        ({"stop_token_ids": (fakes.VOCAB_SIZE,)}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"n": 0}, "n = 0"),
    ],
)
def test_a_request_out_of_range_is_refused(params: dict[str, Any], words: str) -> None:
    engine = Engine(FakeRunner())
    with pytest.raises(RequestError, match=words):
        engine.add(request(**params))
    assert not engine.has_work()


def test_a_prompt_outside_the_vocabulary_is_refused() -> None:
    for token in (-1, fakes.VOCAB_SIZE, 2**40):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            Engine(FakeRunner()).add(Request(id="a", prompt_ids=[1, token], params=SamplingParams()))


def test_a_step_that_fails_ends_its_sequences_and_no_others() -> None:
    engine = Engine(FakeRunner(max_num_seqs=2))
    engine.add(Request(id="bad", prompt_ids=[POISON], params=SamplingParams()))
    engine.add(request("beside", max_tokens=3))
    engine.add(request("later", max_tokens=3))
    outputs = engine.step()
    assert {(o.id, o.finish_reason) for o in outputs} == {("bad", "error"), ("beside", "error")}
    assert "(RuntimeError; its log" in (outputs[0].error or "") and engine.n_failures == 1
    outputs = drain(engine)
    assert [o.finish_reason for o in outputs if o.id == "later"] == [None, None, "length"]
    assert engine.n_failures == 0


def test_a_runner_that_is_lost_ends_the_engine() -> None:
    class Lost(FakeRunner):
        def step(self, step: Step) -> StepResult:
            raise RunnerLostError("GPU 1 of 2 failed")

    engine = Engine(Lost())
    engine.add(request())
    with pytest.raises(RunnerLostError, match="GPU 1"):
        engine.step()


def test_the_fake_finds_a_broken_promise(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(FakeRunner):
        def step(self, step: Step) -> StepResult:
            step.slot_copies.clear()
            return super().step(step)

    engine = Engine(Forgetful())
    engine.add(request(n=2))
    assert "AssertionError" in (engine.step()[0].error or "") and "slot of a/1 is off" in caplog.text
