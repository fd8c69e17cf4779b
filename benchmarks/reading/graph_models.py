"""jraph's networks, with Haiku's layers, as its examples put them together."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from .models import Built, cross_entropy, floats, Model


# pyright: reportMissingImports=false
LIBRARIES = ("jraph", "dm-haiku")

KEY = jax.random.key(0)
SENDERS, RECEIVERS = np.asarray([0, 1, 2, 3, 0]), np.asarray([1, 2, 3, 0, 2])
DENSE = {"*": "-", "*/w": "io", "head/w": "-"}


def of(forward: Callable[[jraph.GraphsTuple], jraph.GraphsTuple]) -> Built:
    def classified(nodes: Any, edges: Any) -> jax.Array:
        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=edges,
            senders=jnp.asarray(SENDERS),
            receivers=jnp.asarray(RECEIVERS),
            n_node=jnp.asarray([4]),
            n_edge=jnp.asarray([5]),
            globals=None,
        )
        out = forward(graph).nodes
        return hk.Linear(3, name="head")(jax.nn.relu(out))

    net = hk.without_apply_rng(hk.transform(classified))
    data = (floats(4, 7), floats(5, 6))
    params = jax.eval_shape(net.init, KEY, *data)

    def loss(params: Any, *args: Any) -> jax.Array:
        return cross_entropy(net.apply(params, *args))

    return Built(loss, params, data)


def perceptron(name: str) -> Callable[..., jax.Array]:
    def run(*parts: Any) -> jax.Array:
        x = jnp.concatenate([part for part in parts if part is not None], -1)
        return hk.nets.MLP([16, 16], name=name)(x)

    return run


def message_passing(graph: jraph.GraphsTuple) -> jraph.GraphsTuple:
    for i in range(2):
        graph = jraph.GraphNetwork(
            update_edge_fn=perceptron(f"edges_{i}"),
            update_node_fn=perceptron(f"nodes_{i}"),
        )(graph)
    return graph


def convolutional(graph: jraph.GraphsTuple) -> jraph.GraphsTuple:
    for i in range(2):
        graph = jraph.GraphConvolution(
            lambda nodes, i=i: hk.Linear(16, name=f"gcn_{i}")(jax.nn.relu(nodes))
        )(graph)
    return graph


def attentional(graph: jraph.GraphsTuple) -> jraph.GraphsTuple:
    """Its logits are one linear function of both ends, no product of query and key."""
    return jraph.GAT(
        lambda nodes: hk.Linear(16, name="query")(nodes),
        lambda sent, received, _: jax.nn.leaky_relu(
            hk.Linear(1, name="logit")(jnp.concatenate([sent, received], -1))
        ),
        lambda nodes: jax.nn.relu(nodes),
    )(graph._replace(edges=None))


MODELS = [
    Model("GraphNetwork", lambda: of(message_passing), DENSE),
    Model("GraphConvolution", lambda: of(convolutional), DENSE),
    # A kernel of one output is a vector.
    Model("GAT", lambda: of(attentional), DENSE | {"logit/w": "-"}),
]
