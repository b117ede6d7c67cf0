"""Steps as messages, for machines that run some of a model's layers: integers, each of which is sent once.

The engine's side (`StepTeller`) knows what a batch slot has been told of its sequence, and sends what is new:
tokens and pages behind those that are there. The other side (`Mirror`) keeps sequences that look to a runner
as the engine's do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltic.engine.messages import Constraint, Request, TokenLogprob
from deltic.engine.step import Chunk, Draw, HeldAdapter, Rule, Sequence, Step, StepResult


class SentRule(msgspec.Struct, array_like=True, frozen=True):
    """A Rule: the words of its mask."""

    mask: bytes | None
    bans_end: bool

    @classmethod
    def of(cls, rule: Rule) -> SentRule:
        return cls(None if rule.mask is None else rule.mask.tobytes(), rule.bans_end)

    @property
    def rule(self) -> Rule:
        return Rule(None if self.mask is None else np.frombuffer(self.mask, np.int32), self.bans_end)


class Newcomer(msgspec.Struct, array_like=True, frozen=True):
    """Tells what a sequence is, of one that its batch slot did not have before."""

    request: Request
    """Request without the prompt, whose ids are among the tokens."""
    index: int
    seed: int
    n_prompt: int
    adapter_slot: int
    """The row of its adapter in every machine's table; -1: it has none."""


class SentSequence(msgspec.Struct, array_like=True, frozen=True):
    """Tells what is new of the sequence in a batch slot, and the state slots of its chunk."""

    batch_slot: int
    newcomer: Newcomer | None
    tokens: bytes
    """int32: behind those that are known."""
    pages: bytes
    """int32: behind those that are known; all of them where their version has changed."""
    pages_version: int
    state_slot: int | None
    start_slot: int | None
    rule: SentRule | None
    """Rule of its guide for the next token; None: it has no guide."""


class SentChunk(msgspec.Struct, array_like=True, frozen=True):
    """A Chunk of the sequence in a batch slot."""

    batch_slot: int
    start: int
    length: int
    prompt_logprobs: bool
    snapshots: list[tuple[int, int]]
    n_redo: int
    drafts: list[int]
    rules: list[SentRule]


class SentStep(msgspec.Struct, tag="step", frozen=True):
    """A Step. draws: the number of the chunk, the batch slot of the sequence, and what is to be guessed."""

    sequences: list[SentSequence]
    chunks: list[SentChunk]
    draws: list[tuple[int, int, int]]
    slot_copies: list[tuple[int, int]]
    page_copies: list[tuple[int, int]]


class SentResult(msgspec.Struct, tag="result", frozen=True):
    """A StepResult of text."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob] | None]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    guesses: list[list[int]]
    guess_s: float

    @classmethod
    def of(cls, result: StepResult) -> SentResult:
        return cls(result.tokens, result.logprobs, result.prompt_logprobs, result.guesses, result.guess_s)

    @property
    def result(self) -> StepResult:
        return StepResult(self.tokens, self.logprobs, self.prompt_logprobs, self.guesses, self.guess_s)


class AskedAdapter(msgspec.Struct, tag="adapter"):
    """Asks for an Answer: a machine reads its copy of an adapter, and puts the terms of its layers into a
    slot.
    """

    path: str
    key: bytes
    """Key of its content, which must be the same everywhere."""
    adapter_slot: int
    number: int = 0


class DroppedAdapter(msgspec.Struct, tag="no adapter", frozen=True):
    """The adapter in a slot is not needed any more."""

    adapter_slot: int


class AskedTiers(msgspec.Struct, tag="tiers"):
    """Asks for an Answer: a machine opens its tiers."""

    content: str
    """Names all that decides the bits of pages and states, on any machine; "": none has a disk."""
    keys: bytes
    """Keys of the objects on the engine's disk, 16 bytes each; files of others are of use to nobody."""
    number: int = 0


class AskedMoves(msgspec.Struct, tag="moves"):
    """Asks for moves of the parts of pages and states that a machine has, and for an Answer unless number is
    0: out and in at once, load, save, delete and clear behind the steps; resume: once there is room on disk.
    """

    action: Literal["out", "in", "load", "save", "delete", "clear", "resume"]
    moves: list[tuple[str, bytes, bytes, int, int, tuple[int, ...]]] = []
    """Fields of each Move, from `kind` to `units`."""
    number: int = 0


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """Tells how a Task went. error: why it could not be done; None: it was."""

    number: int
    error: str | None = None
    failed: list[int] = []
    """Numbers of the moves that failed."""
    is_full: bool = False
    """True if a disk had no room for them."""


Task = AskedAdapter | AskedTiers | AskedMoves


class Errand:
    """A Task of the other machines, and their answers."""

    def __init__(self, n_machines: int) -> None:
        self.n_machines = n_machines
        self.answers: list[Answer] = []

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.n_machines

    @property
    def error(self) -> str | None:
        return next((answer.error for answer in self.answers if answer.error is not None), None)


class Machines(Protocol):
    """The other machines of a model, for what is done beside its steps, in the order in which it is asked."""

    def ask(self, task: Task) -> Errand: ...

    def tell(self, news: DroppedAdapter | AskedMoves) -> None: ...

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes the answers that have come, or waits for the next so long."""

    @property
    def n_heard(self) -> int:
        """Number of answers, and of signs that one will come."""


class _ToldSequence(NamedTuple):
    """Record of what a batch slot has been told."""

    sequence: Sequence
    tokens: array[int]
    """The sequence's array: another one is sent whole."""
    n_tokens: int
    pages_version: int
    n_pages: int


class StepTeller:
    """Makes messages of steps. One for each receiver, which must get all of them."""

    def __init__(self, n_batch_slots: int) -> None:
        self._known: list[_ToldSequence | None] = [None] * n_batch_slots

    def of(self, step: Step) -> SentStep:
        """The message of a step. Its sequences must have batch slots."""
        draws = [draw.sequence for draw in step.draws]
        drawn = {id(sequence) for sequence in draws}
        every = {id(one): one for one in (*(chunk.sequence for chunk in step.chunks), *draws)}
        return SentStep(
            [self._tell(one, is_drawn=id(one) in drawn) for one in every.values()],
            [_sent(chunk) for chunk in step.chunks],
            [(draw.chunk, _batch_slot(draw.sequence), draw.n_guesses) for draw in step.draws],
            step.slot_copies,
            step.page_copies,
        )

    def _tell(self, sequence: Sequence, *, is_drawn: bool) -> SentSequence:
        """Makes a message of what is new of a sequence."""
        number, known, newcomer = _batch_slot(sequence), self._known[_batch_slot(sequence)], None
        if known is None or known.sequence is not sequence or known.tokens is not sequence.tokens:
            known = _ToldSequence(sequence, sequence.tokens, 0, sequence.pages_version, 0)
            newcomer = Newcomer(
                _bare(sequence.request), sequence.index, sequence.seed, sequence.n_prompt, sequence.adapter_slot
            )
        n_pages = known.n_pages if known.pages_version == sequence.pages_version else 0
        tokens, pages, guide = sequence.tokens[known.n_tokens :], sequence.pages[n_pages:], sequence.guide
        self._known[number] = _ToldSequence(
            sequence, sequence.tokens, len(sequence.tokens), sequence.pages_version, len(sequence.pages)
        )
        return SentSequence(
            number,
            newcomer,
            tokens.tobytes(),
            array("i", pages).tobytes(),
            sequence.pages_version,
            sequence.state_slot,
            sequence.start_slot,
            SentRule.of(Rule.of(guide)) if guide is not None and is_drawn else None,
        )


def _batch_slot(sequence: Sequence) -> int:
    assert sequence.batch_slot is not None
    return sequence.batch_slot


def _bare(request: Request) -> Request:
    """A request without what only the engine reads."""
    constraint = None if request.params.constraint is None else Constraint()  # it may ban ends
    params = msgspec.structs.replace(request.params, constraint=constraint)
    pictures = [msgspec.structs.replace(picture, pixels=b"") for picture in request.pictures]
    return msgspec.structs.replace(request, prompt_ids=[], params=params, pictures=pictures, boundaries=[], labels={})


def _sent(chunk: Chunk) -> SentChunk:
    return SentChunk(
        _batch_slot(chunk.sequence),
        chunk.start,
        chunk.length,
        chunk.prompt_logprobs,
        list(chunk.snapshots),
        chunk.n_redo,
        list(chunk.drafts),
        [SentRule.of(rule) for rule in chunk.rules],
    )


class _ToldGuide:
    """A TokenGuide that says of the next token what the engine's has said."""

    is_ready, is_over, next_is_free = True, False, False

    def __init__(self, rule: Rule) -> None:
        self.mask: NDArray[np.int32] | None = rule.mask
        self.bans_end = rule.bans_end

    def behind(self, tokens: Iterable[int]) -> Rule:
        """The engine alone knows."""
        return Rule()

    def leaves_any(self, banned: Iterable[int]) -> bool:
        """The engine has asked."""
        return True


class Mirror:
    """Makes steps of messages: all that one StepTeller has made, in their order."""

    def __init__(self, n_batch_slots: int) -> None:
        self._sequences: list[Sequence | None] = [None] * n_batch_slots

    def step(self, sent: SentStep) -> Step:
        """The step. Raises IndexError, ValueError for a message that cannot be one of a StepTeller."""
        for each in sent.sequences:
            self._take(each)
        chunks = [
            Chunk(
                self._at(one.batch_slot),
                one.start,
                one.length,
                one.prompt_logprobs,
                one.snapshots,
                one.n_redo,
                one.drafts,
                [each.rule for each in one.rules],
            )
            for one in sent.chunks
        ]
        draws = [Draw(chunk, self._at(number), n_guesses) for chunk, number, n_guesses in sent.draws]
        return Step(chunks, draws, sent.slot_copies, sent.page_copies, runs_ahead=False)

    def _take(self, sent: SentSequence) -> None:
        if (new := sent.newcomer) is not None:
            self._sequences[sent.batch_slot] = sequence = Sequence(
                new.request, new.index, new.seed, array("i"), new.n_prompt, batch_slot=sent.batch_slot
            )
            sequence.adapter = HeldAdapter(new.adapter_slot) if new.adapter_slot >= 0 else None
        sequence = self._at(sent.batch_slot)
        sequence.tokens.frombytes(sent.tokens)
        if sequence.pages_version != sent.pages_version:
            sequence.pages_version, sequence.pages = sent.pages_version, []
        sequence.pages += array("i", sent.pages).tolist()
        sequence.state_slot, sequence.start_slot = sent.state_slot, sent.start_slot
        sequence.guide = None if sent.rule is None else _ToldGuide(sent.rule.rule)

    def _at(self, batch_slot: int) -> Sequence:
        """The sequence in a batch slot. Raises ValueError where there is none."""
        sequence = self._sequences[batch_slot]
        if sequence is None:
            raise ValueError(f"batch slot {batch_slot} has no sequence")
        return sequence
