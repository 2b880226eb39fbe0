"""Passes counted without numbers, against the same passes of real tensors, by random shapes and families."""

import random
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from gpu_path import as_on_a_gpu
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.layers.kernel_choice import current_preference, force_kernel
from encoder_core.layers.planned import visible_pair_count
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.train.counting import PassCost, count_module_passes, count_passes
from encoder_core.train.zero_memory import Device
from launcher.runtime.capacity.workload import MicrobatchShape, objective_cost
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import MlmTerm, RecipeObjective
from tests.support.models.small_networks import NETWORKS, SHAPE, Network, build, full_rows, memory, turns

pytestmark = pytest.mark.heavy

SHORT = ("distilbert", "bert with relative keys", "deberta v3", "xlnet", "bart")


@dataclass(frozen=True)
class Case:
    """A shape, and what else decides what is kept."""

    shape: MicrobatchShape
    dropout: float
    checkpointed: bool
    dtype: torch.dtype
    device: Device

    @classmethod
    def drawn(cls, seed: str, device: Device) -> "Case":
        draw = random.Random(seed)
        targets = 2 * draw.randint(1, 4)
        return cls(
            shape=MicrobatchShape(draw.randint(2, 4), draw.randint(max(24, 8 + 3 * targets), 48), targets),
            # torch's own kernels on a GPU (attention without dropout, norms in bf16) keep other tensors than a CPU's.
            dropout=0.1 if device == "cuda" else draw.choice([0.0, 0.1]),
            checkpointed=draw.random() < 0.3,
            dtype=torch.float32 if device == "cuda" else draw.choice([torch.float32, torch.bfloat16]),
            device=device,
        )


def module_of(network: Network, case: Case) -> ObjectiveModule:
    model, objective = network.model, network.objective
    module = objective_module(model, objective, recompute=case.checkpointed)
    if objective.distil is not None:
        hold_teachers(module, [Teacher(source.model) for source in objective.distil.teachers])
    return module


def ensure_equal(network: Network, case: Case) -> None:
    rates = {"dropout": case.dropout, "attention_dropout": case.dropout}
    if isinstance(network.model, PreNormConfig):
        rates["attention_output_dropout"] = case.dropout
    network = replace(network, model=network.model.model_copy(update=rates))
    batch = full_rows(network, case.shape)
    counted = count_module_passes(lambda: module_of(network, case), batch, case.dtype, case.device)
    module = build(network, recompute=case.checkpointed).to(case.dtype)
    with ExitStack() as stack:
        if case.device == "cuda":
            stack.enter_context(as_on_a_gpu(module, lambda name: None))
        found = count_passes(module, batch)
    assert [group.saved for group in counted.bytes] == [group.saved for group in found.bytes], case
    if case.device == "cpu":
        assert (counted.forward, counted.model) == (found.forward, found.model), case
        peaks = [group.peak for group in found.bytes]
        assert [group.peak for group in counted.bytes] == pytest.approx(peaks, rel=1e-3), case


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cuda") for name in SHORT), *((name, "cpu") for name in ("electra", "eurobert"))],
)
def test_what_is_kept_is_what_real_tensors_keep(name: str, device: Device) -> None:
    """To the byte. On a CPU the highest peak and all FLOPs are the same, too."""
    network = next(network for network in NETWORKS if network.name == name)
    ensure_equal(network, Case.drawn(name, device))


@pytest.mark.long
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_what_is_kept_of_many_shapes_is_what_real_tensors_keep(network: Network, device: Device) -> None:
    for seed in range(6):
        ensure_equal(network, Case.drawn(f"{seed}", device))


@pytest.mark.parametrize("name", ["roberta", "albert", "deberta v2", "bart", "deberta taught by roberta"])
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    """On real tensors, with attention as written; of in-place sums of products, which torch does not count, apart."""
    network = next(network for network in NETWORKS if network.name == name)
    module, batch = build(network), full_rows(network)
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with force_kernel("written"):
        remembered = memory(network, module, batch)
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            for losses in turns(module, batch, remembered):
                sum(term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]
        found = count_passes(module, batch)
    assert 0 < found.forward < found.model == counter.get_total_flops()


def counted(network: Network, shape: MicrobatchShape = SHAPE, *, checkpointing: bool = False) -> PassCost:
    return objective_cost(network.model, network.objective, shape, "bf16", checkpointing=checkpointing)


def roberta() -> Network:
    return next(network for network in NETWORKS if network.name == "roberta")


def test_flops_of_an_encoder_by_its_formula() -> None:
    """Six products of each weight matrix, and of scores and values, for both passes; the head for targets."""
    network, model = roberta(), roberta().model
    matrices = model.layers * (4 * model.hidden**2 + 2 * model.hidden * model.feed_forward)
    attention = model.layers * 2 * SHAPE.length * model.hidden
    vocabulary = 64 * -(-model.vocabulary_size // 64)  # as a GPU computes it
    head = SHAPE.rows * SHAPE.targets_per_row * (model.hidden**2 + model.hidden * vocabulary)
    assert counted(network).model == 6 * (SHAPE.tokens * (matrices + attention) + head)


def test_checkpointing_repeats_the_layers_forward_pass_and_keeps_their_inputs() -> None:
    network, model = roberta(), roberta().model
    plain, again = counted(network), counted(network, checkpointing=True)
    layers = 4 * model.hidden**2 + 2 * model.hidden * model.feed_forward + 2 * SHAPE.length * model.hidden
    last = 2 * SHAPE.tokens * model.hidden * model.feed_forward  # torch stops where nothing more is needed
    repeated = 2 * SHAPE.tokens * model.layers * layers
    assert repeated - model.layers * last <= again.model - plain.model <= repeated
    assert again.bytes[0].saved < 0.4 * plain.bytes[0].saved
    assert again.bytes[0].peak < plain.bytes[0].peak


def test_parameters_and_their_gradients_are_left_out() -> None:
    """A vocabulary of 64 times as many ids adds no more than the head's own gradient of them and its work."""
    few, many = (
        counted(replace(roberta(), model=roberta().model.model_copy(update={"vocab": vocabulary})))
        for vocabulary in (512, 512 * 64)
    )
    added = 63 * 512
    assert many.bytes[0].saved - few.bytes[0].saved == 4 * added * (roberta().model.hidden + 1)


@given(length=st.integers(1, 300), window=st.none() | st.integers(1, 320), causal=st.booleans())
def test_pairs_in_sight_are_those_of_a_mask(length: int, window: int | None, causal: bool) -> None:
    at = torch.arange(length)
    ahead = at[:, None] - at
    seen = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    seen &= ahead.abs() <= (length if window is None else window)
    assert visible_pair_count(length, window, causal=causal) == int(seen.sum())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_window_counts_the_pairs_in_sight_by_every_kernel(dropout: float) -> None:
    """Of torch's flash attention and of ours; two of three layers have windows."""
    size = {"layers": 3, "hidden": 32, "heads": 4, "feed_forward": 40, "vocab": 512, "max_length": 256}
    network = Network(
        "modernbert",
        ModernBertConfig.model_validate(size | {"local_attention": 32, "attention_dropout": dropout}),
        RecipeObjective(mlm=MlmTerm()),
    )
    wide = replace(network, model=network.model.model_copy(update={"local_attention": 1024}))
    shape = MicrobatchShape(2, 200, 20)
    out_of_sight = 200**2 - visible_pair_count(200, 16, causal=False)
    found = counted(wide, shape).model - counted(network, shape).model
    assert found == 3 * 2 * 2 * 2 * shape.rows * 32 * out_of_sight


def test_relative_positions_count_as_scores_do() -> None:
    """DeBERTa's two tables, a product for each pair in sight: as many FLOPs as scores and values."""
    deberta = next(network for network in NETWORKS if network.name == "deberta without mask decoder")
    model, lengths = deberta.model, (16, 32, 48)
    found = [counted(deberta, MicrobatchShape(2, length, 2)).model for length in lengths]
    curvature = found[0] - 2 * found[1] + found[2]  # of what grows with the square of the length
    whole = model.layers - 1  # the last layer runs for few tokens
    assert curvature == 3 * 2 * 4 * 2 * model.hidden * whole * (16**2 - 2 * 32**2 + 48**2)


def test_the_kernels_of_this_process_stay_preferred() -> None:
    with force_kernel("padded"):
        before = current_preference()
        counted(roberta(), MicrobatchShape(1, 16, 2))
        assert current_preference() is before


@pytest.mark.parametrize("name", ["roberta", "contrastive"])
def test_vectors_have_a_first_pass(name: str) -> None:
    network = roberta()
    if name == "contrastive":
        network = next(network for network in NETWORKS if network.name == "roberta with vectors")
    assert (counted(network).first_pass > 0) == (name == "contrastive")
