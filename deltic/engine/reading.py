"""Signs of life of prompts that are being computed: Outputs for who asked, and now and then a line of the
log.
"""

from __future__ import annotations

import logging
import time

from deltic.engine.messages import Output
from deltic.engine.step import Sequence
from deltic.logs import counted

log = logging.getLogger("deltic.engine")

LOG_S = 10.0
"""Seconds that a prompt takes before the log tells of it, and between two lines, of whichever prompts."""


class Reading:
    """Prompts that steps compute. A step without any costs nothing here."""

    def __init__(self) -> None:
        self.begun: list[Sequence] = []
        """Sequences that wanted to be told, and whose prompt has its place since the last `begin`."""
        self._logged_s = 0.0

    def enter(self, sequence: Sequence) -> None:
        """Notes that a sequence got its place."""
        if sequence.request.wants_progress and not sequence.n_generated:
            self.begun.append(sequence)

    def begin(self) -> list[Output]:
        """The first Output of each sequence that entered: what the cache had of its prompt."""
        begun, self.begun = self.begun, []
        return [_told(sequence) for sequence in begun]

    def advance(self, sequence: Sequence, n_others: int) -> list[Output]:
        """Notes that a chunk of a prompt was computed. n_others: other prompts that have their place.

        Returns the Output that says so, if it is wanted.
        """
        if sequence.n_generated:  # it is computed again: the client reads the answer by now
            return []
        now_s = time.monotonic()
        seconds = now_s - sequence.arrived_at - sequence.queued_s
        if seconds >= LOG_S and now_s - self._logged_s >= LOG_S and sequence.n_computed < sequence.n_prompt:
            self._logged_s = now_s
            log.info(
                "request %s: %d of %d tokens of the prompt are computed (%.0f %%) after %.0f s%s",
                sequence.request.id,
                sequence.n_computed,
                sequence.n_prompt,
                100 * sequence.n_computed / sequence.n_prompt,
                seconds,
                f"; {counted(n_others, 'prompt')} beside it" if n_others else "",
            )
        return [_told(sequence)] if sequence.request.wants_progress else []


def _told(sequence: Sequence) -> Output:
    return Output(
        sequence.request.id,
        sequence.index,
        cached_tokens=sequence.n_cached,
        queued_s=sequence.queued_s,
        n_read=sequence.n_computed,
    )
