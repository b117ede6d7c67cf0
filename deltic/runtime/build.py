"""A runner from a configuration, for every device and kind of model: settled, planned, loaded, recorded."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from deltic.config import ConfigError, EngineConfig, without_foreign
from deltic.engine.cache.tree import Kind
from deltic.engine.engine import StepRunner
from deltic.engine.events import Needs
from deltic.engine.messages import EngineInfo
from deltic.engine.mirror import AskedTiers
from deltic.engine.step import Progress, silent
from deltic.machine import cuda_driver
from deltic.models.checkpoint import ALL_FILES, locate, locate_speech, model_name, n_real_ids, resolve_model, speaks
from deltic.models.dflash.shape import DRAFT_MODEL, is_drafter
from deltic.models.dflash.weights import stored_drafter
from deltic.models.embedder import embedder_in
from deltic.models.fields import CheckpointError, UnsupportedModelError, only
from deltic.models.files import PACKED, forget_headers, open_tensors, without_skipped
from deltic.models.gguf_config import naming
from deltic.models.joint_head import HeadShape, JointHead
from deltic.models.packed import resolve_quantize
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import cut, deals_experts, shares_told, whole
from deltic.models.qwen.weights import MIXES, UNUSED, dummy_formats, has_head, stored_shape
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import check_tower, picture_rules, stored_tower, stored_vision_shape, tower_place
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.runtime.adapters import Adapters, adapter_room, given_adapters
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.fingerprint import fingerprint
from deltic.runtime.fit import make_plan, refuse_little_memory
from deltic.runtime.info import embedder_info, precision
from deltic.runtime.model import FoundDrafter, SpeechModel, TextModel, check_keys, of_stage, resolve_kv_cache
from deltic.runtime.plan import SpeechPlan, TextKind, TextPlan, shared_sizes
from deltic.runtime.pools import Judge, Pools
from deltic.runtime.stages import (
    Neighbours,
    Stages,
    StageTasks,
    beat,
    check_settings,
    content_of,
    nth_stage,
    serve_steps,
    settings_of,
)
from deltic.runtime.voices import open_voices
from deltic.runtime.wire import GREETING_S, Join, Limits, Loaded, LostError, PeerConnection, ReadyStage, StageRefusal

if TYPE_CHECKING:
    from deltic.runtime.gpu.compile import Kernels
    from deltic.runtime.gpu.device import Gpu


END_S = 1.0
"""Seconds for which a stage whose engine has gone writes to its --cache-dir."""
NO_PACKAGES = "there is an NVIDIA GPU, and torch or Triton is missing: pip install 'deltic[gpu]' to use it"


class BuiltRunner(StepRunner, Protocol):
    """A runner as its device makes it: it does not know yet what it is called and what it keeps on disk."""

    info: EngineInfo


class TextRunner(BuiltRunner, Protocol):
    """A runner of a language model."""

    plan: TextPlan
    pools: Pools | None
    """The prompts whose hidden states are read; None: nobody reads any."""
    neighbours: Neighbours | None
    """Neighbours of a stage, which is told them once they are ready; None: all layers are here."""

    def open_tiers(self, directory: Path | None, disk_bytes: int, model: str, /) -> object: ...


def is_for_gpu(config: EngineConfig) -> bool:
    """Returns whether the model runs on a GPU.

    It does if that is asked for; by default if there is a GPU and no setting that only the CPU has.
    """
    if config.device is not None or not config.may_use_gpu:
        return config.may_use_gpu
    return sees_gpu() and not (Path(config.model) / PACKED).exists()


def sees_gpu() -> bool:
    """Returns whether there is a GPU that models can run on here.

    Importing torch takes a second: it is asked last.
    """
    if not _has_packages() or cuda_driver() is None:
        return False
    import torch

    return torch.cuda.is_available()


def _has_packages() -> bool:
    return find_spec("torch") is not None and find_spec("triton") is not None


def gpu_device(config: EngineConfig, is_here: bool = True) -> Gpu:
    """The GPU; is_here=False: also where there is none, to plan for one. Raises ConfigError."""
    if not _has_packages():
        raise ConfigError("a GPU needs torch and Triton: pip install 'deltic[gpu]', or give --device cpu")
    if is_here and not sees_gpu():
        raise ConfigError("torch sees no GPU here; install a build of torch with CUDA, or leave --device out")
    from deltic.runtime.gpu.device import Gpu  # imports Triton

    device = Gpu(config.lever, 1) if speaks(config) else Gpu(config.lever, config.tensor_parallel, config.tp_invariant)
    if is_here:
        device.find_reach()
    return device


def check_alone(configs: Sequence[EngineConfig]) -> None:
    """Raises ConfigError where one of several models of a server is to run on several GPUs: its kernels wait
    for those of other GPUs, which could wait there for room that another model has. And where two models have
    a stage on one machine, for which the second would wait in vain.
    """
    stages = [stage for config in configs if config.stages and not speaks(config) for stage in config.stages]
    for stage in stages:
        if stages.count(stage) > 1:
            raise ConfigError(f"--stages: {stage} is named twice; it runs layers of one model, once")
    on_gpu = [config for config in configs if is_for_gpu(config)] if len(configs) > 1 else []
    most = max((config.tensor_parallel for config in on_gpu), default=1)
    if len(on_gpu) > 1 and most > 1:
        raise ConfigError(f"--tensor-parallel {most}: a model on several GPUs is served alone")


def settle(config: EngineConfig, device: Cpu | Gpu, format: str | None = None) -> TextModel | SpeechModel:
    """Decides what the settings leave open. format: of a language model's random weights (`dummy_formats`).

    Raises ValueError subclasses: a bad checkpoint, a setting that this model or device does not honour.
    """
    if format is None and speaks(config):
        return _settle_speech(config, device)
    return settle_text(config, device, format)


def _settle_speech(config: EngineConfig, device: Cpu | Gpu) -> SpeechModel:
    directory, shape = locate_speech(config)
    quantize, rest = resolve_quantize(config, directory)
    config = without_foreign(replace(config, quantize=quantize, quantize_rest=rest), device.name, "speech")
    device.check(config, directory)
    device.speech.check(shape)
    return SpeechModel(config=config, directory=directory, shape=shape, n_real=shape.n_drawn)


def settle_text(
    config: EngineConfig, device: Cpu | Gpu, format: str | None = None, n_layers: int | None = None, stage: int = 0
) -> TextModel:
    """Does what `settle` does for a language model. n_layers: of random weights, the first ones alone. stage:
    the number of the one that is run, with --stages.
    """
    known = (*WEIGHT_FORMATS, *MIXES)
    if format is not None and (config.dummy is None or config.quantize or format not in known):
        raise ConfigError(f"--format {format}: with --dummy, without --quantize, and one of {', '.join(known)}")
    config = check_settings(without_foreign(config, device.name, "text"), device.name)
    directory, shape = locate(config)
    if n_layers is not None:
        if config.dummy is None or not 4 <= n_layers <= shape.n_layers:
            raise ConfigError(f"--layers {n_layers}: with --dummy, and from 4 to {shape.n_layers}")
        shape = replace(shape, layer_types=shape.layer_types[:n_layers])
    embedder = embedder_in(directory) if config.dummy is None else None
    joint_head = HeadShape.of(directory, shape.hidden_size) if config.dummy is None and directory.is_dir() else None
    if embedder is not None:
        config = replace(config, max_drafts=0)
    drafter = None if config.stages else find_drafter(config, directory, shape, device)
    left_out = [f"{DRAFT_MODEL}: left out on several machines"] * (
        bool(config.stages) and is_drafter(directory / DRAFT_MODEL)
    )
    shape = replace(shape, keeps_hidden=embedder is not None or joint_head is not None)
    max_drafts = device.text.max_drafts(config, shape)
    if drafter is not None and config.max_drafts is None:
        max_drafts = max(max_drafts, min(TextKind.drafts, drafter.shape.most_guesses))
    kv_cache_dtype, notices = resolve_kv_cache(config, directory, device.name)
    has_mtp = max_drafts > 0 and drafter is None  # one of the two
    shape = replace(shape, kv_cache_dtype=kv_cache_dtype, has_draft_head=config.dummy is not None and has_mtp)
    if config.dummy is None:
        shape = stored_shape(directory, shape, has_mtp)
    elif format is not None:
        shape = replace(shape, formats=dummy_formats(shape, format))
    if embedder is not None and not has_head(directory):
        shape = replace(shape, tie_word_embeddings=True)  # nothing is drawn from what it gives
    if drafter is not None:
        shape = replace(shape, feature_layers=drafter.shape.target_layer_ids)
    quantize, rest = resolve_quantize(config, directory, shape.formats)
    config = replace(
        config, quantize=quantize, quantize_rest=rest, max_drafts=max_drafts, kv_cache_dtype=kv_cache_dtype
    )
    device.check(config, directory)
    tower, no_pictures = (None, "") if stage else find_tower(config, directory, shape, device.text)
    n_real, shape = n_real_ids(config, directory, shape), nth_stage(shape, directory, config, stage)
    are_dealt = are_experts_dealt(config, shape, device.n_cuts)
    largest, cuts = cut(shape, device.n_cuts, are_even=config.tp_invariant is not None, are_dealt=are_dealt)
    notices += (*left_out, *shares_told(cuts))
    bytes_of = partial(device.text.adapter_bytes, cuts=cuts)
    adapters = adapter_room(config, given_adapters(config, shape), bytes_of)
    with naming(None if config.dummy else directory):
        for each in (largest, *(part.shape for part in cuts)):
            device.text.check(each)
    return TextModel(
        config=config,
        directory=directory,
        shape=largest,
        n_real=n_real,
        tower=tower,
        drafter=drafter,
        adapters=adapters,
        cuts=cuts,
        n_gpus=device.n_gpus,
        notices=notices,
        embedder=embedder,
        joint_head=joint_head,
        no_pictures=no_pictures,
        is_behind_tower=stage > 0 and shape.mrope_section is not None,
    )


def are_experts_dealt(config: EngineConfig, shape: ModelShape, n_cuts: int) -> bool:
    """Returns whether parts of a model get whole experts: where that is asked for, or columns are too few.

    Raises ConfigError where it is asked for and cannot be.
    """
    adapters = "--lora" if config.lora else "--allow-lora-loading" if config.allow_lora_loading else ""
    if not config.expert_parallel:
        return deals_experts(shape, n_cuts) and not adapters and config.expert_memory is None
    if not shape.is_moe or n_cuts == 1:
        alone = "one GPU has all experts; give --tensor-parallel, too"
        why = alone if shape.is_moe else "the model has no routed experts"
        raise ConfigError(f"--expert-parallel: {why}; else leave it out")
    if adapters:
        raise ConfigError(
            f"--expert-parallel: {adapters} is for experts that are cut by their columns; leave one of both out"
        )
    return True


def find_drafter(config: EngineConfig, directory: Path, shape: ModelShape, device: Cpu | Gpu) -> FoundDrafter | None:
    """Finds the block drafter that was asked for, or that is in the model's directory, unless drafts are off.

    Raises CheckpointError, UnsupportedModelError for one that is not there, not of this model, or not for
    this device; ConfigError for one that may not be used.
    """
    if config.draft_model is None:
        place = directory / DRAFT_MODEL
        most = device.text.drafts if config.max_drafts is None else config.max_drafts
        if most == 0 or config.dummy is not None or not is_drafter(place):
            return None
    elif config.max_drafts == 0:
        raise ConfigError(
            f"--draft-model {config.draft_model}: nothing is guessed here; leave it out, or --max-drafts 0"
        )
    elif config.draft_model.endswith(".gguf"):
        raise ConfigError(
            f"--draft-model {config.draft_model}: give the head's own checkpoint, in safetensors; GGUF is not read"
        )
    else:
        place = resolve_model(config.draft_model, ALL_FILES, None, config.download_dir)
    drafter = stored_drafter(place)
    drafter.check_target(shape)
    device.text.check_drafter(drafter)
    return FoundDrafter(place, drafter)


def find_tower(
    config: EngineConfig, directory: Path, shape: ModelShape, kind: TextKind
) -> tuple[VisionShape | None, str]:
    """The shape of the vision tower that is to be run, if any, and why one that is there is not. Random
    weights have one where --max-picture-tokens asks for it.

    Raises UnsupportedModelError, CheckpointError for one that was asked for and cannot be run.
    """
    asked = bool(config.max_picture_tokens)
    if not kind.picture_tokens(config) or (config.dummy is not None and not asked):
        return None, ""
    try:
        if config.dummy is not None:
            tower = VisionShape.published(config.dummy, shape.hidden_size)
        else:
            tensors = stored_tower(directory)
            tower = stored_vision_shape(directory, tensors)
            picture_rules(directory)
        if tower is None:
            if asked:
                raise ConfigError(f"--max-picture-tokens {config.max_picture_tokens}: this model has no vision tower")
            return None, ""
        with naming(None if config.dummy else tower_place(directory), "vision_config."):
            kind.check_tower(tower)
            only({"out_hidden_size": tower.out_hidden_size}, "out_hidden_size", (shape.hidden_size,))
        if config.dummy is None:
            check_tower(directory, tower, tensors, kind.counted)
        if shape.mrope_section is None:
            raise UnsupportedModelError("mrope_section", None, "three numbers, where there is a vision tower")
    except (CheckpointError, UnsupportedModelError) as error:
        if asked:
            raise
        return None, f"pictures are refused: {error}"
    return tower, ""


def plan_of(model: TextModel | SpeechModel, device: Cpu | Gpu, free_bytes: int) -> TextPlan | SpeechPlan:
    """The plan of a model in free_bytes of the device's memory. Raises what `make_plan` does."""
    if isinstance(model, SpeechModel):
        return make_plan(device.speech, model, free_bytes)
    return make_plan(device.text, model, free_bytes)


def needs_of(config: EngineConfig, free_bytes: Mapping[str, int], limit_bytes: int | None) -> Needs:
    """Plans a model as if it were alone in free_bytes of its device's memory, of which all models may have
    limit_bytes; see `Needs`. Raises what `build_runner` does before it loads.
    """
    device = gpu_device(config) if is_for_gpu(config) else Cpu()
    model = settle(config, device)
    kind = device.speech if isinstance(model, SpeechModel) else device.text
    free = free_bytes.get(device.name) or device.free_bytes()
    limit = int(free * kind.free_share)
    if limit_bytes is not None:
        limit = min(limit, limit_bytes + kind.reserve_bytes)
        free = min(free, math.ceil(limit / kind.free_share))
    plan = plan_of(model, device, free)
    names = ["max_model_len", "max_num_seqs", "max_step_tokens", *(["max_picture_tokens"] if plan.tower else [])]
    settings: dict[str, int | float] = {name: getattr(plan, name) for name in names}
    settings["memory_gb"] = (plan.total_bytes + 1000) / 1e9  # as a float, which may round down
    return Needs(device.name, plan.total_bytes + kind.reserve_bytes, limit, free, settings)


def build_runner(
    config: EngineConfig, progress: Progress, device: Cpu | Gpu | None = None, format: str | None = None
) -> StepRunner:
    """A runner of the configured model. device: by default the one that was asked for, or else a GPU if there
    is one. format: of random weights, see `settle`.

    Raises ValueError subclasses: a bad checkpoint, a plan that does not fit, no such device.
    """
    start = _Start(progress)
    if device is None:
        device = gpu_device(config) if is_for_gpu(config) else Cpu()
        if config.device is None and config.may_use_gpu and cuda_driver() is not None and not _has_packages():
            start.notices.append(NO_PACKAGES)
    progress("plan", 0.0)
    free = device.free_bytes()
    model = settle(config, device, format)
    if isinstance(model, SpeechModel):
        runner, kind = _build_speech(model, device, free, start)
    elif model.config.stages:
        runner, kind, stages = _build_stage(model, device, start)
        start.notices += [f"{each.what} ({each.kernels})" for each in stages.said]
        start.notices += _share_tiers(runner, model, stages, progress)
        kinds = dict.fromkeys(each.kernels for each in stages.said)
        if isinstance(runner.adapters, Adapters):
            runner.adapters.machines = stages
        drafts = model.shape.model_drafts  # on the last machine
        runner.info = msgspec.structs.replace(runner.info, has_draft_head=drafts)
        if len(kinds) > 1:
            runner.info = msgspec.structs.replace(runner.info, kernels=" and ".join(kinds))
            start.notices.append("machines have different kernels: answers have the bits of no single one of them")
    else:
        runner, kind = _build_text(model, device, free, start)
    start.lap("cache")
    keys = {}
    if isinstance(runner.adapters, Adapters):
        keys = {name: runner.adapters.load_now(path).key for name, path in model.config.adapters.items()}
        start.lap("adapters")
    forget_headers()
    runner.info = msgspec.structs.replace(
        runner.info,
        model_name=model_name(model.config),
        precision=kind,
        notices=[str(notice) for notice in start.notices],
        no_pictures=model.no_pictures,
        embedder=embedder_info(model),
        has_joint_head=model.joint_head is not None,
        prefix_cache=model.config.prefix_cache,
        adapters=keys,
        cache_files=str(runner.tiers.disk.directory.path) if runner.tiers and runner.tiers.disk else "",
        start_s=start.spent,
    )
    return runner


def _build_text(model: TextModel, device: Cpu | Gpu, free_bytes: int, start: _Start) -> tuple[TextRunner, str]:
    """A runner of a language model, with its cache, and its precision."""
    try:
        plan = make_plan(device.text, model, free_bytes)
    except ConfigError:
        if model.config.dummy is None or not model.shape.is_moe or model.cuts or model.config.stages:
            raise
        model = replace(model, shape=replace(model.shape, shares_experts=True))
        plan = make_plan(device.text, model, free_bytes)
        start.notices.append("random experts of each layer do not fit: all layers have those of the first")
    refuse_little_memory(plan)
    start.notices += where_experts_are(plan)
    start.lap("plan")
    compiling = device.begin_compiling(plan)  # beside reading the weights
    weights, loaded = device.text_weights(model, plan, start.progress)
    first = weights[0][0]
    if not plan.cuts and first.n_bytes > plan.weight_bytes + plan.table_bytes + plan.outside_bytes:
        # A head beside an embedding that the configuration ties to it, which only its values tell.
        model = replace(model, shape=replace(model.shape, tie_word_embeddings=False))
        plan = make_plan(device.text, model, free_bytes)
    check_keys(first, plan.shape)
    vision, said = model.load_tower(device.stores(plan)[0])
    drafters, told = model.load_drafters(device.stores(plan))
    loaded += told
    if vision is not None:  # the language model's loader has skipped it
        loaded = without_skipped(loaded, "vision")
    start.compiled(compiling)
    runner = device.text_runner(plan, weights, vision, start.progress, drafters)
    if model.joint_head is not None and runner.pools is not None:
        runner.pools.judge = judge_of(model, model.joint_head)
    start.lap(device.made)
    told = []
    if not model.config.stages:
        told = _open_tiers(runner, model, _content(model, device.kernels(runner.info), start))
    kind, formats = precision(plan, first)
    start.notices = [*formats, *start.notices, *loaded, *model.notices, *said, *told]
    return runner, kind


def where_experts_are(plan: TextPlan) -> list[str]:
    """Says that a GPU has some of the experts alone, where that is so."""
    n_slots = f"{plan.n_expert_slots} of {plan.shape.n_experts} of each layer"
    told = f"experts are in the host's memory, {n_slots} on the GPU, too: fewer sequences or less context leave room"
    return [told] if plan.n_expert_slots else []


def _build_stage(
    model: TextModel, device: Cpu | Gpu, start: _Start, number: int = 0, front: PeerConnection | None = None
) -> tuple[TextRunner, str, Stages]:
    """A runner of a stage of a language model, once all stages behind it are ready, its precision, and the
    stages. front: of a stage that is not the engine's own. Raises ConfigError, RunnerLostError.
    """
    free, stages, shape = device.free_bytes(), Stages(model, device.name, front), model.shape
    plan = make_plan(device.text, model, free)
    limits = stages.join(number, Limits(shared_sizes(plan), plan.n_host_units), start.progress)
    if front is not None:
        limits = front.agreed(limits, stages.limit_s)
    runner, kind = _build_text(stages.load(limits), device, free, start)
    last, place = shape.first_layer + shape.n_layers - 1, "here" if front is None else f"on {front.own_name}"
    own = f"layers {shape.first_layer} to {last} of {len(shape.model_layer_types)} run {place}"
    kernels = f"{runner.info.kernels}, {runner.info.device}" if runner.info.on_gpu else runner.info.kernels
    content, plan = _content(model, device.kernels(runner.info), start), runner.plan
    ready = ReadyStage(own, kernels, content, plan.page_bytes, plan.state_bytes)
    stages.said = stages.wait(ready, start.progress)
    runner.neighbours = stages
    return runner, kind, stages


def serve_stage(front: PeerConnection, given: EngineConfig) -> None:
    """Runs a stage of a model for an engine, until that is gone: LostError. given: this machine's settings.

    What this machine refuses is told to the engine. Raises RunnerLostError where a stage behind is lost.
    """
    join = front.receive(GREETING_S)
    if not isinstance(join, Join):
        raise LostError(f"{front.name} sent {join}, where it should join")
    try:
        config = settings_of(join, given)
        if not 0 < join.number <= len(config.stages):  # without stages no setting would be refused
            raise ConfigError(f"{front.name} has no stage {join.number}, of {len(config.stages)}")
        threading.Thread(target=beat, args=(front, config.stages_timeout_s / 4), daemon=True).start()
        device = gpu_device(config) if is_for_gpu(config) else Cpu()
        model = settle_text(config, device, stage=join.number)
        if content_of(model) != join.content:
            raise ConfigError(f"it has another model, {model_name(config)}; give all machines the same")
        runner, _, stages = _build_stage(model, device, _Start(front.report), join.number, front)
    except (ValueError, MemoryError) as error:
        front.send(StageRefusal(str(error) or "out of memory"))
        return
    forget_headers()
    front.send(Loaded(stages.said))
    beside = StageTasks(runner, partial(_open_tiers, runner, model), front.own_name)
    try:
        serve_steps(front, runner, stages, beside)
    finally:
        if runner.tiers is not None:
            runner.tiers.close(END_S)


def judge_of(model: TextModel, shape: HeadShape) -> Judge:
    """The joint head of a decision model, with rows of the output embedding as they are in the files.

    Raises CheckpointError, UnsupportedModelError.
    """
    tensors = open_tensors(model.directory, UNUSED)
    ends = ("lm_head.weight", *(["embed_tokens.weight"] if whole(model.shape, model.cuts).tie_word_embeddings else []))
    name = next((name for end in ends for name in tensors if name.endswith(end)), ends[0])
    if name not in tensors or tensors[name].format is not None:
        found = "nothing" if name not in tensors else tensors[name].dtype
        raise UnsupportedModelError(name, found, "rows of 16 bits, beside a joint head")
    return Judge(JointHead.load(model.directory, shape), lambda id: np.asarray(tensors[name].read(id, id + 1)))


def _build_speech(model: SpeechModel, device: Cpu | Gpu, free_bytes: int, start: _Start) -> tuple[BuiltRunner, str]:
    """A runner of a speech model, with the voices of one that clones them, and its precision."""
    plan, config, shape = make_plan(device.speech, model, free_bytes), model.config, model.shape
    start.lap("plan")
    compiling = device.begin_compiling(plan)
    weights, loaded = device.speech_weights(model, plan, start.progress)
    vocoder = model.load_vocoder()
    start.compiled(compiling)
    runner = device.speech_runner(plan, weights, vocoder, start.progress)
    start.lap(device.made)
    if shape.variant == "base":
        width, kernels = shape.talker.hidden_size, device.kernels(runner.info)
        runner.voices = open_voices(config, model.directory, width, runner, kernels)
    start.notices += loaded
    if config.prefix_cache and config.cache_dir is not None:
        start.notices.append("--cache-dir keeps voices only: prefixes of a speech model stay in memory")
    return runner, plan.quantize or "bf16"


def _content(model: TextModel, kernels: Path | str, start: _Start) -> str:
    """Names what decides the bits of what is kept on disk; "": nothing is."""
    config, shape, on_bytes = model.config, model.shape, of_stage(start.progress, "cache")
    if not config.prefix_cache or config.cache_dir is None:
        return ""
    if (drafter := model.drafter) is None:
        return fingerprint(config, shape, model.directory, kernels, on_bytes)
    # The drafter's keys are in the pages, too.
    drafters = fingerprint(config, drafter.shape, drafter.directory, kernels, on_bytes)
    return fingerprint(config, (shape, drafters), model.directory, kernels, on_bytes)


def _share_tiers(runner: TextRunner, model: TextModel, stages: Stages, progress: Progress) -> list[str]:
    """Starts the tiers of all machines of a model; gives the notices of this one's. Files are named after all
    machines: what one has computed comes of what those in front of it did. Raises ConfigError.
    """
    ready, content, keys = stages.said, "", set[bytes]()
    if lacking := [each.what for each in ready if not each.content]:
        if len(lacking) < len(ready):
            raise ConfigError(f"--cache-dir: {lacking[0]} without one; give one to all machines, or to none")
    else:
        content = blake2b("".join(each.content for each in ready).encode(), digest_size=16).hexdigest()
    told = _open_tiers(runner, model, content)
    if (tiers := runner.tiers) is not None and tiers.disk is not None:
        keys = {entry.key for entry in tiers.disk.entries}
    errand = stages.ask(AskedTiers(content, b"".join(keys)))
    while not errand.is_done:
        progress("cache", 0.0)
        stages.hear(1.0)
    if errand.error is not None:
        raise ConfigError(errand.error)
    if tiers is not None:
        largest = {Kind.PAGE: max(one.page_bytes for one in ready), Kind.STATE: max(one.state_bytes for one in ready)}
        tiers.share(stages, largest, max(-(-each.state_bytes // each.page_bytes) for each in ready))
    return told


def _open_tiers(runner: TextRunner, model: TextModel, content: str) -> list[str]:
    """Starts the tiers of a language model's prefix cache; gives their notices. content: of `_content`."""
    config = model.config
    if content:
        if config.stages:  # machines may have one directory, and each has a part of its own
            content = blake2b(f"{content} {model.shape.first_layer}".encode(), digest_size=16).hexdigest()
        runner.open_tiers(config.cache_dir, int(config.cache_disk_gb * 1e9), content)
    elif runner.plan.n_host_units:
        runner.open_tiers(None, 0, "")
    tiers = runner.tiers
    if tiers is None:
        return []
    # The default is meant for preempted sequences: on a CPU it is the same memory as the pools.
    tiers.takes_evicted = config.cache_host_gb is not None
    tiers.takes_imports = config.allow_cache_transfer
    return tiers.notices


def warmup(config: EngineConfig) -> int:
    """`deltic warmup`: fills Triton's cache for a model or a shape, and prints how long that took.

    Exit status 1: not all kernels could be compiled. Raises ConfigError without a GPU or Triton, and what
    planning raises.
    """
    device = gpu_device(config)
    import torch
    import triton

    plan = plan_of(settle(config, device), device, device.free_bytes())
    report = device.begin_compiling(plan, again=True).wait(silent)
    if report is None:
        print("nothing was compiled", file=sys.stderr)
        return 1
    print(
        f"{model_name(config)} on {torch.cuda.get_device_name()}: {report.n_kernels} kernels, {report.n_compiled} compiled, "
        f"{report.n_failed} failed, {report.seconds:.1f} s; in {triton.knobs.cache.dir}"
    )
    return 1 if report.n_failed else 0


class _Start:
    """Progress of a start: how far it is, the seconds that each stage took, by its name, and notices."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.spent, self._begun = progress, dict[str, float](), time.perf_counter()
        self.notices: list[str] = []

    def lap(self, stage: str) -> None:
        """Ends a stage."""
        now = time.perf_counter()
        self.spent[stage], self._begun = round(now - self._begun, 3), now

    def compiled(self, kernels: Kernels | None) -> None:
        """Ends the reading of weights, and waits for the kernels."""
        self.lap("weights")
        if kernels is not None:
            kernels.wait(self.progress)
            self.lap("compile")
