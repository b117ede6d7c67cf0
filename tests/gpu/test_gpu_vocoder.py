"""The vocoder of the GPU against the oracle, and the equality of bits it promises: any chunks, any batch, any tiles.

Off a GPU the interpreter's product is computed in float64 here: products of bfloat16 then add up exactly, in any shape of tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("triton")
from deltic.models.vocoder.cpu import SEEN_FRAMES
from deltic.models.vocoder.gpu import (
    ChunkBuffers,
    VocoderGpu,
    VocoderWeights,
    chunk_buffers,
    frame_samples,
    kept_inputs,
    pack_vocoder,
    state_words,
)
from deltic.models.vocoder.shape import VocoderShape
from deltic.models.vocoder.weights import FILE, load_vocoder, vocoder_tensors
from deltic.ops.gpu import conv as conv_module
from deltic.ops.gpu.conv import Snake, Tile
from tests.reference import vocoder as reference
from tests.reference.speech import Checkpoint

HAS_GPU = torch.cuda.is_available()
SHAPE = VocoderShape(
    latent_dim=64, codebook_dim=32, codebook_size=32, hidden_size=48, intermediate_size=56, n_layers=2, n_heads=2, head_dim=16,
    sliding_window=5, decoder_dim=96, upsample_rates=(3, 2),
)  # fmt: skip
"""Widths that do and do not fill a block of K: 64, 32, and 48, 24, 56."""
SHORT = replace(SHAPE, n_layers=1, upsample_rates=(6,))
"""Its samples depend on few frames behind the transformer."""
REAL = VocoderShape()
TOLERANCE = 5e-5
"""Pairs of bfloat16 leave 2^-17 of a product; a waveform within [-1, 1]."""


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not HAS_GPU:
        from triton.runtime import interpreter

        from tests.gpu.mended_interpreter import _widened

        def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
            product = np.matmul(_widened(a).astype(np.float64), _widened(b).astype(np.float64)) + d.data
            return interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    yield


def raw_tensors(shape: VocoderShape, seed: int = 0) -> dict[str, Tensor]:
    """As a checkpoint stores them: no block is a near-identity, and few samples are clamped."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in vocoder_tensors(shape).items():
        values = torch.randn(size, generator=generator)
        if name.endswith("usage"):
            values = values.abs() + 0.5
            values[3] = 0
        elif name.endswith(("norm.weight", "scale", "gamma")):
            values = 0.6 + 0.1 * values
        elif len(size) == 1:
            values *= 0.2
        elif not name.endswith("embedding_sum"):
            is_transposed = ".block.1." in name or (name.startswith("upsample") and ".0.conv" in name)
            values *= (size[0] if is_transposed else math.prod(size[1:])) ** -0.5 * (0.5 if ".block." in name else 1)
        tensors["decoder." + name] = values
    last = f"decoder.decoder.{len(shape.upsample_rates) + 2}.conv.weight"
    tensors[last] *= 0.05
    return tensors


@cache
def checkpoint(shape: VocoderShape) -> Checkpoint:
    config = {
        "num_hidden_layers": shape.n_layers, "num_attention_heads": shape.n_heads, "num_key_value_heads": shape.n_heads,
        "head_dim": shape.head_dim, "sliding_window": shape.sliding_window, "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps, "upsampling_ratios": shape.upsampling_ratios, "upsample_rates": shape.upsample_rates,
        "hidden_size": shape.hidden_size,
    }  # fmt: skip
    return Checkpoint({"decoder_config": config}, raw_tensors(shape))


@cache
def weights(shape: VocoderShape, device: str, directory: Path) -> VocoderWeights:
    (directory / FILE).parent.mkdir(exist_ok=True)
    save_file(checkpoint(shape).weights, directory / FILE)
    return pack_vocoder(shape, load_vocoder(directory, shape), device)


@pytest.fixture(scope="module")
def make(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[VocoderGpu, ChunkBuffers]]:
    directory = tmp_path_factory.mktemp("vocoder")

    def made(shape: VocoderShape = SHAPE, n_slots: int = 4) -> tuple[VocoderGpu, ChunkBuffers]:
        """One whose memory is poisoned, but for the heads."""
        nan = torch.full((n_slots, state_words(shape)), 0x7FC00000, dtype=torch.int32, device=device)
        model = VocoderGpu(shape, weights(shape, device, directory), nan)
        model.head.zero_()

        def allocate(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            fill = math.nan if dtype.is_floating_point else 0
            return torch.full(size, fill, dtype=dtype, device=device)

        return model, chunk_buffers(shape, 32, allocate)

    return made


def codes_of(n: int, seed: int = 0, shape: VocoderShape = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.codebook_size, (n, 16), generator=generator, dtype=torch.int32)


def say(made: tuple[VocoderGpu, ChunkBuffers], state_slot: int, codes: Tensor, pieces: list[int]) -> Tensor:
    """The samples of one stream, from its begin."""
    model, buffers = made
    model.head[state_slot] = 0
    out = []
    for piece in codes.to(model.state.device).split(pieces):
        state_slots = torch.tensor([state_slot], dtype=torch.int32, device=model.state.device)
        out.append(model.forward(piece[None].contiguous(), state_slots, buffers)[0].clone())
    return torch.cat(out)


@pytest.fixture(scope="module")
def whole(make: Any) -> Callable[[], Tensor]:
    """The samples of codes_of(7) in one pass, made once."""

    @cache
    def wave() -> Tensor:
        return say(make(), 3, codes_of(7), [7])

    return wave


def test_against_the_oracle(whole: Any) -> None:
    expected = reference.decode(checkpoint(SHAPE), codes_of(7))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(whole().cpu(), expected, rtol=0, atol=TOLERANCE)


def test_any_chunks_give_the_bits_of_one_pass(make: Any, whole: Any) -> None:
    """Across the window and the longest reach of a convolution."""
    assert torch.equal(say(make(), 0, codes_of(7), [1, 3, 1, 2]), whole())


def reach(shape: VocoderShape) -> int:
    """Frames before it that a sample depends on, behind the transformer: all rings but those of `pre_conv` and the layers."""
    return math.ceil(sum(kept.rows / kept.rate for kept in kept_inputs(shape)[1 + shape.n_layers :]))


def test_what_nobody_hears_is_skimmed(make: Any) -> None:
    """Poisoned memory is behind the transformer then, until nothing depends on it any more."""
    assert reach(REAL) <= SEEN_FRAMES
    model, buffers = make(SHORT)
    n_skimmed, n_after = 4, reach(SHORT) + 2
    codes = codes_of(n_skimmed + n_after, shape=SHORT)
    expected = say((model, buffers), 0, codes, [len(codes)])
    state_slots = torch.tensor([2], dtype=torch.int32, device=model.state.device)
    begin, middle, rest = codes[None].to(model.state.device).split([1, 3, n_after], 1)
    for skimmed in (begin, middle):
        model.skim(skimmed.contiguous(), state_slots, buffers)
    wave = model.forward(rest.contiguous(), state_slots, buffers)[0]
    frames = wave.view(n_after, -1) == expected.view(len(codes), -1)[n_skimmed:]
    assert frames[reach(SHORT) :].all() and not frames[0].any()


def test_any_batch_gives_the_bits_of_one_stream(make: Any, whole: Any) -> None:
    """Two streams at different positions, one place of the batch not in use."""
    model, buffers = make()
    device = model.state.device
    codes = codes_of(7).to(device)
    expected = whole()[: 4 * frame_samples(SHAPE)]
    state_slots = torch.tensor([3, -1, 1], dtype=torch.int32, device=device)

    def together(state_slot: Tensor, *codes: Tensor) -> Tensor:
        out: Tensor = model.forward(torch.stack(codes), state_slot, buffers).clone()
        return out

    one = together(state_slots[:1].contiguous(), codes[:2])
    two = together(state_slots, codes[2:4], codes[5:7], codes[:2])
    three = together(state_slots[2:].contiguous(), codes[2:4])
    assert torch.equal(torch.cat([one[0], two[0]]), expected)
    assert torch.equal(torch.cat([two[2], three[0]]), expected)
    assert model.head[[1, 3], 0].tolist() == [4, 4] and model.head[0, 0] == 0


def test_streams_as_the_engine_drives_them(device: str, tmp_path: Path) -> None:
    """Chunks of several lengths at once, cut into recorded sizes; frames skimmed; states kept and put back; bad codes refused."""
    from deltic.runtime.gpu.vocoder import GpuVocoderStreams

    (tmp_path / FILE).parent.mkdir()
    save_file(checkpoint(SHAPE).weights, tmp_path / FILE)
    tensors = load_vocoder(tmp_path, SHAPE)
    vocoder = GpuVocoderStreams(SHAPE, tensors, n_streams=3, device=device, n_frames=4)
    first, second = codes_of(5, 1).numpy(), codes_of(2, 2).numpy()
    expected = reference.decode(checkpoint(SHAPE), torch.from_numpy(first)).numpy()
    vocoder.open(0)
    vocoder.open(2)
    pending = vocoder.begin([(0, first[:3]), (2, second)])
    begin, other = pending.samples()
    assert pending.is_done() and len(other) == 2 * frame_samples(SHAPE)
    vocoder.open(1)
    vocoder.skim(1, first[:3])
    assert torch.equal(vocoder.model.head[1], vocoder.model.head[0])
    vocoder.open(1, vocoder.state_of(0))
    for state_slot in (0, 1):
        rest = vocoder.vocode([(state_slot, first[3:])])[0]
        np.testing.assert_allclose(np.concatenate([begin, rest]), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match="outside"):
        vocoder.begin([(0, first + 1000)])
    with pytest.raises(ValueError, match="outside"):
        vocoder.skim(0, first - 1000)
    with pytest.raises(ValueError, match="state of this model"):
        vocoder.open(0, np.zeros(7, np.float32))


def test_bad_codes_stay_inside_the_tables(make: Any) -> None:
    """A frame that is thrown away may hold anything."""
    codes = torch.full((1, 16), 1 << 20, dtype=torch.int32)
    codes[0, 3:] = -7
    assert say(make(), 0, codes, [1]).isfinite().all()


@pytest.mark.parametrize("tile", [Tile(64, 16, 4, 2, True), Tile(64, 64, 4, 2, False), Tile(128, 128, 8, 2, False)])
def test_tiles_leave_the_bits_alone(device: str, tile: Tile) -> None:
    """A convolution whose K is in 8 slices, added by one program or by the last of several."""
    c, m, taps, n = (1024, 192, 7, 80) if HAS_GPU else (64, 64, 7, 48)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(m, c, taps, generator=generator) * (c * taps) ** -0.5
    bias = torch.randn(m, generator=generator)
    packed = conv_module.pack_conv(w.to(device), bias.to(device), rate=1, dilation=3)
    packed = replace(packed, slices=8)
    x = torch.randn(n, c, generator=generator)
    ring = torch.zeros(1, 2, 36, c, dtype=torch.bfloat16, device=device)
    head = torch.zeros(1, 2, dtype=torch.int32, device=device)
    streams = conv_module.Streams(torch.zeros(1, dtype=torch.int32, device=device), head, 1)
    history = conv_module.Ring(ring, 18, 1, n)
    scratch = conv_module.ConvScratch(
        torch.full((conv_module.MAX_PARTS, conv_module.PART_SIZE), torch.nan, device=device),
        torch.zeros(conv_module.MAX_PARTS, dtype=torch.int32, device=device),
    )
    snake = Snake(torch.rand(m).to(device) + 0.5, torch.rand(m).to(device))

    def run(tile: Tile) -> tuple[Tensor, Tensor]:
        raw = torch.full((n, m), torch.nan, device=device)
        pair = torch.full((2, n, m), torch.nan, dtype=torch.bfloat16, device=device)
        end = conv_module.ConvOut(raw=raw, pair=pair, act=snake)
        pairs = conv_module.split_pair(x.to(device))
        conv_module.conv(pairs, packed, streams, scratch, end, history=history, tile=tile)
        return raw, pair

    (raw, pair), (other, other_pair) = run(Tile(64, 32, 4, 3, False)), run(tile)
    assert torch.equal(raw, other) and torch.equal(pair, other_pair)
    assert not scratch.arrived.any()
    padded = torch.nn.functional.pad(x.t().double(), (18, 0))
    expected = torch.nn.functional.conv1d(padded[None], w.double(), bias.double(), dilation=3)[0].t()
    torch.testing.assert_close(raw.cpu().double(), expected, rtol=0, atol=2e-5)
    angle = snake.alpha.cpu() * raw.cpu()
    snaked = raw.cpu() + angle.double().sin().square() * snake.scale.cpu()
    torch.testing.assert_close(pair.sum(0, dtype=torch.float32).cpu().double(), snaked, rtol=0, atol=5e-5)


@pytest.mark.skipif(not HAS_GPU, reason="real shapes")
def test_real_shapes(make: Any) -> None:
    """Against the oracle, beyond the window and in the chunks that are served; a batch of streams."""
    codes = codes_of(90, 5, REAL)
    made = make(REAL)
    wave = say(made, 1, codes, [1, 1, 2, 4, 8, 16, 32, 16, 8, 2])
    assert torch.equal(wave, say(made, 2, codes, [32, 32, 26]))
    expected = reference.decode(checkpoint(REAL), codes)
    error = (wave.cpu() - expected).abs().max()
    print(f"largest error {error:.2e} of a wave with deviation {expected.std():.3f}")
    assert error < TOLERANCE
    model, buffers = made
    model.head.zero_()
    state_slots = torch.tensor([3, 0, 1, 2], dtype=torch.int32, device="cuda")
    some = torch.stack([codes_of(8, i, REAL) for i in range(4)]).cuda()
    together = model.forward(some, state_slots, buffers).clone()
    for i in range(4):
        assert torch.equal(together[i], say(made, 0, some[i].cpu(), [4, 4]))
