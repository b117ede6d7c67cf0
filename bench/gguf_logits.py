"""Logits of tiny GGUF files in Deltic and in llama.cpp, beside the float32 oracle.

    python -m bench.gguf_logits --types BF16,Q8_0,Q4_K

Needs llama-cpp-python beside the test extra. Each file is read by both engines; the oracle (tests/reference)
runs the weights that the file means in float32. Printed is the error of the logits after 97 tokens,
|a - b| / |b|. Value heads in tiled order, experts, and the interleaving of Qwen3-Next are among what both
must read alike.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import torch

from tests.cpu.test_formats import loaded, lowest, mixed, runner
from tests.cpu.test_purity import prompt, run
from tests.plain import plain
from tests.reference.model import forward
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import write_gguf

KINDS = ("dense", "moe", "next")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="BF16,Q8_0,Q4_0,Q4_K,Q5_K,Q6_K,mixed")
    types = parser.parse_args().types.split(",")
    ids = prompt(1, 97)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            for type in types:
                source = tiny_checkpoint(kind, layout="flat", experts="fused")
                # llama.cpp wants merges; the tiny tokenizer has none
                path = write_gguf(
                    source,
                    Path(folder) / f"{kind}-{type}.gguf",
                    {"mixed": mixed, "lowest": lowest}.get(type, type),
                    change=lambda writer: writer.add_token_merges(["a b"]),
                )
                weights, shape = loaded(path)
                with torch.no_grad():
                    oracle = forward(plain(weights), shape, ids, chunked=True)[-1].numpy()
                ours, theirs = run(runner(path), ids, n_tokens=1)[1][0], llama_logits(path, ids)
                print(
                    f"{kind:5} {type:5}: Deltic {error(ours, oracle):.4f}, llama.cpp {error(theirs, oracle):.4f}, "
                    f"apart {error(ours, theirs):.4f}",
                    flush=True,
                )


def llama_logits(path: Path, ids: list[int]) -> np.ndarray:
    model = llama_cpp.Llama(str(path), n_ctx=256, n_batch=128, n_threads=2, verbose=False, logits_all=True)
    model.eval(ids)
    return np.array(model.scores[len(ids) - 1])


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    main()
