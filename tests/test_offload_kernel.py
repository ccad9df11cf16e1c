"""pdt.offload.kernel: built once, kept whole, rebuilt when broken, done without when it must be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from pdt.offload import kernel

needs_compiler = pytest.mark.skipif(not kernel.available(), reason=kernel.why_not() or "built")


def works(found: kernel.Compiled) -> bool:
    a, b, c = torch.zeros(5), torch.ones(5), torch.ones(5)
    found.triad(a, b, c, 2.0)
    return torch.equal(a, torch.full((5,), 3.0))


def kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@needs_compiler
def test_a_built_kernel_is_kept_and_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(kernel.open_kernel(tmp_path / "new"))
    (file,) = kept(tmp_path / "new")
    monkeypatch.setattr(kernel, "_build", lambda *args: pytest.fail("built again"))
    assert works(kernel.open_kernel(tmp_path / "new"))
    assert kept(tmp_path / "new") == [file]


@needs_compiler
@pytest.mark.parametrize("harm", ["cut", "changed", "foreign"])
def test_a_broken_or_foreign_file_is_built_anew(tmp_path: Path, harm: str) -> None:
    kernel.open_kernel(tmp_path)
    (file,) = kept(tmp_path)
    content = file.read_bytes()
    broken = {"cut": content[:5000], "changed": content[:-1] + b"x", "foreign": b"text"}[harm]
    file.unlink()
    file.write_bytes(broken)
    assert works(kernel.open_kernel(tmp_path))
    assert [path.read_bytes() for path in kept(tmp_path)] == [content]


@needs_compiler
def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert works(kernel.open_kernel(tmp_path / "file" / "below"))
    assert [path.name for path in kept(tmp_path)] == ["file"]


@needs_compiler
def test_many_may_build_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: kernel.open_kernel(tmp_path), range(3)))
    assert all(map(works, found))
    assert len(kept(tmp_path)) == 1


@needs_compiler
@pytest.mark.parametrize("more", kernel.MORE_FLAGS)
def test_every_set_of_flags_gives_the_same_triad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(kernel, "MORE_FLAGS", (("-no-such-flag",), more))
    assert works(kernel.open_kernel(tmp_path))


def test_what_a_failing_compiler_said_is_told(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho cannot do that >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(RuntimeError, match="cannot do that"):
        kernel.open_kernel(tmp_path / "cache", str(compiler))
    compiler.write_text("#!/bin/sh\nexit 0\n")  # says that all is well, and makes nothing
    with pytest.raises(RuntimeError, match="made no library"):
        kernel.open_kernel(tmp_path / "cache", str(compiler))
    assert not (tmp_path / "cache").exists()


def test_no_compiler_on_the_path_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no C compiler"):
        kernel.open_kernel(tmp_path)


def test_a_process_without_compiler_looks_once_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def nothing(name: str) -> None:
        looked.append(name)

    monkeypatch.setattr(kernel, "_find", cache(kernel._find.__wrapped__))
    monkeypatch.setattr(kernel.shutil, "which", nothing)
    assert not kernel.available()
    assert "no C compiler" in kernel.why_not()
    with pytest.raises(RuntimeError, match="no C compiler"):
        kernel.get()
    assert looked == list(kernel.COMPILERS)


def test_what_a_kernel_depends_on_changes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("one")
    names = {kernel.fingerprint(str(compiler))}
    compiler.write_text("another")
    names.add(kernel.fingerprint(str(compiler)))
    monkeypatch.setattr(kernel, "_cpu", lambda: ["another processor"])
    names.add(kernel.fingerprint(str(compiler)))
    monkeypatch.setattr(kernel, "FLAGS", ("-O0",))
    names.add(kernel.fingerprint(str(compiler)))
    assert len(names) == 4
