"""What docs/guides/hub.md needs and does not show: a Hub on the loopback interface, and being logged in to it."""

import os
import tempfile

from tests.core.hub_server import WRITE_TOKEN, running_hub

serving = running_hub()
stand_in = serving.__enter__()
home = tempfile.TemporaryDirectory(prefix="mouse-docs-")
os.environ |= {
    "HF_ENDPOINT": stand_in.endpoint,
    "HF_HOME": home.name,
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
    "HF_TOKEN": WRITE_TOKEN,
}
