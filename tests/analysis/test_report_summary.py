"""The page's first sentence, and the words that it explains."""

import pytest
from results import Page, content

from medfedaug.analysis import summary_table, write_report
from medfedaug.analysis.report import answer, words_in
from medfedaug.runs.load_results import load_run


def told(*folders) -> str:
    return answer(summary_table([load_run(folder) for folder in folders]))


@pytest.mark.all_layers
def test_the_answer_names_the_best_and_what_is_open(seeds):
    """Of three seeds the best method is named with its difference, and that it may be chance."""
    assert answer(summary_table(seeds)) == (
        "fedrdn has a mean Dice of 0.540 on the test cases, 0.020 above fedavg (0.520). "
        "Whether that is more than chance is open: a verdict takes more (3 of 5 seeds, 2 of 20 patients)."
    )


@pytest.mark.all_layers
def test_the_answer_of_several_methods(write):
    worse = {"DU": 0.4, "HT": 0.5}
    runs = [write(), write(methods=("fedrdn",), scores=worse), write(methods=("fedbn",), scores={"DU": 0.5})]
    # The third has one site alone, so that its mean is of other sites: it is compared all the same by none.
    assert told(*runs[:2]) == (
        "fedrdn has a mean Dice of 0.450 on the test cases, 0.150 below fedavg (0.600). "
        "Whether that is more than chance is open: a verdict takes more (1 of 5 seeds, 2 of 20 patients)."
    )
    better = write(methods=("fedfa",), scores={"DU": 0.6, "HT": 0.8})
    text = told(runs[0], runs[1], better)
    assert text.startswith(
        "fedfa has a mean Dice of 0.700 on the test cases, 0.100 above fedavg (0.600), the best "
    )
    assert text.endswith("The others: fedrdn -0.150.")


@pytest.mark.all_layers
def test_the_answer_follows_the_direction_of_the_metric(write):
    """A smaller distance is the better one."""
    far, near = content(), content(methods=("fedrdn",))
    for data, distance in ((far, 9.0), (near, 5.0)):
        for site in data["test"]["sites"].values():
            site |= {"hd95": distance, "unit": "mm", "case_metrics": {"hd95": {"p1": distance}}}
        data["test"]["mean"]["hd95"] = distance
    runs = [load_run(write(data)).scored_by("hd95") for data in (far, near)]
    assert answer(summary_table(runs)).startswith(
        "fedrdn has a mean HD95 of 5.000 on the test cases, 4.000 below "
    )


@pytest.mark.all_layers
def test_the_page_begins_with_it_and_explains_its_words(write, tmp_path):
    folders = [write(unseen={"EZ": 0.3}), write(methods=("fedrdn",), scores={"DU": 0.6, "HT": 0.75})]
    page = Page(write_report(folders, tmp_path / "page.html").read_text())
    first = page.text.index("fedrdn has a mean Dice of 0.675")
    assert first < page.text.index("2 runs · data: phantom")
    assert page.tags.count("dt") == page.tags.count("dd") >= 8
    for word in ("Dice", "unseen", "selected round", "verdict"):
        assert f"{word}{words_in(word)[word]}" in page.text
    assert words_in("AUC")["AUC"] not in page.text
