"""A script with a custom training loop, in a thread of the site's job."""

import logging
import runpy
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Queue

from medfedaug.client import script_at
from medfedaug.config.training_scripts import find_loop
from medfedaug.errors import MedFedAugError, translated, withheld
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.script_training import CustomLoop, ScriptSession
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.job.ranks import Ranks

_PERIOD, _TO_END = 0.2, 10.0  # seconds between two looks at lost ranks, and for a script after its last round
_log = logging.getLogger("medfedaug")


class ScriptDone(BaseException):
    """Ends a script before its last round; no `Exception`, which the script could catch."""


class ScriptLoop(CustomLoop):
    """The script of a run's training loop, by its name in the run (`medfedaug.config.training_scripts`).

    The site starts it once the run is admitted, passes it rounds, and sends its own collection of the trained
    network. Script and site wait for each other: only one of them works at a time.

    Attributes:
        settings: the site's settings, with the number of processes.
        folder: the folder of the job's code.
        should_stop: returns whether the job was stopped.
    """

    def __init__(self, loop: str) -> None:
        self.loop, self.settings, self.folder = loop, SiteSettings(), Path()
        self.should_stop: Callable[[], bool] = lambda: False
        self._script: _Running | None = None

    def start(self, session: ScriptSession) -> None:
        """Run the script until it waits for its first round."""
        script = find_loop(self.loop, self.folder)
        self.end()
        self._script = _Running(script, session, self.settings)

        def cause(error: MedFedAugError) -> Exception:
            return session.error or MedFedAugError(f"{error.marked}; it has to call medfedaug.client.join")

        with translated(MedFedAugError, to=cause):
            self._await(0)

    def train(self, round_: LocalRound) -> None:
        """Let the script train for a round."""
        assert self._script is not None
        self._script.ranks.begin(round_)
        self._script.hand_over(round_)
        self._await(round_.number)
        self._script.ranks.finish()

    def end(self) -> None:
        """End the script in all its processes, if it runs."""
        if self._script is not None:
            self._script.end()
            self._script = None

    def _await(self, number: int) -> None:
        """Wait until the script asks for the next round in all its processes."""
        assert self._script is not None
        script, ranks = self._script, self._script.ranks
        with ranks.in_group():
            while not script.idle.wait(_PERIOD) and not self.should_stop() and ranks.lost() is None:
                pass
        waits = script.idle.is_set() and not script.ended
        if not waits or not ranks.collect(self.should_stop):
            # With a lost peer rank 0 fails, too, and may fail first.
            rank, cause = ranks.lost(1.0) or ("", script.error)
            when = f"before round {number} was over" if number else "before its first round"
            reason = f" ({withheld(cause)})" if cause else ""
            raise MedFedAugError(
                f"site {script.session.site.name}: {rank}the training script {self.loop.split('@')[0]} ended "
                f"{when}{reason}; the site's log says why"
            )


class _Running:
    """A started script, its thread and its ranks; ``idle`` while it waits for a round, or has ended."""

    def __init__(self, script: Path, session: ScriptSession, settings: SiteSettings) -> None:
        self.session, self.ranks = session, Ranks(script, session, settings)
        self.idle, self.ended, self.error = threading.Event(), False, ""
        self._rounds: Queue[LocalRound | None] = Queue()
        self._thread = threading.Thread(target=self._run, args=(script,), daemon=True)
        self._thread.start()

    def _run(self, script: Path) -> None:
        try:
            with script_at(self.session, self._wait):
                runpy.run_path(str(script), run_name="__main__")
        except ScriptDone:
            pass
        except BaseException as error:  # SystemExit of a script, too
            self.error = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
            _log.exception("the training script failed")
        finally:
            self.ended = True
            self.idle.set()

    def _wait(self) -> LocalRound | None:
        self.idle.set()
        return self._rounds.get()

    def hand_over(self, round_: LocalRound | None) -> None:
        """Let the script continue with a round, or after the last one."""
        self.idle.clear()
        self._rounds.put(round_)

    def end(self) -> None:
        """End the script; one that is stuck ends with the process."""
        self.ranks.over()
        with self.ranks.in_group():
            self.hand_over(None)
            self._thread.join(_TO_END)
        self.ranks.close()
