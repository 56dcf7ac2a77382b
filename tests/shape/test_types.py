"""What the type-checker does not see yet, counted: the list may only shrink."""

import ast
import tomllib

from tests.shape.tree import ROOT, functions, named, sources

UNCHECKED = 0
"""Modules without the type-checker: none, for ever."""


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def overrides():
    return settings()["overrides"]


def test_the_package_and_what_measures_it_are_checked():
    assert settings()["strict"] and settings()["packages"] == ["forerun", "bench"]


def lenient():
    """Modules of overrides that switch any check off, by the checks."""
    found = {}
    for override in overrides():
        for name in override["module"]:
            found.setdefault(name, set()).update(override.keys() - {"module"})
    return found


def test_the_list_of_unchecked_modules_only_shrinks():
    unchecked = [name for name, checks in lenient().items() if "ignore_errors" in checks]
    assert len(unchecked) == UNCHECKED
    for name in unchecked:
        assert "*" not in name
        assert (ROOT / (name.replace(".", "/") + ".py")).exists(), name


def test_nothing_else_of_ours_is_excused():
    kernels = [
        name for name in lenient() if name.startswith("forerun.executors.torch.triton.triton_")
    ]
    ours = {name for name in lenient() if name.startswith(("forerun", "bench"))}
    unchecked = {name for name, checks in lenient().items() if "ignore_errors" in checks}
    # Ray is an extra that checks need not have: what is a subclass of its classes.
    assert ours == unchecked | set(kernels) | {"forerun.ray.router"}


def test_what_launches_kernels_is_annotated():
    """Kernels are excused from annotations, so their modules are held to them here."""
    bare = [
        named(path, node)
        for path in sources("forerun/executors/torch")
        if path.name.startswith("triton_")
        for node in functions(path)
        if not any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
        and (node.returns is None or any(a.annotation is None for a in node.args.args))
    ]
    assert not bare
