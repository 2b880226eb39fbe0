"""What a run is, and how it is operated: one table, complete."""

import pytest

from launcher.runtime.recipe import identity
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe


def test_every_top_level_field_has_a_row_of_its_own() -> None:
    """A field added to Recipe must be decided upon; a pattern that matches nothing is stale."""
    heads = [pattern.split(".")[0] for pattern, _ in identity.FIELD_KINDS]
    assert set(heads) == set(Recipe.model_fields)
    with pytest.raises(KeyError):
        identity.field_kind("something_new")


@pytest.mark.parametrize(
    "assignment",
    [
        "seed=2",
        "model.layers=3",
        "optimizer.adamw.lr=1",
        "objective.mlm.rate=0.2",
        "precision=bf16",
        "shuffle=uniform",
    ],
)
def test_identity_changes_the_fingerprint(assignment: str) -> None:
    old, new = (identity.identity_fields(load("quickstart", sets)) for sets in ((), (assignment,)))
    assert identity.fingerprint(old) != identity.fingerprint(new)
    assert len(identity.diff_lines(old, new)) == 1


@pytest.mark.parametrize(
    "assignment",
    ["zero=2", "reduce_dtype=fp32", "trainers=8", "name=other", "checkpoint.keep_last=9", "evaluation.samples=7",
     "tokenizer.uri=b", "corpus.sources.text.uri=elsewhere", "data_service.memory=1GiB", "logging.tensorboard=false"],
)  # fmt: skip
def test_how_a_run_is_operated_does_not_change_its_identity(assignment: str) -> None:
    assert identity.identity_fields(load("quickstart")) == identity.identity_fields(load("quickstart", (assignment,)))


@pytest.mark.parametrize("name", ["corpora", "microbatch", "most_readings", "uri", "text"])
def test_a_sources_weight_is_identity_whatever_its_name(name: str) -> None:
    for path in (f"corpus.sources.{name}.weight", f"phases.0.mixture.weights.{name}", f"phases.0.weights.{name}"):
        assert identity.field_kind(path) == "identity"
    assert identity.field_kind(f"corpus.sources.{name}.uri") == "operational"
    assert identity.field_kind(f"phases.0.corpora.{name}") == "operational"


def test_the_fingerprint_does_not_depend_on_order() -> None:
    assert identity.fingerprint({"a": 1, "b": 2}) == identity.fingerprint({"b": 2, "a": 1})
