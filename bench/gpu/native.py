"""Tests of kernels and engines on the GPU that is here, and what came of each file.

    python -m bench.gpu.native --name drafters --out DIR tests/gpu/test_gpu_block_drafter.py
    python -m bench.gpu.native --name as-sm_89 --as-chip sm_89 --workers 4 -m "not long" tests/gpu

A test file counts what passed, failed and was skipped; a failure is kept with its last line. The result is
written as tests end, so that a run that is cut tells how far it came.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.experiment import parser
from deltic.bench.provenance import writer

EVERY_S = 5.0
"""How often the result is written."""


class Kept:
    """A plugin of pytest that keeps what came of each test."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.files: dict[str, Counter[str]] = defaultdict(Counter)
        self.failures: dict[str, str] = {}
        self.longest: dict[str, float] = {}
        self._write, self._begin, self._last = write, time.monotonic(), time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Counts a test's call; of its set-up and end only what did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self.files[report.nodeid.partition("::")[0]][report.outcome] += 1
        if report.outcome == "failed":
            self.failures[report.nodeid] = (str(report.longrepr).strip().splitlines() or [""])[-1][:200]
            print(f"FAILED {report.nodeid}: {self.failures[report.nodeid]}", flush=True)
        self.longest[report.nodeid] = round(self.longest.get(report.nodeid, 0.0) + report.duration, 1)
        if time.monotonic() - self._last > EVERY_S:
            self.write()

    def write(self, is_whole: bool = False) -> Counter[str]:
        """Writes what there is; the sums of all files."""
        self._last, total = time.monotonic(), sum(self.files.values(), Counter[str]())
        longest = dict(sorted(self.longest.items(), key=lambda item: -item[1])[:10])
        seconds = round(self._last - self._begin, 1)
        told = {"counts": total, "seconds": seconds, "files": self.files}
        self._write(is_whole=is_whole, **told, failures=self.failures, longest_s=longest)
        return total


def main(given: Sequence[str] | None = None) -> int:
    """The command. Exit status 1: a test failed, or there was none."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("tests", nargs="+", metavar="FILE", help="files, folders or ids of tests")
    add("--name", default="all", help="what these tests are called together (default: all)")
    add("--as-chip", choices=("sm_86", "sm_89", "sm_120"), help="with the kernels and sizes of another card")
    add("--workers", type=int, default=0, metavar="N", help="processes side by side, by pytest-xdist (default: none)")
    add("-k", default="", metavar="EXPRESSION", help="those that pytest chooses by it")
    add("-m", default="", metavar="EXPRESSION", help="those whose markers pytest chooses by it")
    arguments = flags.parse_args(given)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    device += f" as {arguments.as_chip}" if arguments.as_chip else ""
    kept = Kept(writer("gpu-native", arguments.name, device, arguments.out or Path("."), tests=arguments.tests))
    command = ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]
    command += ["-n", str(arguments.workers)] if arguments.workers else []
    for flag, value in (("-k", arguments.k), ("-m", arguments.m), ("--as-chip", arguments.as_chip)):
        command += [flag, value] if value else []
    pytest.main([*command, *arguments.tests], plugins=[kept])
    counts = kept.write(is_whole=True)
    print(f"{arguments.name} on {device}: {', '.join(f'{n} {outcome}' for outcome, n in sorted(counts.items()))}")
    return int(counts["failed"] > 0 or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
