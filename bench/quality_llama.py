"""llama.cpp quantises a GGUF file and reads documents, teacher-forced (runs in the environment of llama.cpp).

    python -m bench.quality_llama JOB      (JSON: documents, source, out, types, files, n_real, n_threads)

Each of `types` (Q4_K_M, ...) becomes out/TYPE.gguf, by llama.cpp's own quantiser without an importance
matrix. Of these and of `files`, by name, out/NAME.npy gets float32 [n, V]: the log-probabilities of each
token that counts. Settings are llama.cpp's defaults, and token ids go in as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
from numpy.typing import NDArray

from bench.peers_llama import Batch
from bench.peers_quantise import quantise


def read(path: Path, documents: list[dict[str, Any]], n_real: int, n_threads: int) -> NDArray[np.float32]:
    """float32 [n, n_real]. Raises RuntimeError."""
    model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    params = ll.llama_context_default_params()
    params.n_ctx = params.n_batch = max(len(document["ids"]) for document in documents)
    params.n_threads = params.n_threads_batch = n_threads
    context = ll.llama_init_from_model(model, params)
    n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    found = []
    for document in documents:
        wanted = [*document["counts"][1:], False]
        batch = Batch([(token, at, 0, wanted[at]) for at, token in enumerate(document["ids"])])
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        if ll.llama_decode(context, batch.raw) != 0:
            raise RuntimeError(f"llama.cpp could not read a document with {path}")
        batch.close()
        for at in np.flatnonzero(wanted):
            row = np.ctypeslib.as_array(ll.llama_get_logits_ith(context, int(at)), (n_vocab,))[:n_real]
            shifted = row.astype(np.float64) - row.max()
            found.append((shifted - np.log(np.exp(shifted).sum())).astype(np.float32))
    ll.llama_free(context)
    ll.llama_model_free(model)
    return np.stack(found)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out, n_threads = Path(job["out"]), job["n_threads"]
    ll.llama_backend_init()
    files = {name: Path(path) for name, path in job["files"].items()}
    for name in job["types"]:
        files[name] = out / f"{name}.gguf"
        quantise(Path(job["source"]), files[name], name, n_threads)
    for name, path in files.items():
        np.save(out / f"{name}.npy", read(path, job["documents"], job["n_real"], n_threads))
        print(f"llama.cpp has read {name}", file=sys.stderr, flush=True)
    print(json.dumps({"version": ll.__version__, "system": ll.llama_print_system_info().decode()}))


if __name__ == "__main__":
    main()
