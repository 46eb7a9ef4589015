"""What stands for a bucket on the page: an object storage on the loopback network."""

import os
import tempfile

from tests.core.object_server import ObjectServer

server = ObjectServer().__enter__()
os.environ.update({name.upper(): value for name, value in server.options.items()})
os.environ["MOUSE_CACHE"] = tempfile.mkdtemp(prefix="mouse-docs-")
