"""The published implementation (transformers) beside Deltic's, a layer at a time, so that one layer is in
memory in float32.

Each layer of theirs reads what Deltic's layers before it have made, and what comes out is compared: so a
layer that is wrong is named, whatever the ones before it did. Another pass through all of them, of its own
states, gives the log-probabilities that the published model has. Weights are the stored tensors by their
published names, and not Deltic's own layout of them.
"""

from __future__ import annotations

import copy
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltic.engine.cache.cache import pages_for
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Step
from deltic.engine.step import Sequence as Running
from deltic.models.fields import CheckpointError
from deltic.models.gguf_config import document
from deltic.models.qwen.shape import FULL_ATTENTION, ModelShape
from deltic.ops.arrays import Array
from deltic.ops.cpu.program import Program
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.runtime.cpu.text import Runner
from deltic.runtime.plan import TextPlan
from deltic.verify.files import Files
from deltic.verify.page import Check, Tell
from deltic.verify.values import BLOCK_WEIGHTS, rounding, ungrouped, values_of

MODEL_TYPES = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3NextForCausalLM": "qwen3_next",
}
"""Names of transformers' configurations, by the architecture that a GGUF file stands for."""

BOUND, QUANTISED_BOUND = 0.03, 0.08
"""Errors of what a layer adds, as parts of its length, that rows in bfloat16 explain, and rows of fewer
bits.
"""

NEAR = 0.1
"""Distance of two experts' logits in a router that bfloat16 rows may turn round: such tokens are left out."""


class Pieces(Program):
    """A forward in pieces, each of which begins at a norm of the residual stream."""

    def __init__(self, n_threads: int, norms: Sequence[Array]) -> None:
        super().__init__(n_threads)
        self.pieces = [Program(n_threads)]
        self._norms = {id(norm) for norm in norms}

    def call(self, kernel: str, *arguments: Array | int | float | None) -> None:
        if any(id(argument) in self._norms for argument in arguments):
            self.pieces.append(Program(self.n_threads))
        self.pieces[-1].call(kernel, *arguments)


def residuals(runner: Any, ids: Sequence[int]) -> list[Array]:
    """float32 [T, H] each: the residual stream behind the embedding, each mixer and each feed-forward.

    runner: of a language model, on one device. ids: at most a page of them. Writes to the runner's first
    pages and its first slots.
    """
    request, pages = Request(id="layers", prompt_ids=[*ids], params=SamplingParams()), [*range(pages_for(len(ids)))]
    sequence = Running(request, 0, 0, array("i", ids), n_prompt=len(ids), pages=pages, state_slot=0, batch_slot=0)
    step = Step(chunks=[Chunk(sequence, 0, len(ids))])
    if not isinstance(runner, Runner):
        runner.step(step)
        return [*runner.residuals(len(ids))]
    layers, norm = runner.model.weights.layers, runner.model.weights.norm
    norms = [norm, *(each for layer in layers for each in (layer.input_norm, layer.post_norm))]
    pieces = Pieces(runner.plan.n_threads, norms)
    batch, activations = runner.workspace.batch, runner.workspace.activations
    runner.model.record(pieces, batch.inputs, runner.memory, activations)
    batch.fill(step)
    found = []
    for piece in pieces.pieces[: 1 + 2 * len(layers)]:
        piece.run()
        found.append(activations.residual[: len(ids)].copy())
    return found


@dataclass(frozen=True)
class Layer:
    """Outputs of transformers' layer: float32 [B, T, H] behind the mixer and behind the
    layer, and bool [B, T], whether a token's experts are sure.
    """

    middle: Any
    out: Any
    is_sure: Any


class PublishedLayers:
    """Layers of transformers' model with the values of these files. Raises ImportError without
    transformers.
    """

    def __init__(self, files: Files) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        if files.is_gguf:
            said = document(files.path, "config.json")
            kind = MODEL_TYPES[said.pop("architectures")[0]]
            del said["tiled_value_heads"]
            config = AutoConfig.for_model(kind, **said)
        else:
            config = AutoConfig.from_pretrained(files.path, local_files_only=True)
        self.config = config.get_text_config()
        self.files = files
        self._change = ungrouped(files.shape)
        self._prefix = files.prefix

    def embedded(self, ids: Sequence[int]) -> Any:
        """float32 [T, H]: rows of the embedding."""
        import torch

        embed = self.files.tensors[f"{self._prefix}embed_tokens.weight"]
        return torch.from_numpy(np.concatenate([values_of(embed, id, id + 1) for id in ids]))

    def layer(self, i: int, inputs: Sequence[Any]) -> list[Layer]:
        """Runs a layer over each of the inputs, float32 [B, T, H]. Raises CheckpointError for tensors that
        transformers' layer has not.
        """
        import torch
        from transformers import AutoModel

        config = copy.deepcopy(self.config)
        config.num_hidden_layers, config.layer_types = 1, [self.config.layer_types[i]]
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        model.rotary_emb, model.norm = type(model.rotary_emb)(config), torch.nn.Identity()
        (layer,) = model.layers
        try:
            layer.load_state_dict(self._tensors(i), strict=True, assign=True)
        except RuntimeError as error:
            raise CheckpointError(f"layer {i} does not fit transformers' ({' '.join(str(error).split())})") from None
        model.requires_grad_(False)
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        seen: dict[str, Any] = {}
        mixer.register_forward_hook(lambda _, __, out: seen.update(mixer=out[0] if isinstance(out, tuple) else out))
        layer.mlp.register_forward_pre_hook(lambda _, given: seen.update(mlp=given[0]))
        found = []
        for x in inputs:
            out = model(inputs_embeds=x, use_cache=False).last_hidden_state
            is_sure = torch.ones(x.shape[:2], dtype=torch.bool)
            if self.files.shape.is_moe:
                k = self.files.shape.n_experts_per_tok
                best = (seen["mlp"] @ layer.mlp.gate.weight.T).topk(k + 1).values
                is_sure = best[..., k - 1] - best[..., k] > NEAR
            found.append(Layer(x + seen["mixer"], out, is_sure))
        return found

    def _tensors(self, i: int) -> dict[str, Any]:
        """float32 tensors of a layer by transformers' names."""
        import torch

        prefix, experts, found = f"{self._prefix}layers.{i}.", defaultdict[str, dict[int, Array]](dict), {}
        for name, tensor in self.files.tensors.items():
            if not name.startswith(prefix):
                continue
            values = values_of(tensor, 0, math.prod(tensor.shape[:-1])).reshape(tensor.shape)
            values, own = self._change(name, values), name.removeprefix(prefix)
            if one := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", own):
                experts[one[2]][int(one[1])] = values
            else:
                found[own] = values
        if experts:
            gate, up, down = (
                np.stack([experts[part][e] for e in sorted(experts[part])]) for part in ("gate", "up", "down")
            )
            found |= {"mlp.experts.gate_up_proj": np.concatenate([gate, up], 1), "mlp.experts.down_proj": down}
        qkv = found.pop("linear_attn.in_proj_qkv.weight", None) if self.files.shape.family == "qwen3_next" else None
        if qkv is not None:
            z = found.pop("linear_attn.in_proj_z.weight")
            found["linear_attn.in_proj_qkvz.weight"] = _interleaved(qkv, z, self.files.shape)
        return {name: torch.from_numpy(np.array(values, np.float32)) for name, values in found.items()}

    def logprobs(self, states: Sequence[Any], texts: Sequence[Sequence[int]], n_real: int) -> list[Array]:
        """Log-probabilities of each text's tokens but the first, float64 [T - 1], of the last layer's
        states [T, H]. n_real: ids that mean something; the rows behind them are padding, which Deltic does
        not count.
        """
        import torch

        shape, tensors = self.files.shape, self.files.tensors
        norm = 1 + torch.from_numpy(values_of(tensors[f"{self._prefix}norm.weight"], 0, 1)[0].copy())
        x = torch.cat([state[:-1] for state in states])
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.rms_norm_eps) * norm
        wanted = torch.tensor([id for ids in texts for id in ids[1:]])
        head = tensors.get("lm_head.weight") or tensors[f"{self._prefix}embed_tokens.weight"]
        n, total, own = n_real, torch.full((len(x),), -math.inf), torch.zeros(len(x))
        step = max(1, BLOCK_WEIGHTS // head.shape[1])
        for begin in range(0, n, step):
            end = min(begin + step, n)
            logits = x @ torch.from_numpy(values_of(head, begin, end).copy()).T
            total = torch.logaddexp(total, logits.logsumexp(1))
            here = (wanted >= begin) & (wanted < end)
            own[here] = logits[here, wanted[here] - begin]
        found = (own - total).double().numpy()
        return np.split(found, np.cumsum([len(ids) - 1 for ids in texts])[:-1])


def _interleaved(qkv: Array, z: Array, shape: ModelShape) -> Array:
    """Rows of Next's in_proj_qkvz, by key head, of q | k | v and z."""
    n, key = shape.gdn_n_k_heads, shape.gdn_key_size
    parts = (qkv[:key], qkv[key : 2 * key], qkv[2 * key :], z)
    rows: Array = np.concatenate([part.reshape(n, -1, part.shape[-1]) for part in parts], 1).reshape(-1, qkv.shape[1])
    return rows


def check_layers(
    files: Files,
    texts: Mapping[str, Sequence[int]],
    ours: Mapping[str, Sequence[Array]],
    plan: TextPlan,
    check: Check,
    tell: Tell,
) -> dict[str, Array]:
    """Compares every layer, and returns transformers' log-probabilities of the texts.

    texts: ids by name. ours: Deltic's `residuals` of each; {}: only the log-probabilities are wanted.
    plan: of Deltic's runner. Raises ImportError without transformers, CheckpointError.
    """
    import torch

    published, shape, names, bound = PublishedLayers(files), files.shape, [*texts], _bound(plan)
    own = {name: published.embedded(texts[name]) for name in names}
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])

    def add(part: str, mine: Array, theirs: Any, before: Any, is_sure: Any) -> None:
        error, added = (mine - theirs.numpy())[is_sure], (theirs.numpy() - before)[is_sure]
        sums[part][0] += float(np.square(error, dtype=np.float64).sum())
        sums[part][1] += float(np.square(added, dtype=np.float64).sum())

    for name in names if ours else ():
        add("the embedding", ours[name][0], own[name], 0.0, slice(None))
    for i in range(shape.n_layers):
        tell("running transformers' layers", i / shape.n_layers)
        inputs = [torch.stack([own[name], *([torch.from_numpy(ours[name][2 * i])] if ours else [])]) for name in names]
        kind = "attention" if shape.layer_types[i] == FULL_ATTENTION else "DeltaNet"
        for name, layer in zip(names, published.layer(i, inputs), strict=True):
            own[name] = layer.out[0]
            if ours:
                before, mixed, after = ours[name][2 * i : 2 * i + 3]
                add(f"layer {i}, {kind}", mixed, layer.middle[1], before, slice(None))
                add(f"layer {i}, feed-forward", after, layer.out[1], mixed, layer.is_sure[1].numpy())
    errors = {part: math.sqrt(error / added) if added else 0.0 for part, (error, added) in sums.items()}
    wrong = {part: error for part, error in errors.items() if not error <= bound}
    for part, error in wrong.items():
        mixers = [each for each in wrong if each.startswith(f"{part.partition(',')[0]},")]
        if part == mixers[0]:  # what follows a wrong mixer in its layer has read it
            check.wrong(f"{part}: what it adds differs by {error:.1%} of its length from what transformers' adds")
    check.figures = {"errors": errors, "bound": bound}
    if ours and not wrong:
        part = max(errors, key=lambda part: errors[part])
        check.note(
            f"{shape.n_layers} layers add what transformers' add, within {errors[part]:.2%} of its length ({part})"
        )
    found = published.logprobs([own[name] for name in names], [texts[name] for name in names], plan.n_real)
    return dict(zip(names, found, strict=True))


def layer_bytes(files: Files) -> int:
    """Bytes of the largest layer in float32."""
    sizes = defaultdict[str, int](int)
    for name, tensor in files.tensors.items():
        if found := re.search(r"\blayers\.\d+\.", name):
            sizes[found[0]] += 4 * math.prod(tensor.shape)
    return max(sizes.values(), default=0)


def _bound(plan: TextPlan) -> float:
    """The largest error of what a layer adds that the formats explain. A matrix that was rounded when it
    was loaded is not that of the files.
    """
    if plan.quantize is not None:
        return QUANTISED_BOUND + 2 * rounding(WEIGHT_FORMATS[plan.quantize])
    return QUANTISED_BOUND if plan.shape.formats else BOUND
