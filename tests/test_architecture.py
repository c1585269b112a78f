"""The fences of the house: rules about the source that lint and the layer contract cannot say.

The rules read the syntax tree, so a comment or a string breaks none and an aliased import escapes
none.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from megacp.engine.config.run import fields
from tools import structure
from tools.style import (
    DOCUMENTS,
    HIDDEN_CONDITIONS,
    PROSE_OF_CODE,
    Style,
    count_code,
    dense_idioms,
    measure,
)

ROOT = Path(__file__).resolve().parent.parent
MAX_PARAMETERS = 8
PACKAGES = sorted(path.parent.name for path in (ROOT / "megacp").glob("*/__init__.py"))
PUBLIC = ("megacp/__init__.py", *(f"megacp/{name}/__init__.py" for name in PACKAGES))
"""Packages with public names: their `__init__` holds a docstring and the table of names."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
DISTRIBUTED_FILES = (
    "megacp/distributed/",
    "megacp/training/start/launch.py",
    "megacp/engine/data_parallel/fully_shard.py",
    "megacp/engine/data_parallel/parameter.py",
)
"""Collectives and groups, starting ranks, torch's full sharding, and its DTensor parameters."""
ENVIRONMENT_FILES = (
    "megacp/distributed/heap.py",
    "megacp/training/start/launch.py",
    "megacp/prepare/packs/unit.py",
)
_PURE = (
    "engine/config/",
    "engine/layers/",
    "engine/checks.py",
    "training/data/",
    "dry_run/",
    "plan/",
)
TORCH_IN_A_FUNCTION = ("megacp/plan/calibrate.py", "megacp/dry_run/parts.py")
"""Files of those rooms that measure something, and that others import in a function."""
PURE_ROOMS = tuple(f"megacp/{room}" for room in _PURE)
PEERS = "tools/peers/"
"""Scripts that run other trainers in their own interpreter; they import nothing of ours."""
GUESTS = {"transformer_engine": 2, "apex": 1}
"""Files that import a guest: on each floor that needs it one."""
TRAINING = ("attention", "distributed", "engine", "storage", "train", "training")
"""Packages that train, without an extra."""
EXTRAS = {
    "transformers",
    "tokenizers",
    "sentencepiece",
    "pyarrow",
    "PIL",
    "av",
    "jinja2",
    "ray",
    "fsspec",
    "s3fs",
}
MAY_HIDE_IMPORTS = {
    "megacp/public.py": "public names of a package, whose homes are in its own table",
    "megacp/programs.py": "the program that the user names, whose module is in its own table",
    "megacp/training/monitor/log.py": "wandb or trackio, as the flag names it",
}
"""Files that import by a name that the contracts in pyproject.toml cannot see, and why."""
CALLED_BY_OTHERS = {"readable", "readinto", "seekable", "find_class", "allocate"} | {
    "is_infra_mode",
    "ignore_compile_internals",
}
"""Methods that classes of Python and torch call."""

FAMILY = re.compile(
    # llama3 is also a way to scale rotary embeddings, and is_llama_config a field of any config
    r"qwen|(?<!is_)llama(?!3)|llava|olmo|gemma|gpt_?oss|molmo|mi[sx]tral|smollm|smolvlm|phi3|glm\d|nemotron|internvl|idefics",
    re.IGNORECASE,
)
NAME_FAMILIES = {
    # in the converter: the rows, and two tables of image rules
    **{
        f"megacp/huggingface/convert/{name}.py": "its rows"
        for name in ("text_families", "moe", "gpt_oss", "molmo2", "qwen3_5", "text_part")
    },
    "megacp/huggingface/convert/families.py": "the list of all rows",
    "megacp/huggingface/convert/processor.py": "a function for each vision family that writes its processor files",
    "megacp/huggingface/convert/verify.py": "videos as the rules of one vision family cut them",
    # elsewhere: a vision family's own files, and one table each in four packages
    "megacp/training/data/vision/molmo2.py": "its image rules",
    "megacp/training/data/vision/qwen3_5.py": "its image rules",
    "megacp/training/data/vision/decoding.py": "the list of these rules",
    "megacp/engine/config/vision.py": "a row for each vision family: its flags",
    "megacp/engine/layers/vision.py": "a row for each vision family: its layers",
    "megacp/engine/models/multimodal.py": "a row for each vision family: its modules",
    "megacp/prepare/media/processor_files.py": "a row for each vision family: its processor files",
    # names that are not of our families
    "megacp/integrations/model_rules.py": "model types of transformers that need special care",
    "megacp/verify/cases.py": "tiny models of parity, named after what they are like",
    "megacp/prepare/records/conversation.py": "a chat template of ours in a message",
}
"""Files that name a family, and why they may."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*tops: str) -> list[str]:
    """Paths of all Python files below some top folders, relative to the root."""
    return sorted(
        str(path.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("*.py")
    )


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Dotted names of everything imported, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def relative_imports(tree: ast.AST) -> list[int]:
    """Lines of imports that `imports` cannot read."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def hidden_imports(tree: ast.Module) -> list[str]:
    """Imports by a name in a string that is ours, or that may be: its beginning is not written
    where it is used.
    """
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants |= {
                target.id: node.value for target in node.targets if isinstance(target, ast.Name)
            }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func).rpartition(".")[2]
        if function not in (
            "import_module",
            "__import__",
            "exec",
            "eval",
            "run_module",
            "resolve_name",
        ):
            continue
        if function in ("exec", "eval") and isinstance(node.func, ast.Attribute):
            continue  # `model.eval()`
        for choice in choices_of(node.args[0]):
            name = constants.get(choice.id, choice) if isinstance(choice, ast.Name) else choice
            if isinstance(name, ast.JoinedStr):
                name = name.values[0]
            known = isinstance(name, ast.Constant) and not str(name.value).startswith(
                ("megacp", ".")
            )
            if not known:
                found.append(ast.unparse(node))
    return found


def choices_of(node: ast.expr) -> list[ast.expr]:
    """The branches of a conditional expression, or the expression."""
    if isinstance(node, ast.IfExp):
        return [*choices_of(node.body), *choices_of(node.orelse)]
    return [node]


def names_from_elsewhere(tree: ast.AST) -> list[str]:
    """Names of ours that are imported from another module than the one that defines them."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not is_within(node.module or "", "megacp"):
            continue
        home = str(node.module).replace(".", "/")
        path = f"{home}/__init__.py" if (ROOT / home).is_dir() else f"{home}.py"
        defined_there = set(names_of_body(tree_of(path)))
        for alias in node.names:
            is_module = (ROOT / home / f"{alias.name}.py").exists() or (
                ROOT / home / alias.name
            ).is_dir()
            if alias.name not in defined_there and not is_module:
                found.append(f"{node.module}.{alias.name}")
    return found


def dotted_uses(tree: ast.AST) -> Iterator[str]:
    """Dotted names as they are used (`torch.distributed.all_reduce`), imports' aliases resolved."""
    aliases = {
        alias.asname or alias.name.split(".")[0]: alias.name
        if alias.asname
        else alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if parts and isinstance(inner, ast.Name):
            yield ".".join([aliases.get(inner.id, inner.id), *parts])


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def environment_uses(tree: ast.AST) -> list[str]:
    names = {name for name, _ in imports(tree)} | set(dotted_uses(tree))
    return sorted(
        n
        for n in names
        if any(is_within(n, f"os.{kind}") for kind in ("environ", "getenv", "putenv"))
    )


def guests_outside_functions(tree: ast.AST) -> list[str]:
    """Guest packages that are imported when the module is."""
    inside = {id(node) for function in functions(tree) for node in ast.walk(function)}
    found = [(name.split(".")[0], node) for name, node in imports(tree)]
    return sorted({name for name, node in found if name in GUESTS and id(node) not in inside})


def torch_imports(tree: ast.AST) -> list[str]:
    return sorted({name for name, _ in imports(tree) if is_within(name, "torch")})


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def too_many_parameters(tree: ast.AST) -> list[str]:
    found = []
    for function in functions(tree):
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
        if count > MAX_PARAMETERS:
            found.append(f"{function.name}: {count} parameters")
    return found


def global_statements(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]


def module_name(path: str) -> str:
    """`megacp/attention/ops/mask.py` as `megacp.attention.ops.mask`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """For each module, the modules of the same set that it imports anywhere, also inside
    functions.
    """
    graph = {}
    for name, tree in trees.items():
        parts = [imported.split(".") for imported, _ in imports(tree)]
        prefixes = {".".join(p[:end]) for p in parts for end in range(1, len(p) + 1)}
        graph[name] = {other for other in trees if other in prefixes and other != name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which reaches all others of its set."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {
        frozenset({name} | {other for other in reached[name] if name in reached[other]})
        for name in graph
    }
    return [set(group) for group in groups if len(group) > 1]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def names_of_body(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes and constants, types among them."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names = (name for name in ast.walk(target or ast.Pass()) if isinstance(name, ast.Name))
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))


def defined(tree: ast.Module) -> Iterator[str]:
    """Names of a module's body, and of methods."""
    yield from names_of_body(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (member.name for member in node.body if isinstance(member, Function))


def used(tree: ast.AST) -> Iterator[str]:
    """Every name that is read, imported, passed as a keyword or written as a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unused_names(owned: Iterable[ast.Module], readers: Iterable[ast.Module]) -> list[str]:
    """Public names of `owned` that no module of `readers` uses."""
    read = {name for tree in readers for name in used(tree)} | CALLED_BY_OTHERS
    return sorted(
        {n for tree in owned for n in defined(tree) if not n.startswith("_") and n not in read}
    )


def private_names(tree: ast.AST) -> list[str]:
    """Private names that are imported from the package."""
    names = [name for name, _ in imports(tree) if is_within(name, "megacp")]
    return sorted(name for name in names if any(part.startswith("_") for part in name.split(".")))


def family_names(tree: ast.AST) -> list[str]:
    """Identifiers, imports and strings that name a family; a docstring may."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = [name for name, _ in imports(tree)]
    for node in ast.walk(tree):
        for kind in ("id", "attr", "arg", "name", "value"):
            word = getattr(node, kind, None)
            if isinstance(word, str) and id(node) not in docs:
                named.append(word)
    return sorted({name for name in named if FAMILY.search(name)})


def disk_uses(tree: ast.AST) -> list[str]:
    """What makes writing durable, atomic or exclusive, and hashes of files."""
    kinds = (
        "os.fsync",
        "os.replace",
        "os.rename",
        "fcntl",
        "hashlib.file_digest",
        "tempfile.mkstemp",
    )
    names = {name for name, _ in imports(tree)} | set(dotted_uses(tree))
    found = {name for name in names if any(is_within(name, kind) for kind in kinds)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, method = ast.unparse(node.func.value), node.func.attr
            # `text.replace(a, b)` and `dataclasses.replace(x, a=b)` have more arguments than
            # `path.replace(target)`
            only_one = len(node.args) == 1 and not node.keywords
            if owner != "files" and (method == "rename" or (method == "replace" and only_one)):
                found.add(f"{owner}.{method}")
            if owner == "hashlib" and "read_bytes" in ast.unparse(node):
                found.add(f"hashlib.{method} of a file")
    return sorted(found)


def ours(tree: ast.AST) -> list[str]:
    return [name for name, _ in imports(tree) if is_within(name, "megacp")]


def missing_docstring(tree: ast.Module) -> bool:
    return not (ast.get_docstring(tree) or "").strip()


def more_than_a_docstring(tree: ast.Module) -> bool:
    return len(tree.body) != 1


def torch_distributed(tree: ast.AST) -> list[str]:
    names = {name for name, _ in imports(tree)} | set(dotted_uses(tree))
    return sorted(name for name in names if is_within(name, "torch.distributed"))


CODE = ("megacp", "bench", "tools")
CODE_PATHS = [path for path in sources(*CODE) if not path.startswith(PEERS)]
DISK = "megacp/storage/files.py"
RULES: dict[str, tuple[Callable[[ast.Module], object], list[str]]] = {
    "torch.distributed is called in its own package and three more files": (
        torch_distributed,
        [path for path in CODE_PATHS if not path.startswith(DISTRIBUTED_FILES)],
    ),
    "scripts of other trainers import nothing of ours": (ours, sources(PEERS)),
    "the environment is used in three files": (
        environment_uses,
        [path for path in CODE_PATHS if path not in ENVIRONMENT_FILES],
    ),
    "files are made durable, locked and hashed in one file": (
        disk_uses,
        [path for path in sources(*CODE) if path != DISK],
    ),
    "guest packages are imported inside functions": (guests_outside_functions, sources(*CODE)),
    "pure rooms do not import torch": (
        torch_imports,
        [
            path
            for path in sources("megacp")
            if path.startswith(PURE_ROOMS) and path not in TORCH_IN_A_FUNCTION
        ],
    ),
    "there is no global statement": (global_statements, sources(*CODE)),
    "functions take few parameters": (too_many_parameters, sources(*CODE)),
    "every module says what it is": (
        missing_docstring,
        sources("megacp", "tools", "tests", "examples"),
    ),
    "folders inside a package hold a docstring only": (
        more_than_a_docstring,
        [path for path in sources("megacp") if path.endswith("__init__.py") and path not in PUBLIC],
    ),
    "tests import no private names": (private_names, sources("tests")),
    "imports are absolute": (relative_imports, sources(*CODE)),
    "no import of ours hides behind a string": (
        hidden_imports,
        [path for path in sources("megacp") if path not in MAY_HIDE_IMPORTS],
    ),
    "a name of ours is imported from its home": (names_from_elsewhere, sources(*CODE, "tests")),
    "a family is named in its own files only": (
        family_names,
        [path for path in sources("megacp") if path not in NAME_FAMILIES],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_no_file_breaks_the_rule(name: str) -> None:
    rule, paths = RULES[name]
    assert paths and [path for path in paths if rule(tree_of(path))] == []


@pytest.mark.parametrize(
    ("rule", "sample"),
    [
        (torch_distributed, "import torch\ntorch.distributed.barrier()"),
        (torch_distributed, "import torch.distributed as d\nd.barrier()"),
        (torch_distributed, "from torch import distributed"),
        (torch_distributed, "from torch.distributed import barrier"),
        (environment_uses, "import os as o\no.environ['A'] = '1'"),
        (environment_uses, "from os import getenv"),
        (disk_uses, "import os\nos.fsync(1)"),
        (disk_uses, "from os import replace"),
        (disk_uses, "path.with_suffix('.new').rename(path)"),
        (disk_uses, "path.replace(target)"),
        (disk_uses, "import hashlib\nhashlib.sha256(path.read_bytes() + b'x')"),
        (
            guests_outside_functions,
            "try:\n    import transformer_engine.pytorch\nexcept ImportError:\n    pass",
        ),
        (torch_imports, "def f():\n    from torch import nn"),
        (global_statements, "def f():\n    global x\n    x = 1"),
        (too_many_parameters, "class A:\n    def f(self, a, b, c, d, e, f, g, *, h, i): ..."),
        (private_names, "from megacp.attention.ops.mask import _runs"),
        (relative_imports, "from . import grid"),
        (hidden_imports, "import importlib\nimportlib.import_module('megacp.plan.search')"),
        (hidden_imports, "from importlib import import_module\nimport_module(f'{package}.a')"),
        (hidden_imports, "NAME = 'megacp.train'\ndef f():\n    import_module(NAME)"),
        (hidden_imports, "import_module('torch' if x else 'megacp.train')"),
        (hidden_imports, "__import__(name)"),
        (names_from_elsewhere, "from megacp.attention import Metadata"),
        (names_from_elsewhere, "from megacp.engine.step.step import RunConfig"),
        (family_names, "if config.vision_family == 'qwen3_5': ..."),
        (family_names, "from megacp.huggingface.convert.moe import GPT_OSS"),
        (family_names, "class Gemma3Words: ..."),
        (family_names, "f(rotary='llama')"),
        (
            lambda tree: circles(import_graph({"a": tree, "b": ast.parse("import a.c")})),
            "def f():\n    import b",
        ),
        (lambda tree: unused_names([tree], [tree]), "def f(): ..."),
        (lambda tree: unused_names([tree], [tree]), "class A:\n    def unread(self): ...\nA()"),
    ],
)
def test_each_rule_catches_its_offence(rule: Callable[[ast.Module], object], sample: str) -> None:
    assert rule(ast.parse(sample))


def test_rules_let_lawful_code_pass() -> None:
    assert (
        guests_outside_functions(ast.parse("def f():\n    import transformer_engine.pytorch")) == []
    )
    assert (
        too_many_parameters(ast.parse("class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."))
        == []
    )
    assert disk_uses(ast.parse("text.replace('a', 'b')\nreplace(x, a=1)\nfiles.rename(a, b)")) == []
    assert torch_distributed(ast.parse("# torch.distributed\nx = 'torch.distributed'")) == []
    assert (
        hidden_imports(
            ast.parse("NAME = 'apex'\nimport_module(NAME)\nmodel.eval()\nimport_module(f'PIL.{x}')")
        )
        == []
    )
    assert (
        names_from_elsewhere(
            ast.parse("from megacp.storage import files\nfrom megacp import __version__")
        )
        == []
    )
    assert (
        family_names(
            ast.parse("def f():\n    'As in Qwen3.'\n    return 'llama3', 'is_llama_config'")
        )
        == []
    )


@pytest.mark.parametrize("path", MAY_HIDE_IMPORTS)
def test_a_file_that_may_hide_an_import_does(path: str) -> None:
    assert hidden_imports(tree_of(path)), MAY_HIDE_IMPORTS[path]


@pytest.mark.parametrize("path", NAME_FAMILIES)
def test_a_file_that_may_name_a_family_does(path: str) -> None:
    assert family_names(tree_of(path)), NAME_FAMILIES[path]


@pytest.mark.parametrize("guest", GUESTS)
def test_a_guest_package_is_imported_in_one_file_of_a_floor(guest: str) -> None:
    users = [
        p
        for p in sources("megacp")
        if any(name.split(".")[0] == guest for name, _ in imports(tree_of(p)))
    ]
    assert len({Path(p).parent for p in users}) == len(users) <= GUESTS[guest]


def test_training_imports_no_extra() -> None:
    code = (
        "import importlib, pkgutil, sys, megacp; "
        f"packages = {TRAINING}; "
        "names = [m.name for m in pkgutil.walk_packages(megacp.__path__, 'megacp.')]; "
        "[importlib.import_module(name) for name in names if name.split('.')[1] in packages]; "
        f"print(*sorted({EXTRAS} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120, capture_output=True
    )
    assert found.stdout.decode().strip() == ""


def test_a_parsed_command_line_and_a_dry_run_measured_before_need_no_torch() -> None:
    code = (
        "import sys; from megacp.engine.config import cli, yaml_file; from megacp.engine.checks import require; "
        "from megacp.dry_run import report; c = cli.parse('--vocab-size 64 --pipeline-model-parallel-size 2'.split()); "
        "require(c, 4); yaml_file.to_yaml(c); "
        "before = 'torch' in sys.modules; report.describe(c, 4); print(before, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(
            command, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True
        ).stdout.split()
        for _ in range(2)
    )
    assert first[0] == "False"
    assert second == ["False", "False"]


@pytest.mark.parametrize(
    "package", [path for path in PUBLIC if "exports(" in (ROOT / path).read_text()]
)
def test_every_public_name_of_a_package_is_there(package: str) -> None:
    name = module_name(package)
    (call,) = (node for node in ast.walk(tree_of(package)) if isinstance(node, ast.Call))
    module = importlib.import_module(name)
    for public, home in ast.literal_eval(call.args[1]).items():
        assert getattr(module, public) is not None
        path = f"{name}.{home}".replace(".", "/") + ".py"
        assert public in names_of_body(tree_of(path)), f"{path} does not define {public}"


@pytest.mark.parametrize(
    "package", [path for path in PUBLIC if "exports(" in (ROOT / path).read_text()]
)
def test_the_stub_of_a_package_types_its_public_names(package: str) -> None:
    (call,) = (node for node in ast.walk(tree_of(package)) if isinstance(node, ast.Call))
    name = module_name(package)
    homes = {public: f"{name}.{home}" for public, home in ast.literal_eval(call.args[1]).items()}
    stub = ast.parse((ROOT / f"{package}i").read_text())
    typed = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            typed.update({alias.asname: node.module for alias in node.names})
    assert typed == homes


def test_no_module_has_a_vague_name() -> None:
    assert [
        p
        for p in sources("megacp", "tools", "tests")
        if VAGUE_NAMES & set(Path(p).with_suffix("").parts)
    ] == []


def test_no_module_imports_itself_by_a_detour() -> None:
    """A circle, also one that an import inside a function hides."""
    assert (
        circles(import_graph({module_name(path): tree_of(path) for path in sources("megacp")}))
        == []
    )


def test_a_public_name_means_one_thing() -> None:
    """A public one of a module's body, and any class; `main` is each command's own."""
    homes = defaultdict(set)
    for path in sources("megacp"):
        names = {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}
        for name in names | {name for name in names_of_body(tree_of(path)) if name[0] != "_"} - {
            "main"
        }:
            homes[name].add(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


HEADLESS = re.compile(
    r"(Of|Those|That|It|In|As|By|For|From|With|At|On|To|Per|Until|Between|Among|Around|Above|About|Inside|Outside|See|"
    r"Likewise|Now|Not|Called|When)\b"
)


def documented(tree: ast.Module) -> Iterator[str]:
    """Docstrings of functions, classes and attributes: they begin with a noun, or a function's with
    a verb.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and node is not tree.body[0]
            and isinstance(node.value, ast.Constant)
        ):
            yield str(node.value.value)


def test_docstrings_begin_with_what_they_are_about() -> None:
    found = [text for path in sources("megacp") for text in documented(tree_of(path))]
    headless = [text for text in found if HEADLESS.match(text)]
    assert 200 * len(headless) <= len(found), headless


def test_every_public_name_is_used_outside_the_tests() -> None:
    owned = [tree_of(path) for path in sources("megacp")]
    assert (
        unused_names(
            owned, [tree_of(path) for path in sources("megacp", "bench", "tools", "examples")]
        )
        == []
    )


CIRCLES = 0
"""Groups of folders that know each other, a folder and one inside it too."""


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """For each folder the folders it imports from; a file of the top folder stands for itself."""

    def folder(name: str) -> str:
        is_package = (ROOT / name.replace(".", "/") / "__init__.py").exists()
        return name if is_package or name.count(".") < 2 else name.rpartition(".")[0]

    found: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        packages = {
            other for other in others if (ROOT / other.replace(".", "/") / "__init__.py").exists()
        }
        found[folder(name)] |= {folder(other) for other in others - packages} - {folder(name)}
    for targets in list(found.values()):
        for target in targets:
            found.setdefault(target, set())
    return found


MOST_PHRASES = 3.0
"""Unnatural phrases (tools/phrases.txt) per 1,000 words of the whole repository."""
LEAST_COMMENTS = 8.0
"""Comments per 100 lines of code in each package."""
MOST_TOKENS = 9.5
"""Tokens per line of code, on average."""
MOST_NODES = 25
"""Nodes of a statement that is larger than 90 % of all statements."""
MOST_NESTED = 30
"""Comprehensions inside another one, or with two loops."""


@functools.cache
def style_of_package(name: str) -> Style:
    """Measure one package of megacp, or all of it for ""."""
    return measure([ROOT / "megacp" / name])


def test_prose_reads_as_natural_english() -> None:
    prose = measure([ROOT / name for name in (*PROSE_OF_CODE, *DOCUMENTS)])
    assert prose.phrases_per_1000 <= MOST_PHRASES, "\n".join(prose.phrases)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_explains_its_hard_blocks(package: str) -> None:
    assert style_of_package(package).comments_per_100 >= LEAST_COMMENTS


def test_code_hides_no_condition_in_an_expression() -> None:
    style = style_of_package("")
    for idiom in HIDDEN_CONDITIONS:
        assert style.idiom(idiom) == []
    nested = style.idiom("nested comprehension")
    assert len(nested) <= MOST_NESTED, nested


def test_statements_and_lines_are_short() -> None:
    style = style_of_package("")
    assert style.tokens_per_line <= MOST_TOKENS
    assert style.large_statement <= MOST_NODES


@pytest.mark.parametrize(
    ("source", "idiom"),
    [
        ("x = y * (a > b)", "product with a condition"),
        ("x = y * (not b)", "product with a condition"),
        ("for x in (a if b else ()): pass", "loop over a conditional expression"),
        ("x = {**({'a': 1} if b else {})}", "splat of a conditional dict"),
        ("x = [y for z in a for y in z]", "nested comprehension"),
        ("x = [[y for y in z] for z in a]", "nested comprehension"),
    ],
)
def test_a_dense_idiom_is_found(source: str, idiom: str) -> None:
    assert [name for _, name in dense_idioms(ast.parse(source))] == [idiom]


def test_plain_code_has_no_dense_idiom() -> None:
    plain = "x = a * b\nfor y in a: pass\nz = {**a, 'b': 1}\nw = [y for y in a if y]"
    assert list(dense_idioms(ast.parse(plain))) == []


def test_style_counts_words_comments_tokens_and_nodes() -> None:
    style = Style()
    source = '"""Nobody goes on."""\n\nx = 1  # said\n# why\ny = x\n'
    count_code(style, "file.py", source)
    # Nobody, goes on and said are unnatural; the words are these four and `why`.
    assert (style.words, len(style.phrases)) == (5, 3)
    # x = 1 and y = x have three tokens and four and five nodes (names have a context).
    assert (style.code_lines, style.comments, style.tokens) == (2, 2, 6)
    assert max(style.nodes) == 5


def test_folders_have_one_direction() -> None:
    graph = import_graph({module_name(path): tree_of(path) for path in sources("megacp")})
    assert len(circles(folder_graph(graph))) <= CIRCLES


def test_a_choice_lists_the_words_of_its_flag() -> None:
    for choice in structure.CHOICES.values():
        assert {*choice.words} == {*fields()[choice.flag].words} - {"auto"}


def test_a_choice_is_compared_in_one_file_at_most() -> None:
    modules = structure.trees(structure.sources())
    found = {
        name: structure.comparing(choice, modules) for name, choice in structure.CHOICES.items()
    }
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("transport", "if p.cp_comm_type == 'p2p': ..."),
        ("transport", "late = transport not in ('p2p', 'a2a')"),
        ("layout", "if layout == 'contiguous': ..."),
        ("layout", "if p.cp_layout.startswith('zigzag'): ..."),
        ("recomputation", "again = {'none': 0, 'selective': 1}[x]"),
        ("recomputation", "again = ('none', 'selective', 'full').index(x)"),
        ("recomputation", "if self.recompute == 'none': ..."),
        ("sharding", "match x:\n    case 'optim' | 'optim_grads': ..."),
        ("schedule", "waits = 'zero_bubble' == name"),
        ("norm position", "after = values['norm_position'] != 'after'"),
        ("norm position", "match m.norm_position:\n    case 'both': ..."),
        ("kind of layer", "if layer.mlp is MOE: ..."),
    ],
)
def test_a_comparison_of_a_choice_is_found(name: str, sample: str) -> None:
    assert structure.compares(ast.parse(sample), structure.CHOICES[name])


def test_a_word_that_is_only_named_is_no_comparison() -> None:
    samples = (
        "def f(transport='p2p'): ...",
        "fixed = {'norm_position': 'after', 'qk_layernorm': 'head'}",
        "if rope_scaling == 'none' or vision_shards == 'contiguous': ...",
        "MIXERS = {ATTENTION: SelfAttention, MAMBA2: Mamba2}",
        "ways = [{'recompute_granularity': one} for one in ('full', 'none')]",
    )
    for sample in samples:
        assert not any(
            structure.compares(ast.parse(sample), choice) for choice in structure.CHOICES.values()
        ), sample
