from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from hybridserve.replicas.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


@pytest.fixture(scope="session")
def prefix_space() -> Tokenizer:
    """A SentencePiece-like tokenizer: a leading space, byte tokens for what it has no piece of."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += list("\N{LOWER ONE EIGHTH BLOCK}abcdefghijklmnopqrstuvwxyzé中")
    merges = [
        ("\N{LOWER ONE EIGHTH BLOCK}", "a"),
        ("a", "b"),
        ("b", "c"),
        ("\N{LOWER ONE EIGHTH BLOCK}a", "b"),
    ]
    pieces += list(dict.fromkeys(left + right for left, right in merges))
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    fast = FastTokenizer(model)
    fast.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(fast, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
