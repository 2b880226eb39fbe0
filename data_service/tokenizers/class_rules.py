"""What classes of `transformers` do to text: their families, special pieces, and rules before and after pieces are
looked up, as the code of version 5 has them, with a few settings of `tokenizer_config.json`.

bert and most others with `vocab.txt`: BERT's normalizer and words. esm: pieces are found in text, from left to right.
albert, xlnet: text is decomposed, stripped of accents, split at white space.
deberta-v2 (and v3): the model's own character map is not applied. barthez: likewise.
camembert, mbart, xlm-roberta: fairseq's special pieces come before those of the SentencePiece model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, assert_never

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from data_service.tokenizers.specials import STYLES, SpecialNames, TemplateLayout
from data_service.tokenizers.spm import SPACE

SentencePieceFamily = Literal["albert", "xlnet", "deberta-v2", "xlm-roberta", "camembert", "mbart", "barthez"]
Family = Literal["bert", "mpnet", "funnel", "esm", "roberta", "deberta"] | SentencePieceFamily
"""Classes that treat text alike."""

_CLASSES: Mapping[Family, str] = {
    "bert": "Bert ConvBert DistilBert Electra LayoutLM MobileBert SqueezeBert",
    "mpnet": "MPNet",
    "funnel": "Funnel",
    "esm": "Esm",
    "roberta": "Roberta Bart LED Longformer",
    "deberta": "Deberta",
    "albert": "Albert",
    "xlnet": "XLNet",
    "deberta-v2": "DebertaV2",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "mbart": "MBart",
    "barthez": "Barthez",
}
_MODEL_TYPES: Mapping[Family, str] = {
    "bert": "bert convbert distilbert electra ernie layoutlm megatron-bert mobilebert nezha nomic_bert qdqbert "
    "retribert squeezebert visual_bert",
    "mpnet": "mpnet",
    "funnel": "funnel",
    "esm": "esm",
    "roberta": "roberta bart data2vec-text ibert led longformer roberta-prelayernorm",
    "deberta": "deberta",
    "albert": "albert yoso",
    "xlnet": "xlnet",
    "deberta-v2": "deberta-v2",
    "xlm-roberta": "xlm-roberta xmod",
    "camembert": "camembert",
    "mbart": "mbart",
    "barthez": "barthez",
}
BY_CLASS = {name: family for family, names in _CLASSES.items() for name in names.split()}
BY_TYPE = {name: family for family, names in _MODEL_TYPES.items() for name in names.split()}
PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
"""Classes that add nothing to the files."""

_NAMES: Mapping[Family, SpecialNames] = {
    "bert": STYLES["bert"].names,
    "mpnet": SpecialNames(cls="<s>", sep="</s>", pad="<pad>", mask="<mask>", unk="[UNK]"),
    "funnel": STYLES["xlnet"].names,
    "esm": SpecialNames(cls="<cls>", sep="<eos>", pad="<pad>", mask="<mask>", unk="<unk>"),
    "deberta": STYLES["deberta"].names,
    "albert": STYLES["albert"].names,
    "xlnet": STYLES["xlnet"].names,
    "deberta-v2": STYLES["deberta"].names,
}
LAYOUTS: Mapping[Family, TemplateLayout] = {
    **dict.fromkeys(("bert", "funnel", "esm", "deberta", "albert", "deberta-v2"), "bert"),
    "xlnet": "xlnet",
}
# All others are RoBERTa's in both.
MBART_LANGUAGES = (
    *(
        "ar_AR",
        "cs_CZ",
        "de_DE",
        "en_XX",
        "es_XX",
        "et_EE",
        "fi_FI",
        "fr_XX",
        "gu_IN",
        "hi_IN",
        "it_IT",
        "ja_XX",
        "kk_KZ",
    ),
    *(
        "ko_KR",
        "lt_LT",
        "lv_LV",
        "my_MM",
        "ne_NP",
        "nl_XX",
        "ro_RO",
        "ru_RU",
        "si_LK",
        "tr_TR",
        "vi_VN",
        "zh_CN",
    ),
)
FURTHER_ROLES: Mapping[Family, dict[str, str]] = {"funnel": {"bos": "<s>", "eos": "</s>"}}
"""Further roles of special tokens, which a class adds by itself."""
FURTHER_PIECES: Mapping[Family, tuple[str, ...]] = {"mbart": MBART_LANGUAGES}
"""Further special pieces of a class."""


def names_of(family: Family) -> SpecialNames:
    """Return the names of the special tokens that a class takes by itself."""
    return _NAMES.get(family, STYLES["roberta"].names)


class TextRules(NamedTuple):
    """What is done to text before and after pieces are looked up."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer
    decoder: decoders.Decoder


def text_rules(family: Family, config: Mapping[str, Any], characters: bytes) -> TextRules:
    """Return the rules of a family. Unset options have the defaults of `transformers`."""
    prefixed, lower = config.get("add_prefix_space"), config.get("do_lower_case")
    scheme: Literal["always", "never", "first"] = "never" if prefixed is False else "always"
    mapped = normalizers.Precompiled(characters) if characters else None
    spaces = pre_tokenizers.WhitespaceSplit()
    match family:
        case "bert" | "mpnet" | "funnel":
            return _bert_rules(config)
        case "esm":
            # Python's white space, by which its class splits, has four characters more than the library's.
            also = pre_tokenizers.Split(Regex("[\\x1c-\\x1f]+"), "removed")
            words = pre_tokenizers.Sequence([spaces, also])
            return TextRules(None, words, decoders.WordPiece(prefix="##", cleanup=False))
        case "roberta" | "deberta":
            return TextRules(None, pre_tokenizers.ByteLevel(bool(prefixed)), decoders.ByteLevel())
        case "albert":
            folded = _decomposing(
                mapped, lower=lower is not False, strip_accents=not config.get("keep_accents")
            )
            return _marked(folded, [spaces], scheme)
        case "xlnet":  # its class strips accents whatever `keep_accents` says
            return _marked(_decomposing(mapped, lower=bool(lower), strip_accents=True), [spaces], "always")
        case "deberta-v2":
            isolated = config.get("split_by_punct")
            before = [pre_tokenizers.Punctuation(behavior="isolated")] if isolated else []
            return _marked(_composing(lower=bool(lower)), before, "first" if prefixed is False else "always")
        case "barthez":
            return _marked(_composing(lower=False), [], scheme)
        case "xlm-roberta" | "camembert":
            return _marked(mapped, [spaces], scheme)
        case "mbart":
            return _marked(None, [spaces], "always")
        case _:
            assert_never(family)


def _bert_rules(config: Mapping[str, Any]) -> TextRules:
    normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    return TextRules(
        normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##", cleanup=False)
    )


def _marked(
    normalizer: normalizers.Normalizer | None,
    before: Sequence[pre_tokenizers.PreTokenizer],
    scheme: Literal["always", "never", "first"],
) -> TextRules:
    """Return rules that mark the beginnings of words. `scheme`: which words without a space before them are marked."""
    marks = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return TextRules(normalizer, pre_tokenizers.Sequence([*before, marks]), decoder)


def _decomposing(
    mapped: normalizers.Normalizer | None, *, lower: bool, strip_accents: bool
) -> normalizers.Normalizer:
    """Return the normalizer of ALBERT and XLNet, which turns TeX's quotes into plain ones."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if strip_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lower:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, *([] if mapped is None else [mapped])])


def _composing(*, lower: bool) -> normalizers.Normalizer:
    """Return the normalizer of DeBERTa and BARThez, which turns a run of white space into one space and removes it at
    the end."""
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower else []
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    return normalizers.Sequence(
        [*steps, spaces, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    )
