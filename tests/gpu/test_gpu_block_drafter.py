"""A block drafter on a GPU (or in the interpreter): guesses against the reference, and answers that no guess changes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import pytest
import torch

pytest.importorskip("triton")
from deltic.config import EngineConfig
from deltic.engine.drafts import Drafter
from deltic.engine.engine import Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Constraint, Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Step, StepResult
from deltic.models.dflash.shape import LEAST_CHANCE
from deltic.models.fields import UnsupportedModelError
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights, stored_shape
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.device import Gpu
from tests.cpu.test_block_drafter import Answers, a_token_too_far, always, features_of, likely
from tests.cpu.test_picture_prompts import picture
from tests.cpu.test_picture_prompts import request as with_pictures
from tests.cpu.test_reference import prompt
from tests.drafted import Schedule, Sizes
from tests.gpu.test_gpu_drafts import FEW, HAS_GPU, SIZES, SMALL, small_checkpoint, truth
from tests.gpu.test_gpu_lora import adapter_of
from tests.heads import run, sequence
from tests.plain import plain
from tests.reference import dflash as reference
from tests.tiny import byte_tokenizer, tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB
from tests.tiny_drafter import MASK, plain_drafter, small_drafter, tiny_drafter, write_drafter

MOST, TOP_K = 4, 4


def build(kind: str | None = "dflash", path: Path | None = None, **settings: Any) -> Any:
    """kind: of the drafter; None: there is none."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "max_step_tokens": 128, "n_pages": 24}
    sizes |= {"n_checkpoints": 0, "draft_model": str(tiny_drafter(kind)) if kind else None, "max_drafts": MOST}
    config = EngineConfig(model=str(path or tiny_checkpoint("dense")), **{**sizes, **settings})
    return build_runner(config, lambda stage, done: None, Gpu())


def drafter_of(kind: str) -> Path:
    """Of the checkpoints of test_gpu_drafts.py."""
    return tiny_drafter(kind) if HAS_GPU else small_drafter(kind, SMALL["HIDDEN"])


@cache
def small(kind: str = "dense", max_drafts: int = MOST, of: str = "dflash", **settings: Any) -> Any:
    """With a drafter, unless there are no drafts."""
    sizes: dict[str, Any] = {"max_num_seqs": 6 if HAS_GPU else 3, "max_model_len": 512 if HAS_GPU else 192}
    drafter = drafter_of(of) if max_drafts else None
    return build(None, small_checkpoint(kind), **sizes, n_pages=30, n_checkpoints=6, max_drafts=max_drafts,
                 draft_model=None if drafter is None else str(drafter), **settings)  # fmt: skip


def keys_of(runner: Any, of: Any, n: int) -> torch.Tensor:
    """The drafter's keys and values of a sequence's first n tokens, [layers, 2, heads, n, dim]."""
    pages = runner.block_drafter.pages[of.pages].cpu()
    return torch.cat(list(pages), dim=3)[:, :, :, :n]


@pytest.mark.parametrize("kind", ["dflash", pytest.param("sliding", marks=pytest.mark.long), "dflash2", "dspark"])
def test_guesses_are_those_of_the_reference(kind: str) -> None:
    """Behind a decode; keys and values are of a prefill and of decodes."""
    path = tiny_checkpoint("dense")
    shape = stored_shape(path, ModelShape.from_directory(path))
    weights, (own, of) = plain(load_weights(path, shape)[0]), plain_drafter(tiny_drafter(kind))
    runner, ids, n = build(kind, max_drafts=5), prompt(70), 5
    run(runner, sequence_ := sequence(ids), len(ids))
    run(runner, sequence_, 1)
    guesses = run(runner, sequence_, 1, n)
    tokens = list(sequence_.tokens)
    known = reference.context(own, of, features_of(weights, shape, tokens[:-1]), "bfloat16")
    found = keys_of(runner, sequence_, len(tokens) - 1).float()
    for i, keys in enumerate(known):
        for j, expected in enumerate(keys):
            off = (found[i, j].transpose(0, 1) - expected).abs()
            assert off.max() < 0.2 and off.median() < 0.01, (i, j, off.max(), off.median())
    rows = weights.embed[[tokens[-1]] + [MASK] * (n if not of.guesses_at_anchor else n - 1)].float()
    states = reference.block_states(own, of, known, rows, "bfloat16")[-n:]
    logits = reference.logits_of(of, states, weights.lm_head, "bfloat16")
    logits[:, N_REAL_VOCAB:] = -torch.inf
    assert 0 < len(guesses) <= n and (kind == "dspark" or len(guesses) == n)
    before = tokens[-1]
    for i, guess in enumerate(guesses):
        # near-ties may fall either way, at the end of the candidates, too
        last = logits[i].sort(descending=True)[0][TOP_K - 1] if kind == "dflash2" else -torch.inf
        more = replace(of, selector_top_k=2 * TOP_K)
        scores = reference.step_scores(own, more, states[i], logits[i], before, "bfloat16")
        assert logits[i][guess] > last - 0.05, i
        assert scores[logits[i] > last + 0.05].max() - scores[guess] < (0.1 if kind == "dflash2" else 0.05), i
        if kind == "dspark":
            assert reference.confidence(own, of, states[i], before) > LEAST_CHANCE - 0.01
        before = guess
    if len(guesses) < n:
        assert reference.confidence(own, of, states[len(guesses)], before) < LEAST_CHANCE + 0.01


def test_blocks_end_where_pages_end() -> None:
    """And write to no page that is not the sequence's."""
    runner = small()
    pages = runner.block_drafter.pages
    of = sequence(prompt(PAGE_SIZE - 3))
    of.pages = of.pages[:1]
    run(runner, of, PAGE_SIZE - 3)
    before = pages[1:-1].clone()
    assert [len(run(runner, of, 1, 4)) for _ in range(3)] == [1, 0, 0]  # the anchor has a place, too
    assert torch.equal(pages[1:-1], before)


def test_what_draws_waits_for_what_says_which_rows_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that reads that before it waits is not started early behind the one that writes it: guesses of DFlash 2 were now and
    then those of an earlier block.
    """
    early, runner = dict[str, Any](), build("dflash2")
    monkeypatch.setattr(
        "deltic.ops.gpu.sample.launch", lambda kernel, *_, pdl=True, **more: early.update({kernel.fn.__name__: pdl})
    )
    runner.block_drafter._next_body(1)()
    assert early == {"scan": False, "collect": True, "finish": True}


def test_nothing_is_guessed_beyond_the_end_of_an_answer() -> None:
    """Nor are there rows for it: behind a guess one token is drawn."""
    runner, n_rows = small(), list[int]()
    of = sequence(prompt(20), max_tokens=6)
    run(runner, of, 20, 4)
    for _ in range(5):
        n_rows.append(len(run(runner, of, 1, 4)))
        assert runner.block_drafter._blocks == ({of: (0, n_rows[-1])} if n_rows[-1] else {})
    assert n_rows == [3, 2, 1, 0, 0]


@pytest.mark.long
def test_a_block_ends_where_no_candidate_may_be_drawn(tmp_path: Path) -> None:
    write_drafter(tmp_path, "dflash2")
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"]["selector_top_k"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner, found = build(None, draft_model=str(tmp_path)), list[list[int]]()
    for i in range(2):
        barred: dict[str, Any] = {"stop_token_ids": (found[0][1],), "min_tokens": 50} if i else {}
        run(runner, of := sequence(prompt(9), batch_slot=i, **barred), 9)
        found.append(run(runner, of, 1, 4))
    assert found[0][1] != found[0][0] and found[1] == found[0][:1]


def test_blocks_follow_what_was_accepted() -> None:
    """Behind a draft with a wrong token, beside another block: those of a sequence that came there token by token."""
    runner = small()
    run(runner, alone := sequence(prompt(20)), 20)
    guesses = [run(runner, alone, 1, n) for n in (0, 0, 3)]
    run(runner, of := sequence(prompt(20), batch_slot=1), 20)
    run(runner, beside := sequence(prompt(33, seed=1), batch_slot=2), 33)
    draft = [*alone.tokens[21:23], (alone.tokens[23] + 1) % 256]
    step = Step([Chunk(beside, 33, 1), Chunk(of, 20, 4, drafts=draft)], [Draw(0, beside, 2), Draw(1, of, 3)])
    step.runs_ahead = False
    result = runner.step(step)
    assert result.tokens[1] == alone.tokens[21:24].tolist() and len(result.guesses[0]) == 2
    assert result.guesses[1] == guesses[-1] and result.guess_s > 0


@pytest.mark.parametrize("of", ["dflash", pytest.param("dspark", marks=pytest.mark.long)])
def test_penalties_count_no_guess_that_was_not_right(of: str) -> None:
    """A guess is the same whether others were made and rejected before it, or none were."""
    found, params = list[list[int]](), {"logit_bias": {7: 50.0, 8: 49.0, 9: 48.0}, "frequency_penalty": 20.0}
    for n in (0, 3):
        run(runner := small(of=of), one := sequence(prompt(20), batch_slot=1, **params), 20)
        run(runner, one, 1, n)
        one.tokens[-1] = 33  # another token than was guessed, and what follows it
        found.append(run(runner, one, 1, 3))
    assert found[0] == found[1] != []


def asking(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has every decode that nothing runs ahead of guess. Gives a list of what each step guessed."""
    step, counts = runner.step, list[int]()

    def more(planned: Step) -> StepResult:
        if not any(draw.sequence.runs_ahead for draw in planned.draws) and len(counts) % 3:
            planned.runs_ahead = False
            for i, draw in enumerate(planned.draws):
                draw.n_guesses, draw.sequence.runs_ahead = (i + len(counts)) % (MOST + 1), False
        result: StepResult = step(planned)
        counts.append(sum(map(len, result.guesses)))
        return result

    monkeypatch.setattr(runner, "step", more)
    return counts


HITS = SIZES if HAS_GPU else Sizes(4, 14, (66,), 4, abort_at=30, preempts=0.12)
"""With prompts that begin with the same page."""


@pytest.mark.parametrize(
    ("kind", "of", "seed", "sizes", "format"),
    [
        ("dense", "dflash", 7, SIZES if HAS_GPU else FEW, "bf16"),
        pytest.param("dense", "dflash2", 7, SIZES if HAS_GPU else FEW, "bf16", marks=pytest.mark.long),
        pytest.param("dense", "dspark", 7, SIZES if HAS_GPU else FEW, "bf16", marks=pytest.mark.long),
        pytest.param("next", "dflash", 131, SIZES, "bf16", marks=pytest.mark.long),
        pytest.param("dense", "dflash", 7, HITS, "fp8", marks=pytest.mark.long),
        pytest.param("dense", "dspark", 7, HITS, "fp8", marks=pytest.mark.long),
    ],
)
def test_random_schedules_keep_their_bits(
    kind: str, of: str, seed: int, sizes: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix hits, forks, aborts, preemption, seeds, penalties, company; decodes run ahead between blocks. The model's keys are e4m3 or
    bfloat16, the drafter's bfloat16.
    """
    plain_ = truth(kind, seed, sizes, format)
    counts = asking(runner := small(kind, of=of, kv_cache_dtype=format), monkeypatch)
    found, engine = Schedule(seed, ("1",), plain_, sizes).run(runner, monkeypatch)
    assert found == plain_
    stats = engine.stats()
    assert stats.n_accepted > 5 and sum(counts) > 10
    assert sizes is not HITS or (engine.cache.stats.n_hits > 0 and stats.n_preemptions > 0)


def few(n_tokens: int) -> list[Request]:
    """Requests of `likely` that are quick, interpreted."""
    params = {"max_tokens": n_tokens, "temperature": 0.0, "n": 1}
    return [
        Request(id=one.id, prompt_ids=prompt(40 + i, seed=i), params=msgspec.structs.replace(one.params, **params))
        for i, one in enumerate(likely(5)[:2])
    ]


@pytest.mark.long
def test_its_guesses_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own guesses are drafted, and some of them are right."""
    plain_ = Answers(small(max_drafts=0), few(12))
    always(monkeypatch)
    found = Answers(small(), few(12))
    assert found.said == plain_.said
    assert found.stats.n_drafted > found.stats.n_accepted > 0


@pytest.mark.long
@pytest.mark.parametrize("of", ["dflash", "dspark"])
def test_pictures(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions behind a picture are not those of the drafter, which counts tokens."""
    params: dict[str, Any] = {"seed": 3, "logit_bias": {i: 9.0 for i in range(3)}, "logprobs": 1, "temperature": 0.7}
    given = [
        with_pictures("a", "See ", picture(2, 3), " and ", picture(2, 2, 1), "!", max_tokens=10, **params),
        with_pictures("b", picture(2, 2, 2), max_tokens=8, **params),
    ]
    sizes: dict[str, Any] = {"max_picture_tokens": 16, "max_model_len": 128}
    path = tiny_checkpoint("dense", has_tower=True)
    plain_ = Answers(build(None, path, max_drafts=0, **sizes), given)
    always(monkeypatch)
    found = Answers(build(of, path, **sizes), given)
    assert found.said == plain_.said
    assert found.stats.n_drafted > found.stats.n_accepted > 0


@pytest.mark.long
def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter reads hidden states with an adapter's terms in them; it has none itself."""
    room: dict[str, Any] = {"allow_lora_loading": True, "max_loras": 3, "max_lora_rank": 20, "lora_gb": 0.05}
    plain_runner, runner = small(max_drafts=0, **room), small(**room)
    for seed in (1, 2):
        for each in (plain_runner, runner):
            assert each.adapters.load_now(adapter_of(each.plan.shape, seed)).error is None
    given = [*few(10), *few(8)[:1]]
    for i, one in enumerate(given):
        one.id, one.adapter = str(i), bytes([i] * 16) if i else b""
    plain_ = Answers(plain_runner, given)
    assert plain_.said["0"] != plain_.said["2"], "the adapter matters"
    always(monkeypatch)
    found = Answers(runner, given)
    assert found.said == plain_.said
    assert found.stats.n_drafted > found.stats.n_accepted > 0


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.long
@pytest.mark.parametrize("of", ["dflash", "dspark"])
def test_grammars(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made without a mask, and cut by the grammar of a JSON schema; beside one that is free."""
    schema = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    seven = byte_tokenizer().token_to_id("7")
    params: dict[str, Any] = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, "logit_bias": {seven: 50.0}}
    given = [
        Request(
            id="json", prompt_ids=prompt(20), params=SamplingParams(**params, constraint=Constraint(grammar=schema))
        ),
        Request(id="free", prompt_ids=prompt(17, seed=1), params=SamplingParams(**params, frequency_penalty=20.0)),
    ]
    vocabulary = Vocabulary((small_checkpoint("dense") / "tokenizer.json").read_text)
    plain_ = Answers(small(max_drafts=0), given, vocabulary=vocabulary)
    text = byte_tokenizer().decode(plain_.said["json"][0])
    assert text.startswith('{"n":7777')
    always(monkeypatch)
    found = Answers(small(of=of), given, vocabulary=vocabulary)
    assert found.said == plain_.said
    assert found.stats.n_drafted > found.stats.n_accepted > 3


def over_the_models_keys(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """Its keys stand where the model's are."""
    step = runner.step

    def spoiling(planned: Step) -> StepResult:
        result: StepResult = step(planned)
        for draw, guesses in zip(planned.draws, result.guesses, strict=True):
            if guesses:
                page = draw.sequence.pages[0]
                runner.memory[0].pages[page].view(-1)[:512] = runner.block_drafter.pages[page].view(-1)[:512]
        return result

    monkeypatch.setattr(runner, "step", spoiling)


@pytest.mark.long
@pytest.mark.parametrize("fault", [over_the_models_keys, a_token_too_far], ids=lambda fault: fault.__name__)
def test_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_ = Answers(small(max_drafts=0), few(12))
    always(monkeypatch)
    fault(monkeypatch, runner := small())
    assert Answers(runner, few(12)).said != plain_.said


@pytest.mark.long
def test_a_prefix_brings_its_keys_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tree, and from the disk behind a restart: guesses behind it are those of a prompt that was computed."""
    monkeypatch.setattr(Drafter, "propose", lambda self, *_: [])  # so each run has the same steps
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    kept: list[list[list[int]]] = []

    def ask(engine: Engine) -> int:
        runner: Any = engine.runner
        step, found, n_cached = runner.step, list[list[int]](), 0

        def noted(planned: Step) -> StepResult:
            planned.runs_ahead = False
            for draw in planned.draws:
                draw.n_guesses = MOST if planned.chunks[draw.chunk].is_decode else 0
            result: StepResult = step(planned)
            found.extend(guesses for guesses in result.guesses if guesses)
            return result

        runner.step = noted
        engine.add(Request(id="a", prompt_ids=prompt(80), params=params))
        while engine.has_work():
            n_cached = max([n_cached, *(output.cached_tokens for output in engine.step())])
        runner.step = step
        kept.append(found)
        return n_cached

    settings: dict[str, Any] = {"path": small_checkpoint("dense"), "draft_model": str(drafter_of("dflash"))}
    settings |= {"cache_dir": tmp_path / "cache", "cache_host_gb": 0.05, "n_checkpoints": 4}
    engine = Engine(build(None, **settings))
    hits = [ask(engine), ask(engine)]
    engine.close(5)
    hits.append(ask(Engine(build(None, **settings))))
    assert hits == [0, PAGE_SIZE, PAGE_SIZE]
    assert sum(map(len, kept[0])) > 8 and kept[0] == kept[1] == kept[2]


def test_what_is_planned_and_refused(tmp_path: Path) -> None:
    runner = small()
    plan = runner.plan
    assert plan.page_bytes == plan.shape.page_bytes() + plan.drafter.page_bytes
    assert plan.page_bytes == sum(part[0].nbytes for part in runner._pages)
    assert plan.workspace["decode features"] == plan.n_decode_rows * 2 * plan.shape.hidden_size * 2
    model, drafter = runner.model, runner.block_drafter._drafter
    tables = model.cos, model.sin, drafter.cos, drafter.sin, drafter._k_norms
    assert plan.workspace["rotary tables"] == sum(table.nbytes for table in tables)
    assert plan.drafter_bytes > 0 and runner.info.draft_block == 7 and runner.draft_head is None
    with pytest.raises(UnsupportedModelError, match="hc_count"):
        build("dflash", tiny_checkpoint("flash"))
