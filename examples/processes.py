"""Several processes on one machine, joined by JAX's own coordinator."""

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import jax


def launch(target: Callable[[], None], count: int) -> None:
    """Runs `target` in `count` new processes that see each other's CPU devices.

    If one fails the others are stopped, and if this process ends so do they.
    """
    context = multiprocessing.get_context("spawn")
    address = f"localhost:{_free_port()}"
    processes: list[BaseProcess] = []
    try:
        for index in range(count):
            arguments = (target, address, count, index)
            processes.append(context.Process(target=_run, args=arguments))
            processes[-1].start()
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(target: Callable[[], None], address: str, count: int, index: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_follow_parent, daemon=True).start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, count, index, cluster_detection_method="deactivate"
    )
    target()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _wait(processes: list[BaseProcess]) -> None:
    running: dict[Any, BaseProcess] = {p.sentinel: p for p in processes}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                raise SystemExit(
                    f"process {processes.index(process)} of {len(processes)} ended "
                    f"with exit code {process.exitcode}; the others were stopped"
                )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
