"""How long `/health` waits beside one large request, and what the server process keeps of it.

`python -m bench.large` starts `deltic serve` (further arguments are its own), asks each kind of large request
alone, and prints a table. On a machine that does nothing else the longest wait is what the event loop was
held up for.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MESSAGES = [{"role": "user", "content": "Tell a story."}]
BODY_CHARACTERS = 15_500_000


def requests(context: int) -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Path and body of each kind. context: tokens of the longest sequence."""
    half = context // 2
    ids = list(range(100, 1100))
    long: dict[str, Any] = {"ignore_eos": True, "max_tokens": half - 50}
    scores = ["message.output_text.logprobs"]
    response: dict[str, Any] = {
        "input": "Tell a story.",
        "include": scores,
        "top_logprobs": 20,
        "max_output_tokens": half,
    }
    ollama = {
        "model": "built-in",
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": False,
        "options": {"num_predict": half},
    }
    chat, text, tokens = "/v1/chat/completions", "/v1/completions", "/tokenize"
    return {
        "n = 16, 20 alternatives": (
            chat,
            lambda: {"messages": MESSAGES, "n": 16, "logprobs": True, "top_logprobs": 20, **long},
        ),
        "the same, a completion": (text, lambda: {"prompt": "Once", "n": 16, "logprobs": 20, **long}),
        "the same, streamed": (text, lambda: {"prompt": "Once", "n": 16, "logprobs": 20, "stream": True, **long}),
        "n = 16": (chat, lambda: {"messages": MESSAGES, "n": 16, **long}),
        "a prompt's 20 alternatives": (
            text,
            lambda: {"prompt": (ids * 40)[: context - 10], "prompt_logprobs": 20, "max_tokens": 1},
        ),
        "a prompt's, echoed": (
            text,
            lambda: {"prompt": (ids * 40)[: context - 10], "logprobs": 20, "echo": True, "max_tokens": 1},
        ),
        "a prompt's, streamed": (
            text,
            lambda: {
                "prompt": (ids * 40)[: context - 10],
                "logprobs": 20,
                "echo": True,
                "max_tokens": 1,
                "stream": True,
            },
        ),
        "a response's": ("/v1/responses", lambda: response),
        "a response's, streamed": ("/v1/responses", lambda: response | {"stream": True}),
        "Ollama's": ("/api/chat", lambda: ollama),
        "32 prompts": (text, lambda: {"prompt": [[i, *(ids * 40)[:half]] for i in range(100, 132)], "max_tokens": 16}),
        "/tokenize of words": (tokens, lambda: {"prompt": "one two " * (BODY_CHARACTERS // 8)}),
        "/tokenize of digits": (tokens, lambda: {"prompt": "1234567890" * (BODY_CHARACTERS // 10)}),
        "/tokenize with texts": (
            tokens,
            lambda: {"prompt": "one two " * (BODY_CHARACTERS // 8), "return_token_strs": True},
        ),
        "/tokenize of Chinese": (
            tokens,
            lambda: {"prompt": "".join(chr(0x4E00 + i * 7 % 20_000) for i in range(BODY_CHARACTERS // 6))},
        ),
        "/tokenize of one letter": (tokens, lambda: {"prompt": "a" * BODY_CHARACTERS}),
        "/tokenize of spaces": (tokens, lambda: {"prompt": " " * BODY_CHARACTERS}),
        "/detokenize": ("/detokenize", lambda: {"tokens": [1000 + i % 500 for i in range(490_000)]}),
        "a chat that is too long": (
            chat,
            lambda: {"messages": [{"role": "user", "content": "one two " * (BODY_CHARACTERS // 8)}]},
        ),
        "many messages": (chat, lambda: {"messages": MESSAGES * 95_000}),
    }


class Pulse(threading.Thread):
    """Asks /health again and again, in a process of its own; `longest_ms` since it was last asked."""

    PROGRAM = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1])
while True:
    began_s = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    print((time.perf_counter() - began_s) * 1e3, flush=True)
    time.sleep(0.002)
"""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, address], stdout=subprocess.PIPE, text=True
        )
        self.waits_ms: list[float] = []
        self.start()

    def run(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.waits_ms.append(float(line))

    def longest_ms(self) -> float:
        waits, self.waits_ms = self.waits_ms, []
        return max(waits, default=0.0)


def memory_mb(address: str) -> float:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/metrics")
    found = re.search(r"^process_resident_memory_bytes (\S+)", connection.getresponse().read().decode(), re.MULTILINE)
    assert found
    return float(found.group(1)) / 1e6


def main(arguments: list[str]) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "deltic", "serve", "--port", "0", *arguments], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr
    address, log = "", []
    for line in server.stderr:
        log.append(line)
        if " ready on " in line:
            address = line.partition("http://")[2].split()[0]
            break
    if not address:
        sys.exit("".join(log))
    threading.Thread(target=lambda: list(server.stderr or ()), daemon=True).start()
    try:
        measure(address)
    finally:
        server.terminate()
        server.wait(30)


def measure(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("GET", "/v1/models")
    context = json.loads(connection.getresponse().read())["data"][0]["max_model_len"]
    pulse = Pulse(address)
    time.sleep(1)
    print(f"{'request':28} {'status':>6} {'sent MB':>8} {'got MB':>8} {'took s':>8} {'wait ms':>8} {'kept MB':>8}")
    print(f"{'(none)':28} {'':6} {'':8} {'':8} {1.0:8.2f} {pulse.longest_ms():8.1f}")
    for name, (path, make) in requests(context).items():
        body = json.dumps(make(), ensure_ascii=False).encode()
        before_mb = memory_mb(address)
        pulse.longest_ms()
        began_s = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        n_got = 0
        while piece := response.read(1 << 20):
            n_got += len(piece)
        took_s = time.perf_counter() - began_s
        time.sleep(0.5)
        longest_ms = pulse.longest_ms()
        time.sleep(1.0)
        kept_mb = memory_mb(address) - before_mb
        sizes = f"{len(body) / 1e6:8.1f} {n_got / 1e6:8.1f}"
        print(f"{name:28} {response.status:6} {sizes} {took_s:8.2f} {longest_ms:8.1f} {kept_mb:8.0f}", flush=True)
    pulse.process.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])
