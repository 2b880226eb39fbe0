"""Filling masks with an exported model by our own code: the candidates that transformers' model gives, and texts as the
rule of unmasking, written once more on transformers' model, fills them. BART writes, token by token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_service.errors import TokenizerError
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from encoder_core.errors import ModelError
from encoder_core.families.bart import BartConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig
from launcher.after.fill.fill import MaskFiller, TextWriter, predict_masks
from launcher.errors import OptionError
from tests.support.checks.command import maskfleet
from tests.support.models.written import export_model
from tests.support.runs.small_runs import prepare_corpus


def export_untrained(folder: Path, shape: ModelConfig, build: Callable[[Any], torch.nn.Module], heads: Heads) -> Path:
    """A model with large weights, so that its candidates differ clearly."""
    prepare_corpus(folder)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    config = shape.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    model = build(config)
    torch.manual_seed(0)
    initialise(model, std=0.5)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    out = open_store(folder / "model")
    export_model(parameters.__getitem__, config, tokenizer.save_files(), out, heads)
    return folder / "model"


SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "feed_forward": 64}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = RobertaConfig(**SHAPE, max_length=64)
    return export_untrained(tmp_path_factory.mktemp("roberta"), shape, masked_language_model, "mlm")


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = BartConfig(**SHAPE, max_length=40)
    return export_untrained(tmp_path_factory.mktemp("bart"), shape, DenoiseConfig().build, "denoise")


@pytest.mark.parametrize(
    "sentence", ["every rank reads its <mask> and the loss falls", "<mask> is lost", "the loss <mask>"]
)
def test_candidates_are_those_of_transformers(exported: Path, sentence: str) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForMaskedLM.from_pretrained(exported)
    encoded = tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**encoded).logits
    place = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    best = logits[0, place].softmax(-1).topk(5)
    guesses = MaskFiller(exported).top_candidates(sentence, 5)
    assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert [guess.text for guess in guesses] == [tokenizer.decode([i]) for i in best.indices.tolist()]


def test_more_candidates_than_tokens_are_all_tokens(exported: Path) -> None:
    filler = MaskFiller(exported)
    probabilities = [guess.probability for guess in filler.top_candidates("the <mask> falls", 10**6)]
    assert sum(probabilities) == pytest.approx(1)
    assert len(probabilities) < 10**6


def test_a_model_that_predicts_no_masks_says_so(tmp_path: Path, exported: Path) -> None:
    config = XlnetConfig(layers=1, hidden=32, heads=2, feed_forward=64, vocab=320)
    parameters = dict(PlmConfig().build(config).named_parameters())
    files = {name: (exported / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    export_model(lambda name: parameters[name].detach(), config, files, open_store(tmp_path), "plm")
    with pytest.raises(ModelError, match=r"\bxlnet\b.*\bhead\b"):
        MaskFiller(tmp_path)


@pytest.mark.parametrize("sentence", ["no mask here", "<mask> and <mask>"])
def test_exactly_one_mask(exported: Path, sentence: str) -> None:
    with pytest.raises(TokenizerError, match=r"\bone <mask>"):
        MaskFiller(exported).top_candidates(sentence, 3)


@pytest.mark.parametrize("steps", [1, 3, 5, 20])
def test_the_surest_are_kept_step_by_step(exported: Path, steps: int) -> None:
    """At temperature 0, by the rule: predict all masks, keep the surest, as many a step as the others to one."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForMaskedLM.from_pretrained(exported)
    ids = tokenizer("every<mask><mask><mask> reads the<mask><mask>.", return_tensors="pt")["input_ids"]
    masked = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
    each = [5 // min(steps, 5) + (step < 5 % min(steps, 5)) for step in range(min(steps, 5))]
    for keep in each:
        with torch.no_grad():
            scores = model.eval()(input_ids=ids).logits[0].double()
        scores[:, tokenizer.all_special_ids] = float("-inf")
        best = scores.softmax(-1).max(-1)
        surest = sorted(masked, key=lambda place: -float(best.values[place]))[:keep]
        for place in surest:
            ids[0, place] = best.indices[place]
            masked.remove(place)
    assert not masked
    filled = MaskFiller(exported).fill("every <mask:3> reads the <mask> <mask>.", steps=steps)
    assert filled == tokenizer.decode(ids[0, 1:-1])


def test_draws_belong_to_the_seed(exported: Path) -> None:
    filler = MaskFiller(exported)
    texts = [filler.fill("<mask:12>", steps=6, temperature=1.5, seed=seed) for seed in (1, 2, 1, 2)]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert texts[0] != texts[1]


def test_ids_are_drawn_from_the_softmax_at_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator)
    never = torch.tensor([2, 6])
    draws = torch.rand(40_000, generator=generator, dtype=torch.float64)
    ids, confidence = predict_masks(logits.expand(len(draws), 7), never, 0.7, draws)
    allowed = logits.double().index_fill(0, never, float("-inf"))
    shares = torch.bincount(ids, minlength=7) / len(draws)
    expected = (allowed / 0.7).softmax(-1)
    assert (shares - expected).abs().max() < 4 * (expected * (1 - expected) / len(draws)).sqrt().max()
    assert not shares[never].any()
    torch.testing.assert_close(confidence, allowed.softmax(-1)[ids])


def test_no_mask_and_too_long_a_text_are_refused(exported: Path) -> None:
    filler = MaskFiller(exported)
    with pytest.raises(TokenizerError, match="<mask>"):
        filler.fill("nothing to do")
    with pytest.raises(TokenizerError, match=r"\b66 tokens\b.*\b64\b"):
        filler.fill("<mask:64>")


def test_the_command_fills_and_shows_candidates(exported: Path) -> None:
    filler, many, one = MaskFiller(exported), "the <mask:4> is lost", "<mask> is lost"
    filled = maskfleet("fill", str(exported), many, "--steps", "2", "--json")
    assert json.loads(filled) == {"text": filler.fill(many, steps=2)}
    shown = maskfleet("fill", str(exported), one, "--count", "2", "--json").splitlines()
    assert [json.loads(line)["text"] for line in shown] == [guess.text for guess in filler.top_candidates(one, 2)]


TEXT = "every rank <mask> its rows and the <mask> falls"


@pytest.mark.long
def test_the_text_is_what_transformers_writes(writing: Path) -> None:
    """The likeliest token each time, special ones left out but the last, up to the longest row."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(writing)
    model = AutoModelForSeq2SeqLM.from_pretrained(writing).eval()
    read = tokenizer(TEXT.replace(" <mask>", "<mask>"), return_tensors="pt").input_ids
    end = model.config.eos_token_id
    assert model.config.decoder_start_token_id == end
    never = [i for i in tokenizer.all_special_ids if i != end]
    written = [end, tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id]
    while len(written) < 40:
        with torch.no_grad():
            logits = model(input_ids=read, decoder_input_ids=torch.tensor([written])).logits[0, -1]
        logits[never] = float("-inf")
        if int(logits.argmax()) == end:
            break
        written.append(int(logits.argmax()))
    assert len(written) > 4
    assert TextWriter(writing).write(TEXT) == tokenizer.decode(written[2:])


@pytest.mark.long
def test_written_text_belongs_to_the_seed(writing: Path) -> None:
    writer = TextWriter(writing)
    texts = [writer.write(TEXT, 2.0, seed) for seed in (1, 2, 1, 2)]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("text", ["nothing is hidden", "two <mask:2>"])
def test_a_mask_without_a_number_is_needed(writing: Path, text: str) -> None:
    with pytest.raises(TokenizerError):
        TextWriter(writing).write(text)


@pytest.mark.long
def test_the_command_writes(writing: Path) -> None:
    found = json.loads(maskfleet("fill", str(writing), TEXT, "--json"))
    assert found == {"text": TextWriter(writing).write(TEXT)}
    with pytest.raises(OptionError):
        maskfleet("fill", str(writing), TEXT, "--steps", "3")
