"""What torchrun runs: DistributedDataParallel, in which rank 1 is killed before step 5 of the first attempt."""

import json
import os
import sys
from pathlib import Path

from tests.trainers import jobs

if __name__ == "__main__":
    folder, stop = sys.argv[1:]
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    rank = int(os.environ["RANK"])
    found = jobs.ddp(rank, folder, int(stop), kill=[1, 5] if first else None)
    Path(folder, f"found-{rank}").write_text(json.dumps(found))
