"""The draft head: against the published model code, the reference, and itself on any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltic.config import EngineConfig
from deltic.engine.guides import Guide, Lexicon
from deltic.engine.messages import Constraint
from deltic.engine.step import Chunk, Draw, Step
from deltic.models.fields import CheckpointError
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights, stored_shape
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.test_reference import needs_transformers, prompt, published_model
from tests.heads import KINDS, kept, loaded, run, sequence
from tests.reference.layers import linear
from tests.reference.model import draft_states, draft_trunk, hidden_states, trunk
from tests.tensors import tensor_of
from tests.tiny import tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB
from tests.tiny_gguf import tiny_gguf

PUBLISHED = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "post_norm"}


def build(path: Path, **settings: Any) -> Runner:
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "max_step_tokens": 128, "n_pages": 24, "n_checkpoints": 0}
    config = EngineConfig(model=str(path), threads=2, **{**sizes, "max_drafts": 8, **settings})
    return build_runner(config, lambda stage, done: None, Cpu())


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_published_head(kind: str) -> None:
    from transformers.modeling_layers import MtpLayer

    path = tiny_checkpoint(kind, has_mtp=True, experts="fused", layout="flat")
    weights, shape = loaded(path)
    model = published_model(path)
    decoder = model.get_decoder()
    config = type(decoder.config)(
        **{**decoder.config.to_dict(), "layer_types": ["full_attention"], "num_hidden_layers": 1}
    )
    config._attn_implementation = config._experts_implementation = "eager"
    head = MtpLayer(config, type(decoder.layers[3]), type(decoder.norm), 0).eval()
    stored = torch_tensors(path)
    head.load_state_dict(
        {
            f"mtp_block.{name[13:]}" if name.startswith("mtp.layers.0.") else f"{PUBLISHED[name[4:-7]]}.weight": value
            for name, value in stored.items()
            if name.startswith("mtp.")
        },
        strict=True,
    )
    ids = prompt()
    n = len(ids) - 1
    hidden = hidden_states(weights, shape, ids)[:n]
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor([ids[1:]]))
        positions = torch.arange(n)[None]
        angles = decoder.rotary_emb(embedded, positions if kind == "next" else positions.expand(3, 1, n))
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        states = head(embedded, hidden[None], angles, mask, positions, None)
        expected = model.lm_head(states)[0]
    found = linear(draft_states(weights, shape, hidden, ids[1:]), weights.lm_head, "float32")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def torch_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(path / "model.safetensors").items()}


@pytest.mark.parametrize("kind", [*KINDS, "flash"])
def test_guesses_are_those_of_the_reference(kind: str) -> None:
    """Each from the head's own state of the one before."""
    path = tiny_checkpoint(kind, has_mtp=True)
    weights, shape = loaded(path)
    runner, ids, n_wanted = build(path), prompt(), 4
    guesses = run(runner, of := sequence(ids), len(ids), n_wanted)
    assert len(guesses) == n_wanted
    known = [*ids[1:], of.tokens[-1]]
    goes_on = (trunk, draft_trunk) if kind == "flash" else (hidden_states, draft_states)
    hidden = goes_on[0](weights, shape, ids, "bfloat16")
    for i in range(n_wanted):
        states = draft_states(weights, shape, hidden, [*known, *guesses[:i]], "bfloat16")
        logits = linear(states[-1:], weights.lm_head, "bfloat16")[0, :N_REAL_VOCAB]
        assert logits.max() - logits[guesses[i]] < 0.02  # of magnitude 4; near-ties may fall either way
        own = goes_on[1](weights, shape, hidden, [*known, *guesses[:i]], "bfloat16")
        hidden = torch.cat([hidden, own[-1:]])
    found = tensor_of(runner.draft_head.buffers.logits[:1])[0, :N_REAL_VOCAB]
    assert (found - logits).abs().max() < 0.2 and (found - logits).abs().median() < 0.02


@pytest.mark.parametrize("kind", ["dense", "flash"])
def test_its_keys_and_values_are_the_same_on_every_way(kind: str) -> None:
    """In one chunk, in several, token by token, with guesses and without, beside others: bit for bit."""
    path = tiny_checkpoint(kind, has_mtp=True)
    ids, n = prompt(), 140
    runner = build(path)
    run(runner, of := sequence(ids), len(ids), 3)
    while len(of.tokens) < n + 1:
        run(runner, of, 1, len(of.tokens) % 4)
    truth, tokens = kept(runner, of, 128), list(of.tokens)
    assert len(set(truth[0, 0, :, 0].tolist())) > 100

    runner = build(path)
    run(runner, other := sequence(tokens[:n]), 64, draws=False)
    run(runner, other, n - 64)
    assert other.tokens[-1] == tokens[n]
    np.testing.assert_array_equal(kept(runner, other, 128), truth)

    runner = build(path)
    scored = sequence(tokens[:n], prompt_logprobs=0)
    for length in (30, 64, 46):  # each row has logits, as those of decodes
        run(runner, scored, length, prompt_logprobs=True, draws=length == 46)
    np.testing.assert_array_equal(kept(runner, scored, 128), truth)

    runner = build(path)
    run(runner, first := sequence(ids), 64, draws=False)
    run(runner, second := sequence(prompt(50, seed=1), batch_slot=1), 50, 2)
    run(runner, first, len(ids) - 64)
    while len(first.tokens) < n + 1:  # nothing is guessed for the first, so its rows wait for the end of a page
        n_guesses = len(first.tokens) % 3
        step = Step([Chunk(s, s.n_computed, 1) for s in (first, second)], [Draw(0, first), Draw(1, second, n_guesses)])
        result = runner.step(step)
        assert [len(g) for g in result.guesses] == [0, min(n_guesses, 1 if len(second.tokens) % 64 == 0 else 9)]
        for s, drawn in zip((first, second), result.tokens, strict=True):
            s.n_computed += 1
            s.tokens.extend(drawn)
    assert list(first.tokens) == tokens
    np.testing.assert_array_equal(kept(runner, first, 128), truth)


def test_more_rows_than_a_step_has() -> None:
    """Rows of many sequences that waited, and a chunk: in turns."""
    path = tiny_checkpoint("dense", has_mtp=True)
    runner = build(path, max_step_tokens=64)
    assert runner.draft_head.n_rows < 3 * 63
    many = [sequence(prompt(62, seed=i), batch_slot=i) for i in range(4)]
    for of in many:
        run(runner, of, 62)
    step = Step([Chunk(of, 62, 1) for of in many], [Draw(i, of, 2) for i, of in enumerate(many)])
    together = runner.step(step).guesses
    for i in range(4):
        alone = build(path)
        run(alone, of := sequence(prompt(62, seed=i), batch_slot=i), 62)
        assert run(alone, of, 1, 2) == together[i] and len(together[i]) == 2


def test_guesses_end_where_pages_end() -> None:
    runner = build(tiny_checkpoint("dense", has_mtp=True))
    of = sequence(prompt(PAGE_SIZE - 3))
    of.pages = of.pages[:1]
    assert [len(run(runner, of, n, 8)) for n in (PAGE_SIZE - 3, 1, 1)] == [4, 3, 2]
    assert len(run(runner, of, 1, 8)) == 1  # the next token has no page yet


def test_what_draws_a_token_draws_a_guess() -> None:
    """Penalties, biases and bans see the guesses before."""
    runner = build(tiny_checkpoint("dense", has_mtp=True))
    biased = {"logit_bias": {7: 50.0}, "frequency_penalty": 2.0}
    assert run(runner, sequence(prompt(9), **biased), 9, 3) == [7, 7, 7]
    runner = build(tiny_checkpoint("dense", has_mtp=True))
    assert run(runner, sequence(prompt(9), logit_bias={7: 50.0, 500: 90.0}), 9, 2) == [7, 7]  # 500: no token
    seeds = set()
    for batch_slot in range(4):
        of = sequence(prompt(9), batch_slot=batch_slot, temperature=5.0)
        seeds.add(tuple(run(runner, of, 9, 4)))
    assert len(seeds) == 4


CONSTRAINTS = {
    "allowed": (Constraint(allowed=bytes([0b01100000])), lambda drawn: {*drawn} <= {5, 6}),
    "bad word": (Constraint(bad_ids=((7, 7),)), lambda drawn: drawn[::2] == [7, 7, 7] and 7 not in drawn[1::2]),
    "closing": (
        Constraint(think_end_id=32, think_budget=0, close_ids=(30, 31, 32)),
        lambda drawn: drawn[:3] == [30, 31, 32] and drawn[3:] == [7, 7],
    ),
    "end of the budget": (
        Constraint(think_end_id=9, think_budget=2, close_ids=(9,), begin_ids=(8, 8)),
        lambda drawn: drawn == [7, 7, 9, 8, 8],
    ),
    "thought": (Constraint(grammar="anything", think_end_id=9), lambda drawn: 7 not in drawn),
    "grammar": (Constraint(grammar="anything"), lambda drawn: drawn == [3, 7, 7, 7, 7]),
}
"""And what is drawn and then guessed under them, where 7 is the likeliest."""


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_a_guide_says_is_said_of_guesses(name: str) -> None:
    """All but what a grammar says, which has not seen what was drawn; such guesses are cut before they run (Guides.ahead)."""
    constraint, is_right = CONSTRAINTS[name]
    runner = build(tiny_checkpoint("dense", has_mtp=True))
    ends = {"stop_token_ids": (7,)} if name == "thought" else {}
    of = sequence(prompt(9), logit_bias={7: 50.0}, constraint=constraint, **ends)
    n_ids, is_lexical = N_REAL_VOCAB, constraint.allowed or constraint.bad_ids
    of.guide = guide = Guide(of, constraint, n_ids, Lexicon(constraint, n_ids) if is_lexical else None)
    if constraint.grammar:
        guide.words = np.zeros(-(-n_ids // 32), np.int32)
        guide.words[0] = 1 << 3  # its grammar begins with id 3
    guesses = run(runner, of, 9, 4)
    assert is_right([of.tokens[-1], *guesses]) and len(guesses) == 4, (of.tokens[-1], guesses)
    assert not ends or guide.bans_end


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_heads(quantize: str) -> None:
    path = tiny_checkpoint("moe", has_mtp=True, experts="split")
    guesses = run(build(path, quantize=quantize), sequence(prompt()), 97, 3)
    assert len(guesses) == 3


@pytest.mark.parametrize(("kind", "type"), [*((kind, "Q8_0") for kind in KINDS), ("moe", "IQ2_S")])
def test_heads_of_gguf_files(kind: str, type: str) -> None:
    path = tiny_gguf(kind, type, has_mtp=True)
    runner = build(path)
    assert runner.info.has_draft_head and runner.model.weights.draft_head.fc.whole.format.name == type
    assert len(run(runner, sequence(prompt()), 97, 3)) == 3
    assert not build(path, max_drafts=0).info.has_draft_head


def test_a_head_that_is_not_there_or_not_whole() -> None:
    for options in ({}, {"extras": True}):
        runner = build(tiny_checkpoint("dense", **options))
        assert not runner.info.has_draft_head and runner.info.max_drafts == 8
        assert run(runner, sequence(prompt()), 97, 3, draws=False) == []
    config = tiny_checkpoint("dense", extras=True) / "config.json"
    assert runner.info.notices == [
        "skipped 3 vision tensors: only the text stack is run",
        "skipped 2 MTP tensors: only the text stack is run",
        f"pictures are refused: {config}: config field 'vision_config.hidden_size': found 144; supported: a multiple of 32",
    ]


def test_without_drafts_there_is_no_head() -> None:
    path = tiny_checkpoint("dense", has_mtp=True)
    on, off = build(path), build(path, max_drafts=0)
    assert on.info.has_draft_head and not off.info.has_draft_head
    assert on.plan.page_bytes == 2 * off.plan.page_bytes  # one attention layer, and the head's
    assert on.plan.weight_bytes > off.plan.weight_bytes
    assert on.info.notices == off.info.notices == []
    with pytest.raises(CheckpointError):
        load_weights(tiny_checkpoint("dense"), stored_shape(path, ModelShape.from_directory(path), drafts=True))
