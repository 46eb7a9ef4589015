"""``python -m mouse_core.cli``: the ``mouse`` command."""

import sys

from mouse_core.cli.main import main

sys.exit(main())
