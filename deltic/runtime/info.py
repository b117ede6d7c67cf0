"""The EngineInfo that follows from a plan."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from deltic.engine.messages import EmbedderInfo, EngineInfo, PictureInfo, VideoInfo
from deltic.models.loading import shares_text
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import Weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import BLOCK
from deltic.runtime.model import SpeechModel, TextModel
from deltic.runtime.plan import SpeechPlan, TextPlan


def engine_info(
    plan: TextPlan | SpeechPlan, device: str, rules: PictureRules | None = None, **of_device: Any
) -> EngineInfo:
    """Makes what follows from a plan. rules: of a model that takes pictures. of_device: fields that follow
    from the device.

    `build.build_runner` adds what only it knows: the model's name, notices, the precision, whether there is a
    prefix cache, and the times of the start.
    """
    shape, n_gpus = plan.shape, plan.n_gpus
    info = partial(
        EngineInfo,
        vocab_size=plan.n_real,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_step_tokens=plan.max_step_tokens,
        max_drafts=plan.max_drafts,
        n_pages=plan.n_pages,
        n_slots=plan.n_slots,
        page_bytes=plan.host_page_bytes,
        state_bytes=n_gpus * plan.state_bytes,
        device=device if n_gpus == 1 else f"{n_gpus} x {device}",
        **of_device,
    )
    if isinstance(shape, ModelShape):
        return info(
            eos_token_ids=list(shape.eos_token_ids),
            even_context=even_context(shape),
            has_draft_head=shape.has_draft_head or plan.drafter is not None,
            draft_block=0 if plan.drafter is None else plan.drafter.most_guesses,
            max_loras=plan.adapters.n,
            kv_cache_dtype=shape.kv_cache_dtype,
            pictures=None if rules is None else _pictures(plan, rules),
        )
    return info(
        eos_token_ids=[shape.end_id],
        even_context=shape.talker.layer_params / (2 * shape.talker.n_layers * shape.talker.q_rows),
        n_prompt_ids=shape.n_prompt_ids,
        is_speech=True,
        has_state=False,
    )


def _pictures(plan: TextPlan | SpeechPlan, rules: PictureRules) -> PictureInfo:
    most = min(rules.max_pixels, plan.max_picture_tokens * BLOCK**2)
    video = VideoInfo(*dataclasses.astuple(rules.video))
    return PictureInfo(min(rules.min_pixels, most), most, plan.max_picture_tokens, video, plan.pixel_bytes)


def embedder_info(model: TextModel | SpeechModel) -> EmbedderInfo | None:
    """Facts of an embedder; None: the model is none."""
    if model.embedder is None or not isinstance(model.shape, ModelShape):
        return None
    return EmbedderInfo(size=model.shape.hidden_size, **dataclasses.asdict(model.embedder))


def precision(plan: TextPlan, weights: Weights) -> tuple[str, list[str]]:
    """Returns what EngineInfo says of a language model's precision and, for the log, the formats of a
    quantised checkpoint.
    """
    if not plan.shape.formats:
        return plan.quantize or "bf16", []
    formats = weights.formats()
    most = max(formats, key=lambda name: formats[name].n_weights)
    return most, [f"weights as they are stored: {shares_text(formats)}"]


def even_context(shape: ModelShape) -> float:
    """Tokens of context at which attention multiplies as much for a token as everything else."""
    n_heads = 1 if shape.tie_word_embeddings else 2
    weights = shape.n_active_params - n_heads * shape.vocab_size * shape.hidden_size
    state = 3.5 * shape.n_gdn_layers * shape.gdn_n_v_heads * shape.gdn_k_dim * shape.gdn_v_dim
    return (weights + state) / (2 * shape.n_attn_layers * shape.n_q_heads * shape.head_dim)
