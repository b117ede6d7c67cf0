"""A hub on a loopback port, as huggingface_hub asks it (HF_ENDPOINT): slow, broken, gated, or without what is wanted."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMITS = {"main": "a" * 40, "old": "b" * 40}


@dataclass
class FakeHub:
    """`files` of owner/model: at main as they are, at old with `old` in them changed."""

    files: dict[str, bytes]
    old: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    rate: float = 0.0
    """Bytes a second of each file; 0: as fast as it goes."""
    n_breaks: int = 0
    """How many files are cut off in the middle."""
    gated: bool = False
    down: bool = False
    asked: list[str] = field(default_factory=list)

    def at(self, commit: str) -> dict[str, bytes]:
        return self.files | (self.old if commit == COMMITS["old"] else {})


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.down:
            self._say(500, b"down", {})
            return
        if hub.gated:
            self._say(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "owner", "model"]:
            self._tell(parts[4:])
        elif parts[:3] == ["owner", "model", "resolve"]:
            self._file(parts[3], "/".join(parts[4:]))
        else:
            self._say(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _tell(self, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else "")
        if not commit:
            self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.hub.at(commit)
        if rest and rest[0] == "tree":
            told: Any = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)} for name, data in files.items()
            ]
        else:
            told = {"id": "owner/model", "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        self._say(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _file(self, commit: str, name: str) -> None:
        data = self.hub.at(COMMITS.get(commit, commit))[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        more = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMITS.get(commit, commit)}
        if start:
            more["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._say(206 if start else 200, data[start:], more)

    def _say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        hub = self.hub
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        is_file = "/resolve/" in self.path
        if is_file and hub.n_breaks and len(body) > 100:
            hub.n_breaks -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            self.connection.close()
            return
        piece = max(1, int(hub.rate / 20)) if hub.rate and is_file else len(body)
        for i in range(0, len(body), piece or 1):
            try:
                self.wfile.write(body[i : i + piece])
                self.wfile.flush()
            except OSError:
                self.close_connection = True
                return
            if piece < len(body):
                time.sleep(0.05)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def hub_with(files: dict[str, bytes], **settings: Any) -> Iterator[FakeHub]:
    """Runs until the block ends."""
    hub = FakeHub(files, **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
