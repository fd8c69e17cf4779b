"""Eight CPU devices, for pmap and shard_map; set before JAX starts."""

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)
