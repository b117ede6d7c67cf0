"""Drafts change nothing but the time: tokens and log-probabilities with and without them, bit for bit.

Random schedules on tiny checkpoints: prompts that share prefixes, forks, penalties, seeds, stop tokens, aborts,
preemption, few pages. A plain run says what comes; the run with drafts is given drafts that are right up to a random
batch slot. Three planted faults show that the comparison would see a wrong state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance
import msgspec
import pytest
import torch

from deltic.config import ConfigError, EngineConfig, without_foreign
from deltic.engine.drafts import Drafter, Drafting
from deltic.engine.engine import Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Constraint, Request, SamplingParams, TokenLogprob
from deltic.engine.step import Step, StepResult
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.sampler import Sampler
from deltic.runtime.cpu.text import Runner
from tests.drafted import Schedule, requests
from tests.tensors import tensor_of
from tests.tiny import tiny_checkpoint

KV = {"next": "int8", "int4": "k8v4"}
"""Formats of keys and values, by what is built; of the others bf16."""


def build(kind: str = "dense", quantize: str | None = None, path: Path | None = None, **settings: Any) -> Runner:
    kind, _, states = kind.partition(", ")
    settings |= {"state_dtype": "bfloat16"} if states else {}
    sizes = {"max_num_seqs": 6, "max_model_len": 512, "max_step_tokens": 128, "n_pages": 24, "n_checkpoints": 6}
    settings = {"kv_cache_dtype": KV.get(kind if quantize is None else quantize, "auto"), "max_drafts": 8, **settings}
    config = EngineConfig(
        model=str(path or tiny_checkpoint(kind)), quantize=quantize, threads=2, **{**sizes, **settings}
    )
    return build_runner(config, lambda stage, done: None, Cpu())


KINDS = [
    ("dense", None),
    ("moe", "int8"),
    ("next", None),
    ("dense", "int4"),
    ("dense, bfloat16 states", None),
    ("flash", None),
]


@pytest.mark.parametrize(("kind", "quantize"), KINDS)
def test_drafts_change_no_bit(kind: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    parks = (
        {"cache_host_gb": 0.05} if kind in ("next", "flash") else {}
    )  # preempted sequences come back with their state
    plain, drafting = build(kind, quantize, max_drafts=0, **parks), build(kind, quantize, **parks)
    n_accepted = n_preempted = 0
    for seed in range(4):
        truth, engine = Schedule(seed).run(plain, monkeypatch)
        assert engine.stats().n_drafted == 0
        found, engine = Schedule(seed, truth=truth).run(drafting, monkeypatch)
        assert found == truth
        stats = engine.stats()
        n_accepted += stats.n_accepted
        n_preempted += stats.n_preemptions
        assert stats.n_drafted > stats.n_accepted > 0
    assert n_accepted > 200 and n_preempted > 0


def draft_always(monkeypatch: pytest.MonkeyPatch, propose: Any) -> None:
    """Drafts are what `propose` says, whatever they cost."""
    monkeypatch.setattr(Drafter, "propose", propose)
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    monkeypatch.setattr(Drafting, "_is_probe", lambda self, n: False)


def spoil_token_7(runner: Runner) -> None:
    """Its embedding is no number."""
    embed = runner.model.weights.embed
    weight = tensor_of(embed.whole.data).view(torch.bfloat16).view(-1, embed.k // 2, 16, 2)
    weight[0, :, 7] = float("nan")


SPOILT = [("dense", "bf16"), ("dense", "int8"), ("dense", "k8v4"), ("moe", "bf16"), ("next", "int8"), ("dense, bfloat16 states", "bf16")]  # fmt: skip


@pytest.mark.parametrize(("kind", "kv"), SPOILT)
def test_rejected_drafts_that_are_no_numbers_change_no_bit(kind: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their sequence, or of others; also where they begin the next page."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2, logit_bias={7: -50.0})
    penalised = msgspec.structs.replace(params, temperature=1.0, seed=3, frequency_penalty=0.7, repetition_penalty=1.2)
    given = [
        Request(id=str(n), prompt_ids=[20 + n + i % 50 for i in range(n)], params=params if n % 2 else penalised)
        for n in (3, 60, 61, 62, 130)
    ]
    runner = build(kind, kv_cache_dtype=kv)
    spoil_token_7(runner)
    draft_always(monkeypatch, lambda self, tokens, most, forced=(): [])
    plain = Drawn(runner, given)
    draft_always(monkeypatch, lambda self, tokens, most, forced=(): [9, 7, 9][: min(most, len(tokens) % 4)])
    found = Drawn(runner, given)
    assert found.stats.n_drafted > 100 and plain.stats.n_drafted == 0
    assert found.answers == plain.answers


def test_logits_that_are_not_finite_harm_their_sequence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's last token, or of one in its midst, with drafts, grammars and penalties, beside others that have them, too."""
    runner = build("dense")
    text = (tiny_checkpoint("dense") / "tokenizer.json").read_text()
    grammar = llguidance.LLMatcher.grammar_from_lark("start: /[a-e]{24}/")
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, "logit_bias": {7: -50.0}}
    others = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(seed=3, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2, **common),
        SamplingParams(seed=4, constraint=Constraint(grammar=grammar), **common),
    ]
    good = [Request(id=f"good {i}", prompt_ids=[20 + i, 40, 60], params=params) for i, params in enumerate(others)]
    prompts = {"at once": [9, 7], "in the midst": [7, 9, 11]}
    bad = [
        Request(id=f"{name} {i}", prompt_ids=ids, params=msgspec.structs.replace(params, logprobs=None))
        for name, ids in prompts.items()
        for i, params in enumerate(others)
    ]

    def run(requests: list[Request]) -> dict[str, list[Any]]:
        engine = Engine(runner, vocabulary=Vocabulary(lambda: text))
        found: dict[str, list[Any]] = {}
        waiting = list(requests)
        while waiting or engine.has_work():
            if waiting and engine.scheduler.n_open < engine.info.max_num_seqs:
                engine.add(waiting.pop(0))
            for output in engine.step():
                found.setdefault(output.id, []).append(output)
            engine.check()
        assert engine.stats().n_pages_used == engine.stats().n_slots_used == 0
        engine.close(0)
        return found

    def said(outputs: list[Any]) -> tuple[list[int], list[Any]]:
        return [id for o in outputs for id in o.token_ids], [entry for o in outputs for entry in o.logprobs or []]

    def propose(self: Drafter, tokens: Any, most: int, forced: Any = ()) -> list[int]:
        return [7 if 7 in tokens else int(tokens[-1])] * min(most, 3)

    draft_always(monkeypatch, propose)
    truth = {id: said(outputs) for id, outputs in run(good).items()}
    spoil_token_7(runner)
    found = run([*bad, *good])
    for request in good:
        assert (
            found[request.id][-1].finish_reason in ("length", "stop") and said(found[request.id]) == truth[request.id]
        )
    for request in bad:
        (*_, last) = found[request.id]
        assert last.finish_reason == "error" and "logits that are not finite" in (last.error or ""), request.id
        assert not said(found[request.id])[0]


def one_too_many(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """A token is taken whose row does not belong to it."""
    read = Sampler.read

    def more(self: Sampler, step: Step) -> StepResult:
        result, at = read(self, step), 0
        for i, draw in enumerate(step.draws):
            drafts = step.chunks[draw.chunk].drafts
            n = len(result.tokens[i])
            if n <= len(drafts):
                result.tokens[i].append(int(self._entries.target[at + n]))
                if result.logprobs[i] is not None:
                    result.logprobs[i].append(self._entry(at + n))
            at += 1 + len(drafts)
        return result

    monkeypatch.setattr(Sampler, "read", more)


def committed_early(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """The state has seen rows that were not accepted."""
    step = runner.step

    def early(planned: Step) -> StepResult:
        inputs = runner.workspace.batch.inputs
        fill = runner.workspace.batch.fill

        def filled(again: Step) -> list[int]:
            rows = fill(again)
            inputs.is_lazy[:] = 0
            return rows

        monkeypatch.setattr(runner.workspace.batch, "fill", filled)
        result = step(planned)
        monkeypatch.setattr(runner.workspace.batch, "fill", fill)
        return result

    monkeypatch.setattr(runner, "step", early)


def columns_not_rolled_back(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """The convolution goes on behind rows that were not accepted."""
    step = runner.step

    def rolled(planned: Step) -> StepResult:
        result = step(planned)
        memory = runner.memory
        for chunk in planned.chunks:
            if len(chunk.drafts) >= 2:
                last = memory.window_columns[chunk.sequence.batch_slot, :, chunk.length - 3 : chunk.length]
                memory.columns[chunk.sequence.state_slot] = last
        return result

    monkeypatch.setattr(runner, "step", rolled)


@pytest.mark.parametrize("fault", [one_too_many, committed_early, columns_not_rolled_back], ids=lambda f: f.__name__)
def test_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, _ = Schedule(1).run(build(max_drafts=0), monkeypatch)
    runner = build()
    fault(monkeypatch, runner)
    found, _ = Schedule(1, truth=truth).run(runner, monkeypatch)
    assert found != truth


class Drawn:
    """What an engine says of some requests, with no help."""

    def __init__(self, runner: Runner, given: list[Request]) -> None:
        engine, self.answers = Engine(runner), dict[str, tuple[list[int], list[TokenLogprob]]]()
        for request in given:
            engine.add(request)
            self.answers[request.id] = [], []
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                tokens, entries = self.answers[output.id]
                tokens += output.token_ids
                entries += output.logprobs or []
            engine.check()
        self.n_steps, self.stats = engine.n_steps, engine.stats()


def test_text_that_repeats_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the proposer itself; a bias makes the tiny model repeat itself."""
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True, logprobs=2, logit_bias={5: 9.0})
    request = Request(id="a", prompt_ids=list(range(40)), params=params)
    plain, found = (Drawn(build(max_drafts=most, max_num_seqs=1), [request]) for most in (0, 8))
    assert found.answers == plain.answers
    assert found.stats.n_accepted > 0 and found.n_steps + found.stats.n_accepted == plain.n_steps


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_a_draft_head_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own guesses, of random weights; a bias makes some of them right."""
    path = tiny_checkpoint(kind, has_mtp=True)
    given = [
        Request(
            id=request.id,
            prompt_ids=request.prompt_ids,
            params=msgspec.structs.replace(
                request.params, n=1, logprobs=1, logit_bias={i: 6.0 for i in range(5)}, ignore_eos=True, min_tokens=0
            ),
        )
        for request in requests(5)
    ]
    plain = Drawn(build(path=path, max_drafts=0), given)
    for seconds in (lambda self, n: [1.0] * 65, Drafting._step_s):
        monkeypatch.setattr(Drafting, "_step_s", seconds)
        found = Drawn(build(path=path), given)
        assert found.answers == plain.answers
    assert found.stats.n_drafted > 0


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-drafts 4 is for a text model, and this is a speech model"):
        without_foreign(EngineConfig(max_drafts=4), "cuda", "speech")
    assert build(max_drafts=0).info.max_drafts == 0 and build(max_drafts=3).info.max_drafts == 3
