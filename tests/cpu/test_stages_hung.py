"""Further machines of a model that hang, whose connections stand: processes that are stopped while they do something slow. Those that are
slow and live are waited for."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deltic.config import EngineConfig
from deltic.engine.messages import LoadAdapter
from deltic.engine.step import RunnerLostError
from deltic.runtime import stages as runtime
from tests.cpu.test_reference import needs_transformers
from tests.cpu.test_stages import SETTINGS, answers, built
from tests.cpu.test_stages_adapters import LAYERS, made
from tests.served import Served
from tests.staged import Stage
from tests.tiny import tiny_checkpoint
from tests.waiting import wait_for

SLOW = """
import os, sys, time
from pathlib import Path
import deltic.runtime.adapters, deltic.runtime.build, deltic.runtime.stages
from deltic.__main__ import main

real = deltic.runtime.{call}

def slow(*given):
    if not Path({once!r}).exists():
        Path({once!r}).write_text("")
        print("it is slow now", file=sys.stderr, flush=True)
        time.sleep({seconds})
    return real(*given)

deltic.runtime.{call} = slow
main()
"""
"""A stage of which a call takes so long the first time that a file is not there."""
CALLS = {
    "sizes": "build.content_of",
    "weights": "build._build_text",
    "tiers": "build._open_tiers",
    "adapter": "adapters.Adapters._read",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "GREETING_S", 1.0)


class Slow:
    """A server of several machines, of which the last is slow in a call."""

    def __init__(self, stages: list[Stage], root: Path, what: str, seconds: float, n_between: int = 0) -> None:
        checkpoint = str(tiny_checkpoint("dense", n_layers=LAYERS))
        self.program = SLOW.format(call=CALLS[what], once=str(root / "once"), seconds=seconds)
        stages += [Stage(checkpoint, "--threads", "1") for _ in range(n_between)]
        self.stage = Stage(checkpoint, "--threads", "1", program=("-c", self.program))
        stages.append(self.stage)
        adapters = {"lora": (f"a={made('dense', 0)}",)} if what == "adapter" else {}
        self.config = EngineConfig(
            model=checkpoint,
            stages=tuple(stage.address for stage in stages),
            stages_timeout_s=0.5,
            allow_lora_loading=True,
            **SETTINGS | adapters,
        )

    def stop(self) -> threading.Thread:
        """A thread that stops the machine once it is slow."""

        def run() -> None:
            wait_for(lambda: "it is slow now" in self.stage.log)
            self.stage.kill_worker(signal.SIGSTOP)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def load(self, runner: Any, path: Path) -> Any:
        """Loads an adapter while the engine is idle, as a client does, and gives the answer."""
        runner.adapters.load(LoadAdapter(str(path)))
        return wait_for(lambda: runner.is_busy() or runner.adapters.poll())[0]


@needs_transformers
@pytest.mark.parametrize("what", CALLS)
def test_a_machine_that_is_slow_is_waited_for(what: str, stages: list[Stage], tmp_path: Path) -> None:
    """For longer than one may be silent."""
    slow = Slow(stages, tmp_path, what, 2.5)
    begun = time.monotonic()
    runner = built(slow.config)
    assert time.monotonic() - begun > 2.5 > 2 * runner.neighbours.limit_s
    assert answers(runner) and slow.stage.log.count("is served") == 1


@needs_transformers
@pytest.mark.parametrize("what", [what for what in CALLS if what != "sizes"])
def test_a_start_with_a_machine_that_hangs(what: str, stages: list[Stage], tmp_path: Path) -> None:
    """It ends and says which one, and the next one finds a machine that works."""
    slow = Slow(stages, tmp_path, what, 60.0)
    stopping, begun = slow.stop(), time.monotonic()
    with pytest.raises(
        RunnerLostError, match=rf"{slow.stage.address} is lost \(it shows no sign of life\); if .*hangs"
    ):
        built(slow.config)
    stopping.join()
    assert time.monotonic() - begun < 20
    assert answers(built(slow.config))


def test_a_machine_that_hangs_before_anything_is_loaded(stages: list[Stage], tmp_path: Path) -> None:
    """It is asked again, as one that does not listen yet."""
    slow = Slow(stages, tmp_path, "sizes", 60.0)
    stopping = slow.stop()
    assert answers(built(slow.config)) and slow.stage.log.count("is served") >= 2
    stopping.join()


def test_a_machine_that_hangs_behind_another(stages: list[Stage], tmp_path: Path) -> None:
    slow = Slow(stages, tmp_path, "weights", 60.0, n_between=1)
    stopping = slow.stop()
    with pytest.raises(RunnerLostError, match=rf"stage {stages[0].address}: .* {stages[1].address} is lost"):
        built(slow.config)
    stopping.join()


@needs_transformers
def test_an_adapter_that_a_machine_does_not_load(stages: list[Stage], tmp_path: Path) -> None:
    """One that is slow is loaded; where the machine hangs, the engine ends, and the request with it."""
    slow = Slow(stages, tmp_path, "adapter", 2.5)
    (tmp_path / "once").write_text("")
    runner = built(slow.config)
    (tmp_path / "once").unlink()
    assert slow.load(runner, made("dense", 1)).error is None
    (tmp_path / "once").unlink()
    slow.stage.lines.clear()
    stopping = slow.stop()
    with pytest.raises(RunnerLostError, match=f"{slow.stage.address} is lost"):
        slow.load(runner, made("dense", 2))
    stopping.join()


@needs_transformers
def test_an_adapter_over_http(stages: list[Stage], tmp_path: Path) -> None:
    """Whoever asks for it is told to ask again, and then has it."""
    slow = Slow(stages, tmp_path, "adapter", 60.0)
    served = Served(
        slow.config.model, "--stages", slow.stage.address, "--stages-timeout-s", "1", "--allow-lora-loading"
    )
    try:
        stopping, asked = slow.stop(), {"lora_name": "a", "lora_path": str(made("dense", 1))}
        reply = served.http.post("/v1/load_lora_adapter", json=asked)
        assert reply.status_code == 503 and "the engine process ended" in reply.text
        assert f"{slow.stage.address} is lost (it shows no sign of life)" in served.process.log_tail()
        stopping.join()
        wait_for(lambda: served.http.get("/health").status_code == 200)
        assert served.http.post("/v1/load_lora_adapter", json=asked).status_code == 200
    finally:
        assert served.close() == 0


def test_a_machine_that_hangs_while_nobody_asks(stages: list[Stage], tmp_path: Path) -> None:
    runner = built(Slow(stages, tmp_path, "weights", 0.0).config)
    time.sleep(3 * runner.neighbours.limit_s)
    assert not runner.is_busy(), "what came meanwhile was not read"
    stages[0].kill_worker(signal.SIGSTOP)
    with pytest.raises(RunnerLostError, match=f"{stages[0].address} is lost"):
        wait_for(runner.is_busy)
