"""The flags of each command, by a function of its name, and those that several take.

A setting of an engine, a model or a server is a `knob` in `config.py`, and becomes a flag by itself
(`add_flags`).

`deltic --help` waits for this file: it imports nothing heavy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from deltic.config import MEASURED, Config, EngineConfig, ModelConfig, ServerConfig
from deltic.json_types import JsonObject

MODEL_HELP = (
    "short name (qwen3.5:4b), hub name (owner/model, owner/model:Q4_K_M), GGUF file or checkpoint directory (default: the small "
    "built-in model)"
)
NAME_HELP = "short name (qwen3.5:4b) or hub name, as owner/model or owner/model:Q4_K_M"
REMOTE_HELP = MODEL_HELP + "; with --url, the name of its model (default: the first it lists that fits)"
CONFIG_HELP = (
    "settings of deltic serve by their flags' names, as TOML or YAML; what is on the command line, or in a DELTIC_ "
    "variable, counts more. Further models are tables [[and]]"
)
AND_HELP = (
    "one more model, with its own engine and model flags behind it; may be given several times. What is the server's "
    "comes before. A request names its model; DELTIC_ variables hold for all models. Example: deltic serve "
    "Qwen/Qwen3.5-4B --port 8080 --and Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice --quantize int8"
)
FORMAT_HELP = (
    "of --dummy: projections as a published checkpoint stores them, e.g. fp8, Q4_K, NVFP4; or ud-q4_k_xl: all matrices in the types of "
    "Unsloth's file of that name"
)
OUT_HELP = "write the JSON result into this directory"


UNITS = {"dir": "DIR", "gb": "GB", "mb": "MB", "ms": "MS", "s": "SECONDS", "tokens": "TOKENS"}
"""Values of flags by the last word of their names, which is a unit."""

FOREIGN = Path(__file__).with_name("foreign_flags.txt")
"""Flags and commands of other servers, a line for each meaning, with what to give here."""


def advice(flag: str) -> str:
    """Says what to give here for a flag, or a command, of another server; empty where none of them has it."""
    for line in FOREIGN.read_text(encoding="utf-8").splitlines():
        flags, *_, hint = line.split(" | ")
        if flag in flags.split(", "):
            return hint
    return ""


def json_object(text: str) -> JsonObject:
    """Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _json_argument(text: str) -> JsonObject:
    """Raises ArgumentTypeError, which says what was expected."""
    try:
        return json_object(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid JSON object value: {text!r}") from None


def scalar(hint: type) -> tuple[type, bool]:
    """The type of a field's value, or of each of its values; and whether there may be several."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(h for h in get_args(hint) if h is not type(None))
    return get_origin(hint) or hint, False


def add_flags(parser: argparse.ArgumentParser, cls: type[Config], skip: tuple[str, ...] = ()) -> None:
    """Adds a flag for each field of `cls`; only flags that were given appear in the parsed namespace."""
    hints = get_type_hints(cls)
    group = parser.add_argument_group(cls.__name__.removesuffix("Config").lower())
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        (kind, many), about = scalar(hints[field.name]), field.metadata
        text, flag = about["help"], "--" + field.name.replace("_", "-")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        if field.default not in (None, ()):
            text += f" (default: {field.default})"
        action, nargs = ("extend", "+") if about.get("several") else ("append" if many else "store", None)
        choices = about.get("choices")
        group.add_argument(
            flag,
            type=_json_argument if kind is dict else kind,
            action=action,
            nargs=nargs,
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=about.get("metavar")
            or UNITS.get(flag.rpartition("-")[2])
            or (None if choices else kind.__name__.upper()),
            help=text,
        )


def add_model(sub: argparse.ArgumentParser, text: str = MODEL_HELP) -> None:
    """MODEL."""
    sub.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)


def add_engine(sub: argparse.ArgumentParser, *without: str) -> None:
    """A flag for each setting of an engine but its model and those named."""
    add_flags(sub, EngineConfig, skip=("model", *without))


def add_some(sub: argparse.ArgumentParser, *names: str) -> None:
    """The flags of these engine settings only."""
    add_flags(sub, EngineConfig, skip=tuple(set(EngineConfig.__dataclass_fields__) - set(names)))


def add_config(sub: argparse.ArgumentParser) -> None:
    """--config."""
    sub.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)


def add_remote(sub: argparse.ArgumentParser, positional: bool = True, text: str = REMOTE_HELP) -> None:
    """MODEL and the flags that name a running server. text: the help of --model where MODEL is not
    positional.
    """
    if positional:
        add_model(sub, REMOTE_HELP)
    text = "the same as MODEL" if positional else text
    sub.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=text)
    add_server(sub, "use this running server instead of starting one")


def add_server(sub: argparse.ArgumentParser, text: str, default: str | None = None) -> None:
    """The flags of a running server: --url, with this help and default, --api-key and --cacert."""
    sub.add_argument("--url", default=default, help=text)
    sub.add_argument("--api-key", metavar="KEY", help="key of the server at --url")
    text = "what vouches for the certificate of an https --url (PEM): its authority's, or its own (default: the system's authorities)"
    sub.add_argument("--cacert", metavar="FILE", help=text)


def add_speech(sub: argparse.ArgumentParser) -> None:
    """The flags of a request for speech, beside its text."""
    add = sub.add_argument_group("speech").add_argument
    add("--voice", metavar="NAME", help="default: the first that the server lists, if any")
    add("--language", metavar="NAME", help="default: the server's, Auto")
    add("--instructions", metavar="TEXT", help="how to say it; what a VoiceDesign model needs")
    add("--ref-audio", metavar="FILE", help="a voice to clone (Base models): a file or a URL")
    text = "what is said there; without it only the speaker's vector is taken"
    add("--ref-text", metavar="TEXT", help=text)
    add("--max-new-tokens", type=int, metavar="N", help="most frames, of 80 ms each")
    add("--extra", default="{}", metavar="JSON", help="more fields of the request, or @FILE that has them")


def add_load(sub: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """The flags of any load; returns what adds more to their group."""
    add = sub.add_argument_group("load").add_argument
    add("--n", default=None, metavar="N,N,...", help="requests in flight, closed loop (default: 1,2,4,8,16)")
    text = "requests for each N (default: 4 N, at least 8)"
    add("--requests-per-n", type=int, metavar="R", help=text)
    text = "seconds for each N or rate, instead of a count"
    add("--duration", type=float, metavar="S", help=text)
    add("--poisson", metavar="RATE,...", help="open loop: requests a second with random arrivals")
    text = "unmeasured requests per stream before each N (default: 1)"
    add("--warmup", type=int, default=1, metavar="W", help=text)
    text = "seed of prompts and arrivals (default: 0)"
    add("--seed", dest="load_seed", type=int, default=0, metavar="INT", help=text)
    add("--label", default=None, help="name of this run in tables, plots and file names")
    add("--out", metavar="DIR", help="directory of the results (default: bench/runs/<date>-<machine>)")
    add("--no-plot", dest="plot", action="store_false", help="write no PNG")
    text = "more flags for the server started, in one string"
    add("--serve-args", default="", metavar="ARGS", help=text)
    return add


def add_gpu_model(sub: argparse.ArgumentParser, *more: str) -> None:
    """Adds the flags of a bench of a model on a GPU: what it measures, and where its result goes. more:
    further engine settings.
    """
    add_model(sub)
    add = sub.add_argument
    add("--n", default="1,4,16,64,128", metavar="N,N,...", help="sequences (default: 1,4,16,64,128)")
    add("--format", metavar="NAME", help=FORMAT_HELP)
    text = "run the kernels that another chip gets, with its sizes and its card's memory, on the GPU that is here"
    add("--as-chip", choices=("sm_86", "sm_89", "sm_120"), help=text)
    add("--out", metavar="DIR", help=OUT_HELP)
    add_some(sub, *MEASURED, *more)


def none(sub: argparse.ArgumentParser) -> None:
    """Adds nothing: the command takes no arguments."""


def serve(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic serve`."""
    sub.usage = "deltic serve [-h] [MODEL] [flags] [--and MODEL [flags]] ..."
    add_model(sub)
    sub.add_argument("--and", dest="further", nargs=argparse.REMAINDER, help=AND_HELP)
    add_config(sub)
    add_engine(sub)
    add_flags(sub, ModelConfig)
    add_flags(sub, ServerConfig)


class _ModelOrPrompt(argparse.Action):
    """Takes a word with a space in it for a question: no model's name has one, but for a path that is
    there.
    """

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        is_prompt = self.dest == "prompt" or (any(map(str.isspace, values)) and not os.path.exists(values))
        if is_prompt and hasattr(namespace, "prompt"):
            parser.error(f"there are two questions, {namespace.prompt!r} and {values!r}. Give one.")
        setattr(namespace, "prompt" if is_prompt else "model", values)


def chat(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic chat`."""
    add = sub.add_argument
    add("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, action=_ModelOrPrompt, help=REMOTE_HELP)
    text = (
        "one question, which is answered alone; what is piped in stands behind it, or is it; a text with a space may be "
        "given without a MODEL"
    )
    add("prompt", nargs="?", metavar="PROMPT", default=argparse.SUPPRESS, action=_ModelOrPrompt, help=text)
    text = "the same as PROMPT"
    add("-p", "--prompt", metavar="PROMPT", default=argparse.SUPPRESS, action=_ModelOrPrompt, help=text)
    add("--json", action="store_true", help="write the answer to the question as one JSON object")
    text = "whether the thought is written, where the output is a terminal (default: yes)"
    add("--show-thinking", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "keep what is typed for the next time, in ~/.local/state/deltic (default: yes)"
    add("--history", action=argparse.BooleanOptionalAction, default=True, help=text)
    add_remote(sub, positional=False, text="the same as MODEL")
    add("--system", metavar="TEXT", help="system message")
    text = "thinking on or off (default: the model's)"
    add("--think", action=argparse.BooleanOptionalAction, help=text)
    add("--temperature", type=float, metavar="T", help="sampling temperature (default: the model's)")
    add("--max-tokens", type=int, metavar="TOKENS", help="longest answer")
    text = "a picture for the first message, a file or a URL; may be given several times"
    add("--image", action="append", default=[], metavar="FILE", help=text)
    add("--video", action="append", default=[], metavar="FILE", help="the same of a video")
    add_engine(sub)


def launch(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic launch`."""
    sub.add_argument("agent", metavar="AGENT", help="one that deltic agents lists; what is behind -- goes to it")
    text = "model to serve for it; with --url, the name of its model (default: the server that runs here, and its first model)"
    add_remote(sub, positional=False, text=text)
    add_engine(sub)


def agents(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic agents`."""
    text = "print the lines that set this one up (default: list all)"
    sub.add_argument("agent", nargs="?", metavar="AGENT", help=text)
    add_remote(sub, positional=False, text="the name of its model (default: its first)")


def run(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic run`."""
    add = sub.add_argument
    text = 'lines of {"custom_id": ..., "body": {...}}, or bare bodies'
    add("input", metavar="IN.jsonl", help=text)
    add("output", metavar="OUT.jsonl", help="results, one line each, in order of completion")
    text = REMOTE_HELP + "; given, it is that of every line, whatever the line says"
    add_remote(sub, positional=False, text=text)
    add("--in-flight", type=int, default=64, metavar="N", help="requests sent at once (default: 64)")
    text = (
        "spread the lines over servers on a Ray cluster: the one that this machine is in, or that at ADDRESS; local: "
        "one that is started here"
    )
    add("--ray", nargs="?", const="auto", metavar="ADDRESS", help=text)
    text = "servers that --ray starts, each with --threads CPUs or --tensor-parallel GPUs (default: what there is room for)"
    add("--replicas", type=int, metavar="N", help=text)
    text = "drop the errors that the output holds, and try their lines again"
    add("--retry-errors", action="store_true", help=text)
    text = "a picture for the last message of the user in each line; may be given several times"
    add("--image", action="append", default=[], metavar="FILE", help=text)
    add("--video", action="append", default=[], metavar="FILE", help="the same of a video, in chats")
    add_engine(sub)


def say(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic say`."""
    add = sub.add_argument
    add("text", metavar="TEXT", help="what to say; - reads it from the input")
    text = "wav, pcm, flac, mp3 or opus, by its name; - writes a wav into a pipe as it comes (default: speech.wav)"
    add("-o", "--out", metavar="FILE", default="speech.wav", help=text)
    add("--format", choices=("wav", "pcm", "flac", "mp3", "opus", "aac"), help="default: by --out")
    add_remote(sub, positional=False)
    add_speech(sub)
    add_engine(sub)


def pack(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic pack`."""
    add_model(sub)
    sub.add_argument("--out", metavar="DIR", required=True, help="directory to make")
    add_some(sub, "revision", "download_dir", "quantize", "quantize_rest", "threads")


def plan(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic plan`."""
    add_model(sub)
    sub.add_argument("--format", metavar="NAME", help=FORMAT_HELP)
    add_config(sub)
    add_engine(sub)


def verify(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic verify`."""
    add_model(sub)
    text = (
        "what to compare with, beside transformers where that is installed: the URL of a server with the same model (vLLM, SGLang, "
        "llama-server or Deltic), or another checkpoint of it (MODEL); each may be given once"
    )
    sub.add_argument("--against", action="append", default=[], metavar="URL|MODEL", help=text)
    sub.add_argument("--api-key", metavar="KEY", help="key of the server of --against")
    sub.add_argument(
        "--cacert", metavar="FILE", help="what vouches for the certificate of an https:// URL of --against (PEM)"
    )
    sub.add_argument("--out", metavar="DIR", help="write the page and its JSON into this directory, too")
    add_engine(sub, "dummy")


def warmup(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic warmup`."""
    add_model(sub)
    add_engine(sub)


def completion(sub: argparse.ArgumentParser) -> None:
    """Adds the argument of `deltic completion`."""
    sub.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help='put eval "$(deltic completion bash)" into ~/.bashrc'
    )


def bench_serve(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic bench serve`. Without --url, MODEL and the engine flags say what server to
    start.
    """
    add_remote(sub)
    add = add_load(sub)
    add("--prompt-tokens", type=int, default=128, metavar="T", help="default: 128")
    add("--output-tokens", type=int, default=128, metavar="T", help="default: 128")
    text = "start all prompts alike (default: 0)"
    add("--shared-prefix-tokens", type=int, default=0, metavar="T", help=text)
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0")
    add("--stream-endpoint", choices=("completions", "chat"), default="completions")
    text = "pictures in each prompt of a chat, beside --prompt-tokens (default: 0)"
    add("--images", type=int, default=0, metavar="N", help=text)
    add("--image-size", default="1024x1024", metavar="WxH", help="of a picture, in pixels (default: 1024x1024)")
    add("--same-images", action="store_true", help="all prompts show the same pictures")
    add_engine(sub, "seed")


def bench_speech(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic bench speech`. Without --url, MODEL and the engine flags say what server to
    start.
    """
    add_remote(sub)
    add = add_load(sub)
    text = "words of a text, one of these at random (default: 16)"
    add("--words", default="16", metavar="W,W,...", help=text)
    add("--whole", action="store_true", help="ask for whole answers instead of streams")
    text = "part of the requests that are left midway (default: 0)"
    add("--cancel", type=float, default=0.0, metavar="P", help=text)
    add_speech(sub)
    add_engine(sub, "seed")


def bench_gpu(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic bench gpu`."""
    add_gpu_model(sub)
    add = sub.add_argument
    add("--prompt", type=int, default=128, metavar="TOKENS", help="default: 128")
    add("--output", type=int, default=256, metavar="TOKENS", help="default: 256")
    add("--prefill", default="8192", metavar="T,T,...", help="tokens of cold prompts (default: 8192)")
    add("--rounds", type=int, default=1, metavar="R", help="default: 1")


def bench_quality(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic bench quality`."""
    add_model(sub)
    add = sub.add_argument
    text = "formats to measure (default: int8,int4,int4-symmetric; with --beside none)"
    add("--quantize", dest="formats", default=None, metavar="FORMAT,...", help=text)
    text = "quantised checkpoints of the same model to measure, too: directories, GGUF files or hub names"
    add("--beside", nargs="+", default=[], metavar="MODEL", help=text)
    text = "a setting to compare with its default, e.g. kv-cache-dtype=int8; may be given several times"
    add("--setting", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=text)
    text = "count only the last tokens of texts of so many (default: all tokens of each document)"
    add("--context", type=int, metavar="TOKENS", help=text)
    text = (
        "plain text, or .jsonl with a document in each line: [[text, does it count], ...] (default: "
        "conversations that the built-in model knows)"
    )
    add("--text", metavar="FILE", help=text)
    add("--out", metavar="DIR", help=OUT_HELP)
    add_some(sub, "device", "dummy", "weights_cache", "threads", "seed")


def _add_names(sub: argparse.ArgumentParser, *more: str) -> None:
    sub.add_argument("models", nargs="+", metavar="NAME", help=NAME_HELP)
    add_some(sub, "download_dir", *more)


def pull(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic pull`."""
    _add_names(sub, "revision")


def list_models(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic list`."""
    add = sub.add_argument
    add("directories", nargs="*", metavar="DIR", help="directory that is looked through, too, beside the hub's cache")
    add("--published", action="store_true", help="list the models that have a short name instead, on the disk or not")
    add("--json", action="store_true", help="print JSON, for programs")
    add_some(sub, "download_dir")


def show(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic show`."""
    sub.add_argument("name", metavar="NAME", help=NAME_HELP + ", or a path")
    add_some(sub, "download_dir")


def rm(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic rm`."""
    _add_names(sub)
    sub.add_argument("-y", "--yes", action="store_true", help="do not ask")


def ps(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of `deltic ps`."""
    add_server(sub, "the running server (default: http://127.0.0.1:8000)", "http://127.0.0.1:8000")
