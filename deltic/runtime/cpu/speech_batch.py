"""A speech model's step in tensors: rows of prompts, frames of decodes, and the parameters of the predictor's
draws.

All buffers keep their addresses. Decodes come first in a step, so that the frames are its first rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltic.engine.step import Sequence, Step
from deltic.models.tts.cpu import PAD_ROW, PredictorDraws, SpeechInputs
from deltic.models.tts.shape import FRAME, SPEAKER, SpeechShape, split_row
from deltic.ops.arrays import Array
from deltic.ops.cpu.attention import AttentionInputs
from deltic.ops.cpu.sample import BatchParameters, DrawInputs, draw_scratch
from deltic.ops.cpu.speech import SIDE_KEPT, SIDE_VOICE
from deltic.ops.geometry import N_CODES, Allocate
from deltic.runtime.speaking import DEFAULT_SPEECH, PREDICTOR_KEY

Ints = NDArray[np.int32]


class SpeechBatch:
    """The forward's inputs for steps of up to n_rows rows and n_batch_slots sequences, each of one chunk."""

    def __init__(
        self, shape: SpeechShape, n_rows: int, n_batch_slots: int, max_pages: int, n_threads: int, allocate: Allocate
    ) -> None:
        def buffer(name: str, *size: int) -> Array:
            return np.asarray(allocate(name, size, np.int32))

        self.shape = shape
        counts = buffer("counts", 5)
        self.inputs = SpeechInputs(
            rows=AttentionInputs(
                n_tokens=counts[0, ...],
                n_seqs=counts[1, ...],
                positions=buffer("positions", n_rows),
                token_batch_slot=buffer("row batch slot", n_rows),
                seq_start=buffer("sequence start", n_batch_slots + 1),
                seq_context=buffer("sequence context", n_batch_slots),
                batch_slot=buffer("sequence batch slot", n_batch_slots),
                page_table=buffer("page table", n_batch_slots, max_pages),
            ),
            n_frames=counts[2, ...],
            n_first_rows=counts[3, ...],
            n_texts=counts[4, ...],
            text_ids=buffer("text ids", n_rows),
            text_row=buffer("text row", n_rows),
            side=buffer("codec side", n_rows),
            voice_rows=allocate("voice rows", (n_rows, shape.talker.hidden_size), np.float32),
            code0=buffer("code 0", n_batch_slots),
            state_slot=buffer("sequence state slot", n_batch_slots),
            last_row=buffer("last row", n_batch_slots),
        )
        self._counts = counts
        self._owner: list[Sequence | None] = [None] * n_batch_slots
        self.draws = _predictor_draws(
            shape, n_batch_slots, n_threads, self.inputs.rows.batch_slot, self.inputs.n_frames, allocate
        )

    def fill(self, step: Step) -> None:
        """Writes the step's inputs.

        Chunk i is sequence i of the forward, its last row gives row i of the logits.
        """
        inputs, rows = self.inputs, self.inputs.rows
        self._n_texts = 0
        frames: list[int] = []
        at = 0
        for i, chunk in enumerate(step.chunks):
            sequence, end = chunk.sequence, at + chunk.length
            batch_slot, state_slot = sequence.batch_slot, sequence.state_slot
            assert batch_slot is not None and state_slot is not None
            if self._owner[batch_slot] is not sequence:
                self._take_batch_slot(batch_slot, sequence)
            rows.page_table[batch_slot, : len(sequence.pages)] = sequence.pages
            rows.seq_start[i], rows.seq_context[i] = at, chunk.start
            rows.batch_slot[i], inputs.state_slot[i], inputs.last_row[i] = batch_slot, state_slot, end - 1
            rows.positions[at:end] = np.arange(chunk.start, chunk.start + chunk.length)
            rows.token_batch_slot[at:end] = batch_slot
            if chunk.is_decode:
                assert len(frames) == i
                frames.append(chunk.start - sequence.n_prompt)
                self._fill_frame(i, sequence, frames[-1], sequence.tokens[chunk.start])
            else:
                ids = np.array(sequence.tokens[chunk.start : chunk.start + chunk.length], np.int32)
                self._fill_prompt(at, ids, sequence)
            at = end
        n, n_frames = len(step.chunks), len(frames)
        rows.seq_start[n] = at
        for i, draw in enumerate(self.draws.draws):
            draw.position[:n_frames] = [frame * N_CODES + i + 1 for frame in frames]
        self._counts[:] = at, n, n_frames, 2 * n_frames, self._n_texts

    def _fill_frame(self, m: int, sequence: Sequence, frame: int, code0: int) -> None:
        inputs, speech = self.inputs, sequence.request.speech or DEFAULT_SPEECH
        trailing = speech.trailing_ids
        assert speech.knows_text(frame)
        text = trailing[frame] if frame < len(trailing) else self.shape.ids.tts_pad
        inputs.code0[m], inputs.side[m] = code0, SIDE_KEPT
        inputs.text_row[m] = self._text(text)

    def _fill_prompt(self, at: int, ids: Ints, sequence: Sequence) -> None:
        inputs, end = self.inputs, at + len(ids)
        texts, sides = split_row(ids)
        inputs.text_row[at:end] = [-1 if text < 0 else self._text(text) for text in texts.tolist()]
        inputs.side[at:end] = sides - 1  # NO_SIDE becomes SIDE_NONE
        for i in np.flatnonzero(sides >= SPEAKER).tolist():
            voice, side = sequence.voice, int(sides[i])
            assert voice is not None
            if side == SPEAKER:
                inputs.voice_rows[at + i] = voice.speaker
            elif voice.frames is not None:
                inputs.voice_rows[at + i] = voice.frames[side - FRAME]
            inputs.side[at + i] = SIDE_VOICE - (at + i)

    def _text(self, text_id: int) -> int:
        """Returns the text's row among the projected texts."""
        if text_id == self.shape.ids.tts_pad:
            return PAD_ROW
        self.inputs.text_ids[self._n_texts] = text_id
        self._n_texts += 1
        return PAD_ROW + self._n_texts

    def _take_batch_slot(self, batch_slot: int, sequence: Sequence) -> None:
        self._owner[batch_slot] = sequence
        speech, batch_slots = sequence.request.speech or DEFAULT_SPEECH, self.draws.batch_slots
        batch_slots.temperature[batch_slot], batch_slots.top_k[batch_slot] = speech.temperature, speech.top_k
        batch_slots.top_p[batch_slot] = speech.top_p
        batch_slots.seed[batch_slot] = np.uint64((sequence.seed ^ PREDICTOR_KEY) & (2**64 - 1)).astype(np.int64)

    def read_codes(self) -> Ints:
        """int32 [n_frames, 16]: the frames of the last step's decodes.

        A code that could not be drawn is 0. The logits that follow from it are not finite, which ends the
        sequence.
        """
        n = int(self._counts[2])
        codes = np.empty((n, N_CODES), np.int32)
        codes[:, 0] = self.inputs.code0[:n]
        codes[:, 1:] = np.maximum(self.draws.codes[:, :n], 0).T
        return codes


def _predictor_draws(
    shape: SpeechShape, n_batch_slots: int, n_threads: int, batch_slot: Array, n_frames: Array, allocate: Allocate
) -> PredictorDraws:
    """Row m of the logits is frame m's, drawn with the parameters of its batch slot.

    There are no penalties, biases or bans.
    """
    i32, f32, n = np.int32, np.float32, shape.n_codebook
    zeros = allocate("predictor zeros", (n_batch_slots + 1,), i32)
    none = zeros[:0]
    batch_slots = BatchParameters(
        **{name: allocate(f"predictor {name}", (n_batch_slots,), f32) for name in ("temperature", "top_p", "min_p")},
        **dict.fromkeys(("repetition", "frequency", "presence"), zeros.view(f32)),
        top_k=allocate("predictor top_k", (n_batch_slots,), i32),
        seed=allocate("predictor seed", (n_batch_slots,), np.int64),
        history=zeros[:n_batch_slots, None],
    )

    def draws(i: int) -> DrawInputs:
        return DrawInputs(
            n_draws=n_frames,
            row=rows,
            batch_slot=batch_slot,
            position=allocate(f"predictor position {i}", (n_batch_slots,), i32),
            n_history=zeros,
            n_prompt=zeros,
            bias_begin=zeros,
            bias_ids=none,
            bias=none.view(f32),
            banned_begin=zeros,
            banned=none,
            masked=zeros,
            masks=masks,
        )

    rows = np.arange(n_batch_slots, dtype=i32)
    masks = allocate("predictor masks", (1, -(-n // 32)), i32)
    return PredictorDraws(
        batch_slots=batch_slots,
        draws=[draws(i) for i in range(1, N_CODES)],
        scratch=draw_scratch(min(n_threads, n_batch_slots), n, allocate, "predictor"),
        codes=allocate("predictor codes", (N_CODES - 1, n_batch_slots), i32),
    )
