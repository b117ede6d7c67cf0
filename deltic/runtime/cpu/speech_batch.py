"""A speech model's step in tensors: rows of prompts, frames of decodes, and the parameters of the predictor's
draws.

All buffers keep their addresses. Decodes come first in a step, so that the frames are its first rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deltic.engine.step import Sequence, Step
from deltic.models.tts.cpu import PAD_ROW, PredictorDraws, RowInputs, SpeechInputs
from deltic.models.tts.shape import FRAME, N_SIDE, SPEAKER, SpeechShape
from deltic.ops.cpu.sample import DrawInputs, DrawScratch, PlaceParameters
from deltic.ops.cpu.speech import SIDE_KEPT, SIDE_VOICE
from deltic.ops.geometry import N_CODES, Allocate
from deltic.runtime.speaking import DEFAULT_SPEECH, PREDICTOR_KEY

Ints = NDArray[np.int32]


class SpeechBatch:
    """The forward's inputs for steps of up to n_rows rows and n_places sequences, each of one chunk."""

    def __init__(
        self, shape: SpeechShape, n_rows: int, n_places: int, n_pages_per_seq: int, n_threads: int, allocate: Allocate
    ) -> None:
        def buffer(name: str, *size: int) -> torch.Tensor:
            return allocate(name, size, torch.int32)

        self.shape = shape
        counts = buffer("counts", 5)
        self.inputs = SpeechInputs(
            rows=RowInputs(
                n_rows=counts[0],
                n_seqs=counts[1],
                positions=buffer("positions", n_rows),
                row_place=buffer("row place", n_rows),
                seq_start=buffer("sequence start", n_places + 1),
                seq_context=buffer("sequence context", n_places),
                place=buffer("sequence place", n_places),
                page_table=buffer("page table", n_places, n_pages_per_seq),
            ),
            n_frames=counts[2],
            n_first_rows=counts[3],
            n_texts=counts[4],
            text_ids=buffer("text ids", n_rows),
            text_row=buffer("text row", n_rows),
            side=buffer("codec side", n_rows),
            voice_rows=allocate("voice rows", (n_rows, shape.talker.hidden_size), torch.float32),
            code0=buffer("code 0", n_places),
            slot=buffer("sequence slot", n_places),
            last_row=buffer("last row", n_places),
        )
        i, r = self.inputs, self.inputs.rows
        self._counts = counts.numpy()
        self._positions, self._row_place, self._page_table = (
            r.positions.numpy(),
            r.row_place.numpy(),
            r.page_table.numpy(),
        )
        self._seq_start, self._seq_context, self._place = (r.seq_start.numpy(), r.seq_context.numpy(), r.place.numpy())
        self._text_ids, self._text_row, self._side = i.text_ids.numpy(), i.text_row.numpy(), i.side.numpy()
        self._voice_rows, self._code0 = i.voice_rows, i.code0.numpy()
        self._slot, self._last_row = i.slot.numpy(), i.last_row.numpy()
        self._owner: list[Sequence | None] = [None] * n_places
        self.draws = _predictor_draws(shape, n_places, n_threads, r.place, i.n_frames, allocate)
        places = self.draws.places
        self._temperature, self._top_k = places.temperature.numpy(), places.top_k.numpy()
        self._top_p, self._seed = places.top_p.numpy(), places.seed.numpy()
        self._draw_positions = [draw.position.numpy() for draw in self.draws.draws]
        self._codes = self.draws.codes.numpy()

    def fill(self, step: Step) -> None:
        """Writes the step's inputs.

        Chunk i is sequence i of the forward, its last row gives row i of the logits.
        """
        self._n_texts = 0
        frames: list[int] = []
        at = 0
        for i, chunk in enumerate(step.chunks):
            sequence, end = chunk.sequence, at + chunk.length
            place, slot = sequence.place, sequence.slot
            assert place is not None and slot is not None
            if self._owner[place] is not sequence:
                self._take_place(place, sequence)
            self._page_table[place, : len(sequence.pages)] = sequence.pages
            self._seq_start[i], self._seq_context[i] = at, chunk.start
            self._place[i], self._slot[i], self._last_row[i] = place, slot, end - 1
            self._positions[at:end] = np.arange(chunk.start, chunk.start + chunk.length)
            self._row_place[at:end] = place
            if chunk.is_decode:
                assert len(frames) == i
                frames.append(chunk.start - sequence.n_prompt)
                self._fill_frame(i, sequence, frames[-1], sequence.tokens[chunk.start])
            else:
                ids = np.array(sequence.tokens[chunk.start : chunk.start + chunk.length], np.int32)
                self._fill_prompt(at, ids, sequence)
            at = end
        n, n_frames = len(step.chunks), len(frames)
        self._seq_start[n] = at
        for i, positions in enumerate(self._draw_positions):
            positions[:n_frames] = [frame * N_CODES + i + 1 for frame in frames]
        self._counts[:] = at, n, n_frames, 2 * n_frames, self._n_texts

    def _fill_frame(self, m: int, sequence: Sequence, frame: int, code0: int) -> None:
        speech = sequence.request.speech or DEFAULT_SPEECH
        trailing = speech.trailing_ids
        assert speech.knows_text(frame)
        text = trailing[frame] if frame < len(trailing) else self.shape.ids.tts_pad
        self._code0[m], self._side[m] = code0, SIDE_KEPT
        self._text_row[m] = self._text(text)

    def _fill_prompt(self, at: int, ids: Ints, sequence: Sequence) -> None:
        end = at + len(ids)
        texts, sides = ids // N_SIDE - 1, ids % N_SIDE
        self._text_row[at:end] = [-1 if text < 0 else self._text(text) for text in texts.tolist()]
        self._side[at:end] = sides - 1  # NO_SIDE becomes SIDE_NONE
        for i in np.flatnonzero(sides >= SPEAKER).tolist():
            voice, side = sequence.voice, int(sides[i])
            assert voice is not None
            if side == SPEAKER:
                self._voice_rows[at + i] = voice.speaker
            elif voice.frames is not None:
                self._voice_rows[at + i] = voice.frames[side - FRAME]
            self._side[at + i] = SIDE_VOICE - (at + i)

    def _text(self, text_id: int) -> int:
        """Its row of the projected texts."""
        if text_id == self.shape.ids.tts_pad:
            return PAD_ROW
        self._text_ids[self._n_texts] = text_id
        self._n_texts += 1
        return PAD_ROW + self._n_texts

    def _take_place(self, place: int, sequence: Sequence) -> None:
        self._owner[place] = sequence
        speech = sequence.request.speech or DEFAULT_SPEECH
        self._temperature[place], self._top_k[place] = speech.temperature, speech.top_k
        self._top_p[place] = speech.top_p
        self._seed[place] = np.uint64((sequence.seed ^ PREDICTOR_KEY) & (2**64 - 1)).astype(np.int64)

    def read_codes(self) -> Ints:
        """int32 [n_frames, 16]: the frames of the last step's decodes.

        A code that could not be drawn is 0. The logits that follow from it are not finite, which ends the
        sequence.
        """
        n = int(self._counts[2])
        codes = np.empty((n, N_CODES), np.int32)
        codes[:, 0] = self._code0[:n]
        codes[:, 1:] = np.maximum(self._codes[:, :n], 0).T
        return codes


def _predictor_draws(
    shape: SpeechShape, n_places: int, n_threads: int, place: torch.Tensor, n_frames: torch.Tensor, allocate: Allocate
) -> PredictorDraws:
    """Row m of the logits is frame m's, drawn with the parameters of its place.

    There are no penalties, biases or bans.
    """
    i32, f32, n = torch.int32, torch.float32, shape.n_codebook
    zeros = allocate("predictor zeros", (n_places + 1,), i32)
    none = zeros[:0]
    places = PlaceParameters(
        **{name: allocate(f"predictor {name}", (n_places,), f32) for name in ("temperature", "top_p", "min_p")},
        **dict.fromkeys(("repetition", "frequency", "presence"), zeros.view(f32)),
        top_k=allocate("predictor top_k", (n_places,), i32),
        seed=allocate("predictor seed", (n_places,), torch.int64),
        history=zeros[:n_places, None],
    )

    def draws(i: int) -> DrawInputs:
        return DrawInputs(
            n_draws=n_frames,
            row=rows,
            place=place,
            position=allocate(f"predictor position {i}", (n_places,), i32),
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

    rows = torch.arange(n_places, dtype=i32)
    masks = allocate("predictor masks", (1, -(-n // 32)), i32)
    n_scratch = min(n_threads, n_places)
    return PredictorDraws(
        places=places,
        draws=[draws(i) for i in range(1, N_CODES)],
        scratch=DrawScratch(
            values=allocate("predictor values", (n_scratch, n), f32),
            counts=allocate("predictor counts", (n_scratch, n), i32),
            candidates=allocate("predictor candidates", (n_scratch, n), torch.int64),
        ),
        codes=allocate("predictor codes", (N_CODES - 1, n_places), i32),
    )
