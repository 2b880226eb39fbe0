"""Recipes whose phases weigh the sources."""

import re

import pytest

from launcher.errors import RecipeError
from launcher.runtime.recipe import identity
from launcher.runtime.recipe.load import load, parse_recipe
from launcher.runtime.recipe.phase_parts import PhaseMixture
from launcher.runtime.recipe.phases import is_staged, source_shares, source_temperature
from launcher.runtime.recipe.tiny import tiny
from tests.support.checks.command import maskfleet

SOURCES = "corpus.sources={web: {uri: a, weight: %s}, books: {uri: b, weight: %s}}"
PHASES = (
    "phases=[{steps: 60, length: 128, batch: {sequences: 64}, mixture: {weights: {web: 3, books: 1}}}, "
    "{steps: 20, length: 128, batch: {sequences: 64}, mixture: {weights: {books: 2}, most_readings: 4}}, "
    "{steps: 20, length: 128, batch: {sequences: 64}}]"
)
MIXED = (PHASES, "schedule.warmup=10")


def test_shares_are_those_of_the_phase_or_of_the_corpus() -> None:
    recipe = load("roberta-base", (SOURCES % (0.2, 0.6), *MIXED))
    assert is_staged(recipe)
    assert [source_shares(recipe, phase) for phase in recipe.phases] == [
        {"web": 0.75, "books": 0.25},
        {"web": 0.0, "books": 1.0},
        {"web": pytest.approx(0.25), "books": pytest.approx(0.75)},
    ]
    by_size = load("roberta-base", (SOURCES % ("auto", "auto"), *MIXED))
    assert source_shares(by_size, by_size.phases[2]) is None
    assert parse_recipe(recipe.to_yaml(), "again") == recipe


ANNEALED = (
    "corpus.sources={en: {uri: a, weight: auto}, code: {uri: b, weight: auto}, de: {uri: c, weight: auto}, "
    "eo: {uri: d, weight: auto}}",
    "phases=[{steps: 60, length: 128, batch: {sequences: 64}, "
    "mixture: {weights: {en: 0.5, code: 0.1, de: auto}, temperature: 1.428571}}, "
    "{steps: 20, length: 128, batch: {sequences: 64}, "
    "mixture: {weights: {en: 0.4, de: auto, eo: auto}, temperature: 2}}, "
    "{steps: 20, length: 128, batch: {sequences: 64}, mixture: {temperature: 3.333333}}, "
    "{steps: 20, length: 128, batch: {sequences: 64}}]",
    "mixing.temperature=1.25",
    "schedule.warmup=10",
)


def test_languages_enter_late_and_share_out_what_is_left_by_the_temperature_of_the_phase() -> None:
    recipe = load("roberta-base", ANNEALED)
    assert [source_shares(recipe, phase) for phase in recipe.phases] == [
        {"en": 0.5, "code": 0.1, "de": None, "eo": 0.0},
        {"en": 0.4, "code": 0.0, "de": None, "eo": None},
        None,
        None,
    ]
    assert [source_temperature(recipe, phase) for phase in recipe.phases] == [1.428571, 2, 3.333333, 1.25]
    assert parse_recipe(recipe.to_yaml(), "again") == recipe
    assert identity.field_kind("phases.0.mixture.temperature") == "identity"


def test_recipes_without_mixtures_are_as_they_were() -> None:
    plain = load("roberta-base")
    assert not is_staged(plain)
    assert "mixture" not in plain.phases[0].model_dump(mode="json")
    assert identity.field_kind("phases.1.mixture.most_readings") == "operational"
    assert identity.field_kind("phases.1.mixture.weights.books") == "identity"


TWO = "corpus.sources.rare={uri: b, weight: auto}"


def test_a_small_form_keeps_shares_and_has_no_cap() -> None:
    small = tiny(load("roberta-base", (SOURCES % ("auto", "auto"), *MIXED, "phases.1.mixture.steps=90")))
    assert [phase.mixture for phase in small.phases] == [
        PhaseMixture(weights={"web": 3, "books": 1}),
        PhaseMixture(weights={"books": 2}),
        None,
    ]


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("roberta-base", ("phases.0.mixture={weights: {wep: 1}}",), "the phase sets a weight for wep"),
        ("roberta-base", ("phases.0.mixture={weights: {english: 0}}",), "sources have weight 0"),
        ("roberta-base", ("phases.0.mixture={weights: {english: -1}}",), "greater than or equal to 0"),
        ("roberta-base", (TWO, "phases.0.mixture={weights: {english: 1, rare: auto}}"), "add up to 1"),
        ("roberta-base", (TWO, "phases.0.mixture={weights: {english: 1, rare: 1}, temperature: 2}"), "none"),
        ("roberta-base", ("phases.0.mixture={temperature: 0.7}",), "T = 1.42857"),
        ("xlnet-base", ("phases.0.mixture={}",), "rows that continue from step to step"),
        ("contrastive-base", ("phases.0.mixture={}",), "batches of one source"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, settings: tuple[str, ...], problem: str) -> None:
    sources = "corpus.sources={english: {uri: a, weight: auto}}"
    with pytest.raises(RecipeError) as caught:
        load(name, (sources, *settings))
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_the_timeline_shows_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    settings = (SOURCES % ("auto", "auto"), *MIXED)
    shown = maskfleet(
        "recipe", "show", "roberta-base", "--timeline", *(word for one in settings for word in ("--set", one))
    )
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0].endswith("sources")
    assert lines[2].endswith("0.75 web, 0.25 books")
    assert re.search(r"\b1 books, .*\b4 times\b", lines[3])
    assert lines[4].endswith(" size")
