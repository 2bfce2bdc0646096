"""DAC-SC: norms that remove style from features and keep their content."""

from torch import Tensor, nn

from medfedaug.methods.average import AveragedParameters, AverageServer
from medfedaug.methods.base import Method, ServerContext, ServerExchange, SiteContext, SitePart
from medfedaug.models import insert_layers, stage_layers
from medfedaug.models.stages import known_stages
from medfedaug.research.layers.phase_norms import StyleControlNorm, control_shortcuts


class DACSC(Method):
    """Decompose, adjust, compose: SCNorm and CCNorm (Lee et al., CVPR 2023).

    Amplitudes of features over space stand for style, and phases for content. After every stage but the last
    comes an SCNorm, in training and in evaluation, ::

        x̂ = γ (s₁ IN(x) + s₂ x) + β,   s = softmax(h / T)

    with T = 0.1. In the shortcuts of residual blocks CCNorm replaces the batch norm; it keeps the phases of
    ``x − λμ`` with λ = 0.5 (`medfedaug.research.functional.phases.control_content`).

    Exchange, every round and SCNorm: γ and β, (C,) each, and h, (2,), up; their average down, which a
    finished run keeps.

    Raises:
        ValueError: for a network whose stages are unknown.

    Deviations:
        The abstract and the published code were available, not the paper's text. The code transforms features
        to frequencies and back; the closed forms above are equal up to rounding, except that the code's
        amplitudes are at least 0.003. The code trains λ, which stays at its initial 0.5: it acts on a phase
        of 0 or π, which has no gradient. A network without normalised shortcuts, such as AlexNet and most
        U-Nets, gets SCNorm alone. The paper's networks are ResNets with weights from ImageNet, with an SCNorm
        after three of four stages; in a U-Net the norm follows the pooling, and skip connections have none.
        Methods on the entries of the state dict, such as FedProx and SCAFFOLD, do not act on γ, β and h.
    """

    name = "dac_sc"
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"complete_state_dict"})

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Insert the norms."""
        known = known_stages(network)
        stages = None if known is None else [stage.name for stage in known[:-1]]
        return control_shortcuts(insert_layers(network, StyleControlNorm, stages))

    def at_site(self, context: SiteContext) -> SitePart:
        return AveragedParameters(_parameters(context.network))

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(_parameters(context.network))


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return γ, β and h of all norms by stage."""
    return {
        f"{stage}/{name}": parameter
        for stage, norm in stage_layers(network, StyleControlNorm).items()
        for name, parameter in norm.named_parameters()
    }
