"""The contract between the engine and the runtimes: sequences, the step that runs them, and its results.

Plain dataclasses of integers, without torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from deltic.engine.messages import Branch, FinishReason, Picture, PromptLogprobs, Request, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Progress = Callable[[str, float], None]
"""Called with the name of a stage of the start and the part of it that is done, 0 to 1."""


def silent(stage: str, done: float) -> None:
    """A Progress of which nobody is told."""


class Voice(Protocol):
    """An encoded voice (runtime/voices.py).

    The engine only carries it: to the rows of a prompt, and `state` to the vocoder.
    """

    @property
    def speaker(self) -> NDArray[np.float32]:
        """float32 [h]."""

    @property
    def codes(self) -> NDArray[np.int32] | None: ...

    @property
    def frames(self) -> NDArray[np.float32] | None:
        """float32 [R, h]: the rows of the reference frames."""

    @property
    def state(self) -> NDArray[np.float32] | None:
        """State of the vocoder behind the reference frames."""


class Rule(NamedTuple):
    """The rule that a guide has for one token."""

    mask: NDArray[np.int32] | None = None
    """The ids that may be drawn, as in Guide.mask."""
    bans_end: bool = False

    @classmethod
    def of(cls, guide: TokenGuide | None) -> Rule:
        """The rule that a guide has for the next token."""
        return cls() if guide is None else cls(guide.mask, guide.bans_end)

    def allows(self, token: int) -> bool:
        """Returns whether the mask lets a token be drawn."""
        return self.mask is None or bool(int(self.mask[token // 32]) >> token % 32 & 1)


class TokenGuide(Protocol):
    """Says which ids a sequence may draw next (engine/guides.py)."""

    @property
    def is_ready(self) -> bool:
        """True if a token may be drawn now."""

    @property
    def is_over(self) -> bool:
        """True if the answer ends here, without an end token."""

    @property
    def mask(self) -> NDArray[np.int32] | None:
        """int32 [ceil(n_ids / 32)]: bit id % 32 of word id // 32 says whether id may be drawn; None: any."""

    @property
    def bans_end(self) -> bool:
        """True if end tokens are forbidden."""

    @property
    def next_is_free(self) -> bool:
        """True if the token after the next has no mask."""

    def behind(self, tokens: Iterable[int]) -> Rule:
        """The rule of the token behind these, which it has not taken, as far as that is known."""

    def leaves_any(self, banned: Iterable[int]) -> bool:
        """Returns whether any id other than these may be drawn."""


def mixed_seed(seed: int, index: int) -> int:
    """The seed of sequence `index`: the request's own for the first, else 63 bits of splitmix64 of both."""
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """A LoRA adapter that the runner has."""

    adapter_slot: int
    """The row that it has in the table of adapters."""
    n_sequences: int = 0
    """Open sequences that have it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Sequence in the engine: its tokens and what it owns.

    `tokens[:n_computed]` have their KV in `pages` and their recurrent state in `start_slot` or, without one,
    in `state_slot`; the rest is still to be run, but for the `n_window` tokens behind them. While running,
    exactly one token (the last drawn) is not computed yet.
    """

    request: Request
    index: int
    seed: int
    """Seed of this sequence's draws: the request's seed, mixed with `index` when n > 1."""
    tokens: array[int]
    n_prompt: int
    """Tokens that were given: the prompt, and those of the sequence's branch."""
    n_computed: int = 0
    n_window: int = 0
    """Tokens behind n_computed that a draft's step has run: their KV is in `pages`, but the state has not
    seen them. The runner has what they bring to it.
    """
    pages: list[int] = field(default_factory=list)
    pages_version: int = 0
    """Counted up whenever an entry of `pages` that a step may have seen changes."""
    batch_slot: int | None = None
    """Row of the sequence in the tables of the step (page table, sampling parameters), while it runs."""
    state_slot: int | None = None
    """The state slot that its chunks write."""
    start_slot: int | None = None
    """The state slot that its next chunk starts from, when that is a checkpoint, which is only read."""
    arrival: int = 0
    """Order of arrival, to break ties of equal turn."""
    turn: int = 0
    """Tenants are served in order of this number. It rises when its tenant sends something more urgent."""
    arrived_at: float = 0.0
    """time.monotonic() of its arrival."""
    queued_s: float = 0.0
    """Seconds that it first waited for its batch slot."""
    siblings: list[Sequence] = field(default_factory=list)
    """n > 1: sequences that start when this one's prompt is done (they share its pages)."""
    prompt_logprobs: PromptLogprobs | None = None
    n_preempted: int = 0
    is_second_try: bool = False
    """True if the sequence's logits were not finite once, so it was computed again from nothing, without the
    cache.

    There is no third try.
    """
    prefix: Any = None
    """Tie of the sequence to the prefix tree (cache.Prefix); None: it neither reads nor feeds the tree."""
    n_cached: int = 0
    """Prompt tokens that it found there."""
    waits_for: tuple[Sequence, int] | None = None
    """A sequence with the same beginning, and how many tokens its prefill must reach before this one is
    admitted.
    """
    adapter: HeldAdapter | None = None
    """The adapter that changes its rows; None: there is none."""
    voice: Voice | None = None
    """The voice of the prompt's rows, kept as long as the sequence; None: it has none."""
    guide: TokenGuide | None = None
    """The guide that says which id may be next; None: any may."""
    drafter: Any = None
    """The drafts.Drafter that drafts for it; None: nobody did yet."""
    runs_ahead: bool = False
    """True if the runner may have started its next decode, which then has no draft (drafts.Drafting)."""
    finish_reason: FinishReason | None = None

    @property
    def adapter_slot(self) -> int:
        """The row of its adapter in the runner's table; -1: it has none."""
        return -1 if self.adapter is None else self.adapter.adapter_slot

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens known but not computed: the whole prompt at first, one while decoding."""
        return len(self.tokens) - self.n_computed - self.n_window

    @property
    def branch(self) -> Branch | None:
        """The branch that it reads behind the request's prompt; None: the request has none."""
        return self.request.branches[self.index] if self.request.branches else None

    @property
    def n_shared(self) -> int:
        """Tokens of the request's prompt, before the sequence's branch."""
        return self.n_prompt - (len(self.branch.ids) if self.branch else 0)

    @property
    def scored_from(self) -> int | None:
        """The first token behind which something may be scored: it and all others are to be computed. None:
        nothing is scored.

        Of a request without branches only the first sequence brings the prompt's log-probabilities, and not
        when it is computed again.
        """
        if self.n_generated > 0:
            return None
        if self.request.branches:
            return self.n_shared - 1
        return 0 if self.request.params.prompt_logprobs is not None and self.index == 0 else None

    @property
    def reads_whole_prompt(self) -> bool:
        """True if every token of the prompt has to be computed for this sequence, whatever the cache has."""
        pooling = self.request.pooling
        is_summed = bool(self.request.questions) or (pooling is not None and pooling.mode != "last")
        return is_summed or self.scored_from == 0

    def begin_prompt_logprobs(self) -> None:
        """Starts its log-probabilities afresh, if it wants any. The first token of a prompt has none."""
        if self.scored_from is not None:
            self.prompt_logprobs = PromptLogprobs()
            if self.branch is None:
                self.prompt_logprobs.extend([None])

    def read_prompt(self, first: Sequence) -> None:
        """Takes the prompt over from its request's first sequence, and reads its own branch behind it."""
        self.tokens = first.tokens[:]
        if self.branch is not None:
            self.tokens[first.n_shared :] = array("i", self.branch.ids)

    @property
    def lacks_text(self) -> bool:
        """Speech: whether the frame of its last token goes with a text that has not come yet.

        It stalls until then.
        """
        speech = self.request.speech
        return speech is not None and not speech.knows_text(self.n_generated - 1)

    @property
    def can_draw(self) -> bool:
        """True if the sequence's next token can be drawn: the mask is there, and the text that goes before
        it.
        """
        guide, speech = self.guide, self.request.speech  # most sequences have neither
        return (guide is None or guide.is_ready) and (speech is None or not self.lacks_text)


@dataclass(slots=True)
class Chunk:
    """A run of one sequence's tokens in a step: `tokens[start : start + length]`, or one and a draft."""

    sequence: Sequence
    start: int
    length: int
    prompt_logprobs: bool = False
    """The log-probabilities of the prompt's tokens are wanted (a logits row for each), or what its branch
    wants.
    """
    snapshots: Items[tuple[int, int]] = ()
    """(n, state slot): the state after the chunk's first n tokens is stored in `state_slot`, too. start + n
    is a multiple of PAGE_SIZE, 0 < n < length, ascending.
    """
    n_redo: int = 0
    """Accepted tokens before `start` whose inputs are in the sequence's window, not yet in its state."""
    drafts: Items[int] = ()
    """Tokens that may follow tokens[start]; `length` is 1 + their number. The state is left at `start`."""
    rules: Items[Rule] = ()
    """Rules of the draw from each row, where there is a draft and a guide."""
    pictures: Items[tuple[Picture, list[int]]] = ()
    """Pictures that some of its tokens are of, and the blocks of the pool (pictures.Pictures) that have the
    tower's rows of each, PAGE_SIZE rows in a block.
    """

    @property
    def is_decode(self) -> bool:
        """True if the chunk is one generated token, with a draft or without.

        One token of a prompt, the last behind a full page, is a prefill.
        """
        return self.length == 1 + len(self.drafts) and self.start >= self.sequence.n_prompt

    @property
    def scored(self) -> list[tuple[int, int]]:
        """The log-probabilities that it brings: pairs of an offset in the chunk and the id behind that token,
        ascending by offset.
        """
        if not self.prompt_logprobs:
            return []
        sequence, branch = self.sequence, self.sequence.branch
        if branch is not None:
            first = sequence.n_shared - 1 - self.start
            return [(first + n, id) for n, id in branch.scored if 0 <= first + n < self.length]
        return list(enumerate(sequence.tokens[self.start + 1 : min(self.start + self.length + 1, sequence.n_prompt)]))

    def logit_offsets(self, is_drawn: bool) -> Items[int]:
        """The tokens of the chunk whose logits are wanted, ascending. is_drawn: a token is drawn behind its
        last, and behind each of a draft.
        """
        if self.drafts or (self.prompt_logprobs and self.sequence.branch is None):
            return range(self.length)
        drawn = [self.length - 1] * is_drawn
        return sorted({*(offset for offset, _ in self.scored), *drawn}) if self.prompt_logprobs else drawn

    def accepted(self, drawn: list[int]) -> list[int]:
        """Cuts the draws from its rows to those that count: up to the first that was not drafted."""
        n = 1
        while n < len(drawn) and drawn[n - 1] == self.drafts[n - 1] and drawn[n] >= 0:
            n += 1
        return drawn[:n]


@dataclass(slots=True)
class Draw:
    """A token to draw: from the logits after `chunk`'s last token, with `sequence`'s parameters. Of a chunk
    with a draft one from each row, as long as the rows before gave what was drafted.
    """

    chunk: int
    """Index into Step.chunks."""
    sequence: Sequence
    n_guesses: int = 0
    """Tokens that the draft head should guess behind it."""


@dataclass(slots=True)
class Step:
    """The work of one forward, or, where decodes are a batch of their own, of two.

    Decodes come first, then prefill chunks. A decode without a draw computes a token that was drawn before,
    whose KV and state were lost. (Where prefill and decode give the same bits, lost tokens are computed in
    chunks of any length, and a preempted sequence's chunk may come after others.)

    After the forward and before the draws are read, states and pages are copied for sequences that fork off a
    finished prompt: `slot_copies` and `page_copies` are (source, destination) pairs.
    """

    chunks: list[Chunk] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    """Sequences that fork off in it and read their branches in later steps."""
    runs_ahead: bool = True
    """True if the runner may start the decodes behind this step before its tokens are read: they have no
    drafts.
    """

    @property
    def n_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def put_decodes_first(self) -> None:
        """Sequences that came back from host memory decode, and were planned among the prefills."""
        order = sorted(range(len(self.chunks)), key=lambda i: not self.chunks[i].is_decode)
        position = {old: new for new, old in enumerate(order)}
        self.chunks = [self.chunks[i] for i in order]
        for draw in self.draws:
            draw.chunk = position[draw.chunk]


class RunnerLostError(RuntimeError):
    """The runner can run no further step: the engine's process must end."""


@dataclass(slots=True)
class StepResult:
    """The results of a step: `tokens[i]` and `logprobs[i]` belong to `Step.draws[i]`.

    A draw gives one token, or several in a row. Of several, the step has computed KV and state of all but the
    last; where a draft was run, only their KV. -1 alone says that nothing could be drawn.

    `prompt_logprobs[c]` holds, for chunk c, the entries of `Chunk.scored`.
    """

    tokens: list[list[int]]
    """Tokens of each draw: a new list, not empty, which belongs to the reader."""
    logprobs: list[list[TokenLogprob] | None]
    """A log-probability of each token, or None where nobody asked."""
    prompt_logprobs: dict[int, list[TokenLogprob]]
    guesses: list[list[int]] = field(default_factory=list)
    """Guesses of the draft head behind what each draw gave: up to n_guesses tokens. Empty: there is no head.
    """
    guess_s: float = 0.0
    """Seconds that the head took."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Vectors of the prompts whose hidden states are read, by the number of the draw."""
    codes: NDArray[np.int32] | None = None
    """Frames of a speech model: [n_decodes, 16], that of chunk i, a decode, in row i (decodes come first)."""
