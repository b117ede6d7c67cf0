"""A hub on a loopback port, as huggingface_hub asks it (HF_ENDPOINT): slow, broken, gated, or without what is wanted."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

from huggingface_hub import constants

COMMITS = {"main": "a" * 40, "old": "b" * 40}


@dataclass(frozen=True)
class Long:
    """A file of many zeros behind its beginning: as large as files of weights are, in no memory."""

    head: bytes
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self.size)
        found = self.head[begin:end]
        return found + bytes(end - begin - len(found))


@dataclass
class FakeHub:
    """`files` of owner/model: at main as they are, at old with `old` in them changed."""

    files: dict[str, Any]
    """bytes, or Long."""
    old: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    rate: float = 0.0
    """Bytes a second of each file; 0: as fast as it goes."""
    n_breaks: int = 0
    """How many answers with a big file are cut off in the middle."""
    n_empty: int = 0
    """How many answers with a big file end before the first byte of it, after those that are cut off."""
    n_stalls: int = 0
    """How many answers with a big file stop in the middle, and neither go on nor end."""
    silent: str = ""
    """Beginning of the paths that are heard and never answered."""
    over: threading.Event = field(default_factory=threading.Event)
    wrong: set[str] = field(default_factory=set)
    """Files that come with other bytes than the hub says."""
    ranges: bool = True
    """Whether it sends a part of a file where one is asked for; the rest of a file it always does."""
    gated: bool = False
    down: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """What else it says of the model."""
    asked: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent of each file."""
    sending: list[str] = field(default_factory=list)
    """Who is being answered."""

    def at(self, commit: str) -> dict[str, Any]:
        return self.files | (self.old if commit == COMMITS["old"] else {})


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.sending.append(self.path)
        try:
            self._get()
        finally:
            self.hub.sending.remove(self.path)

    def _get(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.silent and path.startswith(hub.silent):
            hub.over.wait()
            self.close_connection = True
            return
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
            told: Any = [{"type": "file", "path": name, **_told(name, data)} for name, data in files.items()]
        else:
            siblings = [{"rfilename": name} | _sibling(name, data) for name, data in files.items()]
            told = {"id": "owner/model", "sha": commit, "siblings": siblings} | self.hub.more
        self._say(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _file(self, commit: str, name: str) -> None:
        data = self.hub.at(COMMITS.get(commit, commit))[name]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1 if last and self.hub.ranges else len(data)
        more = {"ETag": f'"{blob_name(name, data)}"', "X-Repo-Commit": COMMITS.get(commit, commit)}
        is_part = start > 0 or end < len(data)
        if is_part:
            more["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        if name in self.hub.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._say(206 if is_part else 200, data[start:end], more, name)

    def _say(self, status: int, body: bytes, headers: dict[str, str], file: str = "") -> None:
        hub = self.hub
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file and len(body) > 100 and (hub.n_breaks or hub.n_empty):
            body = body[: len(body) // 2] if hub.n_breaks else b""
            if hub.n_breaks:
                hub.n_breaks -= 1
            else:
                hub.n_empty -= 1
            self.close_connection = True
        if file and len(body) > 100 and hub.n_stalls:
            hub.n_stalls -= 1
            self.wfile.write(body[: len(body) // 2])
            hub.sent[file] = hub.sent.get(file, 0) + len(body) // 2
            hub.over.wait()
            self.close_connection = True
            return
        piece = max(1, int(hub.rate / 20)) if hub.rate and file else len(body)
        for i in range(0, len(body), piece or 1):
            try:
                self.wfile.write(body[i : i + piece])
                self.wfile.flush()
            except OSError:
                self.close_connection = True
                return
            if file:
                hub.sent[file] = hub.sent.get(file, 0) + len(body[i : i + piece])
            if piece < len(body):
                time.sleep(0.05)


def is_lfs(name: str) -> bool:
    """Whether the hub stores it beside git, as it does with what is big."""
    return name.endswith((".safetensors", ".gguf", "tokenizer.json"))


def blob_name(name: str, data: Any) -> str:
    """The name of a file in the cache: its hash."""
    return hashlib.sha256(data.head if isinstance(data, Long) else data).hexdigest() if is_lfs(name) else _git(data)


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _told(name: str, data: Any) -> dict[str, Any]:
    """What the hub's tree says of a file: `oid` is git's hash of the file, or of the pointer to it."""
    if not is_lfs(name):
        return {"size": len(data), "oid": _git(data)}
    lfs = {"oid": blob_name(name, data), "size": len(data), "pointerSize": 130}
    return {"size": len(data), "oid": _git(lfs["oid"].encode()), "lfs": lfs}


def _sibling(name: str, data: Any) -> dict[str, Any]:
    """What the hub's model says of a file, in other words."""
    told = _told(name, data)
    told["blobId"] = told.pop("oid")
    if "lfs" in told:
        told["lfs"]["sha256"] = told["lfs"].pop("oid")
    return told


@contextmanager
def hub_with(files: Mapping[str, Any], **settings: Any) -> Iterator[FakeHub]:
    """Runs until the block ends, and is the hub of this process: of others HF_ENDPOINT says it."""
    hub = FakeHub(dict(files), **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url, 1)
    try:
        with mock.patch.multiple(constants, ENDPOINT=hub.url, HUGGINGFACE_CO_URL_TEMPLATE=template):
            yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
