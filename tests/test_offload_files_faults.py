"""Files that are short, changed, old or another's, disks that are full, and owners that are killed.

Each is said by name, with what was expected and found; nothing is read that was not written.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pdt.offload.aligned import BLOCK_NBYTES, BOUNCE_NBYTES
from pdt.offload.files import DamagedFile, TensorFiles
from pdt.offload.tensor_file import checksum

NUMEL = 3000  # 12,000 bytes: three blocks, the last partly filled
BOTH = pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "none"])


def tensor(number=0):
    return torch.arange(NUMEL) * 7.0 + number


def empty():
    return torch.empty(NUMEL)


@pytest.fixture
def store(tmp_path):
    with TensorFiles(tmp_path) as files:
        files.write("w", tensor()).wait()
        yield files


# Files that are not what was written


def damage(files, change, match):
    """What `change` makes of the bytes of a file is refused, and the file is named."""
    path = files.path("w")
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    with pytest.raises(DamagedFile, match=match) as caught:
        files.read("w", empty()).wait()
    assert str(path) in str(caught.value)
    path.write_bytes(whole)
    files.read("w", out := empty()).wait()
    assert torch.equal(out, tensor())


@pytest.mark.parametrize("nbytes", [-1, -BLOCK_NBYTES, -12_288, -20_480, +1, +BLOCK_NBYTES])
@BOTH
def test_a_file_that_is_short_or_long_is_refused(tmp_path, nbytes, checksums):
    with TensorFiles(tmp_path, checksums=checksums) as files:
        files.write("w", tensor()).wait()
        whole = 12_288 + 2 * BLOCK_NBYTES
        match = f"has {whole + nbytes} bytes, expected {whole} for 'w', torch.float32"
        cut = whole + nbytes
        damage(files, lambda old: old[:cut] + b"\0" * (cut - len(old)), match)


@pytest.mark.parametrize("place", ["first", "payload", "end of payload", "last", "end"])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_that_flips_anywhere_is_seen(store, place, bit):
    whole = 12_288 + 2 * BLOCK_NBYTES
    at, match = {
        "first": (100, "its first cover does not match its own checksum"),
        "payload": (BLOCK_NBYTES, "'w' have changed since write 1: expected checksum 0x"),
        "end of payload": (BLOCK_NBYTES + 4 * NUMEL - 1, "have changed since write 1"),
        "last": (whole - BLOCK_NBYTES, "last cover: expected b'pdt-tensor-1', found"),
        "end": (whole - 1, "its last cover does not match"),
    }[place]

    def flip(old):
        return old[:at] + bytes([old[at] ^ 1 << bit]) + old[at + 1 :]

    damage(store, flip, match)


def test_blocks_that_have_changed_places_are_seen(store):
    def swap(old):
        one, two = old[BLOCK_NBYTES : 2 * BLOCK_NBYTES], old[2 * BLOCK_NBYTES : 3 * BLOCK_NBYTES]
        return old[:BLOCK_NBYTES] + two + one + old[3 * BLOCK_NBYTES :]

    damage(store, swap, "'w' have changed since write 1")


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, BOUNCE_NBYTES + 5, 2 * BOUNCE_NBYTES])
def test_a_checksum_is_of_the_bytes_wherever_they_lie(nbytes):
    generator = torch.Generator().manual_seed(nbytes)
    whole = torch.randint(0, 256, (nbytes + 8,), generator=generator, dtype=torch.uint8)
    seen = set()
    for start in (0, 1, 4, 8):
        moved = torch.empty_like(whole)[start:][:nbytes]
        moved.copy_(whole[:nbytes])
        seen.add(checksum(moved))
    assert len(seen) == 1
    for at in {0, nbytes // 2, nbytes - 1} - {-1}:
        if nbytes:
            moved[at] ^= 1
            assert checksum(moved) not in seen
            moved[at] ^= 1


@BOTH
def test_an_older_write_is_refused(tmp_path, checksums):
    with TensorFiles(tmp_path, checksums=checksums) as files:
        files.write("w", tensor(1)).wait()
        older = files.path("w").read_bytes()
        files.write("w", tensor()).wait()
        damage(files, lambda _: older, "first cover: number: expected 2, found 1")


@BOTH
def test_a_file_of_another_name_or_store_is_refused(tmp_path, checksums):
    with TensorFiles(tmp_path, checksums=checksums) as files:
        files.write("w", tensor())
        files.write("v", tensor()).wait()
        other = files.path("v").read_bytes()
        damage(files, lambda _: other, "name: expected 'w', found 'v'")
        with TensorFiles(tmp_path, checksums=checksums) as second:
            second.write("w", tensor()).wait()
            other = second.path("w").read_bytes()
        damage(files, lambda _: other, "store: expected '[0-9a-f]{32}', found")


@BOTH
def test_a_write_over_old_content_that_was_cut_short_is_seen(tmp_path, checksums):
    with TensorFiles(tmp_path, checksums=checksums) as files:
        files.write("w", tensor(1)).wait()
        older = files.path("w").read_bytes()
        files.write("w", tensor()).wait()
        for cut in range(BLOCK_NBYTES, len(older), BLOCK_NBYTES):
            damage(files, lambda new, cut=cut: new[:cut] + older[cut:], "last cover: number")


def test_a_file_that_is_gone_is_said(store):
    store.path("w").unlink()
    with pytest.raises(DamagedFile, match=r"w\.tensor is gone"):
        store.read("w", empty()).wait()


def test_what_an_earlier_process_left_must_say_so_itself(tmp_path):
    kept = tmp_path / "kept"
    for folder in (kept, tmp_path / "other"):
        with TensorFiles(folder, keep=True) as files:
            for name in ("w", "v", "short", "strange"):
                files.write(name, tensor())
    shutil.copy(tmp_path / "other" / "v.tensor", kept / "v.tensor")
    shutil.copy(kept / "w.tensor", kept / "u.tensor")
    (kept / "strange.tensor").write_bytes(b"x" * 20_000)
    with (kept / "short.tensor").open("r+b") as file:
        file.truncate(5)
    with TensorFiles(kept, keep=True) as files:
        for name, match in {
            "v": "expected 'v' of store [0-9a-f]{32}, found 'v' of store",
            "u": "expected 'u' of store .* found 'w'",
            "strange": "expected b'pdt-tensor-1', found b'xxxx",
            "short": "has 5 bytes, expected 8192 or more",
        }.items():
            with pytest.raises(DamagedFile, match=match):
                files.read(name, empty()).wait()
        for name in ("short", "strange"):  # can be written anew
            files.write(name, tensor(3))
            files.read(name, out := empty()).wait()
            assert torch.equal(out, tensor(3))


# Disks that refuse


def refusing(monkeypatch, after, code):
    """From now on a disk takes `after` bytes."""
    left, real = [after], os.pwritev

    def pwritev(fd, views, offset):
        if left[0] <= 0:
            raise OSError(code, os.strerror(code))
        whole = b"".join(views)
        moved = os.pwrite(fd, whole, offset) if left[0] >= len(whole) else left[0]
        left[0] -= moved
        return moved

    monkeypatch.setattr(os, "pwritev", pwritev)
    return lambda: monkeypatch.setattr(os, "pwritev", real)


@pytest.mark.parametrize("after", [0, BLOCK_NBYTES, 3 * BLOCK_NBYTES])
def test_a_durable_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch, after):
    with TensorFiles(tmp_path, direct=False) as files:
        files.write("w", tensor(1), durable=True).wait()
        restore = refusing(monkeypatch, after, errno.ENOSPC)
        failed = files.write("w", tensor(2), durable=True)
        with pytest.raises(OSError, match=r"cannot write 'w': No space.*20480 bytes wanted, \d+"):
            failed.wait()
        restore()
        files.read("w", out := empty()).wait()
        assert torch.equal(out, tensor(1))
        assert [path.name for path in files.folder.glob("w*")] == ["w.tensor"]


def test_a_write_over_old_content_that_fails_says_what_is_lost(tmp_path, monkeypatch):
    with TensorFiles(tmp_path, direct=False) as files:
        files.write("w", tensor(1)).wait()
        restore = refusing(monkeypatch, BLOCK_NBYTES, errno.EIO)
        failed = files.write("w", tensor(2))
        for _ in range(2):  # whoever waits is told
            with pytest.raises(OSError, match="cannot write 'w'") as caught:
                failed.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(files.path("w")))
        with pytest.raises(RuntimeError, match="'w' is lost") as caught:
            files.read("w", empty()).wait()
        assert isinstance(caught.value.__cause__, OSError)
        restore()
        files.write("w", tensor(3))
        files.read("w", out := empty()).wait()
        assert torch.equal(out, tensor(3))


def test_an_error_that_nobody_waited_for_comes_at_the_end(tmp_path, monkeypatch):
    files = TensorFiles(tmp_path, direct=False)
    refusing(monkeypatch, 0, errno.ENOSPC)
    files.write("a", tensor())
    files.write("b", tensor())
    with pytest.raises(OSError, match=r"cannot write '[ab]'") as caught:
        files.close()
    assert "cannot write" in caught.value.__notes__[0]
    files.close()  # it has been told
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError, match="else") as raised, TensorFiles(tmp_path) as files:
        raise KeyError(files.write("a", tensor()) and "else")
    assert "cannot write 'a'" in raised.value.__notes__[0]


@contextmanager
def powerless(folder):
    """Without permission for `folder`, also where the tests run as root."""
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        folder.chmod(0o000)
        try:
            yield
        finally:
            folder.chmod(0o700)


def test_no_permission_is_said_and_takes_nothing(tmp_path):
    with TensorFiles(tmp_path / "kept", keep=True) as files:
        files.write("w", tensor()).wait()
        with powerless(files.folder):
            for durable in (True, False):
                with pytest.raises(PermissionError, match="cannot write 'w': Permission denied"):
                    files.write("w", tensor(1), durable=durable).wait()
            with pytest.raises(PermissionError, match="cannot read 'w': Permission denied"):
                files.read("w", empty()).wait()
            with pytest.raises(PermissionError):
                TensorFiles(files.folder / "below")
        files.read("w", out := empty()).wait()
        assert torch.equal(out, tensor())


# Whole processes

START = """
import os, signal, sys, time
import torch
from pdt.offload.files import TensorFiles
def tensor(number=0): return torch.arange(3000) * 7.0 + number
folder = sys.argv[1]
"""


@contextmanager
def running(code, folder, *before):
    """A process that runs `code`, once it has printed a line; killed at the end."""
    command = [*before, sys.executable, "-c", START + code, str(folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        start_new_session=True,  # one may end its whole group
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def is_gone(folder, within_s=10.0):
    """Whether nothing is left in the folder, and no process that speaks of it."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if not any(folder.iterdir()) and not watchers(folder):
            return True
        time.sleep(0.02)
    return False


def watchers(folder):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"pdt-files" in words and any(str(folder).encode() in word for word in words):
            found.append(path.parent.name)
    return found


def test_killed_while_it_writes_with_children_alive_it_leaves_nothing(tmp_path):
    code = """
import subprocess
files = TensorFiles(folder)
sleeper = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
forked = os.fork()
if forked == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
files.write("w", tensor()).wait()
print(sleeper.pid, forked, flush=True)
while True:
    for i in range(8): files.write(str(i), torch.zeros(1_000_000))
    files.flush()
"""
    with running(code, tmp_path) as process:
        children = [int(pid) for pid in process.stdout.readline().split()]
        try:
            assert len(watchers(tmp_path)) == 1
            assert list(tmp_path.glob("*/w.tensor"))
            process.kill()
            assert is_gone(tmp_path)
            for pid in children:
                os.kill(pid, 0)  # they live on, and hold nothing
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["os.killpg(0, signal.SIGKILL)", "sys.exit()", "1 / 0"])
@pytest.mark.slow
def test_however_a_process_ends_it_leaves_nothing(tmp_path, end):
    with running(
        f"files = TensorFiles(folder)\nfiles.write('w', tensor())\n{end}", tmp_path
    ) as process:
        process.communicate(timeout=60)
        assert is_gone(tmp_path)


def test_killed_between_write_and_rename_it_loses_nothing(tmp_path):
    code = """
files = TensorFiles(folder, keep=True)
files.write("w", tensor(1)).wait()
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
files.write("w", tensor(2)).wait()
"""
    with running(code, tmp_path) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert (tmp_path / "w.tensor.new").exists()  # it was there that it ended
    with TensorFiles(tmp_path, keep=True) as files:
        files.read("w", out := empty()).wait()
        assert torch.equal(out, tensor(1))
        assert not (tmp_path / "w.tensor.new").exists()


@BOTH
@pytest.mark.slow
def test_killed_while_it_writes_over_old_content_that_is_seen(tmp_path, checksums):
    code = f"""
files = TensorFiles(folder, keep=True, direct=False, checksums={checksums})
files.write("w", tensor(1)).wait()
def pwritev(fd, views, offset):
    os.pwrite(fd, b"".join(views)[:3 * 4096], offset)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwritev = pwritev
files.write("w", tensor(2), durable=False).wait()
"""
    with running(code, tmp_path) as process:
        assert process.wait(60) == -signal.SIGKILL
    with TensorFiles(tmp_path, keep=True) as files:
        with pytest.raises(DamagedFile, match="last cover: number: expected 2, found 1"):
            files.read("w", empty()).wait()


def private_mounts():
    """A command in which mounts are its own, or None where the user may not."""
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        command = ["unshare", *options]
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "true"], timeout=10).returncode
        ):
            return command
    return None


def test_a_full_disk_is_said_with_what_was_wanted_and_what_is_free(tmp_path):
    if (command := private_mounts()) is None:
        pytest.skip("the user may make no private mounts")
    code = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
for direct in (None, False):
    with TensorFiles(folder, direct=direct) as files:
        files.write("w", tensor()).wait()
        for durable in (False, True):
            try:
                files.write("large", torch.zeros(500_000), durable=durable).wait()
            except OSError as error:
                print(error.errno, error, flush=True)
        out = torch.empty(3000)
        files.read("w", out).wait()
        print(torch.equal(out, tensor()), files.names())
        files.write("fits", torch.zeros(150_000)).wait()
"""
    with running(code, tmp_path, *command) as process:
        lines = process.communicate(timeout=60)[0].splitlines()
    assert len(lines) == 6
    for line in lines[:2] + lines[3:5]:
        assert line.startswith(f"{errno.ENOSPC} ")
        assert "cannot write 'large': No space left on device; 2011136 bytes wanted" in line
        assert 900_000 < int(line.split(" free")[0].split()[-1]) < 2**20
    assert lines[2] == lines[5] == "True ['w']"
