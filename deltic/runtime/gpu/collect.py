"""Finds the kernels that the steps of a plan start: it walks the steps, and `compile.collecting` notes what
Triton would compile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deltic.models.dflash.weights import declare_drafter
from deltic.models.loading import Declaration
from deltic.models.qwen.weights import Weights, empty_weights
from deltic.models.tts.weights import empty_speech_weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.weights import empty_vision
from deltic.models.vocoder.weights import empty_vocoder
from deltic.ops.gpu.launch import allocate_on, bound_levers
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix
from deltic.runtime.gpu.buffers import exchanges, gpu_workspace, meeting
from deltic.runtime.gpu.compile import Job, collecting
from deltic.runtime.gpu.speech import GpuSpeechRunner
from deltic.runtime.gpu.text import GpuTextRunner
from deltic.runtime.plan import Plan, SpeechPlan, TextPlan


def collect(plan: Plan[Any]) -> list[Job]:
    """Every kernel that the steps of this plan start, and the chunks of a speech model's vocoder."""
    plan = replace(plan, host_bytes=0)
    runner = _speech_runner(plan) if plan.speaks else _text_runner(plan)
    with collecting() as jobs:
        for recording in runner.recordings.made.values():
            recording.run()
        if isinstance(runner, GpuTextRunner):
            runner.walk()
        else:
            for recording in runner.vocoder.recordings():
                recording.run()
    return list(jobs)


def _text_runner(plan: TextPlan) -> GpuTextRunner:
    weights = empty_weights(plan.shape, plan.quantize, plan.shape.tie_word_embeddings, DeviceStore("meta"))
    vision = None
    if plan.tower is not None:
        tower = replace(plan.tower, depth=1)  # the other blocks start the same kernels
        plan, vision = replace(plan, tower=tower), (empty_vision(tower, DeviceStore("meta")), PictureRules())
    joined = None
    if plan.cuts:  # other GPUs start the same kernels, unless they have other sizes
        workspace = gpu_workspace(plan, allocate_on("meta"))
        in_host = (
            None if bound_levers().peer or plan.n_gpus == 1 else meeting(plan, allocate_on("meta"), is_in_host=True)
        )
        joined = workspace, exchanges([workspace] * plan.n_gpus, plan.cuts, in_host)[0]
    weights = replace(weights, layers=_different_layers(weights))
    drafter = None
    if plan.drafter is not None:
        drafter = declare_drafter(Declaration(plan.quantize, DeviceStore("meta"), plan.drafter.formats), plan.drafter)
    return GpuTextRunner(plan, [weights] * plan.n_shards, vision=vision, exchange=joined, drafter=drafter)


def _speech_runner(plan: SpeechPlan) -> GpuSpeechRunner:
    shape = plan.shape  # two layers: the others start the same kernels
    talker, predictor = replace(shape.talker, n_layers=2), replace(shape.predictor, n_layers=2)
    shape = replace(shape, talker=talker, predictor=predictor)
    weights, vocoder = empty_speech_weights(shape, plan.quantize, DeviceStore("meta")), empty_vocoder(shape.vocoder)
    return GpuSpeechRunner(replace(plan, shape=shape), weights, vocoder)


def _different_layers(weights: Weights) -> list[Any]:
    """Layers that start all kernels: one of each kind and formats, the first of their type in front, and one
    behind them. Each stands where the model has a layer of its type.
    """
    kinds: list[list[object]] = [[type(layer), type(layer.mlp)] for layer in weights.layers]
    for name, part in weights.named_parts():
        if name.startswith("layers.") and isinstance(part, Matrix):
            kinds[int(name.split(".")[1])] += [(segment.n, segment.format) for segment in part.segments]
    new = list({tuple(kind): layer for kind, layer in reversed([*zip(kinds, weights.layers, strict=True)])}.values())[
        ::-1
    ]
    others = [layer for layer in weights.layers if not any(layer is one for one in new)]
    found = list[Any]()
    for layer in weights.layers:
        is_end = not new
        found.append(next(one for one in (*new, *others) if type(one) is type(layer)))
        new, others = ([one for one in part if one is not found[-1]] for part in (new, others))
        if is_end:
            break
    return found
