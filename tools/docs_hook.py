"""What mkdocs.yml cannot say: pages from elsewhere in the tree, and formulas without a network."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Where a page comes from, if not from docs.
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "bench/README.md",
    "benchmark-tables.md": "bench/results/tables.md",
    "contributing.md": "CONTRIBUTING.md",
    "ptxrun.md": "tests/ptxrun/README.md",
}
SOURCES = {source: page for page, source in PAGES.items()}
# As GitHub takes them: $`...`$ in a line, ```math for a line of their own.
INLINE = re.compile(r"\$`(.+?)`\$", re.DOTALL)
BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)")
TAG = re.compile(r'((?:src|srcset)=")([^"]+)')


def api() -> str:
    """One page, from the docstrings."""
    sys.path[:0] = [str(ROOT), str(ROOT / "python")]
    from tools.public_api import public, undocumented

    if missing := undocumented():
        raise PluginError(f"not described in a docstring: {', '.join(missing)}")
    return "# API reference\n\n" + "".join(f"::: {name}\n\n" for name in public())


def on_files(files: Any, config: Any) -> Any:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=text_of(source)))
    files.append(File.generated(config, "api.md", content=api()))
    for picture in (ROOT / "bench/results").glob("*.png"):
        files.append(File.generated(config, f"bench/{picture.name}", abs_src_path=str(picture)))
    return files


def text_of(source: str) -> str:
    """A file of the tree whose links lead to pages and pictures of the site.

    A link to anything else, a program or a folder, becomes plain text.
    """
    text = mathml((ROOT / source).read_text())
    text = TAG.sub(lambda match: match[1] + moved(source, match[2]), text)

    def link(match: re.Match[str]) -> str:
        target = moved(source, match[3])
        if match[2].strip("`").endswith(".md") and "://" not in target:  # a file's name
            name = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[3]))
            title = (ROOT / name).read_text().partition("\n")[0].removeprefix("# ")
            return f"[{title}]({target}{match[4] or ''})"
        is_there = "://" in target or target.endswith((".md", ".png")) or not target
        return f"{match[1]}[{match[2]}]({target}{match[4] or ''})" if is_there else match[2]

    return LINK.sub(link, text)


def moved(source: str, target: str) -> str:
    """Where a link of a file in the tree leads on the site."""
    if "://" in target or not target:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith("bench/results/") and path.endswith(".png"):
        return f"bench/{posixpath.basename(path)}"
    return SOURCES.get(path) or path.removeprefix("docs/")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages of docs; the others were written by `on_files`."""
    name = page.file.src_uri
    return markdown if name in PAGES or name == "api.md" else text_of(f"docs/{name}")


def mathml(markdown: str) -> str:
    """Formulas as MathML, which browsers draw themselves."""
    wide = '\n<div style="overflow-x: auto">{}</div>\n'  # on a phone it scrolls by itself
    blocks = BLOCK.sub(lambda match: wide.format(convert(match[1], display="block")), markdown)
    # Python-Markdown takes <math> at the start of a line for a block of its own.
    return INLINE.sub(lambda match: f"<span>{convert(match[1])}</span>", blocks)
