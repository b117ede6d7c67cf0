"""GGUF files quantised by llama.cpp itself, without an importance matrix (in the environment of the peers).

    python -m bench.peers_quantise DIRECTORY THREADS NAME...

Of DIRECTORY/bf16.gguf makes those named of q8_0.gguf, q4_k_m.gguf, q4_0.gguf and ud_q4.gguf. The last gives
each kind of tensor a type of its own, as published files of the kind of UD-Q4_K_XL do; which types is made
up here.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

FILE_TYPES = {"q8_0": "Q8_0", "q4_k_m": "Q4_K_M", "q4_0": "Q4_0", "ud_q4": "Q4_K_M"}
"""llama.cpp's mixtures, by the file's name."""

UD_Q4 = (
    (r"ssm_(alpha|beta)", "Q8_0"),
    (r"blk\.[0-3]\.(attn_qkv|attn_gate|ssm_out)", "Q8_0"),
    (r"attn_(qkv|gate|q|k|output)\.", "Q5_K"),
    (r"attn_v|ssm_out|blk\.[0-3]\.ffn_down", "Q6_K"),
    (r"ffn_down", "Q5_K"),
    (r"blk\.\d*[02468]\.ffn_(gate|up)", "IQ4_XS"),
    (r"ffn_(gate|up)", "Q4_K"),
)
"""Types of ggml by a pattern of tensors' names; the first that is found counts."""

UD_Q4_EMBEDDING = "Q6_K"
"""Of the embedding and of the head, one tensor or two."""


def quantise(source: Path, target: Path, mixture: str, n_threads: int, is_mixed: bool = False) -> None:
    """Writes a file of one of llama.cpp's mixtures (Q4_K_M, ...). Raises RuntimeError.

    is_mixed: tensors that UD_Q4 names have its types.
    """
    import llama_cpp as ll  # the tables above are read where it is not installed

    params = ll.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(ll, f"LLAMA_FTYPE_MOSTLY_{mixture}"), n_threads
    if is_mixed:
        given = [(pattern.encode(), getattr(ll, f"GGML_TYPE_{type}")) for pattern, type in UD_Q4]
        overrides = (ll.llama_model_tensor_override * (len(given) + 1))(*given)  # zeros end them
        params.tt_overrides = ctypes.cast(overrides, ctypes.POINTER(ll.llama_model_tensor_override))
        params.token_embedding_type = params.output_tensor_type = getattr(ll, f"GGML_TYPE_{UD_Q4_EMBEDDING}")
    status = ll.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama.cpp could not quantise {source} to {target.name} (status {status})")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for file in sys.argv[3:]:
        target = folder / f"{file}.gguf"
        quantise(folder / "bf16.gguf", target, FILE_TYPES[file], int(sys.argv[2]), is_mixed=file == "ud_q4")
