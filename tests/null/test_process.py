"""The engine process by itself, and how its models take turns."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cost import StepCost
from deltic.engine.engine import Engine
from deltic.engine.events import Event, Loading, Ready, StartFailed, StepOutputs
from deltic.engine.messages import Abort, Command, Output, Request, SamplingParams, Shutdown
from deltic.engine.step import Step, StepResult
from deltic.host.launch import EventSockets
from deltic.host.process import EngineProcess, Launch, ModelLaunch, ServedModel, is_out_of_memory
from tests.fakes import POISON, FakeRunner, expected_tokens
from tests.null.test_loop import request

ROOT = Path(__file__).resolve().parents[2]

DEADLINE_S = 60
"""Long: on a busy machine a process may take seconds to start, and to end."""


class Process:
    """An engine process at the end of two sockets."""

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        parent_pid: int | None = None,
        topic: str | None = None,
        kv_events: EventSockets | None = None,
    ) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.PULL)
        self.commands = self.context.socket(zmq.PUSH)
        self.events.bind(f"ipc://{directory}/events")
        self.commands.connect(f"ipc://{directory}/commands")
        launch = Launch(
            models=[ModelLaunch("m", config, f"ipc://{directory}/commands", f"ipc://{directory}/events", topic)],
            parent_pid=parent_pid or os.getpid(),
            started_at=time.time(),
            kv_events=kv_events,
        )
        argument = msgspec.json.encode(launch).decode()
        self.child = subprocess.Popen([sys.executable, str(ROOT / "tests" / "fakes.py"), argument])

    def send(self, command: Command) -> None:
        self.commands.send(msgspec.msgpack.encode(command))

    def receive(self) -> Event:
        assert self.events.poll(DEADLINE_S * 1000), "the engine process says nothing"
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


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError("Unable to allocate 256. PiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # the driver's and Triton's have no type of their own
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ConfigError("--lora out of memory=/a: there is no such file"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_errors(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_memory_that_torch_did_not_get() -> None:
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.OutOfMemoryError("whatever it says"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


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
    assert [t for o in outputs if o.id == "good" for t in o.token_ids] == expected_tokens(good.prompt_ids, good.params)
    assert [(o.index, o.finish_reason) for o in outputs if o.id == "bad"] == [(i, "error") for i in range(3)]
    assert [o.error for o in outputs if o.id == "odd"] == ["Expected `int`, got `str` - at `$.params.top_k`"]
    assert [o.finish_reason for o in outputs if o.id == "gone"][-1] == "abort"

    process.send(request("again", max_tokens=2))  # it went idle, and its check passed
    assert len(process.receive_last(1)) == 2
    process.send(Shutdown())
    assert process.child.wait(DEADLINE_S) == 0


def test_the_process_tells_of_a_prompt_before_its_first_step(process: Process) -> None:
    while not isinstance(process.receive(), Ready):
        pass
    process.receive()
    process.send(msgspec.structs.replace(request("a", 200, max_tokens=2), wants_progress=True))
    events = []
    while not events or not events[-1].outputs[-1].finish_reason:
        events.append(process.receive())
        assert isinstance(events[-1], StepOutputs)
    assert [[output.n_read for output in event.outputs] for event in events] == [[0], [200, None], [None]]
    assert events[0].stats.n_steps == 0 and events[0].stats.n_running == 1


def test_the_process_gives_up_after_three_failures_in_a_row(process: Process) -> None:
    while isinstance(process.receive(), Loading):
        pass
    for i in range(3):
        process.send(Request(id=str(i), prompt_ids=[POISON], params=SamplingParams()))
        (output,) = process.receive_last(1)
        assert output.finish_reason == "error"
    assert process.child.wait(DEADLINE_S) == 1


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    process = Process(tmp_path, EngineConfig(model="missing"))
    events = [process.receive()]
    while isinstance(events[-1], Loading):
        events.append(process.receive())
    assert events[-1] == StartFailed("no checkpoint at 'missing'; give a directory")
    assert process.child.wait(DEADLINE_S) == 1
    process.close()


def test_the_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    process = Process(tmp_path, EngineConfig(), parent_pid=1)
    assert process.child.wait(DEADLINE_S) == 1
    process.close()
    # A parent that is killed: the child of a child, which says its own process id.
    grandchild = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.null.test_process import Process
from deltic.config import ConfigError, EngineConfig
from deltic.engine.events import Loading
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
    end = time.monotonic() + DEADLINE_S
    while _runs(engine_pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether the process is there and not a zombie, which it stays where nobody collects orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Recording(FakeRunner):
    """Notes in `order` that it ran a step."""

    def __init__(self, name: str, order: list[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.name, self.order = name, order

    def step(self, step: Step) -> StepResult:
        self.order.append(self.name)
        return super().step(step)


def test_models_take_turns_of_one_step(tmp_path: Path) -> None:
    order: list[str] = []
    endpoints = [(f"ipc://{tmp_path}/{name}-commands", f"ipc://{tmp_path}/{name}-events") for name in "ab"]
    with zmq.Context() as context:
        commands = [context.socket(zmq.PUSH) for _ in endpoints]
        events = [context.socket(zmq.PULL) for _ in endpoints]
        for (command_end, event_end), pushes, pulls in zip(endpoints, commands, events, strict=True):
            pushes.connect(command_end)
            pulls.bind(event_end)
        launch = Launch(
            models=[ModelLaunch(name, EngineConfig(dummy=name), *ends) for name, ends in zip("ab", endpoints, strict=True)],
            parent_pid=os.getppid(),
            started_at=time.time(),
        )  # fmt: skip
        process = EngineProcess(launch)
        try:
            assert process.load(lambda config, progress: Recording(config.dummy or "", order))
            for pushes, n_tokens in zip(commands, (30, 10), strict=True):
                pushes.send(msgspec.msgpack.encode(request("same", max_tokens=n_tokens)))
            while not all(model.commands.poll(1000) for model in process.models):
                pass
            serving = threading.Thread(target=process.serve)
            serving.start()
            for pulls, n_tokens in zip(events, (30, 10), strict=True):
                tokens: list[int] = []
                while len(tokens) < n_tokens:
                    event = msgspec.msgpack.decode(pulls.recv(), type=Event)
                    if isinstance(event, StepOutputs):
                        tokens += [t for output in event.outputs for t in output.token_ids]
                r = request("same", max_tokens=n_tokens)
                assert tokens == expected_tokens(r.prompt_ids, r.params)
            commands[0].send(msgspec.msgpack.encode(Shutdown()))  # to either
            serving.join(10)
            assert not serving.is_alive()
        finally:
            process.close()
            gc.unfreeze()
        for socket in commands + events:
            socket.close(linger=0)
    assert order == ["a", "b"] * 10 + ["a"] * 20


def test_only_the_model_whose_turn_it_is_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ServedModel, "progress", lambda model, stage, done: said.append(model.name))
    without_torch = SimpleNamespace(build_runner=None, check_alone=lambda configs: None)
    monkeypatch.setitem(sys.modules, "deltic.runtime.build", without_torch)
    launch = Launch(
        models=[
            ModelLaunch(name, EngineConfig(device="cpu"), f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}-events")
            for name in "ab"
        ],
        parent_pid=os.getppid(),
        started_at=time.time(),
    )  # fmt: skip
    process = EngineProcess(launch)
    process._import_build({})
    process.close()
    assert said == ["a"]


def known(engine: Engine) -> Engine:
    """A row takes a millisecond, in its cost model."""
    assert engine.scheduler.cost is not None
    engine.scheduler.cost.curve = [(0, 0.0), (64, 0.064)]
    return engine


def test_steps_in_turns_share_the_shortest_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "observe", lambda *_: None)  # a fake's steps take no time
    engine, other, third = (
        known(Engine(FakeRunner(max_step_tokens=4096, prefix_cache=False), max_itl_ms=ms)) for ms in (1000, 400, 2000)
    )
    without_target = Engine(FakeRunner())

    def n_prefilled(others: list[Engine]) -> int:
        """In a step without decodes."""
        engine.share(others)
        engine.add(request("a", 2000, max_tokens=2))
        engine.step()
        (n_computed,) = (sequence.n_computed for sequence in engine.scheduler.sequences())
        engine.abort("a")
        return n_computed

    assert n_prefilled([]) == 2000, "nobody waits"
    assert n_prefilled([other]) == 192, "200 ms, in blocks of 64"
    assert n_prefilled([other, third]) == 128
    assert n_prefilled([without_target]) == 448
    assert n_prefilled([]) == 2000


@pytest.mark.parametrize(
    ("config", "may"),
    [
        (EngineConfig(dummy="qwen3.5-0.8b"), True),
        (EngineConfig(dummy="qwen3.5-0.8b", quantize="int8"), False),
        (EngineConfig(dummy="qwen3-tts-0.6b"), True),
        (EngineConfig(dummy="qwen3-tts-0.6b", quantize="int8", device="cuda"), True),
        (EngineConfig(dummy="qwen3.5-0.8b", device="cpu"), False),
    ],
)
def test_the_driver_is_woken_only_for_models_that_may_want_it(config: EngineConfig, may: bool) -> None:
    assert config.may_use_gpu == may
