"""Every number in the messages of a site is in the table of `docs/privacy/policy.md`, and no other leaves."""

import re
from pathlib import Path

import pytest
from hospitals import Deployment, Hospital

from medfedaug.config.plan import Plan
from medfedaug.federation.messages.messages import MASK_TASKS, SCORE, TASKS, Reply
from medfedaug.hospital.privacy.score_release import SENT, listed_name, sent_numbers

PAGE = (Path(__file__).resolve().parents[3] / "docs/privacy/policy.md").read_text(encoding="utf-8")
EVERY = {*TASKS, SCORE}


def table() -> dict[str, set[str]]:
    """By task, the names of what an answer may hold, as the page lists them."""
    section = PAGE.partition("## Every number in a message")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        assert all(cells[:3]), f"a row with an empty cell: {line}"
        tasks = EVERY if cells[1] == "all" else set(re.findall(r"`([^`]+)`", cells[1]))
        assert tasks <= EVERY
        for task in tasks:
            found.setdefault(task, set()).update(re.findall(r"`([^`]+)`", cells[0]))
    return found


LISTED = table()


def names(reply: Reply) -> set[str]:
    """What a message holds, by the names of the table."""
    fields = {"weights": reply.weights, "masks": reply.masks, "statistics": reply.payload}
    fields |= {"num_samples": reply.num_samples, "error": reply.error}
    return {name for name, value in fields.items() if value} | {listed_name(name) for name in reply.metrics}


def check(replies) -> None:
    for reply in replies:
        lacking = names(reply) - LISTED[reply.task]
        assert not lacking, f"the table of policy.md lacks {lacking} of {reply.task}"


def test_the_table_and_the_list_of_what_leaves_are_one():
    of_a_message = {"weights", "masks", "statistics", "num_samples", "error"}
    assert {task: listed - of_a_message for task, listed in LISTED.items()} == {
        task: set(SENT.get(task, ())) for task in EVERY
    }
    assert all("error" in LISTED[task] for task in EVERY)
    assert all({*LISTED[task]} == {"masks", "error"} for task in MASK_TASKS)


def test_what_the_list_lacks_does_not_leave():
    told = {"val_dice": 0.5, "fedfa/negative_std": 0.1, "ditto/loss": 2.0, "seconds": 1.2, "skipped": 3}
    assert sent_numbers("train", told) == {"val_dice": 0.5, "seconds": 2}
    assert sent_numbers("no task", told) == {}


@pytest.fixture
def deploy(make_site, tmp_path):
    def make(**privacy) -> Deployment:
        for name in "AB":
            if not (tmp_path / "data" / name).exists():
                make_site(name, cases=(8, 3, 3))
        settings = {"privacy": {"min_images": 3, **privacy}}
        return Deployment(
            [Hospital(tmp_path / "kits" / name, tmp_path / "data" / name, **settings) for name in "AB"]
        )

    return make


@pytest.mark.parametrize("methods", ["fedrdn,fedfa", "ditto"])
def test_a_training_sends_nothing_that_the_table_lacks(deploy, tiny_config, methods):
    deployment = deploy()
    server = deployment.run(tiny_config(methods, rounds=2))
    replies = [reply for _, reply in deployment.replies]
    assert not any(reply.error for reply in replies)
    assert {reply.task for reply in replies} >= {"prepare", "train", "test"}
    check(replies)
    for entry in server.results()["rounds"]:
        for told in entry["sites"].values():
            known = {"samples", *LISTED["train"]}
            assert {listed_name(name) for name in told} <= known


def test_planning_sends_nothing_that_the_table_lacks(deploy, tiny_config):
    deployment = deploy()
    planned = tiny_config(rounds=1, plan=Plan(), planning={"memory": 0.05})
    deployment.run(planned)
    assert "fingerprint" in {reply.task for _, reply in deployment.replies}
    check(reply for _, reply in deployment.replies)


def test_a_split_of_few_cases_has_no_number_in_a_message(deploy, tiny_config):
    deployment = deploy(min_images=4)
    deployment.run(tiny_config(rounds=1))
    prepared = [reply.metrics for _, reply in deployment.replies if reply.task == "prepare"]
    assert [metrics["cases"] for metrics in prepared] == [{"training": 8}] * 2
    assert [metrics["counts"] for metrics in prepared] == [{"patients": 8, "studies": 8}] * 2
