"""An objective is added in a scratch copy, in as many files as "Contributing" says, and is trained."""

import shutil
from pathlib import Path

import pytest

from tests.support.checks.scratch import ROOT, copied, counted

EXAMPLES = ROOT / "tests/support/models"


@pytest.mark.long
def test_an_objective(tmp_path: Path) -> None:
    """With a host half of its own. Its test and the guide, whose table the test prints, are of the files."""
    packages = copied(tmp_path, "data_service", "encoder_core", "checkpoints", "launcher")
    page = packages.root / "infra/docs/keys.md"
    page.parent.mkdir(parents=True)
    shutil.copy(ROOT / "infra/docs/keys.md", page)
    packages.create("data_service/samples/shuffling.py", (EXAMPLES / "shuffling.py").read_text("utf-8"))
    spec, host = "data_service/samples/spec.py", "shuffling"
    packages.replace(
        spec, "MlmMasking | PermutedPrediction", "MlmMasking | TokenShuffling | PermutedPrediction"
    )
    imported = "from data_service.samples.similar_words import SimilarSource\n"
    packages.replace(spec, imported, f"from data_service.samples.{host} import TokenShuffling\n{imported}")
    objective, device = "launcher/runtime/recipe/objective.py", "shuffled"
    packages.create(f"encoder_core/terms/{device}.py", (EXAMPLES / "shuffled.py").read_text("utf-8"))
    packages.create(
        f"encoder_core/objectives/{device}.py", (EXAMPLES / "shuffled_tokens.py").read_text("utf-8")
    )
    network = "encoder_core/objectives/network.py"
    packages.replace(
        network,
        "        case SboConfig():\n",
        "        case ShuffledConfig():\n"
        "            return ShuffledTokens(term, tied_head(model, word))\n"
        "        case SboConfig():\n",
    )
    packages.replace(
        network,
        "\n\ndef head_term(",
        f"from encoder_core.objectives.{device} import ShuffledTokens\n"
        f"from encoder_core.terms.{device} import ShuffledConfig\n\n\ndef head_term(",
    )
    line = "    nsp: NspConfig | None = None\n"
    packages.replace(objective, line, f"{line}    shuffled: ShuffledTerm | None = None\n")
    before = "class RecipeObjective(Choice):\n"
    packages.replace(
        objective,
        before,
        f"from encoder_core.terms.{device} import ShuffledConfig\n"
        f"from data_service.samples.{host} import TokenShuffling\n\n\n"
        f'class ShuffledTerm(ShuffledConfig, TokenShuffling):\n    """Both halves."""\n\n\n{before}',
    )
    test = f"tests/encoder_core/objectives/test_{device}.py"
    (packages.root / test).parent.mkdir(parents=True)
    packages.create(test, (EXAMPLES / "shuffled_checks.py").read_text("utf-8"))
    said = packages.run(
        f"import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', '--noconftest', {test!r}]))"
    )
    assert "3 passed" in said
    printed = packages.run("from tests.support.models.compositions import table; print(table(), end='')")
    assert "| shuffled | `full_sentences` | yes | yes |" in printed
    guide = page.read_text("utf-8")
    packages.replace("infra/docs/keys.md", guide[guide.index("| objective | rows tried") :], printed)
    assert len(packages.touched) == counted("Add an objective")
