"""Results that a GPU computed ahead of the scheduler, kept until a step asks for them.

They are tokens (and codes, of a speech model) on their way to the host, and logits that wait for a draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deltic.engine.messages import MAX_LOGPROBS, TokenLogprob
from deltic.engine.step import Sequence
from deltic.ops.geometry import N_CODES
from deltic.ops.gpu.sample import Drawn
from deltic.runtime.gpu.batch_slots import Ring

N_PENDING = 8
"""Results on their way to the host, at most: of this step's two kinds of draws, its prefill, and the decode
that runs ahead, twice.
"""


@dataclass(eq=False)
class Pending:
    """Tokens on their way to the host."""

    rows: dict[Sequence, int]
    """First row of each sequence. A draft has several."""
    tokens: Tensor  # int32, pinned
    event: torch.cuda.Event | None = None
    logprobs: tuple[Tensor, ...] | None = None
    """Pinned, where somebody asked for them: of the tokens, and ids and values of the likeliest."""
    codes: Tensor | None = None
    """int32 [n, 16], pinned: of the frames that a speech model's tokens follow."""
    guesses: Tensor | None = None
    """int32 [guesses, n], pinned: of a draft head, one below the other."""
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Logprobs of a prefill's prompts, by chunk."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Vectors of a prefill's prompts, by the number of the draw."""
    is_own: bool = False
    """True if the memory is its own, not pinned buffers that are soon used again."""

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def only(self, sequence: Sequence) -> Pending:
        """Returns what it holds of one sequence, in memory of its own."""
        if self.is_own:
            return self
        self.wait()
        row = slice(self.rows[sequence], self.rows[sequence] + 1)
        logprobs = None if self.logprobs is None else tuple(part[row].clone() for part in self.logprobs)
        codes = None if self.codes is None else self.codes[row].clone()
        tokens = self.tokens[row].clone()
        return Pending({sequence: 0}, tokens, logprobs=logprobs, codes=codes, is_own=True)


class ResultBuffers:
    """Draws on their way to the host, in pinned buffers that are used in turn."""

    def __init__(self, out: dict[str, Drawn], n_rows: int, codes: Tensor | None = None) -> None:
        """out: of a decode, and of a prefill. n_rows: most draws of one. codes: int32 [n, 16], of a speech
        model's decodes, of which nobody wants log-probabilities.
        """
        self._out, self._codes, self._turn = out, codes, 0
        self._is_gpu = out["decode"].token.is_cuda

        def pinned(*size: int, dtype: torch.dtype = torch.int32) -> list[Tensor]:
            return [torch.empty(size, dtype=dtype, pin_memory=self._is_gpu) for _ in range(N_PENDING)]

        self._tokens = pinned(n_rows)
        self._host_codes, self._logprobs = list[Tensor](), list[tuple[Tensor, ...]]()
        if codes is not None:
            self._host_codes = pinned(n_rows, N_CODES)
        else:
            of_token, of_top = (pinned(n_rows, *more, dtype=torch.float32) for more in ((), (MAX_LOGPROBS,)))
            self._logprobs = list(zip(of_token, pinned(n_rows, MAX_LOGPROBS), of_top, strict=True))

    def send(self, rows: dict[Sequence, int], n: int, kind: str, pending: Pending | None = None) -> Pending:
        """Starts the way of n draws to the host, behind a decode or a prefill: those of each sequence begin
        in its row. pending: of a draft head, which has sent the tokens with its guesses.
        """
        turn, out = self._turn, self._out[kind]
        self._turn = (turn + 1) % N_PENDING
        if pending is None:
            pending = Pending(rows, self._tokens[turn][:n])
            pending.tokens.copy_(out.token[:n], non_blocking=True)
        if self._codes is not None and kind == "decode":
            pending.codes = self._host_codes[turn]
            pending.codes[:n].copy_(self._codes[:n], non_blocking=True)
        if any(s.request.params.logprobs is not None for s in rows):
            pending.logprobs = self._logprobs[turn]
            for target, source in zip(pending.logprobs, (out.logprob, out.top_ids, out.top_logprobs), strict=True):
                target[:n].copy_(source[:n], non_blocking=True)
        if self._is_gpu:
            pending.event = torch.cuda.Event()
            pending.event.record()
        return pending


class Ahead(NamedTuple):
    """A decode that ran ahead of the scheduler.

    The chunk that asks for exactly this decode uses it. Any other chunk of its sequence drops it, and so does
    the sequence's end.
    """

    position: int
    """Position of the token that was fed."""
    pending: Pending | None
    """Results under way. None: only the forward ran, and its logits are in `Undrawn`."""
    n_preempted: int
    """Times that its sequence had lost its batch slot by then."""

    def only(self, sequence: Sequence) -> Ahead:
        """The same, without a hold on a pinned buffer."""
        if self.pending is None:
            return self
        return Ahead(self.position, self.pending.only(sequence), self.n_preempted)


class Undrawn:
    """Logits of forwards that ran ahead, from which nothing is drawn yet, since the masks were not there.

    They lie where the forward left them. A row that is not drawn from before the next forward (its mask is
    late, or its sequence was preempted) is copied to one of the spare rows. Each sequence has had a spare row
    from the beginning, so there is always room.
    """

    def __init__(self, logits: Tensor, n_rows: int) -> None:
        """logits: float32 [n_rows + n, V]: a forward writes the first n_rows, the others are to keep."""
        self.logits = logits
        device = logits.device
        self._kept = list(range(n_rows, len(logits)))  # those that are free
        self._own: dict[Sequence, int] = {}  # of those, the one of each sequence
        self._row: dict[Sequence, int] = {}  # where its logits are now
        self.draws = torch.zeros((3, n_rows), dtype=torch.int32, device=device)
        """Inputs of a recorded draw: rows, batch slots (-1: no draw) and positions of the tokens to be
        drawn."""
        self._ring = Ring(3 * n_rows, 3, device)

    @property
    def n_free(self) -> int:
        """Sequences for which there is room."""
        return len(self._kept)

    def put(self, sequences: list[Sequence]) -> None:
        """The forward that was just started was of these, row by row; at most n_free."""
        for row, sequence in enumerate(sequences):
            self._row[sequence], self._own[sequence] = row, self._kept.pop()

    def take(self, sequence: Sequence) -> int | None:
        """Takes a sequence's row, which may be read until the next forward. None: there are no
        logits of it.
        """
        row = self._row.pop(sequence, None)
        if row is not None:
            self._kept.append(self._own.pop(sequence))
        return row

    def keep(self) -> None:
        """Copies rows that the next forward would overwrite to spare rows."""
        for sequence, row in self._row.items():
            own = self._own[sequence]
            if row != own:
                self.logits[own].copy_(self.logits[row])
                self._row[sequence] = own

    def send(self, rows: list[int], batch_slots: list[int], positions: list[int]) -> None:
        """Sends what the next draw reads. The one before has been read."""
        buffer, n = self._ring.take().view(self.draws.shape), len(rows)
        words = buffer.numpy()
        words[0, :n], words[1, :n], words[2, :n] = rows, batch_slots, positions
        words[1, n:] = -1
        self.draws.copy_(buffer, non_blocking=True)
        self._ring.used()
