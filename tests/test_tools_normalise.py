"""tools.normalise: the stored form is stable, and what may not be stored is named."""

from __future__ import annotations

import base64
import copy
import io
import os
import sys
import tempfile
from typing import Any

import pytest
from nbformat import v4

from tools.normalise import ROOT, cell_ids, clean, complaints, normalise, strip_png


def ran(source: str, number: int = 1, outputs: list[Any] | None = None) -> Any:
    return v4.new_code_cell(source, execution_count=number, outputs=outputs or [])


def stream(text: str, name: str = "stdout") -> Any:
    return v4.new_output("stream", name=name, text=text)


def notebook(*cells: Any) -> Any:
    return v4.new_notebook(cells=[*cells])


def picture(width: int = 8) -> bytes:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, file = plt.figure(figsize=(width, 2)), io.BytesIO()
    figure.savefig(file, format="png")
    plt.close(figure)
    return file.getvalue()


def shown(png: bytes) -> Any:
    return v4.new_output("display_data", data={"image/png": base64.b64encode(png).decode()})


def test_normalising_twice_changes_nothing_more() -> None:
    once = normalise(notebook(ran("print(1)", 1, [stream("1\n"), shown(picture())])))
    assert normalise(once) == once
    assert complaints(once) == []


def test_the_given_notebook_is_left_alone() -> None:
    given = notebook(ran("1", 1, [stream("a"), stream("b")]))
    before = copy.deepcopy(given)
    normalise(given)
    assert given == before


def test_a_new_cell_leaves_the_ids_of_the_others_alone() -> None:
    cells = [v4.new_code_cell(source) for source in ("a = 1", "b = 2", "c = 3")]
    before = cell_ids(cells)
    after = cell_ids([cells[0], v4.new_code_cell("new = 0"), *cells[1:]])
    assert [after[0], *after[2:]] == before


def test_equal_cells_have_different_ids() -> None:
    cells = [v4.new_code_cell("same"), v4.new_markdown_cell("same"), v4.new_code_cell("same")]
    assert len(set(cell_ids(cells))) == 3


def test_streams_become_one_each_and_stdout_comes_first() -> None:
    outputs = [stream("w", "stderr"), stream("a\n"), stream("x", "stderr"), stream("b\n")]
    cell = normalise(notebook(ran("f()", 1, outputs))).cells[0]
    assert [(out.name, out.text) for out in cell.outputs] == [
        ("stdout", "a\nb\n"),
        ("stderr", "wx"),
    ]


def test_a_result_keeps_its_place_between_streams() -> None:
    value = v4.new_output("execute_result", data={"text/plain": "3"}, execution_count=1)
    cell = normalise(notebook(ran("3", 1, [stream("a\n"), value, stream("b\n")]))).cells[0]
    assert [out.output_type for out in cell.outputs] == ["stream", "execute_result"]


def test_progress_bars_leave_no_trace() -> None:
    bar = "  0%|          | 0/3\r 50%|##   | 1/3\r100%|#####| 3/3 [00:00<00:00, 9.7it/s]\n"
    outputs = [stream(bar, "stderr"), stream("loading\rdone\n")]
    cell = normalise(notebook(ran("f()", 1, outputs))).cells[0]
    assert [out.text for out in cell.outputs] == ["done\n"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{ROOT}/notebooks/x.py", "./notebooks/x.py"),
        (f"{sys.prefix}/bin/python", "<env>/bin/python"),
        (f"{tempfile.gettempdir()}/pdt-1", "<tmp>/pdt-1"),
        ("<object at 0x7f3a12bc9d>", "<object at 0x...>"),
        ("/tmp/ipykernel_4211/903.py:3: Warning", "<cell>:3: Warning"),
        ("flags 0x1f and 65536 bytes", "flags 0x1f and 65536 bytes"),
    ],
)
def test_traces_of_this_machine_are_removed(text: str, wanted: str) -> None:
    assert clean(text) == wanted


def test_a_home_at_the_root_does_not_eat_every_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.sep)
    assert clean("bytes/s") == "bytes/s"


def test_timing_metadata_goes_and_tags_stay() -> None:
    cell = ran("1")
    cell.metadata = {"execution": {"iopub.execute_input": "2024"}, "tags": ["nbval-check-output"]}
    given = notebook(cell)
    given.metadata = {"kernelspec": {"name": "my-env", "display_name": "Mine"}, "toc": {}}
    result = normalise(given)
    assert result.cells[0].metadata == {"tags": ["nbval-check-output"]}
    assert result.metadata.kernelspec.name == "python3"
    assert "toc" not in result.metadata


def test_a_picture_loses_its_texts_and_nothing_else() -> None:
    from PIL import Image

    png = picture()
    assert b"Software" in png
    stripped = strip_png(png)
    assert b"Software" not in stripped
    before, after = (Image.open(io.BytesIO(data)) for data in (png, stripped))
    assert before.tobytes() == after.tobytes()
    assert strip_png(stripped) == stripped


def test_what_is_no_png_is_refused() -> None:
    with pytest.raises(ValueError, match="PNG"):
        strip_png(b"GIF89a")


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        ([v4.new_code_cell("1")], "never run"),
        ([ran("1"), v4.new_code_cell("2")], "code cell 2: never run"),
        ([ran("1", 2)], "ran as number 2"),
        ([ran("1", 1), ran("2", 3)], "code cell 2: ran as number 3"),
        ([ran("  ")], "empty"),
        ([ran("!ls")], "`!command` never fails its cell"),
        ([ran("x = 1\n  !ls")], "`!command` never fails its cell"),
        (
            [ran("1/0", 1, [v4.new_output("error", ename="ZeroDivisionError", evalue="by zero")])],
            "shows an error: ZeroDivisionError: by zero",
        ),
        ([v4.new_markdown_cell("only text")], "there is no code cell"),
    ],
)
def test_what_may_not_be_stored_is_named(cells: list[Any], complaint: str) -> None:
    found = complaints(normalise(notebook(*cells)))
    assert len(found) == 1
    assert complaint in found[0]


def test_a_big_picture_is_refused() -> None:
    noise = b"\x89PNG\r\n\x1a\n" + os.urandom(210_000)
    output = v4.new_output("display_data", data={"image/png": base64.b64encode(noise).decode()})
    (found,) = complaints(notebook(ran("plot()", 1, [output])))
    assert "a picture of 210,0" in found


def test_a_notebook_out_of_the_stored_form_names_what_differs() -> None:
    stored = normalise(notebook(v4.new_markdown_cell("text"), ran("1")))
    stored.cells[1].metadata["collapsed"] = True
    (found,) = complaints(stored)
    assert "cell 2: metadata" in found
