"""Golden answers of the published package `qwen-tts` 0.1.1 to the tiny checkpoints of `tests/tiny_speech.py`.

    make oracle

makes an environment for it (it wants another transformers than the tests) and runs this file there, which writes `speech/`:

cases.json        for each case the checkpoint, what was asked, the text ids that the package's tokenizer made, the greedy codes
tensors.safetensors
  CASE.rows       the first COLUMNS columns of the prompt rows, float32 [P, COLUMNS]; CASE.trailing: of the text still to come
  CASE.wave       every STRIDE-th sample of the answer, int16
  VOICE.speaker   speaker vector, float32 [h]; VOICE.codes: reference codes, int16 [R, 16], for each voice that a case names
  vocoder.codes, vocoder.wave   one whole pass of the vocoder, longer than its window

Needs torch, and of this repository tests/tiny_speech.py only; nothing of deltic runs here.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.tiny_speech import N_CODEBOOKS, N_CODES, tiny_audio, tiny_speech

DIRECTORY = Path(__file__).with_name("speech")
COLUMNS, STRIDE, VOCODER_STRIDE = 8, 13, 5
MAX_NEW_TOKENS = 13
VOCODER_FRAMES = 40

VOICES = {"short": (5000, 1), "long": (52000, 2)}
"""Samples and seed of `tiny_audio`: 3 frames, fewer than the text has ids, and 28, more; neither is a whole number of frames."""

TEXT, LONG_TEXT, REF_TEXT = "hello world", "the speech, a user says: Größe 北京", "a speech"
STYLE = "Calm, and a little hoarse."

REQUESTS: list[dict[str, Any]] = [
    {"variant": "custom_voice", "text": TEXT, "speaker": "Vivian", "language": "English"},
    {"variant": "custom_voice", "text": LONG_TEXT, "speaker": "sohee", "instruct": STYLE},
    {"variant": "custom_voice", "text": TEXT, "speaker": "eric"},
    {"variant": "custom_voice", "text": TEXT, "speaker": "Dylan", "language": "chinese"},
    {"variant": "custom_voice", "text": TEXT, "speaker": "dylan", "language": "german"},
    {"variant": "voice_design", "text": LONG_TEXT, "instruct": STYLE, "language": "Japanese"},
    {"variant": "voice_design", "text": TEXT, "instruct": STYLE},
    {"variant": "base", "text": TEXT, "voice": "short", "language": "french"},
    {"variant": "base", "text": LONG_TEXT, "voice": "short", "ref_text": REF_TEXT},
    {"variant": "base", "text": TEXT, "voice": "long", "ref_text": REF_TEXT, "language": "English"},
]


def load_package() -> Any:
    """The package's model class. What only its other tokenizer imports (25 Hz, no published model) is stood in for."""
    for name in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
    import qwen_tts
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return qwen_tts.Qwen3TTSModel


def answer(model: Any, request: dict[str, Any], is_streaming: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the package makes of a request: what goes into cases.json, and tensors by the names of this file's docstring."""
    kept: dict[str, Any] = {}
    generate, talk = model.model.generate, model.model.talker.generate

    def watch(**given: Any) -> Any:
        for name in ("input_ids", "ref_ids", "instruct_ids"):
            ids = (given.get(name) or [None])[0]
            kept[name] = None if ids is None else ids[0].tolist()
        codes, states = generate(**given)
        kept["codes"] = codes[0].tolist()
        return codes, states

    def watch_talker(**given: Any) -> Any:
        kept["rows"], kept["trailing"] = given["inputs_embeds"][0], given["trailing_text_hidden"][0]
        return talk(**given)

    model.model.generate, model.model.talker.generate = watch, watch_talker
    greedy = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": MAX_NEW_TOKENS}
    asked = {"text": request["text"], "language": request.get("language"), "non_streaming_mode": not is_streaming}
    try:
        if request["variant"] == "base":
            audio = (tiny_audio(*VOICES[request["voice"]]).numpy(), 24000)
            ref_text = request.get("ref_text")
            clone = {"ref_audio": audio, "ref_text": ref_text, "x_vector_only_mode": ref_text is None}
            waves, _ = model.generate_voice_clone(**asked, **clone, **greedy)
        elif request["variant"] == "voice_design":
            waves, _ = model.generate_voice_design(**asked, instruct=request["instruct"], **greedy)
        else:
            who = {"speaker": request["speaker"], "instruct": request.get("instruct")}
            waves, _ = model.generate_custom_voice(**asked, **who, **greedy)
    finally:
        model.model.generate, model.model.talker.generate = generate, talk
    tensors = {
        "rows": kept.pop("rows")[:, :COLUMNS],
        "trailing": kept.pop("trailing")[:, :COLUMNS],
        "wave": to_int16(torch.from_numpy(waves[0])[::STRIDE]),
    }
    return kept, tensors


def to_int16(samples: Tensor) -> Tensor:
    return (samples * 32767).round().to(torch.int16)


@torch.no_grad()
def main() -> None:
    package = load_package()

    @functools.cache
    def load(variant: str, wide: bool) -> Any:
        return package.from_pretrained(str(tiny_speech(variant, wide=wide)), dtype=torch.float32)

    cases: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for wide, request, is_streaming in itertools.product((False, True), REQUESTS, (True, False)):
        model = load(request["variant"], wide)
        if request["variant"] == "base":
            audio = tiny_audio(*VOICES[request["voice"]]).numpy()
            name = f"{request['voice']}.{'wide' if wide else 'even'}"
            tensors[f"{name}.speaker"] = model.model.extract_speaker_embedding(audio, 24000)
            codes = model.model.speech_tokenizer.encode(audio, sr=24000).audio_codes[0]
            tensors[f"{name}.codes"] = codes.to(torch.int16)
        kept, found = answer(model, request, is_streaming)
        tensors |= {f"{len(cases)}.{name}": value for name, value in found.items()}
        cases.append(request | {"wide": wide, "is_streaming": is_streaming} | kept)
        print(len(cases) - 1, request, wide, is_streaming, len(kept["codes"]))
    generator = torch.Generator().manual_seed(3)
    tensors["vocoder.codes"] = torch.randint(0, N_CODES, (VOCODER_FRAMES, N_CODEBOOKS), generator=generator)
    waves, _ = model.model.speech_tokenizer.decode([{"audio_codes": tensors["vocoder.codes"]}])
    tensors["vocoder.wave"] = to_int16(torch.from_numpy(waves[0])[::VOCODER_STRIDE])
    tensors["vocoder.codes"] = tensors["vocoder.codes"].to(torch.int16)
    DIRECTORY.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, DIRECTORY / "tensors.safetensors")
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    head = f'"made_by": "make oracle", "max_new_tokens": {MAX_NEW_TOKENS}'
    text = f'{{\n {head},\n "cases": [\n{lines}\n ]\n}}\n'
    (DIRECTORY / "cases.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
