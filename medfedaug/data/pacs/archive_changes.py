"""`find_changes`: differences between what an archive has and what earlier imports took of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from medfedaug.data.pacs.archive import (
    OBJECT_FIELDS,
    Archive,
    ArchiveError,
    FoundSeries,
    Wanted,
    known_fields,
)
from medfedaug.data.pacs.choice import NO_STUDY, Planned
from medfedaug.data.pacs.label_objects import LabelObject
from medfedaug.data.pacs.patience import Patience

_IMAGE, _LABEL, _OTHER = "image", "label", "possible image"

Taken = dict[str, dict[str, Any]]


def taken_series(plan: Planned, images: Mapping[str, Sequence[str]], labels: Sequence[LabelObject]) -> Taken:
    """Describe the series that an import looked at, for the site's own list.

    Returns:
        By SeriesInstanceUID the kind and modality; of an image the number of its objects and a hash of their
        UIDs, since a list of thousands of studies is written anew with each of them; of label objects the
        dates by SOPInstanceUID.
    """
    found: Taken = {}
    for one in plan.images:
        kind = _IMAGE if one.uid in images else _OTHER
        uids = {*images.get(one.uid, ())}
        found[one.uid] = {"kind": kind, "modality": one.modality, "count": len(uids), "uids": _hash(uids)}
    for one in plan.labels:
        objects = {
            label.uid: known_fields(label.dataset, OBJECT_FIELDS)
            for label in labels
            if label.series == one.uid
        }
        found[one.uid] = {"kind": _LABEL, "modality": one.modality, "objects": objects}
    return found


def find_changes(
    archive: Archive,
    plans: Sequence[Planned],
    wanted: Sequence[Wanted],
    pseudonym: Callable[[str, str], str],
    studies: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[str]]:
    """Compare what an archive has with what earlier imports took.

    Compared are the patient; the series; of an image the number of its objects; of label objects also their
    UIDs, and their dates where the archive says them. An object that was overwritten under its own UID with
    the same dates is not seen.

    Returns:
        Differences by case, in words without values of headers; cases without any are left out.
    """
    found: dict[str, list[str]] = {}
    patience = Patience(archive.place, answered=True)
    for plan in plans:
        if plan.study is None or plan.case not in studies:
            continue
        try:
            changes = _changes(archive, plan, studies[plan.case])
            patience.heard()
        except ArchiveError as error:
            changes = [f"not compared: {patience.problem(error)}"]
        if changes:
            found[plan.case] = changes
    unanswered = {plan.case for plan in plans if plan.study is None and plan.problem != NO_STUDY}
    there = {plan.case for plan in plans if plan.study is not None}
    asked = {(one.key, one.value) for one in wanted if pseudonym(one.value, "case") not in unanswered}
    for case, entry in studies.items():
        if case not in there and any((key, entry.get(key)) in asked for key in {key for key, _ in asked}):
            found[case] = ["the study is gone"]
    return found


def _changes(archive: Archive, plan: Planned, entry: Mapping[str, Any]) -> list[str]:
    known: Taken | None = entry.get("series")
    if known is None:
        return ["imported by a version that did not remember its objects"]
    now = {one.uid: one for one in (*plan.images, *plan.labels)}
    new = [one.modality for uid, one in now.items() if uid not in known]
    gone = [one["modality"] for uid, one in known.items() if uid not in now and one["kind"] != _OTHER]
    changes = ["another patient"] if plan.patient != entry["patient"] else []
    changes += [
        f"{what} {modality} series" for what, some in (("new", new), ("gone", gone)) for modality in some
    ]
    for uid, one in now.items():
        if uid in known:
            changes += _of_series(archive, one, known[uid])
    return changes


def _of_series(archive: Archive, one: FoundSeries, known: Mapping[str, Any]) -> list[str]:
    if known["kind"] == _OTHER:
        return []
    if known["kind"] == _IMAGE:
        count, same = one.instances, one.instances == known["count"]
        if count is None:  # the archive does not say
            uids = archive.find_objects(one).keys()
            count, same = len(uids), _hash(uids) == known["uids"]
        return [] if same else [f"{one.modality} series of {count} objects, {known['count']} before"]
    before: Mapping[str, Mapping[str, str]] = known["objects"]
    now = archive.find_objects(one)
    counts = {
        "new": len(now.keys() - before.keys()),
        "gone": len(before.keys() - now.keys()),
        # By dates that both have: an archive may not say all.
        "rewritten": sum(
            any(now[uid].get(name, date) != date for name, date in dates.items())
            for uid, dates in before.items()
            if uid in now
        ),
    }
    return [f"{count} {what} {one.modality}" for what, count in counts.items() if count]


def _hash(uids: Collection[str]) -> str:
    return hashlib.sha256("\n".join(sorted(uids)).encode()).hexdigest()
