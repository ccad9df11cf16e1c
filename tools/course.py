"""Open JupyterLab on a lesson: in the browser where there is a display, else by an address.

The server listens on this machine only, on a free port, with a token of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.normalise import ROOT
from tools.notebooks import find

FIRST_PORT, LAST_PORT = 8888, 8987
NOTIFICATIONS = "@jupyterlab/apputils-extension:notification"


def free_port(first: int = FIRST_PORT, last: int = LAST_PORT) -> int:
    """The first port of the range that nobody listens on, else any free one."""
    for port in [*range(first, last + 1), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise RuntimeError("no free port on 127.0.0.1")


def has_display(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser opened here would be seen."""
    if "SSH_CONNECTION" in environment and not environment.get("DISPLAY"):
        return False
    shown = environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    return platform in ("darwin", "win32") or bool(shown)


def directions(port: int, token: str, notebook: str, environment: Mapping[str, str]) -> str:
    """How to reach the server from this machine, and from another one over ssh."""
    connection = environment.get("SSH_CONNECTION", "").split()
    host = connection[2] if len(connection) > 2 else socket.gethostname()
    return (
        f"The lesson will be at\n\n"
        f"    http://127.0.0.1:{port}/lab/tree/{notebook}?token={token}\n\n"
        f"From another machine, first open a tunnel there and leave it open:\n\n"
        f"    ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{host}\n\n"
        f"Ctrl-C here ends the course."
    )


def ask_no_questions(prefix: Path) -> None:
    """Keep this environment's JupyterLab from asking about its news and looking for updates."""
    settings = prefix / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    if settings.exists():
        return
    quiet = {NOTIFICATIONS: {"fetchNews": "false", "checkForUpdates": False}}
    with contextlib.suppress(OSError):  # a lesson is not lost for want of it
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps(quiet, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Become the JupyterLab server; 2 when the lesson asked for does not exist."""
    parser = argparse.ArgumentParser(prog="python -m tools.course", description=__doc__)
    parser.add_argument("lesson", nargs="?", default="00", help="its number, or a notebook's path")
    try:
        notebook = find([parser.parse_args(argv).lesson])[0]
    except ValueError as error:
        parser.error(str(error))
    relative = Path(os.path.relpath(notebook, ROOT)).as_posix()
    port, token = free_port(), secrets.token_hex(16)
    # The address, not the notebook as an argument: that would hide the folders beside it.
    command = [sys.executable, "-m", "jupyterlab", f"--LabApp.default_url=/lab/tree/{relative}"]
    command += [f"--ServerApp.root_dir={ROOT}", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    command.append("--Application.log_level=WARN")  # its chatter would push the address away
    if not has_display(os.environ, sys.platform):
        command.append("--no-browser")
    print(directions(port, token, relative, os.environ), flush=True)
    # By the environment, so that the token does not stand in the list of processes.
    environment = {**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_PREFER_ENV_PATH": "1"}
    if sys.prefix != sys.base_prefix:
        ask_no_questions(Path(sys.prefix))
    os.chdir(ROOT)
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main())
