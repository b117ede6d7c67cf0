"""LoRA adapters on the CPU, against PEFT's model and against the oracle with an adapter's terms."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltic.commands.plan import report
from deltic.config import ConfigError, EngineConfig
from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.models.fields import CheckpointError
from deltic.models.qwen.adapters import Adapter, _Names, read_adapter
from deltic.models.qwen.cpu_buffers import allocate_adapters
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights
from tests.adapters import ATTENTION, DELTANET, EVERY, EXPERTS, adapted, make_adapter
from tests.cpu.test_engine import EXCHANGED, LOGIT_TOLERANCE, build, finish, prompt, tokens
from tests.cpu.test_reference import needs_transformers, published_model
from tests.reference.model import forward
from tests.tensors import tensor_of
from tests.tiny import new_directory, tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB

pytestmark = [needs_transformers, pytest.mark.skipif(not pytest.importorskip("peft"), reason="peft is not installed")]

KINDS = ["dense", "moe", "next", "flash"]


@functools.cache
def made(kind: str, modules: str = "every", seed: int = 0, rank: int = 8) -> tuple[Path, Any]:
    """An adapter's directory, and PEFT's model with it. Every module, or those of DeltaNet layers."""
    path = new_directory("adapter") / modules
    names, parameters = {"every": (EVERY, EXPERTS if kind != "dense" else []), "deltanet": (DELTANET, [])}[modules]
    model = published_model(tiny_checkpoint(kind))
    return path, make_adapter(model, path, names, parameters, seed=seed, r=rank)


def read(kind: str, path: Path) -> Adapter:
    return read_adapter(path, ModelShape.from_directory(tiny_checkpoint(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_peft(kind: str) -> None:
    """Every module's rows are where they belong: logits in float32."""
    (path, model), checkpoint = made(kind), tiny_checkpoint(kind)
    shape, ids = ModelShape.from_directory(checkpoint), prompt(70)
    weights = load_weights(checkpoint, shape)[0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    found = forward(adapted(weights, read(kind, path)), shape, ids, chunked=True)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_against_the_oracle(kind: str) -> None:
    """24 greedy tokens behind a prompt: logits within the tolerance of the model without an adapter."""
    path, checkpoint = made(kind)[0], tiny_checkpoint(kind)
    runner = build(model=str(checkpoint), lora=(f"a={path}",))
    engine, ids = Engine(runner), prompt(97)
    weights = adapted(runner.model.weights, read(kind, path), "bfloat16")
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="a", prompt_ids=ids, params=params, adapter=runner.info.adapters["a"]))
    drawn: list[int] = []
    rows = []
    while engine.has_work():
        for output in engine.step():
            drawn += output.token_ids
            rows.append(tensor_of(runner.logits(1)[0]).clone())
    expected = forward(weights, runner.plan.shape, ids + drawn[:-1], precision="bfloat16")[len(ids) - 1 :]
    error = (torch.stack(rows) - expected)[:, :N_REAL_VOCAB].abs().amax(-1)
    assert error.median() < LOGIT_TOLERANCE / 2
    assert (error > LOGIT_TOLERANCE).float().mean() <= EXCHANGED[kind]


def run(engine: Engine, requests: dict[str, tuple[list[int], bytes]], **params: Any) -> dict[str, list[int]]:
    of_all = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, **params})
    for name, (ids, adapter) in requests.items():
        engine.add(Request(id=name, prompt_ids=ids, params=of_all, adapter=adapter))
    found = finish(engine)
    return {
        name: [*tokens(found[name, 0]), *(e.logprob for o in found[name, 0] for e in o.logprobs or [])]
        for name in requests
    }


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_same_alone_and_among_other_adapters(kind: str, quantize: str | None) -> None:
    """To the bit; and without an adapter it is that of a server that has none. Drafts are on."""
    paths = [made(kind)[0], made(kind, "deltanet")[0], made(kind, "every", 1, 40)[0]]
    settings = {"model": str(tiny_checkpoint(kind)), "quantize": quantize, "max_num_seqs": 8, "max_step_tokens": 128}
    runner = build(**settings, lora=tuple(f"{i}={path}" for i, path in enumerate(paths)), max_drafts=3)
    keys = [b"", *runner.info.adapters.values()]
    together = run(Engine(runner), {f"{i}": (prompt(90 + i // 4), keys[i % 4]) for i in range(8)})
    for i in range(8):
        alone = run(Engine(runner), {f"{i}": (prompt(90 + i // 4), keys[i % 4])})
        assert alone[f"{i}"] == together[f"{i}"]
    plain = run(Engine(build(**settings)), {"0": (prompt(90), b"")})
    assert plain["0"] == together["0"]
    assert len({tuple(together[f"{i}"]) for i in range(8)}) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_are_those_of_an_adapter(kind: str) -> None:
    """An adapter of DeltaNet layers alone changes the answer; what another computed is no hit; what it has itself is."""
    path = made(kind, "deltanet")[0]
    runner = build(model=str(tiny_checkpoint(kind)), lora=(f"a={path}", f"same={path}"))
    engine, ids = Engine(runner), prompt(200)
    first, a = run(engine, {"1": (ids, b"")})["1"], runner.info.adapters["a"]
    assert runner.info.adapters["same"] == a
    changed = run(engine, {"2": (ids, a)})["2"]
    assert changed != first
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="3", prompt_ids=ids, params=params, adapter=a))
    again = finish(engine)["3", 0]
    assert again[0].cached_tokens == 192
    assert tokens(again) == changed[:6]


def test_adapters_come_and_go() -> None:
    """A dropped adapter stays until its last sequence ends; then its slot and bytes are another's."""
    paths = [made("dense")[0], made("dense", "deltanet")[0]]
    runner = build(model=str(tiny_checkpoint("dense")), allow_lora_loading=True, max_loras=1)
    engine = Engine(runner)
    assert engine.adapters is not None
    one = runner.adapters.load_now(paths[0])
    with pytest.raises(CheckpointError, match="unload one, or start with more --max-loras"):
        runner.adapters.load_now(paths[1])
    expected = run(engine, {"alone": (prompt(30), one.key)})["alone"]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="a", prompt_ids=prompt(30), params=params, adapter=one.key))
    outputs = engine.step()
    engine.adapters.drop(one.key)
    with pytest.raises(RequestError, match="not loaded any more"):
        engine.add(Request(id="b", prompt_ids=prompt(30), params=params, adapter=one.key))
    with pytest.raises(CheckpointError, match="max-loras"):
        runner.adapters.load_now(paths[1])
    outputs += [output for of_step in finish(engine).values() for output in of_step]
    assert tokens(outputs) == expected[:6]
    assert runner.adapters.load_now(paths[1]).key != one.key
    runner.adapters.drop(runner.adapters.load_now(paths[1]).key)  # twice loaded, once dropped
    assert runner.adapters.load_now(paths[1]).error is None


def test_the_plan_says_which_rows_are_covered() -> None:
    path = made("moe")[0]
    said = report(EngineConfig(model=str(tiny_checkpoint("moe")), lora=(f"mine={path}",), device="cpu"))
    assert "Adapter mine: rank 8" in said
    found = {tuple(part.strip() for part in line.split("│")[1:-1]) for line in said.splitlines() if "│" in line}
    assert ("layers.*.linear_attn.in_proj_z", "layers.*.in_proj", "1024 to 1535", "0-2") in found
    assert ("layers.*.self_attn.k_proj", "layers.*.qkv", "2048 to 2559", "3") in found
    assert ("layers.*.mlp.experts.down_proj", "layers.*.mlp.down", "0 to 255", "0-3") in found
    assert any(line[:1] == ("adapters",) and "room for 1 of rank up to 8" in line[2] for line in found)


def test_names_of_other_programs(tmp_path: Path) -> None:
    """Experts one by one, fused and split projections, and what wraps the text model, mean the same rows."""
    from safetensors.torch import load_file, save_file

    path, _ = made("moe")
    expected = read("moe", path)
    stored = load_file(path / "adapter_model.safetensors")
    renamed = {}
    for name, value in stored.items():
        short = name.replace("base_model.model.model.language_model.", "base_model.model.model.")
        if ".experts." not in name:
            renamed[short] = value
    for i, delta_name in [(i, f"layers.{i}.mlp.") for i in range(4)]:
        for matrix, module in (("gate_up", "gate_up"), ("down", "down")):
            (delta,) = expected.deltas[f"{delta_name}{matrix}"]
            for e in range(16):
                up, down = tensor_of(delta.up[e]).clone(), tensor_of(delta.down[e]).clone()
                halves = {"gate": up[:128], "up": up[128:]} if module == "gate_up" else {"down": up}
                for half, rows in halves.items():
                    p = f"base_model.model.model.layers.{i}.mlp.experts.{e}.{half}_proj"
                    renamed |= {f"{p}.lora_A.weight": down.clone(), f"{p}.lora_B.weight": rows.clone()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((path / "adapter_config.json").read_text())
    found = read("moe", tmp_path / "adapter_model.safetensors")
    for name, deltas in expected.deltas.items():
        for first in deltas:
            rows = torch.cat(
                [tensor_of(d.up).float() @ tensor_of(d.down).float() * d.scale for d in found.deltas[name]], 1
            )
            want = tensor_of(first.up).float() @ tensor_of(first.down).float() * first.scale
            torch.testing.assert_close(rows[:, first.first :][:, : want.shape[1]], want) if len(deltas) == 1 else None


def spoil(tmp_path: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """The DeltaNet adapter of the dense model with other tensors (None: without them) and another configuration."""
    from safetensors.torch import load_file, save_file

    path, _ = made("dense", "deltanet")
    stored = load_file(path / "adapter_model.safetensors") | (tensors or {})
    save_file(
        {name: value for name, value in stored.items() if value is not None}, tmp_path / "adapter_model.safetensors"
    )
    said = json.loads((path / "adapter_config.json").read_text()) | config
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    return tmp_path


A = "base_model.model.model.language_model.layers.0.linear_attn.out_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
HOSTILE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rank": ({A: torch.zeros(300, 768), B: torch.zeros(256, 300)}, {}, "rank 300; from 1 to 256"),
    "huge rank": ({A: torch.zeros(10**6, 1), B: torch.zeros(1, 10**6)}, {}, "rank 1000000; from 1 to 256"),
    "no rank": ({A: torch.zeros(0, 768), B: torch.zeros(256, 0)}, {}, "rank 0"),
    "not a number": ({A: torch.full((8, 768), torch.nan)}, {}, "not finite"),
    "too large for bfloat16": ({A: torch.full((8, 768), 3.4e38)}, {}, "not finite in bfloat16"),
    "another model's": (
        {A: torch.zeros(8, 700)},
        {},
        r"changes a matrix of \[256, 700\], where this model has \[256, 768\]",
    ),
    "halves that do not fit": ({A: torch.zeros(7, 768)}, {}, "do not fit each other"),
    "half": ({B: None}, {}, "lora_A or lora_B is missing"),
    "vector": ({A: torch.zeros(768)}, {}, "do not fit each other"),
    "integers": ({A: torch.zeros(8, 768, dtype=torch.int32)}, {}, "stored as I32"),
    "unknown module": (
        {A.replace("out_proj", "conv1d"): torch.zeros(8, 4), B.replace("out_proj", "conv1d"): torch.zeros(1, 8)},
        {},
        "conv1d: no such module",
    ),
    "tower": (
        {
            "base_model.model.model.visual.blocks.0.mlp.linear_fc1.lora_A.weight": torch.ones(8, 4),
            "base_model.model.model.visual.blocks.0.mlp.linear_fc1.lora_B.weight": torch.ones(4, 8),
        },
        {},
        "visual.blocks.0.mlp.linear_fc1: changes the vision tower or the draft head",
    ),
    "whole weights": (
        {"base_model.model.lm_head.weight": torch.zeros(4, 4)},
        {},
        "lm_head.weight: neither lora_A nor lora_B",
    ),
    "magnitudes": ({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(4)}, {}, "DoRA is not supported"),
    "DoRA": ({}, {"use_dora": True}, r"DoRA \(use_dora\) is not supported"),
    "bias": ({}, {"bias": "all"}, "bias is not supported"),
    "modules_to_save": ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "another kind": ({}, {"peft_type": "LOHA"}, "a LOHA adapter"),
    "changes the base": ({}, {"init_lora_weights": "pissa"}, "changes the model"),
    "no alpha": ({}, {"lora_alpha": None}, "lora_alpha is None"),
    "infinite alpha": ({}, {"lora_alpha": float("inf")}, "lora_alpha is inf"),
    "an alpha beyond floats": ({}, {"lora_alpha": 10**400}, "put its adapter_config.json beside it"),
    "a huge alpha": ({}, {"lora_alpha": 1e8}, "too large"),
    "a pattern without end": ({}, {"alpha_pattern": {"(.*)*x": 1}}, "an expression that is not supported"),
    "a pattern too large": ({}, {"rank_pattern": {"a{99999999999}": 1}}, "an expression that is not supported"),
    "a pattern for too many": ({}, {"rank_pattern": {"[a-z]*" * 10**6: 1}}, "too much for so many modules"),
    "a bracket that is open": ({}, {"rank_pattern": {"(q_proj": 1}}, "a bracket that nothing closes"),
    "a bracket too many": ({}, {"rank_pattern": {"q_proj)|(k": 1}}, "a bracket that nothing opens"),
    "brackets without end": ({}, {"rank_pattern": {"(" * 10**6: 1}}, "RecursionError"),
    "a range that is none": ({}, {"rank_pattern": {"[z-a]": 1}}, "bad character range"),
    "an empty alpha": ({A.replace("lora_A.weight", "alpha"): torch.zeros(0)}, {}, "lora_alpha is None"),
    "another rank said": ({}, {"r": 4}, "rank 8 is stored, and adapter_config.json says 4"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_applied_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    tensors, config, message = HOSTILE[name]
    path = spoil(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=message) as found:
        read("dense", path)
    assert "\n" not in str(found.value)
    with pytest.raises(ConfigError, match=message):
        build(model=str(tiny_checkpoint("dense")), lora=(f"bad={path}",))


def test_terms_of_a_tower_that_add_nothing_are_left_out(tmp_path: Path) -> None:
    """As `all-linear` has them where no picture was trained on."""
    zero = {
        f"base_model.model.model.{module}.lora_{half}.weight": value
        for module in ("visual.blocks.0.attn.qkv", "visual.merger.linear_fc1", "mtp.fc")
        for half, value in (("A", torch.randn(8, 4)), ("B", torch.full((4, 8), -0.0)))
    }
    assert read("dense", spoil(tmp_path, zero)).key == read("dense", made("dense", "deltanet")[0]).key


EXPRESSIONS = (
    "q_proj",
    "layers.0.self_attn.q_proj",
    r"layers\.[01]\..*",
    ".*",
    "",
    "x?.*_proj",
    "(q|k|v)_proj",
    "(?:gate|up)_proj",
)
EXPRESSIONS += (
    "^layers",
    r"^model\.layers\.\d+\.mlp\.(up|down)_proj$",
    r"[^.]+\.[a-z_]+",
    "(self_attn|mlp).*",
    "a|",
    "proj",
)
EXPRESSIONS += (
    r"layers\.(1|10|11)\.self_attn\.(q|qk|k)_?proj",
    r"\w+_\w+",
    "(mlp|mlp.up|m)(.up_proj|_proj)",
    "[a-z_]*.up_proj",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_patterns_find_the_modules_that_peft_finds(expression: str) -> None:
    names = [f"layers.{i}.{m}" for i in (0, 1, 10, 11) for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")]
    names += ["lm_head", "layers.3.mlp.down_proj"]
    expected = [
        any(re.match(rf"(.*\.)?({expression})$", start + name) for start in ("", "model.", "model.language_model."))
        for name in names
    ]
    assert _Names(names).find(expression).tolist() == expected


def test_alternatives_without_end_are_soon_tried(tmp_path: Path) -> None:
    """Each is taken in every way by what goes back to try the next: 4 ** 31 of them."""
    hostile = "([a-z_]|.|[a-z]|[_a-z])" * 31 + "Z"
    start = time.perf_counter()
    read("dense", spoil(tmp_path, rank_pattern={hostile: 1}, alpha_pattern={".*" * 200 + "Z": 1}))
    assert time.perf_counter() - start < 5


def test_workspaces_are_as_wide_as_the_widest_input() -> None:
    """Also where that is the rows of n-grams."""
    shape = ModelShape.from_directory(tiny_checkpoint("flash"))
    assert shape.ngrams is not None
    wide = dataclasses.replace(shape, ngrams=dataclasses.replace(shape.ngrams, width=1 << 14))
    found = allocate_adapters(wide, 64, 64, 1, 8, lambda name, size, dtype: np.empty(size, dtype))
    assert found.scratch.packed.nbytes >= 64 * (1 << 14) * 2


def test_sizes_without_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-loras: there are no adapters"):
        build(model=str(tiny_checkpoint("dense")), max_loras=2)


def test_paths_that_are_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such adapter"):
        read("dense", tmp_path / "gone")
    with pytest.raises(CheckpointError, match="no adapter_model"):
        read("dense", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="save them as safetensors"):
        read("dense", tmp_path)
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="save them as safetensors"):
        read("dense", tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match="damaged"):
        read("dense", tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"o_proj": 3, "k_proj": 11}}],
    ids=str,
)
def test_scales_and_ranks_follow_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("dense")
    model = make_adapter(published_model(checkpoint), tmp_path, ATTENTION, **settings)
    shape, ids = ModelShape.from_directory(checkpoint), prompt(20)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    found = forward(adapted(load_weights(checkpoint, shape)[0], read("dense", tmp_path)), shape, ids)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
