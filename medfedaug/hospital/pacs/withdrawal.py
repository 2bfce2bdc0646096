"""`withdraw`: remove patients from imported data, and record it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medfedaug.data.preparation.cache import remove_prepared
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import ArchiveStudy, StudyQuery
from medfedaug.hospital.pacs.case_files import CaseFiles
from medfedaug.hospital.pacs.study_list import StudyList


@dataclass(frozen=True)
class Withdrawal:
    """Number of removed cases by pseudonym of the patient, and number of queries without a study."""

    removed: dict[str, int]
    unmatched: int


def withdraw(
    queries: Sequence[StudyQuery],
    out: Path,
    state: Path,
    pseudonym: Callable[[str, str], str],
    caches: Sequence[Path] = (),
) -> Withdrawal:
    """Remove the patients of the named studies, and record the withdrawal.

    This removes images, label maps, objects, prepared images, entries of lists, and objects of failed
    imports. The record, which has only pseudonyms and times, comes first: after a killed process, the next
    import or withdrawal finishes the removal. A later import leaves the patients out.
    """
    files = CaseFiles(out, state)
    if not StudyList(state).path.is_file():
        raise ConfigError(f"{state}: holds no list of imported studies; name its folder with --state")
    with files.locked():
        studies = StudyList(state)
        matches = [studies.patients_of(query) for query in queries]
        patients = sorted(set[str]().union(*matches))
        unmatched = sum(
            not persons and not _is_withdrawn(query, studies, pseudonym)
            for query, persons in zip(queries, matches, strict=True)
        )
        studies.withdraw(patients, [path.resolve() for path in caches])
        return Withdrawal(dict.fromkeys(patients, 0) | finish_withdrawals(studies, files), unmatched)


def _is_withdrawn(query: StudyQuery, studies: StudyList, pseudonym: Callable[[str, str], str]) -> bool:
    """Return whether a query names a withdrawn patient, of whom the list keeps only the pseudonym."""
    person = ArchiveStudy("", query.value).person
    return query.key == "PatientID" and pseudonym(person, "patient") in studies.withdrawn


def finish_withdrawals(studies: StudyList, files: CaseFiles) -> dict[str, int]:
    """Remove the listed cases of withdrawn patients, and count them by the pseudonym."""
    files.remove_unfinished()
    patients = {case: entry["patient"] for case, entry in studies.studies.items()}
    gone = {case: patient for case, patient in patients.items() if patient in studies.withdrawn}
    files.unlist({*gone.values()})
    removed: dict[str, int] = dict.fromkeys(sorted(gone.values()), 0)
    images = [file for case in gone for file in files.of(case)]
    for cache in studies.caches if gone else ():
        remove_prepared(Path(cache), images)
    for case, patient in gone.items():
        files.remove(case)
        removed[patient] += 1
    # Last: a case in the list is not yet removed.
    for case in gone:
        del studies.studies[case]
    refused = [case for case, entry in studies.refused.items() if entry["patient"] in studies.withdrawn]
    for case in refused:
        files.remove(case)
        del studies.refused[case]
    if gone or refused or studies.caches:
        studies.caches.clear()
        studies.save()
    return removed
