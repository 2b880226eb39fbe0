"""Options of `maskfleet corpus build`: what a document is, what is held out, and how sentences and words are found."""

from typing import Annotated, Literal

import typer

TxtDocuments = Literal["file", "blank_line"]
TextsKind = Literal["plain", "pairs"]
Segmenter = Literal["jieba", "longest_match", "field"]
TxtDocumentsOption = Annotated[
    TxtDocuments, typer.Option("--txt-documents", help="A .txt document: a whole file, or text between blank lines.")
]
HeldoutOption = Annotated[
    float | None,
    typer.Option(
        "--heldout",
        help="Share of documents held out for evaluation. It is raised if there is little text; of few or long "
        "documents, parts are held out. Default: 0.0005.",
    ),
]
HeldoutLikeOption = Annotated[
    str | None,
    typer.Option(
        "--heldout-like",
        metavar="CORPUS",
        help="Hold text out by this corpus's rule instead of --heldout, so that the two corpora can be merged.",
    ),
]
TextsOption = Annotated[
    TextsKind,
    typer.Option("--texts", help="plain: running text. pairs: each record has a query, a positive and negatives."),
]
NegativesOption = Annotated[
    int | None,
    typer.Option("--negatives", min=0, help="Number of negatives per pair. A record with fewer is a bad record."),
]
QueryFieldOption = Annotated[str | None, typer.Option("--query-field", help="Field of a pair's query. Default: query.")]
PositiveFieldOption = Annotated[
    str | None, typer.Option("--positive-field", help="Field of a pair's positive. Default: positive.")
]
NegativesFieldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--negatives-field",
        help="Field of a pair's negatives, a text or a list of texts. Repeatable. Default: negatives.",
    ),
]
SentencesOption = Annotated[
    Literal["any", "zh", "ja", "de", "es", "fr", "it", "nl", "pt", "ru"],
    typer.Option("--sentences", help="Language whose rules decide where sentences end, or any."),
]
LinesOption = Annotated[
    Literal["keep", "join"],
    typer.Option(
        "--lines",
        help="keep: white space is encoded unchanged. join: lines are joined by one space, as in fairseq.",
    ),
]
SegmenterOption = Annotated[
    Segmenter | None,
    typer.Option(
        "--segmenter",
        help="Store where words begin, for text without spaces: found by jieba, by the longest match in --dictionary, "
        "or given by a field of the input. Default: the tokenizer decides where words begin.",
    ),
]
DictionaryOption = Annotated[
    str | None,
    typer.Option("--dictionary", metavar="FILE", help="Dictionary for longest_match, or for jieba instead of its own."),
]
UserWordsOption = Annotated[
    str | None,
    typer.Option("--user-words", metavar="FILE", help="More words for jieba, one per line: word [frequency] [tag]."),
]
WordsFieldOption = Annotated[
    str | None,
    typer.Option("--words-field", help="Field with the list of a text's words, for --segmenter field. Default: words."),
]
LexiconOption = Annotated[
    str | None,
    typer.Option(
        "--lexicon",
        metavar="FILE",
        help="Entities and phrases to be masked whole (ERNIE). A line is the text, a tab, and `entity` or `phrase`.",
    ),
]


ProvenanceOption = Annotated[
    str | None,
    typer.Option(
        "--provenance",
        metavar="FILE",
        help="YAML file with the names of the record fields for id, source, url, licence, language and date. Their "
        "values are stored next to the shards.",
    ),
]
OutOption = Annotated[str, typer.Option("--out", help="New folder or s3:// URI for the corpus.")]
TokenizerOption = Annotated[str, typer.Option("--tokenizer", help="The tokenizer's folder or s3:// URI.")]
BuildWorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Number of processes. Default: one per core; one for small inputs."),
]
BlockTokensOption = Annotated[
    int, typer.Option("--block-tokens", min=1, help="Target size of a block in tokens. Documents are never cut.")
]
MaxDocumentBytesOption = Annotated[
    int, typer.Option("--max-document-bytes", min=1, help="Longest accepted document in bytes.")
]
