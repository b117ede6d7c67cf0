"""What tests of a draft head share: weights for the reference, sequences without a scheduler, and steps of them."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights, stored_shape
from tests.plain import plain

KINDS = ("dense", "moe", "next")


def loaded(path: Path) -> tuple[Any, ModelShape]:
    shape = stored_shape(path, ModelShape.from_directory(path), drafts=True)
    assert shape.has_draft_head
    return plain(load_weights(path, shape)[0]), shape


def sequence(ids: list[int], batch_slot: int = 0, n_prompt: int | None = None, **params: Any) -> Sequence:
    params = {"temperature": 0.0, "max_tokens": 99, **params}
    request = Request(id=str(batch_slot), prompt_ids=[], params=SamplingParams(**params))
    pages = [4 * batch_slot + i for i in range(4)]
    n_prompt = len(ids) if n_prompt is None else n_prompt
    return Sequence(
        request, 0, batch_slot, array("i", ids), n_prompt, pages=pages, batch_slot=batch_slot, state_slot=batch_slot
    )


def run(runner: Any, of: Sequence, length: int, n_guesses: int = 0, draws: bool = True, **more: Any) -> list[int]:
    """A chunk and, if it draws, a draw, whose token the sequence gets. Gives the guesses."""
    chunk = Chunk(of, of.n_computed, length, **more)
    step = Step([chunk], [Draw(0, of, n_guesses)] if draws else [], runs_ahead=False)
    result = runner.step(step)
    of.n_computed += length
    of.tokens.extend(result.tokens[0] if draws else [])
    return result.guesses[0] if draws else []


def kept(runner: Any, of: Sequence, n: int) -> np.ndarray:
    """Bits of the head's keys and values for the first n tokens, [2, heads, n, dim]."""
    pages = (runner.memory[0] if isinstance(runner.memory, list) else runner.memory).pages
    if isinstance(pages, torch.Tensor):
        pages = pages.view(torch.int16).cpu().numpy()
    return np.concatenate(list(pages[of.pages, -1].view(np.uint16)), axis=2)[:, :, :n]
