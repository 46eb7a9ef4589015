"""The page's programs train on CPUs, beside nobody, and ask no host."""

import os
import warnings

from tests.ports import free_port

# As torchrun says it to the one process that it starts.
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
os.environ |= {"ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
warnings.simplefilter("ignore")
