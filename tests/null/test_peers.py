"""The comparison's pure parts: which lanes run in which order, what is summed up, how it is shown."""

from __future__ import annotations

import json

import pytest

from bench import peers, peers_busy
from bench.peers_report import (
    LANES,
    OURS,
    Cost,
    Lane,
    Workload,
    draw,
    fits,
    markdown_table,
    pairs,
    ratio_cells,
    rotated,
    speed_cells,
    summarise,
)
from deltic.config import ConfigError
from deltic.models.qwen.shape import PUBLISHED

A, B = Lane(OURS, "bf16", 16), Lane("llama.cpp", "bf16", 16)


def figures(ours: list[float], theirs: list[float], workload: str = "decode 1") -> list[dict[str, object]]:
    both = ((A, ours), (B, theirs))
    return [
        {"round": r, "workload": workload, "lane": lane.name, "tok_s": value, "others": 0.0}
        for lane, values in both
        for r, value in enumerate(values)
    ]


def roofs_of(*reads: float) -> list[dict[str, object]]:
    return [
        {"round": r, "workload": workload, "read": read, "multiply_bf16": 1e6, "multiply_int8": 2e6}
        for r, read in enumerate(reads)
        for workload in ("decode 1", "prefill 64")
    ]


COSTS = {lane.name: Cost(weight_bytes=100, body_params=40, head_params=10) for lane in (A, B)}


def test_every_lane_comes_first_once_and_neighbours_stay() -> None:
    orders = [rotated(LANES, turn) for turn in range(len(LANES))]
    assert {order[0] for order in orders} == set(LANES)
    assert all(sorted(order, key=LANES.index) == list(LANES) for order in orders)
    assert rotated([], 3) == []


def test_pairs_are_ours_with_theirs_of_the_same_width() -> None:
    found = {(a.format, b.name) for a, b in pairs(LANES)}
    assert found == {
        ("bf16", "llama.cpp-bf16"), ("bf16", "transformers-bf16"), ("int8", "llama.cpp-q8_0"),
        ("int4", "llama.cpp-q4_k_m"), ("int4", "llama.cpp-q4_0"),
    }  # fmt: skip
    assert pairs([B]) == []


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that halves its speed in one round changes the speeds, not the ratio."""
    roofs = roofs_of(1000.0, 1000.0, 1000.0)
    summary = summarise(figures([20, 10, 22], [10, 5, 10]), roofs, [A, B], COSTS)
    assert summary["ratios"][0]["ratio"] == {"median": 2.0, "min": 2.0, "max": 2.2, "n": 3}
    assert summary["speeds"][0]["tok_s"] == {"median": 20, "min": 10, "max": 22, "n": 3}


def test_a_round_that_lacks_one_side_gives_no_ratio() -> None:
    roofs = roofs_of(1000.0, 1000.0)
    summary = summarise(figures([20, 20], [10]), roofs, [A, B], COSTS)
    assert summary["ratios"][0]["ratio"]["n"] == 1
    assert summarise(figures([20], []), roofs[:1], [A, B], COSTS)["ratios"] == []


def test_disturbed_figures_count_only_where_there_are_no_others() -> None:
    roofs = roofs_of(1000.0, 1000.0)
    found = figures([20, 5], [10, 10])
    found[1]["others"] = 1.0
    summary = summarise(found, roofs, [A, B], COSTS)
    assert summary["ratios"][0]["ratio"] == {"median": 2.0, "min": 2.0, "max": 2.0, "n": 1}
    found[0]["others"] = 1.0
    summary = summarise(found, roofs, [A, B], COSTS)
    assert ratio_cells(summary)[1] == [["decode 1", "1.25 (0.50 .. 2.00) *"]]
    assert speed_cells(summary)[1] == [["decode 1", "12.5 (5.0 .. 20.0; 125%) *", "10.0 (10.0 .. 10.0; 100%)"]]


def test_the_roof_is_memory_for_one_row_and_multiplies_for_many() -> None:
    cost = Cost(weight_bytes=100, body_params=40, head_params=10)
    assert cost.least_s(Workload("decode", 1), 1000.0, 1e4) == 0.1
    assert cost.least_s(Workload("decode", 100), 1000.0, 1e4) == pytest.approx(2 * 100 * 50 / 1e4)
    assert cost.least_s(Workload("prefill", 100), 1000.0, 1e4) == pytest.approx(2 * (100 * 40 + 10) / 1e4)


def test_share_of_the_roof_uses_the_rounds_own_roof() -> None:
    roofs = roofs_of(1000.0, 500.0)
    summary = summarise(figures([8, 4], [1, 1]), roofs, [A, B], COSTS)
    assert summary["speeds"][0]["roof_share"] == 0.8


def test_tables_have_a_cell_for_every_lane(tmp_path) -> None:
    roofs = roofs_of(1000.0)
    summary = summarise(figures([8], [4]) + figures([80], [], "prefill 64"), roofs, [A, B], COSTS)
    header, rows = speed_cells(summary)
    assert header[1:] == ["deltic-bf16", "llama.cpp-bf16"]
    assert rows[0] == ["decode 1", "8.0 (8.0 .. 8.0; 80%)", "4.0 (4.0 .. 4.0; 40%)"]
    assert rows[1][2] == "-"
    assert ratio_cells(summary)[1] == [["decode 1", "2.00 (2.00 .. 2.00)"]]
    assert markdown_table(header, rows).splitlines()[1] == "| --- | ---: | ---: |"
    draw(summary, [A, B], "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
    json.dumps(summary)


def test_lanes_are_chosen_by_engine_or_by_name() -> None:
    assert [lane.name for lane in peers.chosen_lanes("transformers, llama.cpp-q8_0")] == [
        "transformers-bf16", "llama.cpp-q8_0",
    ]  # fmt: skip
    assert peers.chosen_lanes("deltic")[0] == A
    with pytest.raises(ConfigError, match=r"'vllm' is not known; known: deltic, deltic-bf16"):
        peers.chosen_lanes("deltic,vllm")


def test_models_that_do_not_fit_together_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(peers, "free_memory_bytes", lambda: 24e9)
    peers.check_memory(LANES, PUBLISHED["qwen3.5-0.8b"])
    with pytest.raises(ConfigError, match="--engines"):
        peers.check_memory(LANES, PUBLISHED["qwen3.5-4b"])
    peers.check_memory([A, B], PUBLISHED["qwen3.5-4b"])


@pytest.mark.parametrize("flags", [["--n", "1,zero"], ["--prefill", "0"], ["--rounds", "0"], ["--shape", "gpt"]])
def test_a_bad_flag_is_refused_before_anything_is_made(flags: list[str], capsys) -> None:
    assert peers.main([*flags, "--engines", "deltic"]) == 1
    assert capsys.readouterr().err.startswith("bench.peers: ")


def test_no_round_begins_that_would_end_too_late() -> None:
    assert fits(600.0, 300.0, 900.0) and not fits(601.0, 300.0, 900.0)
    assert fits(1e9, 1e9, 0.0), "without a limit"


def test_all_engines_decode_256_tokens_behind_equal_prompts() -> None:
    arguments = peers.parse([])
    assert (arguments.context, arguments.steps) == (128, 256)
    assert {len(prompt) for prompt in peers.prompts("0", 16, arguments.context, 1000)} == {128}


def test_prompts_repeat_for_the_same_seed_only() -> None:
    assert peers.prompts("0 decode 4", 4, 8, 1000) == peers.prompts("0 decode 4", 4, 8, 1000)
    assert peers.prompts("0 decode 4", 4, 8, 1000) != peers.prompts("1 decode 4", 4, 8, 1000)


def test_work_of_the_measured_process_is_not_other_work() -> None:
    before = peers_busy.Reading(wall_s=10.0, all_s=100.0, own_s=5.0)
    assert peers_busy.others(before, peers_busy.Reading(12.0, 104.0, 9.0)) == 0.0
    assert peers_busy.others(before, peers_busy.Reading(12.0, 104.0, 6.0)) == 1.5


def test_the_recorded_command_repeats_the_measurement_elsewhere() -> None:
    given = ["--rounds", "3", "--n", "1,16", "--env", "/home/somebody/env", "--out", "here"]
    arguments = peers.parse(given)
    again = peers.parse(peers.command(arguments).split()[3:])
    assert "/home" not in peers.command(arguments)
    assert (again.rounds, again.n, again.prefill) == (3, [1, 16], [128, 512, 2048])
