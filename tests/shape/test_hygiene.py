"""Things that must not be anywhere."""

import ast
import re
import subprocess
from collections import Counter
from fnmatch import fnmatch
from functools import cache

import pytest

from tests.conftest import FIRST, TESTS, WAITING
from tests.shape.tree import PACKAGE, ROOT, functions, nodes, sources, text_files

PRODUCT = sources("forerun")
LAZY = {
    "forerun/__init__.py",
    "forerun/measure/pictures.py",
    "forerun/build/device.py",
    "forerun/build/with_cpu.py",
    "forerun/build/with_jax.py",
    "forerun/build/with_torch.py",
    "forerun/checkpoints/ggml.py",
    "forerun/cli/doctor.py",
    "forerun/cli/eval.py",
    "forerun/cli/layers.py",
    "forerun/cli/main.py",
    "forerun/cli/serve_begin.py",
    "forerun/cli/terminal.py",
    "forerun/cli/train.py",
    "forerun/executors/torch/triton/kernels.py",
    "forerun/hub/huggingface.py",
    "forerun/serve/app.py",
}
"""Files whose functions may import what is optional or slow: an executor is loaded only when
chosen, a server's own code when its engine's process has begun, torch where `doctor`, `eval` and
`train` look at it or a GPU is there, jax where a TPU is, Triton on CUDA, matplotlib for a picture,
OpenTelemetry where traces are wanted, the hub's client where a model is fetched, gguf where
numbers in few bits become floats.
"""

HOSTS = [
    "".join(parts)
    for parts in (
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("hugging", "face.co"),
        ("hf", ".co"),
        ("modelscope", ".cn"),
        ("git", "hub.com"),
        ("crates", ".io"),
        ("npm", "js.com"),
        ("conda", ".anaconda"),
        ("pytorch", ".org"),
    )
]


def relative(path):
    return str(path.relative_to(ROOT))


def test_folders_that_are_said_to_take_longest_are_there():
    assert [name for name in (*FIRST, *WAITING) if not (TESTS / name).is_dir()] == []


def test_no_registry_host_is_named():
    hosts = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, HOSTS))})(?![\w-])")
    assert hosts.search("https://" + HOSTS[0] + "/simple")
    read = ((path, path.read_text(encoding="utf-8", errors="replace")) for path in text_files())
    named = [
        f"{relative(path)}: {found[1]}"
        for path, text in read
        if any(host in text for host in HOSTS) and (found := hosts.search(text))
    ]
    assert not named


def test_no_link_is_committed():
    """It leads to a file of one machine. (Where git is not there, nothing is committed.)"""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    link = "120000"  # Git's mode of one.
    assert not [line for line in listed.stdout.splitlines() if line.startswith(link)]


IMPORTS = ast.Import | ast.ImportFrom
IMPORTERS = "import_module", "__import__"


def test_no_import_hides_in_a_function():
    hidden = [
        f"{relative(path)}:{inner.lineno}"
        for path in PRODUCT
        if relative(path) not in LAZY
        if any(isinstance(node, IMPORTS) and node.col_offset for node in nodes(path))
        for node in functions(path)
        if not (path.name == "attention.py" and node.name == "choose")
        for inner in ast.walk(node)
        if isinstance(inner, IMPORTS)
    ]
    assert not hidden


def test_no_import_is_a_string():
    """A module that is named in a string is imported past the layers, and past every tool that
    reads imports. `forerun.cli.main` loads the command of the line.
    """
    hidden = [
        f"{relative(path)}:{node.lineno}"
        for path in PRODUCT
        if relative(path) != "forerun/cli/main.py"
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS
        and re.fullmatch(r"(importlib\.)?import_module|__import__", ast.unparse(node.func))
        and any(isinstance(part, ast.Constant | ast.JoinedStr) for part in node.args)
    ]
    assert not hidden


@cache
def called(path):
    """Dotted names of what a file calls and imports."""
    names = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call | ast.Attribute):
            names.append(ast.unparse(node.func if isinstance(node, ast.Call) else node))
    return names


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (r"(typing\.)?TYPE_CHECKING", "a type that needs it is in the wrong layer"),
        (r"c?pickle(\..*)?|dill(\..*)?|shelve(\..*)?|joblib(\..*)?", "no pickle is ever loaded"),
        (r"torch\.(jit\.)?(load|save)", "what torch loads may run"),
        (r"(builtins\.)?(eval|exec)", "no code from data"),
    ],
)
def test_forbidden_names(what, why):
    named = [
        f"{relative(path)}: {name}"
        for path in PRODUCT
        for name in called(path)
        if re.fullmatch(what, name)
    ]
    assert not named, why


def test_behaviour_does_not_depend_on_the_environment():
    """Only the platform's own conventions for the cache directory are read."""
    readers = {
        relative(path)
        for path in PRODUCT
        for name in called(path)
        if re.fullmatch(r"os\.(environ(\..*)?|getenv|putenv)", name)
    }
    # wheel.py hands the environment on to pip, unread; layers.py reads FORERUN_* and what other
    # servers read of their own; measure/launch.py leaves these out for a server that is measured;
    # cli/launch.py hands it on to an agent, and looks for Codex' folder where Codex does;
    # program_cache.py tells compiled programs apart by XLA's own flags.
    allowed = {"forerun/cache_dir.py", "forerun/hub/wheel.py", "forerun/cli/layers.py",
               "forerun/cli/launch.py", "forerun/measure/launch.py",
               "forerun/executors/jax/program/program_cache.py"}  # fmt: skip
    assert readers <= allowed


def test_one_class_name_is_one_class():
    """So a reader who meets a name knows which file to open. The list may only become shorter."""
    names = Counter(
        node.name
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    doubled = {name for name, count in names.items() if count > 1}
    assert doubled <= {"Marks", "Ready", "Server", "Start"}


def test_only_the_composition_root_names_executors():
    naming = {
        relative(path)
        for path in PRODUCT
        if "executors" not in path.relative_to(PACKAGE).parts
        for name in called(path)
        if re.match(r"forerun\.executors", name)
    }
    # An entry of the registry each, and the toy.
    allowed = {f"forerun/build/with_{name}.py" for name in ("cpu", "torch", "jax")}
    allowed |= {"forerun/build/target.py", "forerun/cli/doctor.py"}
    allowed |= {"forerun/drafters/ngram_index.py"}  # It calls the compiled core, no executor.
    assert naming <= allowed | {
        # Training needs the torch decoder itself, not an executor behind a contract.
        name
        for name in naming
        if name.startswith("forerun/train/")
    }


def test_pytest_collects_every_folder_of_tests(pytestconfig):
    """Its own list of folders to leave out has a `build` in it, which hid tests/build for weeks."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()} - {"__pycache__"}
    hidden = [name for name in folders if any(fnmatch(name, pattern) for pattern in left_out)]
    assert not [name for name in hidden if not name.startswith(".")]
