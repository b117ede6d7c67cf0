"""The joint schema head of Clef in torch's own modules: JointSchemaHead of its joint_schema_model.py.

logits = joint_head(weights, config, hidden, questions, lexical)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Question = tuple[int, tuple[int, int], Sequence[tuple[int, int]]]
"""Kind (noul 0, choice 1, score 2), tokens of the instruction, and tokens of each option."""


def _part(weights: Mapping[str, Tensor], name: str, module: nn.Module) -> nn.Module:
    """A module of torch with the tensors whose names begin so."""
    own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
    module.load_state_dict(own, strict=True)
    return module.eval()


def joint_head(
    weights: Mapping[str, Tensor],
    config: Mapping[str, int],
    hidden: Tensor,
    questions: Sequence[Question],
    lexical: Sequence[Tensor],
) -> list[Tensor]:
    """The logits of each question's options.

    weights: float32, of joint_head.safetensors. config: joint_head_config.json. hidden: float32 [T, H],
    behind the final norm. lexical: [options, H] of each question: the mean of its tokens' rows of the output
    embedding.
    """
    h, w, f, n_heads = config["hidden_size"], config["width"], config["feedforward"], config["heads"]
    norm = lambda name, rows, size=w: _part(weights, name, nn.LayerNorm(size))(rows)  # noqa: E731
    project = lambda name, rows: rows @ weights[f"{name}_projection.weight"].T  # noqa: E731
    hidden = norm("hidden_norm", hidden, h)
    memory, last = project("memory", hidden)[None], hidden[-1]
    asked = torch.stack([hidden[begin:end].mean(0) for _, (begin, end), _ in questions])
    queries = []
    for question, words, (_, _, spans) in zip(asked, lexical, questions, strict=True):
        context = torch.stack([hidden[begin:end].mean(0) for begin, end in spans])
        queries.append(
            project("option_context", context) + project("option_lexical", words) + project("option_question", question)
        )
    x = torch.cat(queries)[None]
    for i in range(config["routing_layers"]):
        p = f"evidence_layers.{i}"
        attention = _part(weights, f"{p}.attention", nn.MultiheadAttention(w, n_heads, batch_first=True))
        known = norm(f"{p}.memory_norm", memory)
        x = x + attention(norm(f"{p}.query_norm", x), known, known, need_weights=False)[0]
        ff = nn.Sequential(nn.Linear(w, f), nn.GELU(), nn.Identity(), nn.Linear(f, w))
        x = x + _part(weights, f"{p}.feedforward", ff)(norm(f"{p}.feedforward_norm", x))
    options = x[0].split([len(spans) for _, _, spans in questions])
    fields = project("question", asked)
    summaries = [(o @ field / math.sqrt(w)).softmax(0) @ o for field, o in zip(fields, options, strict=True)]
    kinds = weights["type_embedding.weight"][[kind for kind, _, _ in questions]]
    fields = fields + norm("option_summary_norm", torch.stack(summaries)) + project("global", last) + kinds
    for i in range(config["layers"]):
        layer = nn.TransformerDecoderLayer(w, n_heads, f, 0.0, "gelu", batch_first=True, norm_first=True)
        fields = _part(weights, f"layers.{i}", layer)(fields[None], memory)[0]
    fields = norm("field_norm", fields)
    scorer = _part(
        weights, "residual_scorer", nn.Sequential(nn.Linear(4 * w, w), nn.GELU(), nn.Identity(), nn.Linear(w, 1))
    )
    scale = {name: weights[f"{name}_logit_scale"].clamp(max=math.log(100.0)).exp() for name in ("prior", "joint")}
    found = []
    for field, question, words, routed in zip(fields, asked, lexical, options, strict=True):
        prior = scale["prior"] * F.normalize(words, dim=-1) @ F.normalize(question + last, dim=-1)
        o = norm("option_norm", routed)
        both = field.expand_as(o)
        residual = scorer(torch.cat([both, o, both * o, (both - o).abs()], -1))[:, 0]
        found.append(
            prior
            + weights["residual_gate"].sigmoid() * (scale["joint"] * F.cosine_similarity(both, o, dim=-1) + residual)
        )
    return found
