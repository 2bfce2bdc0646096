"""The command of a run, from its settings."""

from __future__ import annotations

from medfedaug.config.command_line import command_of


def test_a_repeatable_setting_is_repeated_and_a_list_is_joined():
    settings = {"without_metrics": ["hd95", "nsd"], "plan": {"spatial_dims": 3, "patch_size": [16, 16, 8]}}
    command = command_of(settings, simulated=False)
    assert "--without-metrics hd95 --without-metrics nsd" in command
    assert "--patch-size 16,16,8" in command
