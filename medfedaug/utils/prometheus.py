"""`write_metrics`: numbers in Prometheus' text format, which node_exporter's textfile collector reads."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from medfedaug.utils.files import write_text


def write_metrics(
    path: str | Path, texts: Mapping[str, str], samples: Iterable[tuple[str, float, Mapping[str, str]]]
) -> None:
    """Write numbers to a file that every user may read.

    Args:
        path: the file.
        texts: by metric, without the prefix ``medfedaug_``, its description.
        samples: metric, value and labels of each number; those of a metric follow one another.
    """
    lines, last = [], ""
    for name, value, labels in samples:
        if name != last:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP medfedaug_{name} {texts[name]}", f"# TYPE medfedaug_{name} {kind}"]
            last = name
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        lines.append(f"medfedaug_{name}{{{text}}} {float(value):.15g}")
    write_text(path, "\n".join(lines) + "\n")
    with contextlib.suppress(OSError):  # a collector is another user, and the file has no secret
        os.chmod(path, 0o644)


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
