"""What a trace says of HuggingFace's GPT-2 that its names do not.

    pip install 'transformers<5' flax && python examples/read_gpt2.py

Nothing runs and nothing is downloaded: the model is traced on shapes alone.
"""

import jax
import jax.numpy as jnp
import optax
from transformers import (  # pyright: ignore[reportMissingImports]
    FlaxGPT2LMHeadModel,
    GPT2Config,
)

import muonclip_jax as mc


def main() -> None:
    model = FlaxGPT2LMHeadModel(GPT2Config(), _do_init=False)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 8)))

    def loss_fn(params, tokens):
        logits = model(tokens[:, :-1], params=params).logits
        targets = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    tokens = jax.ShapeDtypeStruct((2, 65), jnp.int32)
    reading = mc.read_model(loss_fn, params, tokens)
    print(reading, mc.describe(params, model=reading), sep="\n\n")


if __name__ == "__main__":
    main()
