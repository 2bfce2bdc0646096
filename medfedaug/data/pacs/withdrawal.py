"""`withdraw`: remove patients from imported data, and record it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medfedaug.data.pacs.archive import FoundStudy, Wanted
from medfedaug.data.pacs.case_files import CaseFiles
from medfedaug.data.pacs.folder import FolderArchive
from medfedaug.data.pacs.study_list import StudyList
from medfedaug.data.preparation.cache import remove_prepared
from medfedaug.errors import ConfigError


@dataclass(frozen=True)
class Withdrawal:
    """Number of removed cases by pseudonym of the patient, and of values that belong to no imported study."""

    removed: dict[str, int]
    unmatched: int


def withdraw(
    wanted: Sequence[Wanted],
    out: Path,
    state: Path,
    pseudonym: Callable[[str, str], str],
    caches: Sequence[Path] = (),
) -> Withdrawal:
    """Remove the patients whose studies are named, and record it.

    Images, label maps, objects, prepared images and entries of lists are removed, and what a failed import
    has fetched.

    The record, which has pseudonyms and times alone, comes first: where the process is killed, the next
    import or withdrawal finishes it. A later import leaves the patients out.

    Raises:
        ConfigError: where there is no list, or an import writes to the folder.
    """
    files = CaseFiles(out, state)
    if not StudyList(state).path.is_file():
        raise ConfigError(f"{state}: holds no list of imported studies; name its folder with --state")
    with files.locked():
        studies = StudyList(state)
        patients: set[str] = set()
        fetched: list[FoundStudy] = []
        unmatched = 0
        archive = FolderArchive(files.fetching) if files.fetching.is_dir() else None
        for one in wanted:
            found = archive.find_studies(one) if archive is not None else []
            of_value = studies.patients_of([one]) | {pseudonym(study.person, "patient") for study in found}
            if not of_value and not _is_withdrawn(one, studies, pseudonym):
                unmatched += 1
            patients |= of_value
            fetched += found
        studies.withdraw(sorted(patients), [path.resolve() for path in caches])
        for study in fetched:
            files.remove(pseudonym(study.uid, "case"))
        removed = dict.fromkeys(sorted(patients), 0) | finish_withdrawals(studies, files)
        return Withdrawal(removed, unmatched)


def _is_withdrawn(wanted: Wanted, studies: StudyList, pseudonym: Callable[[str, str], str]) -> bool:
    """Return whether a value names a patient who was withdrawn: of these the pseudonym alone is kept."""
    person = FoundStudy("", wanted.value).person
    return wanted.key == "PatientID" and pseudonym(person, "patient") in studies.withdrawn


def finish_withdrawals(studies: StudyList, files: CaseFiles) -> dict[str, int]:
    """Remove the listed cases of withdrawn patients, record it, and count them by the pseudonym."""
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
    # Last: as long as a case is in the list, its removal is not done.
    for case in gone:
        del studies.studies[case]
    refused = [case for case, entry in studies.refused.items() if entry["patient"] in studies.withdrawn]
    for case in refused:
        del studies.refused[case]
    if gone or refused or studies.caches:
        studies.caches.clear()
        studies.save()
    return removed
