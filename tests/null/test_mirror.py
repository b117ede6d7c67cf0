"""Steps as messages: what a machine with some of the layers sees of a step is what the engine's own runner sees."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from deltic.engine.messages import Constraint, Request, SamplingParams
from deltic.engine.mirror import Mirror, SentStep, StepTeller
from deltic.engine.step import Chunk, Draw, HeldAdapter, Rule, Sequence, Step

N_SLOTS = 4


def seen(step: Step) -> Any:
    """All that a runner reads of a step."""

    def of(sequence: Sequence) -> Any:
        rule = Rule.of(sequence.guide)
        return (
            sequence.request.id, sequence.request.params.temperature, sequence.index, sequence.seed, sequence.tokens.tolist(),
            sequence.n_prompt, sequence.adapter_slot, sequence.pages, sequence.pages_version, sequence.batch_slot, sequence.state_slot, sequence.start_slot,
            None if rule.mask is None else rule.mask.tolist(), rule.bans_end,
        )  # fmt: skip

    def rules(chunk: Chunk) -> Any:
        return [(None if rule.mask is None else rule.mask.tolist(), rule.bans_end) for rule in chunk.rules]

    chunks = [
        (
            of(c.sequence)[:12],
            c.start,
            c.length,
            c.prompt_logprobs,
            list(c.snapshots),
            c.n_redo,
            list(c.drafts),
            rules(c),
            c.scored,
        )
        for c in step.chunks
    ]
    return (
        chunks,
        [(draw.chunk, of(draw.sequence), draw.n_guesses) for draw in step.draws],
        step.slot_copies,
        step.page_copies,
    )


def sent(message: SentStep) -> tuple[SentStep, int]:
    """As it arrives, and its bytes."""
    data = msgspec.msgpack.encode(message)
    return msgspec.msgpack.decode(data, type=SentStep), len(data)


@pytest.mark.parametrize("seed", range(20))
def test_what_arrives_is_what_was_told(seed: int) -> None:
    """Sequences come, go on, move to other batch slots, change their pages and give way to others."""
    rng = random.Random(seed)
    teller, mirror = StepTeller(N_SLOTS), Mirror(N_SLOTS)
    sequences: list[Sequence] = []
    for n in range(60):
        if not sequences or (len(sequences) < N_SLOTS and rng.random() < 0.3):
            constraint = Constraint(grammar="long" * 100)
            request = Request(
                id=f"r{n}", prompt_ids=[1] * 500, params=SamplingParams(temperature=n / 9, constraint=constraint)
            )
            tokens = array("i", rng.choices(range(1000), k=rng.randrange(1, 200)))
            sequences.append(Sequence(request, rng.randrange(3), rng.randrange(2**60), tokens, len(tokens)))
            sequences[-1].adapter = rng.choice([None, HeldAdapter(rng.randrange(4))])
        elif rng.random() < 0.15:
            sequences.remove(rng.choice(sequences))
        for sequence, batch_slot in zip(sequences, rng.sample(range(N_SLOTS), len(sequences)), strict=True):
            if sequence.batch_slot is None or rng.random() < 0.1:
                sequence.batch_slot = batch_slot
        taken = [sequence.batch_slot for sequence in sequences]
        running = [s for i, s in enumerate(sequences) if taken.index(s.batch_slot) == i and rng.random() < 0.9]
        step = Step(slot_copies=[(n, n + 1)] * (n % 2), page_copies=[(n, 7)] * (n % 3))
        for sequence in running:
            sequence.tokens.extend(rng.choices(range(1000), k=rng.randrange(3)))
            sequence.pages += rng.choices(range(100), k=rng.randrange(2))
            if sequence.pages and rng.random() < 0.1:
                sequence.pages[0] += 1
                sequence.pages_version += 1
            if rng.random() < 0.1:
                sequence.tokens = sequence.tokens[:]
            sequence.state_slot, sequence.start_slot = rng.randrange(9), rng.choice([None, 3])
            mask = np.array([rng.randrange(2**31) for _ in range(4)], np.int32)
            guide: Any = SimpleNamespace(mask=rng.choice([None, mask]), bans_end=rng.random() < 0.5)
            sequence.guide = rng.choice([None, guide])
            drafts = rng.choices(range(9), k=rng.randrange(3))
            start = rng.randrange(len(sequence.tokens))
            rules = [Rule(mask, True)] * (1 + len(drafts)) if rng.random() < 0.2 else []
            step.chunks.append(
                Chunk(sequence, start, 1 + len(drafts), snapshots=[(64, 5)], n_redo=2, drafts=drafts, rules=rules)
            )
            if rng.random() < 0.8:
                step.draws.append(Draw(len(step.chunks) - 1, sequence, rng.randrange(3)))
        message, _ = sent(teller.of(step))
        arrived = mirror.step(message)
        assert seen(arrived) == seen(step)
        assert not arrived.runs_ahead


def test_each_token_and_page_is_sent_once() -> None:
    """A step of a long sequence is as short as that of a short one, and prompts and grammars are not repeated."""
    sizes = []
    for n_prompt in (10, 30_000):
        request = Request(
            id="r", prompt_ids=[1] * n_prompt, params=SamplingParams(constraint=Constraint(grammar="x" * 90_000))
        )
        sequence = Sequence(request, 0, 0, array("i", [70_000] * n_prompt), n_prompt, batch_slot=0, state_slot=0)
        teller = StepTeller(1)
        first, n_bytes = sent(teller.of(Step([Chunk(sequence, 0, 1)], [Draw(0, sequence)])))
        assert n_bytes < 4 * n_prompt + 200 and first.sequences[0].newcomer is not None
        sequence.tokens.append(5)
        sizes.append(sent(teller.of(Step([Chunk(sequence, 1, 1)], [Draw(0, sequence)])))[1])
    assert sizes[0] == sizes[1] < 120


def test_a_step_of_nobody_is_refused() -> None:
    sequence = Sequence(
        Request(id="r", prompt_ids=[], params=SamplingParams()), 0, 0, array("i", [1]), 1, batch_slot=0, state_slot=0
    )
    teller = StepTeller(1)
    teller.of(Step([Chunk(sequence, 0, 1)]))
    with pytest.raises(ValueError, match="batch slot 0 has no sequence"):
        Mirror(1).step(teller.of(Step([Chunk(sequence, 0, 1)])))
