"""The names of the folders in a buffer's folder."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

BATCHES = "batches"
"""The folder of stored batches."""

STATE = ".state"
"""The folder of what is not data: the logs, and who owns the folder."""

LATE = ".late"
"""The folder of columns that came later."""

_LONGEST = 200


@lru_cache(maxsize=1024)
def folder_name(environment: str) -> str:
    """A name that is safe in paths for an environment's folder, another one for every environment.

    Letters, digits, ``_``, ``-`` and inner dots stay; all else becomes ``%XX``, byte by byte.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), environment)
    if name[0] == "." or name == BATCHES:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST:
        # "%" and no hexadecimal digit after it: no other name can look like this.
        name = f"{name[:100]}%-{hashlib.sha256(environment.encode()).hexdigest()[:32]}"
    return name
