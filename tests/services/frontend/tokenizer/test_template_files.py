"""Tests of the chat templates of a folder: where they are searched for, and which one a conversation gets."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer import template_files
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from tests.services.frontend.tiny_folder import write_folder

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def rendered(folder: Path, override: str = "", **more: Any) -> str:
    template = template_files.load(folder, override)
    return template.render(HELLO, add_generation_prompt=True, continue_final_message=False, variables={}, **more)


def additional(folder: Path, **texts: str) -> Path:
    (folder / "additional_chat_templates").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return folder


def test_template_files_override_the_config(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, chat_template=named)
    assert rendered(folder) == "D"
    assert rendered(folder, tools=TOOLS) == "T"
    (folder / "chat_template.jinja").write_text("F {{ eos_token }}")
    assert rendered(folder) == "F <|im_end|>"
    assert rendered(folder, tools=TOOLS) == "F <|im_end|>"


async def test_additional_templates_of_a_folder_are_read(tmp_path: Path) -> None:
    """Checks ct08: the files that save_pretrained of transformers 4.50 and later writes."""
    folder = additional(write_folder(tmp_path, chat_template="C"), tool_use="T {{ tools | length }}", rag="R")
    (folder / "chat_template.jinja").write_text("D")
    with contextlib.closing(Tokenizer(folder, 1)) as tokenizer:
        texts = [
            (await tokenizer.chat_renderer.sections(ChatPrompt(HELLO, **given)))[0].text
            for given in ({}, {"tools": TOOLS}, {"template": "rag"}, {"template": "rag", "tools": TOOLS})
        ]
        assert texts == ["D", "T 1", "R", "R"]
        assert set(tokenizer.chat_renderer.shapes()) <= {"default", "tool_use", "rag"}


def test_additional_templates_replace_the_configs_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = additional(write_folder(tmp_path, chat_template=named), tool_use="A")
    assert rendered(folder, tools=TOOLS) == "A"
    assert rendered(folder) == "D"


def test_a_request_names_one_of_the_models_templates(tmp_path: Path) -> None:
    folder = additional(write_folder(tmp_path, chat_template="D"), rag="R")
    assert rendered(folder, name="rag") == "R"
    with pytest.raises(InvalidArgument, match=r"cannot be sent with a request.*available: default, rag"):
        rendered(folder, name="{{ 1 }}")


def test_the_setting_is_a_file_or_a_name(tmp_path: Path) -> None:
    folder = additional(write_folder(tmp_path / "model", chat_template="D"), rag="R", tool_use="T")
    (tmp_path / "own.jinja").write_text("O")
    assert rendered(folder, str(tmp_path / "own.jinja"), tools=TOOLS) == "O"
    assert rendered(folder, "rag", tools=TOOLS) == "R"
    with pytest.raises(InvalidArgument, match=r"'missing' is neither a file nor.*default, rag, tool_use"):
        rendered(folder, "missing")


@pytest.mark.parametrize("written", [7, [{"name": "default"}], ["D"]])
def test_a_config_in_an_unknown_format_is_refused(tmp_path: Path, written: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a text or a list"):
        rendered(write_folder(tmp_path, chat_template=written))


def test_binary_or_too_long_files_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="D")
    for content, words in ((b"\xff\xfe", "not UTF-8"), (b"a" * (template_files.LARGEST_BYTES + 1), "more than")):
        (folder / "chat_template.jinja").write_bytes(content)
        with pytest.raises(InvalidArgument, match=words):
            template_files.load(folder)
