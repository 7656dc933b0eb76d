from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hybridserve.replicas.text.chat import ChatTemplate
from hybridserve.replicas.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_demo_template_as_transformers_renders_it(
    byte_level: Tokenizer, demo_model: Path, add_generation_prompt: bool
) -> None:
    reference = AutoTokenizer.from_pretrained(demo_model)
    messages = [
        {"role": "system", "content": "be <b>short</b>"},
        *USER,
        {"role": "assistant", "content": "so"},
    ]
    text = byte_level.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    assert text == reference.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    ids = byte_level.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    assert ids[0] == 1
    assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_names_that_templates_expect() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% if tools is none %}no tools{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ thinking }}",
        {"bos_token": "<s>"},
    )
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "<é>"}, *USER]
    text = template.render(messages, False, {"thinking": "off"})
    assert text == f'<s>no tools"<é>"{datetime.now().year}off'


def test_blocks_leave_no_blank_lines() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert template.render(USER, False, {}) == "hi\n"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ raise_exception('only one system message') }}", USER, "only one system message"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}], "refuses these messages"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user"}], "content"),
        ("{{ messages[7].content }}", USER, "refuses these messages"),
        ("{{ 1 / 0 }}", USER, "division by zero"),
        ("{{ messages.append(1) }}", USER, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", USER, "unsafe"),
    ],
)
def test_a_refusal_is_a_value_error(source: str, messages: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(messages, True, {})


def test_variables_do_not_replace_the_messages() -> None:
    with pytest.raises(ValueError, match="must not set messages"):
        ChatTemplate("").render(USER, True, {"messages": []})


def test_a_model_without_template_says_so(prefix_space: Tokenizer) -> None:
    assert not prefix_space.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        prefix_space.apply_chat_template(USER)


def test_templates_are_found_in_order(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "named"}, {"name": "rag", "template": ""}]
    found = ChatTemplate.load(tmp_path, {"chat_template": named}, {})
    assert found is not None
    assert found.source == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    found = ChatTemplate.load(tmp_path, {"chat_template": named}, {})
    assert found is not None
    assert found.source == "file"
    assert ChatTemplate.load(tmp_path / "none", {}, {}) is None


@pytest.mark.parametrize("entry", [{"name": "default"}, "default"])
def test_an_entry_that_is_no_template_is_named(tmp_path: Path, entry: object) -> None:
    with pytest.raises(ValueError, match="chat_template's entries .* got .*default"):
        ChatTemplate.load(tmp_path, {"chat_template": [entry]}, {})


def test_a_template_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8 text"):
        ChatTemplate.load(tmp_path, {}, {})
