"""The comparison's pure parts: which lanes run in which order, what is summed up, how it is shown."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from bench import peers, peers_busy, peers_environment, peers_gguf
from bench.peers_environment import MemoryGroup, PeerFailed
from bench.peers_model import cut_shape, write_checkpoint
from bench.peers_quantise import FILE_TYPES, UD_Q4
from bench.peers_report import (
    FILES,
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
from deltic.config import ConfigError, EngineConfig
from deltic.models.checkpoint import n_real_ids, tokenizer_json
from deltic.models.gguf import open_gguf
from deltic.models.qwen.published import PUBLISHED
from deltic.models.qwen.shape import ModelShape
from tests.cpu.test_formats import loaded
from tests.tiny import tiny_checkpoint
from tests.tiny_config import VOCAB_SIZE
from tests.tiny_gguf import tiny_gguf

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


def test_pairs_are_of_the_same_file_or_else_of_the_same_width() -> None:
    found = {(a.format, b.name) for a, b in pairs(LANES)}
    assert found == {
        ("bf16", "llama.cpp-bf16"), ("bf16", "transformers-bf16"), ("int8", "llama.cpp-q8_0"),
        ("int4", "llama.cpp-q4_k_m"), ("int4", "llama.cpp-q4_0"),
        ("q8_0", "llama.cpp-q8_0"), ("q4_k_m", "llama.cpp-q4_k_m"), ("q4_0", "llama.cpp-q4_0"), ("ud_q4", "llama.cpp-ud_q4"),
    }  # fmt: skip
    assert pairs([B]) == []
    assert FILE_TYPES.keys() == set(FILES)


def test_engines_that_read_one_file_must_agree() -> None:
    lanes = [lane for lane in LANES if lane.format == "ud_q4"]
    (ours, theirs), same = (lane.name for lane in lanes), np.array([[0.6, 0.8], [1.0, 0.0]])
    assert peers.same_files(lanes, {ours: same, theirs: same}) == {"ud_q4": 1.0}
    for other in (np.array([[0.6, 0.8], [0.8, 0.6]]), same * np.nan):
        with pytest.raises(PeerFailed, match=r"deltic-ud_q4 and llama\.cpp-ud_q4 read the same file and give other"):
            peers.same_files(lanes, {ours: same, theirs: other})
    assert peers.same_files([A, B], {}) == {}


def test_both_lanes_of_a_file_have_its_bytes_as_roof() -> None:
    shape = PUBLISHED["qwen3.5-0.8b"]
    infos = {lane.name: {"weight_bytes": 7} if lane.engine == OURS else {} for lane in LANES}
    costs = peers.model_costs(LANES, shape, {"bf16": 160, **{name: i for i, name in enumerate(FILES, 1)}}, infos)
    for i, name in enumerate(FILES, 1):
        assert costs[f"deltic-{name}"].weight_bytes == costs[f"llama.cpp-{name}"].weight_bytes == i
    assert costs["deltic-int8"].weight_bytes == costs["deltic-bf16"].weight_bytes == 7
    assert costs["llama.cpp-bf16"].weight_bytes == 160


def test_every_matrix_of_the_mixed_file_has_a_type_of_its_kind() -> None:
    """The first pattern that is found counts; tables, vectors and the convolution have none."""
    kinds = ("attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta", "attn_q", "attn_k", "attn_v", "attn_output")

    def type_of(name: str) -> str | None:
        return next((type for pattern, type in UD_Q4 if re.search(pattern, name)), None)

    found = {
        (layer, kind): type_of(f"blk.{layer}.{kind}.weight")
        for layer in (0, 3, 10, 11, 23)
        for kind in (*kinds, "ffn_gate", "ffn_up", "ffn_down")
    }
    assert set(found.values()) == {"Q8_0", "Q5_K", "Q6_K", "IQ4_XS", "Q4_K"}
    expected = {(3, "attn_qkv"): "Q8_0", (10, "attn_qkv"): "Q5_K", (23, "ssm_out"): "Q6_K", (11, "ffn_down"): "Q5_K"}
    expected |= {(0, "ffn_down"): "Q6_K", (10, "ffn_up"): "IQ4_XS", (11, "ffn_up"): "Q4_K", (23, "attn_output"): "Q5_K"}
    assert {at: found[at] for at in expected} == expected
    assert not any(
        map(type_of, ("token_embd.weight", "output_norm.weight", "blk.3.ssm_conv1d.weight", "blk.3.ssm_norm.weight"))
    )


def test_the_file_that_is_quantised_has_a_token_for_every_id(tmp_path) -> None:
    """So that Deltic draws as many ids as from the checkpoint; the prompts are random ones."""
    source = tiny_checkpoint("dense", tied=True, layout="flat")
    file = tmp_path / "bf16.gguf"
    peers_gguf.write_bf16(source, file)
    shape = ModelShape.from_directory(file)
    config = EngineConfig(model=str(file))
    assert n_real_ids(config, file, shape) == shape.vocab_size == VOCAB_SIZE
    assert shape.eos_token_ids == (VOCAB_SIZE - 1, VOCAB_SIZE - 2)
    text = json.loads(tokenizer_json(config))
    assert len(set(text["model"]["vocab"].values())) == VOCAB_SIZE - 2 and text["model"]["merges"]
    tensors = open_gguf(file).tensors
    assert {tensor.type for tensor in tensors.values()} == {"F32", "BF16"}
    assert peers.bytes_per_step(file) == sum(tensor.end - tensor.begin for tensor in tensors.values())
    untied = tiny_gguf("dense")
    embedding = open_gguf(untied).tensors["token_embd.weight"]
    all_bytes = sum(tensor.end - tensor.begin for tensor in open_gguf(untied).tensors.values())
    assert peers.bytes_per_step(untied) == all_bytes - (embedding.end - embedding.begin)


def test_the_environment_holds_what_the_lanes_need() -> None:
    assert peers_environment.packages([A, B]) == {"llama-cpp-python": "0.3.36"}
    assert {"llama-cpp-python", "transformers", "torch"} <= peers_environment.packages(LANES).keys()


def test_a_folder_of_wheels_says_how_llama_was_built(tmp_path, monkeypatch, capsys) -> None:
    """The flags of the build are in the result; a folder that does not have them is refused before pip runs."""
    python, wheels = tmp_path / "env" / "bin" / "python", tmp_path / "wheels"
    python.parent.mkdir(parents=True)
    python.write_text("")
    wheels.mkdir()
    ran: list[list[str]] = []
    monkeypatch.setattr(peers_environment, "installed", lambda python, wanted: dict(wanted) if ran else None)
    monkeypatch.setattr(peers_environment.subprocess, "run", lambda command, **more: ran.append(command))
    with pytest.raises(ConfigError, match="llama-build"):
        peers_environment.make_environment(tmp_path / "env", peers_environment.packages([B]), wheels)
    assert not ran and peers_environment.built_with(tmp_path / "env").startswith("unknown")
    (wheels / "llama-build").write_text("-DGGML_NATIVE=OFF\n")
    assert peers_environment.make_environment(tmp_path / "env", peers_environment.packages([B]), wheels)[
        1
    ] == peers_environment.packages([B])
    (command,) = ran
    assert command[3:] == [
        "--python",
        str(python),
        "install",
        "--no-index",
        "--find-links",
        str(wheels),
        "llama-cpp-python==0.3.36",
    ]
    assert peers_environment.built_with(tmp_path / "env") == "-DGGML_NATIVE=OFF"


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


def test_the_roof_of_a_mixture_has_the_experts_that_a_step_uses() -> None:
    cost = Cost(weight_bytes=100, body_params=4, head_params=1, expert_bytes=1000, used=0.25)
    assert cost.least_s(Workload("decode", 1), 1000.0, 1e9) == pytest.approx(0.35)
    assert cost.least_s(Workload("decode", 2), 1000.0, 1e9) == pytest.approx(0.5375)
    assert cost.least_s(Workload("prefill", 512), 1000.0, 1e9) == pytest.approx(1.1)


def test_a_part_of_a_mixture_costs_what_its_file_and_its_tokens_say() -> None:
    shape, lane = cut_shape("qwen3.6-35b-a3b", 4), Lane("llama.cpp", "q4_k_m", 4)
    (cost,) = peers.model_costs([lane], shape, {"q4_k_m": 2_000_000_000}, {}).values()
    assert (cost.used, cost.head_params) == (8 / 256, shape.hidden_size * 24832)
    assert cost.weight_bytes + cost.expert_bytes == 2_000_000_000 and 0.9 < cost.expert_bytes / 2e9 < 0.98
    assert cost.body_params == shape.n_active_params - 2 * cost.head_params < 0.1 * shape.n_params
    (dense,) = peers.model_costs([B], PUBLISHED["qwen3.5-0.8b"], {"bf16": 160}, {}).values()
    assert (dense.weight_bytes, dense.expert_bytes) == (160, 0)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_checkpoint_of_a_mixture_is_read_as_its_shape(fp8: bool, tmp_path) -> None:
    shape = replace(
        cut_shape("qwen3.6-35b-a3b", 4), vocab_size=512, hidden_size=128, n_experts=8, eos_token_ids=(510, 511)
    )
    write_checkpoint(tmp_path, shape, fp8=fp8)
    weights, read = loaded(tmp_path)
    assert (read.n_params, read.n_experts, len(weights.layers)) == (shape.n_params, 8, 4)


def test_parts_of_a_shape_have_as_much_of_its_vocabulary() -> None:
    part, whole = cut_shape("qwen3.6-35b-a3b", 4), cut_shape("qwen3.6-35b-a3b")
    assert part.n_layers * 10 == whole.n_layers and part.vocab_size * 10 == whole.vocab_size
    assert max(part.eos_token_ids) < part.vocab_size
    for n_layers in (0, 6, 44):
        with pytest.raises(ConfigError, match=f"--layers {n_layers}: give a multiple of 4, from 4 to 40"):
            cut_shape("qwen3.6-35b-a3b", n_layers)


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
    assert [lane.name for lane in peers.chosen_lanes("ud_q4")] == ["deltic-ud_q4", "llama.cpp-ud_q4"]
    with pytest.raises(ConfigError, match=r"'vllm' is not known; known: deltic, bf16, deltic-bf16"):
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


@pytest.mark.parametrize("version", [1, 2])
def test_an_engine_s_memory_is_that_of_its_control_group(version: int, tmp_path) -> None:
    """Played in a folder: its command enters the group first, whose folder is gone in the end."""
    root = tmp_path / "memory" if version == 1 else tmp_path
    root.mkdir(exist_ok=True)
    group = MemoryGroup("lane", 2_000_000_000, tmp_path)
    limit = group.folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
    assert group.folder.parent == root and limit.read_text() == "2000000000"
    ran = subprocess.run(group.enter(["echo", "a b"]), capture_output=True, text=True, check=True)
    assert ran.stdout == "a b\n" and int((group.folder / "cgroup.procs").read_text()) > 1
    for file in group.folder.iterdir():  # which the kernel's have not
        file.unlink()
    group.close()
    assert not group.folder.exists()
    with pytest.raises(ConfigError, match="needs root on Linux"):
        MemoryGroup("lane", 1, tmp_path / "absent")
