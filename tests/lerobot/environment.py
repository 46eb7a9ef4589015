"""What LeRobot's reader needs beside its packages: FFmpeg for torchcodec, and torchvision without CUDA.

    python tests/lerobot/environment.py FOLDER

links the libraries of FFmpeg that PyAV's wheel holds under the names that torchcodec looks for; LD_LIBRARY_PATH names
the folder then.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def lerobot_dataset() -> Any:
    """LeRobot's reader, ``LeRobotDataset``, where it is installed.

    Raises:
        ImportError: It is not.
    """
    if find_spec("lerobot") is None:
        raise ImportError("LeRobot is not installed: make test-lerobot")
    load_torchvision()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset


def load_torchvision() -> None:
    """Import torchvision, also where its wheel needs CUDA and torch has none."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # Its wheels hold operations for CUDA, which do not load without; of these it only asks what they are like.
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        load_torchvision.kept = library  # type: ignore[attr-defined]
        for name in [one for one in sys.modules if one.startswith("torchvision")]:
            del sys.modules[name]


def link_ffmpeg(folder: Path) -> None:
    """Make the links."""
    spec = find_spec("av")
    assert spec is not None
    assert spec.origin is not None
    folder.mkdir(parents=True, exist_ok=True)
    for library in (Path(spec.origin).parent.parent / "av.libs").iterdir():
        match = re.fullmatch(r"(lib[\w+-]+?)-[0-9a-f]{8}(\.so\.\d+).*", library.name)
        for name in {library.name} | ({f"{match[1]}{match[2]}"} if match else set()):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(library.resolve())


if __name__ == "__main__":
    link_ffmpeg(Path(sys.argv[1]))
