"""Requests, sequences and events: the plain data that crosses the queue and lives in the engine.

Everything here is msgspec or plain Python; this file imports neither torch nor any other part of the engine.
Structs with a tag travel over ZeroMQ as msgpack; `Sequence` never leaves the engine process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import msgspec

MAX_BIASES = 1024
"""Ids that one request may bias, and stop ids it may have: the sampler's buffers hold as many for each sequence."""

MAX_LOGPROBS = 100
"""Alternatives per position that the sampler's buffers hold; the server usually allows fewer."""

LOGPROBS_PACKED = 64
"""Positions of a prompt whose log-probabilities are packed, and unpacked, at once: some hundred microseconds."""

MAX_FIRST_FRAMES = 32
"""Frames that a request may want in its first chunk of audio. They are made in one go, and everybody waits for it."""

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must look like. The grammar begins behind the thought; `allowed` and `bad_ids` hold in it, too, and what is
    forced comes whatever they say."""

    grammar: str = ""
    """As llguidance's LLMatcher takes it, JSON or Lark; "": none."""
    think_end_id: int | None = None
    """The prompt opened a thought, which is free until this token has come."""
    think_budget: int | None = None
    """Tokens of the thought, after which `close_ids` are forced."""
    close_ids: tuple[int, ...] = ()
    """Contain `think_end_id`."""
    begin_ids: tuple[int, ...] = ()
    """Forced behind `think_end_id`, before the grammar begins."""
    allowed: bytes = b""
    """Bit id % 8 of byte id // 8: whether the id may be drawn at all; b"": any may."""
    bad_ids: tuple[tuple[int, ...], ...] = ()
    """Each of some ids, the last of which may not be drawn where the others were drawn just before."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are drawn. Defaults are the neutral ones: temperature 1, no filter, no penalty.

    The order of the transformations is the one of `reference/sample.py`. Penalties count as in the OpenAI API:
    presence and frequency look at generated tokens, repetition at prompt and generated tokens.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: drawn by the server, so that two equal requests differ."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """None: none; k: the drawn token's log-probability and the k most likely alternatives'."""
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


class Speech(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request to a speech model has beside its prompt, whose ids are rows then (`models/speech_shapes.py`)."""

    trailing_ids: tuple[int, ...] = ()
    """Text ids still to be said: one is fed with each frame, then the pad row."""
    is_open: bool = False
    """More of them are to come, by AddText. A frame whose id is not there yet is not computed before it is, or the text has ended."""
    voice: str = ""
    """Key of the encoded voice whose speaker vector and reference frames the prompt's rows name; "": none."""
    is_primed: bool = False
    """The vocoder starts behind the voice's reference codes."""
    temperature: float = 0.9
    """Of the predictor's draws; 0: greedy. So the next two."""
    top_k: int = 50
    top_p: float = 1.0
    is_streamed: bool = True
    """Audio is played as it comes; otherwise it may come whole, at the end."""
    first_chunk_frames: int = 0
    """Frames of the first chunk of audio, at most MAX_FIRST_FRAMES; 0: the engine's choice."""

    def knows_text(self, frame: int) -> bool:
        """Whether it is known what goes with this frame: an id, or, behind the end of the text, the pad row."""
        return not self.is_open or frame < len(self.trailing_ids)


class Request(msgspec.Struct, tag="request", kw_only=True, omit_defaults=True):
    """One prompt with its parameters, as the server sends it to the engine."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower runs first: above 0 of all requests, below 0 of its owner's alone. Of equal ones owners take turns, and what one
    owner sent is first come, first served."""
    owner: str = ""
    """The name of the API key; "" without keys."""
    party: str = ""
    """Prefixes are shared only within a party: an API key's name, without line ends, or "" where all are one."""
    boundaries: list[int] = []
    """Token offsets at which a chat message ends (from the template): where prompts branch."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt."""
    use_cache: bool = True
    """Whether the prefix cache is looked up for this request, and keeps what it computes."""
    speech: Speech | None = None


class EncodeVoice(msgspec.Struct, tag="encode_voice", kw_only=True):
    """Asks a speech model for a VoiceEncoded: makes what `Speech.voice` names, and keeps it, on disk where there is a place for it.
    With neither samples nor a speaker vector: whether the key is known."""

    key: str
    """Of the content: the same audio and mode have the same key."""
    samples: bytes = b""
    """float32, mono, at the model's rate, within [-1, 1]."""
    speaker: bytes = b""
    """float32 [h]: given instead of samples."""
    needs_codes: bool = False
    """In-context cloning: reference codes and the vocoder's state behind them, too."""
    is_kept: bool = False
    """Stored on disk; otherwise it lives with the process, as long as there is room."""


class DropVoice(msgspec.Struct, tag="drop_voice"):
    """Forgets an encoded voice, on disk as well; requests that run keep theirs."""

    key: str


class Abort(msgspec.Struct, tag="abort"):
    """Ends a request (index None) or one of its n sequences. Unknown ids are ignored: it may have just ended."""

    id: str
    index: int | None = None
    if_waiting: bool = False
    """Only a request that never had a place."""


class AddText(msgspec.Struct, tag="add_text"):
    """More of the text of a request whose `Speech.is_open`. One that is not open is left alone: it may have just ended."""

    id: str
    text_ids: list[int]
    """Behind its trailing_ids."""
    is_last: bool = False
    max_tokens: int | None = None
    """Lowers the request's, where that follows from the length of the text."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The engine process leaves its loop and exits 0."""


class InspectCache(msgspec.Struct, tag="inspect_cache"):
    """Asks for a CacheReport. reset: after everything that the prefix cache holds was dropped, on disk as well."""

    reset: bool = False


class Ping(msgspec.Struct, tag="ping"):
    """Asks for a Pong."""


Command = Request | AddText | Abort | InspectCache | EncodeVoice | DropVoice | Ping | Shutdown


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability of one position's token and of the most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a prompt's tokens, in order, the first of which has none. Read once or twice, and as they are needed:
    as objects they would take ten times as much, and hold up everybody while they are all made.
    """

    packed: list[bytes] = []
    """Each a msgpack array of at most LOGPROBS_PACKED entries."""
    n: int = 0
    """Entries."""

    def extend(self, added: Iterable[TokenLogprob | None]) -> None:
        entries = list(added)
        for start in range(0, len(entries), LOGPROBS_PACKED):
            self.packed.append(msgspec.msgpack.encode(entries[start : start + LOGPROBS_PACKED]))
        self.n += len(entries)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        return chain.from_iterable(map(_unpack_logprobs, self.packed))


_unpack_logprobs = msgspec.msgpack.Decoder(list[TokenLogprob | None]).decode


class Output(msgspec.Struct, array_like=True):
    """What one step brought for one sequence. Exactly one Output of a sequence has a finish_reason: its last."""

    id: str
    index: int = 0
    token_ids: list[int] = []
    """New tokens; the stop token itself is included (the server does not print it)."""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """All of them, once, with the first Output of index 0."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed because the prefix cache had them."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop or eos token that ended it, when one did."""
    error: str | None = None
    queued_s: float = 0.0
    """Seconds the sequence waited for its place; with its first Output."""
    audio: bytes = b""
    """New samples of a speech model: 16-bit signed little-endian mono, at its rate."""


class CacheStats(msgspec.Struct, array_like=True):
    """The prefix cache since the start: monotonic counters, but for the gauges at the end."""

    n_lookups: int = 0
    n_hits: int = 0
    n_lookup_tokens: int = 0
    """Prompt tokens that were looked up."""
    n_hit_tokens: int = 0
    """Of those, the ones that were not computed again."""
    checkpoints_taken: dict[str, int] = {}
    """By kind: message, ladder, end, junction, tail."""
    n_pages_evicted: int = 0
    """From device memory, to a lower tier or to nowhere; so the next."""
    n_checkpoints_evicted: int = 0
    read_bytes: dict[str, int] = {}
    """Brought back to device memory, by the tier it came from: host, disk."""
    written_bytes: dict[str, int] = {}
    """Moved or copied to a tier: host, disk."""
    n_damaged: int = 0
    """Files of the disk tier that were not what they should be."""
    n_pages: int = 0
    """Pages that the tree holds in device memory, those of running sequences included."""
    n_checkpoints: int = 0
    """State slots that are checkpoints."""


class SpeechStats(msgspec.Struct, array_like=True):
    """The vocoder's streams: gauges, then monotonic counters."""

    n_streams_used: int = 0
    """Stream slots in use: sequences whose first chunk has been begun and whose last has not left."""
    n_streams: int = 0
    n_frames: int = 0
    """Frames that became audio."""
    n_underruns: int = 0
    """Chunks that came more than 0.1 s too late for a client that plays as it receives."""
    vocoder_s: float = 0.0


class Stats(msgspec.Struct, array_like=True):
    """The engine's gauges and monotonic counters, sent when it is ready and with every step's outputs."""

    n_running: int = 0
    n_waiting: int = 0
    n_pages_used: int = 0
    n_pages: int = 0
    n_slots_used: int = 0
    n_slots: int = 0
    n_steps: int = 0
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    n_preemptions: int = 0
    n_recomputed: int = 0
    """Sequences that were computed once more, since their logits were not finite."""
    last_step_ms: float = 0.0
    cache: CacheStats = msgspec.field(default_factory=CacheStats)
    speech: SpeechStats | None = None


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the engine resolved at start; the server needs it to validate requests."""

    model_name: str
    vocab_size: int
    """Ids that can be drawn and given: without the padding rows of the embedding."""
    eos_token_ids: list[int]
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    n_pages: int
    n_slots: int
    """State slots: of the sequences that run, and checkpoints."""
    device: str
    on_gpu: bool = False
    prefix_cache: bool = True
    canonical_decode: bool = True
    """Whether prefill and decode give the same bits. Where they do not (GPU), a token of the prompt always goes through prefill
    and a generated one through decode, each a batch of its own, and only what prefill wrote is kept for others."""
    n_lookahead: int = 0
    """Tokens beyond the one of a step for which a decode has pages, so that the next may be started before this one was read."""
    block_size: int = 1
    """Rows of a prefill batch that one sequence takes at a time: max_step_tokens is counted in whole blocks."""
    max_prefill_seqs: int = 0
    """Prefill chunks in one step; 0: any number."""
    page_bytes: int = 1
    state_bytes: int = 16
    even_context: float = 32768.0
    """Tokens of context at which a token's attention takes as long as all the rest of it."""
    operators: dict[str, str] = {}
    """Operator name -> implementation chosen."""
    notices: list[str] = []
    n_prompt_ids: int = 0
    """Ids that a prompt may have, where these are not those that can be drawn (speech: rows); 0: vocab_size."""
    is_speech: bool = False
    has_state: bool = True
    """Whether a sequence has a recurrent state, so that it can start only behind a checkpoint; else behind any page."""
    start_s: dict[str, float] = {}
    """Seconds spent in each stage of the start."""


class Loading(msgspec.Struct, tag="loading"):
    """Progress of the start: stage name and the part done, 0 to 1."""

    stage: str
    done: float


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class StepOutputs(msgspec.Struct, tag="step"):
    """All Outputs of one step, and the gauges after it."""

    outputs: list[Output]
    stats: Stats


class CacheReport(msgspec.Struct, tag="cache_report"):
    """The answer to InspectCache: plain data, as `GET /cache` shows it."""

    summary: dict[str, Any]


class VoiceEncoded(msgspec.Struct, tag="voice_encoded"):
    """The answer to EncodeVoice."""

    key: str
    n_frames: int = 0
    """Reference frames; 0 without codes."""
    error: str | None = None
    """Why there is no such voice now."""


class StartFailed(msgspec.Struct, tag="start_failed"):
    """The engine cannot serve (bad checkpoint, plan that does not fit); it exits. The message says what to do."""

    message: str


class Pong(msgspec.Struct, tag="pong"):
    """The answer to Ping, between two steps."""

    is_stuck: bool = False
    """Whether what is awaited from the lower tiers has not come on since the last Ping."""


Event = Loading | Ready | StepOutputs | CacheReport | VoiceEncoded | Pong | StartFailed


def mixed_seed(seed: int, index: int) -> int:
    """The seed of sequence `index`: the request's own for the first, else 63 bits of splitmix64 of both."""
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence in the engine: its tokens and what it owns.

    `tokens[:n_computed]` have their KV in `pages` and their recurrent state in `start_slot` or, without one, in `slot`;
    the rest is still to be run. While running, exactly one token (the last drawn) is not computed yet.
    """

    request: Request
    index: int
    seed: int
    """Seed of this sequence's draws: the request's seed, mixed with `index` when n > 1."""
    tokens: array[int]
    n_prompt: int
    n_computed: int = 0
    pages: list[int] = field(default_factory=list)
    pages_version: int = 0
    """Raised whenever an entry of `pages` that a step may have seen is another one now."""
    place: int | None = None
    """Its row in the tables of the step (page table, sampling parameters), while it runs."""
    slot: int | None = None
    """The state slot that its chunks write."""
    start_slot: int | None = None
    """The slot that its next chunk starts from, when that is a checkpoint, which is only read."""
    arrival: int = 0
    """Order of arrival, to break ties of equal turn."""
    turn: int = 0
    """In the order of which owners are served. It rises when its owner sends something more urgent."""
    arrived_at: float = 0.0
    """time.monotonic() of its arrival."""
    queued_s: float = 0.0
    """How long it first waited for its place."""
    siblings: list[Sequence] = field(default_factory=list)
    """n > 1: sequences that start when this one's prompt is done (they share its pages)."""
    prompt_logprobs: PromptLogprobs | None = None
    n_preempted: int = 0
    is_second_try: bool = False
    """Its logits were not finite once: it was computed again from nothing, without the cache, and will not be another time."""
    prefix: Any = None
    """What ties it to the prefix tree (cache.Prefix); None: it neither reads nor feeds the tree."""
    n_cached: int = 0
    """Prompt tokens that it found there."""
    waits_for: tuple[Sequence, int] | None = None
    """Another, whose prefill is to reach that many tokens before this one is admitted: they begin with the same."""
    voice: Any = None
    """What the prompt's rows of a voice are (voices.Voice), kept as long as the sequence; None: it has none."""
    guide: Any = None
    """What says which ids its next token may be (constraint.Guide); None: all."""
    finish_reason: FinishReason | None = None

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens known but not computed: the whole prompt at first, one while decoding."""
        return len(self.tokens) - self.n_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first sequence of the request brings them, with its first token; computed again later, it does not."""
        return self.request.params.prompt_logprobs is not None and self.index == 0 and self.n_generated == 0

    def begin_prompt_logprobs(self) -> None:
        """If it wants them: what it has is forgotten, and the first token has none."""
        if self.wants_prompt_logprobs:
            self.prompt_logprobs = PromptLogprobs()
            self.prompt_logprobs.extend([None])

    @property
    def lacks_text(self) -> bool:
        """Speech: whether the frame of its last token goes with a text that has not come yet. It stalls until then."""
        speech = self.request.speech
        return speech is not None and not speech.knows_text(self.n_generated - 1)

    @property
    def can_draw(self) -> bool:
        """Whether its next token can be: it is known which ids that may be, and the text that goes before it is there."""
        return not self.lacks_text and (self.guide is None or bool(self.guide.is_ready))


@dataclass(slots=True)
class Chunk:
    """A run of one sequence's tokens in a step: `tokens[start : start + length]`."""

    sequence: Sequence
    start: int
    length: int
    prompt_logprobs: bool = False
    """The log-probabilities of this chunk's own tokens are wanted (a logits row for each)."""
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    """(n, slot): the state after the chunk's first n tokens is stored in `slot`, too. start + n is a multiple of
    PAGE_SIZE, 0 < n < length, ascending."""

    @property
    def is_decode(self) -> bool:
        """Whether it is one generated token. One token of a prompt, the last behind a full page, is a prefill."""
        return self.length == 1 and self.start >= self.sequence.n_prompt


@dataclass(slots=True)
class Draw:
    """A token to draw: from the logits after `chunk`'s last token, with `sequence`'s parameters."""

    chunk: int
    """Index into Step.chunks."""
    sequence: Sequence


@dataclass(slots=True)
class Step:
    """What runs in one forward, or, where decodes are a batch of their own, in two. Decodes come first, then prefill chunks.

    A decode without a draw computes a token that was drawn before, and whose KV and state were lost. (Where prefill and decode
    give the same bits, what was lost comes back in chunks of any length, and one of a preempted sequence may stand behind others.)

    After the forward and before the draws are read, states and pages are copied for sequences that fork off a
    finished prompt: `slot_copies` and `page_copies` are (source, destination) pairs.
    """

    chunks: list[Chunk] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def put_decodes_first(self) -> None:
        """Sequences that came back from host memory decode, and were planned among the prefills."""
        order = sorted(range(len(self.chunks)), key=lambda i: not self.chunks[i].is_decode)
        place = {old: new for new, old in enumerate(order)}
        self.chunks = [self.chunks[i] for i in order]
        for draw in self.draws:
            draw.chunk = place[draw.chunk]


@dataclass(slots=True)
class StepResult:
    """What the device gave back: `token_ids[i]` and `logprobs[i]` belong to `Step.draws[i]`.

    `prompt_logprobs[c]` holds, for chunk c, the entries of tokens start+1 .. start+length (those whose predecessor
    is in the chunk and which exist in the prompt).
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    codes: Any = None
    """Of a speech model: int32 [n_decodes, 16], the frame of chunk i, a decode, in row i (decodes come first)."""
