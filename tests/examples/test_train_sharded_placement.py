"""Where the multi-device example puts its arrays, and what it reads and logs."""

import jax
import numpy as np
import pytest
import train_sharded


pytestmark = pytest.mark.usefixtures("fast_compilation")
BATCH, CONTEXT = 6, 10
SMALL = f"--batch-size={BATCH} --context={CONTEXT} --layers=2 --width=16 --heads=2"
MESHES = {"fsdp": (2, 1), "tensor": (1, 2)}


@pytest.fixture
def args():
    return train_sharded.parse_args(SMALL.split())


@pytest.fixture
def mesh(request):
    mesh = train_sharded.make_mesh(MESHES[request.param])
    with jax.set_mesh(mesh):
        yield mesh


def shards(tree):
    """Path to whole shape and the shape of one device's part."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            leaf.shape,
            leaf.sharding.shard_shape(leaf.shape),
        )
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


EXPECTED = {
    "fsdp": {
        "blocks/0/attention/query/kernel": (8, 2, 8),
        "blocks/1/attention/out/kernel": (2, 8, 8),
        "blocks/1/up/kernel": (8, 64),
        "blocks/1/down/kernel": (64, 8),
        "embed/embedding": (256, 8),
        "position_embed/embedding": (CONTEXT, 8),
        "head/kernel": (8, 256),
    },
    "tensor": {
        "blocks/0/attention/key/kernel": (16, 1, 8),
        "blocks/0/attention/value/bias": (1, 8),
        "blocks/1/attention/out/kernel": (1, 8, 16),
        "blocks/1/up/kernel": (16, 32),
        "blocks/1/up/bias": (32,),
        "blocks/1/down/kernel": (32, 16),
    },
}


@pytest.mark.parametrize("mesh", MESHES, indirect=True)
def test_parameters_are_divided(args, mesh, request):
    create, _ = train_sharded.compile_for(mesh, args)
    name = request.node.callspec.params["mesh"]
    parameters = shards(create.eval_shape().params)
    for path, part in EXPECTED[name].items():
        assert parameters[path][1] == part
    whole = [path for path, (shape, part) in parameters.items() if part == shape]
    if name == "fsdp":
        assert whole and all(path.endswith(("bias", "scale")) for path in whole)


@pytest.mark.parametrize("mesh", MESHES, indirect=True)
def test_momenta_are_sharded_as_their_parameters(args, mesh):
    create, _ = train_sharded.compile_for(mesh, args)
    state = create.eval_shape()
    momenta = shards(state.opt_state)
    for path, place in shards(state.params).items():
        its_own = [m for m in momenta if m.endswith(f"mu/{path}")]
        assert [momenta[m] for m in its_own] == [place]


@pytest.mark.parametrize("mesh", ["fsdp"], indirect=True)
def test_no_device_ever_holds_the_whole_model(args, mesh):
    create, _ = train_sharded.compile_for(mesh, args)
    program = create.lower().compile().as_text()
    divided = [(x, y) for x, y in shards(create.eval_shape()).values() if x != y]
    assert len(divided) > len(EXPECTED["fsdp"])
    for whole, part in divided:
        assert str([*part]).replace(" ", "") in program
        assert str([*whole]).replace(" ", "") not in program


@pytest.mark.parametrize("mesh", MESHES, indirect=True)
def test_a_process_reads_the_rows_of_its_devices(args, mesh, monkeypatch):
    corpus = train_sharded.Corpus()
    whole = corpus.batch(BATCH, CONTEXT, seed=args.seed, step=7)
    read, batch = [], corpus.batch

    def watched(*size, **options):
        rows = batch(*size, **options)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(corpus, "batch", watched)
    tokens = train_sharded.load_batch(corpus, args, 7, mesh)
    np.testing.assert_array_equal(tokens, whole)
    assert set(read) == {BATCH // mesh.shape["fsdp"]}


def test_log_is_cut_to_the_steps_of_the_checkpoint(tmp_path):
    file = tmp_path / "run" / "losses.jsonl"
    train_sharded.LossLog(file, 0).append([{"step": 1}, {"step": 2}, {"step": 3}])
    with file.open("a") as torn:
        torn.write('{"step": 4, "lo')
    train_sharded.LossLog(file, 2).append([{"step": 3}])
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
