"""Folders of the bundled tasks as their authors publish them, in small: file names, columns and quirks are theirs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write(path: Path, *lines: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))


def write_tsv(path: Path, *rows: Sequence[str]) -> None:
    write(path, *("\t".join(row) for row in rows))


def write_jsonl(path: Path, *records: object) -> None:
    write(path, *(json.dumps(record, ensure_ascii=False) for record in records))


def write_parquet(path: Path, columns: Mapping[str, Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)


def glue(root: Path) -> None:
    """GLUE's zips, unpacked. The MRPC folder is as GLUE's script makes it of Microsoft's files."""
    cola = [
        ("gj04", "1", "", "Our friends won't buy this analysis."),
        ("gj04", "0", "*", "They drank the pub."),
    ]
    for split in ("train", "dev"):
        write_tsv(root / f"CoLA/{split}.tsv", *cola)  # no line of names
        write_tsv(root / f"SST-2/{split}.tsv", ("sentence", "label"), ('a "film', "0"), ("good '' one ", "1"))
    write_tsv(root / "CoLA/test.tsv", ("index", "sentence"), ("0", "Bill whistled past the house."))
    _mrpc(root)
    sts = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
    rows = [
        ("0", "main-captions", "MSRvid", "2012", "1", "none", "none", "A plane.", "An air plane.", "5.000"),
        ("1", "main-forums", "deft", "2014", "4", "none", "none", 'A "man', "A woman.", "0.400"),
    ]
    for split in ("train", "dev"):
        write_tsv(root / f"STS-B/{split}.tsv", [*sts, "score"], *rows)
    questions = [
        ("0", "1", "2", "How do I?", "How can I?", "1"),
        ("1", "3", "4", "Why is", "What was", "0"),
        ("2", "5", "6", "broken by a"),
        (" line end?", "fine?", "0"),
    ]
    names = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    for split in ("train", "dev"):
        write_tsv(root / f"QQP/{split}.tsv", names, *questions)
    _inference(root)


def _mrpc(root: Path) -> None:
    names = ("\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String")
    rows = [("1", "70", "71", 'He said "yes.', "He agreed."), ("0", "72", "73", "It rose.", "It fell.")]
    rows += [(str(n % 2), str(n), str(n), f"It rose {n}.", "It fell.") for n in range(60)]
    for name in ("train.tsv", "dev.tsv", "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"):
        write(root / f"MRPC/{name}", *("\t".join(row) + "\r" for row in (names, *rows)))


def _inference(root: Path) -> None:
    shared = ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"]
    shared += ["sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1"]
    row = ["0", "31193", "31193n", "government", "( a )", "( b )", "(ROOT a)", "(ROOT b)"]
    sides = ("Conceptually cream has two.", "Product is what works.")
    train = [[*row, *sides, "neutral", "neutral"], [*row, *sides, "entailment", "entailment"]]
    write_tsv(root / "MNLI/train.tsv", [*shared, "gold_label"], *train)
    five = ["label2", "label3", "label4", "label5", "gold_label"]
    dev = [[*row, *sides, *["neutral"] * 5, label] for label in ("contradiction", "neutral", "-")]
    for name in ("dev_matched", "dev_mismatched"):
        write_tsv(root / f"MNLI/{name}.tsv", [*shared, *five], *dev)
    for task, first, second in (("QNLI", "question", "sentence"), ("RTE", "sentence1", "sentence2")):
        for split in ("train", "dev"):
            rows = [("0", "a", "b", "entailment"), ("1", "c", "d", "not_entailment")]
            write_tsv(root / f"{task}/{split}.tsv", ("index", first, second, "label"), *rows)
    for split in ("train", "dev"):
        rows = [("0", "a", "b", "1"), ("1", "c", "d", "0")]
        write_tsv(root / f"WNLI/{split}.tsv", ("index", "sentence1", "sentence2", "label"), *rows)
    names = ("Lexical Semantics", "Predicate-Argument Structure", "Logic", "Knowledge", "Domain")
    sentences = [("", "", "Negation", "", "x", "The cat sat.", "The cat did not sit.", "contradiction")]
    sentences += [("Lexical entailment", "", "", "", "x", "A cat sat.", "An animal sat.", "entailment")]
    write_tsv(root / "diagnostic/diagnostic-full.tsv", (*names, "Premise", "Hypothesis", "Label"), *sentences)


def clue(root: Path) -> None:
    """CLUE's zips, each in a folder of its name: JSON lines called .json."""
    tnews = [
        {"label": "108", "label_desc": "news_edu", "sentence": "上课时学生手机响个不停", "keywords": ""},
        {"label": "104", "label_desc": "news_finance", "sentence": "商赢环球股份", "keywords": "商赢"},
    ]
    iflytek = [
        {"label": "110", "label_des": "社区超市", "sentence": "朴朴快送超市"},
        {"label": 0, "sentence": "打车"},
    ]
    afqmc = [
        {"sentence1": "双十一花呗提额在哪", "sentence2": "里可以提花呗额度", "label": "0"},
        {"sentence1": "花呗", "sentence2": "花呗", "label": "1"},
    ]
    nli = [{"sentence1": "甲", "sentence2": "乙", "label": label} for label in ("neutral", "entailment", "-")]
    csl = [
        {"id": 1, "abst": "为解决传统均匀", "keyword": ["水声学", "成像声呐"], "label": "0"},
        {"id": 2, "abst": "针对核函数", "keyword": ["支持向量机"], "label": "1"},
    ]
    for split in ("train", "dev"):
        write_jsonl(root / f"tnews/{split}.json", *tnews)
        write_jsonl(root / f"iflytek/{split}.json", *iflytek)
        write_jsonl(root / f"afqmc/{split}.json", *afqmc)
        write_jsonl(root / f"cmnli/{split}.json", *nli)
        write_jsonl(root / f"ocnli/{'train.50k' if split == 'train' else split}.json", *nli)
        write_jsonl(root / f"csl/{split}.json", *csl)


def squad_json(*paragraphs: tuple[str, list[dict[str, object]]], version: str = "1.1") -> str:
    """`paragraphs`: contexts and their `qas`."""
    inner = [{"context": context, "qas": questions} for context, questions in paragraphs]
    return json.dumps({"version": version, "data": [{"title": "A", "paragraphs": inner}]}, ensure_ascii=False)


def squad(root: Path) -> None:
    """SQuAD 1.1 and 2.0, and CMRC 2018 whose answers may begin before the place that is given."""
    context = "The Norman dynasty came from Denmark, Iceland and Norway."
    answers: list[dict[str, object]] = [
        {"text": "Denmark", "answer_start": 29},
        {"text": "Denmark", "answer_start": 29},
        {"text": "Denmark, Iceland and Norway", "answer_start": 29},
    ]
    asked: dict[str, object] = {"id": "56dd", "question": "From where?", "answers": answers}
    plausible = [{"text": "Iceland", "answer_start": 38}]
    never: dict[str, object] = {"id": "5ad3", "question": "When?", "answers": [], "is_impossible": True}
    for split in ("train", "dev"):
        write(root / f"{split}-v1.1.json", squad_json((context, [asked])))
        both = squad_json(
            (context, [{**asked, "is_impossible": False}, {**never, "plausible_answers": plausible}]),
            version="v2.0",
        )
        write(root / f"{split}-v2.0.json", both)
        chinese: dict[str, object] = {
            "id": "TRAIN_186_QUERY_0",
            "question": "范廷颂是什么时候被任为主教的",
            "answers": [{"text": "1963年", "answer_start": 7}],
        }
        where = root / f"squad-style-data/cmrc2018_{split}.json"
        write(where, squad_json(("范廷颂枢机于1963年被任为主教", [chinese]), version="v1.0"))


def tagging(root: Path) -> None:
    """CoNLL-2003 with its documents' bounds and IOB1 tags, MSRA with a character a line."""
    lines = [
        "-DOCSTART- -X- -X- O",
        "",
        "EU NNP I-NP I-ORG",
        "rejects VBZ I-VP O",
        "German JJ I-NP I-MISC",
        "",
    ]
    lines += ["Peter NNP I-NP I-PER", "Blackburn NNP I-NP I-PER", "Smith NNP I-NP B-PER"]
    for name in ("eng.train", "eng.testa", "eng.testb"):
        write(root / name, *lines)
    characters = ["历\tB-LOC", "博\tI-LOC", "、\tO", " \tO", "", "古\tB-ORG", "研\tI-ORG", ""]
    many = [line.replace("古", chr(0x4E00 + n)) for n in range(200) for line in characters[5:]]
    write(root / "msra_train_bio.txt", *characters, *many)
    write(root / "msra_test_bio.txt", *characters)


_SETS = {
    "test-gold": "MSRpar MSRvid SMTeuroparl surprise.OnWN surprise.SMTnews",
    "test-gs": "FNWN headlines OnWN",
    "sts-en-test-gs-2014": "deft-forum deft-news headlines images OnWN tweet-news",
    "test_evaluation_task2a": "answers-forums answers-students belief headlines images",
    "sts2016-english-with-gs-v1.0": "answer-answer headlines plagiarism postediting question-question",
}


def similarity(root: Path) -> None:
    """SemEval's folders, where a blank line in a gold file is a pair that nobody scored, and the STS benchmark."""
    for folder, names in _SETS.items():
        for name in names.split():
            prefix = "STS2016" if "2016" in folder else "STS"
            sources = ("http://a", "http://b") if "2016" in folder else ()
            rows = [("A dog.", "A cat.", *sources), ('A "man', "One", *sources), ("Rain.", "Sun.", *sources)]
            write_tsv(root / f"{folder}/{prefix}.input.{name}.txt", *rows)
            write(root / f"{folder}/{prefix}.gs.{name}.txt", "1.8", "", "4")
    for split in ("train", "dev", "test"):
        row = ("main-captions", "MSRvid", "2012test", "0001", "5.000", "A plane.", "An air plane.")
        longer = ("main-news", "headlines", "2013", "2", "0.25", "A", "B", "http://a", "http://b")
        write_tsv(root / f"stsbenchmark/sts-{split}.csv", row, longer)


def senteval(root: Path) -> None:
    """SentEval's downstream folder; Latin-1 in TREC."""
    classes = {
        "MR/rt-polarity": ("pos", "neg"),
        "CR/custrev": ("pos", "neg"),
        "SUBJ/subj": ("objective", "subjective"),
        "MPQA/mpqa": ("pos", "neg"),
    }
    for name, endings in classes.items():
        for ending in endings:
            write(root / f"{name}.{ending}", *(f"{ending} sentence {n}" for n in range(100)))
    for split in ("train", "dev", "test"):
        write(root / f"SST/fine/sentiment-{split}", "4 a stirring film", "0 a dull one")
        write_tsv(root / f"SST/binary/sentiment-{split}", ("a stirring film", "1"), ("a dull one", "0"))
    questions = [f"NUM:dist How far is it from Denver to {n} ?" for n in range(60)]
    questions += ["ENTY:cremat What is the film about Ren\xe9 ?", "ABBR:exp What does S.O.S. mean ?"]
    for name in ("train_5500", "TREC_10"):
        write(root / f"TREC/{name}.label", *questions, encoding="latin-1")
    _mrpc(root)
    names = ("pair_ID", "sentence_A", "sentence_B", "relatedness_score", "entailment_judgment")
    rows = [("1", "Kids play", "Kids rest", "3.3", "NEUTRAL"), ("2", "A", "A", "5", "ENTAILMENT")]
    for name in ("train", "trial", "test_annotated"):
        write_tsv(root / f"SICK/SICK_{name}.txt", names, *rows)


NANO = ["ClimateFEVER", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ"]
NANO += ["QuoraRetrieval", "SCIDOCS", "ArguAna", "SciFact", "Touche2020"]


def retrieval(root: Path) -> None:
    """BEIR's three files, and NanoBEIR's three Parquet files without scores."""
    for name in ("scifact", "nfcorpus", "fiqa", "arguana"):
        documents = [
            {"_id": "d1", "title": "Zero", "text": "Nothing at all.", "metadata": {}},
            {"_id": "d2", "title": "", "text": "Everything."},
            {"_id": "d3", "text": "Something."},
        ]
        write_jsonl(root / f"{name}/corpus.jsonl", *documents)
        asked = [{"_id": "q1", "text": "What is nothing?"}, {"_id": "q2", "text": "Of no split"}]
        write_jsonl(root / f"{name}/queries.jsonl", *asked)
        for split in ("train", "dev", "test"):
            rows = [("query-id", "corpus-id", "score"), ("q1", "d1", "2"), ("q1", "d2", "0")]
            write_tsv(root / f"{name}/qrels/{split}.tsv", *rows)
    for name in NANO:
        part = "train-00000-of-00001.parquet"
        write_parquet(root / f"Nano{name}/corpus/{part}", {"_id": ["d1", "d2"], "text": ["One", "Two"]})
        write_parquet(root / f"Nano{name}/queries/{part}", {"_id": ["q1"], "text": ["Which?"]})
        write_parquet(root / f"Nano{name}/qrels/{part}", {"query-id": ["q1"], "corpus-id": ["d2"]})


def everything(root: Path) -> None:
    """Every folder that a bundled task names, all under one root."""
    for published in (glue, clue, squad, tagging, similarity, senteval, retrieval):
        published(root)
