"""Brax's networks of policies and values."""

# pyright: reportMissingImports=false

from typing import Any

import jax
import jax.numpy as jnp
from brax.training.agents.ppo import networks as ppo
from brax.training.agents.sac import networks as sac

from .models import Built, floats, Model


LIBRARIES = ("brax", "flax")

KEY = jax.random.key(0)
#: The last of the three layers writes the output.
VERDICTS = {"*": "-", "*hidden_?/kernel": "io", "*hidden_2/kernel": "-"}
HIDDEN = (32, 32)
DATA = (floats(2, 9),)


def of(network: Any, *more: Any) -> Built:
    params = jax.eval_shape(network.init, KEY)

    def loss(params: Any, *args: Any) -> jax.Array:
        return jnp.mean(network.apply(None, params, *args) ** 2)

    return Built(loss, params, (*DATA, *more))


def of_ppo() -> Any:
    return ppo.make_ppo_networks(
        9, 3, policy_hidden_layer_sizes=HIDDEN, value_hidden_layer_sizes=HIDDEN
    )


def of_sac() -> Any:
    return sac.make_sac_networks(9, 3, hidden_layer_sizes=HIDDEN)


MODELS = [
    Model("PPO, policy", lambda: of(of_ppo().policy_network), VERDICTS),
    Model("PPO, value", lambda: of(of_ppo().value_network), VERDICTS),
    Model("SAC, policy", lambda: of(of_sac().policy_network), VERDICTS),
    Model("SAC, two critics", lambda: of(of_sac().q_network, floats(2, 3)), VERDICTS),
]
