"""Sites with many images per file, and readers for the files of published benchmarks."""

import bz2
import gzip
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from medfedaug.data.base import Case, SiteFolder, unreadable
from medfedaug.errors import DataError


@dataclass(frozen=True)
class Archive:
    """The content of a file.

    Args:
        images: uint8, (N, H, W) or (N, H, W, 3).
        labels: classes as whole numbers, (N,).
        owners: owner of each image, where the file names it.
    """

    images: np.ndarray
    labels: np.ndarray
    owners: Sequence[str] = ()

    def cases(self, path: Path, classes: Sequence[str]) -> list[Case]:
        """Return the images of the file ``path`` as cases, named after the file and the position."""
        return [Case(f"{path.name}/{i}", path, classes[int(label)], i) for i, label in enumerate(self.labels)]


Reader = Callable[[Path], Archive]


@dataclass(frozen=True)
class ArchiveSite(SiteFolder):
    """A site whose files hold many images each, by `Case.index`; ``reader`` reads each file once."""

    reader: Reader

    task: ClassVar[str] = "classification"
    listing: ClassVar[str] = ""

    def check_files(self) -> int:
        """Check that every file is there and holds the images listed."""
        last: dict[Path, int] = {}
        for case in self.listed_cases:
            last[case.image] = max(last.get(case.image, 0), case.index or 0)
        for path, index in last.items():
            images = self._images(path)
            if index >= len(images):
                raise self.error(f"holds {len(images)} images, number {index} is listed", path)
        return 3

    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """Return the image as uint8 (3, H, W), or with ``"scale"`` as float32 in [0, 1]."""
        assert case.index is not None
        pixels = self._images(case.image)[case.index]
        if pixels.ndim == 2:
            pixels = np.repeat(pixels[..., None], 3, axis=-1)
        image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        return image / 255 if intensity == "scale" else image

    def _images(self, path: Path) -> np.ndarray:
        try:
            return read_archive(self.reader, path).images
        except FileNotFoundError as error:
            raise self.error("a listed file is missing", path) from error


@lru_cache(maxsize=64)
def read_archive(reader: Reader, path: Path) -> Archive:
    """Read a file once and keep it for the rest of the process."""
    try:
        archive = reader(path)
        if archive.images.dtype != np.uint8 or archive.images.shape[3:] not in ((), (3,)):
            raise ValueError(f"images of type {archive.images.dtype} and shape {archive.images.shape}")
        if len(archive.images) != len(archive.labels):
            raise ValueError(f"{len(archive.images)} images and {len(archive.labels)} labels")
        return archive
    except (DataError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged file fails anywhere
        raise unreadable("", path, error) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Reads only arrays, numbers, text and containers, since a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core", "numpy.core")  # the name before NumPy 2
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"holds {module}.{name}; only arrays are read") from None


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"holds text encoded as {encoding}")
    return text.encode(encoding)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
    ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy.core.numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


def load_arrays(path: Path) -> Any:
    """Read a pickle of arrays, numbers, text and containers of them.

    Raises:
        pickle.UnpicklingError: for any other content.
        OSError: when it cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "list.pkl"
        >>> _ = path.write_bytes(pickle.dumps(print))
        >>> load_arrays(path)
        Traceback (most recent call last):
        _pickle.UnpicklingError: holds builtins.print; only arrays are read
    """
    with open(path, "rb") as file:
        # Python 2 wrote bytes for text.
        return _ArrayUnpickler(file, encoding="latin1").load()


def read_cifar(path: Path) -> Archive:
    """Read a batch of CIFAR-10 (Python version): ``data`` (N, 3072), channels first, and ``labels``."""
    batch = load_arrays(path)
    images = np.asarray(batch["data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Archive(images, np.asarray(batch["labels"]))


def read_idx(path: Path) -> Archive:
    """Read images in MNIST's format, and labels from the file of the same name."""
    labels = path.name.replace("images", "labels").replace("idx3", "idx1")
    return Archive(_idx(path), _idx(path.with_name(labels)))


def _idx(path: Path) -> np.ndarray:
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    zeros, kind, rank = struct.unpack(">HBB", content[:4])
    if zeros or kind != 8:
        raise ValueError("not an idx file of bytes")
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_mat(path: Path) -> Archive:
    """Read SVHN or SynthDigits in MATLAB's format: ``X`` (H, W, 3, N), ``y`` (N, 1); SVHN writes 10 for 0."""
    content = _matlab(path)
    return Archive(content["X"].transpose(3, 0, 1, 2), content["y"].ravel().astype(int) % 10)


def read_emnist(path: Path) -> Archive:
    """Read EMNIST in MATLAB's format: training and test images together, with their writers."""
    dataset = _matlab(path)["dataset"][0, 0]
    parts = [dataset[part][0, 0] for part in ("train", "test")]
    images, labels, writers = (
        np.concatenate([part[name] for part in parts]) for name in ("images", "labels", "writers")
    )
    # MATLAB stores an image column by column.
    images = images.reshape(-1, 28, 28).transpose(0, 2, 1)
    return Archive(images, labels.ravel().astype(int), [f"writer_{writer:04d}" for writer in writers.ravel()])


def _matlab(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    with open(path, "rb") as file:
        return dict(loadmat(file))


def read_libsvm(path: Path) -> Archive:
    """Read USPS of LIBSVM: ``label index:value ...``, 16 x 16, values -1 to 1, labels 1 to 10."""
    with bz2.open(path, "rt") as file:
        rows = [line.split() for line in file]
    values = np.zeros((len(rows), 256))
    for number, row in enumerate(rows):
        for item in row[1:]:
            index, _, value = item.partition(":")
            values[number, int(index) - 1] = float(value)
    images = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return Archive(images, np.array([int(row[0]) - 1 for row in rows]))
