"""The inputs of a model: the tokenizer in the checkpoint's folder, rows of piece ids, padded batches of rows, and
overlapping windows over a text that is longer than the model allows. Also the interface of a kind of task for the
training loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_service.tokenizers.files import check_folder, library_errors
from launcher.after.finetune.settings import TaskMismatch
from launcher.errors import EVALUATE, optional, reason

IGNORED = -100
"""The target of positions that the loss ignores."""
_ANY_LENGTH = 1 << 20  # tokenizers without a maximal length report more than this
_COUNT_FROM_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Model types that number positions from the padding id + 1."""
_DEFAULT_LENGTH = 512  # if neither the model nor its tokenizer has a maximal length
_USE = "fine-tuning"


@dataclass(frozen=True)
class InputRow:
    """An input of T pieces, including special ones.

    Attributes:
        ids: [T] int64 ids of the pieces.
        types: [T] int64 token types; None if the model has none.
        target: target of the row, which depends on the kind of task: a label, [T] labels, or a start and an end.
    """

    ids: NDArray[np.int64]
    types: NDArray[np.int64] | None
    target: NDArray[np.int64] | NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Pieces:
    """A tokenizer that fits a model.

    Attributes:
        tokenizer: a tokenizer of transformers.
        max_length: number of pieces of the longest row.
        left: whether rows are padded on the left, so that the class token stays last (XLNet).
        types: whether the model takes token types.
    """

    tokenizer: Any
    max_length: int
    left: bool
    types: bool

    @property
    def special(self) -> int:
        """Number of special pieces in a row of one text."""
        return int(self.tokenizer.num_special_tokens_to_add(pair=False))

    def row(
        self,
        ids: Sequence[int],
        types: Sequence[int] | None,
        target: NDArray[np.int64] | NDArray[np.float64],
    ) -> InputRow:
        kept = np.asarray(types, np.int64) if self.types and types is not None else None
        return InputRow(np.asarray(ids, np.int64), kept, target)

    def shift(self, row: InputRow, width: int) -> int:
        """Return the position of the row's first piece after padding to `width`."""
        return width - len(row) if self.left else 0

    def batch(self, rows: Sequence[InputRow], device: torch.device) -> dict[str, Tensor]:
        """Return the padded inputs of a model of transformers by name, [rows, longest] int64 each."""
        width = max(len(row) for row in rows)
        padded = {name: np.zeros((len(rows), width), np.int64) for name in ("input_ids", "attention_mask")}
        padded["input_ids"][:] = self.tokenizer.pad_token_id
        if self.types:
            padded["token_type_ids"] = np.full_like(
                padded["input_ids"], getattr(self.tokenizer, "pad_token_type_id", 0)
            )
        for index, row in enumerate(rows):
            start = self.shift(row, width)
            place = (index, slice(start, start + len(row)))
            padded["input_ids"][place], padded["attention_mask"][place] = row.ids, 1
            if self.types and row.types is not None:
                padded["token_type_ids"][place] = row.types
        return {name: torch.from_numpy(values).to(device) for name, values in padded.items()}


def open_pieces(folder: Path, config: Any, max_length: int | None) -> Pieces:
    """Return the tokenizer in `folder`, for the model of `config` there (a configuration of transformers).

    Raises:
        TaskMismatch: if there is none, it does not fit the model, or `max_length` is more than the model takes.
        MissingPackage: if transformers is not installed.
    """
    tokenizer = _load(folder)
    _check_fit(tokenizer, config, folder)
    longest = most_tokens(tokenizer, config) or _DEFAULT_LENGTH
    if max_length is not None and max_length > longest:
        raise TaskMismatch(
            f"max_length {max_length:,} is more than the {longest:,} tokens that the model in {folder} takes",
            remedy=f"give a max_length of at most {longest:,}",
        )
    types = "token_type_ids" in tokenizer.model_input_names
    left = config.model_type == "xlnet"
    tokenizer.padding_side = "left" if left else "right"
    return Pieces(tokenizer, max_length or longest, left=left, types=types)


def _load(folder: Path) -> Any:
    transformers = optional("transformers", _USE, EVALUATE)
    check_folder(folder)
    try:
        with library_errors(str(folder)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # of any kind: see `reason`
        raise TaskMismatch(
            f"{folder} has no tokenizer that transformers reads: {reason(error)}",
            remedy="put tokenizer.json and tokenizer_config.json of the model beside its weights",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise TaskMismatch(
            f"the tokenizer in {folder} is {type(tokenizer).__name__}, which cannot say where in a text its pieces are",
            remedy="put the model's tokenizer.json beside its weights",
        )
    return tokenizer


def _check_fit(tokenizer: Any, config: Any, folder: Path) -> None:
    missing = [role for role in ("pad_token", "cls_token", "sep_token") if getattr(tokenizer, role) is None]
    if missing:
        raise TaskMismatch(
            f"the tokenizer in {folder} has no {' and no '.join(missing)}, which inputs of a task need",
            remedy="use the tokenizer that the model was pretrained with, and say in tokenizer_config.json "
            "which of its pieces have these roles",
        )
    sample = tokenizer("a", "a")
    largest = max(*tokenizer.get_vocab().values(), *sample["input_ids"])
    if largest >= config.vocab_size:
        raise TaskMismatch(
            f"the tokenizer in {folder} does not fit the model there: its largest id is {largest:,}, and the model "
            f"has embeddings for {config.vocab_size:,} pieces",
            remedy="use the tokenizer that the model was pretrained with",
        )
    rows = getattr(config, "type_vocab_size", 0) or 0
    types = max(sample.get("token_type_ids", [0]))
    if config.model_type != "xlnet" and rows and types >= rows:  # XLNet's are relative: same or other
        raise TaskMismatch(
            f"the tokenizer in {folder} gives token type {types}, and the model there has {rows}",
            remedy="use the tokenizer that the model was pretrained with",
        )


def most_tokens(tokenizer: Any, config: Any) -> int | None:
    """Return the length of the longest row that the model has positions for and its tokenizer allows; None if neither
    has a limit.

    Raises TaskMismatch if the tokenizer's limit is not a number above 0.
    """
    told = tokenizer.model_max_length
    if not isinstance(told, int | float) or not told >= 1:
        raise TaskMismatch(
            f"the tokenizer's model_max_length is {told!r}, no number of tokens",
            remedy="correct it in tokenizer_config.json",
        )
    lengths = [int(told)] if told < _ANY_LENGTH else []
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        unused = config.pad_token_id + 1 if config.model_type in _COUNT_FROM_PADDING else 0
        lengths.append(positions - unused)
    return min(lengths, default=None)


Ranges = list[tuple[int, int]]


def window_ranges(pieces: int, room: int, stride: int) -> Ranges:
    """Return ranges of `room` consecutive pieces that cover all `pieces`; each shares `stride` pieces with the previous
    one.

    It is a single range if all pieces fit, also for none. `stride` is lowered to half of `room` if it is larger.
    """
    step = room - min(stride, room // 2)
    ranges = [(0, min(room, pieces))]
    while ranges[-1][1] < pieces:
        start = ranges[-1][0] + step
        ranges.append((start, min(start + room, pieces)))
    return ranges


def best_window(pieces: int, ranges: Ranges) -> NDArray[np.int64]:
    """Return, for each piece, the index of the window that shows most context on the piece's shorter side (Devlin et
    al. 2019, `run_squad.py`): [pieces].

    Of equal windows it is the longest, then the first.
    """
    index = np.arange(pieces)
    begin, end = (np.array(side)[:, None] for side in zip(*ranges, strict=True))
    context = np.minimum(index - begin, end - 1 - index) + 0.01 * np.minimum(end - begin, 10_000) / 10_000
    inside = (begin <= index) & (index < end)
    best: NDArray[np.int64] = np.where(inside, context, -1.0).argmax(0)
    return best


Logits = NDArray[np.float32]
"""Logits of one row: [outputs], or [pieces, outputs] if the head has outputs for each piece."""
Head = Literal["SequenceClassification", "TokenClassification", "QuestionAnswering"]


@dataclass(frozen=True)
class Prepared:
    """Examples as rows. Each kind adds the data that turn predictions for rows into predictions for examples."""

    rows: list[InputRow]


class TaskKind(Protocol):
    """The interface of a kind of task for the training loop.

    Attributes:
        head: name of the head: transformers' class is `AutoModelFor` + `head`.
        outputs: number of outputs for each row, or for each piece.
    """

    @property
    def head(self) -> Head: ...

    @property
    def outputs(self) -> int: ...

    def targets(self, rows: Sequence[InputRow], width: int) -> Tensor:
        """Return the targets of rows padded to `width`: [rows], [rows, width] or [rows, 2]."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over targets, from [rows, outputs] or [rows, width, outputs]."""

    def count(self, rows: Sequence[InputRow]) -> int:
        """Return the number of targets of the rows, over which the loss is averaged."""
