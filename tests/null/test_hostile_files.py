"""Files of a checkpoint that are damaged or meant to harm: each is read, or refused by the error that is documented, soon.

The weights' own files are in tests/cpu/test_hostile_weights.py.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from deltic.config import EngineConfig
from deltic.engine.messages import MAX_BIASES
from deltic.models.checkpoint import DEMO, n_real_ids
from deltic.models.dflash.shape import DrafterShape
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.qwen.shape import MAX_END_IDS, ModelShape
from deltic.server.chat.template import ChatTemplate
from deltic.server.errors import ApiError
from deltic.text import SamplingDefaults, Tokenizer, TokenizerError
from tests.null.test_drafter_shapes import DFLASH, DFLASH2, DSPARK, SPECULATORS
from tests.tiny_config import tiny_config

REFUSALS = (CheckpointError, UnsupportedModelError, TokenizerError)
DEEP = "[" * 200_000

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308, -0.0, math.inf, math.nan, 10**12, 4300])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(p for key in keys for p in places(value[key], (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with another at a place."""
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


def mutated(original: Any, extra: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """`original` with up to three values changed; `extra`: fields that it might have besides."""
    whole = (extra or {}) | original

    @st.composite
    def draw(draw: Callable[[Any], Any]) -> Any:
        value = whole
        for _ in range(draw(st.integers(1, 3))):
            value = put(value, draw(st.sampled_from(places(value))), draw(JSON))
        return value

    return draw()


CONFIG = json.loads((DEMO / "config.json").read_text())
ROPE = {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 4.0, "original_max_position_embeddings": 4096}
YARN = {**CONFIG, "rope_parameters": {**CONFIG["rope_parameters"], "rope_type": "yarn"} | ROPE}


FLASH = tiny_config("flash", tied=False, layout="flat")
HASH = {"ngram_hash": {"multipliers": [3, 5, 7], "primes": [2] * 8, "offsets": [0] * 8, "n_rows": 16, "eos_id": 256}}


@settings(deadline=2000, max_examples=400, suppress_health_check=list(HealthCheck))
@given(mutated(CONFIG, {"text_config": None}) | mutated(YARN) | mutated(FLASH) | mutated(FLASH | HASH))
def test_config(config: Any) -> None:
    if isinstance(config, dict):
        try:
            shape = ModelShape.from_config(config, {})
        except (CheckpointError, UnsupportedModelError):
            return
        assert shape.state_bytes > 0 and shape.n_layers < 10_000
        assert all(math.isfinite(frequency) for frequency in shape.inv_freq())


@settings(deadline=2000, max_examples=400, suppress_health_check=list(HealthCheck))
@given(st.one_of(*(mutated(config) for config in (DFLASH, DFLASH2, DSPARK, SPECULATORS))))
def test_config_of_a_block_drafter(config: Any) -> None:
    if isinstance(config, dict):
        try:
            shape = DrafterShape.from_config(config)
        except UnsupportedModelError:
            return
        assert shape.page_bytes > 0 and shape.most_guesses > 0 and len(shape.windows) == len(shape.are_causal)
        assert all(math.isfinite(frequency) for frequency in shape.inv_freq())


@pytest.mark.parametrize("eos_id", [-1, FLASH["vocab_size"], 2**31 - 1, 2**32 - 1, True, None])
def test_an_end_that_is_no_id_hashes_to_no_row(eos_id: object) -> None:
    """It would be the address of a row in front of the table, or behind it."""
    ModelShape.from_config(FLASH | HASH)
    with pytest.raises(UnsupportedModelError, match="eos_id"):
        ModelShape.from_config(FLASH | {"ngram_hash": HASH["ngram_hash"] | {"eos_id": eos_id}})


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**7, "layer_types": None}, {"architectures": [[]]}])
def test_configs_that_once_hung_or_crashed(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        ModelShape.from_config(CONFIG | change)


@pytest.mark.parametrize(
    "value", [{"temperature": -1}, {"top_p": 7}, {"top_k": 1e30}, {"repetition_penalty": 0}, {"min_p": math.nan}]
)
def test_defaults_that_no_request_may_have(tmp_path: Path, value: dict[str, float]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(TokenizerError, match=next(iter(value))):
        SamplingDefaults.load(tmp_path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the built-in model's text files."""
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def read_all(directory: Path) -> None:
    """As both processes do at their start."""
    shape = ModelShape.from_directory(directory)
    tokenizer = Tokenizer.load(directory)
    tokenizer.decode(tokenizer.encode("Hello <think> <|im_end|> é", "parse"))
    ChatTemplate.load(directory, tokenizer)
    SamplingDefaults.load(directory)
    n_real_ids(EngineConfig(model=str(directory)), directory, shape)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b'{"a": 1',
        b"\xff\xfe",
        b'{"model": {"vocab": 3}}',
        DEEP.encode(),
        b'{"a": ' + DEEP.encode(),
        b'{"eos_token_id": ' + b"1" * 5000 + b"}",
    ],
    ids=range(9),
)
def test_a_broken_file(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    if name in ("generation_config.json", "tokenizer_config.json"):
        with contextlib.suppress(REFUSALS):
            read_all(directory)
    else:
        with pytest.raises(REFUSALS):
            read_all(directory)


def test_more_end_ids_than_a_request_could_ban(directory: Path) -> None:
    """Refused at the start, not by every request."""
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": list(range(MAX_END_IDS - 8))}))
    shape = ModelShape.from_directory(directory)
    assert MAX_END_IDS - 8 <= len(shape.eos_token_ids) <= MAX_END_IDS == MAX_BIASES // 2
    file.write_text(json.dumps({"eos_token_id": list(range(MAX_END_IDS + 1))}))
    with pytest.raises(UnsupportedModelError, match=r"eos_token_id.*51\d ids.*at most 512"):
        ModelShape.from_directory(directory)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@settings(deadline=2000, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_small_files(directory: Path, name: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer.load(DEMO)
    original = json.loads((DEMO / name).read_text())
    extra = {
        "chat_template": [{"name": "default", "template": "x"}], "eos_token": {"content": "<|im_end|>"},
        "temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    (directory / name).write_text(json.dumps(data.draw(mutated(original, extra))))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    try:
        ChatTemplate.load(directory, tokenizer)
        defaults = SamplingDefaults.load(directory)
    except REFUSALS:
        return
    assert 0 <= defaults.temperature <= 100 and 0 <= defaults.top_p <= 1 and 0 <= defaults.min_p <= 1
    assert defaults.top_k >= -1 and 0 < defaults.repetition_penalty <= 100


TOKENIZER = json.loads((DEMO / "tokenizer.json").read_text())
SMALL_TOKENIZER = TOKENIZER | {
    "model": TOKENIZER["model"]
    | {"vocab": dict(list(TOKENIZER["model"]["vocab"].items())[:300]), "merges": TOKENIZER["model"]["merges"][:5]}
}


@settings(deadline=5000, max_examples=100, suppress_health_check=list(HealthCheck))
@given(value=mutated(SMALL_TOKENIZER))
def test_tokenizer(directory: Path, value: Any) -> None:
    (directory / "tokenizer.json").write_text(json.dumps(value))
    try:
        tokenizer = Tokenizer.load(directory)
        n_real_ids(EngineConfig(model=str(directory)), directory, ModelShape.from_directory(DEMO))
    except REFUSALS:
        return
    try:
        tokenizer.decode(tokenizer.encode("Hello <think> <|im_end|> é", "parse"))
    except Exception as error:  # the library's own: a request's, not the server's end
        assert type(error) is Exception, error


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in b %}" * 50 + "{% endfor %}" * 50,
        "{{ a | nofilter }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
    ],
    ids=range(7),
)
def test_a_template_that_does_not_compile(source: str) -> None:
    tokenizer = Tokenizer.load(DEMO)
    try:
        template = ChatTemplate({"default": source}, tokenizer)
    except TokenizerError:
        return
    with pytest.raises(ApiError) as raised:
        template.render([{"role": "user", "content": "x"}])
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ lipsum.__globals__.os }}",
        "{{ messages | map(attribute='__class__.__base__') | list }}{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ '%s' % nothing.more }}",
    ],
    ids=range(8),
)
def test_a_template_that_reaches_out(source: str) -> None:
    template = ChatTemplate({"default": source}, Tokenizer.load(DEMO))
    with pytest.raises(ApiError) as raised:
        template.render([{"role": "user", "content": "x"}])
    assert raised.value.status == 400


def test_without_asserts_the_same_files_are_refused() -> None:
    """`python -O` leaves asserts out: none of them may be what refuses a file. pytest's own stay, as it writes them anew."""
    pytest.importorskip("torch")  # of the tests that are run
    refusals = "hostile_header or not_supported_is_named or refusals_name or sizes_of_any or contradicts"
    files = ["tests/null/test_gguf.py", "tests/null/test_quantised_files.py"]
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", refusals, *files]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, env=env)
    assert ran.returncode == 0, ran.stdout[-3000:]
