"""
A hospital's site
=================

From certificates to a job that a hospital reads and approves, and its results: two hospitals, with a server
between them. Everything runs on one machine here; in life each kit goes to its owner, and the commands are
the same. :doc:`/deploy` has all options and what to do when something is wrong.
"""

# %%
# Before you begin
# ----------------
# A hospital's engineer installs medfedaug (``pip install ./medfedaug``, :doc:`/deploy`), gets a kit from the
# project administrator, and has a folder with images: volumes and label maps that ``medfedaug init`` lists,
# or what ``medfedaug import`` takes from the archive (:doc:`/howto/import`). The site needs outgoing
# connections to one port of the server, and no incoming ones.

# %%
# Certificates: the project administrator, once
# ---------------------------------------------

import json
import re
import socket
import subprocess
import time

from shell import run, workspace

from medfedaug.data.phantom import make_phantom

here = workspace()
with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]

sites = "hospital-a,hospital-b"
run(f"medfedaug enrol project --sites {sites} --server localhost --port {port} --out project.yml")
run("nvflare provision -p project.yml -w kits > provision.log")
kits = "kits/medfedaug/prod_00"
run(f"ls {kits}")

# %%
# Each hospital sets its own limits
# ---------------------------------
# The folder of the images, the least number of cases that statistics may be of, and that no job may carry
# code. The first hospital also wants to approve each job. All of it lies in the kit, and no job can change
# it.

for site in make_phantom(here / "data", sites=2, patients=18, shape=(32, 32, 6)):
    site.rename(site.with_name(site.name.replace("site_", "hospital-").lower()))

run(f"medfedaug site configure {kits}/localhost")
for hospital, more in (("hospital-a", " --approve"), ("hospital-b", "")):
    run(
        f"medfedaug site configure {kits}/{hospital} --data data/{hospital} --device cpu "
        f"--min-images 10{more}"
    )

# %%
# Start
# -----
# The server first. Sites open connections to it, never the other way round.


def start(name):
    kit = here / kits / name
    with (kit / "start.log").open("wb") as log:
        subprocess.run([kit / "startup/start.sh"], cwd=kit, stdout=log, stderr=log, check=True)


start("localhost")

# %%
# ``doctor`` says whether a site is ready, and shows what it would allow. It also tries the way to the server,
# which takes some seconds to start.

doctor = f"medfedaug site doctor {kits}/hospital-a"
for _ in range(60):
    if not subprocess.run(doctor, shell=True, cwd=here, capture_output=True).returncode:
        break
    time.sleep(1)
run(doctor)

# %%
# Then the sites.

for name in ("hospital-a", "hospital-b"):
    start(name)


def nvflare(command):
    """NVFlare's command, whose answer is one line of JSON."""
    done = subprocess.run(
        f"nvflare --format json {command}", shell=True, text=True, capture_output=True, cwd=here
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]).get("data") or {} if lines else {}


admin, lead = f"{kits}/admin@example.org", f"{kits}/lead@example.org"
for _ in range(120):
    joined = json.dumps(nvflare(f"system status --startup-kit {admin}"))
    if "hospital-a" in joined and "hospital-b" in joined:
        break
    time.sleep(1)
print("hospital-a and hospital-b have joined" if "hospital-b" in joined else joined)

# %%
# The lead submits a job
# ----------------------
# A job is three files of settings: no code, and no path of anybody's data.

run(
    "medfedaug export --methods fedrdn --rounds 2 --min-sites 2 --threads 1 --out job "
    """--purpose "Lesions in brain MRI, two hospitals" """
    """--network-args '{"features": [4, 8, 8, 8, 8, 4]}'"""
)
job = nvflare(f"job submit -j job --startup-kit {lead}")["job_id"]

# %%
# The hospital reads and approves it
# ----------------------------------
# The job waits at the first hospital. `jobs` prints one page about it: its purpose, what runs, what leaves,
# how often.

jobs = f"medfedaug site jobs {kits}/hospital-a"
for _ in range(120):
    listed = subprocess.run(jobs, shell=True, cwd=here, capture_output=True, text=True).stdout
    if "waiting" in listed:
        break
    time.sleep(1)
(waiting,) = re.findall(r"\b[0-9a-f]{12}\b", run(jobs).split("waiting")[0])

# %%
# Whoever decides at the hospital approves this configuration, or refuses it (``--refuse``). Another one, of
# the same lead or not, waits again.

run(f"medfedaug site approve {kits}/hospital-a {waiting} --by 'the data officer'")
nvflare(f"job wait {job} --timeout 300 --startup-kit {lead}")

# %%
# What it did, and what left
# --------------------------
# While it runs, and afterwards, the engineer of a hospital sees what it did, and what left:

run(f"medfedaug site watch {kits}/hospital-a --once")
run(f"medfedaug site ledger {kits}/hospital-a")

# %%
# The lead downloads the results: the folder that ``simulate`` writes, with the model and its page.

nvflare(f"job download {job} -o results --startup-kit {lead}")
run(f"ls results/{job}/workspace/medfedaug")

# %%
# Shut down
# ---------

nvflare(f"system shutdown all --force --startup-kit {admin}")

# %%
# Next: :doc:`what leaves a site </privacy>`, :doc:`what stops whom </threats>`, and :doc:`whether it is worth
# it for a site </evaluation>`.
