"""Events that an engine sends to the server: its progress, its statistics, the outputs of steps, and replies.

`Event` is the union of what has a tag, and travels over ZeroMQ as msgpack. What comes the other way, and what
both know, is in `messages.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, get_type_hints

import msgspec

from deltic.engine.messages import EngineInfo, Output


class Metric(msgspec.Struct, frozen=True):
    """Metadata with which /metrics shows a field of statistics."""

    name: str
    text: str
    is_counter: bool
    """True if the value only grows, and goes on where a process that died had left it."""
    label: str = ""
    """Label of the names in a field of counts by name."""


def gauge(name: str, text: str) -> msgspec.Meta:
    """The annotation of a field that /metrics shows as it is."""
    return msgspec.Meta(extra={"metric": Metric(f"deltic_{name}", text, is_counter=False)})


def counter(name: str, text: str, label: str = "") -> msgspec.Meta:
    """The annotation of a field that only grows."""
    return msgspec.Meta(extra={"metric": Metric(f"deltic_{name}", text, True, label)})


@cache
def metrics_of(part: type[msgspec.Struct]) -> dict[str, Metric]:
    """The metrics among the fields of a part of Stats, by the names of the fields."""
    hints = get_type_hints(part, include_extras=True)
    metas = {name: getattr(hints[name], "__metadata__", ()) for name in part.__struct_fields__}
    return {name: meta.extra["metric"] for name, (meta,) in ((n, m) for n, m in metas.items() if m)}


class ReplayStats(msgspec.Struct, array_like=True):
    """Recorded steps (CUDA graphs) of a model, its vocoder's too: monotonic counters.

    All are recorded before the engine is ready. One that is recorded later would hold up the steps.
    """

    n_recorded: Annotated[
        int, counter("graph_recordings", "CUDA graphs that were recorded; later ones hold up steps.")
    ] = 0
    n_replayed: Annotated[int, counter("graph_replays", "CUDA graphs that were replayed.")] = 0


class ExpertStats(msgspec.Struct, array_like=True):
    """Routed experts that are outside the GPU: monotonic counters."""

    n_hits: Annotated[int, counter("expert_hits", "Experts of decodes that were in a slot on the GPU.")] = 0
    n_fetched: Annotated[int, counter("expert_fetches", "Experts of decodes that came over the GPU's link.")] = 0
    n_bytes: Annotated[
        int, counter("expert_fetched_bytes", "Bytes of experts that came over the link for decodes.")
    ] = 0
    n_prefill_bytes: Annotated[
        int, counter("expert_prefill_bytes", "Bytes of experts that came over the link for prefills.")
    ] = 0


class CacheStats(msgspec.Struct, array_like=True):
    """The prefix cache: gauges, then monotonic counters."""

    n_pages: Annotated[
        int, gauge("prefix_pages", "Pages of the prefix cache in the pool, those of running sequences included.")
    ] = 0
    n_checkpoints: Annotated[
        int, gauge("prefix_checkpoints", "State slots that are checkpoints of the prefix cache.")
    ] = 0
    n_lookups: Annotated[int, counter("prefix_cache_lookups", "Prompts looked up in the prefix cache.")] = 0
    n_hits: Annotated[int, counter("prefix_cache_hits", "Of those, the ones that began in a way it knew.")] = 0
    n_lookup_tokens: Annotated[
        int, counter("prefix_cache_lookup_tokens", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    n_hit_tokens: Annotated[
        int, counter("prefix_cache_hit_tokens", "Of those, the ones that were not computed again.")
    ] = 0
    n_pages_evicted: Annotated[
        int, counter("prefix_pages_evicted", "Pages that left the pool, to a lower tier or for good.")
    ] = 0
    n_checkpoints_evicted: Annotated[
        int, counter("prefix_checkpoints_evicted", "Checkpoints that left the pool, to a lower tier or for good.")
    ] = 0
    n_damaged: Annotated[
        int, counter("prefix_damaged_files", "Files of --cache-dir that were not what they should be.")
    ] = 0
    checkpoints_taken: Annotated[
        dict[str, int],
        counter("prefix_checkpoints_taken", "Checkpoints taken, by what made their place worth one.", "kind"),
    ] = {}
    """Counts by kind: message, ladder, end, junction, tail, picture."""
    read_bytes: Annotated[
        dict[str, int], counter("prefix_read_bytes", "Brought back to the pool, by the tier it came from.", "tier")
    ] = {}
    """Bytes by tier: host, disk."""
    written_bytes: Annotated[
        dict[str, int], counter("prefix_written_bytes", "Moved or copied to a lower tier.", "tier")
    ] = {}
    """Bytes by tier: host, disk."""


class SpeechStats(msgspec.Struct, array_like=True):
    """The vocoder's streams: gauges, then monotonic counters."""

    n_streams_used: Annotated[
        int, gauge("speech_streams_used", "Streams that the vocoder has begun and not ended.")
    ] = 0
    """Stream slots in use: sequences whose first chunk has been begun and whose last has not left."""
    n_streams: Annotated[int, gauge("speech_streams", "Streams that it may have at once.")] = 0
    n_frames: Annotated[int, counter("speech_frames", "Frames of 80 ms that were vocoded.")] = 0
    n_underruns: Annotated[
        int, counter("speech_late_pieces", "Pieces that the engine saw leave too late for playback.")
    ] = 0
    """Chunks that came more than 0.1 s too late for a client that plays as it receives."""
    vocoder_s: Annotated[float, counter("speech_vocoder_seconds", "Time that vocoding took.")] = 0.0


class PictureStats(msgspec.Struct, array_like=True):
    """The vision tower: gauges, then monotonic counters."""

    n_blocks_used: Annotated[int, gauge("tower_blocks_used", "Blocks of 64 tokens that encoded pictures fill.")] = 0
    n_blocks: Annotated[int, gauge("tower_blocks", "Blocks that there are for them.")] = 0
    n_encoded: Annotated[int, counter("tower_pictures", "Pictures that the vision tower encoded.")] = 0
    n_hits: Annotated[int, counter("tower_hits", "Pictures of prompts that were encoded for an earlier one.")] = 0
    tower_s: Annotated[float, counter("tower_seconds", "Time that the vision tower took.")] = 0.0


class Stats(msgspec.Struct, array_like=True):
    """The engine's gauges and monotonic counters, sent when it is ready and with every step's outputs."""

    n_running: Annotated[int, gauge("sequences_running", "Sequences that own a state slot.")] = 0
    n_waiting: Annotated[int, gauge("sequences_waiting", "Sequences that wait for a batch slot.")] = 0
    n_pages_used: Annotated[
        int, gauge("pages_used", "KV pages of sequences; what only the cache holds is as good as free.")
    ] = 0
    n_pages: Annotated[int, gauge("pages", "KV pages there are.")] = 0
    n_slots_used: Annotated[int, gauge("state_slots_used", "State slots in use.")] = 0
    n_slots: Annotated[int, gauge("state_slots", "State slots there are.")] = 0
    n_steps: Annotated[int, counter("steps", "Steps of the engine.")] = 0
    n_prompt_tokens: Annotated[int, counter("prompt_tokens", "Prompt tokens computed.")] = 0
    n_generated_tokens: Annotated[int, counter("generated_tokens", "Tokens drawn.")] = 0
    n_preemptions: Annotated[int, counter("preemptions", "Sequences that had to give back their memory.")] = 0
    n_recomputed: Annotated[
        int, counter("recomputed_sequences", "Sequences computed once more, since their logits were not finite.")
    ] = 0
    drafted: Annotated[dict[str, int], counter("draft_tokens", "Tokens that were guessed ahead.", "position")] = {}
    """Counts by the tokens' place in the draft, from 1 on."""
    accepted: Annotated[
        dict[str, int], counter("accepted_draft_tokens", "Of those, the ones that were drawn, too.", "position")
    ] = {}
    last_step_ms: float = 0.0
    cache: CacheStats = msgspec.field(default_factory=CacheStats)
    speech: SpeechStats | None = None
    pictures: PictureStats | None = None
    replays: ReplayStats | None = None
    """Counts of a GPU's recorded steps; a CPU has none."""
    experts: ExpertStats | None = None
    """Counts of experts that are outside the GPU; None: none are."""

    @property
    def pages_used_ratio(self) -> float:
        """Part of the KV pages that sequences have."""
        return self.n_pages_used / max(1, self.n_pages)

    @property
    def n_drafted(self) -> int:
        return sum(self.drafted.values())

    @property
    def n_accepted(self) -> int:
        return sum(self.accepted.values())


class EngineReply(msgspec.Struct, kw_only=True):
    """An event that answers a Question."""

    number: int = 0
    """The question's."""


class Loading(msgspec.Struct, tag="loading"):
    """Progress of the start: stage name and the part done, 0 to 1."""

    stage: str
    done: float


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class StepOutputs(msgspec.Struct, tag="step"):
    """Outputs of one step, all of them, and the gauges after it."""

    outputs: list[Output]
    stats: Stats


class CacheReport(EngineReply, tag="cache_report"):
    """The answer to InspectCache: plain data, as `GET /cache` shows it."""

    summary: dict[str, object]


class CacheLocated(EngineReply, tag="cache_located"):
    """The answer to LocateCache."""

    id: str
    """The id of the request that was located."""
    n_tokens: int = 0
    """Tokens of the prompt up to its deepest checkpoint; 0: there is none."""
    files: list[str] = []
    """Pages from the first on, then the state; another server may delete them at any time."""
    error: str | None = None
    """Reason why the pages could not be written, in one line; None if they were."""
    is_refused: bool = False
    """The error is the request's."""


class VoiceEncoded(EngineReply, tag="voice_encoded"):
    """The answer to EncodeVoice."""

    key: str
    n_frames: int = 0
    """Reference frames; 0 without codes."""
    error: str | None = None
    """Reason why the voice could not be encoded; None if it was."""


class AdapterLoaded(EngineReply, tag="adapter_loaded"):
    """The answer to LoadAdapter."""

    path: str
    key: bytes = b""
    """Names its content, for `Request.adapter`."""
    rank: int = 0
    """The largest of its ranks."""
    n_bytes: int = 0
    """Bytes on the device."""
    error: str | None = None
    """Reason why the adapter could not be loaded, in one line; None if it was."""


class StartFailed(msgspec.Struct, tag="start_failed"):
    """The engine cannot serve (bad checkpoint, plan that does not fit); it exits.

    The message says what to do.
    """

    message: str


class Needs(msgspec.Struct, tag="needs"):
    """Memory that a model takes once it is loaded, as it is planned where no other model is."""

    device: str
    """Device, as --device says it: cpu or cuda."""
    n_bytes: int
    """Bytes of the device's memory: the plan's, and what is used beside it."""
    limit_bytes: int
    """The most that all models on the device may take together."""
    free_bytes: int
    """Bytes of the device's memory that this was planned in."""
    settings: dict[str, int | float]
    """Settings, by the names of EngineConfig's fields, with which the same is planned in less memory."""


class Pong(msgspec.Struct, tag="pong"):
    """The answer to Ping, between two steps."""

    is_stuck: bool = False
    """True if a load from the lower tiers has made no progress since the last Ping."""


Event = Loading | Ready | StepOutputs | CacheReport | CacheLocated | VoiceEncoded | AdapterLoaded | Pong | StartFailed
