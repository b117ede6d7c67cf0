"""The engine in this process, and the engine process by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from deltic.config import EngineConfig
from deltic.engine.loop import Engine, Launch
from deltic.engine.request import (
    Abort,
    Command,
    Event,
    Loading,
    Output,
    Ready,
    Request,
    SamplingParams,
    Shutdown,
    StartFailed,
    Step,
    StepOutputs,
    StepResult,
)
from deltic.engine.scheduler import RequestError
from tests import fakes
from tests.fakes import POISON, FakeRunner, expected_tokens

ROOT = Path(__file__).resolve().parents[2]


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
    assert "poisoned" in (outputs[0].error or "") and engine.n_failures == 1
    outputs = drain(engine)
    assert [o.finish_reason for o in outputs if o.id == "later"] == [None, None, "length"]
    assert engine.n_failures == 0


class Process:
    """An engine process at the end of two sockets."""

    def __init__(self, directory: Path, config: EngineConfig, parent_pid: int | None = None) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.PULL)
        self.commands = self.context.socket(zmq.PUSH)
        self.events.bind(f"ipc://{directory}/events")
        self.commands.connect(f"ipc://{directory}/commands")
        launch = Launch(
            config=config,
            commands=f"ipc://{directory}/commands",
            events=f"ipc://{directory}/events",
            parent_pid=parent_pid or os.getpid(),
            started_at=time.time(),
        )
        argument = msgspec.json.encode(launch).decode()
        self.child = subprocess.Popen([sys.executable, str(ROOT / "tests" / "fakes.py"), argument])

    def send(self, command: Command) -> None:
        self.commands.send(msgspec.msgpack.encode(command))

    def receive(self) -> Event:
        assert self.events.poll(10_000), "the engine process says nothing"
        return msgspec.msgpack.decode(self.events.recv(), type=Event)

    def receive_last(self, n: int) -> list[Output]:
        """Every output until `n` sequences had their last."""
        outputs: list[Output] = []
        while sum(o.finish_reason is not None for o in outputs) < n:
            event = self.receive()
            assert isinstance(event, StepOutputs)
            outputs += event.outputs
        return outputs

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.context.destroy(linger=0)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path, EngineConfig(n_pages=64, max_num_seqs=2))
    yield process
    process.close()


def test_the_process_serves_and_stops(process: Process) -> None:
    events = [process.receive()]
    while isinstance(events[-1], Loading):
        events.append(process.receive())
    assert [e.done for e in events[:-1]] == [0.0, 1.0]
    ready = events[-1]
    assert isinstance(ready, Ready) and ready.info.n_pages == 64 and ready.info.start_s["python"] > 0

    good = request("good", 200, max_tokens=30)
    process.send(good)
    process.send(request("bad", n=3))  # more than run at once: fails alone, three times
    process.send(request("odd", top_k="many"))
    process.send(request("gone", max_tokens=3000))
    process.send(Abort("gone"))
    process.send(Abort("unknown"))
    outputs = process.receive_last(6)
    assert [t for o in outputs if o.id == "good" for t in o.token_ids] == expected_tokens(
        good.prompt_ids, good.params
    )
    assert [(o.index, o.finish_reason) for o in outputs if o.id == "bad"] == [(i, "error") for i in range(3)]
    assert [o.error for o in outputs if o.id == "odd"] == ["Expected `int`, got `str` - at `$.params.top_k`"]
    assert [o.finish_reason for o in outputs if o.id == "gone"][-1] == "abort"

    process.send(request("again", max_tokens=2))  # it went idle, and its check passed
    assert len(process.receive_last(1)) == 2
    process.send(Shutdown())
    assert process.child.wait(10) == 0


def test_the_process_gives_up_after_three_failures_in_a_row(process: Process) -> None:
    while isinstance(process.receive(), Loading):
        pass
    for i in range(3):
        process.send(Request(id=str(i), prompt_ids=[POISON], params=SamplingParams()))
        (output,) = process.receive_last(1)
        assert output.finish_reason == "error"
    assert process.child.wait(10) == 1


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    process = Process(tmp_path, EngineConfig(model="missing"))
    events = [process.receive()]
    while isinstance(events[-1], Loading):
        events.append(process.receive())
    assert events[-1] == StartFailed("no checkpoint at 'missing'; give a directory")
    assert process.child.wait(10) == 1
    process.close()


def test_the_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    process = Process(tmp_path, EngineConfig(), parent_pid=1)
    assert process.child.wait(10) == 1
    process.close()
    # A parent that is killed: the child of a child, which says its own process id.
    grandchild = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.null.test_loop import Process
from deltic.config import EngineConfig
from deltic.engine.request import Loading
from pathlib import Path
process = Process(Path({str(tmp_path)!r}), EngineConfig())
while isinstance(process.receive(), Loading): pass
print(process.child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", grandchild], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(300):
        if not _runs(engine_pid):
            break
        time.sleep(0.01)
    assert not _runs(engine_pid)


def _runs(pid: int) -> bool:
    """Whether the process is there and not a zombie, which it stays where nobody collects orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_fake_finds_a_broken_promise() -> None:
    class Forgetful(FakeRunner):
        def step(self, step: Step) -> StepResult:
            step.slot_copies.clear()
            return super().step(step)

    engine = Engine(Forgetful())
    engine.add(request(n=2))
    assert "slot of a/1 is off" in (engine.step()[0].error or "")
