"""Parameter groups: which parameters decay, have a trust ratio, or have another learning rate."""

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
"""The updates of one step by name, in order, and the parameters that each of them changes."""


_UNSCALED: Mapping[str, float] = MappingProxyType({})


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
        decayed: the parameters that decay.
        update_groups: parameters by update; None: one update for all.
        matrices: whether hidden matrices have groups of their own (Muon's), one for each way in which several are
            joined in a parameter.
        rates: what the learning rate of a parameter is multiplied by, by its name (`objectives/modules/mup.py`).
            Its decay, which optimizers multiply by the rate, stays what it is.
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
    """The weight of a projection. `joined` says how several projections are joined in it; None: there is one."""

    weight: nn.Parameter
    joined: JoinedLayout | None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix in the weight."""
        return matrix_shapes(self.weight.shape, self.joined)


def hidden_matrices(model: nn.Module) -> dict[str, HiddenMatrix]:
    """Return the projections inside layers by name, which are what Muon updates. Tied ones appear once; frozen ones
    are included.

    Embeddings are not among them, not even those of positions inside a layer. Nor are weights outside layers: heads,
    and projections between embeddings and the first layer, touch the vocabulary, where AdamW works better.
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
    """Return the ids of the parameters without weight decay."""
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
    """Return the ids of norms and biases."""
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
