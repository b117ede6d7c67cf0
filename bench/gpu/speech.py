"""Speech on a GPU in one call: the three targets, and where the time of a frame goes.

Targets (random weights of the shape, bfloat16, over HTTP, `deltic bench speech`): one stream's real-time
factor at most 0.10; at 16 streams 60 seconds of audio a second; at 10 requests a second that come at random,
95 of 100 hear something within 34 ms, and no stream runs dry. Then, in this process, a frame as it is served
(steps of the engine, the vocoder beside them) and its recordings alone, by CUDA events: decodes, prefills,
chunks of the vocoder, each beside the other; and the kernels of a decode by name.
`python -m bench.gpu.speech --out bench/runs/...`
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from bench.gpu.experiment import parser, run
from deltic.bench.provenance import checked
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams, Speech
from deltic.models.tts.shape import codec_side, row_id
from deltic.models.vocoder.shape import FRAME_SAMPLES, SAMPLE_RATE
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.record import Recording
from deltic.runtime.gpu.speech import GpuSpeechRunner

Row = Callable[..., None]

FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
MAX_RTF, MIN_AUDIO, MAX_TTFA_MS = 0.10, 60.0, 34.0
N_STEPS = 100
N_TOKENS = 400
"""Of a sequence that is measured: more than are drawn."""


def targets(row: Row, arguments: argparse.Namespace) -> None:
    """One server, three loads: raises when it fails."""
    command = [sys.executable, "-m", "deltic", "bench", "speech", "--dummy", arguments.dummy, "--device", "cuda"]
    command += ["--n", "1,16", "--poisson", "10", "--warmup", "2", "--no-plot"]
    command += ["--out", str(arguments.out)] if arguments.out else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    found = {r["mode"] + f" {r['value']:g}": r for r in json.loads(done.stdout.splitlines()[-1])["rows"]}
    one, many, open_ = found["closed 1"], found["closed 16"], found["open 10"]
    rtf, audio, ttfa = one["rtf"]["p50"], many["audio_s_per_s"], open_["ttfa_ms"]["p95"]
    row(target="RTF of one stream", found=rtf, wanted=MAX_RTF, met=rtf <= MAX_RTF)
    row(target="audio seconds a second, 16 streams", found=audio, wanted=MIN_AUDIO, met=audio >= MIN_AUDIO)
    dry = open_["continuous"]
    row(target="first audio, p95 ms, 10 requests/s", found=ttfa, wanted=MAX_TTFA_MS, met=ttfa <= MAX_TTFA_MS)
    row(
        target="streams not late there",
        found=dry,
        wanted=1.0,
        met=dry == 1.0,
        underrun_p99_ms=open_["underrun_ms"]["p99"],
    )


class Frames:
    """An engine in this process, made when the first part asks for it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._dummy, self._made, self.sizes = arguments.dummy, False, [int(n) for n in arguments.n.split(",")]

    def make(self) -> None:
        if self._made:
            return
        begin = time.perf_counter()
        config = EngineConfig(dummy=self._dummy, device="cuda", prefix_cache=False, max_num_seqs=max(64, *self.sizes))
        runner = build_runner(config, lambda stage, done: None)
        assert isinstance(runner, GpuSpeechRunner)
        self.runner = runner
        self.engine, self._made = Engine(self.runner), True
        print(f"start {time.perf_counter() - begin:.1f} s: {self.runner.info.start_s}", flush=True)

    def begin(self, n: int) -> None:
        """Has n sequences decode; the device is idle."""
        self.make()
        ids = self.runner.plan.shape.ids
        prompt = [row_id(100 + i, codec_side(ids.codec_pad)) for i in range(24)]
        for i in range(n):
            params = SamplingParams(max_tokens=N_TOKENS, min_tokens=N_TOKENS, temperature=0.9, top_k=50, seed=i)
            speech = Speech(trailing_ids=tuple(range(100, 130)), temperature=0.9, top_k=50)
            self.engine.add(Request(id=f"{i}", prompt_ids=prompt, params=params, speech=speech))
        for _ in range(8):
            checked(self.engine.step())
        torch.cuda.synchronize()

    def end(self, n: int) -> None:
        torch.cuda.synchronize()
        for i in range(n):
            self.engine.abort(f"{i}")
        while self.engine.has_work():
            self.engine.step()
        self.engine.check()

    def served(self, row: Row) -> None:
        """A frame of n sequences, the host's work and the vocoder's chunks in it."""
        for n in self._sizes():
            self.begin(n)
            begin, first = time.perf_counter(), self.engine.n_steps
            while self.engine.n_steps < first + N_STEPS:
                checked(self.engine.step())  # sometimes of the vocoder only
            ms = (time.perf_counter() - begin) / N_STEPS * 1000
            self.end(n)
            stage = self.engine.stage
            assert stage is not None
            row(
                n=n,
                frame_ms=round(ms, 3),
                rtf=round(ms / 1000 / FRAME_S, 4),
                audio_s_per_s=round(n * FRAME_S / ms * 1000, 1),
                vocoder_frame_ms=round(stage.frame_s * 1000, 3),
                first_chunk_ms=round(stage._first_s * 1000, 3),
            )

    def _sizes(self) -> list[int]:
        self.make()
        return self.sizes

    def alone(self, row: Row) -> None:
        """Decodes with rows in use; prefills and chunks of the vocoder with none, which compute the same."""
        for n in self._sizes():
            self.begin(n)
            recording = self.runner.recordings.decode(n, 512)
            found = replayed(recording, self.runner.stream)
            self.end(n)
            row(
                what="decode",
                n=n,
                launches=recording.n_launches,
                us_a_launch=round(found["ms"] * 1000 / recording.n_launches, 2),
                **found,
            )
        for blocks in self.runner.recordings.block_sizes:
            recording = self.runner.recordings.of("prefill", blocks)
            row(
                what="prefill",
                rows=64 * blocks,
                launches=recording.n_launches,
                **replayed(recording, self.runner.stream),
            )
        vocoder = self.runner.vocoder
        for (b, f), recording in sorted(vocoder._chunks.items()):
            row(
                what="vocoder",
                streams=b,
                frames=f,
                launches=recording.n_launches,
                **replayed(recording, vocoder.stream),
            )
        for f, recording in sorted(vocoder._skims.items()):
            row(what="skim", frames=f, launches=recording.n_launches, **replayed(recording, vocoder.stream))

    def beside(self, row: Row) -> None:
        """Decodes and first chunks of the vocoder at once, on their two streams."""
        for n in self._sizes():
            self.begin(n)
            decode, vocoder = self.runner.recordings.decode(n, 512), self.runner.vocoder
            for streams in sorted({1, max(b for b, f in vocoder._chunks if f == 1 and b <= n)}):
                chunk = vocoder._chunks[streams, 1]
                decodes, chunks = both_ms((decode, self.runner.stream), (chunk, vocoder.stream))
                row(n=n, chunk_streams=streams, decode_ms=round(decodes, 4), chunk_ms=round(chunks, 4))
            self.end(n)

    def kernels(self, row: Row) -> None:
        """What a decode starts, by name: times a frame, microseconds each, and of the whole frame; by the
        profiler.
        """
        for n in self._sizes()[:2]:
            self.begin(n)
            recording, n_replays = self.runner.recordings.decode(n, 512), 3
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                with torch.cuda.stream(self.runner.stream):
                    for _ in range(n_replays):
                        recording.run()
                torch.cuda.synchronize()
            self.end(n)
            times, counts = Counter[str](), Counter[str]()
            for event in profile.events():
                times[event.name] += event.device_time_total
                counts[event.name] += 1
            for name, us in times.most_common(16):
                each = us / counts[name]
                row(
                    n=n,
                    kernel=name[:60],
                    times=counts[name] // n_replays,
                    us=round(each, 2),
                    us_a_frame=round(us / n_replays, 1),
                )


def replayed(
    recording: Recording, stream: torch.cuda.Stream | None, n_replays: int = 20, n_rounds: int = 3
) -> dict[str, float]:
    """Milliseconds of one of several replays that follow each other: median of the rounds, least and most."""
    times = []
    with torch.cuda.stream(stream):
        recording.run()
        for _ in range(n_rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(n_replays):
                recording.run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / n_replays)
    return {"ms": round(statistics.median(times), 4), "ms_least": round(min(times), 4), "ms_most": round(max(times), 4)}


def both_ms(*pairs: tuple[Recording, torch.cuda.Stream | None], n_replays: int = 40) -> list[float]:
    """Milliseconds of a replay of each, where all are replayed at once.

    The longer one runs alone at its end.
    """
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in pairs]
    for (_, stream), (begin, _) in zip(pairs, events, strict=True):
        begin.record(stream)
    for _ in range(n_replays):
        for recording, stream in pairs:
            with torch.cuda.stream(stream):
                recording.run()
    for (_, stream), (_, end) in zip(pairs, events, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / n_replays for begin, end in events]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--dummy", default="qwen3-tts-1.7b", metavar="SHAPE", help="default: qwen3-tts-1.7b")
    flags.add_argument("--n", default="1,16,4,64", metavar="N,N,...", help="sequences (default: 1,16,4,64)")
    flags.add_argument("--no-targets", action="store_true", help="leave the server out")
    arguments = flags.parse_args()
    frames = Frames(arguments)
    parts = {} if arguments.no_targets else {"targets": lambda row: targets(row, arguments)}
    parts |= {"served": frames.served, "alone": frames.alone, "beside": frames.beside, "kernels": frames.kernels}
    run(f"frames-{arguments.dummy}", parts, arguments)


if __name__ == "__main__":
    main()
