"""What a user sees while a run goes on, and after Ctrl-C."""

import re
import shlex

from cli_arguments import simulate_args
from rich.console import Console

from medfedaug.cli.console import RoundProgress
from medfedaug.cli.watch import _shown
from medfedaug.nvflare_jobs.job.messages import EventLog
from medfedaug.nvflare_jobs.kit.job_states import Watched
from medfedaug.utils.event_text import follow


def test_ctrl_c_says_in_one_line_how_to_go_on_and_that_command_does(run, phantom_dir, tmp_path, monkeypatch):
    show = RoundProgress.show

    def stop(self, event):
        show(self, event)
        if event["event"] == "round_started" and event["round"] == 2:
            raise KeyboardInterrupt

    arguments = [*simulate_args(phantom_dir, tmp_path / "a run", "fedavg"), "--rounds", 2]
    with monkeypatch.context() as patch:
        patch.setattr(RoundProgress, "show", stop)
        code, _, err = run(*arguments)
    assert code == 130
    assert "Traceback" not in err
    told = err.strip().splitlines()[-1]
    assert told.startswith("stopped; continue with: medfedaug simulate ")
    code, out, err = run(*shlex.split(told.partition("medfedaug ")[2]))
    assert code == 0, err
    assert "resumed after round 1" in err
    assert "test, model of round" in out


def test_the_remaining_time_follows_from_the_rounds_and_ends_with_the_last_one():
    now, progress = [0.0], RoundProgress(4)
    progress.bar.get_time = lambda: now[0]
    with progress:
        (task,), column = progress.bar.tasks, progress.bar.columns[-1]
        for round_ in (1, 2, 3):
            now[0] += 100
            progress.show({"event": "round_finished", "round": round_, "seconds": 100.0})
        assert str(column.render(task)) == "0:01:40"
        now[0] += 100
        progress.show({"event": "round_finished", "round": 4, "seconds": 100.0})
        assert str(column.render(task)) == ""


def test_where_sites_send_no_loss_it_says_that_losses_stay_there(tmp_path):
    def watched(**told) -> tuple[str, str]:
        seen, events = Watched(), tmp_path / "events.jsonl"
        events.touch()
        for event in (
            {"event": "round_started", "round": 1, "rounds": 2},
            {"event": "trained", "round": 1, "site": "A", "samples": 5, **told},
            {"event": "round_finished", "round": 1, "seconds": 1.0},
            {"event": "validated", "round": 1, "val_dice": 0.5},
        ):
            seen.take(event)
        console = Console(width=100)
        with console.capture() as said:
            console.print(_shown(seen, events))
        return "\n".join(seen.lines), said.get()

    for place in watched():
        assert re.search(r"losses\s+(│\s*)?stay at the sites", place)
        assert "loss A" not in place
    lines, screen = watched(train_loss=0.25)
    assert "loss A 0.2500" in lines
    assert "A: training loss" in screen
    assert not any("stay at the sites" in place for place in (lines, screen))


def test_a_line_that_was_cut_off_hides_no_other(tmp_path):
    """By a power failure, or on a full disk: the job's process is started again, and writes on."""
    log = EventLog(tmp_path, "site A")
    log({"event": "finished"})
    log.close()
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + b'{"event": "trai' + bytes(3))
    again = EventLog(tmp_path, "site A")
    again({"event": "finished"})
    again.close()
    assert [event for event, _ in follow(log.path)] == [{"event": "finished"}] * 2
    assert [end for _, end in follow(log.path)][-1] == log.path.stat().st_size
