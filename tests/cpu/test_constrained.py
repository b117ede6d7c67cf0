"""Answers that follow a grammar, from the built-in model on the CPU: they are valid, and nobody's bits depend on them."""

from __future__ import annotations

import json
import time
from array import array
from typing import Any

import jsonschema
import llguidance
import pytest

from deltic import LLM
from deltic.engine.drafts import Drafting
from deltic.engine.guides import Guide, Guides
from deltic.engine.messages import Constraint, Output, Request, SamplingParams
from deltic.engine.step import Sequence

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMAR = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
QUESTION = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=2, max_num_seqs=16)


def thinking(llm: LLM, budget: int | None = 12) -> Constraint:
    (end,) = llm.tokenizer.encode("</think>")
    begin = tuple(llm.tokenizer.encode("\n\n"))
    return Constraint(
        grammar=GRAMMAR, think_end_id=end, think_budget=budget, close_ids=(*begin[:1], end), begin_ids=begin
    )


def request(llm: LLM, id: str, constraint: Constraint | None, **params: Any) -> Request:
    text = QUESTION + ("<think>\n" if constraint is not None and constraint.think_end_id is not None else "")
    params = {"seed": 5, "max_tokens": 200, "constraint": constraint} | params
    return Request(id=id, prompt_ids=llm.tokenizer.encode(text, "parse"), params=SamplingParams(**params))


def run(llm: LLM, *requests: Request) -> dict[tuple[str, int], list[Output]]:
    engine = llm._engine
    for r in requests:
        engine.add(r)
    found: dict[tuple[str, int], list[Output]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault((output.id, output.index), []).append(output)
    engine.check()
    return found


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_answers_are_valid(llm: LLM, temperature: float) -> None:
    """With and without a thought, four at once, with filters and penalties that would rather have something else."""
    odd = {"top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {llm.tokenizer.encode("{")[0]: -50.0}}
    requests = [
        request(llm, "plain", Constraint(grammar=GRAMMAR), temperature=temperature, n=4),
        request(llm, "thought", thinking(llm), temperature=temperature, n=4),
        request(llm, "odd", Constraint(grammar=GRAMMAR), temperature=temperature, min_tokens=60, **odd),
    ]
    found = run(llm, *requests)
    assert len(found) == 9
    for (id, _), outputs in found.items():
        text = llm.tokenizer.decode(ids(outputs), skip_special_tokens=False)
        if id == "thought":
            thought, _, text = text.partition("</think>\n\n")
            assert len(llm.tokenizer.encode(thought)) <= 13
        jsonschema.validate(json.loads(text), SCHEMA)
        assert outputs[-1].finish_reason == "stop" and not outputs[-1].token_ids


def test_bits(llm: LLM) -> None:
    """Alone or among constrained ones, a free sequence draws the same; so does a constrained one."""
    free = [request(llm, f"free {i}", None, temperature=t, max_tokens=40, logprobs=3) for i, t in enumerate((0.0, 1.0))]
    guided = [
        request(llm, "guided", Constraint(grammar=GRAMMAR), temperature=1.0, logprobs=3),
        request(llm, "thought", thinking(llm), temperature=1.0, logprobs=3, top_k=20),
    ]  # fmt: skip

    def drawn(*requests: Request) -> dict[tuple[str, int], list[Any]]:
        return {key: [o.logprobs for o in outputs if o.token_ids] for key, outputs in run(llm, *requests).items()}

    together = drawn(*free, *guided)
    for r in (*free, *guided):
        assert drawn(r)[r.id, 0] == together[r.id, 0]
    # Log-probabilities are the model's own, whatever the mask lets through.
    plain = drawn(request(llm, "a", None, max_tokens=1, logprobs=3))["a", 0][0][0]
    first = together["guided", 0][0][0]
    assert first.top == plain.top and first.token_id not in [id for id, _ in first.top]


def test_stop_strings_and_the_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, constraint=Constraint(grammar=GRAMMAR))
    (whole,) = llm.generate(QUESTION, params)
    jsonschema.validate(json.loads(whole.text), SCHEMA)
    assert whole.finish_reason == "stop"
    (cut,) = llm.generate(QUESTION, params, stop='"age"')
    assert whole.text.startswith(cut.text) and cut.text.endswith(",") and cut.finish_reason == "stop"
    (short,) = llm.generate(QUESTION, SamplingParams(temperature=0.0, max_tokens=4, constraint=params.constraint))
    assert short.finish_reason == "length" and whole.text.startswith(short.text)
    llm._engine.check()


def test_a_slow_mask_delays_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original, n_others = Guides._do, 0

    def slow(guides: Guides, job: list[Any], tokens: list[int], words: Any) -> None:
        if any(guide.sequence.request.id == "slow" for guide in job):
            until, deadline = n_others + 10, time.monotonic() + 20
            while n_others < until and time.monotonic() < deadline:
                time.sleep(0.001)
        original(guides, job, tokens, words)

    monkeypatch.setattr(Guides, "_do", slow)
    engine, n_before = llm._engine, []
    engine.add(request(llm, "slow", Constraint(grammar=GRAMMAR), max_tokens=3))
    engine.add(request(llm, "free", None, max_tokens=100, ignore_eos=True))
    engine.add(request(llm, "quick", Constraint(grammar=GRAMMAR), temperature=1.0))
    while engine.has_work():
        for output in engine.step():
            if output.id == "slow" and output.token_ids:
                n_before.append(n_others)
            n_others += output.id != "slow"
    assert len(n_before) == 3 and n_before[0] >= 10 and n_before[2] >= 30, n_before


def test_drafts_follow_the_grammar_and_change_no_bit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grammar leaves as the only text is a draft; thoughts, closings and bad words as without drafts."""
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    drafting = LLM(threads=2, max_num_seqs=16, max_drafts=8)
    bad = Constraint(bad_ids=(tuple(llm.tokenizer.encode("Once")), tuple(llm.tokenizer.encode(" upon a"))))
    given = [
        request(llm, "free", None, logprobs=1, temperature=0.0, max_tokens=40),
        request(llm, "bad", bad, logprobs=1, max_tokens=60),
        *(
            request(llm, f"{name} {temperature}", constraint, temperature=temperature, n=2, logprobs=2, **more)
            for temperature in (0.0, 1.0)
            for name, constraint, more in (
                ("plain", Constraint(grammar=GRAMMAR), {"stop_token_ids": (300,)}),
                ("thought", thinking(llm), {}),
                ("hurried", thinking(llm, 0), {"repetition_penalty": 1.3}),
                ("long", thinking(llm, None), {"max_tokens": 60}),
            )
        ),
    ]

    def said(answers: dict[tuple[str, int], list[Output]]) -> dict[Any, Any]:
        return {
            key: (ids(outputs), [entry for o in outputs for entry in o.logprobs or ()], outputs[-1].finish_reason)
            for key, outputs in answers.items()
        }

    plain, found = said(run(llm, *given)), said(run(drafting, *given))
    assert found == plain
    assert drafting._engine.stats().n_accepted > 0.2 * sum(len(tokens) for tokens, _, _ in plain.values())


def test_a_guide_says_how_far_a_draft_may_go(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is left where it was."""
    monkeypatch.setattr("deltic.engine.guides.AHEAD_S", 10.0)
    engine = llm._engine
    texts = ['{"name":"', 'Mia","age":', '7,"tags":[]', ',"at":{"x":true}}', "<|im_end|>"]
    engine.add(request(llm, "a", Constraint(grammar=GRAMMAR), max_tokens=2))
    while not (sequence := next(iter(engine.scheduler.sequences()))).guide.is_ready:
        engine.guides.wait(0.1)
        engine.scheduler.take_masks(0.0)
    guide, guides = sequence.guide, engine.guides
    forced = guide.forced(8)
    assert llm.tokenizer.decode(forced) == '{"name":"'[: len(llm.tokenizer.decode(forced))] and len(forced) > 1
    draft = [id for text in texts for id in llm.tokenizer.encode(text, "parse")]
    before = guide.mask.copy()
    kept, rules = guides.ahead(guide, draft)
    # The last brace ends the answer: behind it nothing is drawn.
    assert kept == draft[:-2] and len(rules) == len(draft) - 1
    assert all(rule.allows(token) for rule, token in zip(rules, draft, strict=False))
    wrong = llm.tokenizer.encode('{"name":"Mia","size":')
    kept, _ = guides.ahead(guide, wrong)
    assert llm.tokenizer.decode(kept).startswith('{"name":"Mia",') and len(kept) < len(wrong)
    assert (guide.mask == before).all() and guide.forced(8) == forced
    engine.abort("a")


def test_a_draft_ends_where_a_grammar_begins_that_a_worker_has(llm: LLM) -> None:
    """While a grammar is compiled, the mask behind a thought is not known."""
    guides, constraint = llm._engine.guides, thinking(llm, 0)
    sequence = Sequence(request(llm, "a", constraint), 0, 0, array("i"), 0)
    guide = Guide(sequence, constraint, guides.n_ids)
    guide.is_busy = True
    forced = [*constraint.close_ids, *constraint.begin_ids]
    kept, rules = guides.ahead(guide, [*forced, *llm.tokenizer.encode('{"name')])
    assert kept == forced[:-1] == guide.forced(len(forced) - 1)
    assert [rule.allows(token) for rule in rules for token in forced] == [a == b for a in forced for b in forced]
