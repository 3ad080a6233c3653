"""Pages of the site beside those in docs: the README, the list of decisions, and files of the repository with a link.

MkDocs calls the functions named ``on_...``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mathml import format_math
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
HOME = "README.md"
REPOSITORY = "repository"  # folder of the site for files outside of docs
HIDDEN = "---\nsearch: {exclude: true}\n---\n"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
NO_DEFAULT = "<code>Sentinel.UNSET</code>"
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".sbatch": "bash", ".pbs": "bash"}


def on_config(config: Any) -> Any:
    """Show blocks of formulas as MathML."""
    fences = [{"name": "math", "class": "math", "format": format_math}]
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, the list of decisions, and all files of the repository that pages link to."""
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()} | {HOME}
    added: dict[str, str] = {"decisions/index.md": list_of_decisions()}
    waiting = sorted(pages)
    while waiting:
        path = waiting.pop()
        for target in targets(path):
            uri = place(target)
            if uri.startswith(REPOSITORY) and uri not in added:
                added[uri] = shown(target)
                waiting += [target] if target.endswith(".md") else []
    added["index.md"] = (ROOT / HOME).read_text(encoding="utf-8")
    for uri, content in sorted(added.items()):
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files of the repository by links to their pages."""
    here = source(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        target = resolved(here, match[1])
        return relative(place(target), page.file.src_uri) if target else match[1]

    return LINK.sub(replaced, markdown) if here else markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Leave the cell of an option without a default empty; mkdocs-click writes click's mark for it."""
    return html.replace(NO_DEFAULT, "")


def source(uri: str) -> str | None:
    """Return the path in the repository of a page with links of its own; None for pages made of code."""
    if uri == "index.md":
        return HOME
    if not uri.startswith(f"{REPOSITORY}/"):
        return f"docs/{uri}"
    path = uri.removeprefix(f"{REPOSITORY}/")
    return path if (ROOT / path).is_file() else None


def targets(path: str) -> Iterator[str]:
    """Yield the paths in the repository of what a Markdown file links to."""
    for link in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        target = resolved(path, link)
        if target:
            yield target


def resolved(path: str, link: str) -> str | None:
    """Return the path in the repository to which a link of the file at ``path`` leads; None if it leads elsewhere."""
    if ":" in link:
        return None
    target = PurePosixPath(os.path.normpath(PurePosixPath(path).parent / link))
    return str(target) if (ROOT / target).exists() else None


def place(target: str) -> str:
    """Return the path in the site's sources of a file or folder of the repository."""
    if target == HOME:
        return "index.md"
    if target == "docs/decisions":
        return "decisions/index.md"
    if target.startswith("docs/") and (ROOT / target).is_file():
        return target.removeprefix("docs/")
    return f"{REPOSITORY}/{target}" if target.endswith(".md") else f"{REPOSITORY}/{target}.md"


def relative(uri: str, page: str) -> str:
    """Return a link from a page to another, both as paths in the site's sources."""
    return os.path.relpath(uri, PurePosixPath(page).parent)


def shown(target: str) -> str:
    """Return a page that shows a file of the repository, or lists a folder."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith(("_", ".")))
        return f"{HIDDEN}# {target}\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return HIDDEN + text
    return f"{HIDDEN}# {target}\n\n~~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~~\n"


def list_of_decisions() -> str:
    """Return a page that lists the decisions by number."""
    lines = []
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return (
        "# Decisions\n\nEach page states the context, the decision and what was rejected.\n\n" + "\n".join(lines) + "\n"
    )
