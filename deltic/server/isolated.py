"""Files that nobody vouches for, each decoded by a short process of its own.

The process has little memory and time, makes way for everybody else if it takes long, and may write no file.
What a broken file makes of it is an exit status. Where memory runs out, the kernel ends it and not the
engine.

A module that decodes has a `main`, which calls `answer`, and is asked by `ask`. Its libraries take 0.15 s to
import, far longer than a small file takes. So they are imported once, by a process that decodes nothing
itself: a fork server, which forks a process for each file in two milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # a fork has what its server has
    import subprocess
    from collections.abc import Callable, Iterator

COMMAND = (sys.executable, "-I", "-c", "from deltic.server.isolated import serve_forks; serve_forks()")
STATUS = struct.Struct("<8si")
"""END, and the exit status of a process, below zero a signal, which come behind all that it wrote."""
END = b"\0status\0"
"""The mark of a status: what a process wrote does not end with it where the fork server was ended first."""
REFUSED = 3
"""The exit status of a process that refuses a file, and has written the reason."""
QUICK_CPU_S = 0.3
"""Seconds of a processor that most files take less than. Those that take longer make way for everybody else;
those that only wait for a processor do not.
"""
LOOK_S = 0.05
"""Seconds between two looks at how long the processes have taken."""
NICENESS = 5
SLOWER = 3
"""Factor on the seconds of a processor that a file has: it may last so long, as it makes way."""
MAX_MESSAGE = 1 << 16
READ_BYTES = 1 << 20
N_PARTS = 8
"""Parts of what was made that are taken in one turn of the event loop: as much as a socket holds, each."""
FIRST_TO_GO = "1000"
"""The kernel's largest oom_score_adj."""


class Refused(ValueError):
    """A file that cannot be used; the message says why, for whoever sent it."""


async def ask(program: tuple[str, ...], data: bytes, limit_s: float, otherwise: str) -> bytes:
    """Returns what the program makes of the file. Raises Refused: with its reason, or with `otherwise` where
    it died; ApiError (503) where the kernel had no memory or no process for it.

    program: a module, and its arguments. limit_s: seconds of a processor. The process is ended when nobody
    waits any more, too.
    """
    import asyncio

    try:
        channel = FORKS.connect(program)
    except OSError as error:
        raise _lack(f"no process for a decoder can be started ({error.strerror}). Try again later.") from None
    try:
        async with asyncio.timeout(SLOWER * limit_s):
            made = await _exchange(channel, data)
    except TimeoutError:
        raise Refused(f"could not be decoded within {SLOWER * limit_s:g} s") from None
    finally:
        channel.close()  # which ends a process that has not ended
    made, last = made[: -STATUS.size], made[-STATUS.size :]
    if not last.startswith(END):
        raise _lack("the process of the decoders ended while a file of the request was decoded. Try again later.")
    _, status = STATUS.unpack(last)
    if status == REFUSED:
        raise Refused(made.decode("utf-8", "replace"))
    if status == -signal.SIGXCPU:
        raise Refused(f"could not be decoded within {limit_s:g} s")
    if status == -signal.SIGKILL:  # nobody else sends it
        raise _lack("memory ran out while a file of the request was decoded. Try again later, or send a smaller one.")
    if status:
        raise Refused(otherwise)
    return made


def _lack(message: str) -> Exception:
    from deltic.server.errors import ApiError

    return ApiError(503, message, code="out_of_memory", headers={"retry-after": "10"})


async def _exchange(channel: socket.socket, data: bytes) -> bytes:
    """Returns all that comes back for a file. What has come is taken where the event loop sees it: a task
    that waits for each part has two turns a part, each behind all other requests.
    """
    import asyncio

    loop, made = asyncio.get_running_loop(), bytearray()
    with contextlib.suppress(ConnectionError):  # it has ended, and its status says why
        await loop.sock_sendall(channel, data)
        channel.shutdown(socket.SHUT_WR)
    ended: asyncio.Future[bytes] = loop.create_future()

    def take() -> None:
        with contextlib.suppress(ConnectionError):  # it left some of the file
            for _ in range(N_PARTS):
                try:
                    part = channel.recv(READ_BYTES)
                except BlockingIOError:
                    return
                if not part:
                    break
                made.extend(part)
            else:
                return
        loop.remove_reader(channel)
        ended.set_result(bytes(made))

    loop.add_reader(channel, take)
    try:
        return await ended
    finally:
        loop.remove_reader(channel)


class ForkServer:
    """The process that forks, started when it is first asked. It ends with this process, or when told to."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, program: tuple[str, ...]) -> socket.socket:
        """Returns the end of a socket whose other end is a new process's stdin and stdout. Raises OSError."""
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_BYTES)  # or as much as the system allows
        ours.setblocking(False)
        with theirs:
            try:
                self._send(program, theirs)
            except BaseException:
                ours.close()
                raise
        return ours

    def _send(self, program: tuple[str, ...], channel: socket.socket) -> None:
        message = [json.dumps(program).encode()]
        if self._control is not None:
            try:
                socket.send_fds(self._control, message, [channel.fileno()])
                return
            except ConnectionError:  # it was ended by somebody
                self.stop()
        self._start()
        assert self._control is not None
        socket.send_fds(self._control, message, [channel.fileno()])

    def _start(self) -> None:
        """Raises OSError."""
        import subprocess

        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                # Not by the event loop: uvloop forks, which copies the tables of a large server's memory.
                self._process = subprocess.Popen(
                    COMMAND,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={"PATH": os.environ.get("PATH", ""), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                )
            except BaseException:
                control.close()
                raise
        control.setblocking(False)
        self._control = control

    def stop(self) -> None:
        """Ends it, and all that it forked."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
            self._control = self._process = None


FORKS = ForkServer()


def serve_forks() -> None:
    """The fork server: each message of stdin, a socket, has a program, and the socket of its process."""
    control = socket.socket(fileno=os.dup(0))
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it wakes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all; it ends with who started it
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    forks: dict[int, socket.socket] = {}
    """Channels of processes, held until their status is written."""
    quick: set[int] = set()
    """Processes that have not made way."""
    while True:
        for fd, _ in poll.poll(1000 * LOOK_S if quick else None):
            if fd == control.fileno():
                message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
                if not message:
                    for pid in forks:
                        os.kill(pid, signal.SIGKILL)
                    return
                channel = socket.socket(fileno=fds[0])
                if pid := _forked(json.loads(message), channel):
                    forks[pid] = channel
                    quick.add(pid)
                    poll.register(channel, 0)  # tells when the other end is closed
            elif fd == woken:
                os.read(woken, 4096)
            else:
                poll.unregister(fd)
                for pid, channel in forks.items():
                    if channel.fileno() == fd:
                        os.kill(pid, signal.SIGKILL)
        for pid, status in _ended():
            quick.discard(pid)
            with forks.pop(pid) as channel:
                with contextlib.suppress(KeyError):
                    poll.unregister(channel)
                _tell(channel, status)
        for pid in [*quick]:
            with contextlib.suppress(OSError):  # it has just ended
                if time.clock_gettime(~pid << 3 | 2) >= QUICK_CPU_S:  # its own clock, in Linux
                    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
                    quick.discard(pid)


def _forked(program: list[str], channel: socket.socket) -> int:
    """Forks the process of a program, and returns its number; 0 where the kernel has no room for one."""
    if program[0] not in sys.modules:
        with contextlib.suppress(Exception):  # the process finds it again, and ends
            importlib.import_module(program[0]).prepare()
        gc.freeze()
    try:
        pid = os.fork()
    except OSError:
        with channel:
            _tell(channel, -signal.SIGKILL)
        return 0
    if not pid:
        _run(program, channel)
    return pid


def _run(program: list[str], channel: socket.socket) -> NoReturn:
    """The process that was forked: it reads and writes its channel, and has nothing else of its server."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(channel.fileno(), 0)
        os.dup2(channel.fileno(), 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.argv = program
        status = importlib.import_module(program[0]).main()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _tell(channel: socket.socket, status: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits
        channel.sendall(STATUS.pack(END, status))


def _ended() -> Iterator[tuple[int, int]]:
    """Yields each process that has ended, with its exit status."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def answer(decode: Callable[[bytes], bytes], *, limit_s: float, memory: int, most_bytes: int) -> int:
    """The program: a file in stdin, what `decode` makes of it out of stdout. Gives the exit status.

    decode may raise Refused. memory: bytes of address space; of the file, at most most_bytes + 1 are read.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_TO_GO)
    # One more to the second, which is SIGKILL's: the kernel sends that where memory runs out, too.
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        made, status = decode(sys.stdin.buffer.read(most_bytes + 1)), 0
    except Refused as refused:
        made, status = str(refused).encode(), REFUSED
    sys.stdout.buffer.write(made)
    return status
