"""The rules of `transformers`' tokenizer classes (version 5): normalizer, pre-tokenizer, decoder and special tokens of
each family of classes, and the settings of `tokenizer_config.json` that change them.

bert and most others with `vocab.txt`: BERT's normalizer and words. esm: pieces are found in text, from left to right.
albert, xlnet: text is decomposed, stripped of accents, split at white space.
deberta-v2 (and v3), barthez, big_bird: the SentencePiece model's character map is not applied.
camembert, mbart, xlm-roberta: fairseq's special pieces come before those of the SentencePiece model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, assert_never

from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from data_service.tokenizers.specials import STYLES, SpecialNames, TemplateLayout
from data_service.tokenizers.words import SPACE_MARK

FairseqFamily = Literal["xlm-roberta", "camembert", "mbart", "barthez"]
Family = (
    FairseqFamily
    | Literal["albert", "fnet", "xlnet", "big_bird", "rembert", "deberta-v2", "t5", "llama", "gemma"]
    | Literal["bert", "splinter", "mpnet", "funnel", "esm", "roberta", "deberta", "gpt2"]
)
"""Families of tokenizer classes. The classes of a family treat text alike."""

_FAMILY_NAMES: Mapping[Family, tuple[str, str]] = {
    "bert": (
        "Bert ConvBert DistilBert Electra LayoutLM MobileBert SqueezeBert",
        "bert convbert distilbert electra ernie layoutlm megatron-bert mobilebert nezha nomic_bert qdqbert "
        "retribert squeezebert visual_bert",
    ),
    "splinter": ("Splinter", "splinter"),
    "mpnet": ("MPNet", "mpnet"),
    "funnel": ("Funnel", "funnel"),
    "esm": ("Esm", "esm"),
    "roberta": ("Roberta Bart LED Longformer", "roberta bart data2vec-text ibert led longformer roberta-prelayernorm"),
    "deberta": ("Deberta", "deberta"),
    "gpt2": ("GPT2", "gpt2"),
    "albert": ("Albert", "albert yoso"),
    "fnet": ("FNet", "fnet"),
    "xlnet": ("XLNet", "xlnet"),
    "big_bird": ("BigBird", "big_bird"),
    "rembert": ("RemBert", "rembert"),
    "deberta-v2": ("DebertaV2", "deberta-v2"),
    "xlm-roberta": ("XLMRoberta", "xlm-roberta xmod gte jina_embeddings_v3"),
    "camembert": ("Camembert", "camembert"),
    "mbart": ("MBart", "mbart"),
    "barthez": ("Barthez", "barthez"),
    "t5": ("T5", "t5 mt5"),
    "llama": ("Llama", ""),
    "gemma": ("Gemma", "gemma gemma2 gemma3 gemma3_text"),
}
"""Class names, without `Tokenizer`, and model types of each family. Model type `llama` does not decide the family."""
FAMILY_BY_CLASS = {name: family for family, (names, _) in _FAMILY_NAMES.items() for name in names.split()}
FAMILY_BY_TYPE = {name: family for family, (_, types) in _FAMILY_NAMES.items() for name in types.split()}
CLASSES_WITHOUT_RULES = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
"""Classes that have no rules of their own: they follow the files."""
CLASSES_FOLLOWING_FILE = ("FNetTokenizer", "ConvBertTokenizer")
MODEL_TYPES_FOLLOWING_FILE = ("modernbert", "modernbert-decoder", "nystromformer", "umt5", "xlm-roberta-xl")
"""Classes, and model types of any class, with which `transformers` follows a `tokenizer.json`."""

_SPECIAL_NAMES: Mapping[Family, SpecialNames] = {
    **dict.fromkeys(("bert", "splinter"), STYLES["bert"].names),
    "mpnet": SpecialNames(cls="<s>", sep="</s>", pad="<pad>", mask="<mask>", unk="[UNK]"),
    "funnel": STYLES["xlnet"].names,
    "esm": SpecialNames(cls="<cls>", sep="<eos>", pad="<pad>", mask="<mask>", unk="<unk>"),
    "deberta": STYLES["deberta"].names,
    **dict.fromkeys(("albert", "fnet", "big_bird", "rembert"), STYLES["albert"].names),
    "xlnet": STYLES["xlnet"].names,
    "deberta-v2": STYLES["deberta"].names,
    # Empty: the class has no token of this role.
    "t5": SpecialNames(cls="", sep="</s>", pad="<pad>", mask="", unk="<unk>"),
    "llama": SpecialNames(cls="<s>", sep="</s>", pad="", mask="", unk="<unk>"),
    "gemma": SpecialNames(cls="<bos>", sep="<eos>", pad="<pad>", mask="<mask>", unk="<unk>"),
    "gpt2": SpecialNames(cls="", sep="", pad="", mask="", unk="<|endoftext|>"),
}
LAYOUTS: Mapping[Family, TemplateLayout] = {  # where special tokens stand around a text
    **dict.fromkeys(("bert", "splinter", "funnel", "esm", "deberta", "deberta-v2"), "bert"),
    **dict.fromkeys(("albert", "fnet", "big_bird", "rembert"), "bert"),
    "xlnet": "xlnet",
}
# Families without an entry in `_SPECIAL_NAMES` or `LAYOUTS` are like RoBERTa.
_MBART_CODES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART_LANGUAGES = tuple(_MBART_CODES.split())
T5_SENTINELS = tuple(f"<extra_id_{i}>" for i in reversed(range(100)))
MORE_SPECIAL_TOKENS_BY_ROLE: Mapping[Family, dict[str, str]] = {
    "funnel": {"bos": "<s>", "eos": "</s>"},
    "splinter": {"question": "[QUESTION]"},
}
"""Special tokens of other roles that the classes of a family add by default."""
FURTHER_PIECES: Mapping[Family, tuple[str, ...]] = {"mbart": MBART_LANGUAGES, "t5": T5_SENTINELS}
"""Special tokens without a role that the classes of a family add by default."""


def special_names(family: Family) -> SpecialNames:
    """Return the default special tokens of a family of tokenizer classes."""
    return _SPECIAL_NAMES.get(family, STYLES["roberta"].names)


class TextRules(NamedTuple):
    """The rules applied to text before the vocabulary is looked up, and to pieces when ids are decoded."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
    decoder: decoders.Decoder


def text_rules(family: Family, config: Mapping[str, Any], characters: bytes) -> TextRules:
    """Return a family's rules. `config`: tokenizer_config.json; `characters`: SentencePiece character map, or empty."""
    prefixed, lower = config.get("add_prefix_space"), config.get("do_lower_case")
    scheme: Literal["always", "never", "first"] = "never" if prefixed is False else "always"
    mapped = normalizers.Precompiled(characters) if characters else None
    spaces = pre_tokenizers.WhitespaceSplit()
    match family:
        case "bert" | "splinter" | "mpnet" | "funnel":
            return _bert_rules(config)
        case "esm":
            # ESM's class splits at Python's white space, which has four characters more than the library's.
            also = pre_tokenizers.Split(Regex("[\\x1c-\\x1f]+"), "removed")
            words = pre_tokenizers.Sequence([spaces, also])
            return TextRules(None, words, decoders.WordPiece(prefix="##", cleanup=False))
        case "roberta" | "deberta" | "gpt2":
            return TextRules(None, pre_tokenizers.ByteLevel(bool(prefixed)), decoders.ByteLevel())
        case "albert":
            folded = _decomposing_normalizer(
                mapped, lower=lower is not False, strip_accents=not config.get("keep_accents")
            )
            return _word_marking_rules(folded, [spaces], scheme)
        case "rembert":
            kept = config.get("keep_accents", True)
            folded = _decomposing_normalizer(mapped, lower=bool(lower), strip_accents=not kept, single_spaces=True)
            return _word_marking_rules(folded, [], scheme)
        case "big_bird":
            return _word_marking_rules(normalizers.Replace(Regex(" {2,}"), SPACE_MARK), [], scheme)
        case "fnet":  # FNet's class has no rules of its own for a SentencePiece model
            spelt = [*([] if mapped is None else [mapped]), normalizers.Replace(" ", SPACE_MARK)]
            return TextRules(normalizers.Sequence(spelt), None, decoders.Replace(SPACE_MARK, " "))
        case "xlnet":  # XLNet's class strips accents even with `keep_accents`
            return _word_marking_rules(
                _decomposing_normalizer(mapped, lower=bool(lower), strip_accents=True), [spaces], "always"
            )
        case "deberta-v2":
            isolated = config.get("split_by_punct")
            before = [pre_tokenizers.Punctuation(behavior="isolated")] if isolated else []
            return _word_marking_rules(
                _composing_normalizer(lower=bool(lower)), before, "first" if prefixed is False else "always"
            )
        case "barthez":
            return _word_marking_rules(_composing_normalizer(lower=False), [], scheme)
        case "xlm-roberta" | "camembert":
            return _word_marking_rules(mapped, [spaces], scheme)
        case "mbart" | "t5":
            return _word_marking_rules(mapped if family == "t5" else None, [spaces], "always")
        case "llama":
            first = "first" if scheme == "always" and not config.get("legacy") else scheme
            marks = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=first, split=False)
            return TextRules(None, marks, _byte_decoder(strip=scheme == "always"))
        case "gemma":
            split = pre_tokenizers.Split(" ", "merged_with_previous")
            return TextRules(normalizers.Replace(" ", SPACE_MARK), split, _byte_decoder(strip=False))
        case _:
            assert_never(family)


def _byte_decoder(*, strip: bool) -> decoders.Decoder:
    """Return the decoder of Llama and Gemma. `strip`: whether it removes the space before the text."""
    last = [decoders.Strip(content=" ", left=1)] if strip else []
    return decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def _bert_rules(config: Mapping[str, Any]) -> TextRules:
    normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    return TextRules(normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##", cleanup=False))


def _word_marking_rules(
    normalizer: normalizers.Normalizer | None,
    before: Sequence[pre_tokenizers.PreTokenizer],
    scheme: Literal["always", "never", "first"],
) -> TextRules:
    """Return rules that put a space mark before words. `scheme`: as `prepend_scheme` of `pre_tokenizers.Metaspace`."""
    marks = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    decoder = decoders.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    return TextRules(normalizer, pre_tokenizers.Sequence([*before, marks]), decoder)


def _decomposing_normalizer(
    mapped: normalizers.Normalizer | None, *, lower: bool, strip_accents: bool, single_spaces: bool = False
) -> normalizers.Normalizer:
    """Return the normalizer of ALBERT, XLNet and RemBERT. `mapped`: the model's character map, applied last."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if single_spaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if strip_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lower:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, *([] if mapped is None else [mapped])])


def _composing_normalizer(*, lower: bool) -> normalizers.Normalizer:
    """Return the normalizer of DeBERTa and BARThez: it collapses white space, strips it at the end, and applies NFC."""
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower else []
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    return normalizers.Sequence([*steps, spaces, normalizers.NFC(), normalizers.Strip(left=False, right=True)])
