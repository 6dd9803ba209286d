"""Hooks of mkdocs for the site that `./run.sh docs` builds: pages of the root, and links out of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Pages that are not in docs/, by the name that each has in the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE, FLAG = re.compile(r"<code>.*?</code>", re.DOTALL), re.compile(r"--[\w-]+")
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b(?=</td>)")
WHOLE = r'<span class="whole">\g<0></span>'
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)((?:#[^)\s]*)?)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    for source, name in PAGES.items():
        files.append(
            File.generated(config, name, content=(ROOT / source).read_text().replace("](docs/", "]("))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page for the site.

    Comments go, as a table is not recognized behind one. Links to pages of the root get their names in the
    site, and links to files that are no pages become their text.
    """
    is_log = page.file.src_uri.startswith("log/")
    if is_log:
        # The archive would hide the pages in the results of a search.
        page.meta["search"] = {"exclude": True}

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        name = PAGES.get(Path(path).name)
        if name:
            return f"[{text}]({'../' * page.file.src_uri.count('/')}{name}{anchor})"
        is_page = not path or "://" in path or path.endswith((".md", ".png"))
        return match[0] if is_page else text

    return LINK.sub(link, re.sub(r"<!--.*?-->\n?", "\n", markdown, flags=re.DOTALL))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Return the content with flags in code and dates in tables that no line break divides."""
    return DATE.sub(WHOLE, CODE.sub(lambda match: FLAG.sub(WHOLE, match[0]), html))
