"""Where record batches and their columns lie in Arrow files, held against Arrow's own reader."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import DataError
from mouse_core.files.ipc import read_footer, read_message
from mouse_core.store.remote.files import lying, rows_of, run

NUMBERS = np.random.default_rng(0)


def _column(kind: str, rows: int, *, nulls: bool) -> pa.Array:
    def some(values: list[Any]) -> list[Any]:
        return [None if nulls and number % 3 == 1 else value for number, value in enumerate(values)]

    numbers = NUMBERS.integers(0, 100, rows).tolist()
    ragged = [list(range(number % 4)) for number in numbers]
    made = {
        "int64": lambda: pa.array(some(numbers), pa.int64()),
        "half": lambda: pa.array(some([np.float16(one) for one in numbers]), pa.float16()),
        "bool": lambda: pa.array(some([one > 50 for one in numbers]), pa.bool_()),
        "fixed": lambda: pa.array(some([[one, one + 1] for one in numbers]), pa.list_(pa.float32(), 2)),
        "square": lambda: pa.array(some([[[one, 1]] * 3 for one in numbers]), pa.list_(pa.list_(pa.uint8(), 2), 3)),
        "ragged": lambda: pa.array(some(ragged), pa.list_(pa.int32())),
        "deep": lambda: pa.array(some([[one, one] for one in ragged]), pa.large_list(pa.list_(pa.int16()))),
        "text": lambda: pa.array(some([str(one) for one in numbers]), pa.large_string()),
        "image": lambda: pa.array(
            some([{"bytes": b"x" * one, "path": None} for one in numbers]),
            pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        ),
        "none": lambda: pa.nulls(rows),
        "when": lambda: pa.array(some(numbers), pa.timestamp("us")),
        "words": lambda: pa.DictionaryArray.from_arrays(pa.array(some(numbers), pa.int8()), [*map(str, range(100))]),
        "views": lambda: pa.array(some([str(one) * 9 for one in numbers]), pa.string_view()),
    }
    return made[kind]()


FIXED, OTHERS = ("int64", "half", "fixed", "square"), ("bool", "ragged", "deep", "text", "image", "none", "when")
KINDS = [*FIXED, *OTHERS, "words", "views"]


@given(
    kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=6),
    rows=st.lists(st.integers(0, 40), max_size=4),
    compressed=st.booleans(),
)
def test_metadata_says_where_columns_lie(kinds: list[tuple[str, bool]], rows: list[int], compressed: bool) -> None:
    names = [str(number) for number in range(len(kinds))]
    made = [
        pa.record_batch([_column(kind, count, nulls=nulls) for kind, nulls in kinds], names=names) for count in rows
    ]
    schema = pa.schema(
        [(name, _column(kind, 1, nulls=False).type) for name, (kind, _) in zip(names, kinds, strict=True)]
    )
    options = pa.ipc.IpcWriteOptions(compression="lz4" if compressed else None)
    file, stream = io.BytesIO(), io.BytesIO()
    for sink, new in ((file, pa.ipc.new_file), (stream, pa.ipc.new_stream)):
        with new(sink, schema, options=options) as writer:
            for batch in made:
                writer.write_batch(batch)
    for sink, where in ((file, _of_file(file)), (stream, _of_stream(stream))):
        assert len(where) == len(made)
        whole = pa.py_buffer(sink.getvalue())

        def read(begin: int, end: int, whole: pa.Buffer = whole) -> pa.Buffer:
            return whole.slice(begin, end - begin)

        for batch, (head, body) in zip(made, where, strict=True):
            assert head.rows == batch.num_rows
            columns = head.columns(schema, body)
            readable = names if not compressed else []
            if "views" in dict(kinds):
                readable = readable[: [kind for kind, _ in kinds].index("views")]
            assert list(columns) == [name for name in readable if kinds[int(name)][0] != "words"]
            for name, place in columns.items():
                wanted = batch.column(name)
                assert place.array(read).equals(wanted)
                check_rows(place, wanted, whole, fixed=kinds[int(name)][0] in FIXED)


def check_rows(place: Any, wanted: pa.Array, whole: pa.Buffer, *, fixed: bool) -> None:
    """Some rows of a column are read by their bytes alone, and so are values that lie one after the other."""

    def read(ranges: Any) -> list[pa.Buffer]:
        return [whole.slice(one.begin, one.end - one.begin) for one in ranges]

    for row, count in ((0, len(wanted)), (len(wanted) // 3, len(wanted) // 2)):
        assert run(rows_of(place, 0, row, count), read).equals(wanted.slice(row, count))
    found = run(lying(place, 0), read)
    assert found is not None or not fixed or not len(wanted) or wanted.null_count
    if found is not None and not pa.types.is_boolean(wanted.type):
        flat = wanted
        while pa.types.is_nested(flat.type):
            flat = flat.flatten()
        values = np.frombuffer(whole, flat.to_numpy().dtype, len(flat), found[0])
        np.testing.assert_array_equal(values, flat.to_numpy())


def _of_file(file: io.BytesIO) -> list[Any]:
    content = file.getvalue()
    footer = read_footer(lambda begin, end: content[begin:end], len(content))
    found = []
    for number in range(len(footer)):
        begin, body, end = footer.span(number)
        message = read_message(lambda begin, end: content[begin:end], begin, len(content))
        assert message is not None
        assert message[:3] == (begin, body, end)
        found.append((message.head, body))
    return found


def _of_stream(stream: io.BytesIO) -> list[Any]:
    content, begin, found = stream.getvalue(), 0, []
    while (message := read_message(lambda begin, end: content[begin:end], begin, len(content))) is not None:
        begin = message.end
        found += [(message.head, message.body)] if message.head is not None else []
    assert begin + 8 == len(content)
    return found


def test_damaged_metadata_is_a_data_error() -> None:
    batch = pa.record_batch([_column("ragged", 9, nulls=True), _column("fixed", 9, nulls=False)], names=["a", "b"])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    whole = sink.getvalue()
    with pytest.raises(DataError, match="was truncated"):
        read_footer(lambda begin, end: whole[begin:end], len(whole) - 3)
    for _ in range(500):
        content = bytearray(whole)
        for place in NUMBERS.integers(0, len(content), 3):
            content[place] = NUMBERS.integers(0, 256)
        kept = pa.py_buffer(bytes(content))

        def read(begin: int, end: int, kept: pa.Buffer = kept) -> pa.Buffer:
            assert 0 <= begin <= end <= len(whole)
            return kept.slice(begin, end - begin)

        try:
            footer = read_footer(read, len(whole))
            for number in range(len(footer)):
                message = read_message(read, int(footer.begins[number]), len(whole))
                if message is not None and message.head is not None:
                    for place in message.head.columns(batch.schema, message.body).values():
                        place.array(read)

                        def parts(ranges: Any, read: Any = read) -> list[pa.Buffer]:
                            return [read(one.begin, one.end) for one in ranges]

                        run(rows_of(place, 0, 2, 5), parts)
                        run(lying(place, 0), parts)
        except DataError:
            pass
