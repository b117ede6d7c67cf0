"""Pictures of a prompt: the bytes of a file to patches, exactly as the published slow image processor gives
them.

A file is decoded, turned as its EXIF says, put on white where it is transparent, and resized by a process of
its own (server/isolated.py), this file run as a program: Pillow is imported there only. Out come 8-bit
pixels; `patches` makes of them what the vision tower reads. Of animated files the first frame is taken.
16-bit samples lose their lower byte, grey ones too, which Pillow alone would clip to white.

Source: Qwen2VLImageProcessor(Pil) of transformers, which the published configs name.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deltic.models.fields import UnsupportedModelError, json_table, only, positive_float, positive_int
from deltic.models.vision.shape import FRAMES_A_PATCH, MERGE, PATCH_SIZE, PATCH_WIDTH
from deltic.server.isolated import Refused, answer, ask

if TYPE_CHECKING:
    from PIL import Image

BLOCK = PATCH_SIZE * MERGE
"""Pixels of a side of a token's square: the sides of a resized picture are multiples of it."""
MAX_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""What is read, of all that Pillow can."""
READABLE = "PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF"

MAX_PICTURE_BYTES = 20_000_000
MAX_SOURCE_PIXELS = 1 << 26
"""Of a file: 67 million, as its header says; more are not decoded."""

PROGRAM = (sys.executable, "-I", "-m", "deltic.server.chat.pictures")
DECODE_S = 20.0
DECODE_MEMORY = 3 << 30
"""Address space of the process that decodes: some copies of MAX_SOURCE_PIXELS, and the libraries."""

BICUBIC = 3
"""Pillow's number of it, in a preprocessor_config.json."""


class PictureError(Refused):
    """A picture that cannot be used; the message says why, for whoever sent it."""


@dataclass(frozen=True)
class PictureRules:
    """How a model wants its pictures. min_pixels, max_pixels: of a resized one, which may miss them by the
    rounding of its sides to whole blocks, and, long and narrow, by more (`fitted`).
    """

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> PictureRules:
        """Of a preprocessor_config.json. Raises UnsupportedModelError for what would not be honoured."""
        for name, default, supported in (
            ("patch_size", PATCH_SIZE, PATCH_SIZE),
            ("temporal_patch_size", FRAMES_A_PATCH, FRAMES_A_PATCH),
            ("merge_size", MERGE, MERGE),
            ("resample", BICUBIC, BICUBIC),
            ("do_resize", True, True),
            ("do_rescale", True, True),
            ("do_normalize", True, True),
            ("do_convert_rgb", True, True),
        ):
            only({name: default, **fields}, name, (None, supported))
        size = json_table(fields, "size") if fields.get("size") is not None else {}
        given = {
            "shortest_edge": fields.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
            "longest_edge": fields.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        }
        least = positive_int(given, "shortest_edge", cls.min_pixels)
        most = positive_int(given, "longest_edge", cls.max_pixels)
        if least > most:
            raise UnsupportedModelError("size", dict(size), "a shortest_edge below the longest_edge")
        return cls(
            min_pixels=least,
            max_pixels=most,
            mean=_three(fields, "image_mean", cls.mean),
            std=_three(fields, "image_std", cls.std),
            scale=positive_float(fields, "rescale_factor", cls.scale),
        )


def _three(fields: Mapping[str, Any], name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = fields.get(name)
    if values is None:
        return default
    if isinstance(values, list) and len(values) == 3:
        red, green, blue = (positive_float({name: value}, name) for value in values)
        return red, green, blue
    raise UnsupportedModelError(name, values, "three numbers")


@dataclass(frozen=True)
class Picture:
    """pixels: uint8 [height, width, 3], red, green and blue, resized: both sides are multiples of BLOCK."""

    pixels: NDArray[np.uint8]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of patches."""
        return 1, self.pixels.shape[0] // PATCH_SIZE, self.pixels.shape[1] // PATCH_SIZE

    @property
    def n_tokens(self) -> int:
        """Of the language model."""
        return int(self.pixels.shape[0] * self.pixels.shape[1] // BLOCK**2)


def needs_pillow() -> str | None:
    """What to do where Pillow is not installed, for whoever starts the server; None where it is."""
    return None if find_spec("PIL") else "pictures need a library: pip install 'deltic[vision]'"


def fitted(height: int, width: int, rules: PictureRules) -> tuple[int, int]:
    """Height and width of a picture once it is resized: whole blocks, about as long as wide as it was,
    between the least and most pixels. One that is very long and narrow can have more, since no side is
    shorter than a block.

    Raises PictureError for one that is more than MAX_ASPECT times as long as wide.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise PictureError(f"has {width} x {height} pixels; a side may be {MAX_ASPECT} times the other at most")
    # Half rounds to even, and the order of operations is the published one: others give other sizes.
    new_height, new_width = round(height / BLOCK) * BLOCK, round(width / BLOCK) * BLOCK
    if new_height * new_width > rules.max_pixels:
        shrink = math.sqrt(height * width / rules.max_pixels)
        new_height = max(BLOCK, math.floor(height / shrink / BLOCK) * BLOCK)
        new_width = max(BLOCK, math.floor(width / shrink / BLOCK) * BLOCK)
    elif new_height * new_width < rules.min_pixels:
        grow = math.sqrt(rules.min_pixels / (height * width))
        new_height = math.ceil(height * grow / BLOCK) * BLOCK
        new_width = math.ceil(width * grow / BLOCK) * BLOCK
    return new_height, new_width


async def read_picture(data: bytes, rules: PictureRules) -> Picture:
    """The picture in a file of one of FORMATS. Raises PictureError, also for files that mean no good.

    In a process of its own, which is ended after DECODE_S, or when nobody waits any more.
    """
    if len(data) > MAX_PICTURE_BYTES:
        raise PictureError(_TOO_LARGE)
    program = (*PROGRAM, str(rules.min_pixels), str(rules.max_pixels))
    try:
        made = await ask(program, data, DECODE_S, f"cannot be decoded; send {READABLE}")
    except Refused as refused:
        raise PictureError(str(refused)) from None
    height, width = struct.unpack_from("<II", made)
    return Picture(np.frombuffer(made, np.uint8, offset=8).reshape(height, width, 3))


def patches(picture: Picture, rules: PictureRules) -> NDArray[np.float32]:
    """What the vision tower reads, float32 [rows * columns, PATCH_WIDTH]: (channel, frame, y, x) of each
    patch, both frames alike; patches block by block, of each 2 x 2 block, in raster order, its patches in
    raster order.
    """
    levels = (np.arange(256).astype(np.float64) * rules.scale).astype(np.float32)[:, None]
    table = (levels - np.array(rules.mean, np.float32)) / np.array(rules.std, np.float32)  # [256, 3]
    _, rows, columns = picture.grid
    blocks = (rows // MERGE, MERGE, PATCH_SIZE, columns // MERGE, MERGE, PATCH_SIZE)
    channels = [table[:, i][picture.pixels[:, :, i]].reshape(blocks) for i in range(3)]
    whole = np.stack(channels).transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    out = np.empty((*whole.shape[:5], FRAMES_A_PATCH, *whole.shape[6:]), np.float32)
    out[...] = whole
    return out.reshape(rows * columns, PATCH_WIDTH)


_TOO_LARGE = f"is larger than {MAX_PICTURE_BYTES // 1_000_000} MB"


def main() -> int:
    """A file in stdin; height and width, as two uint32, and the resized pixels out of stdout."""
    rules = PictureRules(min_pixels=int(sys.argv[1]), max_pixels=int(sys.argv[2]))

    def decode(data: bytes) -> bytes:
        pixels = _decode(data, rules)
        return struct.pack("<II", *pixels.shape[:2]) + pixels.tobytes()

    return answer(decode, limit_s=DECODE_S, memory=DECODE_MEMORY, most_bytes=MAX_PICTURE_BYTES)


def _decode(data: bytes, rules: PictureRules) -> NDArray[np.uint8]:
    """As read_picture does. The size in the header is checked before a pixel is decoded."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_PICTURE_BYTES:
        raise PictureError(_TOO_LARGE)
    Image.MAX_IMAGE_PIXELS = None  # _refuse_sizes says more
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _refuse_sizes(image, rules)
            image.load()
            upright = _turned(image)
            height, width = fitted(upright.height, upright.width, rules)
            return np.asarray(_in_colours(upright).resize((width, height), Image.Resampling.BICUBIC))
    except PictureError:
        raise
    except UnidentifiedImageError:
        raise PictureError(f"is no picture that can be read here; send {READABLE}") from None
    except MemoryError:
        raise PictureError("takes too much memory to decode") from None
    except Exception as error:  # decoders of broken files raise anything
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise PictureError(f"cannot be decoded ({said}); is it whole?") from None


def _refuse_sizes(image: Image.Image, rules: PictureRules) -> None:
    """Raises PictureError by the size that the header tells."""
    if image.width * image.height > MAX_SOURCE_PIXELS:
        raise PictureError(f"has {image.width} x {image.height} pixels; at most {MAX_SOURCE_PIXELS} can be used")
    if not image.width or not image.height:
        raise PictureError("has no pixels")
    fitted(image.height, image.width, rules)


def _turned(image: Image.Image) -> Image.Image:
    """As its EXIF says that it is to be seen. What is no EXIF, or says nothing, is passed over, as viewers
    do.
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
    found = image.transpose(turn)
    found.info.update(image.info)
    return found


def _in_colours(image: Image.Image) -> Image.Image:
    """Red, green and blue of 8 bits, on white where the picture is transparent."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        samples = np.asarray(image)
        grey = (samples >> 8).astype(np.uint8)
        clear = image.info.get("transparency")
        return Image.fromarray(grey if clear is None else np.where(samples == clear, np.uint8(255), grey)).convert(
            "RGB"
        )
    if image.mode in ("I", "F"):
        raise PictureError("has samples of 32 bits; send one of 8 or 16 bits")
    if "A" not in image.getbands() and "a" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


if __name__ == "__main__":
    sys.exit(main())
