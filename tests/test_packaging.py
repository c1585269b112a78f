"""The requirements of the wheel cover the imports of its commands, and each command names the extras
that it needs.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megacp.engine.config.run import RunConfig, with_values
from megacp.huggingface import convert_command as convert
from megacp.training.loop.sources import open_sources
from megacp.verify import plot
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.prepare.packs.builds import run as build

ROOT = Path(__file__).resolve().parents[1]
COMMANDS: dict[str, tuple[str, set[str]]] = {
    "finetune": (
        "megacp.finetuning.command",
        {"data", "fla", "gpu", "hf", "log", "ray", "store"},
    ),
    "train": ("megacp.train", {"data", "log", "fla", "gpu", "hf", "store"}),
    "preprocess": ("megacp.prepare.command", {"data", "hf", "ray", "store"}),
    "convert": ("megacp.huggingface.convert_command", {"data", "fla", "gpu", "hf", "store"}),
    "generate": ("megacp.huggingface.generate_command", {"data", "fla", "gpu", "hf", "store"}),
    "parity": ("megacp.verify.command", {"data", "fla", "gpu", "store"}),
    "plan": ("megacp.plan.command", {"data", "fla", "gpu", "hf", "log", "store"}),
    "plot": ("megacp.verify.plot", {"log", "store"}),
}
"""Module, and the extras that a command may need for its flags or inputs. If an extra is missing,
the command names it.
"""
BUILT_FROM_SOURCE = {"apex", "amp_C", "fused_weight_gradient_mlp_cuda"}
"""Optional dependencies that are in no package index; see README."""
GPU_VARIABLES = "GPU_TESTS", "GPU_NEEDS"
NOT_INSTALLED = {"fla": {"fla-core"}}
"""Distributions of modules that are not installed where the tests run."""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(COMMANDS[name][0]).main(["--version"])
    assert not end.value.code and capsys.readouterr().out.startswith("megacp ")


def packaging() -> dict[str, Any]:
    """Return the tables of setup.py: EXTRAS, COMMANDS, and install_requires."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setup"
    )
    tables = [
        n
        for n in tree.body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "EXTRAS"
    ]
    requires = next(word.value for word in call.keywords if word.arg == "install_requires")
    return {"requires": ast.literal_eval(requires), **ast.literal_eval(tables[0].value)}


def commands_of_setup() -> dict[str, str]:
    """Return the table COMMANDS of setup.py: the function of each command."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "COMMANDS":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no COMMANDS")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the source distribution of a copy of the project."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "project"
    ignored = shutil.ignore_patterns(".*", "*_out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    # The tests' environment has setuptools, so nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return folder


@pytest.mark.slow
def test_the_wheel_runs_every_command_from_another_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    assert (place / "megacp" / "py.typed").is_file()
    (points,) = place.glob("*.dist-info/entry_points.txt")
    targets = dict(re.findall(r"^(megacp\S*) = (\S+)$", points.read_text(), re.MULTILINE))
    assert set(targets) == {"megacp", *(f"megacp-{name}" for name in commands_of_setup())}
    # One process imports every command from the wheel and asks it for its help.
    code = """
import importlib, sys
for target in sys.argv[1:]:
    module = importlib.import_module(target.partition(":")[0])
    sys.argv = ["command", "--help"]
    try:
        module.main(["--help"])
    except SystemExit as end:
        assert not end.code, target
    assert module.__file__.startswith(sys.path[1]), module.__file__
"""
    environment = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-c", code, *targets.values()]
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("usage:") == len(targets)


@pytest.mark.slow
def test_the_source_distribution_has_documents_examples_and_tools(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in (
        "docs/attention.md",
        "docs/pictures/mask.png",
        "examples/tiny.yaml",
        "examples/slurm/finetune.sbatch",
        "tools/preprocess_data.py",
        "constraints.txt",
        "LICENSE",
    ):
        assert name in names


def distribution(requirement: str) -> str:
    """Return the name in a requirement: `PyYAML>=6` -> `pyyaml`."""
    return re.split("[<>=![; ]", requirement)[0].lower().replace("_", "-")


@functools.cache
def owners() -> dict[str, set[str]]:
    """Return the distributions that an importable name belongs to."""
    return {
        name: {distribution(d) for d in found}
        for name, found in importlib.metadata.packages_distributions().items()
    }


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@functools.cache
def imports(module: str, late: bool) -> frozenset[str]:
    """Return the dotted names that a module of megacp imports, including the packages above it.

    With `late`, also names imported inside functions.
    """
    file = file_of(module)
    assert file is not None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = module.split(".")
    found = {".".join(parts[:i]) for i in range(1, len(parts))}
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if not late and _may_not_run(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _may_not_run(node: ast.AST) -> bool:
    """Return whether a node is a function, a block for types, or a `try` around an import."""
    if isinstance(node, ast.Try):
        return any(getattr(handler.type, "id", "") == "ImportError" for handler in node.handlers)
    if isinstance(node, ast.If):
        return getattr(node.test, "id", "") == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def third_party(start: str, late: bool) -> set[str]:
    """Return third-party modules that a module imports, directly or through megacp's modules."""
    waiting, seen, found = [start], set[str](), set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imports(module, late):
            if name.split(".")[0] in ("megacp", "tests"):
                waiting += [name] if file_of(name) is not None else []
            elif name.split(".")[0] not in sys.stdlib_module_names:
                found.add(name.split(".")[0])
    return found


def undeclared(names: set[str], declared: list[str]) -> set[str]:
    known = {distribution(name) for name in declared}
    return {
        name
        for name in names
        if not ((NOT_INSTALLED | owners()).get(name, {distribution(name)}) & known)
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_with_the_requirements_and_reaches_no_more_than_its_extras(
    command: str,
) -> None:
    """Check `--help` on a machine without extras, and that an extra has all packages of its flags."""
    tables, (module, extras) = packaging(), COMMANDS[command]
    assert f'"{command}": "{module}:' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert undeclared(third_party(module, late=False), tables["requires"]) == set()
    names = [*tables["requires"], *(name for extra in extras for name in tables[extra])]
    reached = third_party(module, late=True)
    assert undeclared(reached - BUILT_FROM_SOURCE, names) == set()
    assert command != "convert" or "transformers" in reached, (
        "a walk that follows nothing finds nothing"
    )


def test_make_names_what_the_tests_on_a_gpu_import() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tests, needs = (
        re.search(rf"^{name} := (.*)", makefile, re.MULTILINE)[1].split() for name in GPU_VARIABLES
    )
    files = [
        ROOT / "tests/conftest.py",
        *(path for test in tests for path in [*(ROOT / test).glob("*.py"), ROOT / test]),
    ]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.is_file()
    ]
    names = set.union(*(third_party(module, late=False) for module in modules))
    assert "tyro" in imports("megacp.engine.config.cli", late=True) and "zlib_ng" in names
    assert undeclared(names | {"tyro"}, ["torch", "numpy", *needs]) == set()  # they read flags


def test_images_without_pillow_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(encoded(noise(16, 16)))
    line = '{"content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "seen"}]}\n'
    (tmp_path / "records.jsonl").write_text(line)
    rules = {
        "image_rules": TINY,
        "image_root": str(tmp_path),
        "seq_length": 256,
        "cp_degrees": (1,),
    }
    build([tmp_path / "records.jsonl"], tmp_path / "packed", **rules)
    vision = {
        "vision_num_layers": 2,
        "vision_image_size": 16,
        "vision_patch_size": 4,
        "additional_vocab_size": 8,
    }
    config = with_values(
        RunConfig(), {"data_path": str(tmp_path / "packed"), "seq_length": 256, **vision}
    )
    open_sources(config)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[data\]'"):
        open_sources(config)


def test_a_missing_package_is_one_message_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    for name in ("matplotlib", "safetensors", "jinja2", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert plot.main(["--log", str(log), "--output", str(tmp_path / "loss.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "matplotlib" in error and "pip install -e '.[log]'" in error
    with pytest.raises(SystemExit) as stopped:
        convert.main(
            ["--from", "hf", "--to", "megacp", "--input", "a", "--output", "b", "--verify"]
        )
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.count("pip install -e '.[hf]'") == 3
    assert "transformers" in error
