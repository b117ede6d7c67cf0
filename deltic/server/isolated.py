"""Files that nobody vouches for, decoded by a short process of their own: a module run as a program.

It has little memory and time, makes way for everybody else if it takes long, and may write no file. What a
broken file makes of it is an exit status. Where memory runs out, the kernel ends it and not the engine. A
module that decodes has a `main` that calls `answer`, and asks for it by `ask`. Most of a small file's time is
the program's start; so a server begins the next one before it is asked for (`SPARE`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every file waits until its program is ready
    import asyncio
    import subprocess
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

REFUSED = 3
"""The program's exit status where it refuses a file, with the reason in stderr."""
QUICK_S = 0.25
"""Seconds until the next spare is begun, if a file takes so long."""
QUICK_CPU_S = 0.5
"""Seconds of a processor that most files take less than, the program's start included. Those that take longer
make way for everybody else; those that only wait for a processor do not.
"""
NICENESS = 5
SLOWER = 3
"""Factor on the seconds of a processor that a program has: it may last so long, as it makes way."""
SPARE_S = 60.0
"""Seconds that a spare process waits when it is not asked for."""
MOST = 64
"""Programs at once: far more than rooms for decoders let in."""
FIRST_TO_GO = "1000"
"""The kernel's largest oom_score_adj."""


class Refused(ValueError):
    """A file that cannot be used; the message says why, for whoever sent it."""


async def ask(program: tuple[str, ...], data: bytes, limit_s: float, otherwise: str) -> bytes:
    """Returns what the program makes of the file. Raises Refused: with its reason, or with `otherwise` where
    it died; ApiError (503) where the kernel had no memory or no process for it.

    limit_s: seconds of a processor. It is ended when nobody waits any more, too.
    """
    import asyncio  # which the program itself does without
    import subprocess

    from deltic.server.errors import ApiError

    try:
        process = SPARE.take(program)
    except OSError as error:
        lack = f"no process for a decoder can be started ({error.strerror}); try again later"
        raise ApiError(503, lack, code="out_of_memory", headers={"retry-after": "10"}) from None
    later = asyncio.create_task(_make_way(process.pid, program))
    try:
        made, why = await asyncio.get_running_loop().run_in_executor(_threads(), _use, process, data, SLOWER * limit_s)
    except subprocess.TimeoutExpired:
        raise Refused(f"could not be decoded within {SLOWER * limit_s:g} s") from None
    finally:
        later.cancel()
        process.kill()  # if it has not ended, nobody waits any more
        SPARE.begin(program)
    if process.returncode == REFUSED:
        raise Refused(why.decode("utf-8", "replace").rpartition("\n")[2])  # decoders print there, too
    if process.returncode == -signal.SIGXCPU:
        raise Refused(f"could not be decoded within {limit_s:g} s")
    if process.returncode == -signal.SIGKILL:  # nobody else sends it
        lack = "memory ran out while a file of the request was decoded; try again later, or send a smaller one"
        raise ApiError(503, lack, code="out_of_memory", headers={"retry-after": "10"})
    if process.returncode:
        raise Refused(otherwise)
    return made


async def _make_way(pid: int, program: tuple[str, ...]) -> None:
    """Has the next file not wait for a process, and lets all others go before it once its file is no small
    one.
    """
    import asyncio

    await asyncio.sleep(QUICK_S)
    SPARE.begin(program)
    with contextlib.suppress(OSError):  # it has just ended
        while time.clock_gettime(~pid << 3 | 2) < QUICK_CPU_S:  # Linux's clock of what a process has had
            await asyncio.sleep(QUICK_S / 4)
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Returns the pool with a thread for each program that runs, which writes, reads and waits."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(MOST, "decoders")


def _begun(program: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Starts the program, by `subprocess` and not the event loop: uvloop forks, which copies the tables of a
    large server's memory, and all wait for that.
    """
    import subprocess

    return subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", ""), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


def _use(process: subprocess.Popen[bytes], data: bytes, timeout_s: float) -> tuple[bytes, bytes]:
    """Returns what a process writes to stdout and stderr. Raises TimeoutExpired, and has ended it then."""
    try:
        return process.communicate(data, timeout_s)
    except BaseException:
        process.kill()
        process.communicate()
        raise


class Spare:
    """A process of the program that ran last, which waits for a file. Of one event loop."""

    def __init__(self) -> None:
        self.is_kept = False
        """True if a spare is kept: not without somebody who drops it at the end."""
        self._program: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, program: tuple[str, ...]) -> None:
        """Starts one, if there is none of the program. Where that fails, the next to ask is told."""
        import asyncio

        if self.is_kept and program != self._program:
            self.drop()
            with contextlib.suppress(OSError):
                self._process, self._program = _begun(program), program
                self._timer = asyncio.get_running_loop().call_later(SPARE_S, self.drop)

    def take(self, program: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Gives the process that waits, or starts another. Raises OSError."""
        process = self._process if program == self._program else None
        if process is None:
            return _begun(program)
        self._process = None
        self.drop()
        return process if process.poll() is None else _begun(program)

    def drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            _threads().submit(self._process.communicate)
        self._program, self._process, self._timer = (), None, None


SPARE = Spare()


def answer(decode: Callable[[bytes], bytes], *, limit_s: float, memory: int, most_bytes: int) -> int:
    """The program: a file in stdin, what `decode` makes of it out of stdout. Gives the exit status.

    decode may raise Refused. memory: bytes of address space; of the file, at most most_bytes + 1 are read.
    """
    import resource

    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_TO_GO)
    # One more to the second, which is SIGKILL's: the kernel sends that where memory runs out, too.
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        made = decode(sys.stdin.buffer.read(most_bytes + 1))
    except Refused as refused:
        sys.stderr.write(str(refused))
        return REFUSED
    sys.stdout.buffer.write(made)
    return 0
