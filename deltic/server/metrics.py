"""Counters and histograms of the server, for /metrics.

Kept as plain numbers, since every token passes here; they become Prometheus' text when it is asked for. The engine's
gauges and counters are read from its last Stats at that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltic.engine.messages import CacheStats, SpeechStats, Stats

SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKENS = tuple(2.0**k for k in range(18))


def labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    """A counter with one label. counts: by the label's value."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


class Histogram:
    """How often a value fell into which bucket. `bounds`: upper ends, included, ascending."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, name: str | None = None) -> HistogramMetricFamily:
        """name: another than its own."""
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            buckets.append((bound, below))
        family = HistogramMetricFamily(name or self.name, self.text)
        family.add_metric([], buckets, self.total)
        return family


@dataclass(slots=True)
class KeyNumbers:
    """What the requests of one API key came to."""

    name: str
    n_open: int = 0
    responses: Counter[int] = field(default_factory=Counter)
    """By status."""
    limited: Counter[str] = field(default_factory=Counter)
    """Refused, by limit: requests, tokens."""
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_generated_tokens: int = 0


class SpeechNumbers:
    """What was spoken. Seconds of audio are those of the model's rate, before any change of tempo."""

    def __init__(self) -> None:
        self._first_s = Histogram(
            "deltic_speech_first_audio_seconds", "From the request to its first audio.", SECONDS
        )
        self._audio_s = Histogram("deltic_speech_audio_duration_seconds", "Of a whole utterance.", SECONDS)
        self._rtf = Histogram(
            "deltic_speech_real_time_factor",
            "Seconds that a second of audio took, from the request on.",
            FACTORS,
        )
        self._late_s = Histogram(
            "deltic_speech_underrun_seconds", "The most that a stream's audio was late for playback.", SECONDS
        )
        self._n_samples = self._n_empty = self._n_continuous = 0
        self._ended: Counter[str] = Counter()

    def note(
        self, end: str, first_s: float | None, took_s: float, audio_s: float, late_s: float | None
    ) -> None:
        """An utterance ended. end: its finish reason, or what went wrong; late_s: of a stream."""
        self._ended[end] += 1
        self._n_samples += round(audio_s * SPEECH_RATE)
        if first_s is None:
            self._n_empty += 1
            return
        self._first_s.observe(first_s)
        if late_s is not None:
            self._late_s.observe(late_s)
            self._n_continuous += late_s <= CONTINUOUS_S
        if end in ("stop", "length"):
            self._audio_s.observe(audio_s)
            self._rtf.observe(took_s / audio_s)

    def families(self, stage: SpeechStats) -> Iterable[Metric]:
        """stage: what the engine tells."""
        for name, text, value in (
            ("streams_used", "Streams that the vocoder has begun and not ended.", stage.n_streams_used),
            ("streams", "Streams that it may have at once.", stage.n_streams),
        ):
            yield GaugeMetricFamily(f"deltic_speech_{name}", text, value=value)
        for name, text, count in (
            ("samples", "Samples of audio that were sent.", self._n_samples),
            ("empty", "Utterances that ended without audio.", self._n_empty),
            (
                "continuous",
                f"Streams whose audio was never {CONTINUOUS_S:g} s late for playback.",
                self._n_continuous,
            ),
            ("frames", "Frames of 80 ms that were vocoded.", stage.n_frames),
            ("late_pieces", "Pieces that the engine saw leave too late for playback.", stage.n_underruns),
            ("vocoder_seconds", "Time that vocoding took.", stage.vocoder_s),
        ):
            yield CounterMetricFamily(f"deltic_speech_{name}", text, value=count)
        yield labelled("deltic_speech_ended", "Utterances, by how they ended.", "reason", self._ended)
        for histogram in (self._first_s, self._audio_s, self._rtf, self._late_s):
            yield histogram.family()


VLLM_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "error": "error"}
"""Finish reasons as vLLM has them; any other is an abort."""

FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0)
CONTINUOUS_S = 0.1
SPEECH_RATE = 24_000


class Metrics:
    """The numbers of one model."""

    def __init__(
        self,
        stats: Callable[[], Stats],
        n_restarts: Callable[[], int],
        is_ready: Callable[[], bool],
        *,
        about: Callable[[], dict[str, str]] = dict,
        has_speech: bool = False,
    ) -> None:
        """stats, n_restarts, is_ready, about (labels of deltic_build_info): read when the metrics are."""
        self._about = about
        self._stats = stats
        self._n_restarts = n_restarts
        self._is_ready = is_ready
        self.ttft_s = Histogram(
            "deltic_time_to_first_token_seconds", "From the request to its first token.", SECONDS
        )
        self.prefill_s = Histogram(
            "deltic_prefill_time_seconds", "From the place in the engine to the first token.", SECONDS
        )
        self.decode_s = Histogram(
            "deltic_decode_time_seconds", "From the first token of an answer to its last.", SECONDS
        )
        self.queued_s = Histogram(
            "deltic_queue_time_seconds", "From the request to its place in the engine.", SECONDS
        )
        self.itl_s = Histogram(
            "deltic_inter_token_latency_seconds", "Between two tokens of a sequence.", SECONDS
        )
        self.e2e_s = Histogram(
            "deltic_request_duration_seconds", "From the request to its last token.", SECONDS
        )
        self.n_prompt = Histogram("deltic_prompt_length_tokens", "Tokens of a prompt.", TOKENS)
        self.n_generated = Histogram("deltic_generation_length_tokens", "Tokens of an answer.", TOKENS)
        self.speech = SpeechNumbers()
        self._has_speech = has_speech
        self.finished: Counter[str] = Counter()
        """Sequences by finish reason."""

    def families(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("deltic_engine_ready", "1 while the engine takes requests.", int(self._is_ready())),
            ("deltic_sequences_running", "Sequences that own a state slot.", stats.n_running),
            ("deltic_sequences_waiting", "Sequences that wait for a place.", stats.n_waiting),
            ("deltic_pages_used", "KV pages in use.", stats.n_pages_used),
            ("deltic_pages", "KV pages there are.", stats.n_pages),
            ("deltic_pages_used_ratio", "Part of them in use.", stats.n_pages_used / max(1, stats.n_pages)),
            ("deltic_state_slots_used", "State slots in use.", stats.n_slots_used),
            ("deltic_state_slots", "State slots there are.", stats.n_slots),
            ("deltic_last_step_seconds", "Duration of the last step.", stats.last_step_ms / 1000),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("deltic_steps", "Steps of the engine.", stats.n_steps),
            ("deltic_prompt_tokens", "Prompt tokens computed.", stats.n_prompt_tokens),
            ("deltic_generated_tokens", "Tokens drawn.", stats.n_generated_tokens),
            ("deltic_preemptions", "Sequences that had to give back their memory.", stats.n_preemptions),
            (
                "deltic_recomputed_sequences",
                "Sequences computed once more, since their logits were not finite.",
                stats.n_recomputed,
            ),
            ("deltic_engine_restarts", "Times the engine process was started again.", self._n_restarts()),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield from _prefix_cache(stats.cache)
        build = GaugeMetricFamily("deltic_build_info", "What runs here.", labels=list(about := self._about()))
        build.add_metric(list(about.values()), 1)
        yield build
        yield labelled("deltic_sequences_finished", "Sequences that ended.", "finish_reason", self.finished)
        for histogram in (
            self.queued_s,
            self.prefill_s,
            self.ttft_s,
            self.decode_s,
            self.itl_s,
            self.e2e_s,
            self.n_prompt,
            self.n_generated,
        ):
            yield histogram.family()
        if self._has_speech:
            yield from self.speech.families(stats.speech or SpeechStats())

    def vllm_families(self) -> Iterable[Metric]:
        """The same numbers under vLLM's names, as far as it has such."""
        stats = self._stats()
        cache = stats.cache
        for name, text, value in (
            ("num_requests_running", "Sequences that own a state slot.", stats.n_running),
            ("num_requests_waiting", "Sequences that wait for a place.", stats.n_waiting),
            (
                "kv_cache_usage_perc",
                "Part of the KV pages in use.",
                stats.n_pages_used / max(1, stats.n_pages),
            ),
        ):
            yield GaugeMetricFamily(f"vllm:{name}", text, value=value)
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens, cached ones too.", stats.n_prompt_tokens + cache.n_hit_tokens),
            ("generation_tokens", "Tokens drawn.", stats.n_generated_tokens),
            ("num_preemptions", "Sequences that had to give back their memory.", stats.n_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.n_lookup_tokens),
            ("prefix_cache_hits", "Of those, the ones that were not computed again.", cache.n_hit_tokens),
        ):
            yield CounterMetricFamily(f"vllm:{name}", text, value=count)
        reasons: Counter[str] = Counter()
        for reason, count in self.finished.items():
            reasons[VLLM_REASONS.get(reason, "abort")] += count
        yield labelled("vllm:request_success", "Sequences that ended.", "finished_reason", reasons)
        for name, histogram in (
            ("request_queue_time_seconds", self.queued_s),
            ("request_prefill_time_seconds", self.prefill_s),
            ("request_decode_time_seconds", self.decode_s),
            ("time_to_first_token_seconds", self.ttft_s),
            ("inter_token_latency_seconds", self.itl_s),
            ("time_per_output_token_seconds", self.itl_s),  # of the same, in older versions
            ("e2e_request_latency_seconds", self.e2e_s),
            ("request_prompt_tokens", self.n_prompt),
            ("request_generation_tokens", self.n_generated),
        ):
            yield histogram.family(f"vllm:{name}")


class Exposition(Collector):
    """All numbers of the process, as Prometheus reads them. One instance an app; no global state."""

    def __init__(self, keys: Sequence[KeyNumbers] = (), names: str = "deltic") -> None:
        """keys: read when the metrics are. names: whose the models' numbers have: deltic, vllm, both."""
        self._has_own, self._has_vllm = names != "vllm", names != "deltic"
        self.models: dict[str, Metrics] = {}
        """By name."""
        self.responses: Counter[tuple[str, int]] = Counter()
        """HTTP responses by route and status."""
        self.closed: Counter[str] = Counter()
        """Connections that were closed before their client was done with them, by why."""
        self.unknown_fields: Counter[str] = Counter()
        """Fields of requests that were left out, by route."""
        self._keys = keys
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU time and files of the server process

    def text(self) -> bytes:
        """Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """A family comes once: its samples say which model they are of, however many there are."""
        families: dict[str, Metric] = {}
        for name, metrics in self.models.items():
            own = [(family, {"model": name}) for family in metrics.families() if self._has_own]
            theirs = metrics.vllm_families() if self._has_vllm else ()
            for family, label in [*own, *((family, {"model_name": name}) for family in theirs)]:
                samples = [sample._replace(labels=sample.labels | label) for sample in family.samples]
                family.samples = []
                families.setdefault(family.name, family).samples += samples
        yield from families.values()
        yield from _keys(self._keys)
        responses = CounterMetricFamily("deltic_http_responses", "HTTP responses.", labels=["route", "code"])
        for (route, code), count in self.responses.items():
            responses.add_metric([route, str(code)], count)
        yield responses
        closed = "Connections closed for what their clients did."
        yield labelled("deltic_http_connections_closed", closed, "reason", self.closed)
        unknown = "Fields of requests that were left out."
        yield labelled("deltic_unknown_fields", unknown, "route", self.unknown_fields)


MAX_KEYS = 100
"""Keys with labels of their own; what there are more is one more, REST."""
REST = "(others)"


def _keys(keys: Sequence[KeyNumbers]) -> Iterable[Metric]:
    """The numbers of each API key, by its name."""
    if not keys:
        return
    told = list(keys[:MAX_KEYS])
    if len(keys) > MAX_KEYS:
        told.append(rest := KeyNumbers(REST))
        for numbers in keys[MAX_KEYS:]:
            rest.n_open += numbers.n_open
            rest.responses += numbers.responses
            rest.limited += numbers.limited
            rest.n_prompt_tokens += numbers.n_prompt_tokens
            rest.n_cached_tokens += numbers.n_cached_tokens
            rest.n_generated_tokens += numbers.n_generated_tokens
    open_ = GaugeMetricFamily("deltic_key_requests_open", "Generating requests of a key.", labels=["key"])
    responses = CounterMetricFamily("deltic_key_responses", "Its HTTP responses.", labels=["key", "code"])
    limited = CounterMetricFamily(
        "deltic_key_rate_limited", "Of those, refused for its limits.", labels=["key", "limit"]
    )
    tokens = CounterMetricFamily(
        "deltic_key_tokens",
        "Tokens of its requests that have ended; cached ones are prompt tokens, too.",
        labels=["key", "kind"],
    )
    for numbers in told:
        key = numbers.name
        open_.add_metric([key], numbers.n_open)
        for code, count in numbers.responses.items():
            responses.add_metric([key, str(code)], count)
        for limit, count in numbers.limited.items():
            limited.add_metric([key, limit], count)
        tokens.add_metric([key, "prompt"], numbers.n_prompt_tokens)
        tokens.add_metric([key, "cached"], numbers.n_cached_tokens)
        tokens.add_metric([key, "generated"], numbers.n_generated_tokens)
    yield from (open_, responses, limited, tokens)


def _prefix_cache(cache: CacheStats) -> Iterable[Metric]:
    """The prefix cache's numbers."""
    for name, text, value in (
        (
            "pages",
            "Pages of the prefix cache in the pool, those of running sequences included.",
            cache.n_pages,
        ),
        ("checkpoints", "State slots that are checkpoints of the prefix cache.", cache.n_checkpoints),
    ):
        yield GaugeMetricFamily(f"deltic_prefix_{name}", text, value=value)
    for name, text, value in (
        ("cache_lookups", "Prompts looked up in the prefix cache.", cache.n_lookups),
        ("cache_hits", "Of those, the ones that began in a way it knew.", cache.n_hits),
        ("cache_lookup_tokens", "Prompt tokens looked up in the prefix cache.", cache.n_lookup_tokens),
        ("cache_hit_tokens", "Of those, the ones that were not computed again.", cache.n_hit_tokens),
        ("pages_evicted", "Pages that left the pool, to a lower tier or for good.", cache.n_pages_evicted),
        (
            "checkpoints_evicted",
            "Checkpoints that left the pool, to a lower tier or for good.",
            cache.n_checkpoints_evicted,
        ),
        ("damaged_files", "Files of --cache-dir that were not what they should be.", cache.n_damaged),
    ):
        yield CounterMetricFamily(f"deltic_prefix_{name}", text, value=value)
    for name, text, label, counts in (
        (
            "checkpoints_taken",
            "Checkpoints taken, by what made their place worth one.",
            "kind",
            cache.checkpoints_taken,
        ),
        ("read_bytes", "Brought back to the pool, by the tier it came from.", "tier", cache.read_bytes),
        ("written_bytes", "Moved or copied to a lower tier.", "tier", cache.written_bytes),
    ):
        family = CounterMetricFamily(f"deltic_prefix_{name}", text, labels=[label])
        for key, count in counts.items():
            family.add_metric([key], count)
        yield family
