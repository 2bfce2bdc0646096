"""The server's component: NVFlare's FedAvg workflow, driving the engine-neutral server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.fedavg import FedAvg

from medfedaug.config import RunConfig
from medfedaug.errors import MedFedAugError, RunFailed
from medfedaug.federation.messages import PREPARE, TEST, TRAIN, VALIDATE, Request
from medfedaug.federation.output import write_run
from medfedaug.federation.server import FederationServer
from medfedaug.nvflare_jobs.messages import reply_from_model, request_to_model

__all__ = ["EVENTS_FILE", "OUTPUT_FOLDER", "FederationController"]

OUTPUT_FOLDER, EVENTS_FILE = "medfedaug", "events.jsonl"


class FederationController(FedAvg):
    """Channel statistics first, then rounds, then the test of the best model.

    It keeps NVFlare's round loop, persistor and events. Model selection is our own: NVFlare's selector
    weighs sites by steps and never scores the last model. In the server's run folder it leaves
    ``medfedaug/`` with ``results.json``, ``global_model.pt``, ``final_model.pt`` and ``events.jsonl``.

    Args:
        config: `medfedaug.config.RunConfig` as a dictionary.
        task_check_period: seconds between two looks at whether a round is complete.

    Raises:
        ConfigError: when the configuration is not one.
    """

    def __init__(self, config: dict[str, Any], task_check_period: float = 0.05) -> None:
        run = RunConfig.from_dict(config)
        super().__init__(
            num_clients=run.min_sites or 2,
            num_rounds=run.rounds,
            persistor_id="persistor",
            task_name=TRAIN,
            task_check_period=task_check_period,
        )
        self.config = config
        self.task_check_period = task_check_period
        self._run_config = run
        self._left_out: set[str] = set()

    def run(self) -> None:
        """The whole federation."""
        folder = Path(self.get_run_dir()) / OUTPUT_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / EVENTS_FILE).open("w", buffering=1) as events:

            def record(event: dict[str, Any]) -> None:
                events.write(json.dumps(event) + "\n")

            try:
                self.server = FederationServer(self._run_config, record)
                self._ask(self.server.prepare(), None, self.server.accept_preparation)
                self.server.finish_preparation()
                super().run()
                self._ask(self.server.validate(), sorted(self.server.sites), self.server.accept_validation)
                before = self.server.selected_round
                self.server.finish_validation()
                if self.server.selected_round != before:
                    self.event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE)
                self._ask(self.server.test(), None, self.server.accept_test)
                write_run(folder, self.server)
                record({"event": "finished"})
            except MedFedAugError as error:
                record({"event": "failed", "message": str(error)})
                raise

    def _ask(self, request: Request, targets: list[str] | None, accept: Callable[..., Any]) -> None:
        answers = self.send_model_and_wait(
            task_name=request.task, data=request_to_model(request), targets=targets
        )
        silent = sorted(set(targets or self.sample_all()) - {self._site(answer) for answer in answers})
        if silent:
            raise RunFailed(f"{request.task}: no answer from {', '.join(silent)}")
        for answer in sorted(answers, key=self._site):
            accept(self._site(answer), reply_from_model(answer))

    def sample_all(self) -> list[str]:
        """The names of all connected sites."""
        return sorted(client.name for client in self.engine.get_clients())

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """The sites of the next round; `FedAvg.run` asks in every round, and late sites join here."""
        late = sorted(
            set(self.sample_all()) - self.server.sites.keys() - set(self.server.unseen) - self._left_out
        )
        if late:
            self._admit(late)
        return self.server.choose_sites()

    def _admit(self, late: list[str]) -> None:
        request = request_to_model(self.server.prepare())
        for answer in self.send_model_and_wait(task_name=PREPARE, data=request, targets=late):
            site = self._site(answer)
            try:
                self.server.accept_preparation(site, reply_from_model(answer))
            except MedFedAugError as error:  # a late site's trouble is not the federation's
                self._left_out.add(site)
                self.warning(f"site {site} does not join: {error}")
        self.server.finish_preparation()

    def send_model(self, task_name: str = TRAIN, data: FLModel | None = None, **kwargs: Any) -> None:
        """Send the round's request in place of the bare model: the methods' exchange goes with it."""
        request = self.server.start_round(kwargs.get("targets"))
        super().send_model(task_name=task_name, data=request_to_model(request), **kwargs)

    def _aggregate_one_result(self, result: FLModel) -> bool:
        used = self.server.accept(self._site(result), reply_from_model(result))
        if not used:
            self.warning(self.server.rounds[-1]["refused"][-1]["reason"])
        return used

    def _get_aggregated_result(self) -> FLModel:
        before = self.server.selected_round
        state = self.server.finish_round()
        if self.server.selected_round != before:
            # The round before has just turned out best, and its model is still the current one.
            self.event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE)
        return FLModel(params=state, params_type=ParamsType.FULL, current_round=self.current_round)

    @staticmethod
    def _site(result: FLModel) -> str:
        return str((result.meta or {}).get("client_name", ""))


TASKS = [PREPARE, TRAIN, VALIDATE, TEST]
