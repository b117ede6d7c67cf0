"""Estimates of the time of a step, so that prefill beside running sequences can be cut to a target.

    seconds = scale * (curve(rows) + per_decode * decodes + per_key * keys + per_pair * pairs)

rows: of prefill. keys: tokens of context of all decodes. pairs: of a prefill row and a token before it.
`curve` is a line through measured points. All but `scale` is fitted at start, with what was not measured put
on the safe side; `scale` follows the machine.

Errors of the fit show in the ratio of a step's time to its estimate; `scale` is nearly the largest of the
last ratios. A rare accident (another process, a page fault) changes nothing. A step that is slow three times
counts at once; one that got faster counts when the slow ones are forgotten.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

from deltic.engine.messages import EngineInfo, Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.ops.geometry import PAGE_SIZE

N_RATIOS = 32
"""Ratios that are remembered, one a step."""

N_ACCIDENTS = 2
"""Steps that do not count, the slowest of N_RATIOS; of fewer steps, proportionally fewer."""

FIT_S = 0.3
"""Seconds that the fit may take beyond its first decode and its first prefill."""

SLOW_S = 0.1
"""Seconds of a decode beyond which nothing else is measured at start. The model then learns from the first
prefills, of 64 tokens each.
"""

BRIEF = 0.9
"""Prompt tokens a second of a chunk that is made short for others' decodes, in those of a longer one."""

FAR = 8192
"""Tokens of context at which attention is timed, if a sequence may have that many."""


@dataclass(slots=True)
class StepLoad:
    """The work of a step, as the cost model counts it."""

    n_decodes: int = 0
    n_keys: int = 0
    n_rows: int = 0
    """Rows of prefill, padding to whole blocks included."""
    n_pairs: float = 0.0

    @classmethod
    def of(cls, chunks: Iterable[Chunk], block_size: int) -> StepLoad:
        load = cls()
        for chunk in chunks:
            load.add(chunk, block_size)
        return load

    def add(self, chunk: Chunk, block_size: int) -> None:
        if chunk.is_decode:
            self.n_decodes += 1
            self.n_keys += chunk.start
        else:
            self.add_prefill(-(-chunk.length // block_size) * block_size, chunk.start)

    def add_prefill(self, n_rows: int, context: int) -> None:
        self.n_rows += n_rows
        self.n_pairs += n_rows * (context + 0.5 * n_rows)


class StepCost:
    """Estimates of steps, for a target of `target_s` seconds."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.is_shared = False
        """True if a step without decodes is held to the target, too, since others wait for it."""
        self.curve: list[tuple[int, float]] = []
        """(rows, seconds), ascending, at least two. Empty: nothing is known."""
        self.per_decode_s = self.per_key_s = self.per_pair_s = 0.0
        self.scale = 1.0
        self._even_context = 32768.0
        self._ratios: deque[float] = deque(maxlen=N_RATIOS)

    def seconds(self, load: StepLoad) -> float:
        """The estimate for a step; 0 while nothing is known."""
        curve = self.curve
        if not curve:
            return 0.0
        i = min(bisect_right(curve, load.n_rows, key=lambda point: point[0]), len(curve) - 1)
        (x0, y0), (x1, y1) = curve[i - 1], curve[i]
        slope = (y1 - y0) / (x1 - x0)
        if load.n_rows > x1:  # a step of twice as much takes no longer than two; how much less is not known
            slope = max(slope, y1 / x1)
        seconds = y1 + slope * (load.n_rows - x1)
        seconds += self.per_decode_s * load.n_decodes + self.per_key_s * load.n_keys
        return self.scale * (seconds + self.per_pair_s * load.n_pairs)

    def part(self, some: Iterable[Chunk], chunks: Iterable[Chunk], block_size: int) -> float:
        """Estimates what some chunks of a step take alone, as a part of what all do."""
        alone_s, all_s = (self.seconds(StepLoad.of(c, block_size)) for c in (some, chunks))
        return alone_s / all_s if all_s else 1.0

    def room(self, load: StepLoad, context: int, most: int, is_brief: bool = False) -> int:
        """Counts the tokens of one more prefill, after `context` tokens, that keep a step with `load` within
        the target. is_brief: no more of them than a step needs to compute nearly as many tokens a second.

        The result is `most` or a multiple of 64; 0 if none fit, or nothing is known.
        """
        if not self.curve:
            return 0

        def with_blocks(n: int) -> float:
            more = replace(load)
            more.add_prefill(n * PAGE_SIZE, context)
            return self.seconds(more)

        sizes = range(1, -(-most // PAGE_SIZE) + 1)
        n = bisect_right(sizes, self.target_s, key=with_blocks)
        if is_brief:
            rates = [(load.n_rows + i * PAGE_SIZE) / max(1e-9, with_blocks(i)) for i in range(n + 1)]
            n = next(i for i, rate in enumerate(rates) if rate >= BRIEF * max(rates))
        return min(most, PAGE_SIZE * n)

    @staticmethod
    def brief_s(step_s: float, most_s: float) -> float:
        """Seconds of work behind a step of `step_s` with which as much is done a second as BRIEF of what
        most_s would give.
        """
        share = BRIEF * most_s / (most_s + step_s)
        return share / (1.0 - share) * step_s

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learns from a step that ran, if steps of its kind are estimated: it had a prefill, and somebody
        waited for it.
        """
        if not self.curve:
            if load.n_rows >= PAGE_SIZE:
                self._know_rows([(0, 0.0), (load.n_rows, seconds)])
        elif load.n_rows and (load.n_decodes or self.is_shared):
            self._ratios.append(seconds * self.scale / max(1e-9, self.seconds(load)))
            n_ignored = N_ACCIDENTS * len(self._ratios) // N_RATIOS
            self.scale = max(1e-3, sorted(self._ratios)[-1 - n_ignored])

    def _know_rows(self, curve: list[tuple[int, float]]) -> None:
        """Sets the curve, and the rest to what is no less than it will be measured: a decode costs a row of
        prefill, and attention what its multiplications are beside the others'.
        """
        self.curve = curve
        self.per_decode_s = curve[1][1] / curve[1][0]
        self.per_pair_s = self.per_key_s = self.per_decode_s / self._even_context

    def fit(self, run: Callable[[Step], object], info: EngineInfo) -> None:
        """Times some steps of `run`, a runner's that nobody uses yet.

        They write to the first pages and state slots.
        """
        self._even_context = info.even_context
        if info.max_num_seqs < 2 or info.n_pages < 4:
            return  # then nothing prefills beside a decode

        def measure(n_decodes: int, n_rows: int, decode_at: int = 1, prefill_at: int = 0) -> float:
            step = made_up_step(n_decodes, n_rows, decode_at, prefill_at, info.vocab_size)
            best, spent = float("inf"), 0.0
            for i in range(5):
                begin = time.perf_counter()
                run(step)
                seconds = time.perf_counter() - begin
                spent += seconds
                best = seconds if i == 0 else min(best, seconds)
                if spent > FIT_S / 20:
                    break
            for chunk in step.chunks:
                chunk.sequence.finish_reason = "length"
            return best

        decode = measure(1, 0)
        if decode > SLOW_S:
            return
        first = max(decode, measure(1, PAGE_SIZE))
        deadline = time.perf_counter() + FIT_S
        self._know_rows([(0, decode), (PAGE_SIZE, first)])

        def has_time(seconds: float) -> bool:
            return time.perf_counter() + seconds < deadline

        n = min(8, info.max_num_seqs - 1, info.n_pages - 2)
        if n > 1 and has_time(2 * first):
            self.per_decode_s = max(0.0, (measure(n, PAGE_SIZE) - first) / (n - 1))
        n_far = min(FAR, info.max_model_len) // PAGE_SIZE - 1
        far = min(n_far, info.n_pages - 3) * PAGE_SIZE
        if far > 0 and has_time(2 * decode):
            self.per_key_s = max(0.0, (measure(1, 0, decode_at=far) - decode) / far)
        if far > 0 and has_time(first + 2 * self.per_pair_s * far * PAGE_SIZE):
            self.per_pair_s = max(
                0.0, (measure(1, PAGE_SIZE, prefill_at=far) - first) / (far + PAGE_SIZE / 2) / PAGE_SIZE
            )
        most = min(info.max_step_tokens - 1, info.max_model_len, (info.n_pages - 2) * PAGE_SIZE)
        while (n_rows := 2 * self.curve[-1][0]) <= most and self.curve[-1][1] < self.target_s:
            if not has_time(2 * self.curve[-1][1]):
                break
            self.curve.append((n_rows, max(self.curve[-1][1], measure(1, n_rows))))
        # A point of the curve is without its decode, and without its own pairs.
        points, least = self.curve, 0.0
        for i, (x, y) in enumerate(points):
            least = max(least, y - self.per_decode_s - self.per_pair_s * x * x / 2)
            points[i] = x, least


def made_up_step(
    n_decodes: int, n_rows: int, decode_at: int, prefill_at: int, vocab_size: int, n_drafts: int = 0, n_guesses: int = 0
) -> Step:
    """A step of made-up sequences, in the first batch slots, state slots and pages. n_drafts, n_guesses: of
    each decode.

    Its tokens are random: equal ones would all go to the same experts.
    """
    params = SamplingParams(max_tokens=4 + n_drafts + n_guesses, top_k=20, top_p=0.95)
    step = Step(runs_ahead=False)
    n_pages = 0
    for i in range(n_decodes + (n_rows > 0)):
        is_decode = i < n_decodes
        start, length = (decode_at, 1 + n_drafts) if is_decode else (prefill_at, n_rows)
        n_own = -(-(start + length) // PAGE_SIZE)
        n_prompt = start if is_decode else start + length + 1
        ids = array("i", Random(i).choices(range(vocab_size), k=max(n_prompt, start + length)))
        sequence = Sequence(
            Request(id=f"fit-{i}", prompt_ids=[], params=params),
            0,
            i,
            ids[: start + 1] if is_decode else ids,
            n_prompt,
            n_computed=start,
            pages=list(range(n_pages, n_pages + n_own)),
            batch_slot=i,
            state_slot=i,
        )
        n_pages += n_own
        step.chunks.append(Chunk(sequence, start, length, drafts=ids[start + 1 :] if is_decode else ()))
        if is_decode:
            step.draws.append(Draw(i, sequence, n_guesses))
    return step
