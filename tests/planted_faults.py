"""Plants faults in the package, one at a time, and asks which of them the tests find.

At the root of the repository, with Python 3.12 or newer:

    python tests/planted_faults.py record lines.pickle    # which test runs which line
    python tests/planted_faults.py plant lines.pickle --faults 60 --seed 0

The faults are of the kinds that were found here. A seed chooses places for them in the
source. Each is planted in a copy of the package. The tests that run its line are run on
the copy, short ones first, until one fails: those of `pytest`, then the others.
"""

import argparse
import ast
import collections
import contextlib
import json
import os
import pathlib
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest


ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "muonclip_jax"
AXES = {"-1": "-2", "-2": "-1", "0": "1", "1": "0", "True": "False", "False": "True"}
OTHER = {
    **{ast.Add: ("sign", "-"), ast.Sub: ("sign", "+")},
    **{ast.Mult: ("share", "/"), ast.Div: ("share", "*")},
    **{ast.Lt: ("off by one", "<="), ast.LtE: ("off by one", "<")},
    **{ast.Gt: ("off by one", ">="), ast.GtE: ("off by one", ">")},
}
COLLECTIVES = {"all_gather", "all_to_all", "pmax", "pmean", "pmin", "psum"}
SAID = ast.Raise | ast.JoinedStr
LIMIT = 300  # seconds, and ten times what the tests took: what takes longer hangs
FIRST = 50  # of the shortest tests, which find most faults


class Test(NamedTuple):
    lines: set[tuple[str, int]]  # a file below the package, and a number
    seconds: float
    is_daily: bool


Tests = dict[str, Test]


class Fault(NamedTuple):
    kind: str
    file: str  # below the package
    line: int
    before: str
    after: str
    source: str  # of the whole file, with the fault


def changes(node: ast.expr, parent: ast.AST) -> Iterator[tuple[str, str]]:
    """What may stand in the place of an expression, by the kind of the fault."""
    text = ast.unparse(node)
    match node:
        case ast.BinOp(a, op, b) if type(op) in OTHER:
            if not isinstance(a, ast.JoinedStr | ast.Tuple | ast.List):
                kind, sign = OTHER[type(op)]
                yield kind, f"({ast.unparse(a)}) {sign} ({ast.unparse(b)})"
                if isinstance(op, ast.Div):  # a state converted the other way
                    yield "share", f"({ast.unparse(b)}) / ({ast.unparse(a)})"
        case ast.BinOp(a, ast.Pow()):
            yield "share", ast.unparse(a)
        case ast.UnaryOp(ast.USub(), ast.Name() | ast.Call() as a):
            yield "sign", ast.unparse(a)
        case ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(_, a), ast.FloorDiv(), b)):
            yield "limit", f"({ast.unparse(a)}) // ({ast.unparse(b)})"
        case ast.UnaryOp(ast.USub(), ast.Attribute(_, "inf")):
            yield "hidden", "0.0"
        case ast.Compare(a, [op], [b]) if type(op) in OTHER:
            kind, sign = OTHER[type(op)]
            yield kind, f"{ast.unparse(a)} {sign} {ast.unparse(b)}"
        case ast.Constant(int()) if isinstance(parent, ast.Slice):
            yield "off by one", f"{text} + 1"
        case ast.Attribute(a, "mT" | "T"):
            yield "axis", ast.unparse(a)
        case ast.Attribute(a, "float32"):
            yield "dtype", f"{ast.unparse(a)}.bfloat16"
        case ast.Attribute(a, "bfloat16" | "float16"):
            yield "dtype", f"{ast.unparse(a)}.float32"
        case ast.Call(ast.Attribute(_, "where"), [_, a, _]):
            yield "hidden", ast.unparse(a)
        case ast.Call(ast.Attribute(ast.Name("jnp") as a, "max"), [x, *_]):
            yield "merged", f"0 * {text} + {ast.unparse(a)}.max({ast.unparse(x)})"
        case ast.Call(ast.Attribute(a, "max"), [*axis], words) if axis or words:
            yield "merged", f"0 * {text} + {ast.unparse(a)}.max()"
        case ast.Call(ast.Name("min" | "max"), [_, _] as limits, []):
            for a in limits:
                if not isinstance(a, ast.Starred):
                    yield "limit", ast.unparse(a)
        case ast.Call(ast.Attribute(a, "astype"), [_]):
            yield "dtype", ast.unparse(a)
        case ast.Call(ast.Attribute(_, name), [a, *_]) if name in COLLECTIVES:
            yield "collective", ast.unparse(a)
        case ast.Call(ast.Attribute(_, "_replace") as a, [], [_, *rest]):
            yield "stale state", ast.unparse(ast.Call(a, [], rest))
        case ast.Call(ast.Name(name) as a, args, [*words, _]) if "State" in name:
            for i, word in enumerate(words):
                if word.arg is None:
                    continue
                old = ast.keyword(word.arg, ast.Name(f"state.{word.arg}"))
                changed = [*words[:i], old, *node.keywords[i + 1 :]]
                yield "stale state", ast.unparse(ast.Call(a, args, changed))
    named = parent.arg if isinstance(parent, ast.keyword) else ""
    if named in ("axis", "axes", "keepdims") and text in AXES:
        yield "axis", AXES[text]
    if isinstance(parent, ast.comprehension | ast.For) and node is parent.iter:
        yield "lost head", f"list({text})[:-1]"


def expressions(parent: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """With the node around each, but for annotations and what errors say."""
    for name, value in ast.iter_fields(parent):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.expr):
                yield parent, node
            if isinstance(node, ast.AST) and not isinstance(node, SAID):
                yield from expressions(node)


def faults_of(path: pathlib.Path) -> Iterator[Fault]:
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    for parent, node in expressions(ast.parse(text)):
        assert node.end_lineno and node.end_col_offset
        start = len(b"".join(lines[: node.lineno - 1])) + node.col_offset
        end = len(b"".join(lines[: node.end_lineno - 1])) + node.end_col_offset
        for kind, changed in changes(node, parent):
            new = f"({changed})"
            source = text[:start] + new.encode() + text[end:]
            place = path.relative_to(PACKAGE).as_posix(), node.lineno
            yield Fault(kind, *place, text[start:end].decode(), new, source.decode())


def chosen(count: int, seed: int) -> list[Fault]:
    """As many of each kind, at places that `seed` draws."""
    kinds = collections.defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for fault in faults_of(path):
            kinds[fault.kind].append(fault)
    draw, found = random.Random(seed), []
    for _, of_kind in sorted(kinds.items()):
        draw.shuffle(of_kind)
    while len(found) < count and any(kinds.values()):
        for _, of_kind in sorted(kinds.items()):
            found += [of_kind.pop()] if of_kind and len(found) < count else []
    return found


class Recorder:
    """As a plugin: the lines of the package that each test runs, and its seconds."""

    def __init__(self, file: str):
        self.file = pathlib.Path(f"{file}.{os.getpid()}")
        self.tests: Tests = {}
        self.failed: set[str] = set()
        self.lines: set[tuple[str, int]] = set()
        sys.monitoring.use_tool_id(3, "planted faults")
        event = sys.monitoring.events.LINE
        sys.monitoring.register_callback(3, event, self.line)
        sys.monitoring.set_events(3, event)

    def line(self, code: Any, number: int) -> Any:
        if code.co_filename.startswith(f"{PACKAGE}/"):
            file = pathlib.Path(code.co_filename).relative_to(PACKAGE)
            self.lines.add((file.as_posix(), number))
        return sys.monitoring.DISABLE  # until the next test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.lines, began = set(), time.process_time()
        sys.monitoring.restart_events()
        result = yield
        marks = {mark.name for mark in item.iter_markers()}
        seconds = time.process_time() - began
        self.tests[item.nodeid] = Test(self.lines, seconds, "more" not in marks)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        kept = {k: tuple(x) for k, x in self.tests.items() if k not in self.failed}
        self.file.write_bytes(pickle.dumps(kept))


def pytest_configure(config: pytest.Config) -> None:
    if file := os.environ.get("LINES_OF_TESTS"):
        config.pluginmanager.register(Recorder(file))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if file := os.environ.get("TESTS_IN_ORDER"):
        order = {
            name: i for i, name in enumerate(json.loads(pathlib.Path(file).read_text()))
        }
        kept = [item for item in items if item.nodeid in order]
        items[:] = sorted(kept, key=lambda item: order[item.nodeid])


def run_tests(
    *arguments: str, limit: float | None = None, **variables: str
) -> str | None:
    """The first that fails, where the package is that of `PYTHONPATH`, not this one."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "planted_faults"]
    path = [variables.get("PYTHONPATH", str(ROOT)), str(ROOT / "tests")]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            [*command, *arguments],
            env=os.environ | variables,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = run.wait(limit)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:  # with the processes that tests start
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
        output.seek(0)
        lines = [line.strip() for line in output]
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    return [*failed, f"ends with {code}"][0] if code else None


def record(file: str) -> None:
    run_tests("-m", "not slow", LINES_OF_TESTS=str(pathlib.Path(file).resolve()))
    parts = list(pathlib.Path(file).parent.glob(f"{pathlib.Path(file).name}.*"))
    tests = {}
    for part in parts:
        tests |= pickle.loads(part.read_bytes())
        part.unlink()
    pathlib.Path(file).write_bytes(pickle.dumps(tests))
    print(f"{len(tests)} tests")


def file_of(name: str) -> str:
    return name.partition("::")[0]


def verdict(fault: Fault, tests: Tests, scratch: pathlib.Path) -> str:
    """Which run finds it: the everyday tests, short ones first, then the others."""
    at = [n for n, test in tests.items() if (fault.file, fault.line) in test.lines]
    if not at:  # run at import
        at = [
            n for n, x in tests.items() if fault.file in {file for file, _ in x.lines}
        ]
    at = [name for name in at if name.startswith("tests/")]  # not of docstrings here
    at.sort(key=lambda name: tests[name].seconds)
    daily = [name for name in at if tests[name].is_daily]
    # Short ones are of many files. Of the rest, those of a file share its fixtures.
    rest = sorted(daily[FIRST:], key=file_of)
    others = sorted((name for name in at if not tests[name].is_daily), key=file_of)
    file, order = scratch / "muonclip_jax" / fault.file, scratch / "order.json"
    right = file.read_bytes()
    file.write_text(fault.source)
    try:
        for names in filter(None, (daily[:FIRST], rest, others)):
            order.write_text(json.dumps(names))
            where = {"PYTHONPATH": str(scratch), "TESTS_IN_ORDER": str(order)}
            files = ["-x", "-n", "0", "-m", "", *sorted(set(map(file_of, names)))]
            limit = LIMIT + 10 * sum(tests[name].seconds for name in names)
            if found := run_tests(*files, limit=limit, **where):
                return f"{'more' if names is others else 'daily'} {found}"
    finally:
        file.write_bytes(right)
    return f"survives {len(at)} tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("do", choices=["record", "plant"])
    parser.add_argument("lines", help="file of the lines that each test runs")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number to begin with")
    options = parser.parse_args()
    if options.do == "record":
        return record(options.lines)
    stored = pickle.loads(pathlib.Path(options.lines).read_bytes())
    tests = {name: Test(*test) for name, test in stored.items()}
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        # Few programs change with a fault.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(scratch / "programs"))
        shutil.copytree(PACKAGE, scratch / "muonclip_jax")
        faults = list(enumerate(chosen(options.faults, options.seed)))
        for i, fault in faults[options.first :]:
            said = verdict(fault, tests, scratch)
            kinds[fault.kind].append(said.partition(" ")[0])
            old, new = (" ".join(x.split()) for x in (fault.before, fault.after))
            place = f"{fault.kind}, {fault.file}:{fault.line}"
            print(f"{i}: {place}: {old} -> {new}: {said}", flush=True)
    print("\n| kind | planted | found by `pytest` | by `.ci/run` alone | by none |")
    print("|---|---|---|---|---|")
    for kind, said in sorted(kinds.items()):
        found = [said.count(word) for word in ("daily", "more", "survives")]
        print("|", " | ".join(map(str, [kind, len(said), *found])), "|")


if __name__ == "__main__":
    main()
