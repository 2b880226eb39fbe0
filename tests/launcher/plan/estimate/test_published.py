"""Published runs, reproduced from our counts: FLOPs, utilisation and training times that their authors state."""

import re
from pathlib import Path

import pytest

from encoder_core.families import albert
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.electra import ElectraConfig
from launcher.plan.estimate.estimate import estimate_recipe
from launcher.plan.estimate.utilisation import REFERENCE_RUNS, assume_utilisation
from launcher.runtime.capacity.devices import Cluster, find_gpu
from launcher.runtime.capacity.workload import MicrobatchShape, objective_cost
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.objective import RecipeObjective
from tests.support.models import official

MLM, NSP, RTD = (
    RecipeObjective.model_validate({name: {} for name in names}) for names in (["mlm"], ["mlm", "nsp"], ["mlm", "rtd"])
)


def flops(model: ModelConfig, objective: RecipeObjective, length: int, targets: int) -> int:
    """Forward and backward of one row."""
    return objective_cost(model, objective, MicrobatchShape(1, length, targets), "bf16").model


MLPERF_TOKENS = 247_000 * 8 / 7760  # of a sequence, on average


@pytest.mark.parametrize(
    ("model", "objective", "rows_per_second", "length", "targets", "tflops"),
    [
        (official.BERT_LARGE, NSP, 272, 128, 20, 64),  # DeepSpeed on a V100, as its authors count
        (official.BERT_LARGE, NSP, 52, 512, 80, 53),
        (official.BERT_LARGE, NSP, 580, 128, 20, 0.45 * 312),  # NVIDIA: about 45 % of an A100's peak
        (
            official.BERT_LARGE,
            NSP,
            7760 / 8,
            round(MLPERF_TOKENS),
            round(0.15 * MLPERF_TOKENS),
            0.48 * 989,
        ),  # of an H100's
        (
            official.MODERNBERT_BASE,
            MLM,
            304_000 / 1024,
            1024,
            307,
            0.25 * 989,
        ),  # 30 % masked; about 25 % of an H100's
    ],
)
def test_throughputs_that_authors_state(
    model: ModelConfig,
    objective: RecipeObjective,
    rows_per_second: float,
    length: int,
    targets: int,
    tflops: float,
) -> None:
    reached = rows_per_second * flops(model, objective, length, targets) / 1e12
    assert reached == pytest.approx(tflops, rel=0.03)


@pytest.mark.parametrize(
    ("model", "objective", "rows", "length", "published"),
    [
        (official.BERT_BASE, MLM, 256e6, 512, 6.4e19),
        (official.BERT_LARGE, MLM, 256e6, 512, 1.9e20),
        (official.ELECTRA_SMALL, RTD, 128e6, 128, 1.4e18),
        (official.ELECTRA_BASE, RTD, 256 * 766e3, 512, 6.4e19),
        (official.ELECTRA_LARGE, RTD, 2048 * 400e3, 512, 7.1e20),
        (official.ROBERTA_LARGE, MLM, 8000 * 500e3, 512, 3.2e21),
        (official.ALBERT_XXLARGE, MLM, 4096 * 1.5e6, 512, 3.1e22),
    ],
)
def test_training_flops_that_electra_states(
    model: ModelConfig, objective: RecipeObjective, rows: float, length: int, published: float
) -> None:
    """Clark et al. 2020, and their flops_computation.py: the backward pass counts as one forward pass, embeddings are
    looked up by a dense product, 15.625 % is masked; and small operations count, 5 % or less but in small models."""
    targets = round(0.15625 * length)
    forward = flops(model, objective, length, targets) / 3
    networks = [model, model.generator] if isinstance(model, ElectraConfig) else [model]
    looked_up = sum(2 * length * _width(network) * network.vocabulary_size for network in networks)
    ours = 2 * rows * (forward + looked_up)
    small = model.hidden < 512
    assert ours == pytest.approx(published, rel=0.10 if small else 0.05)


def _width(model: ModelConfig) -> int:
    return model.embedding if isinstance(model, albert.AlbertConfig | ElectraConfig) else model.hidden


@pytest.mark.long
def test_roberta_large_took_a_day_for_a_fifth_of_its_steps() -> None:
    """Liu et al. 2019, section 5: 100k steps of 8,192 rows on 1,024 V100 took about a day, 8 % of their peak: with that
    we say a day. With DeepSpeed's utilisation of a year later and a p3dn's network, less than half of it."""
    settings = ("phases.0.steps=100000", "microbatch=8", "schedule.warmup=6000")
    recipe = load("roberta-large-160gb", (*settings, "reduce_dtype=bf16"))  # fairseq adds up in half precision
    cluster = Cluster(128, 8, find_gpu("V100"), mtbf=1e9)
    days = {mfu: estimate_recipe(recipe, cluster, mfu).seconds / 86400 for mfu in ("0.08", None)}
    assert days["0.08"] == pytest.approx(1.0, abs=0.2)
    assert 0.25 < days[None] < 0.5


def test_electra_small_took_four_days_on_one_v100() -> None:
    """1M steps, about four days: 2.7 % of the tensor cores' peak, in fp32. Narrow models are assumed to reach that, so
    this shows no more than that the arithmetic is consistent."""
    recipe = load("electra-small")
    found = estimate_recipe(recipe, Cluster(1, 1, find_gpu("V100"), mtbf=1e9))
    assert found.seconds / 86400 == pytest.approx(4.0, rel=0.15)


def test_known_runs_are_those_of_the_measurements() -> None:
    """Each of ours has a line in RESULTS-gpu.md with its share; each names its source."""
    table = (Path(__file__).parents[3] / "bench" / "RESULTS-gpu.md").read_text("utf-8")
    for known in REFERENCE_RUNS:
        assert 0 < known.share < 1
        name, _, ours = known.source.partition(", tests/bench/RESULTS-gpu.md")
        rows = re.findall(
            rf"^\| {re.escape(name)}, {known.length:,} \|(?:[^|]*\|){{5}} ([\d.]+) % \|", table, re.MULTILINE
        )
        assert (ours == "" and f"{known.share:.1%}"[:-1] in rows) or name == known.source


@pytest.mark.parametrize(
    ("recipe", "gpu", "share"),
    [
        ("bert-large", "H200", 0.361),
        ("bert-large", "A100-80", 0.45),
        ("roberta-base", "H100", 0.301),
        ("deberta-v3-base", "H100", 0.122),
        ("xlnet-base", "H100", 0.122),
        ("modernbert-base", "H200", 0.264),
        ("electra-small", "L4", 0.03),
    ],
)
def test_a_share_is_that_of_the_most_similar_run(recipe: str, gpu: str, share: float) -> None:
    model = load(recipe).model
    assert assume_utilisation(model, 512, find_gpu(gpu)).share == share
