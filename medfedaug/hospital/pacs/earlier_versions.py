"""`EarlierVersions`: files of a case from before the archive had another outline or image."""

import gzip
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from medfedaug.utils.files import private_folder

_PIECE = 2**20


@dataclass(frozen=True)
class EarlierVersions:
    """Private folder of earlier versions: ``CASE/VERSION`` holds files of ``out`` that changed after it."""

    folder: Path
    out: Path

    def keep(self, case: str, version: int, files: Iterable[Path]) -> None:
        """Keep files, which stay in place until others replace them.

        Kept files of this version stay: a killed import may already have replaced the originals.
        """
        for file in files:
            target = self._of(case, version) / file.relative_to(self.out)
            if target.exists() or not file.is_file():
                continue
            private_folder(target.parent)
            try:
                os.link(file, target)
            except OSError:  # another file system
                shutil.copy2(file, target)

    def restore_equal(self, case: str, version: int) -> bool:
        """Restore files whose successors have the same content, and return whether any differs.

        The site's accounts identify an image by the bytes of its file: an unchanged image keeps them.
        """
        folder = self._of(case, version)
        differs = False
        for file in [path for path in folder.rglob("*") if path.is_file()]:
            now = self.out / file.relative_to(folder)
            if now.is_file() and _equal(file, now):
                shutil.move(file, now)
            else:
                differs = True
        if not differs:
            shutil.rmtree(folder, ignore_errors=True)
        return differs

    def remove(self, case: str) -> None:
        """Remove all versions of a case."""
        shutil.rmtree(self.folder / case, ignore_errors=True)

    def trim(self, most: int) -> None:
        """Remove all but the newest versions of each case."""
        for case in self.folder.iterdir() if self.folder.is_dir() else ():
            versions = sorted(int(path.name) for path in case.iterdir() if path.name.isdigit())
            for version in versions[: max(0, len(versions) - most)]:
                shutil.rmtree(self._of(case.name, version))
            if not any(case.iterdir()):
                case.rmdir()

    def _of(self, case: str, version: int) -> Path:
        return self.folder / case / str(version)


def _equal(one: Path, other: Path) -> bool:
    if one.suffix != ".gz":
        return cmp(one, other, shallow=False)
    with gzip.open(one) as first, gzip.open(other) as second:
        while block := first.read(_PIECE):
            if block != second.read(_PIECE):
                return False
        return not second.read(1)
