"""In the place of the tokenizer of a model that has none: token ids go in and out, and text is refused."""

from collections.abc import Mapping, Sequence

from hybridserve.replicas.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Every id has no text; what needs text raises ValueError."""

    has_text = False
    vocab_size = 0
    eos_token_ids = ()
    has_chat_template = False
    byte_level = True

    def __init__(self, model: str) -> None:
        """`model` names the model in messages."""
        self._model = model

    def token_id(self, token: str) -> int | None:
        return None

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise self._refusal()

    def min_tokens(self, text: str) -> int:
        return 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise self._refusal()

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_text(self, token_id: int) -> str:
        return ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        raise self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(
            f"{self._model} was loaded without a tokenizer: it takes token ids "
            "({'prompt_token_ids': [...]}) and no text"
        )
