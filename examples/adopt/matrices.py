"""Kernels of other libraries that hold several matrices, and what cuts them.

`python matrices.py` prints the table of each; `python matrices.py gpt2` of one. Shapes
are those of the models as published: nothing is downloaded, and nothing is computed.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import muonclip_jax as mc


class Model(NamedTuple):
    """Leaves of one layer, and the entries of `dimension_numbers` that cut them."""

    about: str
    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, mc.MatrixAxes]


MODELS = {
    "gpt2": Model(
        "GPT-2 124M of HuggingFace Flax, (out, in): 12 heads of 64 in query and key, "
        "the value whole",
        {"attn/c_attn/kernel": (2304, 768), "attn/c_proj/kernel": (768, 768)},
        {"*c_attn/*": mc.MatrixAxes(1, 0, parts=(768,) * 3, head_dim=(64, 64, None))},
    ),
    "llama-huggingface": Model(
        "Llama 3.2 1B of HuggingFace Flax: 32 query heads of 64, 8 key heads",
        {
            "self_attn/q_proj/kernel": (2048, 2048),
            "self_attn/k_proj/kernel": (2048, 512),
            "self_attn/v_proj/kernel": (2048, 512),
        },
        {f"*{name}_proj/*": mc.MatrixAxes(0, 1, head_dim=64) for name in "qk"},
    ),
    "llama-equinox": Model(
        "the same in Equinox, (out, in)",
        {
            "attention/query_proj/weight": (2048, 2048),
            "attention/key_proj/weight": (512, 2048),
        },
        {"*query_proj*": mc.MatrixAxes(1, 0, head_dim=64)}
        | {"*key_proj*": mc.MatrixAxes(1, 0, head_dim=64)},
    ),
    "llama-levanter": Model(
        "the same in Levanter, (layers, groups, heads of a group, head_dim, in): the "
        "heads are axes, and so a stack",
        {"self_attn/q_proj/weight": (16, 8, 4, 64, 2048)},
        {"*q_proj*": mc.MatrixAxes(4, 3)},
    ),
    "bloom": Model(
        "Bloom 560M: query, key and value of each of 16 heads of 64 follow one another",
        {"self_attention/query_key_value/kernel": (1024, 3072)},
        {
            "*query_key_value/*": mc.MatrixAxes(
                0, 1, parts=(64, 64, 64), head_dim=(64, 64, None), groups=16
            )
        },
    ),
    "qwen3-next": Model(
        "Qwen3-Next 80B: 16 groups of a query and a key of 128 and two values and two "
        "gates of 128",
        {"linear_attn/in_proj_qkvz/kernel": (2048, 12288)},
        {
            "*in_proj_qkvz/*": mc.MatrixAxes(
                0, 1, parts=(128, 128, 256, 256), head_dim=128, groups=16
            )
        },
    ),
    "gated-mlp": Model(
        "gate and up in one kernel, as Phi-3 has them",
        {
            "mlp/gate_up_proj/kernel": (3072, 16384),
            "mlp/down_proj/kernel": (8192, 3072),
        },
        {"*gate_up_proj/*": mc.MatrixAxes(0, 1, parts=(8192, 8192))},
    ),
}


def params_of(model: Model) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for path, shape in model.shapes.items():
        *modules, name = path.split("/")
        node = params
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return params


def table(model: Model) -> str:
    return mc.describe(params_of(model), dimension_numbers=model.axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL")
    for name in parser.parse_args().models or MODELS:
        print(f"{name}: {MODELS[name].about}\n{table(MODELS[name])}\n")


if __name__ == "__main__":
    main()
