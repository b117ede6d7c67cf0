"""Embedders on the CPU: vectors are those of sentence-transformers' equations over the published model's hidden states, and have the
same bits whatever runs beside them, however their prompts are cut, and whatever the cache has."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltic import LLM
from deltic.config import EngineConfig
from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import Pooling, Request, SamplingParams
from deltic.models.embedder import embedder_in
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.cpu.test_purity import prompt
from tests.cpu.test_reference import needs_transformers, published_model
from tests.tiny import tiny_checkpoint, tiny_embedder
from tests.tiny_config import HIDDEN, TOKEN_ID

END = TOKEN_ID["<|endoftext|>"]
MODES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}


@cache
def runner(kind: str, mode: str, quantize: str | None = None, **more: Any) -> Runner:
    config = EngineConfig(
        model=str(tiny_embedder(kind, mode)), quantize=quantize, max_num_seqs=4, max_model_len=512, max_step_tokens=320, threads=2,
        **more,
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Cpu())


def request(name: str, ids: list[int], mode: str, **fields: Any) -> Request:
    pooling = Pooling(mode=MODES[mode], is_normalised=True, n_dimensions=HIDDEN)  # type: ignore[arg-type]
    return Request(
        id=name, prompt_ids=ids, params=SamplingParams(max_tokens=0, temperature=0.0), pooling=pooling, **fields
    )


def vectors(engine: Engine, requests: list[Request], preempt_at: int | None = None) -> dict[str, bytes]:
    for each in requests:
        engine.add(each)
    found, n_steps = dict[str, bytes](), 0
    while engine.has_work():
        if n_steps == preempt_at:
            for sequence in [*engine.scheduler._prefills]:
                engine.scheduler._preempt(sequence)
        for output in engine.step():
            assert output.finish_reason == "length" and not output.token_ids and output.vector, output
            found[output.id] = output.vector
        n_steps += 1
    engine.check()
    return found


@torch.no_grad()
def published(model: Any, mode: str, ids: list[int], normalises: bool, n: int) -> NDArray[np.float32]:
    """Pooling of sentence_transformers/models/Pooling.py over one prompt, then its cut, then Normalize."""
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    pooled = {"lasttoken": hidden[-1], "mean_tokens": hidden.sum(0) / len(ids), "cls_token": hidden[0]}[mode][:n]
    return np.asarray(torch.nn.functional.normalize(pooled, dim=0) if normalises else pooled)


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "mode", "normalises", "n"),
    [
        ("dense", "lasttoken", True, 256),
        ("dense", "mean_tokens", False, 256),
        ("moe", "mean_tokens", True, 64),
        ("next", "lasttoken", True, 128),
    ],
)
def test_vectors_are_those_of_the_published_equations(kind: str, mode: str, normalises: bool, n: int) -> None:
    """Ours round activations to bfloat16 as they go; the published model computes in float32 here. So a cosine is within 2e-3 of 1, and
    within 2e-2 where a rounded router may take another of its random experts."""
    texts = ["What is a gated delta rule?", "a" * 200, "<|im_start|>x"]
    with LLM(
        str(tiny_embedder(kind, mode, normalises=normalises)), threads=2, max_model_len=512, progress=False
    ) as llm:
        ours = llm.embed(texts, dimensions=n, progress=False)
        ids = [[*llm.tokenizer.encode(text, "parse"), END] for text in texts]
        assert ours.dtype == np.float32 and ours.shape == (3, n)
        assert ours.tobytes() == llm.embed(ids, dimensions=n, progress=False).tobytes()
    model = published_model(tiny_checkpoint(kind, layout="flat"))
    for vector, own in zip(ours, ids, strict=True):
        expected = published(model, mode, own, normalises, n)
        cosine = float(vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected))
        assert cosine > (0.998 if kind == "dense" else 0.98)
        assert np.linalg.norm(vector) == pytest.approx(
            1.0 if normalises else float(np.linalg.norm(expected)), rel=1e-6 if normalises else 0.02
        )


@pytest.mark.parametrize(
    ("kind", "mode", "quantize"),
    [("dense", "lasttoken", None), ("dense", "mean_tokens", "int8"), ("moe", "mean_tokens", None), ("next", "lasttoken", "int4"), ("moe", "cls_token", None)],
)  # fmt: skip
def test_bits_are_the_same_in_any_company_cut_or_cached(kind: str, mode: str, quantize: str | None) -> None:
    own = runner(kind, mode, quantize)
    ids, beginning = prompt(1, 330), prompt(1, 330)[:192]
    alone = vectors(Engine(own), [request("a", ids, mode)])["a"]
    assert np.isfinite(np.frombuffer(alone, np.float32)).all()
    others = [request(f"b{i}", prompt(i + 7, 40 + 61 * i), mode) for i in range(5)]
    engine = Engine(own)
    assert vectors(engine, [*others[:3], request("a", ids, mode), *others[3:]])["a"] == alone, "in company"
    assert vectors(engine, [request("a", ids, mode)])["a"] == alone, "warm"
    for n_tokens in (64, 128):
        cut = Engine(own)
        cut.scheduler.max_step_tokens = n_tokens
        assert vectors(cut, [request("a", ids, mode)])["a"] == alone, f"in chunks of {n_tokens}"
    hit = Engine(own)
    assert vectors(hit, [request("c", [*beginning, 5], mode), request("a", ids, mode)])["a"] == alone, "behind a prefix"
    cut = Engine(own)
    cut.scheduler.max_step_tokens = 64
    assert vectors(cut, [request("a", ids, mode), *others], preempt_at=3)["a"] == alone, "preempted"
    one = vectors(Engine(own), [request("a", ids[:1], mode)])["a"]
    assert vectors(Engine(own), [*others, request("a", ids[:1], mode)])["a"] == one, "one token"


def test_a_prefix_counts_where_the_last_token_is_taken() -> None:
    engine = Engine(runner("dense", "lasttoken"))
    ids, found = prompt(3, 300), []
    for name in "ab":
        engine.add(request(name, ids, "lasttoken"))
        while engine.has_work():
            found += [output.cached_tokens for output in engine.step()]
    assert found[0] == 0 and found[1] >= 256


def test_bits_are_the_same_after_a_restart(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with LLM(str(tiny_embedder()), threads=2, max_model_len=512, cache_dir=tmp_path, progress=False) as llm:
            found.append(llm.embed([prompt(1, 300)], progress=False).tobytes())
    assert found[0] == found[1]


def test_an_embedder_writes_nothing_and_others_make_no_vectors() -> None:
    engine = Engine(runner("dense", "lasttoken"))
    with pytest.raises(RequestError, match="makes vectors, and does not write"):
        engine.add(Request(id="a", prompt_ids=[1], params=SamplingParams()))
    with pytest.raises(RequestError, match="max_tokens must be 0"):
        engine.add(
            Request(id="a", prompt_ids=[1], params=SamplingParams(), pooling=request("b", [1], "lasttoken").pooling)
        )
    llm = LLM(str(tiny_checkpoint("dense")), threads=2, max_model_len=512, progress=False)
    with llm, pytest.raises(ValueError, match="writes and makes no embeddings"):
        llm.embed("x")


def test_prompts_limits_and_lengths() -> None:
    with LLM(str(tiny_embedder()), threads=2, max_model_len=256, progress=False) as llm:
        whole = llm.embed("Instruct: find what answers\nQuery:delta", progress=False)
        assert llm.embed("delta", prompt_name="query", progress=False).tobytes() == whole.tobytes()
        assert (
            llm.embed("delta", prompt_name="document", progress=False).tobytes()
            == llm.embed("delta", progress=False).tobytes()
        )
        assert llm.embed(["a" * 255], progress=False).shape == (1, HIDDEN)
        for texts, fields, said in (
            ("a" * 256, {}, "input: has 257 tokens"),
            (["a", "b" * 9000], {}, r"input\[1\]: has at least"),
            ([[1] * 257], {}, "has 257 tokens, and this model reads 256"),
            ([[]], {}, "is empty"),
            ("a", {"dimensions": HIDDEN + 1}, "is not from 1 to 256"),
            ("a", {"dimensions": 0}, "is not from 1 to 256"),
            ("a", {"prompt_name": "answer"}, "'answer' is not known. The model has 'query', 'document'"),
        ):
            with pytest.raises(ValueError, match=said):
                llm.embed(texts, **fields, progress=False)


def changed(tmp_path: Path, file: str, value: object) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_embedder(), path)
    (path / file).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


MODULES = json.loads((tiny_embedder() / "modules.json").read_text())


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("modules.json", "{", "cannot be read"),
        ("modules.json", {"a": 1}, "expected a list of modules"),
        ("modules.json", [3], "expected a list of modules"),
        ("modules.json", MODULES[:1], "Transformer, Pooling"),
        ("modules.json", [*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}], "models.Dense"),
        ("modules.json", [*MODULES, MODULES[2]], "Normalize"),
        ("modules.json", [{"path": "0_Transformer", "type": "x.Transformer"}, *MODULES[1:]], "in the directory itself"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "one of lasttoken, mean",
        ),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": "yes"}, "true or false"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {}, "one of lasttoken"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "texts by their names"),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_files_that_say_something_else_are_refused(tmp_path: Path, file: str, value: object, said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        embedder_in(changed(tmp_path, file, value))


def test_newer_files_and_files_of_no_embedder_are_read(tmp_path: Path) -> None:
    found = embedder_in(
        changed(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean", "embedding_dimension": HIDDEN})
    )
    assert found is not None and (found.mode, found.is_normalised, found.max_tokens) == ("mean", True, 512)
    assert embedder_in(tiny_checkpoint("dense")) is None


def test_an_embedder_with_a_head_of_its_own_loads() -> None:
    """Saved as a model that writes, its names have a beginning, and there is a head."""
    with LLM(str(tiny_embedder(is_bare=False)), threads=2, max_model_len=512, progress=False) as llm:
        whole = llm.embed("a text", progress=False)
    with LLM(str(tiny_embedder()), threads=2, max_model_len=512, progress=False) as llm:
        assert llm.embed("a text", progress=False).tobytes() == whole.tobytes()
