"""Jobs whose files read the environment, a file or an address of the machine that parses them."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VARIABLE = "HOSPITAL_SECRET"
SECRET = "TOPSECRET-4711"
TOKEN = "token-of-the-registry-0815"


@dataclass(frozen=True)
class Bait:
    """A machine's secrets: `VARIABLE` in its environment, a file, an address that only it can reach."""

    file: Path
    address: str
    asked: list[str]


@contextmanager
def bait(folder: Path) -> Iterator[Bait]:
    """Lay out a file, and listen at an address of this machine."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"reached": true}')

        def log_message(self, *_: object) -> None:
            pass

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "docker_config.json"
    file.write_text(json.dumps({"auths": {"registry": TOKEN}}))
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield Bait(file, f"http://127.0.0.1:{listener.server_address[1]}/metadata", asked)
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def hocon(text: str, bait: Bait) -> str:
    """The same configuration in HOCON, with the machine's secrets among the names of the classes."""
    secret, token = f'"x"${{{VARIABLE}}}', "${f.auths.registry}"
    body = re.sub(r'"classes": \[[^\]]*\]', f'"classes": ["background", {secret}, {token}]', text)
    included = f'"f": {{ include file("{bait.file}") }}, "u": {{ include url("{bait.address}") }}'
    return f"{body.rstrip()[:-1]}, {included} }}"


def yaml(text: str, bait: Bait) -> str:
    """The same in OmegaConf's YAML, of which JSON is a part."""
    return re.sub(r'"classes": \[[^\]]*\]', f'"classes": ["background", "${{oc.env:{VARIABLE}}}"]', text)


def variable(text: str, bait: Bait) -> str:
    """JSON, in which NVFlare puts the job process's environment in the place of variables."""
    return re.sub(r'"classes": \[[^\]]*\]', f'"classes": ["background", "x{{${VARIABLE}}}"]', text)


def composed(text: str, bait: Bait) -> str:
    """The same variable, whose name and braces are put together in two steps."""
    body = re.sub(r'"classes": \[[^\]]*\]', '"classes": ["background", "{o}{d}{n}{c}"]', text)
    parts = {"o": "{", "d": "$", "n": VARIABLE, "c": "}"}
    return f"{body.rstrip()[:-1]}, {json.dumps(parts)[1:]}"


def secret_reference(text: str, bait: Bait) -> str:
    """NVFlare's reference to a file that the site reads."""
    classes = json.dumps(["background", f"${{secret:file:{bait.file}}}"])
    return re.sub(r'"classes": \[[^\]]*\]', lambda _: f'"classes": {classes}', text)


@dataclass(frozen=True)
class HostileFile:
    """A change of one file of a job's app.

    Args:
        name: the file; that of a side with ``{side}``.
        content: from the side's own configuration.
        keep: whether that configuration stays, too.
    """

    name: str
    content: Callable[[str, Bait], str]
    keep: bool = False


FILES: Mapping[str, HostileFile] = {
    "hocon": HostileFile("config/config_fed_{side}.conf", hocon),
    "hocon as the default": HostileFile("config/config_fed_{side}.conf.default", hocon),
    "yaml": HostileFile("config/config_fed_{side}.yml", yaml),
    "yaml, long suffix": HostileFile("config/config_fed_{side}.yaml", yaml),
    "yaml as the default": HostileFile("config/config_fed_{side}.yaml.default", yaml),
    "hocon in a folder below": HostileFile("config/more/config_fed_{side}.conf", hocon),
    "hocon beside json": HostileFile("config/config_fed_{side}.conf", hocon, keep=True),
    "upper case": HostileFile("config/CONFIG_FED_{side}.CONF", hocon, keep=True),
    "json as the default": HostileFile("config/config_fed_{side}.json.default", variable),
    "json in a folder below": HostileFile("config/more/config_fed_{side}.json", variable),
    "settings of NVFlare": HostileFile("config/comm_config.conf", hocon, keep=True),
    "settings of NVFlare in json": HostileFile("resources.json", variable, keep=True),
    "another configuration": HostileFile("other/config/settings.yml", yaml, keep=True),
    "a variable": HostileFile("config/config_fed_{side}.json", variable),
    "a composed variable": HostileFile("config/config_fed_{side}.json", composed),
    "a reference to a secret": HostileFile("config/config_fed_{side}.json", secret_reference),
}


def spoil_files(job: Path, out: Path, side: str, attack: str, bait: Bait) -> Path:
    """A copy of a job with an attack on ``side``, ``"client"`` or ``"server"``."""
    shutil.copytree(job, out)
    app, hostile = out / "app", FILES[attack]
    honest = app / f"config/config_fed_{side}.json"
    text = honest.read_text()
    if '"classes"' not in text:  # the server's names none unless they are given
        raise AssertionError(f"{honest} names no classes")
    if not hostile.keep:
        honest.unlink()
    target = app / hostile.name.format(side=side)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(hostile.content(text, bait))
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**meta, "name": out.name}))
    return out
