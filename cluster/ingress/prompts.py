"""From a request's prompt or messages to token ids. Knows nothing of sampling."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from hybridserve.cluster.ingress.errors import invalid
from hybridserve.cluster.ingress.params import check_token_ids
from hybridserve.cluster.ingress.protocol import Message, Prompt, TemplateFields
from hybridserve.cluster.observe.trail import current_request
from hybridserve.cluster.pool.interface import EngineInfo
from hybridserve.replicas.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizedPrompt:
    token_ids: tuple[int, ...]
    text: str | None
    """None when the client sent ids."""


class PromptReader:
    """Tokenises, short texts at once and long ones in a thread."""

    def __init__(self, tokenizer: Tokenizer, inline_characters: int) -> None:
        self.tokenizer = tokenizer
        self._inline_characters = inline_characters

    async def read(self, prompt: Prompt, info: EngineInfo) -> list[TokenizedPrompt]:
        """All prompts of a completion.

        Raises:
            ApiError: 400; one is empty, or holds an id that is not in the vocabulary.
        """
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        prompts: Sequence[str | list[int]] = prompt if many else [prompt]
        return [await self._read_one(item, info) for item in prompts]

    async def _read_one(self, prompt: str | list[int], info: EngineInfo) -> TokenizedPrompt:
        if isinstance(prompt, str):
            token_ids, text = await self.encode(prompt), prompt
        else:
            token_ids, text = prompt, None
            check_token_ids("prompt", token_ids, info)
        if not token_ids:
            raise invalid("prompt", f"prompt must not be empty, got {prompt!r}")
        return TokenizedPrompt(tuple(token_ids), text)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with current_request().phase("tokenize"):
            if len(text) <= self._inline_characters:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[Message], options: TemplateFields) -> list[int]:
        """A conversation through the model's template.

        Raises:
            ApiError: 400; the model has no template, or it refuses the messages.
        """
        turns = [_template_message(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=options.add_generation_prompt,
                variables=options.chat_template_kwargs,
            )
        except ValueError as error:
            raise invalid("messages", f"messages: {error}") from None
        return await self.encode(text, add_special_tokens=False)


def _template_message(message: Message) -> dict[str, object]:
    """A message as templates know it; "developer" is OpenAI's newer word for "system"."""
    turn: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            turn[name] = value
    return turn
