"""Packed weights on disk: the same bytes come back, mapped; nothing half-written is seen; `deltic pack` end to end."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltic import LLM, SamplingParams
from deltic.__main__ import main
from deltic.config import ConfigError, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request
from deltic.models import loading, packed
from deltic.models.fields import CheckpointError
from deltic.models.files import PACKED
from deltic.models.packed import cache_file, map_packed, save_packed
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import Moe, Weights, load_weights
from deltic.runtime.build import build_runner, plan_of, settle
from deltic.runtime.cpu import device as cpu_device
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from tests.heads import run, sequence
from tests.tiny import tiny_checkpoint
from tests.tiny_drafter import tiny_drafter

FORMATS = (None, "int8", "int4", "int4-symmetric")


def loaded(path: Path, quantize: str | None = None) -> tuple[Weights, ModelShape]:
    shape = ModelShape.from_directory(path)
    return load_weights(path, shape, quantize=quantize)[0], shape


def assert_same(a: Weights, b: Weights) -> None:
    assert [name for name, _ in a.named_parts()] == [name for name, _ in b.named_parts()]
    for (name, x), (_, y) in zip(a.named_memory(), b.named_memory(), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, name
        assert x.tobytes() == y.tobytes(), name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Weights, ModelShape]:
    """A packed file of the tiny dense checkpoint in int8, and what is in it."""
    weights, shape = loaded(tiny_checkpoint("dense"), "int8")
    save_packed(weights, tmp_path / PACKED, "int8", [])
    return tmp_path / PACKED, weights, shape


# The file.


@pytest.mark.parametrize("quantize", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_what_is_saved_comes_back(kind: str, quantize: str | None, tmp_path: Path) -> None:
    file, seen = tmp_path / "x.safetensors", []
    for tied in (False, True) if kind == "dense" else (False,):
        weights, shape = loaded(tiny_checkpoint(kind, tied=tied), quantize)
        save_packed(weights, file, quantize, ["said then"], lambda *at: seen.append(at))
        assert seen == sorted(seen) and seen.pop()[0] == seen[-1][1], "progress ends at the whole"
        seen.clear()
        mapped, notices = map_packed(file, shape, 2, lambda *at: seen.append(at))
        assert seen == sorted(seen) and seen.pop() == (weights.n_bytes,) * 2
        seen.clear()
        assert notices == ["said then"]
        assert_same(mapped, weights)
        assert (mapped.lm_head is mapped.embed) == tied
        formats = [getattr(part, "format", None) for _, part in mapped.named_parts()]
        assert formats == [getattr(part, "format", None) for _, part in weights.named_parts()]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are read from /proc")
def test_parts_are_the_mapped_file_itself(saved: tuple[Path, Weights, ModelShape]) -> None:
    file, _, shape = saved
    mapped, _ = map_packed(file, shape, 1)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    ranges = [[int(at, 16) for at in line[0].split("-")] for line in lines]
    for name, memory in mapped.named_memory():
        at = memory.ctypes.data
        assert any(first <= at and at + memory.nbytes <= last for first, last in ranges), f"{name} was copied"
        assert at % 64 == 0, f"{name} does not begin on a cache line"


def test_different_head_of_a_tied_model_is_kept(tmp_path: Path) -> None:
    weights, _ = loaded(tiny_checkpoint("dense"))
    tied = ModelShape.from_directory(tiny_checkpoint("dense", tied=True))
    save_packed(weights, tmp_path / "x", None, [])
    assert_same(map_packed(tmp_path / "x", tied, 1)[0], weights)


def test_absent_head_of_an_untied_model_is_another_model(tmp_path: Path) -> None:
    weights, _ = loaded(tiny_checkpoint("dense", tied=True))
    save_packed(weights, tmp_path / "x", None, [])
    with pytest.raises(CheckpointError, match=r"another model.*'lm_head'"):
        map_packed(tmp_path / "x", ModelShape.from_directory(tiny_checkpoint("dense")), 1)


def test_a_writer_that_fails_leaves_what_was_there(saved: tuple[Path, Weights, ModelShape]) -> None:
    file, weights, shape = saved

    def fail(done: int, total: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        save_packed(loaded(tiny_checkpoint("dense", seed=1), "int8")[0], file, "int8", [], fail)
    assert os.listdir(file.parent) == [file.name]
    assert_same(map_packed(file, shape, 1)[0], weights)


KILLED = """
import os, signal, sys
from pathlib import Path
from deltic.models.packed import save_packed
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights
weights, _ = load_weights(sys.argv[1], ModelShape.from_directory(sys.argv[1]))
save_packed(weights, Path(sys.argv[2]), None, [], lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_writer_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    source, file = tiny_checkpoint("dense"), tmp_path / "x.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(file)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    (part,) = tmp_path.iterdir()
    assert part.name.startswith("x.safetensors.") and part.suffix == ".part"
    weights, shape = loaded(source)
    save_packed(weights, file, None, [])
    assert part.exists(), "it could be one that is being written"
    os.utime(part, (time.time() - 7200,) * 2)
    save_packed(weights, file, None, [])
    assert list(tmp_path.iterdir()) == [file], "an abandoned one is removed"
    assert_same(map_packed(file, shape, 1)[0], weights)


def test_concurrent_writers_and_readers(saved: tuple[Path, Weights, ModelShape]) -> None:
    file, weights, shape = saved

    def write() -> None:
        for _ in range(8):
            save_packed(weights, file, "int8", [])

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert_same(map_packed(file, shape, 1)[0], weights)
    assert os.listdir(file.parent) == [file.name]


def rewrite_header(file: Path, **metadata: str) -> None:
    """Changes what the header says of the whole file."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] |= metadata
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("keep", [0, 5, 4000, 100_000, -1])
def test_a_truncated_file_is_damaged(saved: tuple[Path, Weights, ModelShape], keep: int) -> None:
    file, _, shape = saved
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{PACKED}: damaged or unreadable .* packed again"):
        map_packed(file, shape, 1)


def test_a_file_of_something_else_is_refused(saved: tuple[Path, Weights, ModelShape]) -> None:
    file, _, shape = saved
    good = file.read_bytes()

    def refused(reason: str, shape: ModelShape = shape) -> None:
        with pytest.raises(CheckpointError, match=rf"{PACKED}: .*{reason}.* packed again"):
            map_packed(file, shape, 1)

    refused("packed from another model", ModelShape.from_directory(tiny_checkpoint("moe")))
    refused("packed from another model", ModelShape.from_directory(tiny_checkpoint("dense", n_layers=8)))
    file.write_bytes(b"\xff" * 10_000)
    refused("damaged")
    shutil.copy(tiny_checkpoint("dense") / "model.safetensors", file)
    refused("another version of Deltic")
    for change, reason in (({"deltic": "0"}, "another version"), ({"quantize": "int3"}, "'int3'")):
        file.write_bytes(good)
        rewrite_header(file, **change)
        refused(reason)
    file.write_bytes(good)
    rewrite_header(file, quantize="int4")  # the bytes are int8
    refused("size of another model")


# The cache of a start.


def start(directory: Path, weights_cache: Path, quantize: str | None = "int4") -> Runner:
    config = EngineConfig(
        model=str(directory), quantize=quantize, weights_cache=weights_cache, max_num_seqs=1,
        max_model_len=64, threads=1,
    )  # fmt: skip
    return build_runner(config, lambda stage, done: None, Cpu())


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What has been loaded from a checkpoint, rather than mapped."""
    done: list[Path] = []

    def load(path: Path, *arguments: object, **more: object) -> object:
        done.append(path)
        return load_weights(path, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("deltic.runtime.model.load_weights", load)
    return done


def test_the_second_start_maps_what_the_first_packed(tmp_path: Path, loads: list[Path]) -> None:
    source, cache = tiny_checkpoint("dense", extras=True), tmp_path / "made" / "here"
    first, second = start(source, cache), start(source, cache)
    assert len(loads) == 1 and len(list(cache.iterdir())) == 1
    assert first.info.notices == second.info.notices and "skipped 3 vision tensors" in first.info.notices[0]
    assert_same(first.model.weights, second.model.weights)
    start(source, cache, "int8")
    assert len(loads) == 2 and len(list(cache.iterdir())) == 2
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--weights-cache .*/here: is writable for others"):
        start(source, cache)


def test_random_weights_are_cached_by_shape_and_seed(tmp_path: Path) -> None:
    names = {
        cache_file(EngineConfig(dummy=shape, seed=seed, quantize=quantize, weights_cache=tmp_path), tmp_path)
        for shape in ("qwen3.5-0.8b", "qwen3.5-2b")
        for seed in (0, 1)
        for quantize in FORMATS
    }
    assert len(names) == 16


def test_the_name_changes_with_the_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dense", shards=2), source)
    config = EngineConfig(model=str(source), weights_cache=tmp_path)
    names = [cache_file(config, source)]
    assert cache_file(config, source) == names[0]
    shards = sorted(source.glob("*.safetensors"))
    for file in (*shards, source / "config.json", source / "model.safetensors.index.json"):
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        names.append(cache_file(config, source))
    shards[0].write_bytes(shards[0].read_bytes() + b"\0")
    names.append(cache_file(config, source))
    moved = source.rename(tmp_path / "moved")
    names.append(cache_file(EngineConfig(model=str(moved), weights_cache=tmp_path), moved))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("damage", ["truncated", "another version", "a directory"])
def test_a_damaged_cache_costs_a_load_and_is_packed_again(damage: str, tmp_path: Path, loads: list[Path]) -> None:
    source, cache = tiny_checkpoint("dense"), tmp_path / "cache"
    good = start(source, cache)
    (file,) = cache.iterdir()
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "another version":
        rewrite_header(file, deltic="0")
    else:
        file.unlink()
        file.mkdir()
    again = start(source, cache)
    assert len(loads) == 2
    assert_same(again.model.weights, good.model.weights)
    why, then = again.info.notices
    assert why.startswith("--weights-cache: ") and str(file) in why
    if damage == "a directory":  # cannot be replaced either
        assert "the next start loads again" in then
        return
    assert "packed again" in then
    assert start(source, cache).info.notices == [] and len(loads) == 2


def test_a_cache_that_cannot_be_written_is_a_notice(tmp_path: Path, loads: list[Path]) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        (notice,) = start(tiny_checkpoint("dense"), directory).info.notices
        assert notice.startswith("--weights-cache: ") and notice.endswith("the next start loads again")
    assert len(loads) == 2


# The command.


def test_pack_writes_a_model_that_answers(tmp_path: Path, loads: list[Path], capsys) -> None:
    target = tmp_path / "small"
    assert main(["pack", "--out", str(target), "--quantize", "int4"]) == 0
    assert f"deltic serve {target}" in capsys.readouterr().out
    settings = {"max_model_len": 512, "max_num_seqs": 1, "threads": 2}
    question, params = (
        [{"role": "user", "content": "What is 17 + 25?"}],
        SamplingParams(temperature=0.0, max_tokens=30),
    )
    llm = LLM(str(target), **settings)
    assert loads == [], "it is mapped"
    (answer,) = llm.chat(question, params)
    assert "42" in answer.text
    (at_load,) = LLM(quantize="int4", **settings).chat(question, params)
    assert (answer.text, answer.token_ids) == (at_load.text, at_load.token_ids)
    # What it is, all commands know; what it is not, they say.
    assert main(["plan", str(target)]) == 0
    assert "int4 matrices" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--quantize int8: .*small holds weights packed as int4; leave the flag out"):
        LLM(str(target), quantize="int8", **settings)
    assert LLM(str(target), quantize="int4", **settings).info.precision == "int4"
    assert main(["pack", str(target), "--out", str(tmp_path / "again")]) == 2
    assert "holds packed weights; give the original checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_pack_keeps_everything_but_the_weights(kind: str, tmp_path: Path) -> None:
    source, target = tiny_checkpoint(kind, shards=2), tmp_path / "out"
    target.mkdir()
    assert main(["pack", str(source), "--out", str(target), "--threads", "1"]) == 0
    kept = {file.name for file in source.iterdir() if "safetensors" not in file.name}
    assert {file.name for file in target.iterdir()} == kept | {PACKED}
    weights, shape = loaded(source)
    assert_same(map_packed(target / PACKED, shape, 1)[0], weights)


def test_pack_brings_the_block_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the setting, or of the model's directory; what is served of it is what is served of the checkpoint."""
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("dense"), source)
    drafter, settings = tiny_drafter("dflash"), {"max_drafts": 4, "max_model_len": 512, "threads": 2}
    monkeypatch.setenv("DELTIC_DRAFT_MODEL", str(drafter))
    assert main(["pack", str(source), "--out", str(tmp_path / "a")]) == 0
    monkeypatch.delenv("DELTIC_DRAFT_MODEL")
    shutil.copytree(drafter, source / "draft_model")
    assert main(["pack", str(source), "--out", str(tmp_path / "b"), "--quantize", "int8"]) == 0
    for name, quantize in (("a", None), ("b", "int8")):
        runners = [
            build_runner(EngineConfig(model=str(path), quantize=quantize, **settings), lambda stage, done: None, Cpu())
            for path in (source, tmp_path / name)
        ]
        (of, of_packed), guesses = (runner.plan.drafter_bytes for runner in runners), list[list[int]]()
        assert of == of_packed > 0
        for runner in runners:
            guesses.append(run(runner, sequence(list(range(20))), 20, 4))
        assert guesses[0] == guesses[1] != []
    config = json.loads((source / "draft_model" / "config.json").read_text()) | {"hidden_size": 512}
    (source / "draft_model" / "config.json").write_text(json.dumps(config))
    (other := tmp_path / "other").mkdir()
    for name in ("modules.json", "joint_head_config.json"):
        shutil.copytree(tiny_checkpoint("dense"), other / name)
        (other / name / name).write_text("[]")
    capsys.readouterr()
    for path, said in (
        (source, "draft model: hidden_size"),
        (other / "modules.json", "what its modules.json says is not packed"),
        (other / "joint_head_config.json", "what its joint_head_config.json says is not packed"),
    ):
        assert main(["pack", str(path), "--out", str(tmp_path / "c")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_pack_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def refused(reason: str, out: Path, model: str = str(tiny_checkpoint("dense"))) -> None:
        assert main(["pack", model, "--out", str(out)]) == 2
        assert reason in capsys.readouterr().err

    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("keep")
    refused("exists and is not an empty directory", full)
    refused("exists and is not an empty directory", full / "mine")
    refused("cannot be written", full / "mine" / "below")
    refused("no such directory", tmp_path / "out", "/absent")
    monkeypatch.setattr(packed, "free_memory_bytes", lambda: 1000)
    refused("packing takes", tmp_path / "out")
    monkeypatch.undo()

    def no_space(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(packed, "save_packed", no_space)
    refused("cannot be written (no space left)", tmp_path / "out")
    monkeypatch.setenv("DELTIC_DUMMY", "qwen3.5-0.8b")
    monkeypatch.setenv("DELTIC_MODEL", "built-in")
    assert main(["pack", "--out", str(tmp_path / "out")]) == 2
    assert "random weights are not packed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"] and (full / "mine").read_text() == "keep"


# More than memory holds.


def test_pack_takes_more_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for all of it, what is packed lies on the disk meanwhile; the file is the same."""
    source = str(tiny_checkpoint("moe"))
    monkeypatch.setattr(loading, "_LEAST_ON_DISK", 1024)
    files = []
    for free in (1 << 30, 2_000_000):
        monkeypatch.setattr(packed, "free_memory_bytes", lambda free=free: free)
        target = tmp_path / f"{free}"
        assert main(["pack", source, "--out", str(target), "--quantize", "int4"]) == 0
        files.append((target / PACKED).read_bytes())
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            f"{n}" for n in (1 << 30, 2_000_000)[: len(files)]
        )
    assert files[0] == files[1]


def answer_of(runner: Runner) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, of a prompt that is not short."""
    engine = Engine(runner)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    engine.add(Request(id="a", prompt_ids=list(range(40)), params=params))
    outputs = [output for _ in range(40) for output in engine.step() if engine.has_work() or output.token_ids]
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [entry.logprob for output in outputs for entry in output.logprobs or ()]


def test_experts_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are the same to the bit, whether the file is new or there, and a disk that is too slow is refused with numbers."""
    config = EngineConfig(
        model=str(tiny_checkpoint("moe")), quantize="int4", max_num_seqs=2, max_model_len=128, threads=2,
        weights_cache=tmp_path,
    )  # fmt: skip

    def build(**changes: object) -> Runner:
        return build_runner(dataclasses.replace(config, **changes), lambda stage, done: None, Cpu())  # type: ignore[arg-type]

    expected = answer_of(build(weights_cache=None))
    assert len(expected[0]) == len(expected[1]) == 12
    for _ in range(2):  # packed first, then mapped
        runner = build(expert_memory=0.0)
        plan, moe = runner.plan, runner.model.weights.layers[0].mlp
        assert isinstance(moe, Moe)
        assert not moe.down.whole.data.flags.writeable, "it is the file"
        assert plan.outside_bytes > 0 and plan.weight_bytes + plan.outside_bytes == runner.model.weights.n_bytes
        assert answer_of(runner) == expected
    assert build(expert_memory=1.0).plan.outside_bytes == 0
    monkeypatch.setattr(cpu_device, "disk_bandwidth", lambda file: 1000.0)
    with pytest.raises(ConfigError, match=r"GB of experts do not fit into memory, and the disk of .* tokens/s at most"):
        build(expert_memory=0.0)
    with pytest.raises(ConfigError, match=r"--expert-memory 0.0: experts are outside of memory in a packed model"):
        build(expert_memory=0.0, weights_cache=None)
    with pytest.raises(ConfigError, match=r"--expert-memory 0.0: the model has no routed experts; leave it out"):
        build(expert_memory=0.0, model=str(tiny_checkpoint("dense")))


def test_a_model_that_memory_does_not_hold_leaves_experts_on_the_disk(tmp_path: Path) -> None:
    """Without being told, where it has a file; and more of them the less memory there is."""
    config = EngineConfig(dummy="qwen3.6-35b-a3b", quantize="int4", device="cpu", weights_cache=tmp_path)
    plans = [plan_of(settle(config, Cpu()), Cpu(), gb * 10**9) for gb in (8, 16, 24, 40)]
    outside = [plan.outside_bytes for plan in plans]
    assert outside[0] > outside[1] > outside[2] > outside[3] == 0
    for plan in plans:
        assert plan.total_bytes <= plan.budget_bytes and plan.max_model_len >= 4096
    with pytest.raises(ConfigError, match="the model does not fit"):
        plan_of(settle(dataclasses.replace(config, weights_cache=None), Cpu()), Cpu(), 16 * 10**9)
