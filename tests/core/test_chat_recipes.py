"""Chats kept on disk: their rows are those of encode_chat and encode_preference, whatever the chats lie in."""

import json
import re
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mouse_core import BatchSource, text
from mouse_core.errors import ConfigError, DataError
from mouse_core.text import chat
from tests.core.chat_cases import BRACKETS, CHATML, TALK, TOOL_TALK, TOOLS, WEATHER, said, template, tokenizer

PAD = 0
WITH_TOOLS = {"messages": list(TOOL_TALK[1:]), "tools": [WEATHER], "score": 0.5}
DATA = [{"messages": list(TALK), "score": 2.0}, WITH_TOOLS, {**WITH_TOOLS, "tools": None, "score": -1}]
PAIRS = [
    {"prompt": list(TALK[:1]), "chosen": list(TALK[1:2]), "rejected": list(TALK[3:])},
    {"prompt": list(TALK[:3]), "chosen": list(TALK[3:]), "rejected": list(TALK[1:2])},
]
BY_TOKEN = {"sequence_length": 200, "batch_size": 3, "sampling": "sequential", "boundary": "episode"}


def stored(found: text.Tokenized) -> dict[str, np.ndarray]:
    """All rows, as batches deliver them."""
    store = found.to_store()
    return dict(BatchSource(store, batch_size=len(store), windows={}, sampling="last")[0])


def by_hand(source: str, eos: str, **options: Any) -> list[chat.EncodedChat]:
    """Each chat by itself."""
    return [
        chat.encode_chat(template(source, eos), one["messages"], tokenizer(), tools=one.get("tools"), **options)
        for one in DATA
    ]


@pytest.mark.parametrize(("source", "eos"), [(TOOLS, "<|im_end|>"), (BRACKETS, "</s>")])
@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_are_the_tokens_of_each_chat_cut_and_filled_up(source: str, eos: str, side: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"template": template(source, eos), "tools": "tools", "pad_id": PAD, "padding_side": side}
    recipe = chat.Chats(**options, max_length=70, truncation_side=side, keep={"score": "float32"})
    made = text.tokenize(DATA, tokenizer(), tmp_path, recipe)
    rows = stored(made)
    chats = by_hand(source, eos, max_length=70, truncation_side=side)
    scores = [one["score"] for one, cut in zip(DATA, chats, strict=True) if cut.assistant_masks.any()]
    chats = [one for one in chats if one.assistant_masks.any()]
    assert 70 in map(len, (one.input_ids for one in chats))  # some were cut
    assert made.left_out == 3 - len(chats) == (side == "right")  # where nothing of the answer was left
    fills = [70 - len(one.input_ids) for one in chats]
    for name, values, fill in (
        ("input_ids", [one.input_ids for one in chats], PAD),
        ("assistant_masks", [one.assistant_masks for one in chats], 0),
        ("attention_mask", [np.ones(len(one.input_ids)) for one in chats], 0),
    ):
        width = [(0, more) if side == "right" else (more, 0) for more in fills]
        wanted = [np.pad(one, each, constant_values=fill) for one, each in zip(values, width, strict=True)]
        np.testing.assert_array_equal(rows[name], wanted)
        assert rows[name].dtype == np.int64
    assert rows["score"].tolist() == scores


def test_every_token_is_a_row_and_every_chat_an_episode(tmp_path: Path) -> None:
    recipe = chat.ChatTokens(template=template(TOOLS), tools="tools", max_length=120, truncation_side="left")
    store = text.tokenize(DATA, tokenizer(), tmp_path, recipe).to_store()
    chats = by_hand(TOOLS, "<|im_end|>", max_length=120, truncation_side="left")
    ids, masks = ([getattr(one, name) for one in chats] for name in ("input_ids", "assistant_masks"))
    rows = dict(BatchSource(store, batch_size=len(store), windows={}, sampling="last")[0])
    assert rows["input_ids"].tolist() == np.concatenate(ids).tolist()
    assert rows["assistant_masks"].tolist() == np.concatenate(masks).tolist()
    assert rows["done"].tolist() == [int(at == len(one) - 1) for one in ids for at in range(len(one))]

    # Padded, packed and as windows, the tokens of a batch are those of some chats, each once an epoch.
    packed = BatchSource(store, **BY_TOKEN, packed=True)[0]
    ends = packed["cu_seqlens"].tolist()
    names = ("input_ids", "assistant_masks")
    found = [[packed[name][a:b].tolist() for name in names] for a, b in pairwise(ends)]
    assert sorted(found) == sorted([one.tolist(), mask.tolist()] for one, mask in zip(ids, masks, strict=True))
    padded = BatchSource(store, **BY_TOKEN, pad=PAD)[0]
    assert padded["input_ids"].shape == padded["mask"].shape == (3, 200)
    assert padded["input_ids"][padded["mask"]].tolist() == packed["input_ids"].tolist()
    windows = BatchSource(store, sequence_length=16, batch_size=4)[0]
    assert windows["assistant_masks"].shape == (4, 16)
    whole = "".join(chr(one) for one in np.concatenate(ids))
    assert all("".join(map(chr, row)) in whole for row in windows["input_ids"].tolist())


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_those_of_encode_preference(side: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"template": template(CHATML), "max_length": 40, "pad_id": PAD, "truncation_side": side}
    recipe = chat.Preferences(**options, keep={"margin": "float32"})
    data = [{**one, "margin": at} for at, one in enumerate(PAIRS)]
    rows = stored(text.tokenize(data, tokenizer(), tmp_path, recipe))
    pairs = [chat.encode_preference(template(CHATML), **one, tokenizer=tokenizer()) for one in PAIRS]
    for side_of, fields in text.as_pairs({name: rows[name] for name in rows if name != "margin"}).items():
        for row, pair in enumerate(pairs):
            prompt, answer = (pair[name].tolist() for name in ("prompt_ids", f"{side_of.removesuffix('_data')}_ids"))
            kept = slice(40) if side == "right" else slice(-40, None)
            ids, mask = (prompt + answer)[kept], ([0] * len(prompt) + [1] * len(answer))[kept]
            more = [0] * (40 - len(ids))
            assert fields["input_ids"][row].tolist() == ids + [PAD] * len(more)
            assert fields["attention_mask"][row].tolist() == [1] * len(ids) + more
            assert fields["completion_mask"][row].tolist() == mask + more
    assert rows["margin"].tolist() == [0, 1]

    # Without a column of prompts they are what both chats begin with.
    whole = [{name: one["prompt"] + one[name] for name in ("chosen", "rejected")} for one in PAIRS]
    again = text.tokenize(whole, tokenizer(), tmp_path, chat.Preferences(**options, prompt=None))
    assert all(np.array_equal(values, rows[name]) for name, values in stored(again).items())
    same = [{"chosen": one["chosen"], "rejected": one["chosen"]} for one in whole]
    again = text.tokenize([*same, *whole], tokenizer(), tmp_path, chat.Preferences(**options, prompt=None))
    assert (again.rows, again.left_out) == (2, 2)
    assert all(np.array_equal(values, rows[name]) for name, values in stored(again).items())
    # One that is the beginning of the other keeps its last message.
    more = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "of it"}]
    longer = {"chosen": whole[0]["chosen"], "rejected": whole[0]["chosen"] + more}
    said = {"prompt": PAIRS[0]["prompt"], "chosen": PAIRS[0]["chosen"], "rejected": PAIRS[0]["chosen"] + more}
    for turned in (lambda row: row, lambda row: {**row, "chosen": row["rejected"], "rejected": row["chosen"]}):
        options["max_length"] = 90
        found, wanted = (
            stored(text.tokenize([turned(row)], tokenizer(), tmp_path, chat.Preferences(**options, prompt=prompt)))
            for row, prompt in ((longer, None), (said, "prompt"))
        )
        assert all(np.array_equal(values, wanted[name]) for name, values in found.items())
    apart = [{name: one[name] for name in ("chosen", "rejected")} for one in PAIRS]
    with pytest.raises(ConfigError, match="keep: expected names of columns other than"):
        chat.Preferences(**options, keep={"rejected_data.completion_mask": "int8"})
    with pytest.raises(ConfigError, match="pad_id"):
        chat.Chats(**{**options, "pad_id": -1})
    with pytest.raises(DataError, match="row 0: columns 'chosen' and 'rejected': expected both chats to begin with"):
        text.tokenize(apart, tokenizer(), tmp_path, chat.Preferences(**options, prompt=None))


CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    """A pair of plain texts."""
    answers = {name: [said("assistant", text)] for name, text in (("chosen", chosen), ("rejected", rejected))}
    return {"prompt": [said("user", prompt)], **answers}


def test_answers_begin_with_the_token_that_the_prompt_ends_within(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "cat": 2, "car": 3}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<pad>"])
    words.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    recipe = chat.Preferences(template=chat.ChatTemplate(CONTENTS), max_length=3, pad_id=PAD)
    made = text.tokenize([pair("a ca", "t", "r"), pair("a ", "cat", "cat")], words, tmp_path, recipe)
    row = text.as_pairs(stored(made))
    assert made.left_out == 1
    assert [row[f"{side}_data"]["input_ids"].tolist() for side in ("chosen", "rejected")] == [[[1, 2, 0]], [[1, 3, 0]]]
    assert row["chosen_data"]["completion_mask"].tolist() == [[0, 1, 0]]
    found = chat.encode_preference(recipe.template, **pair("a ", "cat", "car"), tokenizer=words)
    # The template writes what stands before texts.
    assert [found[name].tolist() for name in ("prompt_ids", "chosen_ids", "rejected_ids")] == [[1], [2], [3]]


def test_messages_may_lie_in_columns_of_texts(tmp_path: Path) -> None:
    recipe = chat.Preferences(template=template(CHATML), max_length=60, pad_id=PAD)
    texts = [{name: json.dumps(value) for name, value in one.items()} for one in PAIRS]
    chats, found = (stored(text.tokenize(one, tokenizer(), tmp_path, recipe)) for one in (PAIRS, texts))
    assert all(np.array_equal(chats[name], values) for name, values in found.items())
    for wrong in ({"a": 1}, [], 5, True, ["yes"], "yes", "[[1]]"):
        with pytest.raises(DataError, match=r"row 1: .*expected (.* messages|a dict with a role|messages as JSON)"):
            text.tokenize([PAIRS[0], {**PAIRS[0], "chosen": wrong}], tokenizer(), tmp_path, recipe)


def test_what_a_row_has_not_is_no_text(tmp_path: Path) -> None:
    recipe = chat.Preferences(template=template(CHATML), max_length=16, pad_id=PAD)
    data = [pair("a", "b", "c") for _ in range(3)]

    def refused(source: list[dict[str, Any]], message: str, recipe: Any = recipe) -> None:
        (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, source)))
        for each in (source, tmp_path / "lines.jsonl"):
            with pytest.raises(DataError, match=re.escape(message)):
                text.tokenize(each, tokenizer(), tmp_path / "tokens", recipe)

    for name in data[0]:
        other = [{"other" if key == name else key: one for key, one in row.items()} for row in data]
        refused(other, f"expected a column {name!r}, found none in 3 rows; the first row has {list(other[0])}")
        without = f"row 2: column {name!r}: expected a list of messages, found None"
        refused([*data[:2], other[2]], without)
        refused([*data[:2], {**data[2], name: None}], without)
        nulls = pa.Table.from_pylist([*data[:2], {**data[2], name: None}])
        with pytest.raises(DataError, match=without):
            text.tokenize(nulls, tokenizer(), tmp_path, recipe)
    found = "expected a column 'tool', found none in 3 rows; the first row has ['prompt', 'chosen', 'rejected']"
    refused(data, found, replace(recipe, tools="tool"))
    chats = chat.Chats(template=template(TOOLS), max_length=150, pad_id=PAD, tools="tool")
    refused(DATA, "expected a column 'tool', found none in 3 rows", chats)
    nothing = [{**one, "tool": None} for one in data]
    assert text.tokenize(nothing, tokenizer(), tmp_path, replace(recipe, tools="tool")).rows == 3


def test_chats_and_pairs_of_which_nothing_is_learned_are_left_out_and_counted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"template": template(TOOLS), "pad_id": PAD}
    data = [DATA[0], {**DATA[0], "messages": [{"role": "user", "content": "a" * 100}, *DATA[0]["messages"]]}]
    recipe = chat.Chats(**options, max_length=40, keep={"score": "float32"})
    found = text.tokenize([*data, {**DATA[0], "score": 3}], tokenizer(), tmp_path, recipe)
    assert (found.rows, found.texts, found.left_out) == (2, 3, 1)
    rows = stored(found)
    assert rows["assistant_masks"].any(1).all()
    assert rows["score"].tolist() == [2, 3]
    again = text.tokenize([*data, {**DATA[0], "score": 3}], tokenizer(), tmp_path, recipe)
    assert again == replace(found, reopened=True)
    tokens = text.tokenize(data, tokenizer(), tmp_path, chat.ChatTokens(template=template(TOOLS), max_length=40))
    assert (tokens.rows, tokens.left_out) == (40, 1)
    for name in tmp_path.glob("*.json"):
        name.unlink()  # as where a process was killed before it had written it
    again = text.tokenize(data, tokenizer(), tmp_path, chat.ChatTokens(template=template(TOOLS), max_length=40))
    assert again == replace(tokens, reopened=True)
    with pytest.raises(DataError, match="found none in 3 rows, all of which were left out"):
        text.tokenize(DATA, tokenizer(), tmp_path, chat.Chats(**options, max_length=6))

    pairs = [pair("a", "b", "c"), pair("a", "b", "b"), pair("a" * 50, "b", "c")]
    options["template"] = chat.ChatTemplate(CONTENTS)
    for side, left in (("right", 1), ("left", 2)):
        preferences = chat.Preferences(**options, max_length=8, truncation_side=side)  # type: ignore[arg-type]
        found = text.tokenize(pairs, tokenizer(), tmp_path, preferences)
        assert (found.rows, found.left_out) == (left, 3 - left)
        assert stored(found)["chosen_data.completion_mask"].any(1).all()


def test_chats_lie_in_lists_files_tables_and_datasets_and_are_the_same(tmp_path: Path) -> None:
    recipe = chat.Chats(template=template(TOOLS), max_length=150, tools="tools", pad_id=PAD)
    data = [{name: one.get(name) for name in ("messages", "tools")} for one in DATA]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("\n".join(map(json.dumps, data)))
    typed = pa.Table.from_pylist(data)  # every message has all keys, most of them null
    pq.write_table(typed, tmp_path / "chats.parquet")
    texts = pa.table({name: [json.dumps(one[name]) for one in data] for name in ("messages", "tools")})
    sources = {"list": data, "lines": lines, "parquet": tmp_path / "chats.parquet", "typed": typed, "texts": texts}
    sources["dataset"] = datasets.Dataset(typed)
    wanted = stored(text.tokenize(data, tokenizer(), tmp_path / "tokens", recipe))
    for name, source in sources.items():
        rows = stored(text.tokenize(source, tokenizer(), tmp_path / name, recipe))
        assert all(np.array_equal(rows[field], values) for field, values in wanted.items()), name

    alone = replace(recipe, tools=None)
    lists = stored(text.tokenize([one["messages"] for one in data], tokenizer(), tmp_path / "tokens", alone))
    for name, values in stored(text.tokenize(data, tokenizer(), tmp_path / "tokens", alone)).items():
        np.testing.assert_array_equal(lists[name], values)


def test_it_is_made_once_for_the_same_template_and_options(tmp_path: Path) -> None:
    recipe = chat.Chats(template=template(TOOLS), max_length=64, pad_id=PAD)
    folder = tmp_path / "tokens"

    def again(changed: chat.Chats) -> text.Tokenized:
        return text.tokenize(DATA, tokenizer(), folder, changed)

    first = again(recipe)
    assert not first.reopened
    assert again(chat.Chats(template=chat.ChatTemplate(TOOLS, recipe.template.variables), max_length=64, pad_id=PAD))
    assert again(recipe).reopened
    turned = chat.ChatTemplate(TOOLS, dict(reversed(recipe.template.variables.items())), max_seconds=5.0)
    assert again(replace(recipe, template=turned)).reopened
    for changed in (
        replace(recipe, template=template(TOOLS, "</s>")),
        replace(recipe, template=template(TOOLS + " ")),
        replace(recipe, max_length=65),
        replace(recipe, tools="tools"),
        replace(recipe, truncation_side="left"),
    ):
        assert not again(changed).reopened


def test_what_is_no_chat_is_refused_by_its_row(tmp_path: Path) -> None:
    recipe = chat.ChatTokens(template=template(TOOLS))

    def refused(source: Any, match: str) -> None:
        with pytest.raises(DataError, match=match) as told:
            text.tokenize(source, tokenizer(), tmp_path, recipe)
        assert told.type is DataError  # and nothing that nobody else can name

    many = [[{"role": "user", "content": "hi"}]] * 513
    refused([*many, {"messages": []}], "row 513: .*expected one or more messages")
    refused([*many, {"text": "none"}], "row 513: column 'messages': expected a list of messages, found None")
    refused([{"messages": "no JSON"}], "row 0: column 'messages': expected messages as JSON, found 'no JSON'")
    refused([{"messages": [{"content": "of nobody"}]}], "row 0: chat, message 0: expected a dict with a role")
    refused([{"messages": [{"role": "user", "content": {1}}]}], "rows 0..0: .*set is not JSON")
    deep = "[" * 100_000 + "]" * 100_000
    refused([{"messages": deep}], "row 0: column 'messages': expected messages as JSON, .*: maximum recursion depth")
    (tmp_path / "deep.jsonl").write_text(deep)
    refused(tmp_path / "deep.jsonl", "line 1: expected JSON, found: maximum recursion")
    refused(["a text"], "expected a list or a dict, found 'a text' in row 0")
    refusing = chat.ChatTemplate("{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}a")
    recipe = chat.ChatTokens(template=refusing)
    chats = [DATA[0]["messages"][:1], DATA[0]["messages"]]
    refused(chats, "row 1: chat template: the template raised an error for this chat: no")


def test_recipes_refuse_what_cannot_be() -> None:
    told = "Today is {{ strftime_now('%d') }}."
    with pytest.raises(ConfigError, match=r"uses the current time .*; pass now= to ChatTemplate"):
        chat.ChatTokens(template=chat.ChatTemplate(told))
    assert chat.ChatTokens(template=chat.ChatTemplate(told, now=datetime(2026, 1, 2))).max_length is None
    with pytest.raises(ConfigError, match="template: expected a ChatTemplate, found 'chatml'"):
        chat.Preferences(template="chatml", max_length=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_length"):
        chat.Chats(template=template(TOOLS), max_length=0)
    with pytest.raises(ConfigError, match="assistant_masks"):
        chat.Chats(template=template(TOOLS), max_length=4, keep={"assistant_masks": "int8"})
