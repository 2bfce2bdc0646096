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
LASTING = {"write keys"}
"""What a site does again whenever it is asked, from the planned round on."""


def _cause(fault, seconds, reply, site):
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
    if fault == "write keys":  # no fault: what a site publishes under secure aggregation
        with open(os.path.join(os.environ["MEDFEDAUG_FAULT_MARKS"], "keys"), "a") as file:
            file.write(json.dumps([site, [reply.masks[kind].hex() for kind in ("cipher", "mask")]]) + "\n")
    return reply


def _install(module):
    do = module.Site._do
    faults = json.loads(os.environ.get("MEDFEDAUG_FAULTS", "[]"))

    def faulty(self, request, should_stop):
        mine = [f for f in faults if f[:2] == [self.name, request.task]]
        planned = [f for f in mine if f[2] == request.round or (f[3] in LASTING and f[2] < request.round)]
        # The others each only once, also when the process was restarted in between.
        pending = [f for f in planned if f[3] in LASTING or not os.path.exists(_mark(f))]
        for f in pending:
            open(_mark(f), "w").close()
        for f in pending:
            if f[3] == "hang halfway":
                should_stop = _halfway(should_stop, f[4])
        reply = None if pending and pending[0][3] in ("raise", "die") else do(self, request, should_stop)
        for f in pending:
            reply = _cause(f[3], f[4], reply, self.name)
        return reply

    module.Site._do = faulty


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
