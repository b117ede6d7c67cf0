"""Videos of a prompt: a file, or a list of pictures, to pairs of frames with their times.

Which frames are taken, how large they become and what times they have is as the published processor says.
Their pixels are those of Pillow's bicubic filter, as a picture's are: that processor's own resize differs by
its rounding. A process of its own (server/isolated.py) does all of it: PyAV,
Pillow and numpy are imported there only.

Frames of a file are counted by its packets, and the rate is their number by the time from the first to the
end of the last: what a header says of either is not asked. So frames that come at uneven times are placed as
if they came evenly, as that processor places them.

Source: Qwen3VLVideoProcessor and Qwen3VLProcessor of transformers, which the published configs name.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from deltic.engine.messages import Picture, VideoInfo
from deltic.models.vision.shape import BLOCK, FRAMES_A_PATCH
from deltic.server.chat.pictures import MAX_ASPECT, decoding, of_pixels, picture_in, resized, whole_blocks
from deltic.server.isolated import Refused, answer, ask

if TYPE_CHECKING:
    import numpy as np
    from av.container import InputContainer
    from av.video import VideoStream
    from numpy.typing import NDArray

CAPPED_TOKENS = 768
"""Tokens that a frame may have, where `VideoInfo.is_capped`."""
PAIR_TEXT_TOKENS = 12
"""Tokens of text that come with a pair of frames, about: its time, and the two around its own."""
UNKNOWN_FPS = 24.0
"""Frames a second of a file whose frames all have one time."""

MAX_VIDEO_BYTES = 48_000_000
"""Bytes of a file, or of the files of a list together."""
MAX_FRAME_PIXELS = 1 << 25
"""Pixels of a file's frame, as its header says: 8K."""
MAX_FILE_FRAMES = 1 << 18
MAX_FILE_S = 86_400
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
READABLE = "MP4, MOV, MKV or WebM with H.264, H.265, VP8, VP9, AV1 or MPEG-4"
FAR_FRAMES = 16
"""Frames ahead from which on it is quicker to seek a frame than to decode all before it."""

PROGRAM = ("deltic.server.chat.videos",)
HEAD = struct.Struct("<III")
"""Head that the program writes first: pairs, height and width."""
PAIR = struct.Struct("<d16s")
"""Record that follows for each pair: seconds and `Picture.key`. The pixels come last."""
DECODE_S = 60.0
DECODE_MEMORY = 3 << 30


class VideoWish(msgspec.Struct, frozen=True, kw_only=True):
    """Wish for a video: the frames that are wanted of it, and how large."""

    info: VideoInfo
    frame_pixels: int
    """Pixels of a frame at most."""
    most_tokens: int
    """Tokens of the video at most, the texts between its frames included."""
    least_pixels: int = 0
    """Pixels of a frame at least."""
    fps: float | None = None
    """Frames a second that are taken of a file; None: the model's."""
    num_frames: int | None = None
    """Number of frames that are taken of a file, whatever fps."""
    takes_all: bool = False
    """True if all frames of a file are taken."""
    listed_fps: float | None = None
    """Frames a second of a list of pictures; None for a file."""


class Clip(msgspec.Struct, frozen=True):
    """A video as a prompt has it."""

    pairs: list[Picture]
    seconds: list[float]
    """The time of each pair: the mean of its frames'."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the pixels of all pairs."""
        return sum(pair.n_tokens for pair in self.pairs)


def needs_av() -> str | None:
    """Says what to do where PyAV is not installed; None where it is."""
    return None if find_spec("av") else "files of video need a library: pip install 'deltic[video]'"


async def read_video(data: bytes | Sequence[bytes], wish: VideoWish) -> Clip:
    """The video in a file, or of the files of a list (`listed_fps`). Raises Refused, also for files that
    mean no good.

    In a process of its own, which is ended after DECODE_S, or when nobody waits any more.
    """
    body = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
    if len(body) > MAX_VIDEO_BYTES:
        raise Refused(_TOO_LARGE)
    program = (*PROGRAM, msgspec.json.encode(wish).decode())
    return _clip(await ask(program, body, DECODE_S, f"cannot be decoded. Send {READABLE}."))


def _clip(made: bytes) -> Clip:
    n_pairs, height, width = HEAD.unpack_from(made)
    size, at = FRAMES_A_PATCH * height * width * 3, HEAD.size + n_pairs * PAIR.size
    pairs, seconds, rows, columns = [], [], height // BLOCK, width // BLOCK
    for i in range(n_pairs):
        time_s, key = PAIR.unpack_from(made, HEAD.size + i * PAIR.size)
        pixels = made[at + i * size : at + (i + 1) * size]
        pairs.append(Picture(key=key, rows=rows, columns=columns, pixels=pixels, n_frames=FRAMES_A_PATCH))
        seconds.append(time_s)
    return Clip(pairs, seconds)


_TOO_LARGE = f"is larger than {MAX_VIDEO_BYTES // 1_000_000} MB"


def number_of_frames(n_frames: int, fps: float, wish: VideoWish) -> int:
    """Number of frames that are taken of a file with n_frames of them, fps a second. Raises Refused."""
    info = wish.info
    if wish.takes_all and n_frames > info.max_frames:
        raise Refused(f"has {n_frames} frames. At most {info.max_frames} can be taken.")
    if wish.takes_all or wish.num_frames is not None:
        return wish.num_frames or n_frames
    wanted = int(n_frames / fps * (wish.fps or info.fps))
    return min(max(wanted, info.min_frames), info.max_frames, n_frames)


def times_of(indices: Sequence[int], fps: float) -> list[float]:
    """Seconds of each pair of frames."""
    whole = [*indices, *[indices[-1]] * (len(indices) % FRAMES_A_PATCH)]
    return [(whole[i] / fps + whole[i + 1] / fps) / 2 for i in range(0, len(whole), FRAMES_A_PATCH)]


def fitted_frames(n_frames: int, height: int, width: int, wish: VideoWish) -> tuple[int, int]:
    """Height and width of frames once they are resized: whole blocks, with all of them between the model's
    least and most, and none above what the wish allows.

    Raises Refused for what no size fits.
    """
    n_frames = max(FRAMES_A_PATCH, n_frames)  # one alone stands twice
    n_pairs = -(-n_frames // FRAMES_A_PATCH)
    room = (wish.most_tokens - n_pairs * PAIR_TEXT_TOKENS) // n_pairs
    if room < 1:
        fewer = "Ask for fewer (mm_processor_kwargs.num_frames)."
        raise Refused(f"has {n_frames} frames, too many for this model's context. {fewer}")
    info = wish.info
    most = info.max_pixels
    if info.is_capped:
        most = max(min(CAPPED_TOKENS * BLOCK**2, most // n_frames), int(info.min_pixels * 1.05)) * n_frames
    # The published rule counts an odd number of frames as one less or one more.
    counted = round(n_frames / FRAMES_A_PATCH) * FRAMES_A_PATCH
    most = min(most, min(counted, n_frames) * min(wish.frame_pixels, room * BLOCK**2))
    least = min(most, max(info.min_pixels, n_frames * wish.least_pixels))
    return _resized(n_frames, counted, height, width, least, most)


def _resized(n_frames: int, counted: int, height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """The published rule of videos. Raises Refused."""
    if height < BLOCK or width < BLOCK:
        scale = max(BLOCK / height, BLOCK / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_ASPECT:
        ratio = f"A side may be {MAX_ASPECT} times the other at most."
        raise Refused(f"has frames of {width} x {height} pixels. {ratio}")
    return whole_blocks(height, width, least, most, n_frames, counted)


def prepare() -> None:
    """Imports what every file needs."""
    import av  # noqa: F401


def main() -> int:
    """A file, or MessagePack of several, in stdin; HEAD, PAIRs and the resized pixels out of stdout."""
    wish = msgspec.json.decode(sys.argv[1], type=VideoWish)

    def decode(data: bytes) -> bytes:
        if len(data) > MAX_VIDEO_BYTES:
            raise Refused(_TOO_LARGE)
        if wish.listed_fps is not None:
            files = msgspec.msgpack.decode(data, type=list[bytes])
            frames, seconds = _listed(files, wish), times_of(range(len(files)), wish.listed_fps)
        else:
            frames, seconds = _filed(data, wish)
        return _packed(frames, seconds)

    return answer(decode, limit_s=DECODE_S, memory=DECODE_MEMORY, most_bytes=MAX_VIDEO_BYTES)


def _packed(frames: list[NDArray[np.uint8]], seconds: list[float]) -> bytes:
    height, width = frames[0].shape[:2]
    parts = [HEAD.pack(len(seconds), height, width)]
    pixels = []
    for i, time_s in enumerate(seconds):
        # The last of an odd number stands twice.
        both = b"".join(frames[min(at, len(frames) - 1)].tobytes() for at in (2 * i, 2 * i + 1))
        parts.append(PAIR.pack(time_s, of_pixels(both, height, width, FRAMES_A_PATCH).key))
        pixels.append(both)
    return b"".join(parts + pixels)


def _listed(files: list[bytes], wish: VideoWish) -> list[NDArray[np.uint8]]:
    """Resized frames of a list of pictures, which must have one size. Raises Refused."""
    import numpy as np

    frames: list[NDArray[np.uint8]] = []
    first = size = 0, 0
    for i, data in enumerate(files):
        try:
            image = picture_in(data)
        except Refused as error:
            raise Refused(f"frame {i}: {error}") from None
        if not frames:
            first = image.size
            size = fitted_frames(len(files), image.height, image.width, wish)
        if image.size != first:
            message = f"frame {i} has {image.width} x {image.height} pixels, and frame 0 {first[0]} x {first[1]}"
            raise Refused(f"{message}. They must have one size.")
        frames.append(np.asarray(resized(image, *size)))
    return frames


class _Missed(Exception):
    """Error of a seek behind which the frame that was sought had passed."""


def _filed(data: bytes, wish: VideoWish) -> tuple[list[NDArray[np.uint8]], list[float]]:
    """Resized frames of a file, and the times of their pairs. Raises Refused."""
    import numpy as np

    form = _form_of(data)
    with decoding():
        times, keys, fps = _packets(data, form)
        n_frames = number_of_frames(len(times), fps, wish)
        indices = [int(i) for i in np.linspace(0, len(times) - 1, n_frames).round().astype(int)]
        wanted = [times[i] for i in indices]
        try:
            frames = _decoded(data, form, wanted, wish, [key for key in keys if key is not None])
        except _Missed:
            frames = _decoded(data, form, wanted, wish, [])
        return frames, times_of(indices, fps)


def _form_of(data: bytes) -> str:
    """The reader of a file, by its first bytes: no other is asked. Raises Refused."""
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"):
        return "mov"
    raise Refused(f"is no video that can be read here. Send {READABLE}.")


def _stream(container: InputContainer) -> Any:
    """The video of a container, not yet decoded. Raises Refused for what shall not be."""
    from av.stream import Disposition

    streams = [video for video in container.streams.video if not video.disposition & Disposition.attached_pic]
    if not streams:
        raise Refused("has no video, only other streams" if container.streams else "has no video")
    stream = streams[0]
    context = stream.codec_context
    if context is None or context.name not in CODECS:
        raise Refused(f"is coded as {context.name if context else 'something unknown'}. Send {READABLE}.")
    if context.width * context.height > MAX_FRAME_PIXELS:
        message = f"has frames of {context.width} x {context.height} pixels. At most {MAX_FRAME_PIXELS} can be used."
        raise Refused(message)
    context.thread_count = 1
    context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
    return stream


def _packets(data: bytes, form: str) -> tuple[list[int], list[int], float]:
    """Times of all frames in the order in which they are seen, of those that need no other, and frames a
    second. Raises Refused.
    """
    import av

    times, keys, end = [], [], 0
    with av.open(io.BytesIO(data), "r", format=form) as container:
        stream = _stream(container)
        n_declared, base, average = stream.frames, stream.time_base, stream.average_rate
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard:
                continue
            time = packet.dts if packet.pts is None else packet.pts
            if time is None:
                raise Refused("has frames without a time")
            times.append(time)
            end = max(end, time + (packet.duration or 0))
            if packet.is_keyframe:
                keys.append(time)
            if len(times) > MAX_FILE_FRAMES:
                raise Refused(f"has more than {MAX_FILE_FRAMES} frames")
    if not times or len(times) < n_declared - 1:
        raise Refused(f"has {len(times)} frames of the {n_declared} that it declares. Is it whole?")
    times.sort()
    seconds = float((end - times[0]) * Fraction(base))
    if seconds > MAX_FILE_S:
        raise Refused(f"lasts {seconds:.0f} s. At most {MAX_FILE_S} s can be used.")
    return times, sorted(keys), len(times) / seconds if seconds > 0 else float(average or UNKNOWN_FPS)


def _decoded(data: bytes, form: str, wanted: list[int], wish: VideoWish, keys: list[int]) -> list[NDArray[np.uint8]]:
    """Resized frames that are seen at some times, ascending. keys: where decoding may begin; without any it
    begins once. Raises Refused, _Missed.
    """
    import av
    import numpy as np
    from PIL import Image

    images: list[NDArray[np.uint8]] = []
    first = size = 0, 0
    with av.open(io.BytesIO(data), "r", format=form) as container:
        stream = _stream(container)
        frames, last = _frames(container, stream), None
        for time in wanted:
            if last is not None and last.pts >= time:  # asked for once more
                images.append(images[-1])
                continue
            key = max((key for key in keys if key <= time), default=None)
            if key is not None and last is not None and key > last.pts + FAR_FRAMES * (last.duration or 1):
                container.seek(key, stream=stream)
                frames, last = _frames(container, stream), None
            for frame in frames:
                if last is None and frame.pts > time and keys:
                    raise _Missed
                last = frame
                if frame.pts >= time:
                    break
            if last is None or last.pts < time:
                raise Refused(f"ends before its frame at {float(time * stream.time_base):.1f} s. Is it whole?")
            turns = round((last.rotation or 0) / 90) % 4
            image = Image.fromarray(np.rot90(last.to_ndarray(format="rgb24"), turns))
            if not images:
                first, size = image.size, fitted_frames(len(wanted), image.height, image.width, wish)
            if image.size != first:
                raise Refused("has frames of several sizes")
            images.append(np.asarray(resized(image, *size)))
    return images


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[Any]:
    """Frames with a time, from where the container stands."""
    return (frame for frame in container.decode(stream) if frame.pts is not None)
