"""What is said of the package in one place holds in the others: version, compiler, instruction sets."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

import deltic
from deltic.machine import MAX_THREADS
from tests import wheel

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CMAKE = (ROOT / "CMakeLists.txt").read_text()


def test_the_version_is_said_once() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"] == "deltic/__init__.py"
    said = re.findall(r'^__version__ = "(.+)"$', (ROOT / "deltic/__init__.py").read_text(), re.MULTILINE)
    assert said == [deltic.__version__]
    assert f"## {deltic.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_compiler_is_pinned() -> None:
    """For developers, too: what runs in the emulator is what is shipped."""
    (compiler,) = (each for each in PROJECT["build-system"]["requires"] if each.startswith("ziglang"))
    assert re.fullmatch(r"ziglang==[\d.]+", compiler)
    assert compiler in PROJECT["dependency-groups"]["build"]


def test_every_instruction_set_is_compiled_and_carried() -> None:
    compiled = set(re.findall(r"^ *kernels\((\w+)", CMAKE, re.MULTILINE))
    chosen = set(
        re.findall(r'^    \("(\w+)", ', (ROOT / "deltic/ops/cpu/instruction_sets.py").read_text(), re.MULTILINE)
    )
    assert compiled == chosen == wheel.X86 | wheel.ARM


def test_the_pool_has_a_place_for_every_thread() -> None:
    assert f"constexpr int MAX_THREADS = {MAX_THREADS};" in (ROOT / "deltic/csrc/pool.cpp").read_text()


def test_the_glibc_is_the_same_everywhere() -> None:
    texts = CMAKE, (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    said = [re.findall(r"(?:gnu\.|manylinux_|glibc )2[._](\d+)", text) for text in texts]
    assert all(said) and {int(each) for found in said for each in found} == {wheel.GLIBC}


@pytest.mark.parametrize(
    "name", ["deltic-0.0.1-py3-none-manylinux_2_28_x86_64.whl", "deltic-0.1.0-cp311-cp311-linux_x86_64.whl"]
)
def test_a_wheel_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="not of this version"):
        wheel.processor_of(Path(name))


def test_a_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"deltic-{deltic.__version__}-py3-none-manylinux_2_28_x86_64.whl"
    head = f"deltic-{deltic.__version__}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{head}/WHEEL", "Root-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n")
        file.writestr(f"{head}/entry_points.txt", "[console_scripts]\ndeltic = deltic.__main__:main\n")
    with pytest.raises(AssertionError, match="not the kernels of every instruction set"):
        wheel.check_contents(path)
