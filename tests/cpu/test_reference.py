"""The oracle against the published model code, and against itself in its two forms."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights
from deltic.models.rotary import rotary_tables
from tests.cpu.grid import grid
from tests.plain import plain
from tests.reference import layers, sample
from tests.reference.model import forward, generate_greedy
from tests.tensors import TiledOrder
from tests.tiny import tiny_checkpoint
from tests.tiny_config import tiny_config

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra: test)"
)
N_PROMPT = 97  # past a chunk of 64, with a ragged tail
N_GREEDY = 36  # past the next one

CHECKPOINTS = [
    ("dense", {}),
    ("dense", {"tied": True, "layout": "flat"}),
    ("moe", {}),
    ("moe", {"tied": True, "layout": "flat", "shards": 2}),
    ("moe", {"experts": "split"}),
    ("next", {}),
    ("next", {"tied": True, "experts": "fused"}),
]


def prompt(n_tokens: int = N_PROMPT, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def published_model(path: Path) -> Any:
    """The same checkpoint in transformers, float32, plain attention and plain expert loops."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    name = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def published_greedy(model: Any, ids: list[int], n_tokens: int) -> list[int]:
    step, cache, out = torch.tensor([ids]), None, []
    for _ in range(n_tokens):
        result = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = result.past_key_values, result.logits[:, -1:].argmax(-1)
        out.append(int(step))
    return out


@needs_transformers
@pytest.mark.parametrize(("kind", "options"), grid(CHECKPOINTS, CHECKPOINTS[1:6:2], pytest.mark.long), ids=str)
def test_logits_and_greedy_tokens_equal_the_published_model(kind: str, options: dict[str, Any]) -> None:
    path = tiny_checkpoint(kind, **options)
    shape = ModelShape.from_directory(path)
    weights = plain(load_weights(path, shape)[0])
    model, ids = published_model(path), prompt()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    for chunked in (False, True):
        torch.testing.assert_close(forward(weights, shape, ids, chunked=chunked), expected, atol=1e-4, rtol=0)
    greedy = generate_greedy(weights, shape, ids, N_GREEDY, chunked=True)
    assert greedy == published_greedy(model, ids, N_GREEDY)


@needs_transformers
def test_yarn_frequencies_equal_the_published_ones() -> None:
    from transformers import Qwen3NextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny_config("next", tied=False, layout="flat")
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](Qwen3NextConfig(**config), torch.device("cpu"))
    shape = ModelShape.from_config(config)
    torch.testing.assert_close(torch.tensor(shape.inv_freq()), expected, rtol=1e-6, atol=0)
    assert shape.rope_attention_factor == pytest.approx(factor)


@needs_transformers
def test_angles_at_the_far_end_are_the_published_ones() -> None:
    """Of the last positions that the model was made for, and of a million by --rope-scaling: by the published frequencies, which
    differ from ours in the last bit of float32; that turns an angle by up to 0.016 there, one step of bfloat16.
    """
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
    config = tiny_config("next", tied=False, layout="flat") | {"max_position_embeddings": 262_144}
    shape = ModelShape.from_config(config)
    for one, rope, end in ((shape, {}, 262_144), (shape.scaled(given), given, 1_048_576)):
        assert one.max_position_embeddings == end
        fields = config | {"rope_parameters": config["rope_parameters"] | rope, "max_position_embeddings": end}
        published = Qwen3NextRotaryEmbedding(Qwen3NextConfig(**fields))
        torch.testing.assert_close(torch.tensor(one.inv_freq()), published.inv_freq, rtol=2.0**-22, atol=0)
        positions = torch.tensor([[0, 1, end // 4 - 1, end // 2, end - 1]])
        expected = published(torch.zeros(1), positions)
        tables = rotary_tables(published.inv_freq.tolist(), end, one.rope_attention_factor)
        for table, both_halves in zip(tables, expected, strict=True):
            found = torch.from_numpy(table[positions[0].numpy()])
            torch.testing.assert_close(found, both_halves[0, :, : found.shape[1]], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "limit"), [("dense", 0.05), ("moe", 0.4), ("next", 0.4)])
def test_bfloat16_rules_stay_near_float32(kind: str, limit: float) -> None:
    """Logits of magnitude 4 move little; a router in a near-tie moves them more, so the median is judged."""
    path = tiny_checkpoint(kind)
    shape = ModelShape.from_directory(path)
    weights = plain(load_weights(path, shape)[0])
    exact, lossy = (forward(weights, shape, prompt(40), p) for p in ("float32", "bfloat16"))
    gap = (exact - lossy).abs().amax(-1)
    assert 0 < gap.median() < limit


def test_tiled_value_heads_are_the_same_model() -> None:
    """Everything of the value heads permuted, as GGUF files have it: out_proj's sums are in another order, the rest is the same."""
    path = tiny_checkpoint("dense")
    shape = ModelShape.from_directory(path)
    weights = plain(load_weights(path, shape)[0])
    expected, order = forward(weights, shape, prompt(70)), TiledOrder(shape.gdn_heads)
    for layer in weights.layers:
        if hasattr(layer, "in_proj"):
            layer.in_proj, layer.conv = layer.in_proj[order.row], layer.conv[order.channel]
            layer.a_log, layer.dt_bias = layer.a_log[order.head], layer.dt_bias[order.head]
            layer.out_proj = layer.out_proj[:, order.out]
    tiled = dataclasses.replace(shape, tiled_value_heads=True)
    for chunked in (False, True):
        torch.testing.assert_close(forward(weights, tiled, prompt(70), chunked=chunked), expected, atol=1e-4, rtol=0)
    assert (forward(weights, shape, prompt(70)) - expected).abs().max() > 0.1


def gdn_inputs(n_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    q, k = layers.l2_norm(normal(n_tokens, 2, 16)) * 16**-0.5, layers.l2_norm(normal(n_tokens, 2, 16))
    decay = -torch.exp(normal(n_tokens, 4) - 3)
    return q, k, normal(n_tokens, 4, 24), decay, torch.sigmoid(normal(n_tokens, 4))


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_delta_rule_equals_the_recurrent_one(n_tokens: int, chunk: int) -> None:
    state = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(2))
    for initial in (None, state):
        o, s = layers.naive_gdn(*gdn_inputs(n_tokens), initial)
        o_chunked, s_chunked = layers.chunk_gdn(*gdn_inputs(n_tokens), initial, chunk)
        torch.testing.assert_close(o_chunked, o, atol=2e-5, rtol=0)
        torch.testing.assert_close(s_chunked, s, atol=2e-5, rtol=0)


def test_delta_rule_and_convolution_continue_from_their_states() -> None:
    inputs = gdn_inputs(50)
    whole, state = layers.naive_gdn(*inputs)
    first, middle = layers.naive_gdn(*(x[:23] for x in inputs))
    second, last = layers.naive_gdn(*(x[23:] for x in inputs), middle)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(last, state, atol=1e-6, rtol=1e-6)

    x, weight = torch.randn(9, 5), torch.randn(5, 4)
    whole, window = layers.causal_conv(x, weight)
    first, carried = layers.causal_conv(x[:2], weight)
    second, last = layers.causal_conv(x[2:], weight, carried)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(last, window, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(window, x[-3:].T, atol=1e-6, rtol=1e-6)


def test_equal_router_probabilities_prefer_lower_ids() -> None:
    weights, ids = layers.route(torch.ones(1, 4), torch.zeros(8, 4), 3, True, "float32")
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "min_tokens": 0,
    "stop_token_ids": (),
}


def params(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**NEUTRAL, **changes})


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert sample.philox4x32(counter, key) == words


def test_uniform_uses_the_whole_seed_and_the_position() -> None:
    values = {sample.uniform(seed, position) for seed in (0, 1, 1 << 32, 2**64 - 1) for position in (0, 1)}
    assert len(values) == 8
    assert all(0 <= u < 1 for u in values)


def test_penalties_apply_in_order_and_bans_win() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, 4.0, 9.0])
    row = sample.processed_logits(
        logits,
        params(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={2: -1.5, 3: 1.0}),
        prompt_ids=[0],
        output_ids=[2, 3, 3],
        banned=[4],
        n_real_vocab=5,
    )
    # 0: prompt only, halved; 2: -1 doubled, one use; 3: 4 halved, two uses; 4: banned; 5: padding
    assert row.tolist() == [1.0, -1.0, -2.75, 1.0, -torch.inf, -torch.inf]
    assert logits[2] == 0.5
    assert sample.banned_ids(params(min_tokens=2, stop_token_ids=(7,)), [1], n_output=1) == {1, 7}
    assert sample.banned_ids(params(min_tokens=2), [1], n_output=2) == set()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 3}, [0, 1, 2]),  # 0 and 3 tie at the threshold
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.6}, [1, 2]),
        ({"min_p": 0.6, "top_p": 0.5}, [1]),  # top-p counts shares of what min-p left
    ],
)
def test_filters(changes: dict[str, Any], kept: list[int]) -> None:
    row = torch.tensor([0.15, 0.4, 0.3, 0.15]).log()
    ids, p = sample.candidates(row, params(**changes))
    assert ids.tolist() == kept
    assert len(p) == len(kept)


def test_draw_walks_ids_upwards() -> None:
    ids, p = torch.tensor([3, 5, 9]), torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    assert [sample.draw(ids, p, u) for u in (0.0, 0.249, 0.25, 0.749, 0.75, 0.999)] == [3, 3, 5, 5, 9, 9]


def test_drawn_frequencies_follow_the_probabilities_and_greedy_takes_the_lowest_tie() -> None:
    row = torch.tensor([0.2, 0.5, 0.3]).log()
    counts = torch.zeros(3)
    for position in range(2000):
        counts[sample.sample(row, params(), seed=7, position=position)] += 1
    torch.testing.assert_close(counts / 2000, row.exp(), atol=0.03, rtol=0)
    assert sample.sample(torch.tensor([1.0, 2.0, 2.0]), params(temperature=0), 0, 0) == 1


def test_logprobs_are_of_the_raw_row_without_padding() -> None:
    logprobs = sample.token_logprobs(torch.tensor([1.0, 1.0, 50.0]), n_real_vocab=2)
    torch.testing.assert_close(logprobs, torch.tensor([0.5, 0.5, 0.0]).log())
