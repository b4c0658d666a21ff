"""Hooks of MkDocs: the first page is README.md, the navigation has the page of every method, sections become tabs."""

from __future__ import annotations

import ast
import re
import textwrap
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


def in_tabs(markdown: str) -> str:
    """Make tabs of the sections between two comments, which GitHub shows one below the other."""

    def tabs(match: re.Match[str]) -> str:
        _, *parts = re.split(r"^### (.*)$", match[1].replace("<!-- fresh -->\n", ""), flags=re.MULTILINE)
        made = zip(parts[::2], parts[1::2], strict=True)
        return "".join(f'=== "{title}"\n\n{textwrap.indent(text.strip(), "    ")}\n\n' for title, text in made)

    return re.sub(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", tabs, markdown, flags=re.DOTALL | re.MULTILINE)


def highlighted(markdown: str) -> str:
    """Highlight the lines that use GRACE, in scripts that import a toolkit."""

    def marked(match: re.Match[str]) -> str:
        code = match[1]
        if not re.search(r"^import (horovod|keras|tensorflow|torch)\b", code, re.MULTILINE):
            return match[0]
        lines = [
            f"{node.lineno}-{node.end_lineno}"
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.stmt)
            and not hasattr(node, "body")
            and re.search(r"\bgr(ace|c)\b", ast.unparse(node))
        ]
        if not lines:
            return match[0]
        return f'```python hl_lines="{" ".join(lines)}"\n{code}```'

    return re.sub(r"^```python\n(.*?)^```", marked, markdown, flags=re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Called by MkDocs first: add the pages of methods to the navigation, after the page that lists them."""
    pages = sorted(Path(config.docs_dir, "methods").glob("*.md"))
    for section in config.nav:
        if "Methods" in section:
            section["Methods"].append({"Compressors": [{page.stem: f"methods/{page.name}"} for page in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for every page: replace the index by README.md, and point links to README.md there."""
    if page.file.src_uri == "index.md":
        markdown = for_the_site(Path(config.config_file_path).with_name("README.md").read_text())
    return in_tabs(highlighted(markdown.replace("](../README.md", "](index.md")))


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Called by MkDocs for every page: add the anchors of tabs, which MkDocs does not know yet."""
    page.present_anchor_ids |= set(re.findall(r'<input[^>]* id="([^"]+)"', html))
