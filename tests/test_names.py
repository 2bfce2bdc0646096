"""The names of `import medfedaug as mfa`, which are imported when they are used."""

import subprocess
import sys
from importlib import import_module

import pytest

import medfedaug as mfa

NAMES = {
    "FFALayer": "medfedaug.models",
    "FedRDN": "medfedaug.transforms",
    "FedRDNd": "medfedaug.transforms",
    "channel_statistics": "medfedaug.statistics",
    "insert_ffa": "medfedaug.models",
    "join": "medfedaug.client",
    "load_run": "medfedaug.runs.prediction.predict",
    "load_statistics": "medfedaug.statistics",
    "remove_ffa": "medfedaug.models",
    "simulate": "medfedaug.simulate",
}


def python(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_the_import_alone_brings_no_library():
    script = "import sys, medfedaug as mfa; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    assert not {"torch", "monai", "numpy", "nvflare", "matplotlib", "pydantic"} & set(python(script).split())


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_that_of_its_module(name):
    assert getattr(mfa, name) is getattr(import_module(NAMES[name]), name)


def test_the_list_is_whole():
    assert set(dir(mfa)) == set(mfa.__all__) == {*NAMES, "functional", "__version__"}
    assert mfa.functional is import_module("medfedaug.functional")
    assert mfa.__version__ == import_module("medfedaug._version").__version__
    with pytest.raises(AttributeError):
        mfa.no_such_name  # noqa: B018


@pytest.fixture(scope="module")
def simulate_alone():
    """A new process that imports what runs in one process: what it says of `simulate`, and its modules."""
    script = (
        "import sys; import medfedaug as mfa; from medfedaug.simulate import configure; "
        "import medfedaug.simulate; print(callable(mfa.simulate), mfa.simulate.__module__); "
        "print(*sorted(sys.modules))"
    )
    said, modules = python(script).splitlines()
    return said, modules.split()


def test_simulate_stays_the_function_after_an_import_of_its_module(simulate_alone):
    assert simulate_alone[0] == "True medfedaug.simulate"


def test_running_in_process_imports_neither_nvflare_nor_opacus_which_noise_alone_needs(simulate_alone):
    assert "torch" in simulate_alone[1]
    assert not {"nvflare", "opacus"} & set(simulate_alone[1])


@pytest.mark.all_layers
def test_the_dictionary_of_dicom_codes_is_imported_when_a_report_is_written(simulate_alone):
    assert "pydicom.sr" not in simulate_alone[1]
    script = "import sys, medfedaug.hospital.dicom.prediction_objects; sys.exit('pydicom.sr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.all_layers
@pytest.mark.parametrize("package", ["analysis", "federation", "nvflare_jobs"])
def test_the_names_of_packages_that_import_on_demand_are_there(package):
    module = import_module(f"medfedaug.{package}")
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
