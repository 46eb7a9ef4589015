"""Small datasets of TFDS for the page."""

from pathlib import Path

from tests.core.formats.recording import Counting, record, rlds_episode
from tests.core.formats.test_tfds import as_tfrecord, features_of, write

for _name in ("bridge", "droid"):
    _episodes = [rlds_episode(log) for log in record(Counting((9, -8, 7), "image"), 3)]
    write(Path("made", _name, "arrays"), features_of("image"), {"train": _episodes})
    Path(_name).mkdir()
    as_tfrecord(Path("made", _name, "arrays")).rename(Path(_name, "1.0.0"))
