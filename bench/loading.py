"""Loading of quantised checkpoints, by format: `python -m bench.loading --formats bf16,qwen-fp8,gptq,Q4_K`.

A random checkpoint at a published shape, as a GGUF file (formats are ggml's types) or as a publisher's
safetensors (recipes of tests/tiny_quantised.py), is loaded in a process of its own, its files warm in the
system's cache. Prints seconds, bytes of the files a second, and how far the process grew beyond the packed
weights. Takes 8 GB of memory and of the temporary directory for the 0.8B shape.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from bench.peers_model import write_checkpoint
from deltic.machine import n_usable_cpus
from deltic.models.gguf import is_gguf
from deltic.models.loading import Host, stored_formats
from deltic.models.qwen.shape import ModelShape, published_shape
from deltic.models.qwen.weights import UNUSED, load_weights
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import write_gguf
from tests.tiny_quantised import RECIPES, quantise, set_config, write_shards

TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def peak_bytes(again: bool = False) -> int:
    """The most that this process had resident; again: count from now on."""
    if again:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def load(path: Path, n_threads: int) -> dict[str, float]:
    """What one load takes."""
    begin, before = time.perf_counter(), peak_bytes(again=True)
    shape = replace(ModelShape.from_directory(path), formats=stored_formats(path, UNUSED))
    weights, _ = load_weights(path, shape, store=Host(n_threads))
    seconds, peak = time.perf_counter() - begin, peak_bytes()
    files = [path] if is_gguf(path) else list(path.glob("*.safetensors"))
    return {
        "seconds": round(seconds, 2),
        "file_gb": round(sum(file.stat().st_size for file in files) / 1e9, 3),
        "packed_gb": round(weights.n_bytes / 1e9, 3),
        "beyond_gb": round((peak - before - weights.n_bytes) / 1e9, 3),
    }


def written(source: Path, target: Path, format: str) -> Path:
    """A checkpoint in a format, made of one in bfloat16. Raises ValueError for an unknown format."""
    if format == "bf16":
        return source
    target.mkdir()
    if format not in RECIPES:
        return write_gguf(source, target / "model.gguf", format)
    for file in (*TEXT, "config.json"):
        shutil.copy(source / file, target)
    tensors = {name: one for file in source.glob("*.safetensors") for name, one in load_file(file).items()}
    write_shards(target, quantise(tensors, RECIPES[format])[0])
    set_config(target, RECIPES[format].config)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-0.8b")
    parser.add_argument("--formats", default="bf16,qwen-fp8,awq-compressed,gptq,nvfp4,Q8_0,Q4_K,Q6_K,IQ4_XS")
    parser.add_argument("--threads", type=int, default=n_usable_cpus())
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # in the process of its own
    arguments = parser.parse_args()
    if arguments.load is not None:
        print(json.dumps(load(arguments.load, arguments.threads)))
        return
    with tempfile.TemporaryDirectory(prefix="deltic-loading-") as folder:
        source = Path(folder) / "bf16"
        write_checkpoint(source, published_shape(arguments.shape))
        for file in TEXT:
            shutil.copy(tiny_checkpoint("dense") / file, source)
        print(f"{arguments.shape}, {arguments.threads} threads; the fastest of {arguments.loads} loads")
        print(f"{'format':16} {'file GB':>8} {'packed GB':>10} {'s':>7} {'GB/s':>6} {'grew beyond, GB':>16}")
        for format in arguments.formats.split(","):
            path = written(source, Path(folder) / format, format)
            command = [sys.executable, "-m", "bench.loading", "--threads", str(arguments.threads), "--load", str(path)]
            runs = [json.loads(subprocess.check_output(command)) for _ in range(arguments.loads)]
            best = min(runs, key=lambda run: run["seconds"])
            print(
                f"{format:16} {best['file_gb']:8.3f} {best['packed_gb']:10.3f} {best['seconds']:7.2f} "
                f"{best['file_gb'] / best['seconds']:6.2f} {max(run['beyond_gb'] for run in runs):16.3f}",
                flush=True,
            )
            if path != source:
                shutil.rmtree(Path(folder) / format)


if __name__ == "__main__":
    main()
