"""A small network of a run's family, and rows for it, on which kernels and compiled layers are tried.

Every kernel, and the compiled layers, compute gradients of the same loss, with the same dropout. They are judged by the
largest relative error of a parameter's gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from encoder_core.batch import Batch, batch_without_targets
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.clm import ClmConfig
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule
from encoder_core.objectives.modules.multitask import multitask_model
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig

_LAYERS, _SEED = 2, 1  # layers of the small network, seed of its weights and rows
_VOCABULARY = 2500  # number of ids: more than a tile of the loss's kernel, and not a multiple of it
_WEIGHT_STD = 0.05  # standard deviation of weights, large enough for attention scores to differ as after training
_TOKENS_PER_TARGET = 7  # every seventh token is a target
_SMALL_GRADIENT_SHARE = 1e-3  # smallest divisor of a gradient's error, as a share of the norm of all gradients


@dataclass(frozen=True)
class TrialSubject:
    """A run's networks and shapes, for which kernels are tried.

    Attributes:
        networks: networks of the objective, which may differ in width.
        dtype: dtype of weights and activations.
        rows, length: number of rows in a microbatch, and tokens in a row.
        causal: whether the run has causal rows, on which kernels are then also tried.
        stable: whether the run's optimizer is StableAdamW, whose kernels are then also tried.
    """

    networks: tuple[ModelConfig, ...]
    dtype: torch.dtype
    device: torch.device
    rows: int
    length: int
    causal: bool = False
    stable: bool = False

    def to_json(self) -> dict[str, Any]:
        networks, dtype = _NETWORKS_TYPE.dump_python(self.networks, mode="json"), str(self.dtype)
        apart = {"networks": networks, "dtype": dtype.removeprefix("torch."), "device": str(self.device)}
        return vars(self) | apart

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TrialSubject":
        networks, dtype = _NETWORKS_TYPE.validate_python(fields["networks"]), getattr(torch, fields["dtype"])
        apart = {"networks": networks, "dtype": dtype, "device": torch.device(fields["device"])}
        return cls(**{**fields, **apart})


def torch_settings() -> dict[str, Any]:
    """Return the torch settings of this process on which a trial's results depend, as JSON."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
    }


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Apply the `torch_settings` of the process that has started the trial.

    Only settings that differ are set, because setting one, even to its current value, changes the key under which torch
    caches compiled code.
    """
    here = torch_settings()
    if settings["threads"] != here["threads"]:
        torch.set_num_threads(settings["threads"])
    if settings["deterministic"] != here["deterministic"]:
        torch.set_deterministic_debug_mode(settings["deterministic"])
    if settings["precision"] != here["precision"]:
        torch.set_float32_matmul_precision(settings["precision"])


_NETWORKS_TYPE = TypeAdapter(tuple[ModelConfig, ...])  # converts `TrialSubject.networks` to and from JSON


def shrink_network(network: ModelConfig, longest: int, reuse: int | None = None) -> ModelConfig:
    """Return the network with the same widths, two layers, a small vocabulary, and rows of at most `longest` tokens.

    `reuse`: largest number of tokens of a row that are appended to XLNet's memory.
    """
    less: dict[str, object] = {
        "layers": min(_LAYERS, network.layers),
        "vocab": _VOCABULARY,
        "max_length": longest,
    }
    if reuse is not None and network.recurrence is not None:
        less["reuse"] = min(network.recurrence.reuse, reuse)
    return network.model_copy(update=less)


def build_module(network: ModelConfig, subject: TrialSubject) -> ObjectiveModule:
    """Build the network with its family's objective (mlm, plm for XLNet, denoise for BART; also clm if the run has
    causal rows), on the subject's device and in its precision.
    """
    module: ObjectiveModule
    with torch.device(subject.device):
        if network.permutes:
            module = PlmConfig().build(network)
        elif network.has_decoder:
            module = DenoiseConfig().build(network)
        elif subject.causal:
            module = multitask_model(network, [MlmConfig(), ClmConfig()])
        else:
            module = masked_language_model(network)
    torch.manual_seed(_SEED)
    initialise(module, _WEIGHT_STD, network.initializer)
    return module.to(subject.dtype)


def random_batch(network: ModelConfig, lengths: Sequence[int], device: torch.device) -> Batch:
    """Return rows of these lengths with random tokens, in the form that the network's objective needs. Every seventh
    token is a target.
    """
    draws = torch.Generator().manual_seed(_SEED)
    batch = _random_rows(network, lengths, draws)
    targets = torch.arange(0, len(batch.tokens), _TOKENS_PER_TARGET)
    batch = replace(batch, target_positions=targets, target_ids=batch.tokens[targets])
    if network.permutes:
        order = torch.cat([torch.randperm(length, generator=draws) for length in lengths])
        batch = replace(batch, order=order, segments=(batch.positions >= min(lengths)).long())
    if network.has_decoder:
        fewer = [length - length // 4 for length in lengths]
        batch = replace(batch, causal=True, corrupted=_random_rows(network, fewer, draws))
    return batch.to(device)


def _random_rows(network: ModelConfig, lengths: Sequence[int], draws: torch.Generator) -> Batch:
    return batch_without_targets(torch.randint(network.vocabulary_size, (sum(lengths),), generator=draws), lengths)


def run_passes(module: ObjectiveModule, batch: Batch, *, backward: bool = True) -> None:
    """Run a forward pass and, if `backward`, a backward pass, with the same dropout at every call."""
    torch.manual_seed(_SEED)
    found: LossSums = module(batch)
    if found.memory:  # run again with XLNet's memory, which gives attention other shapes
        found = module(batch, found.memory)
    if backward:
        loss: Tensor = torch.stack([term.loss_sum / max(1, term.targets) for term in found.terms]).sum()
        loss.backward()  # type: ignore[no-untyped-call]


def compute_gradients(module: ObjectiveModule, *batches: Batch) -> dict[str, Tensor]:
    """Return the gradients by parameter name, in fp64, summed over the batches. The module keeps no gradients."""
    for batch in batches:
        run_passes(module, batch)
    found = {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient; infinity if a gradient is missing or not finite."""
    if found.keys() != exact.keys():
        return float("inf")
    whole = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    errors = [
        (found[name] - gradient).norm() / torch.maximum(gradient.norm(), _SMALL_GRADIENT_SHARE * whole)
        for name, gradient in exact.items()
    ]
    worst = float(torch.stack(errors).max())
    return worst if worst == worst else float("inf")
