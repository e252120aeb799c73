"""Make ``corpus/tokenizer.json`` from the shipped text: ``python -m`` this module."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardscope.training.data.tokenizer import END_OF_TEXT, SHIPPED_TEXT, SHIPPED_TOKENIZER, VOCAB_SIZE


def make_tokenizer(text: Path, target: Path) -> int:
    """Train a byte-level BPE tokenizer on ``text``, write it to ``target``, return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes are tokens, so text in any language and any emoji encodes without an unknown token.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
    tokenizer.save(str(target), pretty=False)
    return int(tokenizer.get_vocab_size())


def main() -> None:
    """Parse the arguments, write the tokenizer and print its path, vocabulary size and bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=SHIPPED_TEXT)
    parser.add_argument("--target", type=Path, default=SHIPPED_TOKENIZER)
    arguments = parser.parse_args()
    size = make_tokenizer(arguments.text, arguments.target)
    print(f"{arguments.target}: {size} tokens, {arguments.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
