"""`deltic bench gpu` starts kernels: its tests have the device of tests/gpu, and the interpreter as it is mended there."""

from __future__ import annotations

from tests.gpu.conftest import device, served_levers  # noqa: F401
