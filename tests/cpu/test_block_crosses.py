"""Block drafters beside what else a request can have: pictures, adapters and grammars. Their guesses change no bit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deltic import LLM
from deltic.engine.drafts import Drafting
from deltic.engine.messages import Constraint, Request, SamplingParams
from tests.cpu.test_block_drafter import SIZES, Answers, always, build, likely
from tests.cpu.test_constrained import GRAMMAR, QUESTION, ids, request, run, thinking
from tests.cpu.test_picture_prompts import PROMPTS
from tests.cpu.test_picture_prompts import build as build_with_tower
from tests.cpu.test_picture_prompts import request as with_pictures
from tests.tiny_drafter import tiny_drafter, write_drafter


def test_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions behind a picture are not those of the drafter, which counts tokens."""
    more: dict[str, Any] = {
        "max_tokens": 20,
        "seed": 3,
        "logit_bias": {i: 9.0 for i in range(3)},
        "logprobs": 1,
        "temperature": 0.7,
    }
    given = [with_pictures(name, *PROMPTS[name], **more) for name in ("one", "first", "last", "video")]
    plain = Answers(build_with_tower(max_drafts=0), given)
    always(monkeypatch)
    found = Answers(build_with_tower(draft_model=str(tiny_drafter("dflash")), max_drafts=8), given)
    assert found.said == plain.said
    assert found.stats.n_drafted - 20 > found.stats.n_accepted > 5


def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter reads hidden states with an adapter's terms in them; it has none itself."""
    pytest.importorskip("peft")
    from tests.cpu.test_adapters import made

    lora = tuple(f"{name}={made('dense', name)[0]}" for name in ("every", "deltanet"))
    runner = build(None, max_drafts=0, lora=lora, **SIZES)
    keys = [b"", *runner.info.adapters.values()]
    given = [msgspec.structs.replace(one, adapter=keys[i % 3]) for i, one in enumerate(likely(5))]
    plain = Answers(runner, given)
    assert len({one.adapter for one in given}) == 3
    always(monkeypatch)
    found = Answers(build("dspark", lora=lora, **SIZES), given)
    assert found.said == plain.said
    assert found.stats.n_drafted - 50 > found.stats.n_accepted > 10


def every_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row and every guess is worth it."""
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    monkeypatch.setattr(Drafting, "_n_asked", lambda self, asked, s, n: Counter({i: w.n_guessable for i, w in asked}))


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_grammars(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the built-in model, with thoughts and bad words: its guesses are made without a mask, and cut by the grammar."""
    monkeypatch.setattr("tests.tiny_drafter.VOCAB_SIZE", 1600)
    write_drafter(tmp_path, kind)
    llm = LLM(threads=2, max_num_seqs=16, max_drafts=0)
    every_guess(monkeypatch)
    drafting = LLM(threads=2, max_num_seqs=16, max_drafts=8, draft_model=str(tmp_path))
    bias = {"logit_bias": {id: 8.0 for id in range(300, 303)}, "logprobs": 2, "max_tokens": 60}
    bad = Constraint(bad_ids=(tuple(llm.tokenizer.encode("Once")),))
    given: list[Request] = [
        request(llm, f"{name} {temperature}", constraint, temperature=temperature, **bias)
        for temperature in (0.0, 1.0)
        for name, constraint in (
            ("free", None),
            ("bad", bad),
            ("plain", Constraint(grammar=GRAMMAR)),
            ("thought", thinking(llm)),
        )
    ]
    plain, found = ({key: ids(outputs) for key, outputs in run(each, *given).items()} for each in (llm, drafting))
    assert found == plain
    drafter: Any = drafting._engine.runner
    assert drafter.info.draft_block and drafting._engine.stats().n_accepted > 20


def two_thousand(llm: LLM) -> list[Request]:
    """With prompts that begin alike, seeds, penalties, schemas and bad words; biases make some guesses right."""
    draw, found, bad = random.Random(1), list[Request](), Constraint(bad_ids=(tuple(llm.tokenizer.encode("Once")),))
    shared = llm.tokenizer.encode(QUESTION, "parse") * 12
    for i in range(2000):
        params = SamplingParams(
            max_tokens=draw.randrange(4, 24),
            temperature=draw.choice((0.0, 0.8)),
            top_k=draw.choice((0, 5)),
            seed=draw.randrange(1000),
            logprobs=draw.choice((None, 1)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.8)),
            ignore_eos=draw.random() < 0.5,
            logit_bias={id: draw.choice((8.0, 30.0)) for id in range(300, 303)},
            constraint=draw.choice((*[None] * 6, bad, Constraint(grammar=GRAMMAR))),
        )
        own = [draw.randrange(256, 1500) for _ in range(draw.randrange(1, 30))]
        found.append(Request(id=f"{i}", prompt_ids=[*shared[: draw.choice((0, 64, 130))], *own], params=params))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_two_thousand_answers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None differs from that without drafts, with 64 in company, preemption, and an engine that is another from the middle on."""
    monkeypatch.setattr("tests.tiny_drafter.VOCAB_SIZE", 1600)
    write_drafter(tmp_path, kind)
    sizes: dict[str, Any] = {
        "threads": 2,
        "max_num_seqs": 64,
        "max_model_len": 256,
        "n_pages": 120,
        "n_checkpoints": 16,
    }
    said, n_preempted, n_cached, n_accepted = list[dict[Any, Any]](), 0, 0, 0
    for settings in ({"max_drafts": 0}, {"max_drafts": 8, "draft_model": str(tmp_path)}):
        of_all: dict[Any, Any] = {}
        for half in (slice(1000), slice(1000, 2000)):
            llm = LLM(**sizes, **settings)
            engine, draw, n_steps = llm._engine, random.Random(2), 0
            for one in two_thousand(llm)[half]:
                engine.add(one)
            while engine.has_work():
                n_steps += 1
                if n_steps % 5 == 0 and (running := engine.scheduler._decodes):
                    engine.scheduler._preempt(draw.choice(running))
                for output in engine.step():
                    assert output.error is None
                    tokens, logprobs = of_all.setdefault(output.id, ([], []))
                    tokens += output.token_ids
                    logprobs += output.logprobs or ()
                    n_cached += output.cached_tokens
            stats = engine.stats()
            n_preempted, n_accepted = n_preempted + stats.n_preemptions, n_accepted + stats.n_accepted
        said.append(of_all)
        every_guess(monkeypatch)
    assert len(said[0]) == 2000 and [key for key in said[0] if said[0][key] != said[1][key]] == []
    assert n_preempted > 20 and n_cached > 10_000 and n_accepted > (20 if kind == "dflash2" else 500)
