"""`PixelFormat`: how the pixels of a DICOM object are stored, by a header that does not contradict itself."""

from __future__ import annotations

from dataclasses import dataclass

from pydicom import Dataset

from medfedaug.errors import ReaderError

_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOURS = (
    "RGB",
    "HSV",
    *(f"YBR_{k}" for k in ("FULL", "FULL_422", "PARTIAL_422", "PARTIAL_420", "ICT", "RCT")),
)
_SAMPLES = {**dict.fromkeys((*_GREY, "PALETTE COLOR"), 1), **dict.fromkeys(_COLOURS, 3)}


@dataclass(frozen=True)
class PixelFormat:
    """Description of pixels, PS3.3 C.7.6.3.

    Args:
        samples: values of one pixel.
        allocated: bits of a value in the file.
        stored: those of them that are used, the lowest.
    """

    rows: int
    columns: int
    samples: int
    allocated: int
    stored: int
    signed: bool
    photometric: str

    @classmethod
    def of(cls, header: Dataset) -> PixelFormat:
        """Take the description of a header; `ReaderError` where it is missing or contradicts itself."""
        photometric = str(header.get("PhotometricInterpretation") or "")
        found = cls(
            rows=_number(header, "Rows"),
            columns=_number(header, "Columns"),
            samples=_number(header, "SamplesPerPixel"),
            allocated=_number(header, "BitsAllocated"),
            stored=_number(header, "BitsStored"),
            signed=bool(_number(header, "PixelRepresentation")),
            photometric=photometric,
        )
        if not found.rows or not found.columns:
            raise ReaderError(f"its header has {found.columns} x {found.rows} pixels")
        if found.samples != _SAMPLES.get(photometric):
            kind = photometric if photometric in _SAMPLES else "of no known kind"  # any text may stand there
            raise ReaderError(
                f"its header has {found.samples} values a pixel (SamplesPerPixel), and pixels are "
                f"{kind} (PhotometricInterpretation)"
            )
        highest = _number(header, "HighBit")
        if found.allocated not in (1, 8, 16, 32) or not 0 < found.stored <= found.allocated:
            raise ReaderError(
                f"its header has {found.stored} bits in {found.allocated} (BitsStored, BitsAllocated)"
            )
        if highest != found.stored - 1:
            raise ReaderError(
                f"its header has {found.stored} bits that end at bit {highest} (BitsStored, HighBit)"
            )
        return found

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
        """The shape of an image as an array: (rows, columns), in colour (rows, columns, samples)."""
        return (self.rows, self.columns, self.samples) if self.colour else (self.rows, self.columns)

    @property
    def lowest(self) -> int:
        """The lowest value of the stored bits."""
        return -(2 ** (self.stored - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        """The highest value of the stored bits."""
        return 2 ** (self.stored - self.signed) - 1

    @property
    def text(self) -> str:
        """Describe bits and kind of the values, in which slices of a volume are alike."""
        return f"{self.allocated} bits {'signed' if self.signed else 'unsigned'}, {self.photometric}"


def _number(header: Dataset, name: str) -> int:
    value = header.get(name)
    if not isinstance(value, int):
        raise ReaderError(f"its header has no {name}" if value is None else f"its header has a wrong {name}")
    return value
