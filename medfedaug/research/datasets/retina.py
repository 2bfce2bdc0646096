"""Retinal vessels: photographs of the retina from five cameras, with masks of the vessels."""

from pathlib import Path

from medfedaug.data.base import SiteFolder
from medfedaug.research.datasets.published import Benchmark, listed_sites

_CAMERAS = ("AVWIDE", "CHASEDB1", "DRIVE", "STARE", "VEVIO")


def retina_vessels(root: Path) -> list[SiteFolder]:
    """Up to five sites of RGB photographs, split by patient.

    DRIVE (Staal et al. 2004; Canon CR5, 45 degrees), STARE (Hoover et al. 2000; TopCon TRV-50, 35 degrees),
    CHASEDB1 (Fraz et al. 2012; Nidek NM-200-D, 30 degrees, both eyes of each child), AVWIDE (Estrada et al.
    2015; ultra-wide field by two lasers, without blue) and VEVIO (Estrada et al. 2012; mosaics of video).
    Each is a folder with a ``dataset.json`` whose rows name their patients.

    Raises:
        DataError: for another site.
    """
    return listed_sites(root, "the retinal vessels", _CAMERAS)


BENCHMARKS = {
    "retina_vessels": Benchmark(
        retina_vessels,
        "Retinal vessels: photographs from five cameras with masks, one camera without blue",
        "https://drive.grand-challenge.org (DRIVE), https://cecas.clemson.edu/~ahoover/stare (STARE), "
        "https://blogs.kingston.ac.uk/retinal/chasedb1 (CHASEDB1), "
        "https://people.duke.edu/~sf59/Estrada_TMI_2015_dataset.htm (AVWIDE, VEVIO)",
        "{AVWIDE,CHASEDB1,DRIVE,STARE,VEVIO}/dataset.json with images and masks as PNG, "
        'and "patient" in each row',
        in_folds=True,
    )
}
