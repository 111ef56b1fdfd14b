"""Docstrings and file lengths under test: public functions say what their parameters are, and no file is too long."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("flows", "tasks", "engine") for path in (ROOT / folder).rglob("*.py"))
MOST_LINES = 300
FEWEST_PARAMETERS = 3
"""Functions of fewer parameters may leave `Args:` out."""

DESCRIBES_PARAMETERS = re.compile(r"^\s*Args:$|\bSee `[^`]+`", re.MULTILINE)
SPEAKING_TYPES = {"device", "dtype", "DuckDBPyConnection"}
"""Of other packages; the classes of this one are described where they are defined."""


def is_exempt(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Overloads have no docstring of their own, and Triton compiles what it decorates."""
    return any(re.search(r"\boverload\b|\btriton\.jit\b", ast.unparse(one)) for one in function.decorator_list)


def list_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [parameter for parameter in parameters if parameter.arg not in ("self", "cls")]


@functools.cache
def read_definitions() -> tuple[dict[str, set[str]], set[str]]:
    """By the name of a function or class its parameters, its fields, and what a class describes; the classes' names."""
    names: dict[str, set[str]] = {}
    classes = set()
    for node in (node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.setdefault(node.name, set()).update(parameter.arg for parameter in list_parameters(node))
        elif isinstance(node, ast.ClassDef):
            classes.add(node.name)
            found = names.setdefault(node.name, set())
            found.update(re.findall(r"`(\w+)`", ast.get_docstring(node) or ""))
            for child in node.body:
                if isinstance(child, ast.AnnAssign):
                    found.add(ast.unparse(child.target))
                elif isinstance(child, ast.FunctionDef) and child.name == "__init__":
                    found.update(parameter.arg for parameter in list_parameters(child))
    return names, classes


def list_undescribed(function: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> list[str]:
    """Parameters that the docstring does not name, what it refers to does not have, and whose type does not say it."""
    if "Args:" in docstring:
        return []
    definitions, classes = read_definitions()
    quoted = re.findall(r"``?([^`]+)``?", docstring)
    named = set(re.findall(r"\w+", " ".join(quoted)))
    for reference in quoted:
        named |= definitions.get(reference.rpartition(".")[2], set())
    return [
        parameter.arg
        for parameter in list_parameters(function)
        if parameter.arg not in named
        and not (classes | SPEAKING_TYPES)
        & set(re.findall(r"\w+\b(?!\[)", ast.unparse(parameter.annotation or parameter)))
    ]


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
        if len(list_parameters(function)) >= FEWEST_PARAMETERS and not is_exempt(function)
    ]
    assert functions
    missing = [
        f"{path.relative_to(ROOT)}:{function.lineno} {name}"
        for path, name, function in functions
        if not DESCRIBES_PARAMETERS.search(ast.get_docstring(function) or "")
    ]
    assert not missing, "\n".join(["neither `Args:` nor a reference (See `...`) in the docstring of:", *missing])


def test_what_a_docstring_refers_to_describes_the_parameters() -> None:
    missing = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [(name, function, "") for name, function in list_public_functions(tree)]
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] != "_"):
            functions += [
                (f"{owner.name}.__init__", child, ast.get_docstring(owner) or "")
                for child in owner.body
                if isinstance(child, ast.FunctionDef) and child.name == "__init__"
            ]
        for name, function, class_docstring in functions:
            if len(list_parameters(function)) < FEWEST_PARAMETERS or is_exempt(function):
                continue
            names = list_undescribed(function, f"{ast.get_docstring(function)}\n{class_docstring}")
            if names:
                missing.append(f"{path.relative_to(ROOT)}:{function.lineno} {name}: {', '.join(names)}")
    assert not missing, "\n".join(["parameters that no docstring describes:", *missing])


def test_a_reference_to_something_else_describes_nothing() -> None:
    (function,) = ast.parse("def check(tensor: torch.Tensor, name: str, device: torch.device) -> None: ...").body
    assert isinstance(function, ast.FunctionDef)
    assert list_undescribed(function, "Raises. See `torch.Tensor`.") == ["tensor", "name"]
    assert list_undescribed(function, "Raises for the tensor `name`. See `make_room`.") == ["tensor"]
    assert list_undescribed(function, "Raises.\n\nArgs:\n    tensor, name: what.") == []


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    too_long = [f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > MOST_LINES]
    assert not too_long, "\n".join([f"files of more than {MOST_LINES} lines:", *too_long])
