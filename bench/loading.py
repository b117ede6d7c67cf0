"""Loading of quantised checkpoints, by format: `python -m bench.loading --formats bf16,qwen-fp8,gptq,Q4_K`.

A random checkpoint at a published shape, as a GGUF file (formats are ggml's types) or as a publisher's
safetensors (recipes of tests/tiny_quantised.py), or one that is there (a path), its files warm in the cache
of the system. For each format: the weights alone, in a process of its own, and whole starts of a server until
it is ready, in turns with the roof, which is to copy the file's bytes to new memory by as many threads. How
far the process grew beyond the packed weights contains mapped pages of the file, 256 MB at most. Takes 8 GB
of memory and of the temporary directory for the 0.8B shape.

    python -m bench.loading --device cuda --shape qwen3.5-35b-a3b --formats fp8       (35 GB)

`fp8` is Qwen's, of any shape, written at once and not from bfloat16. On a GPU the process's growth says
nothing and is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from bench.peers_model import write_checkpoint
from bench.start import start_once
from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.machine import n_usable_cpus
from deltic.models.files import stored_formats
from deltic.models.gguf import is_gguf
from deltic.models.loading import Host, Store
from deltic.models.qwen.published import published_shape
from deltic.models.qwen.shape import ModelShape
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


def files_of(path: Path) -> list[Path]:
    return [path] if is_gguf(path) else sorted(path.glob("*.safetensors"))


def load(path: Path, n_threads: int, device: str) -> dict[str, float | None]:
    """What one load takes."""
    store: Store = Host(n_threads)
    if device != "cpu":
        import torch

        from deltic.ops.gpu.weight import DeviceStore

        torch.zeros(1, device=device)  # the driver's own start
        store = DeviceStore(device)
    begin, before = time.perf_counter(), peak_bytes(again=True)
    shape = replace(ModelShape.from_directory(path), formats=stored_formats(path, UNUSED))
    weights, _ = load_weights(path, shape, store=store)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - begin, peak_bytes()
    return {
        "seconds": round(seconds, 3),
        "file_gb": round(sum(file.stat().st_size for file in files_of(path)) / 1e9, 3),
        "packed_gb": round(weights.n_bytes / 1e9, 3),
        "beyond_gb": round((peak - before - weights.n_bytes) / 1e9, 3) if device == "cpu" else None,
    }


def copy(path: Path, n_threads: int) -> float:
    """Seconds to copy the bytes of the files to new memory."""
    size, blocks = 1 << 22, [(file, at) for file in files_of(path) for at in range(0, file.stat().st_size, 1 << 22)]
    begin, memory = time.perf_counter(), np.zeros(size * len(blocks), np.uint8)

    def read(i: int) -> None:
        file, at = blocks[i]
        with file.open("rb", buffering=0) as opened:
            opened.seek(at)
            opened.readinto(memory[i * size : (i + 1) * size].data)

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(read, range(len(blocks))))
    return round(time.perf_counter() - begin, 3)


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


def measured(path: Path, format: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Loads, starts and copies of a checkpoint, in turns, after one load that warms its files."""
    threads, device = ["--threads", str(arguments.threads)], ["--device", arguments.device]
    command = [sys.executable, "-m", "bench.loading", *threads, *device]
    serve = [str(path), *device, *(threads if arguments.device == "cpu" else ())]
    row: dict[str, list[object]] = {"loads": [], "copies": [], "starts": [], "load_average": []}
    for nth in range(arguments.rounds + 1):
        loaded = json.loads(subprocess.check_output([*command, "--load", str(path)]))
        if nth:
            row["loads"].append(loaded)
            row["copies"].append(json.loads(subprocess.check_output([*command, "--copy", str(path)])))
            row["starts"].append(asyncio.run(start_once(serve)))
            row["load_average"].append(os.getloadavg()[0])
    return {"format": format, "file_gb": loaded["file_gb"], "packed_gb": loaded["packed_gb"], **row}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-0.8b")
    parser.add_argument("--formats", default="bf16,qwen-fp8,awq-compressed,gptq,nvfp4,Q8_0,Q4_K,Q6_K,IQ4_XS")
    parser.add_argument("--threads", type=int, default=n_usable_cpus())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the checkpoints here, or find them here")
    parser.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # in the process of its own
    parser.add_argument("--copy", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.load or arguments.copy:
        found: object
        if arguments.load:
            found = load(arguments.load, arguments.threads, arguments.device)
        else:
            found = copy(arguments.copy, arguments.threads)
        print(json.dumps(found))
        return
    made_by, rows = code(), []
    with tempfile.TemporaryDirectory(prefix="deltic-loading-") as temporary:
        folder = arguments.keep or Path(temporary)
        source, formats = folder / "bf16", arguments.formats.split(",")
        for name in {"fp8" if format == "fp8" else "bf16" for format in formats}:
            if not (folder / name).exists():
                write_checkpoint(folder / name, published_shape(arguments.shape), fp8=name == "fp8")
                for file in TEXT:
                    shutil.copy(tiny_checkpoint("dense") / file, folder / name)
        for format in formats:
            path, name = Path(format), Path(format).stem
            if not path.is_absolute():
                path = folder / format if (folder / format).exists() else written(source, folder / format, format)
                path = path / "model.gguf" if (path / "model.gguf").exists() else path
            rows.append(measured(path, name, arguments))
            print(json.dumps(rows[-1]), flush=True)
            if path.is_relative_to(temporary) and path != source:
                shutil.rmtree(folder / format)
    result = {
        "bench": "loading",
        "date": now().isoformat(timespec="seconds"),
        "machine": machine(),
        "code": made_by,
        "shape": arguments.shape,
        "threads": arguments.threads,
        "rows": rows,
    }
    if arguments.device != "cpu":
        import torch

        result["device"] = torch.cuda.get_device_name()
    report = runs_directory(arguments.out) / f"loading-{now():%H%M%S}.json"
    report.write_text(json.dumps(result, indent=1) + "\n")
    print(report)


if __name__ == "__main__":
    main()
