"""The joint schema head of a decision model against torch's own modules, and its files."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import JointQuestion, Request, SamplingParams
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.joint_head import CONFIG, WEIGHTS, HeadShape, JointHead, Span, SpannedQuestion
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.runtime.plan import page_cost
from deltic.server.chat.joint import asked_choice, asked_noul, asked_score, joint_request
from deltic.server.errors import ApiError
from deltic.text import Tokenizer
from tests.cpu.test_embedder import vectors
from tests.cpu.test_reference import needs_transformers, published_model
from tests.reference.joint_head import joint_head
from tests.tiny import new_directory, tiny_checkpoint
from tests.tiny_config import HIDDEN, TOKEN_ID

SHAPE = HeadShape(hidden_size=48, width=32, routing_layers=2, layers=3, heads=4, feedforward=64)


def random_weights(shape: HeadShape, seed: int = 0) -> dict[str, Tensor]:
    """Trained ones have norms near 1; all else is random."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(size, generator=generator) * 0.2 for name, size in shape.parts().items()}
    return {
        name: 1 + tensor if "norm" in name and name.endswith("weight") else tensor for name, tensor in found.items()
    }


def stored(path: Path, shape: HeadShape = SHAPE, weights: dict[str, Tensor] | None = None, **changed: Any) -> Path:
    (path / CONFIG).write_text(
        json.dumps({name: getattr(shape, name) for name in shape.__dataclass_fields__} | changed)
    )
    save_file(random_weights(shape) if weights is None else weights, path / WEIGHTS)
    return path


def record(counts: list[int], seed: int, n_tokens: int) -> tuple[list[SpannedQuestion], Tensor, list[Tensor]]:
    """Questions with so many options, hidden states of a prompt, and the words of the options."""
    generator = torch.Generator().manual_seed(seed)
    hidden, at, questions, words = torch.randn((n_tokens, SHAPE.hidden_size), generator=generator) * 3, 3, [], []
    for i, n in enumerate(counts):
        spans = [Span(at + 4 + 3 * j, at + 4 + 3 * j + 1 + (i + j) % 3) for j in range(n)]
        questions.append(SpannedQuestion(i % 3, Span(at, at + 3), spans))
        words.append(torch.randn((n, SHAPE.hidden_size), generator=generator))
        at = spans[-1].end + 2
    assert at <= n_tokens
    return questions, hidden, words


@pytest.mark.parametrize(("counts", "n_tokens"), [([2], 40), ([2, 5, 3, 2], 120), ([700, 2], 2300)])
def test_logits_are_those_of_the_published_equations(counts: list[int], n_tokens: int, tmp_path: Path) -> None:
    """Both compute in float32, so they differ by its rounding: 2e-4 of logits of some units."""
    weights = random_weights(SHAPE)
    head = JointHead.load(stored(tmp_path, weights=weights), SHAPE)
    questions, hidden, words = record(counts, len(counts), n_tokens)
    with torch.no_grad():
        config = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}
        expected = joint_head(weights, config, hidden, questions, words)
    found = head.logits(hidden.numpy(), questions, torch.cat(words).numpy())
    assert [len(each) for each in found] == counts
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4, rtol=0)
    again = head.logits(hidden.numpy().copy(), questions, torch.cat(words).numpy().copy())
    assert b"".join(each.tobytes() for each in again) == b"".join(each.tobytes() for each in found)


def test_a_head_of_bfloat16_is_read(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(SHAPE).items()}
    JointHead.load(stored(tmp_path, weights=weights), SHAPE)
    assert HeadShape.of(tmp_path, 48) == SHAPE and SHAPE.n_bytes > 0


def test_heads_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    assert HeadShape.of(tmp_path, 48) is None
    with pytest.raises(UnsupportedModelError, match="64, as the model has"):
        HeadShape.of(stored(tmp_path), 64)
    with pytest.raises(UnsupportedModelError, match="a divisor of the width"):
        HeadShape.of(stored(tmp_path, heads=5), 48)
    weights = random_weights(SHAPE)
    for spoilt, said in (
        ({k: v for k, v in weights.items() if k != "field_norm.bias"}, "'field_norm.bias' is missing"),
        (weights | {"other": torch.zeros(1)}, "'other' is not known"),
        (weights | {"field_norm.bias": torch.zeros(3)}, "expected"),
        (weights | {"field_norm.bias": torch.full((32,), torch.nan)}, "not finite"),
    ):
        with pytest.raises(CheckpointError, match=said):
            JointHead.load(stored(tmp_path, weights=spoilt), SHAPE)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="not there"):
        HeadShape.of(tmp_path, 48)


# The head behind a model.

QUESTIONS = [
    asked_noul("urgent", "Is it urgent?", {"true": "Somebody waits."}),
    asked_choice("team", {"b": 1, "a": "Who?"}, {"sales": None, "care": {"does": "helps"}, "billing": "money"}),
    asked_score("anger", "", ["calm", "cross", "furious"]),
]


@cache
def decider() -> Path:
    path = new_directory("decider")
    shutil.copytree(tiny_checkpoint("dense"), path, dirs_exist_ok=True)
    return stored(path, HeadShape(HIDDEN, 64, 2, 2, 4, 96))


@cache
def runner(quantize: str | None = None) -> Runner:
    config = EngineConfig(
        model=str(decider()), quantize=quantize, max_num_seqs=4, max_model_len=1536, max_step_tokens=320, threads=2
    )
    return build_runner(config, lambda stage, done: None, Cpu())


def decision(engine: Engine, state: Any, name: str = "a") -> Request:
    request = joint_request(Tokenizer.load(decider()), engine.info, state, QUESTIONS)
    return msgspec.structs.replace(request, id=name)


def test_the_prompt_is_that_of_the_published_encoder() -> None:
    """Pieces of it as joint_schema_model.py writes them; of the client's text nothing becomes a special token."""
    engine = Engine(runner())
    sent = decision(engine, {"z": "<|im_end|>", "a": [1]})
    tokenizer = Tokenizer.load(decider())
    text = tokenizer.decode(sent.prompt_ids, False)
    assert text.startswith("<|im_start|>system\nRead the complete state and schema. Decide every field jointly.")
    assert (
        '<|im_start|>user\nSTATE:\n{"a":[1],"z":"<|im_end|>"}\n\nSCHEMA FIELDS:\n\nFIELD 1\nID: urgent\nTYPE: noul\n'
        in text
    )
    assert text.endswith(
        "END FIELD\n\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
    )
    assert sent.prompt_ids.count(TOKEN_ID["<|im_end|>"]) == 2
    shown = [[tokenizer.decode(sent.prompt_ids[a:b]) for a, b in (q.instruction, *q.options)] for q in sent.questions]
    assert shown[0] == [
        "Is it urgent?", '{"description":"Somebody waits.","option_id":"true"}',
        '{"description":"The proposition is false or the answer is no.","option_id":"false"}',
    ]  # fmt: skip
    assert shown[1][0] == '{"a":"Who?","b":1}' and shown[1][3] == '{"option_id":"sales"}'
    assert shown[2] == [
        "anger",
        *(f'{{"description":"{level}","option_id":"{i}"}}' for i, level in enumerate(("calm", "cross", "furious"))),
    ]
    assert [q.kind for q in sent.questions] == [0, 1, 2]


@needs_transformers
def test_decisions_are_those_of_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model rounds to bfloat16 as it goes, where the published one computes in float32 here: of each token the hidden states
    have a cosine within 3e-3 of 1. Behind these states the head is the published one to 2e-4, whose words are rows of the checkpoint."""
    engine, config = Engine(runner()), json.loads((decider() / CONFIG).read_text())
    sent, seen = decision(engine, "The server is down, and I am losing money!"), []
    logits = JointHead.logits
    monkeypatch.setattr(
        JointHead, "logits", lambda head, hidden, *more: [seen.append(hidden), logits(head, hidden, *more)][1]
    )
    found = np.frombuffer(vectors(engine, [sent])["a"], np.float32)
    model, ids = published_model(tiny_checkpoint("dense")), torch.tensor(sent.prompt_ids)
    hidden = torch.tensor(seen[0])
    with torch.no_grad():
        published = model.model.language_model(input_ids=ids[None]).last_hidden_state[0]
        words = [torch.stack([model.lm_head.weight[ids[a:b]].mean(0) for a, b in q.options]) for q in sent.questions]
        asked = [(q.kind, q.instruction, q.options) for q in sent.questions]
        expected = torch.cat(joint_head(load_file(decider() / WEIGHTS), config, hidden, asked, words))
    assert float(torch.cosine_similarity(hidden, published).min()) > 0.997
    assert len(found) == 8 and float(expected.std()) > 0.1
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_decisions_have_the_same_bits_in_any_company(quantize: str | None) -> None:
    own = runner(quantize)
    engine = Engine(own)
    state = "The server is down, and I am losing money!" * 4
    alone = vectors(engine, [decision(engine, state)])["a"]
    others = [decision(engine, "x" * 90 * i, f"b{i}") for i in range(3)]
    assert vectors(engine, [*others, decision(engine, state)])["a"] == alone, "in company, and warm"
    cut = Engine(own)
    cut.scheduler.max_step_tokens = 64
    assert vectors(cut, [decision(engine, state), others[1]], preempt_at=4)["a"] == alone, "in chunks, preempted"
    fresh = Engine(own)
    fresh.add(Request(id="c", prompt_ids=others[0].prompt_ids, params=SamplingParams(max_tokens=3, temperature=0.0)))
    while fresh.has_work():
        fresh.step()
    assert vectors(fresh, [decision(engine, state)])["a"] == alone, "behind a chat"


def test_questions_that_do_not_fit_are_refused() -> None:
    engine = Engine(runner())
    sent = decision(engine, "x")
    n = len(sent.prompt_ids)
    for spoilt, said in (
        (JointQuestion(0, (0, 3), []), "needs options"),
        (JointQuestion(0, (3, 3), [(0, 1)]), "needs options"),
        (JointQuestion(0, (0, 1), [(0, n + 1)]), "needs options"),
        (JointQuestion(3, (0, 1), [(0, 1)]), "no kind of question 3"),
    ):
        with pytest.raises(RequestError, match=said):
            engine.add(msgspec.structs.replace(sent, questions=[spoilt]))
    with pytest.raises(RequestError, match="nothing is drawn"):
        engine.add(msgspec.structs.replace(sent, params=SamplingParams(max_tokens=1)))
    with pytest.raises(ApiError, match="maximum context length"):
        decision(engine, "x" * 2000)


def test_a_model_with_a_head_plans_for_it() -> None:
    plan = runner().plan
    assert plan.workspace["joint head"] == HeadShape(HIDDEN, 64, 2, 2, 4, 96).n_bytes
    assert page_cost(plan) == plan.page_bytes + 64 * HIDDEN * 2
