"""Train the built-in model: `python -m training.train --out DIR --minutes 20 --device cuda|cpu [--resume]`.

`--minutes` bounds the wall clock of the whole program. The learning rate follows the clock: a short warm-up, then a
cosine to zero at the end of the budget, counted over all runs that were resumed. DIR gets model.safetensors (the
published layout, bfloat16), what `--resume` needs, and log.txt. Needs torch, numpy, tokenizers, safetensors, jinja2.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import training.model as model_module
from training.model import Attention, DeltaNet, Geometry, Hybrid, Mlp, Norm, Packed, Projection, checkpoint_tensors
from training.optimiser import Optimiser
from training.rows import FIRST, ID_MASK, LEARN, LONG_ROW, SHORT_ROW, Batches, Row, Supply

START = time.monotonic()
WARM_UP = 0.01  # of the budget
N_WARM_UP_STEPS = 100  # at the least
SAVE_EVERY_S, LOG_EVERY_S, VALIDATE_EVERY_S = 120.0, 10.0, 60.0
FINISH_S = 4.0  # kept for the last checkpoint


def compile_parts() -> list[tuple[Any, str, Any]]:
    """Compile what works on the flat run of tokens; both row lengths have the same shapes there.

    Left alone: attention and the chunk scan, which are library calls and depend on the row length. Returns what was
    replaced, as arguments of `setattr`.
    """
    parts = [
        (Norm, "forward"),
        (DeltaNet, "chunk_inputs"),
        (DeltaNet, "finish"),
        (Attention, "heads"),
        (Attention, "finish"),
        (Mlp, "forward"),
        (Hybrid, "token_loss"),
        (model_module, "after_scan"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in parts]
    for owner, name, part in before:
        setattr(owner, name, torch.compile(part, dynamic=False))
    return before


def to_device(rows: Row, device: torch.device) -> tuple[Packed, Tensor]:
    """Rows of flagged tokens -> a batch, and its targets [N] with -100 where nothing is learned."""
    flat = torch.from_numpy(rows.astype(np.int32)).to(device, non_blocking=True).flatten().long()
    tokens, first = flat & ID_MASK, (flat & FIRST) != 0
    targets = torch.where(((flat & LEARN) != 0) & ~first, tokens, -100).roll(-1)
    targets[-1] = -100
    return Packed(tokens, first, rows.shape[0]), targets


def save(directory: Path, model: Hybrid, optimiser: Optimiser, seconds: float) -> None:
    """Write the checkpoint; every file stays under 16 MB. Weights are replaced last, and atomically."""
    weights = {name: p.detach().cpu() for name, p in model.state_dict().items()}
    names = list(weights)
    state = {name: t.detach().cpu().contiguous() for name, t in optimiser.state().items()}
    files = {
        "state-0": {n: weights[n] for n in names[::2]},
        "state-1": {n: weights[n] for n in names[1::2]},
        "state-2": state,
        "model": checkpoint_tensors(weights),
    }
    for name, tensors in files.items():
        partial = directory / f"{name}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(directory / f"{name}.safetensors")
    (directory / "progress.json").write_text(json.dumps({"n_steps": optimiser.n_steps, "seconds": seconds}))


def resume(directory: Path, model: Hybrid, optimiser: Optimiser) -> float:
    """Load what `save` wrote -> seconds trained before."""
    missing = [n for n in ("state-0", "state-1", "state-2") if not (directory / f"{n}.safetensors").exists()]
    if missing:
        raise SystemExit(f"cannot resume: {directory} has no {missing[0]}.safetensors; train without --resume first")
    model.load_state_dict(
        {**load_file(directory / "state-0.safetensors"), **load_file(directory / "state-1.safetensors")}
    )
    progress = json.loads((directory / "progress.json").read_text())
    optimiser.load(load_file(directory / "state-2.safetensors"), progress["n_steps"])
    return float(progress["seconds"])


class Training:
    """One run: the model, its optimiser, its batches and its clock."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.device = torch.device(given.device)
        on_gpu = self.device.type == "cuda"
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
        n_workers = given.workers or (max(1, min(10, n_cores - 3)) if on_gpu else 1)
        self.batch_tokens = given.batch_tokens or (65536 if on_gpu else 8192)
        run = json.loads((given.out / "progress.json").read_text())["n_steps"] if given.resume else 0
        # the workers are forked: before the device is touched
        self.supply = Supply(given.seed + run, self.batch_tokens, n_workers)
        held_out = Batches(7_000_003, self.batch_tokens)
        self.held_out = [held_out.draw(length) for length in (SHORT_ROW, LONG_ROW)]
        torch.manual_seed(given.seed)
        Projection.compute_dtype = torch.bfloat16 if on_gpu else torch.float32
        # cuDNN's support of this head size with a mask varies by version
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.model = Hybrid(Geometry()).to(self.device)
        self.optimiser = Optimiser(self.model)
        self.before = resume(given.out, self.model, self.optimiser) if given.resume else 0.0
        self.check_every = 10 if on_gpu else 1
        self.budget = self.before + given.minutes * 60
        self.log: TextIO = (given.out / "log.txt").open("a", encoding="utf-8")
        n_params = sum(p.numel() for p in self.model.parameters())
        self.report(
            f"{n_params:,} parameters on {self.device}, {self.batch_tokens:,} tokens a step, {n_workers} corpus workers, "
            f"step {self.optimiser.n_steps}, ready after {time.monotonic() - START:.1f} s"
        )

    def warm_up(self) -> None:
        """Compile on a held-out batch; where that fails, say why and go on eagerly."""
        if self.given.no_compile:
            return
        replaced = compile_parts()
        try:
            self.mean_loss(self.held_out[0]).backward()  # type: ignore[no-untyped-call]
            self.report(f"{self.elapsed():6.0f} s  compiled")
        except Exception as error:  # any part of the compiler may fail on a machine it does not know
            for owner, name, part in replaced:
                setattr(owner, name, part)
            self.report(f"{self.elapsed():6.0f} s  not compiled, going on without: {error!r:.600}")
        self.model.zero_grad()

    def report(self, line: str) -> None:
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def elapsed(self) -> float:
        return time.monotonic() - START

    def rate(self, n_done: int) -> float:
        """The learning rate's factor, 0..1, by the clock or (with --steps) by the count."""
        total = (self.before + self.elapsed()) / self.budget
        if self.given.steps:
            total = max(total, n_done / self.given.steps)
        warm = min(1.0, (n_done + 1) / N_WARM_UP_STEPS, (total + 1e-3) / WARM_UP)
        if self.given.steps:
            warm = min(1.0, (n_done + 1) / max(1, min(N_WARM_UP_STEPS, self.given.steps // 10)))
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, total)))

    def mean_loss(self, rows: Row) -> Tensor:
        batch, targets = to_device(rows, self.device)
        return self.model.loss(batch, targets).sum() / (targets >= 0).sum()

    def validate(self) -> str:
        # with gradients on, though unused: without, every compiled part would be compiled a second time
        short, long = (self.mean_loss(rows).item() for rows in self.held_out)
        return f"held out: short rows {short:.4f}, long rows {long:.4f}"

    def run(self) -> None:
        given = self.given
        self.warm_up()
        end = given.minutes * 60 - FINISH_S
        n_done, n_logged, losses = 0, 0, []
        logged = saved = validated = self.elapsed()
        while self.elapsed() < end and not (given.steps and n_done >= given.steps):
            loss = self.mean_loss(self.supply.draw())
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step(self.rate(n_done))
            losses.append(loss.detach())
            n_done += 1
            if n_done % self.check_every and n_done != 1:
                continue  # reading the loss waits for the device: not at every step
            mean = torch.stack(losses).mean().item()
            now = self.elapsed()
            if now - logged > LOG_EVERY_S or n_done == 1:
                speed = (n_done - n_logged) * self.batch_tokens / (now - logged)
                self.report(
                    f"{now:6.0f} s  step {self.optimiser.n_steps:6d}  loss {mean:.4f}  rate {self.rate(n_done):.3f}  "
                    f"{speed:,.0f} tokens/s  batches used again {self.supply.n_reused}"
                )
                n_logged, losses, logged = n_done, [], self.elapsed()
            if now - validated > VALIDATE_EVERY_S:
                self.report(f"{now:6.0f} s  {self.validate()}")
                validated = self.elapsed()
            if now - saved > SAVE_EVERY_S:
                save(given.out, self.model, self.optimiser, self.before + now)
                saved = self.elapsed()
        save(given.out, self.model, self.optimiser, self.before + self.elapsed())
        self.report(f"{self.elapsed():6.0f} s  saved after step {self.optimiser.n_steps} ({n_done} in this run)")
        if given.steps or self.elapsed() < given.minutes * 60 - 1:
            self.report(f"{self.elapsed():6.0f} s  {self.validate()}")
        if self.device.type == "cuda":
            self.report(f"peak device memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--minutes", type=float, default=20.0, help="wall clock of the whole program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly (default: torch.compile on a GPU)")
    parser.add_argument("--batch-tokens", type=int, default=0, help="tokens a step, a multiple of 4096")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the corpus")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.batch_tokens % LONG_ROW:
        parser.error(f"--batch-tokens must be a multiple of {LONG_ROW}, not {given.batch_tokens}")
    if torch.device(given.device).type != "cuda":
        given.no_compile = True
    if given.resume and not (given.out / "progress.json").exists():
        parser.error(f"--resume: there is no checkpoint in {given.out}; train without --resume first")
    given.out.mkdir(parents=True, exist_ok=True)
    return given


def main() -> None:
    given = parse()
    Training(given).run()


if __name__ == "__main__":
    main()
