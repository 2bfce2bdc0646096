"""Send the sites' metrics of each round as NVFlare analytics to TensorBoard at the server."""

from importlib.util import find_spec

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.recipe.spec import Recipe
from nvflare.recipe.utils import add_experiment_tracking
from nvflare.widgets.widget import Widget

from medfedaug.errors import ConfigError
from medfedaug.federation.messages.messages import TEST, TRAIN, VALIDATE, Reply
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.job.messages import reply_from_model
from medfedaug.runs.folder import SERVER_TRACKING
from medfedaug.utils.validation import check_choice, is_number


def add_tracking(recipe: Recipe, tracker: str) -> None:
    """Let the sites of a job send their metrics, and the server write them to a tracker."""
    check_choice("tracking", tracker, ("tensorboard",))
    if find_spec(tracker) is None:
        raise ConfigError(f"tracking needs the package {tracker}: pip install 'medfedaug[tracking]'")
    recipe._job.to_clients(RoundMetrics(), id="round_metrics")
    add_experiment_tracking(recipe, tracker, tracking_config={"tb_folder": SERVER_TRACKING})


class RoundMetrics(Widget):
    """Send the numbers in a site's replies to the server as analytics, each with its round.

    A site in a real federation sends none unless its own settings say so (``tracking`` of
    `medfedaug.hospital.privacy.site_settings.SiteSettings`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._sends: bool | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Read a task's result before it is sent."""
        if event_type != EventType.AFTER_TASK_EXECUTION:
            return
        if self._sends is None:
            settings = SiteSettings.load(fl_ctx.get_workspace().get_root_dir())
            self._sends = settings.tracking or settings.simulation
        if not self._sends:
            return
        result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        for name, value, round_ in tracked(reply_from_model(FLModelUtils.from_shareable(result))):
            dxo = create_analytic_dxo(name, value, AnalyticsDataType.SCALAR, global_step=round_)
            send_analytic_dxo(self, dxo, fl_ctx)


def tracked(reply: Reply) -> list[tuple[str, float, int]]:
    """Return name, value and round of the numbers in a reply, earlier rounds first.

    A validation score in an update belongs to the previous round, whose model was scored. The test scores of
    a class have names such as ``test_dice/lesion``.

    >>> tracked(Reply("train", 3, metrics={"train_loss": 0.5, "val_dice": 0.7, "seconds": None}))
    [('val_dice', 0.7, 2), ('train_loss', 0.5, 3)]
    """
    prefix = {TRAIN: "", VALIDATE: "val_", TEST: "test_"}.get(reply.task)
    if prefix is None:
        return []
    numbers = dict(reply.metrics)
    classes = numbers.get("classes")
    for label, scores in classes.items() if isinstance(classes, dict) else ():
        # The ends of intervals belong to the test alone, and are no curve.
        ends = ("_low", "_high")
        numbers |= {f"{name}/{label}": value for name, value in scores.items() if not name.endswith(ends)}
    entries = []
    for name, value in numbers.items():
        if is_number(value):
            earlier = reply.task == TRAIN and name.startswith("val_")
            entries.append((prefix + name, float(value), reply.round - int(earlier)))
    return sorted(entries, key=lambda entry: entry[2])
