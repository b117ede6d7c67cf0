"""One name for all that decides the bits: another when any of it changes, the same when only time passes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deltic.config import EngineConfig
from deltic.models.fields import CheckpointError
from deltic.models.qwen.published import PUBLISHED
from deltic.runtime import fingerprint as fingerprint_module
from deltic.runtime.fingerprint import MEMORY, fingerprint
from tests.null.test_layout import FILES, import_graph, module_name, reachable

SHAPE = PUBLISHED["qwen3.5-0.8b"]
OF_SHAPES = ({"state_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"has_draft_head": True})
OLD = 1_600_000_000_000_000_000  # a time of change long ago, in ns


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "_SEGMENT_BYTES", 1000)
    monkeypatch.setattr(fingerprint_module, "_BLOCK_BYTES", 300)


class Model:
    """A checkpoint of two files, a kernel library, and a cache directory that is not there yet."""

    def __init__(self, root: Path) -> None:
        self.directory, self.kernels = root / "model", root / "cpu.so"
        self.directory.mkdir()
        self.config = EngineConfig(model=str(self.directory), cache_dir=root / "cache")
        self.memory = root / "cache" / MEMORY
        self.files = [self.directory / f"model-{i}.safetensors" for i in range(2)]
        self.write(self.files[0], bytes(range(250)) * 10)
        self.write(self.files[1], b"x" * 999)
        self.write(self.directory / "config.json", b"{}")
        self.write(self.kernels, b"kernels")

    def write(self, file: Path, content: bytes, changed_ns: int = OLD) -> None:
        file.write_bytes(content)
        os.utime(file, ns=(changed_ns, changed_ns))

    def name(self, shape: object = SHAPE, **changes: object) -> str:
        return fingerprint(replace(self.config, **changes), shape, self.directory, self.kernels)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def test_everything_that_decides_the_bits_is_in_it(model: Model) -> None:
    first = model.name(cache_dir=None)
    assert re.fullmatch("[0-9a-f]{32}", first)
    names = {first}
    content = model.files[0].read_bytes()
    for i, at in enumerate((0, 299, 300, 999, 1000, 1234, 2000, 2499)):
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        model.write(model.files[0], changed, OLD + 1 + i)
        names.add(model.name())
    model.write(model.files[0], content[:-1])
    names.add(model.name())
    model.write(model.files[0], content, OLD + 100)
    assert model.name() == first
    for file in (model.directory / "config.json", model.kernels, model.directory / "more.safetensors"):
        before = file.read_bytes() if file.exists() else None
        model.write(file, b"changed")
        names.add(model.name())
        file.unlink() if before is None else model.write(file, before)
    names |= {model.name(quantize="int8"), model.name(quantize="int4")}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    shapes = [replace(SHAPE, **each) for each in OF_SHAPES] + [SHAPE.scaled(yarn)]
    names |= {model.name(shape) for shape in shapes}
    assert len(names) == 1 + 8 + 1 + 3 + 2 + len(shapes) and model.name() == first


def test_contents_that_are_exchanged_or_shifted_are_others(model: Model) -> None:
    first, (a, b) = model.name(cache_dir=None), (file.read_bytes() for file in model.files)
    model.write(model.files[0], b)
    model.write(model.files[1], a)
    exchanged = model.name(cache_dir=None)
    model.write(model.files[0], a[:1000])
    model.write(model.files[1], a[1000:] + b)
    assert len({first, exchanged, model.name(cache_dir=None)}) == 3


def test_code_and_libraries_are_in_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.name()
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint_module, "_version", lambda name: f"another {name}")
        another_torch = model.name()
    hashed = fingerprint_module._hash
    monkeypatch.setattr(
        fingerprint_module, "_hash", lambda file: "other" if file.parts[-2:] == ("qwen", "cpu.py") else hashed(file)
    )
    assert len({first, another_torch, model.name()}) == 3


DECIDE_NO_BITS = {"config", "json_types", "logs", "machine", "private", "roofs"}
"""Modules that the engine imports and that are no part of the name: the knobs that matter are in it by their values."""


def test_all_that_the_engine_imports_is_in_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Path] = set()
    hashed = fingerprint_module._hash

    def hash_and_note(file: Path) -> str:
        seen.add(file)
        return hashed(file)

    monkeypatch.setattr(fingerprint_module, "_hash", hash_and_note)
    model.name()
    graph = import_graph()
    used = {"runtime.build", "engine.engine"}.union(
        *(reachable(graph, name) for name in ("runtime.build", "engine.engine"))
    )
    files = {module_name(path).removesuffix(".__init__"): path for path in FILES}
    assert {name for name in used if files[name] not in seen} == DECIDE_NO_BITS


def test_folders_are_hashed_at_any_depth(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / "ops" / "one" / "two" / "kernel.py"
    deep.parent.mkdir(parents=True)
    monkeypatch.setattr(fingerprint_module, "__file__", str(tmp_path / "runtime" / "fingerprint.py"))
    names = set()
    for text in ("a = 1", "a = 2"):
        deep.write_text(text)
        names.add(model.name())
    assert len(names) == 2


def test_random_weights(model: Model) -> None:
    config = replace(model.config, model=EngineConfig.model, dummy="qwen3.5-0.8b")
    names = {
        fingerprint(replace(config, **changes), SHAPE, model.directory, model.kernels)
        for changes in ({}, {"seed": 1}, {"dummy": "qwen3.5-4b"}, {"quantize": "int8"})
    }
    assert len(names) == 4
    assert not model.memory.exists(), "there was nothing to remember"


def test_large_files_are_hashed_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []
    first = fingerprint(model.config, SHAPE, model.directory, model.kernels, lambda *p: progress.append(p))
    assert progress == [(1000, 3499), (2000, 3499), (2500, 3499), (3499, 3499)]
    assert model.memory.parent.stat().st_mode & 0o777 == 0o700
    hashed: list[Path] = []
    segment = fingerprint_module._hash_segment
    monkeypatch.setattr(
        fingerprint_module, "_hash_segment", lambda file, start: (hashed.append(file), segment(file, start))[1]
    )
    assert model.name() == first and not hashed
    os.utime(model.files[1], ns=(OLD + 5, OLD + 5))
    assert model.name() == first and hashed == [model.files[1]], "touched, but equal"
    hashed.clear()
    assert model.name() == first and not hashed
    assert model.name(cache_dir=None) == first and len(hashed) == 4


def test_a_file_that_was_just_written_is_not_remembered(model: Model) -> None:
    model.files[0].write_bytes(b"now" * 500)
    model.name()
    remembered = json.loads(model.memory.read_text())
    assert list(remembered) == [str(model.files[1].resolve())]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"%s": 3}', '{"%s": ["a", 2]}', "\xff"])
def test_a_damaged_memory_means_to_hash_again(model: Model, content: str) -> None:
    first = model.name()
    model.memory.write_text(content.replace("%s", str(model.files[0].resolve())), encoding="latin-1")
    assert model.name() == first
    assert len(json.loads(model.memory.read_text())) == 2
    assert [file.name for file in model.memory.parent.iterdir()] == [MEMORY]


def test_a_memory_that_cannot_be_written_costs_the_hash(model: Model) -> None:
    first = model.name()
    model.memory.unlink()
    model.memory.parent.rmdir()
    model.memory.parent.write_text("a file")
    assert model.name() == first


def test_one_file_and_a_file_that_is_missing(model: Model) -> None:
    alone = fingerprint(model.config, SHAPE, model.files[0], model.kernels)
    assert alone != model.name()
    model.kernels.unlink()
    with pytest.raises(CheckpointError, match=r"cpu\.so"):
        model.name()


def test_imports_no_torch() -> None:
    code = "import deltic.runtime.fingerprint, deltic.engine.cache.tiers, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
