"""The command `maml-rl play`: a video of a policy before and after adaptation to one task."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from maml_rl.cli.console import (
    Parser,
    add_trust,
    ending_in_order,
    file_path,
    not_negative,
    run_command,
)
from maml_rl.cli.run_options import path_or_name, refuse_untrusted_code, refuse_unused_steps
from maml_rl.config.catalog import find_run
from maml_rl.config.placement import ELSEWHERE
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import ConfigError
from maml_rl.runs.atomic_files import check_output, replace_file

_ENDINGS = (".mp4", ".gif", ".webp")


def run_play(arguments: Sequence[str], prog: str) -> int:
    """Write a video, and return the exit code."""
    parser = Parser(prog=prog, description="Show a policy before and after adaptation to a task, side by side.")
    parser.add_argument("policy", type=path_or_name, metavar="POLICY", help="folder of a run, or zoo:NAME")
    parser.add_argument("--task", help="the task, as YAML: '{goal: [0.3, -0.2]}' (default: a new one)")
    parser.add_argument(
        "--output", type=file_path, default=Path("runs/play.mp4"), help=".mp4, .gif or .webp (default: runs/play.mp4)"
    )
    parser.add_argument("--checkpoint", default="last", help="of the run: 'last' (default), 'best', or a number")
    parser.add_argument("--num-steps", type=not_negative, help="gradient steps (default: the config's)")
    parser.add_argument("--seed", type=not_negative, help="of task and episodes (default: the run's)")
    add_trust(parser)
    return run_command(parser, arguments, _play)


def _play(options: argparse.Namespace) -> None:
    if options.output.suffix not in _ENDINGS:
        raise ConfigError(f"--output {options.output} must end with {', '.join(_ENDINGS)}")
    check_output(options.output, "--output")
    # Beside this it imports torch, which the other commands do not wait for.
    from maml_rl.runs.run_folder import load_run_config

    folder = find_run(options.policy)
    config = load_run_config(folder)
    config = refuse_untrusted_code(config, options)
    config = config.override(ELSEWHERE | ({} if options.seed is None else {"seed": options.seed}))

    from maml_rl.episode import TaskEpisodes
    from maml_rl.experiment.build import make_experiment
    from maml_rl.experiment.evaluate import evaluate
    from maml_rl.policies import performed
    from maml_rl.report.task_charts import describe
    from maml_rl.report.videos import encode_animation, encode_h264, film
    from maml_rl.results.evaluation import SampledEvaluation
    from maml_rl.task_distributions.task_files import try_tasks

    phases: list[TaskEpisodes] = []
    with ending_in_order():
        experiment = make_experiment(config)
        refuse_unused_steps(options.num_steps, experiment)
        experiment.restore(options.checkpoint, folder)
        # Where test tasks were drawn once and for all, the first of them.
        tasks = (experiment.fixed_tasks("test") or [])[:1] or 1
        if options.task is not None:
            tasks = [parse_value(options.task, "--task")]
            with closing(experiment.make_env()) as env:
                try_tasks(tasks, env, "--task")
        evaluation = evaluate(
            experiment,
            tasks,
            num_steps=options.num_steps,
            num_workers=0,
            on_batch=lambda batch: phases.extend(performed(experiment.policy, phase) for phase in batch.phases),
        )
        frames, fps = film(SampledEvaluation(experiment.config, phases, evaluation))
        kind = options.output.suffix
        data = encode_h264(frames, fps) if kind == ".mp4" else encode_animation(frames, fps, kind[1:].upper())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.output, data)
    print(f"{describe(evaluation.tasks[0])}: wrote {options.output}")
