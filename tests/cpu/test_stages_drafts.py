"""The draft head of a model on several machines: it is on the last, guesses what it would on one, and changes no bit."""

from __future__ import annotations

import dataclasses
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest

from deltic.config import EngineConfig
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.runtime.build import settle
from deltic.runtime.cpu.device import Cpu
from tests.cpu.test_stages import SETTINGS, answers, built, said
from tests.staged import Stage
from tests.tiny import tiny_checkpoint
from tests.tiny_drafter import write_drafter


def guesses(runner: Any, n_steps: int = 8) -> list[Any]:
    """Tokens and guesses of the same steps: two prompts, and decodes behind them over the end of a page."""
    found, sequences = [], []
    for i, n in enumerate((60, 57)):
        params = SamplingParams(max_tokens=40, temperature=float(i), seed=i)
        ids = array("i", [(7 * k + i) % 251 for k in range(n)])
        request = Request(id=str(i), prompt_ids=ids.tolist(), params=params)
        pages = [3 * i, 3 * i + 1, 3 * i + 2]
        sequences.append(Sequence(request, 0, i, ids, n, pages=pages, batch_slot=i, state_slot=i))
    for _ in range(n_steps):
        chunks = [Chunk(s, s.n_computed, len(s.tokens) - s.n_computed) for s in sequences]
        result = runner.step(Step(chunks, [Draw(i, s, n_guesses=3) for i, s in enumerate(sequences)], runs_ahead=False))
        found.append((result.tokens, result.guesses))
        for sequence, tokens in zip(sequences, result.tokens, strict=True):
            sequence.n_computed = len(sequence.tokens)
            sequence.tokens.extend(tokens)
    return found


def test_a_block_drafter_in_the_directory_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dense", n_layers=12), path)
    (path / "draft_model").mkdir()
    write_drafter(path / "draft_model", "dflash")
    model = settle(EngineConfig(model=str(path), device="cpu", stages=("127.0.0.1:1",)), Cpu())
    assert "draft_model: left out on several machines" in model.notices and model.drafter is None


@pytest.mark.parametrize(("kind", "tied"), [("dense", True), ("moe", False)])
def test_the_head_guesses_on_the_last_machine(kind: str, tied: bool) -> None:
    checkpoint = str(tiny_checkpoint(kind, n_layers=12, has_mtp=True, tied=tied))
    config = EngineConfig(model=checkpoint, **SETTINGS)
    alone = built(config)
    assert alone.info.has_draft_head
    expected, drawn = guesses(alone), [said(outputs) for outputs in answers(alone)]
    assert all(any(made) for _, made in expected)
    stages = [Stage(checkpoint, "--threads", "1") for _ in range(2)]
    try:
        staged = built(dataclasses.replace(config, stages=tuple(stage.address for stage in stages)))
        assert staged.info.has_draft_head and staged.draft_head is None
        assert guesses(staged) == expected
        assert [said(outputs) for outputs in answers(staged)] == drawn
        staged.neighbours.behind.close()
        without = built(dataclasses.replace(config, max_drafts=0, stages=tuple(stage.address for stage in stages)))
        assert not without.info.has_draft_head
    finally:
        for stage in stages:
            stage.close()
