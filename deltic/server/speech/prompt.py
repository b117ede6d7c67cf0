"""Text and voice to the rows of a prompt: which text vector and which codec vector are added in each.

The layout is the one of the published package; `SpeechShape` has the ids, and `row_id` names a sum.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deltic.models.tts.shape import FRAME, SPEAKER, SpeechShape, codec_side, row_id
from deltic.server.errors import bad_request
from deltic.text import TRUSTED, IncrementalEncoder, Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of one utterance, as ids."""

    body: list[int]
    """The text to be spoken."""
    instructions: list[int]
    reference: list[int]
    """The transcript of the voice's reference frames."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    prompt: list[int]
    trailing: tuple[int, ...]
    """Text ids that go with the frames."""


class OpenText:
    """A text that is spoken while it is written, as ids that nothing behind them can change.

    One task writes it, one waits for it.
    """

    def __init__(self, encoder: IncrementalEncoder) -> None:
        self.encoder = encoder
        """Whoever writes has it encode what comes, without white space before the first word."""
        self.written: list[str] = []
        self.n_characters = 0
        self.ids: list[int] = []
        self.is_whole = False
        """True if no more ids come."""
        self.is_over = False
        """True if nobody speaks the text any more."""
        self._grew = asyncio.Event()

    def add(self, text: str, ids: list[int]) -> None:
        """ids: those that are certain now."""
        self.written.append(text)
        self.n_characters += len(text)
        self.ids += ids
        self._grew.set()

    def end(self, ids: list[int]) -> None:
        """ids: the last ones."""
        self.ids += ids
        self.is_whole = True
        self._grew.set()

    async def wait(self, n: int) -> None:
        """Waits until it has n ids, or is whole."""
        while len(self.ids) < n and not self.is_whole:
            self._grew.clear()
            await self._grew.wait()


class Prompter:
    """Prompts of one checkpoint."""

    def __init__(self, shape: SpeechShape, tokenizer: Tokenizer, *, is_dummy: bool = False) -> None:
        """Raises TokenizerError when the tokenizer is not the checkpoint's; is_dummy: it is borrowed, and any
        will do.
        """
        self.shape = shape
        self._tokenizer = tokenizer
        self._role = self._marked("assistant", "", ends=False)
        ids = shape.ids
        if not is_dummy and (len(self._role) != 3 or self._role[:2] != [ids.im_start, ids.assistant]):
            raise TokenizerError(
                f"the tokenizer makes {self._role} of '<|im_start|>assistant' and a newline, where config.json says "
                f"{ids.im_start} and {ids.assistant}, so it is another model's"
            )

    def open_text(self) -> OpenText:
        return OpenText(IncrementalEncoder(self._tokenizer))

    def words(self, text: str | OpenText, instructions: str, reference: str, limit: int) -> Words:
        """The body of an open text is its ids, and grows with them. limit: tokens that any of them may have.

        Raises ApiError (400) for a text that is empty or too long.
        """
        texts = {"input": text, "ref_text": reference} if isinstance(text, str) else {"ref_text": reference}
        for field, part in texts.items():
            if self._tokenizer.least_tokens(part, limit) >= limit:
                raise bad_request(field, f"has more than {limit} tokens. Shorten it.", "context_length_exceeded")
        # Without the white space around it a text is the same tokens wherever it stands: nothing merges with
        # its neighbours.
        body = self._tokenizer.encode(text.strip()) if isinstance(text, str) else text.ids
        if not body:
            raise bad_request("input", "is empty")
        instructed = self._marked("user", instructions.strip()) if instructions.strip() else []
        return Words(body, instructed, self._tokenizer.encode(reference.strip()))

    def rows(
        self,
        words: Words,
        *,
        language_id: int | None,
        speaker: str | None = None,
        has_voice: bool = False,
        n_frames: int = 0,
        streams_text: bool,
        is_open: bool = False,
    ) -> PromptRows:
        """speaker: of the checkpoint; has_voice: an encoded voice speaks. n_frames: of its reference, if that
        goes into the prompt; `words.reference` is its transcript then. is_open: more of the body is to come;
        there must be `least_body` of it.
        """
        ids = self.shape.ids
        if language_id is None:
            control = [ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos]
        else:
            control = [ids.codec_think, ids.codec_think_bos, language_id, ids.codec_think_eos]
        sides = [codec_side(i) for i in control]
        if has_voice:
            sides.append(SPEAKER)
        elif speaker is not None:
            sides.append(codec_side(self.shape.speakers[speaker]))
        rows = [row_id(i) for i in (*words.instructions, *self._role)]
        rows += [row_id(ids.tts_pad, side) for side in sides]
        rows.append(row_id(ids.tts_bos, codec_side(ids.codec_pad)))
        text = [*(words.reference if n_frames else []), *words.body, *([] if is_open else [ids.tts_eos])]
        codes = [codec_side(ids.codec_bos), *range(FRAME, FRAME + n_frames)]
        trailing: list[int] = []
        if streams_text:
            texts = text + [ids.tts_pad] * (len(codes) - len(text))
            rows += [row_id(i, side) for i, side in zip(texts, codes, strict=False)]
            trailing = text[len(codes) :]
        else:
            rows += [row_id(i, codec_side(ids.codec_pad)) for i in text]
            rows += [row_id(ids.tts_pad, side) for side in codes]
        return PromptRows(rows, tuple(trailing))

    @staticmethod
    def least_body(words: Words, n_frames: int) -> int:
        """Ids of the body that the prompt's rows of a streamed text take, if it has as many."""
        return max(1, 1 + n_frames - len(words.reference)) if n_frames else 1

    def _marked(self, role: str, text: str, ends: bool = True) -> list[int]:
        """A turn of the chat format; special tokens written in `text` are its letters."""
        end = f"{TRUSTED}<|im_end|>\n" if ends else ""
        text = text.replace(TRUSTED, "")
        return self._tokenizer.encode(f"{TRUSTED}<|im_start|>{role}\n{text}{end}", "trusted")
