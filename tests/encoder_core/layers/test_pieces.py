"""Compiled layers against the same layers in Python: losses and gradients of every family, on rows of any lengths."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.layers import pieces as pieces_module
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.trials.compile_trial import try_compilation
from encoder_core.trials.trial_network import TrialSubject, random_batch
from tests.support.models.small_networks import NETWORKS, SHAPE, Network, build, full_rows, memory, turns

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")
BY_NAME = {network.name: network for network in NETWORKS}
LONG = ("deberta v3", "xlnet", "modernbert with dropout", "eurobert with dropout", "electra")
SOME = ["roberta", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
STEPS, RATE = 4, 0.1


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """No test leaves anything compiled. The checks of shapes, which only tests have, cannot be compiled."""
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def pieces_for(network: Network, backend: str) -> Pieces:
    """Compiled as a run would; whatever is then not among it is an error."""
    pieces = Pieces(backend)
    networks = [network.model]
    if network.objective.rtd is not None:
        networks.append(network.model.generator)
    tried = try_compilation(TrialSubject(tuple(networks), torch.float32, CPU, SHAPE.rows, SHAPE.length), pieces)
    assert tried.is_right, tried
    torch.compiler.set_stance("fail_on_recompile")
    return pieces


def trained(module: ObjectiveModule, batch: Batch, remembered: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Losses of some steps of plain descent, and the last gradients."""
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        losses = [
            sum(term.loss_sum / max(1, term.targets) for term in turn.terms)
            for turn in turns(module, batch, remembered)
        ]
        module.zero_grad(set_to_none=True)
        sum(losses).backward()  # type: ignore[union-attr]
        found |= {f"loss {step} {i}": loss.detach() for i, loss in enumerate(losses)}  # type: ignore[union-attr]
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p.sub_(RATE * p.grad)
    return found | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def ensure_equal(network: Network, pieces: Pieces, batch: Batch, tolerance: float) -> None:
    """Both from the same weights, with the same draws."""
    found = []
    for compiled in (None, pieces):
        module = build(network)
        remembered = memory(network, module, batch)
        compile_layers(module, compiled)
        found.append(trained(module, batch, remembered))
    exact, same = found
    assert exact.keys() == same.keys()
    for name, value in exact.items():
        assert float((same[name] - value).norm()) <= tolerance * (float(value.norm()) + 1e-3), name


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_pieces_have_no_break_and_no_second_graph_for_other_rows(name: str) -> None:
    network = BY_NAME[name]
    pieces = pieces_for(network, "eager")
    assert not torch._dynamo.utils.counters["graph_break"]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows, length in ((1, 40), (5, 33), (7, 21)):
        ensure_equal(network, pieces, full_rows(network, replace(SHAPE, rows=rows, length=length)), 0.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.long
@pytest.mark.parametrize("known", [["recompile_limit", "isolate_recompiles"], ["recompile_limit"], []])
def test_each_torch_compiles_many_graphs_of_a_piece(monkeypatch: pytest.MonkeyPatch, known: list[str]) -> None:
    """torch 2.13's compiler takes both limits, 2.12's one, 2.11's none; the limit is 8 unless it is told."""
    if not set(known) <= signature(torch.compile).parameters.keys():
        pytest.skip("this torch is older")
    monkeypatch.setattr(pieces_module, "_SUPPORTED_LIMITS", frozenset(known))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=8):
        pieces = Pieces("eager")
        for dimensions in range(12):
            pieces.run_piece(_successor, torch.nn.Module(), torch.ones(4, *[1] * dimensions))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 12


def _successor(layer: torch.nn.Module, x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_rows_of_any_lengths_use_what_was_compiled(lengths: list[int]) -> None:
    torch._dynamo.reset()
    network = BY_NAME["modernbert with dropout"]
    batch = random_batch(network.model, lengths, CPU)
    ensure_equal(network, pieces_for(network, "eager"), batch, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["roberta", "xlnet"])
def test_checkpointed_activations_use_what_was_compiled(name: str) -> None:
    network = BY_NAME[name]
    pieces, batch = pieces_for(network, "eager"), full_rows(network)
    found = []
    for checkpointed in (False, True):
        module = build(network, recompute=checkpointed)
        remembered = memory(network, module, batch)
        compile_layers(module, pieces)
        found.append(trained(module, batch, remembered))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.long
@pytest.mark.cluster  # inductor starts compilers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_every_family_compiled_is_itself_within_rounding(network: Network) -> None:
    pieces = pieces_for(network, "inductor")
    tolerance = 1e-5 if network.objective.contrastive is None else 1e-4  # likenesses are divided by 0.05
    for rows, length in ((SHAPE.rows, SHAPE.length), (2, 51), (9, 24)):
        ensure_equal(network, pieces, full_rows(network, replace(SHAPE, rows=rows, length=length)), tolerance)


@pytest.mark.long
def test_a_compiler_that_computes_something_else_is_found() -> None:
    def wrong(graph: torch.fx.GraphModule, _: object) -> object:
        return lambda *given: tuple(x * 1.01 for x in graph(*given))

    tried = try_compilation(
        TrialSubject((BY_NAME["roberta"].model,), torch.float32, CPU, 2, 16),
        Pieces(wrong),  # type: ignore[arg-type]
    )
    assert not tried.is_right
    assert not tried.failure
    assert tried.error is not None
    assert tried.error > tried.bound
