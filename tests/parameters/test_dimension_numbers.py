"""Routing of every stock Flax layer, in Linen and NNX, and numbers that are given."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from containers import table, unwrapped
from flax import nnx
from helpers import as_pure, first_update, query_and_key
from internals import matrix_views, paths
from optax.contrib import MuonDimensionNumbers as Numbers
from trees import matrices_of, run, tree_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


class LinenZoo(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 16, name="tokens")(tokens)
        x = nn.LayerNorm()(x)
        x = nn.MultiHeadDotProductAttention(4)(x, x)
        y = nn.DenseGeneral((4, 8))(x)
        nn.DenseGeneral(16, axis=(-2, -1))(y)
        nn.Einsum((16, 4, 8), "btd,dnh->btnh")(x)
        nn.Conv(8, (3,))(x)
        nn.Conv(8, (3, 5))(x[:, :, None])
        nn.BatchNorm(use_running_average=True)(x)
        nn.Dense(16)(x)
        return nn.Dense(50)(x)


class NNXZoo(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(50, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.split = nnx.LinearGeneral(16, (4, 8), rngs=rngs)
        self.merge = nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), rngs=rngs)
        self.einsum = nnx.Einsum("btd,dnh->btnh", (16, 4, 8), (4, 8), rngs=rngs)
        self.conv = nnx.Conv(16, 8, (3, 5), rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
        self.lora = nnx.LoRA(16, 2, 16, rngs=rngs)
        self.lm_head = nnx.Linear(16, 50, rngs=rngs)


def linen_params(model, *args):
    return jax.eval_shape(model.init, jax.random.key(0), *args)["params"]


def nnx_params(make):
    return nnx.state(nnx.eval_shape(make), nnx.Param)


def matrices(params, **options):
    return {path: m for path, m in table(params, **options).items() if m}


def attention(module, *size):
    """What the kernels of an attention layer are."""
    names = ("query", "key", "value", "out")
    return {f"{module}/{name}/kernel": size for name in names}


def test_linen_zoo():
    found = table(linen_params(LinenZoo(), jnp.zeros((2, 6), int)))
    name = "MultiHeadDotProductAttention_0"
    assert {path: m for path, m in found.items() if m} == {
        **attention(name, 1, 16, 16),
        "DenseGeneral_0/kernel": (1, 16, 32),
        "DenseGeneral_1/kernel": (1, 32, 16),
        "Einsum_0/kernel": (1, 16, 32),
        "Conv_0/kernel": (1, 48, 8),
        "Conv_1/kernel": (1, 3 * 5 * 16, 8),
        "Dense_0/kernel": (1, 16, 16),
    }
    adamw = {"tokens/embedding", "Dense_1/kernel", f"{name}/query/bias"}
    assert adamw | {"LayerNorm_0/scale"} <= found.keys()


@pytest.mark.parametrize("pure", [False, True])
def test_nnx_zoo_as_state_and_as_dicts(pure):
    state = nnx_params(lambda: NNXZoo(nnx.Rngs(0)))
    assert matrices(as_pure(state) if pure else state) == {
        **attention("attn", 1, 16, 16),
        "split/kernel": (1, 16, 32),
        "merge/kernel": (1, 32, 16),
        "einsum/kernel": (1, 16, 32),
        "conv/kernel": (1, 3 * 5 * 16, 8),
        "blocks/0/kernel": (1, 16, 16),
        "lora/lora_a": (1, 16, 2),
        "lora/lora_b": (1, 2, 16),
    }


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y)
        x = nn.Dense(64)(x)
        return nn.Dense(16)(x), None


@pytest.mark.parametrize("masked", [False, True])
def test_scanned_layers_are_stacks(masked):
    """Norms show the stack; where a mask hides them, plain kernels are asked about."""
    scanned = nn.scan(
        ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )(name="layers")
    params = linen_params(scanned, jnp.zeros((2, 6, 16)), None)
    options = {}
    if masked:  # as scale_by_muon sees it under optax.masked
        mask = mc.matrix_mask(params)
        options = {"dimension_numbers": mc.flax_dimension_numbers(params)}
        params = jax.tree.map(lambda m, p: p if m else optax.MaskedNode(), mask, params)
        with pytest.raises(ValueError, match="(?s)Dense_0/kernel.*A mask hides"):
            mc.flax_dimension_numbers(params)
    assert matrices(params, **options) == {
        **attention("MultiHeadDotProductAttention_0", 3, 16, 16),
        "Dense_0/kernel": (3, 16, 64),
        "Dense_1/kernel": (3, 64, 16),
    }


def test_nnx_vmapped_stack():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 5)
    found = table(nnx_params(lambda: make(keys)))
    assert found["query/kernel"] == found["out/kernel"] == (5, 16, 16)
    assert found["query/bias"] is None


def test_experts_are_known_by_their_router():
    experts = {"moe/wi": (8, 16, 32), "moe/wo": (8, 32, 16)}
    found = table(tree_of(experts | {"moe/router/kernel": (16, 8)}))
    assert found == experts | {"moe/router/kernel": None}
    with pytest.raises(ValueError, match=r"moe/wi \(8, 16, 32\)"):
        table(tree_of(experts))


@pytest.mark.parametrize("last", ["o", "out"])
def test_bias_tells_a_stack_of_plain_dense_from_attention(last):
    leaves = {}
    for name in ("query", "key", "value", last):
        leaves |= {f"{name}/kernel": (3, 16, 16), f"{name}/bias": (3, 16)}
    expected = {path: x for path, x in leaves.items() if path.endswith("kernel")}
    assert matrices(tree_of(leaves)) == expected


def test_grouped_query_attention():
    def make():
        options = dict(num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
        return nnx.MultiHeadAttention(4, 16, **options)

    found = table(nnx_params(make))
    assert found["query/kernel"] == (1, 16, 16)
    assert found["key/kernel"] == found["value/kernel"] == (1, 16, 8)


def test_scanned_convolution_is_known_by_its_bias():
    conv = {"conv/kernel": (4, 3, 16, 8), "conv/bias": (4, 8)}
    assert table(tree_of(conv))["conv/kernel"] == (4, 48, 8)


@pytest.mark.parametrize("width, hidden", [(16, 50), (16, 64)])
def test_unnamed_output_head_is_found_next_to_the_embedding(width, hidden):
    leaves = {
        "Embed_0/embedding": (50, width),
        "Dense_2/kernel": (width, hidden),
        "Dense_9/kernel": (hidden, width),
        "Dense_10/kernel": (width, 50),
        "block/up/kernel": (width, 50),
    }
    # A layer of the same shape elsewhere, or earlier, is no head.
    others = leaves.keys() - {"Embed_0/embedding", "Dense_10/kernel"}
    assert matrices_of(leaves) == others


def test_last_dense_next_to_tied_embeddings_may_be_a_head():
    leaves = {"Embed_0/embedding": (64, 16)}
    with pytest.raises(ValueError, match="Dense_1/kernel.*may write the output"):
        matrices_of(leaves | run("Dense_", 16, 64, 16))


def test_position_embedding_does_not_hide_the_head():
    tables = {"tok/embedding": (256, 16), "pos/embedding": (64, 16)}
    layers = {"up/kernel": (16, 64), "out/kernel": (16, 256)}
    assert matrices(tree_of(tables | layers)) == {"up/kernel": (1, 16, 64)}


def test_absent_leaves_and_paths_in_one_key():
    assert table({"w": jnp.ones((3, 4)), "bias": None}) == {"w": (1, 3, 4)}
    haiku = {"dec/attn/query": {"bias": jnp.ones((4, 5))}, "ln/scale": jnp.ones((3, 5))}
    assert set(table(haiku).values()) == {None}


@pytest.mark.parametrize("name", ["stem", "DenseGeneral_0"])
def test_kernels_that_nothing_explains_are_ambiguous(name):
    with pytest.raises(ValueError, match=f"{name}/kernel"):
        matrices_of({f"{name}/kernel": (3, 3, 4, 8)})
    one_by_one = {"shortcut/kernel": (1, 1, 4, 8)}
    assert matrices(tree_of(one_by_one)) == {"shortcut/kernel": (1, 4, 8)}


def test_hidden_bias_of_a_scanned_convolution_is_ambiguous():
    conv = {"kernel": jnp.ones((4, 3, 3, 16, 8)), "bias": optax.MaskedNode()}
    with pytest.raises(ValueError, match="Conv_0/kernel"):
        mc.flax_dimension_numbers({"Conv_0": conv})


@pytest.mark.parametrize(
    "name", ["head", "lm_head", "logits_dense", "output_head", "Head_0"]
)
def test_named_output_heads(name):
    leaf = f"net/{name}/kernel"
    assert table(tree_of({leaf: (16, 50)}))[leaf] is None


@pytest.mark.parametrize(
    "name", ["multi_head_attention", "MultiHeadDotProductAttention_0"]
)
def test_heads_of_attention_are_no_output_heads(name):
    leaf = f"{name}/query/kernel"
    assert table(tree_of({leaf: (16, 4, 4)}))[leaf]


def test_bare_arrays_and_foreign_names_go_by_rank():
    assert table(jnp.ones((3, 4))) == {"(the array itself)": (1, 3, 4)}
    found = table(tree_of({"w": (3, 4), "g": (3,), "s": ()}))
    assert found == {"w": (1, 3, 4), "g": None, "s": None}


def test_mask_is_a_tree_of_bools():
    params = nnx_params(lambda: NNXZoo(nnx.Rngs(0)))
    mask = mc.matrix_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(unwrapped(params))
    assert all(type(leaf) is bool for leaf in jax.tree.leaves(mask))


def test_variables_with_the_params_key_read_the_same():
    params = linen_params(LinenZoo(), jnp.zeros((2, 6), int))
    assert table({"params": params}) == table(params)


def test_optax_accepts_these_numbers():
    params, numbers = query_and_key(16, 4, 8), mc.flax_dimension_numbers
    tx = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)
    first_update(tx, params, params)


def test_every_ambiguous_leaf_is_listed_at_once():
    leaves = {"moe/wi": (8, 4, 4), "moe/wo": (8, 4, 4), "w": (2, 2)}
    message = r"(?s)moe/wi \(8, 4, 4\).*moe/wo.*dimension_numbers"
    with pytest.raises(ValueError, match=message):
        mc.flax_dimension_numbers(tree_of(leaves))


def test_attention_with_a_flat_out_kernel():
    """As DeepSeek's code has it: `(heads * head_dim, features)`."""
    for names in (("wq_b", "wkv_b"), ("query", "key", "value")):
        params = {name: {"kernel": jnp.ones((6, 4, 8))} for name in names}
        params["out"] = {"kernel": jnp.ones((4 * 8, 6))}
        stacked = {"layers": jax.tree.map(lambda p: jnp.stack([p] * 3), params)}
        for tree, stack in ((params, 1), (stacked, 3)):
            table = mc.describe(tree, attention=[])
            assert table.count(f"{stack} x 6 x 32") == len(names)
            assert f"{stack} x 32 x 6" in table


def test_leaves_without_floats_hold_no_matrix():
    params = {
        "base": {"kernel": jnp.zeros((8, 8), jnp.int8)},
        "mask": jnp.ones((8, 8), bool),
        "rngs": jax.random.split(jax.random.key(0), (3, 4)),
        "up": {"kernel": jnp.ones((8, 8))},
    }
    others = {"base": {"kernel": False}, "mask": False, "rngs": False}
    assert mc.matrix_mask(params) == others | {"up": {"kernel": True}}


@pytest.mark.parametrize("call", [mc.matrix_mask, mc.describe, mc.muon(1e-3).init])
def test_leaves_that_are_no_arrays_are_named(call):
    params = {"up": {"kernel": jnp.ones((4, 4))}}
    params |= {"temperature": 1.0, "relu": jax.nn.relu}
    with pytest.raises(ValueError, match=r"'relu', 'temperature'.*eqx\.filter"):
        call(params)


@pytest.mark.parametrize(
    "name", ["tok_emb", "word_emb", "emb", "embd", "token_table", "embedding_matrix"]
)
def test_tables_of_other_frameworks_are_embeddings(name):
    layers = {"time_emb/weight": (64, 64), "up/weight": (256, 64)}
    assert matrices_of({f"{name}/weight": (1000, 64)} | layers) == layers.keys()


LINEAR = {"q": (64, 4, 16), "k": (64, 4, 16), "out": (4, 16, 64)}


@pytest.mark.parametrize(
    "leaves",
    [
        {f"linear_{name}": shape for name, shape in LINEAR.items()},
        {"mlp/wi": (64, 2, 128), "mlp/wo": (128, 64)},  # MaxText's fused_mlp
        {"ffn/up": (64, 2, 128), "ffn/norm": (64,), "down": (128, 64)},
    ],
)
def test_a_general_kernel_without_bias_is_no_stack_by_its_name(leaves):
    with pytest.raises(ValueError, match="cannot decide which axes"):
        matrices_of({f"block/{name}/kernel": x for name, x in leaves.items()})


def test_layers_without_bias_are_no_stack_by_their_name():
    """DenseGeneral has such kernels, too."""
    leaves = {"mlp/dense_0/kernel": (10, 8, 32), "mlp/dense_1/kernel": (10, 32, 32)}
    with pytest.raises(ValueError, match="(?s)mlp/dense_0/kernel.*mlp/dense_1"):
        mc.flax_dimension_numbers(tree_of(leaves))


SPEC = Numbers(0, 1)
PARAMS = {"a": {"w": jnp.ones((3, 4)), "v": jnp.ones((2, 2))}, "b": jnp.ones((3, 3))}


def views_of(numbers, params):
    return matrix_views(numbers, paths.flatten(params))


@pytest.mark.parametrize(
    "spec",
    [
        {"a": {"w": SPEC, "v": None}, "b": SPEC},
        {"a": {"w": SPEC, "v": None}, "b": Numbers((0,), (1,))},
        lambda params: jax.tree.map(
            lambda p: SPEC if p.shape[0] == 3 else None, params
        ),
    ],
)
def test_given_numbers_override_everything(spec):
    views = views_of(spec, PARAMS)
    assert [v is not None for v in views] == [False, True, True]


def test_a_prefix_will_do():
    found = [bool(v) for v in views_of({"a": None, "b": SPEC}, PARAMS)]
    assert found == [False, False, True]
    assert all(views_of(SPEC, PARAMS))


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"a": SPEC}, r"no entry for 'b/w'"),
        ({"a": SPEC, "b": None, "c": SPEC}, r"names 'c'"),
        ({"a": SPEC, "b": 3}, r"at 'b' is 3"),
        (
            {"a": Numbers(0, 2), "b": None},
            r"'a/w' with shape \(3, 4\): axis 2 is out of range",
        ),
        ({"a": Numbers(0, -2), "b": None}, r"'a/w' .*distinct"),
    ],
)
def test_bad_numbers_name_the_path(spec, message):
    params = {"a": {"w": jnp.ones((3, 4))}, "b": {"w": jnp.ones((3, 4))}}
    with pytest.raises(ValueError, match=message):
        mc.muon(1e-3, dimension_numbers=spec).init(params)


def test_stack_axes_of_a_module_that_is_not_there():
    with pytest.raises(ValueError, match="stack_axes names 'decoder'"):
        mc.flax_dimension_numbers({"w": jnp.ones((2, 2))}, stack_axes={"decoder": 1})
