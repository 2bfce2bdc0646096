"""Write the command of a run from its settings."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any

from medfedaug.config.options import defaults
from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig, task_defaults

_FROM_THE_DATA = ("methods", "plan", "planning", "task", "in_channels", "channel_names", "classes", "init")


def command_of(settings: Mapping[str, Any], *, simulated: bool) -> str:
    """Return the command of a run with these settings; folders and initial weights are placeholders.

    Example:
        >>> settings = {"methods": [{"name": "fedfa", "args": {"prob": 0.3}}], "rounds": 20, "seed": 1}
        >>> command_of(settings, simulated=True)
        'medfedaug simulate --data DATA --methods fedfa --set fedfa.prob=0.3 --rounds 20 --seed 1 --out OUT'
    """
    config = RunConfig.from_dict(settings)
    parts = ["simulate", "--data", "DATA"] if simulated else ["export"]
    parts += ["--methods", ",".join(method["name"] for method in config.methods)]
    for method in config.methods:
        for name, value in method.get("args", {}).items():
            parts += ["--set", f"{method['name']}.{name}={_text(value)}"]
    if config.planning:
        parts += ["--plan", "auto", "--plan-memory", f"{config.planning.get('memory', 0):g}"]
    usual = {**defaults(RunConfig), **task_defaults(config.task, config.plan)}
    if not simulated:
        del usual["max_step"]  # a job's default follows from its methods
    left_out = _FROM_THE_DATA if simulated else ()
    for cls, values in ((RunConfig, config), (Plan, config.plan)):
        for entry in dataclasses.fields(cls):
            flags, value = entry.metadata["flags"], getattr(values, entry.name)
            default = usual.get(entry.name) if cls is RunConfig else defaults(Plan)[entry.name]
            if flags is None or entry.name in left_out or value == default:
                continue
            flag = flags[0] if flags else f"--{entry.name.replace('_', '-')}"
            for item in value if entry.default == () else [value]:  # an empty default: repeatable
                parts += [flag, _text(item)]
    if config.init:
        parts += ["--init", "WEIGHTS"]
    return shlex.join(["medfedaug", *parts, "--out", "OUT"])


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)
