"""Layouts of quantised matrices in safetensors files, one class a layout. Each reads ranges of rows.

    Fp8       weight F8_E4M3, with scales of blocks of 128 x 128, of rows or of the tensor (Qwen's FP8,
              compressed-tensors, ModelOpt)
    Fp4       weight_packed (compressed-tensors) or weight (ModelOpt) U8: two e2m1, the lower nibble first;
              scales are e4m3 and one of the tensor (NVFP4), or e8m0 (MXFP4)
    Packed    weight_packed I32: 4 or 8 bits along K, the lowest first (compressed-tensors, pack-quantized)
    Int8      weight I8 (compressed-tensors, int-quantized; ModelOpt)
    Columns   qweight I32, of the transpose: along N (AutoAWQ) or along K (GPTQ, AutoRound)

Stacked experts [E, N, K] are rows like all others, with scales [E, ...] beside them. Where more weights share
a scale than the format has in a group, each of their groups gets it, which changes no value.

Sources: Qwen's FP8 releases, and, read for the layouts, the packages compressed-tensors 0.20, AutoAWQ 0.2.9,
GPTQModel 7.7, auto-round 0.16 and nvidia-modelopt 0.47.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltic.models.fields import CheckpointError
from deltic.models.mapped import Header, MappedFiles
from deltic.ops.arrays import Array
from deltic.ops.formats import WEIGHT_FORMATS, Quantised, WeightFormat

PLAIN = ("BF16", "F16", "F32")
"""Types of values that need no scale, and of most scales."""

_BLOCK = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word's eight that the nibbles hold, from the lowest nibble on."""

_LESS_ONE = {
    "gptq": True,
    "gptq_v2": False,
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round:gptqmodel": False,
    "auto_round": False,
}
"""Layouts like GPTQ's, and whether they store zeros less 1, as its first version does."""

Rows = tuple[Array, Array, Array | None, Array | None]
"""Codes, scales, least values and outer scales of rows."""


@dataclass(frozen=True)
class Said:
    """Settings of a quantization_config that tensors do not tell."""

    is_symmetric: bool
    """GPTQ, AWQ, AutoRound: the zero of every matrix is half the range."""
    has_zeros: bool
    """compressed-tensors: every group of integers is asymmetric."""
    packing: str
    """GPTQ's checkpoint_format, AutoRound's packing_format."""
    bits: int | None
    orders: bool
    """desc_act; compressed-tensors' actorder by groups, of every group."""
    kind: str
    """AutoRound's data_type."""
    divides: bool
    """GPTQModel's FP8: scales divide."""

    @classmethod
    def by(cls, config: Mapping[str, object]) -> Said:
        bits = config.get("bits")
        rules = [config.get(name) for name in ("dynamic", "extra_config")]
        exceptions = [rule for each in rules if isinstance(each, Mapping) for rule in each.values()]
        has_zeros = config.get("sym") is False or config.get("zero_point") is True
        has_zeros |= any(isinstance(rule, Mapping) and rule.get("sym") is False for rule in exceptions)
        groups = config.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, Mapping) else []
        weights = [group.get("weights") for group in groups if isinstance(group, Mapping)]
        integers = [each for each in weights if isinstance(each, Mapping) and each.get("type", "int") == "int"]
        if "auto-round" in str(config.get("quant_method")):
            packing = config.get("packing_format") or "auto_round:gptq"
        else:
            packing = config.get("checkpoint_format") or config.get("format") or "gptq"
        return cls(
            is_symmetric=(config.get("sym") is True or config.get("zero_point") is False) and not has_zeros,
            has_zeros=bool(integers) and all(each.get("symmetric") is False for each in integers),
            packing=str(packing),
            bits=bits if isinstance(bits, int) else None,
            orders=bool(config.get("desc_act"))
            or (
                bool(weights) and all(isinstance(each, Mapping) and each.get("actorder") == "group" for each in weights)
            ),
            kind=str(config.get("data_type")),
            divides=config.get("weight_scale_semantics") == "inverse",
        )


@dataclass(slots=True)
class Module:
    """The tensors that make one matrix: the name of each, by its role (`weight`, `weight_scale`, ...)."""

    files: MappedFiles
    headers: Mapping[str, Header]
    config: Said
    parts: dict[str, str]
    used: set[str] = field(default_factory=set)

    def where(self, role: str) -> str:
        name = self.parts[role]
        return f"{self.headers[name].file}: tensor {name!r}"

    def error(self, role: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where(role)} {text}")

    def take(self, role: str, *dtypes: str, of: str = "") -> Header:
        """The header of a part, of one of the dtypes. of: the role that needs it. Raises CheckpointError."""
        if role not in self.parts:
            raise self.error(of, f"has no {role} beside it; is the download complete?")
        header = self.headers[self.parts[role]]
        if header.dtype not in dtypes:
            raise self.error(role, f"has the wrong dtype: expected {' or '.join(dtypes)}, found {header.dtype}")
        self.used.add(role)
        return header

    def shaped(self, role: str, header: Header, *shapes: Sequence[int]) -> Header:
        """The header, if it has one of the shapes. Raises CheckpointError."""
        if header.shape not in map(tuple, shapes):
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
            raise self.error(role, f"has the wrong shape: expected {expected}, found {list(header.shape)}")
        return header

    def matrix(self, role: str, *dtypes: str) -> Header:
        """The header of a matrix, or of a stack of them."""
        header = self.take(role, *dtypes)
        if len(header.shape) not in (2, 3) or not all(header.shape):
            raise self.error(
                role, f"has the wrong shape: expected [N, K] or [experts, N, K], found {list(header.shape)}"
            )
        return header


@dataclass(slots=True)
class Plain:
    """Values that are not quantised."""

    files: MappedFiles
    name: str
    header: Header
    format = None

    @property
    def where(self) -> str:
        return f"{self.header.file}: tensor {self.name!r}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.header.shape

    @property
    def dtype(self) -> str:
        return self.header.dtype

    def read(self, begin: int, end: int) -> Array:
        return self.files.read(self.header.rows(begin, end))


class Stored:
    """A quantised matrix, or a stack of them. `rows` of a subclass reads."""

    kind: str
    """Kind, as the names of published formats tell them apart: fp8, nvfp4, mxfp4, packed, int8, awq, gptq."""
    zero: Header | None = None
    spread: tuple[int, int]
    """Rows and columns that share a scale of the file; 0: all of them."""

    def __init__(self, module: Module, role: str, shape: tuple[int, ...], format: WeightFormat) -> None:
        self.files, self.where, self.shape, self.format = module.files, module.where(role), shape, format

    @property
    def dtype(self) -> str:
        return self.format.name

    @property
    def is_integer(self) -> bool:
        return self.format.codes not in ("e4m3", "e2m1")

    def rows(self, begin: int, end: int) -> Rows:
        raise NotImplementedError

    def read(self, begin: int, end: int) -> Quantised:
        codes, scale, least, outer = self.rows(begin, end)
        kind = self.format.scales
        if self.format.codes == "e4m3" and ((codes & np.uint8(127)).max(initial=0) == 127):
            raise CheckpointError(f"{self.where} has weights that are not numbers (NaN); get the checkpoint anew")
        if kind == "e8m0":
            finite = (scale != 255).all()
        elif kind == "e4m3":
            assert outer is not None
            finite = ((scale & 127) != 127).all() and np.isfinite(outer).all() and outer[:, 1].all()
        else:
            finite = np.isfinite(scale).all()
        if not finite:
            raise CheckpointError(f"{self.where} has scales that are not finite; get the checkpoint anew")
        return Quantised(self.format, codes, scale, least, outer)


class Fp8(Stored):
    """e4m3. Scales of each matrix: [1], [N], [N, 1], [ceil(N / 128), ceil(K / 128)] or [N, ceil(K / 128)]."""

    kind = "fp8"

    def __init__(self, module: Module) -> None:
        header = module.matrix("weight", "F8_E4M3")
        roles = [role for role in ("weight_scale_inv", "weight_scale") if role in module.parts]
        if len(roles) != 1:
            found = "two scales, weight_scale_inv and weight_scale" if roles else "no weight_scale_inv or weight_scale"
            raise module.error("weight", f"is F8_E4M3 and has {found}; it needs one, is the download complete?")
        if module.headers[module.parts[roles[0]]].dtype in ("U8", "F8_E8M0"):
            raise module.error("weight", "is MXFP8 (e4m3 with e8m0 scales), which is not supported; use FP8 or MXFP4")
        if module.config.divides:
            raise module.error(roles[0], "divides (weight_scale_semantics 'inverse'), which is not supported")
        self.codes, self.scale = header, module.take(roles[0], *PLAIN)
        self.n, k = header.shape[-2:]
        groups, n_blocks = -(-k // _BLOCK), -(-self.n // _BLOCK)
        n_experts = header.shape[0] if len(header.shape) == 3 else 1
        dims = self.scale.shape
        if len(dims) == 4 and dims[1] == dims[3] == 1:  # as ModelOpt's blocks are
            dims = (dims[0], dims[2])
        size = math.prod(dims)
        if size in (1, n_experts):
            self.size: tuple[int, ...] = (size, 1, 1)
        else:
            inner = dims[1:] if len(header.shape) == 3 else dims
            inner = (*inner, 1) if len(inner) == 1 else inner
            if inner not in ((self.n, 1), (self.n, groups), (n_blocks, groups)) or size != n_experts * math.prod(inner):
                raise module.error(
                    roles[0],
                    f"has the wrong shape for weights {list(header.shape)}: found {list(self.scale.shape)}; supported is "
                    f"one scale a tensor, a row, or a block of 128 x 128 ({[n_blocks, groups]} a matrix)",
                )
            self.size = (n_experts, *inner)
        _, n_scales, n_columns = self.size
        rows = 1 if n_scales == self.n else 0 if n_scales == 1 else _BLOCK
        self.spread = rows, 0 if n_columns == 1 else _BLOCK
        in_groups = self.size[2] == groups and (
            groups > 1 or 1 < self.size[1] < self.n or roles[0] == "weight_scale_inv"
        )
        name = "fp8-row" if not in_groups else "fp8-group" if rows == 1 else "fp8"
        super().__init__(module, "weight", header.shape, WEIGHT_FORMATS[name])

    def rows(self, begin: int, end: int) -> Rows:
        n_sets, n_scales, n_columns = self.size
        height = self.spread[0] or self.n
        expert, row = np.divmod(np.arange(begin, end), self.n)
        scale = self.files.read(self.scale).reshape(n_sets * n_scales, n_columns)
        scale = scale[(expert if n_sets > 1 else 0) * n_scales + row // height].astype(np.float32)
        return self.files.read(self.codes.rows(begin, end)).view(np.uint8), scale, None, None


class Fp4(Stored):
    """e2m1: NVFP4 (weight_global_scale divides, weight_scale_2 multiplies) and MXFP4."""

    def __init__(self, module: Module, role: str) -> None:
        self.codes = header = module.matrix(role, "U8")
        lead, k = header.shape[:-1], 2 * header.shape[-1]
        self.scale = module.take("weight_scale", "F8_E4M3", "U8", "F8_E8M0", of=role)
        is_nv = self.scale.dtype == "F8_E4M3"
        kind = module.config.kind
        if kind.startswith("mx_int"):
            raise module.error(role, f"holds {kind}, which is not supported; supported of U8: NVFP4, MXFP4")
        format = WEIGHT_FORMATS["NVFP4" if is_nv else "MXFP4"]
        self.kind, self.spread = format.name.lower(), (1, format.group)
        if k % format.group:
            raise module.error(role, f"has {k} columns, which are not whole groups of {format.group} ({format.name})")
        module.shaped("weight_scale", self.scale, (*lead, k // format.group))
        self.outer: Header | None = None
        if is_nv:
            self.divides = "weight_global_scale" in module.parts
            outer_role = "weight_global_scale" if self.divides else "weight_scale_2"
            self.outer = module.take(outer_role, "F32", of=role)
            # A stack has one for all, one an expert, or one for gate and one for up of each.
            counts = (1, lead[0], 2 * lead[0]) if len(lead) == 2 else (1,)
            n, n_rows = math.prod(self.outer.shape), math.prod(lead)
            if n not in counts or n_rows % n:
                expected = " or ".join(map(str, counts))
                raise module.error(
                    outer_role, f"has the wrong shape: expected {expected} values, found {list(self.outer.shape)}"
                )
            self.share = n_rows // n
        super().__init__(module, role, (*lead, k), format)

    def rows(self, begin: int, end: int) -> Rows:
        codes = _nibbles(self.files.read(self.codes.rows(begin, end)))
        scale, outer = self.files.read(self.scale.rows(begin, end)).view(np.uint8), None
        if self.outer is not None:
            outer = np.ones((end - begin, 2), np.float32)
            outer[:, int(self.divides)] = self.files.read(self.outer).ravel()[np.arange(begin, end) // self.share]
        return codes, scale, None, outer


class _Integers(Stored):
    """Integers of 4 or 8 bits with scales (and codes of 0) of groups along K."""

    scale: Header
    repeat: int
    """Groups of the format that share a scale of the file."""
    bits: int

    def choose(self, module: Module, role: str, shape: tuple[int, ...], n_groups: int, scale: str) -> None:
        """Takes the format for n_groups scales along K. scale: their role. Raises CheckpointError."""
        k, dtype = shape[-1], self.scale.dtype
        group = k // n_groups
        if k % n_groups or (group not in (32, 64) and group % _BLOCK and n_groups > 1):
            found = f"{n_groups} groups of its {k} columns" if k % n_groups else f"groups of {group}"
            raise module.error(role, f"has {found}; supported are groups of 32, 64, multiples of 128, and one a row")
        size = group if group in (32, 64) else _BLOCK
        self.repeat, self.spread = -(-group // size), (1, group if n_groups > 1 else 0)
        kind = {"BF16": "bfloat16", "F16": "float16"}.get(dtype)
        name = f"int{self.bits}-g{size}-{kind}{'' if self.zero is None else '.zero'}"
        if kind is None:
            if self.bits != 8 or size != _BLOCK or self.zero is not None:
                raise module.error(scale, f"is F32 beside int{self.bits} in groups of {group}; supported: BF16, F16")
            name = "int8"
        Stored.__init__(self, module, role, shape, WEIGHT_FORMATS[name])

    def scales_of(self, module: Module, role: str, lead: tuple[int, ...]) -> int:
        """Takes weight_scale, [*lead, groups], [*lead] or [1]; how many groups. Raises CheckpointError."""
        self.scale = module.take("weight_scale", *PLAIN, of=role)
        shape = self.scale.shape
        n_groups = shape[-1] if len(shape) == len(lead) + 1 else 1
        if math.prod(shape) == 1:
            n_groups = 1
        else:
            module.shaped("weight_scale", self.scale, lead, (*lead, max(n_groups, 1)))
        return n_groups

    def rows_of(self, header: Header, begin: int, end: int) -> Array:
        """Rows of scales [rows, groups], [rows] or one for all."""
        if math.prod(header.shape) == 1:
            return np.repeat(self.files.read(header).reshape(1, 1), end - begin, axis=0)
        flat = header.shape if len(header.shape) == len(self.shape) else (*header.shape, 1)
        return self.files.read(Header(header.file, flat, header.dtype, header.begin, header.end).rows(begin, end))

    def shared(self, part: Array) -> Array:
        """Scales or zeros [n, groups of the file] as the format has them, [n, its groups]."""
        return part if self.repeat == 1 else np.repeat(part, self.repeat, axis=1)

    def signed(self, codes: Array) -> Array:
        """Unsigned codes of 8 bits as int8's bits; those of 4 bits as they are."""
        return codes ^ np.uint8(128) if self.bits == 8 else codes


class Packed(_Integers):
    """compressed-tensors' pack-quantized: words of 4 or 8 bits along K, zeros packed along N."""

    kind = "packed"

    def __init__(self, module: Module) -> None:
        role = "weight_packed"
        self.codes = header = module.matrix(role, "I32")
        lead, n_words = header.shape[:-1], header.shape[-1]
        listed = module.shaped("weight_shape", module.take("weight_shape", "I64", "I32", of=role), (len(lead) + 1,))
        shape = tuple(int(size) for size in module.files.read(listed))
        k = shape[-1]
        if shape[:-1] != lead or k < 1:
            raise module.error("weight_shape", f"says {list(shape)}, but {role} has {list(lead)} rows")
        bits = next((bits for bits in range(1, 9) if -(-k * bits // 32) == n_words), None)
        if bits not in (4, 8):
            held = (
                f"{bits} bits a weight; supported are 4 and 8" if bits else f"not what weight_shape {list(shape)} says"
            )
            raise module.error(role, f"of shape {list(header.shape)} holds {held}")
        self.bits = bits
        n_groups = self.scales_of(module, role, lead)
        if "weight_zero_point" in module.parts:
            n = -(-lead[-1] * bits // 32)
            self.zero = module.take("weight_zero_point", "I32")
            module.shaped("weight_zero_point", self.zero, (*lead[:-1], n, n_groups))
            if lead[:-1] and lead[-1] * bits % 32:
                raise module.error("weight_zero_point", f"is stacked of {lead[-1]} rows, which fill no whole words")
        elif module.config.has_zeros:
            raise module.error(role, "has no weight_zero_point beside it, though config.json says symmetric: false")
        self.choose(module, role, shape, n_groups, "weight_scale")
        if "weight_g_idx" in module.parts:
            order = module.shaped("weight_g_idx", module.take("weight_g_idx", "I32"), (k,))
            check_order(module.files, order, k // n_groups, module.where("weight_g_idx"))
        elif module.config.orders:
            raise module.error(role, "has no weight_g_idx beside it, though config.json says actorder: group")

    def rows(self, begin: int, end: int) -> Rows:
        packed = self.files.read(self.codes.rows(begin, end)).view(np.uint8)
        codes = self.signed(_nibbles(packed) if self.bits == 4 else packed)[:, : self.shape[-1]]
        zero = None
        if self.zero is not None:
            share = 32 // self.bits
            first, last = begin // share, -(-end // share)
            words = self.files.read(self.zero.rows(first, last)).T
            zero = _columns(words, self.bits, range(share))[begin - first * share : end - first * share]
            zero = self.shared(self.signed(zero))
        return codes, self.shared(self.rows_of(self.scale, begin, end)), zero, None


class Int8(_Integers):
    """weight I8, with zeros of I8 or without."""

    kind = "int8"
    bits = 8

    def __init__(self, module: Module) -> None:
        self.codes = header = module.matrix("weight", "I8")
        n_groups = self.scales_of(module, "weight", header.shape[:-1])
        if "weight_zero_point" in module.parts:
            zero = module.take("weight_zero_point", "I8")
            self.zero = module.shaped("weight_zero_point", zero, self.scale.shape)
        self.choose(module, "weight", header.shape, n_groups, "weight_scale")

    def rows(self, begin: int, end: int) -> Rows:
        codes = self.files.read(self.codes.rows(begin, end)).view(np.uint8)
        zero = None if self.zero is None else self.shared(self.rows_of(self.zero, begin, end)).view(np.uint8)
        return codes, self.shared(self.rows_of(self.scale, begin, end)), zero, None


class Columns(_Integers):
    """AutoAWQ's and GPTQ's: all of the transpose, scales [groups, N], qzeros packed along N.

    AWQ packs along N as well, in an order of its own; GPTQ along K. Its first version stores zeros less 1.
    """

    def __init__(self, module: Module) -> None:
        self.codes = header = module.take("qweight", "I32")
        self.scale = module.take("scales", *PLAIN, of="qweight")
        if len(header.shape) != 2 or len(self.scale.shape) != 2 or not all(header.shape + self.scale.shape):
            raise module.error(
                "qweight", f"of shape {list(header.shape)} has scales {list(self.scale.shape)}, not [G, N]"
            )
        n_groups, n = self.scale.shape
        self.is_awq = header.shape[1] * 8 == n
        self.kind = "awq" if self.is_awq else "gptq"
        if not self.is_awq and header.shape[1] != n:
            raise module.error(
                "qweight",
                f"has the wrong shape for scales {list(self.scale.shape)}: found {list(header.shape)}; supported are "
                f"AWQ's GEMM layout of 4 bits [K, {n // 8}] and GPTQ's [K / 8 or K / 4, {n}]",
            )
        self.bits = self.bits_of(module, n_groups, n)
        k = header.shape[0] * (1 if self.is_awq else 32 // self.bits)
        if not self.is_awq and module.config.packing not in _LESS_ONE:
            known = ", ".join(_LESS_ONE)
            raise module.error(
                "qweight",
                f"has format {module.config.packing!r} in config.json (checkpoint_format, packing_format); supported are {known}",
            )
        self.adds_one = not self.is_awq and _LESS_ONE[module.config.packing]
        self.choose(module, "qweight", (n, k), n_groups, "scales")
        self.order = None
        if "g_idx" in module.parts:
            self.order = module.shaped("g_idx", module.take("g_idx", "I32", "I64"), (k,))
            self.group, self.order_where = k // n_groups, module.where("g_idx")
            if module.config.orders:
                check_order(module.files, self.order, self.group, self.order_where)
        elif module.config.orders and not self.is_awq:
            raise module.error("qweight", "has no g_idx beside it, though config.json says desc_act")

    def bits_of(self, module: Module, n_groups: int, n: int) -> int:
        """Takes qzeros; the bits of a weight. Raises CheckpointError."""
        symmetric = module.config.is_symmetric
        self.zeros: Header | None = None
        if "qzeros" in module.parts:
            self.zeros = module.take("qzeros", "I32")
            n_words = self.zeros.shape[-1] if self.zeros.shape else 0
            bits = next((bits for bits in range(1, 9) if -(-n * bits // 32) == n_words), None)
            module.shaped("qzeros", self.zeros, (n_groups, -(-n * (bits or 4) // 32)))
            self.zero = None if symmetric else self.zeros
        else:
            bits = 4 if self.is_awq else module.config.bits
            if not symmetric:
                raise module.error("qweight", "has no qzeros beside it, and config.json does not say sym: true")
        if bits is None or bits not in ((4,) if self.is_awq else (4, 8)):
            raise module.error("qweight", f"holds {bits} bits a weight; supported are 4, and of GPTQ 4 and 8")
        return bits

    def rows(self, begin: int, end: int) -> Rows:
        share = 32 // self.bits
        first, last = begin // share, -(-end // share)
        cut = slice(begin - first * share, end - first * share)
        if self.order is not None:
            check_order(self.files, self.order, self.group, self.order_where)
        order = _AWQ_ORDER if self.is_awq else tuple(range(share))
        words = self.files.read(self.codes)
        if self.is_awq:
            codes = _columns(words[:, first:last], self.bits, order)[cut]
        else:
            packed = np.ascontiguousarray(words[:, begin:end].T).view(np.uint8)
            codes = self.signed(_nibbles(packed) if self.bits == 4 else packed)
        scale = np.ascontiguousarray(self.files.read(self.scale)[:, begin:end].T)
        zero = None
        if self.zeros is not None:
            words = self.files.read(self.zeros)[:, first:last].view(np.uint32)
            if self.adds_one:  # to whole words, as GPTQModel does: what one zero lacks, the next has too much
                words = words + np.uint32(sum(1 << self.bits * i for i in range(share)))
            zero = _columns(words, self.bits, order)[cut]
            if self.zero is None:
                if (zero != 1 << (self.bits - 1)).any():
                    raise CheckpointError(
                        f"{self.where} has zeros other than {1 << (self.bits - 1)}, but config.json says that it is symmetric "
                        "(sym, zero_point)"
                    )
                zero = None
            else:
                zero = self.shared(self.signed(zero))
        return codes, self.shared(scale), zero, None


def check_order(files: MappedFiles, order: Header, group: int, where: str) -> None:
    """Raises CheckpointError unless column i belongs to group i // group (or is -1, which says no order)."""
    found = files.read(order)
    if (found != np.arange(len(found)) // group).any() and (found != -1).any():
        raise CheckpointError(
            f"{where} orders columns by activation (desc_act, actorder), which is not supported; "
            "use a checkpoint that was quantised without"
        )


def _nibbles(packed: Array) -> Array:
    """uint8 [n, 2k] of uint8 [n, k], the lower nibble first."""
    wide = packed.astype(np.uint16)
    wide |= wide << np.uint16(4)
    wide &= np.uint16(0x0F0F)
    return wide.view(np.uint8)


def _columns(words: Array, bits: int, order: Sequence[int]) -> Array:
    """uint8 [n, r] of words [r, n * bits / 32], each with columns in this order, from the lowest bits on."""
    words = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((len(words), len(order), words.shape[1]), np.uint8)
    for i, column in enumerate(order):
        codes[:, column] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    return codes.reshape(-1, words.shape[1])
