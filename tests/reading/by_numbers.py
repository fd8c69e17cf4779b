"""A judge of readings that knows no symbols: it scales, runs and compares.

A case is a function whose author marks where its logits enter the softmax, and says
what an expert would call each leaf. All else is found by running it.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

import muonclip_jax as mc


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A function, its arguments, and what is true of it.

    `labels`: `"q k v 0|12; o 01|2; bias vector"`, patterns of paths and then a label;
    `0|12` is a matrix with inputs in axis 0 and outputs in axes 1 and 2. `~` is
    between labels that are both right, `any` is every label.
    `attention`: what has to become of it,
        `read`: every head by itself; `jointly`: all heads by the largest, at least;
        `said`: refused, or right; `none`: there is none, and none may be suspected;
        `again`: read; a layer is called twice, so the clip need not be exact;
        `named`: it has no softmax, so it is listed as not clipped, which is no error;
        `maybe`: there is something like it, refused or denied in the printed reading.
    `scaled`: patterns of leaves besides q* and k* that the clip may change.
    `plain`: a function with the same logits, where they cannot be seen in `fun`.
    `taste`: experts differ, so it only must not crash.
    """

    name: str
    fun: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    labels: str
    attention: str
    scaled: str = ""
    plain: Callable[..., Any] | None = None
    taste: bool = False


class Noted(NamedTuple):
    layer: str
    merge: str
    heads: tuple[int, ...]
    logits: Any


class Verdict(NamedTuple):
    """`right`, `jointly`, `said`; or a fault: `wrong`, `late`, `suspected`, `crash`."""

    kind: str
    why: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("wrong", "late", "suspected", "crash", "unread")


# The open notebooks: a function that is run has no other way to reach its judge.
_OPEN: list[list[Noted]] = []


@contextlib.contextmanager
def _notebook() -> Iterator[list[Noted]]:
    """Opens a notebook for what runs inside."""
    _OPEN.append([])
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()


def noted(logits, heads: Any = -3, layer: str = "", merge: str = "rows", unit=1.0):
    """Marks logits that enter a softmax; adds no operation to the function.

    `heads`: the axis of heads, or several; `()` if there is one head. Axes of
    `jax.vmap` are in front, so count from the end. Calls of one `layer` are `rows` of
    a stack of layers, `heads` of one layer, or parts of which the `largest` counts.
    `unit` makes natural exponents of them.
    """
    if _OPEN:
        seen = logits
        while hasattr(seen, "batch_dim"):  # a tracer of vmap
            seen = jnp.moveaxis(seen.val, seen.batch_dim, 0)
        axes = (heads,) if isinstance(heads, int) else tuple(heads)
        _OPEN[-1].append(Noted(layer, merge, axes, seen * unit))
    return logits


@functools.lru_cache(maxsize=1)
def _program(case: Case) -> tuple[list[Noted], Callable[..., Any]] | None:
    """What is noted, and one program that computes its logits, its loops unrolled.

    It is compiled once a case, and faster than its many ops one by one. None where the
    length of a loop or a branch depends on numbers.
    """
    noted: list[Noted] = []

    def logits(params, args):
        with _notebook() as written:
            (case.plain or case.fun)(params, *args)
        noted[:] = written
        return [note.logits for note in noted]

    try:
        with jax.disable_jit():
            jaxpr = jax.make_jaxpr(logits)(case.params, case.args)
    except (jax.errors.JAXTypeError, jax.errors.UnexpectedTracerError):
        return None
    program = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))
    return noted, lambda params: program(*jax.tree.leaves((params, case.args)))


def notes(case: Case, params: Any) -> list[Noted]:
    """What a run notes, loops and all."""
    if program := _program(case):
        noted, logits = program
        values = zip(noted, logits(params), strict=True)
        return [note._replace(logits=x) for note, x in values]
    with _notebook() as written, jax.disable_jit():
        (case.plain or case.fun)(params, *case.args)
    return written


def largest(case: Case, params: Any) -> list[np.ndarray]:
    """The largest logits of every layer in turn, `(heads,)` each."""
    rows: list[tuple[str, np.ndarray]] = []
    for note in notes(case, params):
        x = np.asarray(note.logits, np.float64)
        x = np.moveaxis(x, note.heads, range(len(note.heads)))
        row = x.reshape(*x.shape[: len(note.heads)], -1).max(-1).reshape(-1)
        at = [i for i, (layer, _) in enumerate(rows) if layer == note.layer]
        if note.merge == "rows" or not at:
            rows.append((note.layer, row))
        elif note.merge == "heads":
            rows[at[0]] = note.layer, np.concatenate([rows[at[0]][1], row])
        else:
            rows[at[0]] = note.layer, np.maximum(rows[at[0]][1], row)
    return [row for _, row in rows]


def by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in leaves}


def expected_labels(case: Case) -> dict[str, list[str]]:
    """The labels that are right, by path; a case has to name every leaf."""
    rules = [
        (pattern, words.split()[-1].split("~"))
        for words in case.labels.split(";")
        for pattern in words.split()[:-1]
    ]
    found = {}
    for path in by_path(case.params):
        fits = [right for pattern, right in rules if fnmatch.fnmatch(path, pattern)]
        assert fits, f"{case.name} does not say what {path} is"
        found[path] = fits[0]
    return found


def label_faults(case: Case, reading: Any) -> list[str]:
    """Leaves whose labels or axes are not those of an expert."""
    labels = by_path(mc.param_labels(case.params, model=reading))
    axes = by_path(
        reading.dimension_numbers, is_leaf=lambda x: x is None or bool(_axes(x))
    )
    shapes, faults = by_path(case.params), []
    for path, right in expected_labels(case).items():
        if path in reading.unknown or right == ["any"]:
            continue
        label, found = labels[path], axes[path]
        if label == "matrix":
            n = np.ndim(shapes[path])
            sides = _axes(found)
            label = "|".join(
                "".join(str(a) for a in sorted(x % n for x in side)) for side in sides
            )
        if label not in right:
            faults.append(f"{path} is {label}, not {' or '.join(right)}")
    return faults


def shapes(**leaves: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in leaves.items()}


def _axes(x: Any) -> Any:
    """Inputs and outputs of an entry of `dimension_numbers`, or nothing."""
    if not hasattr(x, "reduction_axis"):
        return None
    return [np.atleast_1d(side).tolist() for side in (x.reduction_axis, x.output_axis)]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _differ(a: Any, b: Any, share: float) -> bool:
    """Whether leaves differ by more than this share of their largest entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(
        np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0)
        > share * (np.abs(np.asarray(y, np.float64)).max(initial=0) + 1e-6)
        for x, y in pairs
    )


def run(fun: Callable[..., Any], case: Case) -> tuple[Any, Any, Any]:
    """The outputs and statistics of `fun`, and gradients that every output moves.

    One program: op by op, the compiler is asked for every derivative of every op.
    """

    def total(params, *args):
        outs, stats = fun(params, *args)
        moved = [x for x in jax.tree.leaves(outs) if _is_float(x)]
        return sum(jnp.sum(jnp.sin(x + 0.3)) for x in moved), (outs, stats)

    derivative = jax.jit(jax.grad(total, allow_int=True, has_aux=True))
    grads, (outs, stats) = derivative(case.params, *case.args)
    return outs, stats, grads


def verdict_of(case: Case) -> Verdict:
    """What the package says of a case, against its numbers."""
    try:
        return _judged(case)
    except Exception as error:  # of the package, on a function that runs
        return Verdict("crash", f"{type(error).__name__}: {str(error)[:300]}")


def _judged(case: Case) -> Verdict:
    rows = largest(case, case.params)
    assert bool(rows) == (case.attention in ("read", "jointly", "said", "again")), (
        case.name
    )
    assert all(row.max() > 0.05 for row in rows), f"{case.name}: logits are too small"
    expected_labels(case)
    reading = mc.read_model(case.fun, case.params, *case.args)
    str(reading)  # may not fail, whatever was read
    if case.taste:
        return Verdict("right", "a matter of taste")
    faults = label_faults(case, reading)
    labels = by_path(mc.param_labels(case.params, model=reading))
    seen = rows or "frozen" in labels.values()
    outs, _, grads = run(lambda *a: (case.fun(*a), {}), case) if seen else ({}, {}, {})
    for path, g in by_path(grads).items():
        # A gradient that is not zero: the leaf is not frozen, whoever says so.
        if labels[path] == "frozen" and _is_float(g) and np.any(np.asarray(g) != 0):
            faults.append(f"{path} is frozen, but has a gradient")
    if faults:
        return Verdict("wrong", "; ".join(faults))
    said = [f"unknown: {', '.join(reading.unknown)}"] if reading.unknown else []
    try:
        jax.eval_shape(mc.muon(0.1, model=reading).init, case.params)
    except ValueError as error:
        if not said:
            return Verdict("late", f"muon.init: {error}")
    if not rows:
        return _without_attention(case, reading, said)
    return _with_attention(case, reading, rows, outs, grads, said)


def _without_attention(case: Case, reading: Any, said: list[str]) -> Verdict:
    if reading.attention:
        return Verdict("wrong", f"attention found, and none there: {reading.attention}")
    if case.attention == "named" and not reading.not_clipped:
        return Verdict("wrong", "attention without a softmax is not listed")
    if reading.refused and case.attention in ("none", "named"):
        return Verdict("suspected", "; ".join(reading.refused))
    said += reading.refused
    if not reading.refused and case.attention == "maybe":
        lines = [x for x in str(reading).lower().splitlines() if "attention" in x]
        if not any(re.search(r"\bno\b|\bnone\b|\bnot\b", x) for x in lines):
            return Verdict("wrong", "no line says that no attention was found")
    mc.record_attention(case.fun)(case.params, *case.args)
    return Verdict("said" if said else "right", "; ".join(said))


def _with_attention(
    case: Case,
    reading: Any,
    rows: list[np.ndarray],
    outs: Any,
    grads: Any,
    said: list[str],
) -> Verdict:
    refused = list(reading.refused)
    if not reading.attention and not refused:
        return Verdict("wrong", "attention is neither found nor refused")
    if not reading.attention:
        kind = "said" if case.attention == "said" else "unread"
        return Verdict(kind, "; ".join(refused))
    if not refused:
        try:
            jax.eval_shape(mc.muonclip(0.1, model=reading).init, case.params)
        except ValueError as error:
            return Verdict("late", f"muonclip.init: {error}")
    try:
        recorded, stats, slopes = run(mc.record_attention(case.fun), case)
    except ValueError as error:
        return Verdict("said" if refused else "late", f"record_attention: {error}")
    if _differ(recorded, outs, 1e-5):
        return Verdict("wrong", "the recorded function has another value")
    if _differ(slopes, grads, 1e-4):
        return Verdict("wrong", "the recorded function has other gradients")
    # What nothing scales has a statistic, too.
    own = {layer.path for layer in reading.attention}
    stats = jax.tree.map_with_path(
        lambda at, x: x if _module(at) in own else None, stats
    )
    shapes = {path: np.shape(leaf) for path, leaf in by_path(stats).items()}
    for layer in reading.layers:
        statistic = "/".join((*layer.path, "max_logits"))
        if layer.shape not in (None, shapes.get(statistic, layer.shape)):
            return Verdict("wrong", f"{layer.shape} is read of {shapes}")
    found, is_joint, missed = _matched(stats, rows)
    if missed and not refused:
        return Verdict("wrong", f"statistics {_short(stats)} for {_short(rows)}")
    for i in found:
        if fault := _clip_fault(case, reading, stats, rows, i, found[i], is_joint):
            return Verdict(*fault)
    if not refused and (fault := _shown_fault(case, reading, stats)):
        return Verdict("wrong", fault)
    kind = "jointly" if is_joint else "right"
    if refused or said:
        kind = "said"
    if (kind == "jointly" and case.attention == "read") or (
        refused and case.attention != "said"
    ):
        kind = "unread"
    return Verdict(kind, "; ".join([*refused, *said]))


def _shown_fault(case: Case, reading: Any, stats: Any) -> str:
    """Both tables have to show which leaves change if all heads are clipped."""
    clipped = mc.clip_qk(
        case.params, jax.tree.map(jnp.ones_like, stats), 0.5, model=reading
    )
    before, after = by_path(case.params), by_path(clipped)
    changed = {k for k in before if np.any(np.asarray(before[k]) != after[k])}
    described = mc.describe(case.params, model=reading, collapse=False)
    table = str(reading.table(collapse=False))
    for shown in (_with_roles(described), _with_scales(table)):
        if shown != changed:
            return f"a table shows {shown}, but the clip changes {changed}"
    return ""


def _with_roles(table: str) -> set[str]:
    """The leaves that `describe` shows with heads that do not stay."""
    return {
        path
        for path, *_, roles in _cells(table, "path")
        if any("heads" in x and "stays" not in x for x in roles.split(" + "))
    }


def _with_scales(table: str) -> set[str]:
    """The leaves that a reading lists with their layer as what QK-Clip scales."""
    found = set()
    for module, *_, scaled in _cells(table, "attention"):
        inside = "" if module == "(the root)" else f"{module}/"
        for leaves in scaled.split("; "):
            if "stays" not in leaves:
                names = re.sub("^(query|key|by the whole) ", "", leaves).split(", ")
                # From the root, or from the layer's module.
                found |= {x[1:] if x[0] == "/" else inside + x for x in names}
    return found


def _cells(table: str, first: str) -> list[list[str]]:
    """The rows of the block whose heading starts with this word."""
    (block,) = [x for x in table.split("\n\n") if x.startswith(first)]
    return [re.split("  +", line) for line in block.splitlines()[1:]]


def _module(at: Any) -> str:
    return jax.tree_util.keystr(at[:-1], simple=True, separator="/")


def _short(tree: Any) -> str:
    return str(jax.tree.map(lambda x: np.asarray(x).round(3).tolist(), tree))


def _matched(stats: Any, rows: list[np.ndarray]) -> tuple[Any, set[int], bool]:
    """Which entries of the statistics are of which row, by their values.

    Logits of random numbers are distinguished by them. A row of which only the largest
    is there is clipped jointly.
    """
    left = [
        (path, i, float(v))
        for path, leaf in by_path(stats).items()
        for i, v in enumerate(np.ravel(np.asarray(leaf, np.float64)))
    ]
    found, is_joint, missed = {}, set(), False
    for n, row in enumerate(rows):
        bound = 2e-5 * max(1.0, np.abs(row).max())
        # Heads may be cut finer, down to where logits can be scaled apart.
        if not (own := _finer(left, row, bound)):
            for value in row:
                close = [x for x in left if abs(x[2] - value) <= bound and x not in own]
                own += close[:1]
        if len(own) < len(row):
            own = [x for x in left if abs(x[2] - row.max()) <= bound][:1]
            is_joint.add(n)
        if not own:
            missed = True
            continue
        found[n] = {(path, i) for path, i, _ in own}
        left = [x for x in left if x not in own]
    return found, is_joint & found.keys(), missed or bool(left)


def _finer(left: list[Any], row: np.ndarray, bound: float) -> list[Any]:
    """The entries of one statistic whose maxima, evenly grouped, are a row."""
    for path in dict.fromkeys(path for path, *_ in left):
        own = [x for x in left if x[0] == path]
        if len(own) % len(row) == 0:
            values = np.reshape([x[2] for x in own], (len(row), -1)).max(1)
            if np.all(np.abs(values - row) <= bound):
                return own
    return []


def _clip_fault(case, reading, stats, rows, n, own, is_joint) -> tuple[str, str] | None:
    """Clips one layer alone, once some of its heads and once all, by much.

    What is not quite linear is near it where logits hardly move.
    """
    positive = rows[n][rows[n] > 0]
    middle = 0.6 if len(positive) < 2 else (positive.min() / positive.max() + 1) / 2
    every = 0.1 * positive.min() / positive.max()
    faults = (
        _clipped_at(
            float(share * rows[n].max()), case, reading, stats, rows, n, own, is_joint
        )
        for share in (middle, every)
    )
    return next(filter(None, faults), None)


def _clipped_at(tau, case, reading, stats, rows, n, own, is_joint):
    row = rows[n]
    alone = {
        path: np.reshape(
            [v if (path, i) in own else 0 for i, v in enumerate(np.ravel(leaf))],
            np.shape(leaf),
        )
        for path, leaf in by_path(stats).items()
    }
    leaves = [jnp.asarray(x, jnp.float32) for x in alone.values()]
    stats = jax.tree.unflatten(jax.tree.structure(stats), leaves)
    which: Any = {"attention": reading.attention} if reading.refused else {}
    try:
        clipped = mc.clip_qk(case.params, stats, tau, alpha=0.3, model=reading, **which)
    except ValueError as error:
        return "late", f"clip_qk: {error}"
    after = largest(case, clipped)[n]
    right = np.minimum(row, tau)
    bound = 1e-4 * max(tau, np.abs(row).max())
    is_right = np.abs(after - right).max() <= bound
    if case.attention == "again":  # it is less, and nothing else moves
        is_right = np.abs(after - row)[row <= tau].max(initial=0) <= bound
        is_right &= np.all(after[row > tau] < row[row > tau])
    elif np.all(after <= tau + bound) and np.abs(after.max() - tau) <= bound:
        # Heads under the threshold moved too: all are scaled by one number.
        is_joint.update(() if is_right else {n})
        is_right = True
    if not is_right:
        text = f"{_short(row)} clipped at {tau:.3f} is {_short(after)}"
        return "wrong", f"layer {n}: {text}"
    return _touch_fault(case, clipped, n)


def _touch_fault(case: Case, clipped: Any, n: int) -> tuple[str, str] | None:
    """Only query and key may change, and of them only what some logit depends on."""
    before, after = by_path(case.params), by_path(clipped)
    changed = [k for k in before if np.any(np.asarray(before[k]) != after[k])]
    for path in changed:
        may = any(part[0] in "qk" for part in path.split("/"))
        if not may and not any(fnmatch.fnmatch(path, x) for x in case.scaled.split()):
            return "wrong", f"the clip changes {path}"

    slopes = _slopes(case)
    for path in changed:
        moved = np.asarray(before[path]) != np.asarray(after[path])
        if np.any(moved & (np.asarray(slopes[path]) == 0)):
            return "wrong", f"the clip changes entries of {path} without logits"
    return None


@functools.lru_cache(maxsize=1)
def _slopes(case: Case) -> dict[str, Any]:
    """Derivatives of a weighted sum of all logits: zero where no logit depends."""

    def all_logits(params):
        values = [note.logits for note in notes(case, params)]
        generator = np.random.default_rng(0)
        return sum(
            jnp.sum(jnp.where(jnp.isfinite(x), x, 0) * generator.normal(size=x.shape))
            for x in values
        )

    return by_path(jax.grad(all_logits, allow_int=True)(case.params))
