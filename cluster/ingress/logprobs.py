"""Log-probabilities in the forms of the two OpenAI endpoints, and vLLM's form of a prompt's."""

import codecs
from collections.abc import Sequence

from hybridserve.replicas.engine.plan import TokenLogprobs
from hybridserve.replicas.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> dict[str, object]:
    """/v1/chat/completions: one entry a token, with its `top` likeliest alternatives."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        likeliest = zip(entry.top_token_ids[:top], entry.top_logprobs[:top], strict=True)
        content.append(
            {
                **_chat_token(tokenizer, token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in likeliest],
            }
        )
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """/v1/completions: parallel lists, with each token's offset in the whole text of the answer.

    One object an answer: offsets go on from call to call.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[object]]:
        """The lists for the next tokens; None stands for a prompt's first token, which nothing predicts."""
        tokenizer = self._tokenizer
        out: dict[str, list[object]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            out["tokens"].append(tokenizer.token_text(token_id))
            out["token_logprobs"].append(None if entry is None else max(entry.logprob, _LOWEST))
            out["top_logprobs"].append(None if entry is None else self._likeliest(token_id, entry))
            out["text_offset"].append(self._offset)
            self._advance(token_id)
        return out

    def _advance(self, token_id: int) -> None:
        """Move past the characters that this token completes."""
        if not (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _likeliest(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by text, and always the chosen one."""
        text = self._tokenizer.token_text
        pairs = zip(entry.top_token_ids[: self._top], entry.top_logprobs[: self._top], strict=True)
        # two ids of one text: the likelier comes first and stays
        found: dict[str, float] = {}
        for i, logprob in [*pairs, (token_id, entry.logprob)]:
            found.setdefault(text(i), max(logprob, _LOWEST))
        return found


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[tuple[int, TokenLogprobs]]
) -> list[dict[str, object] | None]:
    """vLLM's form: one dict a prompt token, by token id; the first is None."""
    out: list[dict[str, object] | None] = [None]
    for token_id, entry in entries:
        likeliest = {
            str(i): _prompt_token(tokenizer, i, logprob, rank)
            for rank, (i, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), 1)
        }
        chosen = _prompt_token(tokenizer, token_id, entry.logprob, entry.rank)
        out.append({str(token_id): chosen, **likeliest})
    return out


def _prompt_token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, object]:
    return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
