"""How documents become rows: the settings under a recipe's `input`. The rules are in the other files of this folder."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Share = Annotated[float, Field(ge=0, le=1)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def structures(self) -> int:
        """Number of ways in which a corpus is cut. Each reading of the corpus uses the next one."""
        return 1

    @property
    def repeats(self) -> float:
        """How often a token of the corpus is read in one reading of it, on average and about."""
        return 1.0

    @property
    def texts(self) -> int:
        """Texts of a row, each cut to the phase's length with special tokens of its own."""
        return 1

    def once(self) -> Self:
        """The same with one way of cutting."""
        return self


Packing = Literal["full_sentences", "doc_sentences", "contiguous"]


class Packed(_Input):
    """Rows of one segment; every token once an epoch. See `data_service.samples.packing`.

    RoBERTa's FULL-SENTENCES and DOC-SENTENCES (Liu et al. 2019, section 4.2), and plain cutting.
    """

    packing: Packing


class Drawn(_Input):
    """Rows whose boundaries are drawn.

    Attributes:
        copies: number of ways in which the corpus is cut, each with its own draws (BERT's duplication factor). They are
            read one after another, and then the first again. Their rows are counted in advance.
    """

    copies: PositiveInt = 10

    @property
    def structures(self) -> int:
        return self.copies

    def once(self) -> Self:
        return self.model_copy(update={"copies": 1})


class _RandomPairs(Drawn):
    """Two segments, of which the second follows the first or is drawn from another document.

    Attributes:
        random: of the rows that could have either, the share whose second segment is drawn from elsewhere.
    """

    random: Share = 0.5

    @property
    def repeats(self) -> float:
        # A random second segment, about half a row, is read besides the corpus.
        return 1 / (1 - self.random / 2)


class SegmentPairs(_RandomPairs):
    """Segments of many sentences that fill the row (Devlin et al. 2019, appendix A.2).

    Attributes:
        short: share of documents whose rows are filled to a random shorter length.
    """

    packing: Literal["segment_pair"]
    short: Share = 0.1


class SentencePairs(_RandomPairs):
    """Two single sentences (Liu et al. 2019, section 4.2)."""

    packing: Literal["sentence_pair"]


class OrderedPairs(Drawn):
    """Two consecutive segments, swapped or not (Lan et al. 2019, section 3.1).

    Attributes:
        short: share of documents whose rows are filled to a random shorter length.
        swapped: share of rows in which they are swapped.
        lone_sentence: what a row of one sentence becomes: cut in two like any other text (the paper's definition
            of the task), or given a random second segment (google-research/albert).
    """

    packing: Literal["ordered_pair"]
    short: Share = 0.1
    swapped: Share = 0.5
    lone_sentence: Literal["cut", "random"] = "cut"


class TwoSegments(Drawn):
    """Consecutive text, usually as two segments, without a label (google-research/electra,
    build_pretraining_dataset.py).

    Attributes:
        single: share of rows of one segment.
        short: share of rows filled to a random shorter length.
    """

    packing: Literal["two_segments"]
    single: Share = 0.1
    short: Share = 0.05


Pairs = SegmentPairs | SentencePairs | OrderedPairs | TwoSegments


class Lanes(_Input):
    """Rows that continue from step to step: lane i of a step continues lane i of the step before (XLNet).

    Each row is `[reuse][A <sep> B <sep> <cls>]`, and the window moves on by `reuse` tokens.

    Attributes:
        reuse: tokens at the start of each row that join the model's memory.
        random: share of rows whose segment B is drawn from elsewhere.
        both_directions: every second lane reads its text backwards (bi_data).
    """

    packing: Literal["lanes"]
    reuse: PositiveInt = 256
    random: Share = 0.5
    both_directions: bool = True


class TextPairs(_Input):
    """Examples of a corpus of pairs, a row each: query, positive, negatives (contrastive training).

    Attributes:
        negatives: how many of an example's negatives are used, the first ones.
    """

    packing: Literal["pairs"]
    negatives: NonNegativeInt = 0

    @property
    def texts(self) -> int:
        return 2 + self.negatives


class RepeatedSentences(_Input):
    """Sentences of a plain corpus, each a row that holds it twice: dropout makes the two differ (Gao et al. 2021,
    "SimCSE", section 3).

    Attributes:
        shortest: sentences of fewer tokens, special ones not counted, are left out.
    """

    packing: Literal["sentences"]
    shortest: PositiveInt = 8

    @property
    def repeats(self) -> float:
        return 2.0

    @property
    def texts(self) -> int:
        return 2


class Translations(_Input):
    """Examples of corpora of pairs, a row each: a sentence and its translation, each with special tokens and positions
    of its own (Conneau and Lample 2019, section 3.3: TLM). Corpora of text beside them give rows of one segment.

    Attributes:
        text: how those are packed; the published way is streams cut anywhere.
    """

    packing: Literal["translations"]
    text: Packing = "contiguous"


Texts = TextPairs | RepeatedSentences
"""Rows of several texts, which nothing is masked in."""

Input = Annotated[Packed | Pairs | Lanes | Translations | Texts, Field(discriminator="packing")]
