"""What is decided when a library is first imported, and so is said here, before any test is read, and without torch, which some
tests do without; and which tests a run leaves out."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import areas

# Without a GPU, Triton's kernels are interpreted; other libraries import it, too. Threads of torch and NumPy spin while they wait for
# each other: where two runs of tests share the CPUs (Makefile), that takes minutes. The engine's own threads are not these.
if not any(Path("/dev").glob("nvidia*")) and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where tests are run by nohup, the servers that they start would pass over this signal, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

NEEDS_TREE = (
    "architecture",
    "areas",
    "cli_docs",
    "dashboard",
    "deploy",
    "docs",
    "fingerprint",
    "gpu_syncs",
    "layout",
    "package",
    "words",
)
"""Of tests/null: those that read the sources."""
NEEDS_TORCH = ("device_copy", "gguf", "quantised_files")
NEEDS_BENCH = ("kv_events",)
WITHOUT_TORCH = (
    "served",
    "openai_client",
    "anthropic_client",
    "constrained",
    "schemas",
    "hangs",
    "served_purity",
    "pool",
)
"""Of tests/cpu: those that need no torch."""


def runs_in_package(path: Path) -> bool:
    """Whether a file of tests needs neither torch nor this tree, so that it can run beside an installed package."""
    name, folder = path.stem.removeprefix("test_"), path.parent.name
    if folder == "cpu":
        return name in WITHOUT_TORCH
    return folder == "null" and name not in (*NEEDS_TREE, *NEEDS_TORCH, *NEEDS_BENCH)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--area",
        choices=list(areas.AREAS),
        help="all tests of this area are given: without the long ones while it is as it was when they passed",
    )
    parser.addoption("--everything", action="store_true", help="with --area: the long ones in any case")
    parser.addoption("--in-package", action="store_true", help="only what needs neither torch nor the tree")
    parser.addoption("--not-in-package", action="store_true", help="all but that")
    parser.addoption(
        "--as-chip",
        choices=("sm_86", "sm_89", "sm_120"),
        help="of tests/gpu: with the kernels and sizes of another card (docs/gpu.md)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    left_out = "--in-package" if runs_in_package(collection_path) is False else "--not-in-package"
    return True if config.getoption(left_out) else None


def _check_whole(area: str, config: pytest.Config, given: set[Path]) -> None:
    """Raises UsageError where tests of an area are missing: what did not run has not passed."""
    files = (Path(__file__).parent / area).glob("test_*.py")
    missing = [f.name for f in files if areas.counts(f) and not pytest_ignore_collect(f, config) and f not in given]
    if missing or config.option.keyword or config.option.markexpr:
        raise pytest.UsageError(
            f"--area {area} is for all of its tests, in one run; {', '.join(missing) or '-k'} missing"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    area = config.getoption("--area")
    if area:
        _check_whole(area, config, {item.path for item in items})
    if area and not areas.has_changed(area) and not config.getoption("--everything"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    area = None if session.config.option.collectonly else session.config.getoption("--area")
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and area:
        session.exitstatus = pytest.ExitCode.OK  # all of them are long
    if exitstatus == pytest.ExitCode.OK and area and areas.has_changed(area):
        areas.note(area)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Cycles are left alone: to look through what thousands of tests have left takes a quarter of a second of any thread's time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch's own, as in the engine process: the tensors of tiny models are too small to share."""
    import torch  # some tests do without

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
