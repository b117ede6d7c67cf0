"""Servers of one model on this machine, and the router in front of them: what `bench.routed` starts, kills
and restarts.

Each router is set up as docs/many-machines.md says. All listen on the loopback. Replicas share one API key,
which clients send and routers pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.soak.soak import engine_pid
from deltic.bench.gauges import gauges
from deltic.commands.endpoint import Endpoint, EndpointError, LocalServer, Reply, free_port, model_name

ROUTERS = ("sglang", "nginx", "haproxy", "ray")

NGINX = """user root; daemon off; pid {dir}/nginx.pid; error_log stderr warn; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
  uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
  upstream deltic {{
    hash $http_x_session_id consistent;
    {servers}
    keepalive 64;
  }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m;
    location / {{
      proxy_pass http://deltic;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 1h;
      proxy_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
}}
"""

HAPROXY = """global
  maxconn 4096
defaults
  mode http
  timeout connect 2s
  timeout client 1h
  timeout server 1h
  retries 3
  retry-on conn-failure empty-response 503
  option redispatch
  option http-no-delay
frontend router
  bind 127.0.0.1:{port}
  default_backend deltic
backend deltic
  balance hdr(x-session-id)
  hash-type consistent
  option httpchk GET /ready
  http-check expect status 200
  default-server inter 500ms fall 1 rise 1
  {servers}
"""


class Visitors(Endpoint):
    """Each request is another session's: routers that hash sessions spread them."""

    async def open(self, method: str, path: str, body: Any = None, headers: str = "") -> Reply:
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
            own += ["--prometheus-host", "127.0.0.1"]
            health = ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"]
            health += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
            health += ["--cb-timeout-duration-secs", "2", "--cb-success-threshold", "1"]
            # By default it does not look at the load before one has 64 requests more than another.
            balance = ["--balance-abs-threshold", "2", "--balance-rel-threshold", "1.2"]
            policy = [*balance, "--policy", "cache_aware", "--api-key", self.api_key, "--log-level", "warn"]
            return [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls, *own, *health, *policy]
        if self.router == "ray":  # it has replicas of its own, beside those here, which wait
            flags = ["--api-key", self.api_key, *self.replicas[0].arguments]
            return [sys.executable, "-m", "bench.routed.ray_app", str(self.port), str(len(self.replicas)), *flags]
        file = directory / "router.conf"
        if self.router == "nginx":
            servers = "\n    ".join(f"server 127.0.0.1:{port} max_fails=1 fail_timeout=1s;" for port in ports)
            file.write_text(NGINX.format(dir=directory, port=self.port, servers=servers))
            return [_program("nginx"), "-p", str(directory), "-c", str(file)]
        servers = "\n  ".join(f"server deltic{i} 127.0.0.1:{port} check" for i, port in enumerate(ports))
        file.write_text(HAPROXY.format(port=self.port, servers=servers))
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
