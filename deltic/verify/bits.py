"""Runs of a model: the same bits alone, in company, cold and from the cache; log-probabilities beside
others'; the speed beside the roof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from deltic.engine.engine import Engine
from deltic.engine.messages import Output, Request, SamplingParams, TokenLogprob
from deltic.text import n_alike
from deltic.verify.page import Check, Tell

N_DRAWN = 16
"""Tokens of an answer whose bits are compared."""

N_TIMED = 64
"""Tokens of an answer that is timed."""

LOOK_NATS, WRONG_NATS = 0.1, 0.3
"""Mean distances of log-probabilities that somebody should see, and that the same weights do not explain."""


@dataclass
class Told:
    """Answer to a request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens but the first."""
    n_cached: int = 0


def run(engine: Engine, prompts: Mapping[str, Sequence[int]], *, cached: bool = False) -> dict[str, Told]:
    """Runs prompts together. cached: with the prefix cache; else with log-probabilities of the prompts.

    Raises RuntimeError where one fails.
    """
    asked = SamplingParams(temperature=0.0, max_tokens=N_DRAWN, ignore_eos=True, logprobs=4)
    if not cached:
        asked = msgspec.structs.replace(asked, prompt_logprobs=0)
    for name, ids in prompts.items():
        engine.add(Request(id=name, prompt_ids=[*ids], params=asked, use_cache=cached))
    told = {name: Told() for name in prompts}
    for output in _outputs(engine):
        each = told[output.id]
        each.ids += output.token_ids
        each.logprobs += output.logprobs or []
        each.n_cached = max(each.n_cached, output.cached_tokens)
        if output.prompt_logprobs is not None:
            each.prompt = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    return told


def _outputs(engine: Engine) -> Iterator[Output]:
    """Runs the engine while it has work. Raises RuntimeError where a request fails."""
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"the request for {output.id} failed: {output.error}")
            yield output


def check_bits(engine: Engine, prompts: Mapping[str, Sequence[int]], check: Check, tell: Tell) -> dict[str, Told]:
    """Runs every prompt alone, then all together, then all twice with the prefix cache. Returns what each
    was told alone.
    """
    alone: dict[str, Told] = {}
    for nth, (name, ids) in enumerate(prompts.items()):
        tell("running texts alone", nth / len(prompts))
        alone |= run(engine, {name: ids})
    tell("running texts together", 0.0)
    company = run(engine, prompts)
    _same(alone, company, "in company", check)
    engine.reset_cache()
    cold = run(engine, prompts, cached=True)
    warm = run(engine, prompts, cached=True)
    _same(alone, cold, "cold", check)
    n_cached = sum(each.n_cached for each in warm.values())
    if n_cached:
        _same(alone, warm, "from the prefix cache", check)
    engine.reset_cache()
    if check.verdict == "ok":
        n = sum(len(each.ids) + len(each.prompt) for each in alone.values())
        info = engine.runner.info
        how = "alone and together" if info.max_num_seqs > 1 else "each time; --max-num-seqs is 1: nothing ran together"
        check.note(f"{len(prompts)} texts, {n} log-probabilities: the same bits {how}")
        why = "no text is as long as a page" if info.prefix_cache else "it is off"
        hit = f"the same bits with {n_cached} of {sum(map(len, prompts.values()))} tokens from the prefix cache"
        check.note(hit if n_cached else f"the prefix cache was not tried: {why}")
    return alone


def _same(alone: Mapping[str, Told], other: Mapping[str, Told], how: str, check: Check) -> None:
    for name, told in other.items():
        known = alone[name]
        if told.prompt and told.prompt != known.prompt:
            at = n_alike(told.prompt, known.prompt)
            check.wrong(f"{name}: other bits {how} than alone, at first for token {at + 1} of the prompt")
        elif (told.ids, told.logprobs) != (known.ids, known.logprobs):
            at = n_alike(told.logprobs, known.logprobs)
            check.wrong(f"{name}: other bits {how} than alone, at first for token {at} of the answer")


def check_logprobs(
    mine: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], whose: str, check: Check
) -> None:
    """Compares log-probabilities of texts' tokens, in nats, and judges by the mean distance."""
    figures, distances = {}, []
    for name, others in theirs.items():
        each = [abs(a - b) for a, b in zip(mine[name], others, strict=False)]
        mean = sum(each) / max(1, len(each))
        distances += each
        nats, their_nats = (-sum(told) / max(1, len(told)) for told in (mine[name], others))
        figures[name] = {"mean": mean, "worst": max(each, default=0.0), "nats": nats, "their_nats": their_nats}
        if len(mine[name]) != len(others):
            check.wrong(f"{name}: {len(mine[name])} log-probabilities here, and {len(others)} by {whose}")
        if not mean <= LOOK_NATS:
            tell = check.look if mean <= WRONG_NATS else check.wrong
            at = max(range(len(each)), key=lambda i: math.inf if math.isnan(each[i]) else each[i])
            first = next((i for i, distance in enumerate(each) if not distance <= WRONG_NATS), at)
            tell(
                f"{name}: log-probabilities differ by {mean:.3g} nats a token from {whose}; most for token {at + 1}, by "
                f"{each[at]:.3g}; the first that is far is token {first + 1}"
            )
    check.figures[whose] = figures
    if check.verdict in ("ok", "skipped"):
        check.note(
            f"{len(distances)} tokens of {len(theirs)} texts: {sum(distances) / max(1, len(distances)):.2g} nats from {whose} in the "
            f"mean, {max(distances, default=0.0):.2g} at most"
        )


def check_speed(engine: Engine, ids: Sequence[int], roof: float, check: Check, tell: Tell) -> None:
    """Times one sequence. roof: tokens a second that the memory's speed allows, as `deltic plan` says."""
    tell("timing", 0.0)
    asked = SamplingParams(temperature=0.0, max_tokens=N_TIMED, ignore_eos=True)
    rates = []
    for nth in range(3):
        engine.add(Request(id=f"timed {nth}", prompt_ids=[*ids], params=asked, use_cache=False))
        # With drafts an output has several tokens.
        at = [(time.perf_counter(), len(output.token_ids)) for output in _outputs(engine)]
        rates.append(sum(n for _, n in at[1:]) / (at[-1][0] - at[0][0]))
    best = max(rates)
    check.figures = {"decode": rates, "roof": roof}
    check.note(
        f"one sequence: {best:.1f} tokens a second, the best of three; reading the weights allows {roof:.1f}, so this is "
        f"{best / roof:.0%}{' (the caches hold a part of them)' if best > roof else ''}"
    )
    if best < roof / 4:
        check.look("the speed is under a quarter of that: is the machine busy, or are --threads too many or too few?")
