"""What classes of `transformers` do to text: their families, special pieces, and rules before and after pieces are
looked up, as the code of version 5 has them, with a few settings of `tokenizer_config.json`.

bert and most others with `vocab.txt`: BERT's normalizer and words. esm: pieces are found in text, from left to right.
albert, xlnet: text is decomposed, stripped of accents, split at white space.
deberta-v2 (and v3): the model's own character map is not applied. barthez, big_bird: likewise.
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
"""Classes that treat text alike."""

_NAMES: Mapping[Family, tuple[str, str]] = {
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
"""Names of classes, without `Tokenizer`, and model types of each family; the type `llama` names none."""
FAMILY_BY_CLASS = {name: family for family, (names, _) in _NAMES.items() for name in names.split()}
FAMILY_BY_TYPE = {name: family for family, (_, types) in _NAMES.items() for name in types.split()}
CLASSES_WITHOUT_RULES = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
"""Classes that add nothing to the files."""
CLASSES_FOLLOWING_FILE = ("FNetTokenizer", "ConvBertTokenizer")
MODEL_TYPES_FOLLOWING_FILE = ("modernbert", "modernbert-decoder", "nystromformer", "umt5", "xlm-roberta-xl")
"""Classes, and model types with any class, whose `tokenizer.json` is followed if there is one."""

_SPECIAL_NAMES: Mapping[Family, SpecialNames] = {
    **dict.fromkeys(("bert", "splinter"), STYLES["bert"].names),
    "mpnet": SpecialNames(cls="<s>", sep="</s>", pad="<pad>", mask="<mask>", unk="[UNK]"),
    "funnel": STYLES["xlnet"].names,
    "esm": SpecialNames(cls="<cls>", sep="<eos>", pad="<pad>", mask="<mask>", unk="<unk>"),
    "deberta": STYLES["deberta"].names,
    **dict.fromkeys(("albert", "fnet", "big_bird", "rembert"), STYLES["albert"].names),
    "xlnet": STYLES["xlnet"].names,
    "deberta-v2": STYLES["deberta"].names,
    # Roles that a class does not have are empty.
    "t5": SpecialNames(cls="", sep="</s>", pad="<pad>", mask="", unk="<unk>"),
    "llama": SpecialNames(cls="<s>", sep="</s>", pad="", mask="", unk="<unk>"),
    "gemma": SpecialNames(cls="<bos>", sep="<eos>", pad="<pad>", mask="<mask>", unk="<unk>"),
    "gpt2": SpecialNames(cls="", sep="", pad="", mask="", unk="<|endoftext|>"),
}
LAYOUTS: Mapping[Family, TemplateLayout] = {
    **dict.fromkeys(("bert", "splinter", "funnel", "esm", "deberta", "deberta-v2"), "bert"),
    **dict.fromkeys(("albert", "fnet", "big_bird", "rembert"), "bert"),
    "xlnet": "xlnet",
}
# In both tables, families without an entry are as RoBERTa.
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
"""Further roles of special tokens, which a class adds by itself."""
FURTHER_PIECES: Mapping[Family, tuple[str, ...]] = {"mbart": MBART_LANGUAGES, "t5": T5_SENTINELS}
"""Further special pieces of a class."""


def special_names(family: Family) -> SpecialNames:
    """Return the names of the special tokens that a class takes by itself."""
    return _SPECIAL_NAMES.get(family, STYLES["roberta"].names)


class TextRules(NamedTuple):
    """What is done to text before and after pieces are looked up."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
    decoder: decoders.Decoder


def text_rules(family: Family, config: Mapping[str, Any], characters: bytes) -> TextRules:
    """Return the rules of a family. Unset options have the defaults of `transformers`."""
    prefixed, lower = config.get("add_prefix_space"), config.get("do_lower_case")
    scheme: Literal["always", "never", "first"] = "never" if prefixed is False else "always"
    mapped = normalizers.Precompiled(characters) if characters else None
    spaces = pre_tokenizers.WhitespaceSplit()
    match family:
        case "bert" | "splinter" | "mpnet" | "funnel":
            return _bert_rules(config)
        case "esm":
            # Python's white space, by which its class splits, has four characters more than the library's.
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
    """Return rules that mark the beginnings of words. `scheme`: which words without a space before them are marked."""
    marks = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    decoder = decoders.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    return TextRules(normalizer, pre_tokenizers.Sequence([*before, marks]), decoder)


def _decomposing_normalizer(
    mapped: normalizers.Normalizer | None, *, lower: bool, strip_accents: bool, single_spaces: bool = False
) -> normalizers.Normalizer:
    """Return the normalizer of ALBERT, XLNet and RemBERT, which turns TeX's quotes into plain ones."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if single_spaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if strip_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lower:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, *([] if mapped is None else [mapped])])


def _composing_normalizer(*, lower: bool) -> normalizers.Normalizer:
    """Return the normalizer of DeBERTa and BARThez, which turns a run of white space into one space and removes it at
    the end."""
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower else []
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    return normalizers.Sequence([*steps, spaces, normalizers.NFC(), normalizers.Strip(left=False, right=True)])
