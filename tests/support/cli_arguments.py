"""Arguments of commands that tests start."""

from running import TINY_OPTIONS


def simulate_args(data, out, methods="fedrdn,fedfa"):
    return [
        "simulate",
        *("--data", data, "--methods", methods, "--out", out, "--engine", "inprocess", "--rounds", 1),
        *TINY_OPTIONS,
        *("--threads", 1, "--batch-size", 4, "--no-pictures"),
    ]
