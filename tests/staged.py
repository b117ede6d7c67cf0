"""`deltic stage` in a process of its own, on this machine or in a network namespace: what tests of several machines start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.waiting import wait_for


class Stage:
    """A stage that listens. Its log is in `lines`."""

    def __init__(
        self,
        *arguments: str,
        listen: str = "127.0.0.1:0",
        inside: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "deltic"),
    ) -> None:
        """inside: a command that runs it, as of a network namespace. program: what Python runs."""
        command = (*inside, sys.executable, *program, "stage", *arguments, "--listen", listen)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        try:
            self.address = wait_for(self._listening)
        except AssertionError:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))  # one after the other, as they come

    def _listening(self) -> str:
        assert self.process.poll() is None, self.log
        found = re.search(r"listening on (\S+)", self.log)
        return "" if found is None else found[1]

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def worker(self) -> int:
        """The process that runs the stage for an engine; 0: there is none."""
        pid = self.process.pid
        with contextlib.suppress(FileNotFoundError):
            return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
        return 0

    def kill_worker(self, by: signal.Signals = signal.SIGKILL) -> None:
        os.kill(wait_for(self.worker), by)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(5)
