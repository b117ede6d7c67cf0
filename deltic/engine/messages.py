"""The plain data that crosses the queue between the server and an engine, but for its events (`events.py`).

Commands come first (`Request`, then the others), then outputs, metrics and what the engine says of itself.
`Command` is the union of what has a tag, and travels over ZeroMQ as msgpack. This file imports no other part
of Deltic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

import msgspec

MAX_BIASES = 1024
"""The most ids that one request may bias, and the most stop ids: the room in the sampler's buffers."""

MAX_LOGPROBS = 100
"""Alternatives per position that the sampler's buffers hold; the server usually allows fewer."""

MAX_GRAMMAR = 300_000
"""Characters of a grammar: compiling one of that size takes half a second, and one of twice that four times
as long.
"""

MAX_SCORED = 63
"""Log-probabilities that one branch may want: each is a row of logits at most, and those of one branch fit a
step whatever else runs.
"""

LOGPROBS_PACKED = 64
"""Positions of a prompt whose log-probabilities are packed at once: that takes some hundred microseconds."""

MAX_FIRST_FRAMES = 32
"""Frames that a request may want in its first chunk of audio.

They are made in one go, and all requests wait for it.
"""

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an answer must have.

    The grammar begins behind the thought; `allowed` and `bad_ids` hold in it, too, and what is forced comes
    whatever they say.
    """

    grammar: str = ""
    """A grammar as llguidance's LLMatcher takes it, JSON or Lark; "": none."""
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
    """Sequences of ids, the last of which may not be drawn where the others were drawn just before."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters by which one request's tokens are drawn.

    Defaults are the neutral ones: temperature 1, no filter, no penalty. The order of the transformations is
    the one of `reference/sample.py`. Penalties count as in the OpenAI API: presence and frequency look at
    generated tokens, repetition at prompt and generated tokens.
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
    """Seed of the draws; None: the server draws one, so that two equal requests differ."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """Number k: the log-probabilities of the drawn token and of the k most likely ones are wanted; None:
    none.
    """
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


class Speech(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a request to a speech model, beside its prompt.

    The prompt's ids are rows (`models/tts/shape.py`).
    """

    trailing_ids: tuple[int, ...] = ()
    """Text ids still to be said: one is fed with each frame, then the pad row."""
    is_open: bool = False
    """True if more of the ids are to come, by AddText.

    A frame is not computed before its id has come, or the text has ended.
    """
    voice: str = ""
    """Key of the encoded voice whose speaker vector and reference frames the prompt's rows name; "": none."""
    is_primed: bool = False
    """The vocoder starts behind the voice's reference codes."""
    temperature: float = 0.9
    """Temperature of the predictor's draws; 0: greedy."""
    top_k: int = 50
    """The predictor draws among so many of the most likely codes; 0: among all."""
    top_p: float = 1.0
    """The predictor draws among the most likely codes that have this probability together."""
    is_streamed: bool = True
    """Audio is played as it comes; otherwise it may come whole, at the end."""
    first_chunk_frames: int = 0
    """Frames of the first chunk of audio, at most MAX_FIRST_FRAMES; 0: the engine's choice."""

    def knows_text(self, frame: int) -> bool:
        """Returns whether the text for this frame is known: an id or, after the text's end, the pad row."""
        return not self.is_open or frame < len(self.trailing_ids)


class Picture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A picture of a prompt, or two frames of a video, as the vision tower takes it.

    It has rows * columns tokens, in raster order, each of a square of pixels (ops/geometry.TOKEN_PIXELS).
    """

    key: bytes
    """Names the content: the same pixels of the same sides have the same key."""
    rows: int
    columns: int
    pixels: bytes
    """uint8 [n_frames, rows * TOKEN_PIXELS, columns * TOKEN_PIXELS, 3]: red, green and blue, resized."""
    n_frames: int = 1
    """1: both frames are alike; 2."""
    first: int = 0
    """Index of the picture's first token in the prompt."""

    @property
    def identifier(self) -> str:
        """Name of the picture as routers know it: 64 hexadecimal digits, as of a SHA-256; they take no
        others.
        """
        return 2 * self.key.hex()

    @property
    def n_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """The token behind its last in the prompt."""
        return self.first + self.n_tokens


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A branch behind a request's prompt: tokens that are read and not drawn, and what is scored of them."""

    ids: list[int]
    """The branch's own tokens."""
    scored: list[tuple[int, int]]
    """Pairs (n, id), n ascending, at most MAX_SCORED: the log-probability of the id is wanted behind the
    prompt and the first n tokens of the branch.
    """


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The way from the hidden states of a prompt, behind the final norm, to one vector."""

    mode: Literal["last", "mean", "cls"]
    """The state of the last token, the mean of all, or the state of the first."""
    is_normalised: bool
    """True if the vector is made as long as 1."""
    n_dimensions: int
    """Elements that are kept, from the front, before it is."""


class JointQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question to a model's joint head, by where its parts stand in the prompt: tokens [begin, end)."""

    kind: int
    """0: yes or no; 1: a choice; 2: a score."""
    instruction: tuple[int, int]
    options: list[tuple[int, int]]


class Handling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Wishes of a client about its request that are no part of the answer. APIs hand them on as they are."""

    priority: int = 0
    """Lower runs first.

    A priority above 0 ranks among all requests, one below 0 among its tenant's alone. At equal priority
    tenants take turns, and each tenant's requests are first come, first served.
    """
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt, and so are pictures that were read."""
    use_cache: bool = True
    """True if the prefix cache is looked up for this request, and keeps what it computes."""
    wants_progress: bool = False
    """True if Outputs tell how much of the prompt is computed, before the first token."""


class Request(Handling, tag="request", kw_only=True, omit_defaults=True):
    """Request of one prompt with its parameters, as the server sends it to the engine."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    tenant: str = ""
    """The name of the API key; "" without keys."""
    namespace: str = ""
    """Prefixes are shared only within a namespace: an API key's name, without line ends, or "" for one
    namespace."""
    branches: list[Branch] = []
    """Branches of its n sequences, which are read behind the prompt; nothing is drawn (max_tokens 0).

    The prompt is computed once: all go on from its pages, and from copies of its state. The scores come as
    `Output.prompt_logprobs`.
    """
    boundaries: list[int] = []
    """Token offsets at which a chat message ends (from the template): where prompts branch."""
    speech: Speech | None = None
    adapter: bytes = b""
    """The key of the LoRA adapter that is applied; b"": none."""
    adapter_name: str = ""
    """The adapter's name for the client, for cache events; several names may have one key."""
    pictures: list[Picture] = []
    """Pictures in the order of their tokens, which do not overlap. The ids there are placeholders."""
    labels: dict[str, str] = {}
    """Labels that its client gave it, for `--trace`; empty without."""
    pooling: Pooling | None = None
    """Asks an embedder for the prompt's vector, and no token; None: the model writes."""
    questions: list[JointQuestion] = []
    """Asks a joint head for a logit of every option, and for no token."""

    @property
    def reads_hidden(self) -> bool:
        """True if the request asks for what is made of its prompt's hidden states, and for no token."""
        return self.pooling is not None or bool(self.questions)

    @property
    def prefix_scope(self) -> str:
        """Namespace and salt, and the voice of speech, whose rows do not say it: requests with the same share
        prefixes.
        """
        return f"{self.namespace}\n{self.cache_salt}{self.speech.voice if self.speech else ''}"


class Question(msgspec.Struct, kw_only=True):
    """A command that one EngineReply (`events.py`) answers."""

    number: int = 0
    """Names it among all that the client has asked; its answer has the same."""


class EncodeVoice(Question, tag="encode_voice", kw_only=True):
    """Asks a speech model for a VoiceEncoded.

    The model makes the voice that `Speech.voice` names, and keeps it, on disk if there is a directory for it.
    With neither samples nor a speaker vector it only asks whether the key is known.
    """

    key: str
    """Names the content: the same audio and mode have the same key."""
    samples: bytes = b""
    """float32, mono, at the model's rate, within [-1, 1]."""
    speaker: bytes = b""
    """float32 [h]: given instead of samples."""
    needs_codes: bool = False
    """True if reference codes and the vocoder's state behind them are to be made, too: for in-context
    cloning.
    """
    is_kept: bool = False
    """Store it on disk. Otherwise it lives with the process, as long as there is room."""


class DropVoice(msgspec.Struct, tag="drop_voice"):
    """Forgets an encoded voice, on disk as well; requests that run keep theirs."""

    key: str


class LoadAdapter(Question, tag="load_adapter"):
    """Asks for an AdapterLoaded: a LoRA adapter is read, beside the steps, and kept until as many
    DropAdapters as there were LoadAdapters.
    """

    path: str


class DropAdapter(msgspec.Struct, tag="drop_adapter"):
    """Forgets an adapter; requests that have it run to their end."""

    key: bytes


class Abort(msgspec.Struct, tag="abort"):
    """Ends a request (index None) or one of its n sequences.

    Unknown ids are ignored: it may have just ended.
    """

    id: str
    index: int | None = None
    if_waiting: bool = False
    """Abort it only if it never had a batch slot."""


class AddText(msgspec.Struct, tag="add_text"):
    """Addition to the text of a request whose `Speech.is_open`.

    One that is not open is left alone: it may have just ended.
    """

    id: str
    text_ids: list[int]
    """Ids that follow the request's trailing_ids."""
    is_last: bool = False
    max_tokens: int | None = None
    """Lowers the request's, where that follows from the length of the text."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The engine process leaves its loop and exits 0."""


class InspectCache(Question, tag="inspect_cache"):
    """Asks for a CacheReport.

    reset: first drop everything that the prefix cache holds, on disk as well.
    """

    reset: bool = False


class LocateCache(Question, tag="locate_cache"):
    """Asks for a CacheLocated: what the prefix cache has of a prompt, in files.

    request: as it would be sent to be answered; its pictures' pixels are not looked at.
    """

    request: Request


class Ping(msgspec.Struct, tag="ping"):
    """Asks for a Pong."""


Asking = InspectCache | LocateCache | EncodeVoice | LoadAdapter
"""Questions, each of which has an answer."""
Command = Request | AddText | Abort | DropVoice | DropAdapter | Ping | Shutdown | Asking


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability of one position's token and of the most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a prompt's tokens, in order, the first of which has none.

    They stay packed until they are read: as objects they would take ten times the memory, and making all of
    them at once would hold up every other request.
    """

    packed: list[bytes] = []
    """Entries packed in msgpack arrays of at most LOGPROBS_PACKED each."""
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
    """Tokens or audio that one step brought for one sequence.

    Exactly one Output of a sequence has a finish_reason: its last.
    """

    id: str
    index: int = 0
    token_ids: list[int] = []
    """New tokens; the stop token itself is included (the server does not print it)."""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the whole prompt, once, with the first Output of index 0; or those that the
    sequence's branch wants, with its only Output.
    """
    cached_tokens: int = 0
    """Prompt tokens that were not computed because the prefix cache had them."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop or eos token that ended it, when one did."""
    error: str | None = None
    queued_s: float = 0.0
    """Seconds the sequence waited for its batch slot; with its first Output."""
    audio: bytes = b""
    """New samples of a speech model: 16-bit signed little-endian mono, at its rate."""
    n_drafted: int = 0
    """Tokens of the step's draft."""
    n_accepted: int = 0
    """Tokens of the draft that were drawn, too."""
    n_read: int | None = None
    """Tokens of the prompt that are computed or cached so far, in an Output that tells nothing else."""
    vector: bytes = b""
    """The vector of a prompt that is pooled, or the logits of all options of its questions, in order.
    float32, with its only Output.
    """

    def one_by_one(self) -> list[Output]:
        """The same as an output for each of its tokens: who reads them may stop behind any."""
        ids, logprobs = self.token_ids, self.logprobs
        if len(ids) < 2:
            return [self]
        each = [Output(self.id, self.index, [id], logprobs and logprobs[i : i + 1]) for i, id in enumerate(ids)]
        first, last = each[0], each[-1]
        first.queued_s, first.cached_tokens = self.queued_s, self.cached_tokens
        first.prompt_logprobs = self.prompt_logprobs
        first.n_drafted, first.n_accepted = self.n_drafted, self.n_accepted
        last.finish_reason, last.stop_token_id = self.finish_reason, self.stop_token_id
        return each


class VideoInfo(msgspec.Struct, array_like=True):
    """Bounds of a model's videos. The numbers are the published ones of models whose files say nothing."""

    min_pixels: int = 4096
    """Pixels of all frames together, as for max_pixels."""
    max_pixels: int = 25_165_824
    fps: float = 2.0
    """Frames that are taken of a second."""
    min_frames: int = 4
    max_frames: int = 768
    is_capped: bool = False
    """True if a frame alone has a bound, too (server/chat/videos.fitted_frames)."""


class PictureInfo(msgspec.Struct, array_like=True):
    """Bounds of a model's pictures."""

    min_pixels: int
    """A picture with fewer is enlarged, one with more than max_pixels is made smaller."""
    max_pixels: int
    max_tokens: int
    """Tokens of one picture."""
    video: VideoInfo = msgspec.field(default_factory=VideoInfo)
    room_bytes: int = 1 << 29
    """Bytes of the pixels of all open requests together."""


class EmbedderInfo(msgspec.Struct, kw_only=True):
    """Facts of an embedder (models/embedder.py)."""

    size: int
    """Elements of a vector."""
    mode: Literal["last", "mean", "cls"]
    is_normalised: bool
    max_tokens: int
    """Tokens of the longest text; 0: as many as the model takes."""
    prompts: dict[str, str]
    """Texts that stand before a text, by their names."""
    default_prompt: str
    """Name of the one that is used where none is named; "": none is."""


class EngineInfo(msgspec.Struct, kw_only=True):
    """Facts that the engine resolved at start; the server needs them to validate requests."""

    model_name: str = ""
    """The name that the server gives the model; "" of a runner that nobody serves."""
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
    """True if prefill and decode give the same bits.

    Where they do not (GPU), a token of the prompt always goes through prefill and a generated one through
    decode, each a batch of its own, and only what prefill wrote is kept for others.
    """
    n_lookahead: int = 0
    """Tokens beyond a step's own for which a decode has pages: the device may start their decodes early."""
    max_drafts: int = 0
    """Longest draft in tokens; 0: the runner has no drafts."""
    has_draft_head: bool = False
    """True if the runner guesses tokens (`Draw.n_guesses`)."""
    draft_block: int = 0
    """Tokens that the runner guesses at once, at most, at about one cost; 0: it guesses one by one."""
    block_size: int = 1
    """Rows that a sequence takes at a time in a prefill batch.

    max_step_tokens is counted in such blocks.
    """
    max_prefill_seqs: int = 0
    """Prefill chunks in one step; 0: any number."""
    page_bytes: int = 1
    state_bytes: int = 16
    even_context: float = 32768.0
    """Tokens of context at which a token's attention takes as long as all the rest of it."""
    kernels: str = ""
    """The kernels that run: the CPU's instruction set they were compiled for, or Triton's version."""
    precision: str = "bf16"
    """The format of the weights as they run, a packed model's too: "bf16", one of --quantize, or that of most
    weights of a quantised checkpoint.
    """
    kv_cache_dtype: str = "bf16"
    """The format of keys and values in pages, as --kv-cache-dtype says it."""
    notices: list[str] = []
    n_prompt_ids: int = 0
    """Number of ids that a prompt may have, if it differs from vocab_size (speech: rows); 0: vocab_size."""
    is_speech: bool = False
    pictures: PictureInfo | None = None
    """Bounds and sizes of pictures; None: prompts have no pictures."""
    no_pictures: str = ""
    """Reason why a tower that is there is not run; "" where there is none."""
    has_joint_head: bool = False
    """True if requests may have `questions`."""
    embedder: EmbedderInfo | None = None
    """Facts of a model that makes vectors; None: it writes or speaks."""
    max_loras: int = 0
    """Adapters that may be loaded at once."""
    adapters: dict[str, bytes] = {}
    """Keys of those of --lora, by their names."""
    cache_files: str = ""
    """The directory of the prefix cache's files on disk, which only this model uses; "": there is none."""
    has_state: bool = True
    """True if a sequence has a recurrent state.

    Then it can start only after a checkpoint, else after any page.
    """
    start_s: dict[str, float] = {}
    """Seconds spent in each stage of the start."""
