"""Weight files that are damaged or meant to harm: loaded, or refused by name, without taking the memory that they claim."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from deltic.models.fields import CheckpointError
from deltic.models.packed import map_packed
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights
from tests.null.test_hostile_files import DEEP, JSON, mutated, places, put
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny_checkpoint("dense", shards=2), copy)
    return copy


def shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.safetensors"))[0]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a safetensors file."""
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def join(header: Any, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def load(checkpoint: Path) -> None:
    try:
        load_weights(checkpoint, ModelShape.from_directory(checkpoint))
    except CheckpointError as error:
        assert str(checkpoint) in str(error) and len(str(error)) < 4000


@settings(deadline=5000, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_header(checkpoint: Path, data: st.DataObject) -> None:
    file = shard(checkpoint)
    whole = file.read_bytes()
    try:
        header, tensors = split(whole)
        name = data.draw(st.sampled_from(sorted(header)))
        change = data.draw(st.sampled_from(places(header[name])))
        header = put(header, (name, *change), data.draw(JSON | st.just("F64") | st.just([2**62, 4])))
        file.write_bytes(join(header, tensors))
        load(checkpoint)
    finally:
        file.write_bytes(whole)


@settings(deadline=5000, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bytes_that_were_lost_or_changed(checkpoint: Path, data: st.DataObject) -> None:
    file = shard(checkpoint)
    whole = file.read_bytes()
    try:
        at = data.draw(st.integers(0, 300) | st.integers(0, len(whole) - 1))
        end = data.draw(st.just(len(whole)) | st.integers(0, len(whole)))
        file.write_bytes((whole[:at] + data.draw(st.binary(min_size=1, max_size=8)) + whole[at + 8 :])[:end])
        load(checkpoint)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        join(DEEP.encode(), b""),
        join(b'{"a":' * 100_000, b""),
        join({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b""),
        join({"a": {"dtype": "F32", "shape": [0] * 10_000, "data_offsets": [0, 0]}}, b""),
    ],
    ids=range(7),
)
def test_a_file_that_is_none(checkpoint: Path, content: bytes) -> None:
    file = shard(checkpoint)
    whole = file.read_bytes()
    try:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=file.name):
            load_weights(checkpoint, ModelShape.from_directory(checkpoint))
        with pytest.raises(CheckpointError, match=file.name):
            map_packed(file, ModelShape.from_directory(checkpoint), 1)
    finally:
        file.write_bytes(whole)


@settings(deadline=5000, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_index(checkpoint: Path, data: st.DataObject) -> None:
    index = checkpoint / "model.safetensors.index.json"
    whole = index.read_text()
    path = st.sampled_from(["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0b", "config.json"])
    try:
        value = json.loads(whole)
        changed = mutated(value) | path.map(lambda p: {"weight_map": dict.fromkeys(value["weight_map"], p)})
        index.write_text(json.dumps(data.draw(changed)))
        load(checkpoint)
    finally:
        index.write_text(whole)
