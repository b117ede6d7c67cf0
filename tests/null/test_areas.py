"""Which tests a run leaves out: the long ones of an area that is as it was when they passed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import areas
from tests.conftest import runs_in_package

ROOT = Path(__file__).parents[2]
LONG = "import pytest\n\n\n@pytest.mark.long\ndef test_long():\n    pass\n\n\ndef test_short():\n    pass\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree, with all tests of its areas passed."""
    for name, text in {
        "CMakeLists.txt": "",
        "deltic/csrc/moe.cpp": "// experts\n",
        "deltic/server/app.py": "",
        "tests/cpu/test_moe.py": LONG,
        "tests/cpu/test_engine.py": "def test_engine(): pass\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(areas, "ROOT", tmp_path)
    monkeypatch.setattr(areas, "PASSED", tmp_path / "tests/passed.json")
    for area in areas.AREAS:
        areas.note(area)
    return tmp_path


def test_nothing_has_changed_where_all_passed(tree: Path) -> None:
    assert not any(map(areas.has_changed, areas.AREAS))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deltic/csrc/moe.cpp", {"cpu"}),
        ("deltic/csrc/new.cpp", {"cpu"}),
        ("deltic/ops/formats.py", {"cpu", "gpu"}),
        ("deltic/models/qwen/gpu.py", {"cpu", "gpu"}),
        ("deltic/runtime/gpu/text.py", {"gpu"}),
        ("tests/cpu/test_moe.py", {"cpu"}),
        ("tests/reference/layers.py", {"cpu", "gpu"}),
        ("bench/ops.py", {"bench"}),
        ("deltic/server/app.py", set()),
        ("tests/cpu/test_engine.py", set()),
    ],
)
def test_a_change_is_of_its_areas(tree: Path, name: str, changes: set[str]) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\nmore = 1\n")
    assert {area for area in areas.AREAS if areas.has_changed(area)} == changes


def test_what_changes_no_result_of_python_does_not_count() -> None:
    code = '''"""One.

    Two."""
import os  # what é is
from typing import Any
N: int = 3
"""Number of things."""


def f(a: Any = 1, block: tl.constexpr = 2) -> dict[str, Any]:  # "x"
    """Says # it."""
    # more
    text: str = """kept # too
  é"""; "gone"

    def inner(b: list[int]) -> None:
        return None

    return g(
        "a # b" + text,
    )
'''
    kept = '''import os
N: int = 3
def f(a: str = 1, block: tl.constexpr = 2) -> None:
    text: None = """kept # too
  é""";
    def inner(b: None) -> int:
        return None
    return g("a # b" + text)
'''
    assert areas.what_runs(code.encode()) == areas.what_runs(kept.encode())
    for change in (
        ("= 1", "= 2"),
        ("tl.constexpr", "int"),
        ("é", "e"),
        ("return None", "return 0"),
        ("N: int", "N: str"),
    ):
        assert areas.what_runs(kept.replace(*change).encode()) != areas.what_runs(kept.encode()), change


def test_a_name_counts_too(tree: Path) -> None:
    (tree / "deltic/csrc/moe.cpp").rename(tree / "deltic/csrc/experts.cpp")
    assert areas.has_changed("cpu")


def test_what_a_bench_installs_does_not_count(tree: Path) -> None:
    (tree / "bench/.peers-venv").mkdir(parents=True)
    (tree / "bench/.peers-venv/llama.py").write_text("")
    assert not areas.has_changed("bench")
    (tree / "bench/peers.py").write_text("")
    assert areas.has_changed("bench")


def test_nothing_passed_where_nothing_is_noted(tree: Path) -> None:
    areas.PASSED.unlink()
    assert areas.has_changed("cpu")


def test_long_tests_run_when_their_area_changed_and_then_no_more(tmp_path: Path) -> None:
    """With the real conftest, in a tree of its own."""
    for name in ("tests/conftest.py", "tests/areas.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["long: long"]\n'
    )
    (tmp_path / "tests/cpu").mkdir()
    (tmp_path / "tests/cpu/test_moe.py").write_text(LONG)

    (tmp_path / "tests/cpu/test_linear.py").write_text(LONG)

    def tried(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' take longer than the tests
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)

    def run(*flags: str) -> str:
        done = tried(*flags, "tests/cpu")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    assert "test_linear.py missing" in tried("--area", "cpu", "tests/cpu/test_moe.py").stderr
    assert "-k missing" in tried("--area", "cpu", "-k", "long", "tests/cpu").stderr
    assert run("--area", "cpu").startswith("4 passed")
    assert run("--area", "cpu").startswith("2 passed, 2 deselected")
    assert run("--area", "cpu", "--everything").startswith("4 passed")
    assert run().startswith("4 passed")


def imported_at_top(path: Path) -> set[str]:
    """Names of modules that a file of tests imports as it is read, and that those of tests/ import which it names."""
    names = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {name: ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")}
    return names.union(*(imported_at_top(file) for name, file in files.items() if file.exists()))


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "tests").glob("*/test_*.py")) if runs_in_package(path)],
    ids=lambda p: p.name,
)
def test_what_runs_beside_the_package_needs_no_torch(path: Path) -> None:
    """Without torch an import ends the whole run there: it comes last in CI."""
    needed = {name.partition(".")[0] for name in imported_at_top(path)}
    assert not needed & {"torch", "transformers", "triton", "bench"}
