"""Faults for the sites of a federation: read by every Python process that has this folder on its path.

``MEDFEDAUG_FAULTS`` is a JSON list of ``[site, task, round, fault, seconds]``; see `_cause`.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time

_MODULE = "medfedaug.federation.site.site"


def _cause(fault, seconds, reply):
    import torch

    if fault == "raise":
        raise RuntimeError("out of memory, say")
    if fault == "hang":
        time.sleep(seconds)
    if fault == "die":
        os.kill(os.getpid(), 9)
    key = next(iter(reply.weights), None)
    if fault == "nan":
        reply.weights[key] = torch.full_like(reply.weights[key], float("nan"))
    if fault == "shape":
        reply.weights[key] = torch.zeros(1)
    if fault == "float8":
        reply.weights[key] = reply.weights[key].to(torch.float8_e4m3fn)
    if fault == "variance":
        name = next(k for k in reply.weights if k.endswith("running_var"))
        reply.weights[name] = -torch.ones_like(reply.weights[name])
    if fault == "metrics":  # names that events have too
        reply.metrics.update({"event": "finished", "site": "A", "round": 99, "nested": {"deep": {"x": 1}}})
    return reply


def _install(module):
    do = module.Site._train
    faults = json.loads(os.environ.get("MEDFEDAUG_FAULTS", "[]"))

    def faulty(self, request, should_stop):
        planned = [f for f in faults if f[:3] == [self.name, request.task, request.round]]
        # Each only once, also when the process was restarted in between.
        pending = [f for f in planned if not os.path.exists(_mark(f))]
        for f in pending:
            open(_mark(f), "w").close()
        for f in pending:
            if f[3] == "hang halfway":
                should_stop = _halfway(should_stop, f[4])
        reply = None if pending and pending[0][3] in ("raise", "die") else do(self, request, should_stop)
        for f in pending:
            reply = _cause(f[3], f[4], reply)
        return reply

    module.Site._train = faulty


def _halfway(should_stop, seconds, steps=3):
    """Asked before each step of a training, it sleeps once, after a few of them."""
    asked = iter(range(1_000_000))

    def asks():
        if next(asked) == steps:
            time.sleep(seconds)
        return should_stop() if should_stop is not None else False

    return asks


def _mark(fault):
    return os.path.join(os.environ["MEDFEDAUG_FAULT_MARKS"], "-".join(map(str, fault[:4])))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _install(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("MEDFEDAUG_FAULTS"):
    sys.meta_path.insert(0, _Finder())
