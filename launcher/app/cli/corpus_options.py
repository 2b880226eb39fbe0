"""Options of `maskfleet corpus build`: what a document is, what is held out, and how sentences and words are found."""

from typing import Annotated, Literal

import typer

TxtDocuments = Literal["file", "blank_line"]
TextsKind = Literal["plain", "pairs"]
Segmenter = Literal["jieba", "longest_match", "field"]
TxtDocumentsOption = Annotated[
    TxtDocuments, typer.Option("--txt-documents", help="In .txt: a document a file, or between blank lines.")
]
HeldoutOption = Annotated[
    float,
    typer.Option(
        "--heldout",
        help="Share of documents kept for evaluation; more of little text, and stretches of few or long documents.",
    ),
]
HeldoutLikeOption = Annotated[
    str | None,
    typer.Option(
        "--heldout-like",
        metavar="CORPUS",
        help="Hold text out by the rule of this corpus, in place of --heldout, so that both can be merged.",
    ),
]
TextsOption = Annotated[
    TextsKind,
    typer.Option("--texts", help="Running text, or pairs: query, positive, negatives in each record."),
]
NegativesOption = Annotated[
    int | None,
    typer.Option("--negatives", min=0, help="Negatives of each pair. A record with fewer is a bad one."),
]
QueryFieldOption = Annotated[str | None, typer.Option("--query-field", help="Field of a pair's query. Default: query.")]
PositiveFieldOption = Annotated[
    str | None, typer.Option("--positive-field", help="Field of a pair's positive. Default: positive.")
]
NegativesFieldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--negatives-field",
        help="Fields of a pair's negatives, each a text or a list. Default: negatives.",
    ),
]
SentencesOption = Annotated[
    Literal["any", "zh", "ja", "de", "es", "fr", "it", "nl", "pt", "ru"],
    typer.Option("--sentences", help="The language whose rules say where sentences end, or any."),
]
LinesOption = Annotated[
    Literal["keep", "join"],
    typer.Option(
        "--lines",
        help="keep: white space is encoded as it is. join: lines are joined by one space, as fairseq's are.",
    ),
]
SegmenterOption = Annotated[
    Segmenter | None,
    typer.Option(
        "--segmenter",
        help="Store where words begin, for text without spaces: by jieba, by the longest words of --dictionary, or as "
        "a field of the input says. Default: the tokenizer says where words begin.",
    ),
]
DictionaryOption = Annotated[
    str | None,
    typer.Option("--dictionary", metavar="FILE", help="Words of longest_match; or in place of jieba's own."),
]
UserWordsOption = Annotated[
    str | None,
    typer.Option("--user-words", metavar="FILE", help="For jieba besides its own: word [frequency] [tag] a line."),
]
WordsFieldOption = Annotated[
    str | None,
    typer.Option("--words-field", help="Of --segmenter field: the text's words, a list. Default: words."),
]
LexiconOption = Annotated[
    str | None,
    typer.Option(
        "--lexicon",
        metavar="FILE",
        help="Entities and phrases to be masked whole (ERNIE): text, a tab, and `entity` or `phrase` a line.",
    ),
]


ProvenanceOption = Annotated[
    str | None,
    typer.Option(
        "--provenance",
        metavar="FILE",
        help="YAML that names the fields of a record that hold its id, source, url, licence, language and date. They "
        "are kept beside the shards.",
    ),
]
OutOption = Annotated[str, typer.Option("--out", help="Folder or s3:// URI of its own for the corpus.")]
TokenizerOption = Annotated[str, typer.Option("--tokenizer", help="The tokenizer's folder or s3:// URI.")]
BuildWorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes. Default: all cores, one for a small input."),
]
BlockTokensOption = Annotated[
    int, typer.Option("--block-tokens", min=1, help="Tokens a block aims for; a document is never cut.")
]
MaxDocumentBytesOption = Annotated[
    int, typer.Option("--max-document-bytes", min=1, help="Refuse longer documents than this.")
]
