"""Tiers of a model on several machines: each parks its part of a page and a state, and whoever loses one makes a miss, never other bits."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from tests.cpu.test_stages import SETTINGS, answers, built, said
from tests.staged import Stage
from tests.tiny import tiny_checkpoint

PROMPTS = [list(range(n, n + 200)) for n in (0, 7, 21)]
FULL = """
import errno, os
from pathlib import Path
from deltic.__main__ import main

write = os.pwrite

def pwrite(file, data, offset):
    sizes = [path.stat().st_size for path in Path({directory!r}).rglob("*") if path.suffix in (".page", ".state")]
    if sum(sizes) + len(data) > {n_bytes}:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(file, data, offset)

os.pwrite = pwrite
main()
"""
"""A stage whose disk has so much room for the cache."""


@pytest.mark.parametrize("kind", ["dense", "next"])
def test_what_is_evicted_comes_back(kind: str, stages: list[Stage]) -> None:
    """Host memory of each machine: preempted sequences and prefixes. States take more pages' room on some machines than on others."""
    checkpoint = str(tiny_checkpoint(kind, n_layers=12))
    config = EngineConfig(model=checkpoint, **{**SETTINGS, "cache_host_gb": 0.02})
    alone = built(config)
    expected = [said(outputs) for outputs in answers(alone, rounds=3)]
    assert expected[1:] == [said(outputs) for outputs in answers(built(dataclasses.replace(config, cache_host_gb=0.0)))]
    stages += [Stage(checkpoint, "--threads", "1") for _ in range(2)]
    staged = built(dataclasses.replace(config, stages=tuple(stage.address for stage in stages)))
    assert [said(outputs) for outputs in answers(staged, rounds=3)] == expected
    for runner in (alone, staged):
        assert runner.tiers.read_bytes["host"] and runner.tiers.written_bytes["host"]


def test_machines_may_need_more_room_for_a_state() -> None:
    """Units that one machine has no use for are left alone."""
    import numpy as np

    from deltic.engine.cache.tiers import Move, Tiers
    from deltic.engine.cache.tree import Kind

    pages, states = np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(12, dtype=np.uint8).reshape(2, 6)
    tiers = Tiers(lambda i: [pages[i]], lambda i: [states[i]], np.zeros((6, 4), np.uint8), 6, None, 0, "")
    tiers.copy_out(Move(Kind.STATE, device=1, units=(4, 0, 3, 1)))
    kept, states[1] = states[1].copy(), 0
    tiers.copy_in(Move(Kind.STATE, device=1, units=(4, 0, 3, 1)))
    assert states[1].tolist() == kept.tolist()


class Kept:
    """A server on two machines, with a directory on each."""

    def __init__(self, stages: list[Stage], root: Path, checkpoint: str, room: int | None = None) -> None:
        """room: bytes of the further machine's disk."""
        self.here, self.there = root / "here", root / "there"
        program = ("-m", "deltic") if room is None else ("-c", FULL.format(directory=str(self.there), n_bytes=room))
        self.stage = Stage(checkpoint, "--threads", "1", "--cache-dir", str(self.there), program=program)
        stages.append(self.stage)
        self.config = EngineConfig(
            model=checkpoint, cache_dir=self.here, stages=(self.stage.address,), **{**SETTINGS, "n_pages": 20}
        )

    def ask(self, prompts: list[list[int]] = PROMPTS) -> tuple[list[Any], Engine]:
        """Answers of a new engine, whose disks have then what they should."""
        engine = Engine(built(self.config))
        found: dict[str, list[Any]] = {}
        for n, ids in enumerate(prompts):
            params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
            engine.add(Request(id=str(n), prompt_ids=ids, params=params))
            while engine.has_work():
                for output in engine.step():
                    found.setdefault(output.id, []).append((output.token_ids, output.logprobs))
            self.wait(engine)
        engine.check()
        engine.close(20)
        assert engine.runner.neighbours.behind is not None  # type: ignore[attr-defined]
        engine.runner.neighbours.behind.close()  # type: ignore[attr-defined]
        return list(found.values()), engine

    def wait(self, engine: Engine) -> None:
        """Has done what is to be saved, as far as it can be."""
        until_s = time.monotonic() + 10
        while not engine.cache.store.is_idle and time.monotonic() < until_s:
            engine.cache.store.wait(0.1)
            engine.cache.store.poll()

    def files(self) -> tuple[set[str], set[str]]:
        here, there = (
            {path.name for path in root.rglob("*") if path.suffix in (".page", ".state")}
            for root in (self.here, self.there)
        )
        return here, there


def test_a_disk_that_is_lost_makes_a_miss(stages: list[Stage], tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint("dense", n_layers=12))
    kept = Kept(stages, tmp_path, checkpoint)
    expected, engine = kept.ask()
    here, there = kept.files()
    assert here == there and len(here) >= 9
    found, engine = kept.ask()
    n_read = engine.stats().cache.read_bytes["disk"]
    assert found == expected and n_read
    # A file that was damaged, on the further machine alone.
    file = next(path for path in kept.there.rglob("*.state"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found, engine = kept.ask()
    assert found == expected and engine.stats().cache.read_bytes["disk"] < n_read
    # All files of it.
    for path in kept.there.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found, engine = kept.ask()
    assert found == expected and not engine.stats().cache.read_bytes["disk"]
    here, there = kept.files()
    assert here == there and len(here) >= 9, "they are written again"
    found, engine = kept.ask()
    assert found == expected and engine.stats().cache.read_bytes["disk"] == n_read
    # All files of the first machine: those of the other are of use to nobody.
    for path in kept.here.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found, engine = kept.ask(PROMPTS[:1])
    here, there = kept.files()
    assert found == expected[:1] and here == there and len(here) >= 3


def test_a_disk_that_is_full_on_one_machine_alone(stages: list[Stage], tmp_path: Path) -> None:
    """What is worth least makes room on all, at once: the disk of the further machine is as if all had it."""
    checkpoint = str(tiny_checkpoint("dense", n_layers=12))
    kept = Kept(stages, tmp_path / "whole", checkpoint)
    prompts = [list(range(n, n + 200)) for n in range(0, 35, 7)]
    kept.ask(prompts[:2])
    room = sum(path.stat().st_size for path in kept.there.rglob("*") if path.suffix in (".page", ".state"))
    kept = Kept(stages, tmp_path / "full", checkpoint, room)
    expected, engine = kept.ask(prompts)
    here, there = kept.files()
    assert here == there and here
    assert stages[-1].log.count("No space left on device") == 1 and "tried again with less" in stages[-1].log
    (found,), engine = kept.ask(prompts[-1:])
    assert found == expected[-1] and engine.stats().cache.read_bytes["disk"], "the last one was saved"


def test_machines_may_have_one_directory(stages: list[Stage], tmp_path: Path) -> None:
    """Shares of one size: none is read for another's."""
    kept = Kept(stages, tmp_path, str(tiny_checkpoint("dense", n_layers=8)))
    kept.config = dataclasses.replace(kept.config, cache_dir=kept.there)
    expected, _ = kept.ask()
    found, engine = kept.ask()
    assert found == expected and engine.stats().cache.read_bytes["disk"]


def test_what_is_forgotten_is_forgotten_everywhere(stages: list[Stage], tmp_path: Path) -> None:
    kept = Kept(stages, tmp_path, str(tiny_checkpoint("dense", n_layers=12)))
    kept.ask()
    engine = Engine(built(kept.config))
    engine.reset_cache()
    engine.close(10)
    engine.runner.is_busy()
    engine.runner.neighbours.behind.close()  # type: ignore[attr-defined]
    kept.ask([])
    assert kept.files() == (set(), set())


def test_a_directory_is_for_all_machines_or_none(stages: list[Stage], tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint("dense", n_layers=12))
    kept = Kept(stages, tmp_path, checkpoint)
    with pytest.raises(ConfigError, match=r"--cache-dir: layers 0 to \d+ of 12 run here without one; give one to all"):
        built(dataclasses.replace(kept.config, cache_dir=None))
    stages.append(Stage(checkpoint, "--threads", "1"))
    with pytest.raises(ConfigError, match=rf"run on {stages[-1].address} without one; give one to all machines"):
        built(dataclasses.replace(kept.config, stages=(stages[-1].address,)))
