"""The numbers that a run sent to a tracker, and the numbers of its results."""

from __future__ import annotations

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


def from_mlflow(folder) -> Numbers:
    from mlflow.tracking import MlflowClient

    client, numbers = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}"), {}
    (experiment,) = client.search_experiments(filter_string="name = 'medfedaug-experiment'")
    for run in client.search_runs([experiment.experiment_id]):
        site = run.info.run_name.split("-")[0]
        for tag in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, tag)
            numbers.update({(site, tag, entry.step): entry.value for entry in history})
    return numbers


def from_wandb(folder) -> Numbers:
    """The steps of offline runs, which `wandb sync` would send."""
    numbers: Numbers = {}
    for records in map(wandb_records, sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))):
        (run,) = (record.run for record in records if record.HasField("run"))
        site = run.display_name.split("-")[0]
        for record in records:
            values = {item.key or item.nested_key[0]: float(item.value_json) for item in record.history.item}
            numbers.update({(site, k, int(values["_step"])): v for k, v in values.items() if k[0] != "_"})
    return numbers


def wandb_records(path) -> list:
    """The records of a run: chunks in blocks of 32 KiB, each after seven bytes, as in a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, records, part, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last chunk
            records.append(Record.FromString(part))
            part = b""
    return records
