"""A model of a library as a function, and what an expert says of it beforehand."""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


TREES = Path(__file__).parent.parent.parent / "tests" / "data" / "trees"


class Built(NamedTuple):
    """`fun(params, *args)` is a loss; leaves of `params` may be shapes."""

    fun: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and the verdicts of a person who has read its code.

    **Arguments:**

    - `build`: makes it, at a small size.
    - `verdicts`: from shell patterns of paths to verdicts; of those that match, the
        last one counts. A verdict has a letter for each axis, `i` for an input, `o` for
        an output, `s` for a stack; one with a `*` may stand for several axes or none.
        So `i*o` are kernels of Flax, dense and convolutional, `oi*` those of Equinox.
        `-` is AdamW. With `|` between them, either is right: a first layer that reads
        pixels may be a matrix or AdamW's, like a depthwise window.
    - `attention`: how many layers there are; layers that one `scan` runs are one.
    - `refused`: how many more there are whose logits no parameter scales.
    - `shares_gains`: whether the heads of a layer share what can be scaled, so that all
        of them follow the largest.
    - `is_exact`: whether a clip gives `min(S, tau)`. Not if `S` has a part that no
        clip scales, as tables of relative positions, and not if a layer sees its own
        output, since its weights are shared.
    - `is_capped`: whether logits are capped before their softmax.
    - `tree`: a file of `tests/data/trees`, whose verdicts come first.
    """

    name: str
    build: Callable[[], Built]
    verdicts: Mapping[str, str]
    attention: int = 0
    refused: int = 0
    shares_gains: bool = False
    is_exact: bool = True
    is_capped: bool = False
    tree: str | None = None

    def verdicts_of(self, path: str, shape: Sequence[int]) -> list[Any]:
        """All that are right, as `trees_of_others` reads them."""
        for leaf in _leaves(self.tree):
            is_it = "/".join(leaf["path"]) == path.removeprefix("params/")
            if is_it and len(leaf["shape"]) == len(shape):
                return [leaf["want"], *leaf["alternatives"]]
        held = [v for p, v in self.verdicts.items() if fnmatch.fnmatchcase(path, p)]
        if not held:
            raise ValueError(f"{self.name}: no verdict on {path} {tuple(shape)}")
        return [_axes(one, len(shape), path) for one in held[-1].split("|")]


def _leaves(tree: str | None) -> list[dict[str, Any]]:
    return json.loads((TREES / f"{tree}.json").read_text())["leaves"] if tree else []


def _axes(verdict: str, rank: int, path: str) -> Any:
    if verdict == "-":
        return "adamw"
    missing = rank - len(verdict.replace("*", "")) + ("*" in verdict)
    letters = re.sub(r"(.)\*", lambda m: m.group(1) * missing, verdict)
    if len(letters) != rank:
        raise ValueError(f"{verdict} does not fit {path} of rank {rank}")
    return {
        side: [i for i, letter in enumerate(letters) if letter == mark]
        for side, mark in (("reduction", "i"), ("output", "o"))
    }


def normal(shapes: Any, seed: int = 0) -> Any:
    """Normal entries, kernels by the width of their inputs; vectors stay near one."""
    leaves, treedef = jax.tree.flatten(shapes)
    generator = np.random.default_rng(seed)

    def draw(x: Any) -> jax.Array:
        start, width = (0.0, 2 * x.shape[-2] ** -0.5) if x.ndim > 1 else (1.0, 0.3)
        return jnp.asarray(start + width * generator.normal(size=x.shape), x.dtype)

    return treedef.unflatten([draw(x) for x in leaves])


def tokens(*shape: int, words: int = 99, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, words, shape).astype(np.int32)


def floats(*shape: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cross_entropy(logits: Any) -> jax.Array:
    """Of the first class: what it is does not matter to a reading."""
    return -jnp.mean(jax.nn.log_softmax(logits.astype(jnp.float32))[..., 0])


def losses(outputs: Any) -> jax.Array:
    """The mean over all that a model returns."""
    parts = [
        x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return sum((cross_entropy(x) if x.ndim else x for x in parts), jnp.zeros(()))
