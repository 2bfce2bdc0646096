"""Read pickles of arrays, such as FedBN's lists, without running the code that a pickle may hold."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np


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
    """Read a pickle of arrays, numbers, text and their containers.

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
