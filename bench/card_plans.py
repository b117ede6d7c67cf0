"""Plans of `python -m bench.figures` for a machine with GPUs.

Minutes are those of an H200 and 16 cores: measured, or estimated where the comment of a plan says so. A first
step of a shape compiles its kernels, 60 to 80 s of 27B; steps of the same shape stand behind it.
"""

from __future__ import annotations

from bench.steps import ALL, Step

GPU_27B, GPU_35B = "--dummy qwen3.5-27b --memory-gb 125", "--dummy qwen3.5-35b-a3b --memory-gb 125"
GPU_SMALL = "--dummy qwen3.5-0.8b --memory-gb 60"
GPU = "python -m deltic bench gpu"
LOAD = "--n 1,4,16,64,128,256 --prompt 128 --output 256 --prefill 8192 --rounds 3 --out {out}"
FEW = "--n 1,4,16 --prompt 128 --output 128 --prefill 8192 --rounds 3 --out {out}"
CONTEXTS = "python -m bench.gpu.contexts"
INT4, UD = "int4-g128-bfloat16", "ud-q4_k_xl"
FILL = "python -m bench.gpu.fill --format ud-q4_k_xl --out {out}"
SEVERAL = "--prompt 128 --output 96 --prefill 8192 --rounds 3 --memory-gb 125 --out {out}"
FLASH = "--dummy qwen3.8-flash-next --format fp8"
FLASH_LONG = "--max-model-len 132096 --n 1,8,64 --output 48 --prefill 8192,131072 --rounds 3 --out {out}"
FLASH_CONTEXTS = "--n 1,8,64 --context 4096,32768 --max-model-len 132096 --out {out}"
NATIVE = "python -m bench.gpu.native --out {out}"
ABLATE = "python -m bench.gpu.ablate --dummy qwen3.5-27b"
T = "tests/gpu/test_gpu_"
SHORT = (
    *("attention_decode", "attention_prefill", "gdn_decode", "gdn_prefill", "linear", "moe", "formats", "moe_formats"),
    *(
        "engine",
        "quantised_engine",
        "kv_formats",
        "sample",
        "drafts",
        "draft_head",
        "many_rows",
        "lora",
        "vision",
        "pictures",
    ),
    *("index", "streams", "ngrams", "block", "block_drafter", "batch_slots", "waits", "verify", "embedder", "levers"),
    *("compile", "hopper", "speech", "vocoder", "parallel", "tensor_parallel", "all_reduce", "parts", "experts"),
)
"""Files of tests that run as another card, without their long tests."""
AS_CHIP = " ".join(f"{T}{name}.py" for name in SHORT)


def bench_gpu(name: str, minutes: float, given: str, kind: str = "", gpus: int = 1) -> Step:
    """One run of `deltic bench gpu`."""
    return Step(name, minutes, (f"{GPU} {given}",), gpus, kind)


def few_codes(name: str, minutes: float, format: str) -> Step:
    """27B with few rows of codes multiplied in CUDA C++ and by Triton, in turns."""
    flags = f"--levers hopper --rounds 3 --n 1,4,16 --output 128 --format {format} --memory-gb 60 --out {{out}}"
    return Step(name, minutes, (f"{ABLATE} {flags}",))


def outside(name: str, minutes: float, format: str) -> Step:
    """35B with experts outside: at the end of its minutes no other size of the slots is begun."""
    flags = "--gb 8,16,4,12 --n 1,4,16 --rounds 3 --skew 1,3 --answers 250 --minutes {minutes} --out {out}"
    return Step(name, minutes, (f"python -m bench.gpu.outside --dummy qwen3.6-35b-a3b --format {format} {flags}",))


def block_drafts(minutes: float, head: str, model: str, sizes: str) -> Step:
    """What a block drafter brings to a model in FP8, if no or four of five guesses are right."""
    flags = "--format fp8 --max-drafts 15 --max-model-len 4096 --accept 0,0.8 --prompt 128 --output 160 --rounds 3"
    command = (
        f"python -m bench.gpu.drafts --dummy qwen3.5-{model} --dummy-head {head} --n {sizes} {flags} --out {{out}}"
    )
    return Step(f"{head}-{model}", minutes, (command,))


def on_gpus(n: int) -> tuple[Step, ...]:
    """Models on so many GPUs together. Estimated from two GPUs' first run, 50 s a model."""
    of = {"27b": "--dummy qwen3.5-27b", "35b": "--dummy qwen3.5-35b-a3b", "122b": "--dummy qwen3.5-122b-a10b"}
    of |= {"397b": "--dummy qwen3.5-397b-a17b"} if n > 2 else {}
    chosen = [("27b-fp8", 1.2), ("27b", 1.2), ("35b-fp8", 1.2), ("122b-fp8", 1.6), ("397b-fp8", 2.2)]
    found = []
    for name, minutes in chosen:
        model, _, format = name.partition("-")
        if model in of:
            given = f"{of[model]} --tensor-parallel {n} --n 1,16,64,128 {SEVERAL}" + f" --format {format}" * bool(
                format
            )
            found.append(bench_gpu(f"{name}-on-{n}", minutes, given, gpus=n))
    return tuple(found)


def some_layers(n_layers: int) -> Step:
    """A part of 397B on two GPUs: two of these say what a layer takes."""
    given = f"--dummy qwen3.5-397b-a17b --format fp8 --layers {n_layers} --tensor-parallel 2 --n 1,64,128 {SEVERAL}"
    return bench_gpu(f"layers-{n_layers}", 1.2, given, gpus=2)


CARD_PLANS: dict[str, tuple[Step, ...]] = {
    "gpu-load": (
        bench_gpu("27b-fp8", 3, f"{GPU_27B} --format fp8 {LOAD}"),
        bench_gpu("35b-int4", 2, f"{GPU_35B} --format {INT4} {LOAD}"),
        bench_gpu("27b-int4", 3, f"{GPU_27B} --format {INT4} {LOAD}"),
        few_codes("few-codes-int4", 2.5, INT4),
        bench_gpu("35b-fp8", 2.2, f"{GPU_35B} --format fp8 {LOAD}"),
        Step(
            "contexts",
            1.4,
            tuple(
                f"{CONTEXTS} --dummy {model} --format fp8 --n 1,16 --context 1024,4096,32768 --out {{out}}"
                for model in ("qwen3.5-27b", "qwen3.5-35b-a3b")
            ),
        ),
        bench_gpu("27b", 3.5, f"{GPU_27B} {LOAD}"),
        bench_gpu("35b-a3b", 2.8, f"{GPU_35B} {LOAD}"),
        bench_gpu("0.8b", 1.5, f"{GPU_SMALL} {LOAD}"),
    ),
    "gpu-files": (
        bench_gpu("27b-ud", 1, f"--dummy qwen3.5-27b --format {UD} --memory-gb 60 {FEW}", "files"),
        bench_gpu("35b-ud", 0.7, f"--dummy qwen3.5-35b-a3b --format {UD} --memory-gb 60 {FEW}", "files"),
        bench_gpu("27b-q8_0", 1, f"--dummy qwen3.5-27b --format Q8_0 --memory-gb 60 {FEW}", "files"),
        bench_gpu("27b-fp8", 0.8, f"--dummy qwen3.5-27b --format fp8 --memory-gb 60 {FEW}", "files"),
        bench_gpu("35b-q8_0", 0.8, f"--dummy qwen3.5-35b-a3b --format Q8_0 --memory-gb 70 {FEW}", "files"),
        bench_gpu("35b-fp8", 0.8, f"--dummy qwen3.5-35b-a3b --format fp8 --memory-gb 70 {FEW}", "files"),
        few_codes("few-codes-ud", 3, UD),
        few_codes("few-codes-q8_0", 2.5, "Q8_0"),
        # a first start on four cores, without compiled kernels; then a card of 24 and one of 32 GB, filled
        Step(
            "first",
            1.7,
            (
                "env TRITON_CACHE_DIR={scratch}/no-kernels taskset -c {four} " + FILL + " --dummy qwen3.5-27b "
                "--as-chip sm_89 --memory-gb 24.1 --max-model-len 65536 --max-drafts 4",
            ),
        ),
        Step(
            "35b-filled",
            1,
            (
                f"{FILL} --dummy qwen3.5-35b-a3b --as-chip sm_86 --memory-gb 24.1 --kv-cache-dtype fp8 --max-model-len 131072",
            ),
        ),
        Step(
            "32-gb",
            1.5,
            (f"{FILL} --dummy qwen3.5-27b --as-chip sm_120 --max-model-len 131072 --max-drafts 4",),
        ),
    ),
    # estimates but for the first
    "gpu-outside": (outside("int4", 3, INT4), outside("fp8", 4.5, "fp8"), outside("ud", 3.5, UD)),
    # estimates; the whole model has 130 GB of weights on one GPU
    "gpu-streams": (
        bench_gpu(
            "layers",
            2.5,
            f"{FLASH} --layers 12 --memory-gb 125 {FLASH_LONG}",
        ),
        Step(
            "layers-contexts",
            1,
            (f"{CONTEXTS} {FLASH} --layers 12 --memory-gb 125 {FLASH_CONTEXTS}",),
        ),
        bench_gpu(
            "whole",
            3.5,
            f"{FLASH} --max-model-len 8448 --max-step-tokens 2048 --n 1,8,32 --output 48 --prefill 8192 --rounds 3 --out {{out}}",
        ),
        Step(
            "whole-contexts",
            3,
            (f"{CONTEXTS} {FLASH} --max-step-tokens 2048 --n 1,8 --context 4096,32768 --out {{out}}",),
        ),
        bench_gpu(
            "whole-on-2",
            4,
            f"{FLASH} --tensor-parallel 2 --memory-gb 135 {FLASH_LONG}",
            gpus=2,
        ),
        Step(
            "contexts-on-2",
            3,
            (f"{CONTEXTS} {FLASH} --tensor-parallel 2 --memory-gb 135 {FLASH_CONTEXTS}",),
            gpus=2,
        ),
        Step(
            "outside",
            6,
            (
                f"python -m bench.gpu.outside --dummy qwen3.8-flash-next --format {INT4} --gb 16,32 --n 1,8 --skew 1 "
                "--max-model-len 8448 --answers 50 --minutes {minutes} --out {out}",
            ),
        ),
    ),
    "gpu-block-drafts": (
        block_drafts(2.4, "dflash", "27b", "1,8,32"),
        block_drafts(1.2, "dflash", "35b-a3b", "1,8,32"),
        block_drafts(2.4, "dflash2", "27b", "1,8,32"),
        block_drafts(1.2, "dflash2", "35b-a3b", "1"),
        block_drafts(2.4, "dspark", "27b", "1,8,32"),
        block_drafts(1.2, "dspark", "35b-a3b", "1"),
    ),
    # on_gpus(8) is passed over on four GPUs, and so on
    "gpu-several": (
        Step(
            "sums",
            1.2,
            tuple(
                f"python -m bench.gpu.allreduce --gpus {{gpus}} --width {width} --rows 1,4,16,64,128,512,2048{more} --out {{out}}"
                for width, more in ((5120, ""), (5120, " --e4m3"), (4096, ""))
            ),
            gpus=ALL,
        ),
        *on_gpus(8),
        *on_gpus(4),
        *on_gpus(2),
        Step(
            "same-bits",
            3.5,
            (
                "python -m bench.gpu.same_bits --dummy qwen3.5-27b --format fp8 --tp-invariant 8 --max-model-len 2048 "
                "--on 1,2,4,8 --out {out}",
            ),
            gpus=ALL,
        ),
        bench_gpu(
            "peer-off",
            1.2,
            f"--dummy qwen3.5-27b --format fp8 --tensor-parallel 2 --lever peer=off --n 1,16,64,128 {SEVERAL}",
            gpus=2,
        ),
        some_layers(4),
        some_layers(8),
        # an estimate: three starts of 27B, whose kernels are compiled by then, and 27 rounds
        Step(
            "stages",
            4,
            ("python -m bench.stages --device cuda --dummy qwen3.5-27b --memory-gb 62 --rounds 7 --out {out}",),
            gpus=2,
        ),
        Step(
            "soak",
            3.5,
            (
                "python -m bench.soak --minutes 2 --kill-engine 0.8 --out {out} "
                '--serve-args "--dummy qwen3.5-0.8b --tensor-parallel {gpus}"',
            ),
            gpus=ALL,
        ),
        Step("host", 0.8, ("python -m bench.gpu.host --ranks {gpus} --n 1,64,512 --out {out}",), gpus=ALL),
    ),
    # estimates but for the first: 110 s of a machine that ran another script beside it
    "gpu-native": (
        Step("drafters", 3.5, (f"{NATIVE} --name drafters {T}block.py {T}block_drafter.py",)),
        Step("streams", 2.5, (f"{NATIVE} --name streams {T}index.py {T}streams.py {T}ngrams.py {T}engine.py "
                              "-k 'index or streams or ngrams or flash or pairs'",)),
        Step("experts", 3.5, (f"{NATIVE} --name experts --workers 4 {T}experts.py",)),
        Step("few-codes", 3, (f"{NATIVE} --name few-codes --workers 8 {T}few_codes.py {T}hopper.py",)),
        # whether tokens differ where kernels start early: 64 layers, six rounds each
        Step("early", 7, tuple(f"{ABLATE} --levers pdl --rounds 6 --n 4,16,64 --output 128 --format {format} --memory-gb 60 --out {{out}}"
                               for format in ("fp8", INT4))),
        Step("parts", 4, (f"{NATIVE} --name parts {T}parts.py {T}waits.py -k 'not two_gpus'",)),
        Step("two-gpus", 5, (f"{NATIVE} --name two-gpus {T}all_reduce.py {T}tensor_parallel.py {T}parts.py {T}waits.py "
                             "-k 'two_gpus or more_rows_than_run_at_once'",), gpus=2),
        *(Step(f"as-{chip}", 8, (f'{NATIVE} --name as-{chip} --as-chip {chip} --workers 8 -m "not long" {AS_CHIP}',))
          for chip in ("sm_86", "sm_89", "sm_120")),
    ),
    "gpu-more": (
        Step(
            "start",
            3,
            (
                "python -m deltic warmup",
                "python -m deltic warmup --dummy qwen3.5-0.8b",
                f"python -m deltic warmup {GPU_35B}",
                "python -m bench.start --starts 3 --out {out}",
                "python -m bench.start --dummy qwen3.5-0.8b --starts 3 --out {out}",
                f"python -m bench.start {GPU_35B} --starts 3 --out {{out}}",
            ),
        ),
        Step(
            "constrained",
            3.5,
            (
                f"python -m bench.gpu.constrained {GPU_SMALL} --n 16,64 --out {{out}}",
                f"python -m bench.gpu.constrained {GPU_27B} --n 16,64 --out {{out}}",
            ),
        ),
        Step("soak", 1.7, ("python -m bench.soak --minutes 1.2 --out {out}",)),
    ),
    "gpu-speech": (
        Step("1.7b", 3.5, ("python -m bench.gpu.speech --n 1,16 --out {out}",)),
        Step(
            "0.6b",
            2,
            (
                "python -m deltic bench speech --dummy qwen3-tts-0.6b --n 1,16,64 --poisson 40 --duration 12 --warmup 2 "
                "--no-plot --out {out}",
            ),
        ),
        Step(
            "soak",
            2,
            ('python -m bench.soak --speech --minutes 1.2 --serve-args "--dummy qwen3-tts-1.7b" --out {out}',),
        ),
    ),
}  # fmt: skip
