"""What the type-checker does not see: kernels, and what is held to annotations in its place."""

import ast
import tomllib

from tests.shape.tree import ROOT, functions, named, sources


def test_the_package_and_what_measures_it_are_checked():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] and settings["packages"] == ["forerun", "bench"]
    excused = {name for override in settings["overrides"] for name in override["module"]}
    ours = {name for name in excused if name.startswith(("forerun", "bench"))}
    kernels = {name for name in ours if name.startswith("forerun.executors.torch.triton.triton_")}
    # Ray is an extra that checks need not have: what is a subclass of its classes.
    assert ours == kernels | {"forerun.ray.router"}
    assert not any(override.get("ignore_errors") for override in settings["overrides"])


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
