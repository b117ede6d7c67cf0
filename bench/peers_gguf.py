"""The checkpoint as a GGUF file in bfloat16, which llama.cpp then quantises (bench/peers_quantise.py).

    python -m bench.peers_gguf CHECKPOINT FILE

The engines exchange token ids, so the vocabulary only has to be one that both accept: bytes, the tokens that
end an answer, and a made-up word for every other id, none of which a merge makes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from tests.tiny_gguf import write_gguf

ENDS = ("<|endoftext|>", "<|im_end|>")


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json with a token for every id; one merge, since llama.cpp wants some."""
    alphabet = sorted(ByteLevel.alphabet())
    words = [*alphabet, alphabet[0] + alphabet[1]]
    words += [f"<{id}>" for id in range(len(words), vocab_size - len(ENDS))]
    added = [{"id": len(words) + i, "content": end, "special": True} for i, end in enumerate(ENDS)]
    return {
        "model": {"vocab": {word: id for id, word in enumerate(words)}, "merges": [alphabet[:2]]},
        "added_tokens": added,
    }


def write_bf16(checkpoint: Path, target: Path) -> None:
    """Writes the file: matrices in bfloat16, all else in float32."""
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder)
        (text / "tokenizer.json").write_text(json.dumps(tokenizer(vocab_size)))
        (text / "tokenizer_config.json").write_text(json.dumps({"eos_token": ENDS[1], "pad_token": ENDS[0]}))
        (text / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
        write_gguf(checkpoint, target, "BF16", text=text)


if __name__ == "__main__":
    write_bf16(Path(sys.argv[1]), Path(sys.argv[2]))
