"""The vocoder against the oracle and, to the bit, against itself: any chunks, any batch, any threads, at every instruction set.

DELTIC_TEST_REAL_VOCODER=1 adds a pass of the published size (457 MB of weights, some seconds of torch).
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.messages import Request, SamplingParams, Speech
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.tts.shape import PUBLISHED_SPEECH, SpeechShape, codec_side, row_id
from deltic.models.vocoder.cpu import MAX_POSITIONS, PASS_FRAMES, SEEN_FRAMES, allocate_vocoder, check_vocoder
from deltic.models.vocoder.shape import MAX_REF_FRAMES, VocoderShape
from deltic.models.vocoder.weights import FILE, dummy_vocoder, load_vocoder, vocoder_weight_bytes
from deltic.ops.arrays import nothing
from deltic.ops.contract import KernelError
from deltic.ops.cpu.program import Program, usable_instruction_sets
from deltic.ops.cpu.vocoder import Batch, ConvEnd, ConvWeights, Rows, conv
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.buffers import Arena
from deltic.runtime.cpu.vocoder import VocoderStreams
from tests.cpu.grid import grid
from tests.golden.make_speech import DIRECTORY, VOCODER_STRIDE
from tests.reference import vocoder as oracle
from tests.reference.speech import Checkpoint
from tests.tensors import array_of, tensor_of
from tests.tiny_speech import FRAME_SAMPLES, N_CODES, tiny_speech

Codes = NDArray[np.int32]
N_FRAMES = 20  # more than the window of 12, and than two passes

SETS = usable_instruction_sets()
every_set = pytest.mark.parametrize("library", grid(SETS, SETS[:1], pytest.mark.long))


@functools.cache
def shape() -> VocoderShape:
    return SpeechShape.from_directory(tiny_speech("custom_voice")).vocoder


def vocoder(
    library: str | None = None, n_threads: int = 2, n_streams: int = 4, n_frames: int = 8, half: bool = False
) -> VocoderStreams:
    tensors = load_vocoder(tiny_speech("custom_voice"), shape())
    made = VocoderStreams(
        shape(), tensors, n_streams=n_streams, program=lambda: Program(n_threads, library), n_frames=n_frames, half=half
    )
    assert not tensors, "tensors that nothing reads"
    for rows in made.buffers.rows:
        rows.fill(float("nan"))
    made.buffers.audio.fill(float("nan"))
    return made


def random_codes(n: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, N_CODES, (n, 16)).astype(np.int32)


@functools.cache
def expected(seed: int = 0) -> Tensor:
    path = tiny_speech("custom_voice") / "speech_tokenizer"
    model = Checkpoint(json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors"))
    return oracle.decode(model, torch.from_numpy(random_codes(N_FRAMES, seed)))


def whole(made: VocoderStreams, codes: Codes, state_slot: int = 0) -> NDArray[np.float32]:
    made.open(state_slot)
    return made.vocode([(state_slot, codes)])[0]


@every_set
def test_waveform_is_the_oracles(library: str) -> None:
    found = whole(vocoder(library), random_codes(N_FRAMES))
    assert found.shape == (N_FRAMES * FRAME_SAMPLES,)
    assert np.abs(found - expected().numpy()).max() < 5e-5


def test_waveform_is_the_published_packages() -> None:
    golden = load_file(DIRECTORY / "tensors.safetensors")
    found = whole(vocoder(), golden["vocoder.codes"].numpy().astype(np.int32))[::VOCODER_STRIDE]
    assert np.abs(found - golden["vocoder.wave"].numpy() / 32767).max() < 1e-4


@every_set
def test_half_is_near(library: str) -> None:
    found, wanted = whole(vocoder(library, half=True), random_codes(N_FRAMES)), expected().numpy()
    error = np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean())
    assert 1e-4 < error < 0.1, "of the waveform, of a model that amplifies what is rounded"


@pytest.mark.parametrize("half", [False, True])
@every_set
def test_any_chunks_beside_any_others_give_the_same_bits(library: str, half: bool) -> None:
    if half and library not in (SETS[0], "baseline"):
        pytest.skip("the tiles are those of float32")
    made, random = vocoder(library, half=half), np.random.default_rng(1)
    streams = {state_slot: random_codes(N_FRAMES, seed=state_slot) for state_slot in range(3)}
    alone = {state_slot: whole(made, codes, state_slot) for state_slot, codes in streams.items()}
    pieces: dict[int, list[NDArray[np.float32]]] = {state_slot: [] for state_slot in streams}
    at = dict.fromkeys(streams, 0)
    for state_slot in streams:
        made.open(state_slot)
    while any(at[state_slot] < N_FRAMES for state_slot in streams):
        n = {
            state_slot: min(int(random.integers(0, 12)), N_FRAMES - at[state_slot])
            for state_slot in random.permutation(3)
        }
        chunks = [
            (state_slot, streams[state_slot][at[state_slot] : at[state_slot] + n[state_slot]]) for state_slot in n
        ]
        for (state_slot, _), samples in zip(chunks, made.vocode(chunks), strict=True):
            pieces[state_slot].append(samples)
            at[state_slot] += n[state_slot]
    for state_slot in streams:
        assert np.array_equal(np.concatenate(pieces[state_slot]), alone[state_slot])
        assert made.position(state_slot) == N_FRAMES


def test_threads_and_passes_leave_the_bits_alone() -> None:
    codes = random_codes(N_FRAMES)
    first = whole(vocoder(n_threads=1, n_frames=8), codes)
    for n_threads, n_frames in ((2, 8), (3, 32), (1, 1)):
        assert np.array_equal(whole(vocoder(n_threads=n_threads, n_frames=n_frames), codes), first)


def test_a_state_goes_on_in_another_slot_and_process() -> None:
    made, codes = vocoder(), random_codes(N_FRAMES)
    alone = whole(made, codes)
    made.open(1)
    made.vocode([(1, codes[:13])])
    state = made.state_of(1)
    made.vocode([(1, codes[:3])])  # the copy is one
    for other, state_slot in ((made, 2), (vocoder(), 0)):
        other.open(state_slot, state)
        rest = other.begin([(state_slot, codes[13:])])
        assert rest.is_done() and np.array_equal(rest.samples()[0], alone[13 * FRAME_SAMPLES :])


def test_what_nobody_hears_is_skimmed() -> None:
    """Behind SEEN_FRAMES frames the whole state is what it would be, to the bit."""
    made, codes = vocoder(), random_codes(N_FRAMES + SEEN_FRAMES)
    alone = whole(made, codes, 0)
    made.open(1)
    made.vocode([(1, codes[:3])])  # what it leaves behind the front is out of date then
    made.skim(1, codes[3 : N_FRAMES - 5])
    assert made.position(1) == N_FRAMES - 5
    made.vocode([(1, codes[N_FRAMES - 5 : -5])])
    rest = made.vocode([(1, codes[-5:])])[0]
    assert np.array_equal(rest, alone[-5 * FRAME_SAMPLES :])
    assert np.array_equal(made.state_of(1), made.state_of(0))


def test_what_cannot_be_vocoded_changes_nothing() -> None:
    made, codes = vocoder(), random_codes(4)
    made.open(0)
    made.vocode([(0, codes)])
    before = made.state_of(0)
    too_large = codes.copy()
    too_large[2, 7] = N_CODES
    negative = codes.copy()
    negative[0, 0] = -1
    for chunks in ([(0, too_large)], [(0, negative)], [(0, codes), (0, codes)], [(0, codes[:, :15])]):
        with pytest.raises(ValueError):
            made.vocode(chunks)
    assert np.array_equal(made.state_of(0), before)
    made.buffers.states[0, 0] = MAX_POSITIONS - 3
    with pytest.raises(ValueError, match="at most"):
        made.vocode([(0, codes)])
    with pytest.raises(ValueError, match="state"):
        made.open(0, before[:-1])


def test_memory_is_what_was_planned() -> None:
    arena = Arena()
    allocate_vocoder(shape(), 4, arena.allocate, n_frames=8)
    buffers = vocoder().buffers
    held = [buffers.states, buffers.codes, buffers.start, buffers.state_slot, buffers.n, *buffers.rows, buffers.audio]
    assert arena.n_bytes == sum(tensor.nbytes for tensor in held)
    assert vocoder_weight_bytes(VocoderShape()) == 4 * 114_323_137 - 4 * 2 * 512 * 256  # without input_proj


def test_checkpoints_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="damaged or unreadable"):
        load_vocoder(tmp_path, shape())
    tensors = load_file(tiny_speech("custom_voice") / FILE)
    (tmp_path / FILE).parent.mkdir()
    name = "decoder.decoder.2.block.1.conv.weight"
    for change, said in ((None, "is missing"), (tensors[name][1:], "its config says")):
        rest = {key: value for key, value in tensors.items() if key != name}
        save_file(rest if change is None else rest | {name: change.contiguous()}, tmp_path / FILE)
        with pytest.raises(CheckpointError, match=f"{name}.*{said}"):
            load_vocoder(tmp_path, shape())
    with pytest.raises(UnsupportedModelError, match="decoder_dim"):
        check_vocoder(VocoderShape(decoder_dim=96))


def test_odd_geometries_have_room() -> None:
    """A width that is the largest of all, though in no published shape."""
    small = VocoderShape(decoder_dim=256, latent_dim=16)
    for odd in (replace(small, hidden_size=1 << 16), replace(small, intermediate_size=1 << 16)):
        check_vocoder(odd)
        buffers = allocate_vocoder(odd, 1, lambda name, size, dtype: nothing(size, dtype))
        assert all(rows.size >= PASS_FRAMES << 16 for rows in buffers.rows)


def test_a_stream_is_as_long_as_a_sequence_can_be() -> None:
    longest = max(shape.max_position_embeddings for shape in PUBLISHED_SPEECH.values())
    assert longest + MAX_REF_FRAMES <= MAX_POSITIONS < 2**24, "a position is a float32"


@every_set
def test_snake_and_activations(library: str) -> None:
    """Through a convolution that does nothing, against float64."""
    n, width = 4000, 32
    x = torch.cat([torch.linspace(-60, 60, n - 400), torch.randn(400)]).repeat_interleave(width).view(n, width)
    x = x + torch.linspace(0, 0.01, width)
    states, index = torch.zeros(1, 16), torch.tensor([0, n], dtype=torch.int32)
    batch = array_of(Batch(index, index[:1], torch.tensor(1, dtype=torch.int32), states))
    source, out, snaked = (Rows(np.ones(n * width, np.float32), width, 1) for _ in range(3))
    source.data[:] = x.flatten()
    alpha, inverse_beta = torch.rand(width) * 4, torch.rand(width)
    identity = ConvWeights.pack(np.eye(width, dtype=np.float32)[..., None])
    for activation in (None, "gelu", "clamp"):
        program = Program(1, library)
        conv(
            program, batch, source, identity,
            ConvEnd(out, activation=activation, snake=array_of((alpha, inverse_beta)), snaked=snaked),
        )  # fmt: skip
        program.run()
        y = tensor_of(out.data).view(n, width)
        exact = {None: lambda v: v, "gelu": torch.nn.functional.gelu, "clamp": lambda v: v.clamp(-1, 1)}
        assert (y - exact[activation](x.double())).abs().max() < 4e-7
        wanted = y.double() + (y.double() * alpha.double()).sin() ** 2 * inverse_beta.double()
        assert (tensor_of(snaked.data).view(n, width) - wanted).abs().max() < 2e-5  # of alpha x = 240, and of the sum
        near = y.abs() < 4
        assert (tensor_of(snaked.data).view(n, width) - wanted)[near].abs().max() < 2e-6
    with pytest.raises(KernelError, match="channels"):
        conv(Program(1, library), batch, source, ConvWeights.pack(np.zeros((32, 16, 1), np.float32)), ConvEnd(out))


def speak(engine: Engine, requests: list[Request]) -> dict[str, bytes]:
    """Each one's audio."""
    audio: dict[str, bytes] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            audio[output.id] = audio.get(output.id, b"") + output.audio
            assert output.finish_reason in (None, "stop", "length"), output.error
    engine.check()
    return audio


def test_audio_depends_on_the_request_alone() -> None:
    """Streamed or whole, alone or together, and whatever was vocoded with it."""
    directory = tiny_speech("custom_voice")
    config = EngineConfig(model=str(directory), device="cpu", threads=2, max_num_seqs=4, memory_gb=1)
    engine = Engine(build_runner(config, lambda stage, done: None))

    def request(i: int, **speech: Any) -> Request:
        rows = [row_id(5 + i, codec_side(3)), row_id(7)] * 3
        params = SamplingParams(max_tokens=12 + i, min_tokens=12, temperature=0.9, seed=i)
        return Request(id=str(i), prompt_ids=rows, params=params, speech=Speech(**speech))

    together = speak(engine, [request(i, is_streamed=i % 2 == 0) for i in range(6)])
    for i in range(6):
        alone = speak(engine, [request(i, is_streamed=i % 2 == 1, first_chunk_frames=i)])
        assert alone[str(i)] == together[str(i)] and len(alone[str(i)]) >= 11 * 2 * FRAME_SAMPLES


@pytest.mark.skipif("DELTIC_TEST_REAL_VOCODER" not in os.environ, reason="some seconds and 1.5 GB")
def test_published_size() -> None:
    published = VocoderShape()
    made = VocoderStreams(published, dummy_vocoder(published), n_streams=2, program=lambda: Program(2))
    codes = np.random.default_rng(0).integers(0, published.codebook_size, (5, 16)).astype(np.int32)
    alone = whole(made, codes)
    made.open(1)
    pieces = [made.vocode([(1, part)])[0] for part in (codes[:1], codes[1:4], codes[4:])]
    assert np.array_equal(np.concatenate(pieces), alone)
    assert 0.01 < np.abs(alone).mean() < 0.9
