"""What is estimated to be kept for the backward pass, against what autograd keeps, for random shapes: on a CPU, and by
the path that attention takes on a GPU, whose rows may be of mixed lengths."""

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from gpu_path import as_on_a_gpu
from step_batch import make_batch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations
from encoder_core.cost.products import Shape
from encoder_core.cost.saved import Kernel
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.terms.composition import activations
from tests.support.models.saved import measured, of_autograd
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, with_forms

pytestmark = pytest.mark.heavy

STATE, LONGEST = torch.float32.itemsize, 64
SHORT = {
    *(
        "distilbert",
        "roberta",
        "bert with relative keys",
        "spanbert",
        "albert",
        "electra",
        "deberta with order",
    ),
    *("deberta v2", "deberta v3", "modernbert with dropout", "xlm", "eurobert", "xlnet"),
}


@dataclass(frozen=True)
class Case:
    """A shape, and what else decides what is kept."""

    shape: Shape
    spread: int
    dropout: float
    checkpointed: bool
    kernel: Kernel

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        draw = random.Random(seed)
        targets = 2 * draw.randint(1, 4)
        kernel: Kernel = draw.choice(("cpu", "gpu"))
        length = draw.randint(max(24, 8 + 3 * targets), 48)
        return cls(
            shape=Shape(2 * draw.randint(1, 4), length, targets),
            spread=draw.randint(0, min(LONGEST - length, length - 5 - 3 * targets)) if kernel == "gpu" else 0,
            dropout=draw.choice([0.0, 0.1]),
            checkpointed=draw.random() < 0.3,
            kernel=kernel,
        )


def tried(network: Network, case: Case) -> None:
    rates = {"dropout": case.dropout, "attention_dropout": case.dropout}
    if isinstance(network.model, PreNormConfig):
        rates["attention_output_dropout"] = case.dropout
    network = replace(network, model=network.model.model_copy(update=rates))
    if network.objective.retromae is not None:  # its decoder pads: of mixed rows it keeps the rectangle
        case = replace(case, spread=0)
    module = build(network, checkpoint_activations=case.checkpointed)
    batch = mixed_rows(network, case)
    remembered = memory(network, module, batch)
    with as_on_a_gpu(module, lambda name: None) if case.kernel == "gpu" else nullcontext():
        found = measured(module, batch, remembered)
    plm = network.objective.plm is not None
    if case.checkpointed and plm:  # what was remembered is an input
        found[0] -= sum(tensor.untyped_storage().nbytes() for tensor in remembered)
    terms, shape = network.objective.terms, replace(case.shape, backwards=plm)
    groups = activations(network.model, terms, shape, case.kernel)
    on_cpu = activations(network.model, terms, shape, "cpu")
    expected = [
        kept(of_autograd(one), case) + (normalised(cpu, case) if case.kernel == "gpu" else 0)
        for one, cpu in zip(groups, on_cpu, strict=True)
    ]
    assert expected == pytest.approx(found, rel=0.15 if case.checkpointed and beside(network) else 0.1), case


def beside(network: Network) -> bool:
    """Vectors, teachers and pairs keep whole numbers of each token, which weigh more than states only 32 wide."""
    objective = network.objective
    return any(term is not None for term in (objective.contrastive, objective.distil, objective.sop))


def kept(activations: Activations, case: Case) -> int:
    return activations.checkpointed(STATE) if case.checkpointed else activations.bytes(STATE)


def normalised(activations: Activations, case: Case) -> int:
    """What torch's RMSNorm of a CPU keeps more. That of sums is computed by a kernel."""
    tensors = activations.outside if case.checkpointed else activations.tensors()
    return sum(tensor.bytes(STATE) for tensor in tensors if tensor.what == "normalised")


def mixed_rows(network: Network, case: Case) -> Batch:
    """Rows in pairs that are as much longer as shorter than the shape's."""
    shape = case.shape
    if network.objective.plm is not None or not case.spread:
        return full_rows(network, shape)
    lengths = [shape.length + sign * case.spread for _ in range(shape.rows // 2) for sign in (1, -1)]
    batch = make_batch(lengths, 500)
    inside = torch.arange(shape.targets_per_row) // 2 * 5 + torch.arange(shape.targets_per_row) % 2 + 4
    at: Tensor = (batch.cu_seqlens[:-1, None] + inside).flatten()
    return with_forms(network, replace(batch, target_positions=at, target_ids=batch.tokens[at]))


@pytest.mark.parametrize("kernel", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "network", [n for n in NETWORKS if n.name in SHORT], ids=lambda network: network.name
)
def test_what_is_kept_is_within_ten_percent_of_the_estimate(network: Network, kernel: Kernel) -> None:
    seed = random.Random(f"{network.name} {kernel}").randrange(1 << 30)
    tried(network, next(case for i in range(99) if (case := Case.drawn(seed + i)).kernel == kernel))


@pytest.mark.long
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_what_is_kept_of_many_shapes_is_within_ten_percent_of_the_estimate(network: Network) -> None:
    for seed in range(24):
        tried(network, Case.drawn(seed))


def test_a_kernel_keeps_a_key_of_a_token_where_dropout_had_a_mask() -> None:
    """As many bytes, exactly: of RoBERTa's dropout, masks of the embeddings alone, and keys of sums."""
    network = next(n for n in NETWORKS if n.name == "roberta")
    shape, rates = Shape(2, 32, 4), ({"dropout": 0.0}, {"dropout": 0.1})
    found, expected = [], []
    for rate in rates:
        model = network.model.model_copy(update=rate | {"attention_dropout": 0.0})
        module = build(replace(network, model=model)).train()
        with as_on_a_gpu(module, lambda name: None):
            found += measured(module, full_rows(network, shape))
        (one,) = activations(model, network.objective.terms, shape, "gpu")
        expected.append(one.bytes(STATE))
    sums = 2 * network.model.layers * shape.tokens
    assert found[1] - found[0] == expected[1] - expected[0] == 8 * sums + shape.tokens * network.model.hidden
