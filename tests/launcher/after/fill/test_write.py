"""Text that an exported encoder and decoder write: token by token as transformers' model, from the same text."""

import json
from pathlib import Path

import pytest
import torch

from data_service.errors import TokenizerError
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.bart import BartConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.denoise import denoising_model
from launcher.after.fill.fill import TextWriter
from launcher.errors import OptionError
from tests.support.checks.command import maskfleet
from tests.support.models.written import export_model
from tests.support.runs.small_runs import prepare_corpus

TEXT = "every rank <mask> its rows and the <mask> falls"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with large weights, so that its choices differ clearly."""
    folder = tmp_path_factory.mktemp("export")
    prepare_corpus(folder)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    shape = BartConfig(layers=2, hidden=32, heads=2, feed_forward=64, max_length=40)
    config = shape.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    model = denoising_model(config)
    torch.manual_seed(0)
    initialise(model, std=0.5)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    out = open_store(folder / "model")
    export_model(parameters.__getitem__, config, tokenizer.save_files(), out, "denoise")
    return folder / "model"


@pytest.mark.long
def test_the_text_is_what_transformers_writes(exported: Path) -> None:
    """The likeliest token each time, special ones left out but the last, up to the longest row."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
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
    assert TextWriter(exported).write(TEXT) == tokenizer.decode(written[2:])


@pytest.mark.long
def test_draws_belong_to_the_seed(exported: Path) -> None:
    writer = TextWriter(exported)
    texts = [writer.write(TEXT, 2.0, seed) for seed in (1, 2, 1, 2)]
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("text", ["nothing is hidden", "two <mask:2>"])
def test_a_mask_without_a_number_is_needed(exported: Path, text: str) -> None:
    with pytest.raises(TokenizerError):
        TextWriter(exported).write(text)


@pytest.mark.long
def test_the_command_writes(exported: Path) -> None:
    found = json.loads(maskfleet("fill", str(exported), TEXT, "--json"))
    assert found == {"text": TextWriter(exported).write(TEXT)}
    with pytest.raises(OptionError):
        maskfleet("fill", str(exported), TEXT, "--steps", "3")
