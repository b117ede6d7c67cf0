"""What a built package must be: `python -m tests.wheel dist/deltic-*.whl`, which `make wheel` runs.

Its name and tags, what it carries, and what its compiled kernels need of a machine. Those for this machine's processor are loaded.
Needs auditwheel. No torch: the kernels are called as they are.
"""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deltic import __version__

X86 = {"baseline", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"}
ARM = {"baseline", "neon_dotprod", "neon_i8mm"}
LIBRARIES = {"x86_64": X86, "aarch64": ARM}
CARRIED = {
    "deltic/ops/gpu/hopper.cu",
    "deltic/ops/gpu/hopper_base.cu",
    "deltic/ops/gpu/hopper_codes.cu",
    "deltic/ops/gpu/hopper_few.cu",
    "deltic/ops/gpu/hopper_few_codes.cu",
    "deltic/py.typed",
    "deltic/server/page/index.html",
    "deltic/server/page/main.js",
    "deltic/server/page/page.css",
    "deltic/demo/model.safetensors",
    f"deltic-{__version__}.dist-info/licenses/LICENSE",
}
"""What an install runs on, or needs by law, beside code."""
GLIBC = 28
"""The oldest glibc 2 that the kernels may ask for."""


def processor_of(path: Path) -> str:
    """The processor in a wheel's name. Raises AssertionError if the rest of the name is not what it must be."""
    found = re.fullmatch(
        rf"deltic-{re.escape(__version__)}-py3-none-manylinux_2_{GLIBC}_(x86_64|aarch64)\.whl", path.name
    )
    assert found, f"{path.name}: not of this version, for any Python 3 and for glibc 2.{GLIBC}"
    return found[1]


def check_contents(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        tags = file.read(f"deltic-{__version__}.dist-info/WHEEL").decode()
        entries = file.read(f"deltic-{__version__}.dist-info/entry_points.txt").decode()
    assert f"Tag: {path.stem.split('-', 2)[2]}\n" in tags and "Root-Is-Purelib: false" in tags, tags
    assert "deltic = deltic.__main__:main" in entries, entries
    libraries = {f"deltic/ops/lib/cpu_{name}.so" for name in LIBRARIES[processor_of(path)]}
    assert {name for name in names if name.endswith(".so")} == libraries, "not the kernels of every instruction set"
    assert names >= CARRIED, f"without {CARRIED - names}"
    strange = {name for name in names if not name.startswith(("deltic/", f"deltic-{__version__}.dist-info/"))}
    assert not strange and not any("csrc" in name for name in names), f"too much: {strange or 'csrc'}"


def check_needs(path: Path) -> None:
    """Of the machine: no library beside glibc's, none of its functions newer than 2.28."""
    command = [sys.executable, "-m", "auditwheel", "show", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = " ".join(done.stdout.split())
    found = re.search(r'following platform tag: "manylinux_2_(\d+)_', said)
    assert found and int(found[1]) <= GLIBC, done.stdout + done.stderr
    needed = set(re.findall(r"[\w.+-]+\.so\.\d+", said))
    others = {name for name in needed if not re.match(r"lib(c|m|pthread|dl)\.|ld-linux", name)}
    assert not others, f"needs {others}"


def check_kernels(path: Path) -> None:
    """The plainest kernels of this machine's processor start and end threads."""
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(path) as file:
        library = ctypes.CDLL(file.extract("deltic/ops/lib/cpu_baseline.so", directory))
    assert [library.deltic_start_threads(n, None) for n in (3, 1)] == [0, 0]


def main(names: list[str]) -> None:
    for path in map(Path, names):
        processor = processor_of(path)
        check_contents(path)
        check_needs(path)
        if processor == platform.machine():
            check_kernels(path)
        print(f"{path.name}: as it should be")


if __name__ == "__main__":
    main(sys.argv[1:])
