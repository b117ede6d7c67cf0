"""Adapters of a model on several machines: each has the terms of its layers, and answers are one machine's, to the bit."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltic.config import ConfigError, EngineConfig
from deltic.engine.messages import LoadAdapter
from deltic.engine.mirror import AskedAdapter
from deltic.models.fields import CheckpointError
from deltic.models.qwen.adapters import Adapter, read_adapter
from deltic.models.qwen.shape import ModelShape, stage_of
from deltic.runtime import adapters as room
from tests.adapters import EVERY, EXPERTS, make_adapter
from tests.cpu.test_reference import needs_transformers, published_model
from tests.cpu.test_stages import SETTINGS, answers, built, said
from tests.staged import Stage
from tests.tiny import new_directory, tiny_checkpoint

pytestmark = [needs_transformers, pytest.mark.skipif(not pytest.importorskip("peft"), reason="peft is not installed")]

LAYERS = 12


@functools.cache
def made(kind: str, seed: int, rank: int = 8) -> Path:
    """A directory with an adapter of every module."""
    path = new_directory("adapter") / "a"
    model = published_model(tiny_checkpoint(kind, n_layers=LAYERS))
    make_adapter(model, path, EVERY, EXPERTS if kind != "dense" else [], seed=seed, r=rank)
    return path


def test_stages_share_the_terms_out() -> None:
    shape = ModelShape.from_directory(tiny_checkpoint("dense", n_layers=LAYERS))
    path = made("dense", 0)
    whole = read_adapter(path, shape)
    found: dict[str, Any] = {}
    for begin in range(0, LAYERS, 4):
        part = read_adapter(path, stage_of(shape, begin, begin + 4))
        assert (part.key, part.rank, part.covers) == (whole.key, whole.rank, whole.covers)
        for name, deltas in part.deltas.items():
            field, _, rest = name.partition(".")
            number, _, matrix = rest.partition(".")
            name = f"layers.{int(number) + begin}.{matrix}" if field == "layers" else name
            assert name not in found
            found[name] = [(delta.first, delta.down.tobytes(), delta.up.tobytes()) for delta in deltas]
    assert found == {
        name: [(delta.first, delta.down.tobytes(), delta.up.tobytes()) for delta in deltas]
        for name, deltas in whole.deltas.items()
    }


def load(runner: Any, path: Path) -> Any:
    """Loads an adapter as a client does, and gives the answer."""
    runner.adapters.load(LoadAdapter(str(path)))
    until = time.monotonic() + 30
    while not (found := runner.adapters.poll()):
        runner.is_busy()
        assert time.monotonic() < until
        time.sleep(0.001)
    return found[0]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_answers_with_adapters(kind: str, stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the start, one that is loaded while the server runs, and one in its slot behind that."""
    checkpoint = str(tiny_checkpoint(kind, n_layers=LAYERS))
    config = EngineConfig(
        model=checkpoint, lora=(f"a={made(kind, 0)}",), allow_lora_loading=True, max_loras=2, **SETTINGS
    )
    stages += [Stage(checkpoint, "--threads", "1") for _ in range(2)]
    found, expected = [], []
    for results, addresses in ((expected, ()), (found, tuple(stage.address for stage in stages))):
        runner = built(dataclasses.replace(config, stages=addresses))
        a, keys = runner.info.adapters["a"], []
        for seed, rank in ((1, 40), (2, 3)):
            one = load(runner, made(kind, seed, rank))
            assert one.error is None and one.rank == rank
            keys.append(one.key)
            results.append([said(outputs) for outputs in answers(runner, adapters=(b"", a, one.key))])
            assert "max-loras" in load(runner, made(kind, 3)).error
            runner.adapters.drop(one.key)
    assert found == expected and found[0] != found[1]
    with monkeypatch.context() as patch:  # this machine has other files than the stages
        patch.setattr(room, "read_adapter", lambda path, shape: read_adapter(made(kind, 3), shape))
        error = load(runner, made(kind, 1, 40)).error
        assert error.removeprefix("stage ")[:15] in {stage.address[:15] for stage in stages}
        assert f": {made(kind, 1, 40)}: is another adapter here; give all machines the same files" in error
        assert "no such adapter" in load(runner, Path("/nowhere")).error
    one = load(runner, made(kind, 1, 40))  # its slot is free again, everywhere
    assert one.error is None
    assert [said(outputs) for outputs in answers(runner, adapters=(b"", a, one.key))] == expected[0]


def test_an_adapter_that_is_loaded_again_while_a_request_has_it(stages: list[Stage]) -> None:
    """It has another slot then, on all machines."""
    checkpoint = str(tiny_checkpoint("dense", n_layers=LAYERS))
    stages.append(Stage(checkpoint, "--threads", "1"))
    config = EngineConfig(model=checkpoint, allow_lora_loading=True, max_loras=2, **SETTINGS)
    results = []
    for addresses in ((), (stages[0].address,)):
        runner = built(dataclasses.replace(config, stages=addresses))
        first = runner.adapters.find(load(runner, made("dense", 0)).key)
        first.n_sequences += 1
        runner.adapters.drop(first.key)
        again = load(runner, made("dense", 0))
        assert runner.adapters.find(again.key) is not first
        results.append([said(outputs) for outputs in answers(runner, adapters=(b"", again.key, again.key))])
    assert results[0] == results[1]


class Memory:
    """Memory of adapters that remembers what was written."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def bytes_of(self, adapter: Any) -> int:
        return int(adapter.n_bytes)

    def write(self, slot: int, begin: int, adapter: Any) -> None:
        self.written.append((begin, begin + adapter.n_bytes))

    def open(self, slot: int) -> None: ...
    def clear(self, slot: int) -> None: ...


def test_an_adapter_without_terms_here_gives_nobody_s_place_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one for further layers alone."""
    sizes = {"a": 100, "b": 0, "c": 50}
    monkeypatch.setattr(
        room,
        "read_adapter",
        lambda path, shape: SimpleNamespace(key=str(path).encode(), rank=1, n_bytes=sizes[str(path)]),
    )
    memory = Memory()
    adapters = room.Adapters(None, SimpleNamespace(n=4, rank=8, n_bytes=1000), memory)  # type: ignore[arg-type]
    for i, name in enumerate(sizes):
        adapters.load(AskedAdapter(name, name.encode(), i, i + 1))
        until = time.monotonic() + 30
        while not adapters.poll() and time.monotonic() < until:
            time.sleep(0.001)
    assert [where for where in memory.written if where[0] != where[1]] == [(0, 100), (100, 150)]


def test_a_start_with_other_files(stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(tiny_checkpoint("dense", n_layers=LAYERS))
    stages.append(Stage(checkpoint, "--threads", "1"))
    config = EngineConfig(model=checkpoint, lora=(f"a={made('dense', 0)}",), stages=(stages[0].address,), **SETTINGS)

    def other(path: Path, shape: ModelShape) -> Adapter:
        return read_adapter(made("dense", 1), shape)

    with monkeypatch.context() as patch:
        patch.setattr(room, "read_adapter", other)
        with pytest.raises((ConfigError, CheckpointError), match="is another adapter here; give all machines the same"):
            built(config)
    assert built(config).info.adapters["a"]
