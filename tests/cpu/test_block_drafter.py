"""Block drafters: guesses against the reference, keys and values that no schedule changes, and answers that no guess does."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.cache import pages_for
from deltic.engine.drafts import HEAD, Drafter, Drafting
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams, TokenLogprob
from deltic.engine.step import Chunk, Draw, Step, StepResult
from deltic.models.dflash.weights import drafter_bytes, load_drafter, stored_drafter
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.loading import COUNTED
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights, stored_shape
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.build import build_runner, plan_of, settle
from deltic.runtime.cpu.block_drafter import LEAST_CHANCE
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests import tiny_drafter as tiny_drafter_module
from tests.cpu.test_reference import prompt
from tests.drafted import Schedule, requests
from tests.heads import run, sequence
from tests.plain import plain
from tests.reference import dflash as reference
from tests.reference.model import hidden_states
from tests.tensors import tensor_of
from tests.tiny import tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB
from tests.tiny_drafter import KINDS, MASK, TARGET_LAYERS, plain_drafter, tiny_drafter, write_drafter


def build(kind: str | None = "dflash", target: str = "dense", path: Path | None = None, **settings: Any) -> Any:
    """kind: of the drafter; None: there is none."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_step_tokens": 128, "n_pages": 24}
    sizes |= {"n_checkpoints": 0, "draft_model": str(tiny_drafter(kind)) if kind else None}
    config = EngineConfig(
        model=str(path or tiny_checkpoint(target)), threads=2, **{**sizes, "max_drafts": 8, **settings}
    )
    return build_runner(config, lambda stage, done: None, Cpu())


def keys_of(runner: Any, pages: list[int], n: int) -> np.ndarray:
    """Bits of the drafter's keys and values of the first n tokens: [layers, 2, heads, n, dim], keys in pairs as they lie."""
    shape = runner.plan.drafter
    first = runner.plan.shape.page_bytes()
    own = runner.pages[pages, first : first + shape.page_bytes].view(np.uint16)
    own = own.reshape(len(pages), shape.n_layers, 2, shape.n_kv_heads, PAGE_SIZE * shape.head_dim)
    k = own[:, :, 0].reshape(*own.shape[:2], shape.n_kv_heads, shape.head_dim // 2, PAGE_SIZE, 2)
    k = np.moveaxis(k, 4, 3).reshape(*own.shape[:2], shape.n_kv_heads, PAGE_SIZE, shape.head_dim)
    v = own[:, :, 1].reshape(k.shape)
    return np.concatenate(list(np.stack([k, v], 2)), axis=3)[:, :, :, :n]


def features_of(weights: Any, shape: ModelShape, ids: list[int]) -> torch.Tensor:
    trace: list[torch.Tensor] = []
    hidden_states(weights, shape, ids, "bfloat16", trace=trace)
    return torch.cat([trace[1 + i] for i in TARGET_LAYERS], -1)


@pytest.mark.parametrize(
    ("kind", "target"), [*((kind, "dense") for kind in KINDS), ("dflash", "moe"), ("dflash2", "next")]
)
def test_guesses_are_those_of_the_reference(kind: str, target: str) -> None:
    path = tiny_checkpoint(target)
    shape = stored_shape(path, ModelShape.from_directory(path))
    weights, (own, of) = plain(load_weights(path, shape)[0]), plain_drafter(tiny_drafter(kind))
    runner, ids, n = build(kind, target), prompt(), 5
    guesses = run(runner, sequence_ := sequence(ids), len(ids), n)
    anchor = sequence_.tokens[-1]
    known = reference.context(own, of, features_of(weights, shape, ids), "bfloat16")
    found = keys_of(runner, sequence_.pages, len(ids))
    for i, keys in enumerate(known):
        for j, expected in enumerate(keys):
            values = tensor_of(found[i, j].view(np.int16)).view(torch.bfloat16).float().transpose(0, 1)
            off = (values - expected).abs()
            assert (
                off > 0.1
            ).float().mean() < 0.03 and off.median() < 0.01  # a near-tie of experts may fall either way
    rows = weights.embed[[anchor] + [MASK] * (n if not of.guesses_at_anchor else n - 1)].float()
    states = reference.block_states(own, of, known, rows, "bfloat16")[-n:]
    logits = reference.logits_of(of, states, weights.lm_head, "bfloat16")[:, :N_REAL_VOCAB]
    assert 0 < len(guesses) <= n and (kind == "dspark" or len(guesses) == n)
    before = anchor
    for i, guess in enumerate(guesses):
        scores = reference.step_scores(own, of, states[i], padded(logits[i]), before, "bfloat16")
        assert scores.max() - scores[guess] < 0.05  # near-ties may fall either way
        if kind == "dspark":
            assert reference.confidence(own, of, states[i], before) > LEAST_CHANCE - 0.01
        before = guess
    if len(guesses) < n:
        assert reference.confidence(own, of, states[len(guesses)], before) < LEAST_CHANCE + 0.01


def padded(logits: torch.Tensor) -> torch.Tensor:
    """Padding ids are never drawn."""
    return torch.cat([logits, torch.full((512 - N_REAL_VOCAB,), -torch.inf)])


def test_its_keys_and_values_are_the_same_on_every_way() -> None:
    """In one chunk, in several, token by token, with guesses and without, beside others: bit for bit."""
    ids, n = prompt(), 140
    runner = build()
    run(runner, of := sequence(ids), len(ids), 3)
    while len(of.tokens) < n + 1:
        run(runner, of, 1, len(of.tokens) % 4)
    truth, tokens = keys_of(runner, of.pages, n), list(of.tokens)
    assert len(set(truth[0, 0, 0, :, 0].tolist())) > 100

    runner = build()
    run(runner, other := sequence(tokens[:n]), 64, draws=False)
    run(runner, other, n - 64)
    np.testing.assert_array_equal(keys_of(runner, other.pages, n), truth)

    runner = build()
    run(runner, second := sequence(prompt(50, seed=1), batch_slot=1), 50, 2)
    run(runner, first := sequence(ids), len(ids))
    while len(first.tokens) < n + 1:
        start = first.n_computed + first.n_window
        wrong = [7] * (start % 3) if start % PAGE_SIZE < 50 else []
        chunk = Chunk(first, start, 1 + len(wrong), drafts=wrong, n_redo=first.n_window)
        step = Step([chunk, Chunk(second, second.n_computed, 1)], [Draw(0, first, 2), Draw(1, second, 1)])
        result = runner.step(step)
        first.n_computed, first.n_window = (start, len(result.tokens[0])) if wrong else (start + 1, 0)
        second.n_computed += 1
        for s, drawn in zip((first, second), result.tokens, strict=True):
            s.tokens.extend(drawn)
    assert list(first.tokens[: n + 1]) == tokens
    np.testing.assert_array_equal(keys_of(runner, first.pages, n), truth)


def test_blocks_end_where_pages_end() -> None:
    runner = build()
    of = sequence(prompt(PAGE_SIZE - 4))
    of.pages = of.pages[:1]
    found = [len(run(runner, of, n, 8)) for n in (PAGE_SIZE - 4, 1, 1, 1)]
    assert found == [3, 2, 1, 0]  # the anchor has a place, too; the next token has no page yet


def test_nothing_is_guessed_beyond_the_end_of_an_answer() -> None:
    """Behind a guess one token is drawn: penalties have no room for more."""
    of = sequence(prompt(20), max_tokens=6, frequency_penalty=1e-6)
    of.pages, runner = of.pages[:1], build(max_model_len=26)
    assert [len(run(runner, of, n, 8)) for n in (20, 1, 1, 1, 1, 1)] == [4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("kind", ["dflash", "dspark", "mtp"])
def test_penalties_at_the_end_of_the_longest_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was accepted of the last draft, no step fails, and who is beside it gets an answer."""
    always(monkeypatch)
    path = tiny_checkpoint("dense", has_mtp=True) if kind == "mtp" else None
    runner = build(None if kind == "mtp" else kind, path=path, max_model_len=50)
    params = SamplingParams(
        max_tokens=99, temperature=0.0, ignore_eos=True, logit_bias={7: 80.0}, frequency_penalty=1e-6
    )
    given = [Request(id=f"{n}", prompt_ids=prompt(n), params=params) for n in (17, 18, 20, 23)]
    answers = Answers(runner, given)
    assert [len(answers.said[one.id][0]) for one in given] == [50 - len(one.prompt_ids) for one in given]
    assert answers.stats.n_accepted > 70


def test_more_blocks_than_fit_at_once() -> None:
    """In groups, as alone."""
    runner = build(max_num_seqs=12, n_pages=48)
    assert runner.block_drafter.n_rows == 64
    many = [sequence(prompt(20 + i, seed=i), batch_slot=i) for i in range(12)]
    for of in many:
        run(runner, of, len(of.tokens))
    wanted = [1 + i % 7 for i in range(12)]
    step = Step([Chunk(of, of.n_computed, 1) for of in many], [Draw(i, of, wanted[i]) for i, of in enumerate(many)])
    together = runner.step(step).guesses
    assert [len(guesses) for guesses in together] == wanted
    for i in (0, 6, 11):
        alone = build()
        run(alone, of := sequence(prompt(20 + i, seed=i)), 20 + i)
        assert run(alone, of, 1, wanted[i]) == together[i]


def test_nothing_is_computed_behind_the_end_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that end one after the other, each guesses what it does alone, and its row ends with it."""
    monkeypatch.setattr("deltic.runtime.cpu.block_drafter.LEAST_CHANCE", 0.5)
    runner, n_rows = build("dspark"), 0
    drafter = runner.block_drafter
    scored = drafter._next.run

    def counted() -> None:
        nonlocal n_rows
        n_rows += int(drafter._counts[3])
        scored()

    monkeypatch.setattr(drafter._next, "run", counted)
    many = [sequence(prompt(20 + i, seed=i), batch_slot=i) for i in range(4)]
    alone = [run(runner, sequence(prompt(20 + i, seed=i), batch_slot=i), 20 + i, 8) for i in range(4)]
    n_alone, n_rows = n_rows, 0
    step = Step([Chunk(of, 0, len(of.tokens)) for of in many], [Draw(i, of, 8) for i, of in enumerate(many)])
    assert runner.step(step).guesses == alone and len(set(map(len, alone))) > 1
    assert n_rows == n_alone == sum(min(8, len(guesses) + 1) for guesses in alone)


def test_a_block_ends_where_no_candidate_may_be_drawn(tmp_path: Path) -> None:
    write_drafter(tmp_path, "dflash2")
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"]["selector_top_k"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = build(draft_model=str(tmp_path))
    all_guesses = [run(runner, sequence(prompt(9, seed=i)), 9, 4) for i in range(12)]
    seed, guesses = next((i, found) for i, found in enumerate(all_guesses) if found[1] != found[0])
    barred = sequence(prompt(9, seed=seed), batch_slot=1, stop_token_ids=(guesses[1],), min_tokens=50)
    assert run(runner, barred, 9, 4) == guesses[:1]


def test_what_draws_a_token_draws_a_guess() -> None:
    """Biases, penalties and bans; and seeds."""
    biased: dict[str, Any] = {"logit_bias": {7: 50.0}, "frequency_penalty": 2.0}
    assert run(build(), sequence(prompt(9), **biased), 9, 3) == [7, 7, 7]
    seeds = {tuple(run(build(), sequence(prompt(9), batch_slot=i, temperature=5.0), 9, 4)) for i in range(3)}
    assert len(seeds) == 3


class Answers:
    """What an engine says of some requests, with no help."""

    def __init__(self, runner: Runner, given: list[Request], **more: Any) -> None:
        engine, self.said = Engine(runner, **more), dict[str, tuple[list[int], list[TokenLogprob]]]()
        for request in given:
            engine.add(request)
            self.said[request.id] = [], []
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                self.said[output.id][0].extend(output.token_ids)
                self.said[output.id][1].extend(output.logprobs or [])
            engine.check()
        self.stats = engine.stats()


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row and every guess is worth it, and nobody else guesses."""

    def propose(self: Drafter, tokens: Any, most: int, *_: Any) -> list[int]:
        self.used = HEAD
        return self.guesses[:most]

    monkeypatch.setattr(Drafter, "propose", propose)
    monkeypatch.setattr(Drafting, "_step_s", lambda self, n: [1.0] * 65)
    monkeypatch.setattr(Drafting, "_n_asked", lambda self, asked, s, n: Counter({i: w.n_guessable for i, w in asked}))


def likely(seed: int) -> list[Request]:
    """Requests whose biases make some guesses right."""
    changes: dict[str, Any] = {"n": 1, "logprobs": 1, "logit_bias": {i: 9.0 for i in range(3)}}
    changes |= {"ignore_eos": True, "min_tokens": 0}
    return [
        Request(id=one.id, prompt_ids=one.prompt_ids, params=msgspec.structs.replace(one.params, **changes))
        for one in requests(seed)
    ]


SIZES: dict[str, Any] = {"max_num_seqs": 6, "n_checkpoints": 6}


@pytest.mark.parametrize(("kind", "target", "more"), [
    ("dflash", "dense", {}),
    ("dflash2", "moe", {"quantize": "int8"}),
    ("dspark", "next", {"kv_cache_dtype": "int8"}),
    ("sliding", "dense", {"state_dtype": "bfloat16", "kv_cache_dtype": "k8v4"}),
])  # fmt: skip
def test_its_guesses_change_no_bit(
    kind: str, target: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_ = Answers(build(None, target, max_drafts=0, **SIZES, **more), likely(5))
    always(monkeypatch)
    found = Answers(build(kind, target, **SIZES, **more), likely(5))
    assert found.said == plain_.said
    least = 0 if kind == "dflash2" else 20  # a bias makes no candidate of an id
    assert found.stats.n_drafted - 100 > found.stats.n_accepted >= least


@pytest.mark.parametrize("target", ["dense", "next"])
def test_random_schedules_keep_their_bits(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits, forks, aborts, preemption, seeds, penalties; the drafter runs in every step."""
    more = {**SIZES, "cache_host_gb": 0.05} if target == "next" else SIZES
    truths = [Schedule(seed).run(build(None, target, max_drafts=0, **more), monkeypatch)[0] for seed in range(2)]
    runner, n_guessed = build("dflash", target, **more), 0
    step = runner.step

    def asking(planned: Step) -> StepResult:
        nonlocal n_guessed
        for draw in planned.draws:
            draw.n_guesses = 5
        result = step(planned)
        n_guessed += sum(map(len, result.guesses))
        return result

    monkeypatch.setattr(runner, "step", asking)
    for seed, truth in enumerate(truths):
        found, engine = Schedule(seed, truth=truth).run(runner, monkeypatch)
        assert found == truth
        assert engine.stats().n_accepted > 20
    assert n_guessed > 200


def over_the_models_keys(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """Its keys stand where the model's are."""
    step, size = runner.step, 2 * 64

    def spoiling(planned: Step) -> StepResult:
        result = step(planned)
        for draw, guesses in zip(planned.draws, result.guesses, strict=True):
            if guesses:
                runner.pages[draw.sequence.pages[0], :size] = runner.pages[draw.sequence.pages[0], -size:]
        return result

    monkeypatch.setattr(runner, "step", spoiling)


def a_token_too_far(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """A guess is taken as if it had been drawn."""
    accepted = Chunk.accepted

    def more(self: Chunk, drawn: list[int]) -> list[int]:
        found = accepted(self, drawn)
        return drawn[: len(found) + 1] if len(found) < len(drawn) else found

    monkeypatch.setattr(Chunk, "accepted", more)


@pytest.mark.parametrize("fault", [over_the_models_keys, a_token_too_far], ids=lambda fault: fault.__name__)
def test_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_ = Answers(build(None, max_drafts=0, **SIZES), likely(5))
    always(monkeypatch)
    runner = build(**SIZES)
    fault(monkeypatch, runner)
    assert Answers(runner, likely(5)).said != plain_.said


def test_a_prefix_brings_its_keys_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tree, and from the disk behind a restart: guesses behind it are those of a prompt that was computed."""
    always(monkeypatch)
    params = msgspec.structs.replace(likely(5)[0].params, max_tokens=12, temperature=0.0)
    asked = Request(id="a", prompt_ids=prompt(150), params=params)
    kept: list[list[list[int]]] = []

    def ask(engine: Engine) -> int:
        runner: Any = engine.runner
        follow, found = runner.block_drafter.follow, list[list[int]]()

        def noted(step: Step, drawn: list[list[int]]) -> Any:
            result = follow(step, drawn)
            found.extend(result[0])
            return result

        monkeypatch.setattr(runner.block_drafter, "follow", noted)
        n_cached = 0
        engine.add(asked)
        while engine.has_work():
            n_cached = max([n_cached, *(output.cached_tokens for output in engine.step())])
        monkeypatch.setattr(runner.block_drafter, "follow", follow)
        kept.append(found)
        return n_cached

    settings: dict[str, Any] = {**SIZES, "cache_dir": tmp_path / "cache"}
    engine = Engine(build(**settings))
    hits = [ask(engine), ask(engine)]
    engine.close(5)
    hits.append(ask(Engine(build(**settings))))
    assert hits[0] == 0 and hits[1] >= PAGE_SIZE and hits[2] >= PAGE_SIZE
    assert sum(map(len, kept[0])) > 20 and kept[0] == kept[1] == kept[2]


def test_in_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dense", has_mtp=True), path)
    assert build(None, path=path).info.draft_block == 0
    (path / "draft_model").mkdir()
    write_drafter(path / "draft_model", "dspark", prefix="model.", dtype=torch.float16)
    runner = build(None, path=path)
    assert runner.info.draft_block == 8 and runner.info.has_draft_head and runner.draft_head is None
    assert any("draft model: converted" in notice for notice in runner.info.notices), runner.info.notices
    assert build(None, path=path, max_drafts=0).info.draft_block == 0
    plan = runner.plan
    assert plan.page_bytes == plan.shape.page_bytes() + plan.drafter.page_bytes
    assert plan.drafter_bytes == load_drafter(path / "draft_model", plan.drafter, None)[0].n_bytes


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_quantised_drafter_takes_what_was_planned(prefix: str, tmp_path: Path) -> None:
    write_drafter(tmp_path, "dflash", prefix=prefix)
    stored = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored[name] = tensor
        if "proj" in name:
            stored[name] = (100 * tensor.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in tensor.shape], 0.01)
    save_file(stored, tmp_path / "model.safetensors")
    shape = stored_drafter(tmp_path)
    for quantize in (None, "int4"):
        loaded = load_drafter(tmp_path, shape, quantize)[0]
        assert loaded.n_bytes == drafter_bytes(shape, quantize)


def test_a_plan_looks_at_its_files(tmp_path: Path) -> None:
    """As serving does."""
    write_drafter(tmp_path, "dflash")
    config = EngineConfig(model=str(tiny_checkpoint("dense")), draft_model=str(tmp_path), max_drafts=8)
    settle(config, Cpu()).check_files(COUNTED)
    changed = json.loads((tmp_path / "config.json").read_text()) | {"head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' has the wrong shape"):
        settle(config, Cpu()).check_files(COUNTED)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file here"):
        settle(config, Cpu()).check_files(COUNTED)


def test_a_drafter_larger_than_its_model_leaves_room_for_a_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any setting of memory."""
    monkeypatch.setattr(tiny_drafter_module, "FFN", 20480)
    write_drafter(tmp_path, "dflash")
    config = EngineConfig(model=str(tiny_checkpoint("dense")), draft_model=str(tmp_path), threads=1)
    plan = plan_of(settle(config, Cpu()), Cpu(), 8 << 30)
    assert plan.drafter_bytes > 60e6 and plan.n_checkpoints > 0 and plan.n_pages > 2 * pages_for(plan.max_model_len)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft-model .*: nothing is guessed"):
        build(max_drafts=0)
    with pytest.raises(CheckpointError, match="no such directory"):
        build(draft_model=str(tmp_path / "none"))
    with pytest.raises(
        ConfigError, match=r"--draft-model .*head.gguf: give the head's own checkpoint, in safetensors; GGUF is"
    ):
        build(draft_model=str(tmp_path / "head.gguf"))
    write_drafter(tmp_path, "dflash")
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, said in (
        (
            {"vocab_size": 256, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]}},
            "draft model: vocab_size",
        ),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 3]}}, "draft model: target_layer_ids"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "a block drafter: DFlashDraftModel"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UnsupportedModelError, match=said):
            build(draft_model=str(tmp_path))
