"""The offline API: a model in this process, without server and queue.

    from deltic import LLM
    with LLM("Qwen/Qwen3.5-0.8B") as llm:
        for answer in llm.generate(["Once upon a time"], max_tokens=64):
            print(answer.text)

It runs the engine that the server runs, with the same steps, so the same request gives the same tokens.
An LLM is for one thread at a time; an AsyncLLM (async_llm.py) has one in a thread of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltic.config import BUILT_IN, ConfigError, EngineConfig, nearest
from deltic.config_sources import resolve
from deltic.engine.engine import MAX_FAILURES, Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Constraint, Output, Request, SamplingParams
from deltic.engine.trace import Trace
from deltic.json_types import JsonObject
from deltic.llm_calls import (
    ASIDE,
    AnswerParams,
    AnswerPiece,
    Bar,
    CallScores,
    Completion,
    ContinuationScores,
    OpenCall,
    OpenCompletion,
    PreparedCall,
    form_fields,
    sendable,
    stacked,
)
from deltic.models.checkpoint import drawable_ids, speaks, text_directory, tokenizer_directory, tokenizer_json
from deltic.server.api import decode, protocol
from deltic.server.api.decisions import DecisionAnswer, DecisionQuestion, DecisionRequest, answer_of, asked_of
from deltic.server.api.embeddings import vector_requests
from deltic.server.chat.answer import Choice
from deltic.server.chat.constraint import Constrainer
from deltic.server.chat.decisions import AskedPrompt, QuestionScores, asked_prompt, continuations_asked
from deltic.server.chat.messages import find_pictures
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.picture_parts import PictureReader, Pictures
from deltic.server.chat.request import NO_DEFAULTS, Chat, Shown, context_limit
from deltic.server.chat.template import ChatTemplate, render
from deltic.server.errors import ApiError
from deltic.server.urls import Hosts
from deltic.text import SamplingDefaults, Tokenizer

Message = Mapping[str, object]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]
"""Text, or several, or the token ids of each."""
Chats = Sequence[Message] | Sequence[Sequence[Message]]
"""The messages of one conversation, or of several."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""Parameters for all prompts, or one for each."""
T = TypeVar("T")

SAVE_S = 30.0
"""Seconds for which an LLM that is closed goes on writing to its cache_dir."""


class EngineStopped(RuntimeError):
    """The engine failed several steps in a row, or was closed; make a new LLM."""


class LLM:
    """A loaded model. Making one reads the weights and allocates all memory it will ever use."""

    def __init__(
        self,
        model: str = BUILT_IN,
        *,
        chat_template: Path | None = None,
        lora: Mapping[str, str | Path] | None = None,
        progress: bool = True,
        **settings: object,
    ) -> None:
        """`settings` are the fields of EngineConfig: dummy, threads, memory_gb, max_model_len, ...
        `lora`: paths of adapters, by the names that `generate` and `chat` take. `progress`: whether a
        terminal is shown, in stderr, how far loading is.

        Raises ConfigError, TokenizerError, UnsupportedModelError or CheckpointError: all of them ValueErrors
        that say what to do.
        """
        if any("=" in name for name in lora or ()):
            raise ConfigError(f"lora {list(lora or ())}: a name may have no '='")
        adapters = {"lora": [f"{name}={path}" for name, path in lora.items()]} if lora else {}
        self.config = resolve(EngineConfig, {"model": model, **adapters, **settings})
        if speaks(self.config):
            raise ConfigError(f"{self.config.dummy or model} is a speech model. Use deltic say or deltic serve.")
        directory = tokenizer_directory(self.config)
        self.tokenizer = Tokenizer.load(directory)
        self._template = ChatTemplate.load(directory, self.tokenizer, chat_template)
        from deltic.runtime.build import build_runner  # imports torch: after what can fail at once

        vocabulary = Vocabulary(lambda: tokenizer_json(self.config))
        if self.config.dummy or Path(self.config.model).exists():  # else the files are still to be downloaded
            vocabulary.begin(lambda: drawable_ids(self.config))
        trace = Trace(self.config.trace) if self.config.trace is not None else None
        with Bar(progress) as bar:
            self._engine = Engine(
                build_runner(self.config, lambda stage, done: bar.show(f"loading: {stage}", done)),
                vocabulary=vocabulary,
            )
        self._engine.trace = trace
        self._close = weakref.finalize(self, self._engine.close, SAVE_S)
        self._constrainer = Constrainer(self.tokenizer, self._template.call_form if self._template else None)
        self.info = self._engine.info
        self._ids = count()
        self._calls: dict[str, OpenCall] = {}
        """Calls that are not complete, by the ids of their requests."""
        # Where no SamplingParams are given: the checkpoint's own, for as long as the context lasts.
        defaults = msgspec.structs.asdict(SamplingDefaults.load(text_directory(self.config)))
        del defaults["max_new_tokens"]
        self.default_params = AnswerParams(max_tokens=self.info.max_model_len, **defaults)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self, prompts: Prompts, params: Params = None, *, progress: bool = True, **options: object
    ) -> list[Completion]:
        """Continues each prompt (text, or token ids); completions in the prompts' order.

        `params`: for all prompts, or one for each. `progress`: whether a terminal is shown, in stderr, how
        many answers are complete. `options`: fields of SamplingParams, which count more than those of
        `params`, `stop` and `response_format` among them; `lora`, the name of the adapter that is applied;
        `priority`; `cache_salt`: prefixes are shared only with requests of the same salt; `use_cache`: False
        neither reads nor feeds the prefix cache.
        Raises ValueError, and runs none, when one cannot run.
        """
        return self._complete(self.prepare_text(prompts, params, **options), progress)

    def chat(
        self,
        messages: Chats,
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        progress: bool = True,
        **options: object,
    ) -> list[Completion]:
        """Answers one conversation, or several: OpenAI messages, rendered by the checkpoint's chat template.

        Messages and `tools` are what /v1/chat/completions takes, and mean the same. `options` are generate's,
        the request's enable_thinking, reasoning_effort, thinking_budget, tool_choice, parallel_tool_calls and
        mm_processor_kwargs, and the template's own. Beside parts of the type image_url, which take data:
        URLs, there may be `{"type": "image", "image": ...}` with a picture of Pillow's, a file's bytes, or
        its path. `{"type": "video", "video": ...}` takes a file's bytes or its path, or a list of such
        pictures, and with a list `fps`.
        Raises ValueError, and runs none, when one cannot run; TypeError for what JSON cannot say, OSError for
        a path that cannot be read.
        """
        return self._complete(self.prepare_chat(messages, params, tools=tools, **options), progress)

    def stream(self, given: Prompts | Chats, params: Params = None, **options: object) -> Iterator[AnswerPiece]:
        """Yields what is added to the answers as it comes. given: messages, as of `chat`, or prompts, as of
        `generate`; the rest is theirs, too, and so is what is raised, at once.

        Other calls may run meanwhile. An iterator that is closed or dropped ends its answers.
        """
        return self._pieces(self.begin(self.prepare(given, params, **options)))

    def embed(
        self, texts: Prompts, *, dimensions: int | None = None, prompt_name: str | None = None, progress: bool = True
    ) -> NDArray[np.float32]:
        """Vectors of texts, or of token ids, float32 [N, D] in their order, by a model that is an embedder.

        `dimensions`: elements that are kept, from the front; all of them by default. `prompt_name`: the
        checkpoint's prompt that stands before each text, instead of its default one. Raises ValueError, and
        runs none, when one cannot run.
        """
        return stacked(self._complete(self.prepare_embed(texts, dimensions, prompt_name), progress))

    def prepare_embed(self, texts: Prompts, dimensions: int | None, prompt_name: str | None) -> PreparedCall:
        """Prepares a call of `embed`. Raises ValueError."""
        if self.info.embedder is None:
            raise ValueError("this model writes and makes no embeddings: its checkpoint has no modules.json")
        given = [texts] if isinstance(texts, str) else [text if isinstance(text, str) else [*text] for text in texts]
        with _checked():
            requests = vector_requests(self.tokenizer, self.info, given, dimensions, prompt_name)
        params = AnswerParams(**msgspec.structs.asdict(requests[0].params)) if requests else AnswerParams()
        answers = [
            a for at, own in enumerate(requests) for a in self._answers(at, own.prompt_ids, params, lambda: None)
        ]
        return PreparedCall(answers, [partial(msgspec.structs.replace, own) for own in requests])

    def score(
        self, prompts: Prompts, continuations: Sequence[str] | Sequence[Sequence[int]], **options: object
    ) -> list[ContinuationScores]:
        """Scores each of a closed set of continuations behind each prompt; both are texts, or token ids.

        A text and its continuation are encoded as one, and scored from the first token that is not the
        text's own; where none of the text's tokens is left so, each of the two is encoded by itself. So a
        score does not depend on what else is scored. A prompt is computed once, and found in the prefix
        cache. `options`: those of `generate` that do not say how tokens are drawn. Raises ValueError.
        """
        scores, prepared = prepare_scores(self, prompts, continuations, **options)
        return scores.taken(self._complete(prepared, progress=False))

    def decide(
        self, given: str | Sequence[Message], questions: Sequence[Mapping[str, object]], **options: object
    ) -> list[DecisionAnswer]:
        """Answers questions about a text or a conversation by probabilities, without a text of its own.

        `questions` are those of /v1/decisions, and mean the same: of the type predicate, choice or score.
        `options` are those of `score`. Raises ValueError.
        """
        asked, scores, prepared = prepare_decisions(self, given, questions, **options)
        return decided(asked, scores.taken(self._complete(prepared, progress=False)))

    def prepare_asked(
        self, asked: list[AskedPrompt], options: dict[str, Any], places: list[list[tuple[int, int]]] | None = None
    ) -> tuple[CallScores, PreparedCall]:
        """Prepares a call that scores labels. places: as of CallScores. Raises ValueError."""
        request = self._request(options)
        for name in options:
            raise ValueError(f"{name}: has no meaning for scores")
        with _checked():
            scores = QuestionScores(asked, self.info, "")
        answers: list[OpenCompletion] = []
        for at, sent in enumerate(scores.requests):
            params = AnswerParams(max_tokens=0, temperature=0.0, n=sent.params.n)
            answers += self._answers(at, sent.prompt_ids, params, lambda: None)
        fields = ("branches", "boundaries", "pictures")
        makers = [partial(request, **{name: getattr(sent, name) for name in fields}) for sent in scores.requests]
        return CallScores(scores, places), PreparedCall(answers, makers)

    def _complete(self, prepared: PreparedCall, progress: bool) -> list[Completion]:
        """Runs a call until all its answers are complete."""
        with Bar(progress) as bar:
            call = self.begin(prepared, wants_progress=bar.is_shown)
            for _ in self._pieces(call, bar):
                pass
        return [answer.completion for answer in call.answers]

    def prepare(self, given: Any, params: Any, **options: object) -> PreparedCall:
        """Prepares a call with messages or with prompts."""
        first = given[0] if isinstance(given, Sequence) and given else None
        first = first[0] if isinstance(first, list | tuple) and first else first
        prepare: Callable[..., PreparedCall] = self.prepare_chat if isinstance(first, Mapping) else self.prepare_text
        return prepare(given, params, **options)

    def prepare_text(self, prompts: Prompts, params: Params, **options: object) -> PreparedCall:
        """Prepares a call of `generate`. Raises ValueError."""
        request, sampling = self._request(options), _taken(options, SAMPLING)
        for name in options:
            raise ValueError(f"{name}: {_hint(name, SAMPLING) or 'is no field of SamplingParams'}")
        given: Iterable[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        ids = [self.tokenizer.encode(p, "parse") if isinstance(p, str) else list(p) for p in given]
        each = self._params(params, len(ids), sampling)

        def constraint(own: AnswerParams) -> Constraint | None:
            asked = decode.parse(msgspec.json.encode(form_fields(own)), protocol.SamplingFields)
            wanted = protocol.sampling_of(asked, NO_DEFAULTS, max_tokens=None, logprobs=None)
            return self._constrainer.completion(wanted)

        answers: list[OpenCompletion] = []
        for at, own in enumerate(each):
            if form_fields(own):
                with _checked():
                    own = msgspec.structs.replace(own, constraint=_in_own_thread(partial(constraint, own)))
            answers += self._answers(at, ids[at], own, lambda: None)
        return PreparedCall(answers, [request] * len(ids))

    def prepare_chat(
        self, messages: Chats, params: Params, *, tools: Sequence[Mapping[str, object]] | None = None, **options: object
    ) -> PreparedCall:
        """Prepares a call of `chat`. Raises ValueError, TypeError, OSError."""
        template = self._template
        if template is None:
            raise ValueError("this model has no chat template. Use generate(), or give LLM(chat_template=FILE).")
        request, switches, sampling = self._request(options), _taken(options, SWITCHES), _taken(options, SAMPLING)
        for name in options:
            if error := template.unknown(name):
                known = {*switches, *SAMPLING, *template.variables}
                raise ValueError(f"{name}: {_hint(name, known) or 'is no field of SamplingParams, and ' + error}")
        asked = switches | {"tools": tools, "chat_template_kwargs": options}
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        many: Sequence[Any] = [messages] if is_one else messages
        each = self._params(params, len(many), sampling)
        answers: list[OpenCompletion] = []
        requests = []
        for at, (conversation, own) in enumerate(zip(many, each, strict=True)):
            # Through JSON, so that nothing gets to the template that the server would not let through.
            files: list[bytes] = []
            body = asked | form_fields(own) | {"messages": sendable(conversation, files)}
            with _checked():
                chat = protocol.chat_of(decode.parse(msgspec.json.encode(body), protocol.ChatRequest))
                prompt = render(template, chat, pictures=self._pictures(chat, files))
                constraint = _in_own_thread(partial(self._constraint, chat, prompt.thinking))
            if constraint is not None:
                own = msgspec.structs.replace(own, constraint=constraint)
            exact = own.constraint is not None and bool(own.constraint.grammar)
            is_fixed = chat.is_fixed or (chat.schemas is None and exact)
            parser = partial(OutputParser, thinking=prompt.thinking, tools=chat.schemas, fixed=is_fixed, exact=exact)
            answers += self._answers(at, prompt.ids, own, parser)
            requests.append(partial(request, boundaries=prompt.boundaries, pictures=prompt.pictures))
        return PreparedCall(answers, requests)

    def _constraint(self, chat: Chat, thinking: bool) -> Constraint | None:
        """Raises ApiError."""
        return self._constrainer.chat(chat, self._constrainer.chat_grammar(chat), thinking)

    def _request(self, options: dict[str, Any]) -> partial[Request]:
        """Takes what a Request says beside its prompt and its parameters out of the options of a call."""
        lora, adapters = options.pop("lora", None), self.info.adapters
        if lora is not None and lora not in adapters:
            known = ", ".join(map(repr, adapters)) or "none: give LLM(lora={name: path})"
            raise ValueError(f"no adapter {lora!r}; this LLM has {known}")
        adapter = b"" if lora is None else adapters[lora]
        return partial(Request, adapter=adapter, **_taken(options, ("priority", "cache_salt", "use_cache")))

    def _pictures(self, chat: Chat, files: list[bytes]) -> Pictures:
        """Reads the pictures of a chat. files: what `sendable` has put aside. Raises ApiError."""
        sent = find_pictures(chat.messages)
        if not sent:
            return {}
        for file in (each for whole in sent for each in (whole, *whole.frames)):
            if file.url.startswith(ASIDE):
                file.data, file.url = files[int(file.url.removeprefix(ASIDE))], ""
        info, bounds = self.info, chat.picture_bounds
        reading = PictureReader(Hosts((), "")).read(sent, info.pictures, bounds, info.max_model_len)
        return _in_own_thread(partial(asyncio.run, reading))

    def cache_summary(self) -> JsonObject:
        """The contents of the prefix cache, as `GET /cache` shows them."""
        return self._engine.cache_summary()

    def reset_cache(self) -> None:
        """Empties the prefix cache, its directory included."""
        self._engine.reset_cache()

    def close(self) -> None:
        """Lets what is on its way to the cache_dir get there.

        Nothing can run afterwards. Closing twice is fine. An LLM that is dropped, or lives to the end of the
        program, is closed by that.
        """
        self._close()

    def _params(self, params: Params, n: int, over: Mapping[str, object]) -> list[AnswerParams]:
        """The parameters for each of n prompts. over: fields that count more. Raises ValueError."""
        each = [params or self.default_params] * n if not isinstance(params, Sequence) else params
        if len(each) != n:
            raise ValueError(f"{n} prompts but {len(each)} SamplingParams. Give one, or one for each.")
        return [AnswerParams(**{**msgspec.structs.asdict(own), **over}) for own in each]

    def _answers(
        self, at: int, ids: list[int], params: AnswerParams, parser: Callable[[], OutputParser | None]
    ) -> Iterator[OpenCompletion]:
        """Makes an answer for each sequence of prompt number `at`. A request without a seed gets one, as the
        server would give it.
        """
        own = params if params.seed is not None else msgspec.structs.replace(params, seed=secrets.randbits(63))
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        shown = Shown(stops=stops, stop_token_ids=params.stop_token_ids)
        for index in range(params.n):
            choice = Choice(index, self.tokenizer, shown, parser())
            yield OpenCompletion(Completion(at, index, ids), own, choice)

    # A call runs.

    def begin(self, prepared: PreparedCall, wants_progress: bool = False) -> OpenCall:
        """Adds the requests of a call, all or none. wants_progress: outputs tell of prompts.

        Raises ValueError, EngineStopped.
        """
        if not self._close.alive:
            raise EngineStopped("this LLM was closed. Make a new one.")
        call, ids = OpenCall(prepared.answers), dict[int, str]()
        try:
            for answer in call.answers:
                at = answer.completion.prompt_index
                if at not in ids:
                    ids[at] = str(next(self._ids))
                    make, prompt_ids = prepared.requests[at], answer.completion.prompt_ids
                    self._engine.add(
                        make(id=ids[at], prompt_ids=prompt_ids, params=answer.params, wants_progress=wants_progress)
                    )
                    self._calls[ids[at]] = call
                call.open[ids[at], answer.completion.index] = answer
        except BaseException:
            self.end(call)
            raise
        return call

    def end(self, call: OpenCall) -> None:
        """Ends what is open of a call: after an exception or Ctrl-C nothing of it runs on in the next one."""
        for request_id in {request_id for request_id, _ in call.open}:
            self._engine.abort(request_id)
        for request_id in [request_id for request_id, other in self._calls.items() if other is call]:
            del self._calls[request_id]

    @property
    def has_work(self) -> bool:
        """True if a step can advance something."""
        return self._engine.has_work()

    def advance(self) -> None:
        """Runs a step, and gives its outputs to their calls. Raises EngineStopped."""
        for output in self._engine.step():
            if (call := self._calls.get(output.id)) is not None:
                call.outputs.append(output)
        if self._engine.n_failures >= MAX_FAILURES:
            raise EngineStopped(f"{MAX_FAILURES} steps failed in a row, as the log says. Make a new LLM.")

    def take(self, call: OpenCall, output: Output) -> AnswerPiece | None:
        """Adds an output to its answer. None: there is nothing to tell of it, or it tells of a prompt."""
        key = output.id, output.index
        answer = call.open.get(key)
        if answer is None:
            return None
        if output.n_read is not None:
            call.n_read[output.id] = output.n_read
            return None
        piece = answer.take(output)
        call.n_tokens += len(output.token_ids)
        if answer.completion.finish_reason is not None:
            del call.open[key]
            if output.finish_reason is None:
                self._engine.abort(output.id, output.index)
        return piece

    def _outputs(self, call: OpenCall) -> Iterator[Output]:
        while call.open:
            while call.outputs:
                yield call.outputs.popleft()
            if call.open:
                self.advance()

    def _pieces(self, call: OpenCall, bar: Bar | None = None) -> Iterator[AnswerPiece]:
        try:
            for output in self._outputs(call):
                piece = self.take(call, output)
                if bar is not None:
                    bar.tell(call)
                if piece is not None:
                    yield piece
        finally:
            self.end(call)


def prepare_scores(llm: LLM, prompts: Any, continuations: Any, **options: object) -> tuple[CallScores, PreparedCall]:
    """Prepares a call of `LLM.score`. Raises ValueError."""
    asked, places = continuations_asked(llm.tokenizer, prompts, continuations)
    return llm.prepare_asked(asked, options, places)


def prepare_decisions(
    llm: LLM, given: Any, questions: Any, **options: object
) -> tuple[list[DecisionQuestion], CallScores, PreparedCall]:
    """Prepares a call of `LLM.decide`. Raises ValueError, TypeError, OSError."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, Iterable):
        raise ValueError("given: takes a text, or a list of messages. Give one of the two.")
    if not isinstance(questions, Iterable) or isinstance(questions, str | Mapping):
        raise ValueError("questions: takes a list of questions. Put brackets around a single one.")
    try:
        asked = msgspec.convert({"input": "-", "questions": [*questions]}, DecisionRequest).questions
        shown = [asked_of(question, f"questions[{i}]") for i, question in enumerate(asked)]
        files: list[bytes] = []
        body = {"messages": sendable(messages, files), "enable_thinking": False}
        chat = protocol.chat_of(decode.parse(msgspec.json.encode(body), protocol.ChatRequest))
        prompt = render(llm._template, chat, pictures=llm._pictures(chat, files), is_asked=True)
        behind = asked_prompt(llm.tokenizer, prompt, shown, context_limit(llm.info))
        scores, prepared = llm.prepare_asked([behind], options)
    except msgspec.ValidationError as error:
        fault = decode.fault_of(error)
        raise ValueError(f"{fault.path}: {fault.reason}") from None
    except ApiError as error:
        raise ValueError(error.message) from None
    return asked, scores, prepared


def decided(questions: Sequence[DecisionQuestion], scores: Sequence[ContinuationScores]) -> list[DecisionAnswer]:
    """The answers to questions, of the scores of their labels."""
    return [answer_of(question, each.probabilities) for question, each in zip(questions, scores, strict=True)]


def _taken(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Takes those of these names out of options."""
    return {name: options.pop(name) for name in names if name in options}


@contextmanager
def _checked() -> Iterator[None]:
    """Raises ValueError for what a server would refuse."""
    try:
        yield
    except ApiError as error:
        raise ValueError(error.message) from None


def _in_own_thread(work: Callable[[], T]) -> T:
    """Works in a thread without an event loop: the caller's may have one, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


SAMPLING = AnswerParams.__struct_fields__

SWITCHES = (
    "enable_thinking", "preserve_thinking", "reasoning_effort", "thinking_budget", "tool_choice", "parallel_tool_calls",
    "mm_processor_kwargs",
)  # fmt: skip
"""Fields of a chat's request that `chat` takes by name."""

ELSEWHERE = {
    "max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "num_predict": "max_tokens",
    "n_predict": "max_tokens", "num_return_sequences": "n", "stop_sequences": "stop", "repeat_penalty": "repetition_penalty",
    "guided_json": "response_format", "format": "response_format", "sampling_params": "params", "use_tqdm": "progress",
    "lora_request": "lora",
}  # fmt: skip
"""Names in other libraries, and what they are called here."""


def _hint(name: str, known: Iterable[str]) -> str:
    """A sentence for who gave a name that there is not; empty where none is like it."""
    return f"is called {ELSEWHERE[name]} here" if name in ELSEWHERE else nearest(name, known)
