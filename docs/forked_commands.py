"""Commands of the tutorials, each a fork of one process that has imported PyTorch and MONAI.

A tutorial runs `medfedaug` as a terminal does, and most commands import for longer than they compute. During
the build of the pages, `medfedaug` is a small client, which hands its arguments, folder, environment and
files to that process and ends as the command does.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path

WIDTH = "110"  # of `examples/tutorials/shell.py`: a terminal's width is read when the command is imported
IMPORTED = ("medfedaug.cli.app", "medfedaug.simulate", "medfedaug.analysis.report", "matplotlib.pyplot")
CLIENT = """\
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
message = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
server.sendall(message)
sys.exit(int(server.recv(8) or b"1"))
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process, and put the client first on the path.

    It ends with its standard input, which this process holds.
    """
    script, address = folder / "client.py", str(folder / "socket")
    script.write_text(CLIENT.format(address=address))
    client = folder / "bin" / "medfedaug"
    client.parent.mkdir()
    client.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(script))} "$@"\n'
    )
    client.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    command = [sys.executable, __file__, str(listening.fileno())]
    environment = {**os.environ, "COLUMNS": WIDTH}
    with listening:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            env=environment,
            start_new_session=True,
        )
    os.environ["PATH"] = f"{client.parent}{os.pathsep}{os.environ['PATH']}"
    return process


def main() -> None:
    """Answer clients until standard input closes."""
    for name in IMPORTED:
        import_module(name)
    listening = socket.socket(fileno=int(sys.argv[1]))
    if os.fork() == 0:
        answer(listening)
    sys.stdin.read()  # this one waits for the end, and ends the other
    os.killpg(0, signal.SIGKILL)


def answer(listening: socket.socket) -> None:
    """Fork for each client; the fork waits for the command in a further fork, and sends its exit code."""
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            break
        client.close()
    listening.close()
    length, files, *_ = socket.recv_fds(client, 8, 3)
    message = client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    if (command := os.fork()) == 0:
        client.close()
        os._exit(carry_out(*json.loads(message), files))
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    client.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def carry_out(arguments: list[str], folder: str, environment: dict[str, str], files: list[int]) -> int:
    """Run the command as a new process would: its exit status."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["medfedaug", *arguments[1:]]
    code = 0
    try:
        import_module("medfedaug.cli").main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
