"""Published checkpoints of every format, from their files to logits on a CPU.

What a loaded matrix stands for is what its file means, to the bit; and a sequence has the same bits in any company.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.messages import SamplingParams
from deltic.models.files import open_tensors, stored_formats
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import Weights, load_weights
from deltic.ops.formats import Quantised
from deltic.ops.matrix import Matrix
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.grid import by_turns, grid
from tests.cpu.test_purity import prompt, run
from tests.plain import plain
from tests.reference.model import forward
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import RECIPES, meaning_of, tiny_quantised

KINDS = ("dense", "moe", "next")
TYPES = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "BF16",
    "F16", "NVFP4", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0", "Q1_0",
)  # fmt: skip


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Types as a Q4_K_M or UD file has them, several within what one product reads."""
    if len(shape) == 1 or "conv1d" in name or name.endswith(("mlp.gate.weight", "in_proj_b.weight")):
        return "F32"
    if shape[-1] % 256:
        return "IQ4_NL"
    kinds = {"v_proj": "Q6_K", "in_proj_z": "Q5_K", "in_proj_a": "Q8_0", "up_proj": "Q5_K", "down_proj": "Q6_K"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


def lowest(name: str, shape: tuple[int, ...]) -> str:
    """Types as the lowest UD files have them: experts in codebooks, head and embedding, and some matrices in 16 bits."""
    if len(shape) == 1 or "conv1d" in name or name.endswith(("mlp.gate.weight", "in_proj_b.weight")):
        return "F32"
    if shape[-1] % 256:
        return "IQ4_NL"
    kinds = {
        "embed_tokens": "IQ3_S", "lm_head": "IQ2_S", "in_proj_z": "BF16", "in_proj_a": "F16", "gate_proj": "IQ2_XXS", "up_proj": "IQ1_M",
        "gate_up_proj": "IQ2_XS", "down_proj": "IQ3_XXS", "o_proj": "IQ1_S", "v_proj": "Q6_K",
    }  # fmt: skip
    return next((kind for part, kind in kinds.items() if part in name), "Q2_K")


def loaded(path: Path) -> tuple[Weights, ModelShape]:
    shape = ModelShape.from_directory(path)
    object.__setattr__(shape, "formats", stored_formats(path))
    return load_weights(path, shape)[0], shape


def matrices(weights: Weights) -> dict[str, np.ndarray]:
    return {name: part.unpack() for name, part in weights.named_parts() if isinstance(part, Matrix)}


@pytest.mark.parametrize(("kind", "recipe"), by_turns(KINDS, RECIPES, pytest.mark.long))
def test_what_is_loaded_is_what_the_files_mean(kind: str, recipe: str) -> None:
    """Against the same values in a float32 checkpoint, which loads to bfloat16."""
    found, expected = (
        matrices(loaded(tiny_quantised(kind, recipe).path)[0]),
        matrices(loaded(meaning_of(kind, recipe))[0]),
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(torch.from_numpy(found[name]).to(torch.bfloat16).float(), torch.from_numpy(values)), name


@pytest.mark.parametrize(
    ("kind", "type"),
    by_turns(KINDS, [*TYPES, mixed, lowest], pytest.mark.long, whole=[mixed, lowest]),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_rows_of_gguf_files_are_where_they_belong(kind: str, type: str) -> None:
    """Each stored row, dequantised by the reader alone, is in the part of the same name; in_proj is q k v | z | b | a."""
    path = tiny_gguf(kind, type)
    weights, _ = loaded(path)
    stored = open_tensors(path)

    def values(name: str) -> np.ndarray:
        tensor = stored[name]
        rows = tensor.read(0, int(np.prod(tensor.shape[:-1])))
        return rows.values() if isinstance(rows, Quantised) else rows.reshape(-1, rows.shape[-1]).astype(np.float32)

    found = matrices(weights)
    for name, parts in {
        "embed": ["model.embed_tokens"],
        "layers.0.in_proj": [f"model.layers.0.linear_attn.in_proj_{part}" for part in ("qkv", "z")],
        "layers.1.out_proj": ["model.layers.1.linear_attn.out_proj"],
        "layers.3.o_proj": ["model.layers.3.self_attn.o_proj"],
    }.items():
        expected = np.concatenate([values(f"{part}.weight") for part in parts])
        rounded = [torch.from_numpy(x).to(torch.bfloat16) for x in (found[name][0][: len(expected)], expected)]
        assert torch.equal(*rounded), name
    if kind != "dense":
        p = "model.layers.2.mlp.experts.5."
        expected = np.concatenate([values(f"{p}{part}_proj.weight") for part in ("gate", "up")])
        assert torch.equal(
            *(torch.from_numpy(x).to(torch.bfloat16) for x in (found["layers.2.mlp.gate_up"][5], expected))
        )


@cache
def runner(path: Path) -> Runner:
    config = EngineConfig(model=str(path), max_num_seqs=8, max_model_len=512, max_step_tokens=320, threads=2)
    return build_runner(config, lambda stage, done: None, Cpu())  # type: ignore[return-value]


CHECKPOINTS = {
    "qwen-fp8": lambda: tiny_quantised("dense", "qwen-fp8").path,
    "awq-compressed": lambda: tiny_quantised("moe", "awq-compressed").path,
    "gptq": lambda: tiny_quantised("next", "gptq").path,
    "mixed-nvfp4": lambda: tiny_quantised("moe", "mixed-nvfp4").path,
    "gguf mixed": lambda: tiny_gguf("moe", mixed),
    "gguf lowest": lambda: tiny_gguf("moe", lowest),
    "gguf Q8_0": lambda: tiny_gguf("dense", "Q8_0"),
    "gguf Q6_K": lambda: tiny_gguf("next", "Q6_K"),
}
every_checkpoint = pytest.mark.parametrize(
    "name", grid(CHECKPOINTS, ("qwen-fp8", "gptq", "gguf mixed", "gguf lowest"), pytest.mark.long)
)


@every_checkpoint
def test_company_chunks_and_prefixes_keep_bits(name: str) -> None:
    inner, ids = runner(CHECKPOINTS[name]()), prompt(1, 150)
    tokens, expected = run(inner, ids)
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
    others = [(0, prompt(2, 70), drawn), (0, prompt(3, 5), drawn), (2, prompt(4, 131), drawn)]
    for circumstances in ({"others": others}, {"step_tokens": 64}, {"preempt_at": 4}, {"after": [[*ids[:128], 7]]}):
        again, logits = run(inner, ids, **circumstances)  # type: ignore[arg-type]
        assert again == tokens and np.array_equal(logits, expected), circumstances


@every_checkpoint
def test_logits_are_those_of_the_oracle(name: str) -> None:
    """In float32, with the same weights: what differs are bfloat16 activations, and int8 ones by groups, and now and then
    the expert that is chosen. A row in a wrong place makes it 1 or more.
    """
    path = CHECKPOINTS[name]()
    weights, shape = loaded(path)
    ids = prompt(1, 97)
    with torch.no_grad():
        expected = forward(plain(weights), shape, ids, chunked=True)[-1]
    found = torch.from_numpy(run(runner(path), ids, n_tokens=1)[1][0])
    assert _error(found, expected) < (0.25 if shape.is_moe else 0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_the_checkpoint_it_was_made_of(kind: str) -> None:
    """Value heads in tiled order among the rest: the same model, up to the order of sums."""
    ids = prompt(1, 97)
    source = tiny_checkpoint(kind, layout="flat", experts="fused")
    found, expected = (run(runner(path), ids, n_tokens=1)[1][0] for path in (tiny_gguf(kind, "BF16"), source))
    assert _error(torch.from_numpy(found), torch.from_numpy(expected)) < 0.02


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
