"""The machines on which the runs of a launcher train; they need not be this one."""

from dataclasses import dataclass

from omegaconf import DictConfig

from llama_lab.util.errors import ConfigError

from .hardware import Hardware, asked_counts, check_strategy, choose_accelerator, choose_hardware, choose_precision


@dataclass(frozen=True)
class Site:
    """The machines of a launcher.

    launcher: the option of `hydra/launcher`. accelerators: those that runs may ask for, the one for `auto` first. gpus:
    of each run, if the launcher assigns them. elsewhere: whether runs may train on other machines than this one.
    slots: how many runs train at a time; None if a cluster decides.
    """

    launcher: str
    accelerators: tuple[str, ...]
    gpus: int | None = None
    elsewhere: bool = False
    slots: int | None = None

    def hardware(self, trainer: DictConfig, width: int, micro_batches: int) -> Hardware:
        """The hardware of a run with the group `trainer`; see `choose_hardware`. Raises ConfigError."""
        trainer, asked = trainer.copy(), trainer.accelerator
        if not self.elsewhere:
            asked = choose_accelerator(asked)
        if asked not in ("auto", *self.accelerators):
            *first, last = ["auto", *sorted(self.accelerators, reverse=True)]
            supports = f"hydra/launcher={self.launcher} supports {', '.join(first)} and {last}"
            remedy = "" if len(self.accelerators) > 1 else " here; give each accelerator a command of its own"
            raise ConfigError(f"trainer.accelerator={asked}: {supports}{remedy}")
        trainer.accelerator = self.accelerators[0] if asked == "auto" else asked
        if self.gpus is not None and trainer.accelerator == "gpu":
            if trainer.devices not in ("auto", -1, self.gpus):
                gives = f"hydra/launcher={self.launcher} gives each run hydra.launcher.gpus_per_run={self.gpus}"
                raise ConfigError(f"trainer.devices={trainer.devices}: {gives}; set that, and leave this out")
            trainer.devices = self.gpus
        if not self.elsewhere:
            return choose_hardware(trainer, width, micro_batches)
        check_strategy(trainer.strategy)
        devices, nodes = asked_counts(trainer, f"hydra/launcher={self.launcher}")
        name, precision, sharded = trainer.accelerator, trainer.precision, trainer.strategy == "fsdp"
        if precision != "auto":
            precision, _ = choose_precision(precision, name, has_bf16=True, width=width)
        return Hardware(name, devices, nodes, precision, name, sharded, elsewhere=True)
