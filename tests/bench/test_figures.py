"""Plans of runs: their commands would begin, steps run side by side on places of their own, and a cut run is no run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import figures, gpu_tables, tables
from bench.check import check, parsed
from bench.gpu_tables import goes_by_host, is_plain
from bench.kept import Runs
from bench.steps import ALL, Figures, Step, places, visible_gpus
from deltic.bench.provenance import writer


def python(code: str) -> str:
    return shlex.join(["python", "-c", code.replace("{", "{{").replace("}", "}}")]).replace("OUT", "{out}")


def figures_of(path: Path, **more: Any) -> Figures:
    scratch = path / "scratch"
    scratch.mkdir()
    (path / "out").mkdir()
    return Figures(**{"plan": "p", "out": path / "out", "scratch": scratch, "minutes": 1.0, "words": {}} | more)


@pytest.mark.parametrize("plan", sorted(figures.PLANS))
def test_every_step_can_be_chosen(plan: str) -> None:
    steps = figures.PLANS[plan]
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert figures.chosen(steps, step.name, "") == [step]
        assert step not in figures.chosen(steps, "", step.name)
    with pytest.raises(ValueError, match="no step nothing; there are"):
        figures.chosen(steps, "nothing", "")


@pytest.mark.parametrize("plan", sorted(figures.PLANS))
def test_every_command_would_begin(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    if plan != "cpu":
        pytest.importorskip("triton")
    assert figures.main([plan, "--check"]) == 0
    told = capsys.readouterr().out
    for step in figures.PLANS[plan]:
        assert all(command in told for command in step.commands)
    assert ("GB of weights" in told) == (plan not in ("cpu", "gpu-more", "gpu-speech"))
    lines = told.splitlines()
    for said, command in zip(lines[::2], lines[1::2], strict=True):
        is_model = "bench.gpu." in command and "--dummy" in command and "--as-chip" not in command
        is_model &= "constrained" not in command  # whose settings are its own
        assert "GB of weights" in said or not is_model, command


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("deltic bench gpu --dummy qwen3.5-27b --rows 3", "--rows"),
        ("bench.gpu.contexts --dummy qwen3.5-27b --contexts 3", "unrecognized arguments"),
        ("bench.gpu.contexts --dummy qwen3.5-27b --memory-gb 20", "GB"),
        ("deltic bench gpu --dummy qwen3.5-27b --format fp9", "--format fp9"),
        ("deltic bench gpu --dummy qwen3.5-27b --layers 90", "--layers 90: with --dummy, and from 4 to 64"),
        ("bench.soak --serve-args '--dummy qwen3.5-0.8b --max-num-seq 3 4'", "--max-num-seq"),
        ("bench.gpu.drafts --dummy qwen3.5-27b --dummy-head dflash --draft-model x", "without --draft-model"),
    ],
)
def test_a_command_that_would_not_begin_is_told(given: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert not check([Step("a", 1, (f"python -m {given}",))])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert told in line


def test_what_is_no_command_of_ours_is_left_alone() -> None:
    assert parsed(["/usr/bin/env", "x"]) is None and parsed([sys.executable, "file.py"]) is None


def test_each_gpu_has_its_share_of_the_cpus() -> None:
    cpus = os.sched_getaffinity(0)
    assert [place.cpus for place in places([])] == [cpus]
    shares = places(["3", "5"])
    assert [place.gpu for place in shares] == ["3", "5"]
    assert frozenset().union(*(place.cpus for place in shares)) == cpus
    if len(cpus) > 1:
        assert not shares[0].cpus & shares[1].cpus
    assert all(place.cpus for place in places([str(i) for i in range(4 * len(cpus))]))


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert visible_gpus() == ["4", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_steps_of_one_gpu_run_side_by_side_and_those_of_all_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two wait for each other; the third begins when both have ended, and has both GPUs; the fourth needs more."""
    meet = tmp_path / "meet"
    meet.mkdir()
    wait = f"""
import json, os, pathlib, time
me, meet = os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path({str(meet)!r})
(meet / me).touch()
end = time.monotonic() + 60
while len(list(meet.iterdir())) < 2 and time.monotonic() < end:
    time.sleep(0.01)
assert time.monotonic() < end
pathlib.Path("OUT", me + ".json").write_text(json.dumps([me, len(os.sched_getaffinity(0))]))
(meet / me).rename(meet / (me + "-over"))
"""
    both = f"""
import os, pathlib
over = sorted(path.name for path in pathlib.Path({str(meet)!r}).iterdir())
assert over == ["8-over", "9-over"] and os.environ["CUDA_VISIBLE_DEVICES"] == "8,9"
"""
    steps = [Step("a", 0.1, (python(wait),)), Step("b", 0.1, (python(wait),))]
    steps += [Step("both", 0.1, (python(both),), gpus=ALL), Step("four", 0.1, (), gpus=4)]
    run = figures_of(tmp_path, gpus=["8", "9"])
    assert run.run(steps) == ["four"]
    assert {json.loads(path.read_text())[0] for path in (tmp_path / "out").glob("*.json")} == {"8", "9"}
    said = capsys.readouterr().out
    assert "four: passed over, it needs 4 GPUs, of 2" in said and "on GPU 8,9" in said


def test_steps_without_time_are_passed_over_and_copies_get_their_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"client": {"version": "1"}}
    write = python(f"import json; json.dump({result}, open('OUT/x.json', 'w'))")
    own = python("import json; json.dump({'code': {'commit': 'old', 'modified': True}}, open('OUT/gpu-y.json', 'w'))")
    steps = [Step("a", 0.1, (write,)), Step("b", 100, ()), Step("c", 0.1, ("python -c 1/0",))]
    steps += [Step("d", 0.1, (own,), kind="files")]
    steps += [
        Step("e", 0.1, (python("open('OUT/cut.json', 'w').write('[1, 2'); open('OUT/list.json', 'w').write('[1]')"),))
    ]
    assert figures_of(tmp_path, commit="abc").run(steps) == ["b", "c"]
    found = json.loads((tmp_path / "out" / "x.json").read_text())
    assert found["client"] == {"version": "1", "commit": "abc", "modified": False}
    found = json.loads((tmp_path / "out" / "gpu-files-y.json").read_text())
    assert found["code"] == {"commit": "abc", "modified": False}, "an older history is no witness"
    assert (tmp_path / "out" / "cut.json.broken").exists() and (tmp_path / "out" / "list.json").exists()
    said = capsys.readouterr().out
    assert "b: passed over, too little time is left" in said and "FAILED with status 1" in said
    assert "ZeroDivisionError" in said and "ZeroDivisionError" in (tmp_path / "out" / "figures-p.log").read_text()


def test_a_step_that_is_not_over_is_ended_and_what_it_has_is_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = python("""
import time
from deltic.bench.provenance import writer
write = writer("gpu", "qwen3.5-27b", "GPU", "OUT")
write(rows=[1])
write(rows=[1, 2])
time.sleep(600)
""")
    begin = time.monotonic()
    run = figures_of(tmp_path, minutes=0.15, packed=True)
    assert run.run([Step("slow", 0.1, (slow, "python -c 1/0")), Step("late", 0.1, ())]) == ["slow", "late"]
    assert time.monotonic() - begin < 60
    said = capsys.readouterr().out
    assert "ended after" in said and "no time is left for python -c 1/0" in said
    (packed,) = (tmp_path / "out").iterdir()
    with tarfile.open(packed) as archive:
        assert "figures-p.log" in archive.getnames()
        (name,) = [name for name in archive.getnames() if name.startswith("gpu-qwen")]
        kept = archive.extractfile(name)
        assert kept is not None
        found = json.loads(kept.read())
    assert found["incomplete"] and found["rows"] == [1, 2]


def test_ending_it_ends_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = figures_of(tmp_path)
    begun = tmp_path / "begun"
    slow = python(f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(600)")

    def interrupted() -> None:
        while not begun.exists() or not begun.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "pack", lambda: None)
    monkeypatch.setattr("bench.steps.wait", lambda *_, **__: interrupted())
    with pytest.raises(KeyboardInterrupt):
        run.run([Step("slow", 0.1, (slow, slow))])
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if "ThreadPool" in t.name]


def test_a_changed_tree_is_refused_and_an_older_history_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = list[Figures]()
    monkeypatch.setattr(figures, "code", lambda: {"commit": "old", "modified": True})
    monkeypatch.setattr(figures.Figures, "run", lambda self, steps: asked.append(self) or [])
    monkeypatch.setattr(figures, "is_foreign", lambda commit: commit == "newer")
    out = ["--out", str(tmp_path)]
    assert figures.main(["cpu", *out]) == figures.main(["cpu", "--commit", "old", *out]) == 1
    assert "commit them" in capsys.readouterr().err and not asked
    assert figures.main(["cpu", "--commit", "newer", *out]) == figures.main(["cpu", "--dirty", *out]) == 0
    assert figures.main(["cpu", "--dirty", "--commit", "old", *out]) == 0
    assert [run.commit for run in asked] == ["newer", None, None], "changes are not hidden by a commit's name"
    assert figures.is_foreign("newer") and not asked[0].gpus


def test_whether_a_history_has_a_commit() -> None:
    if not (figures.ROOT / ".git").exists():
        pytest.skip("a copy without history")
    assert not figures.is_foreign("HEAD") and figures.is_foreign("0123456789ab")


def test_a_run_that_was_cut_makes_no_table(tmp_path: Path) -> None:
    out = tmp_path / "2026-01-02-h200"
    write = writer("gpu", "qwen3.5-27b", "NVIDIA H200", out, gpus=1)
    write(rows=[{"n": 1}])
    (file,) = out.iterdir()
    assert json.loads(file.read_text())["incomplete"] and Runs(tmp_path).newest("gpu-*.json", gpu=True) == []
    write(is_whole=True, rows=[{"n": 1}, {"n": 4}])
    (file,) = out.iterdir()
    found = json.loads(file.read_text())
    assert "incomplete" not in found and len(found["rows"]) == 2 and found["gpus"] == 1
    file.write_text(json.dumps(found | {"code": {}}))
    assert len(Runs(tmp_path).newest("gpu-*.json", gpu=True)) == 1


@pytest.mark.parametrize(
    ("more", "plain", "by_host"),
    [
        ({}, True, False),
        ({"levers": ["pdl=off"]}, True, False),
        ({"levers": {"pdl": False, "peer": True}}, False, False),
        ({"levers": {"pdl": True, "peer": False}}, False, True),
        ({"levers": {"pdl": False, "peer": False}}, False, False),
        ({"layers": 8}, False, False),
        ({"device": "NVIDIA H200 as sm_89"}, False, False),
        ({"settings": {"dummy": "qwen3.5-27b", "state_dtype": "bfloat16"}}, False, False),
        ({"settings": {"dummy": "qwen3.5-35b-a3b", "expert_parallel": True}}, False, False),
        ({"settings": {"dummy": "qwen3.5-27b", "memory_gb": 60.0}}, True, False),
    ],
)
def test_what_is_taken_for_a_plain_run(more: dict[str, Any], plain: bool, by_host: bool) -> None:
    data = {"device": "NVIDIA H200", "levers": {"pdl": True, "peer": True}} | more
    assert (is_plain(data), goes_by_host(data)) == (plain, by_host)


def keep(directory: Path, name: str, **data: Any) -> None:
    """A result file of a clean tree."""
    directory.mkdir(exist_ok=True)
    machine = {"machine": {"cpu": "A CPU", "cores": 2}, "device": "NVIDIA H200", "date": "2026-01-01"}
    roofs = {"code": {"commit": "c0ffee", "modified": False}, "roofs": {"read": 4e12, "multiply": 8e14}}
    (directory / name).write_text(json.dumps(machine | roofs | data))


def step(n: int, ms: float) -> dict[str, Any]:
    return {"n": n, "step_ms": ms, "round_ms": [ms, ms + 1], "roof": 0.5, "launches": 9}


def test_runs_by_the_hosts_memory_and_of_some_layers_stand_alone(tmp_path: Path) -> None:
    out, on, off = tmp_path / "h200", {"peer": True, "pdl": True}, {"peer": False, "pdl": True}
    given = {"gpus": 2, "cuts": 2, "prefill": {}, "prompt": 128, "output": 96}
    keep(out, "gpu-parallel-qwen3.5-27b-fp8-1.json", shape="qwen3.5-27b-fp8", rows=[step(1, 5.0)], levers=on, **given)
    keep(out, "gpu-parallel-qwen3.5-27b-fp8-2.json", shape="qwen3.5-27b-fp8", rows=[step(1, 9.0)], levers=off, **given)
    large = "qwen3.5-397b-a17b-fp8-layers"
    for n, ms in ((4, 2.0), (8, 3.0)):
        name, some = f"gpu-parallel-{large}-{n}-1.json", given | {"layers": n}
        keep(out, name, shape=f"{large}-{n}", rows=[step(1, ms), step(64, 4 * ms)], levers=on, **some)
    runs = Runs(tmp_path)
    assert "| qwen3.5-27b-fp8, 2 GPUs | 5.00 (5.00 .. 6.00) |" in gpu_tables.parallel(runs)
    assert "9.00" not in gpu_tables.parallel(runs) and "397b" not in gpu_tables.parallel(runs)
    assert "| qwen3.5-27b-fp8, 2 GPUs, by the host's memory | 9.00" in gpu_tables.through_host(runs)
    made = gpu_tables.layers(runs)  # 3 + 52 x 0.25
    assert "| 1 | 2.00 | 3.00 | 0.250 | 16.0 |" in made and "qwen3.5-397b-a17b-fp8 on 2 GPUs" in made


def test_tables_of_bits_tests_and_streams(tmp_path: Path) -> None:
    out, runs = tmp_path / "h200", Runs(tmp_path)
    for table in ("gpu-same-bits", "gpu-native", "gpu-streams", "gpu-through-host", "gpu-layers", "gpu-sums"):
        assert tables.TABLES[table](runs).startswith("No run of a clean tree is kept; `python -m bench.figures gpu-")
    rows = [{"gpus": n, "compared": 41, "tokens": 1968, "differ": 0} for n in (1, 2)]
    keep(out, "gpu-same-bits-qwen3.5-27b-fp8-1.json", shape="qwen3.5-27b-fp8", cuts=8, rows=rows)
    counts = {"passed": 25, "skipped": 1}
    keep(out, "gpu-native-as-sm_89-1.json", shape="as-sm_89", counts=counts)
    flash = {"shape": "qwen3.8-flash-next-fp8-layers-12", "prefill": {}, "gpus": 1, "cuts": 1, "layers": 12}
    keep(out, "gpu-qwen3.8-flash-next-fp8-layers-12-1.json", rows=[step(8, 7.0)], **flash)
    behind = [{"n": 8, "context": length, "ms": 3.0, "roof": 0.5} for length in (4096, 32768)]
    keep(out, "gpu-context-qwen3.8-flash-next-fp8-1.json", rows=behind, kv_cache_dtype="bf16", **flash)
    for kind, way in (("allreduce", "one kernel"), ("allreduce-e4m3", "three kernels")):
        sums = {"rows": [{"rows": 4, "way": way, "us": [6.0, 7.0, 8.0]}], "gpus": 4, "width": 5120, "link": 3e11}
        keep(out, f"{kind}-4x5120-1.json", bench=kind, **sums)
    runs = Runs(tmp_path)
    assert "| qwen3.5-27b-fp8 | 8 | 2 | 41 | 1,968 | 0 |" in gpu_tables.same_bits(runs)
    assert "| as-sm_89 | NVIDIA H200 | 25 | 0 | 1 |" in gpu_tables.native(runs)
    made = gpu_tables.streams(runs)
    assert (
        "| qwen3.8-flash-next-fp8-layers-12 | 7.00 (7.00 .. 8.00) |" in made
        and "| bf16 | 8 | 3.00, 50 % | 3.00, 50 % |" in made
    )
    made = gpu_tables.sums(runs)
    assert "rounded to e4m3, too; a large copy" in made and "| 4 | 7.00 (6.00 .. 8.00) | 0.273 |" in made


def test_what_came_of_tests_is_kept(tmp_path: Path) -> None:
    """A run that is cut has what ended before; failures have their last line."""
    from bench.gpu.native import Kept

    written = list[dict[str, Any]]()
    kept = Kept(lambda **told: written.append(json.loads(json.dumps(told))))
    for name, when, outcome, told in (
        ("a.py::one", "setup", "passed", None), ("a.py::one", "call", "passed", None), ("a.py::one", "teardown", "passed", None),
        ("b.py::two", "setup", "failed", "trace\nE  no GPU"), ("b.py::three", "setup", "skipped", None),
    ):  # fmt: skip
        kept.pytest_runtest_logreport(
            SimpleNamespace(nodeid=name, when=when, outcome=outcome, longrepr=told, duration=0.04)
        )
    assert kept.write(is_whole=True) == {"passed": 1, "failed": 1, "skipped": 1}
    assert written[-1]["files"] == {"a.py": {"passed": 1}, "b.py": {"failed": 1, "skipped": 1}}
    assert written[-1]["failures"] == {"b.py::two": "E  no GPU"} and written[-1]["is_whole"]


@pytest.mark.parametrize(("chosen", "status"), [("messages", 0), ("nothing_is_called_so", 1)])
def test_tests_are_run_and_counted(chosen: str, status: int, tmp_path: Path) -> None:
    """A run without any test is no success."""
    command = [sys.executable, "-m", "bench.gpu.native", "--name", "few", "--out", str(tmp_path), "-k", chosen]
    done = subprocess.run([*command, "tests/null/test_words.py"], cwd=figures.ROOT, capture_output=True, text=True)
    assert done.returncode == status and "few on interpreter" in done.stdout
    (file,) = tmp_path.glob("gpu-native-few-*.json")
    found = json.loads(file.read_text())
    assert "incomplete" not in found and (found["counts"].get("passed", 0) > 0) == (status == 0)
