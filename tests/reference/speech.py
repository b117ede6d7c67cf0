"""Qwen3-TTS for one request: prompt rows, talker, predictor and the loop over frames.

A checkpoint is its config.json and its tensors under their published names, in any dtype. Everything is
computed in float32; `precision` rounds as in `layers.py`, "bfloat16" where the engine does. A frame is 16
codes: code 0 is drawn from the talker's logits, the other 15 by the predictor, one after another. Left out:
batches, and drawing itself (`Choose` does it).

Source: the published package `qwen-tts` 0.1.1, which `tests/golden/make_speech.py` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.layers import Precision, linear, rope, rounded

N_CONTROL = 1024
"""Ids of the talker's vocabulary behind its codes."""

MIN_FRAMES = 2
"""End of speech cannot be chosen for the first two."""

Choose = Callable[[Tensor, int, int], int]
"""(logits, frame, code index 0..15) -> the code. Of code 0, the last logit is end of speech."""


class Checkpoint(NamedTuple):
    config: dict[str, Any]
    weights: dict[str, Tensor]


class Reference(NamedTuple):
    """What in-context cloning continues."""

    text_ids: Sequence[int]
    """Of the transcript in its template."""
    codes: Tensor
    """[R, 16]."""


def greedy(logits: Tensor, frame: int, code: int) -> int:
    """The first of the largest."""
    return int(logits.argmax())


# Layers.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q [T, nq, d], the last T of S positions; k, v [S, nk, d] -> [T, nq, d]. window: positions that one
    sees, itself included.
    """
    n, s, repeat = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    distance = torch.arange(s - n, s)[:, None] - torch.arange(s)
    seen = (distance >= 0) & (distance < (window or s))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def transformer(
    weights: dict[str, Tensor],
    prefix: str,
    config: dict[str, Any],
    x: Tensor,
    cache: dict[Any, Any],
    precision: Precision = "float32",
    window: int | None = None,
) -> Tensor:
    """The next rows x [T, width] through all layers and the final norm: talker, predictor and the vocoder's
    transformer.

    cache: {} for the first rows; has the keys and values of those before (of the last window - 1). The rows
    take up positions where those before ended. Norms of q and k, and layer scales, where there are weights
    for them.
    """
    head_dim, eps = config["head_dim"], config["rms_norm_eps"]
    start = cache.setdefault("n", 0)
    positions = torch.arange(start, start + x.shape[0])
    inv_freq = config["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}.layers.{i}"

        def weight(name: str, layer: str = layer) -> Tensor:
            return weights[f"{layer}.{name}.weight"]

        def scale(name: str, layer: str = layer) -> Tensor | float:
            found = weights.get(f"{layer}.{name}_layer_scale.scale")
            return 1.0 if found is None else found.float()

        y = rms_norm(x, weight("input_layernorm"), eps)
        q, k, v = (
            linear(y, weight(f"self_attn.{name}_proj"), precision).unflatten(-1, (-1, head_dim)) for name in "qkv"
        )
        if f"{layer}.self_attn.q_norm.weight" in weights:
            q, k = rms_norm(q, weight("self_attn.q_norm"), eps), rms_norm(k, weight("self_attn.k_norm"), eps)
        q, k = (rounded(rope(heads, positions, inv_freq), precision) for heads in (q, k))
        past_k, past_v = cache.get(i, (k[:0], v[:0]))
        k, v = torch.cat([past_k, k]), torch.cat([past_v, rounded(v, precision)])
        cache[i] = (k, v) if window is None else (k[-(window - 1) :], v[-(window - 1) :])
        o = linear(attention(q, k, v, window).flatten(1), weight("self_attn.o_proj"), precision)
        x = x + scale("self_attn") * o
        y = rms_norm(x, weight("post_attention_layernorm"), eps)
        gate, up = (linear(y, weight(f"mlp.{name}_proj"), precision) for name in ("gate", "up"))
        x = x + scale("mlp") * linear(F.silu(gate) * up, weight("mlp.down_proj"), precision)
    cache["n"] = start + x.shape[0]
    return rms_norm(x, weights[f"{prefix}.norm.weight"], eps)


# Rows.


def text_rows(model: Checkpoint, ids: Sequence[int], precision: Precision = "float32") -> Tensor:
    """fc2(silu(fc1(embedding))): text-vocabulary ids -> [n, h]."""
    w = model.weights
    x = w["talker.model.text_embedding.weight"][torch.tensor(ids, dtype=torch.long)]
    projection = "talker.text_projection.linear"
    x = linear(x, w[f"{projection}_fc1.weight"], precision) + w[f"{projection}_fc1.bias"].float()
    return linear(F.silu(x), w[f"{projection}_fc2.weight"], precision) + w[f"{projection}_fc2.bias"].float()


def codec_rows(model: Checkpoint, ids: Sequence[int]) -> Tensor:
    """Rows of the talker's own table: talker-vocabulary ids -> [n, h]."""
    return model.weights["talker.model.codec_embedding.weight"][torch.tensor(ids, dtype=torch.long)].float()


def frame_rows(model: Checkpoint, codes: Tensor) -> Tensor:
    """codes [R, 16] -> [R, h]: the sum of each frame's 16 embeddings, code 0 from the talker's table, others
    from the predictor's.
    """
    x = codec_rows(model, codes[:, 0].tolist())
    for i in range(1, codes.shape[1]):
        table = model.weights[f"talker.code_predictor.model.codec_embedding.{i - 1}.weight"]
        x = x + table[codes[:, i].long()].float()
    return x


def language_id(model: Checkpoint, language: str | None, speaker: str | Tensor | None) -> int | None:
    """Of a language by name, any case; a speaker's dialect takes the place of none and of Chinese."""
    talker = model.config["talker_config"]
    name = (language or "auto").lower()
    dialect = talker["spk_is_dialect"].get(speaker.lower()) if isinstance(speaker, str) else None
    if dialect and name in ("auto", "chinese"):
        name = dialect
    return None if name == "auto" else int(talker["codec_language_id"][name])


def prompt(
    model: Checkpoint,
    text_ids: Sequence[int],
    *,
    is_streaming: bool,
    language: str | None = None,
    speaker: str | Tensor | None = None,
    instruct_ids: Sequence[int] = (),
    reference: Reference | None = None,
    precision: Precision = "float32",
) -> tuple[Tensor, Tensor]:
    """The talker's input rows [P, h], and the text rows that are still to come, one a frame [n, h].

    text_ids, instruct_ids: of the whole templates. speaker: a name of `spk_id`, or a speaker vector [h].
    is_streaming: text comes with the frames instead of before them.
    """
    talker = model.config["talker_config"]

    def text(ids: Sequence[int]) -> Tensor:
        return text_rows(model, ids, precision)

    def control(*names: str) -> Tensor:
        return codec_rows(model, [talker[f"codec_{name}_id"] for name in names])

    pad, bos, eos = (text([model.config[f"tts_{name}_token_id"]]) for name in ("pad", "bos", "eos"))
    language_row = language_id(model, language, speaker)
    if language_row is None:
        codec = [control("nothink", "think_bos", "think_eos")]
    else:
        codec = [control("think", "think_bos"), codec_rows(model, [language_row]), control("think_eos")]
    if isinstance(speaker, str):
        codec.append(codec_rows(model, [talker["spk_id"][speaker.lower()]]))
    elif speaker is not None:
        codec.append(speaker.float()[None])
    controls = torch.cat(codec)
    rows = [text(text_ids[:3]), controls + pad, bos + control("pad")]
    if instruct_ids:
        rows.insert(0, text(instruct_ids))
    body = text(text_ids[3:-5])
    if reference is None:
        said, spoken = torch.cat([body, eos]), control("bos")
    else:
        said = torch.cat([text(reference.text_ids[3:-2]), body, eos])
        spoken = torch.cat([control("bos"), frame_rows(model, reference.codes)])
    if not is_streaming:
        return torch.cat([*rows, said + control("pad"), spoken + pad]), pad
    n = spoken.shape[0]
    beside = torch.cat([said, pad.expand(max(0, n - said.shape[0]), -1)])[:n]
    return torch.cat([*rows, beside + spoken]), said[n:] if said.shape[0] > n else pad


# Frames.


def first_logits(model: Checkpoint, past: Tensor, precision: Precision = "float32") -> Tensor:
    """The talker's logits that can be chosen: [n_codes + 1], end of speech last. past [h]."""
    talker, head = model.config["talker_config"], model.weights["talker.codec_head.weight"]
    kept = torch.cat([head[: talker["vocab_size"] - N_CONTROL], head[talker["codec_eos_token_id"], None]])
    return linear(past[None], kept, precision)[0]


def predict(
    model: Checkpoint,
    past: Tensor,
    code: int,
    frame: int = 0,
    choose: Choose = greedy,
    precision: Precision = "float32",
) -> list[int]:
    """All codes of a frame. past: the talker's hidden state [h] that code 0 was chosen from."""
    w, prefix = model.weights, "talker.code_predictor"
    config = model.config["talker_config"]["code_predictor_config"]
    projection = w.get(f"{prefix}.small_to_mtp_projection.weight")
    codes, cache = [code], dict[Any, Any]()
    x = torch.stack([past, codec_rows(model, codes)[0]])
    for i in range(config["num_code_groups"] - 1):
        if projection is not None:
            x = linear(x, projection, precision) + w[f"{prefix}.small_to_mtp_projection.bias"].float()
        last = transformer(w, f"{prefix}.model", config, x, cache, precision)[-1:]
        codes.append(choose(linear(last, w[f"{prefix}.lm_head.{i}.weight"], precision)[0], frame, i + 1))
        x = w[f"{prefix}.model.codec_embedding.{i}.weight"][codes[-1], None].float()
    return codes


@torch.no_grad()
def generate(
    model: Checkpoint,
    rows: Tensor,
    trailing: Tensor,
    max_new_tokens: int,
    *,
    repetition_penalty: float = 1.05,
    choose: Choose = greedy,
    precision: Precision = "float32",
    trace: list[Tensor] | None = None,
) -> Tensor:
    """Codes [T, 16], from `prompt`'s rows: T <= max_new_tokens - 1, since a last code 0 without its residual
    codes is dropped.

    trace: collects the talker's hidden state [h] behind each code 0, the last included.
    """
    talker, cache = model.config["talker_config"], dict[Any, Any]()
    pad = text_rows(model, [model.config["tts_pad_token_id"]], precision)
    frames: list[list[int]] = []
    for t in range(max_new_tokens):
        past = transformer(model.weights, "talker.model", talker, rows, cache, precision)[-1]
        if trace is not None:
            trace.append(past)
        logits = first_logits(model, past, precision)
        seen = sorted({frame[0] for frame in frames})
        logits[seen] = torch.where(
            logits[seen] > 0, logits[seen] / repetition_penalty, logits[seen] * repetition_penalty
        )
        if t < MIN_FRAMES:
            logits[-1] = -torch.inf
        code = choose(logits, t, 0)
        if code == logits.shape[0] - 1 or t == max_new_tokens - 1:
            break
        frames.append(predict(model, past, code, t, choose, precision))
        text = trailing[t, None] if t < trailing.shape[0] else pad
        rows = frame_rows(model, torch.tensor(frames[-1:])) + text
    return torch.tensor(frames, dtype=torch.long).reshape(-1, talker["num_code_groups"])
