"""Pictures, with random weights: `python -m bench.pictures [--device cuda] [--dummy SHAPE] [--out DIR]`.

Three things, each in rounds in which what is compared takes turns:

- the vision tower for square pictures of some sizes, beside the multiply peak of the same round and the tower
  of transformers in bfloat16 and, on a CPU, float32 (scaled-dot-product attention), with random weights of
  its own; with --env, on a CPU, beside those of llama.cpp (mtmd), from files in bfloat16 and float16;
- the time to the first token of a prompt with one picture that was never seen, of the same number of text
  tokens, of the picture behind another text (its rows are ready), and of the same prompt again;
- the time between the tokens of some sequences, alone and while large pictures arrive, with --max-itl-ms.

Multiplications count as two operations, of linears and attention. "peak" is what a CPU's inner tile
multiplies a second on operands in the first-level cache, and what the vendor's library does with squares of
8,192 on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from bench.ops import cpu_tower
from bench.peers_environment import PACKAGES, Worker, built_with, make_environment
from bench.peers_gguf import write_bf16
from bench.peers_model import write_checkpoint
from deltic.bench.load import percentile
from deltic.bench.provenance import checked, code, machine, now
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Picture, Request, SamplingParams
from deltic.machine import n_usable_cpus
from deltic.models.qwen.published import published_shape
from deltic.models.vision.cpu import TOKEN
from deltic.models.vision.shape import BLOCK, PATCH_SIZE, PATCH_WIDTH, VisionShape
from deltic.models.vision.weights import dummy_vision
from deltic.roofs import multiply_peak
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.server.chat.pictures import of_pixels
from tests.tiny_mmproj import write_mmproj
from tests.tiny_vision import random_tower


def published_tower(shape: VisionShape, dtype: torch.dtype, device: str) -> Any:
    """The tower of transformers, with random weights."""
    config = Qwen3_5VisionConfig(
        depth=shape.depth,
        hidden_size=shape.hidden_size,
        num_heads=shape.n_heads,
        intermediate_size=shape.intermediate_size,
        out_hidden_size=shape.out_hidden_size,
        num_position_embeddings=shape.table_side**2,
        attn_implementation="sdpa",
    )
    return Qwen3_5VisionModel(config).to(device, dtype).eval()


class CpuTowers:
    """Of this package, and those of transformers beside it."""

    device = "cpu"
    peers = {"transformers bf16": torch.bfloat16, "transformers fp32": torch.float32}  # noqa: RUF012

    def __init__(self, shape: VisionShape) -> None:
        self.shape, self.n_threads = shape, n_usable_cpus()
        self.weights = dummy_vision(shape)
        torch.set_num_threads(self.n_threads)

    def peak(self) -> float:
        return multiply_peak(self.n_threads)

    def wait(self) -> None:
        """Until all that was started is done."""

    def own(self, rows: int, patches: np.ndarray) -> Callable[[], None]:
        return cpu_tower(self.shape, self.weights, rows, patches, self.n_threads)


class GpuTowers:
    """The same on a GPU; from pixels that it has."""

    device = "cuda"
    peers = {"transformers bf16": torch.bfloat16}  # noqa: RUF012

    def __init__(self, shape: VisionShape) -> None:
        from deltic.ops.gpu.weight import DeviceStore

        self.shape, self.weights = shape, dummy_vision(shape, store=DeviceStore("cuda"))

    def peak(self) -> float:
        from deltic.ops.gpu.roofs import GpuRoofs

        return GpuRoofs.measured().multiply

    def wait(self) -> None:
        torch.cuda.synchronize()

    def own(self, rows: int, patches: np.ndarray) -> Callable[[], None]:
        from bench.gpu.tower import tower

        start = tower(self.shape, self.weights, rows * PATCH_SIZE)

        def run() -> None:
            start()
            self.wait()

        return run


@contextlib.contextmanager
def llama_towers(dummy: str, environment: Path, flash: dict[str, bool]) -> Iterator[dict[str, Callable[[int], float]]]:
    """Those of llama.cpp, behind the first layers of the text model: seconds of a picture by its side. flash
    gets, by tower and side, whether flash attention was on.
    """
    model = published_shape(dummy)
    shape = VisionShape.published(dummy, model.hidden_size)
    assert shape is not None
    sizes = {
        **{name: getattr(shape, name) for name in ("depth", "hidden_size", "intermediate_size", "out_hidden_size")},
        "num_heads": shape.n_heads,
        "num_position_embeddings": shape.table_side**2,
    }
    python, _ = make_environment(environment, PACKAGES["llama.cpp"], None)
    if "LLAVA_BUILD=OFF" in built_with(environment):
        raise SystemExit(
            f"--env {environment}: its llama.cpp has no vision tools; remove the directory, and it is made anew"
        )
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        write_checkpoint(files / "text", replace(model, vocab_size=4096, layer_types=model.layer_types[:4]))
        write_bf16(files / "text", files / "text.gguf")
        values = random_tower(sizes)
        given: dict[str, Any] = {
            "model": str(files / "text.gguf"),
            "towers": {
                f"llama.cpp {type.lower()}": str(write_mmproj(files / f"{type}.gguf", values, sizes, type))
                for type in ("BF16", "F16")
            },
            "n_threads": n_usable_cpus(),
        }
        worker = Worker("llama.cpp", python, "bench.pictures_llama", given, environment / "pictures.log")

        def timed(name: str, side: int) -> float:
            answer = worker.ask("encode", name=name, side=side)
            assert answer["tokens"] == (side // BLOCK) ** 2  # the picture as it is
            flash[f"{name}, {side}"] = answer["flash"]
            return float(answer["seconds"])

        try:
            yield {name: partial(timed, name) for name in given["towers"]}
        finally:
            worker.close()


def towers(
    of: CpuTowers | GpuTowers, sides: list[int], rounds: int, others: Mapping[str, Callable[[int], float]]
) -> Iterator[dict[str, Any]]:
    """The towers by the side of a picture, in pixels. others: seconds of a picture by its side, by name."""
    published = {name: published_tower(of.shape, dtype, of.device) for name, dtype in of.peers.items()}
    for side in sides:
        n, rows = (side // PATCH_SIZE) ** 2, side // PATCH_SIZE
        patches = np.random.default_rng(0).uniform(-1, 1, (n, PATCH_WIDTH)).astype(np.float32)
        own, seconds = of.own(rows, patches), {name: list[float]() for name in ("deltic", *of.peers, *others)}
        peaks = []
        for i in range(1 + rounds):
            peak = of.peak()
            begin = time.perf_counter()
            own()
            taken = {"deltic": time.perf_counter() - begin}
            for name, dtype in of.peers.items():
                given = torch.from_numpy(patches).to(of.device, dtype)
                grid = torch.tensor([[1, rows, rows]], device=of.device)
                with torch.inference_mode():
                    begin = time.perf_counter()
                    published[name](given, grid_thw=grid)
                    of.wait()
                    taken[name] = time.perf_counter() - begin
            taken |= {name: encode(side) for name, encode in others.items()}
            if i:  # the first warms up
                peaks.append(peak)
                for name, one in taken.items():
                    seconds[name].append(one)
        yield {
            "side": side,
            "tokens": n // TOKEN,
            "operations": of.shape.n_operations(n),
            "peak": peaks,
            "seconds": seconds,
        }


def noise(side: int, rng: np.random.Generator) -> Picture:
    return of_pixels(rng.integers(0, 256, (side, side, 3)).astype(np.uint8).tobytes(), side, side)


def prompt(name: str, text: list[int], shown: Picture | None, tail: list[int], n_output: int = 1) -> Request:
    """A text, perhaps a picture behind it, and a few tokens more."""
    ids, pictures = list(text), []
    if shown is not None:
        pictures.append(
            Picture(key=shown.key, rows=shown.rows, columns=shown.columns, pixels=shown.pixels, first=len(ids))
        )
        ids += [0] * shown.n_tokens
    params = SamplingParams(max_tokens=n_output, ignore_eos=True, temperature=0.0)
    return Request(id=name, prompt_ids=ids + tail, pictures=pictures, params=params)


def first_token_s(engine: Engine, request: Request) -> float:
    begin = time.perf_counter()
    engine.add(request)
    while engine.has_work():
        checked(engine.step())
    return time.perf_counter() - begin


def first_tokens(engine: Engine, sides: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds to the first token, by the side of a picture."""
    rng = np.random.default_rng(1)

    def words(n: int) -> list[int]:
        found: list[int] = rng.integers(1, 1000, n).tolist()
        return found

    for side in sides:
        n = (side // BLOCK) ** 2
        seconds: dict[str, list[float]] = {what: [] for what in ("text", "new", "known", "again")}
        tower = []
        for i in range(1 + rounds):
            shown, head, tail = noise(side, rng), words(20), words(12)
            assert engine.pictures is not None
            before = engine.pictures.tower_s
            asked = {
                "text": prompt("text", head + words(n), None, tail),
                "new": prompt("new", head, shown, tail),
                "known": prompt("known", words(20), shown, tail),
                "again": prompt("again", head, shown, words(12)),
            }
            for what, request in asked.items():
                taken = first_token_s(engine, request)
                if i:
                    seconds[what].append(taken)
            if i:
                tower.append(engine.pictures.tower_s - before)
        yield {"side": side, "tokens": n, "seconds": seconds, "tower_s": tower}


ALONE = 200
"""Tokens that the answers draw alone."""


def gaps(engine: Engine, n: int, side: int, n_pictures: int) -> dict[str, Any]:
    """Milliseconds between the tokens of n sequences, alone and while pictures are encoded."""
    rng = np.random.default_rng(2)
    for i in range(n):
        engine.add(prompt(f"talk {i}", rng.integers(1, 1000, 32).tolist(), None, [], n_output=100_000))
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    while engine.scheduler.n_running < n or engine.n_steps < n + 40:
        checked(engine.step())
    assert engine.pictures is not None
    for what in found:
        if what == "beside":
            for i in range(n_pictures):
                engine.add(prompt(f"see {i}", [1], noise(side, rng), [2]))
        last = time.perf_counter()
        is_over = {f"see {i}" for i in range(n_pictures)} if what == "beside" else set()
        while is_over or (what == "alone" and len(found[what]) < ALONE):
            outputs = checked(engine.step())
            if any(output.id == "talk 0" for output in outputs):
                time_now = time.perf_counter()
                found[what].append((time_now - last) * 1e3)
                last = time_now
            ended = {output.id for output in outputs if output.finish_reason is not None}
            if any(id.startswith("talk") for id in ended):
                raise RuntimeError("an answer ended while the others were measured")
            is_over -= ended
    for i in range(n):
        engine.abort(f"talk {i}")
    tower_s = engine.pictures.tower_s
    return {"sequences": n, "side": side, "pictures": n_pictures, "gaps_ms": found, "tower_s": tower_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dummy", default="qwen3.5-0.8b")
    parser.add_argument("--sides", default="256,512,1024", help="of pictures for the towers, in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--max-itl-ms", type=float, default=350.0)
    parser.add_argument("--large", type=int, default=2048, help="side of the pictures that arrive beside answers")
    parser.add_argument("--pictures", type=int, default=1, help="how many of them")
    parser.add_argument("--env", type=Path, help="environment of llama.cpp, as bench.peers makes one: beside it")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.env and given.device != "cpu":
        parser.error("--env: llama.cpp is measured beside --device cpu only")
    on_gpu, sides = given.device == "cuda", [int(side) for side in given.sides.split(",")]
    shape = VisionShape.published(given.dummy, published_shape(given.dummy).hidden_size)
    assert shape is not None
    result: dict[str, Any] = {"bench": "pictures", "shape": given.dummy, "towers": []}
    flash: dict[str, bool] = {}
    with contextlib.ExitStack() as stack:
        others = stack.enter_context(llama_towers(given.dummy, given.env, flash)) if given.env else {}
        for row in towers(GpuTowers(shape) if on_gpu else CpuTowers(shape), sides, given.rounds, others):
            result["towers"].append(row)
            own = percentile(row["seconds"]["deltic"], 50) or 1.0
            rate = row["operations"] / own
            told = {name: round((percentile(all_s, 50) or 0) / own, 2) for name, all_s in row["seconds"].items()}
            print(
                f"tower, {row['side']} x {row['side']}: {own * 1e3:.1f} ms, {rate / max(row['peak']):.0%} of peak; times as long: {told}",
                flush=True,
            )
    if given.env:
        result["llama.cpp"] = PACKAGES["llama.cpp"] | {"built_with": built_with(given.env)}
        result["flash"] = flash
    config = EngineConfig(
        dummy=given.dummy,
        max_model_len=8192,
        max_num_seqs=given.sequences + given.pictures,
        max_picture_tokens=(max(given.large, *sides) // BLOCK) ** 2,
        max_drafts=0,
    )
    device: Any = Cpu()
    if on_gpu:
        from deltic.runtime.gpu.device import Gpu

        device = Gpu()
    runner = build_runner(config, lambda stage, done: None, device)
    result["first_tokens"] = []
    for row in first_tokens(Engine(runner), sides, given.rounds):
        result["first_tokens"].append(row)
        shown_ms = {what: f"{1e3 * (percentile(all_s, 50) or 0):.1f}" for what, all_s in row["seconds"].items()}
        print(f"first token, ms, {row['tokens']} tokens: {shown_ms}", flush=True)
    engine = Engine(runner, given.max_itl_ms)
    engine.fit_cost()
    result["gaps"] = gaps(engine, given.sequences, given.large, given.pictures) | {"max_itl_ms": given.max_itl_ms}
    for what, all_ms in result["gaps"]["gaps_ms"].items():
        points = [f"{percentile(all_ms, q) or 0:.0f}" for q in (50, 95, 99, 100)]
        print(
            f"ms between tokens of {given.sequences}, {what}: {' / '.join(points)} (p50 / p95 / p99 / most)", flush=True
        )
    if on_gpu:
        result["device"] = torch.cuda.get_device_name()
    else:
        result |= {"threads": n_usable_cpus(), "instruction_set": cast(Runner, runner).program.instruction_set}
    result["torch"] = torch.__version__
    result |= {"machine": machine(), "code": code(), "date": now().isoformat(), "load": os.getloadavg()}
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"pictures-{'gpu-' if on_gpu else ''}{given.dummy}.json").write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
