"""Make the environment in `.venv`, or mend it: run by `make setup`, by the Python it is made with.

It uses the standard library only, and may be run again at any time: a ready environment costs a
look. Environment variables: VENV (its folder), PYTHON (when the user names one) and TORCH_INDEX
(the address of a package index that has the build of torch you want; else pip's own choice).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "pdt-setup.txt"  # in the environment, written last
LOOK = "import torch, cloudpickle, pdt; torch.zeros(1), cloudpickle.dumps; print(pdt.__file__)"
MAKE = [sys.executable, "-m", "venv"]


class SetupError(RuntimeError):
    """What the user has to mend, in one sentence."""


def fingerprint(root: Path) -> str:
    """Of what is asked for: it changes with pyproject.toml and constraints.txt."""
    files = [(root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join(files)).hexdigest()


def interpreter(venv: Path) -> Path:
    """The Python inside an environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def version(python: Path) -> str | None:
    """`3.12`, or None when this Python does not start."""
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def must_start_over(venv: Path, python: str | None, index: str) -> str | None:
    """Why the environment cannot be kept at all, or None; `python` is the version asked for."""
    if not venv.exists():
        return "there is none yet"
    here = version(interpreter(venv))
    if here is None:
        return "its Python does not start"
    if python not in (None, here):
        return f"it has Python {here} and {python} is asked for"
    stamp = read_stamp(venv)
    if index and stamp and stamp[1] != index:
        return f"torch was taken from {stamp[1] or 'the default index'}, not from {index}"
    return None


def must_install(venv: Path, root: Path) -> str | None:
    """Why the environment is not ready, or None when it is."""
    stamp = read_stamp(venv)
    if not stamp:
        return "its set-up was not finished"
    if stamp[0] != fingerprint(root):
        return "pyproject.toml or constraints.txt has changed"
    return does_not_import(venv, root)


def does_not_import(venv: Path, root: Path) -> str | None:
    """Why torch or pdt cannot be used from the environment, or None."""
    # From inside .venv, so that pdt is found because it is installed, not because it lies here.
    command = [str(interpreter(venv).absolute()), "-c", LOOK]
    done = subprocess.run(command, cwd=venv, capture_output=True, text=True)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["its Python dies on importing torch"])[-1]
    pdt = Path(done.stdout.strip())
    return None if root in pdt.resolve().parents else f"its pdt is another checkout's: {pdt}"


def read_stamp(venv: Path) -> list[str] | None:
    """The fingerprint and the index that the environment was last set up with."""
    try:
        return [*(venv / STAMP).read_text().split("\n"), ""][:2]
    except OSError:
        return None


def create(venv: Path) -> None:
    """A new, empty environment; what was there is removed if it looks like one."""
    if venv.exists():
        parts = {path.name for path in venv.iterdir()} if venv.is_dir() else {"a file"}
        if parts and not parts & {"pyvenv.cfg", "bin", "Scripts", "lib"}:
            raise SetupError(f"{venv} is no environment: move it away, or name another by VENV=")
        shutil.rmtree(venv)
    done = subprocess.run([*MAKE, str(venv)])
    if done.returncode != 0:
        raise SetupError(
            f"{sys.executable} cannot make environments (on Debian and Ubuntu: apt install "
            "python3-venv); another Python is named by PYTHON="
        )


def install(venv: Path, root: Path, index: str) -> str | None:
    """Install what pyproject.toml asks for, pinned by constraints.txt; why it failed, or None."""
    # Python compiles what it imports; to compile all of JupyterLab and torch takes a minute.
    command = [str(interpreter(venv).absolute()), "-m", "pip", "install", "--no-compile"]
    command += ["--no-input", "--disable-pip-version-check", "--constraint", "constraints.txt"]
    command += ["--extra-index-url", index] if index else []
    command += [] if sys.stdout.isatty() else ["--quiet"]
    done = subprocess.run([*command, "--editable", ".[course,dev]"], cwd=root)
    if done.returncode != 0:
        return "pip could not install it (see above: is there a network, and space on the disk?)"
    return does_not_import(venv, root)


def ready(venv: Path, root: Path, python: str | None, index: str) -> None:
    """Leave the environment ready, whatever it was before. Raises SetupError where it cannot."""
    reason = must_start_over(venv, python, index)
    if reason is None and (wrong := must_install(venv, root)) is None:
        return
    if reason is None:
        say(f"mending {venv}: {wrong}")
        reason = install(venv, root, index)
        if reason and not does_not_import(venv, root):
            raise SetupError(f"{reason}. {venv} works, and stays as it was")
    if reason:
        say(f"making {venv} with Python {sys.version.split()[0]}: {reason}")
        say("installing torch, JupyterLab and the rest takes a few minutes the first time")
        create(venv)
        if failed := install(venv, root, index):
            raise SetupError(failed)
    (venv / STAMP).write_text(f"{fingerprint(root)}\n{index}\n")


@contextmanager
def locked(venv: Path) -> Iterator[None]:
    """One set-up at a time; raises SetupError when the checkout cannot be written."""
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        lock = open(f"{venv}.lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise SetupError(
            f"{venv} cannot be made: {error.strerror}. Copy the checkout to a folder of yours"
        ) from None
    with lock:
        try:
            import fcntl
        except ImportError:  # not a Unix: two at once are the user's to avoid
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """One line of what is being done."""
    print(f"setup: {text}", flush=True)


def main() -> int:
    """Make or mend; 0 when the environment is ready."""
    venv = Path(os.environ.get("VENV") or ".venv")
    named = os.environ.get("PYTHON")
    python = f"{sys.version_info.major}.{sys.version_info.minor}" if named else None
    try:
        with locked(venv):
            ready(venv, ROOT, python, os.environ.get("TORCH_INDEX", ""))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next one goes on", file=sys.stderr)
        return 130
    say(f"{venv} is ready")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
