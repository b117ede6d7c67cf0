"""llama.cpp through its low-level interface, as llama-cpp-python packages it (runs in the environment of the
peers).

A context is made for each workload, with as many sequences as it has, so that no workload pays for another's
cache. Physical batches are 512 tokens. Decode steps ask for the logits of every sequence and feed given
tokens: no sampling is timed.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from typing import Any

import llama_cpp as ll
import numpy as np

from bench.peers_worker import serve

UBATCH = 512
FLASH = {False: ll.LLAMA_FLASH_ATTN_TYPE_DISABLED, True: ll.LLAMA_FLASH_ATTN_TYPE_ENABLED}


class Batch:
    """Tokens of one llama_decode call, filled once."""

    def __init__(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, sequence, whether its logits are wanted."""
        self.raw = ll.llama_batch_init(len(rows), 0, 1)
        self.raw.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.raw.token[i], self.raw.pos[i], self.raw.logits[i] = token, position, wanted
            self.raw.n_seq_id[i], self.raw.seq_id[i][0] = 1, sequence

    def close(self) -> None:
        ll.llama_batch_free(self.raw)


class Context:
    """A context with room for `n_seqs` sequences of `length` tokens."""

    def __init__(self, model: Any, n_threads: int, n_seqs: int, length: int, flash: bool, unified: bool) -> None:
        params = ll.llama_context_default_params()
        room = -(-length // 256) * 256
        params.n_ctx = room * n_seqs
        params.n_seq_max = params.n_outputs_max = n_seqs
        params.n_ubatch = UBATCH
        params.n_batch = max(UBATCH, n_seqs * length)
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH[flash]
        params.kv_unified = unified
        params.no_perf = True
        self.raw = ll.llama_init_from_model(model, params)
        if not self.raw:
            raise RuntimeError(f"llama.cpp made no context for {n_seqs} sequences of {length} tokens")

    def run(self, batch: Batch) -> float:
        """Seconds of one decode call, until its logits are there."""
        start = time.perf_counter()
        status = ll.llama_decode(self.raw, batch.raw)
        ll.llama_synchronize(self.raw)
        took = time.perf_counter() - start
        batch.close()
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return took

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds for all prompts in one call, logits at each one's end."""
        rows = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        return self.run(Batch(rows))

    def clear(self) -> None:
        """Forgets all tokens; what was allocated stays."""
        ll.llama_memory_clear(ll.llama_get_memory(self.raw), True)

    def close(self) -> None:
        ll.llama_free(self.raw)


class Llama:
    """A GGUF file, loaded."""

    def __init__(self, config: dict[str, Any]) -> None:
        ll.llama_backend_init()
        self.n_threads: int = config["n_threads"]
        self.model = ll.llama_model_load_from_file(config["model"].encode(), ll.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {config['model']}")
        self.n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.decode_options: dict[int, dict[str, bool]] = {}
        """By the number of sequences: what `tune` chose."""
        self.prefill_options: dict[str, bool] = {}
        self.info = {"n_ubatch": UBATCH, "system": ll.llama_print_system_info().decode()}

    def tune(self, prompts: list[list[int]], prompt: list[int] | None) -> dict[str, Any]:
        """Chooses the faster settings of flash attention and, for decodes of so many sequences, of one cache
        for all, by a quick trial of each; they hold from here on. Those of prefills only with a prompt.
        """
        decode: list[dict[str, Any]] = []
        for flash, unified in itertools.product((False, True), (False, True) if len(prompts) > 1 else (False,)):
            trial = {"flash": flash, "unified": unified}
            step_s = statistics.median(self._decode(prompts, 5, trial))
            decode.append({"step_s": round(step_s, 5), "options": trial})
        prefill: list[dict[str, Any]] = []
        for flash in (False, True) if prompt is not None else ():
            assert prompt is not None
            trial = {"flash": flash, "unified": False}
            seconds = min(self._prefill(prompt, trial) for _ in range(2))
            prefill.append({"seconds": round(seconds, 5), "options": trial})
        if prefill:
            self.prefill_options = min(prefill, key=lambda row: row["seconds"])["options"]
        options = {"decode": min(decode, key=lambda row: row["step_s"])["options"], "prefill": self.prefill_options}
        self.decode_options[len(prompts)] = options["decode"]
        return {"options": options, "tried": {"decode": decode, "prefill": prefill}}

    def _decode(self, prompts: list[list[int]], n_steps: int, options: dict[str, bool]) -> list[float]:
        length = len(prompts[0])
        context = Context(self.model, self.n_threads, len(prompts), length + n_steps, **options)
        context.prefill(prompts)
        times = []
        for step in range(n_steps):
            rows = [(prompt[step % length], length + step, i, True) for i, prompt in enumerate(prompts)]
            times.append(context.run(Batch(rows)))
        context.close()
        return times

    def _prefill(self, prompt: list[int], options: dict[str, bool]) -> float:
        context = Context(self.model, self.n_threads, 1, len(prompt), **options)
        context.prefill([prompt])  # touches what is new
        context.clear()
        took = context.prefill([prompt])
        context.close()
        return took

    def decode(self, prompts: list[list[int]], n_steps: int) -> dict[str, Any]:
        return {"step_s": self._decode(prompts, n_steps, self.decode_options[len(prompts)])}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": self._prefill(prompt, self.prefill_options)}

    def check(self, prompt: list[int], follow: list[int], file: str) -> dict[str, Any]:
        """Logits after the prompt, then after each of `follow`, decoded one at a time."""
        context = Context(
            self.model, self.n_threads, 1, len(prompt) + len(follow), **self.prefill_options | {"unified": False}
        )
        context.prefill([prompt])
        found = [self._logits(context)]
        for i, token in enumerate(follow):
            context.run(Batch([(token, len(prompt) + i, 0, True)]))
            found.append(self._logits(context))
        context.close()
        np.stack(found).tofile(file)
        return {}

    def _logits(self, context: Context) -> np.ndarray:
        """float32 [V]: those of the last token, copied."""
        pointer = ctypes.cast(ll.llama_get_logits_ith(context.raw, -1), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()


if __name__ == "__main__":
    serve(Llama)
