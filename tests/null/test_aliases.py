"""Short names of models: what each stands for, and what is said of one that is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltic.aliases import Published, find, published, short_names, spelled_out
from deltic.commands.doctor import MODELS
from deltic.config import BUILT_IN, ConfigError, EngineConfig, ModelConfig
from deltic.config_sources import resolve
from deltic.models.gguf import SUFFIX
from deltic.models.hub import hub_name
from deltic.models.qwen.published import PUBLISHED
from deltic.models.tts.shape import PUBLISHED_SPEECH
from deltic.server.serve import prepared


@pytest.mark.parametrize("model", published(), ids=lambda model: model.names[0])
def test_a_line_of_the_table_can_be_so(model: Published) -> None:
    repository = hub_name(model.hub)
    assert repository is not None and repository.repository == model.hub.partition(":")[0]
    assert all(name == name.lower() and hub_name(name) is None for name in model.names)
    assert model.revision is None or re.fullmatch("[0-9a-f]{40}", model.revision)
    assert (model.format in ("bfloat16", "FP8")) != model.hub.endswith(SUFFIX), "a GGUF model has its file"
    assert model.shape in {**PUBLISHED, **PUBLISHED_SPEECH}
    if model.n_bytes is not None:
        bits = int(re.findall(r"Q(\d)", model.format)[0])
        per_weight = 8 * model.n_bytes / PUBLISHED[model.shape].n_params
        assert bits <= per_weight < bits + 4, "mixtures keep some matrices in more bits, and an embedding, too"


def test_names_are_one_models() -> None:
    names = [name for model in published() for name in model.names]
    assert len(set(names)) == len(names)
    assert len({(model.hub, model.revision) for model in published()}) == len(published())
    assert {model.hub for model in published()} >= set(MODELS.values()), "what doctor names has a short name"


def test_a_short_name_is_spelled_out_wherever_settings_are_read() -> None:
    small = find("QWEN3.5:4b")
    assert small is not None and small.hub == "unsloth/Qwen3.5-4B-GGUF:Qwen3.5-4B-Q4_K_M.gguf"
    for config in (
        resolve(EngineConfig, {"model": "qwen3.5:4b"}),
        resolve(EngineConfig, {}, {"DELTIC_MODEL": "qwen3.5:4b-q4"}),
        resolve(EngineConfig, {}, table={"model": "Qwen3.5:4B"}),
    ):
        assert (config.model, config.revision) == (small.hub, small.revision)
        assert short_names(config) == ("qwen3.5:4b",)
    assert resolve(EngineConfig, {"model": "qwen3.5:4b", "revision": "main"}).revision == "main"
    for name in (BUILT_IN, "owner/model", "owner/model:Q4_K_M", "a-directory"):
        assert spelled_out(name) == (name, None)


def test_a_server_answers_to_the_short_name_and_to_the_hubs() -> None:
    config = resolve(EngineConfig, {"model": "qwen3.5:4b"})
    (model,) = prepared([(config, ModelConfig())], 1)
    assert model.names == ("qwen3.5:4b", "unsloth/Qwen3.5-4B-GGUF:Qwen3.5-4B-Q4_K_M.gguf")
    (model,) = prepared([(config, ModelConfig(served_model_name=("chat",)))], 1)
    assert model.names == ("chat",)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "the name of the model is empty"),
        ("  ", "the name of the model is empty"),
        ("qwen3.5:4bb", r"Did you mean qwen3\.5:4b\?"),
        ("qwen3.6:34b-q4", r"Did you mean qwen3\.6:35b-q4\?"),
        ("qwen3.5", r"There are qwen3\.5:0\.8b, "),
        ("qwen3-tts:9b", r"qwen3-tts:"),
        ("llama3.2:1b", r"llama3\.2:1b: no short name of a model\. Any model of the hub is named owner/model"),
    ],
)
def test_another_name_is_refused_with_those_that_are_like_it(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(EngineConfig, {"model": name})


def test_a_path_of_such_a_name_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3.5:4b").mkdir()
    assert resolve(EngineConfig, {"model": "qwen3.5:4b"}).model == "qwen3.5:4b"
