"""GPU kernels: natively where there is a GPU, else in Triton's interpreter. Without Triton all of it is skipped.

`tests/conftest.py` says which, before Triton is imported; the interpreter is mended here, and made quicker.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # also where there is a driver and torch cannot use it
    from tests.gpu.mended_interpreter import mend
    from tests.gpu.quick_interpreter import quicken

    mend()
    quicken()


def pytest_configure(config: pytest.Config) -> None:
    if HAS_TRITON and (name := config.getoption("--as-chip")):
        from deltic.ops.gpu.chip import emulate

        emulate(name, alone=False)


def pytest_ignore_collect(collection_path: object) -> bool | None:
    return None if HAS_TRITON else True


@pytest.fixture(scope="session", autouse=True)
def served_levers() -> Iterator[None]:
    """Binds the levers that are served; a test of others binds these for its calls."""
    from deltic.ops.gpu.launch import Levers

    with Levers().bound():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
