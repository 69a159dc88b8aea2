"""Imports of the server of `forks`, which its forks share."""

import gc
import os
from importlib import import_module

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's threads, which start as it is imported, would be lost in a fork
for module in ("cli", "training.command", "study.measure"):
    import_module(f"llama_lab.{module}")
for module in ("torch.utils.tensorboard", "wandb.sdk.launch"):
    import_module(module)
gc.freeze()  # so that a collection in a fork does not copy what was allocated here
