"""The offline API: a model in this process, without server and queue.

    from deltic import LLM, SamplingParams
    llm = LLM("Qwen/Qwen3.5-0.8B")
    for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(answer.text)

It runs the engine that the server runs, with the same steps, so the same request gives the same tokens.
An LLM is for one thread at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.console import Console
from rich.progress import Progress

from deltic.config import BUILT_IN, ConfigError, EngineConfig, nearest
from deltic.config_sources import resolve
from deltic.engine.engine import MAX_FAILURES, Engine
from deltic.engine.guides import Vocabulary
from deltic.engine.messages import Output, Request, SamplingParams, TokenLogprob
from deltic.engine.trace import Trace
from deltic.json_types import JsonObject
from deltic.models.checkpoint import drawable_ids, speaks, text_directory, tokenizer_directory, tokenizer_json
from deltic.server.api import decode, protocol
from deltic.server.chat.answer import Choice
from deltic.server.chat.answer import Message as AnswerMessage
from deltic.server.chat.messages import find_pictures
from deltic.server.chat.parser import OutputParser
from deltic.server.chat.picture_parts import PictureReader, Pictures, file_of
from deltic.server.chat.request import Chat, Shown
from deltic.server.chat.template import ChatTemplate, render
from deltic.server.errors import ApiError
from deltic.server.urls import Hosts
from deltic.text import SamplingDefaults, Tokenizer

Message = Mapping[str, object]

SAVE_S = 30.0
"""Seconds for which an LLM that is closed goes on writing to its cache_dir."""


class EngineStopped(RuntimeError):
    """The engine failed several steps in a row, or was closed; make a new LLM."""


@dataclass
class Completion:
    """Answer to a prompt. With n > 1 a prompt has n of them, next to each other."""

    prompt_index: int
    index: int
    """0 to n - 1."""
    prompt_ids: list[int]
    text: str = ""
    """Text without the stop string or token; from `chat`, without reasoning and tool calls."""
    token_ids: list[int] = field(default_factory=list)
    """Ids that were drawn, the stop token included."""
    finish_reason: str | None = None
    """"stop", "length", "tool_calls", "error" or "abort".

    A call that was cut short has another than tool_calls.
    """
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    """Calls, each with `id`, `name` and `arguments` (JSON text); from `chat` with tools."""
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities, one for each of token_ids."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had; with n > 1 in the completion of index 0 alone."""
    error: str | None = None
    """Reason of the failure, when finish_reason is "error"."""


class LLM:
    """A loaded model. Making one reads the weights and allocates all memory it will ever use."""

    def __init__(
        self,
        model: str = BUILT_IN,
        *,
        chat_template: Path | None = None,
        lora: Mapping[str, str | Path] | None = None,
        **settings: object,
    ) -> None:
        """`settings` are the fields of EngineConfig: dummy, threads, memory_gb, max_model_len, ...
        `lora`: paths of adapters, by the names that `generate` and `chat` take.

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
        self._engine = Engine(
            build_runner(self.config, lambda stage, done: None),  # nobody watches: no target
            vocabulary=vocabulary,
        )
        self._engine.trace = trace
        self._close = weakref.finalize(self, self._engine.close, SAVE_S)
        self.info = self._engine.info
        self._ids = count()
        # Where no SamplingParams are given: the checkpoint's own, for as long as the context lasts.
        defaults = msgspec.structs.asdict(SamplingDefaults.load(text_directory(self.config)))
        del defaults["max_new_tokens"]
        self.default_params = SamplingParams(max_tokens=self.info.max_model_len, **defaults)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        cache_salt: str = "",
        use_cache: bool = True,
        lora: str | None = None,
        progress: bool = True,
        **sampling: object,
    ) -> list[Completion]:
        """Continues each prompt (text, or token ids); completions in the prompts' order.

        `params`: for all prompts, or one for each. `cache_salt`: prefixes are shared only with requests of
        the same salt. `use_cache`: False neither reads nor feeds the prefix cache. `lora`: the name of the
        adapter that is applied. `progress`: whether a terminal is shown, in stderr, how many answers are
        complete. `sampling`: fields of SamplingParams, over those of `params`. Raises
        ValueError, and runs none, when one cannot run.
        """
        adapter = self._adapter(lora)
        request = partial(Request, priority=priority, cache_salt=cache_salt, use_cache=use_cache, adapter=adapter)
        given: Iterable[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        ids = [self.tokenizer.encode(p, "parse") if isinstance(p, str) else list(p) for p in given]
        for name in sampling.keys() - {*_SAMPLING}:
            raise ValueError(f"{name}: {nearest(name, _SAMPLING) or 'is no field of SamplingParams'}")
        answers = self._answers(ids, params, stop, lambda at, own: None, sampling)
        self._run(answers, [request] * len(ids), progress)
        return [answer.completion for answer in answers]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        cache_salt: str = "",
        use_cache: bool = True,
        lora: str | None = None,
        progress: bool = True,
        **settings: object,
    ) -> list[Completion]:
        """Answers one conversation, or several: OpenAI messages, rendered by the checkpoint's chat template.

        Messages and `tools` are what /v1/chat/completions takes, and mean the same; `cache_salt`,
        `use_cache`, `lora` and `progress` are generate's. `settings` are fields of SamplingParams, over those
        of `params`, the template's, or the request's enable_thinking, reasoning_effort and
        mm_processor_kwargs. Beside parts of the type image_url, which take data: URLs, there may be `{"type":
        "image", "image": ...}` with a picture of Pillow's, a file's bytes, or its path. `{"type": "video",
        "video": ...}` takes a file's bytes or its path, or a list of such pictures, and with a list `fps`.
        Raises ValueError, and runs none, when one cannot run; TypeError for what JSON cannot say, OSError for
        a path that cannot be read.
        """
        if self._template is None:
            raise ValueError("this model has no chat template. Use generate(), or give LLM(chat_template=FILE).")
        adapter = self._adapter(lora)
        request = partial(Request, priority=priority, cache_salt=cache_salt, use_cache=use_cache, adapter=adapter)
        switches, sampling = (
            {name: settings.pop(name) for name in names if name in settings}
            for names in (("enable_thinking", "reasoning_effort", "mm_processor_kwargs"), _SAMPLING)
        )
        for name in settings:
            if error := self._template.unknown(name):
                known = {*switches, *_SAMPLING, *self._template.variables}
                raise ValueError(f"{name}: {nearest(name, known) or 'is no field of SamplingParams, and ' + error}")
        asked = switches | {"tools": tools, "chat_template_kwargs": settings}
        is_one = bool(messages) and isinstance(messages[0], dict)
        many: Sequence[Iterable[object]] = [messages] if is_one else messages
        try:
            # Through JSON, so that nothing gets to the template that the server would not let through.
            files: list[bytes] = []
            bodies = [msgspec.json.encode(asked | {"messages": _sendable(m, files)}) for m in many]
            chats = [protocol.chat_of(decode.parse(body, protocol.ChatRequest)) for body in bodies]
            prompts = [render(self._template, chat, pictures=self._pictures(chat, files)) for chat in chats]
        except ApiError as error:
            raise ValueError(error.message) from None

        def parser(at: int, own: SamplingParams) -> OutputParser:
            schemas = chats[at].schemas
            exact = own.constraint is not None and bool(own.constraint.grammar)
            return OutputParser(
                thinking=prompts[at].thinking, tools=schemas, fixed=schemas is None and exact, exact=exact
            )

        answers = self._answers([prompt.ids for prompt in prompts], params, stop, parser, sampling)
        requests = [partial(request, boundaries=prompt.boundaries, pictures=prompt.pictures) for prompt in prompts]
        self._run(answers, requests, progress)
        return [answer.completion for answer in answers]

    def _pictures(self, chat: Chat, files: list[bytes]) -> Pictures:
        """Reads the pictures of a chat. files: what `_sendable` has put aside. Raises ApiError."""
        sent = find_pictures(chat.messages)
        if not sent:
            return {}
        for file in (each for whole in sent for each in (whole, *whole.frames)):
            if file.url.startswith(ASIDE):
                file.data, file.url = files[int(file.url.removeprefix(ASIDE))], ""
        info, bounds = self.info, chat.picture_bounds
        reading = PictureReader(Hosts((), "")).read(sent, info.pictures, bounds, info.max_model_len)
        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop already
            return thread.submit(asyncio.run, reading).result()

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

    def _answers(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        parser: Callable[[int, SamplingParams], OutputParser | None],
        over: Mapping[str, object] = MappingProxyType({}),
    ) -> list[_OpenCompletion]:
        """Makes an answer for each sequence to come. A request without a seed gets one, as the server would
        give it.

        parser: makes one for an answer to the prompt of this index, with these parameters; over: fields of
        these that count more.
        """
        each = [params or self.default_params] * len(prompts) if not isinstance(params, Sequence) else params
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} SamplingParams. Give one, or one for each.")
        stops = [stop] if isinstance(stop, str) else list(stop)
        answers = []
        for at, (ids, given) in enumerate(zip(prompts, each, strict=True)):
            p = msgspec.structs.replace(given, **over)
            own = p if p.seed is not None else msgspec.structs.replace(p, seed=secrets.randbits(63))
            for index in range(p.n):
                shown = Shown(stops=stops, stop_token_ids=p.stop_token_ids)
                choice = Choice(index, self.tokenizer, shown, parser(at, p))
                answers.append(_OpenCompletion(Completion(at, index, ids), own, choice))
        return answers

    def _adapter(self, lora: str | None) -> bytes:
        """Returns the key of an adapter, empty for none. Raises ValueError."""
        adapters = self.info.adapters
        if lora is not None and lora not in adapters:
            known = ", ".join(map(repr, adapters)) or "none: give LLM(lora={name: path})"
            raise ValueError(f"no adapter {lora!r}; this LLM has {known}")
        return b"" if lora is None else adapters[lora]

    def _run(self, answers: list[_OpenCompletion], requests: Sequence[partial[Request]], progress: bool) -> None:
        """Adds the requests and steps until all their answers are complete. requests: for each prompt, what
        makes its Request of an id, the prompt's ids and the parameters.
        """
        if not self._close.alive:
            raise EngineStopped("this LLM was closed. Make a new one.")
        ids: dict[int, str] = {}
        open_answers: dict[tuple[str, int], _OpenCompletion] = {}
        engine = self._engine
        try:
            for answer in answers:
                at = answer.completion.prompt_index
                if at not in ids:
                    ids[at] = str(next(self._ids))
                    prompt_ids = answer.completion.prompt_ids
                    engine.add(requests[at](id=ids[at], prompt_ids=prompt_ids, params=answer.params))
                open_answers[ids[at], answer.completion.index] = answer
            with _bar(len(answers), progress) as tell:
                for output in self._outputs(open_answers):
                    answer = open_answers[output.id, output.index]
                    if answer.take(output):
                        del open_answers[output.id, output.index]
                        tell(answer)
                        if output.finish_reason is None:
                            engine.abort(output.id, output.index)
        finally:
            # An exception or Ctrl-C on the way: what is open must not run on in the next call.
            for request_id in {request_id for request_id, _ in open_answers}:
                engine.abort(request_id)

    def _outputs(self, open_answers: Mapping[tuple[str, int], _OpenCompletion]) -> Iterator[Output]:
        while open_answers:
            for output in self._engine.step():
                if (output.id, output.index) in open_answers:
                    yield output
            if self._engine.n_failures >= MAX_FAILURES:
                raise EngineStopped(f"{MAX_FAILURES} steps failed in a row, as the log says. Make a new LLM.")


@contextlib.contextmanager
def _bar(n_answers: int, wanted: bool) -> Iterator[Callable[[_OpenCompletion], None]]:
    """A bar in stderr, if that is a terminal, while the block runs; it is told of complete answers."""
    console = Console(stderr=True)
    n_tokens = n_done = 0
    with Progress(console=console, transient=True, disable=not (wanted and console.is_terminal)) as bar:
        task = bar.add_task("", total=n_answers)

        def tell(answer: _OpenCompletion) -> None:
            nonlocal n_tokens, n_done
            n_tokens, n_done = n_tokens + len(answer.completion.token_ids), n_done + 1
            bar.update(task, completed=n_done, description=f"{n_done}/{n_answers} answers, {n_tokens} tokens")

        yield tell


_SAMPLING = SamplingParams.__struct_fields__

ASIDE = "deltic-picture:"
"""Begins the URL of a picture that JSON cannot say."""


def _sendable(messages: Iterable[object], files: list[bytes]) -> list[object]:
    """Messages with a URL for each picture that is none; the picture is added to `files`. Raises ValueError,
    OSError.
    """

    def part_of(part: object) -> object:
        if isinstance(part, dict) and part.get("type") == "image" and "image" in part:
            return {"type": "image_url", "image_url": {"url": url_of(part["image"])}}
        if isinstance(part, dict) and part.get("type") == "video" and "video" in part:
            video = part["video"]
            return part | {"video": [*map(url_of, video)] if isinstance(video, list | tuple) else url_of(video)}
        return part

    def url_of(file: object) -> str:
        if isinstance(file, str) and file.startswith(("data:", "http:", "https:")):
            return file
        files.append(file_of(file))
        return f"{ASIDE}{len(files) - 1}"

    return [
        message | {"content": [part_of(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


@dataclass
class _OpenCompletion:
    """A completion in the making."""

    completion: Completion
    params: SamplingParams
    choice: Choice
    message: AnswerMessage = field(default_factory=AnswerMessage)

    def take(self, output: Output) -> bool:
        """Adds an output; whether the answer is complete (by a stop string: before the engine knows)."""
        done, message = self.completion, self.message
        done.token_ids += output.token_ids
        done.cached_tokens = max(done.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            done.prompt_logprobs = list(output.prompt_logprobs)
        if output.logprobs is not None:
            done.logprobs = (done.logprobs or []) + output.logprobs
        message.add(self.choice.push(output))
        if message.finish_reason is None:
            return False
        done.text, done.reasoning = "".join(message.content), "".join(message.reasoning)
        done.tool_calls = [
            {"id": call.id or "", "name": call.name or "", "arguments": call.arguments} for call in message.calls
        ]
        done.finish_reason = message.finish_reason
        done.error = output.error if message.finish_reason == output.finish_reason else None
        return True
