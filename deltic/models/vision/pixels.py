"""Pixels of pictures to patches, exactly as the published slow image processor gives them.

A picture is uint8 [frames, height, width, 3], resized: both sides are multiples of shape.BLOCK
(server/chat/pictures.py). A frame alone stands twice.

Source: Qwen2VLImageProcessor(Pil) of transformers, which the published configs name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltic.models.fields import UnsupportedModelError, json_table, only, positive_float, positive_int, read_flag
from deltic.models.vision.shape import BLOCK, CHANNELS, FRAMES_A_PATCH, MERGE, PATCH_SIZE, PATCH_WIDTH

BICUBIC = 3
"""Pillow's number of it, in a preprocessor_config.json."""


@dataclass(frozen=True)
class VideoRules:
    """Rules of a model for its videos: the fields of engine/messages.VideoInfo, in their order."""

    min_pixels: int = 4096
    max_pixels: int = 25_165_824
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    is_capped: bool = False


@dataclass(frozen=True)
class PictureRules:
    """Rules of a model for its pictures. min_pixels, max_pixels: pixels of a resized one, which may miss them
    by the rounding of its sides to whole blocks, and, long and narrow, by more.
    """

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255
    video: VideoRules = VideoRules()

    @classmethod
    def from_config(cls, fields: Mapping[str, object]) -> PictureRules:
        """Reads a preprocessor_config.json. Raises UnsupportedModelError for what would not be honoured."""
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

    def with_video(self, fields: Mapping[str, object]) -> PictureRules:
        """Adds what a video_preprocessor_config.json says. Raises UnsupportedModelError for what would not be
        honoured: frames get the values of a picture's pixels.
        """
        none = VideoRules()
        size = {"size": {"shortest_edge": none.min_pixels, "longest_edge": none.max_pixels}}
        alike = {"image_mean": list(self.mean), "image_std": list(self.std), "rescale_factor": self.scale}
        given = {name: value for name, value in fields.items() if value is not None}
        said = PictureRules.from_config(size | alike | given)
        for name, mine, other in (
            ("image_mean", self.mean, said.mean),
            ("image_std", self.std, said.std),
            ("rescale_factor", self.scale, said.scale),
        ):
            if mine != other:
                raise UnsupportedModelError(name, fields[name], "in a video_preprocessor_config.json that of pictures")
        only({"num_frames": None, **fields}, "num_frames", (None,))
        video = VideoRules(
            min_pixels=said.min_pixels,
            max_pixels=said.max_pixels,
            fps=positive_float(fields, "fps", none.fps),
            min_frames=positive_int(fields, "min_frames", none.min_frames),
            max_frames=positive_int(fields, "max_frames", none.max_frames),
            is_capped=read_flag(fields, "cap_pixels_per_frame"),
        )
        return dataclasses.replace(self, video=video)


def _three(fields: Mapping[str, object], name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = fields.get(name)
    if values is None:
        return default
    if isinstance(values, list) and len(values) == 3:
        red, green, blue = (positive_float({name: value}, name) for value in values)
        return red, green, blue
    raise UnsupportedModelError(name, values, "three numbers")


def level_table(rules: PictureRules) -> NDArray[np.float32]:
    """Value that each level of each channel becomes, float32 [256, 3]."""
    levels = (np.arange(256).astype(np.float64) * rules.scale).astype(np.float32)[:, None]
    mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
    table: NDArray[np.float32] = (levels - mean) / std
    return table


class Patches:
    """Patches that the vision tower reads of a picture, float32 [rows * columns, PATCH_WIDTH], made as they
    are read: (channel, frame, y, x) of each patch; patches block by block, of each 2 x 2 block, in raster
    order, its patches in raster order.
    """

    def __init__(self, pixels: NDArray[np.uint8], rules: PictureRules) -> None:
        """pixels: uint8 [1 or FRAMES_A_PATCH, height, width, 3]."""
        self._table = level_table(rules)
        n_frames, height, width, _ = pixels.shape
        rows, columns = height // BLOCK, width // BLOCK
        sides = (n_frames, rows, MERGE, PATCH_SIZE, columns, MERGE, PATCH_SIZE, CHANNELS)
        # [rows, columns of blocks, rows, columns of patches, channel, frame, y, x]
        self._pixels = pixels.reshape(sides).transpose(1, 4, 2, 5, 7, 0, 3, 6)
        self.shape: tuple[int, int] = (rows * columns * MERGE**2, PATCH_WIDTH)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> NDArray[np.float32]:
        """Makes some patches in a row. part: a slice without a step."""
        begin, end, _ = part.indices(len(self))
        a_row = self._pixels.shape[1] * MERGE**2
        first = begin // a_row
        some = self._pixels[first : -(-end // a_row)]
        some = some.reshape(-1, CHANNELS, *some.shape[5:])[begin - first * a_row : end - first * a_row]
        out = np.empty((len(some), CHANNELS, FRAMES_A_PATCH, PATCH_SIZE, PATCH_SIZE), np.float32)
        for channel in range(CHANNELS):
            out[:, channel] = self._table[:, channel][some[:, channel]]
        return out.reshape(len(some), PATCH_WIDTH)
