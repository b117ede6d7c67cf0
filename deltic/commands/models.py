"""`deltic pull`, `list`, `show`, `rm` and `ps`: models of the hub, of this disk, and of a running server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deltic.aliases import published, spelled_out
from deltic.commands.endpoint import Endpoint, EndpointError, error_message
from deltic.commands.settings import engine, given
from deltic.config import ConfigError, EngineConfig
from deltic.config_sources import resolve
from deltic.engine.cache.cache import pages_for
from deltic.json_types import JsonObject
from deltic.logs import counted, printable, set_up
from deltic.machine import cuda_driver, free_memory_bytes
from deltic.models.checkpoint import ALL_FILES, DEMO, resolve_model
from deltic.models.fields import CheckpointError, read_json
from deltic.models.gguf import is_gguf, open_gguf
from deltic.models.hub import download, is_hub_name, wanted_of
from deltic.ops.contract import KernelError
from deltic.runtime.build import gpu_device, is_for_gpu, plan_of, settle
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.model import SpeechModel, TextModel
from deltic.server.chat.template import ChatTemplate
from deltic.server.downloads import Expected, expected, fetched
from deltic.server.local_models import LocalModel, cache_folder, local_models, model_files, removal, why_not
from deltic.text import Tokenizer

PLENTY = 1 << 50
"""Bytes of memory in which everything fits."""

SMALL_BYTES = 1_000_000
"""Files below this size are told as one."""

CONTEXTS = (4096, 32768, 131072)
"""Tokens of a context whose memory is told, beside the longest of the model."""

ROUNDED = (None, "int8", "int4")
"""Values of --quantize that are tried for a model that is too large, the most exact first."""


def pull(arguments: argparse.Namespace) -> int:
    """The command: downloads models. Raises ConfigError, CheckpointError."""
    set_up("warning", "text", "%(message)s")
    logging.getLogger("deltic").setLevel(logging.INFO)  # lines of progress, where there is no terminal
    for name in arguments.models:
        _pull(name, resolve(EngineConfig, {**given(arguments, EngineConfig), "model": name}))
    return 0


def _pull(name: str, config: EngineConfig) -> None:
    """Downloads a model. It goes on from what has come before."""
    if Path(config.model).expanduser().exists():
        print(f"{name}: a path on this machine, there is nothing to download")
        return
    if not is_hub_name(config.model):
        raise _no_name(name)
    console = Console(highlight=False, soft_wrap=True)
    files = expected(wanted_of(config.model, ALL_FILES, config.revision, config.download_dir))
    to_come = sum(file.n_bytes - file.n_here for file in files)
    if files:
        console.print(f"[bold]{config.model}[/]" + (f" at {config.revision}" if config.revision else ""))
        small = [file for file in files if file.n_bytes < SMALL_BYTES]
        rest = Expected(
            counted(len(small), "small file"), sum(file.n_bytes for file in small), sum(file.n_here for file in small)
        )
        for file in [*sorted(set(files) - {*small}, key=lambda file: -file.n_bytes), *([rest] if small else [])]:
            here = "here" if file.n_here == file.n_bytes else f"{_gb(file.n_here)} of it here" if file.n_here else ""
            console.print(f"  {_gb(file.n_bytes):>9}  {printable(file.name)}  {here}".rstrip(), markup=False)
        folder = cache_folder(config.download_dir)
        free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
        console.print(f"  {_gb(to_come):>9}  to come; the disk has {_gb(free)} free", markup=False)
        weights = sum(file.n_bytes for file in files)
        if weights > free_memory_bytes() and cuda_driver() is None:
            console.print(
                f"[bold]Its files have {_gb(weights)}, and {_gb(free_memory_bytes())} of this machine's memory are free.[/] "
                f"deltic plan {name} says whether it fits, and with which --quantize."
            )
    try:
        there = asyncio.run(fetched(config, asyncio.Event()))
    except KeyboardInterrupt:
        print(f"\nstopped; deltic pull {name} goes on from what has come", file=sys.stderr)
        raise
    assert there is not None  # nobody told it to stop
    console.print(there.model, markup=False)
    console.print(f"Next: [bold]deltic serve {name}[/]")


def _gb(n_bytes: float) -> str:
    unit, scale = ("GB", 1e9) if n_bytes >= 1e8 else ("MB", 1e6)
    return f"{n_bytes / scale:.2f} {unit}"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"


def _no_name(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: no model here, no short name, and not a hub name of the form owner/model or owner/model:Q4_K_M. "
        "deltic list --published has the short names."
    )


def list_models(arguments: argparse.Namespace) -> str:
    """The command: the models on this disk, or with --published those that have a short name.

    Raises CheckpointError.
    """
    if arguments.published:
        return _published()
    models = local_models(engine(arguments).download_dir, [Path(name) for name in arguments.directories])
    if arguments.json:
        return json.dumps([_as_json(model) for model in models], indent=2)
    if not models:
        return "There are no models on this disk. deltic list --published has some; deltic pull NAME gets one."
    table = Table("name", "size", "format", "last read", "here", box=None, pad_edge=False, header_style="")
    for model in models:
        used = time.strftime("%Y-%m-%d", time.localtime(model.used_s))
        verdict = f"not whole: {model.missing}" if model.missing else fit(model.path)
        table.add_row(_typed(model), _gb(model.n_bytes), "" if model.missing else stored_as(model.path), used, verdict)
    return _printed(table)


def _as_json(model: LocalModel) -> JsonObject:
    return {
        "name": model.name,
        "short_name": None if (short := _typed(model)) == model.name else short,
        "path": str(model.path),
        "bytes": model.n_bytes,
        "format": None if model.missing else stored_as(model.path),
        "last_read": int(model.used_s),
        "revision": model.revision or None,
        "missing": model.missing or None,
        "why_not": (None if model.missing else why_not(model.path)) or None,
    }


def _typed(model: LocalModel) -> str:
    """Returns the shortest name of a model on this disk that means it."""
    return model.published_as.names[0] if model.published_as else model.name


def _published() -> str:
    """Lists the models that have a short name."""
    table = Table("name", "also", "size", "format", "on the hub", box=None, pad_edge=False, header_style="")
    for model in published():
        size = _gb(model.n_bytes) if model.n_bytes else "–"
        table.add_row(model.names[0], ", ".join(model.names[1:]), size, model.format, model.hub)
    return (
        _printed(table) + "\n\nThe size is that of the weights. deltic pull NAME gets one, deltic serve NAME serves it."
    )


def _printed(*parts: object) -> str:
    """Returns what a console prints, as wide as it needs to be: pipes and screens get the same lines."""
    console = Console(file=(out := StringIO()), width=400, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def stored_as(path: Path) -> str:
    """Returns in which format a model's weights are stored, in a word or two; empty: its files do not say."""
    try:
        if is_gguf(path):
            n_bytes = Counter[str]()  # where the file does not name its bits, most of it does
            for tensor in open_gguf(path).tensors.values():
                n_bytes[tensor.type] += tensor.end - tensor.begin
            return f"GGUF {model_files(str(path)).level or max(n_bytes, key=lambda kind: n_bytes[kind], default='')}".rstrip()
        config = read_json(path / "config.json")
    except (ValueError, OSError):
        return ""
    inner = config.get("text_config") or config.get("talker_config") or {}
    for fields in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(said := fields.get("quantization_config"), dict):
            return str(said.get("quant_method", ""))
        if dtype := fields.get("dtype") or fields.get("torch_dtype"):
            return str(dtype)
    return ""


def fit(path: Path) -> str:
    """Says whether the model at a path fits this machine, as it is stored or else rounded.

    Of one that cannot be served it says why.
    """
    if reason := why_not(path):
        return _not_served(path, reason)
    said = ""
    for quantize in ROUNDED:
        config = EngineConfig(model=str(path), quantize=quantize)
        try:
            device = gpu_device(config) if is_for_gpu(config) else Cpu()
            plan_of(settle(config, device), device, device.free_bytes())
        except (CheckpointError, OSError) as error:
            return _not_served(path, str(error))
        except (ValueError, KernelError) as error:
            said = said or f"does not fit: {_first(str(error)).removeprefix('the model does not fit: ')}"
            continue
        return "fits" + (f" with --quantize {quantize}" if quantize else "")
    return said


def _not_served(path: Path, reason: str) -> str:
    return f"not served: {_first(reason.removeprefix(f'{path}: ').removeprefix(f'{path}/'))}"


def _first(text: str) -> str:
    """Returns the first clause of a message."""
    return text.partition("; ")[0].partition(". ")[0]


def found(name: str, download_dir: Path | None) -> LocalModel:
    """Finds a model on this disk by any of its names. Raises CheckpointError, ConfigError."""
    hub, revision = spelled_out(name)
    if Path(hub).expanduser().exists():
        path = resolve_model(hub)
        models = local_models(download_dir, [path if path.is_dir() else path.parent])
    elif not is_hub_name(hub):
        raise _no_name(name)
    else:
        models, wanted = local_models(download_dir), wanted_of(hub, ALL_FILES, revision, download_dir)
        try:
            path = download(wanted, only_here=True)
        except CheckpointError:
            path = Path()
        hub = wanted.name
    # Its own path first; of others with the name what is in the cache, which can be deleted.
    for model in sorted(models, key=lambda model: (model.path != path, not model.revision)):
        if model.path == path or model.name == hub:
            return model
    raise CheckpointError(f"{name}: not on this disk. deltic pull {name} gets it, deltic list has those that are here.")


def show(arguments: argparse.Namespace) -> str:
    """The command: what a model on this disk is, where it came from, and the memory that it takes.

    Raises CheckpointError, ConfigError.
    """
    model = found(arguments.name, engine(arguments).download_dir)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("name", model.name + ("" if (short := _typed(model)) == model.name else f" ({short})"))
    source = f"https://huggingface.co/{model.repository} at {model.revision}" if model.revision else "a path here"
    table.add_row("from", source)
    table.add_row("path", str(model.path))
    table.add_row("size", _gb(model.n_bytes))
    if model.missing:
        table.add_row("missing", model.missing)
        return _printed(table)
    table.add_row("format", stored_as(model.path))
    table.add_row("licence", _licence(model.path))
    if reason := why_not(model.path):
        table.add_row("not served", reason)
        return _printed(table)
    about = _About.of(model.path)
    for label, text in about.facts():
        table.add_row(label, text)
    table.add_row("this machine", fit(model.path))
    return _printed(table, *about.memory())


def _licence(path: Path) -> str:
    """Returns the licence that a GGUF file names."""
    named = open_gguf(path).get("general.license") if is_gguf(path) else None
    return str(named) if named else "not in its files; the page of its repository names it"


@dataclass(frozen=True)
class _About:
    """A model on this disk that can be served, with its headers read."""

    config: EngineConfig
    device: Any
    model: TextModel | SpeechModel

    @classmethod
    def of(cls, path: Path) -> _About:
        """Raises ValueError subclasses."""
        config = EngineConfig(model=str(path), max_num_seqs=1)
        device = gpu_device(config) if is_for_gpu(config) else Cpu()
        return cls(config, device, settle(config, device))

    def facts(self) -> list[tuple[str, str]]:
        """Returns lines of a label and a text."""
        if isinstance(self.model, SpeechModel):
            return [("parameters", _count(self.model.shape.n_params)), ("speaks", self.model.shape.variant)]
        shape, path = self.model.shape, Path(self.config.model)
        active = f", {_count(shape.n_active_params)} of them for a token" if shape.is_moe else ""
        template = ChatTemplate.load(path, Tokenizer.load(DEMO))
        can = ["chats"] if template else ["text alone, no chat template"]
        can += ["calls tools"] if template and template.call_form is not None else []
        can += ["thinks, or not"] if template and "enable_thinking" in template.variables else []
        can += ["sees pictures"] if self.model.tower else []
        return [
            ("parameters", f"{_count(shape.n_params)}{active}"),
            ("layers", f"{shape.n_gdn_layers} DeltaNet, {shape.n_attn_layers} attention"),
            ("context", f"{shape.max_position_embeddings} tokens"),
            ("template", ", ".join(can)),
            *([("pictures", self.model.no_pictures)] if self.model.no_pictures else []),
        ]

    def memory(self) -> list[object]:
        """Returns the table of the memory that one sequence takes, by its context."""
        if isinstance(self.model, SpeechModel):
            return []
        longest = self.model.shape.max_position_embeddings
        table = Table("one sequence of", "memory in all", box=None, pad_edge=False, header_style="")
        for length in (*(n for n in CONTEXTS if n < longest), longest):
            config = replace(self.config, max_model_len=length, n_pages=pages_for(length), n_checkpoints=1)
            plan = plan_of(settle(config, self.device), self.device, PLENTY)
            table.add_row(f"{length} tokens", _gb(plan.total_bytes - plan.host_bytes))
        return ["", table]


def rm(arguments: argparse.Namespace) -> int:
    """The command: deletes models of the download cache, once somebody said yes.

    Raises CheckpointError, ConfigError.
    """
    folder = engine(arguments).download_dir
    for name in arguments.models:
        model = found(name, folder)
        gone = removal(model, folder)
        for pid in _engines_of(model.path):
            print(
                f"{name}: process {pid} serves it. Without its files it cannot start its engine again.", file=sys.stderr
            )
        if not arguments.yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"{name}: deleting is asked for, and nobody can be asked here. Give --yes.")
            print(f"Delete {printable(model.name)}, which frees {_gb(gone.n_bytes)}? [y/N] ", end="", flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                print("kept")
                continue
        gone.run()
        print(f"deleted {printable(model.name)}: {_gb(gone.n_bytes)} are free again")
    return 0


def _engines_of(path: Path) -> list[str]:
    """Returns the ids of the engine processes of this machine that were started with the model at a path."""
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if (
                b"deltic.host.process" in (said := words.read_bytes())
                and json.dumps(str(path), ensure_ascii=False).encode() in said
            ):
                found.append(words.parent.name)
    return found


def ps(arguments: argparse.Namespace) -> str:
    """The command: the models that a running server has loaded. Raises EndpointError where there is none."""
    endpoint = Endpoint(arguments.url, arguments.api_key, arguments.cacert)
    status, body = asyncio.run(endpoint.json("GET", "/api/ps"))
    if status != 200 or not isinstance(body, dict):
        raise EndpointError(f"{endpoint.url}: {error_message(body, status)}")
    models = body.get("models") or []
    if not models:
        return f"{endpoint.url} has no model loaded."
    table = Table("name", "size", "format", "context", "stays", box=None, pad_edge=False, header_style="")
    for model in models:
        details = model.get("details") or {}
        kind = f"{details.get('format', '')} {details.get('quantization_level', '')}".strip()
        size, until = _gb(model.get("size") or 0), str(model.get("expires_at") or "")
        stays = "until the server ends" if until[:4] > "2200" else f"until {until[:19].replace('T', ' ')}"
        table.add_row(
            str(model.get("name")).removesuffix(":latest"), size, kind, str(model.get("context_length") or ""), stays
        )
    return _printed(table)
