"""A component of a server's kit that records every message that reaches the server's processes.

``local/resources.json`` names it, and ``RECORDED`` is the file of its records: a line of JSON for each
message, with the sender, the channel, the topic, and which of the texts of ``RECORDED_TEXTS`` are in it.
"""

import json
import os
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.widgets.widget import Widget


class MessageRecorder(Widget):
    def __init__(self) -> None:
        super().__init__()
        self.file = Path(os.environ["RECORDED"])
        self.texts = json.loads(os.environ["RECORDED_TEXTS"])
        self.cells: list[Any] = []

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type not in (EventType.SYSTEM_START, EventType.START_RUN):
            return
        cell = fl_ctx.get_engine().get_cell()
        if cell not in self.cells:
            self.cells.append(cell)
            cell.core_cell.add_incoming_filter("*", "*", self.record)

    def record(self, message: Any) -> None:
        payload = message.payload
        content = (
            bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else repr(payload).encode()
        )
        content += repr(message.headers).encode()
        keys = ("ORIGIN", "CHANNEL", "TOPIC")
        sender, channel, topic = (message.get_header(getattr(MessageHeaderKey, key), "") for key in keys)
        found = [text for text in self.texts if text.encode() in content]
        line = {"from": sender, "channel": channel, "topic": topic, "size": len(content), "found": found}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
