"""Decodes of more than 256 rows, up to the draws: a row has the bits that it has alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Sequence
from tests.tiny import tiny_checkpoint
from tests.tiny_quantised import tiny_quantised

pytest.importorskip("triton")
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.text import GpuTextRunner

N_ROWS = 264
CHOSEN = (0, 127, 128, 255, 256, N_ROWS - 1)
"""Rows at the ends of tiles of 128, and of draws that take turns in the scratch."""
FEW = [*reversed(CHOSEN), *range(1, 61)]
"""Another company of theirs: of more than 64 rows, whose blocks of K are those of many (no matter to a GPU, but the interpreter rounds
behind each)."""
CASES: dict[str, tuple[Callable[[], Path], str | None]] = {
    "dense": (lambda: tiny_checkpoint("dense"), None),
    "experts": (lambda: tiny_checkpoint("moe"), None),
    "fp8": (lambda: tiny_quantised("dense", "qwen-fp8").path, None),
    "int4": (lambda: tiny_checkpoint("dense"), "int4"),
}


def decoded(runner: GpuTextRunner, rows: list[int], states: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and tokens of one decode of these sequences, behind the same states each time."""
    for memory, kept in zip((*runner._states, *runner._pages), states, strict=True):
        memory.copy_(kept)
    chunks = []
    for i in rows:
        params = SamplingParams(temperature=1.0 if i % 2 else 0.0, top_p=0.9 if i % 4 == 1 else 1.0, max_tokens=99)
        request = Request(id=str(i), prompt_ids=[], params=params)
        tokens, position = array("i", [7 + i % 90]), i % 50
        sequence = Sequence(request, 0, i, tokens, position, pages=[i], batch_slot=i, state_slot=i)
        runner.batch_slots.decode(sequence, tokens[0], position)
        chunks.append(Chunk(sequence, position, 1))
    pending = runner._decode(chunks)
    pending.wait()
    logits = runner.workspace.decode.logits.view(-1, runner.plan.shape.vocab_size)
    return logits[: len(rows)].clone(), pending.tokens.clone()


@pytest.mark.parametrize(
    "name", [name if name == "experts" else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_a_row_among_many_has_its_bits(name: str) -> None:
    path, quantize = CASES[name]
    config = EngineConfig(
        model=str(path()), quantize=quantize, max_num_seqs=N_ROWS, max_model_len=64, max_step_tokens=64, n_pages=N_ROWS,
        prefix_cache=False, cache_host_gb=0.0,
    )  # fmt: skip
    runner = build_runner(config, lambda stage, done: None, Gpu())
    assert isinstance(runner, GpuTextRunner)
    generator = torch.Generator().manual_seed(0)
    states = []
    for memory in (*runner._states, *runner._pages):
        states.append(torch.randn(memory.shape, generator=generator).to(memory.dtype).to(memory.device))
    logits, tokens = decoded(runner, list(range(N_ROWS)), states)
    assert torch.isfinite(logits).all() and len({bytes(row.cpu().numpy().tobytes()) for row in logits}) == N_ROWS
    for company in (FEW, *([i] for i in CHOSEN if torch.cuda.is_available())):
        other, drawn = decoded(runner, company, states)
        assert torch.equal(other[: len(CHOSEN)], logits[company[: len(CHOSEN)]]), company
        assert drawn.tolist() == tokens[company].tolist() and min(drawn) >= 0, company
