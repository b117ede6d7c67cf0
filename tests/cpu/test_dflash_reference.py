"""The reference of block drafters against the published Qwen3 layers, and against a second derivation of what they add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cpu.test_reference import needs_transformers
from tests.reference import dflash as reference
from tests.reference.layers import linear
from tests.tiny_config import HIDDEN, VOCAB_SIZE
from tests.tiny_drafter import DIM, FFN, GROUP, MASK, N_KV, N_Q, TARGET_LAYERS, plain_drafter, shapes, tiny_drafter

N_CONTEXT, N_BLOCK = 83, 8


def given(seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Features of a text, and embeddings of all ids; and a head."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(N_CONTEXT, len(TARGET_LAYERS) * HIDDEN, generator=generator)
    embed, head = (torch.randn(VOCAB_SIZE, HIDDEN, generator=generator) / 16 for _ in range(2))
    return features, embed, head


def stored(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(path / "model.safetensors").items()}


@needs_transformers
@pytest.mark.parametrize("kind", ["dflash", "dspark", "sliding"])
def test_a_block_is_qwen3_layers_over_a_filled_cache(kind: str) -> None:
    """The context's keys and values are put into the cache of the published layers, which then run the block's rows."""
    from transformers import DynamicCache, Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3DecoderLayer,
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    path = tiny_drafter(kind)
    weights, shape = plain_drafter(path)
    assert set(stored(path)) == set(shapes(kind))
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=N_Q, num_key_value_heads=N_KV,
        head_dim=DIM, rms_norm_eps=1e-6, vocab_size=VOCAB_SIZE, max_position_embeddings=4096, attn_implementation="eager",
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )  # fmt: skip
    tensors, (features, embed, _) = stored(path), given()

    def norm(name: str) -> Any:
        module = Qwen3RMSNorm(HIDDEN, 1e-6)
        module.load_state_dict({"weight": tensors[f"{name}.weight"]})
        return module

    def visible(i: int) -> Tensor:
        """0 where a row sees a key, else -inf."""
        mask = torch.zeros(N_BLOCK, N_CONTEXT + N_BLOCK)
        for row in range(N_BLOCK):
            for key in range(N_CONTEXT + N_BLOCK):
                at = N_CONTEXT + row
                if kind == "sliding" and i == 0 and not at - 40 < key <= at:
                    mask[row, key] = -torch.inf
        return mask[None, None]

    rotary = Qwen3RotaryEmbedding(config)
    before = torch.arange(N_CONTEXT)[None]
    own = N_CONTEXT + torch.arange(N_BLOCK)[None]
    cache, context = DynamicCache(), norm("hidden_norm")(features @ tensors["fc.weight"].T)[None]
    x = embed[[5] + [MASK] * (N_BLOCK - 1)][None]
    with torch.no_grad():
        for i in range(2):
            layer = Qwen3DecoderLayer(config, i).eval()
            p = f"layers.{i}."
            layer.load_state_dict({name[len(p) :]: value for name, value in tensors.items() if name.startswith(p)})
            attention = layer.self_attn
            k, v = (part(context).view(1, N_CONTEXT, N_KV, DIM) for part in (attention.k_proj, attention.v_proj))
            k, v = attention.k_norm(k).transpose(1, 2), v.transpose(1, 2)
            _, k = apply_rotary_pos_emb(k, k, *rotary(context, before))
            cache.update(k, v, i)
            out = layer(
                x,
                attention_mask=visible(i),
                position_ids=own,
                past_key_values=cache,
                position_embeddings=rotary(x, own),
            )
            x = out if isinstance(out, Tensor) else out[0]
        expected = norm("norm")(x)[0]
    known = reference.context(weights, shape, features)
    found = reference.block_states(weights, shape, known, embed[[5] + [MASK] * (N_BLOCK - 1)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_convolutions_one_value_at_a_time() -> None:
    """Around a mixer that gives a row of its input, doubled and squared."""
    path = tiny_drafter("dflash2")
    weights, shape = plain_drafter(path)
    tensors, x = stored(path), torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)) / 4
    base = tensors["layers.1.mlp_conv.base_kernel"].numpy()
    kernels = (x @ tensors["layers.1.mlp_conv.kernel_projection.weight"].T).numpy()
    kernels = kernels.reshape(5, 2, 2, HIDDEN // GROUP)

    def mixer(y: Any) -> Any:
        return 2 * y**2

    def convolved(y: np.ndarray, side: int) -> np.ndarray:
        out = np.zeros((5, HIDDEN))
        for t in range(5):
            for c in range(HIDDEN):
                for tap in range(2):
                    before = y[t - tap, c] if t >= tap else 0.0
                    out[t, c] += (base[side, tap, c] + kernels[t, side, tap, c // GROUP]) * before
        return out

    expected = convolved(mixer(convolved(x.double().numpy(), 0)), 1)
    found = reference.convolved(mixer, x, weights.layers[1].mlp_conv, shape, "float32")
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_walk_is_that_of_all_pairs(kind: str) -> None:
    """A path of the likeliest tokens, from scores of all pairs that could be one behind the other."""
    path = tiny_drafter(kind)
    weights, shape = plain_drafter(path)
    tensors, (_, _, head) = stored(path), given()
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits = reference.logits_of(shape, states, head)
    expected = states.double() @ head.double().T * shape.output_multiplier
    if kind == "dflash2":
        expected = 20 * torch.tanh(expected / 20)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)
    if kind == "dspark":
        added = tensors["markov_head.markov_w1.weight"] @ tensors["markov_head.markov_w2.weight"].T
        pairs = logits[:, None] + added[None]
    else:
        books = [tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")]
        projected = states @ tensors["candidate_selector.hidden_projection.weight"].T
        pairs = logits[:, None] + torch.einsum("ar,tr,br->tab", books[0], projected, books[1])
        kept = logits.topk(shape.selector_top_k).indices
        pairs = torch.where(torch.zeros(4, VOCAB_SIZE).scatter(1, kept, 1).bool()[:, None], pairs, -torch.inf)
    path_of = [17]
    for of_row in pairs:
        path_of.append(int(of_row[path_of[-1]].argmax()))
    assert reference.guess(weights, shape, states, logits, 17) == path_of[1:]


def test_confidence_is_a_logistic_regression() -> None:
    path = tiny_drafter("dspark")
    weights, shape = plain_drafter(path)
    tensors, state = stored(path), torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4))
    x = torch.cat([state, tensors["markov_head.markov_w1.weight"][9]])
    logit = linear(x[None], tensors["confidence_head.proj.weight"], "float32") + tensors["confidence_head.proj.bias"]
    assert abs(reference.confidence(weights, shape, state, 9) - float(1 / (1 + torch.exp(-logit)))) < 1e-6
