"""`Census`: the one place at a site that counts the patients behind each number that leaves it."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Payload = dict[str, Tensor]

LARGEST_SHARE = 2.0
"""The largest share of a patient in a number that leaves a site, in units of 1/n for n = ``min_images``."""

_COUNTS_FROM = 0.1  # a patient counts whose weight is at least this part of the largest

_NO_GRADIENT = torch.finfo(torch.float32).eps
"""A sample counts in a step if its gradient is above this part of the largest of the round: a smaller one is
lost in a sum in float32. A loss may leave samples out, by class weights of 0 for instance."""

_MARK = "_medfedaug_contributors"


class Contributors:
    r"""The patients behind the numbers of a tensor.

    **The rule.** At least n patients are behind a number that leaves a site, and none has a share above 2/n.
    A patient counts with a weight of at least a tenth of the largest, so that the long tail of a running
    average does not count. A share of 1/n would refuse an honest mean over n patients of whom one has two
    images; with 2/n, the effective number of patients :math:`(\sum w)^2 / \sum w^2` is never below n/2.

    Args:
        weights: (rows, patients), of any sign: one row for all numbers of the tensor, or several for parts
            of it. A row of zeros is about no patient.

    Example:
        >>> alike = Contributors(torch.ones(1, 10))
        >>> int(alike.number), float(alike.share), bool(alike.enough(10))
        (10, 0.1, True)
        >>> last_batch = Contributors(torch.tensor([[1.0, 1.0, *[0.01] * 8]]))
        >>> int(last_batch.number), bool(last_batch.enough(10))
        (2, False)
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights.detach().to("cpu", torch.float64).abs()

    @property
    def number(self) -> Tensor:
        """The number of patients who count, by row."""
        largest = self.weights.amax(dim=1, keepdim=True)
        return ((self.weights > 0) & (self.weights >= _COUNTS_FROM * largest)).sum(dim=1)

    @property
    def share(self) -> Tensor:
        """The largest share of a patient, by row; 0 for nobody."""
        return self.weights.amax(dim=1) / self.weights.sum(dim=1).clamp_min(1e-300)

    def enough(self, least: int) -> Tensor:
        """Return whether numbers with these patients may leave, by row."""
        few = (self.number < least) | (self.share > LARGEST_SHARE / least * (1 + 1e-9))
        return ~few | (self.weights.amax(dim=1) == 0)

    def problem(self, least: int) -> str:
        """Describe the first row that may not leave; empty if all may."""
        bad = (~self.enough(least)).nonzero().flatten()
        if not len(bad):
            return ""
        if int(self.number[bad[0]]) < least:  # the text leaves the site, and the number itself is about few
            return f"fewer than {least} patients would be behind it"
        return f"one patient would have more than {LARGEST_SHARE / least:.0%} of it"


def contributors_of(tensor: Tensor) -> Contributors | None:
    """Return the patients behind a tensor that the census made; ``None`` for any other tensor."""
    contributors: Contributors | None = getattr(tensor, _MARK, None)
    return contributors


def _marked(tensor: Tensor, contributors: Contributors | None) -> Tensor:
    if contributors is not None:
        setattr(tensor, _MARK, contributors)
    return tensor


class Census:
    """Counts the patients behind the numbers of a site.

    A method computes what it sends with the functions of this class. They mark the tensors that they return
    with their patients. Any later operation makes a new tensor without a mark, and a tensor without a mark
    leaves in a simulation only.

    Args:
        owners: the patient of each training case.
        least: n, the fewest patients behind a number.
        silent: the cases from whose samples a step learns nothing, since nothing is annotated in them.

    Attributes:
        strict: whether the site is in a real federation, where a number without patients does not leave.
    """

    def __init__(self, owners: Sequence[Hashable], least: int = 1, silent: Sequence[int] = ()) -> None:
        names = {owner: index for index, owner in enumerate(dict.fromkeys(owners))}
        self.patient_of = torch.tensor([names[owner] for owner in owners], dtype=torch.long)
        self.patients, self.least, self._silent = len(names), least, {*silent}
        self._passed: list[Tensor | None] = []  # the patient of each sample of a step
        self._steps: list[Tensor | None] = []  # the same; -1 for a silent case
        self._gradients: list[Tensor | None] = []  # of each sample of a step, their largest magnitude
        self.strict = False

    # The training of a round, entered by the site.

    def begin(self) -> None:
        """Forget the steps of the last round."""
        self._passed, self._steps, self._gradients = [], [], []

    def step(self, cases: Sequence[int] | None) -> Tensor | None:
        """Enter a step over samples of these cases, and return the patients of the samples.

        ``None`` says that the cases are unknown: then nothing about this round leaves.
        """
        self._gradients.append(None)
        if cases is None:
            self._passed.append(None)
            self._steps.append(None)
            return None
        patients = self.patient_of[torch.tensor([*cases], dtype=torch.long)]
        self._passed.append(patients)
        silent = torch.tensor([case in self._silent for case in cases], dtype=torch.bool)
        self._steps.append(patients.where(~silent, -1))
        return patients

    def gradients(self, of_outputs: Tensor) -> None:
        """Enter the gradients of the loss for the outputs of the last step's samples, (B, ...)."""
        sizes = torch.linalg.vector_norm(of_outputs.detach().flatten(1), torch.inf, dim=1)
        before = self._gradients[-1]
        self._gradients[-1] = sizes if before is None or len(before) != len(sizes) else sizes.maximum(before)

    def __len__(self) -> int:
        """Return the number of steps of the round."""
        return len(self._steps)

    def all_steps(self) -> None:
        """Enter a training in which each case is drawn alike, by DP-SGD or a script that the site allows."""
        self._passed, self._steps, self._gradients = [self.patient_of], [self.patient_of], [None]

    def _shares(self, patients: Tensor) -> Tensor:
        counts = torch.bincount(patients[patients >= 0], minlength=self.patients).double()
        return counts / counts.sum().clamp_min(1)

    def _heard(self) -> list[Tensor]:
        """Return the patient of each sample of each known step, -1 for a sample without a gradient."""
        sizes = [None if size is None else size.float().cpu() for size in self._gradients]
        largest = max((float(size.max()) for size in sizes if size is not None and len(size)), default=0.0)
        return [
            step
            if size is None or len(size) != len(step) or not largest
            else step.where(size > _NO_GRADIENT * largest, -1)
            for step, size in zip(self._steps, sizes, strict=True)
            if step is not None
        ]

    def of_steps(self, by_age: Sequence[float] | None = None, *, passed: bool = False) -> Contributors | None:
        """Return the patients of the round's steps.

        ``by_age`` has the weight of each step, the last one first, equal by default. ``passed`` counts each
        sample that passed through the network, and not only those with a gradient.
        """
        known = [step for step in self._passed if step is not None] if passed else self._heard()
        steps = [self._shares(of_step) for of_step in known]
        if not steps or len(steps) < len(self._steps):
            return None
        weights = torch.ones(len(steps)) if by_age is None else torch.tensor([*by_age][::-1])
        weights = weights.abs().double()
        if len(weights) != len(steps) or not bool(weights.isfinite().all()):
            return None
        return Contributors((weights[:, None] * torch.stack(steps)).sum(dim=0)[None])

    @property
    def everyone(self) -> Contributors:
        """The patients of the site, each with the weight of its cases."""
        return Contributors(self._shares(self.patient_of)[None])

    def of_cases(self, weights: Sequence[float]) -> Contributors:
        """Return the patients behind a sum over the training cases, given the weight of each case."""
        values = torch.tensor([*weights], dtype=torch.float64)
        return Contributors(torch.bincount(self.patient_of, values, minlength=self.patients)[None])

    # What methods compute what they send with.

    def over_steps(self, value: Tensor) -> Tensor:
        """Return a copy of a value that is made of all steps of the round alike, as a sum of gradients is."""
        return _marked(value.detach().clone(), self.of_steps())

    def of_all(self, value: Tensor) -> Tensor:
        """Return a copy of a number about the whole site, such as its number of cases or of steps."""
        return _marked(value.detach().clone(), self.everyone)

    def over_sample(self, value: Tensor, cases: Sequence[int]) -> Tensor:
        """Return a copy of a number about some training cases, in which each patient has the same weight."""
        present = torch.bincount(self.patient_of[torch.tensor([*cases])], minlength=self.patients) > 0
        return _marked(value.detach().clone(), Contributors(present[None].double()))

    def over_cases(
        self,
        values: Iterable[Mapping[str, Tensor]],
        weights: Sequence[float] | None = None,
        then: Callable[[Payload], Payload] | None = None,
    ) -> Payload:
        """Return the weighted means of values of the training cases in their order, float32.

        A case without a value has NaN. ``then`` computes what is sent from the means, and from nothing else.
        """
        totals, who, sums = Payload(), Payload(), Payload()
        for case, entries in enumerate(values):
            weight = 1.0 if weights is None else float(weights[case])
            for key, value in entries.items():
                value = value.detach().to("cpu", torch.float64)
                rows = value.isfinite()
                while rows.ndim > 1:  # a row is known whole, or not at all
                    rows = rows.all(dim=-1)
                known = rows.reshape(*rows.shape, *[1] * (value.ndim - 1)).expand_as(value)
                if key not in totals:
                    totals[key], sums[key] = torch.zeros_like(value), torch.zeros_like(value)
                    who[key] = torch.zeros(rows.numel(), max(self.patients, 1), dtype=torch.float64)
                totals[key] += weight * torch.where(known, value, 0.0)
                sums[key] += weight * known
                who[key][:, self.patient_of[case] if self.patients else 0] += weight * rows.reshape(-1)
        means = {key: (total / sums[key].clamp_min(1e-300)).float() for key, total in totals.items()}
        if then is None:
            return {key: _marked(mean, Contributors(who[key])) for key, mean in means.items()}
        everyone = Contributors(torch.cat(list(who.values())))  # a result may depend on each mean
        return {key: _marked(value.detach().clone(), everyone) for key, value in then(means).items()}

    def by_class(self, values: Tensor, classes: Tensor, patients: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sums of samples' values by class, (K, D), and the numbers of samples, (K,), float32.

        A class of fewer than n patients counts as one that the site does not have. Values are (N, D), shares
        of each class in a sample (N, K), and patients of the samples (N,), as `step` returns them.
        """
        sums, counts = classes.T @ values, classes.sum(dim=0)
        if patients is None or len(patients) != len(values):
            return sums.float(), counts.float()
        who = torch.zeros(classes.shape[1], self.patients, dtype=torch.float64)
        who.index_add_(1, patients.cpu(), classes.detach().T.to("cpu", torch.float64))
        enough = Contributors(who).enough(self.least)
        contributors = Contributors(who * enough[:, None])
        kept = enough.to(sums)
        return (
            _marked((sums * kept[:, None]).float(), contributors),
            _marked((counts * kept).float(), contributors),
        )

    def like(self, value: Tensor, source: Tensor) -> Tensor:
        """Return a value that is computed from a marked tensor, row by row and from nothing else."""
        return _marked(value.detach().clone(), contributors_of(source))

    def histogram(self, counts: Iterable[Tensor]) -> Tensor:
        """Return the histogram of a site, (C, L), whose rows add up to one, from those of its cases.

        Adjacent bins are merged until n patients are in each: they then have equal heights. ``counts`` are
        those of each training case, (C, L), in their order.
        """
        by_patient: Tensor | None = None
        for case, count in enumerate(counts):
            count = count.detach().to("cpu", torch.float64)
            if by_patient is None:
                by_patient = torch.zeros(self.patients, *count.shape, dtype=torch.float64)
            by_patient[self.patient_of[case]] += count
        assert by_patient is not None
        who = torch.zeros(by_patient.shape[1] * by_patient.shape[2], self.patients, dtype=torch.float64)
        total = by_patient.sum(dim=0)
        bins = total.shape[1]
        for channel in range(len(total)):
            for group in self._groups(by_patient[:, channel]):
                weights = by_patient[:, channel, group].sum(dim=1)
                total[channel, group] = total[channel, group].mean()
                who[channel * bins + torch.tensor([*range(bins)][group])] = weights
        return _marked((total / total.sum(dim=1, keepdim=True)).float(), Contributors(who))

    def _groups(self, by_patient: Tensor) -> list[slice]:
        """Divide the bins of a channel, (patients, L), into groups of enough patients."""
        groups, start, bins = list[slice](), 0, by_patient.shape[1]

        def enough(group: slice) -> bool:
            weights = by_patient[:, group].sum(dim=1)[None]
            return bool(weights.any()) and bool(Contributors(weights).enough(self.least))

        for end in range(1, bins + 1):
            if enough(slice(start, end)):
                groups.append(slice(start, end))
                start = end
        if start < bins:  # the rest joins groups before it until one patient does not outweigh the others
            rest = slice(start, bins)
            while groups and not enough(rest):
                rest = slice(groups.pop().start, bins)
            groups.append(rest)
        return groups

    def flags(self, members: Sequence[Sequence[int] | None]) -> Tensor:
        """Return 1 for each set of training cases of at least n patients, and 0 for others, (K,).

        ``None`` is the set of all cases.
        """
        who = torch.zeros(len(members), self.patients, dtype=torch.float64)
        for row, cases in enumerate(members):
            owners = self.patient_of if cases is None else self.patient_of[torch.tensor([*cases]).long()]
            who[row] = (torch.bincount(owners, minlength=self.patients) > 0).double()
        enough = Contributors(who).enough(self.least) & (who.amax(dim=1) > 0)
        return _marked(enough.float(), Contributors(who * enough[:, None]))
