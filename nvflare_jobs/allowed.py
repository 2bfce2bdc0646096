"""The classes that a job without code may name at the server and at a site, each by its whole path.

NVFlare compares every class that such a job names with ``class_allow_list`` in ``local/resources.json`` of
the kit, and builds it with the arguments that the job gives. An entry that ends with a dot stands for
everything that can be reached below it, every function and every class that a module there has imported
included. That is why each entry here is the path of one class in the module that defines it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from medfedaug.errors import ConfigError

__all__ = ["allow_list", "foreign_prefixes", "is_void", "needed_classes", "our_classes", "outdated", "wanted"]

_SERVER = ("medfedaug.nvflare_jobs.controller.FederationController",)
_SITE = (
    "medfedaug.nvflare_jobs.executor.SiteExecutor",
    "medfedaug.nvflare_jobs.tracking.RoundMetrics",
)
# NVFlare's, which its own list has as well.
_NVFLARE_SERVER = (
    "nvflare.app_common.widgets.metrics_artifact_writer.MetricsArtifactWriter",
    "nvflare.app_common.widgets.validation_json_generator.ValidationJsonGenerator",
    "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver",
    "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver",
)
_NVFLARE_SITE = (
    # A site's kit puts it into every job, unless the site forbids that its logs are sent.
    "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
    "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
)


def our_classes(server: bool) -> tuple[str, ...]:
    """The classes of this package that a job names at the server, or at a site."""
    return _SERVER if server else _SITE


def needed_classes(server: bool) -> tuple[str, ...]:
    """All classes that a job of this package names at the server, or at a site."""
    return our_classes(server) + (_NVFLARE_SERVER if server else _NVFLARE_SITE)


def allow_list(resources: Mapping[str, Any]) -> list[str]:
    """The list in force; where ``resources`` have none, NVFlare uses a list of its own.

    Raises:
        ConfigError: when there is something else than a list of paths.
    """
    found = resources.get("class_allow_list", list(DEFAULT_CLASS_ALLOW_LIST))
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise ConfigError("local/resources.json: class_allow_list must be a list of class paths")
    return list(found)


def outdated(allowed: Sequence[str], server: bool) -> list[str]:
    """The entries that allow more of this package than is needed, such as the prefix ``medfedaug.``."""
    ours = our_classes(server)
    return [entry for entry in allowed if entry.split(".")[0] == "medfedaug" and entry not in ours]


def wanted(allowed: Sequence[str], server: bool, only: bool) -> list[str]:
    """The list as it should be.

    Args:
        allowed: the list in force.
        server: whether the kit is the server's.
        only: whether entries go that no job of this package needs.
    """
    if only:
        return list(needed_classes(server))
    old = outdated(allowed, server)
    kept = [entry for entry in allowed if entry not in old]
    return kept + [name for name in our_classes(server) if name not in kept]


def is_void(resources: Mapping[str, Any]) -> str:
    """What makes NVFlare allow every class whatever the list says, in words; empty where nothing does."""
    if "*" in allow_list(resources):
        return "class_allow_list has the entry *"
    if resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        return f"class_list_enforcement_mode is {resources['class_list_enforcement_mode']}"
    return ""


def foreign_prefixes(allowed: Sequence[str]) -> list[str]:
    """The entries that stand for whole packages of others."""
    return [entry for entry in allowed if entry.endswith(".") and entry.split(".")[0] != "medfedaug"]
