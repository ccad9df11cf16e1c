"""Live ranks answer: what goes in, what comes back, what is shown."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist

from pdt import RankError, Ranks
from pdt.ranks import capacity


def test_results_come_back_by_rank(pool):
    assert pool(4).run(lambda: (dist.get_rank(), dist.get_world_size())) == [
        (rank, 4) for rank in range(4)
    ]


def test_ranks_are_processes_that_stay(pool):
    pids = pool(4).run(os.getpid)
    assert len({*pids, os.getpid()}) == 5
    assert pool(4).run(os.getpid) == pids


def test_a_closure_and_arguments_travel(pool):
    scale = 3

    def fn(a, *, b):
        return scale * a + b + dist.get_rank()

    assert pool(2).run(fn, 2, b=1) == [7, 8]


def test_a_name_that_torch_has_too_does_not_keep_a_function_from_travelling(pool):
    class Metered:
        def ops(self):
            return ["all_reduce"]

        classes = 1

    def fn():
        return torch.ones(1).item(), Metered().ops(), Metered.classes

    assert pool(2).run(fn) == [(1.0, ["all_reduce"], 1)] * 2


def test_a_collective_runs_among_them(pool):
    def total():
        tensor = torch.full((3,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        return tensor

    assert all(torch.equal(result, torch.full((3,), 10.0)) for result in pool(4).run(total))


def test_one_rank_is_enough():
    with Ranks(1) as ranks:
        assert ranks.run(lambda: dist.get_world_size()) == [1]


def test_a_rank_computes_on_one_thread(pool):
    assert pool(2).run(torch.get_num_threads) == [1, 1]


def test_a_rank_over_gloo_computes_on_the_cpu(pool):
    from pdt.ranks import device

    assert pool(2).run(device) == [torch.device("cpu")] * 2


def test_ranks_see_torchrun_s_variables(pool):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert pool(2).run(lambda: [os.environ[name] for name in names]) == [
        ["0", "0", "2", "2"],
        ["1", "1", "2", "2"],
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.arange(6).view(2, 3).t(),
        torch.ones(5, dtype=torch.bfloat16)[::2],
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.complex64).conj() * 1j,
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(4.0).to_sparse(),
        torch.ones(2, 2).expand(3, 2, 2),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_any_tensor_goes_and_comes_back_equal(pool, tensor):
    for back in pool(2).run(lambda: tensor):
        assert type(back) is type(tensor)
        assert back.requires_grad == tensor.requires_grad
        assert back.dtype == tensor.dtype
        assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense())


def test_a_large_tensor_comes_back(pool):
    back = pool(2).run(lambda: torch.full((32_000_000,), float(dist.get_rank())))  # 128 MB each
    assert [(tensor.numel(), tensor[-1].item()) for tensor in back] == [
        (32_000_000, 0.0),
        (32_000_000, 1.0),
    ]


def test_a_tensor_that_came_back_may_be_written(pool):
    (tensor, _) = pool(2).run(lambda: torch.zeros(3))
    tensor += 1
    assert tensor.tolist() == [1, 1, 1]


def test_only_the_view_travels_and_not_its_storage(pool):
    big = torch.zeros(1_000_000)
    (back, _) = pool(2).run(lambda: big[:10])
    assert back.untyped_storage().nbytes() == 40


def test_output_is_shown_with_its_rank(pool, capsys):
    def speak():
        print("hello", dist.get_rank())
        os.write(2, b"from C\n")
        sys.stdout.write("no newline")

    pool(2).run(speak)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert own == [
            f"[rank {rank}] hello {rank}",
            f"[rank {rank}] from C",
            f"[rank {rank}] no newline",
        ]


def test_output_is_streamed_while_the_call_runs(pool, monkeypatch):
    seen_at, wait = [], threading.Event()

    class Out:
        def write(self, text):
            seen_at.append(text)
            wait.set()

        def flush(self):
            pass

    def slow():
        print("early")
        import time

        time.sleep(0.7)
        print("late")

    monkeypatch.setattr(sys, "stdout", Out())
    caller = threading.Thread(target=pool(2).run, args=(slow,))
    caller.start()
    assert wait.wait(20)
    assert caller.is_alive()
    assert not any("late" in text for text in seen_at)
    caller.join(20)
    assert any("late" in text for text in seen_at)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_size_below_one_is_refused(world_size):
    with pytest.raises(ValueError, match=f"at least 1, got {world_size}"):
        Ranks(world_size)


@pytest.mark.parametrize("world_size", [True, 2.0, "2", None])
def test_a_world_size_that_is_no_int_is_refused(world_size):
    with pytest.raises(TypeError, match="world_size must be an int"):
        Ranks(world_size)


def test_more_ranks_than_the_memory_carries_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr(capacity, "available_nbytes", lambda: 2**30)
    with pytest.raises(
        ValueError, match=r"100 ranks need about 7\.0 GB and 1\.1 GB are free.* 12$"
    ):
        Ranks(100)


def test_more_ranks_than_the_descriptors_allow_are_refused():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with pytest.raises(ValueError, match="ulimit -n"):
            Ranks(40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backend": "mpi"}, "'mpi' is not one of auto, gloo, nccl, shm"),
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
    ],
)
def test_bad_options_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Ranks(2, **kwargs)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="this machine has the GPUs")
def test_nccl_without_enough_gpus_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"NCCL needs a GPU for each of the 2 ranks.*backend='gloo'"
    ):
        Ranks(2, backend="nccl")


def test_what_cannot_be_sent_is_named_and_the_ranks_live_on(pool):
    pids = pool(2).run(os.getpid)
    lock = threading.Lock()

    def uses_a_lock():
        return lock

    with pytest.raises(TypeError, match="uses_a_lock or its arguments cannot be sent"):
        pool(2).run(uses_a_lock)
    with pytest.raises(TypeError, match="takes a function"):
        pool(2).run(3)
    assert pool(2).run(os.getpid) == pids


def test_a_result_that_cannot_be_sent_is_named_and_the_ranks_live_on(tmp_path):
    with Ranks(2, backend="gloo") as ranks:  # of its own: what other tests have sent matters here
        pids = ranks.run(os.getpid)
        with pytest.raises(RankError, match="cannot send back its result") as caught:
            ranks.run(lambda: (tmp_path / str(dist.get_rank())).open("w"))
        assert caught.value.kind == "result"
        assert "TextIOWrapper" in caught.value.text
        assert ranks.run(os.getpid) == pids


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(
        textwrap.dedent("""
        import torch.distributed as dist
        from pdt import Ranks

        def fn():
            return dist.get_rank()

        with Ranks(2, backend="gloo") as ranks:
            print(ranks.run(fn))
        """)
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr, run.returncode) == ("[0, 1]\n", "", 0)


def test_two_pools_side_by_side_do_not_mix():
    with Ranks(2, backend="gloo") as a, Ranks(3, backend="gloo") as b:

        def total():
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return tensor.item()

        assert a.run(total) == [2.0] * 2
        assert b.run(total) == [3.0] * 3
        assert a.run(total) == [2.0] * 2


def test_a_closed_pool_starts_again_on_the_next_call():
    ranks = Ranks(2, backend="gloo")
    first = ranks.run(os.getpid)
    ranks.close()
    ranks.close()
    assert "stopped" in repr(ranks)
    assert set(ranks.run(os.getpid)).isdisjoint(first)
    ranks.close()


def test_a_module_beside_the_caller_is_found_in_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside

    with Ranks(2, backend="gloo") as ranks:
        assert ranks.run(beside.answer) == [42, 42]
