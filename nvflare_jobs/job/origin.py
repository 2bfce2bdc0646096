"""Find the origin of a job for a site's record of approvals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

from medfedaug.privacy import Origin
from medfedaug.utils.printable import printable

_LONGEST = 200
_ROOT = "rootCA.pem"


def job_origin(fl_ctx: FLContext) -> Origin:
    """Read a job's name and submitter at a site.

    The server gives the name. The submitter comes from the project's certificate that signed the job's
    content, or else from the server.
    """
    workspace, job = fl_ctx.get_workspace(), fl_ctx.get_job_id()
    meta = _meta(Path(workspace.get_job_meta_path(job)))
    name = _text(meta.get(JobMetaKey.JOB_NAME.value))
    root = Path(workspace.get_startup_kit_dir()) / _ROOT
    app = Path(workspace.get_app_dir(job))
    if root.is_file() and app.is_dir():
        verified, signers = verify_folder_signature_and_get_signers(str(app), str(root))
        if verified and len(signers) == 1:
            submitter, organisation, role = map(_text, signers[0])
            return Origin(name, submitter, organisation, role, signed=True)
    claimed = (JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE)
    submitter, organisation, role = (_text(meta.get(key.value)) for key in claimed)
    return Origin(name, submitter, organisation, role)


def _meta(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _text(value: object) -> str:
    return printable("" if value is None else value)[:_LONGEST]
