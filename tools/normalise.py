"""One form for every stored notebook, so that running it again changes only what it shows.

Pure: a notebook (of nbformat) in, a notebook or a list of complaints out.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import re
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_CELL_METADATA = ("nbgrader", "tags")
FIGURE_NBYTES = 200_000  # what one stored picture may take
PROGRESS = re.compile(r"^.*\d+%\|.*\|.*(?:\n|$)", re.MULTILINE)  # a bar of tqdm
OVERWRITTEN = re.compile(r"^[^\n]*\r(?!\n)", re.MULTILINE)
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
KERNEL_FILE = re.compile(r"[^\s\"']*ipykernel_\d+/\d+\.py")


def normalise(notebook: Any) -> Any:
    """A copy of the notebook in the stored form.

    Neutral metadata; cell ids made from the cell's own text, so that a new cell leaves the ids of
    the others alone; streams merged as a terminal would show them, without progress bars, memory
    addresses and paths of this machine; pictures without the name of the program that drew them.
    """
    result = copy.deepcopy(notebook)
    kept = {key: value for key, value in notebook.metadata.items() if key == "pdt"}
    result.metadata = nbformat.from_dict({**METADATA, **kept})
    result.nbformat, result.nbformat_minor = 4, 5
    for cell, cell_id in zip(result.cells, cell_ids(result.cells), strict=True):
        cell.id = cell_id
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in KEPT_CELL_METADATA if cell.metadata.get(key)}
        )
        if cell.cell_type == "code":
            cell.outputs = merge_streams([_output(each) for each in cell.outputs])
    return result


def cell_ids(cells: list[Any]) -> list[str]:
    """Ids of 8 hex digits from each cell's kind and text; a repeated cell gets a number behind."""
    seen: Counter[str] = Counter()
    ids = []
    for cell in cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def merge_streams(outputs: list[Any]) -> list[Any]:
    """All text of stdout in one output and all of stderr in another, stdout first of the two."""
    merged: list[Any] = []
    streams: dict[str, Any] = {}
    for output in outputs:
        if output.output_type != "stream":
            merged.append(output)
        elif output.name in streams:
            streams[output.name].text += output.text
        else:
            streams[output.name] = output
            merged.append(output)
    if [*streams] == ["stderr", "stdout"]:  # which comes first is chance when a child writes both
        first, second = (merged.index(stream) for stream in streams.values())
        merged[first], merged[second] = merged[second], merged[first]
    for output in streams.values():
        output.text = clean(OVERWRITTEN.sub("", PROGRESS.sub("", output.text)))
    return [each for each in merged if each.output_type != "stream" or each.text.strip()]


def clean(text: str) -> str:
    """The text without memory addresses, numbers of processes, and paths of this machine."""
    text = KERNEL_FILE.sub("<cell>", text)
    for path, name in _places():
        text = text.replace(path, name)
    return ADDRESS.sub("0x...", text)


def strip_png(data: bytes) -> bytes:
    """The picture without its texts (the program that drew it, the date); ValueError if no PNG."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("an image/png output does not start like a PNG file")
    kept, at = [data[:8]], 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
            kept.append(data[at : at + 12 + length])
        at += 12 + length
    return b"".join(kept)


def complaints(notebook: Any) -> list[str]:
    """What keeps this notebook from being stored: one line each, none when it may be."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if code and all(cell.execution_count is None for cell in code):
        return ["never run"]
    for number, cell in enumerate(code, 1):
        found += [f"code cell {number}: {what}" for what in _cell_complaints(cell, number)]
    if not code:
        found.append("there is no code cell")
    if not found and notebook != (wanted := normalise(notebook)):
        found.append(f"not in the stored form ({_difference(notebook, wanted)})")
    return found


def _cell_complaints(cell: Any, number: int) -> list[str]:
    found = []
    if not cell.source.strip():
        return ["empty: delete it"]
    if cell.execution_count is None:
        found.append("never run")
    elif cell.execution_count != number:
        found.append(f"ran as number {cell.execution_count}: not run once, from top to bottom")
    if re.search(r"^\s*!", cell.source, re.MULTILINE):
        found.append("`!command` never fails its cell: use subprocess.run(..., check=True)")
    for output in cell.outputs:
        if output.output_type == "error":
            found.append(f"shows an error: {output.ename}: {output.evalue}")
        nbytes = len(output.get("data", {}).get("image/png", "")) * 3 // 4
        if nbytes > FIGURE_NBYTES:
            found.append(f"a picture of {nbytes:,} bytes; {FIGURE_NBYTES:,} is the most")
    return found


def _output(output: Any) -> Any:
    output.pop("transient", None)
    if "execution_count" in output:
        output.execution_count = output.execution_count and int(output.execution_count)
    if "metadata" in output:
        output.metadata = {}
    data = output.get("data", {})
    for kind, value in data.items():
        if kind == "image/png":
            data[kind] = base64.b64encode(strip_png(base64.b64decode(value))).decode()
        elif isinstance(value, str):
            data[kind] = clean(value)
    return output


def _places() -> list[tuple[str, str]]:
    """Paths of this machine and what stands for each, the longest first."""
    places = {
        str(ROOT): ".",
        sys.prefix: "<env>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
    }
    return sorted(
        ((path, name) for path, name in places.items() if len(path) > 1),
        key=lambda place: -len(place[0]),
    )


def _difference(notebook: Any, wanted: Any) -> str:
    for key in ("metadata", "nbformat", "nbformat_minor"):
        if notebook[key] != wanted[key]:
            return key
    for number, (cell, other) in enumerate(zip(notebook.cells, wanted.cells, strict=True), 1):
        keys = sorted(key for key in {*cell, *other} if cell.get(key) != other.get(key))
        if keys:
            return f"cell {number}: {', '.join(keys)}"
    return "order of keys"
