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
            token_ids, text = await self.encode(prompt, room=info.max_model_len - 1), prompt
        else:
            token_ids, text = prompt, None
            check_token_ids("prompt", token_ids, info)
        if not token_ids:
            raise invalid("prompt", f"prompt must not be empty, got {prompt!r}")
        return TokenizedPrompt(tuple(token_ids), text)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, room: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """The text's tokens.

        room: how many may be of use; None: any number. param: the client's name of the text.

        Raises:
            ApiError: 400; it is told without tokenising that there are more. One that has more may still be
                tokenised: refusing those is the caller's business.
        """
        with current_request().phase("tokenize"):
            if len(text) <= self._inline_characters:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if room is not None and len(text) > room:
                # megabytes take seconds to tokenise, and milliseconds to see that they cannot fit
                least = await asyncio.to_thread(self.tokenizer.min_tokens, text)
                if least > room:
                    raise invalid(
                        param,
                        f"{param} has at least {least} tokens; a context of {room + 1} tokens must hold it "
                        "and one more",
                        code="context_length_exceeded",
                    )
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[Message], options: TemplateFields, room: int | None = None
    ) -> list[int]:
        """A conversation through the model's template; `room` as `encode` has it.

        Raises:
            ApiError: 400; the model has no template, or it refuses the messages, or they are far too long.
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
        return await self.encode(text, add_special_tokens=False, room=room, param="messages")


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
