"""The blocks that are files, as files."""

import re
from pathlib import Path

from tests.test_docs import ROOT, blocks

for _block in blocks((ROOT / "docs" / "guides" / "studies.md").read_text(encoding="utf-8")):
    if _title := re.search(r'title="([\w.]+)"', _block.info):
        Path(_title[1]).write_text(_block.code, encoding="utf-8")
