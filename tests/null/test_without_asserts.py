"""`python -O` leaves asserts out, so none of them may be what refuses something from outside: `refused` runs in such a process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import zmq
from safetensors.numpy import save_file

from deltic.batch_lines import BadLine, read
from deltic.config import EngineConfig
from deltic.engine.messages import Shutdown
from deltic.host.launch import ModelLaunch
from deltic.host.process import ServedModel
from deltic.models.fields import CheckpointError
from deltic.models.gguf import open_gguf
from deltic.models.qwen.adapters import read_adapter
from deltic.models.qwen.published import PUBLISHED
from tests.fake_engine import FakeEngineClient, make_app, served
from tests.fakes import FakeRunner
from tests.null.test_loop import request
from tests.null.test_tiers import MODEL, STATE_BYTES, Device, Tiers, files, load, save

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
USER = {"model": "fake", "messages": HI}
BODIES: tuple[tuple[str, Any], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", USER | {"temperature": "hot"}),
    ("/v1/chat/completions", USER | {"n": 0}),
    ("/v1/chat/completions", USER | {"colour": 1}),
    ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "king", "content": "hi"}]}),
    ("/v1/chat/completions", USER | {"response_format": {"type": "json_schema"}}),
    ("/v1/chat/completions", USER | {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("/v1/completions", {"model": "fake", "prompt": [10**6]}),
    ("/v1/completions", {"model": "fake", "prompt": "x", "logprobs": 10**6}),
    ("/v1/responses", {"model": "fake", "input": [{"type": "item_reference", "id": "gone"}]}),
    ("/v1/responses", {"model": "fake", "input": [{"type": "message", "role": "user", "content": 7}]}),
    ("/v1/messages", USER | {"max_tokens": -1}),
    ("/v1/messages", {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "x"}]}]}),
    ("/api/chat", USER | {"options": {"top_p": 7}}),
    ("/api/generate", {"model": "fake", "prompt": ["x"]}),
    ("/tokenize", {"model": "fake", "prompt": 1}),
)
"""Of every API; each is a 400."""
MESSAGES = (
    b"\xc1",
    b"",
    msgspec.msgpack.encode([1]),
    msgspec.msgpack.encode({"type": "request", "id": 7, "params": {"n": "many"}}),
    msgspec.msgpack.encode({"type": "request", "id": "a", "prompt_ids": [1], "params": {"n": 1 << 40, "top_k": "x"}}),
)
"""Which the engine passes over."""


def refused() -> Iterator[tuple[str, object]]:
    """What is refused, and how."""
    with served(make_app(FakeEngineClient())) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for path, body in BODIES:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            yield f"{path} {content.decode()}", client.post(path, content=content, headers=JSON).status_code
        yield "good", client.post("/v1/chat/completions", json=USER).status_code
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _files(folder)
        yield "engine", _engine(folder)


def _files(folder: Path) -> Iterator[tuple[str, object]]:
    shape, file = PUBLISHED["qwen3.5-0.8b"], folder / "adapter_model.safetensors"
    module = "base_model.model.model.layers.3.self_attn.q_proj.lora_{}.weight"
    for ranks in ((8, 7), (8, 8)):
        rows = {module.format(x): np.zeros((r, 9), np.float32) for x, r in zip("AB", ranks, strict=True)}
        save_file(rows, file)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
        yield f"an adapter of ranks {ranks}", _error(read_adapter, folder, shape)
    for i, data in enumerate((b"GGUF", b"GGUF" + b"\xff" * 60, b"GGUF\3\0\0\0" + b"\1" + bytes(7) + b"\xff" * 8)):
        (folder / "x.gguf").write_bytes(data)
        yield f"GGUF {i}", _error(open_gguf, folder / "x.gguf")
    yield "a line of a batch", _error(read, b'{"custom_id": 1, "body": {}}', 0)
    device = Device()
    tiers = Tiers(device.page, device.state, None, STATE_BYTES, folder / "cache", 1 << 30, MODEL)
    saved = save(tiers, device, [("page", 0)])
    (page,) = (path for path in files(folder / "cache") if path.suffix == ".page")
    page.write_bytes(page.read_bytes()[:-1] + b"\1")
    yield "a page of the cache", [*saved, load(tiers, device, "page", 0), tiers.n_damaged]
    tiers.close(5.0)


def _error(run: Callable[..., object], *values: Any) -> str:
    try:
        run(*values)
    except (CheckpointError, BadLine):
        return "refused"
    return "taken"


def _engine(folder: Path) -> object:
    """How many messages it has passed over, and what it makes of those that follow."""
    with zmq.Context() as context:
        commands, events = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        ends = f"ipc://{folder}/commands", f"ipc://{folder}/events"
        events.bind(ends[1])
        model = ServedModel(ModelLaunch("m", EngineConfig(), *ends, None), context)
        model.build(lambda config, progress: FakeRunner(), is_fake=True)
        commands.connect(ends[0])
        bad = [request("ids"), request("top_k", top_k=-1), request("n", n=1000)]
        bad[0].prompt_ids = [10**6]
        for message in (*MESSAGES, *map(msgspec.msgpack.encode, (*bad, Shutdown()))):
            commands.send(message)
        until_s = time.monotonic() + 10
        while model.obey() and time.monotonic() < until_s:
            time.sleep(0.01)
        told = [(output.id, output.finish_reason) for output in model._outputs if output.index == 0]
        model.engine.close(1.0)
        model.close()
        for socket in (commands, events):
            socket.close(linger=0)
        return [*told, time.monotonic() < until_s]


def main() -> None:
    logging.disable()
    print(json.dumps({"asserts": __debug__} | dict(refused())))


def test_without_asserts_the_same_is_refused() -> None:
    command = [sys.executable, "-O", "-m", "tests.null.test_without_asserts"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("asserts") is False and found.pop("good") == 200
    assert found.pop("a page of the cache") == [True, False, 1]
    assert found.pop("engine") == [["ids", "error"], ["top_k", "error"], ["n", "error"], True]
    assert {name: how for name, how in found.items() if how not in (400, "refused")} == {}
    assert len(found) == len(BODIES) + 6


if __name__ == "__main__":
    main()
