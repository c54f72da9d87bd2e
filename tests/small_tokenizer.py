"""A tokenizer of single letters with a few merges, on disk as Gemma's is."""

from __future__ import annotations

from pathlib import Path


def write_tokenizer(folder: Path, merges: list[tuple[str, str]]) -> None:
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    words = [*special, "▁", *"abcdefghijklmnopqrstuvwxyzQPAYN:?.\n", *(left + right for left, right in merges)]
    GemmaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=merges).save_pretrained(folder)
