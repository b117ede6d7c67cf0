"""Fields of a config.json, read one at a time, and the two errors that a checkpoint can raise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# No model comes near them; beyond, sizes could not be added up in 64 bits, and lists would not end.
MAX_SIZE, MAX_NUMBER, MAX_LAYERS = 2**31, 1e15, 4096


class CheckpointError(ValueError):
    """A checkpoint that is not there, damaged, or not what its config says. Names the file or the tensor."""


class UnsupportedModelError(ValueError):
    """A config that this engine cannot run; names the field, what it says, and what would do. file: where it
    stands, where that is known (gguf_config.naming).
    """

    def __init__(self, field: str, found: object, supported: str, file: str = "") -> None:
        place = f"{file}: " if file else ""
        super().__init__(f"{place}config field {field!r}: found {found!r}; supported: {supported}")
        self.file = file
        self.field = field
        self.found = found
        self.supported = supported


_OTHERS = {
    "llama": "a Llama, or made like one", "mistral": "a Mistral", "ministral": "a Mistral", "mixtral": "a Mixtral",
    "pixtral": "a Pixtral", "gemma": "a Gemma", "paligemma": "a Gemma", "phi": "a Phi", "gptoss": "a gpt-oss",
    "qwen3forcausallm": "a plain Qwen3, without DeltaNet layers", "qwen3": "a plain Qwen3, without DeltaNet layers",
    "qwen3moe": "a plain Qwen3 mixture, without DeltaNet layers", "qwen3vl": "a Qwen3-VL", "qwen3omni": "a Qwen3-Omni",
    "qwen3asr": "a Qwen3-ASR", "qwen2": "a Qwen2 or Qwen2.5", "qwen2vl": "a Qwen2-VL", "qwen25vl": "a Qwen2.5-VL",
    "qwen25omni": "a Qwen2.5-Omni", "qwen2audio": "a Qwen2-Audio", "qwenlmhead": "a Qwen of the first generation",
    "deepseek": "a DeepSeek", "glm": "a GLM", "chatglm": "a GLM", "kimi": "a Kimi", "minimax": "a MiniMax",
    "granite": "a Granite", "nemotron": "a Nemotron", "olmo": "an OLMo", "cohere": "a Command", "command": "a Command",
    "falcon": "a Falcon", "mamba": "a Mamba", "jamba": "a Jamba", "rwkv": "an RWKV", "gpt": "a GPT-2 or GPT-NeoX",
    "starcoder": "a StarCoder", "internlm": "an InternLM", "internvl": "an InternVL", "exaone": "an EXAONE",
    "smollm": "a SmolLM", "smolvlm": "a SmolVLM", "lfm": "an LFM", "hunyuan": "a Hunyuan", "ernie": "an ERNIE",
    "bert": "a BERT", "modernbert": "a BERT", "nomicbert": "a BERT", "roberta": "a BERT", "xlmroberta": "a BERT",
    "qwen35": "", "qwen36": "", "qwen38": "", "qwen3next": "", "qwen3tts": "",  # ours, with another head
    "t5": "a T5", "whisper": "a Whisper", "clip": "a vision tower (mmproj), which belongs beside its model's file",
}  # fmt: skip
"""Models of others, by how their architectures in config.json or a GGUF file begin, in lower case."""


def of_another_family(name: object) -> str:
    """Says what is wrong with a model of this architecture. Empty for one of ours, or one that
    is not known.
    """
    bare = "".join(filter(str.isalnum, name.lower())) if isinstance(name, str) else ""
    begin = max((begin for begin in _OTHERS if bare.startswith(begin)), key=len, default="")
    if not _OTHERS.get(begin):
        return ""
    return (
        f"this is {_OTHERS[begin]} ({name}); Deltic serves Qwen's gated-DeltaNet hybrids (Qwen3-Next, 3.5, 3.6, 3.8) and "
        "Qwen3-TTS; deltic doctor names some"
    )


class OtherModelError(UnsupportedModelError):
    """A model of another family, which is named as what it is where it is known."""

    def __init__(self, field: str, found: object, supported: str) -> None:
        super().__init__(field, found, supported)
        if said := of_another_family(found[0] if isinstance(found, list | tuple) and found else found):
            self.args = (said,)


def mending(path: Path) -> str:
    """Says what mends a damaged file. In the hub's cache a name is a link, and the file behind
    it in the way.
    """
    is_cached = path.is_symlink() and path.resolve().parent.name == "blobs"
    return f"delete {path.resolve()} and start again" if is_cached else "download it again"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is absent, broken or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); is this a checkpoint?") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken JSON ({error}); {mending(path)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def positive_int(fields: Mapping[str, object], field: str, default: int | None = None) -> int:
    value = default if fields.get(field) is None else fields[field]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MAX_SIZE:
        raise UnsupportedModelError(field, value, f"an integer of at least 1, below {MAX_SIZE}")
    return value


def positive_float(fields: Mapping[str, object], field: str, default: float | None = None) -> float:
    value = default if fields.get(field) is None else fields[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
        raise UnsupportedModelError(field, value, f"a number above 0, below {MAX_NUMBER:g}")
    return float(value)


def read_flag(fields: Mapping[str, object], field: str, default: bool = False) -> bool:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModelError(field, value, "true or false")
    return value


def only(fields: Mapping[str, object], name: str, allowed: tuple[object, ...]) -> None:
    value = fields.get(name)
    if value not in allowed:
        raise UnsupportedModelError(name, value, " or ".join(repr(a) for a in allowed if a is not None))


Limit = tuple[str, object, bool, str]
"""A field, what was found, whether that can be run, and what is supported."""


def multiple(field: str, n: int, unit: int, most: int | None = None) -> Limit:
    """Makes the limit of a multiple of a unit, at most so large."""
    bound = "" if most is None else f", at most {most}"
    return field, n, n % unit == 0 and (most is None or n <= most), f"a multiple of {unit}{bound}"


def at_most(field: str, n: int, most: int) -> Limit:
    """Makes the limit of a size that is at most so large."""
    return field, n, n <= most, f"at most {most}"


def within(field: str, n: int, least: int, most: int) -> Limit:
    """Makes the limit of a size between two others."""
    return field, n, least <= n <= most, f"{least} to {most}"


def one_of(field: str, n: int, *known: int) -> Limit:
    """Makes the limit of a size of which kernels have these."""
    return field, n, n in known, f"{', '.join(map(str, known[:-1]))} or {known[-1]}"


def refuse_limits(*limits: Limit, prefix: str = "") -> None:
    """Raises UnsupportedModelError for the first limit that does not hold. prefix: of the fields."""
    for field, found, holds, supported in limits:
        if not holds:
            raise UnsupportedModelError(prefix + field, found, supported)


def json_table(fields: Mapping[str, object], name: str, *, may_lack: bool = False) -> Mapping[str, object]:
    """Reads an object. may_lack: {} where it is absent or empty. Raises UnsupportedModelError."""
    value = fields.get(name) or ({} if may_lack else None)
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(name, value, "an object")
    return value
