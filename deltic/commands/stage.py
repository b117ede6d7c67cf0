"""`deltic stage`: runs some layers of a model for an engine on another machine.

This process listens, and lets in who has the secret. Each engine gets a process of its own, which ends with
it: an engine that is started again finds a stage as fresh as itself, whatever happened to the last one.
"""

from __future__ import annotations

import argparse
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
    check_private,
    parse_address,
    read_secret,
    welcome,
)

log = logging.getLogger("deltic.stage")

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
    """Lets engines in, one at a time."""
    worker: Worker | None = None
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        is_called = bool(poll.poll(200 if worker else None))
        if worker is not None and worker.has_ended():
            worker = None
        if not is_called:
            continue
        try:
            connected, (host, port, *_) = listener.accept()
        except OSError as error:  # who called has gone, or too many files are open
            log.warning("nobody is let in: %s", error)
            time.sleep(0.2)
            continue
        front = PeerConnection(connected, f"{host}:{port}")
        try:
            check_private(host, secret, "--listen")
            welcome(front, secret)
            if worker is not None:
                front.receive(GREETING_S)  # what is closed unread takes the answer along
                front.send(StageRefusal(f"it runs for {worker.front.name}", may_pass=True))
            else:
                worker = Worker(front, listener, config)
        except (ConfigError, LostError, OSError) as error:  # of the last, a process that cannot be made
            log.warning("%s:%d is not let in: %s", host, port, error)
        if worker is None or worker.front is not front:
            front.close()


class Worker:
    """The process that runs a stage for one engine."""

    def __init__(self, front: PeerConnection, listener: socket.socket, config: EngineConfig) -> None:
        log.info("%s is served", front.name)
        self.front, self._gone_s = front, 0.0
        self._pid = os.fork()
        if self._pid == 0:
            listener.close()
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
    except Exception:
        log.exception("the stage failed")
        return 1
    finally:
        sys.stderr.flush()
    return 0
