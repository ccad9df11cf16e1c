"""examples/train.py: N ranks train as one process does, and its errors are one line."""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import options  # noqa: E402
import train  # noqa: E402

for module in (options, train, sys.modules[__name__]):  # ranks cannot import these by name
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run whose text is short, since validation reads all of its end."""
    text = tmp_path_factory.mktemp("text") / "short.txt"
    text.write_text("\n\n".join(f"paragraph {i} of the text, {i * i}" for i in range(90)))
    return ["--preset", "tiny", "--batch-size", "12", "--dtype", "float64", "--text", str(text)]


def run(
    arguments: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**(environment or os.environ), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def torchrun(script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run([*launch, "--nproc-per-node", "2", str(script), *flags])


def read_curve(out: Path) -> list[dict[str, str]]:
    with (out / "loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(rows: list[train.Row]) -> list[float]:
    return [row.train_loss for row in rows] + [row.validation_loss or 0.0 for row in rows]


def train_in_world(flags: list[str], world_size: int = 1) -> list[train.Row]:
    """What `train.train` returns, on this rank of the group there is, or alone."""
    args = train.parse(train.STRATEGIES, flags)
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = train.World(rank, world_size, rank, world_size, "gloo")
    return train.train(args, train.load_data(args), world)


def test_one_process_trains_and_writes_its_curve(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "b"
    train.main([*tiny, "--backend", "gloo", "--steps", "5", "--eval-every", "2", "--out", str(out)])
    curve = read_curve(out)
    assert [row["step"] for row in curve] == ["1", "2", "3", "4", "5"]
    assert [bool(row["validation_loss"]) for row in curve] == [False, True, False, True, True]
    assert float(curve[0]["train_loss"]) == pytest.approx(math.log(256), rel=0.05)
    assert float(curve[-1]["train_loss"]) < float(curve[0]["train_loss"]) - 0.3
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert re.fullmatch(
        r"single on 1 rank \(cpu\), 5 steps: loss \d\.\d+, validation \d\.\d+, [\d,]+ tokens/s; "
        rf"curve in {re.escape(str(out))}\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy", ["naive", "ddp", "shared", "zero1", "zero2", "zero3", "offload"]
)
def test_ranks_train_as_one_process_does(
    tiny: list[str], pool: Callable[..., Any], world_size: int, strategy: str
) -> None:
    flags = [*tiny, "--steps", "4", "--eval-every", "2"]
    alone = train_in_world(flags)
    by_rank = pool(world_size).run(train_in_world, [*flags, "--strategy", strategy], world_size)
    for rows in by_rank:
        assert losses(rows) == pytest.approx(losses(alone), rel=0, abs=1e-10)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_recomputed_changes_nothing(tiny: list[str], mode: str) -> None:
    flags = [*tiny, "--steps", "4"]
    assert losses(train_in_world([*flags, "--recompute", mode])) == losses(train_in_world(flags))


def test_states_in_files_change_nothing_and_are_gone(
    tiny: list[str], pool: Callable[..., Any], tmp_path: Path
) -> None:
    flags = [*tiny, "--steps", "4", "--strategy", "offload"]
    folder = tmp_path / "new" / "states"
    in_files = pool(2).run(train_in_world, [*flags, "--states-folder", str(folder)], 2)
    assert losses(in_files[0]) == losses(pool(2).run(train_in_world, flags, 2)[0])
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("hook", options.HOOKS)
def test_ddp_trains_with_every_hook(tiny: list[str], pool: Callable[..., Any], hook: str) -> None:
    flags = [*tiny, "--steps", "4", "--strategy", "ddp", "--comm-hook", hook]
    by_rank = pool(2).run(train_in_world, [*flags, "--bucket-cap-mb", "0.01"], 2)
    assert losses(by_rank[0]) == losses(by_rank[1])
    first, last = by_rank[0][0].train_loss, by_rank[0][-1].train_loss
    assert last < first - 0.05


def test_validation_is_the_mean_over_all_tokens(tiny: list[str]) -> None:
    args = train.parse(train.STRATEGIES, tiny)
    data, model = train.load_data(args), train.GPT(train.PRESETS["tiny"]).double()
    tokens = data.splits["validation"]
    nlls = []
    for first in range(0, len(tokens) - 1, 64):  # the last piece is shorter
        piece = tokens[first : first + 65]
        nlls.append(F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none"))
    assert len(torch.cat(nlls)) % 64
    world = train.World(0, 1, 0, 1, "gloo")
    validation = train.validate(model, data, world, batch_size=5)
    assert validation == pytest.approx(torch.cat(nlls).mean().item(), rel=1e-12)


def test_the_text_is_python_s_own_help_by_default() -> None:
    data = train.load_data(train.parse(train.STRATEGIES, []))
    assert data.block_size == train.PRESETS["small"].block_size
    assert data.num_samples() > 2_000


RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("flags", "environment", "shown"),
    [
        ("--strategy zero9", {}, "invalid choice: 'zero9'"),
        ("--nonsense", {}, "unrecognized arguments: --nonsense"),
        ("--strategy naive", {}, "--strategy naive needs ranks, start them by: torchrun"),
        ("--strategy single", RANK_0_OF_2, "--strategy single is one process, not 2"),
        ("--strategy ddp --states-folder x", RANK_0_OF_2, "is for --strategy offload, not ddp"),
        ("--strategy offload --states-folder /proc/x", RANK_0_OF_2, "cannot be written"),
        ("--strategy naive --comm-hook bf16", RANK_0_OF_2, "are for --strategy ddp, not naive"),
        ("--strategy ddp --comm-hook zip", RANK_0_OF_2, "invalid choice: 'zip'"),
        ("--strategy ddp --bucket-cap-mb -1", RANK_0_OF_2, "must be 0 or more, got -1"),
        ("--strategy naive --batch-size 7", RANK_0_OF_2, "--batch-size 7 is not a multiple of the"),
        ("--steps 0", {}, "--steps must be at least 1, got 0"),
        ("--eval-every -1", {}, "--eval-every must be at least 1, got -1"),
        ("--lr nan", {}, "--lr must be positive and finite, got nan"),
        ("--link-latency 1e-3", {}, "--link-latency 0.001 needs --link-bandwidth"),
        ("--link-bandwidth 1e9", {}, "--strategy single has no link"),
        ("--strategy naive --link-bandwidth 0", RANK_0_OF_2, "bandwidth must be positive"),
        ("--text /no/such/file", {}, "--text /no/such/file: "),
        (f"--text {shlex.quote(sys.executable)}", {}, "codec can't decode"),
        (f"--out {shlex.quote(__file__)}/below", {}, f"--out {__file__}/below cannot be written: "),
    ],
)
def test_a_mistake_is_answered_by_one_line_and_exit_code_2(
    flags: str,
    environment: dict[str, str],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        train.main(["--backend", "gloo", *shlex.split(flags)])
    answer = capsys.readouterr().err
    assert stop.value.code == 2
    assert answer.startswith("train.py: error: ")
    assert answer.count("\n") == 1
    assert shown in answer


def test_nccl_with_fewer_gpus_than_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in RANK_0_OF_2.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        train.main(["--strategy", "naive", "--backend", "nccl"])
    assert "needs a GPU per rank, here 1 for 2: use --backend gloo" in capsys.readouterr().err
    assert train.world_from_environment("auto").backend == "gloo"


def test_a_python_without_the_text_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(SystemExit, match="2"):
        train.main(["--backend", "gloo", "--out", str(tmp_path)])
    answer = capsys.readouterr().err
    assert answer.startswith("train.py: error: --text not given: this Python lacks")
    assert answer.count("\n") == 1


@pytest.mark.slow
def test_torchrun_on_an_emulated_link_gives_the_losses_of_one_process(
    tiny: list[str], tmp_path: Path
) -> None:
    flags = [*tiny, "--steps", "3", "--backend", "gloo", "--out", str(tmp_path)]
    link = ["--link-latency", "1e-4", "--link-bandwidth", "1e8"]
    done = torchrun(EXAMPLES / "train.py", *flags, *link, "--strategy", "naive")
    assert done.returncode == 0, done.stderr
    assert not re.search(r"warn|error|traceback", done.stderr, re.IGNORECASE), done.stderr
    curve = read_curve(tmp_path)
    alone = train_in_world([*tiny, "--steps", "3"])
    trained = [float(row["train_loss"]) for row in curve]
    assert trained == pytest.approx([row.train_loss for row in alone], rel=0, abs=1e-10)
    validation = float(curve[-1]["validation_loss"])
    assert validation == pytest.approx(alone[-1].validation_loss, rel=0, abs=1e-10)
    assert done.stdout.startswith("naive on 2 ranks (cpu), 3 steps: loss ")


FAILING = """
import sys, time, torch.distributed as dist
sys.path.insert(0, {examples!r})
import train
from pdt.strategies import Strategy, average_gradients
calls = []
def fail_on_rank_1(model):
    calls.append(model)
    if dist.get_rank() == 1 and len(calls) == 2:
        print("RAISED AT", time.time(), flush=True)
        raise RuntimeError("rank 1 cannot go on")
    average_gradients(model)
train.STRATEGIES["naive"] = Strategy(after_backward=fail_on_rank_1)
train.record(train.main)()
"""


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_within_seconds(tiny: list[str], tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(examples=str(EXAMPLES)))
    flags = [*tiny, "--steps", "1000", "--backend", "gloo", "--out", str(tmp_path)]
    done = torchrun(script, *flags, "--strategy", "naive")
    ended = time.time()
    assert done.returncode != 0
    raised = re.search(r"RAISED AT ([\d.]+)", done.stdout)
    assert raised is not None, done.stderr
    assert ended - float(raised[1]) < 20
    first_error = next(line for line in done.stderr.splitlines() if "Error: " in line)
    assert first_error.endswith("RuntimeError: rank 1 cannot go on")


@pytest.mark.slow
def test_torchrun_shows_a_mistake_once(tmp_path: Path) -> None:
    done = torchrun(EXAMPLES / "train.py", "--strategy", "single", "--out", str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.count("train.py: error: --strategy single is one process, not 2") == 1


@pytest.mark.gpu
def test_one_gpu_trains_as_the_cpu_does(tiny: list[str], tmp_path: Path) -> None:
    for backend in ("nccl", "gloo"):
        flags = [*tiny, "--steps", "3", "--backend", backend, "--out", str(tmp_path / backend)]
        done = run([sys.executable, str(EXAMPLES / "train.py"), *flags])
        assert done.returncode == 0, done.stderr
    on_gpu, on_cpu = (read_curve(tmp_path / name) for name in ("nccl", "gloo"))
    for gpu_row, cpu_row in zip(on_gpu, on_cpu, strict=True):
        assert float(gpu_row["train_loss"]) == pytest.approx(float(cpu_row["train_loss"]), abs=1e-9)


def test_the_commands_of_the_readme_are_understood() -> None:
    text = (EXAMPLES / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^(?:python|OMP|bash|sbatch).*examples/\S+(.*)$", text, re.MULTILINE)
    flags = [[word for word in shlex.split(c) if word != "first-host"] for c in commands]
    strategies = {train.parse(train.STRATEGIES, f).strategy for f in flags}
    assert len(commands) == 11
    assert strategies == set(train.STRATEGIES)


def test_the_slurm_script_is_valid_shell() -> None:
    assert run(["bash", "-n", str(EXAMPLES / "train.sbatch")]).returncode == 0


@pytest.mark.slow
def test_two_hosts_meet_and_train(tiny: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    flags = [*tiny, "--steps", "2", "--backend", "gloo", "--out", str(tmp_path)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PORT": port, "NPROC_PER_NODE": "1"}
    command = ["bash", str(EXAMPLES / "two_hosts.sh"), "127.0.0.1", *flags]
    with ThreadPoolExecutor() as threads:
        hosts = list(threads.map(lambda _: run(command, environment), range(2)))
    assert [host.returncode for host in hosts] == [0, 0], hosts
    assert "ddp on 2 ranks (cpu), 2 steps" in hosts[0].stdout + hosts[1].stdout
