"""Processes joined by JAX's own coordinator, and what to do when one of them dies.

JAX aborts a process that has lost another one, and nothing can run in it after that. So
each process is started, watched and outlived by a parent, which reports how it ended.
"""

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import jax


HEARTBEAT_TIMEOUT = 30  # seconds of silence after which JAX declares a process dead
REMEDY = "To continue from the last checkpoint, run the same command with --resume"


def launch(target: Callable[[], None], count: int) -> None:
    """Runs `target` in `count` new processes that see each other's CPU devices.

    If one fails the others are stopped, and if this process ends so do they.
    """
    group = {
        "coordinator_address": f"localhost:{_free_port()}",
        "num_processes": count,
        "cluster_detection_method": "deactivate",
    }
    failure = _run_all(target, [group | {"process_id": i} for i in range(count)])
    if failure:
        index, end = failure
        raise SystemExit(
            f"\nprocess {index} of {count} {end}; the others were stopped. {REMEDY}."
        )


def launch_on_host(target: Callable[[], None]) -> None:
    """Runs `target` in a new process, which JAX joins to those of the other hosts.

    If the process of another host dies, this one ends within twice the timeout.
    """
    failure = _run_all(target, [{}])
    if failure:
        _, end = failure
        raise SystemExit(
            f"\nthe process on this host {end}. If the error above names a connection, "
            "a heartbeat or another task, the process on another host died first; all "
            f"others end within {2 * HEARTBEAT_TIMEOUT} seconds of that. "
            f"{REMEDY} on every host."
        )


def _run_all(
    target: Callable[[], None], groups: Sequence[dict[str, Any]]
) -> tuple[int, str] | None:
    """Starts a process for each of `groups`; the first that fails, and how it ended."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(target, group)) for group in groups]
    try:
        for process in processes:
            process.start()
        return _first_failure(processes)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def _run(target: Callable[[], None], group: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_follow_parent, daemon=True).start()
    jax.distributed.initialize(**group, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)
    try:
        target()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an orderly exit waits minutes for the other processes


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _first_failure(processes: Sequence[BaseProcess]) -> tuple[int, str] | None:
    running: dict[Any, int] = {p.sentinel: i for i, p in enumerate(processes)}
    while running:
        for sentinel in connection.wait(list(running)):
            index = running.pop(sentinel)
            processes[index].join()
            if processes[index].exitcode:
                return index, _end(processes[index].exitcode)
    return None


def _end(exitcode: int | None) -> str:
    if exitcode and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
