"""A runner from a configuration, for every device and kind of model: located, planned, loaded, recorded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from deltic.config import ConfigError, EngineConfig
from deltic.engine.cache.tiers import Tiers
from deltic.engine.engine import StepRunner
from deltic.engine.messages import EngineInfo
from deltic.engine.step import Progress
from deltic.machine import cuda_driver
from deltic.models.checkpoint import locate, locate_speech, model_name, n_real_ids, speaks
from deltic.models.fields import CheckpointError, UnsupportedModelError, only
from deltic.models.gguf_config import naming
from deltic.models.loading import COUNTED, COUNTED_ROWS, PACKED, Declaration, Store, forget_headers
from deltic.models.packed import check_packed, resolve_quantize
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.shard import Cuts, cut
from deltic.models.qwen.weights import check_weights, dummy_weights, load_weights, stored_shape
from deltic.models.tts.weights import check_speech, declare_speech, dummy_speech_weights, load_speech_weights
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import VisionShape
from deltic.models.vision.weights import (
    VisionWeights,
    check_tower,
    dummy_vision,
    load_vision,
    picture_rules,
    stored_tower,
    stored_vision_shape,
    tower_place,
)
from deltic.models.vocoder.encoder import VoiceEncoder
from deltic.models.vocoder.weights import check_vocoder_files, dummy_vocoder, load_vocoder
from deltic.runtime.adapters import Adapters, adapter_room, given_adapters, refuse_sizes
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.fingerprint import fingerprint
from deltic.runtime.info import precision
from deltic.runtime.kv_cache import check_keys, resolve_kv_cache
from deltic.runtime.plan import AdapterRoom, Plan, SpeechPlan, TextPlan, make_plan
from deltic.runtime.voices import open_voices

if TYPE_CHECKING:
    from deltic.runtime.gpu.device import Gpu


class BuiltRunner(StepRunner, Protocol):
    """A runner as its device makes it: it does not know yet what it is called and what it keeps on disk."""

    info: EngineInfo


def is_for_gpu(config: EngineConfig) -> bool:
    """Whether the model runs on a GPU.

    It does if that is asked for; by default if there is a GPU and no setting that only the CPU has.
    """
    if config.device is not None or not config.may_use_gpu:
        return config.may_use_gpu
    return sees_gpu() and not (Path(config.model) / PACKED).exists()


def sees_gpu() -> bool:
    """Whether there is a GPU that models can run on here.

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
        device.check_reach()
    return device


def check_alone(configs: Sequence[EngineConfig]) -> None:
    """Raises ConfigError where one of several models of a server is to run on several GPUs: its kernels wait
    for those of other GPUs, which could wait there for room that another model has.
    """
    on_gpu = [config for config in configs if is_for_gpu(config)] if len(configs) > 1 else []
    most = max((config.tensor_parallel for config in on_gpu), default=1)
    if len(on_gpu) > 1 and most > 1:
        raise ConfigError(f"--tensor-parallel {most}: a model on several GPUs is served alone")


def plan_model(config: EngineConfig, device: Cpu | Gpu, free_bytes: int) -> tuple[EngineConfig, Path, Plan[Any]]:
    """The configuration with what the weights, keys and values will be rounded to, the checkpoint's
    directory, and the plan in free_bytes of the device's memory. Raises ValueError subclasses: a bad
    checkpoint, a plan that does not fit.
    """
    if speaks(config):
        directory, speech = locate_speech(config)
        config = device.prepare(resolve_quantize(config, directory), directory)
        return config, directory, make_plan(config, speech, device.speech, speech.n_drawn, free_bytes)
    directory, shape = locate(config)
    if device.text.drafts is not None:
        config = replace(config, max_drafts=device.text.max_drafts(config, shape))
    if config.max_drafts and device.n_cuts > device.n_gpus:
        raise ConfigError(
            f"--max-drafts {config.max_drafts}: with --tp-invariant {device.n_cuts}, drafts need as many GPUs; leave one of the two out"
        )
    drafts = device.text.draft_head and bool(config.max_drafts)
    shape = stored_shape(directory, shape, drafts) if config.dummy is None else replace(shape, has_draft_head=drafts)
    config = device.prepare(resolve_quantize(config, directory, shape.formats), directory)
    config, said = resolve_kv_cache(config, directory, device.text.device)
    shape = replace(shape, kv_cache_dtype=config.kv_cache_dtype)
    n_real = n_real_ids(config, directory, shape)
    tower, notices = find_tower(config, directory, shape, device)
    adapters = _adapter_room(config, shape, device)
    shape, cuts = cut(shape, device.n_cuts, are_even=config.tp_invariant is not None)
    with naming(None if config.dummy else directory):
        plan = make_plan(
            config,
            shape,
            device.text,
            n_real,
            free_bytes,
            tower=tower,
            cuts=cuts,
            n_gpus=device.n_gpus,
            adapters=adapters,
        )
    return config, directory, replace(plan, notices=notices, kv_notices=tuple(said))


def _adapter_room(config: EngineConfig, shape: ModelShape, device: Cpu | Gpu) -> AdapterRoom:
    """Raises ConfigError for adapters that this device or model does not apply."""
    if device.n_cuts > 1:
        if config.lora or config.allow_lora_loading:
            raise ConfigError(
                "--lora and --allow-lora-loading: adapters are applied on one GPU; leave --tensor-parallel and --tp-invariant out"
            )
        refuse_sizes(config)
        return AdapterRoom()
    bytes_of = device.text.adapter_bytes
    assert bytes_of is not None
    return adapter_room(config, given_adapters(config, shape), bytes_of)


def find_tower(
    config: EngineConfig, directory: Path, shape: ModelShape, device: Cpu | Gpu
) -> tuple[VisionShape | None, tuple[str, ...]]:
    """The shape of the vision tower that is to be run, if any, and notices. Random weights have one where
    --max-picture-tokens asks for it.

    Raises UnsupportedModelError, CheckpointError for one that was asked for and cannot be run. One that was
    not is left out, with a notice.
    """
    asked = bool(config.max_picture_tokens)
    if not device.text.picture_tokens(config) or (config.dummy is not None and not asked):
        return None, ()
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
            return None, ()
        assert device.text.check_tower is not None
        with naming(None if config.dummy else tower_place(directory), "vision_config."):
            device.text.check_tower(tower)
            only({"out_hidden_size": tower.out_hidden_size}, "out_hidden_size", (shape.hidden_size,))
        if config.dummy is None:
            store = COUNTED_ROWS if device.text.on_gpu else COUNTED
            check_tower(directory, tower, tensors, store)
        if shape.mrope_section is None:
            raise UnsupportedModelError("mrope_section", None, "three numbers, where there is a vision tower")
    except (CheckpointError, UnsupportedModelError) as error:
        if asked:
            raise
        return None, (f"pictures are refused: {error}",)
    return tower, ()


def check_files(config: EngineConfig, directory: Path, plan: Plan[Any], device: Cpu | Gpu) -> None:
    """Raises what `build_runner` does for the names, shapes and types of a checkpoint's tensors. Headers are
    read, and no weights.
    """
    store: Store = COUNTED_ROWS if device.text.on_gpu else COUNTED
    if config.dummy is not None:
        return
    if plan.speaks:
        d = Declaration(plan.quantize, store)
        declare_speech(d, plan.shape)
        check_speech(directory, d)
        check_vocoder_files(directory, plan.shape.vocoder)
        if plan.shape.variant == "base":
            VoiceEncoder.open(directory)
    elif (directory / PACKED).exists():
        check_packed(directory / PACKED, plan.shape)
    else:
        check_weights(directory, plan.cuts[0].whole if plan.cuts else plan.shape, plan.quantize, store)


def build_runner(config: EngineConfig, progress: Progress, device: Cpu | Gpu | None = None) -> StepRunner:
    """A runner of the configured model. device: by default the one that was asked for, or else a GPU if there
    is one.

    Raises ValueError subclasses: a bad checkpoint, a plan that does not fit, no such device.
    """
    lap, spent = _stopwatch()
    unused = []
    if device is None:
        device = gpu_device(config) if is_for_gpu(config) else Cpu()
        if config.device is None and config.may_use_gpu and cuda_driver() is not None and not _has_packages():
            unused = ["there is an NVIDIA GPU, and torch or Triton is missing: pip install 'deltic[gpu]' to use it"]
    progress("plan", 0.0)
    free = device.free_bytes()
    config, directory, plan = plan_model(config, device, free)
    lap("plan")
    compiling = device.begin_compiling(plan)  # beside reading the weights
    load = partial(_load, config, directory, plan, store=device.store(plan), progress=progress)
    weights, notices = device.weights(config, directory, plan, load, progress)
    notices = unused + notices
    beside: Any = None
    if plan.speaks:
        shape = plan.shape.vocoder
        beside = dummy_vocoder(shape, config.seed) if config.dummy else load_vocoder(directory, shape)
    elif (
        not plan.cuts and weights.n_bytes > plan.weight_bytes
    ):  # a head beside an embedding that the configuration ties to it
        untied = replace(plan.shape, tie_word_embeddings=False)
        remade = make_plan(config, untied, device.text, plan.n_real, free, tower=plan.tower, adapters=plan.adapters)
        plan = replace(remade, notices=plan.notices, kv_notices=plan.kv_notices)
    if not plan.speaks:
        check_keys(weights[0][0] if plan.cuts else weights, plan.shape)
        notices = notices + list(plan.kv_notices)
        beside, said = _load_tower(config, directory, plan, device)
        if plan.tower is not None:  # the language model's loader has skipped it
            notices = [notice for notice in notices if "vision tensors" not in notice]
        notices = notices + said
    lap("weights")
    if compiling is not None:
        compiling.wait(progress)
        lap("compile")
    runner: BuiltRunner = device.runner(plan, weights, beside, progress)
    lap(device.made)
    kernels, keys = device.kernels(runner), dict[str, bytes]()
    said = (
        _open_voices(runner, plan, config, directory, kernels)
        if plan.speaks
        else _open_tiers(runner, plan, config, directory, kernels, progress)
    )
    lap("cache")
    if isinstance(runner.adapters, Adapters):
        keys = {name: runner.adapters.load_now(path).key for name, path in config.adapters.items()}
        lap("adapters")
    forget_headers()
    kind, formats = precision(plan, weights[0][0] if plan.cuts else weights)
    disk = None if runner.tiers is None else runner.tiers.disk
    runner.info = msgspec.structs.replace(
        runner.info,
        model_name=model_name(config),
        precision=kind,
        notices=formats + notices + said,
        no_pictures="" if plan.speaks else "; ".join(plan.notices),
        prefix_cache=config.prefix_cache,
        adapters=keys,
        cache_files="" if disk is None else str(disk.directory.path),
        start_s=spent,
    )
    return runner


def _load(
    config: EngineConfig,
    directory: Path,
    plan: Plan[Any],
    *,
    store: Store,
    progress: Progress,
    cuts: Cuts | None = None,
) -> tuple[Any, list[str]]:
    """Weights from the checkpoint, or random ones, and notices. cuts: of a part of a model that is cut."""
    shape: Any = plan.shape if cuts is None else cuts.shape

    def on_bytes(done: int, total: int) -> None:
        progress("weights", done / max(1, total))

    if config.dummy is not None:
        dummy: Any = dummy_speech_weights if plan.speaks else dummy_weights
        return dummy(shape, config.seed, on_bytes, quantize=plan.quantize, store=store), []
    if plan.speaks:
        return load_speech_weights(directory, shape, on_bytes, quantize=plan.quantize, store=store)
    return load_weights(directory, shape, on_bytes, quantize=plan.quantize, store=store, cuts=cuts)


def _load_tower(
    config: EngineConfig, directory: Path, plan: TextPlan, device: Cpu | Gpu
) -> tuple[tuple[VisionWeights, PictureRules] | None, list[str]]:
    """The vision tower's weights, and how the model wants its pictures; and notices."""
    if plan.tower is None:
        return None, list(plan.notices)
    if config.dummy is not None:
        return (dummy_vision(plan.tower, config.seed, device.store(plan)), PictureRules()), []
    weights, notices = load_vision(directory, plan.tower, store=device.store(plan))
    return (weights, picture_rules(directory)), notices


def _open_tiers(
    runner: Any, plan: TextPlan, config: EngineConfig, directory: Path, kernels: Path | str, progress: Progress
) -> list[str]:
    """Starts the tiers of a language model's prefix cache; gives their notices."""
    if config.prefix_cache and config.cache_dir is not None:
        model = fingerprint(config, directory, kernels, lambda done, total: progress("cache", done / max(1, total)))
        runner.open_tiers(config.cache_dir, int(config.cache_disk_gb * 1e9), model)
    elif plan.n_host_units:
        runner.open_tiers(None, 0, "")
    tiers: Tiers | None = runner.tiers
    if tiers is None:
        return []
    # The default is meant for preempted sequences: on a CPU it is the same memory as the pools.
    tiers.takes_evicted = config.cache_host_gb is not None
    tiers.takes_imports = config.allow_cache_transfer
    return tiers.notices


def _open_voices(
    runner: Any, plan: SpeechPlan, config: EngineConfig, directory: Path, kernels: Path | str
) -> list[str]:
    """Opens the voices of a model that clones them. Returns notices of features that a speech model lacks."""
    shape = plan.shape
    if shape.variant == "base":
        runner.voices = open_voices(config, directory, shape.talker.hidden_size, runner, kernels)
    if config.cache_dir is None or not config.prefix_cache:
        return []
    return ["--cache-dir keeps voices only: prefixes of a speech model stay in memory"]


def warmup(config: EngineConfig) -> int:
    """`deltic warmup`: fills Triton's cache for a model or a shape, and prints how long that took.

    Exit status 1: not all kernels could be compiled. Raises ConfigError without a GPU or Triton, and what
    planning raises.
    """
    device = gpu_device(config)
    import torch
    import triton

    _, _, plan = plan_model(config, device, device.free_bytes())
    report = device.begin_compiling(plan, again=True).wait(lambda stage, done: None)
    if report is None:
        print("nothing was compiled", file=sys.stderr)
        return 1
    print(
        f"{model_name(config)} on {torch.cuda.get_device_name()}: {report.n_kernels} kernels, {report.n_compiled} compiled, "
        f"{report.n_failed} failed, {report.seconds:.1f} s; in {triton.knobs.cache.dir}"
    )
    return 1 if report.n_failed else 0


def _stopwatch() -> tuple[Callable[[str], None], dict[str, float]]:
    """For the stages of a start: a function that ends one, by its name, and the seconds that each took."""
    begun, spent = time.perf_counter(), dict[str, float]()

    def lap(stage: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        spent[stage], begun = round(now - begun, 3), now

    return lap, spent
