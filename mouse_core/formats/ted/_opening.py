"""What a path holds of TED: the entries of a folder or file, or the trajectories of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.files.reading import check_inside, reading
from mouse_core.formats._files.h5 import H5File
from mouse_core.formats.ted._entries import Entries, FileEntries, FolderEntries


@dataclass(frozen=True)
class Trajectories:
    """A file of the nested layout.

    Args:
        file: The open file.
        names: Its trajectories' groups, in order.
    """

    file: H5File
    names: Sequence[str]


@contextmanager
def opened(root: Path) -> Iterator[Entries | Trajectories]:
    """What lies at a path, for as long as it is needed.

    Args:
        root: A folder of TensorDict, the checkpoint of a TorchRL buffer, or an HDF5 file.

    Raises:
        ConfigError: None of these.
        SchemaError: Trajectories of another library.
        DataError: It is damaged.
    """
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    file = root
    if root.is_dir() and not any((folder / "meta.json").is_file() for folder in (root, root / "storage")):
        # The checkpoint of a TorchRL buffer may hold an HDF5 file instead.
        candidates = (root / "storage" / "checkpoint.h5", root / "checkpoint.h5")
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            raise ConfigError(f"{root}: expected meta.json of a TensorDict, or checkpoint.h5, found neither")
        file = found
        check_inside([file], root)
    if file.is_dir():
        with reading(file):
            entries = FolderEntries(file)
        yield entries
        return
    with H5File(file) as opened_file:
        names = [name for name in opened_file.names() if re.fullmatch(r"traj_\d+", name)]
        if names:
            _check_nested(file, opened_file.names(names[0]))
            yield Trajectories(opened_file, sorted(names, key=lambda name: int(name[5:])))
        else:
            yield FileEntries(opened_file, opened_file.trees(["/"])[0], "")


def _check_nested(file: Path, names: Sequence[str]) -> None:
    """Raise SchemaError for trajectories in groups of the same names that ManiSkill wrote."""
    if "actions" in names and "done" not in names:
        raise SchemaError(
            f"{file}: expected trajectories of TED, found those of ManiSkill ({', '.join(sorted(names)[:8])}), which "
            "format='maniskill' (--format maniskill) reads"
        )
