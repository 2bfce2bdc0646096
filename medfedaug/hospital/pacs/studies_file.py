"""Read the studies that a user names in a CSV file."""

import csv
from pathlib import Path

from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import STUDY_KEYS, StudyQuery


def read_studies(path: Path) -> list[StudyQuery]:
    """Read the studies of a CSV file with a column of `STUDY_KEYS`, each once, in the order of the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as a text in UTF-8") from error
    lines = text.splitlines()
    delimiter = ";" if lines and ";" in lines[0] else ","
    rows = csv.DictReader(lines, delimiter=delimiter)
    columns = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = columns
    key = next((name for name in STUDY_KEYS if name in columns), None)
    if key is None:
        raise ConfigError(f"{path}: has no column {', '.join(STUDY_KEYS[:-1])} or {STUDY_KEYS[-1]}")
    queries: dict[StudyQuery, None] = {}
    for row in rows:
        value = (row.get(key) or "").strip()
        if value:
            try:
                queries[StudyQuery(key, value)] = None
            except ConfigError as error:
                raise ConfigError(f"{path}, line {rows.line_num}: {error}") from error
    if not queries:
        raise ConfigError(f"{path}: names no study")
    return [*queries]
