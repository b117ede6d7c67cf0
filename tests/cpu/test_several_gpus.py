"""What works with a model on one GPU, on two, in several parts on one, and on two machines: each cell of
docs/design/several-gpus.md's table has a test, or is refused by name before anything is loaded."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from deltic.config import ConfigError, EngineConfig
from deltic.runtime.build import settle
from deltic.runtime.gpu.device import Gpu
from tests.planned import settled

ROOT = Path(__file__).parents[2]
HERE, ENGINE, RANKS, PARTS = (
    "cpu/test_several_gpus.py",
    "gpu/test_gpu_engine.py",
    "gpu/test_gpu_tensor_parallel.py",
    "gpu/test_gpu_parts.py",
)
QUANTISED, LORA = "gpu/test_gpu_quantised_engine.py", "gpu/test_gpu_lora.py"
DRAFTS, BLOCK = "gpu/test_gpu_drafts.py", "gpu/test_gpu_block_drafter.py"
STAGES = "gpu/test_gpu_stages.py"


def both(case: str) -> tuple[str, str]:
    return (f"{PARTS}::test_two_ranks_and_one_with_both_parts[{case}]",) * 2


def of_ranks(case: str) -> tuple[str, str]:
    return (f"{RANKS}::test_ranks_answer_as_one[{case}]",) * 2


def refused(case: str) -> tuple[str, str]:
    return (f"refused {HERE}::test_what_parts_refuse[{case}]",) * 2


E4M3 = f"{RANKS}::test_rows_in_e4m3_are_those_of_one_kernel_each"
ALONE = "cpu/test_reports.py::test_a_model_on_several_gpus_is_alone"
TABLE: dict[str, tuple[str, str, str]] = {
    "dense": (f"{ENGINE}::test_against_the_oracle[dense]", *of_ranks("dense-bf16")),
    "mixture": (f"{ENGINE}::test_against_the_oracle[moe]", *of_ranks("moe-bf16")),
    "experts dealt out whole": (
        f"refused {HERE}::test_who_deals_no_experts_out",
        *both("dealt"),
    ),
    "experts dealt out, outside the GPU": (
        f"refused {HERE}::test_who_deals_no_experts_out",
        *refused("dealt"),
    ),
    "experts dealt out, with adapters": (
        *(f"refused {HERE}::test_who_deals_no_experts_out",) * 3,
    ),
    "Qwen3.8-Flash-Next": (f"{ENGINE}::test_against_the_oracle[flash]", *of_ranks("flash-bf16")),
    "`--quantize fp8`": (f"{QUANTISED}::test_alone_and_among_others[--quantize fp8 dense]", E4M3, E4M3),
    "`--quantize int8`": (f"{QUANTISED}::test_alone_and_among_others[--quantize int8 dense]", *both("int8")),
    "`--quantize int4`": (f"{QUANTISED}::test_against_the_oracle[--quantize int4 dense]", *both("int4")),
    "files in FP8": (f"{QUANTISED}::test_against_the_oracle[fp8 dense]", *both("qwen-fp8")),
    "files in int4": (f"{QUANTISED}::test_against_the_oracle[w4a16 dense]", *both("w4a16")),
    "files in NVFP4": (f"{QUANTISED}::test_against_the_oracle[nvfp4 dense]", *both("nvfp4")),
    "GGUF": (f"{QUANTISED}::test_against_the_oracle[gguf moe]", *both("gguf")),
    "keys and values in fp8": ("gpu/test_gpu_kv_formats.py::test_one_answer_on_every_way[fp8-dense]", *both("fp8 keys")),
    "keys and values in k8v4": (
        "gpu/test_gpu_kv_formats.py::test_one_answer_on_every_way[turboquant_k8v4-dense]",
        *both("k8v4 keys"),
    ),
    "states in bfloat16": (f"{ENGINE}::test_against_the_oracle[dense, bfloat16 states]", *both("bfloat16 states")),
    "adapters": (f"{LORA}::test_against_the_oracle[dense]", *both("adapters")),
    "adapters of a mixture": (f"{LORA}::test_against_the_oracle[moe]", *both("adapters moe")),
    "pictures": (
        "gpu/test_gpu_pictures.py::test_answers_are_those_of_a_cpu[dense]",
        *(f"{PARTS}::test_parts_see_pictures",) * 2,
    ),
    "the host's memory, the disk, and other servers": (
        f"{BLOCK}::test_a_prefix_brings_its_keys_along",
        "gpu/test_gpu_parallel.py::test_a_page_on_the_host_is_that_of_every_gpu",
        f"{PARTS}::test_parts_leave_the_gpu_and_come_back",
    ),
    "vectors": (
        "gpu/test_gpu_embedder.py::test_vectors_have_the_same_bits_in_any_company[dense-lasttoken]",
        *both("vectors"),
    ),
    "decisions by a joint head": (
        "gpu/test_gpu_embedder.py::test_decisions_of_a_joint_head_have_the_same_bits_in_any_company",
        *both("joint head"),
    ),
    "drafts of repeated text": (f"{DRAFTS}::test_drafts_change_no_bit", *both("drafts")),
    "drafts by the model's head": (
        "gpu/test_gpu_draft_head.py::test_its_own_guesses_change_no_answer[dense]",
        *(f"{RANKS}::test_ranks_guess_as_one[dense-True]",) * 2,
    ),
    "the same over streams": (
        "gpu/test_gpu_draft_head.py::test_its_own_guesses_change_no_answer[flash]",
        *(f"{RANKS}::test_ranks_guess_as_one[flash-True]",) * 2,
    ),
    "block drafts": (
        f"{BLOCK}::test_random_schedules_keep_their_bits",
        *(f"{PARTS}::test_parts_guess_blocks[dflash]",) * 2,
    ),
    "experts outside the GPU": (
        "gpu/test_gpu_experts.py::test_answers_are_those_of_a_model_on_the_gpu",
        *(f"{PARTS}::test_experts_outside_of_parts",) * 2,
    ),
    "speech": ("gpu/test_gpu_speech.py::test_a_batch_changes_nothing", *refused("speech")),
    "several models of a server": (
        "null/test_several_models.py::test_the_official_client_finds_them_all",
        f"refused {ALONE}",
        ALONE,
    ),
}  # fmt: skip
"""By feature, the test of each: on one GPU, on two, in two parts on one (`--tp-invariant 2`)."""


def staged(case: str) -> str:
    return f"{STAGES}::test_layers_that_are_run_apart_are_the_model[{case}]"


def not_staged(case: str) -> str:
    return f"refused {STAGES}::test_what_machines_with_gpus_do_not_have[{case}]"


STAGED: dict[str, str] = {
    "dense": staged("dense"),
    "mixture": staged("moe"),
    "experts dealt out whole": not_staged("experts dealt out"),
    "experts dealt out, outside the GPU": not_staged("experts dealt out"),
    "experts dealt out, with adapters": not_staged("experts dealt out"),
    "Qwen3.8-Flash-Next": not_staged("flash"),
    "`--quantize fp8`": staged("fp8"),
    "`--quantize int8`": staged("int8"),
    "`--quantize int4`": staged("int4"),
    "files in FP8": staged("qwen-fp8"),
    "files in int4": staged("w4a16"),
    "files in NVFP4": staged("nvfp4"),
    "GGUF": staged("gguf"),
    "keys and values in fp8": staged("fp8 keys"),
    "keys and values in k8v4": staged("k8v4 keys"),
    "states in bfloat16": staged("bfloat16 states"),
    "adapters": staged("adapters"),
    "adapters of a mixture": staged("adapters moe"),
    "pictures": not_staged("pictures"),
    "the host's memory, the disk, and other servers": not_staged("the disk"),
    "vectors": not_staged("vectors"),
    "decisions by a joint head": not_staged("joint head"),
    "drafts of repeated text": staged("dense"),
    "drafts by the model's head": f"{STAGES}::test_the_head_guesses_on_the_last_machine[dense-False]",
    "the same over streams": not_staged("flash"),
    "block drafts": not_staged("block drafts"),
    "experts outside the GPU": not_staged("experts outside"),
    "speech": not_staged("speech"),
    "several models of a server": "cpu/test_stages.py::test_a_stage_has_one_place",
}
"""The same of stages on two machines with a GPU each (`--stages`)."""

PARTED: dict[str, tuple[dict[str, Any], str]] = {
    "dealt": (
        {"expert_memory": 1.0, "expert_parallel": True, "dummy": "qwen3.5-35b-a3b"},
        "--expert-memory 1.0: experts are dealt out whole to parts of the model; leave it out",
    ),
    "speech": ({"dummy": "qwen3-tts-0.6b"}, "--tensor-parallel 2|--tp-invariant 2"),
}
"""What is refused with a model in parts: settings, and what is said."""


@pytest.mark.parametrize("case", PARTED)
@pytest.mark.parametrize("n_gpus", [1, 2])
def test_what_parts_refuse(case: str, n_gpus: int) -> None:
    """Before anything is loaded."""
    parts: dict[str, Any] = {"tensor_parallel": 2} if n_gpus == 2 else {"tp_invariant": 2}
    settings, said, device = *PARTED[case], Gpu((), n_gpus, 2)
    with pytest.raises(ConfigError, match=said):
        settled(EngineConfig(device="cuda", **settings, **parts), device, 130 * 10**9)


def test_who_deals_no_experts_out() -> None:
    """Nor are they dealt out unasked where there is room for adapters, or experts are to be outside."""
    config = EngineConfig(dummy="qwen3.5-35b-a3b", device="cuda", expert_parallel=True)
    refusals: list[tuple[EngineConfig, int, str]] = [
        (config, 1, "one GPU has all experts; give --tensor-parallel, too; else leave it out"),
        (replace(config, dummy="qwen3.5-27b"), 2, "the model has no routed experts; else leave it out"),
        (
            replace(config, allow_lora_loading=True),
            2,
            "--allow-lora-loading is for experts that are cut by their columns",
        ),
    ]
    for given, n_gpus, said in refusals:
        with pytest.raises(ConfigError, match=f"--expert-parallel: {said}"):
            settle(given, Gpu((), n_gpus))
    for more in ({}, {"allow_lora_loading": True}, {"expert_memory": 1.0}):
        model = settle(replace(config, expert_parallel=False, **more), Gpu((), 8), "fp8")
        assert all((cut.own_experts is None) == bool(more) for cut in model.cuts)


def ids(mark: Any) -> set[str]:
    """What parametrize calls its cases."""
    given = (getattr(case, "values", case) for case in mark.args[1])
    return {"-".join(map(str, case)) if isinstance(case, tuple) else str(case) for case in given}


def test_each_cell_has_its_test() -> None:
    """The tests are there, with these cases; and the document's table says the same."""
    words = {"refused": "refused", "told": "left out, and told"}
    lines = ["| feature | one GPU | two GPUs | two parts on one | two machines |", "| --- | --- | --- | --- | --- |"]
    assert TABLE.keys() == STAGED.keys()
    for feature, others in TABLE.items():
        cells = (*others, STAGED[feature])
        for cell in cells:
            file, _, name = cell.removeprefix("refused ").removeprefix("told ").partition("::")
            name, _, case = name.removesuffix("]").partition("[")
            test = getattr(importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}"), name)
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            assert not case or any(case in ids(mark) for mark in marks), cell
        shown = [words.get(cell.partition(" ")[0], "yes") for cell in cells]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    document = (ROOT / "docs" / "design" / "several-gpus.md").read_text()
    assert "\n".join(lines) + "\n" in document
