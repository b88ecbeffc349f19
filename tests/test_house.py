"""The house stays one in which things are found: small files, few of them at a level, imports that point one way."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FLOORS = ("dispatch", "graphs", "workers", "cluster")  # each imports from those before it
MAX_LINES, MAX_FILES, MAX_PARAMETERS, MAX_CHAIN = 400, 14, 8, 6
FILES = [path for floor in FLOORS for path in sorted((REPOSITORY / floor).rglob("*.py"))]
FOLDERS = sorted({path.parent for path in FILES})


def name_of(path: Path) -> str:
    relative = path.relative_to(REPOSITORY).with_suffix("")
    return ".".join(relative.parts[:-1] if path.name == "__init__.py" else relative.parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def imports_of(module: str, at_once: bool) -> frozenset[str]:
    """Modules of the house that a module imports, `at_once` or anywhere in it."""
    path, found = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in tree_of(path).body if at_once else ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            target = ".".join(part for part in base if part)
            found |= {name if (name := f"{target}.{alias.name}") in MODULES else target for alias in node.names}
    return frozenset(found & MODULES.keys())


@cache
def chain_within(folder: str, module: str) -> int:
    """The longest chain of imports from this module on through modules of one folder."""
    inside = [name for name in imports_of(module, True) if name.rpartition(".")[0] == folder and name != module]
    return 1 + max((chain_within(folder, name) for name in inside), default=0)


def test_imports_point_one_way():
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports_of(module, False)
        if FLOORS.index(other.partition(".")[0]) > FLOORS.index(module.partition(".")[0])
    ]
    assert upward == []


def test_what_a_layer_runs_through_does_not_import_the_layer_that_runs_through_it():
    """Paths import what is at the root of `dispatch`, and the root knows them as `ExpertPath` alone."""
    roots = [module for module in MODULES if module.startswith("dispatch") and module.count(".") <= 1]
    assert "dispatch.moe" in roots
    back = {(module, other) for module in roots for other in imports_of(module, True)}
    assert [pair for pair in back if pair[1].startswith("dispatch.paths")] == []


def test_names_of_expert_parameters_are_read_in_one_module():
    names = re.compile(r"\b(gate_up_proj|down_proj)\b")
    files = [*(REPOSITORY / "dispatch").rglob("*.py"), *(REPOSITORY / "workers" / "path_selection").rglob("*.py")]
    assert len(files) > 50
    named = [str(path.relative_to(REPOSITORY)) for path in files if names.search(path.read_text("utf-8"))]
    assert named == ["dispatch/experts/expert_weights.py"]


def test_ray_is_imported_by_the_drivers_side_and_by_the_actor_around_a_rank():
    elsewhere = [
        str(path.relative_to(REPOSITORY))
        for path in FILES
        for node in ast.walk(tree_of(path))
        for names in [
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        ]
        if any(name.partition(".")[0] == "ray" for name in names)
    ]
    assert [path for path in elsewhere if not path.startswith("cluster/") and path != "workers/rank.py"] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(REPOSITORY)))
def test_a_folder_is_seen_at_a_glance(folder):
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_FILES
    assert [path.name for path in files if len(path.read_text("utf-8").splitlines()) > MAX_LINES] == []
    name = ".".join(folder.relative_to(REPOSITORY).parts)
    chains = {module: chain_within(name, module) for module in map(name_of, files)}
    assert {module: length for module, length in chains.items() if length > MAX_CHAIN} == {}


def test_functions_take_few_parameters():
    """Kernels aside, which take pointers and strides one by one, and commands, which take their options so."""
    crowded = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([one for one in arguments if one.arg not in ("self", "cls")])
            if count > MAX_PARAMETERS and "triton.jit" not in decorators and "click." not in decorators:
                crowded.append(f"{path.relative_to(REPOSITORY)}: {node.name} takes {count}")
    assert crowded == []


def test_a_wheel_has_every_folder():
    """An editable installation has them all, whatever is listed: only jobs that bring a wheel would miss one."""
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = [".".join(("expert_pool", *folder.relative_to(REPOSITORY).parts)) for folder in FOLDERS]
    assert sorted(listed) == sorted(folders)
