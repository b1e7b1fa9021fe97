"""The rooms of the package, and which way the imports between them point."""

import ast
from collections.abc import Iterator
from pathlib import Path

import maml_rl

PACKAGE = Path(maml_rl.__file__).parent
# From the top to the ground floor: a room imports what stands after it.
ROOMS = (
    "cli",
    "report",
    "experiment",
    "samplers",
    "metalearners",
    "adaptation",
    "derivatives",
    "baseline",
    "task_distributions",
    "runs",
    "policies",
    "episode",
    "envs",
    "config",
    "profiling",
    "functional",
    "seeding",
    "checksums",
    "errors",
)


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield every import of the package's own modules: the file, its room, and the room that it imports."""
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        # The first gives public names, from all rooms, when they are used; `python -m` starts the others.
        if path == Path("__init__.py") or path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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


def test_imports_between_rooms_point_downwards() -> None:
    found = list(imports())
    assert len(found) > 200
    upwards = [f"{file} imports {to}" for file, room, to in found if ROOMS.index(room) > ROOMS.index(to)]
    assert upwards == []


def test_samplers_and_metalearners_do_not_import_each_other() -> None:
    assert not {("samplers", "metalearners"), ("metalearners", "samplers")} & {(room, to) for _, room, to in imports()}
