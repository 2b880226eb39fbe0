"""Small models of the families, each made once for all tests of fine-tuning, which only read them."""

import pytest

from launcher.after.finetune.pretrained import LocalModel
from tests.support.tasks.small_tasks import Models, model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, LocalModel] = {}

    def give(family: str) -> LocalModel:
        if family not in made:
            made[family] = model(family, tmp_path_factory.mktemp(family) / "model")
        return made[family]

    return give
