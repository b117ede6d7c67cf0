"""What makes runners of several GPUs one: threads, errors, and copies of pages and states."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from deltic.engine.step import RunnerLostError
from deltic.runtime.gpu import parallel
from deltic.runtime.gpu.copies import DeviceCopies
from deltic.runtime.gpu.parallel import GpuThread, JointCopies, together

THREADS = [GpuThread(torch.device("cpu")) for _ in range(2)]


def refuse() -> int:
    raise ValueError("no such place")


def test_each_call_has_its_thread() -> None:
    names = together(THREADS, [lambda: threading.current_thread().ident] * 2)
    assert len({*names, threading.current_thread().ident}) == 3
    assert together(THREADS, [lambda: 1, lambda: 2]) == [1, 2]


def test_what_all_refuse_loses_nothing() -> None:
    with pytest.raises(ValueError, match="no such place"):
        together(THREADS, [refuse, refuse])
    assert together(THREADS, [lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("other", ["ends", "hangs"])
def test_where_one_fails_alone_the_runner_is_lost(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "GRACE_S", 0.1)
    release = threading.Event()
    threads = [*THREADS[:1], GpuThread(torch.device("cpu"))]
    beside = (lambda: 1) if other == "ends" else lambda: int(release.wait(30))
    try:
        with pytest.raises(RunnerLostError, match="GPU 1 of 2 failed: ValueError: no such place"):
            together(threads, [beside, refuse])
    finally:
        release.set()


def test_a_page_on_the_host_is_that_of_every_gpu() -> None:
    pages = [torch.arange(12).view(3, 4) + 100 * i for i in range(2)]
    states = [torch.arange(6, dtype=torch.float32).view(3, 2) - 10 * i for i in range(2)]
    joint = JointCopies([DeviceCopies([p], [s], None) for p, s in zip(pages, states, strict=True)])
    assert joint.state_bytes == 16
    joint.fetch("page", 1, joint.mark())
    held = np.concatenate(joint.page(1)).view(np.int64)
    assert held.tolist() == [4, 5, 6, 7, 104, 105, 106, 107]
    joint.store("page", 2, joint.mark())
    assert pages[0][2].tolist() == [4, 5, 6, 7] and pages[1][2].tolist() == [104, 105, 106, 107]
    joint.fetch("state", 0, joint.mark())
    assert np.concatenate(joint.state(0)).view(np.float32).tolist() == [0, 1, -10, -9]
