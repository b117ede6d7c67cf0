"""What a soak may have beside plain text, by the names that `--with` takes: files that they need, and flags
for deltic serve.

drafts: of text that repeats, and of the draft head; pictures: of a tiny model with a vision tower, unless
another is given; adapters: three random ones, which a third of the requests name; formats: weights, keys and
values in 8 bits; grammars: schemas, choices, regular expressions and calls of tools, which answers are held
against; models: three more in the server, a mixture of experts in a GGUF file of Q4_K and two in FP8 and
NVFP4; apis: apis.py says which; keys: three beside the operator's, each a client's own; all: all of these.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from bench.soak import apis
from bench.soak.traffic import Kinds
from deltic.models.checkpoint import DEMO

NAMES = ("drafts", "pictures", "adapters", "formats", "grammars", "models", "apis", "keys")
ADAPTERS, RANK = ("one", "two", "three"), 4
ENDS = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
"""Of the names of matrices that the adapters have terms for."""
TEMPLATE = ["--chat-template", str(DEMO / "chat_template.jinja")]
"""Those of tiny checkpoints have no calls of tools."""
KEYS = ("alice", "bob", "carol")


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
    others: dict[str, list[str]] = field(default_factory=dict)
    """Further models by their names, each with flags of its own."""
    is_of_bytes: bool = False
    """A tiny model reads a byte a token, so prompts are three times as long."""
    kinds: Kinds = field(default_factory=dict)
    """Further kinds of requests."""
    keys: list[str] = field(default_factory=list)
    """Keys beside the operator's."""


def chosen(text: str) -> list[str]:
    """The names of --with, with commas between. Raises ValueError for one that is none."""
    names = [name for name in text.split(",") if name]
    if unknown := {*names} - {*NAMES, "all"}:
        raise ValueError(f"--with {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}, all")
    return [*NAMES] if "all" in names else names


def prepare(names: list[str], model: str | None, scratch: Path) -> Features:
    """Writes what these need into `scratch`."""
    given = model
    if model is None and "pictures" in names:
        from tests.tiny import tiny_checkpoint  # imports torch

        model = str(tiny_checkpoint("dense", has_tower=True, has_mtp="drafts" in names))
        found = Features([model], [*TEMPLATE])
    else:
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
        if "apis" in names:
            found.own_flags.append("--allow-lora-loading")
    if "apis" in names:
        found.kinds = apis.KINDS
        found.own_flags += ["--max-stored-responses", str(apis.MAX_STORED), "--batch-dir", str(scratch / "batches")]
    if "keys" in names:
        found.keys = [secrets.token_hex(8) for _ in KEYS]
        for name, key in zip(KEYS, found.keys, strict=True):
            found.own_flags += ["--api-key", f"{name}={key}"]
    if "models" in names:
        from tests.tiny_gguf import tiny_gguf
        from tests.tiny_quantised import tiny_quantised

        models = {recipe: tiny_quantised("dense", recipe).path for recipe in ("qwen-fp8", "mixed-nvfp4")}
        models["gguf"] = tiny_gguf("moe", "Q4_K", has_mtp=True)
        found.others = {name: [str(path), "--served-model-name", name, *TEMPLATE] for name, path in models.items()}
    found.grammars = "grammars" in names
    found.is_of_bytes = model != given or bool(found.others)
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
