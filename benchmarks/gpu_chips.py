"""GPUs that need not be there: their compiler's view of them, and their rates."""

from typing import Any, NamedTuple

from jax.experimental import topologies


class Chip(NamedTuple):
    """One GPU. Rates are those seen in large products and copies, not the data sheet's.

    Those of the H200 are measured (bfloat16 products of 8,192 cubed, copies); those of
    the other two are scaled by the data sheets.
    """

    name: str
    capability: int  # major
    multiprocessors: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int  # of the memory, bytes a second, data sheet
    cache_bytes: int
    products: float  # operations a second, 16 bits
    copies: float  # bytes a second, read and written


CHIPS = {
    "h100": Chip(
        *("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84942979072, 3352320000000, 52428800),
        *(790e12, 3.0e12),
    ),
    "h200": Chip(
        *("NVIDIA H200", 9, 132, 1.98, 151397597184, 4800000000000, 52428800),
        *(790e12, 4.3e12),
    ),
    "b200": Chip(
        *("NVIDIA B200", 10, 148, 1.965, 191514411008, 7672320000000, 132644864),
        *(1800e12, 6.9e12),
    ),
}

#: Without a GPU nothing is timed, so that no product is to be left to the autotuner.
COMPILER_OPTIONS: Any = {"xla_gpu_enable_triton_gemm": False}


def gpus(chip: Chip, count: int = 1) -> list[Any]:
    """Devices to compile for, of one host."""
    description = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=target_of(chip)
    )
    return list(description.devices)


def target_of(chip: Chip) -> str:
    """The chip as XLA's `GpuTargetConfigProto`, in text."""
    device = dict(
        threads_per_block_limit=1024,
        threads_per_warp=32,
        threads_per_core_limit=2048,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_core=233472,
        registers_per_core_limit=65536,
        registers_per_block_limit=65536,
        core_count=chip.multiprocessors,
        fpus_per_core=128,
        clock_rate_ghz=chip.clock_ghz,
        block_dim_limit_x=2**31 - 1,
        block_dim_limit_y=2**16 - 1,
        block_dim_limit_z=2**16 - 1,
        thread_dim_limit_x=1024,
        thread_dim_limit_y=1024,
        thread_dim_limit_z=64,
        memory_bandwidth=chip.bandwidth,
        l2_cache_size=chip.cache_bytes,
        device_memory_size=chip.memory_bytes,
        device_address_bits=64,
        cuda_compute_capability=dict(major=chip.capability),
        device_vendor="NVIDIA Corporation",
        platform_version=f"Compute Capability {chip.capability}.0a",
        name=chip.name,
        driver_version="13.0.0",
        runtime_version="13.0.0",
        compile_time_toolkit_version="13.0.0",
        dnn_version="9.10.0",
    )
    return _text(
        dict(
            gpu_device_info=device,
            platform_name="CUDA",
            dnn_version_info=dict(major=9, minor=10, patch=0),
            device_description_str=chip.name,
        )
    )


def _text(message: dict[str, Any]) -> str:
    lines = []
    for key, value in message.items():
        if isinstance(value, dict):
            lines.append(f"{key} {{ {_text(value)} }}")
        else:
            lines.append(
                f'{key}: "{value}"' if isinstance(value, str) else f"{key}: {value}"
            )
    return " ".join(lines)
