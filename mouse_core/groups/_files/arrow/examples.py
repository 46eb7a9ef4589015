"""Examples as Arrow tables, and back. One row is one example."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from mouse_core.groups._files.arrow.declared import declared_array, declared_field, dicts_of
from mouse_core.groups._files.arrow.rollouts import FLOATS, TOKENS, arrays_of, columns_of, field_of, lists_of
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.example import RLExample

EXAMPLES = pa.schema(
    [
        field_of("rollout_uid", pa.string()),
        field_of("environment", pa.string()),
        field_of("policy_version", pa.string()),
        field_of("tokens", TOKENS),
        field_of("loss_mask", pa.list_(field_of("element", pa.bool_()))),
        field_of("advantage", FLOATS),
        field_of("generator_log_probs", FLOATS),
    ]
)
"""The columns of a batch."""


def examples_with(declared: Columns) -> pa.Schema:
    """The columns of a batch of examples that have others, too."""
    turn_ids = [field_of("turn_ids", TOKENS)] if declared.of("turn") else []
    return pa.schema([*EXAMPLES, *turn_ids, *(declared_field(column, of_example=True) for column in declared.values())])


def examples_to_table(examples: Sequence[RLExample], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Examples as columns, also those that were declared."""
    columns = columns_of(examples, EXAMPLES, NO_COLUMNS)
    if declared.of("turn"):
        columns.append(lists_of(TOKENS, [example.turn_ids for example in examples]))
    for name, column in declared.items():
        columns.append(declared_array(column, [example.columns[name] for example in examples], of_example=True))
    return pa.RecordBatch.from_arrays(columns, schema=examples_with(declared))


def table_to_examples(table: pa.Table, declared: Columns = NO_COLUMNS) -> list[RLExample]:
    """The examples that ``examples_to_table`` made columns of."""
    rows: list[RLExample] = []
    for batch in table.to_batches():
        names = [name for name in (*EXAMPLES.names, "turn_ids") if name in batch.schema.names]
        values = [
            arrays_of(batch.column(name))
            if pa.types.is_list(batch.column(name).type)
            else batch.column(name).to_pylist()
            for name in names
        ]
        own = dicts_of(((column, batch.column(name)) for name, column in declared.items()), len(batch), of_example=True)
        for row, columns in zip(zip(*values, strict=True), own, strict=True):
            rows.append(RLExample(**dict(zip(names, row, strict=True)), columns=columns, declared=declared))
    return rows
