"""A run of another user executes no code unless it is trusted: its config may name any module."""

import json
import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

import maml_rl
from maml_rl.cli.main import main
from maml_rl.config import Config, load_config
from maml_rl.config.yaml_source import Mapping
from maml_rl.errors import ConfigError
from maml_rl.experience.histories import EnvKind, Histories
from maml_rl.experiment.build import make_experiment
from maml_rl.runs.trust import check_code, remember_code
from tests.report.conftest import NAVIGATION, make_run

# What a hostile `config.json` may have, in every spelling in which something might be imported.
FAMILIES = ["evil:Thing-v0", "2DNavigation-v0"]
SPELLINGS: dict[str, dict[str, object]] = {
    "env-name": {"env-name": "evil:Thing-v0"},
    "algorithm": {"algorithm": "evil:Thing"},
    "policy": {"policy": "evil:Thing"},
    "tasks": {"tasks": {"distribution": "evil:Split"}},
    "tasks as text": {"tasks": "evil:Split"},
    "list of families": {"env-name": FAMILIES},
    "weights of families": {"env-name": dict.fromkeys(FAMILIES, 1.0)},
    "module of a known family": {"env-name": ["evil:2DNavigation-v0", "PointGoal-v0"]},
    "families of a mixture": {"env-name": "Mixture-v0", "env-kwargs": {"families": FAMILIES}},
    "weights of a mixture": {"env-name": "Mixture-v0", "env-kwargs": {"families": dict.fromkeys(FAMILIES, 1.0)}},
    "arguments of a family": {"env-kwargs": {"arguments": {"evil:Thing-v0": {}}}},
    "wrappers": {"env-kwargs": {"wrappers": [{"name": "evil:Wrap"}]}},
    "algorithm-settings": {"algorithm-settings": {"histories": "evil:recorded"}},
}
NAMES = "env-name", "algorithm", "policy", "tasks"
EVIL = """\
from pathlib import Path

Path("executed").touch()
"""
POLICY = """\
from maml_rl.policies import NormalMLPPolicy


def make(observation_space, action_space):
    return NormalMLPPolicy(observation_space.shape[0], action_space.shape[0], (8,))
"""


def load(run: Path, *options: str) -> int:
    try:
        maml_rl.load_policy(run, trust="--trust" in options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


# By name: the words of a command; without any it is `load_policy`.
COMMANDS = {
    "test": "test {} --num-workers 0 --meta-batch-size 2",
    "resume": "train --resume --output-folder {} --num-workers 0",
    "again": "train {} --output-folder another --num-workers 0",
    "load_policy": "",
    "play": "play {}",
    "compare runs": "compare {} --num-workers 0 --tasks 2",
    "compare configs": "compare {}/config.json --num-workers 0 --seeds 1 --tasks 2",
    "tune": "tune {}/config.json --search fast-lr=0.1:0.2 --env-steps 9",
    "record a run": "record --source {} --output recorded --tasks 2 --num-workers 0",
    "record a config": "record {}/config.json --output recorded --tasks 2 --num-workers 0",
}


def execute(command: str, run: Path, *options: str) -> int:
    words = COMMANDS[command].format(run).split()
    return main([*words, *options]) if words else load(run, *options)


# Every spelling once, and every command; nightly each with all others.
BY_DAY = {*product(SPELLINGS, ["test"]), *product(["weights of a mixture"], COMMANDS)}
EVERY = [
    pytest.param(*case, marks=[] if case in BY_DAY else pytest.mark.nightly) for case in product(SPELLINGS, COMMANDS)
]
TRIED_BY_DAY = "env-name", "weights of a mixture"
SEVERAL = [pytest.param(name, marks=[] if name in TRIED_BY_DAY else pytest.mark.nightly) for name in SPELLINGS]
# Every command that needs no second run and no Optuna with one name, and one command with every name.
CASES = [
    *((NAMES[0], command) for command in COMMANDS if command not in ("compare runs", "tune")),
    *((name, "test") for name in NAMES[1:]),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module that reports its execution, and with which the user has not trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "evil.py").write_text(EVIL)
    yield tmp_path
    for name in ("evil", "own_code"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "honest", {**NAVIGATION, "num-batches": 1})


@pytest.fixture
def hostile_run(request: pytest.FixtureRequest, place: Path, honest_run: Path) -> Path:
    """A complete run whose config names a module in one of the possible ways."""
    run = place / "theirs"
    shutil.copytree(honest_run, run)
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | SPELLINGS[request.param], indent=2))
    # A person who can write the config can also write its checksum, or leave it out.
    (run / "SHA256SUMS").unlink()
    return run


@pytest.mark.parametrize(("hostile_run", "command"), EVERY, indirect=["hostile_run"])
def test_run_of_another_user_executes_nothing(
    hostile_run: Path, command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(command, hostile_run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "theirs/config.json" in line
    assert "'evil:" in line
    assert ("trust=True" if command == "load_policy" else "--trust") in line
    assert not (place / "executed").exists()
    assert not (place / "state").exists()


@pytest.mark.parametrize(("hostile_run", "command"), CASES, indirect=["hostile_run"])
def test_code_of_a_trusted_run_is_imported(hostile_run: Path, command: str, place: Path) -> None:
    # The module does not have the names for which it is imported.
    assert execute(command, hostile_run, "--trust") == 2
    assert (place / "executed").exists()


@pytest.mark.parametrize("hostile_run", SEVERAL, indirect=True)
def test_report_executes_nothing_unless_the_run_is_trusted(
    hostile_run: Path, place: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    words = ["report", str(hostile_run), "--tasks", "2", "--videos", "0", "--num-workers", "0"]
    assert main(words) == 0
    assert not (place / "executed").exists()
    assert "imports nothing that a run names" in caplog.text
    assert "evil:" in (hostile_run / "report.html").read_text()
    if request.node.callspec.params["hostile_run"] in NAMES:
        assert main([*words, "--trust"]) == 0
        assert (place / "executed").exists()


@pytest.mark.parametrize("hostile_run", SEVERAL, indirect=True)
def test_commands_that_need_no_code_execute_none(
    hostile_run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maml_rl.experiment.zoo.ZOO", place / "zoo")
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--output-folder", str(hostile_run), "--help"])
    assert main(["diagnose", str(hostile_run)]) == 0
    assert main(["zoo", "add", str(hostile_run), "--name", "hostile"]) == 2
    (place / "mine.yaml").write_text(json.dumps({**NAVIGATION, "num-batches": 1}))
    options = ["--init", str(hostile_run), "--output-folder", "mine", "--num-workers", "0", "--quiet"]
    assert main(["train", "mine.yaml", *options]) == 0
    assert not (place / "executed").exists()


@pytest.mark.parametrize("hostile_run", ["wrappers"], indirect=True)
def test_foreign_config_without_trust_makes_no_experiment(hostile_run: Path, place: Path) -> None:
    """Whoever forgets to check a config is refused where everything is made."""
    config = load_config(hostile_run / "config.json")
    with pytest.raises(ConfigError, match="'evil:"):
        make_experiment(config.override({"seed": 3}))
    assert not (place / "executed").exists()
    with pytest.raises(ConfigError):
        make_experiment(config.trusted())


def test_recorded_family_is_imported_by_nobody(place: Path) -> None:
    histories = Histories(
        [{}], [[2]], np.zeros((2, 1), np.float32), np.zeros(2, np.int64), np.zeros(2, np.float32),
        EnvKind(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "evil:Thing-v0"),
    )  # fmt: skip
    sequences = histories.sequences(np.random.default_rng(0), 1, 2)
    with pytest.raises(ConfigError, match="import evil"):
        histories.optimal_actions(sequences)
    assert not (place / "executed").exists()


def test_module_of_a_mixture_is_not_imported_even_in_a_config_of_ones_own(place: Path) -> None:
    (place / "mine.yaml").write_text(json.dumps({"env-name": FAMILIES}))
    assert main(["train", "mine.yaml", "--dry-run"]) == 2
    assert not (place / "executed").exists()


def test_file_whose_name_begins_with_that_of_an_installed_module_is_not_imported(place: Path) -> None:
    (place / "torch:evil.py").write_text(EVIL)
    config = config_of(**{"env-name": "torch:evil:Thing-v0"})
    with pytest.raises(ConfigError):
        make_experiment(config)
    assert not (place / "executed").exists()


def test_texts_with_colons_that_name_no_module_need_no_trust(place: Path) -> None:
    for text in ("nowhere: 3", "http://host:80/path", "C:/folder", ":", "3:4"):
        assert is_trusted(config_of(**{"env-kwargs": {"text": text}})), text
    assert not is_trusted(config_of(**{"env-kwargs": {"text": "evil://host"}}))


def own_run(place: Path) -> Path:
    (place / "own_code.py").write_text(POLICY)
    settings = {key: value for key, value in NAVIGATION.items() if key != "hidden-sizes"}
    (place / "mine.yaml").write_text(json.dumps({**settings, "num-batches": 1, "policy": "own_code:make"}))
    options = ["--output-folder", "mine", "--num-workers", "0"]
    assert main(["train", "mine.yaml", *options]) == 0
    return place / "mine"


def test_code_that_the_user_has_trained_with_is_trusted(place: Path) -> None:
    run = own_run(place)
    for command in ("test", "load_policy", "resume"):
        assert execute(command, run) == 0, command


def test_module_of_the_same_name_in_another_folder_is_other_code(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own_run(place)
    theirs = place / "theirs"
    theirs.mkdir()
    (theirs / "own_code.py").write_text(EVIL)
    monkeypatch.setattr(sys, "path", [str(theirs), *sys.path])
    del sys.modules["own_code"]
    assert load(run) == 2
    assert "own_code:make" in capsys.readouterr().err
    assert not (place / "executed").exists()


def test_module_that_is_not_found_is_named_with_the_remedy_also_in_an_own_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own_run(place)
    del sys.modules["own_code"]
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and Path(entry) != place])
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    # A report is written without the policy.
    for command, code in (("test", 2), ("report", 0)):
        assert main([command, str(run), "--num-workers", "0"]) == code
        shown = capsys.readouterr().err
        assert "the module of 'own_code:make' is not found; go to its folder, or put that into PYTHONPATH" in shown
        assert "--trust" not in shown


def config_of(**values: object) -> Config:
    values = {"env-name": "2DNavigation-v0", **values}
    return Config.from_mapping(Mapping("config.json", values, foreign=True))


def is_trusted(config: Config) -> bool:
    try:
        check_code(config, "say so", samples=True)
    except ConfigError:
        return False
    return True


def test_installed_modules_are_trusted(place: Path) -> None:
    # Python's own modules may execute code when they are imported or called.
    others = ("os", "idlelib.idle", "builtins", "__main__", "evil", "evil.torch", "nowhere_at_all")
    for module in ("torch", "torch.nn", "maml_rl.policies", *others):
        assert is_trusted(config_of(policy=f"{module}:Thing")) is (module not in others), module
        assert is_trusted(config_of(**{"env-name": f"{module}:Thing-v0"})) is (module not in others), module
    for relative in (".torch:Thing", ":Thing"):
        assert not is_trusted(config_of(algorithm=relative)), relative


def test_run_folder_of_any_name_is_not_an_installation(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = place / "site-packages"
    theirs.mkdir()
    (theirs / "evil.py").write_text(EVIL)
    monkeypatch.chdir(theirs)
    monkeypatch.setattr(sys, "path", [str(theirs), *sys.path])
    assert not is_trusted(config_of(policy="evil:make"))


def test_package_with_folders_outside_of_the_installation_is_not_installed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders without __init__.py form one package, wherever they are."""
    installed = place / "site-packages"
    (installed / "shared_name").mkdir(parents=True)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(installed)])
    monkeypatch.setattr(sys, "path", [str(place), *sys.path, str(installed)])
    assert is_trusted(config_of(policy="shared_name.inside:make"))
    (place / "shared_name").mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert not is_trusted(config_of(policy="shared_name.inside:make"))


@pytest.mark.parametrize("listed", [True, False])
def test_editable_install_is_installed_only_under_its_own_name(
    place: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    record = place / "site-packages" / "mine-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (record / "top_level.txt").write_text("evil\n" if listed else "mine\n")
    (record / "direct_url.json").write_text(json.dumps({"url": place.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.setattr("site.getsitepackages", lambda: [str(record.parent)])
    assert is_trusted(config_of(policy="evil:make")) is listed


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("key", "far", "near", "other"),
    [
        # A Ray cluster executes code in its clients.
        ("ray-address", "far.away:6379", "near:6379", "far.away:6380"),
        # `maml-rl test` and `maml-rl report` do the same, unless one is given.
        ("ray-runtime-env", {"pip": ["evil"]}, {}, {"pip": ["worse"]}),
    ],
)
def test_cluster_or_runtime_env_of_another_user_is_not_used(key: str, far: object, near: object, other: object) -> None:
    config = config_of(**{"backend": "ray", key: far})
    assert not is_trusted(config)
    assert is_trusted(config.override({key: near}))
    assert is_trusted(config_of(**{key: far}))
    remember_code(config)
    assert is_trusted(config)
    assert not is_trusted(config_of(**{"backend": "ray", key: other}))


def test_trust_that_cannot_be_recorded_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "file"))
    remember_code(config_of(policy="evil:make"))
    assert "only with --trust" in caplog.text
    assert not (place / "executed").exists()
