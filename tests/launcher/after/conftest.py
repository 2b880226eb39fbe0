"""Small models of the families, each made once for all tests, which only read them."""

import pytest

from launcher.after.finetune.pretrained import LocalModel
from tests.support.tasks.small_tasks import LENGTH, Models, model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[tuple[str, int], LocalModel] = {}

    def give(family: str, length: int = LENGTH) -> LocalModel:
        if (family, length) not in made:
            made[family, length] = model(family, tmp_path_factory.mktemp(family) / "model", length=length)
        return made[family, length]

    return give
