"""The subcommand ``tokenize``: texts into a store of tokens."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from mouse_core.cli import _data as data
from mouse_core.errors import ConfigError

_OF_CHATS = ("chats", "chat-tokens", "preferences")
_KINDS = ("texts", "prompts", "pairs", "tokens", *_OF_CHATS)


def declare_tokenize(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse tokenize``."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="JSON lines (.jsonl) or a text a line (.txt), also with .gz or .zst; Parquet, Arrow; or a folder of such",
    )
    parser.add_argument("folder", metavar="FOLDER", help="where stores of tokens are kept, each under a digest")
    parser.add_argument(
        "--tokenizer", metavar="FILE", required=True, help="the JSON file of a tokenizer, or a folder with one"
    )
    parser.add_argument("--as", dest="kind", choices=_KINDS, default="texts", help="what becomes of the texts (texts)")
    parser.add_argument(
        "--max-length", metavar="L", type=data.positive, help="tokens of a row; all but tokens and chat-tokens need it"
    )
    parser.add_argument(
        "--chat-template", metavar="FOLDER", help="where the template of chats lies (with the tokenizer)"
    )
    parser.add_argument("--now", metavar="DATE", help="what a template of chats takes for today, as 2026-11-23")
    parser.add_argument("--pad-id", metavar="ID", type=int, help="what rows are filled up with")
    parser.add_argument("--eos-id", metavar="ID", type=int, help="what ends a text, of prompts and tokens")
    parser.add_argument(
        "--columns", metavar="A=B,...", type=data.names, default=[], help="other names of columns, as prompt=question"
    )
    parser.add_argument("--split", metavar="NAME", help="only this split")
    parser.add_argument("--num-workers", metavar="N", type=int, default=0, help="processes that tokenise (0: this one)")


def run_tokenize(chosen: argparse.Namespace) -> int:
    """Tokenise texts into a store, once for the same texts, tokenizer and options.

    examples:
      mouse tokenize prompts.jsonl tokens --tokenizer tokenizer.json --as prompts --max-length 550
      mouse tokenize pairs.parquet tokens --tokenizer tokenizer.json --as pairs --max-length 550 --columns prompt=q
      mouse tokenize books.txt.gz tokens --tokenizer tokenizer.json --as tokens --eos-id 0
      mouse tokenize chats.jsonl tokens --tokenizer model-folder --as chat-tokens --columns tools=tools

    After an interruption the same command goes on. When all is there it says so, and tokenises nothing.

    status: 0 done, 2 texts, a tokenizer or options that cannot be used
    """
    from mouse_core.text import tokenize

    done = tokenize(
        chosen.source,
        chosen.tokenizer,
        chosen.folder,
        _recipe(chosen),
        split=chosen.split,
        num_workers=chosen.num_workers,
        progress=data.wants_bar(),
    )
    found = ", which were there" if done.reopened else ""
    left_out = f"; {done.left_out:,} texts left out" if done.left_out else ""
    print(f"{done.path}: {done.rows:,} rows of {done.texts:,} texts{found}{left_out}")  # noqa: T201
    return 0


def _recipe(chosen: argparse.Namespace) -> Any:
    kind = _kind(chosen.kind)
    if chosen.max_length is None and not chosen.kind.endswith("tokens"):
        raise ConfigError(f"--max-length: expected the tokens of a row for --as {chosen.kind}, found none")
    takes = {one.name for one in fields(kind)}
    asked = {name: getattr(chosen, name) for name in ("max_length", "pad_id", "eos_id", "chat_template", "now")}
    options = {name: value for name, value in asked.items() if value is not None}
    known = takes | {"chat_template", "now"} if "template" in takes else takes
    for name in options.keys() - known:
        raise ConfigError(f"--{name.replace('_', '-')}: expected none for --as {chosen.kind}, found {options[name]}")
    if "template" in takes:
        options["template"] = _template(options.pop("chat_template", chosen.tokenizer), options.pop("now", None))
    columns = takes & {"text", "prompt", "label", "chosen", "rejected", "messages", "tools"}
    for pair in chosen.columns:
        name, _, column = pair.partition("=")
        if name not in columns or not column:
            raise ConfigError(f"--columns: expected NAME=COLUMN with a name among {sorted(columns)}, found {pair!r}")
        options[name] = column
    return kind(**options)


def _kind(name: str) -> Any:
    from mouse_core import text

    if name in _OF_CHATS:
        from mouse_core.text import chat

        return {"chats": chat.Chats, "chat-tokens": chat.ChatTokens, "preferences": chat.Preferences}[name]
    return {"texts": text.Texts, "prompts": text.Prompts, "pairs": text.Pairs, "tokens": text.Tokens}[name]


def _template(folder: str, now: str | None) -> Any:
    from mouse_core.text.chat import ChatTemplate

    template = ChatTemplate.of(folder)
    if now is None:
        return template
    try:
        return replace(template, now=datetime.fromisoformat(now))
    except ValueError as error:
        raise ConfigError(f"--now: expected a date, as 2026-11-23, found {now!r}") from error
