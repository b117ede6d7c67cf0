"""The documents' tables are what the kept runs say, and no figure stands beside them that no run says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_tables, peer_tables, tables
from bench.kept import Runs
from bench.tables import DOCUMENTS, ROOT, filled
from deltic.bench.provenance import checked
from deltic.engine.messages import Output

MEASURED = re.compile(r"\d[\d.,]*\s?(ms|µs|us|s|[GT]B/s|[GT]?FLOP/s|tok/s|tokens/s|%|times|x|TFLOP/s)(?![\w/])")
MACHINE = {"cpu": "A CPU", "cores": 2}
CLEAN = {"version": "0", "commit": "c0ffee", "modified": False}


def keep(directory: Path, name: str, **data: Any) -> None:
    """A result file, of a clean tree unless `data` says otherwise."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps({"machine": MACHINE, "code": CLEAN, "date": "2026-01-01"} | data))


def serve_row(n: int, output: float, prompt: float) -> dict[str, Any]:
    return {
        "value": n, "output_tok_s": output, "prompt_tok_s": prompt, "decode_tok_s": 1.0, "ttft_ms": {"p50": 1.0, "p95": 2.0},
        "mean_prompt_tokens": 124.0, "mean_output_tokens": 128.0,
    }  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_documents_tables_are_those_of_the_kept_runs(name: str) -> None:
    text = (ROOT / name).read_text()
    assert tables.MARKED.search(text)
    assert filled(text, Runs(ROOT / "bench" / "runs"), ROOT / name) == text, "run python -m bench.tables"


def test_every_table_is_in_a_document() -> None:
    used = [m["name"] for name in DOCUMENTS for m in tables.MARKED.finditer((ROOT / name).read_text())]
    assert sorted(used) == sorted(tables.TABLES)


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_no_measured_figure_is_written_by_hand(name: str) -> None:
    text = tables.MARKED.sub("", (ROOT / name).read_text())
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert [found[0] for found in MEASURED.finditer(text)] == []


def test_answers_tokens_a_second_are_the_answers_and_runs_of_a_commit_are_rounds(tmp_path: Path) -> None:
    for i, output in enumerate((4400.0, 4416.0, 4500.0)):
        rows = [serve_row(1, output, 4257.0), serve_row(16, 10809.0, 10271.0)]
        keep(tmp_path / "b", f"serve-built-in-{i}.json", rows=rows, client=CLEAN, date=f"2026-01-02T{i}")
    keep(tmp_path / "a", "serve-built-in-9.json", rows=[serve_row(1, 1.0, 1.0)], date="2026-01-01")
    made = tables.serve(Runs(tmp_path))
    assert "| all answers together, tokens a second | 4,416 (4,400 .. 4,500) | 10,809 (10,809 .. 10,809) |" in made
    assert "124 and answers of 128 tokens, 3 runs" in made
    assert "[b](RUNS/b), commit c0ffee, 2 cores of an A CPU" in made


def test_a_run_of_a_changed_tree_is_not_used(tmp_path: Path) -> None:
    keep(tmp_path / "a", "serve-built-in-1.json", rows=[serve_row(1, 7.0, 1.0)])
    keep(tmp_path / "b", "serve-built-in-2.json", rows=[], date="2026-02-01", code=CLEAN | {"modified": True})
    assert "7.00" in tables.serve(Runs(tmp_path))
    assert "No run of a clean tree is kept" in tables.host(Runs(tmp_path))


def test_the_newest_of_each_kind_stays_beside_newer_ones_of_others(tmp_path: Path) -> None:
    for day, layers in enumerate((12, None, 12, 8), 1):
        date, device = f"2026-01-0{day}", "NVIDIA H200"
        keep(
            tmp_path / f"{date}-h200", f"gpu-context-flash-{day}.json", rows=[], date=date, layers=layers, device=device
        )
    found = Runs(tmp_path).newest_of_each("gpu-context-*.json", lambda data: data["layers"], gpu=True)
    assert [(run.data["layers"], run.data["date"][-1]) for run in found] == [(12, "3"), (8, "4"), (None, "2")]
    found = Runs(tmp_path).newest_of_each(
        "*.json", lambda data: data["layers"], gpu=True, where=lambda data: data["layers"] != 8
    )
    assert [run.data["layers"] for run in found] == [12, None]


def test_a_run_in_which_a_part_failed_is_not_used_nor_are_its_neighbours(tmp_path: Path) -> None:
    row = {
        "n": 16,
        "constrained": 16,
        "ms_a_token": 1.0,
        "times_free": 1.5,
        "round_ms": [1.0],
        "round_times_free": [1.5],
    }
    made, flags = row | {"output": 200}, {"dummy": "qwen3.5-0.8b"}
    keep(tmp_path / "1-h200", "constrained-a.json", rows=[made], flags=flags, failed={}, device="NVIDIA H200")
    later = {"date": "2026-01-02", "flags": flags, "device": "NVIDIA H200"}
    keep(tmp_path / "2-h200", "constrained-a.json", rows=[made | {"times_free": 53.5}], failed={}, **later)
    keep(tmp_path / "2-h200", "constrained-b.json", rows=[], failed={"constrained": "ZeroDivisionError"}, **later)
    found = tables.constrained(Runs(tmp_path))
    assert "| 1.50 |" in found and "53.5" not in found and "1-h200" in found
    later["date"] = "2026-01-03"
    keep(tmp_path / "3-h200", "constrained-a.json", rows=[row], failed={}, **later)
    assert "3-h200" not in tables.constrained(Runs(tmp_path)), "nobody looked whether its sequences came to their end"
    keep(tmp_path / "4", "serve-built-in-1.json", rows=[serve_row(1, 7.0, 1.0)])
    keep(tmp_path / "5", "serve-built-in-1.json", rows=[serve_row(1, 8.0, 1.0) | {"errors": 1}], date="2026-01-02")
    assert "7.00" in tables.serve(Runs(tmp_path))


def outputs(*reasons: str | None) -> list[Output]:
    return [Output(str(i), token_ids=[i], finish_reason=reason) for i, reason in enumerate(reasons)]  # type: ignore[arg-type]


def test_sequences_that_end_before_their_length_are_no_measurement() -> None:
    assert len(checked(outputs(None, "length"), n=2)) == 2
    for wrong in ("stop", "error", "abort"):
        with pytest.raises(RuntimeError, match="sequence 1: it ended as"):
            checked(outputs(None, wrong))
    with pytest.raises(RuntimeError, match="sequence 0: the grammar"):
        checked([Output("0", finish_reason="error", error="the grammar could not be followed")])
    with pytest.raises(RuntimeError, match="2 of 3 sequences drew"):
        checked(outputs(None, None), n=3)


def test_a_bench_of_grammars_fails_where_its_grammars_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that handed the tokenizer's path to the engine instead of its text did."""
    pytest.importorskip("torch")
    from bench.gpu import constrained

    class Fails:
        def __init__(self) -> None:
            self.n = 0

        def add(self, request: Any) -> None:
            self.n += 1

        def has_work(self) -> bool:
            return self.n > 0

        def step(self) -> list[Output]:
            self.n -= 1
            return [Output(str(self.n), finish_reason="error", error="the grammar cannot be followed")]

    with pytest.raises(RuntimeError, match="the grammar cannot be followed"):
        constrained.ms_a_token(Fails(), 4, 2, 10, "start: /a/", "a")  # type: ignore[arg-type]


STEPS = re.compile(r"\.step\((?!step)")


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("bench/**/*.py"), *ROOT.glob("deltic/bench/*.py")]), ids=lambda p: p.stem
)
def test_every_bench_that_runs_an_engine_checks_its_outputs(path: Path) -> None:
    """Each step's outputs go through `checked`, or through what looks at their ends itself."""
    text = path.read_text()
    if STEPS.search(text) and path.name not in (
        "quality.py",
        "agent_replay.py",
    ):  # those let answers end, or look at each
        n_checked = text.count("checked(")
        n_drained = path.name == "speech.py"  # it empties the engine when its sequences were aborted
        assert n_checked >= len(STEPS.findall(text)) - n_drained, "a step whose outputs nobody checks"


def peers_run(n: int = 3, share: float = 0.5, **more: Any) -> dict[str, Any]:
    def one(median: float) -> dict[str, Any]:
        return {"median": median, "min": median - 1, "max": median + 1, "n": n}

    speeds = [
        {"workload": work, "lane": lane, "tok_s": one(value), "roof_share": share, "disturbed": False}
        for work in ("decode 1", "prefill 512")
        for lane, value in (("deltic-bf16", 30.0), ("llama.cpp-bf16", 20.0))
    ]
    ratios = [
        {
            "workload": row["workload"],
            "ours": "deltic-bf16",
            "theirs": "llama.cpp-bf16",
            "ratio": one(1.5),
            "disturbed": i > 0,
        }
        for i, row in enumerate(speeds[::2])
    ]
    return {
        "shape": "qwen3.5-0.8b", "summary": {"speeds": speeds, "ratios": ratios}, "roofs": [{"read": 5e10}], "versions": {}, "figures": [],
        "rounds": 3, "threads": 2, "steps": 256, "context": 128, "llama_build": "-D",
    } | more  # fmt: skip


def test_prefills_count_where_all_were_warmed_up_alike(tmp_path: Path) -> None:
    keep(tmp_path / "a", "peers-1.json", **peers_run())
    made = peer_tables.peers(Runs(tmp_path))
    assert "prefill" not in made.split("\n\n")[0]
    assert (
        "| decode, N = 1, bfloat16 | 30.0 (29.0 .. 31.0), 50 % | llama.cpp 20.0 (19.0 .. 21.0) | 1.50 (0.500 .. 2.50) |"
        in made
    )
    assert "decodes of 256 tokens behind prompts of 128, the same for all" in made
    one_file = json.loads(json.dumps(peers_run()).replace("bf16", "ud_q4"))
    (tmp_path / "b").mkdir()
    keep(tmp_path / "b" / "a", "peers-1.json", **one_file)
    assert "| decode, N = 1, one UD_Q4 file | 30.0 (29.0 .. 31.0), 50 % | llama.cpp UD_Q4 20.0" in peer_tables.peers(
        Runs(tmp_path / "b")
    )
    experts = one_file | {"costs": {"deltic-ud_q4": {"expert_bytes": 3}}, "date": "2026-01-03"}
    keep(tmp_path / "b" / "a", "peers-2.json", **experts)
    assert "one UD_Q4 file | 30.0" in peer_tables.peers_on_experts(Runs(tmp_path / "b"))
    assert [peer_tables.peers_kind(data) for data in (one_file, experts)] == ["checkpoint", "experts"]
    keep(tmp_path / "a", "peers-2.json", **peers_run(prefill_warm_up="same", date="2026-01-02", rounds=5))
    (prefill,) = [line for line in peer_tables.peers(Runs(tmp_path)).splitlines() if "prefill of 512" in line]
    assert prefill.endswith(r"| 1.50 (0.500 .. 2.50) \* |"), "the CPUs were shared in every round"
    assert "decodes and prefills 1.50 to 1.50 times" in peer_tables.peers_claim(Runs(tmp_path))


def test_a_gpus_prefill_without_rounds_is_left_out(tmp_path: Path) -> None:
    row = {"n": 1, "step_ms": 2.0, "p90_ms": 2.1, "roof": 0.5, "launches": 9}
    old = {"shape": "qwen3.5-27b", "device": "NVIDIA H200", "roofs": {"read": 4e12, "multiply": 8e14}}
    keep(tmp_path / "1-h200", "gpu-qwen3.5-27b-1.json", rows=[row], prefill={"8192": {"ms": 674.0, "roof": 0.7}}, **old)
    made = gpu_tables.decodes(Runs(tmp_path))
    assert "| qwen3.5-27b | 2.00 (p90 2.10) | – |" in made
    new = {"date": "2026-02-01", "prompt": 128, "output": 256}
    rounds = {"8192": {"ms": 600.0, "round_ms": [590.0, 600.0, 610.0], "roof": 0.7}}
    keep(
        tmp_path / "2-h200", "gpu-qwen3.5-27b-1.json", rows=[row | {"round_ms": [1.9, 2.0, 2.2]}], prefill=rounds, **old | new
    )  # fmt: skip
    made = gpu_tables.decodes(Runs(tmp_path))
    assert "| qwen3.5-27b | 2.00 (1.90 .. 2.20) | 600 (590 .. 610) |" in made
    assert made.split("\n\n")[1].startswith("128 prompt and 256 generated tokens each.")


def test_the_readmes_claims_follow_the_runs(tmp_path: Path) -> None:
    assert tables.prefix_claim(Runs(tmp_path)) == "No run of the prefix cache is kept."
    assert tables.soak_claim(Runs(tmp_path)) == "No soak is kept."
    summary = [{"item": "system", "median": 0.25, "min": 0.2, "max": 0.3}]
    keep(tmp_path / "a", "prefix-qwen3.5-0.8b-int8-1.json", summary=summary)
    soak = {"requests": 1000, "generated_tokens_checked": 20_000}
    for i, found in enumerate(([], ["a page was lost"])):
        keep(tmp_path / "a", f"soak-{i}.json", kills=i, violations=found, **soak)
    assert "came after 0.250 (0.200 .. 0.300) of the time" in tables.prefix_claim(Runs(tmp_path))
    assert tables.soak_claim(Runs(tmp_path)) == (
        "2 soaks are kept: 2,000 random requests, 40,000 tokens or frames checked, the engine killed 1 times, 1 promises broken."
    )


def test_the_short_table_has_a_row_for_each_large_shape(tmp_path: Path) -> None:
    row = {"p90_ms": 2.1, "launches": 9, "round_ms": [1.9, 2.0, 2.1], "step_ms": 2.0}
    for i, shape in enumerate(("qwen3.5-0.8b", "qwen3.5-27b")):
        rows = [row | {"n": n, "roof": roof} for n, roof in ((1, 0.5), (16, 0.6), (128, 0.7))]
        keep(tmp_path / "h200", f"gpu-{shape}-{i}.json", shape=shape, device="NVIDIA H200", rows=rows)
    (made,) = tables.headline(Runs(tmp_path)).splitlines()[2:]
    assert made == (
        "| qwen3.5-27b, H200, a step of 1 and of 128 | 2.00 (1.90 .. 2.10) and 2.00 (1.90 .. 2.10) ms | 50 % and 70 % of the roof |"
    )


@pytest.mark.parametrize(
    "round_ms, roof, kept",
    [([1.9, 2.0, 2.1], 0.5, True), ([2.0, 2.0], 0.5, False), (None, 0.5, False), ([1.9, 2.0, 2.1], 0.99, False)],
)
def test_a_row_of_the_readme_has_three_rounds_none_above_its_roof(
    round_ms: list[float] | None, roof: float, kept: bool, tmp_path: Path
) -> None:
    row = {"n": 1, "p90_ms": 2.1, "launches": 9, "step_ms": 2.0, "roof": roof} | (
        {"round_ms": round_ms} if round_ms else {}
    )
    for shape in ("qwen3.5-0.8b", "qwen3.5-27b"):  # the first is no headline
        keep(tmp_path / "h200", f"gpu-{shape}-1.json", shape=shape, device="NVIDIA H200", rows=[row])
    assert ("qwen3.5-27b" in tables.headline(Runs(tmp_path))) == kept
    peer = peers_run(n=len(round_ms or ""), share=roof)
    keep(tmp_path / "a", "peers-1.json", **peer)
    assert ("decode, N = 1" in tables.headline(Runs(tmp_path))) == kept
    assert peer_tables.peers_claim(Runs(tmp_path)).startswith("On the CPUs" if kept else "No run of 3 rounds")
    peer["summary"]["speeds"][0]["roof_most"] = 1.33
    keep(tmp_path / "a", "peers-1.json", **peer)
    assert "decode, N = 1" not in tables.headline(Runs(tmp_path))


def test_a_name_that_no_table_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="nothing"):
        filled("<!-- table nothing -->\n<!-- end -->", Runs(tmp_path), ROOT / "README.md")


def test_a_part_in_a_sentence_stays_in_it(tmp_path: Path) -> None:
    text = "It runs. <!-- table peers-claim -->old<!-- end --> More."
    made = filled(text, Runs(tmp_path), ROOT / "README.md")
    assert made == "It runs. <!-- table peers-claim -->No run beside another engine is kept.<!-- end --> More."


def test_a_format_that_is_worse_than_the_peers_is_named(tmp_path: Path) -> None:
    read = {"perplexity": 1.135, "kl_mean": 3.21e-4, "kl_error": 1.2e-5, "same_argmax": 0.975}
    apart = {"kl": -4e-6, "kl_error": 1e-6, "nll": 1e-4, "nll_error": 4e-5, "same": -0.01, "same_error": 0.01}
    row = {"by": "a tool 1", "how": "nearest", "bits_per_weight": 4.5, "ours": read}
    rows = [row | {"format": "NVFP4"}, row | {"format": "Q4_0", "theirs": read, "apart": apart}]
    more = {"tokens": 7501, "text": "quality.jsonl", "llama": {"version": "0.3"}, "failed_to_make": {}}
    keep(tmp_path / "a", "quality-formats-1.json", rows=rows, **more)
    made = tables.TABLES["formats"](Runs(tmp_path))
    assert "| NVFP4 | a tool 1, nearest | 4.50 | 32 ± 1 |  |  | 1.13500 | 97.5 % |" in made
    assert "| 32 ± 1 | 32 ± 1 | -0.4 ± 0.1 | 1.13500 · 1.13500 | 97.5 · 97.5 % |" in made
    assert "in KL better in 1, worse in 0; in perplexity better in 0, worse in 1 (Q4_0, by 2.5);" in made
    keep(tmp_path / "a", "quality-long-1.json", rows=rows, **more | {"tokens": 29_702})
    made = tables.TABLES["formats-again"](Runs(tmp_path))
    assert made.startswith("On another text, of 29,702 tokens: Of the 1 files that both read, ")


def test_loads_stand_beside_copies_of_the_same_bytes(tmp_path: Path) -> None:
    loads = [{"seconds": s, "beyond_gb": 0.2} for s in (0.8, 0.9, 1.0)]
    starts = [{"ready": s, "memory": 1.0} for s in (3.0, 3.5, 4.0)]
    row = {"format": "Q4_K", "file_gb": 0.431, "copies": [0.3, 0.4, 0.5], "load_average": [1.0, 2.0, 3.0]}
    keep(tmp_path / "a", "loading-1.json", shape="s", threads=2, rows=[row | {"loads": loads, "starts": starts}])
    made = tables.TABLES["loading"](Runs(tmp_path))
    assert (
        "| Q4_K | 0.431 | 0.900 (0.800 .. 1.00) | 0.400 (0.300 .. 0.500) | 3.50 (3.00 .. 4.00) | 1.00 (1.00 .. 1.00) | 0.20 |"
        in made
    )
    assert "Load averages were 2.00 (1.00 .. 3.00)." in made
