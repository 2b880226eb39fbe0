"""Predictions of an exported model with nothing but transformers: what a user would write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from launcher.after.tasks.examples import Questions, Sentences, TaggedSentences

_CLASSES = {
    "tagging": transformers.AutoModelForTokenClassification,
    "span": transformers.AutoModelForQuestionAnswering,
}


@torch.no_grad()
def predictions(folder: Path, kind: str, examples: Any, threshold: float | None) -> Any:
    """As `FinetuneOutcome.predictions`, for examples that fit into the model whole."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    loader = _CLASSES.get(kind, transformers.AutoModelForSequenceClassification)
    model, report = loader.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model.eval()
    match examples:
        case Sentences():
            pairs = () if examples.second is None else (list(examples.second),)
            inputs = tokenizer(
                list(examples.first), *pairs, truncation=True, padding=True, return_tensors="pt"
            )
            logits = model(**inputs).logits.numpy()
            return logits[:, 0] if kind == "regression" else logits.argmax(-1)
        case TaggedSentences():
            return tuple(_tags(tokenizer, model, " ".join(words), words) for words in examples.words)
        case Questions():
            given = zip(examples.ids, examples.questions, examples.contexts, strict=True)
            return {
                name: _answer(tokenizer, model, question, context, threshold)
                for name, question, context in given
            }


def _tags(tokenizer: Any, model: Any, text: str, words: tuple[str, ...]) -> tuple[int, ...]:
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    labels = model(**encoded).logits[0].argmax(-1).tolist()
    tags, start = [], 0
    for word in words:
        inside = range(start, start + len(word))
        # The piece that holds the word's first character, or the space before it by itself.
        space = [i for i, (a, b) in enumerate(offsets) if (a, b) == (start - 1, start) and start]
        first = [i for i, (a, b) in enumerate(offsets) if a < b and (a in inside or a < start < b)]
        tags.append(labels[(space + first)[0]])
        start += len(word) + 1
    return tuple(tags)


def _answer(tokenizer: Any, model: Any, question: str, context: str, threshold: float | None) -> str:
    encoded = tokenizer(question, context, return_offsets_mapping=True, return_tensors="pt")
    places = encoded.sequence_ids(0)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    null = encoded["input_ids"][0].tolist().index(tokenizer.cls_token_id)
    output: Mapping[str, torch.Tensor] = model(**encoded)
    start, end = (output[name][0].double().numpy() for name in ("start_logits", "end_logits"))
    inside = [index for index, place in enumerate(places) if place == 1]
    spans = [
        (a, b)
        for a in inside
        for b in inside
        if a <= b < a + 30 and context[offsets[a][0] : offsets[b][1]].strip()
    ]
    best = max(spans, key=lambda span: start[span[0]] + end[span[1]])
    score = start[best[0]] + end[best[1]]
    none = np.float32(output["start_logits"][0, null]) + np.float32(output["end_logits"][0, null])
    if threshold is not None and none - score > threshold:
        return ""
    return context[offsets[best[0]][0] : offsets[best[1]][1]].strip()
