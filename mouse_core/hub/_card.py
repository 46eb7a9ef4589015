"""The dataset card (README.md) of a dataset on the Hub. A push updates the YAML front matter of the card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING, Any

from mouse_core.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features
    from datasets.splits import SplitInfo

_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)(?:\r?\n|(?<=\n))---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
CONFIG = "default"
"""Name of the configuration whose rows are directly in the folder ``data/``."""


@dataclass(frozen=True)
class Card:
    """A parsed README: the front matter, and the text below the front matter, which a push never changes.

    Args:
        metadata: The front matter.
        body: The text.
        newline: The line ending of the file.
        config: Name of the configuration to push; other configurations stay unchanged.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    body: str = ""
    newline: str = "\n"
    config: str = CONFIG


def parse_card(text: str, *, repo_id: str, config: str = CONFIG) -> Card:
    """Parse a README, for a push of a configuration.

    Raises:
        ConfigError: The front matter is not a YAML mapping, so it cannot be extended.
    """
    import yaml  # type: ignore[import-untyped]

    newline = "\r\n" if "\r\n" in text else "\n"
    match = _FRONT_MATTER.match(text)
    if match is None:
        return Card({}, text, newline, config)
    try:
        metadata = yaml.safe_load(match.group(1))
    except yaml.YAMLError as error:
        raise ConfigError(f"README.md of {repo_id}: expected front matter in YAML, found an error: {error}") from error
    metadata = {} if metadata is None else metadata
    configs = metadata.get("configs", []) if isinstance(metadata, dict) else None
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ConfigError(
            f"README.md of {repo_id}: expected front matter that is a mapping, and whose entry 'configs' is a list of "
            "mappings, found other content"
        )
    return Card(metadata, text[match.end() :], newline, config)


def check_extendable(card: Card, *, repo_id: str) -> None:
    """Raise ConfigError if another configuration is marked as default. ``datasets`` accepts only one default."""
    for config in _configs(card, mine=False) if card.config == CONFIG else ():
        if config.get("default"):
            raise ConfigError(
                f"README.md of {repo_id}: expected no default configuration except {CONFIG!r},"
                f" found {config.get('config_name')!r} marked as default"
            )


def stale_files(card: Card, files: Iterable[str]) -> list[str]:
    """Return the old Parquet files that a push removes; files that other configurations read are not included.

    A push replaces the files directly in the configuration's folder, and the files that the card lists for the
    configuration before the push.
    """
    replaced, others = (
        [one for config in _configs(card, mine=mine) for one in _patterns(config)] for mine in (True, False)
    )
    return sorted(
        path
        for path in files
        if path.endswith(".parquet")
        and (path.rpartition("/")[0] == config_folder(card.config) or _matches(path, replaced))
        and not _matches(path, others)
    )


def config_folder(config: str) -> str:
    """Return the folder of a configuration's shards."""
    return "data" if config == CONFIG else f"data/{config}"


def render_card(
    card: Card,
    *,
    repo_id: str,
    features: Features,
    splits: Sequence[SplitInfo],
    download_bytes: int,
    alignment: str | None,
) -> str:
    """Return the README after a push: the front matter describes the pushed dataset; all other text is unchanged."""
    import yaml

    metadata = dict(card.metadata)
    metadata["dataset_info"] = _dataset_info(card, features, splits, download_bytes)
    metadata["configs"] = _config_list(card, splits)
    body = card.body
    if not body.strip():
        metadata.setdefault("task_categories", ["reinforcement-learning"])
        body = _first_body(repo_id, card.config, splits, alignment).replace("\n", card.newline)
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=inf, line_break=card.newline)
    return f"---{card.newline}{front}---{card.newline}{body}"


def _dataset_info(card: Card, features: Features, splits: Sequence[SplitInfo], download_bytes: int) -> Any:
    from datasets import DatasetInfo
    from datasets.info import DatasetInfosDict
    from datasets.splits import SplitDict

    info = DatasetInfo(
        features=features,
        splits=SplitDict({split.name: split for split in splits}),
        download_size=download_bytes,
        dataset_size=sum(split.num_bytes for split in splits),
    )
    rendered: dict[str, Any] = {}
    DatasetInfosDict({CONFIG: info}).to_dataset_card_data(rendered)
    mine = rendered["dataset_info"]
    stored = card.metadata.get("dataset_info") or []
    stored = [stored] if isinstance(stored, dict) else stored
    others = [{"config_name": CONFIG, **entry} for entry in stored if entry.get("config_name", CONFIG) != card.config]
    return [{"config_name": card.config, **mine}, *others] if others or card.config != CONFIG else mine


def _config_list(card: Card, splits: Sequence[SplitInfo]) -> list[dict[str, Any]]:
    mine: dict[str, Any] = {"config_name": card.config}
    for config in _configs(card, mine=True):
        mine.update({key: value for key, value in config.items() if key != "data_dir"})
    folder = config_folder(card.config)
    mine["data_files"] = [{"split": split.name, "path": f"{folder}/{split.name}-*.parquet"} for split in splits]
    return [mine, *_configs(card, mine=False)]


def _configs(card: Card, *, mine: bool) -> list[dict[str, Any]]:
    """Return the card's entries about the pushed configuration, or the entries about all other configurations."""
    configs = card.metadata.get("configs") or []
    return [dict(config) for config in configs if (config.get("config_name", CONFIG) == card.config) == mine]


def _patterns(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the file name patterns of a configuration."""
    folder = str(config.get("data_dir") or "").strip("/")
    prefix = f"{folder}/" if folder else ""
    data_files = config.get("data_files")
    if data_files is None and folder:
        yield f"{folder}/**"
    for entry in [data_files] if isinstance(data_files, str | dict) else data_files or []:
        paths = entry.get("path") if isinstance(entry, dict) else entry
        for path in [paths] if isinstance(paths, str) else paths or []:
            yield prefix + str(path)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a pattern; ``*`` matches any text, including slashes."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _first_body(repo_id: str, config: str, splits: Sequence[SplitInfo], alignment: str | None) -> str:
    name = repo_id.split("/")[-1]
    chosen = f'"{repo_id}"' if config == CONFIG else f'"{repo_id}", "{config}"'
    sizes = "\n".join(f"| {split.name} | {split.num_examples:,} |" for split in splits)
    alignment, known = alignment or "arrived", "in the rows" if alignment else "assumed: the rows do not say it"
    meaning = {
        "arrived": "led to that row's observation; the action that leaves it stands in the next row",
        "outgoing": "leave that row's observation",
    }[alignment]
    return f"""
# {name}

Recorded reinforcement learning experience, one row a step.

| split | steps |
| --- | --- |
{sizes}

A row's action, reward and done {meaning} (alignment "{alignment}", {known}).

```python
from datasets import load_dataset
from mouse_core import DatasetStore

store = DatasetStore(alignment="{alignment}")
store.from_dataset(load_dataset({chosen}, split="{splits[0].name}"))
```
"""
