"""Damages a prefix cache on disk as no checksum can notice: for tests and the soak."""

from __future__ import annotations

import zlib
from pathlib import Path

from deltic.engine.cache.directory import HEADER, HEADER_BYTES, HEADER_CRC


def spoil(cache_dir: Path) -> int:
    """Fills every page and state under a `--cache-dir` with what is no finite number; returns how many files
    those were.

    The bytes are none in bfloat16 nor in float32, and the checksums are made right again. A server that runs
    meanwhile may read a file that is half done, which it notices.
    """
    files = [path for kind in ("page", "state") for path in sorted(cache_dir.rglob(f"*.{kind}"))]
    for path in files:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # the server that runs has dropped it
            continue
        *fields, _ = HEADER.unpack_from(data)
        payload = b"\xff" * (len(data) - HEADER_BYTES)
        header = HEADER.pack(*fields, zlib.crc32(payload))
        path.write_bytes((header + HEADER_CRC.pack(zlib.crc32(header))).ljust(HEADER_BYTES, b"\0") + payload)
    return len(files)
