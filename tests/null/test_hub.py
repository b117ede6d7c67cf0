"""Models of the hub: what is downloaded, how one sees it, how it ends, and whose tokenizer is used."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from huggingface_hub import constants
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from deltic.commands.endpoint import LocalServer, ServerFailed
from deltic.config import BUILT_IN, ConfigError, EngineConfig, ModelConfig, ServerConfig
from deltic.config_sources import resolve
from deltic.models import hub
from deltic.models.checkpoint import (
    ALL_FILES,
    DEMO,
    model_name,
    n_real_ids,
    resolve_model,
    text_directory,
    tokenizer_directory,
)
from deltic.models.fields import CheckpointError
from deltic.models.gguf import open_gguf, tower_beside
from deltic.models.hub import CHUNK_BYTES, HEAD_BYTES, Download, DownloadFailed, hub_name, outline
from deltic.models.mapped import MappedFiles, read_header
from deltic.models.qwen.shape import ModelShape
from deltic.server import downloads
from deltic.server.downloads import fetched
from deltic.server.page.files import FILES, INDEX, VERSION
from deltic.server.serve import Served, _service
from deltic.server.service import Server
from tests.fake_engine import FakeEngineClient, served
from tests.fake_hub import COMMITS, Long, blob_name, hub_with
from tests.fake_speech import FakeSpeechClient
from tests.null.test_serve import server_of
from tests.waiting import wait_for

SMALL = {
    "config.json": b"{}",
    "tokenizer.json": b"t" * 5000,
    "model.safetensors": b"w" * 400_000,
    "README.md": b"x" * 100,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def go(config: EngineConfig, when: Callable[[], bool] | None = None) -> EngineConfig | None:
    """What `fetched` gives; told to stop when `when` is true."""

    async def run() -> EngineConfig | None:
        stop = asyncio.Event()
        task = asyncio.create_task(fetched(config, stop))
        while when is not None and not task.done() and not stop.is_set():
            if when():
                stop.set()
            await asyncio.sleep(0.02)
        return await task

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "means", "revision"),
    [
        ("owner/model", "owner/model", None),
        ("owner/model/", "owner/model", None),
        ("'owner/model'", "owner/model", None),
        (' "owner/model:Q4_K_M" ', "owner/model:Q4_K_M", None),
        ("\u201cowner/model\u201d", "owner/model", None),
        ("hf.co/owner/model:Q4_K_M", "owner/model:Q4_K_M", None),
        ("huggingface.co/owner/model", "owner/model", None),
        ("hf://owner/model", "owner/model", None),
        ("https://huggingface.co/owner/model", "owner/model", None),
        ("http://www.huggingface.co/owner/model/", "owner/model", None),
        ("HTTPS://HuggingFace.co/owner/model", "owner/model", None),
        ("https://huggingface.co/owner/model/tree/main", "owner/model", None),
        ("https://huggingface.co/owner/model/tree/old", "owner/model", "old"),
        ("https://huggingface.co/owner/model/tree/a%2Eb", "owner/model", "a.b"),
        ("https://huggingface.co/owner/model/tree/main/Q4_K_M", "owner/model:Q4_K_M", None),
        ("https://huggingface.co/owner/model/blob/main/config.json", "owner/model", None),
        ("https://huggingface.co/owner/model/blob/main/a/b-Q8_0.gguf", "owner/model:a/b-Q8_0.gguf", None),
        ("https://huggingface.co/owner/model/resolve/old/b.gguf?download=true", "owner/model:b.gguf", "old"),
        ("https://huggingface.co/owner/model?show_file_info=x.gguf", "owner/model", None),
        ("owner/model:b-Q8_0.gguf", "owner/model:b-Q8_0.gguf", None),
        ("owner/model:a/b.gguf", "owner/model:a/b.gguf", None),
    ],
)
def test_names_as_people_paste_them(text: str, means: str, revision: str | None) -> None:
    name = hub_name(text)
    assert name is not None and (str(name), name.revision) == (means, revision)
    assert model_name(EngineConfig(model=text)) == means
    directory = Path("x")
    wanted = hub.wanted_of(text, ALL_FILES, None, directory)
    assert (wanted.name, wanted.revision, wanted.directory) == (means, revision, "x")
    assert hub.wanted_of(text, ALL_FILES, "given", None).revision == "given"


@pytest.mark.parametrize(
    "text", ["model", "./owner/model", "a/b/c", "https://example.org/owner/model", "../model", "qwen3.5:4b"]
)
def test_what_is_no_name_on_the_hub(text: str) -> None:
    assert hub_name(text) is None
    with pytest.raises(CheckpointError, match="no such directory or file, and not a hub name"):
        resolve_model(text)


def test_a_pasted_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a-Q8_0.gguf": b"GGUF" + bytes(90), "sub/b-Q8_0.gguf": b"GGUF" + bytes(80)}
    with hub_with(files) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        for name, file in (
            ("https://huggingface.co/owner/model/blob/main/sub/b-Q8_0.gguf", "sub/b-Q8_0.gguf"),
            ("'hf.co/owner/model:b-Q8_0.gguf'", "sub/b-Q8_0.gguf"),
            ("hf.co/owner/model:a-Q8_0.gguf", "a-Q8_0.gguf"),
        ):
            found = go(EngineConfig(model=name, download_dir=tmp_path))
            assert found is not None and found.model.endswith(f"/{COMMITS['main']}/{file}")
        with pytest.raises(CheckpointError, match=r"has no GGUF file c\.gguf; there are a-Q8_0, sub/b-Q8_0"):
            go(EngineConfig(model="owner/model:c.gguf", download_dir=tmp_path))


def test_a_model_is_downloaded_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(downloads, "LINE_EVERY_S", 0.3)
    config = EngineConfig(model="owner/model", download_dir=tmp_path / "cache", revision="old")
    with hub_with(SMALL, old={"config.json": b'{"old": 1}'}, rate=200_000, n_breaks=1) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with caplog.at_level(logging.INFO, "deltic.server"):
            found = go(config)
        assert found is not None
        directory = Path(found.model)
        assert (directory / "config.json").read_bytes() == b'{"old": 1}'
        assert (directory / "model.safetensors").read_bytes() == SMALL["model.safetensors"], "though it was cut off"
        assert not (directory / "README.md").exists()
        assert directory.is_relative_to(tmp_path / "cache") and directory.name == COMMITS["old"]
        assert found == dataclasses.replace(config, model=str(directory), revision=None)
        assert model_name(found) == "owner/model", "not the commit"
        said = [record.message for record in caplog.records]
        assert any(" of 0.41 MB" in line for line in said), "all of it, as soon as that is known"
        assert all(" of 0.41 MB" in line or ": 0.00 MB" in line for line in said)
        assert any(", 0." in line and "MB/s; model.safetensors " in line for line in said), "speed and file"
        hub.asked.clear()
        assert go(config) == found
        assert not any("resolve" in line for line in hub.asked), "no file is asked for again"
    assert go(config) == found, "the hub has gone"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert go(config) == found
    with pytest.raises(CheckpointError, match=r"owner/model at main: not a directory, not .*the hub cannot be reached"):
        go(dataclasses.replace(config, revision="main"))


@pytest.mark.parametrize(
    ("settings", "revision", "complaint"),
    [
        ({}, "nowhere", "owner/model: has no revision 'nowhere' on the hub"),
        ({"gated": True}, None, "owner/model: gated on the hub; accept its terms"),
        ({"down": True}, None, "the hub cannot be reached"),
        ({"n_empty": 100}, None, "owner/model: the download failed .*; start again: it goes on from what has come"),
        ({"wrong": {"model.safetensors"}}, None, r"owner/model: model\.safetensors has another hash .*; start again"),
        ({"wrong": {"config.json"}}, None, r"owner/model: config\.json has another hash .*; start again"),
    ],
    ids=["revision", "gated", "down", "broken", "wrong", "wrong in git"],
)
def test_a_download_that_fails_says_why(
    settings: dict[str, Any], revision: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(SMALL, **settings) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match=complaint):
            go(EngineConfig(model="owner/model", revision=revision))
        for name in hub.wrong:
            assert not list(tmp_path.rglob(f"{blob_name(name, SMALL[name])}*[!k]")), "no file but the lock"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"config": {"architectures": ["LlamaForCausalLM"]}}, "owner/model: this is a Llama, or made like one"),
        ({"gguf": {"architecture": "qwen3moe", "total": 7}}, "owner/model: this is a plain Qwen3 mixture"),
    ],
)
def test_a_model_of_another_family_is_not_downloaded(
    more: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(SMALL, more=more) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        for get in (lambda wanted: hub.download(wanted), lambda wanted: outline(wanted, tmp_path)):
            with pytest.raises(CheckpointError, match=said):
                get(Download("owner/model", ALL_FILES))
        assert not there.sent
        assert hub.download(Download("owner/model", ("tokenizer.json",))).exists(), "its tokenizer may be wanted"


def test_there_is_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match="owner/other: neither a directory here nor a model on the hub"):
            go(EngineConfig(model="owner/other"))


BIG = "model.safetensors"
BLOB = blob_name(BIG, SMALL[BIG])


def cache_with(tmp_path: Path, half: bytes | None = None) -> EngineConfig:
    """A cache which has so much of the big file."""
    blobs = tmp_path / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    if half is not None:
        (blobs / f"{BLOB}.incomplete").write_bytes(half)
    return EngineConfig(model="owner/model", download_dir=tmp_path)


def big_of(found: EngineConfig | None) -> bytes:
    assert found is not None
    return (Path(found.model) / BIG).read_bytes()


def test_a_download_ends_at_once_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SMALL | {BIG: bytes(range(256)) * 12_000}
    config = EngineConfig(model="owner/model", download_dir=tmp_path)
    with hub_with(files, rate=1_000_000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        told_s = 0.0

        def size() -> int:
            return sum(file.stat().st_size for file in tmp_path.rglob("*.incomplete"))

        def half_has_come() -> bool:
            nonlocal told_s
            told_s = time.monotonic()
            return size() > 1_000_000

        assert go(config, half_has_come) is None
        assert time.monotonic() - told_s < downloads.ENDING_S
        n_come = size()
        wait_for(lambda: not hub.sending)
        hub.sent.clear()
        hub.rate = 0
        assert big_of(go(config)) == files[BIG]
        assert n_come > 1_000_000 and hub.sent[BIG] == len(files[BIG]) - n_come
        assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("half", "n_sent"),
    [
        (SMALL[BIG][:300_000], 100_000),
        (SMALL[BIG], 0),
        (b"another", 400_000 - 7 + 400_000),
        (SMALL[BIG] + b"more", 400_000),
    ],
    ids=["half", "whole", "wrong", "too much"],
)
def test_what_a_killed_process_has_left_is_gone_on_with(
    half: bytes, n_sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert big_of(go(cache_with(tmp_path, half))) == SMALL[BIG]
        assert hub.sent.get(BIG, 0) == n_sent


def test_a_download_goes_on_through_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": b"{}", BIG: bytes(range(256)) * 12_000}
    with hub_with(files, n_breaks=2) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert big_of(go(EngineConfig(model="owner/model", download_dir=tmp_path))) == files[BIG]
        assert hub.n_breaks == 0 and hub.sent[BIG] <= len(files[BIG]) + 2 * CHUNK_BYTES


def test_a_silent_hub_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, and answers none, or no more."""
    monkeypatch.setattr(hub, "TELLING_S", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    wanted = Download("owner/model", ALL_FILES, directory=str(tmp_path))
    with hub_with(SMALL, silent="/api") as there:
        with pytest.raises(DownloadFailed, match=r"cannot be reached \(it has not answered for 0\.5 s\); go online"):
            hub.download(wanted)
        assert there.asked == ["GET /api/models/owner/model"], "nothing else is told, or asked"
        there.silent = "/owner/model/resolve"
        quick = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
        monkeypatch.setattr("huggingface_hub.file_download.time", quick)
        with pytest.raises(DownloadFailed, match=r"the download failed \(it has not answered .*; start again"):
            hub.download(wanted)
        there.silent, there.n_stalls = "", 1
        assert (hub.download(wanted) / BIG).read_bytes() == SMALL[BIG], "it goes on behind what had come"
        assert there.n_stalls == 0 and there.sent[BIG] <= len(SMALL[BIG]) + CHUNK_BYTES
        there.silent = "/api"
        assert (hub.download(wanted) / BIG).exists()
        there.silent = "/api/models/owner/model/"  # what the library asks when we have been told
        assert (hub.download(wanted) / BIG).exists()


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"}, {"mmproj-BF16.gguf"}),
        ({"mmproj-model-f16.gguf", "mmproj-Q8_0.gguf"}, {"mmproj-model-f16.gguf"}),
        ({"mmproj.gguf", "other/mmproj-BF16.gguf"}, {"mmproj.gguf"}),
        ({"other/mmproj-BF16.gguf", "mmproj.txt"}, set()),
    ],
)
def test_a_gguf_model_comes_with_its_tower(
    beside: set[str], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict.fromkeys({"model-Q4_K_M.gguf", "model-Q8_0.gguf", "README.md", *beside}, b"GGUF" + bytes(1000))
    config = EngineConfig(model="owner/model:Q4_K_M", download_dir=tmp_path)
    with hub_with(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = go(config)
        assert found is not None and Path(found.model).name == "model-Q4_K_M.gguf"
        there = {
            file.relative_to(Path(found.model).parent).as_posix() for file in Path(found.model).parent.rglob("*.*")
        }
        assert there == {"model-Q4_K_M.gguf", *expected}
        tower = tower_beside(Path(found.model))
        assert {tower.name if tower else None} == (expected or {None})
    assert go(config) == found, "the hub has gone"


@pytest.mark.parametrize("name", [BIG, "config.json"])
def test_a_file_of_the_cache_that_was_cut_short_comes_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        config = EngineConfig(model="owner/model", download_dir=tmp_path)
        found = go(config)
        assert found is not None
        file = (Path(found.model) / name).resolve()
        file.write_bytes(SMALL[name][:-1])
        hub.sent.clear()
        assert go(config) == found
        assert file.read_bytes() == SMALL[name] and hub.sent == {name: len(SMALL[name])}


def test_a_file_that_was_wrong_comes_again_and_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="owner/model", download_dir=tmp_path)
    with hub_with(SMALL, wrong={BIG}, rate=400_000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(DownloadFailed, match="another hash"):
            go(config)
        hub.wrong.clear()
        hub.sent.clear()
        assert big_of(go(config)) == SMALL[BIG]
        assert hub.sent == {BIG: len(SMALL[BIG])}


def test_two_processes_download_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="owner/model", download_dir=tmp_path)

    async def twice() -> list[EngineConfig | None]:
        stop = asyncio.Event()
        return await asyncio.gather(fetched(config, stop), fetched(config, stop))

    with hub_with(SMALL, rate=400_000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        first, second = asyncio.run(twice())
        assert first == second and big_of(first) == SMALL[BIG]
        assert hub.sent[BIG] == len(SMALL[BIG])


def test_the_cache_is_the_one_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has downloaded is found here; that it finds ours is seen by a start without the hub."""
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code = f"import huggingface_hub as h; h.snapshot_download('owner/model', cache_dir={str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        hub.sent.clear()
        assert big_of(go(EngineConfig(model="owner/model", download_dir=tmp_path))) == SMALL[BIG]
        assert not hub.sent


def test_a_disk_that_is_too_small_is_an_error_before_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: SimpleNamespace(free=2_500_000_000))
    missing = {"a" * 64: hub.Part("a.safetensors", 3_000_000_000), "b" * 64: hub.Part("b.safetensors", 10**9)}
    with pytest.raises(DownloadFailed, match=r"owner/model: 4\.00 GB are to come, .* has 2\.50 GB free; make room"):
        hub._fetch_all("owner/model", COMMITS["main"], tmp_path, missing, [])


def test_only_a_hash_is_a_name_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: str, blob: str) -> SimpleNamespace:
        return SimpleNamespace(rfilename=name, size=1, lfs=None, blob_id=blob)

    files = [told("a.json", "../../up"), told("../../../b.json", "b" * 40), told("/c.json", "c" * 40)]
    files += [told("d/e.json", "d" * 40), told("f.bin", "f" * 40), told("g.json", "d" * 40)]
    model = SimpleNamespace(sha=COMMITS["main"], siblings=files)
    fetched = []
    monkeypatch.setattr(hub, "_fetch_all", lambda *given: fetched.append(given[3]))
    hub._fill("owner/model", model, ["*.json"], str(tmp_path), [])
    assert [*fetched[0]] == ["d" * 40]


def test_the_library_brings_a_file_that_is_too_big_for_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(*_: str, cache_dir: Path, **__: str) -> None:
        assert not left.exists() and cache_dir == tmp_path
        (blobs / BLOB).touch()

    blobs = tmp_path / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    left = blobs / f"{BLOB}.0123abcd.incomplete"
    left.touch()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", bring)
    part = hub.Part(BIG, 60 * 10**9)
    hub._fetch(part, "owner/model", COMMITS["main"], blobs.parent, BLOB)
    assert (part.done_bytes, part.stage) == (part.total_bytes, "done")


def test_a_terminal_shows_a_bar_for_each_file_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    one = hub.Part("one.safetensors", 4_000_000, 1_000_000, stage="downloading")
    two = hub.Part("two.safetensors", 4_000_000, 4_000_000, 3_000_000, "checking")
    with downloads._shown("owner/model") as show:
        show(downloads.Progress(0, 0))
        show(downloads.Progress(5_000_000, 8_000_000, [one, two]))
        time.sleep(0.3)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stderr.getvalue())  # type: ignore[attr-defined]
    assert re.search(r"downloading owner/model .* 5\.0/8\.0 MB", said)
    assert re.search(r"\n  one\.safetensors .* 1\.0/4\.0 MB", said)
    assert re.search(r"\n  checking two\.safetensors .* 3\.0/4\.0 MB", said)


def test_a_line_of_the_log_names_a_few_files(caplog: pytest.LogCaptureFixture) -> None:
    show = downloads._lines("owner/model")
    files = [hub.Part(f"{i}.safetensors", 100, 10 * i, stage="downloading") for i in range(5)]
    with caplog.at_level(logging.INFO, "deltic.server"):
        show(downloads.Progress(2_000_000_000, 4_000_000_000, files))
        show(downloads.Progress(3_000_000_000, 4_000_000_000, files))
    assert [record.message for record in caplog.records] == [
        "downloading owner/model: 2.00 of 4.00 GB; 0.safetensors 0%; 1.safetensors 10%; 2.safetensors 20%; 2 more"
    ]


def test_a_damaged_file_of_the_cache_is_named_by_its_place(tmp_path: Path) -> None:
    blob, link, own = tmp_path / "blobs" / "blob", tmp_path / BIG, tmp_path / "own.safetensors"
    blob.parent.mkdir()
    for file in blob, tmp_path / "kept":
        file.write_bytes((2).to_bytes(8, "little") + b"{")
    link.symlink_to(blob)
    own.symlink_to(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=f"{link}: damaged .*; delete {blob} and start again"):
        read_header(link)
    for file in blob, own:  # nobody is told to delete what a link of his own leads to
        with pytest.raises(CheckpointError, match=f"{file}: damaged .*; download it again"):
            read_header(file)


def test_what_is_here_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PROGRAM", ("/no/such/program",))
    for config in (EngineConfig(), EngineConfig(dummy="qwen3.5-0.8b"), EngineConfig(model=str(tmp_path))):
        assert go(config) == config
    with pytest.raises(CheckpointError, match=r"--revision is of a name on the hub, and this is a path"):
        resolve_model(tmp_path, revision="main")
    with pytest.raises(ConfigError, match="--revision needs a model name of the hub"):
        resolve(EngineConfig, {"revision": "main"}, {})
    with pytest.raises(OSError):
        go(EngineConfig(model="owner/model"))


def demo_files() -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in DEMO.iterdir()
        if file.suffix in (".json", ".jinja") and file.stat().st_size < 10_000_000
    }


def test_a_server_of_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(demo_files()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with server_of(engine={"model": "owner/model"}) as server:
            url = server.url()
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "owner/model"
            n_asked = len(hub.asked)
            server.process.terminate()
            assert server.end() == 0
        assert len(hub.asked) == n_asked


def test_a_server_that_downloads_tells_and_obeys_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with hub_with(SMALL, rate=4_000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with server_of(engine={"model": "owner/model"}, port=port, root_path="/api") as server:
            wait_for(lambda: any("downloading owner/model" in line for line in list(server.log)))
            told = httpx.get(f"http://127.0.0.1:{port}/api/ready")
            assert (told.status_code, told.json()["loading"]["stage"]) == (503, "downloading owner/model")
            other = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={})
            assert other.status_code == 503 and other.headers["retry-after"]
            assert "downloading owner/model: " in other.json()["error"]["message"]
            for path in ("/api/api/chat", "/api/v1/messages"):  # each in the form of its API
                said = httpx.post(f"http://127.0.0.1:{port}{path}", json={}).json()
                told = (
                    said["error"] if path == "/api/api/chat" else said["error"]["message"] * (said["type"] == "error")
                )
                assert told.startswith("downloading owner/model: ")
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions").status_code == 415, "it may be a page"
            page = httpx.get(f"http://127.0.0.1:{port}/api/")
            assert page.status_code == 200 and page.content == INDEX and page.headers["content-security-policy"]
            script = httpx.get(f"http://127.0.0.1:{port}/api/page/{VERSION}/main.js")
            assert script.content == FILES["main.js"]
            known = {"if-none-match": page.headers["etag"]}
            assert httpx.get(f"http://127.0.0.1:{port}/api/", headers=known).status_code == 304
            rebound = httpx.get(f"http://127.0.0.1:{port}/", headers={"host": "rebound.example"})
            assert rebound.status_code == 403
            assert f"listening on http://127.0.0.1:{port}/api (" in "".join(server.log)
            server.process.send_signal(signal.SIGINT)
            assert server.end() == 0
        said = "".join(server.log)
        assert said.endswith("stopped\n") and "Traceback" not in said


def test_a_tokenizer_of_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, other / name)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}, said the other")
    config = EngineConfig(tokenizer=str(other))
    assert (text_directory(config), tokenizer_directory(config)) == (DEMO, other)
    engine = FakeEngineClient()
    engine.config = config  # type: ignore[attr-defined]
    service = _service(Server(ServerConfig()), Served(("a",), ModelConfig(), engine))  # type: ignore[arg-type]
    assert service.template is not None
    ids = service.template.render([{"role": "user", "content": "Hi"}]).ids
    assert service.tokenizer.decode(ids) == "Hi, said the other"
    shape = ModelShape.from_directory(DEMO)
    plain = n_real_ids(EngineConfig(), DEMO, shape)
    assert n_real_ids(config, DEMO, shape) == plain
    with pytest.raises(CheckpointError, match=f"has ids up to {plain - 1}, but the model's vocabulary has 1000"):
        n_real_ids(config, DEMO, dataclasses.replace(shape, vocab_size=1000))
    (other / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokenizer_directory(config)
    client = FakeSpeechClient()
    client.config = EngineConfig(dummy="qwen3-tts-0.6b", tokenizer=str(DEMO))
    with pytest.raises(ConfigError, match="--tokenizer is for models that write"):
        _service(Server(ServerConfig()), Served(("a",), ModelConfig(), client))  # type: ignore[arg-type]


def test_a_tokenizer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = go(EngineConfig(tokenizer="owner/model", download_dir=tmp_path))
        assert found is not None and found.tokenizer is not None and found.model == BUILT_IN
        assert sorted(file.name for file in Path(found.tokenizer).iterdir()) == ["config.json", "tokenizer.json"]


def test_a_block_drafter_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched before the engine starts, as the model is."""
    with hub_with(SMALL) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = go(EngineConfig(draft_model="owner/model", download_dir=tmp_path))
        assert found is not None and (Path(found.draft_model or "") / "config.json").is_file()


def test_the_lines_of_a_download_are_json() -> None:
    said = downloads.Progress(1, 2, [hub.Part("a", 2, 1, stage="downloading")])
    file = {"name": "a", "total_bytes": 2, "done_bytes": 1, "checked_bytes": 0, "stage": "downloading"}
    assert json.loads(msgspec.json.encode(said)) == {
        "type": "progress",
        "done_bytes": 1,
        "total_bytes": 2,
        "files": [file],
    }


def test_what_a_library_prints_is_no_word_of_a_download() -> None:
    async def go() -> Path:
        lines = asyncio.StreamReader()
        lines.feed_data(b"a notice of some library\n{}\n")
        for said in (downloads.Progress(1, 2), downloads.Outcome(directory="/models/x")):
            lines.feed_data(msgspec.json.encode(said) + b"\n")
        lines.feed_eof()
        return await downloads._read(lines, "x", shown.append)

    shown: list[downloads.Progress] = []
    assert asyncio.run(go()) == Path("/models/x") and len(shown) == 1


@pytest.mark.parametrize("moves", [True, False])
def test_who_waits_for_a_server_waits_as_long_as_it_gets_on(moves: bool) -> None:
    """A download may take hours; one that stands still is given up."""
    began_s = time.monotonic()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        done = time.monotonic() - began_s if moves else 0.0
        body = {"status": "starting", "loading": {"stage": "downloading", "done": done}}
        await JSONResponse(body, 200 if done > 2 else 503)(scope, receive, send)

    with served(app) as url, (DEMO / "README.md").open() as log:
        server = LocalServer.__new__(LocalServer)
        server.url, server.api_key = url, "k"
        server.process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
        server.log = log  # type: ignore[assignment]
        if moves:
            asyncio.run(server.wait_ready(timeout_s=1.0))
            assert time.monotonic() - began_s > 2
        else:
            with pytest.raises(ServerFailed, match="got no further for 1 s"):
                asyncio.run(server.wait_ready(timeout_s=1.0))


# What a plan reads of a model on the hub.


def tensors_file(tensors: dict[str, tuple[str, list[int], bytes | int]], padding: int = 0) -> Long:
    """A safetensors file: of each tensor its type, shape, and values, or how many bytes of zeros."""
    fields: dict[str, Any] = {"__metadata__": {"padding": "x" * padding}}
    values, at = b"", 0
    for name, (dtype, shape, data) in tensors.items():
        n_bytes = data if isinstance(data, int) else len(data)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n_bytes]}
        if isinstance(data, bytes):
            assert len(values) == at, "values come first"
            values += data
        at += n_bytes
    said = json.dumps(fields).encode()
    said += b" " * (-len(said) % 8)
    return Long(len(said).to_bytes(8, "little") + said + values, 8 + len(said) + at)


WIDE = {"model.a.weight": ("BF16", [1 << 15, 1 << 15], 1 << 31)}
WANTED = Download("owner/model", ALL_FILES)


def test_an_outline_has_headers_and_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {f"m.{i}.weight_shape": ("I64", [2], i.to_bytes(8, "little") * 2) for i in range(200)}
    files = {
        "config.json": b'{"a": 1}',
        "tokenizer.json": b"t" * 5_000_000,
        "chat_template.jinja": b"x",
        "README.md": b"x",
        "model-1.safetensors": tensors_file(shapes | WIDE),
        "model-2.safetensors": tensors_file({"model.b.weight": WIDE["model.a.weight"]}, padding=3 * HEAD_BYTES),
    }
    with hub_with(files) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        folder = outline(WANTED, tmp_path / "a")
        assert model_name(EngineConfig(model=str(folder))) == "owner/model"
        assert {path.name for path in folder.iterdir()} == files.keys() - {"README.md", "tokenizer.json"}
        for name in ("model-1.safetensors", "model-2.safetensors"):
            stat = (folder / name).stat()
            assert stat.st_size == len(files[name]) and stat.st_blocks * 512 < 1_000_000, "holes take no room"
        header, _ = read_header(folder / "model-1.safetensors")
        read = MappedFiles().read
        assert [list(read(header[f"m.{i}.weight_shape"])) for i in (0, 7, 199)] == [[0, 0], [7, 7], [199, 199]]
        assert header["model.a.weight"].shape == (1 << 15, 1 << 15)
        assert len(read_header(folder / "model-2.safetensors")[0]) == 1
        assert sum(there.sent.values()) < 5 * HEAD_BYTES + 50_000
        assert not (tmp_path / "home").exists(), "nothing is put into the cache"


def test_orders_of_columns_are_read_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = b"".join(i.to_bytes(4, "little") for i in range(30_000))
    tensors: dict[str, tuple[str, list[int], bytes | int]] = {"m.g_idx": ("I32", [30_000], order)}
    for said in ("false", "true"):
        config = f'{{"quantization_config": {{"desc_act": {said}}}}}'.encode()
        files = {"config.json": config, "tokenizer.json": b"t", "model.safetensors": tensors_file(tensors | WIDE)}
        with hub_with(files) as there:
            monkeypatch.setenv("HF_ENDPOINT", there.url)
            file = outline(WANTED, tmp_path / said) / "model.safetensors"
        last = int(MappedFiles().read(read_header(file)[0]["m.g_idx"])[-1])
        assert last == (29_999 if said == "true" else 0)


def test_an_outline_of_a_gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header has the vocabulary: it is read until it ends, however long that is."""
    n = 60_000
    texts = b"".join(len(t).to_bytes(8, "little") + t for t in (b"token%d" % i for i in range(n)))
    key = b"tokenizer.ggml.tokens"
    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 1)
        + struct.pack("<Q", len(key))
        + key
        + struct.pack("<IIQ", 9, 8, n)
        + texts
    )
    head += struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 1 << 15, 1 << 15, 1, 0)
    size = -(-len(head) // 32) * 32 + (1 << 31)
    files = {"x-Q4_K_M.gguf": Long(head, size), "x-Q8_0.gguf": Long(head, size), "mmproj-F16.gguf": Long(head, size)}
    with hub_with(files) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        file = outline(Download("owner/model", ALL_FILES), tmp_path)
        assert file.name == "x-Q4_K_M.gguf" and tower_beside(file) == file.with_name("mmproj-F16.gguf")
        model = open_gguf(file)
        assert model.get("tokenizer.ggml.tokens")[-1] == "token59999" and model.tensors["w"].shape == (1 << 15, 1 << 15)
        assert max(there.sent.values()) < 2 * len(head) and "x-Q8_0.gguf" not in there.sent
    with hub_with({"x.gguf": b"GGUF" + bytes(99)}) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        with pytest.raises(CheckpointError, match="GGUF version 0"):
            open_gguf(outline(WANTED, tmp_path / "damaged"))


@pytest.mark.parametrize(
    ("settings", "files", "complaint"),
    [
        (
            {"ranges": False},
            {},
            "sends whole files where a part is asked for; download the model, and plan its directory",
        ),
        ({"gated": True}, {}, "owner/model: gated on the hub; accept its terms"),
        ({"down": True}, {}, "not .*wholly.* in the download cache, and the hub cannot be reached"),
        ({}, {"tokenizer.json": None}, r"owner/model: no tokenizer\.json and no vocab\.json"),
    ],
    ids=["ranges", "gated", "down", "tokenizer"],
)
def test_an_outline_that_cannot_be_had(
    settings: dict[str, Any], files: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"config.json": b"{}", "tokenizer.json": b"t", "model.safetensors": tensors_file(dict(WIDE))} | files
    with hub_with({name: data for name, data in there.items() if data is not None}, **settings) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        with pytest.raises(CheckpointError, match=complaint):
            outline(WANTED, tmp_path)
        assert sum(fake.sent.values()) < 1_000_000
        if "tokenizer.json" in files:
            assert (outline(WANTED, tmp_path, has_tokenizer=True) / "config.json").exists()


def test_an_outline_takes_what_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Download("owner/model", ALL_FILES, None, str(tmp_path / "cache"))
    with hub_with(SMALL) as there:
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        whole = hub.download(wanted)
        there.sent.clear()
        folder = outline(wanted, tmp_path / "outline")
        assert not there.sent and (folder / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert outline(wanted, tmp_path / "outline") == whole, "the hub has gone"
