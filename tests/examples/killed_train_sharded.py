"""train_sharded.py, one process of which is killed before a step.

The process is that of index `KILLED_PROCESS`, the step is number `KILLED_BEFORE`, and
the time of the kill is printed.
"""

import os
import signal
import time

import jax
import train_sharded


load_batch = train_sharded.load_batch


def load_batch_or_die(corpus, args, step, mesh):
    is_victim = jax.process_index() == int(os.environ["KILLED_PROCESS"])
    if is_victim and step == int(os.environ["KILLED_BEFORE"]):
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return load_batch(corpus, args, step, mesh)


# Spawned processes import this file by another name; pytest does, too, to look for
# examples in it, and shall find train_sharded.py as it is.
if "KILLED_PROCESS" in os.environ:
    train_sharded.load_batch = load_batch_or_die

if __name__ == "__main__":
    train_sharded.main()
