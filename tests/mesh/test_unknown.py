"""One warning on TPU, where nobody says how parameters lie."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


KNOWN = {"device_kind": "TPU v5p", "platform": "tpu"}
TPU = AbstractDevice(
    **{x.name: KNOWN.get(x.name) for x in dataclasses.fields(AbstractDevice)}
)


def warnings_of(names, device=TPU, size=8, kind=AxisType.Auto, **options):
    mesh = AbstractMesh((size,), ("fsdp",), (kind,), abstract_device=device)
    sharding = NamedSharding(mesh, P("fsdp"))
    params = {
        name: jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sharding)
        for name in names
    } | {"bias": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)}
    if "shardings" in options:
        options["shardings"] = sharding
    tx = mc.muon(1e-3, **options)
    state = jax.eval_shape(tx.init, params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(tx.update).trace(params, state, params)
    return [str(x.message) for x in caught if x.category is UserWarning]


def test_says_what_to_pass_and_names_a_few():
    (text,) = warnings_of(["up", "down"])
    assert "'down', 'up' lie on the mesh" in text and "bias" not in text
    assert all(x in text for x in ("shardings=", "AxisType.Explicit", "tx.init"))
    (text,) = warnings_of([f"w{i}" for i in range(5)])
    assert "'w0', 'w1', 'w2' and 2 more lie" in text


@pytest.mark.parametrize(
    "known",
    [
        {"shardings": "as they lie"},
        {"kind": AxisType.Explicit},
        {"size": 1},
        {"device": None},
        {"device": dataclasses.replace(TPU, device_kind="NVIDIA H100")},
    ],
)
def test_silent_where_it_is_known_or_the_compiler_is_asked(known):
    assert warnings_of(["w"], **known) == []
