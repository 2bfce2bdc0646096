"""The patients behind the entries of an update: `medfedaug.methods.census` applied to a network."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.errors import PrivacyRefused
from medfedaug.federation.messages.messages import Reply
from medfedaug.methods.census import Census, Contributors, contributors_of

_NOBODY = Contributors(torch.zeros(1, 1))


class EntryPatients:
    """Finds the patients behind the tensors that a site is about to send.

    - A tensor that the census marked has the patients of its mark.
    - A parameter that the run's optimiser trains has those of all steps of the round, and so has one that a
      method says to train alike (``trained`` of its context). Of a method's other parameters nobody knows how
      earlier steps fade, or whether they are of one class.
    - The running statistics of a batch norm have those of a running average over the steps, in which samples
      without a gradient count too.
    - A buffer, or a parameter without gradients, that has not changed since the round began is about nobody.

    For any other tensor nobody can answer.
    """

    def __init__(self, census: Census, network: nn.Module) -> None:
        self.census, self.network = census, network
        self._trained: dict[int, Tensor] = {}  # given to the optimisers of methods
        self._before: dict[str, Tensor] = {}
        self.by_age: Callable[[int], list[float] | None] = lambda steps: None
        """Returns the weights of a number of steps in the parameters, by age; ``None`` for equal ones."""

    def optimised(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Note parameters of a method that the round's steps train."""
        found = list(parameters)
        self._trained.update({_place(value): value for value in found})
        return found

    def begin(self) -> None:
        """Begin a round: the network has the received model."""
        self.census.begin()
        self._before = {name: value.detach().clone() for name, value in self._untrained()}

    def note(self, reply: Reply) -> None:
        """Note the patients behind a reply's payload, and take the marks off the tensors."""
        reply.contributors = self.of(reply.payload)
        reply.payload = {key: value.detach().clone() for key, value in reply.payload.items()}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Contributors | None]:
        """Return the patients behind tensors; ``None`` where nobody can answer."""
        steps = self.census.of_steps(self.by_age(len(self.census)))
        places = dict[int, Contributors | None]()
        for parameter in self.network.parameters():
            places[_place(parameter)] = steps
        for name, value in self._untrained():
            same = name in self._before and torch.equal(self._before[name], value)
            places[_place(value)] = _NOBODY if same else None
        places.update(dict.fromkeys(self._trained, steps))
        for norm, module in self.network.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                contributors = self._of_norm(norm, module)
                for statistic in (module.running_mean, module.running_var):
                    assert statistic is not None
                    places[_place(statistic)] = places[_place(statistic)] or contributors
        return {key: contributors_of(value) or places.get(_place(value)) for key, value in tensors.items()}

    def _untrained(self) -> list[tuple[str, Tensor]]:
        """Return what no optimiser changes: buffers, and parameters without gradients, as of a codebook."""
        still = [(name, p) for name, p in self.network.named_parameters() if not p.requires_grad]
        return [*self.network.named_buffers(), *still]

    def _of_norm(self, name: str, norm: _BatchNorm) -> Contributors | None:
        count = f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        steps = len(self.census)
        if norm.num_batches_tracked is None or count not in self._before or not steps:
            return None
        updates = (int(norm.num_batches_tracked) - int(self._before[count])) / steps
        if norm.momentum is None:  # a cumulative average
            return self.census.of_steps(passed=True)
        kept = (1.0 - norm.momentum) ** updates
        if not 0.0 <= kept <= 1.0:
            return None
        return self.census.of_steps([kept**age for age in range(steps)], passed=True)


def check_contributors(site: str, entries: Mapping[str, Contributors | None], least: int) -> None:
    """Check the patients behind each entry that is to leave a site."""
    for key, contributors in entries.items():
        problem = "the site cannot say which patients are in it; it sends such numbers in a simulation only"
        if contributors is not None and (problem := contributors.problem(least)):
            problem += " (min_images of its privacy policy); more steps a round or larger batches have more"
        if problem:
            raise PrivacyRefused(site, f"{key} stays here: {problem}")


def step_weights(steps: int, rate: float, momentum: float, pull: float) -> list[float]:
    """Return the weight of each step's gradient in the parameters, by the age of the step.

    Weight decay and other pulls of strength ``pull`` let earlier steps fade: with ``rate * pull`` = 1 the
    parameters are those of the last step only.

    Example:
        >>> step_weights(3, 0.1, 0.0, 0.0), step_weights(3, 0.1, 0.0, 10.0)
        ([0.1, 0.1, 0.1], [0.1, 0.0, 0.0])
    """
    velocity, value, weights = 1.0, 0.0, []
    for _ in range(steps):
        value -= rate * velocity
        weights.append(abs(value))
        velocity = momentum * velocity + pull * value
    return weights


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
