"""A rate of masks that changes from sample to sample: each sample has the rate of its number, alone and among others,
in whichever window and epoch it lies."""

import numpy as np
import pytest

from data_service.samples.diffusion import DiffusionMasking
from data_service.samples.masking import MlmMasking
from data_service.samples.spec import Annealing, SourceSpec, Stage, StreamSpec
from data_service.stream.stream import Stream
from tests.support.data.corpora import (
    NEVER_MASKED,
    originals,
    random_block,
    source_of,
    spec_of,
    targets_per_row,
    write_corpus,
)

START, END, SAMPLES, BEFORE = 0.7, 0.1, 150, 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceSpec, ...]:
    folder = tmp_path_factory.mktemp("annealed")
    return tuple(
        source_of(
            write_corpus(folder / str(number), [random_block(size + number, size) for size in sizes]),
            f"s{number}",
        )
        for number, sizes in enumerate(((900, 600, 700), (800, 500)))
    )


def spec(
    sources: tuple[SourceSpec, ...], start: float = START, end: float = END, most: int | None = None
) -> StreamSpec:
    return spec_of(
        *sources,
        length=32,
        stages=(Stage(phase=0, length=32, units=100, weights=(1, 1)),),
        masking=MlmMasking(rate=start, count="ceil", max_predictions=most),
        annealing=Annealing(end=end, samples=SAMPLES, before=BEFORE),
        input={"packing": "contiguous"},
        window={"samples": 30, "least_tokens": 1, "stretches": 4},
    )


@pytest.mark.parametrize(("start", "end"), [(START, END), (END, START)])
def test_each_sample_has_the_rate_of_its_number(sources: tuple[SourceSpec, ...], start: float, end: float) -> None:
    stream = Stream(spec(sources, start, end))
    assert stream.samples_per_epoch == 100
    for epoch in (0, 1):
        samples = stream.read(epoch, 0, 100)
        number = BEFORE + 100 * epoch + np.arange(100)
        rates = start + (end - start) * np.minimum(number / SAMPLES, 1)
        maskable = np.add.reduceat(~np.isin(originals(samples), NEVER_MASKED), samples.offsets[:-1])
        np.testing.assert_array_equal(targets_per_row(samples), np.ceil(rates * maskable).astype(int))


def test_other_text_and_order_are_those_of_a_constant_rate(sources: tuple[SourceSpec, ...]) -> None:
    constant = spec(sources).model_copy(update={"annealing": None})
    one, other = (Stream(each).read(0, 0, 100) for each in (constant, spec(sources)))
    np.testing.assert_array_equal(originals(one), originals(other))
    assert "annealing" not in constant.model_dump_json()
    assert constant.fingerprint != spec(sources).fingerprint


def test_a_row_keeps_its_most_targets(sources: tuple[SourceSpec, ...]) -> None:
    stream = Stream(spec(sources, most=3))
    assert (targets_per_row(stream.read(0, 0, 100)) <= 3).all()


def test_masked_diffusion_has_no_rate_that_changes(sources: tuple[SourceSpec, ...]) -> None:
    with pytest.raises(ValueError, match=r"\bmlm\b"):
        spec_of(*sources, masking=DiffusionMasking(), annealing=Annealing(end=0.1, samples=9))
