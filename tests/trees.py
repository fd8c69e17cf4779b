"""Trees of parameters by the shapes of their leaves: `dense("up", 8, 16)`."""

import functools
import itertools

import jax
import jax.numpy as jnp

import muonclip_jax as mc


def is_shape(x) -> bool:
    return type(x) is tuple  # a masked node is a named one


def abstract(shapes):
    """A tree of abstract arrays from one of shapes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32) if is_shape(x) else x,
        shapes,
        is_leaf=is_shape,
    )


def nested(leaves):
    """A tree of modules of what paths name."""
    tree = {}
    for path, leaf in leaves.items():
        *modules, name = path.split("/")
        functools.reduce(lambda t, m: t.setdefault(m, {}), modules, tree)[name] = leaf
    return tree


def tree_of(leaves):
    """Abstract arrays in modules, from shapes by path."""
    return abstract(nested(leaves))


def dense(name, *shape, bias=True):
    """A layer as Flax has it, by path: inputs first."""
    kernel = {f"{name}/kernel": shape}
    return kernel | ({f"{name}/bias": shape[-1:]} if bias else {})


def linear(name, outputs, inputs):
    """A layer as PyTorch has it, by path."""
    return {f"{name}/weight": (outputs, inputs), f"{name}/bias": (outputs,)}


def run(name, *sizes, layer=dense):
    """Layers one after the other, by path: `name0`, `name1`, ..."""
    leaves = {}
    for i, pair in enumerate(itertools.pairwise(sizes)):
        leaves |= layer(f"{name}{i}", *pair)
    return leaves


def matrices_of(leaves):
    """The paths of the matrices among leaves by path, as the mask has them."""
    mask = jax.tree.leaves_with_path(mc.matrix_mask(tree_of(leaves)))
    matrices = (keys for keys, is_matrix in mask if is_matrix)
    return {jax.tree_util.keystr(x, simple=True, separator="/") for x in matrices}


def rules_in(message):
    """The mapping that an error prints, as a user pastes it."""
    code = message[message.index("from optax") : message.index("}") + 1]
    names = {}
    exec(code, names)
    return names["dimension_numbers"]
