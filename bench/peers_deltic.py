"""Deltic in this comparison: its engine as the offline API runs it, every step whole (schedule, forward,
draw, commit).

With no model it is the machine's worker: it measures the two roofs and loads nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.peers_worker import serve
from deltic import roofs
from deltic.bench.provenance import checked
from deltic.config import EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.models.qwen.weights import empty_weights
from deltic.ops.cpu.program import instruction_set
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner

SPARE_TOKENS = 64
"""More than a sequence decodes while the others of its batch are still being prefilled."""


class Machine:
    """The roofs: bytes and operations a second."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.n_threads: int = config["n_threads"]
        self.info: dict[str, Any] = {}

    def roofs(self) -> dict[str, Any]:
        return {
            "read": roofs.read_bandwidth(self.n_threads),
            "multiply_bf16": roofs.multiply_peak(self.n_threads),
            "multiply_int8": roofs.multiply_peak(self.n_threads, "int8"),
        }


class Deltic:
    """A checkpoint in an engine, in this process."""

    def __init__(self, config: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"quantize": config["quantize"]} if config.get("quantize") else {}
        if config.get("weights_cache"):  # which lets experts stay on the disk
            settings["weights_cache"] = Path(config["weights_cache"])
        longest = max(config["context"] + config["n_steps"], config["max_prefill"]) + SPARE_TOKENS
        n_pages = config["max_n"] * pages_for(config["context"] + config["n_steps"] + SPARE_TOKENS)
        engine_config = EngineConfig(
            model=config["model"],
            threads=config["n_threads"],
            max_num_seqs=config["max_n"],
            max_model_len=longest,
            n_pages=max(n_pages, pages_for(longest)),
            **settings,
        )
        self.runner = cast(Runner, build_runner(engine_config, lambda stage, done: None, Cpu()))
        self.engine = Engine(self.runner)
        plan = self.runner.plan
        embedding = empty_weights(plan.shape, plan.quantize, tied=False).embed.n_bytes
        self.info = {
            "config": dataclasses.asdict(engine_config) | {"model": Path(engine_config.model).parent.name},
            "instructions": instruction_set(),
            # What a step reads: an embedding that is not the head too gives a row or two.
            "weight_bytes": plan.weight_bytes - (0 if plan.shape.tie_word_embeddings else embedding),
            "start_s": self.engine.info.start_s,
        }
        self._ids = itertools.count()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        request = Request(id=str(next(self._ids)), prompt_ids=prompt, params=params)
        self.engine.add(request)
        return request.id

    def decode(self, prompts: list[list[int]], n_steps: int) -> dict[str, Any]:
        waiting = {self._add(prompt, n_steps + SPARE_TOKENS) for prompt in prompts}
        ids = set(waiting)
        while waiting:
            waiting -= {output.id for output in checked(self.engine.step()) if output.token_ids}
        times = []
        for _ in range(n_steps):
            start = time.perf_counter()
            outputs = self.engine.step()
            times.append(time.perf_counter() - start)
            checked(outputs, len(prompts))
        for request_id in ids:
            self.engine.abort(request_id)
        return {"step_s": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = time.perf_counter()
        request_id = self._add(prompt, 2)
        while not any(output.token_ids for output in checked(self.engine.step())):
            pass
        took = time.perf_counter() - start
        self.engine.abort(request_id)
        return {"seconds": took}

    def check(self, prompt: list[int], follow: list[int], file: str) -> dict[str, Any]:
        """Logits after the prompt, then after each of `follow`.

        The engine draws its own tokens, so each is the end of a prompt of one step: the same bits as decoding
        it.
        """
        found = []
        for n in range(len(follow) + 1):
            request_id = self._add(prompt + follow[:n], 2)
            checked(self.engine.step(), 1)  # the prompt takes one step
            found.append(self.runner.logits(1)[0].copy())
            self.engine.abort(request_id)
        np.stack(found).tofile(file)
        return {}


if __name__ == "__main__":
    serve(lambda config: Deltic(config) if config.get("model") else Machine(config))
