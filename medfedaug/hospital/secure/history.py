"""`SumHistory`: the opened sums of a site, so that no difference of sums covers few sites."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medfedaug.errors import ConfigError, own
from medfedaug.hospital.database import Database
from medfedaug.hospital.primitives import KEY_BYTES, stream
from medfedaug.hospital.secure.agreement import require
from medfedaug.utils.printable import counted

HISTORY_FILE = "sums.sqlite"  # file of a site's history of sums, below its state folder

NEAR = 0.1  # two models are nearly equal if their distance is below this fraction of a site's update

_BUCKETS = 256
_VERSION = 1
_TABLES = """
CREATE TABLE secret (key BLOB NOT NULL);
CREATE TABLE sites (project TEXT NOT NULL, name TEXT NOT NULL, seen REAL NOT NULL,
                    PRIMARY KEY (project, name));
CREATE TABLE sums (time REAL NOT NULL, job TEXT NOT NULL, round INTEGER NOT NULL, sites TEXT NOT NULL,
                   layout TEXT NOT NULL, step REAL NOT NULL, sketch BLOB NOT NULL);
"""


@dataclass(frozen=True)
class SumRules:
    """Rules for the sums that a site takes part in."""

    least: int = 2  # sites in a sum, this one included, and in a difference of sums
    known: tuple[str, ...] | None = None  # the federation's sites; by default those that were met
    share: float = 0.0  # of the known sites that must take part
    most_sets: int | None = None  # different sets of sites in the sums of one job


@dataclass(frozen=True)
class ModelSketch:
    """A sketch of a model; distances of sketches approximate those of models."""

    layout: str  # hash of names and shapes; models of different layouts are not compared
    step: float  # length of the site's training step
    image: NDArray[np.float64]  # sums, with random signs, of random parts of the model's numbers

    @classmethod
    def of(cls, key: bytes, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> ModelSketch:
        """Make the sketch of a model that training has changed.

        ``key``, of signs and parts, must stay secret: with it, different models can look alike.
        """
        names = sorted(after)
        layout = json.dumps([[name, list(after[name].shape)] for name in names])
        image, squares = np.zeros(_BUCKETS), 0.0
        for name in names:  # one by one, to save memory
            first, second = (
                tensors[name].detach().to("cpu").double().reshape(-1) for tensors in (before, after)
            )
            squares += float((second - first).square().sum())
            entry_key = hashlib.sha256(key + name.encode()).digest()
            words = stream(entry_key, -(-len(first) // 4)).view("<u2")[: len(first)]
            signed = np.where(words & _BUCKETS, first, -first)
            image += np.bincount(words & (_BUCKETS - 1), weights=signed, minlength=_BUCKETS)
        return cls(hashlib.sha256(layout.encode()).hexdigest(), math.sqrt(squares), image)

    def is_near(self, other: ModelSketch) -> bool:
        """Return whether two models are so close that training moves both alike."""
        apart = float(np.linalg.norm(self.image - other.image))
        return self.layout == other.layout and not apart > NEAR * max(self.step, other.step)


@dataclass(frozen=True)
class OpenedSum:
    """A sum that a site has helped to open, or is about to open."""

    job: str
    round: int
    sites: frozenset[str]
    sketch: ModelSketch

    def is_near(self, other: OpenedSum) -> bool:
        """Return whether two sums hold similar updates: of one round, or of nearly equal models."""
        return (self.job, self.round) == (other.job, other.round) or self.sketch.is_near(other.sketch)


class SumHistory(Database):
    """The opened sums of a site, and the other sites that it knows, over jobs and restarts."""

    def __init__(self, path: str | Path | None = None) -> None:
        secret = f"INSERT INTO secret VALUES (X'{os.urandom(KEY_BYTES).hex()}');"
        super().__init__(path, _TABLES + secret, _VERSION, _unreadable)

    @property
    def key(self) -> bytes:
        """The site's own secret for sketches."""
        with self.opened() as connection:
            ((key,),) = connection.execute("SELECT key FROM secret")
        return bytes(key)

    def meet(self, project: str, names: Iterable[str]) -> frozenset[str]:
        """Enter sites with valid certificates, and return all known sites of the project."""
        with self.opened() as connection:
            rows = [(project, name, time.time()) for name in names]
            connection.executemany("INSERT OR IGNORE INTO sites VALUES (?, ?, ?)", rows)
            names = connection.execute("SELECT name FROM sites WHERE project = ?", (project,)).fetchall()
        return frozenset(name for (name,) in names)

    def check(self, new: OpenedSum, rules: SumRules) -> None:
        """Check that a sum may be opened, given all earlier sums."""
        with self.opened() as connection:
            _check(connection, new, rules)

    def enter(self, new: OpenedSum, rules: SumRules) -> None:
        """Check and enter a sum, before anything leaves that opens it."""
        with self.opened() as connection:
            _check(connection, new, rules)
            sketch, sites = new.sketch, json.dumps(sorted(new.sites))
            about = (time.time(), new.job, new.round, sites)
            row = (*about, sketch.layout, sketch.step, sketch.image.tobytes())
            connection.execute("INSERT INTO sums VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{own(path)}: is not a history of sums ({error}), so no further sum is opened; restore it from a "
        "backup"
    )


def _check(connection: sqlite3.Connection, new: OpenedSum, rules: SumRules) -> None:
    rows = connection.execute("SELECT job, round, sites, layout, step, sketch FROM sums").fetchall()
    before = [
        OpenedSum(
            job,
            round_,
            frozenset(json.loads(sites)),
            ModelSketch(layout, step, np.frombuffer(image, np.float64)),
        )
        for job, round_, sites, layout, step, image in rows
    ]
    near = [opened for opened in before if opened.is_near(new)]
    few = _smallest_part([*(opened.sites for opened in near), new.sites])
    # Sums over the same set have no difference; the size of the set is checked elsewhere.
    require(
        few >= rules.least or all(opened.sites == new.sites for opened in near),
        f"the sum of nearly the same model was opened for other sites before ({counted(len(near), 'time')}), "
        f"and the difference would be of {few} of them, where {rules.least} are needed; ask the same sites "
        "again",
    )
    sets = {new.sites, *(opened.sites for opened in before if opened.job == new.job)}
    require(
        rules.most_sets is None or len(sets) <= rules.most_sets,
        f"the sums of this job would be over {len(sets)} different sets of sites, and its rule max_sum_sets "
        f"is {rules.most_sets}",
    )


def _smallest_part(sets: Sequence[Collection[str]]) -> int:
    """Return the size of the smallest group of sites that belong to the same sets.

    Every linear combination of the sums over these sets has one factor for all sites of a group.
    """
    groups = Counter(tuple(site in members for members in sets) for site in set().union(*sets))
    return min(groups.values())
