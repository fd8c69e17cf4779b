"""What a change does to every reading of the tests: a snapshot, then the differences.

At the root of the repository, before a change and after it:

    python tests/reading/snapshot.py before.json
    python tests/reading/snapshot.py before.json --compare [part of a name]
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import linecache
import multiprocessing
import os
import pathlib
import re
import sys
from typing import Any


TESTS = pathlib.Path("tests").resolve()
sys.path[:0] = map(str, (TESTS, TESTS / "reading", TESTS / "reading" / "models"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)


@functools.cache
def cases() -> dict[str, Any]:
    """Functions with their params and further arguments, by name."""
    import jax
    import test_architectures
    import test_read_attention
    from adversaries import CASES
    from library_models import MODELS

    x, found = test_read_attention.X, {}
    for kind, models in (("adversary", CASES), ("library", MODELS)):
        for name, case in models.items():
            found[f"{kind} {name}"] = case.fun, case.params, *case.args
    for name, made in test_architectures.ARCHITECTURES.items():
        params, inputs = test_architectures.arrays(name)
        found[f"architecture {name}"] = made.loss, params, *inputs, None
    for name, fun in test_read_attention.WAYS.items():
        found[f"way {name}"] = fun, test_read_attention.PARAMS, x
    return {k: tuple(jax.tree.map(_as_array, v)) for k, v in found.items()}


def _as_array(x: Any) -> Any:
    import numpy as np

    return np.asarray(x) if hasattr(x, "shape") else x


def snapshot(name: str) -> dict[str, str]:
    """All that is said of a case, each thing under a name of its own."""
    import jax
    import numpy as np

    import muonclip_jax as mc

    fun, params, *args = cases()[name]
    try:
        reading = mc.read_model(fun, params, *args)
    except Exception as error:
        return {"error of read_model": _with_code(f"{type(error).__name__}: {error}")}
    said = {}
    for path, v in reading.verdicts.items():
        axes = (v.numbers.reduction_axis, v.numbers.output_axis) if v.numbers else ""
        words = [v.label, str(axes), v.why, "" if v.is_known else "unknown", v.line]
        said["/".join(map(str, path))] = _with_code(" ".join(filter(None, words)))
    for layer in reading.attention:
        for role in ("query", "key", "rotary_query"):
            for leaf in getattr(layer, role):
                head_ids = f"{leaf.head_ids.shape} {leaf.head_ids.tolist()}".encode()
                said[f"layer '{layer.path}', {role} {leaf.path}"] = (
                    f"stack {leaf.stack}, {leaf.heads} heads, of all {leaf.is_of_all}, "
                    f"owners {hashlib.sha256(head_ids).hexdigest()[:8]}"
                )
    said["refused"] = _with_code("; ".join(reading.refused))
    tables = str(reading.table(collapse=False)).split("\n\n")
    for table in tables[1:]:  # what is below the leaves
        first = table.partition(" ")[0].strip()
        said[f"table of {first}"] = _with_code(re.sub("  +", "  ", table))
    try:
        _, stats = mc.record_attention(fun)(params, *args)
        for path, x in jax.tree.leaves_with_path(stats):
            at = jax.tree_util.keystr(path, simple=True, separator="/")
            row = [f"{v:.4g}" for v in np.ravel(np.asarray(x, np.float64))]
            said[f"recorded {at}"] = f"{np.shape(x)} {' '.join(row)}"
    except Exception as error:
        said["error of record_attention"] = _with_code(f"{error}")
    return {k: v for k, v in said.items() if v}


def _with_code(text: str) -> str:
    """The code of a line in place of its number, which edits above it change."""

    def code(match: re.Match[str]) -> str:
        folders = "reading/models", "reading", "."
        files = [TESTS / folder / match[1] for folder in folders]
        found = [linecache.getline(str(x), int(match[2])).strip() for x in files]
        return f"`{next(filter(None, found), match[0])}`"

    return re.sub(r"(\w+\.py):(\d+)", code, text)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = []
    for name in [*before, *(x for x in after if x not in before)]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(f"{name}: {'gone' if new is None else 'new'}")
            continue
        for key in [*old, *(x for x in new if x not in old)]:
            if old.get(key) != new.get(key):
                lines += [f"{name}: {key}"]
                lines += [f"  - {old[key]}"] if key in old else []
                lines += [f"  + {new[key]}"] if key in new else []
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--compare", nargs="?", const="", metavar="PART")
    options = parser.parse_args()
    names = [x for x in cases() if (options.compare or "") in x]
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, spawned) as pool:
        after = dict(zip(names, pool.map(snapshot, names, chunksize=4), strict=True))
    if options.compare is None:
        pathlib.Path(options.file).write_text(json.dumps(after, indent=1) + "\n")
        print(f"{len(after)} readings")
        return 0
    before = json.loads(pathlib.Path(options.file).read_text())
    before = {k: v for k, v in before.items() if options.compare in k}
    print(*(lines := differences(before, after)), sep="\n")
    print(f"{len(after)} readings, {len(lines)} lines of differences")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
