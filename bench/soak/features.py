"""What a soak may have beside plain text, by the names that `--with` takes: files that they need, and flags
for deltic serve.

drafts: of text that repeats, and of the draft head; pictures: of a tiny model with a vision tower, unless
another is given; adapters: three random ones, which a third of the requests name; formats: weights, keys and
values in 8 bits; grammars: schemas, choices and regular expressions, which answers are held against.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from deltic.models.checkpoint import DEMO

NAMES = ("drafts", "pictures", "adapters", "formats", "grammars")
ADAPTERS, RANK = ("one", "two", "three"), 4
ENDS = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
"""Of the names of matrices that the adapters have terms for."""


@dataclass
class Features:
    """The model, flags for it, and what requests may ask."""

    model: list[str]
    flags: list[str] = field(default_factory=list)
    """Of both servers where there are two."""
    own_flags: list[str] = field(default_factory=list)
    """Of the first."""
    adapters: tuple[str, ...] = ()
    grammars: bool = False


def prepare(names: list[str], model: str | None, scratch: Path) -> Features:
    """Writes what these need into `scratch`. Raises ValueError for a name that is none."""
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"--with {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    if model is None and "pictures" in names:
        from tests.tiny import tiny_checkpoint  # imports torch

        model = str(tiny_checkpoint("dense", has_tower=True, has_mtp="drafts" in names))
    found = Features([model] if model else [])
    if "pictures" in names:
        found.flags += ["--max-picture-tokens", "256"]
    if "formats" in names:
        found.flags += ["--quantize", "int8", "--kv-cache-dtype", "int8"]
    if "drafts" in names:
        found.own_flags += ["--max-drafts", "8"]
    if "adapters" in names:
        for seed, name in enumerate(ADAPTERS):
            write_adapter(scratch / name, Path(model) if model else DEMO, seed)
            found.flags += ["--lora", f"{name}={scratch / name}"]
        found.adapters = ADAPTERS
    found.grammars = "grammars" in names
    return found


def write_adapter(path: Path, model: Path, seed: int) -> None:
    """A random adapter of a checkpoint's directory, as PEFT writes them.

    Raises ValueError where no matrix is known.
    """
    rng, terms = np.random.default_rng(seed), dict[str, np.ndarray]()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in (name for name in tensors.keys() if name.endswith(ENDS) and "layers." in name):  # noqa: SIM118
                if name.startswith("mtp"):
                    continue
                n, k = tensors.get_slice(name).get_shape()
                module = f"base_model.model.{name.removesuffix('.weight')}"
                for part, size in (("A", (RANK, k)), ("B", (n, RANK))):
                    terms[f"{module}.lora_{part}.weight"] = rng.normal(0, 0.05, size).astype(np.float32)
    if not terms:
        raise ValueError(f"--with adapters: {model} has no matrix whose name ends as {', '.join(ENDS)}")
    path.mkdir()
    save_file(terms, path / "adapter_model.safetensors")
    modules = sorted({end.split(".")[1] for end in ENDS})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(settings))
