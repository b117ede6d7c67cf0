"""The scheduler, which decides what tokens run in the next step.

A sequence waits (owns nothing), prefills (owns a state slot, and pages for what was computed) or decodes.
Each step takes every decode, then fills the rest of the token budget with prefill chunks. Tenants take turns;
within one tenant and priority it is first come, first served. A request with a priority above 0 waits for all
others. One below 0 goes before its own tenant's less urgent requests, and each of those moves back behind it;
the turns of other tenants do not change. A tenant who has no batch slot does not wait until another's answers
end: the tenant with the most gives up what began last. If several tenants have prompts to compute, the tenant
with the fewest prompt tokens computed so far goes first. On a CPU a tenant's prompts and pictures are done in
short pieces where others have requests, and have half of the time beside the work of who has no more open.

A sequence starts after the longest prefix that the cache has. It is held back while the cache brings that
from a lower tier, and while another prefill of higher rank computes the beginning that both share. Others may
overtake it meanwhile.

A sequence may speak a text that is still being written, and run out of it. Then it stalls: it keeps its pages
and state slot until more text comes (`add_text`). If it is preempted, it waits, and others pass.

Nothing waits for ever, if texts end. Prefills are admitted only while there are pages for all of them, so
they cannot run short once no decode runs. A decode that needs a page takes it from a stalled sequence, or
from the youngest that runs; and `add` refuses a request that would not fit alone. So the oldest decode ends,
and then the next.

A sequence that loses its pages gets them back from host memory, or is computed again from its tokens. Its
output does not change. Where prefill and decode give the same bits, it is computed by prefill. Where they do
not (GPU), prefill computes its prompt, and decodes that draw nothing compute its generated tokens, one a
step. There prefill and decode are separate batches, and a prefill chunk takes whole blocks of rows: it always
starts at a multiple of 64, and never holds a generated token.

Logits that are not finite (a damaged file of the cache, a fault of the device) are never part of an answer.
The tree drops all that it has of such a sequence, and the sequence is computed once more from its tokens,
without the tree. If that happens a second time, the request fails: then the fault is the model's.

A step costs O(sequences that run), not O(tokens): only a fork copies its prompt's ids, once.
"""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import chain

import msgspec

from deltic.engine.admission import Admission, in_turns, rank
from deltic.engine.cache.cache import Cache
from deltic.engine.cache.checkpoints import fork_point
from deltic.engine.checks import RequestError, n_answer_tokens, n_most_computed
from deltic.engine.cost import StepCost, StepLoad
from deltic.engine.drafts import Drafting
from deltic.engine.guides import Guides
from deltic.engine.messages import AddText, EngineInfo, FinishReason, Output, Request
from deltic.engine.pictures import IDLE_S, Pictures
from deltic.engine.reading import Reading
from deltic.engine.step import Chunk, Draw, HeldAdapter, Sequence, Step, StepResult, Voice, mixed_seed
from deltic.engine.turns import TimeShares
from deltic.logs import counted
from deltic.ops.geometry import PAGE_SIZE

log = logging.getLogger("deltic.engine")

TOWER_SHARE = 0.85
"""The part of a target that a step and the vision tower fill: steps, and pieces, take longer now and then."""

NOT_FINITE = (
    "nothing can be drawn: the model gave logits that are not finite (is the checkpoint damaged?) or all ids are banned"
)
NOTHING_ALLOWED = (
    "nothing can be drawn: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar leave no token "
    "(or the logits are not finite)"
)


class Scheduler:
    """The open sequences of an engine, and the steps that run them.

    A step has at most max(max_step_tokens, n_decodes + 64) tokens, n_decodes < max_num_seqs when it has
    prefill; at most max_logit_rows rows of logits; and at most max_num_seqs draws. Without canonical_decode,
    it has at most max_num_seqs decodes and beside them prefill chunks of at most max_step_tokens / block_size
    blocks. Raises ValueError when the limits leave no way to guarantee progress.
    """

    def __init__(
        self,
        cache: Cache,
        info: EngineInfo,
        max_logit_rows: int,
        max_itl_ms: float | None = None,
        guides: Guides | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """info: of the engine, and the same that the cache has."""
        max_num_seqs = info.max_num_seqs
        if min(cache.state_slots.n, cache.batch_slots.n) < max_num_seqs:
            raise ValueError(f"{cache.state_slots.n} state slots are too few for max_num_seqs {max_num_seqs}")
        if max_logit_rows < max_num_seqs + PAGE_SIZE:
            raise ValueError(f"max_logit_rows {max_logit_rows} must be max_num_seqs + {PAGE_SIZE} or more")
        if info.max_step_tokens % info.block_size or PAGE_SIZE % info.block_size:
            raise ValueError(f"max_step_tokens {info.max_step_tokens} must be whole blocks of {info.block_size} tokens")
        self.cache, self.info, self.guides, self.pictures = cache, info, guides, pictures
        self.max_step_tokens = info.max_step_tokens
        self.max_logit_rows = max_logit_rows
        self.eos_token_ids = frozenset(info.eos_token_ids)
        self.cost = StepCost(max_itl_ms / 1000) if max_itl_ms is not None else None
        self.drafting = Drafting.of(info, guides)
        self.is_blocked = False
        """True if no open sequence can run until a text or a request comes, or one ends.

        All of them stall, or wait for what the stalled ones own.
        """
        self.reading = Reading()
        self.n_recomputed = 0
        self.n_prompt_tokens = 0
        self.n_generated_tokens = 0
        self._open: dict[str, dict[int, Sequence]] = {}
        self._n_arrived = 0
        self._admission = Admission(cache, self.reading)
        # The same lists: sequences also enter and leave them here, as steps are planned and committed.
        self._prefills, self._decodes = self._admission.prefills, self._admission.decodes
        self._preempt = self._admission.preempt
        self._had_prefill = False  # the last step
        self._n_open_of: Counter[str] = Counter()  # sequences, by tenant
        # On a GPU short chunks compute far fewer tokens a second, and where they pay was not measured.
        self._time = TimeShares(self._n_open_of, self.cost is not None and info.canonical_decode)
        self._n_prefilled: dict[str, int] = {}
        """Tokens of the tenants who have prefills, since there were several of them."""

    @property
    def n_open(self) -> int:
        return self._n_open_of.total()

    @property
    def n_running(self) -> int:
        """Number of sequences that have a batch slot."""
        return self.cache.batch_slots.n - self.cache.batch_slots.n_free

    @property
    def n_preemptions(self) -> int:
        return self._admission.n_preemptions

    @property
    def n_stalled(self) -> int:
        """Number of open sequences that lack text: no step can advance them."""
        return sum(sequence.lacks_text for sequence in self.sequences())

    def sequences(self) -> Iterable[Sequence]:
        """Every open sequence."""
        return chain.from_iterable(group.values() for group in self._open.values())

    # Requests come and go.

    def add(self, request: Request, voice: Voice | None = None, adapter: HeldAdapter | None = None) -> None:
        """Queues the request's n sequences, which keep `voice` and `adapter`.

        `max_tokens` is clipped to what max_model_len leaves.
        Raises RequestError when it could not run even alone, or its id is in use.
        """
        params, branches = request.params, request.branches
        n_each = [len(request.prompt_ids) + len(branch.ids) for branch in branches] or [len(request.prompt_ids)]
        if request.id in self._open:
            raise RequestError(f"request id {request.id!r} is in use; give each request its own")
        max_tokens = n_answer_tokens(request, max(n_each), self.info, self.cache.pages.n)
        if max_tokens < params.max_tokens:
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        seed = params.seed if params.seed is not None else random.getrandbits(63)
        prompt, now = array("i", request.prompt_ids), time.monotonic()
        # Kept once, as an array: a list is nine times as large, and siblings get their copy when they start.
        request = msgspec.structs.replace(request, params=params, prompt_ids=[])
        turn = self._admission.take_turn(request, [list(group.values()) for group in self._open.values()])
        own = partial(Sequence, arrival=self._n_arrived, turn=turn, arrived_at=now, voice=voice, adapter=adapter)
        lengths = n_each if branches else n_each * params.n
        group = [own(request, i, mixed_seed(seed, i), array("i"), n) for i, n in enumerate(lengths)]
        group[0].tokens = prompt + array("i", branches[0].ids if branches else ())
        if adapter is not None:
            adapter.n_sequences += params.n
        for sequence in group:
            sequence.begin_prompt_logprobs()
        group[0].siblings = group[1:]
        self.cache.open(group[0])
        if self.guides is not None:
            self.guides.open(group)
        for other in self._prefills:
            self.cache.checkpoints.want_junction(other, self.cache.n_common(group[0], other))
        self._n_arrived += 1
        self._n_open_of[request.tenant] += params.n
        self.is_blocked = False
        self._open[request.id] = dict(enumerate(group))
        self._admission.wait(group[0])

    def add_text(self, command: AddText) -> None:
        """Adds text to a request, whose sequences go on with it. One that is not open is left alone."""
        group = self._open.get(command.id)
        request = next(iter(group.values())).request if group else None  # all have the same
        if request is None or request.speech is None or not request.speech.is_open:
            return
        texts = *request.speech.trailing_ids, *command.text_ids
        self.is_blocked = False
        is_open = not command.is_last
        request.speech = msgspec.structs.replace(request.speech, trailing_ids=texts, is_open=is_open)
        if command.max_tokens is not None:
            most = min(command.max_tokens, request.params.max_tokens)
            request.params = msgspec.structs.replace(request.params, max_tokens=most)

    def abort(self, request_id: str, index: int | None = None, if_waiting: bool = False) -> list[Output]:
        """Ends a request or one of its sequences; what it owned is free on return. if_waiting: only if it
        never had a batch slot.
        """
        group = self._open.get(request_id, {})
        # Siblings first, so that none is made the new first one only to be ended next.
        indices = sorted(group, reverse=True) if index is None else [index] if index in group else []
        return [self._end(group[i], "abort") for i in indices if not (if_waiting and group[i].queued_s)]

    def fail(self, step: Step, message: str) -> list[Output]:
        """Ends every sequence of a step that could not be run, with an error."""
        for chunk in step.chunks:
            self.cache.checkpoints.drop(chunk)
        drawn = (draw.sequence for draw in step.draws)
        sequences = {id(s): s for s in chain((c.sequence for c in step.chunks), drawn, step.forks)}
        failed = [s for sequence in sequences.values() for s in [*sequence.siblings, sequence]]
        return [self._end(sequence, "error", message) for sequence in failed]

    def _refuse(self, sequence: Sequence, why: str) -> list[Output]:
        """Ends a sequence, and those that wait for its prompt, whose picture could not be encoded."""
        if sequence.finish_reason is not None:
            return []
        message = f"the engine could not encode a picture ({why}; its log says more). Send the request again."
        return [self._end(member, "error", message) for member in [*sequence.siblings, sequence]]

    def _end(self, sequence: Sequence, reason: FinishReason, message: str | None = None) -> Output:
        """Takes an open sequence out, wherever it is."""
        self._admission.take_out(sequence, self._open[sequence.request.id].values())
        self._close(sequence, reason)
        return Output(sequence.request.id, sequence.index, finish_reason=reason, error=message)

    def _close(self, sequence: Sequence, reason: FinishReason, keep_state: bool = True) -> None:
        """Frees everything that a sequence owns, and forgets it. The sequence must be in no list.

        keep_state: whether its state slot holds the state after exactly `n_computed` tokens.
        """
        self.cache.release(sequence, keep_state=keep_state and reason != "error")
        sequence.finish_reason = reason
        sequence.guide = None
        if self.pictures is not None:
            self.pictures.leave(sequence)
        if sequence.adapter is not None:
            sequence.adapter.n_sequences -= 1
        self.is_blocked = False
        self._n_open_of -= Counter((sequence.request.tenant,))  # who has none left is not in it
        group = self._open[sequence.request.id]
        del group[sequence.index]
        if not group:
            del self._open[sequence.request.id]

    # One step.

    def take_masks(self, step_s: float) -> list[Output]:
        """Takes finished masks, and waits a little for those of decodes.

        Returns the last Outputs of sequences that cannot have a mask, and of answers that are complete.
        """
        ended = [] if self.guides is None else self.guides.collect(self._decodes, step_s)
        ended = [guide for guide in ended if guide.sequence.finish_reason is None]
        return [self._end(g.sequence, "error" if g.error else "stop", g.error or None) for g in ended]

    def plan(self) -> Step | None:
        """Makes the next step, with its pages and state slots handed out.

        None when nothing is open, or when everything waits for the tiers, a mask or a text. Raises
        RuntimeError if sequences are open and none can run, which would be a fault of this file.
        """
        self.cache.store.poll()
        if not self._open:
            return None
        self._grow_decodes()
        step = Step()
        if len(self._n_open_of) > 1:
            self._admission.admit_newcomers(step, len(self._n_open_of))
        for sequence in self._decodes:
            start = sequence.n_computed + sequence.n_window
            if len(sequence.tokens) == start + 1:
                if not sequence.can_draw:
                    continue  # it sits this step out
                step.draws.append(Draw(len(step.chunks), sequence))
            chunk = Chunk(sequence, start, 1)
            chunk.n_redo = sequence.n_window
            step.chunks.append(chunk)
        decoding = {chunk.sequence.request.tenant for chunk in step.chunks}
        others = decoding | {s.request.tenant for s in self._prefills} if self._time.is_brief else set[str]()
        self._time.working = decoding | (self.pictures.waiting() if self.pictures is not None else set())
        # Where there is a target for the time between two tokens, a chunk uses it up: the vision tower and
        # prefills take turns.
        gives_way = self._tower_has_work and self._had_prefill and bool(self._decodes) and self.cost is not None
        if gives_way and self.pictures is not None:
            gives_way = not all(self._time.waits(tenant, others) for tenant in self.pictures.waiting())
        if (self._prefills or self._admission.waiting) and not gives_way:
            self._plan_prefills(step, others)
            if not self.info.canonical_decode:
                step.put_decodes_first()
        self._time.working = {chunk.sequence.request.tenant for chunk in step.chunks}
        if self.drafting is not None:
            self.drafting.plan(step)
        self._had_prefill = bool(step.chunks) and not step.chunks[-1].is_decode
        if not step.chunks:
            has_masks = self.guides is not None and self.guides.n_busy > 0
            if not (self.cache.store.n_moving or has_masks or self._tower_has_work):
                self.is_blocked = self.n_stalled > 0
                if not self.is_blocked:
                    raise RuntimeError(f"{self.n_open} sequences are open and none can run: the scheduler is stuck")
            return None
        return step

    @property
    def _tower_has_work(self) -> bool:
        """True while a picture of an open sequence is still to be encoded."""
        return self.pictures is not None and self.pictures.has_work

    def encode_pictures(self, step_s: float) -> list[Output]:
        """Runs the vision tower for as long as it may behind a step that took so long. A picture that fails
        ends its requests.
        """
        assert self.pictures is not None
        seconds = self.tower_s(step_s)
        if not seconds or all(map(self._time.waits, self.pictures.waiting())):
            return []
        tenants, begin = self.pictures.served(), time.perf_counter()
        failed = self.pictures.work(seconds)
        took_s = time.perf_counter() - begin
        for tenant in self._time.owing:
            if tenants - {tenant}:
                self._time.pay(tenant, took_s)
        self._time.owe(tenants, took_s)
        return [output for sequence, why in failed for output in self._refuse(sequence, why)]

    def tower_s(self, step_s: float) -> float:
        """Seconds that the vision tower may take behind a step that took so long; 0: not now.

        Without a target for the time between two tokens it takes as long as the step.
        """
        cost = self.cost
        if self._decodes:
            if cost is None:
                return step_s
            if self._had_prefill:
                return 0.0
            if self.info.n_lookahead:
                # The measured time is too short: this decode began in the step before, so the host waited for
                # its rest alone. And the next decode is queued before the tower.
                n_keys = sum(s.n_computed for s in self._decodes)
                step_s = max(step_s, cost.seconds(StepLoad(len(self._decodes), n_keys)))
            most_s = max(TOWER_SHARE * cost.target_s - step_s, 1e-3)
            return min(most_s, cost.brief_s(step_s, most_s)) if self._time.is_brief else most_s
        return cost.target_s if cost is not None and cost.is_shared else IDLE_S

    def _grow_decodes(self) -> None:
        """Makes room for one more token in each decode.

        Stalled sequences make way first, then the youngest running one, which may be the decode itself.
        """
        full = [s for s in self._decodes if s.n_computed == len(s.pages) * PAGE_SIZE and not s.lacks_text]
        for sequence in sorted(full, key=rank):
            if sequence.state_slot is not None:
                self.cache.checkpoints.move_tail(sequence)
            while sequence.state_slot is not None and not self.cache.grow(sequence, sequence.n_computed + 1):
                running = chain(self._decodes, self._prefills)
                self._preempt(max(running, key=lambda s: (s.lacks_text, rank(s))))
        n_ahead = self.info.n_lookahead
        for sequence in self._decodes if n_ahead else []:
            n_tokens = sequence.n_computed + sequence.n_window + 1
            if n_tokens + n_ahead > len(sequence.pages) * PAGE_SIZE:
                self._look_ahead(sequence, n_tokens)

    def _look_ahead(self, sequence: Sequence, n_tokens: int) -> None:
        """Takes pages for tokens that the device may compute before the first n_tokens were read.

        It only takes free pages; no sequence makes way. The runner looks how far the pages go.
        """
        if n_tokens + self.info.n_lookahead > len(sequence.pages) * PAGE_SIZE:
            n_most = n_most_computed(sequence.n_prompt, sequence.request.params.max_tokens)
            self.cache.grow(sequence, min(n_tokens + self.info.n_lookahead, n_most))

    def _plan_prefills(self, step: Step, others: set[str]) -> None:
        """Fills the step with prefill chunks: of running sequences, in turns, then of waiting, by rank.

        others: the tenants of decodes and prefills, where they share the time.
        """
        n_decodes = len(step.chunks)
        budget = self.max_step_tokens - (n_decodes if self.info.canonical_decode else 0)
        budget = max(budget, PAGE_SIZE)  # decodes may slow a prefill, not stop it
        cost = self.cost
        load = StepLoad.of(step.chunks, self.info.block_size) if cost and (self._decodes or cost.is_shared) else None
        n_rows = self.max_logit_rows - n_decodes
        candidates = (s for s in self._admission.candidates() if not self._time.waits(s.request.tenant))
        candidate = next(candidates, None)
        prefills, self._n_prefilled = in_turns(self._prefills, self._n_prefilled)
        if self.pictures is not None:
            self.pictures.begin_plan()
            # Claims come in turns, whoever owes: else two would drive out each other's pictures for ever.
            for owing in prefills if others else []:
                self.pictures.ready(owing, budget)
        prefills.sort(key=lambda s: self._time.waits(s.request.tenant, others))
        i = n_prefills = 0  # i: into prefills
        while budget > 0 and (n_prefills < self.info.max_prefill_seqs or not self.info.max_prefill_seqs):
            sequence = prefills[i] if i < len(prefills) else None
            if candidate and (not sequence or (rank(candidate) < rank(sequence) and len(self._n_prefilled) <= 1)):
                # One that is held back lets others pass; one that does not fit does not.
                is_admitted = self._admission.admit(candidate, step)
                if is_admitted:
                    prefills.insert(i, candidate)
                candidate = None if is_admitted is False else next(candidates, None)
                continue
            if not sequence:
                break
            tenant = sequence.request.tenant
            if self._time.waits(tenant):
                i += 1
                continue
            is_brief = bool(others - {tenant})
            most = cost.room(load, sequence.n_computed, budget, is_brief) if cost and load else budget
            if not (load and load.n_rows):
                most = max(most, min(budget, PAGE_SIZE))
            n_fork = fork_point(self.info, sequence)
            if n_fork is not None and n_fork <= sequence.n_computed:  # that was in the tree, with its state
                self._admission.fork(step, sequence, sequence.n_computed)
                n_fork = None
            length = self._chunk_length(sequence, most, n_rows)
            if n_fork is not None:
                length = min(length, n_fork - sequence.n_computed)
            if not length:
                break  # first come, first served: nobody overtakes a prefill that lacks budget or pages
            if self.pictures is not None and sequence.request.pictures:
                length = self.pictures.ready(sequence, length)
            if length == sequence.n_pending and not all(s.can_draw for s in [sequence, *sequence.siblings]):
                length = (sequence.n_computed + length - 1) // PAGE_SIZE * PAGE_SIZE - sequence.n_computed
            if length <= 0:  # its picture is not encoded, or its last page awaits a mask: later ones may run
                i += 1
                continue
            chunk = Chunk(sequence, sequence.n_computed, length, sequence.scored_from is not None)
            self.cache.checkpoints.plan(chunk)
            if self.pictures is not None and sequence.request.pictures:
                self.pictures.place(chunk)
            step.chunks.append(chunk)
            if self.info.canonical_decode or not chunk.is_decode:
                budget -= -(-length // self.info.block_size) * self.info.block_size
            n_prefills += not chunk.is_decode
            i += 1
            self._time.working.add(tenant)
            # What the vision tower did for it counts, too.
            n_seen = sum(picture.n_tokens for picture, _ in chunk.pictures if picture.first >= chunk.start)
            self._n_prefilled[tenant] = self._n_prefilled.get(tenant, 0) + length + n_seen
            if load:
                load.add(chunk, self.info.block_size)
            n_rows -= max(len(chunk.scored), len(chunk.logit_offsets(length == sequence.n_pending)))
            if chunk.start + length == n_fork:
                self._admission.fork(step, sequence, n_fork)
            if length == sequence.n_pending:
                self._prefills.remove(sequence)
                self._draw_first(step, sequence)
            elif not self.info.canonical_decode and chunk.start + length >= sequence.n_prompt:
                self._prefills.remove(sequence)
                self._decodes.append(sequence)  # what it has generated already follows one token a step

    def _chunk_length(self, sequence: Sequence, budget: int, n_rows: int) -> int:
        """Takes pages for the tokens of `sequence` that run in this step. Returns their number, 0 if it has
        to wait.

        It ends with the pending tokens or at a multiple of 64: the grid on which a prefill may be cut.
        """
        branch = sequence.branch
        if sequence.scored_from is not None and branch is None:
            budget = min(budget, n_rows)
        elif n_rows < 1 + (0 if branch is None else len(branch.scored)):  # the last row is drawn from
            return 0
        n_pending = sequence.n_pending
        if not self.info.canonical_decode:  # the rest of the prompt, or a decode
            n_pending = max(1, sequence.n_prompt - sequence.n_computed)
        length = n_pending
        if n_pending > budget:
            length = max(0, budget - (sequence.n_computed + budget) % PAGE_SIZE)
        if not self.cache.grow(sequence, sequence.n_computed + length):
            return 0  # decodes took what was free when it was admitted, and are not stopped for a prefill
        return length

    def _draw_first(self, step: Step, sequence: Sequence) -> None:
        """Plans the draws from the last chunk of a prompt, for its siblings too. All decode from now on."""
        chunk, n_tokens = len(step.chunks) - 1, len(sequence.tokens)
        assert sequence.state_slot is not None
        self._decodes.append(sequence)
        step.draws.append(Draw(chunk, sequence))
        for sibling in sequence.siblings:
            sibling.read_prompt(sequence)
            copies = self._admission.share(sequence, sibling, n_tokens)
            if copies is None:
                continue
            assert sibling.state_slot is not None
            step.page_copies += copies
            step.slot_copies.append((sequence.state_slot, sibling.state_slot))
            self._decodes.append(sibling)
            step.draws.append(Draw(chunk, sibling))
        for draw in step.draws if self.info.n_lookahead else []:
            if draw.chunk == chunk:
                self._look_ahead(draw.sequence, n_tokens)
        sequence.siblings = []

    def commit(self, step: Step, result: StepResult) -> list[Output]:
        """Takes the results of a step, and frees sequences that end.

        Returns one Output for each draw, and for each token where there was a draft, but none for sequences
        that start over. Before them are those that tell of prompts.
        """
        outputs = self._commit_chunks(step, result)
        spoilt: list[Sequence] = []
        n_drawn = 0
        for i, draw in enumerate(step.draws):
            sequence, chunk, drawn = draw.sequence, step.chunks[draw.chunk], result.tokens[i]
            if drawn[0] < 0:
                might_draw = self._might_draw(sequence)
                if might_draw and not sequence.is_second_try:
                    spoilt.append(sequence)
                else:
                    outputs.append(self._end(sequence, "error", NOT_FINITE if might_draw else NOTHING_ALLOWED))
                continue
            output = Output(sequence.request.id, sequence.index, drawn, result.logprobs[i])
            if sequence.n_generated == 0:
                output.queued_s, output.cached_tokens = sequence.queued_s, sequence.n_cached
            if sequence.prompt_logprobs is not None:
                output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            output.vector = result.vectors.get(i, b"")
            if chunk.sequence is not sequence:  # a sibling, which had no chunk of its own
                sequence.n_computed = len(sequence.tokens)
                self.cache.publish(sequence)
            n_taken = self._take(sequence, output)
            is_whole = n_taken == len(drawn)
            n_drawn += n_taken
            if chunk.drafts:
                sequence.n_window = n_taken
                output.n_drafted = len(chunk.drafts)
                output.n_accepted = n_taken - is_whole  # the last, if it was taken, was not in the draft
                if self.drafting is not None:
                    self.drafting.count(output.n_drafted, output.n_accepted)
                outputs += output.one_by_one()
            else:
                outputs.append(output)
                if n_taken > 1:
                    sequence.n_computed = len(sequence.tokens) - 1
                    self.cache.publish(sequence)  # it may have passed the end of a page
            if result.guesses and sequence.drafter is not None:
                sequence.drafter.guesses = result.guesses[i]
            if output.finish_reason is not None:
                self._decodes.remove(sequence)
                self._close(sequence, output.finish_reason, keep_state=is_whole)
        self.n_generated_tokens += n_drawn
        if spoilt:
            self._start_over(spoilt)
        return outputs

    def _commit_chunks(self, step: Step, result: StepResult) -> list[Output]:
        """Notes what a step computed, before anything is drawn of it.

        Returns what there is to tell of prompts.
        """
        told: list[Output] = []
        for i, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            n_new = 0 if chunk.drafts else chunk.length
            sequence.n_computed, sequence.n_window = chunk.start + n_new, 0
            if n_new > 1 or sequence.start_slot is not None or sequence.n_computed % PAGE_SIZE == 0:
                self.cache.computed(chunk)
            if chunk.prompt_logprobs and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs[i])
            if chunk.start < sequence.n_prompt:
                self.n_prompt_tokens += chunk.length
                told += self.reading.advance(sequence, len(self._prefills) - 1)
        return told

    def _take(self, sequence: Sequence, output: Output) -> int:
        """Gives a sequence the tokens of an Output, up to one that ends it; the others leave the Output.

        Returns how many it took.
        """
        tokens, params, n_known = sequence.tokens, sequence.request.params, len(sequence.tokens)
        for token in output.token_ids:
            tokens.append(token)
            if not params.max_tokens:  # only the prompt was asked for
                output.finish_reason, output.token_ids, output.logprobs = "length", [], None
            elif token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
                output.finish_reason, output.stop_token_id = "stop", token
            elif len(tokens) - sequence.n_prompt >= params.max_tokens:
                output.finish_reason = "length"
            elif sequence.guide is not None and self.guides is not None:
                self.guides.advance(sequence, token)
                output.finish_reason = "stop" if sequence.guide.is_over else None
            if output.finish_reason is not None:
                n = len(tokens) - n_known
                output.token_ids, output.logprobs = output.token_ids[:n], output.logprobs and output.logprobs[:n]
                break
        return len(tokens) - n_known

    def _might_draw(self, sequence: Sequence) -> bool:
        """Returns whether logits that are finite would have let a token be drawn."""
        params, banned = sequence.request.params, set[int]()
        if sequence.n_generated < params.min_tokens:
            banned = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        return sequence.guide is None or sequence.guide.leaves_any(banned)

    def _start_over(self, spoilt: list[Sequence]) -> None:
        """Has sequences whose logits were not finite computed once more, from nothing; then they go on."""
        n_pages = self.cache.distrust(spoilt, self.sequences())
        if self.pictures is not None:
            self.pictures.distrust(spoilt)
        for sequence in spoilt:
            self._decodes.remove(sequence)
            self.cache.release(sequence, keep_state=False)
            sequence.n_computed, sequence.n_window, sequence.is_second_try = 0, 0, True
            sequence.n_preempted += 1  # to the runner it is the same
            if not sequence.n_generated:
                sequence.n_cached = 0
            sequence.begin_prompt_logprobs()
            self._admission.wait(sequence)
        self.n_recomputed += len(spoilt)
        log.warning(
            "logits of %s were not finite (request %s): %s of the prefix cache dropped, and all is computed once more",
            counted(len(spoilt), "sequence"),
            ", ".join(sorted({s.request.id for s in spoilt})),
            counted(n_pages, "page"),
        )

    def observe(self, step: Step, seconds: float, guess_s: float = 0.0) -> None:
        """Tells the cost models what a step took, guess_s of it the draft head, and who waited for it."""
        if self._time.is_brief:
            for tenant in self._time.owing:
                theirs = [chunk for chunk in step.chunks if chunk.sequence.request.tenant != tenant]
                if theirs and self.cost is not None:
                    self._time.pay(tenant, seconds * self.cost.part(theirs, step.chunks, self.info.block_size))
            self._time.owe({c.sequence.request.tenant for c in step.chunks if not c.is_decode}, seconds)
        if self.drafting is not None:
            self.drafting.observe(step, seconds, guess_s)
        if self.cost and not step.chunks[-1].is_decode:
            self.cost.observe(StepLoad.of(step.chunks, self.info.block_size), seconds)

    def check(self) -> None:
        """Raises IntegrityError unless sequences, prefix tree and free lists make up all memory."""
        self.cache.check(self.sequences())
        if self.pictures is not None:
            self.pictures.check()
