"""Weights of the vision tower: from the published names into the layout that `models/vision/cpu.py` reads.

Matrices keep the checkpoint's format, whatever --quantize says: the tower is a small part of a model, and is
run once a picture. Norms and biases become float32. The table of positions stays bfloat16 rows. The tower of
a GGUF model is a file of its own, beside the model's (`gguf.tower_beside`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltic.models.fields import CheckpointError, read_json
from deltic.models.files import check_plan, open_part
from deltic.models.gguf import is_gguf, open_gguf, tower_beside
from deltic.models.gguf_config import naming, vision_config
from deltic.models.gguf_tensors import tower_tensors
from deltic.models.loading import COUNTED, COUNTED_ROWS, HOST, Declaration, Parts, Store, Stored, copy_parts, fill_dummy
from deltic.models.stored import Derived, StoredTensor, formats_of
from deltic.models.vision.pixels import PictureRules
from deltic.models.vision.shape import CHANNELS, FRAMES_A_PATCH, PATCH_SIZE, PATCH_WIDTH, VisionShape
from deltic.ops.arrays import Array
from deltic.ops.formats import Quantised
from deltic.ops.geometry import DeviceArray
from deltic.ops.matrix import Matrix

PREFIXES = ("model.visual.", "visual.")
"""Beginnings of the names of a tower's tensors."""


@dataclass
class Linear:
    """y = x W^T + bias."""

    weight: Matrix  # [N, K]
    bias: DeviceArray  # [N] f32


@dataclass
class Norm:
    """A LayerNorm."""

    weight: DeviceArray  # [h] f32
    bias: DeviceArray  # [h] f32


@dataclass
class VisionBlock:
    """Block of a tower. `qkv` rows: q | k | v, each by heads."""

    norm1: Norm
    qkv: Linear  # [3h, h]
    proj: Linear  # [h, h]
    norm2: Norm
    fc1: Linear  # [intermediate, h]
    fc2: Linear  # [h, inner_size]; columns behind the intermediate size are zeros


@dataclass
class VisionWeights(Parts):
    """A tower."""

    patch: Linear  # [h, PATCH_WIDTH]
    positions: DeviceArray  # [side * side, h] bf16
    blocks: list[VisionBlock]
    norm: Norm
    merge1: Linear  # [4h, 4h]
    merge2: Linear  # [out_hidden_size, 4h]


@dataclass(frozen=True)
class Widened(Derived):
    """A StoredTensor of n times anything, read as rows of k: its values of a row one after another, then
    zeros.
    """

    tensor: StoredTensor
    k: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, begin: int, end: int) -> Array | Quantised:
        """Reads rows as every StoredTensor does. Zeros of a quantised tensor are codes of 0, which need not
        stand for 0: what they are multiplied with is 0.
        """
        stored = math.prod(self.shape[1:-1])  # rows of the tensor in one of these
        found = self.tensor.read(begin * stored, end * stored)
        if not isinstance(found, Quantised):
            rows = found.reshape(end - begin, -1)
            return _padded(rows, self.k - rows.shape[1])
        if stored != 1:
            raise CheckpointError(f"{self.where} is quantised as {self.dtype}, which is supported of matrices only")
        codes = _padded(found.codes, self.k - found.codes.shape[1])
        n_scales, n_least, n_outer = (size and size[0] for size in found.format.sizes(self.k))
        if found.outer is not None and found.outer.shape[1] != n_outer:
            raise CheckpointError(f"{self.where}: {self.dtype} of {self.shape[1]} columns is not supported")
        scale = _padded(found.scale, n_scales - found.scale.shape[1])
        least = None if found.least is None else _padded(found.least, (n_least or 0) - found.least.shape[1])
        return dataclasses.replace(found, codes=codes, scale=scale, least=least)


def _padded(rows: Array, n: int) -> Array:
    """n zeros behind each row."""
    return np.concatenate([rows, np.zeros((len(rows), n), rows.dtype)], axis=1) if n else rows


def tower_place(path: str | Path) -> Path | None:
    """The directory or file with the tower of a checkpoint; None: a GGUF model has none beside it."""
    path = Path(path)
    return tower_beside(path) if is_gguf(path) else path


def stored_tower(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint's tower by their names behind `model.visual.`; {} where it has none.

    Raises CheckpointError for files that cannot be read, and for formats that are not supported.
    """
    place = tower_place(path)
    if place is None:
        return {}
    if is_gguf(place):
        return tower_tensors(open_gguf(place))
    found = open_part(place, PREFIXES)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        short = next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))
        if short in tensors:
            raise CheckpointError(f"{tensor.where} is stored twice: also as {tensors[short].where}")
        tensors[short] = tensor
    return tensors


def stored_vision_shape(path: str | Path, tensors: dict[str, StoredTensor] | None = None) -> VisionShape | None:
    """The shape of a checkpoint's tower, with the formats of what it holds quantised; None where it has none.
    tensors: of `stored_tower`, where they were read.

    Raises CheckpointError, and UnsupportedModelError for sizes that the forward would not honour.
    """
    place, tensors = tower_place(path), stored_tower(path) if tensors is None else tensors
    if place is None or not tensors:
        return None
    if is_gguf(place):
        config = {"vision_config": vision_config(open_gguf(place))}
    else:
        config = read_json((place if place.is_dir() else place.parent) / "config.json")
    with naming(place, "vision_config."):
        return dataclasses.replace(VisionShape.from_config(config), formats=formats_of(tensors))


def picture_rules(path: str | Path) -> PictureRules:
    """Reads how the model of a checkpoint wants its pictures and videos: from preprocessor_config.json and
    video_preprocessor_config.json, or the file of a GGUF tower. Where these say nothing, the published
    numbers hold.

    Raises CheckpointError, and UnsupportedModelError for what would not be honoured.
    """
    place = tower_place(path)
    if place is not None and is_gguf(place):
        tower = open_gguf(place)
        names = ("image_mean", "image_std", "image_min_pixels", "image_max_pixels")
        said = {name: tower.get(f"clip.vision.{name}", None) for name in names}
        fields = {name.removeprefix("image_") if "pixels" in name else name: value for name, value in said.items()}
        return PictureRules.from_config({name: value for name, value in fields.items() if value is not None})
    said, video = (
        read_json(file) if (file := Path(path) / name).exists() else {}
        for name in ("preprocessor_config.json", "video_preprocessor_config.json")
    )
    return PictureRules.from_config(said).with_video(video)


def check_tower(
    path: str | Path, shape: VisionShape, tensors: dict[str, StoredTensor], store: Store = HOST
) -> list[str]:
    """The notices of `load_vision`, and what it raises. tensors: of `stored_tower`."""
    if (place := tower_place(path)) is None:
        raise CheckpointError(f"{path}: no vision tower beside this file; put the mmproj-*.gguf of the model there")
    if not tensors:
        raise CheckpointError(f"{path}: no vision tower here (no tensor's name begins with {' or '.join(PREFIXES)})")
    checked = Declaration(None, COUNTED if store.layout == "panels" else COUNTED_ROWS, shape.formats)
    _declare(checked, shape)
    return check_plan(checked.plan, tensors, place)


def load_vision(path: str | Path, shape: VisionShape, *, store: Store = HOST) -> tuple[VisionWeights, list[str]]:
    """Loads the tower of a checkpoint: a directory, a safetensors file, or the GGUF file of a model or tower;
    shape: of `stored_vision_shape`.

    The second result holds notices for the user: what was converted. Raises CheckpointError, naming the
    tensor, what was expected, what was found and the file, for a missing, unexpected or misshapen tensor.
    """
    tensors = stored_tower(path)
    notices = check_tower(path, shape, tensors, store)  # before memory is taken
    parts = Declaration(None, store, shape.formats)
    weights = _declare(parts, shape)
    for part in parts.plan:
        if isinstance(part.target, Matrix):
            for one in part.stored:
                tensors[one.name] = Widened(tensors[one.name], part.target.k)
    copy_parts(parts.plan, tensors, store, None)
    return weights, notices


def empty_vision(shape: VisionShape, store: Store = COUNTED) -> VisionWeights:
    """Uninitialised weights of the right sizes and formats. Counted, they tell the bytes of a tower."""
    return _declare(Declaration(None, store, shape.formats), shape)


def dummy_vision(shape: VisionShape, seed: int = 0, store: Store = HOST) -> VisionWeights:
    """Random weights of a shape, the same for the same seed: for benches, where only sizes matter."""
    weights = empty_vision(shape, store)
    fill_dummy(weights, seed, _dummy_vector, store, None)
    return weights


def _dummy_vector(name: str, size: tuple[int, ...], generator: np.random.Generator) -> Array:
    mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
    return generator.normal(mean, 0.1, size).astype(np.float32)


def _declare(d: Declaration, shape: VisionShape) -> VisionWeights:
    h, merged = shape.hidden_size, shape.merged_size

    def linear(name: str, n: int, k: int, padded: int = 0, size: tuple[int, ...] = ()) -> Linear:
        stored = Stored(f"{name}.weight", (n,), shape=(n, *(size or (k,))))
        return Linear(d.matrix(padded or k, stored, role="kept"), d.vector(f"{name}.bias", n))

    def norm(name: str) -> Norm:
        return Norm(d.vector(f"{name}.weight", h), d.vector(f"{name}.bias", h))

    pixels = (CHANNELS, FRAMES_A_PATCH, PATCH_SIZE, PATCH_SIZE)
    return VisionWeights(
        patch=linear("patch_embed.proj", h, PATCH_WIDTH, size=pixels),
        positions=d.table("pos_embed.weight", shape.table_side**2, h),
        blocks=[
            VisionBlock(
                norm1=norm(f"{p}norm1"),
                qkv=linear(f"{p}attn.qkv", 3 * h, h),
                proj=linear(f"{p}attn.proj", h, h),
                norm2=norm(f"{p}norm2"),
                fc1=linear(f"{p}mlp.linear_fc1", shape.intermediate_size, h),
                fc2=linear(f"{p}mlp.linear_fc2", h, shape.intermediate_size, shape.inner_size),
            )
            for p in (f"blocks.{i}." for i in range(shape.depth))
        ],
        norm=norm("merger.norm"),
        merge1=linear("merger.linear_fc1", merged, merged),
        merge2=linear("merger.linear_fc2", shape.out_hidden_size, merged),
    )
