"""What is decided when a library is first imported, and so is said here, before any test is read, and without torch, which some
tests do without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Without a GPU, Triton's kernels are interpreted; other libraries import it, too. Threads of torch and NumPy spin while they wait for
# each other: where two runs of tests share the CPUs (Makefile), that takes minutes. The engine's own threads are not these.
if not any(Path("/dev").glob("nvidia*")) and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch's own, as in the engine process: the tensors of tiny models are too small to share."""
    import torch  # some tests do without

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
