"""A checkpoint's tokenizer: text to ids, ids to text, and each id's own bytes.

Owns reading `tokenizer.json` and `tokenizer_config.json`. Uses the `tokenizers` library directly: building
transformers' AutoTokenizer takes two to four seconds and imports torch, this takes 0.02 s and does not. Knows
nothing of models (a model's vocabulary may be padded beyond the tokenizer's) or of requests.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from hybridserve.replicas.text.chat import ChatTemplate
from hybridserve.replicas.text.token_bound import TokenBound

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Tokens of one checkpoint. Safe to use from several threads."""

    has_text = True
    """False for a `NoTokenizer`."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """
        Args:
            fast: the tokenizer itself.
            special_tokens: text by role: "bos_token", "eos_token", "pad_token", "unk_token".
            chat_template: None for a model that has none.
        """
        self._fast = fast
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        added = fast.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = json.loads(fast.to_str())["decoder"] if fast.decoder is not None else None
        self.byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        """True when decoding is nothing but joining each token's bytes."""
        self._bytes: dict[int, bytes] = {}
        self._bound: TokenBound | None = None

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint in folder `path`.

        Raises:
            ValueError: the folder or a file in it is missing or malformed; the message names it.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"model folder {str(path)!r} does not exist")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} cannot be read: {error}") from error
        # a checkpoint may carry the padding and truncation of its training
        fast.no_padding()
        fast.no_truncation()
        config = _read_config(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        template = ChatTemplate.load(folder, config, special_tokens)
        return cls(fast, special_tokens=special_tokens, chat_template=template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special and added ones included."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of `eos_token`, if there is one; `config.json` may name more."""
        token_id = self.token_id(self._special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token, or None."""
        return self._fast.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """True for ids that `skip_special_tokens` leaves out."""
        return token_id in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; `add_special_tokens` lets the tokenizer add its own (a leading bos, say).

        Raises:
            ValueError: the text holds a lone surrogate, so it is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds a lone surrogate at character {error.start}") from error
        # the batch call releases the interpreter lock, plain encode holds it for the whole text
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def min_tokens(self, text: str) -> int:
        """How many tokens `text` has at least, without tokenising it; 0 where that cannot be told."""
        if self._bound is None:
            ids = self._fast.get_vocab(with_added_tokens=True).values()
            self._bound = TokenBound(self._fast, map(self._compute_bytes, ids))
        return self._bound.at_least(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are not UTF-8 become U+FFFD; unknown ids are left out."""
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for, possibly only a part of a character; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        r"""One id as text, for logprobs; a part of a character is written `bytes:\xe2\x82`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as the text the model was trained on.

        Encode it with `add_special_tokens=False`: the template has written them.

        Args:
            messages: dicts with "role", "content" and whatever else the template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template ("tools", "enable_thinking", …).

        Raises:
            ValueError: the model has no template, or the template refuses the conversation.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template; send a plain prompt instead of messages")
        return self._chat_template.render(messages, add_generation_prompt, variables or {})

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """`apply_chat_template`, as ids. Raises ValueError as it does."""
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.encode(text, add_special_tokens=False)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            # as the library's decoder: a token with a character outside the table stands for itself
            try:
                return bytes(_BYTE_OF_CHARACTER[c] for c in token)
            except KeyError:
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match[1], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_characters() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte, inverted.

    Bytes that are printable and not blank in Latin-1 stand for themselves; the others, in order, are U+0100
    and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_characters()


def _read_config(file: Path) -> dict[str, object]:
    """`tokenizer_config.json`, or nothing when there is none."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got {type(config).__name__}")
    return config


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Special tokens' text by role; a token is written as a string or as an object with its `content`."""
    tokens: dict[str, str] = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens
