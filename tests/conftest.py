"""Without a GPU, Triton's kernels are interpreted. That is decided when Triton is first imported, which other libraries do too: so
it is said here, before any test is read, and without torch, which some tests do without."""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path("/dev").glob("nvidia*")) and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
