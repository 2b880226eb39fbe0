"""A student's losses beside the others, for every family: values and gradients against plain statements, and memory."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers import sizes
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.distil import CosineConfig, DistilConfig, DistilledTokens, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.objectives.sentence_pairs import SopConfig
from encoder_core.objectives.term import TermConfig
from tests.support.models.parity import make_batch
from tests.support.models.saved import Largest
from tests.support.models.terms import SIZE, families

TEMPERATURE = 3.0
FAMILIES: dict[str, ModelConfig] = {**families(), "roberta": RobertaConfig(**SIZE)}


def teachers(*configs: ModelConfig) -> list[Teacher]:
    torch.manual_seed(6)
    made = [Teacher(config).double() for config in configs]
    for teacher in made:
        initialise(teacher, std=0.3)
    return made


def student(
    config: ModelConfig, its: list[ModelConfig], places: DistilledTokens, **further: TermConfig
) -> MultitaskModel:
    sources = tuple(TeacherSource(uri="somewhere", model=model) for model in its)
    terms: dict[str, TermConfig] = {
        "mlm": MlmConfig(),
        "distil": DistilConfig(temperature=TEMPERATURE, places=places, teachers=sources),
        "cosine": CosineConfig(),
    }
    torch.manual_seed(2)
    model = compose(config, terms | further).double()
    initialise(model, std=0.2)
    hold_teachers(model, teachers(*its))
    assert isinstance(model, MultitaskModel)
    return model


def batch_of(seed: int = 3) -> Batch:
    return make_batch([9, 20, 5], 50, segments=False, seed=seed)


def stated(model: MultitaskModel, networks: list[Teacher], batch: Batch, places: DistilledTokens) -> dict[str, Tensor]:
    """The terms of the student, with every logit held at once."""
    everywhere = torch.arange(len(batch.tokens))
    at = everywhere if places == "all" else batch.target_positions
    asked = replace(batch, target_positions=at, target_ids=batch.tokens[at])
    logits = model.logits(asked)
    with torch.no_grad():
        said = [teacher(asked) for teacher in networks]
        p = torch.stack([(F.linear(*scores) / TEMPERATURE).softmax(-1) for _, scores, _ in said]).mean(0)
    kl = TEMPERATURE**2 * (p * (p.log() - (logits / TEMPERATURE).log_softmax(-1))).sum()
    states = model.encoder(batch)
    cosine = torch.stack([(1 - F.cosine_similarity(states, h, dim=-1)).sum() for h, *_ in said]).mean()
    mlm = F.cross_entropy(model.logits(batch), batch.target_ids, reduction="sum")
    return {"mlm": mlm, "distil": kl, "cosine": cosine}


@pytest.mark.parametrize("places", ["all", "targets"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_of_any_family_learns_from_teachers_of_any_family(family: str, places: DistilledTokens) -> None:
    config, others = FAMILIES[family], list(FAMILIES.values())
    its = [others[(others.index(config) + 1) % len(others)], FAMILIES["deberta_v2"]]
    model, batch = student(config, its, places), batch_of()
    found = {term.name: term.loss_sum for term in model(batch).terms}
    expected = stated(model, teachers(*its), batch, places)
    weights = [p for p in model.parameters() if p.requires_grad]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    actual = torch.autograd.grad(sum(found.values()), weights, allow_unused=True)
    wanted = torch.autograd.grad(torch.stack(list(expected.values())).sum(), weights, allow_unused=True)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if a is None else a, torch.zeros_like(a) if b is None else b, rtol=1e-7, atol=1e-9
        )


def test_beside_sentence_order_and_masks() -> None:
    """Nothing forbids it: each term has the loss that it has alone."""
    config, batch = FAMILIES["albert"], batch_of()
    labelled = replace(batch, pair_labels=torch.tensor([0, 1, 1]))
    all_three = student(config, [FAMILIES["bert"]], "all", sop=SopConfig())
    without = student(config, [FAMILIES["bert"]], "all")
    own = dict(all_three.named_parameters())
    with torch.no_grad():
        for name, p in without.named_parameters():
            p.copy_(own[name])
    found = {term.name: term.loss_sum.item() for term in all_three(labelled).terms}
    assert found.keys() == {"mlm", "distil", "cosine", "sop"}
    for term in without(batch).terms:
        assert found[term.name] == pytest.approx(float(term.loss_sum), rel=1e-12)


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    config, batch = FAMILIES["bert"], batch_of()
    model = student(config, [config], "all")
    teacher = teachers(config)[0]
    teacher.load_state_dict(dict(model.named_parameters()), strict=False)
    hold_teachers(model, [teacher])
    losses = model(batch)
    sums = {term.name: float(term.loss_sum) for term in losses.terms}
    assert sums["distil"] == pytest.approx(0, abs=1e-9)
    assert sums["cosine"] == pytest.approx(0, abs=1e-9)
    assert losses.metrics["distil_correct"] == len(batch.tokens)


def test_no_step_of_training_holds_the_logits_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that forward and backward make has a chunk's logits, where one network's would have eight
    times as many."""
    vocab, chunk = 512, 512 * 16
    monkeypatch.setitem(sizes.CHUNK_LOGITS, "cpu", chunk)
    wide = {**SIZE, "vocab": vocab, "max_length": 64}
    config = BertConfig(**wide)
    model = student(config, [BertConfig(**wide), RobertaConfig(**wide)], "all")
    batch = make_batch([64, 64], vocab, segments=False, seed=1)
    with Largest() as largest:
        sum(term.loss_sum for term in model(batch).terms).backward()
    assert largest.elements <= chunk < len(batch.tokens) * vocab / 4


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"distil"}, "needs mlm"),
        ({"mlm", "cosine"}, "there are none"),
        ({"mlm", "distil", "cosine", "wider"}, "states of width 24, the student 16"),
        ({"mlm", "distil", "layers"}, "cannot be initialised with layers"),
    ],
)
def test_what_cannot_be_is_refused(terms: set[str], reason: str) -> None:
    shape = SIZE | ({"hidden": 24} if "wider" in terms else {})
    sources = (TeacherSource(uri="somewhere", model=BertConfig(**shape)),)
    layers = (0, 2) if "layers" in terms else None
    known = {
        "mlm": MlmConfig(),
        "distil": DistilConfig(teachers=sources, layers=layers),
        "cosine": CosineConfig(),
    }
    with pytest.raises(ModelError, match=reason):
        compose(FAMILIES["bert"], {name: term for name, term in known.items() if name in terms})
