"""DAC-SC: norms that remove style from features and keep their content."""

from collections.abc import Sequence

from torch import Tensor, nn

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import Positive, Share
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

    In the shortcuts of residual blocks CCNorm replaces the batch norm; it keeps the phases of
    ``x − λμ`` (`medfedaug.research.functional.phases.control_content`).

    Exchange, every round and SCNorm: γ and β, (C,) each, and h, (2,), up; their average down, which a
    finished run keeps.

    Args:
        stages: the stages with an SCNorm; ``None``: all but the last.
        content: λ of CCNorm, from 0, which keeps all phases, to 1, the batch norm itself.
        temperature: T of the softmax; the smaller, the sooner one of the two shares dominates.

    Raises:
        ConfigError: for arguments out of range.
        ValueError: for a network whose stages are unknown, or that has a single one.

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
    """Return γ, β and h of all norms by stage."""
    return {
        f"{stage}/{name}": parameter
        for stage, norm in stage_layers(network, StyleControlNorm).items()
        for name, parameter in norm.named_parameters()
    }
