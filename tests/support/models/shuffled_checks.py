"""The own test of a made-up objective, as a newcomer writes it: what is hidden, how it learns, what it costs.

`tests/architecture/test_habit_of_an_objective.py` copies it to tests/encoder_core/objectives/, and runs it there.
"""

from itertools import pairwise

import numpy as np
import torch

from data_service.rng import stream_key
from data_service.samples.make import make_rows
from data_service.samples.packing import pack
from data_service.samples.samples import Samples
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block
from encoder_core.families.bert import BertConfig
from encoder_core.layers.initialise import initialise
from encoder_core.train.collate import to_batch
from encoder_core.train.metrics import means
from encoder_core.train.step import Sums
from launcher.runtime.capacity.passes import counted_passes
from launcher.runtime.capacity.workload import Shape
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import RecipeObjective, exported_heads

MODEL = BertConfig(layers=2, hidden=16, heads=2, feed_forward=32, max_length=32, vocab=60, dropout=0.0)
OBJECTIVE = RecipeObjective.model_validate({"shuffled": {"rate": 0.4}})


def samples() -> Samples:
    spec = StreamSpec(
        sources=(SourceSpec(name="s", uri="", manifest_fingerprint=""),),
        length=32,
        seed=1,
        masking=OBJECTIVE.masking,
        special=SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3),
        never_masked=(0, 1, 2, 3, 4),
        vocab_size=60,
    )
    assert StreamSpec.model_validate_json(spec.model_dump_json()) == spec
    block = Block(np.arange(90, dtype=np.uint16) % 50 + 10, np.array([0, 90]), np.array([0, 1]))
    return make_rows(block, pack(block, "contiguous", 32), 0, 3, spec, stream_key("x"))


def test_tokens_change_places() -> None:
    rows = samples()
    for first, last in pairwise(rows.offsets):
        inside = (rows.target_positions >= first) & (rows.target_positions < last)
        assert inside.sum() == 12
        moved = rows.tokens[rows.target_positions[inside]]
        assert (np.roll(rows.target_ids[inside], -1) == moved).all()


def test_it_learns() -> None:
    torch.manual_seed(0)
    module, batch = objective_module(MODEL, OBJECTIVE), to_batch(samples(), torch.device("cpu"))
    initialise(module, 0.1)
    optimizer, losses = torch.optim.Adam(module.parameters(), lr=5e-3), list[dict[str, float]]()
    for _ in range(5):
        optimizer.zero_grad()
        found = module(batch)
        (found.terms[0].loss_sum / found.terms[0].targets).backward()
        optimizer.step()
        sums = Sums()
        sums.add(found)
        losses.append(means(sums.collect()))
    assert losses[-1]["shuffled_loss"] < losses[0]["shuffled_loss"]
    assert losses[0].keys() == {"loss", "shuffled_loss", "shuffled_accuracy", "shuffled_moved"}
    assert losses[0]["shuffled_moved"] == 1


def test_it_costs_what_masked_tokens_cost() -> None:
    masked, shape = RecipeObjective.model_validate({"mlm": {}}), Shape(3, 32, 12)
    counts = [counted_passes(MODEL, each, shape, "fp32") for each in (OBJECTIVE, masked)]
    assert counts[0] == counts[1]
    assert counts[0].model > 0
    assert OBJECTIVE.masking.expected(32, 30) == 12
    assert exported_heads(MODEL, OBJECTIVE) == "mlm"
