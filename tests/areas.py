"""What a long test is about, and whether that changed since all of its tests passed: so a landing runs what it can break.

Tests that are marked `long` (whole grids of shapes, formats and cards, where a shorter test of the same runs each time) are left
out of `make test` while their area is as it was. tests/passed.json has the hash of each area; a run that passed with all of an
area's tests writes it (`--area NAME`), and the change that needed it takes it along.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / "tests" / "passed.json"

AREAS = {
    "cpu": (
        "CMakeLists.txt",
        "deltic/csrc/*",
        "deltic/ops/*.py",
        "deltic/ops/cpu/*.py",
        "deltic/models/**/*.py",
        "deltic/runtime/cpu/*.py",
        "tests/arm/*",
        "tests/cpu/*.py",
        "tests/reference/*.py",
    ),
    "gpu": (
        "deltic/ops/*.py",
        "deltic/ops/gpu/*.py",
        "deltic/models/**/*.py",
        "deltic/runtime/gpu/*.py",
        "tests/gpu/*.py",
        "tests/reference/*.py",
    ),
    "bench": ("bench/**/*.py", "deltic/bench/**/*.py", "training/*.py", "tests/bench/*.py"),
}
"""Globs of the files whose change brings back the long tests of an area: kernels with what calls and loads them, and the tests."""


def counts(path: Path) -> bool:
    """Whether a file that a glob found says anything of long tests: not one of other tests."""
    return path.is_file() and not (path.name.startswith("test_") and b"mark.long" not in path.read_bytes())


def hash_of(area: str) -> str:
    """SHA-256 of the names and contents of an area's files."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in AREAS[area] for path in ROOT.glob(pattern) if counts(path)}):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def passed() -> dict[str, str]:
    """The hash of each area when all of its tests passed last."""
    kept: dict[str, str] = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    return kept


def has_changed(area: str) -> bool:
    return passed().get(area) != hash_of(area)


def note(area: str) -> None:
    """All tests of an area passed."""
    PASSED.write_text(json.dumps(dict(sorted((passed() | {area: hash_of(area)}).items())), indent=1) + "\n")
