"""Attacks by what is printed: characters of a job, a site or a file reach no terminal, log, page or table."""

import dataclasses
import json
import re
import shutil
import unicodedata
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hospitals import Deployment, Hospital
from running import TINY_NETWORK
from terminal import shown_in_a_terminal

from medfedaug import cli
from medfedaug.analysis import model_card, page
from medfedaug.analysis.text_table import TextTable
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig, job_hash
from medfedaug.errors import ConfigError, DataError, MedFedAugError, RunFailed, own, replace_own
from medfedaug.hospital.privacy import JobBook
from medfedaug.hospital.privacy.job_log import Decision, JobEntry, Origin
from medfedaug.nvflare_jobs.job.controller import FederationController
from medfedaug.nvflare_jobs.job.executor import SiteExecutor
from medfedaug.nvflare_jobs.job.messages import EventLog
from medfedaug.utils.event_text import EventLines, follow
from medfedaug.utils.printable import printable

# Clears the screen, sets the title, C1, DEL, backspace, new lines of all kinds, directions, no width, markup.
EVIL = (
    "x\x1b[2J\x1b[H\x9b2J\x1b]0;PWN\x07\x7f\x08\r\nall is well\x0b\x0c\x85\u2028\u2029"
    "\u202e\u2066\u200b\u2060\ufeff\u00ad\u3164\ufe0f\udcff[red][link=http://evil.org]"
)


def bad(text: str) -> list[str]:
    """The characters of a text that steer a terminal or that nobody sees, but for line feeds."""
    allowed = {"Zs"} | {a + b for a in "LMNPS" for b in "abcdefghijklmnopqrstuvwxyzCDEFGHKLMNOPQRSTU"}
    return sorted(
        {
            repr(char)
            for char in text
            if char != "\n" and (unicodedata.category(char) not in allowed or char in "\u3164\ufe0f")
        }
    )


def assert_clean(text: str) -> None:
    assert not bad(text), (bad(text), text[:2000])
    # A new line of the text's own is none of the reader's.
    assert not any(line.startswith("all is well") for line in text.splitlines())


def in_a_terminal(*args: object) -> str:
    """Return the text that a pseudo-terminal gets of a command in a process of its own, but for colours."""
    return without_colours(shown_in_a_terminal(*map(str, args)))


def without_colours(text: str) -> str:
    """The text without what Rich itself tells a terminal: colours, its spinner's line, the cursor."""
    return re.sub(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|1A)|\r(?=\x1b\[2K)", "", text)


@pytest.fixture
def shown(run, monkeypatch):
    """What a command prints in this process, as for a terminal: `shown("site", "watch", KIT, width=100)`."""

    def show(*args: object, width: int = 100) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("FORCE_COLOR", "1")
            for console in (cli.out_console, cli.err_console):
                patch.setattr(console, "width", width)
            _, out, err = run(*args)
        return without_colours(out + err)

    return show


# Values that hold a text, by the annotation of a setting: another annotation fails here until it is covered.
SHAPES = {
    "str": [EVIL],
    "str | None": [EVIL],
    "tuple[str, ...]": [[EVIL], ["a", EVIL]],
    "tuple[str, ...] | None": [[EVIL]],
    "dict[str, Any]": [{EVIL: 1}, {"a": EVIL}, {"a": [1, {"b": [EVIL]}]}, {"name": EVIL, "hash": "0" * 64}],
    "dict[str, Speed]": [{EVIL: 1.0}, {"a": EVIL}],
    "tuple[dict[str, Any], ...]": [
        [{"name": EVIL}],
        [{"name": "fedfa", "args": {"stages": [EVIL]}}],
        [{"name": "fedfa", "args": {EVIL: 1}}],
        [{"name": "fedfa", EVIL: {}}],
    ],
    "Plan": [{"orientation": EVIL}, {EVIL: 1}],
    "PlanningConfig | None": [{"given": [EVIL]}, {EVIL: 1}],
}
NO_TEXT = {
    *("int", "float", "bool", "int | None", "float | None"),
    *("tuple[int, ...] | None", "tuple[float, ...] | None"),
}


def evil_settings(cls: type) -> list[tuple[str, object]]:
    types = {
        entry.name: entry.type.__name__ if isinstance(entry.type, type) else str(entry.type)
        for entry in dataclasses.fields(cls)
    }
    return [(name, value) for name, kind in types.items() if kind not in NO_TEXT for value in SHAPES[kind]]


@pytest.mark.parametrize("cls", [RunConfig, Execution, Plan])
def test_no_setting_of_a_job_may_hold_such_a_character_and_its_value_is_not_repeated(cls):
    build = {RunConfig: lambda values: SiteExecutor(config=values), Execution: Execution.from_dict}
    build[Plan] = lambda values: RunConfig.from_dict({"plan": values})
    values = evil_settings(cls)
    for name, value in values:
        with pytest.raises(ConfigError) as error:
            build[cls]({name: value})
        assert_clean(str(error.value))
        assert re.match(rf"plan: |{name}: ", str(error.value)), (name, str(error.value))
        assert "evil" not in str(error.value)
        if cls is RunConfig:
            with pytest.raises(ConfigError):
                FederationController(config={name: value})
    assert values


def test_letters_of_all_scripts_are_no_such_characters():
    names = ("Hintergrund", "Läsion", "病变", "опухоль", "ورم", "גידול", "T1 ± 2 µm → é", "a\u00a0b")
    assert RunConfig(classes=names).classes == names
    assert printable(" ".join(names)) == " ".join(names)


@pytest.fixture
def kit(phantom_dir, tmp_path) -> Hospital:
    return Hospital(
        tmp_path / "kits/site_A", phantom_dir / "site_A", privacy={"min_images": 1}, jobs={"approve": True}
    )


def evil_entries(book: JobBook) -> list[JobEntry]:
    """A book that was not checked: each setting, and all that a job says of itself."""
    entries = []
    for name, value in evil_settings(RunConfig):
        config = {**RunConfig(**TINY_NETWORK, purpose="a test").to_dict(), name: value}
        origin = Origin(**{f.name: EVIL for f in dataclasses.fields(Origin) if str(f.type) == "str"})
        decision = Decision(
            **{f.name: EVIL if str(f.type) == "str" else 1.0 for f in dataclasses.fields(Decision)}
        )
        runs = {EVIL: 1.0, "job": 2.0}
        entry = JobEntry(
            job_hash(config), config, 1.0, "waiting", runs, {"job": 3.0}, {EVIL: origin}, (decision,)
        )
        book.folder.mkdir(parents=True, exist_ok=True)
        book._write(entry)
        entries.append(entry)
    return entries


def test_the_pages_on_which_a_job_is_approved_cannot_be_forged(kit, run, shown):
    book = JobBook(kit.kit / "medfedaug/site_A/jobs")
    entries = evil_entries(book)
    printed = lambda *args: "".join(run(*args)[1:])  # noqa: E731
    for show in (shown, printed):
        listed = show("site", "jobs", kit.kit)
        assert_clean(listed)
        assert all(entry.hash in listed for entry in entries)
    # The list has the page of each job that waits; alone, a job's page is made the same way.
    assert_clean(in_a_terminal("site", "jobs", kit.kit, entries[0].hash[:12]))
    assert shown("site", "approve", kit.kit, entries[0].hash[:12]) == f"{entries[0].hash}: approved\n"


@pytest.fixture
def evil_site(phantom_dir, tmp_path):
    """A hospital whose data folder and files have such names, one of them damaged."""
    name = EVIL.replace("/", "").replace("\udcff", "")
    folder = Path(shutil.copytree(phantom_dir / "site_B", tmp_path / f"data {name}/site_B"))
    listing = json.loads((folder / "dataset.json").read_text())
    for split in ("training", "validation", "test"):
        for number, entry in enumerate(listing[split]):
            for kind in ("image", "label"):
                renamed = f"{kind}s/{split} {number} {name}.nii.gz"
                (folder / entry[kind]).rename(folder / renamed)
                entry[kind] = renamed
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


def damage(folder: Path) -> None:
    for path in folder.glob("images/training*"):
        path.write_bytes(path.read_bytes()[:200])


def rules(**jobs):
    return {"privacy": {"min_images": 1}, "jobs": jobs}


def test_a_federation_with_a_site_whose_names_and_errors_are_such(
    evil_site, phantom_dir, tmp_path, tiny_config, shown
):
    sites = [
        Hospital(tmp_path / "kits/site_A", phantom_dir / "site_A", **rules()),
        Hospital(tmp_path / "kits/site_B", evil_site, **rules()),
    ]
    server_kit = tmp_path / "server"
    record = EventLog(server_kit / "job-1", "server")

    def run(job_config):
        deployment = Deployment(sites)
        try:
            deployment.run(job_config)
        finally:
            for event in deployment.events:
                record(event)
        return deployment

    run(tiny_config("fedrdn", rounds=1))
    damage(evil_site)
    with pytest.raises(RunFailed) as failed:
        run(tiny_config("fedrdn", rounds=2))
    assert_clean(str(failed.value))
    record({"event": "failed", "message": str(failed.value)})
    record.close()
    for site in sites:
        assert_clean("\n".join(site.logged))
    events = [*server_kit.rglob("events.jsonl"), *(tmp_path / "kits").rglob("events.jsonl")]
    assert len(events) >= 3
    for path in events:
        assert_clean(path.read_text())
        for event, _ in follow(path):
            assert_clean(json.dumps(event, ensure_ascii=False))
    seen = ""
    for arguments in (
        ("site", "watch", server_kit, "--once"),
        ("site", "watch", tmp_path / "kits/site_B", "--once"),
        ("site", "ledger", tmp_path / "kits/site_B", "--every"),
        ("site", "ledger", tmp_path / "kits/site_B", "--names"),
        ("site", "doctor", tmp_path / "kits/site_B"),
        ("site", "jobs", tmp_path / "kits/site_B"),
        ("inspect", "--data", evil_site.parent, "--out", tmp_path / "inspect.html"),
        ("statistics", "--data", evil_site.parent),
    ):
        text = shown(*arguments)
        assert_clean(text)
        seen += text
    assert r"\x1b[2J" in seen  # they are shown, and not left out
    assert_clean((tmp_path / "inspect.html").read_text())


def test_a_site_that_answers_with_such_an_error_forges_no_line_at_the_server(
    phantom_dir, tmp_path, tiny_config, shown
):
    """The answer is the site's own doing, and not of our code."""
    sites = [Hospital(tmp_path / f"kits/{n}", phantom_dir / n, **rules()) for n in ("site_A", "site_B")]
    answer = sites[1].answer

    def lie(request):
        reply = answer(request)
        if request.task == "train":
            reply.error, reply.weights = f"site site_B: {EVIL}", {}
        reply.metrics = {**reply.metrics, EVIL: 1.0, "input": {"missing_channels": EVIL, "scaling": EVIL}}
        return reply

    sites[1].answer = lie
    deployment = Deployment(sites)
    server = deployment.run(tiny_config(rounds=2), min_sites=1)
    record = EventLog(tmp_path / "server/job-1", "server")
    for event in deployment.events:
        record(event)
    record.close()
    text = shown("site", "watch", tmp_path / "server", "--once")
    assert_clean(text)
    assert r"\x1b[2J" in text
    folder = tmp_path / "run"
    folder.mkdir()
    results = json.dumps(server.results())
    (folder / "results.json").write_text(results)
    assert_clean(results)


def texts_replaced(value, by: str):
    """The value with every text in it, and every key that is no word of ours, as the attack has it."""
    if isinstance(value, str):
        return by
    if isinstance(value, dict):
        return {key: texts_replaced(entry, by) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [texts_replaced(entry, by) for entry in value]
    return value


# One of each kind of which a short run has none.
RARE = [
    {"event": "stage", "text": "drawing"},
    {"event": "unseen", "site": "C"},
    {"event": "planned", "reasons": [["spacing", "the median"]]},
    {"event": "constant_channels", "site": "A", "channels": "1"},
    {"event": "labelled", "site": "A", "classes": "lesion"},
    {"event": "missing_channels", "site": "A", "channels": "T1"},
    {"event": "init", "file": "w.pt", "loaded": 1, "of": 2, "skipped": {EVIL: "its shape"}},
    {"event": "left_out", "reason": "site A: gone"},
    {"event": "resumed", "round": 1},
    {"event": "refused", "round": 1, "site": "A", "reason": "NaN"},
    {"event": "missing", "round": 1, "task": "train", "site": "A", "reason": "gone"},
    {"event": "missing", "round": 1, "task": "test", "site": "A", "reason": "gone"},
    {"event": "warning", "text": "odd"},
    {"event": "ended"},
    {"event": "not_answered", "task": "train", "reason": "gone"},
    {"event": "failed", "message": "no sites"},
    {"event": "unscored", "site": "A", "reason": "few cases"},
    {"event": "away", "site": "A", "seconds": 60},
    {"event": "waiting", "sites": ["A"], "answers": 1, "needed": 2},
    {"event": "returned", "site": "A"},
    {"event": "share_lowered", "site": "A", "after": 0.45, "before": 0.7},
    {"event": "stalled", "round": 1, "reason": "flat"},
]


def test_no_field_of_an_event_reaches_a_terminal_as_it_is(phantom_dir, tmp_path, tiny_config, shown, run):
    sites = [Hospital(tmp_path / f"kits/{n}", phantom_dir / n, **rules()) for n in ("site_A", "site_B")]
    deployment = Deployment(sites)
    deployment.run(tiny_config("fedrdn", rounds=1))
    own_events = [event for event, _ in follow(next((tmp_path / "kits/site_A").rglob("events.jsonl")))]
    events = [*deployment.events, {"event": "finished"}, *own_events, *RARE]
    kinds = {name.removeprefix("_on_") for name in vars(EventLines) if name.startswith("_on_")}
    assert kinds <= {event["event"] for event in events}  # one that is new has its place in RARE
    file = tmp_path / "server/job/medfedaug/events.jsonl"
    file.parent.mkdir(parents=True)
    with file.open("w") as out:
        for event in events:
            # As they are in a file that somebody else wrote.
            out.write(json.dumps({**texts_replaced(event, EVIL), "event": event["event"]}) + "\n")
    text = shown("site", "watch", tmp_path / "server", "--once")
    assert_clean(text)
    assert r"\x1b[2J" in text
    assert_clean("".join(run("site", "watch", tmp_path / "server")[1:]))


def told(name: str = EVIL) -> TextTable:
    return TextTable([EVIL, "dice"], [[name, "0.5"]], [{EVIL: EVIL, "dice": 0.5}], (EVIL,))


def test_tables_in_files_have_one_line_a_row_and_no_markup_of_a_name():
    table = told()
    for text in (table.markdown(), table.csv()):
        assert_clean(text)
    assert len(table.csv().splitlines()) == 2
    name = "[A](http://evil.org) `x` <b> https://evil.org ![](x) | ~~y~~ &lt; # z"
    document = model_card.Document(name, name, [(name, (model_card.Table((name,), ((name,),)), name))])
    for text in (document.markdown(), told(name).markdown()):
        assert not re.search(r"(?<!\\)\](?!\\)\(", text)
        assert "://" not in text
        assert not re.search(r"(?<!\\)[`<]", text)
    html, body = page.start_page(EVIL)
    page.add(body, "p", EVIL, title=EVIL)
    page.table(body, [EVIL], [[EVIL]])
    assert_clean(ET.tostring(html, encoding="unicode").replace("\nall is well", ""))


def test_errors_are_one_printable_line_whose_names_are_still_found():
    error = DataError("is damaged", site="A", path=f"/data/{EVIL}")
    assert_clean(str(error))
    assert "\n" not in str(error)
    name = "Meyer\x1b[2J\ue002Hans.nii"  # with the mark that ends a name
    assert "Hans" not in replace_own(MedFedAugError(f"{own(name)}: gone"), lambda text: "a case")
