"""The numbers that a run sent to a tracker, and the numbers of its results."""

# Site, name and round to value.
Numbers = dict[tuple[str, str, int], float]


def from_results(results: dict) -> Numbers:
    """Return the numbers of `results.json`."""
    numbers: Numbers = {}
    for entry in results["rounds"]:
        for site, metrics in entry["sites"].items():
            for name, value in metrics.items():
                if name != "samples" and value is not None:
                    numbers[site, name, entry["round"]] = value
    for group in ("sites", "unseen"):
        for site, scores in results["test"][group].items():
            by_class = {f"/{name}": values for name, values in scores["classes"].items()}
            for label, values in {"": scores, **by_class}.items():
                for name in ("dice", "hd95", "nsd", "missed", *(() if label else ("undivided",))):
                    if values[name] is not None:
                        numbers[site, f"test_{name}{label}", results["selected_round"]] = values[name]
    return numbers


def from_tensorboard(folder) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers: Numbers = {}
    for site in folder.iterdir():
        events = EventAccumulator(str(site))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            numbers.update({(site.name, tag, event.step): event.value for event in events.Scalars(tag)})
    return numbers
