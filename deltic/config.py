"""Every setting of Deltic, with its default, its help text and its bounds.

No other file invents a default. A field below is a flag, a DELTIC_ variable and a key of --config
(`config_sources.py`), and `--help` shows the docstring behind it as it stands (`commands/flags.py`), so it is
in the words and the case of `--help`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import fnmatch
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from deltic.json_types import JsonObject
from deltic.machine import CPUS, MAX_THREADS

BUILT_IN = "built-in"
"""Name of the model served when none is given."""

ENV_PREFIX = "DELTIC_"

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message says which, why, and what would work."""


class MayPass(ConfigError):
    """A start that may succeed later, as when another server has the port."""


def exit_status(error: Exception) -> int:
    """The exit status of a command that an error ends.

    2: a setting is wrong, which no later start mends. 1: all other errors.
    """
    return 2 if isinstance(error, ValueError) and not isinstance(error, MayPass) else 1


class About(TypedDict, total=False):
    """Facts of a setting beside its default and its docstring, which is its help text."""

    choices: tuple[str, ...]
    metavar: str
    several: bool
    """The flag may have several values behind it, beside being repeated."""
    device: str | Mapping[str, str]
    """The only device (cpu, cuda) for which it means something; see `without_foreign`. Where that is another
    for each kind of model: by kind, those without one left out.
    """
    kind: str
    """The only kind of model (text, speech) for which it means something."""
    least: float
    """Bound from below, whatever the model is. With it, infinity is refused, too."""
    most: float


def knob(default: T, **about: Unpack[About]) -> T:
    """A setting of which there is more to say than a type, a default and a docstring."""
    return dataclasses.field(default=default, metadata=about)


@cache
def docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings behind the fields of each class of a module, by the name of the class."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(Path(str(sys.modules[module].__file__)).read_text())):
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for field, behind in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(behind, ast.Expr)
                    and isinstance(field.target, ast.Name)
                ):
                    texts[field.target.id] = " ".join(str(ast.literal_eval(behind.value)).split())
    return found


ADAPTER_NAME = r"[^\s\x00-\x1f\x7f]{1,256}"
"""Pattern of an adapter's name: no character that a log cannot show."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of the engine process. Values of None are decided at start from the model and the
    machine.
    """

    model: str = knob(BUILT_IN, metavar="MODEL")
    """checkpoint directory, GGUF file, hub name or short name"""
    revision: str | None = None
    """branch, tag or commit of a hub name (default: the hub's)"""
    download_dir: Path | None = None
    """where hub downloads are kept (default: as huggingface_hub, ~/.cache/huggingface)"""
    tokenizer: str | None = knob(None, metavar="MODEL")
    """directory or hub name whose tokenizer and chat template are used (default: the model's)"""
    device: str | None = knob(None, choices=("cpu", "cuda"))
    """where the model runs (default: a GPU if there is one)"""
    dummy: str | None = knob(None, metavar="SHAPE")
    """random weights at a published shape, e.g. qwen3.5-0.8b"""
    quantize: str | None = knob(None, choices=("fp8", "int8", "int4", "int4-symmetric"), device={"speech": "cpu"})
    """round the weights at load, to 8.25 or 4.5 bits; fp8 is for a GPU, where --device cuda is given
    (default: as stored)
    """
    quantize_rest: str | None = knob(None, choices=("fp8", "int8", "int4"), kind="text")
    """of a checkpoint that is quantised, round at load the matrices that it left in 16 bits; fp8 is for a GPU
    (default: as stored)
    """
    weights_cache: Path | None = knob(None, metavar="DIR", device="cpu")
    """keep packed weights in this directory: later starts map them instead of loading; a checkpoint that
    changes leaves its old file there
    """
    threads: int | None = knob(None, device="cpu", least=1, most=MAX_THREADS)
    """CPU threads of the engine (default: all that it may use)"""
    pin_threads: bool = knob(False, device="cpu")
    """bind each engine thread to a CPU of its own, in the order of their numbers"""
    memory_gb: float | None = knob(None, least=0.01)
    """memory for everything: weights, workspace, pages, slots and --cache-host-gb (default: what that takes
    with 2 GiB of pages and slots, or half as much again as sequences need; at most 80 % of what is free)
    """
    expert_memory: float | None = knob(None, metavar="GB", kind="text", least=0.0)
    """GB of memory, on each GPU, for the routed experts of a mixture; those that do not fit stay outside, on
    a GPU in the host's memory, on a CPU on the disk (a packed model, or --weights-cache), and answers stay
    the same, to the bit (default: all of them, else what fits)
    """
    max_model_len: int | None = knob(None, metavar="TOKENS", least=1)
    """longest sequence, prompt and answer together (default: the model's, at most 32768)"""
    rope_scaling: JsonObject | None = knob(None, metavar="JSON", kind="text")
    """positions beyond those that the model was made for, by YaRN, in place of what the checkpoint says, e.g.
    '{"rope_type": "yarn", "factor": 4}'; answers to short prompts change, too
    """
    max_num_seqs: int | None = knob(None, least=1)
    """sequences that run at once, on a GPU up to 1024 (default: 32, on a GPU 128, fewer if they do not fit)
    """
    max_step_tokens: int | None = knob(None, least=1)
    """most tokens of one step: decodes first, then prefill (default: 512; on a GPU 8192 of prefill, decodes
    beside them)
    """
    max_itl_ms: float = knob(250.0, least=0.0)
    """target for the time between a running sequence's tokens: prefill shrinks to meet it, to 64 tokens a
    step at the least; 0 sets none
    """
    max_drafts: int | None = knob(None, metavar="TOKENS", kind="text", least=0, most=31)
    """most tokens of an answer that are guessed ahead and checked in one step, as many as pay: by the draft
    head (MTP) or a block drafter, a grammar, or where text repeats itself; answers stay the same, to the bit;
    0 guesses nothing (default: 8, of a block drafter its block at most; without one 0 on a GPU, and for a
    model of less than 64 MiB)
    """
    draft_model: str | None = knob(None, metavar="MODEL", kind="text")
    """guess several tokens at once with this block drafter (DFlash, DFlash 2 or DSpark), in place of the
    draft head (MTP); answers stay the same, to the bit (default: the folder draft_model in the model's
    directory, if there is one, on a GPU if --max-drafts asks for drafts)
    """
    max_picture_tokens: int | None = knob(None, kind="text", least=0)
    """tokens of the largest picture in a prompt, one for each 32 x 32 pixels; a larger picture is made
    smaller; 0 takes no pictures and leaves the vision tower unread (default: 4096, on a GPU 16384, or what
    memory allows)
    """
    tensor_parallel: int = knob(1, metavar="N", device="cuda", kind="text")
    """GPUs that run the model together, each a part of every layer: 2, 4 or 8 of one machine; fastest where
    they reach each other's memory
    """
    tp_invariant: int | None = knob(None, metavar="N", device="cuda", kind="text")
    """gives the bits of so many GPUs (2, 4 or 8), on as many or fewer: each runs several of the parts that
    the model is cut into, one behind the other, which is slower than one larger part
    """
    expert_parallel: bool = knob(False, device="cuda", kind="text")
    """give GPUs whole experts, also where columns of all could be cut"""
    stages: tuple[str, ...] = knob((), metavar="HOST:PORT", several=True, kind="text")
    """machines with the further layers, in order"""
    stages_secret: Path | None = knob(None, metavar="FILE")
    """file of a secret, 16 bytes or more, that all of them have"""
    stages_timeout_s: float = knob(20.0, least=0.1)
    """a stage that is silent for so many seconds is lost; in a start and beside steps for 5 at least"""
    lora: tuple[str, ...] = knob((), metavar="NAME=PATH", kind="text")
    """apply this LoRA adapter to requests whose model is NAME: a directory of PEFT's, or a safetensors file
    with its adapter_config.json beside it; may be given several times
    """
    allow_lora_loading: bool = knob(False, kind="text")
    """let clients load adapters from paths on this machine, and unload them: POST /v1/load_lora_adapter,
    /v1/unload_lora_adapter
    """
    max_loras: int | None = knob(None, kind="text", least=1, most=1024)
    """adapters that may be loaded at once (default: those of --lora, and 8 with --allow-lora-loading)"""
    max_lora_rank: int | None = knob(None, kind="text", least=1, most=256)
    """largest rank of an adapter, at most 256 (default: that of those of --lora, and 64 with
    --allow-lora-loading)
    """
    lora_gb: float | None = knob(None, kind="text", least=0.0)
    """memory for adapters (default: what those of --lora need, and 1 more with --allow-lora-loading)"""
    kv_cache_dtype: str = knob(
        "auto", choices=("auto", "bf16", "fp8", "turboquant_k8v4", "int8", "k8v4", "bfloat16", "fp8_e4m3"), kind="text"
    )
    """format of keys and values in pages: bf16; on a GPU fp8 (half the memory), or turboquant_k8v4 (keys in 8
    bits, values in 4); on a CPU int8, or k8v4; answers change with it. auto: on a GPU what the checkpoint was
    made for, else bf16
    """
    n_pages: int | None = knob(None, least=1)
    """KV pages of 64 tokens (default: what fits, at most what can be used)"""
    state_dtype: str = knob("float32", choices=("float32", "bfloat16"), kind="text")
    """what recurrent states are kept in; bfloat16 takes half of the memory and traffic, and rounds a state
    whenever it is stored
    """
    prefix_cache: bool = True
    """keep what was computed, for requests that begin in the same way"""
    n_checkpoints: int | None = knob(None, kind="text", least=0)
    """state slots for checkpoints of the prefix cache, beside those of the sequences that run (default: what
    a quarter of the pools holds)
    """
    cache_host_gb: float | None = knob(None, least=0.0)
    """host memory for what is evicted from the pools, and for preempted sequences (default: for one of full
    length, preempted only)
    """
    cache_dir: Path | None = None
    """keep the prefix cache in this directory, too: it survives a restart"""
    cache_disk_gb: float = knob(16.0, least=0.0)
    """most that is kept of a model in --cache-dir, by all servers that use it; less where the disk is full"""
    allow_cache_transfer: bool = knob(False, kind="text")
    """let administrators move prefixes between servers: POST /cache/export, /cache/import; needs --cache-dir
    """
    voices_dir: Path | None = knob(None, kind="speech")
    """keep uploaded voices of a speech model in this directory (default: voices in --cache-dir, else in
    memory)
    """
    lever: tuple[str, ...] = knob((), metavar="NAME=VALUE", device="cuda")
    """set an optimisation of the GPU, to measure it, e.g. pdl=off (docs/gpu.md lists them); may be given
    several times
    """
    trace: Path | None = knob(None, metavar="FILE")
    """append what each step did to this file, as a Chrome trace, up to 256 MB (Perfetto opens it)"""
    seed: int = 0
    """seed of dummy weights"""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that no model could have together."""
        if self.dummy and self.model not in ("", BUILT_IN):
            raise ConfigError("--dummy makes random weights: give a model or --dummy, not both")
        if self.revision and (self.dummy or self.model == BUILT_IN):
            raise ConfigError("--revision needs a model name of the hub.")
        n_gpus, sizes = self.tensor_parallel, (1, 2, 4, 8)
        if n_gpus not in sizes:
            raise ConfigError(f"--tensor-parallel {n_gpus}: give 1, 2, 4 or 8")
        known = [n for n in sizes[1:] if n >= n_gpus]
        if self.tp_invariant not in (None, *known):
            raise ConfigError(
                f"--tp-invariant {self.tp_invariant}: with --tensor-parallel {n_gpus} give one of {', '.join(map(str, known))}"
            )
        names = [given.partition("=")[0] for given in self.lora]
        for given, name in zip(self.lora, names, strict=True):
            if not re.fullmatch(ADAPTER_NAME, name) or not given.partition("=")[2].strip():
                raise ConfigError(f"--lora {given!r}: give NAME=PATH, the name without spaces")
            if names.count(name) > 1:
                raise ConfigError(f"--lora {given!r}: an adapter of this name is given twice")
        if self.allow_cache_transfer and not (self.cache_dir and self.prefix_cache and self.cache_disk_gb):
            raise ConfigError(
                "--allow-cache-transfer: prefixes move as files on disk. Give --cache-dir, without --no-prefix-cache or --cache-disk-gb 0."
            )

    @property
    def adapters(self) -> dict[str, Path]:
        """The paths of --lora by their names."""
        return {name: Path(path).expanduser() for name, _, path in (given.partition("=") for given in self.lora)}

    @property
    def rounded(self) -> str | None:
        """Format that matrices stored in 16 bits are rounded to; None: they stay."""
        return self.quantize or self.quantize_rest

    @property
    def may_use_gpu(self) -> bool:
        """True if none of these says that the model runs on the CPU."""
        return self.quantize in (None, "fp8") if self.device is None else self.device == "cuda"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The HTTP process's settings for one model."""

    served_model_name: tuple[str, ...] = knob((), metavar="NAME", several=True)
    """names that requests may use, the first in answers (default: the model's own). One with *, ? or [ in it
    is a pattern for any other name, e.g. '*' or 'gpt-*', and is not listed
    """
    chat_template: Path | None = None
    """Jinja file to use instead of the checkpoint's chat template"""
    default_chat_template_kwargs: JsonObject | None = knob(None, metavar="JSON")
    """settings of the chat template for requests that do not say, e.g. '{"enable_thinking": false}'"""
    generation_config: str = knob("auto", metavar="auto|none|PATH")
    """where temperature, top_p, top_k, min_p and repetition_penalty of requests that do not say come from:
    auto (the checkpoint's generation_config.json), none (nowhere), or such a file or its directory
    """
    override_generation_config: JsonObject | None = knob(None, metavar="JSON")
    """of these, and max_new_tokens, other values, e.g. '{"temperature": 0.6}'"""
    voice_alias: tuple[str, ...] = knob((), metavar="NAME=VOICE")
    """another name of a voice, for programs that know OpenAI's only, e.g. alloy=ryan; may be given several
    times
    """

    def __post_init__(self) -> None:
        """Raises ConfigError for a pattern that is none."""
        for name in self.patterns:
            if re.escape(name) in fnmatch.translate(name):
                raise ConfigError(
                    f"--served-model-name {name!r}: the '[' needs a ']', as in 'qwen-[ab]'; so it matches only itself"
                )

    def names(self, *own: str) -> tuple[str, ...]:
        """Returns the names in /v1/models, the one in answers first. own: used where none is given."""
        return tuple(n for n in dict.fromkeys(self.served_model_name) if not _is_pattern(n)) or own

    @property
    def shapes_text(self) -> str | None:
        """A flag that was given and means nothing to a model that speaks."""
        names = ("default_chat_template_kwargs", "generation_config", "override_generation_config")
        return next(("--" + name.replace("_", "-") for name in changed(self) if name in names), None)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of further names that requests may use, as in fnmatch."""
        return tuple(n for n in dict.fromkeys(self.served_model_name) if _is_pattern(n))


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP process's settings that do not depend on the model."""

    models_from: tuple[str, ...] = knob((), metavar="cache|DIR")
    """load models when requests name them: those in this directory, or with the word cache in the hub's (or
    --download-dir); may be given several times. A MODEL beside it is loaded at the start
    """
    models_gb: float | None = knob(None, least=0.01)
    """with --models-from: memory for all models that are loaded at once (default: 80 % of what is free at the
    start, on a GPU 95 %); those that were used least recently are unloaded for others
    """
    keep_alive: str = knob("5m", metavar="TIME")
    """with --models-from: unload a model that nobody has asked for so long, as 90s, 5m or 1h; 0: at once, -1:
    never. MODELs of the command line stay until their memory is needed
    """
    allow_pull: bool = False
    """with --models-from cache: let clients (with keys those of administrators) have models of the hub
    fetched to the disk, and deleted: /api/pull, /api/delete
    """
    load_timeout_s: float = knob(300.0, least=0.0)
    """with --models-from: a request that waits longer than this many seconds for its model to be loaded is
    ended, 503; 0: never
    """
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = knob(8000, least=0, most=65535)
    """port to listen on; 0 takes a free one"""
    uds: Path | None = knob(None, metavar="PATH")
    """Unix socket to listen on, instead of a port; who may write to the file may ask (it gets mode 0660)"""
    ssl_certfile: Path | None = knob(None, metavar="FILE")
    """serve https with this certificate and its chain (PEM)"""
    ssl_keyfile: Path | None = knob(None, metavar="FILE")
    """its key (PEM; default: in the same file)"""
    ssl_keyfile_password: str | None = knob(None, metavar="TEXT")
    """the key's password; better in DELTIC_SSL_KEYFILE_PASSWORD, since every user may read a command line"""
    ssl_ca_certs: Path | None = knob(None, metavar="FILE")
    """let in only clients with a certificate of one of these authorities (PEM)"""
    root_path: str = knob("", metavar="PATH")
    """prefix under which a proxy offers this server, e.g. /llm"""
    api_key: tuple[str, ...] = knob((), metavar="[NAME=]KEY")
    """accept only requests with this key; may be given several times. With a name, NAME=KEY, logs and metrics
    tell whose request it was (a KEY that has a '=' needs one)
    """
    api_key_file: Path | None = knob(None, metavar="FILE")
    """more keys, with limits of their own: TOML, for each name a table of key, max_concurrent,
    tokens_per_minute, admin
    """
    share_cache: bool = False
    """let keys of different names find each other's prefixes in the cache, and so learn who asked what before
    """
    max_concurrent_per_key: int = knob(0, least=0)
    """requests of one key that may be open at once; more are answered 429; 0: any number"""
    tokens_per_minute_per_key: int = knob(0, least=0)
    """tokens of one key in a minute, of prompts and answers; beyond it 429; 0: any number"""
    request_timeout_s: float = knob(0.0, least=0.0)
    """a request that has not ended after this many seconds is ended, 504; 0: never"""
    queue_timeout_s: float = knob(0.0, least=0.0)
    """a request that still waits for its place after this many seconds is ended, 503; 0: never"""
    client_timeout_s: float = knob(20.0, least=0.0)
    """close a connection whose request's head is not whole, or whose body makes no progress, for this many
    seconds; 0: never
    """
    engine_timeout_s: float = knob(60.0, least=0.0)
    """an engine that shows no sign of life for so many seconds, though requests are open, is ended and
    started again (a long step on a CPU is one); 0: never
    """
    cors_origin: tuple[str, ...] = ()
    """allow this origin in browsers; may be given several times"""
    fetch_images_from: tuple[str, ...] = knob((), metavar="HOST")
    """fetch a chat's pictures from this host if they have http(s) URLs: a name, *.example.com, * for any, an
    address or a network; only an address that is named so may be one that is not public; may be given several
    times (default: from nowhere)
    """
    allow_audio_host: tuple[str, ...] = knob((), metavar="HOST")
    """fetch a request's ref_audio from this host if it is an http(s) URL, as --fetch-images-from has it; may
    be given several times (default: from nowhere)
    """
    allow_audio_dir: Path | None = None
    """read a request's ref_audio from this directory if it is a file: URL (default: read no files)"""
    max_queue: int = knob(256, least=0)
    """sequences that may wait (n of a request counts n); more are answered 429"""
    max_body_mb: float | None = knob(None, least=0.001)
    """largest request body (default: 16, and 64 with a model that takes pictures)"""
    max_n: int = knob(16, least=1)
    """largest n of a request"""
    max_logprobs: int = knob(20, least=0)
    """most alternatives per token a request may ask for"""
    drain_s: float = knob(30.0, least=0.0)
    """after SIGTERM, seconds that running requests get to finish"""
    drain_notice_s: float = knob(0.0, least=0.0)
    """after SIGTERM and before that, seconds to take requests still, while /health and /ready send routers
    elsewhere (503)
    """
    max_stored_responses: int = knob(1000, least=0)
    """answers of /v1/responses that are held in memory to be continued, in at most 256 MB; 0: none"""
    batch_dir: Path | None = None
    """keep files and batches of /v1/files and /v1/batches in this directory (default: there are none)"""
    batch_disk_gb: float = knob(16.0, least=0.0)
    """most that is kept in --batch-dir"""
    batch_in_flight: int | None = knob(None, least=1)
    """requests of batches that a model answers at once, behind all others (default: half of --max-num-seqs)
    """
    skip_hosted_tools: bool = False
    """leave tools that OpenAI's servers run (web_search, image_generation, ...) out of requests to
    /v1/responses instead of refusing them
    """
    default_max_tokens: int | None = knob(None, least=1)
    """answer length when a request names none (default: whatever the context leaves)"""
    metrics_names: str = knob("deltic", choices=("deltic", "vllm", "both", "sglang"))
    """names of a model's numbers in /metrics: deltic_*, vllm:* for routers and dashboards made for that, both
    of these, or the few of sglang:* that routers read
    """
    kv_events: str | None = knob(None, metavar="ADDRESS")
    """tell routers here what the prefix cache holds, as vLLM does, e.g. tcp://*:5557; who connects reads
    prompts
    """
    kv_events_replay: str | None = knob(None, metavar="ADDRESS")
    """tell readers of --kv-events here what they missed"""
    kv_events_topic: str = knob("kv@{host}:{port}@{model}", metavar="TEXT")
    """what messages of --kv-events begin with; {host}, {port}: the server's (for every address the machine's
    name)
    """
    strict_fields: str = knob("on", choices=("on", "off"))
    """off: fields of a request that are not known are left out, with a warning in the log, instead of refused
    """
    trust_request_chat_template: bool = False
    """let a chat bring a template of its own (chat_template); it may write any token into its prompt"""
    log_level: str = knob("info", choices=("debug", "info", "warning", "error"))
    """server log level"""
    log_format: str = knob("text", choices=("text", "json"))
    """lines for people, or a JSON object each"""
    log_prompts: bool = False
    """write the body of every request into its line of the log"""

    def __post_init__(self) -> None:
        """Raises ConfigError for a prefix that no path could have."""
        if not re.fullmatch(r"(/[\w.~-]+)*", self.root_path):
            raise ConfigError(f"--root-path {self.root_path!r}: must begin with a '/', and end without one")

    def body_mb(self, *, pictures: bool) -> float:
        """The largest request body, where there may be pictures in it or not."""
        return self.max_body_mb or (64.0 if pictures else 16.0)


Config = EngineConfig | ModelConfig | ServerConfig

MEASURED = (
    *("dummy", "quantize", "lever", "memory_gb", "max_model_len", "max_step_tokens", "kv_cache_dtype"),
    *("state_dtype", "tensor_parallel", "tp_invariant", "expert_parallel", "seed"),
)
"""Settings of an engine that benches of a model on a GPU take, too."""

DECIDE_BITS = (
    *("revision", "quantize_rest", "rope_scaling", "state_dtype", "tp_invariant", "expert_parallel", "lever", "seed"),
)
"""Settings that decide the bits of answers, beside what an engine tells of itself."""

_FOR_A_CHILD = """
allow_audio_dir allow_audio_host client_timeout_s default_max_tokens drain_notice_s drain_s engine_timeout_s
fetch_images_from log_format log_level log_prompts max_body_mb max_logprobs max_n max_queue
max_stored_responses queue_timeout_s request_timeout_s skip_hosted_tools strict_fields
trust_request_chat_template
"""
FOR_A_CHILD = frozenset(_FOR_A_CHILD.split())
"""Settings of a server that mean the same in one that a command starts for itself.

The others say where the main server listens, whom it lets in, and what is that one's alone, as the directory
of its batches.
"""


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for who mistyped a name; empty where none is like it."""
    near = difflib.get_close_matches(name, sorted(known), 1, cutoff=0.75)  # below, it is by chance
    return f"did you mean {near[0]}?" if near else ""


def changed(config: Config) -> dict[str, Any]:
    """The settings that are not their defaults, by name."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}


def without_foreign(config: EngineConfig, device: str, kind: str) -> EngineConfig:
    """The settings, without those that mean nothing on this device (cpu, cuda), or to this kind of model
    (text, speech).

    A DELTIC_ variable holds for every model of a server, so it is left out where it means nothing. Raises
    ConfigError for a setting that was given otherwise.
    """
    devices = {"cpu": "the CPU", "cuda": "a GPU"}
    foreign: dict[str, Any] = {}
    for name, value in changed(config).items():
        field = config.__dataclass_fields__[name]
        only_device, only_kind = field.metadata.get("device"), field.metadata.get("kind")
        only = (only_device.get(kind) if isinstance(only_device, Mapping) else only_device) or device
        is_elsewhere = only != device
        if not is_elsewhere and only_kind in (None, kind):
            continue
        if ENV_PREFIX + name.upper() in os.environ:
            foreign[name] = field.default
            continue
        shown = "" if value is True else f" {value[0] if isinstance(value, tuple) else value}"
        given = f"--{name.replace('_', '-')}{shown}"
        if is_elsewhere:
            raise ConfigError(
                f"{given} is for {devices[only]}, and this model runs on {devices[device]}. Leave it out, or give "
                f"--device {only}."
            )
        raise ConfigError(f"{given} is for a {only_kind} model, and this is a {kind} model. Leave it out.")
    return dataclasses.replace(config, **foreign)


def pinned_cpus(n_threads: int) -> tuple[int, ...]:
    """The CPU of each thread when threads are bound: the first of the affinity mask.

    Raises ConfigError if there are fewer.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--pin-threads: this system does not let threads be bound to CPUs. Leave it out.")
    if n_threads > len(CPUS):
        raise ConfigError(
            f"--pin-threads gives each thread a CPU of its own: --threads {n_threads} on {len(CPUS)} CPUs that this process "
            f"may use. Give at most --threads {len(CPUS)}, or leave --pin-threads out."
        )
    return CPUS[:n_threads]
