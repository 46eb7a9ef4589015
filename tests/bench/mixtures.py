"""Several stores as one, beside one store of the same rows."""

from __future__ import annotations

import datasets

from mouse_core import BatchSource, DatasetStore
from mouse_core.bench import Contender, interleave
from mouse_core.mixtures import Mixture
from tests.bench import generate
from tests.bench.results import Table, table_of
from tests.bench.workloads import _PLANNED, Settings, dataset_folder

MEMBERS = 8


def table(settings: Settings, batch_size: int) -> Table:
    """A batch of a mixture of stores, each an eighth of a dataset's rows, and one of a store of all of them."""
    dataset = datasets.load_from_disk(dataset_folder(generate.STATE, settings.rows, settings))
    rows = len(dataset) // MEMBERS
    members = [
        DatasetStore().from_dataset(dataset.select(range(number * rows, (number + 1) * rows)))
        for number in range(MEMBERS)
    ]
    whole = DatasetStore()
    for number in range(MEMBERS):
        whole.from_dataset(dataset.select(range(number * rows, (number + 1) * rows)))
    sources = {
        "one store": whole,
        "a mixture of 8": Mixture(members, field=None),
        "a mixture of 8, and which": Mixture(members),
    }
    timings = interleave(
        [
            Contender(
                name,
                BatchSource(store, 64, batch_size, dtypes={"obs_continuous": "float32"}).__getitem__,
                "ours" if name != "one store" else "floor",
                multiple=max(1, _PLANNED // batch_size),
            )
            for name, store in sources.items()
        ],
        rounds=settings.rounds,
        budget_seconds=settings.budget,
    )
    return table_of(
        f"mixtures-{batch_size}",
        f"A mixture of {MEMBERS} stores, B={batch_size}, S=64",
        timings,
        notes=["`and which`: with the field that says which member a window is of."],
    )
