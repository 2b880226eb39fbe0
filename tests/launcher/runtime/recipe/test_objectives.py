"""Inputs, objectives and models that do not go together are refused, with place, reason and remedy."""

import pytest

from data_service.tokenizers.load import from_files
from launcher.errors import RecipeError
from launcher.runtime.recipe.checks import tokenizer_issues
from launcher.runtime.recipe.load import load

XLNET, ELECTRA = "xlnet-base", "electra-base"
VECTORS = ("objective={contrastive: {}}", "input={packing: pairs}")
PAIRS = "{packing: segment_pair}"


@pytest.mark.parametrize(
    ("name", "assignments", "place", "problem"),
    [
        (XLNET, ("objective={mlm: {}}", "input={packing: full_sentences}"), "objective", "xlnet is not"),
        ("bert-base", ("objective={plm: {}}",), "objective", "bert is not trained by plm"),
        (XLNET, ("objective={rtd: {}}", "input={packing: full_sentences}"), "objective", "rtd needs mlm"),
        (XLNET, ("objective={mlm: {}, rtd: {}}", "input={packing: full_sentences}"), "objective", "xlnet"),
        (XLNET, ("objective.mlm={}",), "objective", "plm cannot be combined with mlm"),
        ("bert-base", ("objective={nsp: {}}",), "objective", "nsp needs mlm"),
        ("bert-base", ("objective={}",), "objective", "give at least one of mlm"),
        ("bert-base", ("objective.sop={}",), "objective.sop", "nsp and sop need the same label"),
        (
            "bert-base",
            ("objective.nsp.weight={start: 0, end: 0, steps: 5}",),
            "objective.nsp.weight",
            "would be 0 in every step",
        ),
        ("bert-base", ("phases.0.weights={sbo: 2}",), "phases.0.weights.sbo", "phase sets a weight for sbo"),
        ("roberta-base", ("objective.mlm.weight={start: 0, end: 1, steps: 5}",), "objective", "all terms"),
        ("roberta-base", ("objective.nsp={}",), "objective.nsp", "full_sentences rows have none"),
        ("bert-base", ("input={packing: ordered_pair}",), "objective.nsp", "ordered_pair rows have none"),
        ("xlnet-base", ("objective.contrastive={}",), "objective", "contrastive cannot be combined with plm"),
        ("deberta-v3-base", ("objective.contrastive={}",), "objective.rtd.embeddings", "two updates a step"),
        ("eurobert-210m", ("objective.contrastive={}",), "model.dropout", "differ only by dropout"),
        ("bert-base", ("objective={contrastive: {}, nsp: {}}",), "objective", "nsp needs mlm, not"),
        (
            "simcse-base",
            ("objective.contrastive.matryoshka=[1024, 64]",),
            "objective.contrastive.matryoshka",
            "the largest width is 1024, but a vector has only 768 numbers",
        ),
        (
            "simcse-base",
            ("objective.contrastive.matryoshka=[64, 64]",),
            "objective.contrastive.matryoshka",
            "the largest first",
        ),
        ("simcse-base", ("model.dropout=0", "model.attention_dropout=0"), "model.dropout", "differ only by"),
        (
            "contrastive-base",
            ("phases.0.batch={sequences: 1}", "microbatch=1"),
            "phases.0.batch.sequences",
            "but the batch has only one",
        ),
        ("contrastive-base", ("objective={mlm: {}}",), "input.packing", "whole texts to be compared"),
        ("simcse-base", ("input={packing: full_sentences}",), "input.packing", "rows are running text"),
        ("albert-base", (f"input={PAIRS}",), "objective.sop", "segment_pair rows have none"),
        ("spanbert-base", ("objective.mlm={unit: token}",), "objective.sbo", "the unit of masks is token"),
        ("bert-base", ("model.token_types=1",), "model.token_types", "the model has one token type"),
        (XLNET, ("input={packing: full_sentences}",), "objective.plm", "continue from step to step, but"),
        ("roberta-base", ("input={packing: lanes}",), "input.packing", "the objective is another"),
        (XLNET, ("phases.0.batch={tokens: 4096}",), "phases.0.batch", "the batch is given in tokens"),
        (XLNET, ("phases.0.batch={sequences: 33}", "microbatch=11"), "phases.0.batch.sequences", "33 lanes"),
        (XLNET, ("phases.0.length=260",), "phases.0.length", "256 reused tokens"),
        (XLNET, ("model.reuse=128",), "model.reuse", "the next row begins 256 "),
        (XLNET, ("checkpoint.keep_every.steps=250",), "checkpoint.keep_every.steps", "checkpoints are saved at"),
        (XLNET, ("objective.plm.predict=508",), "objective.plm.predict", "508 targets, half in each part"),
        (XLNET, ("phases.0.length=300",), "objective.plm.predict", "do not fit the 256 reused and 41 new"),
    ],
)
def test_what_does_not_go_together(name: str, assignments: tuple[str, ...], place: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(name, assignments)
    assert f" {place}: " in caught.value.problem or f"{place} = " in caught.value.problem
    assert problem in caught.value.problem
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "assignments"),
    [
        ("roberta-base", (f"input={PAIRS}", "objective.nsp={}")),  # told apart by the separator alone
        (
            "roberta-base",
            ("input={packing: sentence_pair}", "objective.nsp={}", "phases.0.batch={tokens: 65536}"),
        ),
        ("bert-base", ("objective.nsp=null",)),
        ("roberta-base", ("objective.rtd={}",)),
        ("bert-base", ("objective.rtd={}",)),  # its generator tells next sentences, too
        ("bert-base", ("objective.sbo={}", "objective.mlm={unit: span}")),
        (
            "spanbert-base",
            ("input={packing: ordered_pair}", "objective.sop={weight: {start: 1, end: 0, steps: 9}}"),
        ),
        ("albert-base", ("phases.0.weights={sop: 0.5}",)),
        (ELECTRA, ("objective={mlm: {}}",)),
        ("bert-base", ("model.token_types=1", "objective.nsp=null", "input={packing: full_sentences}")),
        ("deberta-v2-xlarge", ("input={packing: ordered_pair}", "objective.sop={}")),
        (XLNET, ("model.memory=0", "model.reuse=0")),  # rows without a past
        (XLNET, ("phases.0.batch={sequences: 33}", "microbatch=11", "input.both_directions=false")),
        (XLNET, ("phases.0.length=300", "objective.plm.predict=83")),
        *((name, VECTORS) for name in (XLNET, ELECTRA, "deberta-v3-base", "albert-base")),
        ("contrastive-base", ("phases.0.batch={sequences: 1}", "microbatch=1", "input.negatives=1")),
        ("simcse-base", ("model.dropout=0", "objective.contrastive.matryoshka=[768, 64]")),
    ],
)
def test_objectives_that_go_together_load(name: str, assignments: tuple[str, ...]) -> None:
    load(name, assignments)


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.mark.parametrize(
    ("name", "place", "problem"),
    [
        ("albert-base", ("objective", "mlm", "unit"), "masking by ngram needs words"),
        ("spanbert-base", ("objective", "mlm", "unit"), "masking by span needs words"),
        (XLNET, ("objective", "plm", "unit"), "masking by whole_word needs words"),
    ],
)
def test_words_are_masked_only_with_a_tokenizer_that_knows_them(
    name: str, place: tuple[str, ...], problem: str
) -> None:
    wordless = from_files({"vocab.txt": "\n".join((*SPECIAL, "##a", "##b")).encode()})
    (found,) = tokenizer_issues(load(name), wordless)
    assert found.path == place
    assert found.what.startswith(problem)
    assert not tokenizer_issues(load("bert-base"), wordless), "it masks by token"
    assert not tokenizer_issues(load(name), from_files({"vocab.txt": "\n".join((*SPECIAL, "a", "##b")).encode()}))


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    tokenizer = from_files({"vocab.txt": "\n".join((*SPECIAL, "a", "##b")).encode()})
    (found,) = tokenizer_issues(load("bert-base", ("model.vocab=6",)), tokenizer)
    assert (found.path, found.what) == (
        ("model", "vocab"),
        "the tokenizer has 7 ids, the model's vocabulary only 6",
    )
