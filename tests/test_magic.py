"""`%%ranks` in a shell like the notebook's."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from pdt import RankError, Ranks


@pytest.fixture
def shell():
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "pdt")
    yield shell
    if isinstance(ranks := shell.user_ns.get("ranks"), Ranks):
        ranks.close()
    shell.reset(new_session=False)
    InteractiveShell.clear_instance()


@pytest.fixture
def ranks(shell):
    shell.user_ns["ranks"] = Ranks(2, backend="gloo")
    return shell.user_ns["ranks"]


def test_a_cell_runs_on_every_rank_and_its_variables_last(shell, ranks, capsys):
    shell.run_cell_magic("ranks", "", "x = torch.full((2,), float(rank))\ndist.all_reduce(x)")
    shell.run_cell_magic("ranks", "", "x")
    assert capsys.readouterr().out == "tensor([1., 1.])\n"


def test_all_ranks_are_shown_when_they_differ(shell, ranks, capsys):
    shell.run_cell_magic("ranks", "ranks", "print('of', world_size)\nrank")
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] of 2",
        "[rank 0] 0",
        "[rank 1] of 2",
        "[rank 1] 1",
    ]


def test_a_long_cell_shows_its_output_as_it_comes(shell, ranks, capsys, monkeypatch):
    from pdt.ranks import magic

    monkeypatch.setattr(magic, "PATIENCE_S", 0.1)
    shell.run_cell_magic("ranks", "", "print('same')\nimport time\ntime.sleep(1)\nprint('end')")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [f"[rank {r}] {word}" for r in (0, 1) for word in ("end", "same")]


def test_an_exception_shows_the_line_of_the_cell_and_keeps_the_variables(shell, ranks, capsys):
    shell.run_cell_magic("ranks", "", "y = 5")
    with pytest.raises(RankError) as caught:
        shell.run_cell_magic("ranks", "", "z = 1\nundefined + 1")
    assert "line 2" in caught.value.text
    assert "    undefined + 1" in caught.value.text
    shell.run_cell_magic("ranks", "", "y")
    assert capsys.readouterr().out == "5\n"


def test_a_syntax_error_is_the_rank_s_error(shell, ranks):
    with pytest.raises(RankError, match="SyntaxError"):
        shell.run_cell_magic("ranks", "", "x = = 1")


def test_a_missing_pool_says_how_to_make_one(shell):
    with pytest.raises(
        UsageError, match=r"'nobody' is not defined: make one by nobody = pdt\.Ranks"
    ):
        shell.run_cell_magic("ranks", "nobody", "1")
    shell.user_ns["ranks"] = 3
    with pytest.raises(UsageError, match="'ranks' is a int"):
        shell.run_cell_magic("ranks", "", "1")


def test_a_cell_in_a_traceback_bears_its_number(shell, ranks):
    error = RankError(0, "raised", "headline", '  File "/tmp/ipykernel_1/2.py", line 3, in f')
    shell.compile._filename_map["/tmp/ipykernel_1/2.py"] = 7
    assert error._render_traceback_() == ["RankError: headline", "  Cell In[7], line 3, in f"]
    assert str(error) == "headline\n  Cell In[7], line 3, in f"


def test_the_ranks_still_answer_functions(shell, ranks):
    assert ranks.run(dist.get_rank) == [0, 1]
