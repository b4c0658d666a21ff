"""Hooks of MkDocs: the first page is README.md, and the navigation has the page of every method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def for_the_site(readme: str) -> str:
    """Point links to docs/ at the pages beside the index; other files of the tree are not part of the site."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.startswith(("https://", "http://", "#")):
            return match[0]
        return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)]*)\)", link, readme).replace("](docs/", "](")


def on_config(config: Any) -> Any:
    """Called by MkDocs first; the pages of methods follow the one that lists them."""
    pages = sorted(Path(config.docs_dir, "methods").glob("*.md"))
    for section in config.nav:
        if "Methods" in section:
            section["Methods"].append({"Compressors": [{page.stem: f"methods/{page.name}"} for page in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for every page; the index is replaced, and links to README.md lead there."""
    if page.file.src_uri != "index.md":
        return markdown.replace("](../README.md", "](index.md")
    return for_the_site(Path(config.config_file_path).with_name("README.md").read_text())
