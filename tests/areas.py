"""What a long test is about, and whether that changed since all of its tests passed: so a landing runs what it can break.

Tests that are marked `long` (whole grids of shapes, formats and cards, where a shorter test of the same runs each time) are left
out of `make test` while their area is as it was. tests/passed.json has the hash of each area; a run that passed with all of an
area's tests writes it (`--area NAME`), and the change that needed it takes it along. Comments and docstrings of Python are not in
the hash, as they change no result.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize
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


def without_prose(source: bytes) -> bytes:
    """Python source without its comments, its docstrings and those of attributes, and lines that are blank then."""
    lines = source.splitlines(keepends=True)
    spans = [  # of bytes: the first line from 1, its first column, the last line, the column behind the last
        (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            n, column = token.start
            spans.append((n, len(token.line[:column].encode()), n, len(lines[n - 1].rstrip(b"\r\n"))))
    for first, start, last, end in sorted(spans, reverse=True):
        lines[first - 1 : last] = [lines[first - 1][:start] + lines[last - 1][end:]]
    return b"".join(line.rstrip() + b"\n" for line in lines if line.strip())


def hash_of(area: str) -> str:
    """SHA-256 of the names and contents of an area's files."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in AREAS[area] for path in ROOT.glob(pattern) if counts(path)}):
        content = without_prose(path.read_bytes()) if path.suffix == ".py" else path.read_bytes()
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
