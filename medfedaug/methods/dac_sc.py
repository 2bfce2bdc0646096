"""DAC-SC: norms that take style out of features and leave their content."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import Positive, Share
from medfedaug.methods.average import AveragedParameters, AverageServer
from medfedaug.methods.base import Method, ServerContext, ServerExchange, SiteContext, SitePart
from medfedaug.models import insert_layers, stage_layers
from medfedaug.models.phase_norms import StyleControlNorm, control_shortcuts
from medfedaug.models.stages import known_stages


class DACSC(Method):
    r"""Decompose, adjust, compose: SCNorm and CCNorm (Lee et al., CVPR 2023).

    Amplitudes of features over space are taken for style and phases for content. After every stage but the
    last one stands an SCNorm, in training and in evaluation,

    .. math:: \hat x = \gamma\bigl(s_1\, \mathrm{IN}(x) + s_2\, x\bigr) + \beta, \qquad
              s = \mathrm{softmax}(h / T)

    and in the shortcuts of residual blocks CCNorm in the place of the batch norm, which keeps the phases of
    :math:`x - \lambda\mu` (`medfedaug.functional.control_content`).

    Exchange, every round and SCNorm: γ and β, (C,) each, and h, (2,), up; their average down, which a
    finished run keeps beside the model.

    Args:
        stages: the stages that get an SCNorm; ``None``: all but the last.
        content: λ of CCNorm, from 0, which keeps all phases, to 1, which is the batch norm itself.
        temperature: T of the softmax; the smaller, the sooner one of the two shares takes all.

    Raises:
        ConfigError: for arguments out of range.
        ValueError: for a network whose stages are not known, or that has a single one.

    Deviations:
        The abstract and the published code were at hand, not the paper's text. The code transforms features
        to frequencies and back. Neither norm needs that: both are the closed forms above, to rounding, but
        that the code takes no amplitude to be smaller than 0.003. λ is trained in the code, where it stays at
        the 0.5 with which it begins: it acts on a phase that is 0 or π, and that has no gradient. A network
        whose shortcuts are not normalised, as AlexNet and most U-Nets, gets SCNorm alone. The paper's
        networks are ResNets with weights from ImageNet, and an SCNorm after three of four stages; in a U-Net
        the norm stands after the pooling, and skip connections have none. Methods that act on the entries of
        the state dict, such as FedProx and SCAFFOLD, leave γ, β and h alone.
    """

    name = "dac_sc"
    capturable = True
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"complete_state_dict"})

    def __init__(
        self, stages: Sequence[int | str] | None = None, content: Share = 0.5, temperature: Positive = 0.1
    ) -> None:
        self.stages, self.content, self.temperature = stages, content, temperature

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Insert the norms."""
        stages, known = self.stages, known_stages(network)
        if stages is None and known is not None:
            stages = [stage.name for stage in known[:-1]]
            if not stages:
                raise ConfigError(
                    f"dac_sc: {type(network).__name__} has one stage, and the last one gets no norm; name it "
                    f"with dac_sc.stages=[{known[0].name}]"
                )
        insert_layers(network, StyleControlNorm, stages, temperature=self.temperature)
        return control_shortcuts(network, self.content)

    def at_site(self, context: SiteContext) -> SitePart:
        return AveragedParameters(_parameters(context.network))

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(_parameters(context.network))


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """γ, β and h of all norms, by the names of their stages."""
    return {
        f"{stage}/{name}": parameter
        for stage, norm in stage_layers(network, StyleControlNorm).items()
        for name, parameter in norm.named_parameters()
    }
