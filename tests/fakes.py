"""A runner without a model, which keeps the engine's books honest.

Its pages hold the tokens that were written to them and its slots a hash of the tokens they saw, so what it
draws comes through the memory that the scheduler handed out: a page given to two owners, a slot not copied, a
chunk run twice or left out is an AssertionError at the next draw, not a wrong word much later.

Run as a program, this is an engine process with that runner: `python tests/fakes.py [--step-ms MS] LAUNCH`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deltic.config import ConfigError, EngineConfig
from deltic.engine import loop
from deltic.engine.request import (
    PAGE_SIZE,
    EngineInfo,
    SamplingParams,
    Sequence,
    Step,
    StepResult,
    TokenLogprob,
)

VOCAB_SIZE = 1000
EOS = 0
POISON = 13
"""A step with this token in a chunk raises."""

START_STATE = 17
MASK = (1 << 61) - 1


def fold(state: int, token: int) -> int:
    """The recurrent state after one more token."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & MASK


def draw(state: int, seed: int, params: SamplingParams, n_generated: int) -> int:
    """The token drawn in `state`; eos only when it may come, POISON never."""
    token = (state ^ (seed * 0x9E3779B97F4A7C15) & MASK) % 999983 % VOCAB_SIZE
    if token == POISON or (token == EOS and n_generated < params.min_tokens):
        return token + 1
    return token


def expected_tokens(prompt_ids: list[int], params: SamplingParams, seed: int | None = None) -> list[int]:
    """What a sequence with this seed generates, up to and including the token that ends it."""
    state = START_STATE
    for token in prompt_ids:
        state = fold(state, token)
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        token = draw(state, params.seed or 0 if seed is None else seed, params, len(tokens))
        tokens.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            break
        state = fold(state, token)
    return tokens


class FakeRunner:
    """Draws tokens that depend on the sequence's tokens and its seed alone."""

    def __init__(
        self,
        *,
        n_pages: int = 256,
        max_num_seqs: int = 8,
        max_model_len: int = 4096,
        max_step_tokens: int = 512,
        n_slots: int | None = None,
        max_logit_rows: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.n_pages = n_pages
        self.n_slots = n_slots or max_num_seqs
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_step_tokens = max_step_tokens
        self.max_logit_rows = max_logit_rows or max_num_seqs + PAGE_SIZE
        self.step_s = step_s
        self.n_steps = 0
        self.info = EngineInfo(
            model_name="fake",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            n_pages=n_pages,
            n_slots=self.n_slots,
            device="none",
        )
        self._pages = [[-1] * PAGE_SIZE for _ in range(n_pages)]
        self._states = [0] * self.n_slots

    def step(self, step: Step) -> StepResult:
        """Runs the chunks, the copies, the draws. Raises AssertionError for a step that breaks a promise."""
        self.n_steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        self._check_limits(step)
        for chunk in step.chunks:
            self._run(chunk.sequence, chunk.start, chunk.length)
        for source, destination in step.slot_copies:
            self._states[destination] = self._states[source]
        for source, destination in step.page_copies:
            self._pages[destination] = self._pages[source][:]
        tokens, logprobs = [], []
        for drawn in step.draws:
            sequence, params = drawn.sequence, drawn.sequence.request.params
            state = self._check_memory(sequence)
            token = draw(state, sequence.seed, params, sequence.n_generated)
            tokens.append(token)
            logprobs.append(None if params.logprobs is None else self._logprob(token, params.logprobs))
        prompt_logprobs = {}
        for i, chunk in enumerate(step.chunks):
            if chunk.prompt_logprobs:
                sequence = chunk.sequence
                scored = sequence.tokens[
                    chunk.start + 1 : min(chunk.start + chunk.length + 1, sequence.n_prompt)
                ]
                n_top = sequence.request.params.prompt_logprobs or 0
                prompt_logprobs[i] = [self._logprob(token, n_top) for token in scored]
        return StepResult(tokens, logprobs, prompt_logprobs)

    def _check_limits(self, step: Step) -> None:
        n_decodes = sum(c.length == 1 for c in step.chunks)
        assert step.chunks and step.n_tokens <= max(self.max_step_tokens, n_decodes + PAGE_SIZE)
        assert len(step.draws) <= self.max_num_seqs
        rows = {d.chunk for d in step.draws}
        n_rows = sum(c.length if c.prompt_logprobs else i in rows for i, c in enumerate(step.chunks))
        assert n_rows <= self.max_logit_rows, f"{n_rows} rows of logits"
        sequences = [id(c.sequence) for c in step.chunks]
        assert len(set(sequences)) == len(sequences), "a sequence has two chunks"

    def _run(self, sequence: Sequence, start: int, length: int) -> None:
        assert sequence.slot is not None and start == sequence.n_computed and length > 0
        end = start + length
        assert end == len(sequence.tokens) or end % PAGE_SIZE == 0, "cut off the grid"
        state = self._states[sequence.slot] if start else START_STATE
        for position in range(start, end):
            token = sequence.tokens[position]
            if token == POISON:
                raise RuntimeError("poisoned token")
            self._pages[sequence.pages[position // PAGE_SIZE]][position % PAGE_SIZE] = token
            state = fold(state, token)
        self._states[sequence.slot] = state

    def _check_memory(self, sequence: Sequence) -> int:
        """The state of a sequence that draws, after comparing its memory with its tokens."""
        assert sequence.slot is not None
        written = [token for page in sequence.pages for token in self._pages[page]][: len(sequence.tokens)]
        assert written == list(sequence.tokens), (
            f"pages of {sequence.request.id}/{sequence.index} are not its own"
        )
        state = START_STATE
        for token in sequence.tokens:
            state = fold(state, token)
        assert self._states[sequence.slot] == state, f"slot of {sequence.request.id}/{sequence.index} is off"
        return state

    @staticmethod
    def _logprob(token: int, n_top: int) -> TokenLogprob:
        return TokenLogprob(token, -1.0, [(i, -1.0 - i) for i in range(n_top)])


def build_runner(config: EngineConfig, progress: loop.Progress, step_s: float = 0.0) -> FakeRunner:
    """A FakeRunner of the configured sizes. Raises ConfigError for the model "missing"."""
    progress("load", 0.0)
    if config.model == "missing":
        raise ConfigError("no checkpoint at 'missing'; give a directory")
    runner = FakeRunner(
        n_pages=config.n_pages or 256,
        max_num_seqs=config.max_num_seqs or 8,
        max_model_len=config.max_model_len or 4096,
        max_step_tokens=config.max_step_tokens,
        step_s=step_s,
    )
    progress("load", 1.0)
    return runner


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("launch")
    args = parser.parse_args()
    return loop.main(
        lambda config, progress: build_runner(config, progress, args.step_ms / 1000), args.launch
    )


if __name__ == "__main__":
    sys.exit(main())
