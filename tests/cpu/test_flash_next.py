"""Qwen3.8-Flash-Next: the oracle against the published model code, and what is read of its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.models.fields import CheckpointError
from deltic.models.packed import map_packed, pack_model
from deltic.models.qwen import ngram_table
from deltic.models.qwen.ngram_table import check_ngram_table, dummy_ngram_table, dummy_table_bytes, ngram_table_of
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import DraftHead, Moe, check_weights, dummy_weights, load_weights, stored_shape
from deltic.ops.arrays import Array, bfloat16
from deltic.runtime.build import build_runner, needs_of
from deltic.runtime.cpu.device import Cpu
from tests.cpu.test_reference import needs_transformers, prompt, published_model
from tests.plain import plain
from tests.reference import flash_next
from tests.reference.layers import linear
from tests.reference.model import draft_states, draft_trunk, forward, trunk
from tests.tensors import TiledOrder
from tests.tiny import tiny_checkpoint
from tests.tiny_config import TOKEN_ID
from tests.tiny_gguf import tiny_gguf
from tests.tiny_quantised import tiny_quantised

END = TOKEN_ID["<|endoftext|>"]
N_TOKENS = 203  # of 50 whole groups 16 are chosen, and three tokens are behind them


def ids_with_ends() -> list[int]:
    """A prompt with ends of text at its start, alone, two in a row, and shortly before its end."""
    ids = prompt(N_TOKENS)
    for at in (0, 40, 41, 90, N_TOKENS - 2):
        ids[at] = END
    return ids


def read(path: Path, has_mtp: bool = False) -> tuple[Any, ModelShape]:
    shape = stored_shape(path, ModelShape.from_directory(path), drafts=has_mtp)
    return plain(load_weights(path, shape)[0]), shape


@pytest.fixture
def is_sure(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tensor]:
    """Of the tokens of the last forward: whether no group that is left out has the score of one that is chosen. The
    published order of equals is anybody's.
    """
    kept: list[Tensor] = []
    scores_of = flash_next.index_scores

    def scores(*arguments: Any) -> Tensor:
        kept.append(scores_of(*arguments))
        return kept[-1]

    def sure() -> Tensor:
        n_chosen, found = 16, torch.ones(len(kept[-1]), dtype=torch.bool)
        for t in range(4 * n_chosen + 3, len(found)):
            best = kept[-1][t, : (t + 1) // 4].sort(descending=True).values
            found[t] = best[n_chosen - 1] > best[n_chosen]
        assert found.sum() > len(found) - 9
        return found

    monkeypatch.setattr(flash_next, "index_scores", scores)
    return sure


@needs_transformers
@pytest.mark.parametrize("options", [{}, {"layout": "flat", "tied": True, "experts": "split", "shards": 2}], ids=str)
def test_logits_equal_the_published_model(options: dict[str, Any], is_sure: Callable[[], Tensor]) -> None:
    path = tiny_checkpoint("flash", **options)
    weights, shape = read(path)
    model = published_model(path)
    for ids in ([END], [7], ids_with_ends()):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0]
        found = forward(weights, shape, ids, chunked=True)
        rows = is_sure() if len(ids) > 1 else slice(None)
        torch.testing.assert_close(found[rows], expected[rows], atol=1e-4, rtol=0)


def test_each_part_has_its_share_in_the_logits() -> None:
    """Else the comparison would not see a fault in it."""
    path = tiny_checkpoint("flash")
    weights, shape = read(path)
    ids = ids_with_ends()
    expected = forward(weights, shape, ids, chunked=True)
    ngram_rows = weights.ngram_rows
    weights.ngram_rows = lambda wanted: 0 * ngram_rows(wanted)
    assert (forward(weights, shape, ids, chunked=True) - expected).abs().max() > 0.05
    weights.ngram_rows = ngram_rows
    weights.layers[3].indexer.q_norm = weights.layers[3].indexer.q_norm * 0 - 1  # all scores alike: the first groups
    other = forward(weights, shape, ids, chunked=True)
    assert (other[67:] - expected[67:]).abs().max() > 0.05
    torch.testing.assert_close(
        other[:67], expected[:67], atol=1e-5, rtol=0
    )  # up to 16 groups and three tokens attention is plain


@needs_transformers
def test_a_pictures_tokens_are_hashed_by_their_id_and_turned_by_their_position(is_sure: Callable[[], Tensor]) -> None:
    path = tiny_checkpoint("flash")
    weights, shape = read(path)
    ids, at = ids_with_ends(), slice(50, 86)
    ids[at] = [TOKEN_ID["<|image_pad|>"]] * 36
    embedded = weights.embed[torch.tensor(ids)].float()
    embedded[at] = torch.randn(36, shape.hidden_size, generator=torch.Generator().manual_seed(3)) / 10
    positions = torch.arange(N_TOKENS).repeat(3, 1)
    positions[1, at], positions[2, at] = 50 + torch.arange(36) // 6, 50 + torch.arange(36) % 6
    positions[0, at] = 50
    positions[:, 86:] = torch.arange(56, 56 + N_TOKENS - 86)
    model = published_model(path)
    with torch.no_grad():
        states = model.model.language_model(
            inputs_embeds=embedded[None], position_ids=positions[:, None], ple_input_ids=torch.tensor([ids])
        )
        expected = model.lm_head(states.last_hidden_state)[0]
    found = forward(weights, shape, ids, chunked=True, pictures=(embedded, positions))
    torch.testing.assert_close(found[is_sure()], expected[is_sure()], atol=1e-4, rtol=0)
    as_text = forward(weights, shape, ids, chunked=True, pictures=(embedded, torch.arange(N_TOKENS).repeat(3, 1)))
    assert (found - as_text).abs().max() > 0.05


@needs_transformers
def test_the_integers_of_the_hash_are_the_published_ones() -> None:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as published

    for ngrams, vocab_size, base in (
        (PUBLISHED["qwen3.8-flash-next"].ngrams, 248320, 20_000_000),
        (ModelShape.from_directory(tiny_checkpoint("flash")).ngrams, 512, 1000),
    ):
        assert ngrams is not None
        assert list(ngrams.multipliers) == published._build_layer_multipliers(vocab_size, 3, 0, 1234).tolist()
        assert list(ngrams.primes) == [published._find_nth_prime_after(base - 1, i + 1) for i in range(ngrams.n_heads)]
        assert list(ngrams.offsets) == [sum(ngrams.primes[:i]) for i in range(ngrams.n_heads)]
    assert PUBLISHED["qwen3.8-flash-next"].ngrams.n_rows == 320_001_536  # type: ignore[union-attr]


@needs_transformers
def test_the_draft_head_is_made_of_the_published_layers(is_sure: Callable[[], Tensor]) -> None:
    """The published code has no such head: its first matrices by hand, the rest by the published layers."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as published

    path = tiny_checkpoint("flash", has_mtp=True)
    weights, shape = read(path, has_mtp=True)
    model = published_model(path)
    decoder, config = model.model.language_model, model.config.text_config
    layer, mixer = published.Qwen4ExpTextDecoderLayer(config, 3), published.Qwen4ExpTextGatedResidual(config, False)
    stored = {name[4:]: t.float() for name, t in load_file(path / "model.safetensors").items() if name[:4] == "mtp."}
    for module, start in ((layer, "layers.0."), (mixer, "hyper_connection_mixer.")):
        own = {name.removeprefix(start): t for name, t in stored.items() if name.startswith(start)}
        module.eval().load_state_dict(own, strict=True)
    ids, n = ids_with_ends(), N_TOKENS - 1
    hidden = trunk(weights, shape, ids, chunked=True)[:n]
    with torch.no_grad():
        embedded = decoder.embed_tokens(torch.tensor(ids[1:]))
        norm_e, norm_h = (published.Qwen4ExpTextRMSNorm(size) for size in (shape.hidden_size, shape.stream_size))
        norm_e.weight.copy_(stored["pre_fc_norm_embedding.weight"])
        norm_h.weight.copy_(stored["pre_fc_norm_hidden.weight"])
        of_hidden = norm_h(hidden).unflatten(-1, (4, -1)) @ stored["fc_hidden.weight"].T
        x = (of_hidden + (norm_e(embedded) @ stored["fc_embedding.weight"].T)[:, None]).flatten(1)[None]
        angles = decoder.rotary_emb(x, torch.arange(n).expand(3, 1, n))
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        streams = layer(x, angles, attention_mask=mask)
        expected = model.lm_head(mixer(streams))[0]
    found, rows = draft_trunk(weights, shape, hidden, ids[1:]), is_sure()
    torch.testing.assert_close(found[rows], streams[0][rows], atol=1e-4, rtol=0)
    found = linear(draft_states(weights, shape, hidden, ids[1:]), weights.lm_head, "float32")
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-4, rtol=0)


def test_bfloat16_rules_stay_near_float32() -> None:
    weights, shape = read(tiny_checkpoint("flash"))
    exact, lossy = (forward(weights, shape, prompt(60), p, chunked=True) for p in ("float32", "bfloat16"))
    assert 0 < (exact - lossy).abs().amax(-1).median() < 0.4


def test_equal_scores_choose_the_earlier_groups() -> None:
    weights, shape = read(tiny_checkpoint("flash"))
    indexer = weights.layers[3].indexer
    indexer.q_norm = indexer.q_norm * 0 - 1
    x, positions = torch.randn(100, shape.hidden_size), torch.arange(100)
    inv_freq = torch.tensor(shape.inv_freq(), dtype=torch.float64)
    scores = flash_next.index_scores(x, indexer, shape, positions, inv_freq, "float32")
    chosen = flash_next.chosen_keys(scores, shape.index)
    assert chosen[98].nonzero().ravel().tolist() == [*range(64), 96, 97, 98]
    assert chosen[99].nonzero().ravel().tolist() == [*range(64)]  # its own group is complete, and is not chosen


def changed_table(change: Callable[[dict[str, Tensor]], None], target: Path) -> Path:
    """A tiny checkpoint whose table was changed, by the names behind `ple_embedding.`."""
    shutil.copytree(tiny_checkpoint("flash"), target)
    tensors = load_file(target / "model.safetensors")
    begin = "model.language_model.layers.1.ple.ple_embedding."
    table = {name.removeprefix(begin): tensors.pop(name) for name in list(tensors) if name.startswith(begin)}
    change(table)
    save_file(tensors | {begin + name: tensor for name, tensor in table.items()}, target / "model.safetensors")
    return target


def to_fp8(table: dict[str, Tensor]) -> None:
    for i in range(4):
        name = f"ngram_embedding.shard_{i}.weight"
        table[name] = (table[name].float() / 0.01).to(torch.float8_e4m3fn)
    table["ngram_embedding.weight_scale"] = torch.tensor([0.01], dtype=torch.bfloat16)


def test_a_table_in_fp8_has_one_scale(tmp_path: Path) -> None:
    path = changed_table(to_fp8, tmp_path / "fp8")
    shape = ModelShape.from_directory(path)
    weights = load_weights(path, shape)[0]
    rows, ids = weights.ngram_table, np.arange(0, 8 * 900, 9).reshape(-1, 8)
    assert rows is not None and rows.n_rows == shape.ngrams.n_rows  # type: ignore[union-attr]
    out = np.empty((len(ids), 256), bfloat16)
    rows.gather(ids, out)
    stored = load_file(path / "model.safetensors")
    begin = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_"
    whole = torch.cat([stored[f"{begin}{i}.weight"].float() for i in range(4)])
    expected = (whole[torch.from_numpy(ids)] * torch.tensor(0.01).bfloat16().float()).bfloat16().flatten(1)
    assert (torch.from_numpy(out.astype(np.float32)) == expected.float()).all()


def drop_a_part(table: dict[str, Tensor]) -> None:
    del table["ngram_embedding.shard_2.weight"]


def cut_a_part(table: dict[str, Tensor]) -> None:
    table["ngram_embedding.shard_1.weight"] = table["ngram_embedding.shard_1.weight"][1:].clone()


def other_integers(table: dict[str, Tensor]) -> None:
    table["layer_multipliers"] = table["layer_multipliers"] + 2


def no_scale(table: dict[str, Tensor]) -> None:
    to_fp8(table)
    del table["ngram_embedding.weight_scale"]


def in_nvfp4(table: dict[str, Tensor]) -> None:
    table["ngram_embedding.shard_0.weight_packed"] = torch.zeros(8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_a_part, "3 parts are there, numbered up to 3"),
        (cut_a_part, "part 1 of the table"),
        (other_integers, "the sizes and the seed of config.json"),
        (no_scale, "weight_scale"),
        (in_nvfp4, "shard_0.weight_packed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_table_that_is_not_right_is_refused(
    change: Callable[[dict[str, Tensor]], None], words: str, tmp_path: Path
) -> None:
    path = changed_table(change, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=words):
        load_weights(path, ModelShape.from_directory(path))


def test_a_dummys_table_has_all_rows_and_the_memory_of_a_few() -> None:
    ngrams = PUBLISHED["qwen3.8-flash-next"].ngrams
    assert ngrams is not None
    table = dummy_ngram_table(ngrams, 0)
    assert table.n_rows >= ngrams.n_rows and len(set(table.addresses.tolist())) == 1
    out = np.empty((1, 2560), bfloat16)
    table.gather(np.full((1, 16), ngrams.n_rows - 1), out)
    assert np.isfinite(out.astype(np.float32)).all() and out.astype(bool).any()


@pytest.mark.parametrize("kind", ["parts", "fp8", "blocks", "random"])
def test_a_copy_in_memory_has_the_same_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of its own, and blocks of GGUF as the values that they say."""
    monkeypatch.setattr(ngram_table, "_COPIED_BYTES", 100_000)
    monkeypatch.setattr(ngram_table, "_DUMMY_ROWS", 1000)
    path = tiny_gguf("flash", "Q8_0") if kind == "blocks" else tiny_checkpoint("flash")
    path = changed_table(to_fp8, tmp_path / "fp8") if kind == "fp8" else path
    ngrams = ModelShape.from_directory(path).ngrams
    assert ngrams is not None
    table = dummy_ngram_table(ngrams, 0) if kind == "random" else ngram_table_of(path, ngrams)
    assert table is not None
    taken, told = [], list[tuple[int, int]]()

    def allocate(n_bytes: int) -> Array:
        taken.append(n_bytes)
        return np.full(n_bytes, 255, np.uint8)

    copied = table.in_memory(allocate, lambda done, total: told.append((done, total)))
    assert copied.n_rows == table.n_rows >= ngrams.n_rows and not copied.blocks and not copied.files
    assert copied.rows_per_part != table.rows_per_part or kind == "random"
    assert told[-1][0] == told[-1][1] and len(told) == len(taken) == (1 if kind == "random" else len(copied.parts))
    expected = dummy_table_bytes(ngrams) if kind == "random" else check_ngram_table(path, ngrams, in_memory=True)
    assert sum(taken) == expected
    ids = np.arange(ngrams.n_rows // 8 * 8).reshape(-1, 8)
    rows = [np.empty((len(ids), ngrams.width), bfloat16) for _ in range(2)]
    for one, out in zip((table, copied), rows, strict=True):
        one.gather(ids, out)
    assert rows[0].tobytes() == rows[1].tobytes()


def test_the_draft_head_is_found_and_its_two_matrices_are_one() -> None:
    path = tiny_checkpoint("flash", has_mtp=True)
    shape = stored_shape(path, ModelShape.from_directory(path), drafts=True)
    assert shape.has_draft_head
    weights, notices = load_weights(path, shape)
    head, stored = weights.draft_head, load_file(path / "model.safetensors")
    assert isinstance(head, DraftHead) and not notices
    fc = torch.cat([stored["mtp.fc_embedding.weight"], stored["mtp.fc_hidden.weight"]], 1)
    assert (torch.from_numpy(head.fc.unpack()[0]) == fc.float()).all()
    assert load_weights(path, ModelShape.from_directory(path))[1] == []  # drafts are off: it is not missed


def test_random_weights_have_all_parts() -> None:
    path = tiny_checkpoint("flash", has_mtp=True)
    shape = stored_shape(path, ModelShape.from_directory(path), drafts=True)
    made, read = dummy_weights(shape, 0), load_weights(path, shape)[0]
    assert [name for name, _ in made.named_parts()] == [name for name, _ in read.named_parts()]
    assert made.ngram_table is not None


def test_a_checkpoint_is_read_as_the_config_says_it(tmp_path: Path) -> None:
    """A table in one part, and the connection in front of the head with a factor that it does not use."""

    def join(table: dict[str, Tensor]) -> None:
        parts = [table.pop(f"ngram_embedding.shard_{i}.weight") for i in range(4)]
        table["ngram_embedding.weight"] = torch.cat(parts)

    path = changed_table(join, tmp_path / "one")
    tensors = load_file(path / "model.safetensors")
    tensors["model.language_model.hyper_connection_mixer.block_inject_weight.weight"] = torch.zeros(4, 1024)
    save_file(tensors, path / "model.safetensors")
    shape = ModelShape.from_directory(path)
    found, expected = (ngram_table_of(each, shape.ngrams) for each in (path, tiny_checkpoint("flash")))
    rows = [np.empty((3, 256), bfloat16) for _ in range(2)]
    for table, out in zip((found, expected), rows, strict=True):
        assert table is not None
        table.gather(np.arange(24).reshape(3, 8) * 330, out)
    assert rows[0].tobytes() == rows[1].tobytes()
    load_weights(path, shape)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["layer_types"] = ["linear_attention"] * 3 + ["indexed_attention"]
    assert ModelShape.from_config(config) == ModelShape.from_config(json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize("type", ["BF16", "Q8_0"])
def test_a_gguf_file_is_the_same_model(type: str) -> None:
    """In BF16 all matrices are equal in bits; in Q8_0 the table's rows are what the blocks say."""
    path, source = tiny_gguf("flash", type, has_mtp=True), tiny_checkpoint("flash", layout="flat")
    shape, own = (stored_shape(one, ModelShape.from_directory(one), drafts=True) for one in (path, source))
    assert shape.has_draft_head and not own.has_draft_head
    (found, notices), expected = load_weights(path, shape), load_weights(source, own)[0]
    assert notices == ["converted 10 matrices from F32 to BF16"]
    ids = np.arange(24).reshape(3, 8) * 330
    rows = [np.empty((3, 256), bfloat16) for _ in range(2)]
    for weights, out in zip((found, expected), rows, strict=True):
        assert weights.ngram_table is not None
        weights.ngram_table.gather(ids, out)
    if type == "BF16":
        assert rows[0].tobytes() == rows[1].tobytes()
        order = TiledOrder(shape.gdn_heads)
        both = plain(found), plain(expected)
        x = [one.layers[1] for one in both]
        assert torch.equal(x[0].in_proj, x[1].in_proj[order.row])
        for name in ("input_norm", "post_norm"):
            assert torch.equal(getattr(x[0], name).down, getattr(x[1], name).down)
        assert torch.equal(x[0].ngrams.proj, x[1].ngrams.proj) and torch.equal(x[0].ngrams.conv, x[1].ngrams.conv)
        assert torch.equal(both[0].layers[3].indexer.proj, both[1].layers[3].indexer.proj)
        found_logits, logits = (forward(w, s, prompt(70)) for w, s in zip(both, (shape, own), strict=True))
        torch.testing.assert_close(found_logits, logits, atol=1e-4, rtol=0)
    else:
        near = rows[0].astype(np.float32) - rows[1].astype(np.float32)
        assert 0 < np.abs(near).max() < 0.02


def test_a_packed_model_has_its_table_beside_it(tmp_path: Path) -> None:
    source, target = tiny_checkpoint("flash"), tmp_path / "packed"
    pack_model(EngineConfig(model=str(source), threads=2), target, lambda stage, done: None)
    shape = ModelShape.from_directory(target)
    found, expected = (ngram_table_of(path, shape.ngrams) for path in (target, source))
    assert found is not None and expected is not None
    assert [part.tobytes() for part in found.parts] == [part.tobytes() for part in expected.parts]
    weights, notices = map_packed(target / "packed.safetensors", stored_shape(target, shape), 1)
    made = load_weights(source, shape)[0]
    assert [memory.tobytes() for _, memory in weights.named_memory()] == [m.tobytes() for _, m in made.named_memory()]
    assert not notices
    with pytest.raises(ConfigError, match="its table of n-grams stays in its files"):
        pack_model(EngineConfig(model=str(tiny_gguf("flash"))), tmp_path / "gguf", lambda stage, done: None)


def test_the_sizes_of_a_table_are_checked_before_its_values(tmp_path: Path) -> None:
    """As `deltic plan` does, which has the headers of files that are on the hub."""
    path = changed_table(other_integers, tmp_path / "outline")
    shape = ModelShape.from_directory(path)
    assert shape.ngrams is not None
    check_weights(path, shape, None)
    assert check_ngram_table(path, shape.ngrams) == 2 * shape.ngrams.n_params


@pytest.mark.parametrize("recipe", ["qwen-fp8", "nvfp4-modelopt", "awq-compressed"])
def test_quantised_matrices_keep_their_formats_and_the_rest_its_bits(recipe: str) -> None:
    tiny = tiny_quantised("flash", recipe, shards=2)
    shape = stored_shape(tiny.path, ModelShape.from_directory(tiny.path))
    weights, notices = load_weights(tiny.path, shape, quantize="int4")
    layer = weights.layers[3]
    expert = tiny.values["model.language_model.layers.3.mlp.experts.5.down_proj.weight"]
    assert torch.equal(torch.from_numpy(layer.mlp.down.unpack()[5]), expert)  # type: ignore[union-attr]
    kept = [layer.input_norm.down, layer.post_norm.up, layer.indexer.proj, weights.norm.down]  # type: ignore[union-attr]
    assert {matrix.whole.format.name for matrix in kept} == {"bf16"}
    assert weights.layers[1].ngrams.proj.whole.format.name == "int4"  # type: ignore[union-attr]
    assert not notices and weights.ngram_table is not None


def test_random_experts_that_do_not_fit_are_those_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape.from_directory(tiny_checkpoint("flash"))
    monkeypatch.setitem(PUBLISHED, "tiny", shape)
    shared = replace(shape, shares_experts=True)
    n_bytes, least = (dummy_weights(one, 0).n_bytes for one in (shape, shared))
    moe = dummy_weights(shape, 0).layers[0].mlp
    assert isinstance(moe, Moe) and n_bytes - least == 3 * (moe.gate_up.n_bytes + moe.down.n_bytes)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 256, "max_step_tokens": 64, "n_pages": 12}
    config = EngineConfig(dummy="tiny", threads=2, n_checkpoints=0, max_drafts=0, **sizes)
    needed = needs_of(config, {}, None).n_bytes
    notices = []
    for room in (needed + 10**6, needed - (n_bytes - least) // 2):
        runner = build_runner(replace(config, memory_gb=room / 1e9), lambda stage, done: None, Cpu())
        notices.append([notice for notice in runner.info.notices if "random experts" in notice])
        layers = runner.model.weights.layers  # type: ignore[attr-defined]
        assert (layers[0].mlp.gate_up is layers[3].mlp.gate_up) == bool(notices[-1])
    assert [len(each) for each in notices] == [0, 1]
    with pytest.raises(ConfigError, match="the model does not fit"):
        needs_of(replace(config, memory_gb=(needed - (n_bytes - least) // 2) / 1e9), {}, None)
