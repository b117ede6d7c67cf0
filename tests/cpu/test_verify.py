"""`deltic verify`: errors are planted in the files of tiny checkpoints of every format, and in what runs, and each is named."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.tiny_gguf
from deltic.__main__ import main
from deltic.commands import verify
from deltic.commands.endpoint import LocalServer, free_port
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.step import Step
from deltic.models.checkpoint import DEMO, resolve_model
from deltic.models.fields import CheckpointError
from deltic.models.hub import digest, published_hash
from deltic.ops.arrays import Array
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.runtime.build import build_runner
from deltic.verify import bits, layers, servers
from deltic.verify.files import Files, check_configuration, check_hashes, check_index
from deltic.verify.page import Check, Page
from deltic.verify.texts import TEXTS, Wording, check_ids, check_prompts, check_rules
from deltic.verify.values import FACTORS, Compared, check_against, check_numbers, values_of
from tests.cpu.grid import grid
from tests.fake_hub import hub_with
from tests.tiny import tiny_checkpoint, tiny_embedder
from tests.tiny_gguf import tiny_gguf, write_gguf
from tests.tiny_quantised import RECIPES, gptq, nvfp4, tiny_quantised
from tests.tiny_speech import tiny_speech

LAYERS = "model.language_model.layers."
Tensors = dict[str, torch.Tensor]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (group: test)"
)


def tell(stage: str, done: float) -> None:
    """Nobody listens."""


def judged(look: Callable[[Check], object]) -> Check:
    """What a check found, or an error that the command makes a finding of."""
    page = Page({})
    with page.check("one") as check:
        look(check)
    return check


def copied(source: Path, target: Path) -> Files:
    shutil.copytree(source, target)
    return Files(target, "spoilt")


def spoilt(source: Path, target: Path, change: Callable[[Tensors], object]) -> Files:
    """A copy of a checkpoint of one file whose tensors were changed."""
    files = copied(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return files


def made(kind: str, format: str) -> Path:
    """The tiny checkpoint in a format."""
    if format in ("bf16", "split"):
        return tiny_checkpoint(kind, layout="flat", experts="split" if format == "split" else None)
    return tiny_gguf(kind, format[5:]) if format.startswith("gguf ") else tiny_quantised(kind, format).path


def set_field(files: Files, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((files.path / "config.json").read_text())
    change(config["text_config"])
    (files.path / "config.json").write_text(json.dumps(config))


def beside(files: Files, good: Path) -> Check:
    return judged(lambda check: check_against(files, Files(good, "good"), check, tell))


# Errors in tensors.


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def transpose(tensors: Tensors) -> None:
    name = f"{LAYERS}1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].mT


def nudge(tensors: Tensors) -> None:
    tensors[f"{LAYERS}2.mlp.down_proj.weight"].view(torch.int16)[3, 5] ^= 1


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (
            "dense",
            swap(f"{LAYERS}3.self_attn.q_norm.weight", f"{LAYERS}3.self_attn.k_norm.weight"),
            "3.self_attn.q_norm",
        ),
        ("dense", swap(f"{LAYERS}0.mlp.up_proj.weight", f"{LAYERS}0.mlp.gate_proj.weight"), "0.mlp.gate_proj"),
        ("moe", transpose, "1.mlp.experts.gate_up_proj"),
        ("dense", nudge, "2.mlp.down_proj"),
    ],
    ids=["swapped norms", "swapped matrices", "transposed experts", "a bit of a weight"],
)
def test_a_tensor_that_is_another_is_named(
    tmp_path: Path, kind: str, change: Callable[[Tensors], None], named: str
) -> None:
    found = beside(spoilt(tiny_checkpoint(kind), tmp_path / "spoilt", change), tiny_checkpoint(kind))
    assert found.verdict == "wrong" and found.said[0].startswith(f"{LAYERS}{named}")
    assert sum(text.startswith(LAYERS) for text in found.said) == (2 if "swap" in change.__qualname__ else 1)


def test_a_wrong_scale_of_a_block_is_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYERS}1.mlp.up_proj.weight_scale_inv"][2, 1] *= 2

    found = beside(
        spoilt(tiny_quantised("dense", "qwen-fp8").path, tmp_path / "spoilt", change), tiny_checkpoint("dense")
    )
    assert [text for text in found.said if text.startswith(LAYERS)] == [found.said[0]]
    assert found.said[0].startswith(f"{LAYERS}1.mlp.up_proj.weight: ")


def times(scales: Array, factor: float) -> None:
    scales[...] = scales.astype(np.float32) * factor


PLANTS: dict[str, tuple[Callable[[Array], None], str]] = {
    "all x1.15": (lambda scales: times(scales, 1.15), "is 1.1"),
    "all x0.85": (lambda scales: times(scales, 0.85), "is 0.8"),
    "a group x2": (lambda scales: times(scales[5, -1:], 2), "row 5, columns AT, is "),
    "a group halved": (lambda scales: times(scales[5, -1:], 0.5), "row 5, columns AT, is 0."),
    "a group zeroed": (lambda scales: times(scales[5, -1:], 0), "row 5, columns AT, is 0.00 "),
    "a row x1.5": (lambda scales: times(scales[7], 1.5), "row 7"),
}
"""What is planted in scales [rows, groups], and what is said of the tensor."""


@pytest.fixture(scope="module")
def q4_k(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file with one matrix in random blocks of Q4_K, and a checkpoint whose values they are, but for rounding."""
    name = "model.layers.0.mlp.down_proj.weight"
    file = tiny_gguf("dense", lambda hf_name, shape: "Q4_K" if hf_name == name else "F32")
    values = torch.from_numpy(values_of(Files(file, "file").tensors[name], 0, 256))
    values += 0.07 * values.std() * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))

    def change(tensors: Tensors) -> None:
        tensors[f"{LAYERS}0.mlp.down_proj.weight"] = values.bfloat16()

    return file, spoilt(tiny_checkpoint("dense"), tmp_path_factory.mktemp("q4_k") / "source", change).path


def planted_in_gguf(source: Path, target: Path, plant: Callable[[Array], None]) -> Files:
    """A copy with other scales in the matrix down of layer 0, of expert 3 if there are several."""
    shutil.copy(source, target)
    names = ("blk.0.ffn_down.weight", "blk.0.ffn_down_exps.weight")
    (tensor,) = (tensor for tensor in gguf.GGUFReader(target, "r+").tensors if tensor.name in names)
    n_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    rows = tensor.data[3] if tensor.data.ndim == 3 else tensor.data
    scales = rows.reshape(len(rows), -1, n_bytes)[..., : 4 if tensor.tensor_type.name in ("Q4_1", "Q4_K") else 2]
    plant(scales.view(np.float16))
    tensor.data.flush()
    return Files(target, "spoilt")


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q5_0", "Q4_K", "gptq", "awq", "nvfp4"])
def test_wrong_scales_of_few_bits_are_named(format: str, tmp_path: Path, q4_k: tuple[Path, Path]) -> None:
    part = {"gptq": "scales", "awq": "scales", "nvfp4": "weight_scale"}.get(format)
    expert = "" if format == "Q4_K" else "experts.3."
    name = f"{LAYERS if part else 'model.layers.'}0.mlp.{expert}down_proj.weight"
    for planted, (plant, said) in PLANTS.items():
        if part:

            def change(tensors: Tensors, plant: Callable[[Array], None] = plant) -> None:
                stored = tensors[name.replace("weight", part)]
                scales = stored.float().numpy()
                plant(scales if part == "weight_scale" else scales.T)
                stored[...] = torch.from_numpy(scales).to(stored.dtype)

            files = spoilt(tiny_quantised("moe", format).path, tmp_path / planted, change)
            good = tiny_checkpoint("moe")
        else:
            file, good = q4_k if format == "Q4_K" else (tiny_gguf("moe", format), tiny_checkpoint("moe"))
            files = planted_in_gguf(file, tmp_path / f"{planted}.gguf", plant)
        found = beside(files, good)
        (named,) = (text for text in found.said if text.startswith("model."))
        if format == "Q4_K":  # 256 columns share the scale that was changed: half of the row
            said = re.sub(", columns AT.*", "", said)
        at = {"gptq": "0 to 127", "awq": "0 to 127", "nvfp4": "112 to 127"}.get(format, "96 to 127")
        assert re.match(re.escape(f"{name}: ") + said.replace("AT", at), named), (planted, named)
        assert found.verdict == "wrong" and "wrong?" in named


@pytest.mark.parametrize("format", ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", "NVFP4", "int4"])
@pytest.mark.parametrize("tails", [3.0, 2.0, 0.0], ids=["tails", "long tails", "one weight in 2000 times 100"])
def test_rounded_weights_with_tails_are_right(format: str, tails: float) -> None:
    """No group and no row is beyond its bound, and the tensor is within half of its own."""
    generator = np.random.default_rng(0)
    weights = generator.standard_t(tails, (512, 1024)) if tails else generator.normal(0, 1, (512, 1024))
    if not tails:
        weights[generator.random(weights.shape) < 1 / 2000] *= 100
    weights = (0.02 * weights).astype(np.float32)
    if format in ("NVFP4", "int4"):
        rounded = (nvfp4 if format == "NVFP4" else gptq)(torch.from_numpy(weights))[1].float().numpy()
    else:
        kind = gguf.GGMLQuantizationType[format]
        rounded = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
    stored: Any = SimpleNamespace(
        format=WEIGHT_FORMATS[{"int4": "int4-g128-float16"}.get(format, format)], dtype=format
    )
    plain: Any = SimpleNamespace(format=None, dtype="BF16")
    compared = Compared(stored, plain)
    compared.add(rounded, weights, np.arange(512))
    assert compared.furthest == (1.0, "")
    assert abs(compared.factors / compared.n) < FACTORS[int(stored.format.bits)][1] / 2


def test_the_page_has_the_bounds_of_factors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    for n_bits, (low, many_low, high, many_high) in FACTORS.items():
        (row,) = re.findall(rf"^\| (?:\d, )?{n_bits}(?:, \d)? \|(.*)\|$", page, re.MULTILINE)
        both = [
            (low, high),
            (many_low, many_high),
            (many_low + (low - many_low) / 8, many_high + (high - many_high) / 8),
        ]
        said = [[float(n) for n in re.findall(r"[\d.]+\d", cell)] for cell in row.replace("64", "").split("|")]
        wanted = [[*([1 - a] if a < 1 else []), 1 + b] for a, b in both]
        assert said == [pytest.approx(each, abs=0.0075) for each in wanted], n_bits


def test_value_heads_in_another_order_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.tiny_gguf, "tiled", lambda values, n_k, n_v, axis=0: values)
    source = tiny_checkpoint("dense", layout="flat")
    found = beside(Files(write_gguf(source, tmp_path / "spoilt.gguf"), "spoilt"), tiny_checkpoint("dense"))
    named = [text for text in found.said if text.startswith("model.layers.")]
    assert named and all(".linear_attn." in text for text in named)


def test_what_is_unlike_its_like_is_seen_with_nothing_beside_it(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYERS}1.mlp.up_proj.weight"] *= 16
        tensors[f"{LAYERS}2.mlp.gate_proj.weight"][0, 0] = float("nan")

    files = spoilt(tiny_checkpoint("dense"), tmp_path / "spoilt", change)
    found = judged(lambda check: check_numbers(files, check, tell))
    assert found.verdict == "wrong"
    assert f"{LAYERS}2.mlp.gate_proj.weight: has values that are no numbers or infinite" in found.said
    assert any(text.startswith(f"{LAYERS}1.mlp.up_proj.weight: its values are 1") for text in found.said)


SOUND = [
    ("dense", "bf16"),
    ("flash", "bf16"),
    ("moe", "split"),
    ("dense", "qwen-fp8"),
    ("moe", "gguf Q4_0"),
    ("next", "gguf Q8_0"),
]
FORMATS = [*RECIPES, *(f"gguf {type}" for type in ("F16", "Q5_1", "Q4_0", "MXFP4"))]
GRID = [*SOUND, *((kind, format) for kind in ("moe", "dense") for format in FORMATS if (kind, format) not in SOUND)]


@pytest.mark.parametrize(("kind", "format"), grid(GRID, SOUND, pytest.mark.long))
def test_a_sound_checkpoint_is_what_it_was_made_of(kind: str, format: str) -> None:
    files = Files(made(kind, format), "sound")
    assert beside(files, tiny_checkpoint(kind)).verdict == "ok"
    found = judged(lambda check: check_numbers(files, check, tell))
    assert found.verdict == "ok", found.said
    assert any("gguf package" in text for text in found.said) == files.is_gguf


@pytest.mark.parametrize(("type", "n"), [("IQ2_XXS", 33), ("Q1_0", 0)])
def test_blocks_are_held_to_the_gguf_package_where_it_reads_them(
    type: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tiny_gguf("dense", type), "file")
    said = f"a row of each of {n} quantised tensors is what the gguf package makes of it"
    numbers = judged(lambda check: check_numbers(files, check, tell)).said
    assert said in numbers and (f"the gguf package does not read {type}" in numbers) == (not n)
    dequantize = gguf.quants.dequantize
    monkeypatch.setattr(gguf.quants, "dequantize", lambda raw, kind: dequantize(raw, kind) + 1)
    found = judged(lambda check: check_numbers(files, check, tell))
    assert (f"blk.0.ffn_up.weight: {type} is read as other values" in "".join(found.said)) == bool(n)


def test_a_head_is_held_to_the_embedding_that_the_other_has_for_it(tmp_path: Path) -> None:
    tied = tiny_checkpoint("dense", tied=True)

    def change(tensors: Tensors) -> None:
        (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"] = tensors[name].clone()

    def spoil(tensors: Tensors) -> None:
        tensors["lm_head.weight"][7, 3] += 1

    same = spoilt(tied, tmp_path / "same", change)
    assert beside(same, tied).verdict == beside(Files(tied, "tied"), same.path).verdict == "ok"
    other = spoilt(same.path, tmp_path / "other", spoil)
    assert beside(other, tied).said[0].startswith("lm_head.weight: 1 of ")
    found = beside(Files(tied, "tied"), other.path)
    assert found.verdict == "wrong" and found.said[0].partition(":")[0].endswith("embed_tokens.weight as the head")


# Errors in files.


def test_a_changed_byte_is_told_by_the_hash_of_the_hub(tmp_path: Path) -> None:
    sent = {file.name: file.read_bytes() for file in tiny_checkpoint("dense").iterdir()}
    with hub_with(sent):
        snapshot = resolve_model("owner/model", download_dir=tmp_path)
    files = Files(snapshot, "cached")
    sound = judged(lambda check: check_hashes(files, check, tell))
    assert sound.verdict == "ok" and sound.said[0].endswith("; the hub's hash is known of 6")
    with (snapshot / "model.safetensors").open("r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"!")
    found = judged(lambda check: check_hashes(files, check, tell))
    assert found.verdict == "wrong" and found.said[0].startswith("model.safetensors: its SHA-256 is ")


def test_hashes_beside_a_directory_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert published_hash(file) is None
    said = tmp_path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    said.parent.mkdir(parents=True)
    said.write_text(f"{'0' * 40}\n{digest(file, 2, lambda n: None, is_big=False)}\n1.0\n")
    assert published_hash(file) == "9e26dfeeb6e641a33dae4961196235bdb965b21b"


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_file_that_was_cut_is_named(tmp_path: Path, is_gguf: bool) -> None:
    if is_gguf:
        file = tmp_path / "cut.gguf"
        shutil.copy(tiny_gguf("dense"), file)
        files = Files(file, "cut")
    else:
        files = copied(tiny_checkpoint("dense"), tmp_path / "cut")
        file = files.path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    found = judged(lambda check: check_index(files, check))
    assert found.verdict == "wrong" and str(file) in found.said[0]


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    files = spoilt(
        tiny_checkpoint("dense"), tmp_path / "spoilt", lambda tensors: tensors.pop(f"{LAYERS}0.linear_attn.dt_bias")
    )
    found = judged(lambda check: check_index(files, check))
    assert found.verdict == "wrong" and f"tensor '{LAYERS}0.linear_attn.dt_bias' is missing" in found.said[0]


def test_an_index_that_does_not_fit_is_told(tmp_path: Path) -> None:
    files = copied(tiny_checkpoint("dense", shards=2), tmp_path / "spoilt")
    index = files.path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    del said["weight_map"][f"{LAYERS}1.mlp.up_proj.weight"]
    index.write_text(json.dumps(said | {"metadata": {"total_size": 12345}}))
    found = judged(lambda check: check_index(files, check))
    assert found.verdict == "wrong" and f"tensor '{LAYERS}1.mlp.up_proj.weight' is in " in found.said[0]
    assert "says that all tensors have 12345 bytes" in found.said[1]


# Errors in the configuration, the tokenizer and the template.


def test_fields_that_differ_are_named(tmp_path: Path) -> None:
    files = copied(tiny_checkpoint("dense"), tmp_path / "spoilt")

    def change(text: dict[str, Any]) -> None:
        text["rms_norm_eps"] = 1e-5
        text["rope_parameters"]["mrope_section"] = [12, 10, 10]

    set_field(files, change)
    found = judged(lambda check: check_configuration(files, Files(tiny_checkpoint("dense"), "good"), check))
    assert found.said == [
        "rms_norm_eps is 1e-05, and 1e-06 in --against",
        "mrope_section is (12, 10, 10), and (11, 11, 10) in --against",
    ]


def test_fields_are_held_to_the_published_model_of_these_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = Files(tiny_checkpoint("dense"), "good")
    monkeypatch.setattr("deltic.verify.files.PUBLISHED", {"tiny": replace(good.shape)})
    assert judged(lambda check: check_configuration(good, None, check)).verdict == "ok"
    files = copied(good.path, tmp_path / "spoilt")
    set_field(files, lambda text: text.update(rms_norm_eps=1e-5))
    found = judged(lambda check: check_configuration(files, None, check))
    assert found.verdict == "wrong" and found.said == ["rms_norm_eps is 1e-05, and 1e-06 in tiny"]


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_fields_of_a_gguf_file_are_those_of_its_source(kind: str) -> None:
    source = Files(tiny_checkpoint(kind, layout="flat"), "source")
    found = judged(lambda check: check_configuration(Files(tiny_gguf(kind), "file"), source, check))
    assert found.verdict == "ok", found.said


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the built-in model that are text."""
    path = tmp_path_factory.mktemp("demo")
    for file in DEMO.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path)
    return path


def test_another_merge_is_named(demo: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(demo, tmp_path / "spoilt"))
    said = json.loads((path / "tokenizer.json").read_text())
    merges = said["model"]["merges"]
    merges[1], merges[30] = merges[30], merges[1]
    (path / "tokenizer.json").write_text(json.dumps(said))
    spoilt, good = Wording.of(path), Wording.of(demo)
    rules = judged(lambda check: check_rules(spoilt, good, "good", check))
    assert rules.verdict == "wrong" and rules.said[0].startswith("merge 1 is ")
    ids = judged(lambda check: check_ids(spoilt, good.ids, "good", check))
    assert ids.verdict == "wrong" and ": token " in ids.said[0] and ids.said[0].endswith(" by good")
    shorter = {"english": good.ids["english"][:-1]}
    said = judged(lambda check: check_ids(good, shorter, "vLLM", check)).said[0]
    assert said.startswith(f"english: token {len(shorter['english'])} is ") and said.endswith(", and none by vLLM")
    assert " is none here" not in said
    for look in (lambda c: check_rules(good, good, "good", c), lambda c: check_ids(good, good.ids, "good", c)):
        assert judged(look).verdict == "ok"


def test_a_template_with_another_blank_is_named(demo: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(demo, tmp_path / "spoilt"))
    template = path / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("<|im_start|>assistant\\n", "<|im_start|>assistant \\n"))
    assert template.read_text() != text
    spoilt, good = Wording.of(path), Wording.of(demo)
    theirs = {name: good.written(ids) for name, ids in good.prompts.items()}
    found = judged(lambda check: check_prompts(spoilt, theirs, "good", check))
    assert found.verdict == "wrong" and "'a question' is" not in found.said[0]
    assert found.said[0].startswith("a question: rendered otherwise than by good, at character ")
    assert "assistant \\n" in found.said[0]


# Errors in what runs.


def runner_of(path: Path) -> Any:
    config = EngineConfig(model=str(path), device="cpu", threads=1, max_model_len=512, max_num_seqs=4, n_pages=64)
    return build_runner(config, tell)


@pytest.fixture
def prompts() -> dict[str, list[int]]:
    wording = Wording.of(tiny_checkpoint("dense"))
    return {name: wording.ids[name][:90] for name in ("english", "hindi", "code")}


def test_bits_that_depend_on_company_are_found(prompts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(tiny_checkpoint("dense"))
    sound = judged(lambda check: bits.check_bits(Engine(runner), prompts, check, tell))
    assert sound.verdict == "ok" and "from the prefix cache" in sound.said[1]
    step, norm = runner.step, runner.model.weights.norm

    def impure(given: Step) -> object:
        norm[0] += len(given.chunks) > 1
        try:
            return step(given)
        finally:
            norm[0] -= len(given.chunks) > 1

    monkeypatch.setattr(runner, "step", impure)
    found = judged(lambda check: bits.check_bits(Engine(runner), prompts, check, tell))
    assert found.verdict == "wrong" and "other bits in company than alone, at first for token " in found.said[0]


RUN = [
    ("dense", "bf16"),
    ("moe", "split"),
    ("next", "bf16"),
    ("dense", "gguf Q8_0"),
    ("moe", "gguf Q4_K"),
    ("next", "gguf Q8_0"),
]


@needs_transformers
@pytest.mark.parametrize(("kind", "format"), grid([*RUN, ("moe", "nvfp4"), ("dense", "w8a8")], [], pytest.mark.long))
def test_a_layer_that_is_wrong_is_named(kind: str, format: str) -> None:
    path = made(kind, format)
    files, runner = Files(path, "model"), runner_of(path)
    texts = {name: ids[:20] for name, ids in Wording.of(path).ids.items() if name == "english"}

    def look(check: Check) -> dict[str, Any]:
        ours = {name: layers.residuals(runner, ids) for name, ids in texts.items()}
        return layers.check_layers(files, texts, ours, runner.plan, check, tell)

    theirs: dict[str, Any] = {}
    sound = judged(lambda check: theirs.update(look(check)))
    assert sound.verdict == "ok", sound.said
    told = bits.run(Engine(runner), texts)
    mine = {name: each.prompt for name, each in told.items()}
    assert judged(lambda check: bits.check_logprobs(mine, theirs, "transformers", check)).verdict != "wrong"
    runner.model.weights.layers[1].a_log[:] += 3
    runner.model.weights.layers[2].post_norm[:] += 0.2
    found = judged(look)
    named = [text.partition(":")[0] for text in found.said]
    assert named == ["layer 1, DeltaNet", "layer 2, feed-forward"]


@needs_transformers
def test_layers_over_several_streams_are_skipped() -> None:
    files, page = Files(tiny_checkpoint("flash"), "model"), Page({})
    of = verify.Verification(page, files, None, None, argparse.Namespace(), EngineConfig())
    assert of._layers(None, {}, tell) == {} and page.checks[0].verdict == "skipped"


@needs_transformers
@pytest.mark.parametrize("stages", [(), ("127.0.0.1:1",)])
def test_a_model_in_parts_has_its_log_probabilities_alone(stages: tuple[str, ...]) -> None:
    files, cuts = Files(tiny_checkpoint("dense"), "model"), () if stages else (None, None)
    plan = replace(runner_of(files.path).plan, cuts=cuts, n_gpus=max(len(cuts), 1))
    page, texts = Page({}), {"english": Wording.of(files.path).ids["english"][:8]}
    of = verify.Verification(page, files, None, None, argparse.Namespace(), EngineConfig(stages=stages))
    theirs = of._layers(SimpleNamespace(plan=plan), texts, tell)
    assert len(theirs["english"]) == 7 and page.checks[0].verdict == "skipped"
    assert "leave --tensor-parallel, --tp-invariant and --stages out" in page.checks[0].said[0]
    assert of._none_compared(False) == "Deltic told none, as is said under bits"
    of.url = "http://127.0.0.1:1"
    told = "transformers told none, as is said under layers; the server told none, as is said there"
    assert of._none_compared(True) == told


@needs_transformers
def test_the_page_of_a_sound_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_has_transformers", lambda: False)
    monkeypatch.setattr(verify, "decode_roof", lambda plan, on_gpu: 1000.0)
    monkeypatch.setattr("deltic.verify.texts.TEXTS", {name: TEXTS[name] for name in ("english", "korean")})
    files = copied(tiny_checkpoint("dense", tied=True), tmp_path / "home" / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    arguments = ["verify", str(files.path), "--device", "cpu", "--threads", "1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == (tmp_path / "out" / "verify-tiny.md").read_text().strip()
    assert str(tmp_path) not in printed.out and "deltic: running texts together" in printed.err
    page = json.loads((tmp_path / "out" / "verify-tiny.json").read_text())
    verdicts = {check["name"]: check["verdict"] for check in page["checks"]}
    skipped = {name for name, verdict in verdicts.items() if verdict == "skipped"}
    assert skipped == {"configuration", "tokenizer", "chat template", "layers", "log-probabilities"}
    said = {check["name"]: check["said"] for check in page["checks"]}
    advice = "pip install transformers torch, to compare with the published implementation"
    assert (
        said["tokenizer"][-1].startswith("nothing was compared: ")
        and said["chat template"][0] == "5 of 5 chats are taken"
    )
    assert said["log-probabilities"][0].endswith(f"{advice}; give --against URL of a server")
    assert "wrong" not in verdicts.values() and len(page["checks"][0]["figures"]["hashes"]) == 6

    monkeypatch.chdir(files.path)  # a short text fits, without a cache and with nobody beside it
    few = ["--max-model-len", "112", "--max-num-seqs", "1", "--no-prefix-cache"]
    assert main(["verify", ".", *arguments[2:6], *few]) == 0
    printed = capsys.readouterr()
    assert "- model: tiny, safetensors" in printed.out and "model.safetensors.index.json" not in printed.out
    assert "the same bits each time; --max-num-seqs is 1: nothing ran together" in printed.out
    assert "the prefix cache was not tried: it is off" in printed.out and "- deltic: 0." in printed.out

    spoilt(
        files.path,
        tmp_path / "home" / "spoilt",
        swap(f"{LAYERS}3.self_attn.q_norm.weight", f"{LAYERS}3.self_attn.k_norm.weight"),
    )
    arguments[1] = str(tmp_path / "home" / "spoilt")
    assert main([*arguments, "--against", str(files.path)]) == 1
    page = json.loads((tmp_path / "out" / "verify-spoilt.json").read_text())
    (found,) = [check for check in page["checks"] if check["verdict"] == "wrong"]
    assert found["name"] == "values beside tiny" and f"{LAYERS}3.self_attn.q_norm" in found["said"][0]

    monkeypatch.setattr(verify, "build_runner", None)  # what cannot be loaded is not
    url = f"http://127.0.0.1:{free_port()}"
    arguments[1:2] = [str(files.path), "--against", url]
    (files.path / "model.safetensors").write_bytes(b"")
    assert main(arguments) == 1
    page = json.loads((tmp_path / "out" / "verify-tiny.json").read_text())
    assert {check["name"]: check["verdict"] for check in page["checks"]}["tensors"] == "wrong"
    assert str(tmp_path) not in json.dumps(page) and url not in json.dumps(page)
    (found,) = [check for check in page["checks"] if check["name"] == "server"]
    assert (
        found["verdict"] == "look"
        and "nothing was compared with it: the server of --against: cannot" in found["said"][0]
    )


def test_of_a_speech_model_the_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(tiny_speech("custom_voice"), tmp_path / "speech"))
    assert main(["verify", str(path), "--device", "cpu"]) == 0
    assert "speech_tokenizer/model.safetensors" in capsys.readouterr().out
    tensors = load_file(path / "model.safetensors")
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    assert main(["verify", str(path), "--device", "cpu"]) == 1
    assert f"tensor '{name}' is missing" in capsys.readouterr().out


def test_of_packed_weights_the_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "packed")
    assert main(["pack", str(tiny_checkpoint("dense")), "--out", path]) == 0
    assert main(["verify", path, "--device", "cpu"]) == 0
    assert "of packed weights no more than the files is checked" in capsys.readouterr().out
    assert main(["verify", str(tiny_checkpoint("dense")), "--against", path]) == 2


@needs_transformers
@pytest.mark.parametrize("is_bare", [True, False])
def test_an_embedder_is_sound(is_bare: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_embedder(is_bare=is_bare)
    code = main(["verify", str(path), "--device", "cpu", "--threads", "1"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "an embedder draws no tokens" in printed and "4 layers add what transformers' add" in printed


def test_keys_and_homes_are_not_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    places = {"/data/y": "y", "http://me:word@10.0.0.5:80": "the server"}
    page = Page({"model": "/home/somebody/models/x"}, secrets=("sk-1",), places=places)
    with page.check("one") as check:
        check.note("key sk-1 at https://me:word@host/v1, /home/somebody/z and /data/y/config.json")
        check.note("http://me:word@10.0.0.5:80: cannot connect (Connect call failed ('10.0.0.5', 80))")
        check.figures = {"far": float("nan"), "farther": [float("inf"), 1.5]}
    with page.check("two"):
        raise CheckpointError("/data/y/model.safetensors: cut short")
    text = page.text()
    assert "key (a key) at https://host/v1, ~/z and y/config.json" in text and "- model: ~/models/x" in text
    assert "- the server: cannot connect (Connect call failed (an address))" in text
    assert "## two: wrong\n\n- y/model.safetensors: cut short" in text and page.json()["verdict"] == "wrong"
    written: Any = json.loads(json.dumps(page.json(), allow_nan=False))
    assert written["checks"][0]["figures"] == {"far": "nan", "farther": ["inf", 1.5]}


def test_a_check_that_fails_leaves_the_page() -> None:
    assert judged(lambda check: {}["none"]).said == ["this check failed: KeyError: 'none'"]
    with verify._caught(check := Check("one"), "not read"):
        raise CheckpointError("cut short")
    assert check.verdict == "wrong" and check.said == ["cut short"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "a/b", "--against", "c/d"], "--against takes a server's URL and a checkpoint, one each"),
        (["--against", "no such place"], "no such directory or file"),
        (["--max-model-len", "100"], "--max-model-len 100: give 112 or more"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tiny_checkpoint("dense")), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_texts_are_in_several_scripts() -> None:
    assert len(TEXTS) == 10 and np.mean([not text.isascii() for text in TEXTS.values()]) > 0.5


def test_a_server_of_the_same_model_says_the_same(server: LocalServer, tmp_path: Path) -> None:
    """The real one, which is asked as vLLM is, and which has the same bits."""
    wording = Wording.of(DEMO)
    texts = {name: ids[:20] for name, ids in wording.ids.items()}
    answers = servers.ask(server.url, server.api_key, None, texts, tell)
    assert answers.kind == "Deltic" and not answers.refused
    assert judged(lambda check: check_ids(wording, answers.ids, answers.kind, check)).verdict == "ok"
    found = judged(lambda check: check_prompts(wording, answers.prompts, answers.kind, check))
    assert found.said == [f"{len(answers.prompts)} chats are rendered as by Deltic"]
    config = EngineConfig(device="cpu", threads=1, max_model_len=512, max_num_seqs=16, n_pages=64)
    mine = {name: told.prompt for name, told in bits.run(Engine(build_runner(config, tell)), texts).items()}
    assert {name: [round(x, 6) for x in each] for name, each in mine.items()} == {
        name: [round(x, 6) for x in each] for name, each in answers.logprobs.items()
    }
