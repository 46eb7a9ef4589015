"""What a push consists of, given what the repository holds: schema, shards, card, and what becomes stale."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import About, joined, read_about, with_about
from mouse_core.errors import SchemaError
from mouse_core.hub._card import (
    ALIGNMENT_KEY,
    CONFIG,
    Card,
    SplitEntry,
    check_extendable,
    config_folder,
    kept_splits,
    matches,
    parse_card,
    render_card,
    split_pattern,
    stale_files,
)
from mouse_core.hub._repository import Remote
from mouse_core.hub._schema import unify_features
from mouse_core.hub._shards import Part, Shard, ShardOptions, write_shards
from mouse_core.hub._statistics import stale_statistics

if TYPE_CHECKING:
    from datasets import Features

Shards = Mapping[str, Sequence[Shard]]


@dataclass(frozen=True)
class Plan:
    """What the dataset must become, given what the repository holds."""

    card: Card
    features: Features
    about: About
    kept: Sequence[SplitEntry]
    kept_bytes: int
    stale: Sequence[str]


@dataclass(frozen=True)
class Job:
    """The rows to push, by split, and how; knows nothing of the network."""

    parts: Mapping[str, Sequence[Part]]
    rows: Mapping[str, int]
    alignment: str
    about: About
    options: ShardOptions
    keep_other_splits: bool
    progress: bool
    config: str = CONFIG

    def plan(self, remote: Remote, repo_id: str) -> Plan:
        """Work out the schema, what stays and what goes.

        Raises:
            SchemaError: Types or alignments do not go together.
            ConfigError: The card cannot be extended, or does not say what the splits to keep hold.
        """
        card = parse_card(remote.readme or "", repo_id=repo_id, config=self.config)
        check_extendable(card, repo_id=repo_id)
        typed = [
            (part.where, with_about(part.dataset.features, About())) for found in self.parts.values() for part in found
        ]
        kept: list[SplitEntry] = []
        about = self.about
        if self.keep_other_splits:
            kept, kept_features = kept_splits(card, remote.files, pushed=self.parts, repo_id=repo_id)
            if kept:
                where = f"the kept splits {[split.name for split in kept]} of {repo_id}"
                typed.append((where, with_about(kept_features, About())))
                stated = card.metadata.get(ALIGNMENT_KEY, self.alignment)
                if stated != self.alignment:
                    raise SchemaError(
                        f"alignment: expected {stated!r} as in the kept splits of {repo_id}, found {self.alignment!r}"
                    )
                about = joined([(where, read_about(kept_features, where=where)), ("the stores", about)])
                if self.about.alignment is None or ALIGNMENT_KEY not in card.metadata:
                    about = about.replace(alignment=None)  # not all of the rows say it
        self._check_others(card, repo_id)
        stale = stale_files(card, remote.files, pushed=self.parts, keep_other_splits=self.keep_other_splits)
        stale += stale_statistics(self.config, remote.files, kept=[split.name for split in kept])
        patterns = [pattern for split in kept for pattern in split.patterns]
        kept_bytes = sum(size for path, (size, _) in remote.files.items() if matches(path, patterns))
        return Plan(card, unify_features(typed), about, kept, kept_bytes, stale)

    def _check_others(self, card: Card, repo_id: str) -> None:
        """Raise SchemaError where other configurations, for which the card speaks too, have another alignment."""
        said = card.metadata.get(ALIGNMENT_KEY, self.alignment)
        if self.config != CONFIG and card.has_others and said != self.alignment:
            raise SchemaError(
                f"alignment: expected {said!r} as in the other configurations of {repo_id}, found {self.alignment!r}"
            )

    def write(self, features: Features, folder: str) -> Shards:
        """Write the shards of all splits into a new folder inside ``folder``."""
        inside = tempfile.mkdtemp(dir=folder)
        total = sum(self.rows.values())
        with progress_bar("writing shards", total=total, unit="steps", enabled=self.progress) as advance:
            return {
                split: write_shards(
                    parts,
                    split=split,
                    prefix=config_folder(self.config),
                    features=features,
                    about=self.about,
                    folder=inside,
                    options=self.options,
                    advance=advance,
                )
                for split, parts in self.parts.items()
            }

    def readme(self, plan: Plan, shards: Shards, repo_id: str) -> str:
        """The card that describes the dataset as it will be."""
        pushed = [
            SplitEntry(
                split, self.rows[split], sum(shard.data_bytes for shard in found), (split_pattern(split, self.config),)
            )
            for split, found in shards.items()
        ]
        return render_card(
            plan.card,
            repo_id=repo_id,
            features=with_about(plan.features, plan.about),
            splits=[*pushed, *plan.kept],
            download_bytes=plan.kept_bytes + sum(shard.file_bytes for found in shards.values() for shard in found),
            alignment=self.alignment,
            stated=plan.about.alignment is not None,
        )
