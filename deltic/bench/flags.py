"""The flags of each `deltic bench WHAT`, by a function of its name. `deltic --help` waits for this file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from deltic.commands.flags import add_engine, add_model, add_remote, add_some, add_speech

OUT_HELP = "write the JSON result into this directory"


def add_load(sub: argparse.ArgumentParser) -> Callable[..., Any]:
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


def serve(sub: argparse.ArgumentParser) -> None:
    """Of `deltic bench serve`. Without --url, MODEL and the engine flags say what server to start."""
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


def speech(sub: argparse.ArgumentParser) -> None:
    """Of `deltic bench speech`. Without --url, MODEL and the engine flags say what server to start."""
    add_remote(sub)
    add = add_load(sub)
    text = "words of a text, one of these at random (default: 16)"
    add("--words", default="16", metavar="W,W,...", help=text)
    add("--whole", action="store_true", help="ask for whole answers instead of streams")
    text = "part of the requests that are left midway (default: 0)"
    add("--cancel", type=float, default=0.0, metavar="P", help=text)
    add_speech(sub)
    add_engine(sub, "seed")


def gpu_model(sub: argparse.ArgumentParser, *more: str) -> None:
    """What a bench of a model on a GPU measures, and where its result goes. more: further engine settings."""
    add_model(sub)
    add = sub.add_argument
    add("--n", default="1,4,16,64,128", metavar="N,N,...", help="sequences (default: 1,4,16,64,128)")
    text = "of --dummy: projections as a published checkpoint stores them, e.g. fp8, Q4_K, NVFP4"
    add("--format", metavar="NAME", help=text)
    add("--out", metavar="DIR", help=OUT_HELP)
    names = ("dummy", "quantize", "lever", "memory_gb", "max_model_len", "max_step_tokens", "kv_cache_dtype")
    add_some(sub, *names, "state_dtype", "tensor_parallel", "tp_invariant", "seed", *more)


def gpu(sub: argparse.ArgumentParser) -> None:
    """Of `deltic bench gpu`."""
    gpu_model(sub)
    add = sub.add_argument
    add("--prompt", type=int, default=128, metavar="TOKENS", help="default: 128")
    add("--output", type=int, default=256, metavar="TOKENS", help="default: 256")
    add("--prefill", default="8192", metavar="T,T,...", help="tokens of cold prompts (default: 8192)")
    add("--rounds", type=int, default=1, metavar="R", help="default: 1")


def quality(sub: argparse.ArgumentParser) -> None:
    """Of `deltic bench quality`."""
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
