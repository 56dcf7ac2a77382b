"""What MkDocs does to a page of docs/ on its way into the site.

Pages link to source files, which the site does not have: such a link becomes its text with the
file's path behind it. That the file exists is checked here, as it is in tests/shape/test_docs.py.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)]*)?\)")
INSIDE = (".md", ".svg", ".png", ".json")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by the path of the file they mean."""
    folder = (DOCS / page.file.src_path).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match.group(1), match.group(2)
        if "://" in target:
            return match.group(0)
        file = (folder / target).resolve()
        if not file.exists():
            raise FileNotFoundError(
                f"docs/{page.file.src_path} links to {target}, which is not there"
            )
        if file.is_relative_to(DOCS) and file.suffix in INSIDE:
            return match.group(0)
        path = file.relative_to(ROOT).as_posix()
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)
