"""The batch script of an array of Slurm jobs, which can also be submitted by hand, and its submission.

Each job of the array trains one run. Slurm warns the script with USR2 before the time limit: it asks the run to save
and stop, and requeues the job, whose next session resumes from the checkpoint. After TERM (scancel, preemption,
`scontrol requeue`), Slurm decides whether the job starts again. The script writes `<job>.started` with its nodes when
it begins and, for a run that ended by itself, `<job>.exit` with the exit status.
"""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_lab.util.errors import ConfigError

from .engine import QueuedRun
from .process import run_variables, starts_over, without_ranks
from .settings import SlurmSettings

SCRIPT = "batch.sh"
NEVER = "Requested node configuration is not available"  # sbatch may accept such a job, and never start it
# What follows the options and the setup. `kill -0` tells whether srun still runs: signals interrupt `wait`.
BODY = """\
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
files={folder}/$SLURM_ARRAY_TASK_ID
mkdir -p {folder}
case $SLURM_ARRAY_TASK_ID in
{cases}
esac
[ -z "$SLURM_CPUS_PER_TASK" ] || export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}
fail() {{ echo "error: $1"; echo 1 > "$files".exit; exit 1; }}
rm -f "$files".exit "$files".status
echo "$SLURM_JOB_NODELIST" > "$files".started

trap 'near=1; scancel --signal=TERM "$job"' USR2
trap : TERM
{{ {srun} "${{run[@]}}"; echo $? > "$files".status; }} &
while kill -0 $! 2> /dev/null; do wait $!; done
trap '' TERM USR2
status=143
[ ! -s "$files".status ] || read -r status < "$files".status

if [ "$near" ] && [ "$status" -ge 128 ]; then  # stopped, with or without a checkpoint
  if [ "$record"/checkpoints/last.ckpt -nt "$files".started ]; then
    rm -f "$files".fruitless
  elif [ -e "$files".fruitless ]; then
    fail "its time ended twice in a row before it could write a checkpoint; raise hydra.launcher.time"
  else
    touch "$files".fruitless
  fi
  echo "the job's time is nearly over, and it goes back to the queue"
  scontrol requeue "$job" && exit 0
  fail "its time ended, and scontrol cannot requeue its job"
fi
case $status in
  0 | 1 | 2) echo "$status" > "$files".exit ;;
  130 | 143) status=0 ;;  # asked to stop
esac
exit "$status"
"""


def submit(folder: Path, runs: Sequence[QueuedRun], settings: SlurmSettings) -> str:
    """Write the batch script of an array into `folder` and submit it; return the array's id.

    Raises ConfigError with sbatch's message if it refuses.
    """
    script = folder / SCRIPT
    script.write_text(batch_script(folder, runs, settings, f"{str(folder).replace('%', '%%')}/%a.log"))
    # Without the variables of a job that this process itself may be part of.
    environment = without_ranks(os.environ, r"(?!SLURM_CONF$)(SLURM|SRUN)_.*")
    for option in ("--test-only", "--parsable"):
        done = subprocess.run(("sbatch", option, script), env=environment, capture_output=True, text=True)
        # --test-only may also fail for reasons that pass, such as nodes that are down.
        if done.returncode and (option == "--parsable" or NEVER in done.stderr):
            words = ", ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines())
            raise ConfigError(f"hydra/launcher=slurm: sbatch refuses: {words}; see the keys of hydra.launcher")
    return done.stdout.strip().partition(";")[0]  # the cluster's name may follow


def batch_script(folder: Path, runs: Sequence[QueuedRun], settings: SlurmSettings, output: str | None = None) -> str:
    """The batch script of an array whose job i trains `runs[i]`. All need the same devices and nodes.

    folder: for the files of the jobs, which the script makes if need be. output: of Slurm's; None: its default.
    """
    hardware = runs[0].run.hardware
    options: dict[str, Any] = {
        "job-name": "llama-lab",
        "array": f"0-{len(runs) - 1}%{settings.at_a_time or len(runs)}",
        "chdir": Path.cwd(),
        "output": output,
        "open-mode": "append",
        "requeue": True,
        "signal": f"B:USR2@{settings.signal_seconds}",
        "partition": settings.partition,
        "time": settings.time,
        "nodes": hardware.num_nodes,
        "ntasks-per-node": hardware.devices,
        "gpus-per-node": hardware.devices if hardware.accelerator == "gpu" else None,
        "cpus-per-task": settings.cpus_per_task,
        "mem": settings.memory,
        **{name.replace("_", "-"): value for name, value in settings.sbatch.items()},
    }
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    lines = [f"#SBATCH --{k}" + ("" if v is True else f"={shlex.quote(str(v))}") for k, v in given.items()]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in run_variables().items()]
    # If a rank dies, srun kills the others, which would wait for it. Output is unbuffered by PYTHONUNBUFFERED, since
    # srun's `--unbuffered` would give the ranks a terminal.
    cpus = [] if settings.cpus_per_task is None else [f"--cpus-per-task={settings.cpus_per_task}"]
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", *cpus])
    cases = "\n".join(f"  {number}) {case(queued)} ;;" for number, queued in enumerate(runs))
    body = BODY.format(cases=cases, folder=shlex.quote(str(folder)), srun=srun)
    return "\n".join(["#!/bin/bash", *lines, "", *exports, *settings.setup, body])


def case(queued: QueuedRun) -> str:
    """The shell's settings for a run. One that starts over does so until its record is newer than the job's config."""
    anew = [word for word in queued.command if starts_over(word)]
    kept = [word for word in queued.command if not starts_over(word)]
    found = f"record={shlex.quote(str(queued.folder))} run=({shlex.join(kept)})"
    if anew:
        found += f'; [ "$record"/resolved.yaml -nt "$files".yaml ] || run+=({shlex.join(anew)})'
    return found
