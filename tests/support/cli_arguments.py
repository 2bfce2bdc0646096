"""Arguments of commands that tests start."""

from __future__ import annotations

import json

from running import TINY_NETWORK


def simulate_args(data, out, methods="fedrdn,fedfa"):
    return [
        "simulate",
        *("--data", data, "--methods", methods, "--out", out, "--engine", "inprocess", "--rounds", 1),
        *("--network-args", json.dumps(TINY_NETWORK), "--threads", 1, "--batch-size", 4, "--no-pictures"),
    ]
