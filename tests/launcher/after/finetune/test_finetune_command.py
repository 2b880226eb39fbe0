"""`maskfleet finetune`, as a user types it."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.app.cli.main import app
from launcher.errors import OptionError, RunError
from tests.support.checks.guide import keys, promised
from tests.support.tasks.small_tasks import description, model, task


@pytest.mark.long
def test_a_checkpoint_becomes_a_model_and_the_figures_are_printed(tmp_path: Path) -> None:
    given = model("electra", tmp_path / "model")
    task("classification", tmp_path)
    (tmp_path / "task.yaml").write_text(
        description("classification") + "finetune: {lr: [1.e-3, 3.e-3], epochs: 1, batch: 16}\n"
    )
    command = ["finetune", str(tmp_path / "model"), str(tmp_path / "task.yaml")]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0
    assert re.match(r"dev, epoch 1: accuracy [01]\.\d{4}, matthews -?[01]\.\d{4}\n", result.stdout)
    results = json.loads((tmp_path / "out/results.json").read_bytes())
    assert results["settings"]["lr"] == 1e-3, "the first of the list"
    assert results["checkpoint"] == {"source": str(tmp_path / "model"), "step": None, "digest": given.digest}

    result = CliRunner().invoke(app, [*command, "--json", "--set", "lr=2e-3"], catch_exceptions=False)
    (record,) = (json.loads(line) for line in result.stdout.splitlines())
    assert record["settings"]["lr"] == 2e-3
    assert keys([record]) == promised("finetune")

    with pytest.raises(OptionError, match="lrr"):
        CliRunner().invoke(app, [*command, "--set", "lrr=1"], catch_exceptions=False)
    with pytest.raises(RunError, match=r"run\.json.*config\.json"):
        CliRunner().invoke(app, ["finetune", str(tmp_path), *command[2:]], catch_exceptions=False)
    with pytest.raises(RunError, match="--step"):
        CliRunner().invoke(app, [*command, "--step", "3"], catch_exceptions=False)
