"""Docstrings and file lengths under test: public functions say what their parameters are, and no file is too long."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("flows", "tasks", "engine") for path in (ROOT / folder).rglob("*.py"))
MOST_LINES = 300
FEWEST_PARAMETERS = 3
"""Functions of fewer parameters may leave `Args:` out."""

DESCRIBES_PARAMETERS = re.compile(r"^\s*Args:$|\bSee `[^`]+`", re.MULTILINE)


def is_exempt(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Overloads have no docstring of their own, and Triton compiles what it decorates."""
    return any(re.search(r"\boverload\b|\btriton\.jit\b", ast.unparse(one)) for one in function.decorator_list)


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return sum(parameter.arg not in ("self", "cls") for parameter in parameters)


def list_public_functions(
    node: ast.Module | ast.ClassDef, owner: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public functions of a module and public methods of its public classes, with their qualified names."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from list_public_functions(child, f"{owner}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield f"{owner}{child.name}", child


def test_public_functions_of_many_parameters_describe_them() -> None:
    functions = [
        (path, name, function)
        for path in FILES
        for name, function in list_public_functions(ast.parse(path.read_text(encoding="utf-8")))
        if count_parameters(function) >= FEWEST_PARAMETERS and not is_exempt(function)
    ]
    assert functions
    missing = [
        f"{path.relative_to(ROOT)}:{function.lineno} {name}"
        for path, name, function in functions
        if not DESCRIBES_PARAMETERS.search(ast.get_docstring(function) or "")
    ]
    assert not missing, "\n".join(["neither `Args:` nor a reference (See `...`) in the docstring of:", *missing])


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    too_long = [f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > MOST_LINES]
    assert not too_long, "\n".join([f"files of more than {MOST_LINES} lines:", *too_long])
