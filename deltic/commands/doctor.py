"""`deltic doctor`: what this machine is good for, in one screen.

The machine and its two roofs, which published models fit in which format, the tokens a second to expect, and
the command to type next.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub.constants import HF_HUB_CACHE
from rich.console import Console
from rich.table import Table

from deltic import __version__
from deltic.aliases import Published, published
from deltic.commands.plan import CONTEXT, decode_bytes
from deltic.config import ConfigError, EngineConfig, ServerConfig
from deltic.machine import cpu_model, cuda_driver, free_memory_bytes, memory_bound, n_usable_cpus
from deltic.models.checkpoint import locate_speech, speaks
from deltic.models.fields import CheckpointError
from deltic.models.qwen.published import PUBLISHED
from deltic.ops.contract import KernelError
from deltic.ops.cpu.instruction_sets import runnable
from deltic.ops.cpu.program import instruction_set
from deltic.roofs import multiply_peak, read_bandwidth
from deltic.runtime.build import gpu_device, plan_of, sees_gpu, settle
from deltic.runtime.cpu.device import Cpu

if TYPE_CHECKING:
    from deltic.runtime.gpu.device import Gpu

MODELS: dict[str, str] = {}
"""The first name on the hub of each size (--dummy) in bfloat16: texts, the larger the later, then speech."""
for _model in published():
    if _model.format == "bfloat16":
        MODELS.setdefault(_model.shape, _model.hub)

REACHED = {"cpu": 0.79, "cuda": 0.49}
"""The least part of the memory's roof that one sequence reached in the kept runs of docs/performance.md."""

FLUENT = 8.0
"""Tokens a second that are read with ease: the largest model of such a speed is proposed."""

HOPPER = (9, 0)

SLOWER = 0.9
"""A rate below this part of another's is said to be slower: two measurements of a moment differ by less."""


@dataclass(frozen=True)
class Column:
    """A format on a device."""

    format: str
    """bfloat16, or a value of --quantize."""
    device: Cpu | Gpu
    bandwidth: float
    """Bytes a second that the device reads."""

    @property
    def quantize(self) -> str | None:
        return None if self.format == "bfloat16" else self.format

    def config(self, size: str) -> EngineConfig:
        return EngineConfig(dummy=size, quantize=self.quantize, device=self.device.name)

    def fits(self, size: str, beside_bytes: int = 0) -> bool:
        """Returns whether it fits beside so many bytes more, with all of its experts."""
        try:
            model = settle(self.config(size), self.device)
            return not plan_of(model, self.device, self.device.free_bytes() - beside_bytes).outside_bytes
        except (ConfigError, CheckpointError):
            return False

    def roof(self, size: str) -> float:
        """Tokens a second of one sequence of a text model, if the memory's speed were all."""
        return self.bandwidth / decode_bytes(PUBLISHED[size], self.quantize, 1, CONTEXT, self.device.text.counted)

    def n_bytes(self, size: str) -> int:
        """Returns the bytes of the weights."""
        if speaks(self.config(size)):
            (_, speech), kind = locate_speech(self.config(size)), self.device.speech
            return kind.weight_bytes(speech, self.quantize) + kind.vocoder_bytes(speech)
        return self.device.text.weight_bytes(PUBLISHED[size], self.quantize)


def report() -> str:
    """The whole report as text. Takes about two seconds: it measures the roofs."""
    out = StringIO()
    console = Console(file=out, width=124, highlight=False)
    console.print(f"deltic {__version__} · Python {sys.version.split()[0]} · {platform.platform()}")
    columns = _cpu(console) + _gpu(console)
    _server(console)
    if columns:
        _models(console, columns)
    return out.getvalue()


EXTRAS = {"speech": ("soundfile", "soxr"), "video": ("av",), "pdf": ("pypdf",)}
"""Modules that extras of the package bring, of those that are for what requests send."""

FEW_FILES = 4096
"""Open files with which a busy server would close connections."""


def _server(console: Console) -> None:
    """Prints what a server would find here: its port, the disk, open files, what is installed."""
    host, port = ServerConfig.host, ServerConfig.port
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            told = f"port {port} is free"
        except OSError:
            told = f"[bold]port {port} is taken: give --port[/]"
    downloads = Path(HF_HUB_CACHE)
    disk = next(folder for folder in (downloads, *downloads.parents) if folder.exists())
    told += f" · {shutil.disk_usage(disk).free / 1e9:.0f} GB of disk are free for downloads"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= most < FEW_FILES:  # RLIM_INFINITY is less than 0
        told += f" · [bold]only {most} connections and files: raise ulimit -n[/]"
    console.print(f"Server  {told}")
    missing = [name for name, modules in EXTRAS.items() if not all(map(importlib.util.find_spec, modules))]
    ready = ", ".join(name for name in ("pictures", *EXTRAS) if name not in missing)
    more = f" · for more: pip install 'deltic\\[{','.join(missing)}]'" if missing else ""
    console.print(f"        takes {ready}{more}")


def _cpu(console: Console) -> list[Column]:
    """Prints what the CPU is; its formats."""
    n_cpus = n_usable_cpus()
    console.print(
        f"CPU     {cpu_model()} · {n_cpus} usable CPUs · {free_memory_bytes() / 1e9:.1f} GB free{memory_bound()}"
    )
    try:
        name = instruction_set()
    except KernelError as error:
        console.print(f"        [bold red]{error}[/]")
        return []
    best = runnable()[0]
    bandwidth = read_bandwidth(n_cpus)
    peaks = {name: multiply_peak(n_cpus, name) / 1e9 for name in ("bf16", "int8", "int4")}
    console.print(
        f"        kernels: {name}{'' if best == name else f' (this CPU can run {best}: install again)'} · reads "
        f"{bandwidth / 1e9:.1f} GB/s · multiplies bfloat16 {peaks['bf16']:.0f}, int8 {peaks['int8']:.0f}, "
        f"int4 {peaks['int4']:.0f} Gop/s"
    )
    slower = [name for name in ("int8", "int4") if peaks[name] < SLOWER * peaks["bf16"]]
    if slower:
        console.print(f"        [bold]prompts are computed more slowly in {' and '.join(slower)} than in bfloat16[/]")
    return [Column(format, Cpu(), bandwidth) for format in ("bfloat16", "int8", "int4")]


def _gpu(console: Console) -> list[Column]:
    """Prints what the GPU is; its formats."""
    if cuda_driver() is None:
        console.print("GPU     no NVIDIA driver: models run on the CPU")
        return []
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        console.print("GPU     [bold red]a driver, but no torch or Triton: pip install 'deltic\\[gpu]'[/]")
        return []
    import torch
    import triton

    if not sees_gpu():
        console.print(f"GPU     torch {torch.__version__} sees none: models run on the CPU")
        return []

    from deltic.ops.gpu.launch import pdl_works
    from deltic.ops.gpu.roofs import GpuRoofs

    chip, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
    try:
        roofs = GpuRoofs.measured()
    except RuntimeError:  # torch's out of memory
        console.print(f"GPU     {chip.name}: the roofs were not measured, too little of its memory is free")
        return []
    torch.cuda.empty_cache()  # what is free is asked next
    console.print(
        f"GPU     {chip.name} · {free / 1e9:.1f} of {total / 1e9:.1f} GB free · compute capability {chip.major}.{chip.minor}"
        f" · driver {_driver() or 'unknown'}\n"
        f"        torch {torch.__version__} · Triton {triton.__version__} · reads {roofs.read / 1e9:.0f} GB/s · multiplies "
        f"bfloat16 {roofs.multiply / 1e12:.0f} Top/s · PDL: {'yes' if pdl_works() else 'no'}"
    )
    if (chip.major, chip.minor) != HOPPER:
        console.print(
            "        [bold]tested on compute capability 9.0 only: run tests/gpu before you rely on exact bits[/]"
        )
    _links(console)
    torch.cuda.empty_cache()
    return [Column("bfloat16", gpu_device(EngineConfig(device="cuda")), roofs.read)]


def _links(console: Console) -> None:
    """Prints whether several GPUs can run a model together, and how fast they copy to each other."""
    import torch

    from deltic.ops.gpu.all_reduce import ONE_SHOT_BYTES, out_of_reach
    from deltic.ops.gpu.roofs import link_speed

    n = torch.cuda.device_count()
    if n < 2:
        return
    most = max(size for size in (2, 4, 8) if size <= n)
    if (pair := out_of_reach(most)) is not None:
        sums = "sums go through the host's memory, which takes longer"
        found = f"GPU {pair[0]} does not reach the memory of GPU {pair[1]}"
    else:
        sums = f"sums of up to {ONE_SHOT_BYTES >> 20} MiB go in one shot, larger ones in two"
        found = "reach each other"
    try:
        found += f", GPU 0 copies {link_speed(0, 1) / 1e9:.0f} GB/s to GPU 1"
    except RuntimeError:  # torch's out of memory
        found += ", too little of their memory is free to see how fast"
    console.print(f"        {n} GPUs: {found}: --tensor-parallel up to {most}; {sums}")


def _driver() -> str:
    """Version of the NVIDIA driver; empty where it cannot be read."""
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", path.read_text()) if path.exists() else None
    return match[0] if match else ""


def smallest_download(column: Column) -> Published | None:
    """Finds the largest published model that is fluent on the CPU as somebody else stored it in few bits, and
    of several of its files the smallest. None: none is.

    column: of the CPU, in a format that has about as many bits.
    """
    fluent = []
    for model in published():
        if model.n_bytes is None or model.shape not in PUBLISHED:
            continue
        n_bytes = column.n_bytes(model.shape)
        rate = column.roof(model.shape) * n_bytes / model.n_bytes * REACHED["cpu"]
        if rate >= FLUENT and column.fits(model.shape, max(0, model.n_bytes - n_bytes)):
            fluent.append(model)
    return max(fluent, key=lambda model: (PUBLISHED[model.shape].n_params, -(model.n_bytes or 0)), default=None)


def _models(console: Console, columns: list[Column]) -> None:
    """Prints which models fit, how fast they are, and the command for the best of them."""
    table = Table("weights in GB, tokens a second", box=None, pad_edge=False, header_style="")
    for column in columns:
        table.add_column(f"{'CPU' if column.device.name == 'cpu' else 'GPU'}, {column.format}")
    fluent: list[tuple[bool, int, int]] = []
    sizes = list(MODELS)
    for nth, (size, model) in enumerate(MODELS.items()):
        row = [model]
        for place, column in enumerate(columns):
            fits = column.fits(size)
            verdict = "fits" if fits else "too large"
            if fits and size in PUBLISHED:
                roof = column.roof(size)
                least = roof * REACHED[column.device.name]
                verdict = f"{_short(least)} to {_short(roof)}"
                if least >= FLUENT:  # of one size, the format that comes first is the most exact
                    fluent.append((column.device.name == "cuda", nth, -place))
            row.append(f"{column.n_bytes(size) / 1e9:5.1f}  {verdict}")
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print(
        f"\nOne sequence behind {CONTEXT} tokens. The memory's speed allows the second; kept runs reached the first."
    )
    command, why = "deltic serve", "a small built-in model; no published one is fluent here"
    on_gpu, nth, place = max(fluent, default=(False, 0, 0))
    few_bits = [column for column in columns if column.format == "int4" and not on_gpu]
    small = smallest_download(few_bits[0]) if few_bits else None
    n_params = PUBLISHED[sizes[nth]].n_params if fluent else 0
    if small is not None and PUBLISHED[small.shape].n_params >= n_params:
        command += f" {small.names[0]}"
        why = f"the largest that is fluent on the CPU, a download of {(small.n_bytes or 0) / 1e9:.1f} GB"
    elif fluent:
        column = columns[-place]
        command += f" {MODELS[sizes[nth]]}" + (f" --quantize {column.quantize}" if column.quantize else "")
        if column.device.name == "cpu" and column.quantize is None and columns[-1].device.name != "cpu":
            command += " --device cpu"
        why = f"the largest that is fluent on the {'CPU' if column.device.name == 'cpu' else 'GPU'}"
    console.print(f"Next:   [bold]{command}[/]   ({why})", soft_wrap=True)
    console.print("Equal requests get equal bits, in any company, cut, cached or interrupted: docs/design/purity.md.")


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.1f}"
