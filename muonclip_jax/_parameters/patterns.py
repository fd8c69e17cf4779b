"""Rules by path: a mapping from shell-style patterns to dimension numbers."""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from optax.contrib import MuonDimensionNumbers

from .paths import Path, PathedTree, show


#: What a rule says of a leaf that is to be found automatically after all.
AUTOMATIC = "auto"


def is_patterns(entries: Any, tree: PathedTree) -> bool:
    """Whether it is such a mapping, and no tree or prefix of one with params' keys."""
    if not isinstance(entries, Mapping) or not entries:
        return False
    if not all(isinstance(key, str) for key in entries):
        return False
    params = tree.whole()
    keys = (
        set(params) if isinstance(params, Mapping) else {p[0] for p in tree.paths if p}
    )
    others = [key for key in entries if key not in keys]
    is_written_so = any(re.search(r"[*?\[/]", key) for key in others)
    return is_written_so or len(others) == len(entries)


def by_pattern(patterns: Mapping[str, Any], paths: Iterable[Path]) -> dict[Path, Any]:
    """The entry of each path that a pattern matches, of the longest if several do.

    A pattern matches a path or the beginning of one, a module; `*` stands for slashes
    too.

    **Raises:** `ValueError` for entries of another kind, and for patterns that match
    nothing.
    """
    _check_entries(patterns)
    found: dict[Path, Any] = {}
    used: set[str] = set()
    for path in paths:
        names = ["/".join(path[:n]) for n in range(len(path), 0, -1)]
        hits = [p for p in patterns if any(_matches(x, p) for x in names)]
        used.update(hits)
        if hits:
            found[path] = patterns[max(hits, key=len)]
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        raise ValueError(
            "dimension_numbers: no parameter matches "
            f"{', '.join(map(repr, unused))}. Patterns are of whole paths, such as "
            f"{_example(found, paths)}; '*' stands for any letters, slashes too"
        )
    return found


def _matches(name: str, pattern: str) -> bool:
    """As in a shell; a name as it is written matches itself, brackets and all."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def write_patterns(
    guesses: Mapping[Path, MuonDimensionNumbers], paths: Iterable[Path]
) -> str:
    """Python code of a mapping that gives these leaves, and no other, their numbers."""
    groups: dict[str, set[Any]] = {}
    for path, guess in guesses.items():
        groups.setdefault(_pattern(path), set()).add(_numbers(guess))
    others = ["/".join(path) for path in paths if path not in guesses]
    mixed = {
        pattern
        for pattern, found in groups.items()
        if len(found) > 1 or fnmatch.filter(others, pattern)
    }
    entries = {
        _escape("/".join(path)) if _pattern(path) in mixed else _pattern(path): guess
        for path, guess in guesses.items()
    }
    lines = [f'    "{key}": {_numbers(guess)},' for key, guess in entries.items()]
    return "\n".join(["{", *lines, "}"])


def _check_entries(patterns: Mapping[str, Any]) -> None:
    for pattern, entry in patterns.items():
        known = entry is None or isinstance(entry, MuonDimensionNumbers)
        if not known and not (isinstance(entry, str) and entry == AUTOMATIC):
            raise ValueError(
                f"dimension_numbers of '{pattern}' is {entry!r}; expected is "
                "optax.contrib.MuonDimensionNumbers, None for AdamW, or 'auto'"
            )


def _example(found: Mapping[Path, Any], paths: Iterable[Path]) -> str:
    return repr(show(next(iter(found), next(iter(paths), ()))))


def _pattern(path: Path) -> str:
    """The path with a star for the number of a module."""
    *modules, leaf = map(_escape, path)
    return "/".join([*(re.sub(r"\d+$", "*", name) for name in modules), leaf])


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _numbers(guess: MuonDimensionNumbers) -> str:
    return f"MuonDimensionNumbers({guess.reduction_axis}, {guess.output_axis})"
