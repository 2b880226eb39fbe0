"""The tools that exports are made for: pipelines, truncation, fine-tuning, sentence embeddings, for every family."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, LENGTH, export

LONG = " ".join(WORDS * 20)
MASKED = {"bert", "roberta", "albert", "spanbert", "deberta", "deberta-v2", "modernbert", "eurobert", "xlm"}
NETWORKS = [(name, folder) for name, family in FAMILIES.items() for folder in family.folders]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family, exported once."""
    root = tmp_path_factory.mktemp("exports")
    for name, family in FAMILIES.items():
        export(family, root / name)
    return root


TYPED = {"bert", "albert", "spanbert", "electra", "deberta", "deberta-v2", "deberta-v3", "xlnet"}


@pytest.mark.parametrize(("name", "folder"), NETWORKS)
def test_text_is_cut_at_the_models_length_and_pairs_have_the_types_that_it_knows(
    exports: Path, name: str, folder: str
) -> None:
    """Whatever the tokenizer's own layout: XLM would take types for words, ModernBERT refuses them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exports / name / folder)
    assert tokenizer.model_max_length == LENGTH
    cut = tokenizer([LONG, "a rank"], truncation=True, padding=True)
    assert {len(ids) for ids in cut["input_ids"]} == {LENGTH}
    pair = tokenizer(LONG, LONG, truncation=True)["input_ids"]
    assert len(pair) == LENGTH
    whole = tokenizer(LONG, LONG, truncation=False, verbose=False)["input_ids"]
    specials = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert [i for i in pair if i in specials] == [i for i in whole if i in specials]
    given = tokenizer("a rank", "reads its rows", return_tensors="pt")
    if name not in TYPED:
        assert set(given) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        transformers.AutoModel.from_pretrained(exports / name / folder)(**given)


@pytest.mark.parametrize(("name", "folder"), NETWORKS)
def test_pipelines_take_long_text(exports: Path, name: str, folder: str) -> None:
    where = str(exports / name / folder)
    features = transformers.pipeline("feature-extraction", model=where, truncation=True)(LONG)
    assert torch.tensor(features).shape[:2] == (1, LENGTH)
    if name in MASKED or folder == "generator":
        fill = transformers.pipeline("fill-mask", model=where, tokenizer_kwargs={"truncation": True})
        guesses = fill(f"a {fill.tokenizer.mask_token} {LONG}")
        assert all(0 < guess["score"] <= 1 for guess in guesses)
    if name == "xlnet":
        written = transformers.pipeline("text-generation", model=where)("a rank reads", max_new_tokens=2)
        assert written[0]["generated_text"].startswith("a rank reads")


@pytest.mark.parametrize(("name", "folder"), NETWORKS)
def test_a_classifier_does_not_mind_its_batch_and_takes_a_training_step(exports: Path, name: str, folder: str) -> None:
    """XLNet's class token is its last, and must not become padding."""
    where = exports / name / folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(where, num_labels=2).eval()
    alone, batch = (
        tokenizer(texts, truncation=True, padding=True, return_tensors="pt") for texts in (["a rank"], ["a rank", LONG])
    )
    with torch.no_grad():
        logits = [model(**given).logits[0] for given in (alone, batch)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)

    words = model.train().get_input_embeddings().weight
    before = words.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outcome = model(**batch, labels=torch.tensor([0, 1]))
    outcome.loss.backward()
    assert torch.isfinite(outcome.loss)
    used = batch["input_ids"][batch["attention_mask"].bool()].unique()
    assert (words.grad[used].norm(dim=1) > 0).all()
    optimizer.step()
    assert not torch.equal(words, before)


@pytest.mark.long
@pytest.mark.parametrize(("name", "folder"), NETWORKS)
def test_sentence_transformers_embed_long_text(exports: Path, name: str, folder: str) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(exports / name / folder), device="cpu")
    assert model.max_seq_length == LENGTH
    together = model.encode([LONG, "a rank reads its rows"])
    alone = model.encode("a rank reads its rows")
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together[1], alone, rtol=1e-4, atol=1e-5)
    assert not np.allclose(together[0], together[1])
