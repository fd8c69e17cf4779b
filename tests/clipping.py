"""What the tests of models of other libraries share.

The largest logits are read where the library itself forms them, at the input of its
softmax, so that nothing here says how a model scales, rotates or groups its heads.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonclip_jax as mc


def largest_of_heads(logits):
    """`(heads,)` from `(batch, heads..., queries, keys)`."""
    return logits.max((0, -2, -1)).reshape(-1)


# One list for all, since a program compiled once goes on writing to its own.
_CALLS = []


@contextlib.contextmanager
def watched(module=jax.nn, name="softmax", largest=largest_of_heads):
    """The list of what `largest` makes of the arguments of each call of a function.

    It grows in the order of the layers, inside `jit`, `scan` and `remat` too.
    """
    function, taken = getattr(module, name), largest.__code__.co_argcount

    def watching(*args, **kwargs):
        found = largest(*args[:taken])
        if isinstance(found, jax.core.Tracer):
            jax.debug.callback(lambda x: _CALLS.append(np.asarray(x)), found)
        else:
            _CALLS.append(np.asarray(found))
        return function(*args, **kwargs)

    _CALLS.clear()
    setattr(module, name, watching)
    try:
        yield _CALLS
    finally:
        setattr(module, name, function)


def reader(run, modules, stacked=0, **where):
    """The function from params to `{module: largest logits}`, of each layer in turn.

    `run(params)` is the forward pass. The only module of scanned layers has rows of
    so many `stacked` layers.
    """

    def logits(params):
        with watched(**where) as calls:
            jax.block_until_ready(run(params))
            jax.effects_barrier()
            rows = list(calls)
        assert len(rows) == (stacked or len(modules)), len(rows)
        return dict(zip(modules, [np.stack(rows)] if stacked else rows, strict=True))

    return logits


def randomize(params, seed=0, scale=1.0):
    """Normal entries, so that no bias is zero; gains of norms stay near one."""
    leaves, treedef = jax.tree.flatten(params)
    generator = np.random.default_rng(seed)

    def draw(x):
        width = scale * x.shape[-2] ** -0.5 if x.ndim > 1 else 0.3
        start = 1.0 if x.ndim == 1 else 0.0
        return jnp.asarray(start + width * generator.normal(size=x.shape), x.dtype)

    return treedef.unflatten([draw(x) for x in leaves])


def path_of(keys):
    """A path with slashes, without the array that a variable or named array holds."""
    if isinstance(keys[-1], jax.tree_util.FlattenedIndexKey):
        keys = keys[:-1]
    names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    return "/".join(names[:-1] if names[-1] in ("value", "array") else names)


def paths_of(params):
    return [path_of(keys) for keys, _ in jax.tree.leaves_with_path(params)]


def statistics(values):
    """The pytree that an update takes, of `{module: values}`."""
    stats = {}
    for module, row in values.items():
        inner = stats
        for name in module.split("/"):
            inner = inner.setdefault(name, {})
        inner["max_logits"] = jnp.asarray(row, jnp.float32)
    return stats


def check_statistics(stats, expected):
    """A pytree of statistics has just these, `{module: values}`."""
    expected = statistics(expected)
    assert jax.tree.structure(stats) == jax.tree.structure(expected)
    for pair in zip(jax.tree.leaves(stats), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-5)


def clip_at_rest(params, **layers):
    """An update of `mc.muonclip` at learning rate 0, compiled for all thresholds."""
    zeros = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def step(params, stats, tau):
        tx = mc.muonclip(0.0, threshold=tau, **layers)
        updates, _ = tx.update(zeros, tx.init(params), params, attention_stats=stats)
        return optax.apply_updates(params, updates)

    return step


def check_clip(params, logits, may_change, *, shared=False, **layers):
    """QK-Clip gives `min(S, tau)` in every layer, whichever is the one that it clips.

    `may_change` has a regular expression for the end of each path whose leaf may
    change, and the index of the entries that may; all other leaves stay bit for bit.
    Where heads are `shared`, the layer is clipped by the largest of them. `layers` are
    given as to `mc.muonclip`, by `attention=` or `model=`.
    """
    before, step = logits(params), clip_at_rest(params, **layers)
    # A layer alone, since the next sees what a clip makes of this one's output.
    layers = [
        (module, i)
        for module, rows in before.items()
        for i in (range(len(rows)) if rows.ndim > 1 else [...])
    ]
    for module, i in layers:
        seen = before[module][i]
        tau = float(np.median(seen))
        assert 0 < tau < seen.max(), f"draw other numbers: {seen}"
        values = {name: np.zeros_like(rows) for name, rows in before.items()}
        values[module][i] = seen
        after = step(params, statistics(values), tau)
        expected = seen * tau / seen.max() if shared else np.minimum(seen, tau)
        np.testing.assert_allclose(logits(after)[module][i], expected, rtol=1e-4)
        check_rest(params, after, may_change)


def check_rest(before, after, may_change):
    met = set()
    pairs = zip(
        paths_of(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True
    )
    for path, old, new in pairs:
        rest = np.ones(old.shape, bool)
        for pattern, index in may_change.items():
            if re.search(f"{pattern}$", path):
                rest[index] = False
                met.add(pattern)
        assert (np.asarray(old) == np.asarray(new))[rest].all(), path
    assert met == set(may_change)
