"""Vision towers in llama.cpp's mtmd, as llama-cpp-python packages it (runs in the environment of the peers).

    {"do": "encode", "name": NAME, "side": pixels}   ->  {"seconds": s, "tokens": n}

A square picture of noise is cut into patches before; its encoding alone is timed. Flash attention is on or
off, whichever is faster on a picture of that size.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as ll
import numpy as np
from llama_cpp import mtmd_cpp as mtmd

from bench.peers_worker import serve


class Towers:
    """Of several files, behind one text model."""

    def __init__(self, config: dict[str, Any]) -> None:
        """config: model, a GGUF file; towers: files by name; n_threads."""
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = ll.llama_load_model_from_file(config["model"].encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.n_threads = config["n_threads"]
        self.files: dict[str, str] = config["towers"]
        self.contexts: dict[tuple[str, bool], Any] = {}
        self.chosen: dict[tuple[str, int], tuple[Any, Any, bool]] = {}  # context, picture, flash attention
        self.info = {"llama.cpp": ll.__version__}

    def _made(self, name: str, flash: bool) -> Any:
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.print_timings, params.warmup = False, False, False
        params.n_threads = self.n_threads
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = mtmd.mtmd_init_from_file(self.files[name].encode(), self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp could not load the tower {name}")
        return context

    def _chunk(self, context: Any, side: int) -> Any:
        """The picture's part of a prompt, preprocessed."""
        pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3)).astype(np.uint8)
        bitmap = mtmd.mtmd_bitmap_init(side, side, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        marker = mtmd.mtmd_default_marker()
        text, chunks = mtmd.mtmd_input_text(marker, len(marker), False, True), mtmd.mtmd_input_chunks_init()
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1):
            raise RuntimeError(f"llama.cpp took no picture of {side} x {side}")
        found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
        return next(one for one in found if mtmd.mtmd_input_chunk_get_type(one) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)

    def _timed(self, context: Any, chunk: Any) -> float:
        begin = time.perf_counter()
        if mtmd.mtmd_encode_chunk(context, chunk):
            raise RuntimeError("llama.cpp could not encode the picture")
        return time.perf_counter() - begin

    def _choose(self, name: str, side: int) -> tuple[Any, Any, bool]:
        tried = []
        for flash in (True, False):
            if (name, flash) not in self.contexts:
                self.contexts[name, flash] = self._made(name, flash)
            context = self.contexts[name, flash]
            chunk = self._chunk(context, side)
            tried.append((min(self._timed(context, chunk) for _ in range(2)), (context, chunk, flash)))
        return min(tried, key=lambda one: one[0])[1]

    def encode(self, name: str, side: int) -> dict[str, Any]:
        """Seconds for a picture; with flash attention or without was tried before."""
        if (name, side) not in self.chosen:
            self.chosen[name, side] = self._choose(name, side)
        context, chunk, flash = self.chosen[name, side]
        return {
            "seconds": self._timed(context, chunk),
            "tokens": mtmd.mtmd_input_chunk_get_n_tokens(chunk),
            "flash": flash,
        }


if __name__ == "__main__":
    serve(Towers)
