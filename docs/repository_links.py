"""Pages, links and pictures of the site that are elsewhere in the repository.

The report, all experiments and the notebook are pages of the site. A picture joins it;
a link to any other file outside of `docs/`, which reads well in a clone, goes to the
repository.
"""

import json
import posixpath
import re
import struct
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


# What is in a block of code is no link.
LINK = re.compile(r"^ *```.*?^ *```$|(?<=\]\()([^)\s#]+)", re.DOTALL | re.MULTILINE)
PICTURES = (".png", ".gif", ".svg")
PHONE = "(max-width: 44.9375em)"  # as the theme's styles have it
NARROW = 600  # pixels: one panel
# Pages by the file that they are made from.
PAGES = {
    "benchmarks/report.md": "report.md",
    "benchmarks/evidence/experiments.md": "experiments.md",
    "examples/muonclip_tutorial.ipynb": "tutorial.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
# A picture from elsewhere, of which its text stays: the site loads nothing.
BADGE = re.compile(r"!\[([^]]*)\]\(https:[^)]*\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for source, page in PAGES.items():
        text = (_root(config) / source).read_text()
        if source.endswith(".ipynb"):
            text = _as_markdown(json.loads(text))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    here = page.file.src_uri
    source = _SOURCES.get(here, f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        link = match[1]
        if link is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if ":" in link or (path.startswith("docs/") and source.startswith("docs/")):
            return link
        if path in PAGES:
            target = PAGES[path]
        elif path.startswith("docs/") and path.endswith(".md"):
            target = path.removeprefix("docs/")
        elif path.endswith(PICTURES):
            target = _add_picture(path, config, files)
            if (narrow := _for_phones(_root(config) / path)).exists():
                _add_picture(
                    narrow.relative_to(_root(config)).as_posix(), config, files
                )
        else:
            return _in_repository(path, config)
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(
    html: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """Marks pictures that a phone shows as a whole, those of one panel.

    A picture of several panels may have a second one for phones, `NAME_narrow.png`.
    """

    def marked(match: re.Match[str]) -> str:
        image, source = match[0], match[1]
        uri = posixpath.normpath(posixpath.join(page.file.dest_uri, "..", source))
        file = files.src_uris.get(uri)
        if file is None or not file.abs_src_path or not uri.endswith(".png"):
            return image
        if _for_phones(Path(file.abs_src_path)).exists():
            narrow = _for_phones(Path(source)).as_posix()
            return (
                f'<picture><source media="{PHONE}" srcset="{narrow}">{image}</picture>'
            )
        # Width and height are the first two numbers of a PNG.
        with open(file.abs_src_path, "rb") as picture:
            width, _ = struct.unpack(">II", picture.read(24)[16:])
        return (
            image.replace("<img ", '<img class="narrow" ') if width < NARROW else image
        )

    return re.sub(r'<img [^>]*src="([^"]*)"[^>]*>', marked, html)


def _as_markdown(notebook: dict[str, Any]) -> str:
    """The cells of a notebook with the outputs that it was saved with."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(BADGE.sub(r"\1", source))
            continue
        parts.append(f"```python\n{source}\n```")
        text = "".join("".join(out.get("text", "")) for out in cell["outputs"])
        if text:
            parts.append(f"```text\n{text.rstrip()}\n```")
        pictures = (out.get("data", {}).get("image/png") for out in cell["outputs"])
        parts += [
            f"![figure](data:image/png;base64,{p.strip()})" for p in pictures if p
        ]
    return "\n\n".join(parts)


def _in_repository(path: str, config: MkDocsConfig) -> str:
    file = _root(config) / path
    if not file.exists():
        raise FileNotFoundError(f"A page links to {path}, which does not exist.")
    return f"{config.repo_url}/{'tree' if file.is_dir() else 'blob'}/main/{path}"


def _add_picture(path: str, config: MkDocsConfig, files: Files) -> str:
    uri = f"pictures/{path}"
    if files.get_file_from_path(uri) is None:
        files.append(
            File.generated(config, uri, abs_src_path=str(_root(config) / path))
        )
    return uri


def _for_phones(picture: Path) -> Path:
    return picture.with_stem(f"{picture.stem}_narrow")


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent.parent
