"""A run in numbers, to log."""

from __future__ import annotations  # help() shows aliases by name

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ._calls import explained
from ._layout.layout import read_layout
from ._model.attention_layers import Attention
from ._model.knowledge import knowledge_of
from ._model.model_reading import ModelReading
from ._model.statistics import read_attention_stats
from ._muon.momentum import ScaleByMuonState
from ._options import check_flag
from ._parameters import paths
from ._parameters.dimension_numbers import DimensionNumbers
from ._parameters.fit import check_params
from ._qk_clip.heads import Heads, UNKNOWN
from ._qk_clip.multi_steps import MultiStepsState
from ._qk_clip.qk_clip import QKClipState, states_in


@explained
def scalars(
    opt_state: Any,
    params: Any,
    *,
    updates: optax.Updates | None = None,
    model: ModelReading | None = None,
    attention: Attention | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    heads: bool = False,
) -> dict[str, Any]:
    r"""Numbers of the last step by name, for wandb, TensorBoard or a CSV file.

    | name | number |
    |---|---|
    | `max_logit` | the largest finite logit of all heads |
    | `max_logit/<layer>` | that of an attention layer, over all of its stack |
    | `num_clipped` | heads that [`qk_clip`][] scaled |
    | `num_nonfinite` | heads that it left alone, with an infinite or NaN logit |
    | `clipped_fraction` | the share of heads that were clipped in this step |
    | `ever_clipped_fraction` | the share of heads that were ever clipped |
    | `hyperparams/<name>` | of `optax.inject_hyperparams`, such as the learning rate |
    | `hyperparams/<where>/<name>` | the same, if several states have the name |
    | `param_norm/<label>` | $\lVert W \rVert_F$ of all leaves of a label |
    | `update_norm/<label>` | that of the `updates`, if they are given |

    Labels are those of [`param_labels`][]: `matrix`, `embedding`, `head`, ... `<where>`
    is the path to the state: labels of `optax.partition` and positions in
    `optax.chain`. With `heads=True` there are also, for each head of each layer,

    | name | number |
    |---|---|
    | `max_logit/<layer>/head_<i>` | its largest logit |
    | `gamma/<layer>/head_<i>` | the factor of its logits; 1 if it was left alone |
    | `steps_since_clip/<layer>/head_<i>` | -1 if it was never clipped |

    with `<layer>/<number>` in place of `<layer>` for the layers of a stack. Heads that
    share a leaf, such as the gain of a norm, count as one.

    Numbers that are not known or not finite, such as logits before the first step, are
    left out, so that the dict can be written as JSON. Inside `jit` nothing is left out,
    since there are no values yet; the largest logit is `-inf` before the first step.

    **Arguments:**

    - `opt_state`: of any optimizer, however deeply wrapped; numbers for which it has no
        state are left out.
    - `params`: those of the optimizer, or a module of NNX or Equinox.
    - `updates`: those of the last step.
    - `model`: as given to the optimizer.
    - `attention`: as given to the optimizer.
    - `dimension_numbers`: as given to the optimizer.
    - `heads`: whether to add the numbers of each head.

    **Returns:** a flat dict of Python numbers, or of arrays under `jit`.

    **Warns:** if `qk_clip` is before Muon in a chain, where it clips nothing, or inside
    a plain `optax.MultiSteps`, see [`multi_steps`][].

    **Raises:** `ValueError` as [`param_labels`][] does, for several `qk_clip` in the
    optimizer, and for a state that was made for other params.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> tx = mc.muonclip(1e-3)
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> _, state = tx.update(
        ...     params, tx.init(params), params, attention_stats=stats
        ... )
        >>> numbers = mc.scalars(state, params, heads=True)
        >>> numbers["num_clipped"], numbers["max_logit/attn"]
        (1, 400.0)
        >>> numbers["gamma/attn/head_1"], numbers["param_norm/matrix"]
        (0.25, 11.3137...)
    """
    call = "scalars(opt_state, params)"
    check_params(call, params)
    knowledge = knowledge_of(model, attention, dimension_numbers)
    params, numbers = paths.params_of(params), {}
    if (clip := _clip_state(opt_state)) is not None:
        layout = read_layout(params)
        all_heads = Heads(layout, knowledge, only_watches=True)
        is_whole = all_heads.count == clip.gamma.size
        if not is_whole and model is not None and attention is None:
            # An optimizer that was given the layers to clip does not watch others.
            all_heads = Heads(layout, knowledge._replace(attention=model.attention))
        numbers |= _of_heads(clip, all_heads, check_flag("heads", heads))
    elif hasattr(opt_state, "init") or read_attention_stats(opt_state):
        got = "the optimizer" if hasattr(opt_state, "init") else "attention statistics"
        raise ValueError(f"scalars needs a state, got {got}: call {call}")
    numbers |= _hyperparams(opt_state)
    tree = paths.flatten(params)
    labels = tree.unflatten(knowledge.labels(tree))
    for kind, leaves in (("param_norm", params), ("update_norm", updates)):
        if leaves is None:
            continue
        try:
            arrays = tree.of(paths.params_of(leaves))
        except (TypeError, ValueError) as error:
            raise ValueError(f"updates are not like the params: {error}") from None
        sums: dict[str, Any] = {}
        for label, leaf in zip(tree.of(labels), arrays, strict=True):
            if not paths.is_masked(leaf) and not paths.is_masked(label):
                wide = jnp.abs(jnp.asarray(leaf)).astype(jnp.float32)
                sums[label] = sums.get(label, 0.0) + jnp.sum(jnp.square(wide))
        numbers |= {f"{kind}/{label}": jnp.sqrt(sums[label]) for label in sorted(sums)}
    # Python's own, which loggers and JSON take; an array would stay on its device.
    logged: dict[str, Any] = {}
    for name, x in numbers.items():
        if not isinstance(x, Tracer):
            x = np.asarray(x).item()
            if np.isfinite(x) and x != UNKNOWN:
                logged[name] = x
        else:
            is_logit = name.startswith("max_logit")
            logged[name] = jnp.where(x == UNKNOWN, -jnp.inf, x) if is_logit else x
    return logged


def _of_heads(state: QKClipState, heads: Heads, each: bool) -> dict[str, Any]:
    """Scalars of what QK-Clip saw and did: in all, by layer, and of each head."""
    if heads.count != state.gamma.size:
        raise ValueError(
            f"the optimizer state holds {state.gamma.size} heads, the params "
            f"{heads.count}; pass the same params, model= and attention= as to init"
        )
    count = max(1, heads.count)
    numbers: dict[str, Any] = {
        "max_logit": state.max_logit,
        "num_clipped": state.num_clipped,
        "num_nonfinite": state.num_nonfinite,
        "clipped_fraction": state.num_clipped / count,
        "ever_clipped_fraction": jnp.sum(state.last_clip >= 0) / count,
    }
    # `step` counts updates, so that the last one had the number before it.
    since = jnp.where(state.last_clip < 0, -1, state.step - 1 - state.last_clip)
    rows = {"max_logit": state.max_logits, "gamma": state.gamma}
    for kind, row in (rows | {"steps_since_clip": since}).items():
        for layer, x in heads.by_layer(row).items():
            name = f"{kind}/{paths.show_module(layer.path)}"
            if kind == "max_logit":
                # As of all: a head that overflowed is counted, and hides no other.
                finite = jnp.isfinite(x)
                numbers[name] = jnp.max(x, initial=UNKNOWN, where=finite)
            # At once, or every number would be fetched from the device by itself.
            x = x if isinstance(x, Tracer) else np.asarray(x)
            for *stack, head in np.ndindex(x.shape) if each else ():
                name_of_head = "/".join([name, *map(str, stack), f"head_{head}"])
                numbers[name_of_head] = x[(*stack, head)]
    return numbers


def _clip_state(opt_state: Any) -> QKClipState | None:
    states = states_in(opt_state, QKClipState)
    if not states:
        return None
    if len(states) > 1:
        raise ValueError(
            f"the optimizer has {len(states)} qk_clip states, expected one: each "
            "scales what another has scaled. mc.muonclip has a qk_clip of its own"
        )
    if _is_before_muon(opt_state):
        warnings.warn(
            "qk_clip is before Muon in the chain, which replaces what it changed: "
            "nothing is clipped, though num_clipped counts heads. Put it last",
            stacklevel=3,
        )
    # The outermost of either kind: an optax state inside of ours, which has combined
    # the statistics, is not found.
    steps = states_in(opt_state, (MultiStepsState, optax.MultiStepsState))
    plain = [x for x in steps if isinstance(x, optax.MultiStepsState)]
    if states_in(plain, QKClipState):
        warnings.warn(
            "qk_clip inside optax.MultiSteps sees the statistics of the last "
            "micro-batch alone and clips too little, unless you combine them yourself, "
            "jax.tree.map(jnp.maximum, a, b). mc.multi_steps does it for you",
            stacklevel=3,
        )
    # An `nnx.Optimizer` holds variables in place of arrays.
    return QKClipState(*map(jnp.asarray, states[0]))


def _is_before_muon(opt_state: Any) -> bool:
    """Whether a chain has a clip in front of Muon."""
    kinds = (QKClipState, ScaleByMuonState)
    states = jax.tree.leaves_with_path(opt_state, lambda x: isinstance(x, kinds))
    of_clips, of_muon = (
        [path for path, x in states if isinstance(x, kind)] for kind in kinds
    )
    for one, two in itertools.product(of_clips, of_muon):
        pairs = zip(one, two, strict=False)
        first: Any = next(pair for pair in pairs if pair[0] != pair[1])
        is_chain = all(isinstance(x, jax.tree_util.SequenceKey) for x in first)
        if is_chain and first[0].idx < first[1].idx:
            return True
    return False


def _hyperparams(opt_state: Any) -> dict[str, Any]:
    """The numbers of every `optax.inject_hyperparams`, each under a name of its own."""
    states = [
        (at[:-1], numbers)
        for at, numbers in optax.tree_utils.tree_get_all_with_path(
            opt_state, "hyperparams", lambda at, _: "Inject" in str(at[-1])
        )
    ]
    # Keys and places alone, as a reader knows them from the optimizer, unless two
    # states differ in a field of some state; and from where the ways part.
    places = [tuple(_name(k) for k in at if not _is_field(k)) for at, _ in states]
    if len(set(places)) < len(states):
        places = [tuple(map(_name, at)) for at, _ in states]
    levels = zip(*places, strict=False)
    alike = len([*itertools.takewhile(lambda x: len(set(x)) == 1, levels)])
    # An `nnx.Optimizer` holds variables in place of arrays.
    return {
        "/".join(["hyperparams", *place[alike:], name]): jnp.asarray(value)
        for place, (_, numbers) in zip(places, states, strict=True)
        for name, value in numbers.items()
        if np.ndim(value) == 0
    }


def _name(key: Any) -> str:
    return key.name if _is_field(key) else jax.tree_util.keystr((key,), simple=True)


def _is_field(key: Any) -> bool:
    return isinstance(key, optax.tree_utils.NamedTupleKey)
