"""The repository as the shape tests see it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "forerun"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> list[Path]:
    """Python files under the given folders of the repository, in a stable order. Without bench/out,
    where peers are built.
    """
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in paths if ROOT / "bench" / "out" not in path.parents)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything in a file, walked once for all tests."""
    return [*ast.walk(parsed(path))]


@cache
def functions(path: Path) -> list[Function]:
    """All functions and methods of a file, nested ones included."""
    return [node for node in nodes(path) if isinstance(node, Function)]


def named(path: Path, node: Function) -> str:
    return f"{path.relative_to(ROOT)}:{node.name}"


def length(node: Function) -> int:
    """Lines of a function without its docstring and decorators."""
    body = node.body
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    doc = (body[0].end_lineno or 0) - body[0].lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - doc


def text_files() -> list[Path]:
    """Every file a reader may open: sources, documents, settings."""
    kinds = {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".inl", ".jsonl", ".svg", ""}
    skipped = {".git", ".venv", ".venv-clients", "build", "dist", ".mypy_cache", ".ruff_cache"}
    skipped |= {
        ".hypothesis",
        ".pytest_cache",
        ".import_linter_cache",
        "__pycache__",
        "out",
        "shared",
    }
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and path.suffix in kinds
        and not skipped & set(path.relative_to(ROOT).parts)
    )
