"""The encoders that serve against the published package's, and the engine's store of voices in front of them."""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltic.config import ConfigError, EngineConfig
from deltic.engine.events import VoiceEncoded
from deltic.engine.messages import EncodeVoice
from deltic.models.fields import CheckpointError, UnsupportedModelError
from deltic.models.vocoder import encoder as voice_module
from deltic.models.vocoder.encoder import AudioError, Floats, VoiceEncoder, mel_filters
from deltic.ops.arrays import Array
from deltic.runtime import voices as voices_module
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.speech import SpeechRunner
from deltic.runtime.voices import PIECE_FRAMES, Voice, Voices, open_voices
from tests.golden.make_speech import DIRECTORY, STRIDE, VOICES
from tests.reference.speech import Checkpoint, frame_rows
from tests.tensors import tensor_of
from tests.tiny_speech import FRAME_SAMPLES, tiny_audio, tiny_speech, write_speech

pytestmark = pytest.mark.usefixtures("one_thread")


# The encoders.


def recording(n_samples: int, seed: int = 0) -> Floats:
    return tiny_audio(n_samples, seed).numpy()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", VOICES)
def test_vector_and_codes_equal_the_published_package(name: str, wide: bool) -> None:
    goldens = load_file(DIRECTORY / "tensors.safetensors")
    encoder, samples = VoiceEncoder.open(tiny_speech("base", wide=wide)), recording(*VOICES[name])
    kept = f"{name}.{'wide' if wide else 'even'}"
    vector, codes = encoder.speaker(samples), encoder.codes(samples)
    assert vector.dtype == np.float32 and codes.dtype == np.int32
    np.testing.assert_allclose(vector, goldens[f"{kept}.speaker"].numpy(), atol=1e-5, rtol=0)
    assert len(codes) == -(-len(samples) // FRAME_SAMPLES)
    assert np.array_equal(codes, goldens[f"{kept}.codes"].numpy())


def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, samples = VoiceEncoder.open(tiny_speech("base")), recording(70_001)
    whole = encoder.codes(samples)
    for block in (10, 37):
        monkeypatch.setattr(voice_module, "BLOCK", block)
        assert np.array_equal(encoder.codes(samples), whole)


def test_the_bits_of_a_voice_do_not_depend_on_what_was_encoded_before() -> None:
    samples, others = recording(70_001), [recording(n, seed=n) for n in (5_000, 99_999)]
    fresh, used = VoiceEncoder.open(tiny_speech("base")), VoiceEncoder.open(tiny_speech("base"))
    for other in others:
        used.codes(other), used.speaker(other)
    shifted = np.empty(len(samples) + 1, np.float32)[1:]  # at another place of a cache line
    shifted[:] = samples
    for given in (samples, shifted):
        assert used.speaker(given).tobytes() == fresh.speaker(samples).tobytes()
        assert np.array_equal(used.codes(given), fresh.codes(samples))


def test_gelu_is_rounded_from_its_exact_value() -> None:
    x = np.concatenate([np.linspace(-8, 8, 20_001), np.geomspace(1e-30, 1, 501), [0, 1e38, -1e38]]).astype(np.float32)
    exact = np.array([0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
    error = np.abs(voice_module._gelu(x) - exact)
    assert (error <= 0.51 * np.spacing(np.maximum(np.abs(exact), 1e-6).astype(np.float32))).all()


def test_mel_filters_have_an_area_of_one() -> None:
    filters = mel_filters().astype(np.float64)
    areas = filters.sum(1) * 12000 / 512
    assert filters.shape == (128, 513) and (filters.max(1) > 0).all()
    np.testing.assert_allclose(areas[60:], 1, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (np.zeros(100), "from 0.2 to 40.96 s"),
        (np.zeros(42 * 24000), "from 0.2 to 40.96 s"),
        (np.full(24000, np.nan), "not finite"),
    ],
)
def test_what_is_no_recording_is_refused(samples: Floats, words: str) -> None:
    encoder = VoiceEncoder.open(tiny_speech("base"))
    for encode in (encoder.speaker, encoder.codes):
        with pytest.raises(AudioError, match=words):
            encode(samples.astype(np.float32))


def test_silence_and_noise_at_full_scale_give_finite_vectors() -> None:
    encoder = VoiceEncoder.open(tiny_speech("base"))
    for samples in (np.zeros(9000), np.ones(9000), np.sign(recording(9000))):
        samples = samples.astype(np.float32)
        assert np.isfinite(encoder.speaker(samples)).all() and len(encoder.codes(samples)) == 5


def test_a_checkpoint_without_encoders_or_with_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"speaker_encoder.* is missing; only Base"):
        VoiceEncoder.open(tiny_speech("custom_voice"))
    write_speech(tmp_path / "base", "base")
    for file, path, value in (
        ("config.json", ("speaker_encoder_config", "enc_res2net_scale"), 4),
        ("speech_tokenizer/config.json", ("encoder_config", "use_causal_conv"), False),
        ("speech_tokenizer/config.json", ("encoder_config", "num_filters"), "4"),
    ):
        text = (tmp_path / "base" / file).read_text()
        config = json.loads(text)
        config[path[0]][path[1]] = value
        (tmp_path / "base" / file).write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match=path[1]):
            VoiceEncoder.open(tmp_path / "base")
        (tmp_path / "base" / file).write_text(text)
    tensors = load_file(tmp_path / "base/model.safetensors")
    tensors["speaker_encoder.fc.bias"] = torch.zeros(3)
    save_file(tensors, tmp_path / "base/model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.bias is \[3\]; its config says \[64\]"):
        VoiceEncoder.open(tmp_path / "base")


# The store.


class FakeParts:
    """Its state is the sum and the number of the codes that it was taken through."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.fails = False

    def frame_embeddings(self, codes: Array) -> Array:
        return codes.astype(np.float32) @ np.ones((16, 64), np.float32)

    def prime(self, codes: Array, state: Array | None, n_after: int = 0) -> Array:
        if self.fails:
            raise RuntimeError("no memory for this")
        self.pieces.append(len(codes))
        return (np.zeros(2, np.float32) if state is None else state) + np.array([codes.sum(), len(codes)], np.float32)


class Store:
    """Voices, and who waits for them."""

    def __init__(self, directory: Path | None = None, model: str = "model") -> None:
        self.parts = FakeParts()
        self.encoder = VoiceEncoder.open(tiny_speech("base"))
        self.voices = Voices(self.encoder, self.parts, directory, lambda: model)

    def wait(self, n: int = 1) -> list[VoiceEncoded]:
        answers: list[VoiceEncoded] = []
        end = time.monotonic() + 60
        while len(answers) < n:
            assert time.monotonic() < end, answers
            assert self.voices.is_waiting
            if not self.voices.has_work:
                time.sleep(0.001)
            answers += self.voices.poll()
        return answers

    def encode(self, key: str, samples: Tensor | None = None, **options: Any) -> VoiceEncoded:
        data = b"" if samples is None else samples.numpy().tobytes()
        self.voices.encode(EncodeVoice(key=key, samples=data, **options))
        (answer,) = self.wait()
        assert answer.key == key and not self.voices.is_waiting and not self.voices.has_work
        return answer


@pytest.fixture
def open_store() -> Iterator[Any]:
    stores: list[Store] = []

    def opened(*given: Any) -> Store:
        stores.append(Store(*given))
        return stores[-1]

    yield opened
    for store in stores:
        store.voices.close(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "voice-encoder"]


def test_a_voice_is_made_once_and_kept_in_memory(open_store: Any) -> None:
    store, samples = open_store(), tiny_audio(10 * FRAME_SAMPLES)
    assert store.encode("a").error and store.voices.get("a") is None
    assert store.encode("a", samples, needs_codes=True) == VoiceEncoded("a", 10)
    assert store.parts.pieces == [PIECE_FRAMES, PIECE_FRAMES, 2]
    voice = store.voices.get("a")
    assert voice is not None and voice.codes is not None and voice.state is not None
    assert np.array_equal(voice.speaker, store.encoder.speaker(samples.numpy()))
    assert np.array_equal(voice.codes, store.encoder.codes(samples.numpy()))
    assert voice.state.tolist() == [voice.codes.sum(), 10]
    assert np.array_equal(voice.frames, store.parts.frame_embeddings(voice.codes))
    assert store.encode("a", samples, needs_codes=True).n_frames == 10 == store.encode("a").n_frames
    assert len(store.parts.pieces) == 3 and store.voices.get("a") is voice

    assert store.encode("b", samples) == VoiceEncoded("b", 0)
    vector_only = store.voices.get("b")
    assert vector_only is not None and list(vector_only.arrays()) == ["speaker"]
    store.voices.drop("a")
    assert store.voices.get("a") is None and store.encode("a").error


def test_a_speaker_vector_may_be_given(open_store: Any) -> None:
    store, vector = open_store(), np.arange(64, dtype=np.float32)
    assert store.encode("v", speaker=vector.tobytes()) == VoiceEncoded("v", 0)
    assert np.array_equal(store.voices.get("v").speaker, vector)
    for bad, words in (
        (np.zeros(63, np.float32), "64 values, not 63"),
        (np.full(64, np.inf, np.float32), "not finite"),
    ):
        assert words in store.encode("w", speaker=bad.tobytes()).error
    assert "stands for the recording" in store.encode("w", speaker=vector.tobytes(), needs_codes=True).error


def test_what_goes_wrong_is_said_and_the_next_voice_is_made(open_store: Any, tmp_path: Path) -> None:
    store, samples = open_store(tmp_path), tiny_audio(6000)
    assert "0.2 to" in store.encode("a", samples[:9]).error
    assert "float32" in store.encode("a", speaker=b"abc").error
    for key in ("", "../a", "a/b", "a.b", "x" * 65):
        assert "key" in store.encode(key, samples).error and store.voices.get(key) is None
        store.voices.drop(key)
    store.parts.fails = True
    assert store.encode("a", samples, needs_codes=True).error == "RuntimeError; the engine's log says more"
    assert store.voices.get("a") is None
    store.parts.fails = False
    assert store.encode("a", samples, needs_codes=True).n_frames == 4


def test_commands_of_one_key_are_answered_in_their_order(open_store: Any) -> None:
    store, samples = open_store(), tiny_audio(6000).numpy().tobytes()
    known, made = EncodeVoice(key="a"), EncodeVoice(key="a", samples=samples, needs_codes=True)
    for command in (known, made, known, made, EncodeVoice(key="b"), EncodeVoice(key="a", samples=b"1234")):
        store.voices.encode(command)
    answers = store.wait(6)
    mine = [bool(answer.error) for answer in answers if answer.key == "a"]
    assert mine == [True, False, False, False, False]  # the last finds it: its content is the key
    assert store.parts.pieces == [4]


def test_the_least_recently_used_leave_memory(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, vector = open_store(), np.ones(64, np.float32).tobytes()
    monkeypatch.setattr(voices_module, "MEMORY_BYTES", 3 * 256)
    for key in "abc":
        store.encode(key, speaker=vector)
    assert store.voices.get("a") is not None
    store.encode("d", speaker=vector)
    assert [key for key in "abcd" if store.voices.get(key) is not None] == ["a", "c", "d"]


def test_files_outlive_the_process_and_belong_to_a_model(open_store: Any, tmp_path: Path) -> None:
    store, samples = open_store(tmp_path), tiny_audio(9000)
    assert store.encode("kept", samples, needs_codes=True, is_kept=True).n_frames == 5
    assert store.encode("passing", samples, needs_codes=True).n_frames == 5
    voice = store.voices.get("kept")
    store.voices.close(60)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["kept.safetensors"]

    again = open_store(tmp_path)
    assert again.voices.get("kept") is None  # until the other thread knows which files fit
    assert again.encode("kept").n_frames == 5 and not again.parts.pieces
    for name, array in again.voices.get("kept").arrays().items():
        assert np.array_equal(array, getattr(voice, name)), name
    assert again.encode("passing").error
    other = open_store(tmp_path, "other")
    assert other.encode("kept").error and other.encode("kept", samples, is_kept=True).error is None
    other.voices.close(60)
    again.voices.drop("kept")
    again.voices.close(60)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_voice_that_is_dropped_while_it_is_made_leaves_nothing(open_store: Any, tmp_path: Path) -> None:
    store, samples = open_store(tmp_path), tiny_audio(9000).numpy().tobytes()
    command = EncodeVoice(key="a", samples=samples, needs_codes=True, is_kept=True)
    store.voices.encode(command)
    store.voices.drop("a")
    assert store.wait() == [VoiceEncoded("a", 5)] and store.voices.get("a") is None
    assert store.encode("a").error
    store.voices.encode(command)
    assert store.wait() == [VoiceEncoded("a", 5)] and store.voices.get("a") is not None
    store.voices.drop("a")
    store.voices.close(60)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_dropped_voice_is_not_read_again_before_its_file_is_gone(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go_on = open_store(tmp_path), threading.Event()
    store.voices.encode(
        EncodeVoice(key="a", samples=tiny_audio(9000).numpy().tobytes(), needs_codes=True, is_kept=True)
    )
    remove = store.voices._remove

    def late(key: str) -> None:  # the other thread has written the file, and has not removed it yet
        if threading.current_thread() is not threading.main_thread() and list(tmp_path.rglob("*.safetensors")):
            go_on.wait(60)
        remove(key)

    monkeypatch.setattr(store.voices, "_remove", late)
    store.voices.drop("a")
    store.wait()
    while not list(tmp_path.rglob("*.safetensors")):
        time.sleep(0.001)
    assert store.voices.get("a") is None
    go_on.set()
    assert store.encode("a").error and not list(tmp_path.rglob("*.safetensors"))


def test_what_is_asked_for_behind_a_drop_stays(open_store: Any, tmp_path: Path) -> None:
    store, samples = open_store(tmp_path), tiny_audio(9000).numpy().tobytes()
    command = EncodeVoice(key="a", samples=samples, needs_codes=True, is_kept=True)
    store.voices.encode(command)
    store.voices.drop("a")
    store.voices.encode(command)
    assert store.wait(2) == [VoiceEncoded("a", 5)] * 2 and store.voices.get("a") is not None
    store.voices.close(60)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["a.safetensors"]


def test_a_damaged_file_is_said_and_removed(open_store: Any, tmp_path: Path) -> None:
    store, samples = open_store(tmp_path), tiny_audio(9000)
    store.encode("a", samples, is_kept=True)
    store.voices.close(60)
    (path,) = (tmp_path / "model").iterdir()
    whole = path.read_bytes()
    (n_head,) = struct.unpack("<Q", whole[:8])
    for damaged in (b"", whole[:-1], whole[:-5] + b"\x01" + whole[-4:], whole[: n_head // 2], whole + b"0"):
        path.write_bytes(damaged)
        store = open_store(tmp_path)
        assert "damaged" in store.encode("a").error and not path.exists()
        assert store.encode("a", samples, is_kept=True).error is None
        store.voices.close(60)
        assert path.read_bytes() == whole
    for foreign in (torch.zeros(64), torch.tensor(1.0)):  # whole, but of somebody else
        save_file({"speaker": foreign}, path)
        store = open_store(tmp_path)
        assert store.encode("unknown").error  # from now on it knows which files fit
        assert store.voices.get("a") is None and not path.exists()


def test_a_file_of_another_key_is_not_taken(open_store: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.encode("a", tiny_audio(9000), is_kept=True)
    store.voices.close(60)
    (tmp_path / "model/a.safetensors").rename(tmp_path / "model/b.safetensors")
    assert "damaged" in open_store(tmp_path).encode("b").error


def test_memory_brings_back_what_it_dropped_from_disk(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(voices_module, "MEMORY_BYTES", 1)
    for key in "ab":
        store.encode(key, tiny_audio(9000), is_kept=True)
    store.encode("c")  # behind the writing of both
    found = store.voices.get("a")
    assert isinstance(found, Voice) and np.array_equal(found.speaker, store.encoder.speaker(recording(9000)))


def test_a_directory_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for settings in ({"voices_dir": tmp_path / "file"}, {"cache_dir": tmp_path / "file"}):
        config = EngineConfig(model=str(tiny_speech("base")), **settings)
        with pytest.raises(ConfigError, match="cannot be used"):
            open_voices(config, tiny_speech("base"), 64, FakeParts(), "kernels")
    with pytest.raises(UnsupportedModelError, match="enc_dim"):
        open_voices(EngineConfig(), tiny_speech("base"), 128, FakeParts(), "kernels")


def test_files_are_bound_to_the_content_of_the_checkpoint(tmp_path: Path) -> None:
    write_speech(tmp_path / "base", "base")
    command = EncodeVoice(key="a", samples=tiny_audio(9000).numpy().tobytes(), is_kept=True)
    for changed in ("", "model.safetensors", "speech_tokenizer/model.safetensors"):
        if changed:
            tensors = load_file(tmp_path / "base" / changed)
            next(iter(tensors.values())).view(-1)[0] += 1
            (tmp_path / "base" / changed).unlink()  # it may be a link to another's
            save_file(tensors, tmp_path / "base" / changed)
        config = EngineConfig(model=str(tmp_path / "base"), voices_dir=tmp_path / "voices")
        voices = open_voices(config, tmp_path / "base", 64, FakeParts(), "kernels")
        voices.encode(command)
        while not voices.poll():
            time.sleep(0.001)
        voices.close(60)
    assert len(list((tmp_path / "voices").glob("*/a.safetensors"))) == 3


# With the engine's own vocoder and tables.


def test_the_engines_voice_is_the_oracles_and_its_vocoder_goes_on_from_it() -> None:
    path = tiny_speech("base", wide=True)
    runner = build_runner(
        EngineConfig(model=str(path), device="cpu", threads=1, max_model_len=256, max_num_seqs=1, memory_gb=2),
        lambda *_: None,
    )
    assert isinstance(runner, SpeechRunner) and runner.voices is not None
    voices, samples = runner.voices, tiny_audio(*VOICES["long"])
    voices.encode(EncodeVoice(key="a", samples=samples.numpy().tobytes(), needs_codes=True))
    answers: list[VoiceEncoded] = []
    while not answers:
        answers += voices.poll()
    voice = voices.get("a")
    assert voice is not None and voice.codes is not None and answers == [VoiceEncoded("a", len(voice.codes))]

    weights = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}
    model = Checkpoint(json.loads((path / "config.json").read_text()), weights)
    torch.testing.assert_close(tensor_of(voice.frames), frame_rows(model, tensor_of(voice.codes)), atol=1e-6, rtol=0)

    cases = json.loads((DIRECTORY / "cases.json").read_text(encoding="utf-8"))["cases"]
    i = next(i for i, case in enumerate(cases) if case.get("voice") == "long" and case["wide"])
    said = np.array(cases[i]["codes"], np.int32)
    runner.vocoder.open(0)
    runner.vocoder.vocode([(0, voice.codes)])
    assert np.array_equal(runner.vocoder.state_of(0), voice.state)  # in pieces as in one pass
    runner.vocoder.open(0, voice.state)
    (wave,) = runner.vocoder.vocode([(0, said)])
    golden = load_file(DIRECTORY / "tensors.safetensors")[f"{i}.wave"].float() / 32767
    torch.testing.assert_close(torch.from_numpy(wave)[::STRIDE], golden, atol=1e-4, rtol=0)
    voices.close(60)
