"""NVIDIA GPUs that need not be there: their compiler's view of them, and rates."""

from typing import Any, NamedTuple

from jax.experimental import topologies


class Rates(NamedTuple):
    """What one GPU does in large products and copies, which its data sheet exceeds."""

    products: float  # operations a second, 16 bits
    copies: float  # bytes a second, read and written
    launch: float = 2e-6  # seconds for each kernel


#: Measured: bfloat16 products of 8,192 cubed, and copies.
H200 = Rates(790e12, 4.3e12)
#: Measured: float16 products of 8,192 cubed. Copies and launches are those that explain
#: the times of whole updates.
H100 = Rates(699e12, 3.0e12, launch=3e-6)

#: Without a GPU nothing is timed, so that no product is to be left to the autotuner.
COMPILER_OPTIONS: Any = {"xla_gpu_enable_triton_gemm": False}

#: XLA's `GpuTargetConfigProto`, in text.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  device_memory_size: 151397597184
  device_address_bits: 64
  cuda_compute_capability { major: 9 }
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


#: What another chip has in place of that.
DIFFERENCES = {
    "H200": {},
    "H100": {
        "memory_bandwidth: 4800000000000": "memory_bandwidth: 3352320000000",
        "device_memory_size: 151397597184": "device_memory_size: 84942979072",
        "NVIDIA H200": "NVIDIA H100 80GB HBM3",
    },
}


def gpus(count: int, chip: str = "H200") -> list[Any]:
    """Devices to compile for, of one host."""
    target = TARGET
    for own, other in DIFFERENCES[chip].items():
        target = target.replace(own, other)
    description = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=target
    )
    return list(description.devices)
