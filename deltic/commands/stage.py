"""`deltic stage`: runs some layers of a model for an engine on another machine.

This process listens, and lets in who has the secret. Each engine gets a process of its own, which ends with
it: an engine that is started again finds a stage as fresh as itself, whatever happened to the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time

from deltic import logs
from deltic.config import ConfigError, EngineConfig
from deltic.engine.step import RunnerLostError
from deltic.host.process import die_with_parent
from deltic.runtime.build import serve_stage
from deltic.runtime.wire import (
    GREETING_S,
    LostError,
    PeerConnection,
    StageRefusal,
    Welcome,
    check_private,
    parse_address,
    read_secret,
)

log = logging.getLogger("deltic.stage")

MOST_GUESTS = 64
"""Connections of which it is not known yet who they are."""
END_S = 5.0
"""Seconds that a worker may take to end behind its engine."""


def stage(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Serves engines, one at a time, until it is ended. Raises ConfigError for an address that it may not
    listen on.
    """
    logs.set_up("info", "text", "%(levelname)s %(name)s: %(message)s")
    secret, flag = read_secret(config.stages_secret), f"--listen {arguments.listen}"
    host, port = parse_address(arguments.listen, "--listen")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        check_private(str(address[0]), secret, flag)
        listener = socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}; give an address of this machine, and a free port") from None
    log.info("listening on %s:%d", *listener.getsockname()[:2])
    serve(listener, secret, config)
    return 0


def serve(listener: socket.socket, secret: bytes, config: EngineConfig) -> None:
    """Lets engines in, one at a time. Nobody waits for who is slow to say who it is."""
    worker: Worker | None = None
    guests: dict[int, Welcome] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        called = {number for number, _ in poll.poll(200 if worker or guests else None)}
        if worker is not None and worker.has_ended():
            worker = None
        if listener.fileno() in called:
            _accept(listener, secret, guests, poll)
        for number, guest in list(guests.items()):
            front, is_served = guest.connection, False
            try:
                if number not in called and time.monotonic() < guest.until_s:
                    continue
                if not guest.read():
                    continue
                if worker is not None:
                    front.receive(GREETING_S)  # what is closed unread takes the answer along
                    front.send(StageRefusal(f"it runs for {worker.front.name}", may_pass=True))
                else:
                    others = [each.connection for each in guests.values() if each is not guest]
                    worker, is_served = Worker(front, listener, others, config), True
            except (LostError, OSError) as error:  # of the last, a process that cannot be made
                log.warning("%s is not let in: %s", front.name, error)
            del guests[number]
            poll.unregister(number)
            if not is_served:
                front.close()


def _accept(listener: socket.socket, secret: bytes, guests: dict[int, Welcome], poll: select.poll) -> None:
    """Begins to welcome who calls, if there are not too many already: then whoever came first goes."""
    try:
        connected, (host, port, *_) = listener.accept()
    except OSError as error:  # who called has gone, or too many files are open
        log.warning("nobody is let in: %s", error)
        time.sleep(0.2)
        return
    front = PeerConnection(connected, f"{host}:{port}")
    try:
        check_private(host, secret, "--listen")
        guests[connected.fileno()] = Welcome(front, secret)
        poll.register(connected, select.POLLIN)
    except (ConfigError, LostError) as error:
        log.warning("%s is not let in: %s", front.name, error)
        front.close()
    if len(guests) > MOST_GUESTS:
        number = next(iter(guests))
        poll.unregister(number)
        guests.pop(number).connection.close()


class Worker:
    """The process that runs a stage for one engine."""

    def __init__(
        self, front: PeerConnection, listener: socket.socket, others: list[PeerConnection], config: EngineConfig
    ) -> None:
        """others: connections that are not the worker's."""
        log.info("%s is served", front.name)
        self.front, self._gone_s = front, 0.0
        self._pid = os.fork()
        if self._pid == 0:
            listener.close()
            for other in others:
                other.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that listens
            os._exit(_work(front, config))

    def has_ended(self) -> bool:
        """Returns whether it has ended. One that is left over from an engine that has gone is killed."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            log.info("%s is served no more (exit status %d)", self.front.name, os.waitstatus_to_exitcode(status))
            self.front.close()
            return True
        if self.front.is_gone():
            self._gone_s = self._gone_s or time.monotonic()
            if time.monotonic() - self._gone_s > END_S:
                os.kill(self._pid, signal.SIGKILL)  # it may be stopped, or in a long step
        return False


def _work(front: PeerConnection, config: EngineConfig) -> int:
    """The worker; its exit status."""
    try:
        die_with_parent()
        serve_stage(front, config)
    except (LostError, RunnerLostError) as error:
        log.warning("%s", error)
        with contextlib.suppress(LostError):  # whose front may know why it has ended
            front.send(StageRefusal(str(error), may_pass=True), timeout_s=END_S)
    except Exception:
        log.exception("the stage failed")
        return 1
    finally:
        sys.stderr.flush()
    return 0
