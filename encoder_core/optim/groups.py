"""Parameter groups: which parameters have weight decay, a trust ratio, Muon's update or a scaled learning rate."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, assert_never

from torch import nn

from encoder_core.layers.parameters import AttentionBias, IntoHeads, JoinedLayout, JoinedLinear, OutOfHeads
from encoder_core.optim.lamb import TRUST_RATIO
from encoder_core.optim.muon import JOINED_KEY, MATRICES_KEY, matrix_shapes
from encoder_core.optim.settings import Decayed
from encoder_core.optim.updates import ALL_PARAMETERS, LR_SCALE, UPDATE_GROUP

UpdateGroups = Mapping[str, Sequence[nn.Parameter]]
"""The names of a step's updates, in order, with the parameters that each update changes."""

_UNSCALED: Mapping[str, float] = MappingProxyType({})  # no learning rate is scaled


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    decayed: Decayed = "no_bias_norm",
    update_groups: UpdateGroups | None = None,
    matrices: bool = False,
    rates: Mapping[str, float] = _UNSCALED,
) -> list[dict[str, Any]]:
    """Return parameter groups for any of our optimizers, in the order of update groups and then of the model's
    parameters.

    Tied parameters appear once. LayerNorm and biases have no trust ratio (ALBERT).

    Args:
        decayed: which parameters have weight decay; see `Decayed`.
        update_groups: parameters by update; None: one update changes all.
        matrices: whether hidden matrices have separate groups (for Muon), one for each `JoinedLayout`.
        rates: factors of the learning rate by parameter name (`objectives/modules/mup.py`); 1 if missing. Weight decay
            is divided by the factor, so that learning rate times weight decay stays the same.
    """
    plain = _norms_and_biases(model)
    undecayed = _undecayed_ids(model, decayed, plain)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    apart = {id(its.weight): its for its in hidden_matrices(model).values()} if matrices else {}
    order = list(update_groups or (ALL_PARAMETERS,))
    group_of = {id(p): name for name, params in (update_groups or {}).items() for p in params}
    groups: dict[tuple[str, bool, bool, bool, JoinedLayout | None, float], list[nn.Parameter]] = defaultdict(list)
    for name, p in trained:
        joined = apart[id(p)].joined if id(p) in apart else None
        marks = id(p) in undecayed, id(p) in plain, id(p) in apart, joined
        groups[group_of.get(id(p), ALL_PARAMETERS), *marks, rates.get(name, 1.0)].append(p)
    return [
        {
            "params": params,
            "weight_decay": 0.0 if is_undecayed else weight_decay / rate,
            TRUST_RATIO: not is_plain,
            MATRICES_KEY: is_matrix,
            JOINED_KEY: joined,
            LR_SCALE: rate,
            UPDATE_GROUP: update_group,
        }
        for (update_group, is_undecayed, is_plain, is_matrix, joined, rate), params in sorted(
            groups.items(), key=lambda group: order.index(group[0][0])
        )
    ]


class HiddenMatrix(NamedTuple):
    """The weight of a projection. `joined`: how several projections are interleaved in it; None: there is one."""

    weight: nn.Parameter
    joined: JoinedLayout | None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix in the weight."""
        return matrix_shapes(self.weight.shape, self.joined)


def hidden_matrices(model: nn.Module) -> dict[str, HiddenMatrix]:
    """Return by name the projection weights inside layers, which Muon updates. Tied weights appear once; frozen
    weights are included.

    Embeddings are excluded, even position tables inside a layer. So are heads and the projection of the embeddings:
    these work on the vocabulary, where AdamW does better.
    """
    projections = {
        id(module.weight): module.joined if isinstance(module, JoinedLinear) else None
        for module in model.modules()
        if isinstance(module, nn.Linear | IntoHeads | OutOfHeads)
    }
    return {
        name: HiddenMatrix(p, projections[id(p)])
        for name, p in model.named_parameters()
        if id(p) in projections and _layer_index(name) >= 0
    }


def _undecayed_ids(model: nn.Module, decayed: Decayed, plain: set[int]) -> set[int]:
    """Return the Python ids of the parameters without weight decay. `plain`: ids of norms and biases."""
    match decayed:
        case "all":
            return set()
        case "no_bias_norm":
            return plain
        case "xlnet":
            attention = (module for module in model.modules() if isinstance(module, AttentionBias))
            return plain - {id(module.bias) for module in attention}
        case _:
            assert_never(decayed)


def _norms_and_biases(model: nn.Module) -> set[int]:
    """Return the Python ids of all parameters of norms and of all biases."""
    norms = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm)
        for p in module.parameters()
    }
    return norms | {id(p) for name, p in model.named_parameters() if name.endswith("bias")}


_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _layer_index(name: str) -> int:
    """Return the index of the layer that a parameter belongs to, by its name; -1 if it is in no layer."""
    found = _LAYER_NUMBER.search(name)
    return int(found[1]) if found else -1
