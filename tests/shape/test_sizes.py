"""A ratchet on size. The exception lists below may only shrink."""

import ast

from tests.shape.tree import ROOT, functions, length, named, parsed, sources

PRODUCT = sources("forerun")

LONG_FILES: dict[str, str] = {
    "forerun/options/config.py": "one job: every option of an engine and a server, declared once"
}
"""path -> its one job, or what is wrong with it."""

LONG_FUNCTIONS: dict[str, str] = {}
"""path:function -> why it may exceed 80 lines."""

MANY_PARAMETERS: dict[str, str] = {}
"""path:function -> why it may take more than 7 parameters."""


def over(limit, measure):
    return {
        named(path, node): measure(node)
        for path in PRODUCT
        for node in functions(path)
        if measure(node) > limit
    }


def parameters(node):
    if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return 0  # A kernel takes pointers and numbers; no object can carry them.
    arguments = node.args
    given = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if node.name != "__init__":  # Each argument of a constructor that is keyword-only has its name.
        given += [a.arg for a in arguments.kwonlyargs]
    return len([name for name in given if name not in ("self", "cls")])


def test_files_are_short():
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in PRODUCT}
    long = {name: count for name, count in lines.items() if count > 500}
    assert long.keys() == LONG_FILES.keys(), (
        f"{long}: more than 500 lines are a smell, not a crime. Does the file hold two jobs? Then "
        "split it along them. Does it hold one? Then leave it whole and name the job above."
    )


def test_functions_are_short():
    lengths = [length(node) for path in PRODUCT for node in functions(path)]
    above = [count for count in lengths if count > 60]
    assert len(lengths) > 300
    assert len(above) < 0.02 * len(lengths), over(60, length)
    assert over(80, length).keys() == LONG_FUNCTIONS.keys(), over(80, length)


def test_functions_take_few_parameters():
    many = over(7, parameters)
    assert many.keys() == MANY_PARAMETERS.keys(), many


def test_nesting_is_shallow():
    blocks = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith)

    def depth(node, level=0):
        deepest = level
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            # `elif` nests in the tree, not on the page.
            chained = isinstance(node, ast.If) and node.orelse == [child]
            step = isinstance(child, blocks) and not chained
            deepest = max(deepest, depth(child, level + step))
        return deepest

    deep = {named(p, f): depth(f) for p in PRODUCT for f in functions(p) if depth(f) > 4}
    assert not deep


def test_every_module_and_public_name_is_documented():
    bare = [str(p.relative_to(ROOT)) for p in PRODUCT if not ast.get_docstring(parsed(p))]
    assert not bare
