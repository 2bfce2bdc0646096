"""The pages of the documentation: what `make docs` checks, and what can be checked without building them."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from medfedaug.metrics.registry import BUILT_IN_METRICS
from medfedaug.privacy.job_policy import JobRules

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CHECK = runpy.run_path(str(DOCS / "check_pages.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    ROOT / "examples/README.md",
]


def text(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def write(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    return folder


def test_a_link_to_nowhere_is_found(tmp_path):
    """Pages, anchors and pictures; what another site has is left alone."""
    root = write(
        tmp_path,
        index='<a href="other.html#here">x</a> <a href="#own">x</a><p id="own"></p> <a href="https://x.org">x</a>',
        other='<h2 id="here">x</h2> <a href="index.html">x</a> <a href="mailto:a@b">x</a>',
    )
    assert CHECK["broken_links"](root) == []
    write(
        root,
        third='<a href="lost.html">x</a> <a href="other.html#gone">x</a> <img src="no.png"><a href="#n"></a>',
    )
    assert CHECK["broken_links"](root) == [
        f"third.html: {target}" for target in ("lost.html", "other.html#gone", "no.png", "#n")
    ]


def test_the_reference_has_every_public_name():
    """Without Sphinx: each module with public names is described as a whole, or name by name."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in [DOCS / "api.md", *DOCS.glob("api/*.md")])
    described = dict(re.findall(r"automodule:: (\S+)\n   :members:(.*)", pages))
    public = CHECK["public_names"]()
    assert {"medfedaug.transforms.FedRDNd", "medfedaug.statistics.ChannelStatistics"} <= public
    missing = set()
    for name in public:
        module, _, own = name.rpartition(".")
        members = described.get(module)
        if members is None or (members.strip() and own not in re.split(r",\s*", members.strip())):
            missing.add(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_links_to_are_there(page):
    made = {"tutorials", "gallery"}  # by `make docs`, of the scripts in `examples`
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        file, _, _ = target.partition("#")
        if not file or re.match(r"[a-z]+:", file) or set(Path(file).parts) & made & {Path(file).parent.name}:
            continue
        assert (page.parent / file).exists(), f"{page.name}: {target}"


def test_pages_of_tutorials_have_their_scripts():
    linked = set()
    for page in PAGES:
        linked |= set(re.findall(r"\]\((?:\.\./)?tutorials/(\w+)\.rst\)", text(page)))
    scripts = {path.stem for path in (ROOT / "examples/tutorials").glob("0*.py")}
    assert linked == scripts


def test_the_lists_and_tables_of_methods_are_those_of_the_classes():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    behind = [
        path.relative_to(ROOT).as_posix()
        for path, text in {generate["LIST"]: generate["method_list"](), **generate["pages"]()}.items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not behind, "write them anew: make catalogue"


def test_the_table_of_scores_has_every_metric():
    table = (DOCS / "analysis.md").read_text(encoding="utf-8").split("\n## Scores\n")[1].split("```")[0]
    assert set(BUILT_IN_METRICS) == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_the_table_of_rules_for_jobs_has_every_rule():
    table = (DOCS / "deploy.md").read_text(encoding="utf-8").split("| rule in `jobs` |")[1].split("\n\n")[0]
    rules = {field.name for field in dataclasses.fields(JobRules)}
    assert rules <= set(re.findall(r"`(\w+)`", table)), "docs/deploy.md: add a row for the new rule"


@pytest.mark.parametrize("term", ["γ", "Own pair", "Unseen site", "Dice"])
def test_the_glossary_explains(term):
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    assert re.search(rf"^{term}\n  \S", glossary, re.MULTILINE)


@pytest.fixture(scope="module")
def retina():
    """The functions of the script that computes gains from the committed runs."""
    return runpy.run_path(str(ROOT / "benchmarks/retina_tables.py"))


READERS_NAMES = {"each camera alone": "single"}
NUMBERS = {5: "five"}


def test_every_number_of_the_readme_is_computed_from_the_committed_runs(retina):
    """Rows, with what is not measured, and the sentence before them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\u2212", "-")
    rows = [
        [c.strip() for c in line.strip("|").split("|")] for line in readme.splitlines() if line[:1] == "|"
    ]
    shown = {row[0].split(" (")[0]: row[1:] for row in rows if len(row) == 5 and row[0] != "method"}
    archives = retina["SHORT"], retina["LONG"]
    short, long = ({row["methods"]: row for row in retina["gains"](name)} for name in archives)
    folds = Counter(retina["named"](run.label) for run in retina["recorded"](retina["LONG"]))
    for name, cells in ((name, cells) for name, cells in shown.items() if set(name) != {"-"}):
        method = READERS_NAMES.get(name, name.lower())
        row, after = short[method], long.get(method)
        longer = "{gain} ({interval})".format(**after) + f", {folds[method]} folds" if after else None
        assert cells == [
            row["gain"],
            row["interval"],
            row["verdict"],
            longer or "not measured",
        ]
    verdicts = {cells[2].split(" (")[0] for cells in shown.values()}
    assert {"better", "better at AVWIDE", "no difference shown"} <= verdicts
    runs = [run for run in retina["recorded"](retina["SHORT"]) if run.methods == ("fedavg",)]
    cameras, scores = {site for run in runs for site in run.tested}, defaultdict(list)
    for number, site in ((number, site) for number, run in enumerate(runs) for site in run.tested):
        for case, score in runs[number].case_scores[site].items():
            scores[number, site, runs[number].patients[site].get(case, case)].append(score)
    (patients,), (trainings,) = ({row[key] for row in short.values()} for key in ("patients", "trainings"))
    text = " ".join(readme.split())
    for part in (
        f"{NUMBERS[len(cameras)]} hospitals' retinal cameras, {patients} patients",
        f"Dice by patient against plain averaging (FedAvg, {fmean(map(fmean, scores.values())):.3f})",
        f"{NUMBERS[int(trainings)].title()} trainings of {runs[0].config['rounds']} rounds",
        f"one training, of {' or '.join(map(str, sorted({*folds.values()})))} folds of 5",
    ):
        assert part in text
    assert {row["trainings"] for row in long.values()} == {"1"}


def test_the_first_screen_of_the_readme_has_what_code_install_and_picture():
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    parts = ("hospitals", "FedRDNd(", "insert_ffa(", "pip install", "make demo", "docs/pictures/idea.png")
    for part in parts:
        assert part in first


def test_tables_of_the_results_are_computed_from_the_committed_runs(retina):
    results = (DOCS / "results/index.md").read_text(encoding="utf-8").replace("\u2212", "-")
    for row in retina["gains"](retina["SHORT"]):
        cells = f"{row['gain']} ({row['interval']}) | {row['verdict']} |"
        assert re.search(
            rf"^\| `{re.escape(row['methods'])}` \|.*\| {re.escape(cells)}$", results, re.MULTILINE
        ), row
    page = (DOCS / "results/retina/index.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in retina["longer_trainings"]() if row not in page] == []


NAMED = re.compile(r"`(?P<path>tests/[\w/]+\.py)`(?P<names>(?:, \*[^*]+\*(?: and \*[^*]+\*)?)*)")
SELECTED = re.compile(r"(?P<path>tests/[\w/]+\.py) -k (?P<names>\"[^\"]+\"|\w+)")
WORDS = {"and", "or", "not"}


@cache
def names_in(path: str) -> str:
    """The names of the functions in a file, and short texts such as names of cases."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            names.append(node.value)
    return "\n".join(names)


def named_tests(page: str) -> Iterator[tuple[str, str]]:
    """Each file of tests that a page names, with each name of a test in it; `""` for the file alone."""
    for path in re.findall(r"tests/[\w/]+(?:\.py)?", page):
        if path.removeprefix("tests/").strip("/") and not path.endswith("_"):
            yield path, ""
    for match in NAMED.finditer(page):
        yield from ((match["path"], name) for name in re.findall(r"\*([^*]+)\*", match["names"]))
    for match in SELECTED.finditer(page):
        yield from ((match["path"], name) for name in set(re.findall(r"\w+", match["names"])) - WORDS)
    # The page says once where the tests are of rows that name no file before them.
    if of_all := re.search(r"(?:All|The) tests are in `(tests/[\w/]+\.py)`", page):
        for cell in re.findall(r"^\|.*\|([^|]+)\|$", page, re.MULTILINE):
            before = cell.partition("`tests/")[0]
            yield from ((of_all[1], name) for name in re.findall(r"(?<!\*)\*(\w+)\*", before))
    # The page says once which file a letter stands for.
    letters = dict(re.findall(r"`([A-Z])` (?:stands )?for\s+`[^`]*?(tests/[\w/]+\.py) -k`", page))
    both = re.search(
        r"`([A-Z])` and `([A-Z])` for `[^`]*?(tests/[\w/]+\.py) -k` and the same of `(tests/[\w/]+\.py)`",
        page,
    )
    if both:
        letters |= {both[1]: both[3], both[2]: both[4]}
    for letter, names in re.findall(r"`([A-Z]) (\"[^\"]+\"|\w+)(?: -m \w+)?`", page):
        yield from ((letters[letter], name) for name in set(re.findall(r"\w+", names)) - WORDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_page_names_is_there(page):
    missing = []
    for path, name in named_tests(page.read_text(encoding="utf-8")):
        if not (ROOT / path).exists():
            missing.append(path)
        elif name and name not in names_in(path):
            missing.append(f"{path}, {name}")
    assert missing == []


def test_names_of_tests_are_found_on_the_pages():
    """The check above reads the five ways in which pages name tests."""
    tests = {page.name: list(named_tests(page.read_text(encoding="utf-8"))) for page in PAGES}
    reliability, threats = tests["reliability.md"], tests["threats.md"]
    assert ("tests/integration/test_reboot.py", "rebooted") in reliability
    assert ("tests/integration/test_faults.py", "sites_that_raise") in reliability
    assert ("tests/federation/server/test_secure_aggregation.py", "vanish") in reliability
    assert ("tests/federation/site/test_release_log.py", "comes_later") in threats
    assert ("tests/privacy/test_score_release.py", "half_a_step") in threats
    assert sum(bool(name) for _, name in threats) > 60
