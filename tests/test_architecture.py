"""The rooms of the package, and the directions of the imports between them."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import maml_rl
from maml_rl.policies import Policy

PACKAGE = Path(maml_rl.__file__).parent
# From the top to the ground floor: a room imports only later ones.
ROOMS = (
    "cli",
    "report",
    "experiment",
    "samplers",
    "metalearners",
    "plan",
    "adaptation",
    "derivatives",
    "baseline",
    "task_distributions",
    "experience",
    "results",
    "runs",
    "policies",
    "episode",
    "envs",
    "config",
    "profiling",
    "functional",
    "seeding",
    "foreign_files",
    "observation_parts",
    "spaces",
    "machine",
    "named_modules",
    "compat",
    "arguments",
    "arrays",
    "errors",
    "dependencies",
)
# File names that parallel rooms share: those of a backend, its workers and their actors; and the commands `train`,
# `evaluate` and `record` and the functions behind them.
SHARED_NAMES = {"actor.py", "backend.py", "evaluate.py", "record.py", "train.py"}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Return the nodes of the syntax tree of every file."""
    return {file: [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))] for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def statements() -> dict[Path, list[ast.Import | ast.ImportFrom]]:
    """Return the import statements of every file: at its top, in a function, or for its types."""
    return {
        file: [node for node in of_file if isinstance(node, ast.Import | ast.ImportFrom)]
        for file, of_file in nodes().items()
    }


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield every import of the package's own modules: the file, its room, and the room that it imports."""
    for file, of_file in statements().items():
        path = file.relative_to(PACKAGE)
        # The first provides public names of all rooms lazily; `python -m` starts the others.
        if path == Path("__init__.py") or path.name == "__main__.py":
            continue
        for node in of_file:
            names = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "maml_rl" and len(parts) > 1 and not parts[1].startswith("__"):
                    yield str(path), path.parts[0].removesuffix(".py"), parts[1]


def test_every_room_has_its_place() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - {"__init__", "__main__"} == set(ROOMS)


def test_name_of_a_test_fits_a_line() -> None:
    folder = PACKAGE.parent / "tests"
    names = {
        name for path in folder.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert [name for name in names if len(name) > 80] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """Tests are no packages: pytest imports each file by its name alone."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_no_file_name_occurs_twice() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name not in {"__init__.py", "__main__.py"})
    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES


def test_imports_between_rooms_point_downwards() -> None:
    found = list(imports())
    assert len(found) > 200
    upwards = [f"{file} imports {to}" for file, room, to in found if ROOMS.index(room) > ROOMS.index(to)]
    assert upwards == []


def test_samplers_and_metalearners_do_not_import_each_other() -> None:
    assert not {("samplers", "metalearners"), ("metalearners", "samplers")} & {(room, to) for _, room, to in imports()}


def files() -> dict[str, set[str]]:
    """Return the modules of the package that every module imports; see `statements`."""
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in statements()
    }
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        # See `imports`.
        if module == "maml_rl" or path.name == "__main__.py":
            continue
        graph[module] = set()
        for node in statements()[path]:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                # A name imported from a package is one of its modules, or a name in its `__init__`.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in paths else node.module for name in names} & paths.keys()
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & paths.keys()
        graph[module] -= {module, "maml_rl"}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one circle of imports, with its first module repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        members: list[str] = error.args[1]
        return members
    return []


def rooms_inside(floor: str, graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the rooms inside `floor` that every room there imports; a room is a file or a whole folder."""

    def room(module: str) -> str | None:
        parts = module.split(".")
        return parts[2] if parts[1] == floor and len(parts) > 2 else None

    inside: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if (own := room(module)) is not None:
            others = {other for each in imported if (other := room(each)) is not None}
            inside.setdefault(own, set()).update(others - {own})
    return inside


def test_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])
    graph = {"maml_rl.envs.one.a": {"maml_rl.envs.two"}, "maml_rl.envs.two": {"maml_rl.envs.one.b"}}
    assert circle(graph) == []
    assert circle(rooms_inside("envs", graph)) in (["one", "two", "one"], ["two", "one", "two"])


def test_no_file_imports_itself_through_others() -> None:
    graph = files()
    assert graph["maml_rl.samplers.make_backend"] >= {"maml_rl.samplers.backend", "maml_rl.samplers.work.ray.backend"}
    assert circle(graph) == []


def test_transports_of_work_do_not_import_each_other() -> None:
    for one, other in (("child", "ray"), ("ray", "child")):
        of_one = {name: found for name, found in files().items() if name.startswith(f"maml_rl.samplers.work.{one}.")}
        assert len(of_one) > 4
        assert not [name for name, found in of_one.items() if any(f"work.{other}." in each for each in found)]


@pytest.mark.parametrize("floor", ["samplers", "envs", "policies"])
def test_rooms_inside_of_a_room_do_not_import_each_other_in_a_circle(floor: str) -> None:
    inside = rooms_inside(floor, files())
    assert len(inside) > 3
    assert circle(inside) == []


# Documented, whatever their names.
DOCUMENTED = {"_exit", "_current_frames", "_C", "_disabled_torch_function_impl"}


def private_uses() -> Iterator[tuple[str, str]]:
    """Yield the library, and the file, of everything that a library of others keeps private and the package uses."""
    for path, found in nodes().items():
        file = path.relative_to(PACKAGE).as_posix()
        libraries = {
            alias.asname or alias.name.split(".")[0]
            for node in found
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in found:
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and not node.level
                and re.search(r"\._[a-z]", node.module)
            ):
                yield node.module.split(".")[0], file
            elif isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr) and node.attr not in DOCUMENTED:
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in libraries - {"self", "cls"}:
                    yield root.id, file


def test_private_names_of_a_library_are_used_in_one_file() -> None:
    uses: dict[str, set[str]] = {}
    for library, file in private_uses():
        uses.setdefault(library, set()).add(file)
    assert {library: files for library, files in uses.items() if len(files) > 1} == {}
    assert sorted(uses) == ["mujoco_warp", "np", "random", "ray", "subprocess", "torch"]


def test_contract_of_a_policy_stays_small() -> None:
    methods = [name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_")]
    assert len(methods) <= 12, methods


def classes() -> dict[str, list[ast.ClassDef]]:
    """Return the package's classes by their names."""
    found: dict[str, list[ast.ClassDef]] = {}
    for of_file in nodes().values():
        for node in of_file:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def is_described(method: str, owner: ast.ClassDef, known: Mapping[str, list[ast.ClassDef]]) -> bool:
    """Return whether a method has a docstring in a class or in one of its bases."""
    own = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method]
    if any(ast.get_docstring(node) for node in own):
        return True
    names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases]
    return any(is_described(method, base, known) for name in names for base in known.get(name, []) if base is not owner)


def test_public_method_is_described_where_it_is_or_where_it_is_overridden() -> None:
    known = classes()
    methods = [
        (owner, node.name)
        for name, owners in known.items()
        if not name.startswith("_")
        for owner in owners
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert len(methods) > 1_000
    assert [f"{owner.name}.{name}" for owner, name in methods if not is_described(name, owner, known)] == []


def test_entries_of_a_docstring_are_on_lines_of_their_own() -> None:
    run_on = re.compile(r"^\s*(?:Args|Attributes|Returns|Raises|Yields):[ ]+\S", re.MULTILINE)
    assert [path for path in PACKAGE.rglob("*.py") if run_on.search(path.read_text(encoding="utf-8"))] == []
