"""The draft head (MTP) on a GPU: recordings behind the draws of a step, and how its guesses come to the host.

A row of the head is a token's hidden state and the id of the token behind it. Its keys and values stand in
the pages beside those of the model's layers, at the token's position: behind each prefill and each decode
they are written for what that has computed. The head's rows are those of the step, so a recording is by their
number, as those of decodes are.

Three kinds of recordings do: keys and values alone, where nothing is guessed; these and the first guess; and
one guess more, which is replayed as often as guesses are wanted. So the depth of a draft costs no recording.
What counts of a draft, the device finds itself (ops/gpu/draft.py): the host starts all guesses at once, and
reads them with the draws, in one copy. Where one sequence wants several, all guess as many.

A guess is drawn as the model's own token will be, with the same parameters, seed and position, but without a
mask, from the first ids (models/qwen/shape.N_DRAFTED).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.engine.drafts import n_guessable
from deltic.engine.step import Sequence, Step
from deltic.models.qwen.gpu import QwenGpu
from deltic.models.qwen.gpu_buffers import GpuMemory, HeadBuffers
from deltic.ops.gpu.blocks import PrefillInputs
from deltic.ops.gpu.sample import sample
from deltic.runtime.gpu.ahead import Pending
from deltic.runtime.gpu.buffers import GpuWorkspace, Guesses
from deltic.runtime.gpu.record import Body, Recordings, Watch
from deltic.runtime.plan import TextPlan


class DraftHead:
    """The head's recordings. Not thread-safe."""

    def __init__(
        self,
        model: QwenGpu,
        workspace: GpuWorkspace,
        guesses: Guesses[HeadBuffers],
        memory: list[GpuMemory],
        plan: TextPlan,
        recordings: Recordings,
    ) -> None:
        """recordings: the model's, to which the head's are added."""
        self._recordings = recordings
        self._model, self._workspace, self._guesses, self._memory = model, workspace, guesses, memory
        self._max_len = plan.max_model_len
        self._n_ids = min(plan.n_real, plan.shape.n_drafted)
        self._rows = rows = guesses.head.rows
        guesses.none.fill_(-1)
        rows.draws.row.copy_(torch.arange(len(rows.draws.row), dtype=torch.int32))
        is_gpu = rows.tokens.device.type == "cuda"
        # Nothing runs ahead behind guesses: what was sent is read before more is.
        self._host = torch.empty(rows.tokens.shape, dtype=torch.int32, pin_memory=is_gpu)
        self._watch = Watch(is_gpu)

    # Recording.

    def add_bodies(self) -> None:
        """Adds what is to be recorded for each number of rows."""
        for n in reversed(self._recordings.row_sizes):
            self._recordings.add("draft keys", n, self._keys_body(n))
            self._recordings.add("first guess", n, self._guess_body(n, self._drawn(n)))
            self._recordings.add("next guess", n, self._guess_body(n, None))

    def _drawn(self, n: int) -> Tensor:
        return self._workspace.out["decode"].token[:n]

    def _keys_body(self, n: int) -> Body:
        w, g = self._workspace, self._guesses
        return lambda: self._model.draft_keys(n, self._drawn(n), w.batch_slots, w.decode, g.head, self._memory)

    def _guess_body(self, n: int, drawn: Tensor | None) -> Body:
        """Makes a guess behind the draws, or behind the guess before. Contexts have no recordings of their
        own: it is one layer.
        """
        w, g, draws = self._workspace, self._guesses, self._rows.front(n).draws

        def body() -> None:
            logits = self._model.draft_guess(n, drawn, w.batch_slots, w.decode, g.head, self._memory, self._max_len)
            sample(logits, self._n_ids, draws, g.parameters, w.sample, g.out)

        return body

    def follow_prefill(self, n_blocks: int, inputs: PrefillInputs) -> None:
        """Starts the keys and values of a prefill, behind its draws."""
        w = self._workspace
        self._model.draft_keys_many(
            n_blocks, inputs, w.out["prefill"].token, w.batch_slots.page_table, w.prefill, self._memory
        )

    # A step.

    def run(self, n: int, n_guesses: int) -> None:
        """Starts the head behind the draws of a decode recorded for n rows."""
        if not n_guesses:
            self._recordings.of("draft keys", n).run()
            return
        self._watch.begin()
        self._recordings.of("first guess", n).run()
        for _ in range(n_guesses - 1):
            self._recordings.of("next guess", n).run()

    def send(self, rows: dict[Sequence, int], n: int, n_guesses: int) -> Pending:
        """Starts the way of the draws of n rows, and of the guesses behind them, to the host."""
        tokens = self._host[: 1 + n_guesses]
        tokens.copy_(self._rows.tokens[: 1 + n_guesses], non_blocking=True)
        self._watch.end()
        return Pending(rows, tokens[1, :n], guesses=tokens[:, :n])

    def read(
        self, step: Step, results: dict[Sequence, Pending], drawn: list[list[int]]
    ) -> tuple[list[list[int]], float]:
        """Reads what was guessed behind each draw of a step whose tokens are there, and the
        seconds it took.
        """
        guesses: list[list[int]] = []
        seconds = 0.0
        for draw, tokens in zip(step.draws, drawn, strict=True):
            pending, guessed = results[draw.sequence], list[int]()
            if pending.guesses is not None and draw.n_guesses and tokens[0] >= 0:
                latest, _, *before = pending.guesses[:, pending.rows[draw.sequence] + len(tokens) - 1].tolist()
                guessed = [*before, latest][: min(draw.n_guesses, n_guessable(draw.sequence, len(tokens)))]
                if -1 in guessed:  # nothing can be drawn of the head's ids
                    guessed = guessed[: guessed.index(-1)]
                seconds = self._watch.seconds()
            guesses.append(guessed)
        return guesses, seconds
