"""What tests share with `tests/integration/test_reboot.py`."""

from pathlib import Path

from rehearsed_hospitals import Rehearsal
from running import command


class Deployment(Rehearsal):
    """A rehearsal whose commands of ours run in this process, which has imported everything already."""

    def medfedaug(self, *arguments: str | Path) -> str:
        code, out, err = command(*arguments)
        assert code == 0, (out, err)
        return out
