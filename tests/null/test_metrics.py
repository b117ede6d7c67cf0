"""The numbers of /metrics."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltic.config import EngineConfig
from deltic.engine.events import CacheStats, ExpertStats, PictureStats, ReplayStats, SpeechStats, Stats
from deltic.engine.messages import EngineInfo
from deltic.host.client import EngineClient
from deltic.server.metrics import AdapterNumbers, Exposition, Histogram, KeyNumbers, Metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics.txt"
"""All of /metrics but what the server process itself takes and the buckets of histograms."""


def test_histogram_buckets_are_cumulative_and_bounds_included() -> None:
    histogram = Histogram("x", "y", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(1.5, times=2)
    samples = {(s.name, s.labels.get("le")): s.value for s in histogram.family().samples}
    assert samples == {
        ("x_bucket", "1.0"): 2, ("x_bucket", "2.0"): 6, ("x_bucket", "+Inf"): 7, ("x_count", None): 7, ("x_sum", None): 17,
    }  # fmt: skip


def exposition(*models: tuple[str, Metrics]) -> Exposition:
    every = Exposition()
    every.models.update(models)
    return every


def test_exposition_has_the_engine_s_numbers_of_the_moment() -> None:
    stats = Stats(n_running=3, n_pages_used=5, n_pages=9)
    metrics = Metrics(lambda: stats, lambda: 2, lambda: True)
    metrics.finished["stop"] += 4
    metrics.ttft_s.observe(0.02)
    every = exposition(("m", metrics))
    every.responses["/v1/completions", 429] += 1
    text = every.text().decode()
    for line in (
        'deltic_sequences_running{model="m"} 3.0',
        'deltic_pages_used{model="m"} 5.0',
        'deltic_engine_ready{model="m"} 1.0',
        'deltic_engine_restarts_total{model="m"} 2.0',
        'deltic_sequences_finished_total{finish_reason="stop",model="m"} 4.0',
        'deltic_http_responses_total{code="429",route="/v1/completions"} 1.0',
        'deltic_time_to_first_token_seconds_count{model="m"} 1.0',
        'deltic_time_to_first_token_seconds_bucket{le="0.02",model="m"} 1.0',
    ):
        assert line in text, line
    stats.n_running = 7
    assert 'deltic_sequences_running{model="m"} 7.0' in every.text().decode()


@pytest.mark.parametrize("name", ["", "cache", "speech", "pictures", "replays", "experts"])
def test_a_counter_of_the_engine_goes_on_after_a_restart(name: str) -> None:
    """Whatever /metrics calls a counter is one of the numbers that the client carries over; a gauge is not."""

    def told(stats: Stats) -> dict[str, tuple[str, float]]:
        metrics = Metrics(lambda: stats, lambda: 0, lambda: True, has_speech=True)
        families = text_string_to_metric_families(exposition(("m", metrics)).text().decode())
        return {s.name: (family.type, s.value) for family in families for s in family.samples if s.value == 5}

    part = type(getattr(FULL, name)) if name else Stats
    for field in part.__struct_fields__:
        default = getattr(part(), field)
        if type(default) in (int, float, dict):
            value = {"1": 5} if isinstance(default, dict) else 5
            stats = part(**{field: value}) if not name else Stats(**{name: part(**{field: value})})
            client = EngineClient(EngineConfig(), 1)
            client._count(stats)
            shown = told(stats)
            client._forget_gauges()
            carried = told(client.stats)
            assert carried == {name: told for name, told in shown.items() if told[0] == "counter"}, field
            client.n_restarts = 1
            client._count(part() if not name else Stats(**{name: part()}))
            assert told(client.stats) == carried, field


def test_recorded_steps_are_counted_where_there_are_any() -> None:
    for replays in (None, ReplayStats(n_recorded=7, n_replayed=3)):
        stats = Stats(replays=replays)
        text = exposition(("m", Metrics(lambda s=stats: s, lambda: 0, lambda: True))).text().decode()  # type: ignore[misc]
        assert ('deltic_graph_replays_total{model="m"} 3.0' in text) == (replays is not None)
        assert ('deltic_graph_recordings_total{model="m"} 7.0' in text) == (replays is not None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=Stats) == stats


def test_of_several_models_a_family_comes_once() -> None:
    """As Prometheus' own parser reads it; names may have anything in them."""
    stats = {"a/text": Stats(n_running=1), 'b "speech"\n': Stats(n_running=2, speech=SpeechStats(n_streams=4))}
    every = exposition(
        *(
            (name, Metrics(lambda s=s: s, lambda: 0, lambda: True, has_speech=s.speech is not None))
            for name, s in stats.items()
        )
    )
    for metrics in every.models.values():
        metrics.finished["stop"] += 1
        metrics.itl_s.observe(0.01)
    families = list(text_string_to_metric_families(every.text().decode()))
    assert len({family.name for family in families}) == len(families)
    of = {family.name: family.samples for family in families}
    assert {s.labels["model"]: s.value for s in of["deltic_sequences_running"]} == {
        name: s.n_running for name, s in stats.items()
    }
    assert [s.labels["model"] for s in of["deltic_sequences_finished"]] == list(stats)
    assert [(s.labels["model"], s.value) for s in of["deltic_speech_streams"]] == [('b "speech"\n', 4.0)]
    counts = [s for s in of["deltic_inter_token_latency_seconds"] if s.name.endswith("_count")]
    assert [(s.labels["model"], s.value) for s in counts] == [(name, 1.0) for name in stats]
    assert all(
        "model" in s.labels
        for name, samples in of.items()
        if name.startswith("deltic_") and "http" not in name
        for s in samples
    )


INFO = EngineInfo(
    vocab_size=9, eos_token_ids=[], max_model_len=640, max_num_seqs=2, max_step_tokens=64, n_pages=10, n_slots=2, device="cpu",
    kernels="avx2",
)  # fmt: skip


def test_the_same_numbers_under_the_names_of_vllm() -> None:
    cache = CacheStats(n_lookup_tokens=900, n_hit_tokens=640)
    stats = Stats(
        n_running=3, n_waiting=2, n_pages_used=5, n_pages=10, n_prompt_tokens=260, n_generated_tokens=9, cache=cache
    )  # fmt: skip
    metrics = Metrics(lambda: stats, lambda: 0, lambda: True, info=lambda: INFO)
    metrics.finished.update(stop=4, tool_calls=2, queue_timeout=1)
    metrics.ttft_s.observe(0.02)
    metrics.itl_s.observe(0.01, 8)
    expected = {
        'vllm:num_requests_running{model_name="m"} 3.0',
        'vllm:num_requests_waiting{model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.5',
        'vllm:cache_config_info{block_size="64",cache_dtype="bf16",enable_prefix_caching="True",model_name="m",num_gpu_blocks="10"} 1.0',
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5',
        f'vllm:gpu_prefix_cache_hit_rate{{model_name="m"}} {640 / 900}',
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 900.0',
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 640.0',
        'vllm:prompt_tokens_total{model_name="m"} 900.0',
        'vllm:generation_tokens_total{model_name="m"} 9.0',
        'vllm:prefix_cache_queries_total{model_name="m"} 900.0',
        'vllm:prefix_cache_hits_total{model_name="m"} 640.0',
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 6.0',
        'vllm:request_success_total{finished_reason="abort",model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm:time_per_output_token_seconds_count{model_name="m"} 8.0',
        'vllm:inter_token_latency_seconds_count{model_name="m"} 8.0',
        'vllm:e2e_request_latency_seconds_count{model_name="m"} 0.0',
    }
    own = 'deltic_sequences_running{model="m"} 3.0'
    for names, has_own, has_theirs in (("deltic", True, False), ("vllm", False, True), ("both", True, True)):
        every = Exposition(names=names)
        every.models["m"] = metrics
        lines = set(every.text().decode().splitlines())
        assert (own in lines) == has_own
        assert expected <= lines if has_theirs else not any(line.startswith("vllm") for line in lines)
        list(text_string_to_metric_families(every.text().decode()))


def test_what_routers_read_under_the_names_of_sglang() -> None:
    stats = Stats(n_running=3, n_waiting=2, n_pages_used=5, n_pages=10)
    every = Exposition(names="sglang")
    every.models["m"] = Metrics(lambda: stats, lambda: 0, lambda: True)
    lines = [line for line in every.text().decode().splitlines() if line.startswith(("sglang", "vllm", "deltic_seq"))]
    assert sorted(lines) == [
        'sglang:cache_config_info{model_name="m",num_pages="10",page_size="64"} 1.0',
        'sglang:max_total_num_tokens{model_name="m"} 640.0',
        'sglang:num_pages{model_name="m"} 10.0',
        'sglang:num_queue_reqs{model_name="m"} 2.0',
        'sglang:num_running_reqs{model_name="m"} 3.0',
        'sglang:page_size{model_name="m"} 64.0',
        'sglang:token_usage{model_name="m"} 0.5',
    ]


def test_the_layout_of_the_cache_is_told_once_it_is_known() -> None:
    info: EngineInfo | None = None
    every = Exposition(names="both")
    every.models["m"] = Metrics(lambda: Stats(), lambda: 0, lambda: False, info=lambda: info)
    assert "cache_config_info" not in every.text().decode()
    info = INFO
    text = every.text().decode()
    assert "vllm:cache_config_info{" in text and 'deltic_page_tokens{model="m"} 64.0' in text
    assert 'device="cpu",kernels="avx2",model="m"' in text


def test_the_prefix_cache_s_numbers():
    cache = CacheStats(
        n_lookups=5, n_hits=4, n_lookup_tokens=900, n_hit_tokens=640, checkpoints_taken={"message": 3, "tail": 1},
        n_pages_evicted=7, n_checkpoints_evicted=2, read_bytes={"host": 1024}, written_bytes={"host": 4096, "disk": 512},
        n_damaged=1, n_pages=20, n_checkpoints=6,
    )  # fmt: skip
    text = exposition(("m", Metrics(lambda: Stats(cache=cache), lambda: 0, lambda: True))).text().decode()
    told = {
        re.sub(r'model="m",|,model="m"|{model="m"}', "", line)
        for line in text.splitlines()
        if line.startswith("deltic_prefix")
    }
    assert told == {
        "deltic_prefix_cache_lookups_total 5.0",
        "deltic_prefix_cache_hits_total 4.0",
        "deltic_prefix_cache_lookup_tokens_total 900.0",
        "deltic_prefix_cache_hit_tokens_total 640.0",
        'deltic_prefix_checkpoints_taken_total{kind="message"} 3.0',
        'deltic_prefix_checkpoints_taken_total{kind="tail"} 1.0',
        "deltic_prefix_pages_evicted_total 7.0",
        "deltic_prefix_checkpoints_evicted_total 2.0",
        'deltic_prefix_read_bytes_total{tier="host"} 1024.0',
        'deltic_prefix_written_bytes_total{tier="host"} 4096.0',
        'deltic_prefix_written_bytes_total{tier="disk"} 512.0',
        "deltic_prefix_damaged_files_total 1.0",
        "deltic_prefix_pages 20.0",
        "deltic_prefix_checkpoints 6.0",
    }


FULL = Stats(speech=SpeechStats(), pictures=PictureStats(), replays=ReplayStats(), experts=ExpertStats())


def filled(part: type) -> dict[str, object]:
    """A different number for each field of a part of Stats that is one; counts by name have two."""
    of = {int: lambda i: 10 * i + 1, float: lambda i: i + 0.5, dict: lambda i: {"1": i, "2": 100 * i}}
    default = part()
    kinds = {name: type(getattr(default, name)) for name in sorted(part.__struct_fields__)}
    return {name: of[kind](i) for i, (name, kind) in enumerate(kinds.items()) if kind in of}


def test_the_whole_text_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, texts, order and values, so that a dashboard goes on. Rewrite the file where one is to change:
    `python -m tests.null.test_metrics`.
    """
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    assert everything() == GOLDEN.read_text()


def everything() -> str:
    """Both expositions of a model that has all there is, with a key and an adapter."""
    parts = {name: type(getattr(FULL, name)) for name in ("cache", "speech", "pictures", "replays", "experts")}
    stats = Stats(**filled(Stats), **{name: part(**filled(part)) for name, part in parts.items()})
    adapter = AdapterNumbers("sql", 9, 2, 3)
    metrics = Metrics(
        lambda: stats, lambda: 2, lambda: True, info=lambda: INFO, has_speech=True, adapters=lambda: (8, 1, [adapter])
    )
    metrics.n_pictures, metrics.n_picture_tokens = 5, 500
    metrics.finished.update(stop=4, tool_calls=2, queue_timeout=1)
    histograms = (
        metrics.queued_s, metrics.prefill_s, metrics.ttft_s, metrics.decode_s, metrics.itl_s, metrics.e2e_s,
        metrics.n_prompt, metrics.n_generated,
    )  # fmt: skip
    for i, histogram in enumerate(histograms, 1):
        histogram.observe(i / 8, i)
    metrics.speech.note("stop", 0.2, 2.0, 4.0, 0.0)
    metrics.speech.note("cancelled", None, 2.0, 0.0, None)
    key = KeyNumbers("alice", 1, n_prompt_tokens=3, n_cached_tokens=2, n_generated_tokens=1)
    key.responses[200], key.limited["tokens"] = 7, 6
    texts = []
    for names in ("both", "sglang"):
        every = Exposition([key], names)
        every.models = {"m": metrics, "small": Metrics(lambda: Stats(), lambda: 0, lambda: False)}
        every.responses["/v1/completions", 429] = every.closed["slow"] = every.unknown_fields["/v1/responses"] = 1
        lines = every.text().decode().splitlines(keepends=True)
        texts += [line for line in lines if "_bucket{" not in line and not re.match(r"(# \w+ )?process_", line)]
    return "".join(texts)


if __name__ == "__main__":
    import time

    time.time = lambda: 1_700_000_000.0
    GOLDEN.write_text(everything())
