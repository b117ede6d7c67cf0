"""The published package (qwen-tts, torch) with random weights on this machine: ms a frame and RTF.

The checkpoint has a published size.

    python -m venv /tmp/qwen-tts
    /tmp/qwen-tts/bin/pip install torch==2.13.0 transformers==4.57.3 accelerate einops librosa soundfile
    /tmp/qwen-tts/bin/pip install --no-deps qwen-tts==0.1.1
    /tmp/qwen-tts/bin/python bench/speech/published.py --shape 0.6b --threads 2

Run in an environment of its own, where Deltic is not installed; the bandwidth of reading is measured by the
kernels of the checkout. A frame is 80 ms of audio. Codes (prompt, talker and predictor; everything the
package does from text to codes) and waveform are timed apart; beside it, from Deltic's environment:
`deltic bench speech --dummy qwen3-tts-0.6b --threads 2 --n 1 --max-new-tokens 49`. On a GPU (`--device cuda`)
attention is torch's, not flash-attn's. The text vocabulary of the checkpoint is small:
its table is only read by a prompt. Ends with a line of JSON, which --out writes into a directory, too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deltic.bench.provenance import code, machine, now, runs_directory
from deltic.roofs import read_bandwidth
from tests import tiny_speech

REAL: dict[str, Any] = {
    "N_CODES": 2048,
    "CODEC_VOCAB": 3072,
    "PREDICTOR_WIDTH": 1024,
    "TEXT_WIDTH": 2048,
    "PREDICTOR": {"layers": 5, "ffn": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128},
    "VOCODER": {
        "latent_dim": 1024,
        "codebook_dim": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 8,
        "sliding_window": 72,
        "decoder_dim": 1536,
    },
}
"""The published sizes of what tiny_speech.py writes; the encoder, which nothing here runs, stays tiny."""
FFN = {"0.6b": 3072, "1.7b": 6144}
FRAME = 1920


def package() -> Any:
    """qwen_tts. What its 25 Hz tokenizer needs, which is imported with it and not run, may be missing."""
    for name in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
    return importlib.import_module("qwen_tts")


def write(path: Path, shape: str) -> None:
    """A CustomVoice checkpoint of a published size, random: 1.9 or 3.9 GB."""
    vars(tiny_speech).update(REAL)
    tiny_speech.TALKER = {"layers": 28, "ffn": FFN[shape], "heads": 16, "kv_heads": 8, "head_dim": 128}
    tiny_speech.write_speech(path, "custom_voice", wide=shape == "1.7b")
    config = json.loads((path / "config.json").read_text())
    config["talker_config"]["rope_scaling"]["mrope_section"] = [24, 20, 20]
    (path / "config.json").write_text(json.dumps(config))


def measure(model: Any, n_frames: int, seed: int) -> dict[str, float]:
    """One utterance, drawn as the package does by default: seconds of codes and of waveform, and the frames
    it has.
    """
    decode, spent = model.model.speech_tokenizer.decode, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return decode(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - begin

    torch.manual_seed(seed)
    model.model.speech_tokenizer.decode = timed
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        (wave,), _ = model.generate_custom_voice(
            text="A small engine, oddly shaped.", language="English", speaker="vivian", max_new_tokens=n_frames + 1
        )
    finally:
        model.model.speech_tokenizer.decode = decode
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"frames": len(wave) / FRAME, "codes_s": seconds - spent[0], "wave_s": spent[0], "cpu_s": cpu}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(FFN), default="0.6b")
    parser.add_argument("--checkpoint", type=Path, help="a CustomVoice directory, instead of a random one")
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", metavar="DIR", help="write the JSON into this directory, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.checkpoint or Path(scratch) / "checkpoint"
        if not arguments.checkpoint:
            write(path, arguments.shape)
        model = package().Qwen3TTSModel.from_pretrained(
            str(path), device_map=arguments.device, dtype=getattr(torch, arguments.dtype)
        )
    measure(model, 4, 0)
    rounds, read = [], []
    for seed in range(1, arguments.rounds + 1):
        if arguments.device == "cpu":
            read.append(read_bandwidth(arguments.threads))
        got = measure(model, arguments.frames, seed)
        if not arguments.checkpoint and got["frames"] != arguments.frames:
            sys.exit(f"round {seed}: {arguments.frames} frames were to come, and {got['frames']:g} did")
        rounds.append(got)
        rtf = (got["codes_s"] + got["wave_s"]) / (0.08 * got["frames"])
        said = ", ".join(f"{name} {got[name]:.2f} s" for name in ("codes_s", "wave_s", "cpu_s"))
        print(f"{got['frames']:.0f} frames: {said}, RTF {rtf:.2f}", flush=True)
    medians = {
        "codes_ms_a_frame": statistics.median(1e3 * r["codes_s"] / r["frames"] for r in rounds),
        "wave_ms_a_frame": statistics.median(1e3 * r["wave_s"] / r["frames"] for r in rounds),
        "cpu_ms_a_frame": statistics.median(1e3 * r["cpu_s"] / r["frames"] for r in rounds),
        "rtf": statistics.median((r["codes_s"] + r["wave_s"]) / (0.08 * r["frames"]) for r in rounds),
    }
    told = {name: round(value, 3) for name, value in medians.items()}
    about = {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "device": arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    result = {
        "bench": "published",
        "version": importlib.metadata.version("qwen-tts"),
        "date": now().isoformat(),
        "machine": machine(),
        "code": code(),
        **about,
        **told,
        "read": read,
        "rounds": rounds,
    }
    if arguments.out:
        path = runs_directory(arguments.out) / f"published-{arguments.shape}-{now():%H%M%S}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
