"""Videos of a prompt: frames, sizes, times and prompt are those of the published processor; hostile files harm nobody."""

from __future__ import annotations

import asyncio
import io
import json
import time
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

pytest.importorskip("PIL")

from PIL import Image

from deltic.engine.messages import VideoInfo
from deltic.models.fields import UnsupportedModelError
from deltic.models.vision.pixels import PictureRules, VideoRules
from deltic.server.chat import videos
from deltic.server.chat.pictures import of_pixels
from deltic.server.chat.template import VIDEO, ChatTemplate
from deltic.server.chat.videos import Clip, VideoWish, fitted_frames, number_of_frames, read_video, times_of
from deltic.server.isolated import Refused
from deltic.text import Tokenizer
from tests.fake_engine import PICTURE_TEMPLATE, byte_tokenizer
from tests.pictures import file_of
from tests.videos import FORMS, doubtful, frames_of, refused, turned, video, whole

WISH = VideoWish(info=VideoInfo(), frame_pixels=1 << 24, most_tokens=1 << 20)


def of_qwen() -> Any:
    return pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")


def published_indices(n_frames: int, rate: float, **asked: Any) -> list[int]:
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=n_frames, fps=rate)
    found: list[int] = of_qwen().Qwen3VLVideoProcessor.sample_frames(processor, metadata, **asked).tolist()
    return found


def published_prompt(clip: Clip, indices: list[int], fps: float) -> str:
    """What is written for a video."""
    module = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    kind = module.Qwen3VLProcessor
    one = clip.pairs[0]
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    processor._calculate_timestamps = lambda *given: kind._calculate_timestamps(processor, *given)
    grid = np.array([[len(clip.pairs), 2 * one.rows, 2 * one.columns]])
    metadata = SimpleNamespace(fps=fps, frames_indices=list(indices))
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    return str(kind.replace_video_token(processor, inputs, 0))


def wish(**more: Any) -> VideoWish:
    given = {name: getattr(WISH, name) for name in WISH.__struct_fields__}
    return VideoWish(**given | more)


@pytest.mark.parametrize("n_frames", [2, 3, 4, 7, 30, 31, 299, 300, 1000, 9001, 100_000])
@pytest.mark.parametrize("fps", [1.0, 10.0, 24000 / 1001, 25.0, 30000 / 1001, 59.94])
def test_frames_are_those_of_the_published_processor(n_frames: int, fps: float) -> None:
    for asked in ({}, {"fps": 0.5}, {"fps": 24}, {"num_frames": 9}, {"num_frames": 64}):
        n = number_of_frames(n_frames, fps, wish(**asked))
        found = np.linspace(0, n_frames - 1, n).round().astype(int).tolist()
        assert found == published_indices(n_frames, fps, **asked), asked
        module = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
        expected = module.Qwen3VLProcessor._calculate_timestamps(None, list(found), fps, 2)
        assert times_of(found, fps) == expected


def test_sizes_are_those_of_the_published_processor() -> None:
    smart_resize = of_qwen().smart_resize
    generator = np.random.default_rng(0)
    for _ in range(3000):
        n, height, width = (int(generator.integers(low, high)) for low, high in ((2, 769), (8, 2200), (8, 2200)))
        least, most = ((4096, 25_165_824), (131_072, 786_432))[n % 2]
        found = fitted_frames(n, height, width, wish(info=VideoInfo(least, most)))
        assert found == smart_resize(n, height, width, 2, 32, least, most), (n, height, width)


def test_sizes_where_a_frame_alone_is_bounded() -> None:
    smart_resize = of_qwen().smart_resize
    for n in (4, 33, 700):
        cap = max(min(768 * 1024, 25_165_824 // n), int(4096 * 1.05)) * n
        found = fitted_frames(n, 1080, 1920, wish(info=VideoInfo(is_capped=True)))
        assert found == smart_resize(n, 1080, 1920, 2, 32, 4096, cap)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 77, 768])
def test_frames_become_smaller_and_not_fewer(n: int) -> None:
    for pixels, tokens in ((409_600, 1 << 20), (1 << 24, 14_000), (65_536, 200_000)):
        height, width = fitted_frames(n, 1080, 1920, wish(frame_pixels=pixels, most_tokens=tokens))
        n_pairs = -(-n // 2)
        assert height * width <= pixels and n_pairs * (height * width // 1024 + videos.PAIR_TEXT_TOKENS) <= tokens
    with pytest.raises(Refused, match="too many for this model's context"):
        fitted_frames(n, 64, 64, wish(most_tokens=-(-n // 2) * videos.PAIR_TEXT_TOKENS))


def test_what_the_files_of_a_model_say() -> None:
    rules = PictureRules()
    assert rules.with_video({}).video == VideoRules()
    published = {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "image_mean": [0.5] * 3}
    assert rules.with_video(published | {"video_processor_type": "Qwen3VLVideoProcessor"}).video == VideoRules()
    said = {"size": {"longest_edge": 786432, "shortest_edge": 131072}, "fps": 1, "max_frames": 64, "min_frames": None}
    assert rules.with_video(said | {"cap_pixels_per_frame": True}).video == VideoRules(131072, 786432, 1, 4, 64, True)
    for wrong in (
        {"image_mean": [0.4] * 3},
        {"resample": 2},
        {"num_frames": 8},
        {"temporal_patch_size": 1},
        {"fps": 0},
    ):
        with pytest.raises(UnsupportedModelError, match=next(iter(wrong))):
            rules.with_video(wrong)
    assert VideoInfo.__struct_fields__ == tuple(VideoRules.__dataclass_fields__)


LISTED = [file_of(Image.fromarray(frame), "PNG") for frame in frames_of(5)]


def pixels_of(clip: Clip) -> np.ndarray:
    """uint8 [frames, height, width, 3]."""
    one = clip.pairs[0]
    whole = b"".join(pair.pixels for pair in clip.pairs)
    return np.frombuffer(whole, np.uint8).reshape(-1, 32 * one.rows, 32 * one.columns, 3)


def test_a_list_of_frames() -> None:
    clip = asyncio.run(read_video(LISTED, wish(listed_fps=2.0)))
    assert clip.seconds == [0.25, 1.25, 2.0] and clip.n_tokens == 3 * 6
    found = pixels_of(clip)
    assert (found[:5] == np.stack(frames_of(5))).all() and (found[5] == found[4]).all()
    for pair in clip.pairs:
        again = of_pixels(pair.pixels, 32 * pair.rows, 32 * pair.columns, 2)
        assert (again.key, again.pixels, again.n_frames) == (pair.key, pair.pixels, pair.n_frames)
    one = asyncio.run(read_video(LISTED[:1], wish(listed_fps=2.0)))
    assert one.seconds == [0.0] and (pixels_of(one)[0] == pixels_of(one)[1]).all()


def test_resized_pixels_are_close_to_the_published_processor() -> None:
    """It resizes tensors of bytes; Pillow, which is meant here, rounds between the two directions otherwise."""
    torch = pytest.importorskip("torch")
    small = asyncio.run(read_video(LISTED, wish(listed_fps=2.0, frame_pixels=4096)))
    frames = torch.from_numpy(np.stack(frames_of(5))).permute(0, 3, 1, 2)
    size = (32 * small.pairs[0].rows, 32 * small.pairs[0].columns)
    assert size == (32, 64)
    theirs = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True, align_corners=False)
    gap = np.abs(pixels_of(small)[:5].astype(int) - theirs.permute(0, 2, 3, 1).numpy().astype(int))
    assert gap.max() <= 1
    resized = [np.asarray(Image.fromarray(one).resize((64, 32), Image.Resampling.BICUBIC)) for one in frames_of(5)]
    assert (pixels_of(small)[:5] == np.stack(resized)).all()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([LISTED[0], b"abc"], "frame 1: is no picture that can be read here"),
        ([LISTED[0], file_of(Image.new("RGB", (64, 96)), "PNG")], "frame 1 has 64 x 96 pixels, and frame 0 96 x 64"),
        ([file_of(Image.new("RGB", (201, 1)), "PNG")], "frame 0: has 201 x 1 pixels. A side may be 200 times"),
    ],
)
def test_lists_that_are_refused(files: list[bytes], said: str) -> None:
    with pytest.raises(Refused, match=said):
        asyncio.run(read_video(files, wish(listed_fps=2.0)))


def merging_tokenizer() -> Tokenizer:
    """As byte_tokenizer, but `<<` and ` <` are tokens."""
    fields = json.loads(byte_tokenizer(sees=True)._backend.to_str())
    fields["model"]["vocab"] |= {"<<": 256, "Ġ<": 257}
    fields["model"]["merges"] = [["<", "<"], ["Ġ", "<"]]
    for i, token in enumerate(fields["added_tokens"]):
        token["id"] = 258 + i
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(fields)))


@pytest.mark.parametrize("before", ["", "Look:", "a<", "a <", "x\n", "<|video_pad|>", "é "])
def test_the_prompt_is_the_published_one(before: str) -> None:
    """All of it is encoded at once there, so a time may share a token with the text before it."""
    tokenizer = merging_tokenizer()
    clip = asyncio.run(read_video(LISTED, wish(listed_fps=1.7)))
    template = ChatTemplate({"default": PICTURE_TEMPLATE}, tokenizer)
    content = [{"type": "text", "text": before}, {"type": "video"}, {"type": "text", "text": "<3 seconds>?"}]
    prompt = template.render([{"role": "user", "content": content}], pictures=[clip])
    if "pad" not in before:
        told = published_prompt(clip, list(range(5)), 1.7)
        text = f"<|im_start|>user\n{before}{told}<3 seconds>?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        plain = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
        plain.encode_special_tokens = False
        assert prompt.ids == plain.encode(text, add_special_tokens=False).ids
    start, mark, end, turn = map(tokenizer.special_id, ("<|vision_start|>", VIDEO, "<|vision_end|>", "<|im_start|>"))
    assert prompt.ids.count(mark) == clip.n_tokens, "what a user writes is text"
    for picture in prompt.pictures:
        assert prompt.ids[picture.first - 1 : picture.end + 1] == [start, *[mark] * 6, end]
    assert prompt.boundaries == [at for at, token in enumerate(prompt.ids) if token == turn and at]


def test_without_the_library_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    assert "pip install 'deltic[video]'" in str(videos.needs_av())


@pytest.fixture
def av(monkeypatch: pytest.MonkeyPatch) -> Any:
    return pytest.importorskip("av")


def filed(data: bytes, **asked: Any) -> tuple[list[np.ndarray], list[float]]:
    """Frames and times, read in this process."""
    return videos._filed(data, wish(**asked))


@pytest.mark.parametrize("name", FORMS)
def test_files_are_read_as_the_published_reader_does(av: Any, name: str) -> None:
    """Its frames, which Pillow resizes; its times."""
    utils = pytest.importorskip("transformers.video_utils")
    data = whole(name)
    for asked in ({}, {"fps": 5.0}, {"num_frames": 7}, {"takes_all": True}):
        n, rate = 30, 10.0
        given = {"num_frames": 30} if "takes_all" in asked else asked
        indices = published_indices(n, rate, **given)
        frames, seconds = filed(data, **asked)
        theirs, metadata = utils.read_video_pyav(io.BytesIO(data), lambda metadata, found=indices: np.array(found))
        if "webm" not in name and "mkv" not in name and "vp8" not in name:  # their headers have no numbers
            assert (metadata.total_num_frames, metadata.fps) == (n, rate)
        assert (np.stack(frames) == theirs).all() if frames[0].shape == theirs[0].shape else False
        assert seconds == times_of(indices, rate)


def test_a_file_in_the_process_of_its_own(av: Any) -> None:
    clip = asyncio.run(read_video(whole("mp4"), wish(frame_pixels=4096)))
    frames, seconds = filed(whole("mp4"), frame_pixels=4096)
    assert clip.seconds == seconds and (pixels_of(clip) == np.stack(frames)).all()


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_far_frames_are_sought(av: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = video(400, 20, form, g="25")
    frames, seconds = filed(data, num_frames=6)
    monkeypatch.setattr(videos, "FAR_FRAMES", 10**9)
    plain, times = filed(data, num_frames=6)
    assert seconds == times and (np.stack(frames) == np.stack(plain)).all()


def test_uneven_times_are_placed_evenly(av: Any) -> None:
    """As the published processor does: frame i of n that last s seconds is at i * s / n."""
    at = [0, 40, 80, 120, 1000, 1040, 1080, 3000, 3040, 3080, 3120, 3960]
    frames, seconds = filed(data := video(12, times=at), num_frames=4)
    _, _, fps = videos._packets(data, "mov")
    assert len(frames) == 4 and 12 / 5 < fps < 12 / 4 and seconds == [(0 + 4 / fps) / 2, (7 / fps + 11 / fps) / 2]


@pytest.mark.parametrize("rate", [24, 25, 30, Fraction(30000, 1001), Fraction(24000, 1001), Fraction(15, 2)])
@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_rates(av: Any, rate: int | Fraction, form: str) -> None:
    _, _, fps = videos._packets(video(45, rate, form), "mov" if form == "mp4" else form)
    assert fps == pytest.approx(float(rate), rel=1e-3)


@pytest.mark.parametrize("quarters", range(4))
def test_it_is_turned_as_it_says(av: Any, quarters: int) -> None:
    plain, _ = filed(whole("mp4"))
    found, _ = filed(turned(whole("mp4"), quarters))
    assert (found[0] == np.rot90(plain[0], -quarters)).all()


def test_one_frame(av: Any) -> None:
    frames, seconds = filed(video(1))
    assert len(frames) == 1 and seconds == [0.0]


def test_thousands_of_frames(av: Any) -> None:
    begun_s = time.monotonic()
    data = video([frames_of(2, 64, 64)[i % 2] for i in range(3000)], 30, preset="ultrafast", g="250")
    made_s, begun_s = time.monotonic() - begun_s, time.monotonic()
    clip = asyncio.run(read_video(data, wish()))
    assert len(clip.pairs) == 100 and time.monotonic() - begun_s < 30 + made_s
    with pytest.raises(Refused, match=r"has 3000 frames\. At most 768 can be taken"):
        asyncio.run(read_video(data, wish(takes_all=True)))


def test_hostile_files_are_refused(av: Any) -> None:
    for name, data, said in refused():
        begun_s = time.monotonic()
        with pytest.raises(Refused) as error:
            asyncio.run(read_video(data, wish()))
        assert said in str(error.value) and time.monotonic() - begun_s < 20, (name, str(error.value))


def test_doubtful_files_are_refused_or_read(av: Any) -> None:
    for name, data in doubtful():
        begun_s = time.monotonic()
        try:
            clip = asyncio.run(read_video(data, wish()))
            assert 1 <= len(clip.pairs) <= 15, name
        except Refused as error:
            assert "cannot be decoded. Send" not in str(error), (name, error)
        assert time.monotonic() - begun_s < 20, name
