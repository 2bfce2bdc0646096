"""The classes that a job without code may name at the server and at a site, each by its full path.

NVFlare compares every class that such a job names with ``class_allow_list`` in ``local/resources.json`` of
the kit, and builds it with arguments from the job. An entry that ends with a dot allows everything below it,
including every function and class that a module there has imported. Therefore each entry here is the path of
a single class in the module that defines it.
"""

from typing import Any

_SERVER = (
    "medfedaug.nvflare_jobs.job.controller.FederationController",
    "medfedaug.nvflare_jobs.job.comparison.ComparisonController",
)
_SITE = (
    "medfedaug.nvflare_jobs.job.executor.SiteExecutor",
    "medfedaug.nvflare_jobs.job.comparison.ComparisonExecutor",
)
_ENFORCEMENT = "class_list_enforcement_mode"


def allowed_classes(server: bool) -> list[str]:
    """List the classes that a job may name at the server, or at a site."""
    return [*(_SERVER if server else _SITE)]


def restrict_classes(resources: dict[str, Any], server: bool) -> list[str]:
    """Allow only `allowed_classes`; return the changes in words."""
    before, after = resources.get("class_allow_list", "NVFlare's own"), allowed_classes(server)
    changes = []
    if before != after:
        resources["class_allow_list"] = after
        changes.append(f"class_allow_list: the {len(after)} classes of medfedaug's jobs")
    if resources.get(_ENFORCEMENT, "enforce") != "enforce":
        del resources[_ENFORCEMENT]
        changes.append(f"{_ENFORCEMENT}: enforce")
    return changes
