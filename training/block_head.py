"""Train a block drafter for the built-in model: `python -m training.block_head --out DIR --minutes 60 --device cuda|cpu`.

The drafter (DSpark; `deltic serve --draft-model DIR`) guesses BLOCK tokens in one forward: a block is the last token
and masks behind it, its rows see keys and values of the model's hidden states, and a term of the token before joins
their logits. Rows do not see those behind them, so a shorter block guesses the same. The model stays as it is. As in
`training.head` what is learned is the model's own distribution, behind tokens of the corpus; a confidence head learns
how likely a draw of the guess is one of the model.

One forward of the model serves several steps: each begins blocks at random places of the latest batches.
DIR gets config.json and model.safetensors (bfloat16), also while it trains, and block_head.txt, the log.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.corpus import DEMO
from training.head import Fit, flags
from training.model import Geometry, Hybrid, Mlp, Norm, Packed, Projection, checkpoint_tensors, rotate

BLOCK = 6
DECAY = 0.85  # of a guess's weight, by its place
WINDOW = 32  # tokens that a row sees, its own last
N_ANCHORS = 256  # blocks a step
N_KEPT, N_USES = 32, 4  # batches at hand, and steps behind each new one
MASK = "<|fim_pad|>"
SIZES = replace(
    Geometry(), n_layers=1, n_q_heads=4, n_kv_heads=1, head_dim=64, rotary_dim=64, intermediate_size=256
)  # fmt: skip
LAYERS = (1, 3, 6)
"""Layers of the model whose outputs are read."""
RANK = 32


class BlockAttention(nn.Module):
    """Attention of a block's rows over keys of the text and of its own rows, with the norms of Qwen3."""

    def __init__(self, geo: Geometry):
        super().__init__()
        self.geo = geo
        h, d = geo.hidden_size, geo.head_dim
        self.q_proj = Projection(h, geo.n_q_heads * d)
        self.k_proj = Projection(h, geo.n_kv_heads * d)
        self.v_proj = Projection(h, geo.n_kv_heads * d)
        self.o_proj = Projection(geo.n_q_heads * d, h, 0.5)
        self.q_norm, self.k_norm = Norm(d, geo.eps, plain=True), Norm(d, geo.eps, plain=True)

    def heads(self, x: Tensor, norm: Norm | None = None, angles: tuple[Tensor, ...] = ()) -> Tensor:
        """x [K, T, n d]: [K, n, T, d], normed, and rotated by angles, cos and sin [K, T, d / 2], if there is a norm."""
        y = x.unflatten(-1, (-1, self.geo.head_dim))
        if norm is not None:
            cos, sin = (t[:, :, None] for t in angles)
            y = rotate(norm(y), cos, sin)
        return y.to(x.dtype).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, at: "Places") -> Tensor:
        """x [K, BLOCK, H] of blocks; context [K, WINDOW - 1, H] of the tokens before each."""
        y, angles = (
            torch.cat([context, x], 1),
            tuple(torch.cat(pair, 1) for pair in zip(at.text, at.blocks, strict=True)),
        )
        k, v = self.heads(self.k_proj(y), self.k_norm, angles), self.heads(self.v_proj(y))
        q = self.heads(self.q_proj(x), self.q_norm, at.blocks).flatten(1, 2)[:, None]  # all heads read one key head
        scores = (q @ k.mT).float().unflatten(2, (self.geo.n_q_heads, -1)) * self.geo.head_dim**-0.5
        weights = scores.masked_fill(~at.mask[:, :, None], -1e30).softmax(-1).flatten(2, 3).to(v.dtype)
        return self.o_proj((weights @ v).unflatten(2, (self.geo.n_q_heads, -1))[:, 0].transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    """A Qwen3 layer."""

    def __init__(self, geo: Geometry):
        super().__init__()
        self.input_layernorm = Norm(geo.hidden_size, geo.eps, plain=True)
        self.self_attn = BlockAttention(geo)
        self.post_attention_layernorm = Norm(geo.hidden_size, geo.eps, plain=True)
        self.mlp = Mlp(geo, 0.5)

    def forward(self, x: Tensor, context: Tensor, at: "Places") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """The term of the token before in a guess's logits."""

    def __init__(self, geo: Geometry, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(geo.vocab_size, rank)
        self.markov_w2 = Projection(rank, geo.vocab_size, 0.1)


class ConfidenceHead(nn.Module):
    """The logit of a guess's chance to be right."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)


@dataclass
class Known:
    """What the model computed of N tokens."""

    tokens: Tensor
    document: Tensor  # int64 [N]: a number of each token's
    learned: Tensor  # bool [N]
    position: Tensor  # int64 [N]: in its row
    features: Tensor  # [N, n H]
    hidden: Tensor  # [N, H]: behind its final norm

    @classmethod
    @torch.no_grad()
    def of(cls, model: Hybrid, batch: Packed, learned: Tensor) -> "Known":
        outputs: dict[int, Tensor] = {}
        hooks = [
            model.model.layers[i].register_forward_hook(lambda *given, i=i: outputs.__setitem__(i, given[-1]))
            for i in LAYERS
        ]
        hidden = model.model.norm(model.hidden(batch))
        for hook in hooks:
            hook.remove()
        position = torch.arange(len(batch.tokens), device=hidden.device) % batch.row_length
        features = torch.cat([outputs[i] for i in LAYERS], -1).bfloat16()
        return cls(batch.tokens, batch.first.long().cumsum(0), learned, position, features, hidden.bfloat16())

    @classmethod
    def joined(cls, parts: Sequence["Known"]) -> "Known":
        """Those of several batches: no document of one is one of another."""
        document = torch.cat([part.document + (i << 32) for i, part in enumerate(parts)])
        whole = {field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        return cls(**whole | {"document": document})

    def anchors(self, n: int) -> Tensor:
        """Draws n places behind which a learned token of the same document follows."""
        follows = (self.learned & (self.document == self.document.roll(1))).roll(-1)
        follows[-1] = False
        return torch.multinomial(follows.float(), n, replacement=True)


@dataclass
class Places:
    """Where blocks begin, and what their rows see."""

    keys: Tensor  # int64 [K, WINDOW - 1]: tokens before each block
    text: tuple[Tensor, Tensor]  # cos and sin of these
    blocks: tuple[Tensor, Tensor]  # [K, BLOCK, d / 2]
    mask: Tensor  # bool [K, 1, BLOCK, WINDOW - 1 + BLOCK]

    @classmethod
    def of(cls, anchors: Tensor, known: Known, model: Hybrid) -> "Places":
        """anchors [K]: the tokens with which blocks begin."""
        steps, reach = (torch.arange(n, device=anchors.device) for n in (BLOCK, WINDOW - 1))
        keys = anchors[:, None] - (WINDOW - 1) + reach
        is_own = (keys >= 0) & (known.document[keys.clamp(min=0)] == known.document[anchors][:, None])
        keys = keys.clamp(min=0)
        seen = is_own[:, None] & (reach >= steps[:, None])
        own = (steps <= steps[:, None]).expand(len(anchors), -1, -1)
        at = (known.position[anchors][:, None] + steps).clamp(max=len(model.cos) - 1)
        text, blocks = ((model.cos[i], model.sin[i]) for i in (known.position[keys], at))
        return cls(keys, text, blocks, torch.cat([seen, own], -1)[:, None])


class BlockHead(nn.Module):
    """The drafter; its state dict has the published names."""

    def __init__(self, geo: Geometry = SIZES, rank: int = RANK):
        super().__init__()
        self.geo = geo
        self.fc = Projection(len(LAYERS) * geo.hidden_size, geo.hidden_size)
        self.hidden_norm = Norm(geo.hidden_size, geo.eps, plain=True)
        self.layers = nn.ModuleList(BlockLayer(geo) for _ in range(geo.n_layers))
        self.norm = Norm(geo.hidden_size, geo.eps, plain=True)
        self.markov_head = MarkovHead(geo, rank)
        self.confidence_head = ConfidenceHead(geo.hidden_size + rank)

    def forward(self, features: Tensor, rows: Tensor, at: Places) -> Tensor:
        """features [N, n H]; rows [K, BLOCK, H], embedded: states behind the final norm."""
        context, x = self.hidden_norm(self.fc(features[at.keys])), rows.float()
        for layer in self.layers:
            x = layer(x, context, at)
        return self.norm(x)

    def scores(self, states: Tensor, before: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V] of the tokens behind `before` [...], and the logit of the chance that they are right."""
        embedded = self.markov_head.markov_w1(before)
        dtype = Projection.compute_dtype
        logits = F.linear(states.to(dtype), table.to(dtype)).float() + self.markov_head.markov_w2(embedded).float()
        seen = torch.cat([states, embedded], -1).detach()
        return logits, self.confidence_head.proj(seen)[..., 0]


def config(geo: Geometry, mask_id: int) -> dict[str, object]:
    """config.json, as published."""
    own = {"mask_token_id": mask_id, "target_layer_ids": list(LAYERS)}
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "dflash_config": own,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "attention_bias": False,
        "vocab_size": geo.vocab_size,
        "hidden_size": geo.hidden_size,
        "intermediate_size": geo.intermediate_size,
        "num_hidden_layers": geo.n_layers,
        "layer_types": ["sliding_attention"] * geo.n_layers,
        "sliding_window": WINDOW,
        "num_attention_heads": geo.n_q_heads,
        "num_key_value_heads": geo.n_kv_heads,
        "head_dim": geo.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": geo.eps,
        "rope_theta": geo.rope_theta,
        "max_position_embeddings": geo.max_position_embeddings,
    }


def save(directory: Path, head: BlockHead, mask_id: int) -> None:
    """Writes the drafter's directory; its weights last, and at once."""
    (directory / "config.json").write_text(json.dumps(config(head.geo, mask_id), indent=1) + "\n")
    partial = directory / "model.partial"
    save_file(checkpoint_tensors(head.state_dict()), partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")


def guessed(head: BlockHead, model: Hybrid, known: Known, anchors: Tensor, mask_id: int) -> tuple[Tensor, list[float]]:
    """The loss of the blocks that begin with tokens anchors [K], and the part of each place's tokens that is guessed as
    the model's likeliest.
    """
    table, dtype = model.model.embed_tokens.weight, Projection.compute_dtype
    places = anchors[:, None] + torch.arange(BLOCK + 1, device=anchors.device)
    inside, places = places < len(known.tokens), places.clamp(max=len(known.tokens) - 1)
    tokens, document = known.tokens[places], known.document[places]
    is_used = (inside & known.learned[places] & (document == document[:, :1]))[:, 1:].cumprod(-1).bool()
    rows = torch.full_like(tokens[:, :-1], mask_id)
    rows[:, 0] = tokens[:, 0]
    states = head(known.features, F.embedding(rows, table), Places.of(anchors, known, model))
    logits, confidence = head.scores(states[is_used], tokens[:, :-1][is_used], table)
    hidden = known.hidden[places[:, :-1][is_used]]
    target = F.linear(hidden.to(dtype), table.to(dtype)).float().softmax(-1)
    place = torch.arange(BLOCK, device=anchors.device).expand_as(rows)[is_used]
    weight = DECAY**place
    with torch.no_grad():
        overlap = torch.minimum(logits.softmax(-1), target).sum(-1)
        is_right = (logits.argmax(-1) == target.argmax(-1)).float()
        shares = [is_right[place == i].mean().item() for i in range(BLOCK)]
    losses = F.cross_entropy(logits, target, reduction="none")
    losses = losses + F.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
    return (losses * weight).sum() / weight.sum(), shares


def main() -> None:
    parser = flags(__doc__, seed=3)
    parser.add_argument("--resume", action="store_true", help="go on from the head in --out")
    fit = Fit(parser.parse_args(), "block_head.txt")
    Projection.compute_dtype = torch.bfloat16  # half as long on a CPU, too
    head, mask_id = BlockHead().to(fit.device), Tokenizer.from_file(str(DEMO / "tokenizer.json")).token_to_id(MASK)
    with torch.no_grad():
        head.norm.weight.copy_(1 + fit.model.model.norm.weight)
    if fit.given.resume:
        stored = load_file(fit.given.out / "model.safetensors")
        head.load_state_dict({name: t.float() for name, t in stored.items()})
    kept, turns = deque[Known](maxlen=N_KEPT), count()
    apart, known = Known.of(fit.model, *fit.held_out), None
    apart_at = apart.anchors(1024)

    def step() -> tuple[Tensor, list[float]]:
        nonlocal known
        n_steps = next(turns)
        if known is None or n_steps < N_KEPT // 8 or n_steps % N_USES == 0:
            kept.append(Known.of(fit.model, *fit.draw()))
            known = Known.joined(kept)
        return guessed(head, fit.model, known, known.anchors(N_ANCHORS), mask_id)

    @torch.no_grad()
    def held_out() -> list[float]:
        return guessed(head, fit.model, apart, apart_at, mask_id)[1]

    fit.run(head, step, held_out, lambda: save(fit.given.out, head, mask_id))


if __name__ == "__main__":
    main()
