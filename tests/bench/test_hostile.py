"""The bench of two keys finds what is wrong with a run, and with itself; and plays a short one through."""

from __future__ import annotations

import base64
import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.hostile import N_ALONE, Kind, Run, judged, png


def good() -> Run:
    times = [0.1] * N_ALONE
    run = Run({"chat": Kind(alone_s=[*times], beside_s=[0.6, 0.69, 0.2], own_s=[0.1, 0.2, 0.0])})
    run.tricks = {"schemas": {"200": 5, "429": 1000, "open": 2}, "large bodies": {"open": 1}}
    sizes = {"server": 70_000_000, "engine": 600_000_000, "engine_pid": 7}
    run.memory = [sizes | {"server": 40_000_000}, *[dict(sizes) for _ in range(5)]]
    return run


def late(run: Run, *answers: tuple[float, float]) -> None:
    """Adds answers that took so long, and the bench's own share of it."""
    for took_s, own_s in answers:
        run.kinds["chat"].beside_s.append(took_s)
        run.kinds["chat"].own_s.append(own_s)


def test_a_good_run_breaks_nothing() -> None:
    assert judged(good()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: late(run, (0.71, 0.005)), "took 0.71 s, and may take 0.70 s; for 0.01 s of it the bench waited"),
        (lambda run: late(run, (0.71, 0.2), (0.8, 0.0)), "2 are late, 1 without that"),
        (lambda run: setattr(run.kinds["chat"], "n_different", 1), "1 answers are others"),
        (lambda run: run.kinds["chat"].failures.append("HTTP 429"), "1 failed, as: HTTP 429"),
        (lambda run: run.kinds["chat"].beside_s.clear(), "too few"),
        (lambda run: run.kinds["chat"].alone_s.clear(), "too few"),
        (lambda run: run.tricks.update(pictures={"429": 9, "400": 3}), "the attack by pictures was none"),
        (lambda run: run.tricks["schemas"].update({"500": 1}), "1 errors inside the server"),
        (lambda run: run.tricks["schemas"].update({"lost": 999}), "the attack by schemas was none"),
        (lambda run: run.tricks.clear(), "there was no attack"),
        (lambda run: run.memory[-1].update(server=101_000_000), "the server's memory is up to 31 MB off"),
        (lambda run: run.memory[-1].update(engine_pid=8), "started again"),
        (lambda run: setattr(run, "n_restarts", 1.0), "started again, 1 times"),
        (lambda run: run.violations.append("not free"), "not free"),
    ],
)
def test_what_is_wrong_is_found(change: Any, said: str) -> None:
    run = copy.deepcopy(good())
    change(run)
    assert any(said in wrong for wrong in judged(run)), judged(run)


def test_its_picture_is_one() -> None:
    image = pytest.importorskip("PIL.Image")
    with image.open(io.BytesIO(base64.b64decode(png(96, 64).partition(",")[2]))) as picture:
        assert (picture.size, picture.mode, picture.getpixel((95, 63))) == ((96, 64), "RGBA", (0x40, 0x80, 0xC0, 0xFF))


@pytest.mark.long
def test_a_short_run(tmp_path: Path) -> None:
    """Whether promises are kept in it depends on the machine; that it sees them does not."""
    command = [sys.executable, "-m", "bench.hostile", "--minutes", "0.2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    report = json.loads(Path(line["file"]).read_text())
    assert report["tricks"].keys() >= {
        "stored responses", "sequences", "schemas", "large bodies", "waiting pictures", "pictures with endless trailers",
        "questions of events",
    }  # fmt: skip
    assert all(kind["beside_s"] and not kind["n_different"] for kind in report["kinds"].values()), report["violations"]
