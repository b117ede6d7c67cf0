"""Counters and histograms of the server, for /metrics.

Kept as plain numbers, since every token passes here; they become Prometheus' text when it is asked for. The
engine's gauges and counters are read from its last Stats at that moment.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltic import __version__
from deltic.engine.events import SpeechStats, Stats, metrics_of
from deltic.engine.messages import EngineInfo
from deltic.ops.geometry import PAGE_SIZE

SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKENS = tuple(2.0**k for k in range(18))


Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily


def plain(prefix: str, *rows: tuple[Kind, str, str, float]) -> Iterable[Metric]:
    """A family for each row: its name behind the prefix, its help and its only value."""
    for kind, name, text, value in rows:
        yield kind(prefix + name, text, value=value)


def labelled(kind: Kind, name: str, text: str, labels: str, values: Mapping[Any, float]) -> Metric:
    """A family with labels. labels: their names, with spaces between; values: by the label, or a tuple of all
    labels.
    """
    family = kind(name, text, labels=labels.split())
    for key, value in values.items():
        family.add_metric([str(label) for label in (key if isinstance(key, tuple) else (key,))], value)
    return family


def exported(part: msgspec.Struct, **behind: Iterable[Metric]) -> Iterable[Metric]:
    """A family for each field of statistics that is a metric. behind: others, behind that of a field."""
    for name, metric in metrics_of(type(part)).items():
        kind, value = COUNTER if metric.is_counter else GAUGE, getattr(part, name)
        if metric.label:
            yield labelled(kind, metric.name, metric.text, metric.label, value)
        else:
            yield kind(metric.name, metric.text, value=value)
        yield from behind.get(name, ())


class Histogram:
    """Counts of values by bucket. `bounds`: upper ends, included, ascending."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> None:
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
    """Totals of the requests of one API key."""

    name: str
    n_open: int = 0
    responses: Counter[int] = field(default_factory=Counter)
    """Counts of responses by status."""
    limited: Counter[str] = field(default_factory=Counter)
    """Refused, by limit: requests, tokens."""
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_generated_tokens: int = 0


@dataclass(slots=True)
class AdapterNumbers:
    """Requests that have one adapter applied."""

    name: str
    n_requests: int = 0
    n_waiting: int = 0
    """Number of open requests without a token yet."""
    n_running: int = 0
    """The others."""

    def enter(self) -> None:
        """Counts a request that went to the engine."""
        self.n_requests += 1
        self.n_waiting += 1

    def begin(self) -> None:
        """Counts a request that has its first token."""
        self.n_waiting -= 1
        self.n_running += 1

    def leave(self, has_begun: bool) -> None:
        """Counts a request that has ended."""
        self.n_waiting -= not has_begun
        self.n_running -= has_begun


class SpeechNumbers:
    """Totals of speech. Seconds of audio are those at the model's rate, before any change of tempo."""

    def __init__(self) -> None:
        self._first_s = Histogram("deltic_speech_first_audio_seconds", "From the request to its first audio.")
        self._audio_s = Histogram("deltic_speech_audio_duration_seconds", "Of a whole utterance.")
        self._rtf = Histogram(
            "deltic_speech_real_time_factor", "Seconds that a second of audio took, from the request on.", FACTORS
        )
        self._late_s = Histogram(
            "deltic_speech_underrun_seconds", "The most that a stream's audio was late for playback."
        )
        self._n_samples = self._n_empty = self._n_continuous = 0
        self._ended: Counter[str] = Counter()

    def note(self, end: str, first_s: float | None, took_s: float, audio_s: float, late_s: float | None) -> None:
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
        late = f"Streams whose audio was never {CONTINUOUS_S:g} s late for playback."
        ours = plain(
            "deltic_speech_",
            (COUNTER, "samples", "Samples of audio that were sent.", self._n_samples),
            (COUNTER, "empty", "Utterances that ended without audio.", self._n_empty),
            (COUNTER, "continuous", late, self._n_continuous),
        )
        yield from exported(stage, n_streams=ours)
        yield labelled(COUNTER, "deltic_speech_ended", "Utterances, by how they ended.", "reason", self._ended)
        for histogram in (self._first_s, self._audio_s, self._rtf, self._late_s):
            yield histogram.family()


Theirs = tuple[Kind, str, str, Callable[[Stats], float]]
"""Name that another server has for one of our numbers, its help there, and the number."""

VLLM: tuple[Theirs, ...] = (
    (GAUGE, "num_requests_running", "Sequences that own a state slot.", lambda s: s.n_running),
    (GAUGE, "num_requests_waiting", "Sequences that wait for a batch slot.", lambda s: s.n_waiting),
    (GAUGE, "kv_cache_usage_perc", "Part of the KV pages that sequences have.", lambda s: s.pages_used_ratio),
    (COUNTER, "prompt_tokens", "Prompt tokens, cached ones too.", lambda s: s.n_prompt_tokens + s.cache.n_hit_tokens),
    (COUNTER, "generation_tokens", "Tokens drawn.", lambda s: s.n_generated_tokens),
    (COUNTER, "num_preemptions", "Sequences that had to give back their memory.", lambda s: s.n_preemptions),
    (COUNTER, "spec_decode_num_drafts", "Drafts.", lambda s: s.drafted.get("1", 0)),
    (COUNTER, "spec_decode_num_draft_tokens", "Tokens that were guessed ahead.", lambda s: s.n_drafted),
    (COUNTER, "spec_decode_num_accepted_tokens", "Of those, the ones that were drawn.", lambda s: s.n_accepted),
    (COUNTER, "prefix_cache_queries", "Prompt tokens that were looked up.", lambda s: s.cache.n_lookup_tokens),
    (COUNTER, "prefix_cache_hits", "Of those, the ones that were not computed again.", lambda s: s.cache.n_hit_tokens),
    # The names of older versions, which production-stack's router reads.
    (GAUGE, "gpu_cache_usage_perc", "As vllm:kv_cache_usage_perc.", lambda s: s.pages_used_ratio),
    (
        GAUGE,
        "gpu_prefix_cache_hit_rate",
        "Part of the tokens looked up that were found.",
        lambda s: s.cache.n_hit_tokens / max(1, s.cache.n_lookup_tokens),
    ),
    (COUNTER, "gpu_prefix_cache_queries", "As vllm:prefix_cache_queries.", lambda s: s.cache.n_lookup_tokens),
    (COUNTER, "gpu_prefix_cache_hits", "As vllm:prefix_cache_hits.", lambda s: s.cache.n_hit_tokens),
)
SGLANG: tuple[Theirs, ...] = (
    (GAUGE, "num_running_reqs", "Sequences that own a state slot.", lambda s: s.n_running),
    (GAUGE, "num_queue_reqs", "Sequences that wait for a batch slot.", lambda s: s.n_waiting),
    (GAUGE, "token_usage", "Part of the KV pages that sequences have.", lambda s: s.pages_used_ratio),
    (GAUGE, "max_total_num_tokens", "Tokens that the KV pages hold.", lambda s: s.n_pages * PAGE_SIZE),
    (GAUGE, "page_size", "Tokens of a KV page.", lambda s: PAGE_SIZE),
    (GAUGE, "num_pages", "KV pages there are.", lambda s: s.n_pages),
)
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
        info: Callable[[], EngineInfo | None] = lambda: None,
        has_speech: bool = False,
        adapters: Callable[[], tuple[int, int, list[AdapterNumbers]]] = lambda: (0, 0, []),
    ) -> None:
        """stats, n_restarts, is_ready, info, adapters (slots, those in use, and all by name): read when the
        metrics are.
        """
        self._info = info
        self._adapters = adapters
        self._stats = stats
        self._n_restarts = n_restarts
        self._is_ready = is_ready
        self.queued_s = Histogram("deltic_queue_time_seconds", "From the request to its batch slot.")
        self.prefill_s = Histogram("deltic_prefill_time_seconds", "From the batch slot to the first token.")
        self.ttft_s = Histogram("deltic_time_to_first_token_seconds", "From the request to its first token.")
        self.decode_s = Histogram("deltic_decode_time_seconds", "From the first token of an answer to its last.")
        self.itl_s = Histogram("deltic_inter_token_latency_seconds", "Between two tokens of a sequence.")
        self.e2e_s = Histogram("deltic_request_duration_seconds", "From the request to its last token.")
        self.n_prompt = Histogram("deltic_prompt_length_tokens", "Tokens of a prompt.", TOKENS)
        self.n_generated = Histogram("deltic_generation_length_tokens", "Tokens of an answer.", TOKENS)
        times = self.queued_s, self.prefill_s, self.ttft_s, self.decode_s, self.itl_s, self.e2e_s
        self._histograms = *times, self.n_prompt, self.n_generated
        self.n_pictures = self.n_picture_tokens = 0
        """Counts of pictures and their tokens, of requests that went to the engine."""
        self.n_scored = 0
        self.speech = SpeechNumbers()
        self._has_speech = has_speech
        self.finished: Counter[str] = Counter()
        """Sequences by finish reason."""

    def families(self) -> Iterable[Metric]:
        stats = self._stats()
        yield GAUGE("deltic_engine_ready", "1 while the engine takes requests.", value=int(self._is_ready()))
        yield from exported(
            stats,
            n_pages=plain(
                "deltic_",
                (GAUGE, "pages_used_ratio", "Part of them that sequences have.", stats.pages_used_ratio),
                (GAUGE, "page_tokens", "Tokens of a KV page.", PAGE_SIZE),
            ),
            n_slots=plain(
                "deltic_", (GAUGE, "last_step_seconds", "Duration of the last step.", stats.last_step_ms / 1000)
            ),
            n_generated_tokens=plain(
                "deltic_",
                (COUNTER, "pictures", "Pictures of prompts.", self.n_pictures),
                (COUNTER, "picture_tokens", "Their tokens, cached ones too.", self.n_picture_tokens),
                (COUNTER, "scored_questions", "Questions of decisions, and documents that were scored.", self.n_scored),
            ),
            n_recomputed=plain(
                "deltic_",
                (COUNTER, "engine_restarts", "Times the engine process was started again.", self._n_restarts()),
            ),
        )
        yield from exported(stats.cache)
        about, info = {"version": __version__}, self._info()
        if info is not None:
            about |= {"device": info.device, "kernels": info.kernels}
        yield labelled(GAUGE, "deltic_build_info", "What runs here.", " ".join(about), {tuple(about.values()): 1})
        yield labelled(COUNTER, "deltic_sequences_finished", "Sequences that ended.", "finish_reason", self.finished)
        yield from (histogram.family() for histogram in self._histograms)
        most, n_held, adapters = self._adapters()
        if most:
            yield from plain(
                "deltic_",
                (GAUGE, "adapters_used", "LoRA adapters that are loaded.", n_held),
                (GAUGE, "adapters", "LoRA adapters that may be (--max-loras).", most),
            )
            requests = {adapter.name: adapter.n_requests for adapter in adapters}
            text = "Requests with an adapter, since that was loaded."
            yield labelled(COUNTER, "deltic_adapter_requests", text, "adapter", requests)
        if self._has_speech:
            yield from self.speech.families(stats.speech or SpeechStats())
        for part in (stats.replays, stats.pictures, stats.experts):
            if part is not None:
                yield from exported(part)

    def vllm_families(self) -> Iterable[Metric]:
        """The same numbers under vLLM's names, as far as it has such."""
        stats = self._stats()
        yield from plain("vllm:", *((kind, name, text, ours(stats)) for kind, name, text, ours in VLLM))
        if (info := self._info()) is not None:
            layout = {
                "block_size": PAGE_SIZE,
                "cache_dtype": info.kv_cache_dtype,
                "enable_prefix_caching": info.prefix_cache,
                "num_gpu_blocks": info.n_pages,
            }
            name, text = "vllm:cache_config_info", "How the KV cache is laid out."
            yield labelled(GAUGE, name, text, " ".join(layout), {tuple(layout.values()): 1})
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by their place, from 0 on."
        yield labelled(COUNTER, name, text, "position", {int(at) - 1: n for at, n in stats.accepted.items()})
        reasons: Counter[str] = Counter()
        for reason, count in self.finished.items():
            reasons[VLLM_REASONS.get(reason, "abort")] += count
        yield labelled(COUNTER, "vllm:request_success", "Sequences that ended.", "finished_reason", reasons)
        most, _, adapters = self._adapters()
        if most:  # the time, by which balancers know the newest
            running = ",".join(adapter.name for adapter in adapters if adapter.n_running)
            waiting = ",".join(adapter.name for adapter in adapters if adapter.n_waiting)
            labels = "max_lora running_lora_adapters waiting_lora_adapters"
            text, now_s = "Which LoRA adapters requests have.", time.time()
            yield labelled(GAUGE, "vllm:lora_requests_info", text, labels, {(most, running, waiting): now_s})
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

    def sglang_families(self) -> Iterable[Metric]:
        """Yields what routers read, under SGLang's names."""
        stats = self._stats()
        yield from plain("sglang:", *((kind, name, text, ours(stats)) for kind, name, text, ours in SGLANG))
        pages = {(PAGE_SIZE, stats.n_pages): 1}  # before SGLang had the two gauges
        yield labelled(GAUGE, "sglang:cache_config_info", "How the KV cache is laid out.", "page_size num_pages", pages)


class Exposition(Collector):
    """Exposition of all numbers of the process, as Prometheus reads them. One instance an app; no global
    state.
    """

    def __init__(self, keys: Sequence[KeyNumbers] = (), names: str = "deltic") -> None:
        """keys: read when the metrics are. names: whose the models' numbers have: deltic, vllm, sglang, or
        both of the first two.
        """
        self._names = ("deltic", "vllm") if names == "both" else (names,)
        self.models: dict[str, Metrics] = {}
        """Metrics of each model, by name."""
        self.on_demand: Callable[[], Iterable[Metric]] | None = None
        """Numbers of the models that come and go; None: all stay."""
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
            own = metrics.families() if "deltic" in self._names else ()
            vllm = metrics.vllm_families() if "vllm" in self._names else ()
            sglang = metrics.sglang_families() if "sglang" in self._names else ()
            theirs = [(family, {"model_name": name}) for family in [*vllm, *sglang]]
            for family, label in [*((family, {"model": name}) for family in own), *theirs]:
                samples = [sample._replace(labels=sample.labels | label) for sample in family.samples]
                family.samples = []
                families.setdefault(family.name, family).samples += samples
        yield from families.values()
        if self.on_demand is not None:
            yield from self.on_demand()
        yield from _keys(self._keys)
        yield labelled(COUNTER, "deltic_http_responses", "HTTP responses.", "route code", self.responses)
        closed = "Connections closed for what their clients did."
        yield labelled(COUNTER, "deltic_http_connections_closed", closed, "reason", self.closed)
        unknown = "Fields of requests that were left out."
        yield labelled(COUNTER, "deltic_unknown_fields", unknown, "route", self.unknown_fields)


MAX_KEYS = 100
"""Keys with labels of their own; what there are more is one more, REST."""
REST = "(others)"


def _keys(keys: Sequence[KeyNumbers]) -> Iterable[Metric]:
    """The numbers of each API key, by its name."""
    if not keys:
        return
    shown = list(keys[:MAX_KEYS])
    if len(keys) > MAX_KEYS:
        shown.append(rest := KeyNumbers(REST))
        for numbers in keys[MAX_KEYS:]:
            rest.n_open += numbers.n_open
            rest.responses += numbers.responses
            rest.limited += numbers.limited
            rest.n_prompt_tokens += numbers.n_prompt_tokens
            rest.n_cached_tokens += numbers.n_cached_tokens
            rest.n_generated_tokens += numbers.n_generated_tokens
    n_open = {n.name: n.n_open for n in shown}
    responses = {(n.name, code): count for n in shown for code, count in n.responses.items()}
    limited = {(n.name, limit): count for n in shown for limit, count in n.limited.items()}
    kinds = {"prompt": "n_prompt_tokens", "cached": "n_cached_tokens", "generated": "n_generated_tokens"}
    tokens = {(n.name, kind): getattr(n, field) for n in shown for kind, field in kinds.items()}
    yield labelled(GAUGE, "deltic_key_requests_open", "Generating requests of a key.", "key", n_open)
    yield labelled(COUNTER, "deltic_key_responses", "Its HTTP responses.", "key code", responses)
    text = "Of those, refused for its limits."
    yield labelled(COUNTER, "deltic_key_rate_limited", text, "key limit", limited)
    text = "Tokens of its requests that have ended; cached ones are prompt tokens, too."
    yield labelled(COUNTER, "deltic_key_tokens", text, "key kind", tokens)
