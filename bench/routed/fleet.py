"""Servers of one model on this machine, and the router in front of them: what `bench.routed` starts, kills
and restarts.

Each router is set up as docs/many-machines.md says: its configuration is read there. All listen on the
loopback. Replicas share one API key, which clients send and routers pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.soak.soak import engine_pid
from deltic.bench.gauges import gauges
from deltic.commands.endpoint import Endpoint, EndpointError, HttpReply, LocalServer, free_port, model_name

ROUTERS = ("sglang", "nginx", "haproxy", "ray")

PAGE = Path(__file__).parents[2] / "docs" / "many-machines.md"

NGINX = """user root; daemon off; pid {dir}/nginx.pid; error_log stderr warn; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
{recipe}
}}
"""
"""What Debian's nginx has around a file of conf.d."""


def recipe(language: str, router: int, ports: Sequence[int]) -> str:
    """A configuration of PAGE, with these ports in place of 8000 (the router's), 8001 and 8002."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    one, two = re.findall(r"^ *server .*:800[12]\b.*\n", found[1], re.MULTILINE)
    lines = [one.replace("8001", str(port)).replace("deltic1", f"deltic{i}") for i, port in enumerate(ports, 1)]
    return found[1].replace(one, "".join(lines)).replace(two, "").replace("127.0.0.1:8000", f"127.0.0.1:{router}")


def gateway_flags() -> list[str]:
    """Those of SGLang's gateway in PAGE, without addresses."""
    found = re.search(r"sglang_router.launch_router (.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    words = shlex.split(found[1].replace("\\\n", " "))
    ours = ("--host", "--port", "--worker-urls")
    return [word for name, values in _by_flag(words) if name not in ours for word in (name, *values)]


def _by_flag(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    at = [i for i, word in enumerate(words) if word.startswith("--")]
    for i, end in zip(at, [*at[1:], len(words)], strict=True):
        yield words[i], words[i + 1 : end]


class Visitors(Endpoint):
    """Each request is another session's: routers that hash sessions spread them."""

    async def open(self, method: str, path: str, body: Any = None, headers: str = "") -> HttpReply:
        return await super().open(method, path, body, f"{headers}x-session-id: {secrets.token_hex(8)}\r\n")


@dataclass
class Replica:
    """One server, which keeps its port and its key when it is started again."""

    arguments: list[str]
    api_key: str
    port: int = field(default_factory=free_port)
    server: LocalServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = LocalServer(self.arguments, self.port, self.api_key)

    async def ready(self) -> None:
        assert self.server is not None
        (await self.server.wait_ready()).close()

    def kill(self) -> None:
        """SIGKILL, as a machine that is lost."""
        assert self.server is not None
        self.server.process.kill()
        self.server.process.wait()

    def kill_engine(self) -> None:
        """SIGKILL for its engine process alone, which the server starts again."""
        assert self.server is not None
        pid = engine_pid(self.server.process.pid)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    async def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, as an update does; the exit status."""
        assert self.server is not None
        return await asyncio.to_thread(self.server.stop, timeout_s)

    async def gauges(self) -> dict[str, float]:
        """Its /metrics; empty while it cannot be asked."""
        endpoint = Endpoint(self.url, self.api_key)
        try:
            reply = await endpoint.open("GET", "/metrics")
            return gauges((await reply.read()).decode())
        except EndpointError:
            return {}
        finally:
            endpoint.close()


class Fleet:
    """Replicas, and perhaps a router. Without one the only replica is asked itself."""

    def __init__(self, router: str | None, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.api_key = replicas[0].api_key
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}" if router else replicas[0].url
        self.router = router
        self.directory = tempfile.TemporaryDirectory(prefix="deltic-routed-")
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, router: str | None, n_replicas: int, arguments: list[str]) -> Fleet:
        """Replicas that are alike. arguments: of `deltic serve`, without address and key."""
        key = secrets.token_hex(16)  # no "-" at its begin, which a command line would take for a flag
        return cls(router, [Replica(arguments, key) for _ in range(n_replicas)])

    async def start(self) -> None:
        """Raises ServerFailed, and RuntimeError when the router does not come up."""
        for replica in self.replicas:
            replica.start()
        for replica in self.replicas:
            await replica.ready()
        if self.router is not None:
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            await self._routes()

    @property
    def log(self) -> Path:
        """What the router prints."""
        return Path(self.directory.name) / "router.log"

    def command(self) -> list[str]:
        """The router's command line; its configuration is written."""
        directory, urls = Path(self.directory.name), [replica.url for replica in self.replicas]
        ports = [replica.port for replica in self.replicas]
        if self.router == "sglang":
            own = ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(free_port())]
            own += ["--prometheus-host", "127.0.0.1", "--api-key", self.api_key, "--log-level", "warn"]
            return [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls, *own, *gateway_flags()]
        if self.router == "ray":  # it has replicas of its own, beside those here, which wait
            flags = ["--api-key", self.api_key, *self.replicas[0].arguments]
            return [sys.executable, "-m", "bench.routed.ray_app", str(self.port), str(len(self.replicas)), *flags]
        file = directory / "router.conf"
        if self.router == "nginx":
            file.write_text(NGINX.format(dir=directory, recipe=recipe("nginx", self.port, ports)))
            return [_program("nginx"), "-p", str(directory), "-c", str(file)]
        file.write_text(recipe("haproxy", self.port, ports))
        return [_program("haproxy"), "-db", "-f", str(file)]

    async def model(self) -> str:
        """The name that the replicas give their model."""
        endpoint = Endpoint(self.replicas[0].url, self.api_key)
        try:
            return await model_name(endpoint)
        finally:
            endpoint.close()

    async def _routes(self, within_s: float = 60.0) -> None:
        endpoint, limit = Endpoint(self.url, self.api_key), time.monotonic() + within_s
        try:
            while time.monotonic() < limit:
                assert self.process is not None
                if self.process.poll() is not None:
                    break
                with contextlib.suppress(EndpointError):
                    status, _ = await endpoint.json("GET", "/v1/models")
                    if status == 200:
                        return
                await asyncio.sleep(0.1)
        finally:
            endpoint.close()
        raise RuntimeError(f"{self.router} does not answer:\n{self.log.read_text()[-2000:]}")

    async def close(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 30)
            self.process.kill()
        for replica in self.replicas:
            if replica.server is not None:
                await replica.stop()
        self.directory.cleanup()


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    """A fleet that is started, and stopped in the end."""
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


def found_program(name: str) -> str | None:
    """The path of nginx or HAProxy; Debian has them where users do not look."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _program(name: str) -> str:
    found = found_program(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: apt-get install {name}")
    return found
