"""A student's layers and its teacher's: the loss against a plain statement for every family; what is refused."""

from collections.abc import Mapping

import pytest
import torch

from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.distil import CosineConfig, DistilConfig, HiddenConfig, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.objectives.term import TermConfig
from tests.encoder_core.objectives.test_distil import FAMILIES, batch_of
from tests.support.models.parity import states_of
from tests.support.models.terms import SIZE

STUDENTS: dict[str, ModelConfig] = {**FAMILIES, "xlm": XlmConfig(**SIZE | {"feed_forward": 64})}
TEACHER = BertConfig(**SIZE | {"layers": 5, "hidden": 24})


def student(config: ModelConfig, teacher: ModelConfig, **settings: object) -> tuple[MultitaskModel, Teacher]:
    source = TeacherSource(uri="somewhere", model=teacher)
    terms: Mapping[str, TermConfig] = {
        "mlm": MlmConfig(),
        "distil": DistilConfig(teachers=(source,)),
        "hidden": HiddenConfig.model_validate(settings),
    }
    torch.manual_seed(2)
    model, network = compose(config, terms).double(), Teacher(teacher).double()
    initialise(model, std=0.2)
    initialise(network, std=0.3)
    hold_teachers(model, [network])
    assert isinstance(model, MultitaskModel)
    return model, network


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("family", STUDENTS)
def test_the_loss_is_the_sum_over_layers_of_mean_squares(family: str, activations: bool) -> None:
    learnt, batch = (1, 0, 5), batch_of()
    model, teacher = student(STUDENTS[family], TEACHER, layers=learnt, projection=24)
    model.encoder.checkpoint_activations = activations
    (term,) = (term for term in model(batch).terms if term.name == "hidden")
    its = states_of(teacher.encoder, batch)
    expected = torch.zeros(())
    for own, number in zip(states_of(model.encoder, batch), learnt, strict=True):
        difference = model.get_submodule("hidden_projection")(own) - its[number].detach()
        expected = expected + difference.square().mean(-1).sum()
    torch.testing.assert_close(term.loss_sum, expected, rtol=1e-9, atol=1e-9)
    assert term.targets == len(batch.tokens)
    weights = list(model.parameters())
    found, wanted = (torch.autograd.grad(loss, weights, allow_unused=True) for loss in (term.loss_sum, expected))
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize(
    ("own", "its", "expected"),
    [(4, 12, (0, 3, 6, 9, 12)), (2, 4, (0, 2, 4)), (3, 3, (0, 1, 2, 3)), (1, 2, (0, 2))],
)
def test_layers_are_paired_evenly(own: int, its: int, expected: tuple[int, ...]) -> None:
    """TinyBERT's: the n-th of the student learns the 3 n-th of twelve."""
    assert HiddenConfig().teacher_layers(own, its) == expected


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    config = FAMILIES["bert"]
    model, teacher = student(config, config)
    assert not hasattr(model, "hidden_projection")
    teacher.load_state_dict(dict(model.named_parameters()), strict=False)
    sums = {term.name: float(term.loss_sum) for term in model(batch_of()).terms}
    assert sums["hidden"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("teacher", "settings", "message"),
    [
        (TEACHER, {}, "the teacher's states are 24 wide, but the student's are 16"),
        (FAMILIES["bert"], {"projection": 24}, "the teacher's states are 16 wide, but the student's are 24"),
        (TEACHER, {"projection": 24, "layers": (0, 1)}, "embeddings and 2 layers"),
        (TEACHER, {"projection": 24, "layers": (0, 1, 6)}, "of a teacher with 5 layers"),
    ],
)
def test_states_that_cannot_be_compared_are_refused(
    teacher: ModelConfig, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        student(FAMILIES["bert"], teacher, **settings)


def test_it_needs_one_teacher() -> None:
    terms: dict[str, TermConfig] = {"mlm": MlmConfig(), "hidden": HiddenConfig()}
    with pytest.raises(ModelError, match=r"\bnone\b"):
        compose(FAMILIES["bert"], terms)
    sources = tuple(TeacherSource(uri=name, model=FAMILIES["bert"]) for name in ("a", "b"))
    two = {
        "mlm": MlmConfig(),
        "distil": DistilConfig(teachers=sources),
        "cosine": CosineConfig(),
        "hidden": HiddenConfig(),
    }
    with pytest.raises(ModelError, match=r"\bteacher\b.*\b2\b"):
        compose(FAMILIES["bert"], two)
