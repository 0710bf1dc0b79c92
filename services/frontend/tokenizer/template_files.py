"""Chat templates in a model's folder."""

from __future__ import annotations

from pathlib import Path

from quire.services.frontend.tokenizer.chat_template import ChatTemplate
from quire.services.frontend.tokenizer.config_files import read_optional_json, special_tokens
from quire.shared.errors import InvalidArgument

DEFAULT, TOOL_USE = "default", "tool_use"  # names that transformers uses
CONFIG, FILE, ADDITIONAL = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
LARGEST_BYTES = 1 << 20


def load(folder: Path, override: str = "") -> ChatTemplate:
    """Loads the chat templates of a folder.

    `override` is a file or the name of one of the folder's templates; without it, the folder's own templates are used.
    `tool_use` applies to conversations with tools, unless `override` is given.
    """
    variables = special_tokens(folder)
    if override and Path(override).is_file():
        return ChatTemplate(_text(Path(override)), variables, label=override)
    named, label = _named(folder)
    if override:
        if override not in named:
            names = ", ".join(sorted(named)) or "none"
            raise InvalidArgument(
                f"chat_template: {override!r} is neither a file nor the name of one of the model's templates; its"
                f" templates: {names}",
                field="chat_template",
            )
        return ChatTemplate(named[override], variables, named=named, label=f"{label} {override!r}")
    return ChatTemplate(named.get(DEFAULT), variables, named.get(TOOL_USE), named, label)


def _named(folder: Path) -> tuple[dict[str, str], str]:
    """Returns the folder's templates by name, and the source of the default one: files override the config."""
    written = read_optional_json(folder / CONFIG).get("chat_template")
    named, label = _configured(written), CONFIG
    if (folder / FILE).is_file():
        named, label = {DEFAULT: _text(folder / FILE)}, FILE
    for path in sorted((folder / ADDITIONAL).glob("*.jinja")):
        named[path.stem] = _text(path)
    return named, label


def _configured(written: object) -> dict[str, str]:
    """Returns the templates by name from the configuration's value, a text (named default), an object or a list.
    Raises InvalidArgument otherwise."""
    if written is None:
        return {}
    if isinstance(written, str):
        return {DEFAULT: written}
    if isinstance(written, dict):
        written = [{"name": name, "template": text} for name, text in written.items()]
    try:
        assert isinstance(written, list)
        return {str(entry["name"]): str(entry["template"]) for entry in written}
    except (AssertionError, KeyError, TypeError):
        raise InvalidArgument(
            f"model: chat_template of {CONFIG} must be a text or a list of objects with name and template",
            field="model",
        ) from None


def _text(path: Path) -> str:
    """Reads a template file; raises InvalidArgument if it is larger than LARGEST_BYTES or not UTF-8."""
    if path.stat().st_size > LARGEST_BYTES:
        raise InvalidArgument(f"model: chat template {path} has more than {LARGEST_BYTES} bytes", field="model")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(f"model: chat template {path} is not UTF-8", field="model") from None
