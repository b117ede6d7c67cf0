"""Models on this disk: which are there, what each is called, what is missing of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from deltic.config import EngineConfig
from deltic.models.checkpoint import DEMO, model_name, resolve_model
from deltic.models.fields import CheckpointError
from deltic.server.local_models import LocalModel, local_models, removal, why_not
from tests.fake_hub import COMMITS, hub_with

WEIGHTS = {"config.json": b"{}", "tokenizer.json": b"t" * 50, "model.safetensors": b"w" * 4000}
GGUF = {
    "model-Q4_K_M.gguf": b"GGUF" + bytes(500),
    "model-UD-Q4_K_M.gguf": b"GGUF" + bytes(400),
    "BF16/model-BF16-00001-of-00002.gguf": b"GGUF" + bytes(900),
    "BF16/model-BF16-00002-of-00002.gguf": b"GGUF" + bytes(800),
    "mmproj-F16.gguf": b"GGUF" + bytes(70),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def named(models: list[LocalModel]) -> dict[str, LocalModel]:
    assert len({model.name for model in models}) == len(models)
    return {model.name: model for model in models}


def test_an_empty_disk_has_none(tmp_path: Path) -> None:
    assert local_models() == [] == local_models(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"no such directory\. Name one that holds models"):
        local_models(None, [tmp_path / "nowhere"])


def test_models_of_the_cache_have_the_names_that_serve_takes(tmp_path: Path) -> None:
    with hub_with(GGUF):
        paths = {what: resolve_model(f"owner/model:{what}") for what in ("Q4_K_M", "UD-Q4_K_M", "BF16")}
        there = named(local_models())
        assert there.keys() == {f"owner/model:{what}" for what in paths}
        for what, path in paths.items():
            model = there[f"owner/model:{what}"]
            assert model.path == path == resolve_model(model.name) and not model.missing
            assert model.revision == COMMITS["main"]
        tower = len(GGUF["mmproj-F16.gguf"])
        assert there["owner/model:Q4_K_M"].n_bytes == 504 + tower
        assert there["owner/model:BF16"].n_bytes == 904 + 804, "whose folder has no tower"


def test_of_several_revisions_the_one_that_the_name_stands_for(tmp_path: Path) -> None:
    with hub_with(WEIGHTS, old={"config.json": b'{"old": 1}'}):
        resolve_model("owner/model")
        resolve_model("owner/model", revision="old")
        (model,) = local_models()
    assert model.name == "owner/model" and model.path.name == COMMITS["main"]
    assert model.n_bytes == sum(map(len, WEIGHTS.values()))
    assert model_name(EngineConfig(model=str(model.path))) == model.name
    os.utime(model.path / "model.safetensors", (1000, 1000))
    assert local_models()[0].used_s == 1000
    (old,) = local_models(None, [model.path.parent / COMMITS["old"]])[:1]
    assert old.path.name == COMMITS["old"]
    with pytest.raises(CheckpointError, match="deltic rm takes the name that deltic list has"):
        removal(old)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    half = cache / "models--owner--half" / "blobs" / f"{'a' * 64}.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(100))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    for name in ("config.json", "model-1.safetensors", "model.safetensors.index.json"):
        file = cache / "models--owner--part" / "snapshots" / "c" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(index) if "index" in name else "{}")
    text_only = cache / "models--owner--tokenizer" / "snapshots" / "c" / "tokenizer.json"
    text_only.parent.mkdir(parents=True)
    text_only.write_text("{}")
    there = named(local_models())
    assert there.keys() == {"owner/half", "owner/part"}, "and what has no weights is no model"
    assert there["owner/half"].n_bytes == 100 and "deltic pull goes on" in there["owner/half"].missing
    assert there["owner/part"].missing == "model-2.safetensors"


def test_models_of_a_directory(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(DEMO, models / "demo")
    (models / "owner" / "repo").mkdir(parents=True)
    for name in ("a-Q8_0.gguf", "b-Q4_0-00001-of-00002.gguf", "mmproj-F16.gguf"):
        (models / "owner" / "repo" / name).write_bytes(b"GGUF" + bytes(96))
    (models / ".hidden").mkdir()
    shutil.copy(models / "owner" / "repo" / "a-Q8_0.gguf", models / ".hidden")
    (models / "demo" / "speech_tokenizer").mkdir()
    (models / "demo" / "speech_tokenizer" / "model.safetensors").write_bytes(bytes(1000))
    there = named(local_models(None, [models]))
    assert there[str(models / "demo")].n_bytes == 1000 + sum(file.stat().st_size for file in DEMO.iterdir())
    repo = models / "owner" / "repo"
    assert there.keys() == {str(models / "demo"), str(repo / "a-Q8_0.gguf"), str(repo / "b-Q4_0-00001-of-00002.gguf")}
    assert there[str(repo / "a-Q8_0.gguf")].n_bytes == 200
    assert there[str(repo / "b-Q4_0-00001-of-00002.gguf")].missing == "1 of its 2 files"
    assert not why_not(models / "demo") and "GGUF version 0" in why_not(repo / "a-Q8_0.gguf")
    (models / "demo" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert "this is a Llama" in why_not(models / "demo")


def test_what_is_deleted_is_what_no_other_model_needs(tmp_path: Path) -> None:
    with hub_with(GGUF):
        for what in ("Q4_K_M", "UD-Q4_K_M"):
            resolve_model(f"owner/model:{what}")
        before = named(local_models())
        small = removal(before["owner/model:UD-Q4_K_M"])
        assert small.n_bytes == len(GGUF["model-UD-Q4_K_M.gguf"]), "the tower is the other's, too"
        small.run()
        (left,) = local_models()
        assert left == before["owner/model:Q4_K_M"] and left.path.read_bytes() == GGUF["model-Q4_K_M.gguf"]
        blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
        assert len(list(blobs.iterdir())) == 2, "its blob is gone"
        assert resolve_model("owner/model:UD-Q4_K_M").read_bytes() == GGUF["model-UD-Q4_K_M.gguf"], "it comes again"
        removal(named(local_models())["owner/model:UD-Q4_K_M"]).run()
        whole = removal(left)
        assert whole.n_bytes == left.n_bytes
        whole.run()
    assert not local_models() and not blobs.exists()


def test_revisions_that_share_a_file_go_together(tmp_path: Path) -> None:
    with hub_with(WEIGHTS, old={"config.json": b'{"old": 1}'}):
        resolve_model("owner/model")
        resolve_model("owner/model", revision="old")
    (model,) = local_models()
    gone = removal(model)
    assert gone.n_bytes == sum(map(len, WEIGHTS.values())) + len(b'{"old": 1}'), "the weights count once"
    gone.run()
    assert not local_models() and not (tmp_path / "hub" / "models--owner--model").exists()


def test_what_is_not_in_the_cache_is_not_deleted(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    (model,) = local_models(None, [tmp_path])
    with pytest.raises(CheckpointError, match=r"not in the download cache .* Delete its files yourself"):
        removal(model)
    half = tmp_path / "hub" / "models--owner--half" / "blobs" / f"{'a' * 64}.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(100))
    (model,) = local_models()
    gone = removal(model)
    gone.run()
    assert gone.n_bytes == 100 and not local_models()
