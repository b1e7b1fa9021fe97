"""The examples of docs/scaling.md besides commands of this package: a batch script and files of launchers."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.shown_commands import fenced_blocks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
# The script of a cluster on several nodes; another one has one job for each seed.
NODES = "#!/bin/bash\n#SBATCH --nodes=4"
# Programs that record their calls, and then do what the script needs.
STAND_INS = {
    "scontrol": r"printf 'n1\nn2\nn3\nn4\n'",
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
    "hostname": "echo 127.0.0.1 fe80::1",
    "ray": "",
    "python": "",
    "sleep": "",
}


# A port that nobody has: those of Slurm's jobs end in the same digits.
with socket.create_server(("127.0.0.1", 0)) as server:
    PORT = 20000 + server.getsockname()[1] % 20000
JOB = 740_000 + PORT - 20000


def block(beginning: str) -> str:
    """Return the block of code of the page that begins with this text."""
    (found,) = [code for _, code in fenced_blocks(PAGE.read_text(encoding="utf-8")) if code.startswith(beginning)]
    return found


# The head listens until somebody connects.
HEAD = f"""case "$*" in *--head*) {sys.executable} -c '
import socket, sys
socket.create_server(("127.0.0.1", int(sys.argv[1]))).accept()
' "$(printf %s "$*" | sed "s/.*--port=\\([0-9]*\\).*/\\1/")";; esac"""


def called_by_script(
    folder: Path, beginning: str = NODES, *, code: int = 0, stand_ins: Mapping[str, str] = {}
) -> list[str]:
    """Run the script that begins with this text in this folder, and return the sorted calls of programs."""
    programs, log = folder / "bin", folder / "log"
    programs.mkdir(exist_ok=True)
    for name, body in {**STAND_INS, **stand_ins}.items():
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{log}"\n{body}\n')
        (programs / name).chmod(0o755)
    log.write_text("")
    variables = {
        "RUNS": str(folder / "runs"),
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_NNODES": "4",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_JOB_ID": str(JOB),
    }
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    # Some calls continue after the script; they have ended when no process holds the pipe.
    ended = subprocess.run(
        ["bash", "-c", block(beginning)],
        cwd=folder,
        env={**os.environ, **variables, "PATH": path},
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert ended.returncode == code
    return sorted(log.read_text().splitlines())


def test_slurm_script_starts_head_and_workers_and_resumes_an_interrupted_run(tmp_path: Path) -> None:
    calls = called_by_script(tmp_path, stand_ins={"ray": HEAD})
    head = f"start --head --node-ip-address=127.0.0.1 --port={PORT} --num-cpus=32"
    workers = f"start --address=127.0.0.1:{PORT} --num-cpus=32 --block"
    train = f"python train.py halfcheetah-dir --backend ray --ray-address 127.0.0.1:{PORT} --output-folder"
    assert [call for call in calls if call.startswith("ray ")] == [
        f"ray {workers}",
        f"ray {head} --include-dashboard=false --block",
    ]
    # Since Slurm 22.05 a step has the CPUs of its task only if it asks for them.
    assert f"srun --nodes=3 --ntasks=3 --cpus-per-task=32 --exclude=n1 ray {workers}" in calls
    of_head = f"srun --nodes=1 --ntasks=1 --cpus-per-task=32 --nodelist=n1 ray {head}"
    assert any(call.startswith(of_head) for call in calls)
    run = tmp_path / "runs" / "on-the-cluster"
    assert f"{train} {run}" in calls
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    assert f"{train} {run} --resume" in called_by_script(tmp_path, stand_ins={"ray": HEAD})
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(block(NODES).splitlines())


def test_slurm_script_ends_without_a_run_when_the_head_ends_before_it_answers(tmp_path: Path) -> None:
    calls = called_by_script(tmp_path, code=1)
    assert any(call.startswith("ray start --head") for call in calls)
    assert not any(call.startswith("python") for call in calls)


def test_script_of_a_job_resumes_an_interrupted_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "halfcheetah-dir"
    train = f"python train.py halfcheetah-dir --backend ray --output-folder {run}"
    assert called_by_script(tmp_path, "#!/bin/sh") == [train]
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    assert called_by_script(tmp_path, "#!/bin/sh") == [f"{train} --resume"]


def test_kubernetes_file_has_fields_of_a_ray_job() -> None:
    # The fields of KubeRay's API ray.io/v1; values of rayStartParams must be strings.
    found: dict[str, Any] = yaml.safe_load(block("apiVersion: ray.io"))
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    assert set(found["spec"]) <= {"entrypoint", "rayClusterSpec", "backoffLimit", "shutdownAfterJobFinishes"}
    cluster = found["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    head = cluster["headGroupSpec"]
    assert set(cluster) == {"headGroupSpec", "workerGroupSpecs"}
    assert set(head) == {"rayStartParams", "template"}
    assert set(workers) <= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert all(isinstance(value, str) for value in (*head["rayStartParams"].values(),))
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "resources"} == set(container) - {"volumeMounts"}


@pytest.mark.ray
def test_launcher_file_is_valid() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(yaml.safe_load(block("cluster_name:")))
    util.validate_config(config)
    assert "0.0.0.0" not in " ".join(config["head_start_ray_commands"])
