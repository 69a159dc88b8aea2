"""Where a search is kept, so that the same command goes on with it: a journal in its folder, or an Optuna URL."""

from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from llama_lab.util.errors import ConfigError, first_line

from .settings import SearchSettings, setting_error

JOURNAL = "optuna.journal"
# Attributes of Optuna's study.
DEFINITION = "definition"  # of the search
ANEW = "anew"  # whether it began with overwrite=true


def open_study(
    folder: Path, settings: SearchSettings, pruner: optuna.pruners.BasePruner, definition: Sequence[str], anew: bool
) -> optuna.Study:
    """Optuna's study of the search in `folder`, with its trials so far. anew: forget those.

    definition: what must not change from one command of a search to the next. Raises ConfigError if it has, and for a
    storage that cannot be opened.
    """
    storage = open_storage(folder, settings, anew)
    name = folder.name if settings.storage is None else str(folder.absolute())  # others may have a search of that name
    if anew and name in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        direction=StudyDirection[settings.direction.upper()],
        pruner=pruner,
        load_if_exists=True,
    )
    wanted = sorted([*definition, f"hydra.sweeper.metric={settings.metric}", f"direction={settings.direction}"])
    before = study.user_attrs.get(DEFINITION, wanted)
    if before != wanted:
        new, old = (" ".join(sorted({*one} - {*other})) for one, other in ((wanted, before), (before, wanted)))
        fix = "give the same settings to go on, another name=, or start over with overwrite=true"
        raise ConfigError(f"{new or 'name=' + name}: the search in {folder} has {old or 'none of it'}; {fix}")
    study.set_user_attr(DEFINITION, wanted)
    if anew:
        study.set_user_attr(ANEW, True)
    return study


def open_storage(folder: Path, settings: SearchSettings, anew: bool) -> BaseStorage:
    """The storage of a search. Raises ConfigError if it cannot be opened."""
    if settings.storage is not None:
        from sqlalchemy.exc import SQLAlchemyError  # takes a second to import

        try:
            return RDBStorage(settings.storage)
        except (SQLAlchemyError, ImportError) as error:
            reason = f"cannot be opened, {first_line(error)}; give another URL, or leave it out"
            raise setting_error("storage", settings.storage, reason) from error
    journal = folder / JOURNAL
    if anew:
        journal.unlink(missing_ok=True)
    # Remove what a kill may have left: the lock, which is held for one line, and half a line.
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(journal)))
    except (ValueError, KeyError) as error:
        fix = "restore it, choose another name, or start over with overwrite=true"
        raise ConfigError(f"name={folder.name}: {journal} is damaged, {first_line(error)}; {fix}") from error
