"""Check whether a site is ready to take part, as far as this can be checked before a job."""

import os
import platform
import random
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.utils import canonicalize_name

from medfedaug.config.bundle_reference import AllowedBundle, short_hash
from medfedaug.data.base import SPLITS, Case, SiteFolder
from medfedaug.data.dataset_json import unseen_note
from medfedaug.data.sites import open_site
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, MedFedAugError, MedFedAugWarning
from medfedaug.federation.composition import bundle_module
from medfedaug.federation.site.data_folder import resolve_data_folder
from medfedaug.hospital.privacy.ledger import check_account, require_opacus
from medfedaug.hospital.privacy.policy import OPEN_PROMISE, PrivacyPolicy
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.kit.kit import Kit, forbid_code, open_kit
from medfedaug.nvflare_jobs.kit.kit_process import (
    ProcessRecord,
    changes_at_restart,
    find_process,
    find_trouble,
)
from medfedaug.nvflare_jobs.kit.kit_status import LEAST_DISK
from medfedaug.nvflare_jobs.kit.startup import Check, check_startup
from medfedaug.utils import plugins

__all__ = ["Check", "examine"]

_LABEL_TIME = 30.0  # seconds for which label maps are read


def examine(kit: str | Path, *, connect: bool = False) -> list[Check]:
    """Check software, device, data, kit and disk of a site, or of the server where the kit is the server's.

    The checks are in the order in which problems should be solved. ``connect`` connects to a site's server.
    """
    opened = open_kit(kit)
    packages = ("medfedaug", "nvflare", "torch", "monai")
    versions = [f"{package} {metadata.version(package)}" for package in packages]
    checks = [Check("versions", True, ", ".join([*versions, f"Python {platform.python_version()}"]))]
    checks += check_startup(opened.path, connect=connect)
    checks += [*_kit_files(opened), _modes(opened), check_process(opened)]
    try:
        settings = SiteSettings.load(opened.path)
    except ConfigError as error:
        return [*checks, Check("settings", False, str(error), "Correct it, or run medfedaug site configure.")]
    checks += map(_plugin, settings.plugins)
    checks += map(_bundle, settings.bundles.values())
    if opened.server:
        return [*checks, _disk("disk", opened.path)]
    assert settings.state is not None  # a kit always has one
    checks += [_device(settings.device), *_data(opened, settings)]
    checks += [*_noise(settings.privacy), *_leaves(settings.privacy)]
    checks += [Check("jobs", True, settings.jobs.describe()), _disk("state folder", settings.state)]
    # All prepared images may fit into memory, so that a full disk is no failure.
    return [*checks, _disk("prepared images", settings.cache or Path(tempfile.gettempdir()), low=None)]


def _kit_files(kit: Kit) -> Iterator[Check]:
    configure = f"medfedaug site configure {kit.path}"
    try:
        missing, roles = kit.missing(), forbid_code(kit.policy())[1]
    except ConfigError as error:
        yield Check("kit", False, str(error), "Correct it, or provision the kit again.")
        return
    if missing:
        yield Check("kit", False, f"resources.json lacks {'; '.join(missing)}", configure)
    else:
        text = "only medfedaug's jobs, in plain JSON; a process that dies is started again; logs stay here"
        yield Check("kit", True, text)
    if roles:
        yield Check("policy", None, f"jobs may carry code of {', '.join(roles)}", configure)
    else:
        yield Check("policy", True, "jobs may not carry code")


def _modes(kit: Kit) -> Check:
    """Look for files of a kit that other users of this machine may write."""
    folders = [kit.path, kit.path / "local", kit.path / "startup"]
    for entry in [*folders, *(entry for folder in folders[1:] for entry in sorted(folder.iterdir()))]:
        mode = entry.lstat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not entry.is_symlink():
            text = f"{entry} can be written by everybody: who writes there decides what jobs may do"
            return Check("modes", False, text, f"chmod -R o-w {kit.path}")
    return Check("modes", True, "not everybody can write the kit's files")


def check_process(kit: Kit) -> Check:
    """Compare the running process of a kit with the files that a restart would read."""
    name, process, record = "process", find_process(kit.path), ProcessRecord.load(kit.path)
    if process is None and (record is None or not record.is_alive()):
        return Check(name, True, "does not run")
    restart = f"medfedaug site restart {kit.path}"
    if record is None or (process is not None and record.pid != process.pid):
        text = (
            "runs without the components of site configure: with NVFlare's launcher, and without our check "
            "of job files; a site's logs go to the server"
        )
        return Check(name, False, text, restart)
    text = f"runs since {time.strftime('%Y-%m-%d %H:%M', time.localtime(record.started))}"
    if changes := changes_at_restart(kit.path, record):
        # A renewed certificate takes effect at the next start; until then the old one serves.
        ok = None if all(change.startswith("startup/") for change in changes) else False
        return Check(name, ok, f"{text} with an earlier {', '.join(changes)}", restart)
    text = f"{text}, with the files as they are"
    if trouble := find_trouble(kit.path, server=kit.server):
        return Check(name, None, f"{text}; {trouble}", "Is the server up?")
    return Check(name, True, text)


def _attempt(name: str, advice: str, action: Callable[[], str]) -> Check:
    """Return the finding of an action, or its error with the remedy."""
    try:
        return Check(name, True, action())
    except MedFedAugError as error:
        return Check(name, False, str(error), advice)


def _plugin(package: str) -> Check:
    """Check that an allowed package adds something that jobs could use."""
    found = [plugin for group in plugins.JOB_GROUPS for plugin in plugins.installed(group)]
    key, name = canonicalize_name(package), f"plugin {package}"
    if names := [plugin.name for plugin in found if canonicalize_name(plugin.package) == key]:
        return Check(name, True, f"{', '.join(names)}: jobs may use them")
    advice = f"pip install {package}, or take it out of local/medfedaug.json."
    return Check(name, False, "allowed, and adds nothing here that jobs could use", advice)


def _bundle(bundle: AllowedBundle) -> Check:
    """Check that an allowed Bundle is unchanged, and can be read here."""

    def read() -> str:
        bundle.check()
        bundle_module().bundle_settings(bundle)
        return f"{bundle.folder}, content {short_hash(bundle.hash)}: jobs may use it"

    advice = "Mend it, or allow it as it is now: site configure --allow-bundle."
    return _attempt(f"bundle {bundle.name}", advice, read)


def _device(name: str) -> Check:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    if name == "auto":
        return Check("device", bool(gpus) or None, gpus or "no GPU found; training runs on the CPU")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        return Check("device", False, f"{name}: {str(error).splitlines()[0][:80]}", "Set another --device.")
    return Check("device", True, f"{name} ({gpus})" if name.startswith("cuda") else name)


def _data(kit: Kit, settings: SiteSettings) -> Iterator[Check]:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MedFedAugWarning)
            site = open_site(resolve_data_folder(kit.name, settings.data), name=kit.name)
            channels = site.check_files()
    except MedFedAugError as error:
        yield Check("data", False, str(error), "medfedaug site configure --data DIR names the folder.")
        return
    counts = ", ".join(f"{len(cases)} {split}" for split, cases in site.cases.items() if cases)
    text = f"{site.path}: {site.task}, {counts}; channels: {channels}, classes: {len(site.classes)}"
    yield Check("data", True, text)
    for warning in caught:
        if issubclass(warning.category, MedFedAugWarning):
            yield Check("data", None, str(warning.message))
    if not site.published:
        ledger = kit.ledger()

        def named() -> str:
            mark = check_account(ledger, site)
            return f"the images name {ledger.path}" if mark else "the images name none; the next job adds it"

        yield _attempt("account", "medfedaug site configure --state DIR names the state folder.", named)
    case = next(case for cases in site.cases.values() for case in cases)

    def decoded() -> str:
        return f"{case.name}: {' x '.join(map(str, site.load_image(case).shape))} decoded"

    yield _attempt("one image", "Replace the file or take the case out of the list.", decoded)
    yield from _labels(site)
    yield from _numbers(site, settings)


def _numbers(site: SiteFolder, settings: SiteSettings) -> Iterator[Check]:
    """Compare the numbers of cases with the limits of the policy."""
    policy, cases = settings.privacy, site.cases_of_patients("training")
    least = policy.min_images
    text = f"{len(cases)}{' patients' if site.patients('training') else ''} for training"
    if not site.trains:
        yield Check("number of images", True, "test images alone: nothing of them leaves but scores")
    elif len(cases) >= least:
        yield Check("number of images", True, f"{text}; {least} or more may be summarised")
    else:
        text = f"{text}; a site with fewer than {least} does not train"
        advice = "Add images, or lower the limit with medfedaug site configure --min-images."
        yield Check("number of images", False, text, advice)
    most, noise = max(cases, default=1), policy.noise_multiplier or policy.sgd_noise_multiplier
    if noise and most > policy.cases_per_patient:
        text = f"{most} for training, noise would hide {policy.cases_per_patient}: what gets noise stays here"
        advice = "Raise cases_per_patient in local/medfedaug.json (the noise grows with it), or list fewer."
        yield Check("cases of a patient", False, text, advice)
    effects = {"validation": "it does not count in the choice of the round", "test": "it is not reported"}
    for split, effect in effects.items():
        count = len(site.cases_of_patients(split))
        if 0 < count < least:
            kind = "patients" if site.patients(split) else "cases"
            text = f"{count} {kind}; means of fewer than {least} stay here: {effect}"
            yield Check(f"{split} scores", None, text, "Add cases.")


def _noise(policy: PrivacyPolicy) -> Iterator[Check]:
    """Check that a site whose policy asks for noise can add it; else it would refuse every job."""
    if not policy.adds_noise:
        return
    noise = {
        "weights": policy.sgd_noise_multiplier,
        "statistics": policy.noise_multiplier,
        "scores": policy.score_noise_multiplier,
    }
    text = ", ".join(f"{kind} {multiplier:g}" for kind, multiplier in noise.items() if multiplier)

    def adds() -> str:
        require_opacus()
        return f"{text}; up to ε = {policy.epsilon:g} at δ = {policy.delta:g}"

    yield _attempt("noise", "pip install 'medfedaug[privacy]'", adds)


def _leaves(policy: PrivacyPolicy) -> Iterator[Check]:
    """Report the two promises: what is behind each number, and what holds against who chooses the weights."""
    yield Check("numbers", True, f"each is of {policy.min_images} patients or more; losses stay here")
    if policy.epsilon is None:
        text = f"{OPEN_PROMISE}, or bound it for each patient with site configure --epsilon"
        yield Check("images", True, text)


def _labels(site: SiteFolder) -> Iterator[Check]:
    """Decode label maps for as long as a person waits: no header has the voxels' values."""
    if not isinstance(site, VolumeFolder):
        yield Check("labels", True, "the classes are folders")
        return
    cases = [case for split in SPLITS for case in site.cases[split] if isinstance(case.label, Path)]
    end, shown = time.monotonic() + _LABEL_TIME, dict[Case, set[int]]()
    for case in random.Random(0).sample(cases, len(cases)):
        try:
            shown[case] = {*site.load_label(case).unique().tolist()}
        except MedFedAugError as error:
            advice = "Correct dataset.json or the file, or take the case out of the list."
            yield Check("labels", False, str(error), advice)
            return
        if time.monotonic() > end:
            break
    advice = "" if len(shown) == len(cases) else "medfedaug inspect reads them all."
    text = f"{len(shown)} of {len(cases)} label maps read: no value outside of the classes"
    yield Check("labels", True, text, advice)
    training = [shown[case] for case in site.cases["training"] if case in shown]
    if training and not any(values - {0} for values in training):
        text = f"all {len(training)} label maps of training cases that were read are empty"
        yield Check("outlines", False, text, "Check the export, and the values under labels in dataset.json.")
        return
    present = set[int]().union(*shown.values())
    numbers = {name: number for number, name in enumerate(site.classes)}
    if unseen := [name for name in site.annotated() if numbers[name] not in present]:
        text, _, advice = unseen_note(unseen, f"none of {len(shown)} label maps").partition("; ")
        yield Check("outlines", None, text, f"{advice[:1].upper()}{advice[1:]}.")


def _disk(name: str, folder: Path, low: bool | None = False) -> Check:
    """Check that a folder can be written; ``low`` is the result where little space is free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(name, False, f"{existing}: cannot be written ({error.strerror})", "Change its owner.")
    free = shutil.disk_usage(existing).free
    text = f"{os.fspath(folder)}: {free / 2**30:.1f} GiB free"
    return Check(name, True, text) if free >= LEAST_DISK else Check(name, low, text, "Make room.")
