"""The corpus: an endless, seeded stream of conversations, rendered with the chat template the server uses.

A document is a list of (text, learn) segments. The model learns only what an assistant writes after the last real
question: prompts are exactly what a server would send (older thoughts dropped, empty thought where thinking is off), and
the words of users and tools are drawn at random, so learning to predict them would spend a small model on noise.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training import chats
from training.stories import pick_topic, story_title, write_story
from training.tools import with_tools

DEMO = Path(__file__).resolve().parent.parent / "deltic" / "demo"

# kind -> share of documents (stories are longer than the rest, so they have the larger share of tokens)
MIX = {
    "story": 0.26,
    "text": 0.02,
    "talk": 0.12,
    "knowledge": 0.09,
    "refusal": 0.03,
    "arithmetic": 0.20,
    "memory": 0.05,
    "persona": 0.03,
    "several": 0.04,
    "tools": 0.16,
}


@dataclass(frozen=True)
class Document:
    """One training text: its kind, and segments of text with whether the model learns to write them."""

    kind: str
    segments: tuple[tuple[str, bool], ...]


class Template:
    """The chat template, in the sandbox a server runs it in."""

    def __init__(self, path: Path = DEMO / "chat_template.jinja"):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(path.read_text(encoding="utf-8"))

    def render(
        self,
        turns: list[chats.Turn],
        tools: list[dict[str, object]] | None = None,
        generate: bool = True,
        thinking: bool = False,
    ) -> str:
        return self._template.render(
            messages=turns, tools=tools, add_generation_prompt=generate, enable_thinking=thinking
        )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def segments_of(
    template: Template, turns: list[chats.Turn], tools: list[dict[str, object]] | None, thinking: bool
) -> tuple[tuple[str, bool], ...]:
    """Prompt and answer segments of a conversation that ends with an assistant turn."""
    if not thinking:
        turns = [{k: v for k, v in turn.items() if k != "reasoning_content"} for turn in turns]
    last_question = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    segments: list[tuple[str, bool]] = []
    done = 0
    for i in range(last_question + 1, len(turns)):
        if turns[i]["role"] != "assistant":
            continue
        prompt = template.render(turns[:i], tools, True, thinking)
        whole = template.render(turns[: i + 1], tools, False, thinking)
        if not whole.startswith(prompt):
            raise ValueError(f"the template does not continue its own prompt: {prompt[-80:]!r}")
        end = len(whole) - 1  # the newline after <|im_end|> belongs to the next prompt
        segments += [(prompt[done:], False), (whole[len(prompt) : end], True)]
        done = end
    return tuple(segments)


class Corpus:
    """Draws documents. Two corpora with the same seed draw the same ones."""

    def __init__(self, seed: int, longest_story: int = 1500):
        self._rng = Random(seed)
        self._template = Template()
        self._longest = longest_story
        self._kinds, self._shares = list(MIX), list(MIX.values())

    def draw(self, kind: str | None = None) -> Document:
        rng = self._rng
        kind = kind or rng.choices(self._kinds, self._shares)[0]
        if kind == "text":
            return self._plain_story()
        tools: list[dict[str, object]] | None = None
        if kind == "story":
            turns = chats.story(rng, self._longest)
        elif kind == "tools":
            tools, turns = with_tools(rng)
        else:
            turns = {
                "talk": chats.small_talk,
                "knowledge": chats.knowledge,
                "refusal": chats.refusal,
                "arithmetic": chats.arithmetic,
                "memory": chats.remembered_name,
                "persona": chats.persona,
                "several": chats.several,
            }[kind](rng)
        if kind not in ("persona",) and rng.random() < 0.15:
            turns = [{"role": "system", "content": rng.choice(chats.SYSTEM_LINES)}, *turns]
        thinking = rng.random() < 0.4
        return Document(kind, segments_of(self._template, turns, tools, thinking))

    def _plain_story(self) -> Document:
        """Text without any turn, for plain completions."""
        rng = self._rng
        story = write_story(rng, pick_topic(rng), min(chats.number_of_words(rng), self._longest))
        title = f"{story_title(rng, story)}\n\n" if rng.random() < 0.3 else ""
        return Document("text", ((f"{title}{story.text}<|endoftext|>", True),))

    def __iter__(self) -> Iterator[Document]:
        while True:
            yield self.draw()
