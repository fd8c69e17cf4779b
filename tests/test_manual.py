"""The code blocks of README and manual, page by page: Python runs, commands exist.

A `text` block right after a `python` block is what that prints, `...` for any text. A
`python` block with a title needs what no test has; it is compiled, and its names exist.
"""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import re
import shlex
import typing
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import few, ROOT, run_script

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"""(?:\]\(|src="|srcset=")([^)"\s#:]+)(?:#[^)]*)?[)"]""")
KINDS = {"python", "text", "sh", "diff", "toml", "yaml", "bibtex"}


class Block(NamedTuple):
    kind: str
    title: str
    code: str
    line: int
    text_before: str  # since the block before


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text(), [], 0
    for match in FENCE.finditer(text):
        indent, kind, title, code = match.groups()
        code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(kind, title.strip(), code, line, text[end : match.start()]))
        end = match.end()
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
# Their code trains models or compiles for many devices, for ten seconds and more.
LONG = {
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("adoption", "devices", "fine_tuning", "from_optax", "kernels", "labels"),
        *("layouts", "libraries", "logging", "pmap", "qk_clip", "quick_start_linen"),
        *("quick_start_nnx", "reinforcement", "speed", "speedruns", "troubleshooting"),
        *("tuning_variants", "vision"),
    )
}


# A newcomer runs this first, so it is run every day, whatever it takes.
README = ROOT / "README.md"
OTHERS = [page for page in PAGES if page != README]


@pytest.mark.parametrize(
    "page",
    [pytest.param(README, marks=pytest.mark.always), *few(OTHERS, *set(OTHERS) - LONG)],
    ids=name_of,
)
def test_python_runs_and_prints_what_the_page_says(page):
    namespace = {"__name__": "__main__"}
    printed = None
    for block in blocks(page):
        if (
            block.kind == "text"
            and printed is not None
            and not block.text_before.strip()
        ):
            assert matches(block.code, printed), f"{page}:{block.line}\n{printed}"
        runs = block.kind == "python" and not block.title
        printed = run(block, page, namespace) if runs else None


def run(block: Block, page: Path, namespace: dict) -> str:
    padded = "\n" * block.line + block.code  # so that a traceback names the line
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(padded, page, "exec"), namespace)
    return out.getvalue()


def matches(wanted: str, printed: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted, printed, flags)


@each_page
def test_names_exist(page):
    for block in blocks(page):
        assert block.kind in KINDS, f"{page}:{block.line}"
        if block.kind == "python":
            for name in names_of_the_package(ast.parse(block.code)):
                assert hasattr(mc, name), f"{page}:{block.line} mc.{name}"


def names_of_the_package(tree: ast.AST) -> list[str]:
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "mc"
    ]


@each_page
def test_scripts_and_their_options_exist(page):
    commands = [b for b in blocks(page) if b.kind == "sh"]
    inline = re.findall(r"`(python [^`]+)`", page.read_text())
    lines = [line for b in commands for line in b.code.replace("\\\n", " ").split("\n")]
    for words in (shlex.split(line, comments=True) for line in lines + inline):
        for script in (word for word in words if word.endswith(".py")):
            path = ROOT / script
            assert path.exists(), f"{page}: {script}"
            source = "".join(p.read_text() for p in path.parent.glob("*.py"))
            for option in (w.split("=")[0] for w in words if w.startswith("--")):
                assert f'"{option}"' in source, f"{page}: {script} {option}"


@each_page
def test_links_within_the_repository(page):
    text = FENCE.sub("", page.read_text())
    for link in LINK.findall(text):
        assert (page.parent / link).exists(), f"{page}: {link}"


def test_every_public_name_is_in_the_manual():
    pages = "".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: muonclip_jax\.(\w+)$", pages, re.MULTILINE))
    assert documented == set(mc.__all__) - {"MuonDimensionNumbers"}  # optax's


REFERENCE = re.compile(r"(?<![\w\])])\[([^][]+)\]\[([\w.]*)\](?!\[)")
ANCHOR = re.compile(r"\{ #([\w.]+) \}")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def references(text: str) -> set[str]:
    """The targets of `[mc.muon][muon]` and [`muon`][], as the site reads them."""
    return {
        name or title.strip("`")
        for title, name in REFERENCE.findall(FENCE.sub("", text))
    }


def test_references_lead_to_the_api():
    """For the site, without its tools: `mkdocs build` runs in `.ci/run` alone."""
    pages = {page: page.read_text() for page in PAGES}
    api = [text for page, text in pages.items() if page.parent.name == "api"]
    anchors = {name for text in api for name in ANCHOR.findall(text)}
    anchors |= {name for text in api for name in re.findall(r"^::: (\S+)$", text, re.M)}
    pairs = re.findall(r"\{ #(\w+) \}\n\n::: muonclip_jax\.(\w+)", "".join(api))
    assert pairs and all(anchor == name for anchor, name in pairs)
    texts = pages | {
        path: "\n".join(
            ast.get_docstring(node) or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))
        )
        for path in (ROOT / "muonclip_jax").rglob("*.py")
    }
    found = {path: references(text) for path, text in texts.items()}
    assert len(set().union(*found.values())) > 25
    lost = {path: names - anchors for path, names in found.items()}
    assert {path: names for path, names in lost.items() if names} == {}
    # A heading has an anchor too, and the site would send the reference to the first.
    for page, text in pages.items():
        ours = anchors if page.parent.name != "api" else set()
        names = {slug(title) for title in HEADING.findall(FENCE.sub("", text))}
        names |= set(ANCHOR.findall(text))
        assert names & ours == set(), f"{page}: call this heading something else"


def slug(title: str) -> str:
    """As GitHub and the site make anchors of headings."""
    return re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-")


HEADINGS = ("**Arguments:**", "**Returns:**", "**Raises:**", "!!! example")
PUBLIC = [name for name, _ in inspect.getmembers(mc, inspect.isfunction)]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_says_what_it_takes_gives_and_raises(name):
    text = inspect.getdoc(getattr(mc, name))
    assert [heading for heading in HEADINGS if heading not in text] == []


def test_both_commands_stand_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert "pip install -e '.[examples]' && python examples/train_lm.py\n" in readme
    assert "pip install -e '.[test]' && pytest\n" in readme
    assert len(readme.splitlines()) <= 140


def test_types_in_signatures_are_what_the_page_says():
    text = (ROOT / "docs" / "api" / "index.md").read_text()
    rows = re.findall(r"#(\S+)\.(\w+) \}`(\w+)` \| `?(.*?)(?:`|$)", text, re.MULTILINE)
    assert len(rows) > 10
    for module, name, shown, meaning in rows:
        alias = getattr(importlib.import_module(module), name)
        assert shown == name
        if typing.get_origin(alias) is typing.Literal:
            values = ", ".join(f'"{value}"' for value in typing.get_args(alias))
            assert meaning == f"Literal[{values}]"


def strings_of(folder: str) -> str:
    """All strings of the code in a folder, with `...` for what is formatted in."""
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                found += ["...".join(x if isinstance(x, str) else "" for x in parts)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def test_error_messages_of_the_page_exist():
    """Each piece of a message is in the package, or in a test that raises it."""
    page = (ROOT / "docs" / "errors.md").read_text()
    ours = page.split("## Arguments of `update`")[1]
    rows = re.findall(r"^\| (`.*?`) \|", ours, re.MULTILINE)
    assert len(rows) > 40
    known = strings_of("muonclip_jax") + strings_of("tests")
    pieces = [x for row in rows for x in re.findall(r"`([^`]+)`", row)]
    words = [word.strip() for piece in pieces for word in piece.split("...")]
    assert [word for word in words if word not in known] == []


DIAGRAMS = ROOT / "docs" / "diagrams"


@pytest.mark.more
def test_drawn_again_they_are_the_same(tmp_path):
    run_script(DIAGRAMS / "draw.py", "--out", tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in DIAGRAMS.glob("*.svg")}


def test_every_diagram_is_in_the_manual():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for path in DIAGRAMS.glob("*.svg"):
        assert f"(diagrams/{path.name})" in pages
