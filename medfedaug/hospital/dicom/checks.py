"""Refuse DICOM objects: `require`, `reading`, `check_bounds` of deflated ones, `PixelFormat` of pixels."""

import io
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydicom import Dataset
from pydicom.filereader import read_dataset, read_preamble
from pydicom.uid import DeflatedExplicitVRLittleEndian

from medfedaug.errors import MedFedAugError, ReaderError, first_line, translated

MOST_INFLATED = 2**29  # bytes of the largest deflated object, inflated


def require(condition: object, fault: str) -> None:
    """Refuse an object that cannot be read: raise `ReaderError` with its fault."""
    if not condition:
        raise ReaderError(fault)


def reading(
    problem: str, *passing: type[Exception], reason: Callable[[Exception], str] = first_line
) -> AbstractContextManager[None]:
    """Turn any error but of a ``passing`` type into a `ReaderError`: damage fails anywhere in the parsers.

    The text is the problem and a reason, by default the error's own, which may quote the header.
    """

    def refused(error: Exception) -> Exception:
        passes = isinstance(error, (MedFedAugError, ReaderError, *passing))
        return error if passes else ReaderError(f"{problem} ({reason(error)})")

    return translated(Exception, to=refused)


def check_bounds(source: Path | bytes) -> None:
    """Check the size of a deflated object, which parsers inflate as a whole."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        with reading("a damaged DICOM file", reason=lambda error: "its header cannot be read"):
            read_preamble(file, force=True)
            meta = read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
        if meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
            return
        with reading("a damaged DICOM file", reason=lambda error: "it cannot be inflated"):
            inflated = zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(), MOST_INFLATED + 1)
    require(
        len(inflated) <= MOST_INFLATED, f"a DICOM file that inflates to more than {MOST_INFLATED >> 20} MiB"
    )


_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOURS = (
    "RGB",
    "HSV",
    *(f"YBR_{k}" for k in ("FULL", "FULL_422", "PARTIAL_422", "PARTIAL_420", "ICT", "RCT")),
)
_SAMPLES = {**dict.fromkeys((*_GREY, "PALETTE COLOR"), 1), **dict.fromkeys(_COLOURS, 3)}


@dataclass(frozen=True)
class PixelFormat:
    """Description of pixels, PS3.3 C.7.6.3; a value uses the lowest ``stored`` of its ``allocated`` bits."""

    rows: int
    columns: int
    samples: int
    allocated: int
    stored: int
    signed: bool
    photometric: str

    @classmethod
    def of(cls, header: Dataset) -> "PixelFormat":
        """Read the description in a header; `ReaderError` where it is missing or contradicts itself."""
        photometric = str(header.get("PhotometricInterpretation") or "")
        form = cls(
            rows=_number(header, "Rows"),
            columns=_number(header, "Columns"),
            samples=_number(header, "SamplesPerPixel"),
            allocated=_number(header, "BitsAllocated"),
            stored=_number(header, "BitsStored"),
            signed=bool(_number(header, "PixelRepresentation")),
            photometric=photometric,
        )
        require(form.rows and form.columns, f"its header has {form.columns} x {form.rows} pixels")
        # The message quotes no free text of a header.
        kind = photometric if photometric in _SAMPLES else "of no known kind"
        require(
            form.samples == _SAMPLES.get(photometric),
            f"its header has {form.samples} values a pixel (SamplesPerPixel), and pixels are {kind} "
            "(PhotometricInterpretation)",
        )
        require(
            form.allocated in (1, 8, 16, 32) and 0 < form.stored <= form.allocated,
            f"its header has {form.stored} bits in {form.allocated} (BitsStored, BitsAllocated)",
        )
        highest = _number(header, "HighBit")
        require(
            highest == form.stored - 1,
            f"its header has {form.stored} bits that end at bit {highest} (BitsStored, HighBit)",
        )
        return form

    @property
    def colour(self) -> bool:
        """Return whether pixels have several values."""
        return self.samples > 1

    @property
    def inverted(self) -> bool:
        """Return whether the lowest value is white."""
        return self.photometric == "MONOCHROME1"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an image as an array: (rows, columns), in colour (rows, columns, samples)."""
        return (self.rows, self.columns, self.samples) if self.colour else (self.rows, self.columns)

    @property
    def lowest(self) -> int:
        """Lowest value of the stored bits."""
        return -(2 ** (self.stored - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        """Highest value of the stored bits."""
        return 2 ** (self.stored - self.signed) - 1

    @property
    def text(self) -> str:
        """Bits and kind of the values, which the slices of a volume share."""
        return f"{self.allocated} bits {'signed' if self.signed else 'unsigned'}, {self.photometric}"


def _number(header: Dataset, name: str) -> int:
    value = header.get(name)
    require(isinstance(value, int), f"its header has {'no' if value is None else 'a wrong'} {name}")
    return int(value)
