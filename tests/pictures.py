"""Files of pictures: of every kind that is read, and hostile ones, which are refused or read, soon."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image


def scene(width: int, height: int, bands: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, bands]: slopes, edges and noise."""
    y, x = np.mgrid[:height, :width]
    generator = np.random.default_rng(seed)
    planes = [(x * (3 + i) + y * (5 - i)) // 2 % 256 ^ (((x // 7 + y // 5) % 2) * 90) for i in range(bands)]
    noise = generator.integers(-9, 10, (height, width, bands))
    return np.clip(np.stack(planes, -1) + noise, 0, 255).astype(np.uint8)


def file_of(image: Image.Image, form: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def rgb(width: int = 61, height: int = 43, **how: Any) -> Image.Image:
    return Image.fromarray(scene(width, height, **how))


def chunk(kind: bytes, body: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2, data: bytes | None = None) -> bytes:
    """With any header, and chunks between it and the data, which is zeros of a few rows unless given."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(bytes(1 << 16)) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def zeros(n: int) -> bytes:
    """So many zeros, compressed."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 20)
    whole = b"".join(packer.compress(block) for _ in range(n >> 20))
    return whole + packer.compress(bytes(n % (1 << 20))) + packer.flush()


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def with_exif(exif: bytes) -> bytes:
    """A JPEG with this behind its `Exif` mark."""
    whole = file_of(rgb(), "JPEG")
    body = b"Exif\0\0" + exif
    return whole[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + whole[2:]


def tiff(**tags: tuple[int, int, int]) -> bytes:
    """A little-endian TIFF of one IFD; each entry is (tag, type, value), whatever it is called."""
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in sorted(tags.values()))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4) + bytes(64)


def tiff_of(width: int, height: int, **more: tuple[int, int, int]) -> bytes:
    base = {
        "width": (256, 4, width),
        "height": (257, 4, height),
        "bits": (258, 3, 8),
        "compression": (259, 3, 1),
        "photometric": (262, 3, 1),
        "offset": (273, 4, 100),
        "rows": (278, 4, height),
        "bytes": (279, 4, 64),
    }
    return tiff(**(base | more))


FORMS = {
    "png": ("PNG", {}),
    "jpeg": ("JPEG", {"quality": 90}),
    "progressive": ("JPEG", {"progressive": True}),
    "webp": ("WEBP", {"quality": 80}),
    "webp-lossless": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "avif": ("AVIF", {"quality": 80}),
}


def whole() -> dict[str, bytes]:
    """A file of each format."""
    return {name: file_of(rgb(), form, **how) for name, (form, how) in FORMS.items()}


def refused() -> Iterator[tuple[str, bytes, str]]:
    """Files that must be refused: a name, the bytes, and a part of what is said."""
    for name, data in whole().items():
        yield f"{name} of 12 bytes", data[:12], "."
        yield f"{name} cut in its header", data[:30], "."
        yield f"{name} cut in half", data[: len(data) // 2], "."
    jpeg, webp, gif, bmp = (whole()[name] for name in ("jpeg", "webp-lossless", "gif", "bmp"))
    sof = jpeg.index(b"\xff\xc0") + 5
    huge = "At most 67108864"
    yield "png of 10^10 pixels", png(100_000, 100_000), huge
    yield "png of 2^62 pixels", png(2**31 - 1, 2**31 - 1), huge
    yield "png of 8193 x 8192 pixels", png(8193, 8192), huge
    yield "jpeg of 65500 x 65500 pixels", patched(jpeg, sof, struct.pack(">HH", 65500, 65500)), huge
    yield "gif of 65535 x 65535 pixels", patched(gif, 6, struct.pack("<HH", 65535, 65535)), huge
    yield "bmp of 10^9 pixels", patched(bmp, 18, struct.pack("<ii", 50_000, 20_000)), huge
    yield "bmp of negative width", patched(bmp, 18, struct.pack("<ii", -61, 43)), "."
    yield "tiff of 10^10 pixels", tiff_of(100_000, 100_000), huge
    yield "tiff with its data elsewhere", tiff_of(60, 60, offset=(273, 4, 2**31)), "."
    yield "tiff of unknown compression", tiff_of(60, 60, compression=(259, 3, 34_999)), "."
    yield "tiff of 100 samples", tiff_of(60, 60, samples=(277, 3, 100)), "."
    yield "tiff of floats", file_of(Image.fromarray(np.ones((40, 40), np.float32)), "TIFF"), "32 bits"
    yield "webp that is larger than its data", patched(webp, 21, b"\xff\xff\xff\x0f"), "."
    yield "png without pixels", png(0, 5), "."
    yield "png of depth 3", png(40, 40, depth=3), "."
    yield "png of colour type 7", png(40, 40, colour=7), "."
    yield "png with too little data", png(400, 400, data=zlib.compress(bytes(100))), "."
    yield "png whose data are noise", png(400, 400, data=bytes(range(256)) * 50), "."
    yield "png with a broken checksum", patched(whole()["png"], 29, b"\0\0\0\0"), "."
    bomb = zeros(200 << 20)
    yield "png with a profile of 200 MB", png(40, 40, chunk(b"iCCP", b"icc\0\0" + bomb)), "."
    yield "png with a text of 200 MB", png(40, 40, chunk(b"zTXt", b"Comment\0\0" + bomb)), "."
    yield (
        "png with 90 texts of 1 MB",
        png(40, 40, *[chunk(b"zTXt", b"Comment\0\0" + zeros((1 << 20) - 99)) for _ in range(90)]),
        ".",
    )
    yield "a line", file_of(rgb(1, 201), "PNG"), "200 times"
    yield "a wide line", file_of(rgb(2000, 9), "PNG"), "200 times"
    yield "more than 20 MB", whole()["png"] + bytes(20_000_000), "larger than 20 MB"
    none = "no picture that can be read here"
    yield "nothing", b"", none
    yield "one byte", b"\xff", none
    yield "a text", b"a picture of a cat" * 99, none
    yield "noise", np.random.default_rng(0).bytes(5000), none
    yield (
        "svg",
        b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect/></svg>',
        none,
    )
    yield "svg of entities", b'<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><svg>&b;</svg>', none
    yield "pdf", b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\n", none
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", none
    yield "zip", b"PK\3\4" + bytes(100), none
    for form in ("PPM", "TGA", "ICO", "PCX", "SGI", "JPEG2000"):
        yield form.lower(), file_of(rgb(), form), none


def doubtful() -> Iterator[tuple[str, bytes]]:
    """Files that are refused or read, as their decoder can."""
    for name, data in whole().items():
        generator = np.random.default_rng(len(name))
        damaged = bytearray(data)
        for at in generator.integers(len(data) // 8, len(data), 12):
            damaged[at] = generator.integers(256)
        yield f"{name} with 12 wrong bytes", bytes(damaged)
    loop = struct.pack("<2sHIHHHIII", b"II", 42, 8, 1, 0x8769, 4, 1, 8, 8)
    yield "exif that leads to itself", with_exif(loop)
    yield "exif of 10^9 values", with_exif(struct.pack("<2sHIHHHIII", b"II", 42, 8, 1, 0x0112, 3, 10**9, 0, 0))
    yield "exif of noise", with_exif(np.random.default_rng(1).bytes(3000))
    yield "exif that is cut", with_exif(b"II*\0\x08")
    yield "exif of orientation 99", with_exif(struct.pack("<2sHIHHHIII", b"II", 42, 8, 1, 0x0112, 3, 1, 99, 0))
    notes = b"".join(b"\xff\xe5" + struct.pack(">H", 65535) + bytes(65533) for _ in range(200))
    jpeg = whole()["jpeg"]
    yield "jpeg with 13 MB of notes", jpeg[:2] + notes + jpeg[2:]
    yield "png with 15 MB of notes", png(40, 40, chunk(b"prVt", bytes(15 << 20)), data=zlib.compress(bytes(40 * 121)))
    yield "png of 8192 x 8192 pixels in 200 kB", png(8192, 8192, data=zeros((8192 * 3 + 1) * 8192 + (1 << 20)))
    yield (
        "png with colours that it has not",
        png(40, 40, chunk(b"PLTE", bytes(6)), colour=3, data=zlib.compress(b"\xff" * 41 * 40)),
    )
    frames = [rgb(200, 200, seed=i) for i in range(30)]
    yield "gif of 30 frames", file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "gif whose frame is elsewhere", patched(whole()["gif"], 6, struct.pack("<HH", 9, 9))
