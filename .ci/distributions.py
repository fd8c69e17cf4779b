"""Checks the files of a wheel and a source distribution, and the links of their README.

python .ci/distributions.py dist
"""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import readme_renderer.markdown


ROOT = Path(__file__).parent.parent
PACKAGE = "muonclip_jax"


def main(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    check_wheel(distribution)
    check_sdist(sdist)
    check_links(distribution)
    check_code_blocks(distribution)
    check_urls(distribution)


def check_wheel(distribution: Distribution) -> None:
    paths = {str(file) for file in distribution.files or []}
    metadata = {path for path in paths if path.split("/")[0].endswith(".dist-info")}
    assert_same(paths - metadata, {f for f in tracked() if f.startswith(PACKAGE + "/")})
    assert f"{PACKAGE}/py.typed" in paths
    assert any(path.endswith("/licenses/LICENSE") for path in metadata), metadata


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        paths = {name.split("/", 1)[1] for name in archive.getnames()}
    assert_same(paths, tracked() | {"PKG-INFO"})


def tracked() -> set[str]:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    return set(listed.split("\0")) - {""}


def assert_same(paths: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - paths), sorted(paths - expected)
    assert paths == expected, f"missing: {missing}; not tracked by git: {unexpected}"


def check_links(distribution: Distribution) -> None:
    html = readme_renderer.markdown.render(description(distribution))
    assert html is not None
    links = re.findall(r'(?:href|src)="([^#"][^"]*)"', html)
    relative = [link for link in links if not link.startswith("https://")]
    assert not relative, relative
    files = list(files_of(links, distribution))
    missing = [file for file in files if not file.exists()]
    assert files and not missing, missing


def files_of(links: list[str], distribution: Distribution) -> Iterator[Path]:
    """The files of this repository that links go to, by the site or at the tag."""
    site, repository = urls(distribution)
    at_tag = rf"{repository}/(?:raw|blob)/v{re.escape(distribution.version)}/"
    for link in links:
        path = link.split("#")[0]
        if path.startswith(site):
            page = path.removeprefix(site).rstrip("/") or "index"
            yield ROOT / "docs" / f"{page}.md"
        elif path.startswith(repository):
            yield ROOT / re.sub(at_tag, "", path)


def check_code_blocks(distribution: Distribution) -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```.*?^```$", readme, re.DOTALL | re.MULTILINE)
    changed = [block for block in blocks if block not in description(distribution)]
    assert blocks and not changed, changed


def description(distribution: Distribution) -> str:
    return distribution.metadata["Description"]


def check_urls(distribution: Distribution) -> None:
    for file in ("CITATION.cff", "docs/mkdocs.yml"):
        text = (ROOT / file).read_text()
        assert all(url in text for url in urls(distribution)), file


def urls(distribution: Distribution) -> tuple[str, str]:
    pairs = distribution.metadata.get_all("Project-URL") or []
    by_name = dict(pair.split(", ") for pair in pairs)
    return by_name["Documentation"], by_name["Repository"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
