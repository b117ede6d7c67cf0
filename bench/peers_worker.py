"""The child's side of the comparison: one engine with its model loaded, asked through JSON lines on stdin and
stdout.

    {"do": "decode", "prompts": [[id, ...], ...], "n_steps": 24}   ->  {"step_s": [seconds, ...]}
    {"do": "prefill", "prompt": [id, ...]}                         ->  {"seconds": s}
    {"do": "check", "prompt": ..., "follow": [id, ...], "file": f} ->  {}
    {"do": "tune", "prompts": [...], "prompt": [...] or null}      ->  {"options": ..., "tried": ...}
    {"do": "roofs"}                                                ->  what the machine can do

The file of a check gets float32 [1 + follow, V]: the logits after the prompt and after each token that
follows. Only llama.cpp is tuned, and only the machine's worker knows roofs.

The first line it writes is {"ready": {...}}: what it is and how it is set. Standard library only: it runs in
two environments.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]

PR_SET_PDEATHSIG, SIGKILL = 1, 9


def serve(build: Callable[[dict[str, Any]], Any]) -> None:
    """Builds the engine from the JSON in the last argument, then answers until stdin ends.

    `build` returns an object with `info` and a method for each thing it can be asked. What a library prints
    goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":  # a stopped child would outlive a driver that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)

    def send(answer: Answer) -> None:
        out.write(json.dumps(answer, default=str) + "\n")
        out.flush()

    try:
        engine = build(json.loads(sys.argv[-1]))
        send({"ready": engine.info})
        for line in sys.stdin:
            request = json.loads(line)
            send(getattr(engine, request.pop("do"))(**request))
    except Exception as error:
        traceback.print_exc()
        send({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
