"""The built-in model's tokenizer: byte-level BPE trained on the corpus, with the family's added tokens.

`python -m training.tokenizer` writes every file of the model's directory but its weights and card.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.corpus import DEMO, Corpus

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]
PLAIN = frozenset(("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"))
N_BASE = 1560  # with the 33 added tokens 1,593 ids; the embedding has 1,600 rows


def train_tokenizer(n_documents: int, seed: int = 20) -> Tokenizer:
    """BPE of N_BASE entries over the first `n_documents` of a corpus, then the added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_BASE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(n_documents, seed), trainer)
    tokenizer.add_tokens([AddedToken(t, special=t not in PLAIN, normalized=False) for t in ADDED])
    if tokenizer.get_vocab_size() != N_BASE + len(ADDED):
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries; use more documents")
    return tokenizer


def _texts(n_documents: int, seed: int) -> list[str]:
    texts = []
    for document in islice(Corpus(seed), n_documents):
        text = "".join(text for text, _ in document.segments)
        for token in ADDED:
            text = text.replace(token, "\n")
        texts.append(text)
    return texts


def write_files(directory: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    from training.model import Geometry  # here, so that the processes that make the corpus need no torch

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    ids = {token: tokenizer.token_to_id(token) for token in ADDED}
    described = {
        str(i): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t not in PLAIN,
        }
        for t, i in ids.items()
    }
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "added_tokens_decoder": described,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": Geometry().max_position_embeddings,
        },
        "config.json": Geometry().published_config(ids["<|endoftext|>"]),
        "generation_config.json": {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
            "top_k": 20,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument("--documents", type=int, default=40_000)
    given = parser.parse_args()
    write_files(given.out, train_tokenizer(given.documents))
    print(f"{given.out}: {sum(f.stat().st_size for f in given.out.iterdir()):,} bytes in all")


if __name__ == "__main__":
    main()
