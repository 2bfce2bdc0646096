"""What a training script of a user's own is told of a site's files, and what of it is taken."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medfedaug.config.run import RunConfig
from medfedaug.config.training_scripts import loop_reference
from medfedaug.data.base import SiteFolder
from medfedaug.data.sites import open_site
from medfedaug.errors import ConfigError, DataError, MedFedAugError
from medfedaug.federation import SiteTrainer
from medfedaug.federation.site.script_components import script_scores
from medfedaug.federation.site.script_training import CustomLoop


class Reads(CustomLoop):
    """A script that looks at its files."""

    def start(self, session):
        self.files = session.files("training")

    def train(self, round_):
        raise AssertionError


def files_at(folder: SiteFolder, config: RunConfig) -> list[dict]:
    trainer = SiteTrainer(config, folder, "cpu")
    trainer.loop = Reads()
    trainer.open(folder.name)
    return trainer.loop.files


def test_labels_of_photographs_are_the_federations_also_where_a_site_lacks_a_class(make_photos):
    folder = open_site(make_photos("A"))  # of cats and dogs
    config = RunConfig(task="classification", network="lenet5", in_channels=3, classes=("bird", "cat", "dog"))
    labels = {(Path(file["image"]).parent.name, file["label"]) for file in files_at(folder, config)}
    assert labels == {("cat", 1), ("dog", 2)}
    with pytest.raises(DataError, match="the class 'dog' is not among the federation's: bird, cat"):
        files_at(folder, replace(config, classes=("bird", "cat")))


def test_channels_that_a_script_would_mix_up_are_refused(make_photos):
    folder = replace(
        open_site(make_photos("A")), channel_names=("T1", "T2"), federation_channels=("T2", "T1")
    )
    config = RunConfig(task="classification", network="lenet5", in_channels=3, classes=("cat", "dog"))
    with pytest.raises(DataError, match="in another order, and the training script reads files as they are"):
        files_at(folder, config)


def test_a_case_that_a_script_cannot_score_has_no_score_and_an_impossible_one_is_named(make_photos):
    folder = open_site(make_photos("A"))
    first, *others = (case.name for case in folder.cases["test"])
    assert others

    def scored(**scores):
        values = {**dict.fromkeys(others, 0.5), **scores}
        return script_scores(lambda network, split: values, torch.nn.Identity(), folder, "test", "accuracy")

    # As MONAI's DiceMetric gives it without foreground.
    assert scored(**{first: float("nan")}) == scored(**{first: None})
    assert scored(**{first: float("nan")})["accuracy"] == 0.5
    with pytest.raises(
        MedFedAugError, match="site A: the script gives a case the score 87, and accuracy is from 0"
    ):
        scored(**{first: 87.0})


def test_a_scripts_file_with_an_odd_name_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "my train.py"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"my train\.py: the file's name goes into the job.*rename it"):
        loop_reference(str(path))
