"""The kernels on ARM64: compiled by the pinned compiler, run by an emulator, compared with those of this machine.

What is run is the recorded step of tiny checkpoints, token ids to drawn tokens (recording.py), by a program of its own
(replay.cpp): prompts of 70, 71 and 9 tokens, decodes alone and together.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from deltic.config import EngineConfig
from deltic.engine.messages import Request, SamplingParams
from deltic.engine.step import Chunk, Draw, Sequence, Step
from deltic.ops.cpu import program as table
from deltic.ops.cpu.instruction_sets import INSTRUCTION_SETS, cpu_flags
from deltic.runtime.build import build_runner
from deltic.runtime.cpu import text as runner_module
from deltic.runtime.cpu.device import Cpu
from tests.arm.recording import Recording
from tests.tiny import tiny_checkpoint
from tests.tiny_config import VOCAB_SIZE

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "arm64"
EMULATOR = "qemu-aarch64-static"
SYSTEM = Path("/usr/aarch64-linux-gnu")  # libc for the emulated program
LIBRARIES = ("baseline", "neon_dotprod", "neon_i8mm")
MODELS = list(product(("dense", "moe", "next"), (None, "int8", "int4")))


@dataclass(frozen=True)
class Replayed:
    """What one library made of a recording. Arrays of [step, row, ...]; the rows of a step are its draws."""

    logits: np.ndarray  # float32 [n_steps, 3, V]
    tokens: np.ndarray  # int32 [n_steps, 3]
    logprobs: np.ndarray  # float32 [n_steps, 3]


@cache
def missing() -> str | None:
    """Why nothing can be run here."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "compares with the x86-64 kernels of this machine"
    if shutil.which(EMULATOR) is None:
        return f"no {EMULATOR} (apt install qemu-user-static)"
    if not SYSTEM.exists():
        return f"no {SYSTEM} (apt install libc6-arm64-cross)"
    missing = [name for name in ("ziglang", "cmake", "ninja") if find_spec(name) is None]
    return f"no {', '.join(missing)} (make test installs it)" if missing else None


needs_emulator = pytest.mark.skipif(missing() is not None, reason=missing() or "")
every_model = pytest.mark.parametrize(("kind", "quantize"), MODELS)


def command(*words: str | Path) -> None:
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig")}
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@cache
def build() -> None:
    """The three libraries for ARM64, and replay.cpp for it and for this machine, in build/arm64."""
    BUILD.mkdir(parents=True, exist_ok=True)
    command("make", "-C", ROOT, "ARCH=aarch64", f"VENV={sys.prefix}", "build/kernels/aarch64/.all")
    source = ROOT / "tests/arm/replay.cpp"
    for processor, program in (("aarch64", "replay"), ("x86_64", "replay_native")):
        target = f"{processor}-linux-gnu.2.28"
        command(
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            "-target",
            target,
            "-std=c++20",
            "-O3",
            source,
            "-o",
            BUILD / program,
        )


def steps() -> list[Step]:
    """The tokens of `a` and `b` are the same, cut differently; `c` is another sequence with other parameters."""

    def sequence(state_slot: int, n_tokens: int, **params: object) -> Sequence:
        request = Request(id=str(state_slot), prompt_ids=[], params=SamplingParams(**params))
        tokens = array("i", [(i * i * 37 + i * 11 + 5 + n_tokens) % 256 for i in range(n_tokens)])
        return Sequence(
            request,
            0,
            1234,
            tokens,
            n_tokens,
            pages=[2 * state_slot, 2 * state_slot + 1],
            batch_slot=state_slot,
            state_slot=state_slot,
        )

    a = sequence(0, 72, temperature=0.0, logprobs=5)
    b = sequence(1, 72, temperature=0.8, top_k=40, top_p=0.95, logprobs=0)
    c = sequence(2, 10, temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1, min_p=0.01, logprobs=0)
    chunks = [[(a, 0, 70), (c, 0, 9)], [(a, 70, 1), (b, 0, 71)], [(a, 71, 1)], [(b, 71, 1), (c, 9, 1)]]
    return [
        Step([Chunk(*chunk) for chunk in step], [Draw(i, chunk[0]) for i, chunk in enumerate(step)]) for step in chunks
    ]


def engine_config(kind: str, quantize: str | None) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_checkpoint(kind)), quantize=quantize, threads=3,
        max_num_seqs=3, max_model_len=128, max_step_tokens=128, n_pages=6,
    )  # fmt: skip


@cache
def recorded(kind: str, quantize: str | None, directory: Path) -> tuple[Path, list[int]]:
    """The recording, and the lengths in elements of its outputs: logits, tokens, log-probabilities."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "Program", Recording)
        runner = build_runner(engine_config(kind, quantize), lambda stage, done: None, Cpu())
    for step in steps():
        runner.step(step)
    sampler, program = runner.workspace.sampler, runner.program
    assert isinstance(program, Recording)
    outputs = [runner.logits(3), sampler._target[:3], sampler._logprob[:3]]
    path = directory / f"{kind}-{quantize}"
    program.write(path, outputs)
    return path, [output.size for output in outputs]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@cache
def replay(directory: Path, kind: str, quantize: str | None, library: str, n_threads: int = 1) -> Replayed:
    """library: one of LIBRARIES, emulated, or x86/NAME, of this machine."""
    build()
    recording, sizes = recorded(kind, quantize, directory)
    family, _, name = library.rpartition("/")
    out = directory / "out"
    if family:
        program = [BUILD / "replay_native", recording, table.library_file(name)]
    else:
        cpu = "cortex-a53" if name == "baseline" else "max"  # plain ARMv8.0: the baseline needs no more
        emulated = [EMULATOR, "-cpu", cpu, "-L", SYSTEM, BUILD / "replay"]
        program = [*emulated, recording, ROOT / f"build/kernels/aarch64/lib/cpu_{name}.so"]
    command(*program, str(n_threads), out)
    words = np.fromfile(out, np.int32).reshape(-1, sum(sizes))[1:]  # the first step is the engine's warm-up
    logits, tokens, logprobs = np.split(words, np.cumsum(sizes)[:-1], axis=1)
    return Replayed(logits.view(np.float32).reshape(len(words), 3, VOCAB_SIZE), tokens, logprobs.view(np.float32))


def drawn(replayed: Replayed) -> np.ndarray:
    """float32 [n_draws, V]: the rows of logits that the steps made; what lies beyond them is left from earlier steps."""
    return np.concatenate([replayed.logits[i, : len(step.draws)] for i, step in enumerate(steps())])


def assert_same_bits(one: Replayed, other: Replayed) -> None:
    for name in ("logits", "tokens", "logprobs"):
        a, b = getattr(one, name).view(np.int32), getattr(other, name).view(np.int32)
        assert np.array_equal(a, b), f"{name}: {np.mean(a != b):.1%} differ"


def test_flags_of_an_arm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux calls them Features there."""
    text = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd aes crc32 atomics asimdrdm asimddp\nCPU part\t: 0xd0c\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    flags = cpu_flags.__wrapped__()
    assert next(name for name, needed in INSTRUCTION_SETS if needed <= flags) == "neon_dotprod"


@needs_emulator
@every_model
def test_baseline(directory: Path, kind: str, quantize: str | None) -> None:
    """Close to what x86 makes without fused products, and the bits of what it makes with them.

    Lanes, the order of sums and the exponential are the same in all libraries. Without fma a sum is off in its last bit, and
    now and then that tips the rounding of an activation to bfloat16 (2^-9 of it) or int8 (1/254 of the largest of its group):
    seen to move logits, whose deviation is 1, by up to 0.07 in these models. With it nothing is left but the C library's
    expf and log1pf.
    """
    arm = replay(directory, kind, quantize, "baseline")
    x86 = replay(directory, kind, quantize, "x86/baseline")
    assert np.isfinite(drawn(arm)).all() and drawn(arm).std() > 0.5
    np.testing.assert_allclose(drawn(arm), drawn(x86), rtol=0, atol=0.2)
    assert np.abs(drawn(arm) - drawn(x86)).mean() < 0.03
    if "avx2" in table.usable_instruction_sets():
        assert_same_bits(arm, replay(directory, kind, quantize, "x86/avx2"))


@needs_emulator
@every_model
def test_dot_products(directory: Path, kind: str, quantize: str | None) -> None:
    """Sums of a group are exact integers, so sdot and usdot give the bits of the library that has neither."""
    expected = replay(directory, kind, quantize, "baseline")
    for library in LIBRARIES[1:]:
        assert_same_bits(replay(directory, kind, quantize, library), expected)


@needs_emulator
@pytest.mark.parametrize(("library", "quantize"), list(product(LIBRARIES, (None, "int8", "int4"))))
def test_threads(directory: Path, library: str, quantize: str | None) -> None:
    """The bits do not depend on the number of threads, nor does the pool of threads fail here."""
    assert_same_bits(replay(directory, "moe", quantize, library, 3), replay(directory, "moe", quantize, library))


@needs_emulator
@every_model
@pytest.mark.parametrize("library", LIBRARIES)
def test_purity(directory: Path, library: str, kind: str, quantize: str | None) -> None:
    """A token decoded, alone or beside another, has the logits of a prefill that ends with it."""
    logits = replay(directory, kind, quantize, library).logits
    assert np.array_equal(logits[1, 0].view(np.int32), logits[1, 1].view(np.int32)), "decode and prefill"
    assert np.array_equal(logits[2, 0].view(np.int32), logits[3, 0].view(np.int32)), "alone and with another"


@needs_emulator
def test_replay_is_the_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replayed from a file is what the engine computes."""
    monkeypatch.setattr(runner_module, "Program", partial(table.Program, library="baseline"))
    runner = build_runner(engine_config("moe", "int4"), lambda stage, done: None, Cpu())
    replayed = replay(directory, "moe", "int4", "x86/baseline")
    for i, step in enumerate(steps()):
        tokens = runner.step(step).tokens
        n = len(step.draws)
        assert tokens == replayed.tokens[i, :n, None].tolist()
        assert np.array_equal(runner.logits(n), replayed.logits[i, :n])
