"""Which tokens run in the next step.

A sequence waits (owns nothing), prefills (owns a slot, and pages for what was computed) or decodes. Each step
takes every decode, then fills what is left of the token budget with prefill chunks, first come, first served
within a priority. `plan` makes a step, the runner runs it, `commit` takes what was drawn; requests come and
go in between.

A sequence starts behind the longest prefix that the cache has. It is held back while that is brought from a lower tier, and
while another prefill, which goes first in any case, computes what both begin with: those behind it may overtake it then.

Nothing waits for ever. Prefills are admitted only while the pages for all of them are to be had, so once no decode
runs they cannot be short of any. A decode that needs a page takes it from the youngest that runs, and `add`
refuses a request that would not fit alone; so the oldest decode ends, and then the next. A sequence that
loses its pages comes back with them from host memory, or is computed again from its tokens: prefill and decode give the
same bits, so its output does not change.

A step costs O(sequences that run), not O(tokens): only a fork copies its prompt's ids, once.
"""

from __future__ import annotations

import random
import time
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import chain

import msgspec

from deltic.engine.cache import Cache, pages_for
from deltic.engine.request import (
    PAGE_SIZE,
    Chunk,
    Draw,
    FinishReason,
    Output,
    Request,
    Sequence,
    Step,
    StepResult,
)
from deltic.engine.tree import DEVICE

NOT_FINITE = "nothing can be drawn: the model gave logits that are not finite (is the checkpoint damaged?) or all ids are banned"


class RequestError(ValueError):
    """A request that this engine cannot run; the message says why and what would do."""


class StepCost:
    """The duration of a step as `base(n_decodes) + slope * n_prefill_tokens`, learned from steps as they run.

    `base` is a line fitted to the steps without prefill, `slope` what the others took beyond it for each
    token, both least squares with exponentially fading weights: contexts grow and machines get busy, so old
    steps count less. While nothing is known of `base` it counts as 0 and `slope` carries everything, which
    errs to the safe side.
    """

    def __init__(self, target_s: float, decay: float = 0.95) -> None:
        self.target_s = target_s
        self.decay = decay
        # Fading sums: of steps without prefill (n decodes, t seconds), of those with (p tokens, x seconds more).
        self._w = self._n = self._t = self._nn = self._nt = 0.0
        self._pp = self._px = 0.0

    def observe(self, n_prefill: int, n_decodes: int, seconds: float) -> None:
        """Learns from one step."""
        if n_prefill:
            extra = max(0.0, seconds - self.base_s(n_decodes))
            self._pp = self._pp * self.decay + n_prefill * n_prefill
            self._px = self._px * self.decay + n_prefill * extra
        else:
            self._w = self._w * self.decay + 1.0
            self._n = self._n * self.decay + n_decodes
            self._t = self._t * self.decay + seconds
            self._nn = self._nn * self.decay + n_decodes * n_decodes
            self._nt = self._nt * self.decay + n_decodes * seconds

    def base_s(self, n_decodes: int) -> float:
        """Seconds of a step of `n_decodes` decodes and no prefill."""
        if not n_decodes or not self._w:
            return 0.0
        mean_n, mean_t = self._n / self._w, self._t / self._w
        variance = self._nn / self._w - mean_n * mean_n
        slope = max(0.0, (self._nt / self._w - mean_n * mean_t) / variance) if variance > 1e-3 else 0.0
        return max(0.0, mean_t + slope * (n_decodes - mean_n))

    def prefill_budget(self, n_decodes: int) -> int:
        """Prefill tokens that keep a step with `n_decodes` decodes within the target: a multiple of 64, at least 64."""
        if not self._pp:
            return PAGE_SIZE
        slope_s = max(1e-9, self._px / self._pp)
        n_tokens = (self.target_s - self.base_s(n_decodes)) / slope_s
        return max(PAGE_SIZE, int(n_tokens) // PAGE_SIZE * PAGE_SIZE)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    """Who goes first: the lower rank. Unique among the open sequences."""
    return sequence.request.priority, sequence.arrival, sequence.index


def _mixed_seed(seed: int, index: int) -> int:
    """The seed of sequence `index`: the request's own for the first, else 63 bits of splitmix64 of both."""
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    """The first sequence of the request brings them, with its first token; computed again later, it does not."""
    return (
        sequence.request.params.prompt_logprobs is not None
        and sequence.index == 0
        and sequence.n_generated == 0
    )


class Scheduler:
    """The open sequences, in three lists, and the rules by which they move between them.

    | a sequence | is in | owns |
    | --- | --- | --- |
    | that was not admitted, or was preempted | `_waiting` | nothing; host memory perhaps |
    | whose prompt is being computed | `_prefills` | a slot, and pages for what is computed |
    | that decodes | `_decodes` | a slot, and pages for all its tokens |
    | of n > 1, until the first one's prompt is done | the first one's `siblings` | a slot once the first is admitted |

    A step has at most max(max_step_tokens, n_decodes + 64) tokens, n_decodes < max_num_seqs when it has
    prefill; at most max_logit_rows rows of logits; and at most max_num_seqs draws. Raises ValueError when the
    limits leave no way to guarantee progress.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        max_logit_rows: int,
        eos_token_ids: Iterable[int] = (),
        max_itl_ms: float | None = None,
    ) -> None:
        if min(cache.slots.n, cache.places.n) < max_num_seqs:
            raise ValueError(f"{cache.slots.n} state slots are too few for max_num_seqs {max_num_seqs}")
        if max_logit_rows < max_num_seqs + PAGE_SIZE:
            raise ValueError(f"max_logit_rows {max_logit_rows} must be max_num_seqs + {PAGE_SIZE} or more")
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.max_model_len = max_model_len
        self.max_logit_rows = max_logit_rows
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cost = StepCost(max_itl_ms / 1000) if max_itl_ms is not None else None
        self.n_preemptions = 0
        self.n_prompt_tokens = 0
        self.n_generated_tokens = 0
        self._open: dict[str, dict[int, Sequence]] = {}
        self._n_open = 0
        self._n_arrived = 0
        # A sequence that waits for its first sibling's prompt is in none of them, but in that one's `siblings`.
        self._waiting: list[Sequence] = []  # by rank
        self._prefills: list[Sequence] = []  # by rank
        self._decodes: list[Sequence] = []

    @property
    def n_open(self) -> int:
        return self._n_open

    @property
    def n_running(self) -> int:
        """Sequences that have a place."""
        return self.cache.places.n - self.cache.places.n_free

    def sequences(self) -> Iterable[Sequence]:
        """Every open sequence."""
        return chain.from_iterable(group.values() for group in self._open.values())

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues the request's n sequences. `max_tokens` is clipped to what max_model_len leaves.

        Raises RequestError when it could not run even alone, or its id is in use.
        """
        params, n_prompt = request.params, len(request.prompt_ids)
        if request.id in self._open:
            raise RequestError(f"request id {request.id!r} is in use; give each request its own")
        if n_prompt == 0:
            raise RequestError("the prompt is empty; it needs at least one token")
        if not 1 <= params.n <= self.max_num_seqs:
            raise RequestError(f"n = {params.n}: this engine runs 1 to {self.max_num_seqs} sequences at once")
        max_tokens = min(params.max_tokens, self.max_model_len - n_prompt)
        if max_tokens < min(params.max_tokens, 1):
            raise RequestError(
                f"the prompt has {n_prompt} tokens, and max_model_len is {self.max_model_len} for prompt and answer"
            )
        # The last token drawn is never computed, so it needs no room.
        n_needed = pages_for(max(n_prompt, n_prompt + max_tokens - 1))
        if n_needed > self.cache.pages.n:
            raise RequestError(
                f"prompt and answer of {n_prompt} + {max_tokens} tokens need {n_needed} pages, and the engine has"
                f" {self.cache.pages.n}; ask for fewer tokens or start it with more --n-pages"
            )
        if max_tokens < params.max_tokens:
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        seed = params.seed if params.seed is not None else random.getrandbits(63)
        prompt, now = array("i", request.prompt_ids), time.monotonic()
        # Kept once, as an array: a list is nine times as large, and siblings get their copy when they start.
        request = msgspec.structs.replace(request, params=params, prompt_ids=[])
        group = [
            Sequence(
                request,
                index,
                _mixed_seed(seed, index),
                array("i") if index else prompt,
                n_prompt,
                arrival=self._n_arrived,
                arrived_at=now,
            )
            for index in range(params.n)
        ]
        if params.prompt_logprobs is not None:
            group[0].prompt_logprobs = [None]
        group[0].siblings = group[1:]
        self.cache.open(group[0])
        for other in self._prefills:
            self.cache.want_junction(other, group[0])
        self._n_arrived += 1
        self._n_open += params.n
        self._open[request.id] = dict(enumerate(group))
        insort(self._waiting, group[0], key=_rank)

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Ends a request or one of its sequences; what it owned is free on return. Unknown ones are ignored."""
        group = self._open.get(request_id, {})
        # Siblings first, so that none is made the new first one only to be ended next.
        indices = sorted(group, reverse=True) if index is None else [index] if index in group else []
        return [self._end(group[i], "abort") for i in indices]

    def fail(self, step: Step, message: str) -> list[Output]:
        """Ends every sequence of a step that could not be run, with an error."""
        for chunk in step.chunks:
            self.cache.drop_snapshots(chunk)
        sequences = {
            id(s): s for s in chain((c.sequence for c in step.chunks), (d.sequence for d in step.draws))
        }
        failed = [s for sequence in sequences.values() for s in [*sequence.siblings, sequence]]
        return [self._end(sequence, "error", message) for sequence in failed]

    def _end(self, sequence: Sequence, reason: FinishReason, message: str | None = None) -> Output:
        """Takes an open sequence out, wherever it is."""
        self._unlist(sequence)
        if sequence.siblings:
            self._promote(sequence)
        self._close(sequence, reason)
        return Output(sequence.request.id, sequence.index, finish_reason=reason, error=message)

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        """Frees what a sequence that is in no list owns, and forgets it."""
        self.cache.release(sequence, keep_state=reason != "error")
        sequence.finish_reason = reason
        self._n_open -= 1
        group = self._open[sequence.request.id]
        del group[sequence.index]
        if not group:
            del self._open[sequence.request.id]

    def _unlist(self, sequence: Sequence) -> None:
        for other in self._open[sequence.request.id].values():
            if sequence in other.siblings:
                other.siblings.remove(sequence)
                return
        if sequence.slot is None:
            del self._waiting[bisect_left(self._waiting, _rank(sequence), key=_rank)]
        elif sequence in self._prefills:
            self._prefills.remove(sequence)
        else:
            self._decodes.remove(sequence)

    def _promote(self, sequence: Sequence) -> None:
        """The next sibling takes over from a first one that ends before its prompt is done, with all it computed."""
        heir, *siblings = sequence.siblings
        heir.siblings, sequence.siblings = siblings, []
        heir.tokens = sequence.tokens
        heir.prefix, sequence.prefix = sequence.prefix, None
        if sequence.slot is None:
            insort(self._waiting, heir, key=_rank)
            return
        heir.pages, sequence.pages = sequence.pages, heir.pages
        heir.slot, sequence.slot = sequence.slot, heir.slot
        heir.start_slot, sequence.start_slot = sequence.start_slot, None
        heir.n_computed, sequence.n_computed = sequence.n_computed, 0
        insort(self._prefills, heir, key=_rank)

    # One step.

    def plan(self) -> Step | None:
        """The next step, or None when nothing is open, or nothing can run before the tiers have moved something. Pages and
        slots are handed out here.

        Raises RuntimeError if sequences are open and none can run, which would be a fault of this file.
        """
        self.cache.store.poll()
        if not self._n_open:
            return None
        step = Step()
        self._grow_decodes()
        for i, sequence in enumerate(self._decodes):
            step.chunks.append(Chunk(sequence, sequence.n_computed, 1))
            step.draws.append(Draw(i, sequence))
        if self._prefills or self._waiting:
            self._plan_prefills(step)
        if not step.chunks:
            if self.cache.store.n_moving:
                return None
            raise RuntimeError(f"{self._n_open} sequences are open and none can run: the scheduler is stuck")
        return step

    def _grow_decodes(self) -> None:
        """Room for one token more in each decode; the youngest of all that run make way, themselves included."""
        full = [s for s in self._decodes if s.n_computed == len(s.pages) * PAGE_SIZE]
        for sequence in sorted(full, key=_rank):
            if sequence.slot is not None:
                self.cache.move_tail(sequence)
            while sequence.slot is not None and not self.cache.grow(sequence, sequence.n_computed + 1):
                self._preempt(max(chain(self._decodes, self._prefills), key=_rank))

    def _plan_prefills(self, step: Step) -> None:
        """Fills the step with prefill chunks, running and waiting sequences in the order of their rank."""
        n_decodes = len(step.chunks)
        budget = self.max_step_tokens - n_decodes
        if n_decodes and self.cost:
            budget = min(budget, self.cost.prefill_budget(n_decodes))
        budget = max(budget, PAGE_SIZE)  # decodes may slow a prefill, not stop it
        n_rows = self.max_logit_rows - n_decodes
        candidates = (s for s in self._waiting[:] if not self._is_held(s))
        candidate = next(candidates, None)
        i = 0  # into self._prefills
        while budget > 0:
            sequence = self._prefills[i] if i < len(self._prefills) else None
            if candidate and (not sequence or _rank(candidate) < _rank(sequence)):
                # One that is held back lets others pass; one that does not fit does not.
                candidate = None if self._admit(candidate, i, step) is False else next(candidates, None)
                continue
            if not sequence:
                break
            length = self._chunk_length(sequence, budget, n_rows)
            if not length:
                break  # first come, first served: nobody overtakes a prefill that lacks budget or pages
            wants_logprobs = _wants_prompt_logprobs(sequence)
            chunk = Chunk(sequence, sequence.n_computed, length, wants_logprobs)
            self.cache.plan_checkpoints(chunk)
            step.chunks.append(chunk)
            budget -= length
            if length < sequence.n_pending:
                n_rows -= length if wants_logprobs else 0
                i += 1
            else:
                n_rows -= length if wants_logprobs else 1
                del self._prefills[i]
                self._draw_first(step, sequence)

    def _is_held(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is better off waiting on: for its pages, or for a prefill that it shares them with."""
        if sequence.waits_for is not None:
            other, n_tokens = sequence.waits_for
            if other.slot is not None and other.n_computed < n_tokens:
                return True
            sequence.waits_for = None
        return self.cache.is_loading(sequence)

    def _admit(self, sequence: Sequence, i: int, step: Step) -> bool | None:
        """Moves a waiting sequence to place i of the prefills, if it fits; None when it is held back instead.

        It takes pages as it goes, but starts only when all its tokens fit beside what the other prefills
        still need: prefills never wait for each other's pages, and what was preempted does not come back only
        to be preempted again.
        """
        cache = self.cache
        group = [sequence, *sequence.siblings]
        if self.n_running + len(group) > self.max_num_seqs:
            return False
        n_promised = sum(pages_for(len(s.tokens)) - len(s.pages) for s in self._prefills)
        known = [] if _wants_prompt_logprobs(sequence) else cache.look_up(sequence)
        path = cache.usable(sequence, known)
        if self._waits_for_prefix(sequence, len(path) * PAGE_SIZE, step):
            return None
        if not cache.fits(sequence, path, n_promised):
            return False
        if cache.fetch(sequence, path):
            return None
        if self.n_running and cache.is_parked(sequence) and any(node.page[DEVICE] is None for node in path):
            return False  # what runs has the room that its pages need; without them, what is parked would be lost
        if not cache.admit(sequence, cache.usable(sequence, known, DEVICE), n_promised):
            return False
        cache.want_checkpoints(sequence, len(known) * PAGE_SIZE)
        for other in self._waiting[: self.max_num_seqs]:  # those that may come to run beside it
            if other is not sequence:
                cache.want_junction(sequence, other)
        for member in group:
            if not member.n_preempted:
                member.queued_s = time.monotonic() - member.arrived_at
        if not sequence.n_preempted and not _wants_prompt_logprobs(sequence):
            cache.note_lookup(sequence)
        self._waiting.remove(sequence)
        self._prefills.insert(i, sequence)
        return True

    def _waits_for_prefix(self, sequence: Sequence, n_usable: int, step: Step) -> bool:
        """Holds a sequence back if one that prefills now will have computed more of what both begin with than there is.

        That one goes first, so it takes no longer than to compute the same beside it.
        """
        if _wants_prompt_logprobs(sequence):
            return False
        running = (
            chunk.sequence for chunk in step.chunks if chunk.length > 1
        )  # the last chunk of some, perhaps
        for other in chain(running, self._prefills):
            n_common = self.cache.n_common(sequence, other)
            if other.n_computed < n_common > n_usable and _rank(other) < _rank(sequence):
                sequence.waits_for = other, n_common
                return True
        return False

    def _chunk_length(self, sequence: Sequence, budget: int, n_rows: int) -> int:
        """Tokens of `sequence` that run in this step, with pages for them: 0 if it has to wait.

        All that is pending, or else a multiple of 64: the grid on which a prefill may be cut.
        """
        if _wants_prompt_logprobs(sequence):
            budget = min(budget, n_rows)
        elif n_rows < 1:
            return 0
        n_pending = sequence.n_pending
        length = n_pending if n_pending <= budget else budget - budget % PAGE_SIZE
        if not self.cache.grow(sequence, sequence.n_computed + length):
            return 0  # decodes took what was free when it was admitted, and are not stopped for a prefill
        return length

    def _draw_first(self, step: Step, sequence: Sequence) -> None:
        """The last chunk of `sequence` was planned: draws from it, for its siblings too, which decode from now on."""
        chunk, n_tokens = len(step.chunks) - 1, len(sequence.tokens)
        assert sequence.slot is not None
        self._decodes.append(sequence)
        step.draws.append(Draw(chunk, sequence))
        for sibling in sequence.siblings:
            sibling.tokens = sequence.tokens[:]
            copies = self.cache.fork(sequence, sibling, n_tokens)
            if copies is None:  # no page for its partial last one: it starts over by itself
                self.cache.release(sibling)
                self.cache.open(sibling)
                insort(self._waiting, sibling, key=_rank)
                continue
            assert sibling.slot is not None
            step.page_copies += copies
            step.slot_copies.append((sequence.slot, sibling.slot))
            self._decodes.append(sibling)
            step.draws.append(Draw(chunk, sibling))
        sequence.siblings = []

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence and queues it again, at the head of its priority: it is older."""
        (self._prefills if sequence in self._prefills else self._decodes).remove(sequence)
        for member in (sequence, *sequence.siblings):
            self.cache.preempt(member)
        sequence.n_preempted += 1
        if _wants_prompt_logprobs(sequence):
            sequence.prompt_logprobs = [None]
        insort(self._waiting, sequence, key=_rank)
        self.n_preemptions += 1

    def commit(self, step: Step, result: StepResult) -> list[Output]:
        """Takes what the step computed and drew; one Output for each draw. Sequences that end here are freed."""
        for i, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            sequence.n_computed = chunk.start + chunk.length
            if chunk.length > 1 or sequence.start_slot is not None or sequence.n_computed % PAGE_SIZE == 0:
                self.cache.computed(chunk)
            if chunk.prompt_logprobs and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += result.prompt_logprobs[i]
            if chunk.start < sequence.n_prompt:
                self.n_prompt_tokens += chunk.length
        eos_token_ids = self.eos_token_ids
        outputs = []
        n_ended = 0
        for draw, token, logprob in zip(step.draws, result.token_ids, result.logprobs, strict=True):
            sequence = draw.sequence
            params = sequence.request.params
            output = Output(sequence.request.id, sequence.index, [token])
            outputs.append(output)
            if token < 0:
                output.token_ids, output.finish_reason, output.error = [], "error", NOT_FINITE
                self._close(sequence, "error")
                n_ended += 1
                continue
            if logprob is not None:
                output.logprobs = [logprob]
            if sequence.n_generated == 0:
                output.queued_s = sequence.queued_s
                output.cached_tokens = sequence.n_cached
            if sequence.prompt_logprobs is not None:
                output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            tokens = sequence.tokens
            if sequence.n_computed != len(tokens):  # a sibling, which had no chunk of its own
                sequence.n_computed = len(tokens)
                self.cache.publish(sequence)
            tokens.append(token)
            if not params.max_tokens:  # only the prompt was asked for
                output.finish_reason, output.token_ids, output.logprobs = "length", [], None
            elif token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
                output.finish_reason, output.stop_token_id = "stop", token
            elif len(tokens) - sequence.n_prompt >= params.max_tokens:
                output.finish_reason = "length"
            if output.finish_reason is not None:
                self._close(sequence, output.finish_reason)
                n_ended += 1
        if n_ended:
            self._decodes = [s for s in self._decodes if s.finish_reason is None]
        self.n_generated_tokens += sum(token >= 0 for token in result.token_ids)
        return outputs

    def observe(self, step: Step, seconds: float) -> None:
        """Tells the cost model, if there is a target, what a step took."""
        if self.cost:
            n_decodes = sum(chunk.length == 1 for chunk in step.chunks)
            self.cost.observe(step.n_tokens - n_decodes, n_decodes, seconds)

    def check(self) -> None:
        """Raises IntegrityError unless the open sequences, the prefix tree and the free lists make up all pages and slots."""
        self.cache.check(self.sequences())

    def reset_cache(self) -> None:
        """Forgets every prefix, in every tier; what runs goes on."""
        self.cache.reset(self.sequences())
