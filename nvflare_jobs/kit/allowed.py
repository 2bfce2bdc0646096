"""The classes that a job without code may name at the server and at a site, each by its full path.

NVFlare compares every class that such a job names with ``class_allow_list`` in ``local/resources.json`` of
the kit, and builds it with arguments from the job. An entry that ends with a dot allows everything below it,
including every function and class that a module there has imported. Therefore each entry here is the path of
a single class in the module that defines it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from medfedaug.errors import ConfigError

_SERVER = (
    "medfedaug.nvflare_jobs.job.controller.FederationController",
    "medfedaug.nvflare_jobs.job.comparison.ComparisonController",
)
_SITE = (
    "medfedaug.nvflare_jobs.job.executor.SiteExecutor",
    "medfedaug.nvflare_jobs.job.comparison.ComparisonExecutor",
    "medfedaug.nvflare_jobs.job.tracking.RoundMetrics",
)
# Classes of NVFlare, which are in its default list too: those in every job, and those in some.
_EVERY_SERVER = (
    "nvflare.app_common.widgets.metrics_artifact_writer.MetricsArtifactWriter",
    "nvflare.app_common.widgets.validation_json_generator.ValidationJsonGenerator",
)
_EVERY_SITE = ("nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",)
_SOME_SERVER = ("nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver",)
_SOME_SITE = (
    # A site's kit adds it to every job, unless the site forbids sending its logs.
    "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
)


def our_classes(server: bool) -> tuple[str, ...]:
    """List the classes of this package that a job names at the server, or at a site."""
    return _SERVER if server else _SITE


def needed_classes(server: bool) -> tuple[str, ...]:
    """List all classes that a job of this package names at the server, or at a site."""
    return our_classes(server) + (_EVERY_SERVER + _SOME_SERVER if server else _EVERY_SITE + _SOME_SITE)


def allow_list(resources: Mapping[str, Any]) -> list[str]:
    """Return the current list; without one, NVFlare uses its default list."""
    entries = resources.get("class_allow_list", list(DEFAULT_CLASS_ALLOW_LIST))
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError("local/resources.json: class_allow_list must be a list of class paths")
    return list(entries)


def outdated(allowed: Sequence[str], server: bool) -> list[str]:
    """List the entries that allow more of this package than needed, such as the prefix ``medfedaug.``."""
    ours = our_classes(server)
    return [entry for entry in allowed if entry.split(".")[0] == "medfedaug" and entry not in ours]


def lacking(allowed: Sequence[str], server: bool) -> list[str]:
    """List the classes that every job of this package needs and that the list does not allow.

    A list that was narrowed by hand may also lack classes that NVFlare puts into every job.
    """
    required = our_classes(server) + (_EVERY_SERVER if server else _EVERY_SITE)
    # NVFlare allows everything below an entry, whether or not the entry ends with a dot.
    below = tuple(f"{entry.removesuffix('.')}." for entry in allowed)
    return [path for path in required if path not in allowed and not path.startswith(below)]


def wanted(allowed: Sequence[str], server: bool, only: bool) -> list[str]:
    """Return the new list."""
    if only:
        return list(needed_classes(server))
    old = outdated(allowed, server)
    kept = [entry for entry in allowed if entry not in old]
    return kept + lacking(kept, server)


def is_void(resources: Mapping[str, Any]) -> str:
    """Describe the setting, if any, that makes NVFlare allow every class in spite of the list."""
    if "*" in allow_list(resources):
        return "class_allow_list has the entry *"
    if resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        return f"class_list_enforcement_mode is {resources['class_list_enforcement_mode']}"
    return ""
