"""Qwen3.8-Flash-Next on a CPU where it differs from the other kinds: tables in blocks, and the ids of n-grams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.models.qwen.ngram_table import ngram_row_ids
from deltic.models.qwen.shape import ModelShape
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.plain import plain
from tests.reference.flash_next import ngram_ids
from tests.reference.model import forward
from tests.tensors import tensor_of
from tests.tiny import tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB
from tests.tiny_gguf import tiny_gguf


def ids_with_ends(eos: int, n: int) -> list[int]:
    """Ends of text at the start, alone, two in a row, and one token apart."""
    ids = np.random.default_rng(0).integers(0, 256, n).tolist()
    for at in (0, 9, 30, 31, 33):
        ids[at] = eos
    return ids


def build(path: str, **settings: object) -> Runner:
    config = EngineConfig(
        model=path, max_num_seqs=2, max_model_len=256, max_step_tokens=64, threads=2, n_pages=12, **settings
    )
    return build_runner(config, lambda stage, done: None, Cpu())


@pytest.mark.parametrize("type", ["BF16", "Q8_0"])
def test_a_gguf_file_against_the_oracle(type: str) -> None:
    """A table in blocks is read by the host, before each step."""
    runner = build(str(tiny_gguf("flash", type)))
    shape, engine = runner.plan.shape, Engine(runner)
    assert runner.model.weights.ngram_table.blocks == ("" if type == "BF16" else type)
    ids, drawn, rows = ids_with_ends(shape.ngrams.eos_id, 90), [], []
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="a", prompt_ids=ids, params=params))
    while engine.has_work():
        for output in engine.step():
            drawn += output.token_ids
            rows.append(tensor_of(runner.logits(1)[0]).clone())
    expected = forward(plain(runner.model.weights), shape, ids + drawn[:-1], precision="bfloat16")[len(ids) - 1 :]
    error = (torch.stack(rows) - expected)[:, :N_REAL_VOCAB].abs().amax(-1)
    # An int8 product rounds its inputs, too; experts of nearly equal weight may be exchanged.
    assert error.median() < (0.03 if type == "BF16" else 0.15), error


def test_row_numbers_and_what_a_step_is_given_for_them() -> None:
    """In two steps, behind ends of text and at the start."""
    path = tiny_checkpoint("flash")
    ngrams = ModelShape.from_directory(path).ngrams
    assert ngrams is not None
    ids = ids_with_ends(ngrams.eos_id, 70)
    expected = ngram_ids(ids, ngrams)
    runner = build(str(path))
    inputs, found, engine = runner.workspace.batch.inputs, [], Engine(runner)
    step = runner.step

    def watched(given):  # type: ignore[no-untyped-def]
        result, n = step(given), int(inputs.n_tokens)
        found.append(ngram_row_ids(ngrams, inputs.hash_ids[:n], inputs.previous_ids[:n]))
        return result

    runner.step = watched  # type: ignore[method-assign]
    engine.scheduler.max_step_tokens = 64
    engine.add(Request(id="a", prompt_ids=ids, params=SamplingParams(max_tokens=1, temperature=0.0)))
    while engine.has_work():
        engine.step()
    assert len(found) == 2 and torch.equal(torch.from_numpy(np.concatenate(found)), expected)
