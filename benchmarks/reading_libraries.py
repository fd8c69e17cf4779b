"""Reads models of real libraries, and checks readings and statistics.

    python benchmarks/reading_libraries.py huggingface --keep
    python benchmarks/reading_libraries.py
    python benchmarks/reading_libraries.py huggingface --names

A group is a module of `benchmarks/reading`, run where its libraries are installed; with
`--keep` its rows stay in `benchmarks/reading/results`, and without a group the rows of
all groups are printed as one table.

Of every leaf, what is read is compared with an expert's verdict (`reading/models.py`).
Of every attention layer, the heads over a threshold have to come to it after a clip of
this layer alone, and the others stay. The recorded function's value and gradients are
compared with those of the function alone, both under `jax.jit`. With `--names` it
counts what names alone say of the same leaves, where the tree is none of
`tests/data/trees`: of models that the rules of names had no part in.
"""

import argparse
import collections
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any


# Compiling is most of the time here, and nothing is timed but tracing.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from environment import environment
from reading.kept import cells, page, RESULTS, table_of
from reading.models import Built, Model, normal
from trees_of_others import is_right

import muonclip_jax as mc


def read(model: Model) -> dict[str, Any]:
    """A row of the table, with lines on all that is not as an expert expects it."""
    built = model.build()
    start = time.perf_counter()
    reading = mc.read_model(built.fun, built.params, *built.args)
    seconds = time.perf_counter() - start
    counts, lines = collections.Counter(), []
    leaves, treedef = jax.tree.flatten(built.params)
    numbers = treedef.flatten_up_to(reading.dimension_numbers)
    table = reading.table(collapse=False)  # a line for each leaf, in their order
    for line, leaf, answer in zip(
        table.splitlines()[1:], leaves, numbers, strict=False
    ):
        path = line.split()[0]
        assert str(leaf.shape) in line, f"{line} is not of {leaf.shape}"
        want, outcome = judged(model, path, leaf, answer)
        if path in reading.unknown:
            outcome = "unknown"
        counts[outcome] += 1
        if outcome != "right":
            lines.append(f"{outcome}: {line}, expected {want}")
    lines += [f"refused: {text}" for text in reading.refused]
    row = {
        "model": model.name,
        "leaves": len(leaves),
        **{name: counts[name] for name in ("right", "wrong", "unknown")},
        "layers": len(reading.attention),
        "expected": model.attention,
        "refused": len(reading.refused),
        "expected_refused": model.refused,
        "seconds": seconds,
        "lines": lines,
    }
    if reading.attention:
        try:
            row |= compared(model, built, reading)
        except ValueError as error:  # what a user would meet, too
            lines.append(f"failed: {first_line(error)}")
    return row


def judged(model: Model, path: str, leaf: Any, answer: Any) -> tuple[Any, str]:
    """The first verdict of the expert, and whether the answer is right or wrong."""
    want, *others = model.verdicts_of(path, leaf.shape)
    verdict = {"shape": leaf.shape, "want": want, "alternatives": others}
    return want, "right" if is_right(verdict, answer) else "wrong"


def compared(model: Model, built: Built, reading: mc.ModelReading) -> dict[str, Any]:
    """How far values, gradients and clipped heads are off, relative to the largest."""
    params = normal(built.params)
    plain = jax.jit(jax.value_and_grad(built.fun))
    recorded = jax.value_and_grad(mc.record_attention(built.fun), has_aux=True)
    step = jax.jit(recorded)
    value, grads = plain(params, *built.args)
    (recorded_value, stats), recorded_grads = step(params, *built.args)
    pairs = zip(jax.tree.leaves(recorded_grads), jax.tree.leaves(grads), strict=True)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    errors = [float(jnp.abs(new - old).max()) / scale for new, old in pairs]
    seen_by_softmax = softmax_maxima(built.fun, params, built.args)
    off = []
    for layer in reading.attention:
        names = [*layer.path.split("/"), "max_logits"] if layer.path else ["max_logits"]
        rows = np.asarray(functools.reduce(lambda node, k: node[k], names, stats))
        # Later layers see what a clip makes of earlier ones: each is clipped alone.
        for at in np.ndindex(rows.shape[:-1]):
            seen = rows[at]
            if seen.max() <= 0:  # no threshold is under it
                continue
            largest = float(seen.max())
            tau = min(float(np.median(seen[seen > 0])), 0.9 * largest)
            alone = np.zeros_like(rows)
            alone[at] = seen
            only: Any = jnp.asarray(alone)
            for name in reversed(names):
                only = {name: only}
            clipped = mc.clip_qk(params, only, tau, attention=[layer])
            (_, again), _ = step(clipped, *built.args)
            after = np.asarray(functools.reduce(lambda n, k: n[k], names, again))[at]
            expected = np.minimum(seen, tau)
            if model.shares_gains:
                expected = seen * tau / largest
            off.append(float(np.max(np.abs(after - expected) / np.abs(expected))))
    return {
        "value": abs(float(recorded_value - value)) / max(abs(float(value)), 1e-30),
        "gradients": max(errors),
        "softmax": None if model.is_capped else found_among(seen_by_softmax, stats),
        "clip": max(off) if off and model.is_exact else None,
    }


def softmax_maxima(fun: Any, params: Any, args: Sequence[Any]) -> list[float]:
    """Of what each call of `jax.nn.softmax` gets in a run of the function alone.

    JAX's own attention calls it, too, by the name that its module has.
    """
    found: list[float] = []
    kept = jax.nn.softmax
    of_attention = inspect.unwrap(jax.nn.dot_product_attention).__globals__

    def note(largest: Any) -> Any:
        found.append(float(largest.max()))
        return np.zeros_like(largest)

    def watching(x: Any, *args: Any, **kwargs: Any) -> Any:
        # No effect such as `jax.debug.callback` has: Flax 0.12.12 takes any effect in
        # a scan for something that what its trips share depends on.
        largest = jax.lax.stop_gradient(x.max())
        zero = jax.pure_callback(note, largest, largest, vmap_method="expand_dims")
        return kept(x + zero, *args, **kwargs)

    jax.clear_caches()  # what is traced already would pass by
    try:
        jax.nn.softmax = of_attention["softmax"] = watching
        jax.block_until_ready(jax.jit(fun)(params, *args))
    finally:
        jax.nn.softmax = of_attention["softmax"] = kept
        jax.clear_caches()
    return found


def found_among(maxima: Sequence[float], stats: Any) -> float | None:
    """How far a layer's largest logit is from what some softmax got, at most.

    Nothing where the library has a softmax of its own.
    """
    if not maxima:
        return None
    rows = [np.asarray(x) for x in jax.tree.leaves(stats)]
    layers = np.concatenate([x.max(-1).ravel() for x in rows])
    off = np.abs(layers[:, None] - np.asarray(maxima)) / np.abs(layers)[:, None]
    return float(off.min(-1).max())


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def by_names(model: Model) -> collections.Counter[str]:
    """What names and shapes say of each leaf: right, asked about or wrong."""
    built = model.build()
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), built.params
    )
    leaves = jax.tree.leaves(params)
    table = mc.read_model(built.fun, params, *built.args).table(collapse=False)
    paths = [line.split()[0] for line in table.splitlines()[1 : len(leaves) + 1]]
    asked: set[str] = set()
    try:
        found = mc.flax_dimension_numbers(params)
    except ValueError as error:
        lines = str(error).splitlines()
        asked = {
            path
            for path, leaf in zip(paths, leaves, strict=True)
            if any(line.startswith(f"  {path} {leaf.shape}") for line in lines)
        }
        rules = {"*" + path: None for path in asked}
        found = mc.flax_dimension_numbers(params, dimension_numbers=rules)
    numbers = jax.tree.structure(params).flatten_up_to(found)
    counts = collections.Counter(leaves=len(leaves), asked=len(asked))
    for path, leaf, answer in zip(paths, leaves, numbers, strict=True):
        if path not in asked:
            want, outcome = judged(model, path, leaf, answer)
            counts[outcome] += 1
            if outcome == "wrong":
                print(f"    {model.name}: {path} {leaf.shape}, expected {want}")
    return counts


def print_names(group: str) -> None:
    module, totals = importlib.import_module(f"reading.{group}"), collections.Counter()
    for model in module.MODELS:
        if model.tree is None:
            try:
                totals.update(models=1, **by_names(model))
            except Exception as error:
                print(f"    {model.name}: {first_line(error)}")
    print(f"{group}: {dict(totals)}", flush=True)


def versions(names: Sequence[str]) -> str:
    """Of a checkout, the commit is part of its name."""
    return ", ".join(
        name if " " in name else f"{name} {importlib.metadata.version(name)}"
        for name in names
    )


def run(group: str, only: Sequence[str], keep: bool) -> None:
    module = importlib.import_module(f"reading.{group}")
    rows, failed = [], []
    for model in module.MODELS:
        if only and model.name not in only:
            continue
        try:
            rows.append(read(model))
        except Exception as error:
            line = f"failed: {first_line(error)}"
            rows.append({"model": model.name, "lines": [line]})
            failed.append(traceback.format_exc())
        print(table_of(rows[-1:]).line(cells(rows[-1])), flush=True)
        for line in rows[-1]["lines"]:
            print(f"    {line}", flush=True)
        if keep:  # at once, since a group takes minutes
            store(group, module, rows)
    print(*failed, sep="\n")


def store(group: str, module: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows in place of those of the same models."""
    file = RESULTS / f"{group}.json"
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    by_name = {row["model"]: row for row in (*kept, *rows)}
    content = {
        "libraries": versions(module.LIBRARIES),
        "environment": environment(),
        "rows": [by_name[m.name] for m in module.MODELS if m.name in by_name],
    }
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("group", nargs="?", help="a module of benchmarks/reading")
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    parser.add_argument("--keep", action="store_true", help="keep the rows")
    parser.add_argument("--names", action="store_true", help="count what names say")
    args = parser.parse_args()
    if args.group and args.names:
        print_names(args.group)
    elif args.group:
        run(args.group, args.only, args.keep)
    else:
        print(page())


if __name__ == "__main__":
    main()
