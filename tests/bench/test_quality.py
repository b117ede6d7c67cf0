"""`deltic bench quality`: what it says of a format is what the engine serves in that format."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import quality_peers
from deltic.__main__ import main
from deltic.bench import quality
from deltic.bench.quality import Document, Losses, compare, read_documents
from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams
from deltic.models.checkpoint import DEMO
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.text import Tokenizer
from tests.tiny import tiny_checkpoint
from tests.tiny_gguf import write_gguf
from training import held_out

pytestmark = pytest.mark.long

TOKENIZER = Tokenizer.load(DEMO)


def runner(kind: str, quantize: str | None) -> Runner:
    config = EngineConfig(
        model=str(tiny_checkpoint(kind)), threads=1, max_num_seqs=1, max_step_tokens=64, max_model_len=256
    )
    return build_runner(replace(config, quantize=quantize), lambda stage, done: None, Cpu())


def served_logprobs(inner: Runner, ids: list[int]) -> list[float]:
    """Of ids[1:], as the engine answers prompt_logprobs."""
    engine = Engine(inner)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.add(Request(id="a", prompt_ids=ids, params=params))
    while engine.has_work():
        for output in engine.step():
            if output.prompt_logprobs:
                return [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    raise AssertionError("no log-probabilities")


@pytest.mark.parametrize("kind", ("dense", "moe"))
def test_perplexity_is_that_of_the_served_logprobs(kind: str):
    runners = {name: runner(kind, quantize) for name, quantize in (("bf16", None), ("int4", "int4"))}
    documents = []
    for length in (200, 65, 2):  # one that ends inside a page, and one a token behind its edge
        ids = np.random.default_rng(length).integers(0, 256, length).tolist()
        documents.append(Document(ids, [i > 0 and i % 3 > 0 for i in range(length)]))
    done: list[int] = []
    found = compare(runners, documents, done.append)
    assert sum(done) == 267
    for name, inner in runners.items():
        served = [
            logprob
            for d in documents
            for logprob, counts in zip(served_logprobs(inner, d.ids), d.counts[1:], strict=True)
            if counts
        ]
        expected = math.exp(-sum(served) / len(served))
        assert found[name]["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["bf16"]["kl_max"] == 0 and found["bf16"]["same_argmax"] == 1
    assert 0 < found["int4"]["kl_mean"] < found["int4"]["kl_p99"] <= found["int4"]["kl_max"]


def test_divergence_of_two_known_distributions():
    log_p = np.log([[0.6, 0.4], [0.9, 0.1]])
    log_q = np.log([[0.25, 0.75], [0.9, 0.1]])
    losses = Losses()
    losses.add(log_q, log_p, np.array([1, 0]))
    found = losses.summary()
    first = 0.6 * math.log(0.6 / 0.25) + 0.4 * math.log(0.4 / 0.75)
    assert found["kl_max"] == pytest.approx(first) and found["kl_mean"] == pytest.approx(first / 2)
    assert found["perplexity"] == pytest.approx((0.75 * 0.9) ** -0.5)
    assert found["same_argmax"] == 0.5 and found["gap_max"] == pytest.approx(0.2)


def test_documents_of_both_kinds_of_file(tmp_path: Path):
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text('[["<|im_start|>user\\nHello<|im_end|>", false], ["Hi.<|im_end|>", true]]\n\n')
    (document,) = read_documents(lines, TOKENIZER)
    n_answer = len(TOKENIZER.encode("Hi.<|im_end|>", "parse"))
    assert document.counts == [False] * (len(document.ids) - n_answer) + [True] * n_answer
    assert TOKENIZER.decode(document.ids, skip_special_tokens=False).startswith("<|im_start|>user\nHello")
    plain.write_text("A fox and an owl. " * 900)
    windows = read_documents(plain, TOKENIZER)
    assert len(windows) > 1 and len(windows[0].ids) == quality.WINDOW
    assert all(not w.counts[0] and all(w.counts[1:]) for w in windows)


@pytest.mark.parametrize("text", ('[["no pair"]]', "not JSON", "", '[["nothing counts", false]]'))
def test_text_that_says_nothing_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--text .*a\.jsonl: "):
        read_documents(file, TOKENIZER)


def test_the_text_in_the_package_is_what_its_command_makes():
    assert quality.TEXT.read_text() == "".join(held_out.lines())


def test_command_orders_the_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "short.jsonl"
    text.write_text("".join(quality.TEXT.read_text().splitlines(keepends=True)[1:9]))
    flags = ["--threads", "1", "--text", str(text), "--out", str(tmp_path)]
    assert main(["bench", "quality", *flags]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    result = json.loads(Path(line["file"]).read_text())
    rows = {row["format"]: row for row in result["rows"]}
    assert list(rows) == ["bf16", "int8", "int4", "int4-symmetric"]
    assert 0 < rows["int8"]["kl_mean"] < 1e-3 and rows["int8"]["kl_mean"] < rows["int4"]["kl_mean"] < 1e-2
    assert rows["int4"]["bytes"] < rows["int8"]["bytes"] < rows["bf16"]["bytes"]
    assert result["answers"]["int4"][0] == "1 * 4 = 4."
    assert "<function=getWeather>" in result["answers"]["int4"][1]


def test_settings_are_held_to_the_default_at_the_end_of_long_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--threads", "1", "--context", "1024", "--out", str(tmp_path)]
    assert main(["bench", "quality", *flags, "--setting", "kv-cache-dtype=int8", "kv-cache-dtype=k8v4"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(result["file"]).name.startswith("settings-") and result["context"] == 1024
    default, int8, k8v4 = result["rows"]
    assert [row["format"] for row in result["rows"]] == ["default", "kv-cache-dtype=int8", "kv-cache-dtype=k8v4"]
    assert default["kl_max"] == 0 and default["answers_same"] == 1
    assert 0 < int8["kl_mean"] < k8v4["kl_mean"] < 1e-2 and 0 < k8v4["answers_same"] <= int8["answers_same"]
    for given, said in (
        (["--setting", "kv-cache=int8"], "--setting kv-cache=int8: "),
        (["--setting", "kv-cache-dtype=int3"], "must be one of auto"),
        (["--setting", "model=other"], "give NAME=VALUE"),
        (["--context", "100000"], "the text has"),
    ):
        assert main(["bench", "quality", *given]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_far_texts_count_their_end() -> None:
    documents = [Document(list(range(900)), [False, *[True] * 899]) for _ in range(3)]
    found = quality.far_documents(documents, 1200)
    assert [len(document.ids) for document in found] == [1200, 1200]
    assert found[0].counts == [False] * 688 + [True] * 212 + [False] + [True] * 299
    assert found[0].ids[899:902] == [899, 0, 1]
    alike = quality.same_answers([[1, 2, 3], [4, 5]], [[1, 2, 9, 9], [4, 5]])
    assert alike == pytest.approx(4 / 6)


def test_packed_weights_are_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["pack", "--quantize", "int8", "--out", str(tmp_path / "packed")]) == 0
    assert main(["bench", "quality", str(tmp_path / "packed"), "--quantize", "int8"]) == 2
    assert "holds int8 weights only" in " ".join(capsys.readouterr().err.split())
    assert main(["bench", "quality", "--quantize", "int3"]) == 2
    assert "--quantize 'int3': must be one of fp8, int8" in capsys.readouterr().err


@pytest.fixture(scope="module")
def q8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a GGUF file."""
    return write_gguf(DEMO, tmp_path_factory.mktemp("gguf") / "small-Q8_0.gguf", "Q8_0")


def test_checkpoints_that_others_quantised_stand_beside(
    tmp_path: Path, q8: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.jsonl"
    text.write_text("".join(quality.TEXT.read_text().splitlines(keepends=True)[1:5]))
    assert main(["pack", "--quantize", "int4", "--out", str(tmp_path / "packed")]) == 0
    flags = ["--threads", "1", "--text", str(text), "--out", str(tmp_path)]
    assert main(["bench", "quality", *flags, "--quantize", "int8", "--beside", str(q8), str(tmp_path / "packed")]) == 0
    rows = {row["format"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert list(rows) == ["bf16", "int8", "small-Q8_0", "packed"]
    assert rows["small-Q8_0"]["holds"].startswith("Q8_0 100 %") and rows["packed"]["holds"].startswith("int4")
    assert 0 < rows["small-Q8_0"]["kl_mean"] < 1e-3 and rows["small-Q8_0"]["kl_mean"] < rows["packed"]["kl_mean"]
    assert main(["bench", "quality", *flags, "--beside", str(q8)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["format"] for row in rows] == ["bf16", "small-Q8_0"], "no other format unless it is asked for"


def test_what_cannot_stand_beside_is_refused(tmp_path: Path, q8: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*given: str) -> str:
        assert main(["bench", "quality", *given]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "reads the text as other tokens" in said("--beside", str(tiny_checkpoint("dense")))
    assert "another is called small-Q8_0" in said("--beside", str(q8), str(q8))
    assert "holds Q8_0 weights only" in said(str(q8), "--beside", str(q8))


def test_two_engines_are_held_to_the_trained_model_token_by_token() -> None:
    log_p = np.log([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]])
    targets = np.array([0, 0, 1])
    same = quality_peers.Reading(log_p, log_p, targets)
    other = quality_peers.Reading(np.log([[0.25, 0.75], [0.9, 0.1], [0.5, 0.5]]), log_p, targets)
    assert same.summary()["kl_mean"] == 0 and same.summary()["same_argmax"] == 1
    found = quality_peers.apart(other, same)
    first = 0.6 * math.log(0.6 / 0.25) + 0.4 * math.log(0.4 / 0.75)
    assert found["kl"] == pytest.approx(first / 3) and found["kl_error"] == pytest.approx(first / 3)
    assert found["nll"] == pytest.approx(math.log(0.6 / 0.25) / 3) and found["same"] == pytest.approx(-1 / 3)


def test_the_built_in_model_is_read_as_the_published_implementation_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files = quality_peers.make_gguf(tmp_path)
    documents = read_documents(quality.TEXT, TOKENIZER)[1:4]
    log_p = quality_peers.trained(documents, TOKENIZER.n_tokens)
    models = {name: files[name] for name in ("gguf-BF16", "gguf-Q8_0")}
    readings, held = quality_peers.read_ours(models, documents, log_p, 1)
    assert list(readings) == ["bf16", "gguf-BF16", "gguf-Q8_0"]
    assert held["gguf-Q8_0"]["holds"].startswith("Q8_0 100 %")
    assert readings["bf16"].kl.max() < 1e-4 and (readings["bf16"].kl == readings["gguf-BF16"].kl).all()
    assert 0 < readings["gguf-Q8_0"].kl.mean() < 1e-4
