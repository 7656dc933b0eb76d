"""Write a tokenizer with as many tokens as a shape, so that a shape without one can be served.

    python tests/benchmarks/make_tokenizer.py --shape configs/models/qwen3.5-9b.yaml --folder /tmp/words

Each byte is a token, and the rest are made-up words that no text is cut into; every id has a text of its own,
as long as a word, so that answers of random weights cost what real ones do. A prompt has a token a byte.
"""

import argparse
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hybridserve.replicas.models.config import load_model_config

LETTERS = string.ascii_lowercase
# the character that byte-level vocabularies write for a space
SPACE = "\u0120"


def word(number: int) -> str:
    """A space and letters, another one for each number."""
    letters = ""
    while number >= 0:
        number, last = divmod(number, len(LETTERS))
        letters = LETTERS[last] + letters
        number -= 1
    return SPACE + letters


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write `tokenizer.json`.

    Raises:
        ValueError: there are fewer tokens than bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet):
        raise ValueError(f"vocab_size must be at least {len(alphabet)}, got {vocab_size}")
    tokens = [*alphabet, *map(word, range(vocab_size - len(alphabet)))]
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"), pretty=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, required=True, help="a file of configs/models")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    try:
        make_tokenizer(args.folder, load_model_config(args.shape).vocab_size)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
