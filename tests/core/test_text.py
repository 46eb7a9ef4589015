"""Texts become rows of tokens: held to the tokenizer's own truncation and padding, and to plain Python."""

import functools
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from mouse_core import BatchSource, DatasetStore, text
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.text.recipes import identity_of
from tests.core import text_cases
from tests.core.text_cases import EOS, PAD, UNKNOWN, Called, Rereadable, examples, tokenizer

DATA = examples()


def stored(made: text.Tokenized) -> dict[str, np.ndarray]:
    """All rows, as batches deliver them."""
    store = made.to_store()
    return dict(BatchSource(store, batch_size=len(store), windows={}, sampling="last")[0])


def encoded(texts: list[str], length: int, side: str = "right") -> tuple[np.ndarray, np.ndarray]:
    """What the tokenizer itself truncates and pads."""
    by_itself = tokenizer()
    by_itself.enable_truncation(length)
    by_itself.enable_padding(pad_id=PAD, pad_token="<pad>", length=length, direction=side)
    found = by_itself.encode_batch(texts)
    return np.array([one.ids for one in found]), np.array([one.attention_mask for one in found])


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_truncated_and_filled_up_as_the_tokenizer_does(tmp_path: Path, side: Any) -> None:
    recipe = text.Texts(max_length=6, pad_id=PAD, padding_side=side, keep={"score": "float32"})
    made = text.tokenize(DATA, tokenizer(), tmp_path, recipe)
    batch = stored(made)
    ids, mask = encoded([one["text"] for one in DATA], 6, side)
    assert made.rows == made.texts == len(DATA)
    assert list(batch) == ["input_ids", "attention_mask", "score"]
    assert list(BatchSource(DatasetStore.open(made.path), batch_size=4, windows={}).spec) == list(batch)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == np.int64
    np.testing.assert_array_equal(batch["input_ids"], ids)
    np.testing.assert_array_equal(batch["attention_mask"], mask)
    np.testing.assert_array_equal(batch["score"], np.arange(len(DATA), dtype=np.float32) / 4)


@pytest.mark.parametrize("only_whole", [True, False])
def test_prompts_know_where_they_end(tmp_path: Path, only_whole: bool) -> None:
    recipe = text.Prompts(max_length=12, pad_id=PAD, only_whole=only_whole)
    made = text.tokenize(DATA, tokenizer(), tmp_path, recipe)
    ids, mask = encoded([one["prompt"] + one["label"] for one in DATA], 12)
    kept = [number for number in range(len(DATA)) if not only_whole or not mask[number].all()]
    assert 0 < made.rows == len(kept) <= len(DATA)
    assert (made.rows < len(DATA)) == only_whole
    batch = stored(made)
    np.testing.assert_array_equal(batch["input_ids"], ids[kept])
    np.testing.assert_array_equal(batch["labels"], ids[kept])
    np.testing.assert_array_equal(batch["attention_mask"], mask[kept])
    last = [len(tokenizer().encode(DATA[number]["prompt"]).ids[:12]) - 1 for number in kept]
    assert batch["prompt_rindex"].tolist() == last
    alone = text.mask_label(batch, pad_id=PAD)
    for row, end in enumerate(last):
        assert alone["input_ids"][row].tolist() == [*ids[kept[row]][:end].tolist(), *[PAD] * (12 - end)]
        assert alone["attention_mask"][row].sum() == end
    with pytest.raises(MissingFieldError, match="prompt_rindex"):
        text.mask_label({"input_ids": ids}, pad_id=PAD)


def test_what_a_tokenizer_puts_around_every_text_is_no_prompt_and_there_once(tmp_path: Path) -> None:
    used = tokenizer()
    around = [("<unk>", UNKNOWN), ("</s>", EOS)]
    used.post_processor = processors.TemplateProcessing(single="<unk> $A </s>", special_tokens=around)
    data = [{"prompt": one["prompt"], "label": one["label"]} for one in DATA]
    batch = stored(text.tokenize(data, used, tmp_path, text.Prompts(max_length=50, pad_id=PAD)))
    alone = [used.encode(one["prompt"], add_special_tokens=False).ids for one in data]
    assert batch["prompt_rindex"].tolist() == [len(ids) for ids in alone]
    assert [ids[1 : 1 + len(one)].tolist() for ids, one in zip(batch["input_ids"], alone, strict=True)] == alone
    rows = stored(text.tokenize(["king", "is"], used, tmp_path, text.Tokens(eos_id=EOS)))
    assert rows["input_ids"].tolist().count(EOS) == 2


def test_a_full_row_that_ends_is_whole(tmp_path: Path) -> None:
    def three(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[5, 5, EOS] if "end" in one else [5, 5, 5] for one in texts]}

    data = [{"prompt": "a", "label": label} for label in ("end", "cut")]
    assert text.tokenize(data, three, tmp_path, text.Prompts(max_length=3, pad_id=0, eos_id=EOS)).rows == 1


def test_pairs_are_two_answers_that_differ(tmp_path: Path) -> None:
    made = text.tokenize(DATA, tokenizer(), tmp_path, text.Pairs(max_length=10, pad_id=PAD))
    kept = [one for one in DATA if one["chosen"] != one["rejected"] and len(one["chosen"].split()) >= 5]
    assert 0 < made.rows == len(kept) < len(DATA)
    pairs = text.as_pairs(stored(made))
    for side in ("chosen", "rejected"):
        ids, mask = encoded([f"{one['prompt']}\n{one[side]}" for one in kept], 10)
        np.testing.assert_array_equal(pairs[f"{side}_data"]["input_ids"], ids)
        np.testing.assert_array_equal(pairs[f"{side}_data"]["attention_mask"], mask)
    assert (pairs["chosen_data"]["input_ids"] != pairs["rejected_data"]["input_ids"]).any()
    with pytest.raises(MissingFieldError, match="chosen_data"):
        text.as_pairs({"input_ids": ids})


def test_tokens_are_rows_and_texts_episodes(tmp_path: Path) -> None:
    store = text.tokenize(DATA, tokenizer(), tmp_path, text.Tokens(eos_id=EOS)).to_store()
    wanted = [[*tokenizer().encode(one["text"]).ids, EOS] for one in DATA]
    flat = [token for one in wanted for token in one]
    source = BatchSource(store, sequence_length=8, batch_size=2, sampling="sequential", drop_last=False)
    windows = {int(start): row.tolist() for index in range(len(source)) for start, row in drawn(source, index)}
    assert windows == {start: flat[start : start + 8] for start in range(0, len(flat) // 8 * 8, 8)}
    longest = max(map(len, wanted))
    packed = BatchSource(
        store, longest, len(wanted), "sequential", boundary="episode", packed=True, fields=["input_ids", "done"]
    )[0]
    edges = packed["cu_seqlens"].tolist()
    found = [packed["input_ids"][begin:end].tolist() for begin, end in pairwise(edges)]
    assert sorted(found) == sorted(wanted)
    assert packed["done"].sum() == len(wanted)


def drawn(source: BatchSource, index: int) -> Any:
    return zip(source.plan(index).starts, source[index]["input_ids"], strict=True)


def test_texts_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    columns = {name: [one[name] for one in DATA] for name in ("prompt", "chosen", "rejected")}
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "data.parquet")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DATA))
    (tmp_path / "lines").mkdir()
    for part in range(3):
        lines = "".join(json.dumps(one) + "\n" for one in DATA[part * 15 : part * 15 + 15])
        (tmp_path / "lines" / f"{part}.jsonl").write_text(lines)
    order = np.random.default_rng(0).permutation(len(DATA))
    shuffled = datasets.Dataset.from_list([DATA[n] for n in order]).select(np.argsort(order))
    shuffled.save_to_disk(str(tmp_path / "saved"))
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    sources = [tmp_path / "data.parquet", str(tmp_path / "data.jsonl"), table, shuffled, saved, tmp_path / "saved"]
    sources.append(tmp_path / "lines")
    recipe = text.Pairs(max_length=10, pad_id=PAD)
    made = text.tokenize(DATA, tokenizer(), tmp_path / "made", recipe)
    for source in [*sources, Rereadable(DATA)]:
        again = text.tokenize(source, tokenizer(), tmp_path / "made", recipe)
        assert again.reopened
        assert again.path == made.path
    (tmp_path / "lines" / "more.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"more\.parquet"):
        text.tokenize(tmp_path / "lines", tokenizer(), tmp_path / "made", recipe)


def test_lines_may_be_compressed(tmp_path: Path) -> None:
    recipe, lines = text.Texts(max_length=4), ["knock knock", "who is there", "x" * 5000]
    first = text.tokenize(lines, Called(), tmp_path / "made", recipe)
    for end, compression in (("gz", "gzip"), ("zst", "zstd")):
        with pa.output_stream(tmp_path / f"a.jsonl.{end}", compression=compression) as file:
            file.write("\n\n".join(json.dumps({"text": one}) for one in lines).encode())
        assert text.tokenize(tmp_path / f"a.jsonl.{end}", Called(), tmp_path / "made", recipe).path == first.path
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    for name, found, says in (
        ("cut.jsonl.gz", whole[:-9], "cut.jsonl.gz: cannot be read"),
        ("other.jsonl.gz", b"no gzip", "other.jsonl.gz"),
        ("bytes.jsonl", b'"a"\n"\xff"\n', "line 2: expected JSON"),
    ):
        (tmp_path / name).write_bytes(found)
        with pytest.raises(DataError, match=says):
            text.tokenize(tmp_path / name, Called(), tmp_path / "made", recipe)
    with pytest.raises(DataError, match="expected a dict, found 'knock knock' in row 0"):
        text.tokenize(lines, Called(), tmp_path / "made", text.Prompts(max_length=4))


@pytest.mark.parametrize("recipe", [text.Tokens(eos_id=EOS), text.Prompts(max_length=40, pad_id=PAD)], ids=type)
def test_parts_of_a_store_share_no_text(tmp_path: Path, recipe: Any) -> None:
    store = text.tokenize(DATA, tokenizer(), tmp_path, recipe).to_store()
    assert store.episodes.num_rows == len(DATA)
    assert set(store.episodes["return"].to_pylist()) == {0.0}
    parts = store.split(train=0.7, valid=0.3).values()
    numbers = [number for part in parts for number in part.episodes["episode"].to_pylist()]
    assert sorted(numbers) == list(range(len(DATA)))


def test_what_is_no_text_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (iter(["a"]), ConfigError, "read twice"),
        ({"text": ["a"]}, ConfigError, "dict"),
        (3, ConfigError, "int"),
        ("nowhere.jsonl", ConfigError, "nothing at 'nowhere.jsonl'"),
        (["a", 3], DataError, "found 3 in row 1"),
        ([{"text": "a"}, {"text": None}], DataError, "column 'text', found None in row 1"),
        ([{"tex": "a"}], DataError, "column 'text'"),
        (pa.table({"text": ["a", None]}), DataError, "found none in row 1"),
        (pa.table({"text": [1]}), DataError, "found int64"),
        (pa.table({"other": ["a"]}), DataError, "'other'"),
        (["\ud800"], DataError, "rows 0..0"),
        ([], DataError, "found none"),
    ]
    for source, error, says in wrong:
        with pytest.raises(error, match=says):
            text.tokenize(source, tokenizer(), tmp_path, text.Texts(max_length=4, pad_id=PAD))
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_options_and_tokenizers_that_are_none(tmp_path: Path) -> None:
    recipe = text.Texts(max_length=4, pad_id=1)
    wrong: list[tuple[Any, str]] = [
        (lambda: text.tokenize(["a"], tokenizer(), tmp_path, text.Texts(max_length=4)), "pad_id"),
        (lambda: text.Texts(max_length=0), "max_length"),
        (lambda: text.Texts(max_length=1, padding_side="middle"), "padding_side"),  # type: ignore[arg-type]
        (lambda: text.Tokens(eos_id=-1), "eos_id: expected"),
        (lambda: text.tokenize(["a"], 3, tmp_path, recipe), "tokenizer"),
        (lambda: text.tokenize(["a"], "tokenizer.json", tmp_path, recipe), "tokenizer: expected a tokenizers.Token"),
        (lambda: text.tokenize(["a"], tokenizer(), tmp_path, recipe, split="train"), "split"),
        (lambda: text.tokenize(["a"], tokenizer(), tmp_path, recipe, num_workers=-1), "num_workers"),
        (lambda: text.tokenize(["a"], tokenizer(), tmp_path, "texts"), "recipe"),  # type: ignore[arg-type]
    ]
    for recipe_of, taken in (
        (text.Texts, ("input_ids", "text")),
        (text.Prompts, ("labels", "label")),
        (text.Pairs, ("chosen_data.input_ids", "chosen")),
    ):
        other = "keep: expected names of columns other than"
        wrong += [(partial(recipe_of, max_length=1, keep={name: "int8"}), other) for name in taken]
        wrong += [(partial(recipe_of, max_length=1, pad_id=one), "pad_id: ex") for one in (-1, 1 << 31, "x", 1.5, True)]
    for call, says in wrong:
        with pytest.raises(ConfigError, match=says):
            call()
    for wrong_ids in ([[1] * 9], [[1 << 40]], [[None]], [None], [[1.5]], [[-1]], [[1], [1]], "ids"):
        with pytest.raises(DataError, match="tokenizer"):
            text.tokenize(["a"], lambda _, **__: {"input_ids": wrong_ids}, tmp_path, recipe)  # noqa: B023
    kept = text.Texts(max_length=1, pad_id=1, keep={"score": "int8"})
    with pytest.raises(DataError, match=r"rows 0..1: Float value 1.5.* was truncated"):
        text.tokenize([{"text": "a", "score": score} for score in (1, 1.5)], tokenizer(), tmp_path, kept)
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n{"text\n')
    with pytest.raises(DataError, match="line 2"):
        text.tokenize(tmp_path / "lines.jsonl", tokenizer(), tmp_path, recipe)


def test_the_same_is_made_once_and_another_beside_it(tmp_path: Path) -> None:
    recipe, data = text.Texts(max_length=4), [one["text"] for one in DATA]
    begun = len(text_cases.SEEN)
    first = text.tokenize(data, Called(), tmp_path, recipe)
    assert not first.reopened
    assert sum(text_cases.SEEN[begun:]) == len(data)
    begun = len(text_cases.SEEN)
    assert text.tokenize(list(data), Called(), tmp_path, text.Texts(max_length=4)) == text.Tokenized(
        first.path, len(data), len(data), reopened=True
    )
    assert text_cases.SEEN[begun:] == ()
    others = [
        ([*data[:-1], "other"], Called(), recipe, {}),
        (data[:-1], Called(), recipe, {}),
        (["".join(data[:2]), "", *data[2:]], Called(), recipe, {}),  # the same letters, other texts
        (data, Called(1), recipe, {}),
        (data, Called(), text.Texts(max_length=5), {}),
        (data, Called(), text.Texts(max_length=4, pad_id=7), {}),
        (data, Called(), recipe, {"version": "2"}),
    ]
    made = [text.tokenize(one, other, tmp_path, new, **more) for one, other, new, more in others]
    assert len({first.path, *(one.path for one in made)}) == 1 + len(others)
    assert not any(one.reopened for one in made)
    assert text.tokenize(data, Called(), tmp_path, recipe).reopened  # the old one is there still


OFFSET = {"a": [1, (2.5, None)]}
LOCK = threading.Lock()
COUNTED = 0


@functools.cache
def helped(number: int) -> int:
    return number + len(OFFSET)


def loud(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return called


def closing(number: Any, kind: str = "plain") -> Any:
    """A function that looks the same, whatever it closes over."""

    def plain(texts: Any, more: Any = number, **_: Any) -> Any:
        global COUNTED
        COUNTED += 1  # its own doing changes nothing
        return {"input_ids": [[helped(len(str(number)))] for _ in texts]}

    def locked(texts: Any, **_: Any) -> Any:
        with LOCK:
            return {"input_ids": [[1] for _ in texts]}

    class Bound:
        def words(self, texts: Any, **_: Any) -> Any:
            return plain(texts)

    def by_class(texts: Any, **_: Any) -> Any:
        return Words(number)(texts)

    made = {"plain": plain, "wrapped": loud(plain), "method": Bound().words, "locked": locked, "class": by_class}
    return made.get(kind) or Words(number)


class Base:
    BEGIN = (1,)

    def words(self, texts: Any) -> Any:
        return [[*self.BEGIN, helped(len(text)), text_cases.sentence(1, 2)] for text in texts]


class Words(Base):
    """One whose own text is the same, whatever its functions read."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __call__(self, texts: Any, **_: Any) -> Any:
        return {"input_ids": self.words(texts)}


@pytest.mark.parametrize("kind", ["plain", "wrapped", "method", "partial", "object", "class"])
def test_functions_are_known_by_what_they_close_over_and_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(number: Any) -> str:
        made = functools.partial(closing(number), truncation=False) if kind == "partial" else closing(number, kind)
        return identity_of(made, "")

    numbers = [0, 1, [2], [3], {4}]
    before = [said(one) for one in numbers]
    assert len(set(before)) == len(numbers)
    closing(0)(["a"])
    for module_of, changed in (("OFFSET", {"a": [1, (2.5, 1)]}), ("helped", abs)):
        monkeypatch.setattr(sys.modules[__name__], module_of, changed)
        assert said(0) not in before
        monkeypatch.undo()
    if kind in ("object", "class"):
        for there, name, other in (
            (Base, "BEGIN", ()),
            (Base, "words", Words.__call__),
            (text_cases, "sentence", abs),
            (text_cases, "WORDS", []),
        ):
            monkeypatch.setattr(there, name, other)
            assert said(0) not in before
            monkeypatch.undo()
    assert [said(one) for one in numbers] == before
    one, other = (lambda *_, **__: [1]), (lambda *_, **__: [2])  # on one line
    assert identity_of(one, "") != identity_of(other, "")


def test_what_is_made_of_a_fast_tokenizer_is_known_by_its_class_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fast:
        split_special_tokens = False

        def __init__(self) -> None:
            self.backend_tokenizer = tokenizer()

        def __call__(self, texts: Any, **_: Any) -> Any:
            return {"input_ids": [self.backend_tokenizer.encode(one.lower()).ids for one in texts]}

    before = identity_of(Fast(), "")
    for name, changed in (("split_special_tokens", True), ("__call__", lambda self, texts, **_: {"input_ids": []})):
        assert identity_of(Fast(), "") == before
        monkeypatch.setattr(Fast, name, changed)
        assert identity_of(Fast(), "") != before
        monkeypatch.undo()


def test_a_recipe_of_ones_own_is_known_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(text.Texts):
        def rows(self, texts: Any, encode: Any) -> Any:
            return super().rows(texts, encode)

    recipe = Own(max_length=4, pad_id=PAD)
    made = [text.tokenize(["a"], tokenizer(), tmp_path, recipe).reopened for _ in range(2)]
    monkeypatch.setattr(Own, "rows", lambda self, texts, encode: text.Texts.rows(self, texts, encode))
    assert [*made, text.tokenize(["a"], tokenizer(), tmp_path, recipe).reopened] == [False, True, False]


def test_functions_that_nobody_knows_again_need_a_version(tmp_path: Path) -> None:
    recipe = text.Texts(max_length=4, pad_id=PAD)
    for made, what in ((closing(0, "locked"), "'LOCK' of .*locked"), (closing(threading.Lock()), "of .*plain")):
        with pytest.raises(ConfigError, match=f"tokenizer: expected .*{what}, a .*lock.*; pass version='1'"):
            text.tokenize(["a"], made, tmp_path, recipe)
        said = [text.tokenize(["a"], made, tmp_path, recipe, version=one).reopened for one in ("1", "1", "2")]
        assert said == [False, True, False]


def test_settings_of_a_tokenizer(tmp_path: Path) -> None:
    recipe, used = text.Texts(max_length=6, pad_id=PAD), tokenizer()
    first = text.tokenize(DATA, used, tmp_path, recipe)
    used.enable_truncation(2)
    assert text.tokenize(DATA, used, tmp_path, recipe).path == first.path
    assert used.truncation["max_length"] == 2
    used.add_tokens(["nowhere"])
    assert text.tokenize(DATA, used, tmp_path, recipe).path != first.path
    used, made = tokenizer(), []
    for used.encode_special_tokens in (False, True):
        made.append(stored(text.tokenize(["is </s>"], used, tmp_path, recipe))["input_ids"][0].tolist())
        assert made[-1][: len(used.encode("is </s>").ids)] == used.encode("is </s>").ids
    assert EOS in made[0]
    assert EOS not in made[1]
    recipe, made = text.Texts(max_length=3), []
    for pad_id, side in ((PAD, "right"), (EOS, "right"), (EOS, "left")):
        used = tokenizer()
        used.enable_padding(pad_id=pad_id)
        used.enable_truncation(9, direction=side)
        made.append(text.tokenize(["a b c d e f g", "a"], used, tmp_path, recipe))
    assert not any(one.reopened for one in made)
    rows = [stored(one)["input_ids"].tolist() for one in made]
    assert [row[1][-1] for row in rows] == [PAD, EOS, EOS]
    assert rows[0][0] == rows[1][0] != rows[2][0]


def test_files_are_read_again_where_they_changed(tmp_path: Path) -> None:
    file, recipe = tmp_path / "lines.jsonl", text.Texts(max_length=4)

    def lines(word: str, age: float) -> None:
        file.write_text("".join(json.dumps({"text": f"{word} {n}"}) + "\n" for n in range(3)))
        now = os.stat(file).st_mtime
        os.utime(file, (now - age, now - age))

    lines("one", 100)
    first = text.tokenize(file, Called(), tmp_path / "made", recipe)
    lines("two", 50)  # as many bytes, another time
    second = text.tokenize(file, Called(), tmp_path / "made", recipe)
    assert not second.reopened
    lines("one", 20)  # what was there at first
    assert text.tokenize(file, Called(), tmp_path / "made", recipe) == text.Tokenized(first.path, 3, 3, reopened=True)
    lines("six", 0)  # just now: its time says nothing yet
    text.tokenize(file, Called(), tmp_path / "made", recipe)
    when = os.stat(file).st_mtime_ns
    file.write_text(file.read_text().replace("six", "ten"))
    os.utime(file, ns=(when, when))
    assert not text.tokenize(file, Called(), tmp_path / "made", recipe).reopened


def test_datasets_on_disk_are_known_by_their_files(tmp_path: Path) -> None:
    recipe, kept = text.Texts(max_length=4), []
    for name in ("one", "two"):
        datasets.Dataset.from_dict({"text": [name] * 3}).save_to_disk(str(tmp_path / name))
        for file in (tmp_path / name).glob("*.arrow"):
            os.utime(file, (1e9, 1e9))
        kept.append(datasets.load_from_disk(str(tmp_path / name)))
    made = [text.tokenize(one, Called(), tmp_path / "made", recipe) for one in kept]
    notes = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").glob(".texts-*")}
    assert len(notes) == 2  # each has its own, which is not written again
    assert [text.tokenize(one, Called(), tmp_path / "made", recipe).path for one in kept] == [one.path for one in made]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").glob(".texts-*")} == notes
    # What a note says is believed only as it was written.
    for file in (tmp_path / "made").glob(".texts-*"):
        file.write_text(file.read_text().replace('"texts": 3', '"texts": 7'))
    assert [text.tokenize(one, Called(), tmp_path / "made", recipe).texts for one in kept] == [3, 3]
    assert made[0].path != made[1].path


def test_texts_that_change_while_they_are_read_make_no_store(tmp_path: Path) -> None:
    changing = MagicMock(spec=["__iter__"])
    changing.__iter__.side_effect = (iter([f"read {number}"]) for number in count())
    with pytest.raises(DataError, match="expected the same texts at the second reading"):
        text.tokenize(changing, Called(), tmp_path, text.Texts(max_length=4))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_an_error_half_way_leaves_no_store_and_the_next_call_makes_it(tmp_path: Path) -> None:
    class Failing(Called):
        def __call__(self, texts: Any, **options: Any) -> Any:
            if "stop" in texts and FAILS:
                raise RuntimeError("half way")
            return super().__call__(texts, **options)

    FAILS.append(True)
    data = [*("x" * (n % 50) for n in range(4000)), "stop"]
    with pytest.raises(RuntimeError, match="half way"):
        text.tokenize(data, Failing(), tmp_path / "made", text.Tokens())
    assert not [path for path in (tmp_path / "made").iterdir() if path.is_dir()]
    FAILS.clear()
    made = text.tokenize(data, Failing(), tmp_path / "made", text.Tokens())
    assert not made.reopened
    found = BatchSource(made.to_store(), made.rows, 1, "last")[0]["input_ids"][0].tolist()
    assert found == [len(one) for one in data if one]


FAILS: list[bool] = []


def test_several_at_once_make_one_store(tmp_path: Path) -> None:
    begun, texts, recipe = len(text_cases.SEEN), ["some words"] * 3000, text.Texts(max_length=4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: text.tokenize(texts, Called(), tmp_path, recipe), range(4)))
    assert len({one.path for one in found}) == 1
    assert sorted(one.reopened for one in found) == [False, True, True, True]
    assert sum(text_cases.SEEN[begun:]) == 3000


@pytest.mark.slow
def test_processes_make_what_a_thread_makes(tmp_path: Path) -> None:
    recipe = text.Prompts(max_length=12, pad_id=PAD)
    one = text.tokenize(DATA * 40, tokenizer(), tmp_path / "one", recipe)
    many = text.tokenize(DATA * 40, tokenizer(), tmp_path / "many", recipe, num_workers=2)
    assert many.rows == one.rows
    for name, values in stored(one).items():
        np.testing.assert_array_equal(stored(many)[name], values)
    with pytest.raises(ConfigError, match="pickled"):
        text.tokenize(DATA, lambda texts, **_: {}, tmp_path, recipe, num_workers=1)
