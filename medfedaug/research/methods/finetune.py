"""Fine-tuning: every site trains the global model further before the test."""

from medfedaug.methods.arguments import Count
from medfedaug.methods.base import Method


class FineTune(Method):
    """Local fine-tuning of the global model before the test (FedAvg + FT).

    After training, each site trains the selected model on its training images, with the run's optimiser, and
    tests the result, which never leaves it. With ``epochs=0`` it is FedAvg, bit for bit. A site without
    training images tests the global model.

    Args:
        epochs: passes over the site's training images.

    Deviations:
        The round is selected before fine-tuning, by the global model's validation scores. Papers that compare
        with it do not give the number of epochs.
    """

    name = "finetune"

    def __init__(self, epochs: Count = 1) -> None:
        self.epochs = self.epochs_before_test = epochs
