"""Runs that ask for a plan, and fingerprints to make it of."""

from __future__ import annotations

import torch

from medfedaug.config.run import RunConfig


def prints_of(**sites):
    """Fingerprints by site: size and spacing of all its volumes, and how many they are."""
    return {
        name: {
            "size": torch.tensor([size] * 3, dtype=torch.float32),
            "spacing": torch.tensor([spacing] * 3, dtype=torch.float32),
            "foreground": torch.tensor([0.01]),
            "intensity": torch.tensor([[100.0, 20.0]]),
            "ct": torch.tensor([[-100.0, 300.0, 80.0, 40.0]]),
            "cases": torch.tensor([float(cases)]),
        }
        for name, (size, spacing, cases) in sites.items()
    }


def asked(memory=8.0, given=(), **changes):
    return RunConfig(planning={"memory": memory, "given": list(given)}, **changes)
