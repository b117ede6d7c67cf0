"""Quantised checkpoints that are damaged, incomplete or odd, from their files to a server's last line.

What a reader of one matrix or header refuses is in tests/null/test_quantised_files.py and tests/null/test_gguf.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltic.config import EngineConfig
from deltic.models.fields import CheckpointError
from deltic.models.loading import Host
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.grid import grid
from tests.cpu.test_purity import prompt, run
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import tiny_gguf, write_gguf
from tests.tiny_quantised import Tensors, awq, fp8_block, gptq, nvfp4, pack_quantised, tiny_quantised
from tests.tiny_speech import tiny_speech

P = "model.language_model.layers."
DOWN = f"{P}1.mlp.down_proj"


def start(path: Path) -> Runner:
    config = EngineConfig(model=str(path), max_num_seqs=2, max_model_len=256, threads=1)
    return build_runner(config, lambda stage, done: None, Cpu())  # type: ignore[return-value]


def runs(path: Path) -> Runner:
    runner = start(path)
    tokens, logits = run(runner, prompt(1, 70))
    assert tokens and np.isfinite(logits).all()
    return runner


def edited(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a checkpoint of one file, with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def with_nan(tensors: Tensors) -> None:
    tensors[f"{DOWN}.weight_scale_inv"][0, 0] = torch.nan


def other_expert(tensors: Tensors) -> None:
    """One of 16 experts is left in bfloat16."""
    name = f"{P}2.mlp.experts.5.up_proj"
    del tensors[f"{name}.weight_scale_inv"]
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()


FAULTS: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "missing scale": ("dense", lambda t: t.pop(f"{DOWN}.weight_scale_inv"), rf"{DOWN}\.weight' is F8_E4M3 and has no"),
    "missing weights": ("dense", lambda t: t.pop(f"{DOWN}.weight"), rf"{DOWN}\.weight_scale_inv' has no weights beside"),
    "missing matrix": (
        "dense",
        lambda t: [t.pop(f"{DOWN}.{part}") for part in ("weight", "weight_scale_inv")],
        rf"tensor '{DOWN}\.weight' is missing; expected shape \[256, 512\]",
    ),
    "stray scale": (
        "dense",
        lambda t: t.update({f"{P}1.mlp.gate_up_proj.weight_scale": torch.ones(1)}),
        r"gate_up_proj\.weight_scale' has no weights beside it",
    ),
    "scale beside plain weights": (
        "dense",
        lambda t: t.update({"lm_head.weight_scale": torch.ones(512, 1)}),
        r"lm_head\.weight_scale' does not belong beside weights of BF16",
    ),
    "scales of another size": (
        "dense",
        lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(3, 4)}),
        r"weight_scale_inv' has the wrong shape for weights \[256, 512\]: found \[3, 4\]",
    ),
    "weights of another size": (
        "dense",
        lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"][:, :256], f"{DOWN}.weight_scale_inv": torch.ones(2, 2)}),
        r"has the wrong shape: expected \[256, 512\] by config\.json \(intermediate_size, hidden_size\), found \[256, 256\]",
    ),
    "a quantised convolution": (
        "dense",
        lambda t: t.update(
            {
                f"{P}0.linear_attn.conv1d.weight": t[f"{P}0.linear_attn.conv1d.weight"].to(torch.float8_e4m3fn),
                f"{P}0.linear_attn.conv1d.weight_scale": torch.ones(1),
            }
        ),
        r"conv1d\.weight' has the wrong dtype: expected BF16, F16, F32, found fp8-row",
    ),
    "another LoRA": (
        "dense",
        lambda t: t.update({f"{DOWN}.lora_A.weight": torch.ones(2, 4)}),
        "1 unexpected tensors: .*lora_A",
    ),
    "experts of two formats": ("moe", other_expert, "experts of one layer are stored as 16 bits and fp8; only one"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_before_memory_is_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change, message = FAULTS[name]
    path = edited(tiny_quantised(kind, "qwen-fp8").path, tmp_path / "model", change)
    with monkeypatch.context() as patch:
        patch.setattr(Host, "empty", lambda *arguments: pytest.fail("memory was taken"))
        with pytest.raises(CheckpointError, match=message) as caught:
            start(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_scales_that_are_no_numbers_end_the_load(tmp_path: Path) -> None:
    path = edited(tiny_quantised("dense", "qwen-fp8").path, tmp_path / "model", with_nan)
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.weight' has scales that are not finite"):
        start(path)


def test_a_shard_that_was_cut_or_lost(tmp_path: Path) -> None:
    shutil.copytree(tiny_quantised("dense", "awq-compressed", shards=3).path, tmp_path / "model")
    shard = tmp_path / "model" / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: damaged or unreadable .*download it again"):
        start(tmp_path / "model")
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: .*lists this shard, but it is missing"):
        start(tmp_path / "model")


# Odd, and run.


@pytest.mark.parametrize("layout", [fp8_block, pack_quantised, gptq, awq, nvfp4], ids=lambda layout: layout.__name__)
def test_an_embedding_and_a_head_in_any_layout(layout: Callable[[Any], tuple[Tensors, Any]], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for module in ("model.language_model.embed_tokens", "lm_head"):
            parts, _ = layout(tensors.pop(f"{module}.weight"))
            tensors.update({f"{module}.{name}": part for name, part in parts.items()})

    source = tiny_checkpoint("dense", experts="split")
    runner = runs(edited(source, tmp_path / "model", change))
    weights = runner.model.weights
    assert weights.embed.whole.format == weights.lm_head.whole.format != "bf16"


def test_gate_and_up_in_two_formats_are_two_pieces(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for expert in range(16):
            name = f"{P}2.mlp.experts.{expert}.up_proj"
            parts, _ = pack_quantised(tensors.pop(f"{name}.weight"))
            tensors.update({f"{name}.{part}": one for part, one in parts.items()})

    runner = runs(edited(tiny_checkpoint("moe", experts="split"), tmp_path / "model", change))
    found = [segment.format.name for segment in runner.model.weights.layers[2].mlp.gate_up.segments]
    assert found == ["bf16", "int4-g128-bfloat16"]


def test_parts_that_are_not_run_may_be_in_any_format(tmp_path: Path) -> None:
    """A vision tower of bitsandbytes, an MTP head of e5m2 and one without its scale."""

    def change(tensors: Tensors) -> None:
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(64, 1, dtype=torch.uint8)
        tensors["model.visual.blocks.0.attn.qkv.absmax"] = torch.ones(4)
        tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.ones(8, 8).to(torch.float8_e5m2)
        tensors["mtp.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
        tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(8, 8)
        tensors["mtp.layers.0.mlp.experts.1.up_proj.weight"] = torch.ones(8, 8).to(torch.float8_e4m3fn)

    notices = runs(edited(tiny_quantised("dense", "qwen-fp8").path, tmp_path / "model", change)).info.notices
    assert "skipped 2 vision tensors: only the text stack is run" in notices
    assert "skipped 4 MTP tensors: only the text stack is run" in notices


def test_parts_of_a_gguf_file_that_are_not_run(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        odd = np.zeros((4, 292), np.uint8), gguf.GGMLQuantizationType.Q8_K
        for name in ("v.blk.0.attn_qkv.weight", "blk.4.ffn_gate.weight", "blk.4.nextn.eh_proj.weight"):
            writer.add_tensor(name, odd[0], raw_dtype=odd[1])
        writer.add_block_count = None  # type: ignore[method-assign, assignment]
        writer.kv_data[0]["qwen35.block_count"].value = 5
        writer.add_nextn_predict_layers(1)

    source = tiny_checkpoint("dense", layout="flat", experts="fused")
    notices = runs(write_gguf(source, tmp_path / "odd.gguf", "Q8_0", change=change)).info.notices
    assert "skipped 1 vision tensors: only the text stack is run" in notices
    assert "skipped 2 MTP tensors: only the text stack is run" in notices


def test_a_speech_model_that_is_quantised_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "speech"
    shutil.copytree(tiny_speech("custom_voice"), path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("talker.model.layers.0.mlp.down_proj.weight"))
    parts, _ = fp8_block(tensors.pop(name))
    save_file(tensors | {f"{name.removesuffix('.weight')}.{part}": one for part, one in parts.items()}, file)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight' has the wrong dtype: expected BF16, .* found fp8"):
        start(path)


# To the last line of a server.


def served(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deltic", "serve", str(path), "--port", "0", "--threads", "1", "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


LATE_FAULTS = ("missing scale", "NaN scales", "GGUF cut", "GGUF count", "GGUF type", "--quantize")


@pytest.mark.parametrize("fault", grid(LATE_FAULTS, LATE_FAULTS[1::2], pytest.mark.long))
def test_a_server_says_why_and_ends(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, message = tmp_path / "model.gguf", ""
    if fault in ("missing scale", "NaN scales"):
        change = with_nan if fault == "NaN scales" else FAULTS["missing scale"][1]
        path = edited(tiny_quantised("dense", "qwen-fp8").path, tmp_path / "model", change)
        message = (
            "has scales that are not finite" if fault == "NaN scales" else "is F8_E4M3 and has no weight_scale_inv"
        )
    elif fault == "GGUF cut":
        path.write_bytes(tiny_gguf("dense").read_bytes()[:-5000])
        message = "the download is not complete, or the file is damaged"
    elif fault == "GGUF count":
        data = tiny_gguf("dense").read_bytes()
        path.write_bytes(data[:8] + (2**62).to_bytes(8, "little") + data[16:])
        message = f"damaged: {2**62} tensors"
    elif fault == "GGUF type":
        source = tiny_checkpoint("dense", layout="flat", experts="fused")

        def odd(writer: gguf.GGUFWriter) -> None:
            data = np.zeros((4, 292), np.uint8)
            writer.add_tensor("blk.0.ffn_odd.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_K)

        write_gguf(source, path, change=odd)
        message = "'blk.0.ffn_odd.weight' is quantised as Q8_K, which is not supported"
    else:
        shutil.copyfile(tiny_gguf("dense"), path)
        monkeypatch.setenv("DELTIC_CONFIG", str(tmp_path / "deltic.toml"))
        (tmp_path / "deltic.toml").write_text('quantize = "int8"\n')
        message = "--quantize int8: " + str(path) + " is quantised already (Q8_0)"
    done = served(path)
    said = done.stderr.strip().splitlines()
    assert done.returncode in (1, 2), done.stderr
    assert message in said[-1], done.stderr
    assert "Traceback" not in done.stderr
