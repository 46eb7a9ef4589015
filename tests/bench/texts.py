"""Texts tokenised into a store, beside the tokenizer alone; opening again what was made before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from mouse_core import text
from tests.bench.results import Settings, Table, compare, contenders
from tests.core.text_cases import sentence, tokenizer

_WORDS, _LENGTH = 100, 128
_YESTERDAY = 24 * 3600


def tables(settings: Settings) -> list[Table]:
    """Texts of 100 words in a file of JSON lines, as tokens and as rows of 128; and the same asked for again."""
    number = 10_000 if settings.quick else 100_000
    folder = Path(settings.folder) / "texts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    texts = [sentence(n, _WORDS) for n in range(number)]
    file, made = folder / "texts.jsonl", tokenizer()
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    before = file.stat().st_mtime - _YESTERDAY
    os.utime(file, (before, before))
    by_itself, recipes = tokenizer(), {"Tokens()": text.Tokens(), "Texts": text.Texts(max_length=_LENGTH, pad_id=1)}

    def alone(_: int) -> Any:
        for begin in range(0, number, 512):
            for one in by_itself.encode_batch_fast(texts[begin : begin + 512]):
                _ = one.ids

    def once(recipe: Any) -> Callable[[int], Any]:
        runs = count()

        def run(_: int) -> Any:
            target = folder / f"made-{next(runs)}"
            text.tokenize(file, made, target, recipe)
            shutil.rmtree(target)

        return run

    def again(source: Any, recipe: Any) -> Callable[[int], Any]:
        text.tokenize(source, made, folder / "kept", recipe)
        return lambda _: text.tokenize(source, made, folder / "kept", recipe).to_store()

    making = {"the tokenizer alone, of texts in memory": alone}
    making |= {f"mouse tokenize(), {name}": once(recipe) for name, recipe in recipes.items()}
    opening = {
        "reading the file": lambda _: file.read_bytes(),
        "mouse tokenize() again, a file": again(file, recipes["Tokens()"]),
        "mouse tokenize() again, a list": again(texts, recipes["Tokens()"]),
    }
    what, turns = f"Texts: {number:,} texts of {_WORDS} words", {"rounds": min(settings.rounds, 5), "budget": 8}
    return [
        compare(settings, "texts-making", f"{what} tokenised", contenders(making, first="floor"), **turns),
        compare(settings, "texts-opening", f"{what} opened again", contenders(opening, first="floor"), **turns),
    ]
