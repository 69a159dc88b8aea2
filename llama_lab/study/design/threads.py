"""CPU threads per run of a study, the same in all arms, so that several runs can share the cores.

The choice depends on counted FLOPs, never on a timing: results depend on the number of threads in their last digits, so
all runs of a study, and its repetitions, must choose alike.
"""

import os

import torch

from llama_lab.devices.hardware import usable_cores
from llama_lab.runs.stored import Environment

from .memory_fit import copies_fit
from .plan import Plan, PlannedArm

# Training FLOPs of a micro-batch up to which each run has one thread. On two cores (Linux, torch 2.13, 2026-11-23) two
# steps side by side took 0.84, 0.78, 0.79 and 0.82 of their time in turn with two threads each at 6e9, 2e10, 8e10 and
# 9e10 (sizes nano and micro, 2 to 32 sequences), and 1.0 at 7e11 (mini, 8 sequences). In bf16 (2026-11-29): 0.78 at
# 2e10, 0.77 and 0.88 at 4e10 (nano, micro), 0.92 at 1.5e11.
SMALL = 1e11


def threads_per_run(plan: Plan) -> int | None:
    """As the study's runs began; else the user's OMP_NUM_THREADS; else one in small models, and all in others.

    None if the runs do not train on one CPU each. Small models whose copies do not fit into memory together have all.
    """
    runs = [run.run for run in (*plan.tuning, *plan.runs)]
    if (runs[0].hardware.accelerator, runs[0].hardware.world_size) != ("cpu", 1):
        return None
    begun = (run.folder.path for run in runs if (run.folder.path / Environment.FILE).exists())
    if threads := next((Environment.load(path).cpu_threads for path in begun), 0):
        return threads
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    largest, cores = max(plan.arms, key=micro_batch_flops), usable_cores()
    is_small = micro_batch_flops(largest) <= SMALL
    return 1 if is_small and copies_fit(largest.runs[0].run, plan.dataset, cores) else cores


def micro_batch_flops(arm: PlannedArm) -> float:
    """Training FLOPs of one forward and backward pass."""
    cfg = arm.draft.cfg
    sequences = cfg.train.micro_batch_size or cfg.train.batch_size
    return float(sequences * cfg.model.max_seq_len * arm.cost.train_flops_per_token)
