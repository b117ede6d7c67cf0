"""Hashes of everything that must not change when code only moves: `python -m tests.bits --device cpu > before.json`.

Tokens, log-probabilities, audio, tokens of pictures and loaded weights of tiny checkpoints and of the built-in model, in every format
of the device: `cpu`, `cuda`, or `interpreter` (the GPU's kernels without one). Bits may differ between processors, so a run is compared
with one of the same machine: `python -m tests.bits --device cpu --against before.json`, of another commit's worktree. `launches` needs no
GPU: it hashes what steps of a Hopper would start, with every argument, also without a lever, and of published models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

Builder = Callable[..., Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda", "interpreter", "launches"), default="cpu")
    parser.add_argument("--against", type=Path, help="an earlier run; 1 is returned unless all is equal")
    arguments = parser.parse_args()
    if arguments.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
        mend_interpreter()
    found: dict[str, str] = {}
    for name, content in launched() if arguments.device == "launches" else contents(arguments.device):
        found[name] = hashlib.sha256(content).hexdigest()[:16]
        print(f"{found[name]}  {name}", file=sys.stderr)
    print(json.dumps(found, indent=0))
    if arguments.against is None:
        return 0
    kept = json.loads(arguments.against.read_text())
    changed = sorted(name for name in found.keys() | kept.keys() if found.get(name) != kept.get(name))
    print(f"{len(found) - len(changed)} of {len(kept)} are equal", *changed, sep="\n", file=sys.stderr)
    return int(bool(changed))


def contents(device: str) -> Iterator[tuple[str, bytes]]:
    """Names, and the bytes that are hashed."""
    from deltic.config import EngineConfig
    from deltic.models.checkpoint import DEMO
    from tests.tiny import tiny_checkpoint

    formats = (None, "int8", "int4") if device == "cpu" else (None,)
    kinds = {kind: tiny_checkpoint(kind) for kind in ("dense", "moe", "next")}
    if device != "interpreter":
        kinds["built-in"] = DEMO
    sizes: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 512,
        "max_step_tokens": 128,
        "n_pages": 96,
        "memory_gb": None,
    }
    if device == "interpreter":
        sizes |= {"max_num_seqs": 4, "max_model_len": 256, "n_pages": 24}
    else:
        sizes["memory_gb"] = 2.0 if device == "cpu" else 8.0
    for kind, path in kinds.items():
        for quantize in formats:
            config = EngineConfig(model=str(path), quantize=quantize, threads=2 if device == "cpu" else None, **sizes)
            name = f"{kind} {quantize or '16 bits'}"
            runner = build_text(device, config)
            yield f"{name}: weights", b"".join(sorted(digests(runner.model)))
            for request, told in answers(runner, small=device == "interpreter").items():
                yield f"{name}: {request}", told
    if device == "cpu":
        yield from speech()
        yield from vision()
    if device == "cuda":
        yield from speech_on_gpu()


def launched() -> Iterator[tuple[str, bytes]]:
    """Names of models and settings, and all that their recordings start: kernels, grids, options, and what is known of arguments."""
    from dataclasses import replace

    import torch
    import triton

    from deltic.models.qwen.weights import dummy_formats
    from deltic.ops.gpu import hopper
    from deltic.ops.gpu.chip import HOPPER
    from deltic.ops.gpu.launch import Levers, launches
    from deltic.runtime.gpu.collect import collect
    from deltic.runtime.gpu.compile import compile_for
    from deltic.runtime.gpu.device import Gpu
    from tests.gpu.test_gpu_targets import _plan
    from tests.gpu.test_gpu_tensor_parallel import config_of
    from tests.planned import settled

    def known(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.stride()
        if isinstance(value, tuple):
            return [*map(known, value)]
        return value if isinstance(value, int | float | str | None) else type(value)

    def warmup(kernel: Any, *args: Any, grid: Any, **options: Any) -> Any:
        trace.append(
            (kernel.__name__, known(args), grid, sorted((name, known(value)) for name, value in options.items()))
        )
        return whole(kernel, *args, grid=grid, **options)

    compile_for(HOPPER)
    trace: list[Any] = []
    whole, triton.JITFunction.warmup = triton.JITFunction.warmup, warmup
    hopper.works, hopper.begin = lambda: True, trace.append  # nothing is compiled
    cases = {
        f"{kind} {format}": (_plan(kind), format, Levers())
        for kind in ("dense", "moe")
        for format in ("bf16", "fp8", "Q4_K")
    }
    cases["speech"] = _plan("custom_voice"), "bf16", Levers()
    for model in ("qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-35b-a3b"):
        cases |= {
            f"{model} {format}": (_plan(model), format, Levers()) for format in ("bf16", "fp8", "int4-g128-bfloat16")
        }
    for name in ("pdl", "split_k", "silu_epilogue", "hopper"):
        cases |= {
            f"{model} without {name}": (_plan(model), "fp8", Levers(**{name: False}))
            for model in ("moe", "qwen3.5-0.8b")
        }
    cases["drafts and pictures"] = _plan("dense", 3, True), "bf16", Levers()
    cases["adapters"] = _plan("moe", has_adapters=True), "bf16", Levers()
    for n in (1, 2):
        plan = settled(config_of("dense"), Gpu(n_gpus=n, n_cuts=2), 2 << 30)[1]
        cases[f"two parts on {n}"] = plan, "bf16", Levers(fused_sums=n == 1)
    for name, (plan, format, levers) in cases.items():
        trace.clear()
        launches.n = 0
        if format != "bf16":
            plan = replace(plan, shape=replace(plan.shape, formats=dummy_formats(plan.shape, format)))
        with levers.bound():
            collect(plan)
        yield name, repr((launches.n, trace)).encode()


def mend_interpreter() -> None:
    from tests.gpu.mended_interpreter import mend
    from tests.gpu.quick_interpreter import quicken

    mend()
    quicken()


def build_text(device: str, config: Any) -> Any:
    from deltic.runtime.build import build_runner
    from deltic.runtime.cpu.device import Cpu

    if device == "cpu":
        return build_runner(config, lambda stage, done: None, Cpu())
    from deltic.runtime.gpu.device import Gpu

    return build_runner(config, lambda stage, done: None, Gpu())


def answers(runner: Any, small: bool) -> dict[str, bytes]:
    """What every request of a small company is told, all of it."""
    from deltic.engine.engine import Engine
    from deltic.engine.messages import Branch, Request, SamplingParams

    rng = random.Random(7)
    n = 3 if small else 24
    sampled = {
        "temperature": 0.9,
        "seed": 3,
        "top_p": 0.95,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
    }
    asked: dict[str, tuple[int, dict[str, Any]]] = {
        "short": (5, {}),
        "long": (70 if small else 300, {}),
        "sampled": (33, sampled),
        "two of one prompt": (40, sampled | {"n": 2}),
        "a prompt's": (90, {"prompt_logprobs": 5}),
        "biased": (12, {"logit_bias": {65: 3.0, 66: -100.0}, "min_tokens": 2}),
    }
    engine = Engine(runner)
    for name, (length, params) in asked.items():
        ids = [rng.randrange(256) for _ in range(length)]
        given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": n, "logprobs": 10} | params
        engine.add(Request(id=name, prompt_ids=ids, params=SamplingParams(**given)))
    branches = [Branch([], [(0, 65), (0, 66)]), Branch([5, 6, 7], [(1, 6), (3, 65)])]
    params = SamplingParams(max_tokens=0, temperature=0.0, n=2)
    engine.add(Request(id="branches", prompt_ids=[*range(70)], params=params, branches=branches))
    told: dict[str, list[Any]] = {name: [] for name in (*asked, "branches")}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            prompt = [as_plain(entry) for entry in output.prompt_logprobs or ()]
            scores = [as_plain(entry) for entry in output.logprobs or ()]
            told[output.id].append((output.index, output.token_ids, output.finish_reason, scores, prompt))
    engine.check()
    return {name: repr(sorted(outputs, key=lambda output: output[0])).encode() for name, outputs in told.items()}


def as_plain(entry: Any) -> Any:
    return entry and (entry.token_id, entry.logprob.hex(), [(token, value.hex()) for token, value in entry.top])


def speech() -> Iterator[tuple[str, bytes]]:
    """Frames and audio of the golden cases, on a CPU."""
    from tests.cpu.test_speech_engine import CASES, FORMATS, Speaking, request_of

    for variant in ("custom_voice", "voice_design", "base"):
        cases = [case for case in CASES if case["variant"] == variant and not case["wide"]][:4]
        for quantize in FORMATS:
            speaking = Speaking(variant, quantize=quantize)
            speaking.run(*(request_of(speaking, case, str(i)) for i, case in enumerate(cases)))
            name = f"{variant} {quantize or '16 bits'}"
            yield f"{name}: weights", b"".join(sorted(digests(speaking.runner.model)))
            yield f"{name}: frames", repr(sorted(speaking.codes.items())).encode()
            yield f"{name}: audio", b"".join(audio for _, audio in sorted(speaking.audio.items()))


def vision() -> Iterator[tuple[str, bytes]]:
    """Tokens of a picture and a video, in pieces."""
    import numpy as np

    from deltic.models.vision.cpu import VisionForward, VisionTower, allocate_vision
    from deltic.models.vision.shape import VisionShape
    from deltic.models.vision.weights import dummy_vision
    from deltic.ops.arrays import zeros
    from tests.tiny_vision import TINY, vision_config

    grids = [(1, 4, 6), (2, 6, 34)]
    patches = [np.random.default_rng(0).uniform(-1, 1, (int(np.prod(grid)), 1536)) for grid in grids]
    for name, sizes in TINY.items():
        shape = VisionShape.from_config({"vision_config": vision_config(sizes)})
        buffers = allocate_vision(shape, 512, 3, 64, lambda _, size, dtype: zeros(size, dtype))
        for _ in VisionForward(VisionTower(shape, dummy_vision(shape), buffers), 2).run(patches, grids):
            pass
        yield f"vision, {name}", buffers.tokens.tobytes()


def speech_on_gpu() -> Iterator[tuple[str, bytes]]:
    """Frames and audio of the golden cases, on a GPU."""
    from tests.cpu.test_speech_engine import CASES, request_of
    from tests.gpu.test_gpu_speech import SpeakingGpu

    for variant in ("custom_voice", "voice_design", "base"):
        for wide in (False, True):
            cases = [case for case in CASES if case["variant"] == variant and case["wide"] == wide][:4]
            if not cases:
                continue
            speaking = SpeakingGpu(variant, wide)
            speaking.runner.vocoder = speaking.engine.stage._vocoder = speaking.vocoder
            speaking.run(*(request_of(speaking, case, str(i), max_tokens=25) for i, case in enumerate(cases)))
            name = f"{variant}{' wide' * wide} on a GPU"
            yield f"{name}: frames", repr(sorted(speaking.codes.items())).encode()
            yield f"{name}: audio", b"".join(audio for _, audio in sorted(speaking.audio.items()))


def digests(model: Any) -> set[bytes]:
    """Of every tensor that belongs to a model, in whatever objects it is kept."""
    import numpy as np

    found: set[bytes] = set()
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            if value.size > 1:
                found.add(hashlib.sha256(value.tobytes()).digest())
        elif hasattr(value, "data_ptr"):  # a tensor of torch's
            import torch

            if value.dim() and value.numel() > 1:
                raw = value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
                found.add(hashlib.sha256(raw).digest())
        elif isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, list | tuple):
            for part in value:
                walk(part)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                walk(getattr(value, field.name, None))

    walk(getattr(model, "weights", None))
    assert found, "no weights"
    return found


if __name__ == "__main__":
    sys.exit(main())
