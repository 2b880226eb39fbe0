"""Every family with every objective: it learns in a few steps, on rows as the data service makes them, or is refused
with a reason. `tests/determinism/test_compositions.py` trains the same cells on two ranks, killed and resumed."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from data_service.samples.make import cut_block, cutting_key, make_rows, masking_key
from data_service.samples.masking import MaskingTables
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.samples.texts import ClassTokenPlace
from data_service.types import Block
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import embedded_languages
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.recipe.network import objective_module
from tests.support.data.corpora import NEVER_MASKED, SPECIAL
from tests.support.models.compositions import FAMILIES, LANGUAGES, OBJECTIVES, Row, model_of, refused
from tests.support.models.small_networks import first_pass, turns

VOCAB, LENGTH, ROWS, STEPS = 48, 24, 6, 5
CELLS = list(product(FAMILIES, OBJECTIVES))


def learnable_text() -> Block:
    """Sentences that count up: a token tells its neighbours."""
    rng = np.random.default_rng(1)
    sentences = [
        (start + np.arange(length)) % (VOCAB - len(NEVER_MASKED)) + len(NEVER_MASKED)
        for start, length in zip(rng.integers(0, VOCAB, 60), rng.integers(4, 9, 60), strict=True)
    ]
    ends = np.cumsum([0, *map(len, sentences)])
    return Block(np.concatenate(sentences).astype(np.uint16), ends, np.arange(0, 61, 6))


@cache
def batch_of(row_number: int, layout: ClassTokenPlace, known: tuple[str, ...]) -> Batch:
    """The first rows of the text, cut and masked as an objective of the table asks; `known`: the model's languages."""
    row = OBJECTIVES[row_number]
    languages = LANGUAGES if row.packing == "translations" else LANGUAGES[:1]
    block, masking = learnable_text(), row.terms.masking
    spec = StreamSpec(
        sources=(SourceSpec(name="text", uri="-", manifest_fingerprint="0" * 64, languages=languages),),
        languages=known,
        input=row.input,
        length=LENGTH,
        masking=masking,
        lanes=ROWS if row.packing == "lanes" else None,
        layout=layout,
        special=SPECIAL,
        never_masked=NEVER_MASKED,
        vocab_size=VOCAB,
        seed=1,
    )
    cuts = cut_block(block, spec, cutting_key(spec, 0, 0, 0))
    words = None if masking.unit == "token" else np.arange(VOCAB) % 2 == 0
    rows = make_rows(block, cuts, 0, ROWS, spec, masking_key(spec, 0, 0, 0), MaskingTables(words))
    return to_batch(rows, torch.device("cpu"))


def loss_of(module: ObjectiveModule, batch: Batch) -> torch.Tensor:
    terms = [term for found in turns(module, batch, first_pass(module, [batch])[0]) for term in found.terms]
    assert {term.name for term in terms} == module.target_counts(batch).keys()
    assert all(term.targets == module.target_counts(batch)[term.name] for term in terms)
    return torch.stack([term.weight * term.loss_sum / max(1, term.targets) for term in terms]).sum()


@pytest.mark.default_cases(12)
@pytest.mark.heavy
@pytest.mark.parametrize(("family", "row"), CELLS, ids=[f"{family}-{row.name}-{row.packing}" for family, row in CELLS])
def test_it_learns_or_is_refused_with_a_reason(family: str, row: Row) -> None:
    config, found = model_of(family, VOCAB), refused(family, row)
    if found:
        assert all(refusal.what and refusal.remedy and refusal.path for refusal in found)
        if any(refusal.path[0] == "objective" for refusal in found):
            with pytest.raises(ModelError):
                objective_module(config, row.terms)
        return
    torch.manual_seed(0)
    module = objective_module(config, row.terms)
    layout: ClassTokenPlace = "cls_last" if row.name == "contrastive" and family == "XLNet" else "cls_first"
    batch = batch_of(OBJECTIVES.index(row), layout, embedded_languages(config))
    initialise(module, 0.1)
    if row.terms.distil is not None:
        teacher = Teacher(row.terms.distil.teachers[0].model.model_copy(update={"vocab": VOCAB}))
        initialise(teacher, 0.3)
        hold_teachers(module, [teacher])
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=5e-3), list[float]()
    for _ in range(STEPS):
        torch.manual_seed(1)
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
