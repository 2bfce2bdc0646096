"""`find_changes`: differences between an archive and earlier imports of its studies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medfedaug.hospital.pacs.archive import Archive, ArchiveError, ArchiveSeries, Patience, StudyQuery
from medfedaug.hospital.pacs.choice import NO_STUDY, StudyPlan
from medfedaug.hospital.pacs.label_objects import LabelObject

_IMAGE, _LABEL, _OTHER = "image", "label", "possible image"

SeriesRecords = dict[str, dict[str, Any]]


def describe_series(
    plan: StudyPlan, images: Mapping[str, int], labels: Sequence[LabelObject]
) -> SeriesRecords:
    """Describe the series of an import for the site's list.

    Returns:
        By SeriesInstanceUID the kind and modality; for an image the number of its objects, for label objects
        their UIDs.
    """
    records: SeriesRecords = {}
    for one in plan.images:
        kind = _IMAGE if one.uid in images else _OTHER
        records[one.uid] = {"kind": kind, "modality": one.modality, "count": images.get(one.uid, 0)}
    for one in plan.labels:
        objects = sorted(label.uid for label in labels if label.series == one.uid)
        records[one.uid] = {"kind": _LABEL, "modality": one.modality, "objects": objects}
    return records


def find_changes(
    archive: Archive,
    plans: Sequence[StudyPlan],
    queries: Sequence[StudyQuery],
    pseudonym: Callable[[str, str], str],
    studies: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[str]]:
    """Compare the studies of an archive with earlier imports.

    The comparison covers the patient, the series, and the number of an image's objects; for label objects
    also UIDs. It misses an object that was replaced under its UID.

    Returns:
        Differences by case, as text without values of headers; unchanged cases are left out.
    """
    changes_by_case: dict[str, list[str]] = {}
    patience = Patience(answered=True)
    for plan in plans:
        if plan.study is None or plan.case not in studies:
            continue
        try:
            changes = _changes(archive, plan, studies[plan.case])
            patience.heard()
        except ArchiveError as error:
            changes = [f"not compared: {patience.problem(error)}"]
        if changes:
            changes_by_case[plan.case] = changes
    unanswered = {plan.case for plan in plans if plan.study is None and plan.problem != NO_STUDY}
    present = {plan.case for plan in plans if plan.study is not None}
    answered = [query for query in queries if pseudonym(query.value, "case") not in unanswered]
    for case, entry in studies.items():
        if case not in present and any(entry.get(query.key) == query.value for query in answered):
            changes_by_case[case] = ["the study is gone"]
    return changes_by_case


def _changes(archive: Archive, plan: StudyPlan, entry: Mapping[str, Any]) -> list[str]:
    records: SeriesRecords = entry["series"]
    now = {series.uid: series for series in (*plan.images, *plan.labels)}
    changes = ["another patient"] if plan.patient != entry["patient"] else []
    changes += [f"new {series.modality} series" for uid, series in now.items() if uid not in records]
    changes += [
        f"gone {record['modality']} series"
        for uid, record in records.items()
        if uid not in now and record["kind"] != _OTHER
    ]
    for uid, series in now.items():
        if uid in records:
            changes += _changes_of_series(archive, series, records[uid])
    return changes


def _changes_of_series(archive: Archive, series: ArchiveSeries, record: Mapping[str, Any]) -> list[str]:
    if record["kind"] == _OTHER:
        return []
    if record["kind"] == _IMAGE:
        count = series.instances
        if count is None:  # the archive does not say
            count = len(archive.find_objects(series))
        same = count == record["count"]
        return [] if same else [f"{series.modality} series of {count} objects, {record['count']} before"]
    same = archive.find_objects(series) == record["objects"]
    return [] if same else [f"other objects of {series.modality}"]
