"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "draftsmith").rglob("*.py"))
LONG_FUNCTIONS = {"train_steps": 100, "accumulate": 100, "_backward_rows": 70}  # the loop, the step, one GPU kernel


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src" / "draftsmith")))
def test_a_file_is_short_plain_and_explained(path):
    text = path.read_text()
    tree = ast.parse(text)
    wrong = []
    lines = text.count("\n")
    if lines > 400:
        wrong.append(f"{lines} lines")
    if text.strip() and not ast.get_docstring(tree):
        wrong.append("no module docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > LONG_FUNCTIONS.get(node.name, 60):
                wrong.append(f"{node.name} has {length} lines")
        if isinstance(node, ast.ExceptHandler):
            caught = getattr(node.type, "id", None)
            excused = "# noqa: BLE001 - " in text.splitlines()[node.lineno - 1]  # with its reason
            if node.type is None or (caught in ("Exception", "BaseException") and not excused):
                wrong.append(f"line {node.lineno}: broad except")
        if isinstance(node, ast.Global):
            wrong.append(f"line {node.lineno}: global")
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
            first = getattr(node.args[0], "id", "")
            if first in ("cfg", "config", "args", "options"):
                wrong.append(f"line {node.lineno}: getattr({first}, ...)")
    for word in ("raise NotImplementedError", "TODO", "FIXME"):
        if word in text:
            wrong.append(word)
    assert not wrong, f"{path.name}: {wrong}"


def test_dependencies_are_few():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 12


def test_readme_maps_every_file():
    """Under their whole names, in the row of their folder where the row has one's name."""
    _, _, rows = (ROOT / "README.md").read_text().partition("## The files")[2].partition("```\n")
    mapped, folder = set(), ""
    for line in rows.partition("```")[0].splitlines():
        label = line[:15].strip()
        folder = (label if label.endswith("/") else "") if label else folder
        mapped |= {folder + name for name in re.findall(r"[\w/]+\.py", line)}
    files = {str(p.relative_to(ROOT / "src/draftsmith")) for p in SOURCES if p.name != "__init__.py"}
    assert mapped == files, f"lacking: {sorted(files - mapped)}, gone: {sorted(mapped - files)}"
