"""`maskfleet estimate`: what it prints, what it refuses, and figures that must hang together."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.store.open import open_store
from launcher.app.cli.main import app
from launcher.errors import EstimateError
from launcher.output import hours_or_days
from launcher.plan.estimate.estimate import Estimate, estimate_recipe
from launcher.plan.estimate.render import render_text
from launcher.runtime.capacity.devices import Cluster, find_gpu, parse_text_size
from launcher.runtime.capacity.memory_fit import fixed_memory
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.source import bundled
from launcher.runtime.run.log import RunLog

LARGE = ("roberta-large-160gb", "--nodes", "16", "--gpus-per-node", "8", "--gpu", "h100")


def of(name: str, *settings: str, nodes: int = 16, gpu: str = "H100", mfu: str | float | None = None) -> Estimate:
    return estimate_recipe(load(name, settings), Cluster(nodes, 8, find_gpu(gpu), mtbf=1e8), mfu)


@pytest.mark.long
def test_the_command_shows_its_arithmetic() -> None:
    result = CliRunner().invoke(app, ["estimate", *LARGE, "--text", "160GB"])
    assert result.exit_code == 0
    for shown in (
        "355,411,033 parameters",
        "2 B x 355,411,033",
        "sqrt(2 d M)",
        "what autograd keeps",
        "GPU-hours",
        "RESULTS-gpu.md",
    ):
        assert shown in result.output
    assert result.output.count("utilisation, ") == 1
    assert re.search(r"^ *tokens of the run +2\.1T ", result.output, re.MULTILINE)
    assert re.search(r"^ *tokens of the text +36\.4G ", result.output, re.MULTILINE)
    assert re.search(r"^ *epochs +57\.67 ", result.output, re.MULTILINE)
    given = CliRunner().invoke(app, ["estimate", *LARGE, "--mfu", "0.4"]).output
    assert given.count("utilisation, ") == 1
    assert "RESULTS-gpu.md" not in given


@pytest.mark.parametrize(("told", "size"), [("160GB", 160e9), ("1.5 TiB", 1.5 * 2**40), ("300m", 300e6), ("17", 17.0)])
def test_sizes_of_texts(told: str, size: float) -> None:
    assert parse_text_size(told) == size


@pytest.mark.parametrize("told", ["", "0GB", "GB", "-3 GB", "3 GB of text"])
def test_no_size_is_refused(told: str) -> None:
    with pytest.raises(EstimateError):
        parse_text_size(told)


def test_below_two_days_it_says_hours() -> None:
    assert hours_or_days(8.9 * 3600) == "8.9 hours"
    assert hours_or_days(47.5 * 3600) == "47.5 hours"
    assert hours_or_days(2 * 86400) == "2.00 days"


@pytest.mark.long
def test_as_json_it_has_the_same_figures() -> None:
    result = CliRunner().invoke(app, ["estimate", *LARGE, "--mfu", "0.4", "--mtbf-hours", "100", "--json"])
    found = json.loads(result.output)
    assert found["parameters"] == 355_411_033
    assert found["checkpoints"]["mtbf"] == pytest.approx(100 * 3600 / 16)
    phase = found["phases"][0]
    assert phase["compute"] == pytest.approx(phase["model"] / (989e12 * 0.4))
    assert found["largest_microbatch"] == {"0": None, "1": 64, "2": 64, "3": 64}


@pytest.mark.parametrize(
    ("nodes", "gpus", "gpu", "mfu", "what"),
    [
        (0, 8, "H100", None, "0 nodes"),
        (1, -1, "H100", None, "-1 GPUs"),
        (1, 8, "Voodoo2", None, "Voodoo2"),
        (1, 1, "L4", 1.5, "1.5"),
    ],
)
def test_nonsense_is_refused(nodes: int, gpus: int, gpu: str, mfu: float | None, what: str) -> None:
    with pytest.raises(EstimateError, match=what) as error:
        estimate_recipe(load("bert-tiny"), Cluster(nodes, gpus, find_gpu(gpu), mtbf=1e6), mfu)
    assert what != "Voodoo2" or all(name in error.value.remedy for name in ("A100-40", "H100", "B200", "L4"))


@pytest.mark.long
def test_a_model_that_fits_nowhere_is_said_to() -> None:
    shape = ("model.layers=96", "model.hidden=8192", "model.heads=64", "model.feed_forward=32768")
    huge = of("bert-large", *shape, gpu="L4", nodes=1)
    assert not any(fit.fits for fit in huge.fits)
    assert "Not even one row fits" in render_text(huge)


@pytest.mark.long
def test_more_machines_are_faster_until_there_are_no_microbatches_left() -> None:
    seconds = [of("roberta-large-160gb", nodes=nodes).seconds for nodes in (8, 16, 32)]
    assert seconds[1] < 0.6 * seconds[0]
    assert seconds[2] == pytest.approx(seconds[1], rel=0.05)
    assert "ranks that idle" in render_text(of("roberta-large-160gb", nodes=32))


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 2])
def test_a_rising_batch_takes_the_time_of_its_steps(zero: int) -> None:
    """As long as the same steps given as phases of their own, each with a batch that stays."""
    shape = "length: 512, batch: {sequences: %d%s}"
    first = shape % (4096, ", warmup: {start: 2048, steps: 4}")
    batches = (2048, 2560, 3072, 3584, 4096, 4096)
    each = ", ".join(f"{{steps: 1, {shape % (batch, '')}}}" for batch in batches)
    settings = (f"zero={zero}", "microbatch=64", "schedule.warmup=0")
    rising, apart = (
        of("roberta-base", f"phases=[{phases}]", *settings, nodes=1).phases
        for phases in (f"{{steps: 6, {first}}}", each)
    )
    assert rising[0].total_seconds == pytest.approx(sum(phase.total_seconds for phase in apart), rel=1e-9)
    assert rising[0].spared > 0


def test_a_phase_of_long_rows_takes_fewer_at_a_time() -> None:
    shape = "phases=[{steps: 9, length: 128, microbatch: 64, batch: {sequences: 512}}, {steps: 1, length: 512, %s}]"
    long = "batch: {sequences: 512}"
    own, alike = (
        of("roberta-base", shape % part, "microbatch=16", "schedule.warmup=0", "model.layers=4", nodes=1)
        for part in (long, f"{long}, microbatch: 64")
    )
    assert [phase.microbatches for phase in own.phases] == [8, 32]
    assert [phase.shape.tokens for phase in own.phases] == [64 * 128, 16 * 512]
    assert own.phase_with_most_memory.length == 512
    assert own.configured_memory is not None
    assert alike.configured_memory is not None
    assert own.configured_memory.total_bytes < 0.6 * alike.configured_memory.total_bytes


@pytest.mark.long
def test_recomputation_costs_a_third_and_saves_memory() -> None:
    plain, recomputed = (
        of("roberta-large-160gb", f"activation_checkpointing={choice}") for choice in ("false", "true")
    )
    assert recomputed.phases[0].compute / plain.phases[0].compute == pytest.approx(4 / 3, rel=0.02)
    assert plain.configured_memory is not None
    assert recomputed.configured_memory is not None
    assert recomputed.configured_memory.total_bytes < 0.4 * plain.configured_memory.total_bytes


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_muon_keeps_one_moment_of_matrices_and_takes_time_to_orthogonalise_them(zero: int) -> None:
    matrices = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    adamw, muon = (
        of("roberta-large-160gb", f"zero={zero}", *settings) for settings in ((), ("optimizer={muon: {lr: 4.0e-4}}",))
    )
    assert adamw.checkpoints.bytes - muon.checkpoints.bytes == 4 * matrices
    assert adamw.configured_memory is not None
    assert muon.configured_memory is not None
    saved = adamw.configured_memory.total_bytes - muon.configured_memory.total_bytes
    assert saved == pytest.approx(4 * matrices / 128, abs=2)
    one = 24 * 5 * (4 * (4 * 1024**3 + 2 * 1024**3) + 2 * (4 * 1024**2 * 4096 + 2 * 1024**3))
    assert muon.phases[0].orthogonalising == pytest.approx(one / 128)
    plain = adamw.phases[0]
    assert plain.optimizer == 0.0
    assert muon.phases[0].step_seconds > plain.step_seconds == plain.compute + plain.network
    text = render_text(muon)
    assert "orthogonalising" in text
    assert f"8 B x {matrices:,} / 128 ranks" in text
    assert f"- 4 B x {matrices:,} " in text


def test_the_share_is_that_which_a_run_recorded(tmp_path: Path) -> None:
    """The median of its steps, of which some may have none."""
    log = RunLog(open_store(str(tmp_path)), 1, flush_seconds=0.0)
    for step, share in enumerate([0.3, 0.5, 0.31, None, 0.1]):
        log.add_metrics({"kind": "step", "step": step, "seconds": 1.0, **({} if share is None else {"mfu": share})})
    assert log.close()
    found = of("roberta-base", mfu=str(tmp_path)).phases[0].utilisation
    assert found.share == pytest.approx(0.305)
    assert found.measured


@pytest.mark.parametrize("told", ["0,3", "nowhere/run"])
def test_what_is_neither_share_nor_run_is_refused(told: str, tmp_path: Path) -> None:
    with pytest.raises(EstimateError), contextlib.chdir(tmp_path):
        of("roberta-base", mfu=told)
    assert not list(tmp_path.iterdir())


def test_memory_of_xlnet_counts() -> None:
    """155 GB at a batch of 8,192 in bf16, over all ranks (DESIGN: XLNet's memory)."""
    parts = fixed_memory(load("xlnet-large"), trained_count=1, ranks=128, stage=1, rows=8192 // 128)
    remembered = next(part for part in parts if part.what == "memory of earlier tokens")
    assert 128 * remembered.bytes == 8192 * 384 * 1024 * 24 * 2


@pytest.mark.long
@pytest.mark.parametrize("name", list(bundled()))
def test_every_bundled_recipe_can_be_estimated(name: str) -> None:
    found = of(name, nodes=1)
    assert found.seconds > 0
    assert all(0 < phase.forward < phase.model <= phase.executed for phase in found.phases)
    assert found.recipe.name in render_text(found)
