"""The values of a model's tensors: whether they are numbers, whether one is unlike its like in other
layers, and whether they are those of another checkpoint of the model.
"""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from deltic.models.gguf import tower_beside
from deltic.models.gguf_blocks import decoded
from deltic.models.gguf_tensors import Rows
from deltic.models.loading import Planned
from deltic.models.mapped import Header
from deltic.models.qwen.shape import ModelShape
from deltic.models.stored import StoredTensor
from deltic.ops.arrays import Array
from deltic.ops.formats import Quantised, WeightFormat
from deltic.ops.matrix import Matrix
from deltic.verify.files import Files
from deltic.verify.page import Check, Tell

BLOCK_WEIGHTS = 1 << 22
"""Weights that are read at a time, but for matrices whose rows are in another order."""

GROUP = 128
"""Columns of a row whose error is judged by itself. Their factor is judged by the format's own group."""

ROUNDING = {8: 0.05, 6: 0.06, 5: 0.08, 4: 0.2, 3: 0.32, 2: 0.6, 1: 0.9}
"""Errors of a rounded tensor by the bits of its codes, as parts of its length: about twice what
tests/tiny_quantised.py and llama.cpp's quantiser leave.
"""

FACTORS = {
    8: (0.2, 0.03, 0.2, 0.03), 6: (0.2, 0.03, 0.2, 0.03), 5: (0.25, 0.03, 0.25, 0.03), 4: (0.35, 0.1, 0.3, 0.05),
    3: (0.6, 0.2, 0.4, 0.08), 2: (1.01, 0.5, 0.6, 0.2), 1: (1.01, 1.01, 0.9, 0.3),
}  # fmt: skip
"""Bounds of the factor between two tensors, by the bits of the codes: how far below 1 that of a group may be,
and that of very many groups, and how far above. Rounding errors are nearly orthogonal to the weights, so that
a factor stays near 1. Quantisers were measured on random weights, also with tails and outliers. The furthest
factors at 4 bits were 0.75 and 1.2 of a group, 0.94 and 1.01 of a tensor; AWQ's clipping by a quarter has
room.
"""

PLAIN = ("BF16", "F16", "F32")
PLAIN_ROUNDING = 2**-8
"""The same between two of bfloat16, float16 and float32."""

UNLIKE = 8.0
"""Times by which a matrix is larger or smaller than its like in half of the other layers."""

LEAST_ALIKE = 4


def values_of(tensor: StoredTensor, begin: int, end: int) -> Array:
    """float32 [end - begin, K]: rows of a tensor, whatever holds them."""
    rows = tensor.read(begin, end)
    return rows.values() if isinstance(rows, Quantised) else np.asarray(rows, np.float32).reshape(end - begin, -1)


def check_numbers(files: Files, check: Check, tell: Tell) -> None:
    """Reads every tensor: all values are finite, and none is unlike its like in the other layers."""
    alike = defaultdict[str, dict[str, float]](dict)
    total, done, n_read = sum(math.prod(tensor.shape) for tensor in files.tensors.values()) or 1, 0, 0
    for name, tensor in files.tensors.items():
        tell("reading tensors", done / total)
        done += math.prod(tensor.shape)
        if tensor.format is None and tensor.dtype not in PLAIN:
            continue  # of a part that is not run
        n_read += 1
        squares, n_rows, k = 0.0, math.prod(tensor.shape[:-1]), tensor.shape[-1]
        step = max(1, BLOCK_WEIGHTS // k)
        for begin in range(0, n_rows, step):
            rows = values_of(tensor, begin, min(begin + step, n_rows))
            squares += float(np.square(rows, dtype=np.float64).sum())
        if not math.isfinite(squares):
            check.wrong(f"{name}: has values that are no numbers or infinite")
        elif n_rows > 1:
            alike[re.sub(r"\.\d+\.", ".N.", name)][name] = math.sqrt(squares / (n_rows * k))
    for sizes in alike.values():
        middle = statistics.median(sizes.values())
        for name, size in sizes.items() if len(sizes) >= LEAST_ALIKE else ():
            if not middle / UNLIKE <= size <= middle * UNLIKE:
                times = size / middle if middle else math.inf
                check.look(f"{name}: its values are {times:.3g} times those of the same tensor in other layers")
    check.note(f"{n_read} tensors were read")
    if n_left := len(files.tensors) - n_read:
        check.note(f"{n_left} tensors of types that are not run were not read")
    if files.is_gguf:
        _check_blocks(files, check)
        if tower_beside(files.path):
            check.note("the vision tower is another file, which was hashed; its values were not read")


def _check_blocks(files: Files, check: Check) -> None:
    """Holds the first row of each quantised tensor of a GGUF file to the gguf package."""
    if importlib.util.find_spec("gguf") is None:
        check.note("the blocks were not held to the gguf package, which is not installed: pip install gguf")
        return
    import gguf

    n, unread = 0, set[str]()
    for tensor in {id(each.tensor): each for each in files.tensors.values() if isinstance(each, Rows)}.values():
        own = tensor.tensor
        if tensor.format is None:
            continue
        n_bytes = (own.end - own.begin) // (math.prod(own.shape) // own.shape[-1])
        raw = tensor.files.read(Header(own.file, (1, n_bytes), "U8", own.begin, own.begin + n_bytes))
        try:
            theirs = gguf.quants.dequantize(raw, getattr(gguf.GGMLQuantizationType, own.type))
        except (AttributeError, NotImplementedError):
            unread.add(own.type)
            continue
        n += 1
        if not np.array_equal(decoded(own.type, raw, own.where).values(), theirs):
            check.wrong(f"{own.name}: {own.type} is read as other values than by the gguf package")
    if unread:
        check.note(f"the gguf package does not read {', '.join(sorted(unread))}")
    if check.verdict != "wrong":
        check.note(f"a row of each of {n} quantised tensors is what the gguf package makes of it")


def rounding(format: WeightFormat | None) -> float:
    """The largest error of a tensor in this format, as part of its length."""
    return PLAIN_ROUNDING if format is None else ROUNDING[int(format.bits)]


@dataclass
class Compared:
    """The error of one tensor, in parts of its length; of its worst run of GROUP columns, too. And the factor
    between both: of groups that share a scale, of rows, and of all.
    """

    mine: StoredTensor
    theirs: StoredTensor
    n: int = 0
    squares: float = 0.0
    """Sum of the squares of the other's values."""
    errors: float = 0.0
    worst: float = 0.0
    n_differing: int = 0
    factors: float = 0.0
    """Sum of the weights' factors, less 1 each: their group's, so that a large weight counts as any other."""
    furthest: tuple[float, str] = (1.0, "")
    """The factor that is furthest beyond its bound: how many times, and what it is of."""

    @property
    def formats(self) -> list[WeightFormat]:
        return [tensor.format for tensor in (self.mine, self.theirs) if tensor.format is not None]

    @property
    def width(self) -> int:
        """Columns of a row that share a scale; GROUP if more do, or none."""
        return min([GROUP, *(format.group or GROUP for format in self.formats)])

    @property
    def error(self) -> float:
        return math.sqrt(self.errors / self.squares) if self.squares else math.inf if self.errors else 0.0

    def add(self, mine: Array, theirs: Array, rows: Array) -> None:
        """mine, theirs: float32 [n, k]; rows: int [n], their numbers in the tensor."""
        differing = mine - theirs
        self.n += mine.size
        self.n_differing += int(np.count_nonzero(differing))
        squares, errors = _by_group(theirs * theirs, GROUP), _by_group(differing * differing, GROUP)
        self.squares += float(squares.sum())
        self.errors += float(errors.sum())
        # A group that is nearly 0 is judged by its row.
        least = squares.mean(1, keepdims=True) / 16
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = np.sqrt(np.where(errors > 0, errors / np.maximum(squares, least), 0.0))
        self.worst = max(self.worst, float(parts.max(initial=0.0)))
        if not self.formats or not mine.size:
            return
        width = self.width
        squares, along = _by_group(theirs * theirs, width), _by_group(differing * theirs, width)
        # A small group has a coarse scale where larger ones share what its scale is counted in.
        shared = np.maximum(squares.mean(1, keepdims=True) / 16, squares.max(1, keepdims=True) / 64)
        some = max(width * self.squares / self.n / 4096, 2.0**-126)
        groups = along / np.maximum(np.maximum(squares, shared), some)
        means = groups.mean(1, keepdims=True)
        self.factors += float(means.sum()) * mine.shape[1]
        for factors, n in ((groups, 1), (means, groups.shape[1])):
            beyond = self._beyond(factors, n)
            i, j = np.unravel_index(beyond.argmax(), beyond.shape)
            if not beyond[i, j] <= self.furthest[0]:
                columns = f", columns {j * width} to {min((j + 1) * width, mine.shape[1]) - 1}," if n == 1 else ""
                said = f"row {rows[i]}{columns} is {1 + factors[i, j]:.2f} times the other's"
                self.furthest = float(beyond[i, j]), said

    def _beyond(self, factors: Array, n: float) -> Array:
        """Factors, less 1, of n groups each, in parts of their bounds."""
        one, many, above, many_above = np.sum([FACTORS[int(format.bits)] for format in self.formats], axis=0)
        low, high = many + (one - many) / math.sqrt(n), many_above + (above - many_above) / math.sqrt(n)
        beyond: Array = np.maximum(-factors / low, factors / high)
        return beyond

    def judged(self) -> str:
        """Says what is wrong with the tensor; "" if nothing is."""
        if self.mine.dtype == self.theirs.dtype == "BF16":
            differing = f"{self.n_differing} of {self.n} values differ, by {self.error:.2%} of its length"
            return differing if self.n_differing else ""
        bound = rounding(self.mine.format) + rounding(self.theirs.format)
        factor = self.factors / max(self.n, 1)
        is_scaled = self.formats and self._beyond(np.array(factor), max(self.n / self.width, 1)) > 1
        if is_scaled and self.error**2 - factor**2 <= bound**2:
            return f"is {1 + factor:.2f} times the other's: are its scales wrong?"
        if not self.error <= bound:
            return f"differs by {self.error:.1%} of its length, where its format rounds by at most {bound:.1%}"
        if self.furthest[1]:
            return f"{self.furthest[1]}: is a scale wrong?"
        if self.worst > min(3 * bound, 0.9):
            return f"differs in {GROUP} columns of a row by {self.worst:.0%} of their length: is a scale wrong?"
        return ""


def _by_group(values: Array, width: int) -> Array:
    """float64 [n, groups]: sums of as many columns."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % width)))
    sums: Array = padded.reshape(len(values), -1, width).sum(2, dtype=np.float64)
    return sums


def check_against(files: Files, other: Files, check: Check, tell: Tell) -> None:
    """Compares every value with the other checkpoint's, however each of the two stores it, and names the
    tensors that differ by more than their formats round.
    """
    compared: dict[str, Compared] = {}
    parts = [_alike(one, two) for one, two in ((files, other), (other, files))]
    if list(map(_sizes, parts[0])) != list(map(_sizes, parts[1])):
        check.wrong(f"{other.name} has parts of other sizes: it is another model")
        return
    total, done = sum(math.prod(_sizes(part)) for part in parts[0]), 0
    for mine, theirs in zip(*parts, strict=True):
        tell("comparing tensors", done / total)
        done += math.prod(_sizes(mine))
        for (name, their_name), rows, ours, others in _pairs(files, other, mine, theirs):
            tensors = files.tensors[name], other.tensors[their_name]
            as_head = " as the head" if their_name == "lm_head.weight" != name else ""
            compared.setdefault(f"{name}{as_head}", Compared(*tensors)).add(ours, others, rows)
    for name in sorted(files.tensors.keys() - {one.name for part in files.plan for one in part.stored}):
        beside = other.tensors.get(name)  # of a part that is not run, as the draft head
        own = files.tensors[name]
        if beside is None or beside.shape != own.shape or not {beside.dtype, own.dtype} <= set(PLAIN):
            continue
        compared[name] = Compared(own, beside)
        n, step = math.prod(own.shape[:-1]), max(1, BLOCK_WEIGHTS // own.shape[-1])
        for begin in range(0, n, step):
            end = min(begin + step, n)
            compared[name].add(values_of(own, begin, end), values_of(beside, begin, end), np.arange(begin, end))
    differing = {name: said for name, each in compared.items() if (said := each.judged())}
    for name, said in differing.items():
        check.wrong(f"{name}: {said}")
    check.figures = {name: {"error": each.error, "worst": each.worst} for name, each in compared.items()}
    exact = sum(not each.n_differing for each in compared.values())
    check.note(f"{len(compared)} tensors were compared with {other.name}; {exact} are equal to the bit")
    rounded = [each.error for name, each in compared.items() if each.n_differing and name not in differing]
    if rounded:
        check.note(f"{len(rounded)} differ as their formats round, by up to {max(rounded):.2%} of their length")


def _alike(files: Files, other: Files) -> list[Planned]:
    """The parts of a model. Where only the other has a head of its own, the embedding stands for one."""
    mine, theirs = (any(part.stored[0].name == "lm_head.weight" for part in of.plan) for of in (files, other))
    embed, norm, *layers = files.plan
    return [embed, norm, embed, *layers] if theirs and not mine else files.plan


def _sizes(part: Planned) -> tuple[int, ...]:
    target = part.target
    return (target.n_matrices, target.n, target.k) if isinstance(target, Matrix) else tuple(target.shape)


def _pairs(
    files: Files, other: Files, mine: Planned, theirs: Planned
) -> Iterator[tuple[tuple[str, str], Array, Array, Array]]:
    """Yields the names of my tensor and of the other's, numbers of rows in mine, and these rows of both."""
    target, both = mine.target, ((mine, files), (theirs, other))
    if not isinstance(target, Matrix):
        vectors = [_grouped(_vector(part, of.tensors), part.stored[0].name, of.shape) for part, of in both]
        yield (mine.stored[0].name, theirs.stored[0].name), np.arange(len(vectors[0])), vectors[0], vectors[1]
        return
    is_mixed = any(".linear_attn." in one.name for one in mine.stored)
    step = target.n if is_mixed else max(1, BLOCK_WEIGHTS // target.k)
    for i in range(target.n_matrices):
        for begin in range(0, target.n, step):
            pair, names, numbers = [], [], []
            for part, of in both:
                runs = list(part.runs(target.n_matrices, i, begin, min(begin + step, target.n)))
                first = part.stored[0].name
                rows = np.concatenate([values_of(of.tensors[name], a, b) for name, a, b in runs])
                pair.append(_grouped(rows, first, of.shape))
                order = _order(of.shape, first)
                at = order[1] if order is not None and order[0] == 0 else slice(None)
                names.append(np.repeat([name for name, *_ in runs], [b - a for _, a, b in runs])[at])
                numbers.append(np.concatenate([np.arange(a, b) for _, a, b in runs])[at])
            for name in dict.fromkeys(zip(*names, strict=True)):
                both_at = (names[0] == name[0]) & (names[1] == name[1])
                yield (str(name[0]), str(name[1])), numbers[0][both_at], pair[0][both_at], pair[1][both_at]


def _vector(part: Planned, tensors: Mapping[str, StoredTensor]) -> Array:
    (stored,) = part.stored
    rows = values_of(tensors[stored.name], 0, math.prod(stored.shape[:-1]))
    return rows.reshape(sum(stored.sizes), -1)


def _grouped(rows: Array, name: str, shape: ModelShape) -> Array:
    """Rows of a part whose first tensor has this name, with value heads grouped by key head."""
    order = _order(shape, name)
    return rows if order is None else np.take(rows, order[1], axis=order[0])


def _order(shape: ModelShape, name: str) -> tuple[int, Array] | None:
    """The axis of a part, and its indices in the order of value heads grouped by key head; None: it has that
    order.

    Head p of a file with tiled value heads belongs to key head p % Hk (models/gguf_config.py).
    """
    if not shape.tiled_value_heads or ".linear_attn." not in name:
        return None
    last, n_k, n_v = name.partition(".linear_attn.")[2], shape.gdn_n_k_heads, shape.gdn_n_v_heads
    heads = np.arange(n_v).reshape(-1, n_k).T.reshape(-1)
    wide = (heads[:, None] * shape.gdn_v_dim + np.arange(shape.gdn_v_dim)).reshape(-1)
    keys = np.arange(2 * shape.gdn_key_size)
    if last.startswith("in_proj_"):
        at, parts = 2 * shape.gdn_key_size, [keys]
        for each in (wide, wide, heads, heads):
            parts.append(at + each)
            at += len(each)
        return 0, np.concatenate(parts)
    if last.startswith("conv1d"):
        return 0, np.concatenate([keys, len(keys) + wide])
    if last in ("A_log", "dt_bias"):
        return 0, heads
    return (1, wide) if last.startswith("out_proj") else None


def ungrouped(shape: ModelShape) -> Callable[[str, Array], Array]:
    """Gives what brings a tensor of a file with tiled value heads into the order of the published
    checkpoint.
    """

    def change(name: str, values: Array) -> Array:
        last = name.partition(".linear_attn.")[2]
        found = _order(shape, name)
        if found is None:
            return values
        axis, order = found
        if last.startswith("in_proj_"):
            keys, wide = 2 * shape.gdn_key_size, shape.gdn_value_size
            begin = {"qkv": 0, "z": keys + wide, "b": keys + 2 * wide, "a": keys + 2 * wide + shape.gdn_n_v_heads}
            first = begin[last[8:].partition(".")[0]]
            order = order[first : first + len(values)] - first
        return np.take(values, order, axis=axis)

    return change
