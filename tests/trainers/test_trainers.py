"""Each trainer sees the one global stream, each rank its rows; killed and resumed on other ranks, it goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainers import jobs
from tests.trainers.ranks import run

pytestmark = pytest.mark.trainers
