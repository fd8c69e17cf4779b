"""One version: the package's, the changelog's and the citation's."""

import re
import tomllib

from helpers import ROOT

import muonclip_jax as mc


def test_a_version_is_said_alike_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heading = r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest, date = re.findall(heading, changelog, re.MULTILINE)[0]
    assert project["version"] == newest
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {newest}\ndate-released: {date}\n" in citation
    # What is installed, as after `pip install -e .` of another version.
    assert mc.__version__ == newest


def test_actions_are_pinned_to_commits():
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", file.read_text()):
            local = action.startswith("./")
            assert local or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
