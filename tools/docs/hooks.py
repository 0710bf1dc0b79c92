"""Hooks of MkDocs: adds the pages that are generated from the code, and refuses images without a description."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from tools.docs import reference

IMAGE_WITHOUT_TEXT = re.compile(r"<img(?![^>]*\balt=\"[^\"]+\")[^>]*>|!\[\s*\]\(")


def on_files(files: Files, config: Any) -> Files:
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if found := IMAGE_WITHOUT_TEXT.search(markdown):
        raise PluginError(f"{page.file.src_uri}: this image needs an alternative text: {found[0]}")
    return markdown
