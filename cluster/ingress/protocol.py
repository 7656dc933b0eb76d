"""The requests' fields and their types, as OpenAI's API and vLLM's extras name them.

Checks types and refuses what is not supported; values are checked where they are used (`params`, `prompts`).
Unknown fields are errors. Nothing here knows the model.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from hybridserve.cluster.ingress.fields import (
    check_prompt,
    check_response_format,
    check_tools,
    one_or_many,
    read_content,
    read_logit_bias,
    refuse_suffix,
)
from hybridserve.replicas.sampling_params import MAX_LOGPROBS

# far above any conversation, and few enough for a chat template to be rendered without holding up others
MAX_MESSAGES = 4096

Prompt = str | list[str] | list[int] | list[list[int]]


class Strict(BaseModel):
    """A JSON object whose fields are known and of the stated types: "16" is not 16."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool = False


class SamplingFields(Strict):
    """How tokens are chosen; None stands for the model's default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(one_or_many)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(read_logit_bias)] = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = False


class OpenAIFields(SamplingFields):
    """What both OpenAI endpoints share beyond sampling."""

    n: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    """Taken and not used, as `user`."""

    @model_validator(mode="after")
    def _check_stream(self) -> "OpenAIFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not available with stream true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(OpenAIFields):
    prompt: Annotated[Prompt, PlainValidator(check_prompt)]
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Annotated[str | None, PlainValidator(refuse_suffix)] = None

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionRequest":
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise ValueError(f"best_of is not supported unless it equals n, got {self.best_of} with n {n}")
        return self


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(read_content)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Any] | None, PlainValidator(check_tools)] = None
    function_call: Annotated[None, PlainValidator(check_tools)] = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None


class TemplateFields(Strict):
    """What a chat template is rendered with."""

    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(OpenAIFields, TemplateFields):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: Annotated[dict[str, Any] | None, PlainValidator(check_response_format)] = None
    tools: Annotated[list[Any] | None, PlainValidator(check_tools)] = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any] | None, PlainValidator(check_tools)] = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs needs logprobs true, got top_logprobs {self.top_logprobs}")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(f"max_tokens and max_completion_tokens disagree, got {both[0]} and {both[1]}")
        return self


class GenerateRequest(SamplingFields):
    prompt: str


class TokenizeRequest(TemplateFields):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages is required, and only one of them")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]
