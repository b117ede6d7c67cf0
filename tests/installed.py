"""The package as its users have it: `python -m tests.installed dist/deltic-*.whl`, which `make test-package` runs.

An empty environment, no compiler on the PATH, no torch. The package serves from there; then the tests that need neither torch nor
this tree run there (tests/conftest.py). They lie beside a copy of the documents, and not beside `deltic`, so that the installed one
is tested.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.install import first_piece, install, server, until_ready, user_environment

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "installed"
COMPILER = re.compile(
    r"(.*-)?(c\d\d|cc|c\+\+|cpp|gcc|g\+\+|clang(\+\+)?|tcc|zig|nvcc|rustc|ld(\.\w+)?|as|make|cmake|ninja)(-[\d.]+)?"
)


def path_without_compilers() -> str:
    """A directory of links to every program on the PATH that makes none."""
    links = PLACE / "bin"
    links.mkdir(parents=True)
    for directory in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in directory.iterdir() if directory.is_dir() and directory != Path(sys.executable).parent else ():
            link = links / program.name
            if not COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    assert not any(shutil.which(name, path=str(links)) for name in ("cc", "c++", "gcc", "g++", "clang", "ld", "zig"))
    return str(links)


def main(wheel: Path) -> int:
    shutil.rmtree(PLACE, ignore_errors=True)
    os.environ["PATH"] = path = path_without_compilers()
    env = PLACE / "env"
    install("pip --no-compile", env, wheel)
    python = str(env / "bin" / "python")
    code = "import importlib.util as u; print(any(u.find_spec(name) for name in ('torch', 'ziglang')))"
    assert subprocess.check_output([python, "-c", code], text=True) == "False\n", "torch or a compiler was installed"
    with server(env) as (port, process):
        until_ready(port, process)
        first_piece(port)
    print("the package serves: no torch, no compiler", flush=True)

    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-input"]
    subprocess.run([*pip, f"{wheel}[speech,video]", "--group", "test-package"], check=True, cwd=ROOT)
    subprocess.run([*pip, "--no-deps", "--group", "published"], check=True, cwd=ROOT)
    for name in ("tests", "docs", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, PLACE / name)
    environment = user_environment() | {"PATH": f"{env / 'bin'}{os.pathsep}{path}"}
    tests = [python, "-m", "pytest", "--in-package", "tests/null", "tests/cpu"]
    return subprocess.run(tests, cwd=PLACE, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
