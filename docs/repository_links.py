"""Links of a page to files outside `docs/`, which read well in a clone, for the site.

A picture joins the site; any other file becomes a link to the repository.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
PICTURES = (".png", ".gif", ".svg")


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        link = match[1]
        path = posixpath.normpath(posixpath.join("docs", folder, link))
        if ":" in link or path.startswith("docs/"):
            return link
        if not path.endswith(PICTURES):
            return _in_repository(path, config)
        _add_picture(path, config, files)
        return posixpath.relpath(f"pictures/{path}", folder or ".")

    return LINK.sub(moved, markdown)


def _in_repository(path: str, config: MkDocsConfig) -> str:
    file = _root(config) / path
    if not file.exists():
        raise FileNotFoundError(f"A page links to {path}, which does not exist.")
    return f"{config.repo_url}/{'tree' if file.is_dir() else 'blob'}/main/{path}"


def _add_picture(path: str, config: MkDocsConfig, files: Files) -> None:
    uri = f"pictures/{path}"
    if files.get_file_from_path(uri) is None:
        files.append(
            File.generated(config, uri, abs_src_path=str(_root(config) / path))
        )


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent.parent
