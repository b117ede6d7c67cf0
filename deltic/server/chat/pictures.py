"""Pictures of a prompt: the bytes of a file to patches, exactly as the published slow image processor gives
them.

A file is decoded, turned as its EXIF says, put on white where it is transparent, and resized by a process of
its own (server/isolated.py), which alone imports Pillow and numpy. All but
the first two are done a strip at a time, so a large picture is in memory once. Out come
8-bit pixels; models/vision/pixels.py makes of them what the vision tower reads. Of animated files the first
frame is taken.
16-bit samples lose their lower byte, grey ones too, which Pillow alone would clip to white.

Source: Qwen2VLImageProcessor(Pil) of transformers, which the published configs name.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import sys
from hashlib import blake2b
from typing import TYPE_CHECKING

from deltic.server.isolated import Refused, answer, ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image

    from deltic.engine.messages import Picture

BLOCK = 32
"""`models.vision.shape.BLOCK`."""
MAX_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats that are read, of all that Pillow can read."""
READABLE = "PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF"

MAX_PICTURE_BYTES = 20_000_000
"""Bytes of a file, out of base64 or fetched: more are refused before it is decoded."""
MAX_SOURCE_PIXELS = 1 << 26
"""Pixels of a file, as its header says: 67 million; more are not decoded."""

PROGRAM = ("deltic.server.chat.pictures",)
HEAD = struct.Struct("<II16s")
"""Head that the program writes before the pixels: height, width and `Picture.key`."""
STRIP_PIXELS = 1 << 20
DECODE_S = 20.0
DECODE_MEMORY = 3 << 30
"""Address space of the process that decodes: some copies of MAX_SOURCE_PIXELS, and the libraries."""


def fitted(height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width of a picture once it is resized: whole blocks, about as long as wide as it was,
    between the least and most pixels, which rounding may miss. One that is very long and narrow can have
    more, since no side is shorter than a block.

    Raises Refused for one that is more than MAX_ASPECT times as long as wide.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise Refused(f"has {width} x {height} pixels. A side may be {MAX_ASPECT} times the other at most.")
    return whole_blocks(height, width, min_pixels, max_pixels)


def whole_blocks(
    height: int, width: int, least: int, most: int, n_frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Height and width of frames in whole blocks, between the least and most pixels of all of them. counted:
    their number where the published rule of videos takes it for another.

    Half rounds to even, and the order of operations is the published one: others give other sizes.
    """
    new_height, new_width = round(height / BLOCK) * BLOCK, round(width / BLOCK) * BLOCK
    if counted * new_height * new_width > most:
        shrink = math.sqrt((n_frames * height * width) / most)
        new_height = max(BLOCK, math.floor(height / shrink / BLOCK) * BLOCK)
        new_width = max(BLOCK, math.floor(width / shrink / BLOCK) * BLOCK)
    elif counted * new_height * new_width < least:
        grow = math.sqrt(least / (n_frames * height * width))
        new_height = math.ceil(height * grow / BLOCK) * BLOCK
        new_width = math.ceil(width * grow / BLOCK) * BLOCK
    return new_height, new_width


async def read_picture(data: bytes, min_pixels: int, max_pixels: int) -> Picture:
    """The picture in a file of one of FORMATS. Raises Refused, also for files that mean no good, and
    ApiError (503) where there is no memory.

    In a process of its own, which is ended after DECODE_S, or when nobody waits any more.
    """
    if len(data) > MAX_PICTURE_BYTES:
        raise Refused(_TOO_LARGE)
    program = (*PROGRAM, str(min_pixels), str(max_pixels))
    made = await ask(program, data, DECODE_S, f"cannot be decoded. Send {READABLE}.")
    height, width, key = HEAD.unpack_from(made)
    return _picture(key, made[HEAD.size :], height, width)


def of_pixels(pixels: bytes, height: int, width: int, n_frames: int = 1) -> Picture:
    """A picture of resized pixels: uint8 [n_frames, height, width, 3], both sides multiples of BLOCK.

    Takes a millisecond a megabyte.
    """
    return _picture(key_of(pixels, height, width, n_frames), pixels, height, width, n_frames)


def key_of(pixels: bytes, height: int, width: int, n_frames: int = 1) -> bytes:
    """`Picture.key`."""
    digest = blake2b(struct.pack("<III", n_frames, height, width), digest_size=16)
    digest.update(pixels)
    return digest.digest()


def _picture(key: bytes, pixels: bytes, height: int, width: int, n_frames: int = 1) -> Picture:
    from deltic.engine.messages import Picture

    return Picture(key=key, rows=height // BLOCK, columns=width // BLOCK, pixels=pixels, n_frames=n_frames)


_TOO_LARGE = f"is larger than {MAX_PICTURE_BYTES // 1_000_000} MB"


def prepare() -> None:
    """Imports what files need."""
    import numpy  # noqa: F401
    from PIL import Image

    Image.preinit()


def main() -> int:
    """A file in stdin; height, width and key, as HEAD has them, and the resized pixels out of stdout."""
    min_pixels, max_pixels = int(sys.argv[1]), int(sys.argv[2])

    def decode(data: bytes) -> bytes:
        image = _decode(data, min_pixels, max_pixels)
        pixels = image.tobytes()
        return HEAD.pack(image.height, image.width, key_of(pixels, image.height, image.width)) + pixels

    return answer(decode, limit_s=DECODE_S, memory=DECODE_MEMORY, most_bytes=MAX_PICTURE_BYTES)


def _decode(data: bytes, min_pixels: int, max_pixels: int) -> Image.Image:
    """Decodes and resizes as read_picture does."""
    image = picture_in(data)
    return resized(image, *fitted(image.height, image.width, min_pixels, max_pixels))


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Raises Refused for whatever decoders raise. Their words may tell of this machine."""
    try:
        yield
    except Refused:
        raise
    except MemoryError:
        raise Refused("takes too much memory to decode") from None
    except Exception:
        raise Refused("cannot be decoded. Is it whole?") from None


def picture_in(data: bytes) -> Image.Image:
    """The picture in a file, of its own size and mode, upright. Raises Refused: the size in the header
    is checked before a pixel is decoded.
    """
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_PICTURE_BYTES:
        raise Refused(_TOO_LARGE)
    Image.MAX_IMAGE_PIXELS = None  # _refuse_sizes says more
    with decoding():
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _refuse_sizes(image)
                image.load()
                if image.mode in ("I", "F"):
                    raise Refused("has samples of 32 bits. Send one of 8 or 16 bits.")
                return _turned(image)
        except UnidentifiedImageError:
            raise Refused(f"is no picture that can be read here. Send {READABLE}.") from None


def resized(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resizes an image of `picture_in`, in colours; it may change that image. Raises Refused.

    Colours are made a strip at a time, in place where there is room for them, and resized one by one.
    """
    from PIL import Image

    with decoding():
        colours = image if image.mode in ("RGB", "RGBA") else Image.new("RGB", image.size)
        n_rows = max(1, STRIP_PIXELS // image.width)
        for top in range(0, image.height, n_rows):
            strip = image.crop((0, top, image.width, min(top + n_rows, image.height)))
            colours.paste(_in_colours(strip), (0, top))
        bands = (colours.getchannel(i) for i in range(3))
        return Image.merge("RGB", [band.resize((width, height), Image.Resampling.BICUBIC) for band in bands])


def _refuse_sizes(image: Image.Image) -> None:
    """Raises Refused by the size that the header tells."""
    if image.width * image.height > MAX_SOURCE_PIXELS:
        raise Refused(f"has {image.width} x {image.height} pixels. At most {MAX_SOURCE_PIXELS} can be used.")
    if not image.width or not image.height:
        raise Refused("has no pixels")
    fitted(image.height, image.width, 1, MAX_SOURCE_PIXELS)  # the ratio of its sides


def _turned(image: Image.Image) -> Image.Image:
    """Turns an image as its EXIF says that it is to be seen. What is no EXIF, or says nothing, is passed
    over, as viewers do.
    """
    from PIL import Image

    turns = Image.Transpose
    by_orientation = {
        2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
        6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90,
    }  # fmt: skip
    try:
        turn = by_orientation.get(image.getexif().get(0x0112, 1))
    except Exception:  # it is parsed by Python that trusts it
        return image
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.info.update(image.info)
    return turned


def _in_colours(image: Image.Image) -> Image.Image:
    """Red, green and blue of 8 bits, on white where the picture is transparent."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        import numpy as np

        samples = np.asarray(image)
        grey = (samples >> 8).astype(np.uint8)
        clear = image.info.get("transparency")
        return Image.fromarray(grey if clear is None else np.where(samples == clear, np.uint8(255), grey)).convert(
            "RGB"
        )
    if "A" not in image.getbands() and "a" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
