"""A checkpoint's chat template: a conversation to the one string the model was trained on.

Owns finding the template among a checkpoint's files and rendering it in a sandbox, with the names templates
expect. Knows nothing of tokens or of what roles a server accepts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# what a template can meet in messages it was not written for
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """
        Args:
            source: the Jinja template.
            special_tokens: texts the template may name, as "bos_token" or "eos_token".

        Raises:
            ValueError: the source is not a template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def load(
        cls, folder: Path, tokenizer_config: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> "ChatTemplate | None":
        """The checkpoint's template: `chat_template.jinja` first, then the one in `tokenizer_config.json`.

        Raises:
            ValueError: a template is there and is malformed.
        """
        file = folder / "chat_template.jinja"
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), special_tokens)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):
            if not all(
                isinstance(entry, Mapping) and entry.keys() >= {"name", "template"} for entry in source
            ):
                raise ValueError(f"chat_template's entries must have a name and a template, got {source!r}")
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" not in named:
                raise ValueError(f"chat_template has no entry named default, it has {', '.join(named)}")
            source = named["default"]
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError(f"chat_template must be a string or a list, got {type(source).__name__}")
        return cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The conversation as text.

        Args:
            messages: in order; the template may not change them.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further names for the template.

        Raises:
            ValueError: the template refuses the messages or fails on them, or `variables` sets one of the
                other two names.
        """
        names: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens}
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        hidden = sorted(own.keys() & variables.keys())
        if hidden:
            raise ValueError(f"chat template variables must not set {hidden[0]}")
        try:
            return self._template.render({**names, **variables, **own})
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it is bare."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would write `<` as an HTML escape."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
