"""Four virtual CPU devices for the tests of shardings. Must stand before JAX looks for devices."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
