"""What a long test is about, and whether that changed since all of its tests passed: so a landing runs what it can break.

Tests that are marked `long` (whole grids of shapes, formats and cards, where a shorter test of the same runs each time) are left
out of `make test` while their area is as it was. tests/passed.json has the hash of each area; a run that passed with all of an
area's tests writes it (`--area NAME`), and the change that needed it takes it along. What changes no result in Python, such as
comments and annotations, is not in the hash (`what_runs`).
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
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
        "deltic/verify/*.py",
        "tests/arm/*",
        "tests/cpu/*.py",
        "tests/reference/*.py",
    ),
    "gpu": (
        "deltic/ops/*.py",
        "deltic/ops/gpu/*",
        "deltic/models/**/*.py",
        "deltic/runtime/gpu/*.py",
        "tests/gpu/*",
        "tests/reference/*.py",
    ),
    "bench": ("bench/**/*.py", "deltic/bench/**/*.py", "training/*.py", "tests/bench/*.py"),
}
"""Globs of the files whose change brings back the long tests of an area: kernels with what calls and loads them, and the tests."""


def counts(path: Path) -> bool:
    """Whether a file that a glob found says anything of long tests: not one of other tests, nor of what a bench installs."""
    if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
        return False
    return path.is_file() and not (path.name.startswith("test_") and b"mark.long" not in path.read_bytes())


def what_runs(source: bytes) -> str:
    """Tokens of Python source without what changes no result.

    Left out are comments, docstrings and those of attributes, annotations of arguments, results and a function's own variables
    (nothing evaluates these; a kernel's `constexpr` stays), imports of types, and where lines are broken.
    """
    left_out: list[ast.expr | ast.stmt] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())) | ast.ImportFrom("typing" | "collections.abc"):
                left_out.append(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = [inner.annotation for inner in ast.walk(node) if isinstance(inner, (ast.arg, ast.AnnAssign))]
                left_out += [part for part in (*inner, node.returns) if part and "constexpr" not in ast.unparse(part)]
    lines = source.splitlines(keepends=True)
    for _, node in sorted({(node.lineno, node.col_offset): node for node in left_out}.items(), reverse=True):
        last = node.end_lineno or node.lineno
        head, tail = lines[node.lineno - 1][: node.col_offset], lines[last - 1][node.end_col_offset :]
        lines[node.lineno - 1 : last] = [head + tail]
    text = b"".join(lines).decode()
    rows, kept, depth, begin = text.splitlines(keepends=True), [], 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":  # from Python 3.12 on, a token each part: taken whole, as before it
            begin, depth = begin if depth else token.start, depth + 1
        elif name == "FSTRING_END":
            depth -= 1
            within = "".join(rows[begin[0] - 1 : token.end[0]])
            kept += [] if depth else [within[begin[1] : len(within) - len(rows[token.end[0] - 1]) + token.end[1]]]
        elif not depth and name not in ("COMMENT", "NL"):
            kept.append(token.string.strip() or name)
    return re.sub(r"\0,(?=\0[)\]}])", "", "\0".join(kept))


def hash_of(area: str) -> str:
    """SHA-256 of the names and contents of an area's files."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in AREAS[area] for path in ROOT.glob(pattern) if counts(path)}):
        content = what_runs(path.read_bytes()).encode() if path.suffix == ".py" else path.read_bytes()
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
