"""Converts requests and replies to NVFlare's `FLModel` and back.

Weights travel as parameters, so that NVFlare's filters see them. What is exchanged before training travels as
metrics, because filters for parameters destroy statistics. What the methods exchange in every round travels
as meta data, and so does what sites say to each other under secure aggregation: of masked numbers a filter
could make nothing but rubbish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from medfedaug.federation.messages.messages import Reply, Request

_META = "medfedaug"


def request_to_model(request: Request) -> FLModel:
    """Convert the server's request to an `FLModel`."""
    meta = {
        "task": request.task,
        "round": request.round,
        "selected_round": request.selected_round,
        "run": request.run,
        "planned": request.planned,
        "frozen": request.frozen,
        "once": _contiguous(request.once),
        "payload": _contiguous(request.payload),
        "scoring": request.scoring,
        "method_states": _contiguous(request.method_states),
        "masks": request.masks,
        "scanners": request.scanners,
    }
    return _model(_contiguous(request.weights), {"task": request.task}, meta, request.round)


def request_from_model(model: FLModel) -> Request:
    """The inverse of `request_to_model`, at the site."""
    meta = _meta(model)
    return Request(
        task=str(meta.get("task", "")),
        round=meta.get("round", 0),
        weights=_dict(model.params),
        frozen=str(meta.get("frozen", "")),
        once=_dict(meta.get("once")),
        payload=_dict(meta.get("payload")),
        selected_round=meta.get("selected_round", 0),
        run=str(meta.get("run", "")),
        planned=_dict(meta.get("planned")),
        scoring=_dict(meta.get("scoring")),
        method_states=meta.get("method_states") or {},
        masks=_dict(meta.get("masks")),
        scanners=_dict(meta.get("scanners")),
    )


def reply_to_model(reply: Reply) -> FLModel:
    """Convert a site's reply to an `FLModel`."""
    meta = {
        "task": reply.task,
        "round": reply.round,
        "num_samples": reply.num_samples,
        "metrics": reply.metrics,
        "error": reply.error,
        "masks": reply.masks,
    }
    payload = _contiguous(reply.payload)
    if reply.weights:
        meta["payload"] = payload
        return _model(_contiguous(reply.weights), {}, meta, reply.round)
    return _model({}, payload, meta, reply.round)


def reply_from_model(model: FLModel) -> Reply:
    """The inverse of `reply_to_model`, at the server. The content has not been checked yet."""
    meta = _meta(model)
    return Reply(
        task=str(meta.get("task", "")),
        round=_int(meta.get("round")),
        weights=_tensors(model.params),
        payload=_dict(meta.get("payload") if model.params else model.metrics),
        num_samples=_int(meta.get("num_samples")),
        metrics=_dict(meta.get("metrics")),
        error=str(meta.get("error", "")),
        masks=_dict(meta.get("masks")),
    )


def _model(weights: dict[str, Any], metrics: dict[str, Any], meta: dict[str, Any], round_: int) -> FLModel:
    # An FLModel should hold parameters or metrics: with both, the metrics would count as an evaluation.
    content: dict[str, Any] = {"params": weights} if weights else {"metrics": metrics}
    return FLModel(**content, meta={_META: meta}, current_round=round_)


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """NVFlare sends a job's tensors as safetensors, which takes no views with gaps and ends the job."""
    return {
        key: value.contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in tensors.items()
    }


def _meta(model: FLModel) -> dict[str, Any]:
    return _dict((model.meta or {}).get(_META))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tensors(params: Any) -> dict[str, Any]:
    """Convert arrays back to tensors: some of NVFlare's filters turn tensors into NumPy arrays."""
    return {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
        for key, value in _dict(params).items()
    }


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
