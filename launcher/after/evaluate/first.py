"""The intermediate model that several cells start from: fine-tuned on another task, once a machine instead of once a
cell.

RTE, MRPC and STS-B start from the model of MNLI (Liu et al. 2019, section 5.1), which takes longer to train than the
tasks after it. The model is a pure function of the checkpoint, that task and its settings, so cells can share it.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from data_service.processes import locked
from launcher.after.finetune.pretrained import LocalModel, folder_digest
from launcher.after.finetune.run import first_finetuned
from launcher.after.finetune.settings import MACHINE, FinetuneSettings
from launcher.after.tasks.task import Task


def shared_first(
    pretrained: LocalModel, task: Task, chosen: FinetuneSettings, before: Mapping[str, object], place: Path
) -> LocalModel:
    """The model that `task` starts after, in a folder below `place`. The first process that needs it trains it. Others
    wait until it is done, and train it themselves if that process has died.

    Args:
        before: the digest of the task that is learnt first, and its settings.
        place: a folder of this machine, which its cells share.

    Raises: as `first_finetuned`; OSError: `place` cannot be written.
    """
    of_machine = chosen.model_dump(mode="json", include=MACHINE)
    text = json.dumps([pretrained.digest, dict(before), of_machine], sort_keys=True)
    folder = place / f"first-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    place.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{folder}.lock")):
        if not folder.is_dir():
            _make(pretrained, task, chosen, folder)
    return LocalModel(f"{pretrained.name} after {task.after}", None, folder, folder_digest(folder))


def _make(pretrained: LocalModel, task: Task, chosen: FinetuneSettings, folder: Path) -> None:
    with first_finetuned(pretrained, task, chosen) as made:
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        shutil.copytree(made.folder, fresh, dirs_exist_ok=True)
        os.rename(fresh, folder)
