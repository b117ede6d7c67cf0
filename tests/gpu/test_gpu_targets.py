"""Cards that are not here: every kernel that the steps of the models start is compiled for them, fits, and keeps to its registers.

The steps are walked as `deltic warmup` walks them, so a new kernel is covered when a step starts it. Nothing runs. By default one
variant of each kernel of two tiny models is compiled for a few chips; with TEST_TARGETS set (`make targets`) all of them, of published
models too, for all chips. Compiled here is not measured there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton

from deltic.machine import n_usable_cpus
from deltic.models.qwen.weights import dummy_formats
from deltic.ops.contract import KernelError
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.geometry import AttentionHeads
from deltic.ops.gpu.attention_prefill import FlashTile, flash_tile
from deltic.ops.gpu.chip import CHIPS, HOPPER, KIB, Chip, chip, described, emulate
from deltic.ops.gpu.fp8 import Wide
from deltic.ops.gpu.gdn_prefill import _limit, _scan_stages
from deltic.ops.gpu.linear import Narrow, narrow_config, wide_config
from deltic.ops.gpu.moe_prefill import MoePrefillTiles, moe_prefill_tiles
from tests.planned import settled

pytestmark = pytest.mark.long
HAS_AMD = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Triton 3.6 fails on five kernels in a pass of its own for AMD."""
IS_FULL = "TEST_TARGETS" in os.environ
NAMES = [
    name for name in (CHIPS if IS_FULL else ("sm_80", "sm_90", "sm_120", "gfx942")) if CHIPS[name].is_nvidia or HAS_AMD
]
HERE = " here"
"""Behind the name of a chip: as it is emulated on a Hopper."""
EMULATED = [f"{name}{HERE}" for name in (("sm_86", "sm_89", "sm_120") if IS_FULL else ("sm_86",))]
TINY = ("dense", "moe", "flash")
FEW_FORMATS = ("int4", "fp8")
IN_FORMATS = ("qwen3.5-0.8b", "qwen3.5-35b-a3b")
"""Models that are walked in every format of quantised weights, too."""
MODELS = (
    *TINY,
    "next",
    "custom_voice",
    "qwen3.5-0.8b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "qwen3.8-flash-next",
    "qwen3-tts-1.7b",
)
SEEING = ("dense", "flash", "qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b")
TEXTS = ("dense", "moe", "next", "qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-35b-a3b")
STREAMS = ("flash", "qwen3.8-flash-next")
"""Models of several residual streams, whose keys an index chooses, also where they are quantised."""
WITH_DRAFTS = {"_begin_decode_kernel", "_gdn_drafts_kernel", "_attention_decode_kernel", "scan"}
WITH_DRAFTS |= {"_begin_guess_kernel", "_go_on_kernel", "_follow_kernel", "_pair_kernel", "_keys_decode_kernel"}
WITH_DRAFTS |= {"_prepare_kernel"}
"""Kernels that are others, or of another variant, where a decode may have drafts, and behind it a draft head."""
OF_PICTURES = {"_patches_kernel", "_positions_kernel", "_layer_norm_kernel", "_keys_kernel", "_attention_kernel"}
WITH_PICTURES = OF_PICTURES | {"_embed_kernel", "_prepare_kernel", "_begin_decode_kernel", "_attention_decode_kernel"}
WITH_PICTURES |= {"_wide_kernel"}
"""The same where prompts may have pictures."""
OF_KEYS = {"_attention_decode_kernel", "_keys_decode_kernel", "_prepare_kernel", "_flash_kernel", "_chosen_kernel"}
"""Those that write or read keys and values, of another variant for each format."""
KV_DTYPES = ("fp8", "turboquant_k8v4")
WITH_ADAPTERS = {
    "_shrink_kernel",
    "_expand_kernel",
    "_gather_kernel",
    "_shrink_experts_kernel",
    "_expand_experts_kernel",
}
WITH_ADAPTERS |= {"silu_lines_kernel", "prefill_silu_kernel", "gate_up_kernel", "prefill_gate_up_kernel"}
"""The same where rows may have adapters, of a mixture."""
OF_BLOCKS = {
    "_begin_block_kernel",
    "_block_attention_kernel",
    "_merge_kernel",
    "_block_conv_kernel",
    "_scale_rows_kernel",
}
OF_BLOCKS |= {
    "_keys_of_layers_kernel",
    "_bound_kernel",
    "_candidates_kernel",
    "_rule_out_kernel",
    "_next_guess_kernel",
    "_add_scores_kernel",
}
"""Those of block drafters, of two kinds."""
WITH_SLOTS = {"keep_kernel", "fetch_kernel", "lack_kernel", "gate_up_kernel", "down_kernel"}
WITH_SLOTS |= {"prefill_gate_up_kernel", "prefill_down_kernel"}
"""The same where a mixture's experts are outside the GPU."""
REGISTERS = {"cuda": 255, "hip": 512}
SPILLED_BYTES = 128
"""Of a thread, on an NVIDIA GPU: what a compiler may leave over, and less than the operand of any product. Triton 3.9 leaves 72 of
`gdn_keys`, which keeps to 64 registers on Hopper so that four programs fit, and 88 of a decode's attention with fp8 pages (0 in 3.6),
which keeps to 168 for three. `_gdn_drafts_kernel` reads a token ahead with up to 128, and is 15 % faster than without (H200)."""


@dataclass(frozen=True)
class Compiled:
    """A kernel, and what a thread and a program of it take."""

    name: str
    seconds: float
    error: str = ""
    shared: int = 0
    registers: int = 0
    spilled: int = 0


def chip_of(name: str) -> Chip:
    return CHIPS[name.removesuffix(HERE)]


def run(names: list[str], cache: Path) -> Any:
    """What this module says as a program, with a cache of its own. In this process Triton interprets."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_gpu_targets", *names], capture_output=True, text=True,
        cwd=Path(__file__).parents[2], env=environment | {"TRITON_CACHE_DIR": str(cache / names[0].replace(" ", "-"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Compiled]]:
    """By chip: of one process or, when all are asked for, of one for each chip and as many at once as there are CPUs."""
    cache = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(n_usable_cpus()) as pool:
        processes = [[name] for name in NAMES] if IS_FULL else [NAMES]
        parts = pool.map(lambda names: run(names, cache), [*processes, *([name] for name in EMULATED)])
    found = {name: [Compiled(**kernel) for kernel in kernels] for part in parts for name, kernels in part.items()}
    if IS_FULL:
        print(
            "\n| chip | kernels | seconds | shared memory | of | registers | spilled |\n|---|---|---|---|---|---|---|"
        )
        for name, kernels in found.items():
            most = [max(getattr(kernel, field) for kernel in kernels) for field in ("shared", "registers", "spilled")]
            seconds = sum(kernel.seconds for kernel in kernels)
            print(
                f"| {name} | {len(kernels)} | {seconds:.0f} | {most[0]} | {chip_of(name).shared_bytes} | {most[1]} | {most[2]} |"
            )
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, *EMULATED])
def test_every_kernel_compiles_and_fits(compiled: dict[str, list[Compiled]], name: str) -> None:
    kernels, chip = compiled[name], chip_of(name)
    assert len({kernel.name for kernel in kernels}) > 25
    assert not [kernel for kernel in kernels if kernel.error]
    assert not [kernel for kernel in kernels if kernel.shared > chip.shared_bytes]
    assert not [kernel for kernel in kernels if kernel.registers > REGISTERS[chip.target.backend]]
    if chip.is_nvidia:
        assert not [kernel for kernel in kernels if kernel.spilled > SPILLED_BYTES]


def test_rounding_changes_no_sum(tmp_path: Path) -> None:
    """Mixers that leave rows in e4m3, too, take their sums in the layouts of those that do not, and so in their order."""
    sums = run(["sums"], tmp_path)
    assert sums["fp8"] == sums["bf16"] and all(len(of_kernel[0]) > 3 for of_kernel in sums["bf16"].values())


def test_hopper_runs_what_was_measured_on_it() -> None:
    """Limits of other chips change nothing where all figures come from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(described, "chip", HOPPER)
        assert flash_tile(AttentionHeads(24, 4, 256, True)) == FlashTile(2, 8, 2)
        assert flash_tile(AttentionHeads(12, 4, 128, True)) == FlashTile(1, 4, 2)
        assert moe_prefill_tiles() == MoePrefillTiles(up_stages=4, down_warps=4, down_stages=3, router_warps=4)
        assert _limit(64) == {"maxnreg": 64} and _scan_stages(32, 128) == _scan_stages(32, 64) == 3
        assert narrow_config(1, 16480, 5120, 1) == Narrow(64, 128, 4, 5)
        assert narrow_config(16, 5120, 2176, 8) == Narrow(64, 128, 4, 5)
        assert narrow_config(128, 34816, 5120, 1) == Narrow(128, 64, 8, 3)
        assert wide_config(8192, 16480) == Wide(128, 256, 8, 3) and wide_config(512, 5120) == Wide(128, 128, 8, 4)


@pytest.mark.parametrize("name", list(CHIPS))
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_fit(name: str, stages: int) -> None:
    """Tiles that are on their way, and the one that is multiplied where that is read in shared memory."""
    chip, tile = CHIPS[name], 48 * KIB
    n = chip.stages(tile, stages, beside=KIB)
    held = n if chip.multiplies_from_shared else n - 1
    assert 1 <= n <= stages and held * tile + KIB <= chip.shared_bytes
    assert n == stages or (held + 1) * tile + KIB > chip.shared_bytes


def test_what_a_chip_has() -> None:
    assert [name for name, chip in CHIPS.items() if chip.has_hopper_copies] == ["sm_90", "sm_100", "sm_120"]
    assert [name for name, chip in CHIPS.items() if chip.multiplies_from_shared] == ["sm_90", "sm_100"]
    assert [name for name, chip in CHIPS.items() if not chip.is_nvidia] == ["gfx942", "gfx950", "gfx1100"]


# What runs in the other processes.


@cache
def _plan(
    model: str,
    max_drafts: int = 0,
    has_pictures: bool = False,
    has_adapters: bool = False,
    drafter: str = "",
    expert_gb: float | None = None,
) -> Any:
    """A tiny model, perhaps with a block drafter of this kind, or a published shape with all the memory it may want."""
    from deltic.config import EngineConfig
    from deltic.runtime.gpu.device import Gpu
    from tests.tiny import tiny_checkpoint
    from tests.tiny_drafter import tiny_drafter
    from tests.tiny_speech import tiny_speech

    if model.startswith("qwen"):
        config, free_bytes = EngineConfig(model="", dummy=model, max_drafts=max_drafts), 190 << 30
        config = replace(config, max_picture_tokens=16384 if has_pictures else None)
    else:
        path = (
            tiny_speech(model, wide=True)
            if model == "custom_voice"
            else tiny_checkpoint(model, has_mtp=max_drafts > 0, has_tower=has_pictures)
        )
        sizes: dict[str, Any] = dict(
            max_num_seqs=9, max_model_len=1024, max_step_tokens=256, n_pages=20, cache_host_gb=0.0
        )
        config, free_bytes = EngineConfig(model=str(path), **sizes), 2 << 30
        if model != "custom_voice":
            config = replace(config, n_checkpoints=2, max_drafts=max_drafts)
            config = replace(config, max_picture_tokens=128 if has_pictures else 0)
    if drafter:
        config = replace(config, draft_model=str(tiny_drafter(drafter)))
    if has_adapters:
        config = replace(config, allow_lora_loading=True, max_loras=4, lora_gb=0.01)
    return settled(replace(config, expert_memory=expert_gb), Gpu(), free_bytes)[1]


def _jobs(
    model: str,
    format: str = "bf16",
    max_drafts: int = 0,
    has_pictures: bool = False,
    kv_dtype: str = "bf16",
    has_adapters: bool = False,
    drafter: str = "",
    expert_gb: float | None = None,
) -> list[Any]:
    """What the steps of a model start. Nothing, for a format that is refused."""
    from deltic.runtime.gpu.collect import collect

    plan = _plan(model, max_drafts, has_pictures, has_adapters, drafter, expert_gb)
    if format != "bf16":
        plan = replace(plan, shape=replace(plan.shape, formats=dummy_formats(plan.shape, format)))
    plan = plan if kv_dtype == "bf16" else replace(plan, shape=replace(plan.shape, kv_cache_dtype=kv_dtype))
    try:
        return collect(plan)
    except KernelError:
        assert format != "bf16"
        return []


def _sums_of_ranks(meet_in_host: bool) -> list[Any]:
    """What several GPUs start between two layers. meet_in_host: in the host's memory, too."""
    import torch

    from deltic.ops.gpu import all_reduce as sums
    from deltic.ops.gpu.fp8 import fp8_rows
    from deltic.ops.gpu.launch import allocate_on
    from deltic.runtime.gpu.compile import collecting

    def floats(*size: int) -> torch.Tensor:
        return torch.empty(size, device="meta")

    codes = fp8_rows("rows", 16, 5120, allocate_on("meta")).rounded_by(128)
    with collecting() as jobs:
        for n, is_in_host in product((2, 8), (False, True)[: 1 + meet_in_host]):
            for dtype, slices in ((torch.float32, 4), (torch.bfloat16, 1)):
                buffers = sums.shared_buffers(n, 128, 5120, allocate_on("meta"), dtype=dtype)
                ranks = sums.rank_of(0, [(*buffers, floats(16, 5120).bfloat16())] * n, is_in_host=is_in_host)
                partials = floats(slices, 16, 5120).to(dtype)
                sums.all_reduce(partials, floats(16, 5120), ranks=ranks)
                given = floats(16, 5120), partials, floats(5120), 1e-6
                for shots, rounded in product((1, 2)[: 2 - is_in_host], (None, codes)):
                    sums.all_reduce_norm(*given, ranks=ranks, shots=shots, codes=rounded)
            flags = [torch.empty((n, 128 * 32), dtype=torch.int32, device="meta")] * n
            ends = [(i * 248_320 // n, (i + 1) * 248_320 // n) for i in range(n)]
            staged = floats(16 * 248_320) if is_in_host else None
            columns = sums.columns_of(0, ends, [floats(128 * 248_320)] * n, flags, staged)
            sums.all_gather(floats(16, 248_320 // n), columns)
    return list(jobs)


def _some(jobs: list[Any]) -> list[Any]:
    """One variant of each kernel, of each end of a product, and of attention over all keys and chosen ones."""
    found = {}
    for job in jobs:
        said = json.loads(job.specialisation)
        constants = dict(zip((i for (i,) in said["constant_keys"]), said["constant_vals"], strict=True))
        names = list(said["signature"])
        which = (constants.get(names.index(name)) for name in ("EPILOGUE", "CHOSEN") if name in names)
        found[job.name, *which] = job
    return list(found.values())


def _resources(kernel: Any, scratch: Path) -> dict[str, int]:
    """Bytes of shared memory of a program, registers and spilled bytes of a thread, as the assembler says."""
    if "cubin" in kernel.asm:
        scratch.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(scratch)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        words, n_bytes = (r"REG:(\d+)", r"STACK:(\d+)"), 1
    else:
        assert kernel.asm["hsaco"]
        said, words, n_bytes = kernel.asm["amdgcn"], (r"\.vgpr_count:\s+(\d+)", r"\.vgpr_spill_count:\s+(\d+)"), 4
    registers, spilled = (int(re.findall(word, said)[-1]) for word in words)
    return {"shared": kernel.metadata.shared, "registers": registers, "spilled": spilled * n_bytes}


def _compile(name: str) -> list[Compiled]:
    from deltic.runtime.gpu.compile import compile_for, fix_keys

    compile_for(HOPPER if name in EMULATED else CHIPS[name])
    if name in EMULATED:
        emulate(name.removesuffix(HERE))
    fix_keys()
    walks = product(IN_FORMATS, WEIGHT_FORMATS) if IS_FULL else product(["moe"], FEW_FORMATS)
    jobs = [job for walk in [*product(MODELS if IS_FULL else TINY), *walks] for job in _jobs(*walk)]
    heads = (*TEXTS, *STREAMS) if IS_FULL else (TINY[0], *STREAMS[:1])
    of_drafts = [job for model in heads for job in _jobs(model, max_drafts=4)]
    jobs = list(dict.fromkeys(jobs) if IS_FULL else {job.name: job for job in jobs}.values())
    of_drafts = [job for job in dict.fromkeys(of_drafts) if job.name in WITH_DRAFTS and job not in jobs]
    jobs += of_drafts if IS_FULL else _some(of_drafts)
    assert {job.name for job in of_drafts} == WITH_DRAFTS
    walks = product(IN_FORMATS[1:], WEIGHT_FORMATS) if IS_FULL else product(["moe"], ["bf16", *FEW_FORMATS])
    of_slots = [job for walk in walks for job in _jobs(*walk, expert_gb=4.0 if IS_FULL else 0.0)]
    of_slots = [job for job in dict.fromkeys(of_slots) if job.name in WITH_SLOTS and job not in jobs]
    assert {job.name for job in of_slots} == WITH_SLOTS
    jobs += of_slots if IS_FULL else _some(of_slots)
    of_pictures = [
        job for model in (SEEING if IS_FULL else ("qwen3.5-27b",)) for job in _jobs(model, has_pictures=True)
    ]
    of_pictures = [job for job in dict.fromkeys(of_pictures) if job.name in WITH_PICTURES and job not in jobs]
    assert {job.name for job in of_pictures} == WITH_PICTURES
    jobs += of_pictures if IS_FULL else _some(of_pictures)
    for kv_dtype in KV_DTYPES if IS_FULL else KV_DTYPES[:1]:
        of_keys = [
            job for m in heads for n in (0, 4)[not IS_FULL :] for job in _jobs(m, max_drafts=n, kv_dtype=kv_dtype)
        ]
        of_keys = [job for job in dict.fromkeys(of_keys) if job.name in OF_KEYS and job not in jobs]
        assert {job.name for job in of_keys} == OF_KEYS
        jobs += of_keys if IS_FULL else _some(of_keys)
    of_adapters = [job for model in (TEXTS if IS_FULL else TINY[1:2]) for job in _jobs(model, has_adapters=True)]
    of_adapters = [job for job in dict.fromkeys(of_adapters) if job.name in WITH_ADAPTERS and job not in jobs]
    assert {job.name for job in of_adapters} == WITH_ADAPTERS
    jobs += of_adapters if IS_FULL else {job.name: job for job in of_adapters}.values()
    of_blocks = [job for kind in ("dflash2", "dspark") for job in _jobs("dense", max_drafts=4, drafter=kind)]
    of_blocks = [job for job in dict.fromkeys(of_blocks) if job.module.endswith(".block")]
    assert {job.name for job in of_blocks} == OF_BLOCKS
    jobs += of_blocks
    of_ranks = _sums_of_ranks(chip_of(name).is_nvidia)
    assert {job.name for job in of_ranks} == {"_one_shot_kernel", "_two_shot_kernel", "_all_gather_kernel"}
    jobs += of_ranks
    scratch = Path(triton.knobs.cache.dir) / "kernel.cubin"
    scratch.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for job in jobs:
        begun, result = time.perf_counter(), Compiled(job.name, 0.0)
        try:
            kernel = job.kernel.preload(job.specialisation)
            assert name not in EMULATED or chip().multiplies_from_shared or "wgmma.mma" not in kernel.asm["ptx"]
            result = replace(result, **_resources(kernel, scratch))
        except Exception as failure:
            result = replace(result, error=f"{type(failure).__name__}: {failure}"[:500])
        found.append(replace(result, seconds=time.perf_counter() - begun))
    return found


def _sums_of(text: str) -> list[str]:
    """The layouts of a kernel's sums of floats, in their order. text: of Triton's GPU dialect."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r"arith\.addf [^\n]*\n *tt\.reduce\.return[^\n]*\n *\}\) : \((.*)\) -> ", text)
    return [re.sub(r"#\w+\b(?!\.)", lambda at: layouts.get(at[0], at[0]), each) for each in sums]


def _sums() -> dict[str, dict[str, list[list[str]]]]:
    """Of the variants of mixers' kernels, by format of weights and kernel."""
    from deltic.runtime.gpu.compile import compile_for, fix_keys

    compile_for(CHIPS["sm_90"])
    fix_keys()
    found: dict[str, dict[str, list[list[str]]]] = {"bf16": {}, "fp8": {}}
    for format, name in product(found, ("_attention_decode_kernel", "_gdn_decode_kernel")):
        jobs = [job for job in _jobs("qwen3.5-27b", format) if job.name == name]
        found[format][name] = sorted(_sums_of(job.kernel.preload(job.specialisation).asm["ttgir"]) for job in jobs)
    return found


if __name__ == "__main__":
    from deltic.ops.gpu.launch import Levers

    with Levers().bound():
        compiled_here = {name: [asdict(kernel) for kernel in _compile(name)] for name in sys.argv[1:] if name != "sums"}
        print(json.dumps(compiled_here or _sums()))
