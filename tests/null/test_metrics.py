"""The numbers of /metrics."""

from __future__ import annotations

from deltic.engine.request import Stats
from deltic.metrics import Histogram, Metrics


def test_histogram_buckets_are_cumulative_and_bounds_included() -> None:
    histogram = Histogram("x", "y", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(1.5, times=2)
    samples = {(s.name, s.labels.get("le")): s.value for s in histogram.family().samples}
    assert samples == {
        ("x_bucket", "1.0"): 2, ("x_bucket", "2.0"): 6, ("x_bucket", "+Inf"): 7, ("x_count", None): 7, ("x_sum", None): 17,
    }  # fmt: skip


def test_exposition_has_the_engine_s_numbers_of_the_moment() -> None:
    stats = Stats(n_running=3, n_pages_used=5, n_pages=9)
    metrics = Metrics(lambda: stats, lambda: 2, lambda: True)
    metrics.finished["stop"] += 4
    metrics.responses["/v1/completions", 429] += 1
    metrics.ttft_s.observe(0.02)
    text = metrics.exposition().decode()
    for line in (
        "deltic_sequences_running 3.0",
        "deltic_pages_used 5.0",
        "deltic_engine_ready 1.0",
        "deltic_engine_restarts_total 2.0",
        'deltic_sequences_finished_total{finish_reason="stop"} 4.0',
        'deltic_http_responses_total{code="429",route="/v1/completions"} 1.0',
        "deltic_time_to_first_token_seconds_count 1.0",
        'deltic_time_to_first_token_seconds_bucket{le="0.02"} 1.0',
    ):
        assert line in text, line
    stats.n_running = 7
    assert "deltic_sequences_running 7.0" in metrics.exposition().decode()
