"""What the codes of a frame cost on this CPU, talker and predictor, for some numbers of streams at once,
beside the roof.

    python bench/speech/frames.py [--model qwen3-tts-0.6b] [--quantize int8] [--streams 1,2,4,8] [--n 20]

Random weights; streams 100 rows into their utterance, drawn with the published parameters. Streams take
turns, and the least and the median are given: on a machine with other work the least is nearer the truth. The
roof is bytes of matrices over the bandwidth measured in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array

from deltic.config import EngineConfig
from deltic.engine.messages import Request, SamplingParams, Speech
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.models.tts.shape import row_id
from deltic.models.tts.weights import frame_bytes
from deltic.roofs import read_bandwidth
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.speech import SpeechRunner

POSITION, N_PROMPT = 100, 27


def step_of(n_streams: int) -> Step:
    """A decode of each stream, in pages, a state slot and a batch slot of its own."""
    params = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
    tokens = array("i", [row_id(5, 7)] * N_PROMPT + [5] * (POSITION + 1 - N_PROMPT))
    step = Step()
    for i in range(n_streams):
        request = Request(id=str(i), prompt_ids=[], params=params, speech=Speech())
        pages = [2 * i, 2 * i + 1]
        sequence = Sequence(request, 0, i, tokens[:], N_PROMPT, POSITION, pages=pages, batch_slot=i, state_slot=i)
        step.chunks.append(Chunk(sequence, POSITION, 1))
        step.draws.append(Draw(i, sequence))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-tts-0.6b")
    parser.add_argument("--quantize")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--n", type=int, default=20)
    given = parser.parse_args()
    n_streams = [int(n) for n in given.streams.split(",")]
    config = EngineConfig(
        dummy=given.model,
        quantize=given.quantize,
        device="cpu",
        threads=given.threads,
        max_model_len=1024,
        max_num_seqs=max(n_streams),
    )
    runner = build_runner(config, lambda stage, done: None)
    assert isinstance(runner, SpeechRunner)
    n_bytes = sum(frame_bytes(runner.plan.shape, given.quantize))
    seconds: dict[int, list[float]] = {n: [] for n in n_streams}
    bandwidth = 0.0
    for _ in range(given.n):
        bandwidth = max(bandwidth, read_bandwidth(runner.plan.n_threads))
        for n in n_streams:
            step, start = step_of(n), time.perf_counter()
            runner.step(step)
            seconds[n].append(time.perf_counter() - start)
    roof_ms = 1000 * n_bytes / bandwidth
    print(f"{given.model} {given.quantize or 'bf16'}, {runner.plan.n_threads} threads: {n_bytes / 1e9:.2f} GB a step")
    print(f"{bandwidth / 1e9:.1f} GB/s: roof {roof_ms:.0f} ms; a frame is 80 ms of audio")
    rows = []
    for n, times in seconds.items():
        least_ms, median_ms = 1000 * min(times), 1000 * statistics.median(times)
        print(
            f"{n:3d} streams: least {least_ms:6.1f} ms, median {median_ms:6.1f} ms, {least_ms / roof_ms:.2f} times the roof"
        )
        rows.append({"streams": n, "least_ms": least_ms, "median_ms": median_ms})
    print(json.dumps({"model": given.model, "quantize": given.quantize, "roof_ms": roof_ms, "rows": rows}))


if __name__ == "__main__":
    main()
