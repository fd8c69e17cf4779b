"""The bytes that each layout sends, against those on record.

`PYTHONPATH=tests:tests/mesh python tests/mesh/test_bytes.py` writes the record,
tests/data/exchanges.json, anew: a change of it is to be seen in review.
"""

import json
import pathlib
import sys

import jax
import pytest
from test_on_mesh import LAYOUTS, make, placed, traffic


RECORD = pathlib.Path(__file__).parents[1] / "data" / "exchanges.json"


def bytes_of(layout, is_known):
    """Bytes in each kind of collective of an update, by the program for 8 devices."""
    mesh, shardings, params, grads = placed(layout)
    tx = make(shardings=shardings if is_known else None)
    with jax.set_mesh(mesh):
        program = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
    return {kind: int(found.bytes) for kind, found in sorted(traffic(program).items())}


def record():
    return {
        layout: {
            "shardings given": bytes_of(layout, True),
            "nothing said": bytes_of(layout, False),
        }
        for layout in LAYOUTS
    }


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_sends_no_more_than_on_record(layout):
    known = json.loads(RECORD.read_text())[layout]
    assert bytes_of(layout, True) == known["shardings given"]
    # How blocks are sent otherwise is up to XLA, whose versions differ.
    left_open = sum(bytes_of(layout, False).values())
    assert left_open <= 1.25 * sum(known["nothing said"].values())
    assert left_open > 0


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")
    sys.exit()
