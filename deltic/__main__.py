"""The command line: `deltic serve | chat | run | say | pack | plan | warmup | doctor | bench WHAT | version`.

Each subcommand imports what it needs when it runs, so `deltic --help` answers at once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltic import __version__
from deltic.config import (
    BUILT_IN,
    ConfigError,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    add_flags,
    check_environment,
    config_file,
    exit_status,
    nearest,
    resolve,
)
from deltic.machine import n_usable_cpus

MODEL_HELP = "checkpoint directory or hub name (default: the small built-in model)"
REMOTE_HELP = MODEL_HELP + "; with --url, the name of its model (default: the first it lists that fits)"
CONFIG_HELP = (
    "settings of deltic serve by their flags' names, as TOML or YAML; what is on the command line, or in a DELTIC_ variable, "
    "counts more. Further models are tables [[and]]"
)
AND_HELP = (
    "one more model, with its own engine and model flags behind it; may be given several times. What is the server's comes "
    "before. A request names its model; DELTIC_ variables hold for all models. Example: deltic serve Qwen/Qwen3.5-4B --port 8080 "
    "--and Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice --quantize int8"
)


def parser() -> argparse.ArgumentParser:
    """The whole command line; each subcommand's function is in `command`."""
    top = argparse.ArgumentParser(
        "deltic", description="A serving engine for the Qwen gated-DeltaNet hybrids."
    )
    top.add_argument("--version", action="version", version=f"deltic {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Any, text: str, under: Any = commands) -> argparse.ArgumentParser:
        summary = text[0].upper() + text[1:] + "."
        sub: argparse.ArgumentParser = under.add_parser(name, help=text, description=summary)
        sub.set_defaults(command=command, used=sub)
        return sub

    serve = add("serve", _serve, "serve a model, or several, over the OpenAI API")
    _add_model(serve)
    serve.usage = "deltic serve [-h] [MODEL] [flags] [--and MODEL [flags]] ..."
    serve.add_argument("--and", dest="further", nargs=argparse.REMAINDER, help=AND_HELP)
    _add_config(serve)
    add_flags(serve, EngineConfig, skip=("model",))
    add_flags(serve, ModelConfig)
    add_flags(serve, ServerConfig)

    chat = add("chat", _chat, "chat with a model in the terminal")
    _add_remote(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument(
        "--think", action=argparse.BooleanOptionalAction, help="thinking on or off (default: the model's)"
    )
    chat.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature (default: the model's)"
    )
    chat.add_argument("--max-tokens", type=int, metavar="TOKENS", help="longest answer")
    add_flags(chat, EngineConfig, skip=("model",))

    run = add(
        "run", _run, "answer a file of requests: JSON lines in, JSON lines out; resumes where it stopped"
    )
    _add_run(run)

    say = add("say", _say, "speak a text: into a sound file, or through a pipe into a player")
    say.add_argument("text", metavar="TEXT", help="what to say; - reads it from the input")
    say.add_argument(
        "-o", "--out", metavar="FILE", default="speech.wav",
        help="wav, pcm, flac, mp3 or opus, by its name; - writes a wav into a pipe as it comes (default: speech.wav)",
    )  # fmt: skip
    say.add_argument("--format", choices=("wav", "pcm", "flac", "mp3", "opus"), help="default: by --out")
    _add_remote(say, positional=False)
    _add_speech(say)
    add_flags(say, EngineConfig, skip=("model",))

    pack = add("pack", _pack, "write a model directory of packed weights, quantised if asked: fast starts")
    _add_model(pack)
    pack.add_argument("--out", metavar="DIR", required=True, help="directory to make")
    _add_some_flags(pack, "revision", "download_dir", "quantize", "threads")

    plan = add("plan", _plan, "print what fits in memory and the speed to expect")
    _add_model(plan)
    _add_config(plan)
    add_flags(plan, EngineConfig, skip=("model",))

    warmup = add("warmup", _warmup, "compile the GPU's kernels for a model ahead of its first start")
    _add_model(warmup)
    add_flags(warmup, EngineConfig, skip=("model",))

    add("doctor", _doctor, "print the machine, the operators chosen and which promises hold here")
    add("version", _version, "print the version")

    bench = commands.add_parser("bench", help="measure a server or the operators", description="Measure.")
    benches = bench.add_subparsers(title="benches", metavar="WHAT", required=True)
    _add_benches(add, benches)
    return top


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with status 2 and the subcommand's usage where it is wrong."""
    arguments, left = parser().parse_known_args(words)
    if left:
        known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", arguments.used.format_help()))
        hint = nearest(left[0].partition("=")[0], known)
        arguments.used.error(f"unrecognized arguments: {' '.join(left)}{hint and '; ' + hint}")
    return arguments


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=MODEL_HELP)


def _add_config(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)


def _add_some_flags(sub: argparse.ArgumentParser, *names: str) -> None:
    """The flags of these engine settings only."""
    add_flags(sub, EngineConfig, skip=tuple(set(EngineConfig.__dataclass_fields__) - set(names)))


def _add_remote(sub: argparse.ArgumentParser, positional: bool = True, text: str = REMOTE_HELP) -> None:
    """MODEL and the flags that name a running server."""
    if positional:
        sub.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=REMOTE_HELP)
    text = "the same as MODEL" if positional else text
    sub.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=text)
    sub.add_argument("--url", help="use this running server instead of starting one")
    sub.add_argument("--api-key", metavar="KEY", help="key of the server at --url")


def _add_run(run: argparse.ArgumentParser) -> None:
    """What `deltic run` takes."""
    run.add_argument(
        "input", metavar="IN.jsonl", help='lines of {"custom_id": ..., "body": {...}}, or bare bodies'
    )
    run.add_argument("output", metavar="OUT.jsonl", help="results, one line each, in order of completion")
    _add_remote(
        run, positional=False, text=REMOTE_HELP + "; given, it is that of every line, whatever the line says"
    )
    run.add_argument(
        "--in-flight", type=int, default=64, metavar="N", help="requests sent at once (default: 64)"
    )
    run.add_argument(
        "--retry-errors",
        action="store_true",
        help="drop the errors that the output holds, and try their lines again",
    )
    add_flags(run, EngineConfig, skip=("model",))


def _add_speech(sub: argparse.ArgumentParser) -> None:
    """What a request for speech may say, beside its text."""
    speech = sub.add_argument_group("speech")
    speech.add_argument("--voice", metavar="NAME", help="default: the first that the server lists, if any")
    speech.add_argument("--language", metavar="NAME", help="default: the server's, Auto")
    speech.add_argument(
        "--instructions", metavar="TEXT", help="how to say it; what a VoiceDesign model needs"
    )
    speech.add_argument("--ref-audio", metavar="FILE", help="a voice to clone (Base models): a file or a URL")
    speech.add_argument(
        "--ref-text", metavar="TEXT", help="what is said there; without it only the speaker's vector is taken"
    )
    speech.add_argument("--max-new-tokens", type=int, metavar="N", help="most frames, of 80 ms each")
    speech.add_argument(
        "--extra", default="{}", metavar="JSON", help="more fields of the request, or @FILE that has them"
    )


def _add_benches(add: Any, benches: Any) -> None:
    """What can be measured; add: makes a subcommand of the last argument."""
    serving = add("serve", _bench_serve, "measure any OpenAI endpoint, or a server started for it", benches)
    _add_bench_serve(serving)
    speech = add(
        "speech", _bench_speech, "measure any endpoint for speech, or a server started for it", benches
    )
    _add_bench_speech(speech)
    start = add("start", _bench_start, "time a server's way from the command to ready", benches)
    _add_model(start)
    start.set_defaults(url=None)
    start.add_argument("--starts", type=int, default=7, metavar="N", help="default: 7")
    start.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    add_flags(start, EngineConfig, skip=("model",))
    stalls = add("stalls", _bench_stalls, "how long answers stand still while long prompts arrive", benches)
    _add_bench_stalls(stalls)
    ops = add("ops", _bench_ops, "time each operator at a model's shapes", benches)
    _add_bench_ops(ops)
    gpu = add("gpu", _bench_gpu, "time decodes and prefills on a GPU, beside its roofs", benches)
    _add_model(gpu)
    gpu.add_argument(
        "--n", default="1,4,16,64,128", metavar="N,N,...", help="sequences (default: 1,4,16,64,128)"
    )
    gpu.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="default: 128")
    gpu.add_argument("--output", type=int, default=256, metavar="TOKENS", help="default: 256")
    gpu.add_argument(
        "--prefill", default="8192", metavar="T,T,...", help="tokens of cold prompts (default: 8192)"
    )
    gpu.add_argument("--rounds", type=int, default=1, metavar="R", help="default: 1")
    gpu.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    _add_some_flags(gpu, "dummy", "lever", "memory_gb", "max_model_len", "max_step_tokens", "seed")
    ablate = add(
        "ablate", _bench_ablate, "what each optimisation of the GPU brings, and whether bits change", benches
    )
    _add_model(ablate)
    ablate.add_argument("--n", default="1,8,64", metavar="N,N,...", help="sequences (default: 1,8,64)")
    ablate.add_argument("--output", type=int, default=64, metavar="TOKENS", help="default: 64")
    ablate.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    _add_some_flags(ablate, "dummy", "memory_gb", "max_model_len", "seed")
    quality = add("quality", _bench_quality, "what quantised weights lose against bfloat16", benches)
    _add_bench_quality(quality)


def _add_bench_serve(sub: argparse.ArgumentParser) -> None:
    """The load generator's flags. Without --url, `MODEL` and the engine flags say what server to start."""
    _add_remote(sub)
    load = _add_load(sub)
    load.add_argument("--prompt-tokens", type=int, default=128, metavar="T", help="default: 128")
    load.add_argument("--output-tokens", type=int, default=128, metavar="T", help="default: 128")
    load.add_argument(
        "--shared-prefix-tokens",
        type=int,
        default=0,
        metavar="T",
        help="start all prompts alike (default: 0)",
    )
    load.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0")
    load.add_argument("--stream-endpoint", choices=("completions", "chat"), default="completions")
    add_flags(sub, EngineConfig, skip=("model", "seed"))


def _add_bench_speech(sub: argparse.ArgumentParser) -> None:
    """As above."""
    _add_remote(sub)
    load = _add_load(sub)
    load.add_argument(
        "--words",
        default="16",
        metavar="W,W,...",
        help="words of a text, one of these at random (default: 16)",
    )
    load.add_argument("--whole", action="store_true", help="ask for whole answers instead of streams")
    load.add_argument(
        "--cancel", type=float, default=0.0, metavar="P", help="part of the requests that are left midway (default: 0)"
    )  # fmt: skip
    _add_speech(sub)
    add_flags(sub, EngineConfig, skip=("model", "seed"))


def _add_load(sub: argparse.ArgumentParser) -> Any:
    """The flags of any load; returns their group."""
    load = sub.add_argument_group("load")
    load.add_argument(
        "--n", default=None, metavar="N,N,...", help="requests in flight, closed loop (default: 1,2,4,8,16)"
    )
    load.add_argument(
        "--requests-per-n", type=int, metavar="R", help="requests for each N (default: 4 N, at least 8)"
    )
    load.add_argument(
        "--duration", type=float, metavar="S", help="seconds for each N or rate, instead of a count"
    )
    load.add_argument(
        "--poisson", metavar="RATE,...", help="open loop: requests a second with random arrivals"
    )
    load.add_argument(
        "--warmup",
        type=int,
        default=1,
        metavar="W",
        help="unmeasured requests per stream before each N (default: 1)",
    )
    load.add_argument(
        "--seed",
        dest="load_seed",
        type=int,
        default=0,
        metavar="INT",
        help="seed of prompts and arrivals (default: 0)",
    )
    load.add_argument("--label", default=None, help="name of this run in tables, plots and file names")
    load.add_argument(
        "--out", metavar="DIR", help="directory of the results (default: bench/runs/<date>-<machine>)"
    )
    load.add_argument("--no-plot", dest="plot", action="store_false", help="write no PNG")
    load.add_argument(
        "--serve-args", default="", metavar="ARGS", help="more flags for the server started, in one string"
    )
    return load


def _add_bench_stalls(sub: argparse.ArgumentParser) -> None:
    _add_model(sub)
    sub.set_defaults(url=None)
    sub.add_argument(
        "--targets", default="250,0", metavar="MS,MS,...", help="--max-itl-ms of each server; 0: none (default: 250,0)"
    )  # fmt: skip
    sub.add_argument("--n", type=int, default=8, metavar="N", help="answers that run (default: 8)")
    sub.add_argument("--prompts", type=int, default=4, metavar="N", help="long prompts (default: 4)")
    sub.add_argument("--prompt-tokens", type=int, default=8192, metavar="T", help="default: 8192")
    sub.add_argument(
        "--out", metavar="DIR", help="directory of the results (default: bench/runs/<date>-<machine>)"
    )
    add_flags(sub, EngineConfig, skip=("model", "max_itl_ms"))


def _add_bench_ops(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "shape",
        nargs="?",
        metavar="SHAPE",
        help="published shape or checkpoint (default: the built-in model)",
    )
    sub.add_argument("--rows", default="1,4,16,64,512", help="row counts (default: 1,4,16,64,512)")
    sub.add_argument(
        "--seconds", type=float, default=0.3, help="time spent on each measurement (default: 0.3)"
    )
    sub.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    _add_some_flags(sub, "quantize", "threads")


def _add_bench_quality(sub: argparse.ArgumentParser) -> None:
    _add_model(sub)
    sub.add_argument(
        "--quantize",
        dest="formats",
        default="int8,int4,int4-symmetric",
        metavar="FORMAT,...",
        help="formats to measure (default: int8,int4,int4-symmetric)",
    )
    sub.add_argument(
        "--text",
        metavar="FILE",
        help="plain text, or .jsonl with a document in each line: [[text, does it count], ...] (default: "
        "conversations that the built-in model knows)",
    )
    sub.add_argument("--out", metavar="DIR", help="write the JSON result into this directory")
    _add_some_flags(sub, "dummy", "weights_cache", "threads", "seed")


def _given(arguments: argparse.Namespace | None, config_class: Any) -> dict[str, Any]:
    """The settings of `config_class` that were on the command line."""
    words = vars(arguments) if arguments else {}
    return {name: value for name, value in words.items() if name in config_class.__dataclass_fields__}


def _serve(arguments: argparse.Namespace) -> int:
    groups = [arguments]
    while (words := groups[-1].further) is not None:
        groups.append(_further(words))
    tables = _tables(arguments)
    if len(groups) > 1 and len(tables) > 1:
        raise ConfigError(
            "there are models behind --and, and in the file of --config; give them in one place"
        )
    pairs = list(itertools.zip_longest(groups, tables))
    models = [
        (
            resolve(EngineConfig, _given(group, EngineConfig), table=table or {}),
            resolve(ModelConfig, _given(group, ModelConfig), table=table or {}),
        )
        for group, table in pairs
    ]
    for engine, about in models:
        _check_names(engine, about)
    server_config = resolve(ServerConfig, _given(arguments, ServerConfig), table=tables[0])
    from deltic.server.serve import serve

    return serve(models, server_config) or 0


def _check_names(engine: EngineConfig, about: ModelConfig) -> None:
    """Raises ConfigError where the last of several names must have been meant as the MODEL, of which there is none."""
    *others, last = about.served_model_name or ("",)
    if others and engine.model == BUILT_IN and engine.dummy is None and ("/" in last or Path(last).exists()):
        raise ConfigError(
            f"--served-model-name takes every word behind it, {last!r} too; give the MODEL before it"
        )


def _tables(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each model, and the first also of the server, what the file of --config says. Raises ConfigError."""
    path = config_file(vars(arguments).get("config"))
    if path is None:
        return [{}]
    from deltic.config_file import read_config

    return read_config(path)


def _further(words: Sequence[str]) -> argparse.Namespace:
    """What stands behind an `--and`: a model and its flags, and perhaps another `--and`. Raises ConfigError."""
    group = parsed(["serve", *words])
    if not {"model", "dummy"} & vars(group).keys():
        raise ConfigError("--and needs a MODEL behind it, or --dummy SHAPE")
    misplaced = _given(group, ServerConfig) | ({"config": None} if "config" in group else {})
    if misplaced:
        flag = "--" + next(iter(misplaced)).replace("_", "-")
        raise ConfigError(f"{flag} is the whole server's; give it before the first --and")
    return group


def _server_arguments(arguments: argparse.Namespace) -> list[str]:
    """Arguments of `deltic serve` for a server child; the settings are checked here, before it starts."""
    from deltic.commands.endpoint import Endpoint, flags

    given = {name: value for name, value in _given(arguments, EngineConfig).items() if value is not None}
    model = [given["model"]] if "model" in given else []
    if arguments.url:
        Endpoint(arguments.url, arguments.api_key)  # refuses what is no address before anything is opened
        given.pop("model", None)
        if given:
            raise ConfigError(
                f"--url names a running server: {', '.join(sorted(given))} cannot be set from here"
            )
        return []
    resolve(EngineConfig, given)
    given.pop("model", None)
    return [*model, *flags(EngineConfig, given)]


def _chat(arguments: argparse.Namespace) -> int:
    from deltic.commands.chat import chat

    return chat(arguments, _server_arguments(arguments))


def _run(arguments: argparse.Namespace) -> int:
    from deltic.commands.run import run

    return run(arguments, _server_arguments(arguments))


def _say(arguments: argparse.Namespace) -> int:
    from deltic.commands.say import say

    return say(arguments, _server_arguments(arguments))


def _plan(arguments: argparse.Namespace) -> int:
    table, *others = _tables(arguments)
    if others:
        raise ConfigError(
            "deltic plan is about one model, and the file of --config has several; give it one's flags"
        )
    config = resolve(EngineConfig, _given(arguments, EngineConfig), table=table)
    from deltic.commands.plan import report

    print(report(config))
    return 0


def _pack(arguments: argparse.Namespace) -> int:
    config = resolve(EngineConfig, _given(arguments, EngineConfig))
    from rich.console import Console
    from rich.progress import Progress

    from deltic.models.packed import pack_model

    target = Path(arguments.out)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("packing", total=1.0)
        notices = pack_model(
            config, target, lambda stage, done: progress.update(bar, description=stage, completed=done)
        )
    for notice in notices:
        print(notice, file=sys.stderr)
    n_bytes = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {n_bytes / 1e6:,.0f} MB, {config.quantize or 'bfloat16'}; deltic serve {target}")
    return 0


def _warmup(arguments: argparse.Namespace) -> int:
    config = resolve(EngineConfig, _given(arguments, EngineConfig))
    from deltic.runtime.build import warmup

    return warmup(config)


def _doctor(arguments: argparse.Namespace) -> int:
    from deltic.commands.doctor import report

    print(report())
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(f"deltic {__version__}")
    return 0


def _bench_serve(arguments: argparse.Namespace) -> int:
    from deltic.bench.serve import bench

    return bench(arguments, _server_arguments(arguments))


def _bench_speech(arguments: argparse.Namespace) -> int:
    from deltic.bench.speech import bench

    return bench(arguments, _server_arguments(arguments))


def _bench_start(arguments: argparse.Namespace) -> int:
    from deltic.bench.start import bench

    return bench(arguments, _server_arguments(arguments))


def _bench_stalls(arguments: argparse.Namespace) -> int:
    from deltic.bench.stalls import bench

    return bench(arguments, _server_arguments(arguments))


def _bench_ops(arguments: argparse.Namespace) -> int:
    config = resolve(EngineConfig, _given(arguments, EngineConfig))
    from deltic.bench.ops import bench

    return bench(arguments, config.threads or n_usable_cpus(), config.quantize)


def _bench_gpu(arguments: argparse.Namespace) -> int:
    config = resolve(EngineConfig, _given(arguments, EngineConfig))
    from deltic.bench.gpu import bench_gpu

    return bench_gpu(arguments, config)


def _bench_ablate(arguments: argparse.Namespace) -> int:
    config = resolve(EngineConfig, _given(arguments, EngineConfig))
    from deltic.bench.gpu import bench_ablate

    return bench_ablate(arguments, config)


def _bench_quality(arguments: argparse.Namespace) -> int:
    from deltic.bench.quality import bench

    return bench(arguments, _given(arguments, EngineConfig))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. 2: wrong arguments or settings, 1: what may pass, 130: interrupted."""
    words = sys.argv[1:] if argv is None else argv
    # argparse would take no more than the MODEL of `--and=MODEL` as what stands behind it.
    words = [
        part for word in words for part in (("--and", word[6:]) if word.startswith("--and=") else (word,))
    ]
    arguments = parsed(words)
    try:
        check_environment()
        status = int(arguments.command(arguments) or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        # ConfigError and the loaders' errors are ValueErrors meant for the user; any other is a defect and
        # keeps its trace.
        if type(error).__module__.partition(".")[0] != "deltic":
            raise
        print(f"deltic: {error}", file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
