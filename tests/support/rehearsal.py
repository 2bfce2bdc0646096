"""Rehearses a deployment on one machine, from empty folders to a model that is evaluated at a site.

``python tests/support/rehearsal.py poc WORK`` uses NVFlare's POC mode. ``... provisioned WORK`` uses kits
that are provisioned for four hospitals, with mutual TLS on the loopback interface, and ``... own-keys WORK``
those whose private keys the participants made themselves. Every step is a command of `docs/deploy.md`, with
phantom data. WORK is a new folder. Nothing outside it is written, and no process is left running.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rehearsed_hospitals import HOSPITALS, SERVER, Rehearsal

from medfedaug.errors import MedFedAugError

__all__ = ["rehearse_own_keys", "rehearse_poc", "rehearse_provisioned"]

_METHODS = "fedrdn,fedfa+"


def rehearse_poc(work: str | Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Rehearse POC mode: prepare, configure, start, submit, collect, evaluate; kill a site and a server.

    Args:
        work: a new folder.
        say: takes a line for each step.

    Returns:
        ``{"phases": seconds by name, "results": the job's, "scores": of one hospital,
        "killed": results of the job during which a site's process was killed, "resumed": of the job that
        continued one whose server was killed, "same": whether each of both gave the model of the first}``.
    """
    with Rehearsal(work, say) as system:
        with system.phase("prepare"):
            system.prepare_poc()
        system.make_data()
        with system.phase("configure kits"):
            system.configure()
        with system.phase("start"):
            system.start_poc()
        folder, scores = _one_job(system)
        with system.phase("job with a killed site"):
            job_id = system.submit(system.export("killed", _METHODS))
            system.kill_job_process(HOSPITALS[1], job_id, round_=2)
            system.wait(job_id)
        killed = system.collect(job_id)
        with system.phase("job with a killed server, resumed"):
            system.kill_server(system.submit(system.export("interrupted", _METHODS)), round_=3)
            job_id = system.submit(system.export("interrupted", _METHODS, resume=True))
            system.wait(job_id)
        resumed = system.collect(job_id)
        with system.phase("stop"):
            # Not `poc stop`: it would abort the job of the killed server first, which NVFlare takes for
            # running and cannot abort.
            system.shut_down()
        return {
            "phases": system.phases,
            "results": _results(folder),
            "scores": scores,
            "killed": _results(killed),
            "resumed": _results(resumed),
            "same": [_same_model(folder, other) for other in (killed, resumed)],
        }


def rehearse_provisioned(work: str | Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Rehearse four hospitals with certificates, which accept only our jobs and no code.

    Args:
        work: a new folder.
        say: takes a line for each step.

    Returns:
        ``{"phases": seconds by name, "results": the job's, "scores": of one hospital, "doctor": what it said,
        "refusal": why a job with code did not run, "kept": whether a connection is, with a certificate and
        without, "masked": results, page and ledger of a job under secure aggregation, "named": the files of
        the server and of the lead in which a patient's name is}``.
    """
    with Rehearsal(work, say) as system:
        with system.phase("provision"):
            system.provision()
        system.make_data()
        with system.phase("configure kits"):
            system.configure(forbid_code=True, only_ours=True)
        with system.phase("start"):
            system.start_kits()
        with system.phase("doctor"):  # which connects to the server
            doctor = system.medfedaug("site", "doctor", system.kit(HOSPITALS[0]))
        folder, scores = _one_job(system)
        with system.phase("refuse a job with code"):
            refusal = system.refusal(system.work / "jobs" / "job")
        masked = _job_under_masks(system)
        downloads = (folder.parents[1], Path(masked["folder"]).parents[1])
        named = [path for part in (*downloads, system.kit(SERVER)) for path in system.named(part)]
        kept = {"with": system.is_kept(certificate=True), "without": system.is_kept(certificate=False)}
        with system.phase("shut down"):
            system.shut_down()
        return {
            "phases": system.phases,
            "results": _results(folder),
            "scores": scores,
            "doctor": doctor,
            "refusal": refusal,
            "kept": kept,
            "named": named,
            "masked": masked,
        }


def rehearse_own_keys(
    work: str | Path, say: Callable[[str], None] = print, hospitals: Sequence[str] = HOSPITALS
) -> dict[str, Any]:
    """Rehearse hospitals whose private keys never leave them, from requests to a model and the end.

    Args:
        work: a new folder.
        say: takes a line for each step.
        hospitals: those that take part.

    Returns:
        ``{"phases": seconds by name, "results": the job's, "scores": of one hospital, "doctor": what it said
        of the server and of a hospital}``.
    """
    with Rehearsal(work, say, hospitals) as system:
        with system.phase("request kits"):
            system.request_kits()
        system.make_data()
        with system.phase("configure kits"):
            system.configure(forbid_code=True, only_ours=True)
        with system.phase("start"):
            system.start_kits()
        with system.phase("doctor"):
            doctor = [system.medfedaug("site", "doctor", system.kit(name)) for name in (SERVER, hospitals[0])]
        folder, scores = _one_job(system)
        with system.phase("stop"):
            system.stop_kits()
        return {"phases": system.phases, "results": _results(folder), "scores": scores, "doctor": doctor}


def _job_under_masks(system: Rehearsal) -> dict[str, Any]:
    """A job under secure aggregation, at hospitals that take part in no other and approve each."""
    with system.phase("configure hospitals for secure aggregation"):
        system.configure_sites("--secure-only", "--approve")
    with system.phase("job under secure aggregation, approved at each hospital"):
        before = system.jobs_seen()
        job_id = system.submit(system.export("masked", "fedfa+", "--secure-aggregation"))
        page = system.approve(before)
        system.wait(job_id)
    folder = system.collect(job_id)
    ledger = system.medfedaug("site", "ledger", system.kit(HOSPITALS[0]))
    results = _results(folder)
    return {"folder": str(folder), "results": results, "page": page, "ledger": ledger, "job": job_id}


def _one_job(system: Rehearsal) -> tuple[Path, dict[str, Any]]:
    with system.phase("export"):
        job = system.export("job", _METHODS)
    with system.phase("job"):
        job_id = system.submit(job)
        system.wait(job_id)
    with system.phase("collect"):
        folder = system.collect(job_id)
    with system.phase("evaluate"):
        scores = system.evaluate(folder, system.hospitals[0])
    return folder, scores


def _results(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text()))


def _same_model(folder: Path, other: Path) -> bool:
    first, second = (torch.load(f / "final_model.pt", weights_only=True) for f in (folder, other))
    return all(torch.equal(first[key], second[key]) for key in first)


def _main() -> None:
    kinds = {"poc": rehearse_poc, "provisioned": rehearse_provisioned, "own-keys": rehearse_own_keys}
    parser = argparse.ArgumentParser(prog="rehearsal", description=__doc__)
    parser.add_argument("kind", choices=tuple(kinds))
    parser.add_argument("work", type=Path, help="a new folder")
    arguments = parser.parse_args()
    try:
        report = kinds[arguments.kind](arguments.work)
    except MedFedAugError as error:
        raise SystemExit(f"rehearsal: {error}") from error
    dice = f"; Dice {report['results']['test']['mean']}" if "results" in report else ""
    print(f"all done in {sum(report['phases'].values()):.0f} s{dice}")


if __name__ == "__main__":
    _main()
