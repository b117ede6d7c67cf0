"""transformers in bfloat16 with its cache (runs in the environment of the peers).

The batch is one tensor of equally long prompts; decode steps feed given tokens: no sampling is timed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.peers_worker import serve


class Transformers:
    """A checkpoint, loaded."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["n_threads"])
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.bfloat16).eval()
        attention = self.model.config._attn_implementation
        self.info = {"attention": attention, "torch_threads": torch.get_num_threads()}

    def _forward(self, ids: list[list[int]], cache: Any = None) -> Any:
        """ids: [n, tokens]. The logits of each sequence's last token only."""
        return self.model(input_ids=torch.tensor(ids), past_key_values=cache, use_cache=True, logits_to_keep=1)

    def decode(self, prompts: list[list[int]], n_steps: int) -> dict[str, Any]:
        cache = self._forward(prompts).past_key_values
        times = []
        for step in range(n_steps):
            ids = [[prompt[step % len(prompt)]] for prompt in prompts]
            start = time.perf_counter()
            self._forward(ids, cache)
            times.append(time.perf_counter() - start)
        return {"step_s": times}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = time.perf_counter()
        self._forward([prompt])
        return {"seconds": time.perf_counter() - start}

    def check(self, prompt: list[int], follow: list[int], file: str) -> dict[str, Any]:
        """Logits after the prompt, then after each of `follow`, decoded one at a time."""
        out = self._forward([prompt])
        found = [out.logits[0, -1]]
        for token in follow:
            out = self._forward([[token]], out.past_key_values)
            found.append(out.logits[0, -1])
        torch.stack(found).float().numpy().tofile(file)
        return {}


if __name__ == "__main__":
    serve(Transformers)
