"""LongBench: metrics against loops written from their definitions, prompts, bad rows, whole runs and their files."""

import json
import os
import random
import string
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from conftest import shared_model
from kvlab import attach, make_policy
from kvlab.evals.longbench import metrics
from kvlab.evals.longbench.data import DATASETS, E_DATASETS, LENGTHS, PROMPTS, mini_rows
from kvlab.evals.longbench.files import read_predictions, total, v2_totals
from kvlab.evals.longbench.prompts import Filled, fill, fill_v2, to_prompt, without_middle
from kvlab.evals.longbench.task import LongBench
from kvlab.protocol import PromptProtocol, Reader
from kvlab.reading import Prompt
from kvlab.settings import SettingError
from kvlab.tiny import tiny_tokenizer
from running import TINY, kvlab, results, sample_lines

DATA = os.environ.get("KVLAB_DATA_DIR")
TOKENIZER = tiny_tokenizer()
CHAT = tiny_tokenizer()
CHAT.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}<assistant>"


# --------------------------------------------------------------------------------------------- metrics, as they are defined


def naive_words(text):
    """Runs of letters that are an article go, also beside marks that aren't ASCII's."""
    runs = [[]]
    for char in text.lower():
        if char not in string.punctuation:
            if runs[-1] and runs[-1][-1].isalnum() != char.isalnum():
                runs.append([])
            runs[-1].append(char)
    joined = ["".join(run) for run in runs]
    return "".join(" " if run in ("a", "an", "the") else run for run in joined).split()


def naive_f1(given, wanted):
    left, common = list(wanted), 0
    for word in given:
        if word in left:
            left.remove(word)
            common += 1
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def naive_lcs(x, y):
    """Words of y's longest common subsequence with x, of several the one that ROUGE's walk from the end finds."""
    lengths = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if a == b else max(lengths[i][j + 1], lengths[i + 1][j])
    i, j, found = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.append(x[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def naive_rouge(prediction, answer):
    """ROUGE-L over sentences: distinct words in the union of subsequences, over distinct words of each text."""
    ours, theirs = ([" ".join(part.split()).split(" ") for part in text.split(".") if part] for text in (prediction, answer))
    if not ours or not theirs:
        return 0.0
    union = {word for wanted in theirs for given in ours for word in naive_lcs(wanted, given)}
    recall, precision = (len(union) / len({w for s in side for w in s}) for side in (theirs, ours))
    return 2 * precision * recall / (precision + recall + 1e-8)


def naive_classes(prediction, answer, classes):
    named = [name for name in classes if name in prediction]
    for name in named:  # the list changes as it is gone through
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def naive_numbers(text):
    found, digits = [], ""
    for char in text + " ":
        if char.isdigit():
            digits += char
        elif digits:
            found.append(digits)
            digits = ""
    return found


def texts(seed, words, joins=(" ",), most=14):
    rng = random.Random(seed)
    return ["".join(rng.choice(words) + rng.choice(joins) for _ in range(rng.randrange(most))) for _ in range(300)]


def pairs(seed, words, joins=(" ",)):
    found = texts(seed, words, joins)
    return zip(found[::2], found[1::2], strict=True)


def test_f1_of_answers():
    some = ["The", "a", "an", "cat", "Cat!", "U.S.", "dog", "then", "“x”", "b-c"]
    for given, wanted in pairs(0, some, (" ", "  ", "\n", "")):
        assert metrics.qa_f1(given, wanted) == pytest.approx(naive_f1(naive_words(given), naive_words(wanted)))
    assert metrics.qa_f1("The cat.", "a cat") == 1 and metrics.qa_f1("", "cat") == metrics.qa_f1("the", "the") == 0


def test_f1_of_chinese_answers():
    import jieba

    bad = set(string.punctuation + "，。！？、：；（）《》「」『』【】“”‘’…—·") - set("《·")
    for given, wanted in pairs(1, ["北京", "大学", "《红楼梦》", "，", "。", "AI", "的", "１２", "（", "·", "…"], ("", " ")):
        words = [
            [w for w in ("".join(c for c in word.lower() if c not in bad).strip() for word in jieba.cut(text)) if w]
            for text in (given, wanted)
        ]
        assert metrics.qa_f1_zh(given, wanted) == pytest.approx(naive_f1(*words))
    assert metrics.qa_f1_zh("北京大学。", "北京大学") == 1


def test_rouge():
    for given, wanted in pairs(2, ["one", "two", "three", "four", "five."], (" ", ". ", "\n")):
        assert metrics.rouge(given, wanted) == pytest.approx(naive_rouge(given, wanted), abs=1e-12)
    assert metrics.rouge("", "one") == metrics.rouge("...", "one") == metrics.rouge("one", ".") == 0
    assert metrics.rouge_zh("北京大学", "北京大学") == pytest.approx(1)


def test_rouge_of_a_sentence_too_long_for_it_is_0_wherever_it_is_asked():
    """The package recurses along a sentence; the outcome must not depend on the caller's stack."""
    short, long = " ".join(["a"] * 900), " ".join(["a"] * 1100)

    def deep(depth):
        return deep(depth - 1) if depth else (metrics.rouge(short, short), metrics.rouge(long, long))

    assert deep(0) == deep(600) == (pytest.approx(1), 0.0)
    assert sys.getrecursionlimit() == 1000 and threading.active_count() < 20


def test_classes_are_found_as_the_published_loop_finds_them():
    classes = ["Date", "Other number", "number", "Other", "Number of something", "er", "ber", "Disease"]
    rng = random.Random(3)
    for _ in range(500):
        prediction = " ".join(rng.choices(classes, k=rng.randrange(5)))
        order = rng.sample(classes, len(classes))
        answer = rng.choice(classes)
        assert metrics.classification(prediction, answer, order) == naive_classes(prediction, answer, order)
    # Of two parts of the answer's name in a row, only the first is passed over.
    assert metrics.classification("Other number", "Other number", ["Other", "number", "Other number"]) == 0.5


def test_numbers_and_paragraphs():
    for given, wanted in pairs(4, ["3", "13", "Paragraph 3", "x3y", "no", "٣"], (" ", ", ", "")):
        number = (naive_numbers(wanted) or ["3"])[0]
        found = naive_numbers(given)
        share = sum(one == number for one in found) / len(found) if found else 0.0
        assert metrics.count(given, number) == pytest.approx(share)
        assert metrics.retrieval(given, f"Paragraph {number}") == metrics.retrieval_zh(given, f"段落{number}") == share
    with pytest.raises(ValueError, match="must name a paragraph, such as 段落3"):
        metrics.retrieval_zh("3", "Paragraph 3")


def test_likeness_of_code():
    for given, wanted in pairs(5, ["a", "b", "ab", "x = 1", "# no", "`", "//", "\n"], ("", " ", "\n")):
        lines = [line for line in given.lstrip("\n").split("\n") if not any(mark in line for mark in ("#", "`", "//"))]
        line = lines[0] if lines else ""
        both = len(line) + len(wanted)
        ratio = 2 * len(naive_lcs(line, wanted)) / both if both else 1.0
        assert metrics.code_similarity(given, wanted) == pytest.approx(ratio, abs=0.00501)
        assert round(100 * metrics.code_similarity(given, wanted), 9).is_integer()
    assert metrics.code_similarity("\n# a comment\nreturn x\nreturn y", "return x") == 1


def test_a_prediction_counts_by_its_best_answer_and_of_some_datasets_by_its_first_line():
    assert metrics.score("triviaqa", "\n\nOslo\nBergen", ["Bergen", "Oslo"]) == 1
    assert metrics.score("triviaqa", "\n\nOslo\nBergen", ["Bergen"]) == 0
    assert metrics.score("hotpotqa", "Oslo\nBergen", ["Bergen"]) == pytest.approx(2 / 3)
    assert metrics.score("trec", "Date\nFood", ["Food"], ["Food", "Date"]) == 0
    assert [metrics.bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert set(metrics.SCORES) == set(DATASETS) and len(DATASETS) == 21 and set(E_DATASETS) < set(DATASETS)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (C)**", "C"),
        ("The correct answer is D", "D"),
        ("The correct answer is (E), no: The correct answer is A", "A"),
        ("The correct answer is B. The correct answer is (A)", "A"),
        ("the correct answer is (A)", None),
        ("A", None),
        ("", None),
    ],
)
def test_letters_of_responses(response, found):
    assert metrics.letter(response) == found


PUBLISHED = {
    "narrativeqa": 3.99,
    "qasper": 9.48,
    "multifieldqa_en": 19.40,
    "multifieldqa_zh": 13.45,
    "hotpotqa": 5.76,
    "2wikimqa": 10.23,
    "musique": 18.32,
    "dureader": 12.53,
    "gov_report": 22.84,
    "qmsum": 18.25,
    "multi_news": 29.59,
    "vcsum": 5.61,
    "trec": 33.33,
    "triviaqa": 88.39,
    "samsum": 23.02,
    "lsht": 16.67,
    "passage_count": 0.00,
    "passage_retrieval_en": 2.50,
    "passage_retrieval_zh": 8.33,
    "lcc": 69.67,
    "repobench-p": 34.75,
}
"""What the benchmark's own metrics.py gave for MiniLongBench's predictions; see experiments/longbench_metrics.py."""


@pytest.mark.skipif(not DATA or not (Path(DATA) / "minilongbench").is_dir(), reason="no minilongbench in KVLAB_DATA_DIR")
def test_minilongbenchs_predictions_score_as_the_published_metrics_score_them():
    found = {}
    for name in DATASETS:
        found[name] = total(name, read_predictions(Path(DATA) / "minilongbench" / f"MiniLongBench_{name}.json"))
    assert found == PUBLISHED


# ----------------------------------------------------------------------------------------------------------------- prompts


def test_the_middle_of_a_long_prompt_is_taken_out():
    text = "".join(random.Random(0).choices("abcdeü \n中", k=300))
    ids = TOKENIZER(text).input_ids
    for length in (2, 3, 9, 100, 101, len(ids) - 1, len(ids), len(ids) + 1):
        middle = without_middle(TOKENIZER, Filled(text), length)
        kept = ids if len(ids) <= length else None
        if kept is None:
            half = int(length / 2)
            halves = (ids[:half], ids[len(ids) - half :])
            assert middle.filled.text == "".join(TOKENIZER.decode(part, skip_special_tokens=True) for part in halves)
            assert middle.cut
        else:
            assert middle.filled.text == text and not middle.cut
        assert middle.tokens == len(ids)
        if length % 2 and not kept:  # LongBench v2 keeps the odd token
            at_once = without_middle(TOKENIZER, Filled(text), length, at_once=True).filled.text
            assert at_once == TOKENIZER.decode(ids[: length // 2] + ids[-length // 2 :], skip_special_tokens=True)


@pytest.mark.parametrize("length", [1000, 200, 60, 30, 12])
@pytest.mark.parametrize("chat", [False, True])
def test_the_question_is_what_is_left_of_all_that_follows_the_context(length, chat):
    """Letters of the context are small, those of the question large, whatever is cut."""
    filled = fill("{context}\n{input}X", {"context": "abc " * 50, "input": "QU " * 10})
    text = without_middle(TOKENIZER, filled, length).filled
    prompt = to_prompt(CHAT if chat else TOKENIZER, text, chat)
    question = TOKENIZER.decode(prompt.ids[len(prompt.ids) - prompt.question :], skip_special_tokens=True)
    context = TOKENIZER.decode(prompt.ids[: len(prompt.ids) - prompt.question], skip_special_tokens=True)
    question = question.removesuffix("\n<assistant>") if chat else question
    assert question.endswith("X") and not any(char.islower() for char in question)
    assert not any(char.isupper() for char in context)
    assert "QU" in question or length == 12


def test_templates():
    assert fill("{context}|{input}", {"context": "{not a field} {", "input": "{0}"}).text == "{not a field} {|{0}"
    assert fill("Sum up {context}.", {"context": "this", "input": "unused"}).question is None
    with pytest.raises(SettingError, match="has other fields than"):
        fill("{context}{question}", {"context": ""})
    row = {"context": " a $Q$ b ", "question": " why? ", **{f"choice_{x}": x.lower() for x in "ABCD"}}
    filled = fill_v2("Read $DOC$\n$Q$ $C_A$ $C_B$ $C_C$ $C_D$", row)
    assert filled.text == "Read a why? b\nwhy? a b c d", "marks are replaced one after the other, as in the benchmark"
    assert filled.text[filled.question :] == "\nwhy? a b c d"


# ---------------------------------------------------------------------------------------------------------------- fixtures

TEMPLATES = {
    "trec": "Which type?\n{context}\n{input}",
    "qasper": "Article: {context}\n\nQuestion: {input}\n\nAnswer:",
    "samsum": "Sum it up.\n{context}\n{input}",
    "passage_retrieval_en": "{context}\n{input}\nThe answer is: ",
    "lcc": "Go on.\n{context}Next line:\n",
}
CLASSES = ["Food", "Date", "Order"]


def row(number, **fields):
    base = {"_id": f"id{number}", "context": f"Some words {number}. " * 12, "input": f"What is {number}?", "answers": ["Food"]}
    return {**base, "length": 3000 * number, "dataset": "x", "language": "en", "all_classes": CLASSES, **fields}


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows))


@pytest.fixture
def data(tmp_path):
    """A data folder with made-up files of every version."""
    folder = tmp_path / "data"
    for name in TEMPLATES:
        answers = {"passage_retrieval_en": ["Paragraph 2"]}.get(name, ["Food"])
        for end in ("", "_e"):
            rows = [row(number, answers=answers) for number in range(1, 4)]
            write(folder / "longbench" / f"{name}{end}.jsonl", *rows)
    (folder / "longbench" / PROMPTS).write_text(json.dumps(TEMPLATES))
    (folder / "longbench" / LENGTHS).write_text(json.dumps(dict.fromkeys(TEMPLATES, 6)))
    golds = [{"answers": ["Food"], "all_classes": str(CLASSES)}, {"answers": ["Date"], "all_classes": CLASSES}]
    mini = {
        str(n): {"origin_prompt": f"Examples.\nQuestion: What is {n}?\nType:", "prediction": "Food", "gold": gold}
        for n, gold in enumerate(golds)
    }
    mini["7"] = {**mini["0"], "origin_prompt": [{"role": "HUMAN", "prompt": "One message. Question: Who?"}]}
    (folder / "minilongbench").mkdir()
    (folder / "minilongbench" / "MiniLongBench_trec.json").write_text(json.dumps(mini))
    (folder / "longbench_v2").mkdir()
    (folder / "longbench_v2" / "data.json").write_text(json.dumps([v2_row(n) for n in range(3)]))
    return folder


def v2_row(number, **fields):
    parts = {"difficulty": ("easy", "hard", "hard")[number], "length": ("short", "short", "long")[number]}
    choices = {f"choice_{letter}": f"thing {letter}" for letter in "ABCD"}
    base = {"_id": f"v{number}", "domain": "Law", "sub_domain": "x", "question": "Which?", "answer": "ABC"[number]}
    return {**base, **parts, **choices, "context": f"Long text {number}. " * 90, **fields}


def task(data, name=None, **settings):
    return LongBench(tasks=(name,) if name else (), data_dir=str(data), **settings)


# ----------------------------------------------------------------------------------------------------------------- samples


def test_samples_of_a_dataset(data):
    samples = task(data, "qasper").samples(CHAT)
    assert [sample.id for sample in samples] == ["id1", "id2", "id3"]
    text = CHAT.decode(samples[0].prompt.ids)
    assert text == f"<user>Article: {'Some words 1. ' * 12}\n\nQuestion: What is 1?\n\nAnswer:\n<assistant>"
    tail = CHAT.decode(samples[0].prompt.ids[-samples[0].prompt.question :])
    assert tail == "Question: What is 1?\n\nAnswer:\n<assistant>"
    assert samples[0].new_tokens == 6 and samples[0].answers == ("Food",)
    assert CHAT.decode(samples[0].gold) == "Food"
    assert samples[1].fields == {"length": 6000, "tokens": samples[1].fields["tokens"], "truncated": False}
    assert task(data, "qasper", chat=False).samples(CHAT) == task(data, "qasper").samples(TOKENIZER)
    assert TOKENIZER.decode(task(data, "qasper").samples(TOKENIZER)[0].gold) == " Food", "Answer: Food"
    assert len(task(data, "qasper", limit=2).samples(TOKENIZER)) == 2
    long = [row(1, answers=["x" * 200])]
    write(data / "longbench" / "qasper.jsonl", *long)
    assert len(task(data, "qasper").samples(TOKENIZER)[0].gold) == 64


def test_few_shot_prompts_and_code_stay_out_of_the_chat_template(data):
    for name in ("trec", "samsum", "lcc"):
        assert task(data, name).samples(CHAT) == task(data, name).samples(TOKENIZER)
        assert "<user>" in CHAT.decode(task(data, name, chat=True).samples(CHAT)[0].prompt.ids)
    with pytest.raises(SettingError, match="task.chat=false"):
        task(data, "trec", chat=True).samples(TOKENIZER)
    assert task(data, "lcc").samples(TOKENIZER)[0].prompt.question == 0, "no question that is known of"


def test_truncated_prompts_fit(data):
    plain, cut = (task(data, "qasper", max_length=n).samples(TOKENIZER)[0] for n in (1000, 100))
    assert len(cut.prompt.ids) == 100 and cut.fields["truncated"] and not plain.fields["truncated"]
    assert cut.fields["tokens"] == plain.fields["tokens"] == len(plain.prompt.ids)
    assert cut.prompt.ids[:50] == plain.prompt.ids[:50] and cut.prompt.ids[-50:] == plain.prompt.ids[-50:]


def test_minilongbench(data):
    mini = task(data, "trec", version="mini")
    first, second, third = mini.samples(TOKENIZER)
    assert [sample.id for sample in (first, second, third)] == ["0", "1", "7"] and mini.label == "minilongbench-trec"
    assert TOKENIZER.decode(first.prompt.ids[-first.prompt.question :]) == "Question: What is 0?\nType:"
    assert TOKENIZER.decode(third.prompt.ids[1:]) == "One message. Question: Who?"
    assert first.new_tokens == 6, "lengths are those of the first version, beside it"
    assert mini.grade(first, "Food and Date")["score"] == 0.5 and mini.grade(second, "Food")["score"] == 0
    (data / "longbench" / LENGTHS).unlink()
    with pytest.raises(SettingError, match="nothing says how long outputs of trec are.*task.new_tokens"):
        task(data, "trec", version="mini").data_hash()
    assert task(data, "trec", version="mini", new_tokens=9).samples(TOKENIZER)[0].new_tokens == 9


def test_longbench_v2(data):
    v2 = task(data, version="v2")
    assert v2.label == "longbench_v2-own_wording" and v2._new_tokens == 128
    samples = v2.samples(TOKENIZER)
    fields = {"length": "short", "domain": "Law", "difficulty": "hard", "truncated": False}
    assert samples[1].fields == {**fields, "tokens": len(samples[1].prompt.ids)}
    assert TOKENIZER.decode(samples[0].gold).strip() == "The correct answer is (A)"
    assert "(B) thing B" in TOKENIZER.decode(samples[0].prompt.ids[-samples[0].prompt.question :])
    values = v2.grade(samples[1], " The correct answer is (B)")
    assert values == {"score": 1.0, "score_hard": 1.0, "score_short": 1.0, "answered": 1.0}
    records = [{"id": s.id, "values": v2.grade(s, "The correct answer is (A)")} for s in samples]
    found = v2.metrics(records)
    assert found["score"].value == pytest.approx(1 / 3) and found["score"].chance == 0.25
    assert {name: metric.n for name, metric in found.items() if "_" in name} == {
        "score_easy": 1,
        "score_hard": 2,
        "score_short": 2,
        "score_long": 1,
    }
    prompts = data / "longbench_v2" / "prompts"
    prompts.mkdir()
    (prompts / "0shot.txt").write_text("$DOC$ Now: $Q$ $C_A$ $C_B$ $C_C$ $C_D$")
    theirs = task(data, version="v2")
    assert theirs.label == "longbench_v2" and theirs.data_hash() != v2.data_hash()
    assert TOKENIZER.decode(theirs.samples(TOKENIZER)[0].prompt.ids).endswith("Now: Which? thing A thing B thing C thing D")


def test_what_changes_prompts_is_part_of_the_data(data, tmp_path):
    hashes = [task(data, "qasper").data_hash(), task(data, "trec").data_hash()]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"qasper": "{context}{input}"}))
    hashes.append(task(data, "qasper", prompt_file=str(other)).data_hash())
    write(data / "longbench" / "qasper.jsonl", row(1))
    hashes.append(task(data, "qasper").data_hash())
    assert len(set(hashes)) == 4


# ---------------------------------------------------------------------------------------------------------------- bad data


@pytest.mark.parametrize(
    ("name", "version", "bad", "message"),
    [
        ("qasper", "v1", {"context": None}, "the field 'context' is missing or empty"),
        ("qasper", "v1", {"input": ""}, "the field 'input' is missing or empty"),
        ("qasper", "v1", {"answers": None}, "the field 'answers' is missing"),
        ("qasper", "v1", {"answers": []}, "the answers must be a list of texts, not all empty"),
        ("qasper", "v1", {"answers": "Food"}, "the answers must be a list of texts"),
        ("qasper", "v1", {"answers": [" "]}, "not all empty"),
        ("trec", "v1", {"all_classes": None}, "'all_classes' must be a list of texts"),
        ("trec", "v1", {"answers": ["Fish"]}, "the answer 'Fish' isn't among all_classes"),
        ("passage_retrieval_en", "v1", {"answers": ["two"]}, "the answer 'two' must name a paragraph"),
        ("qasper", "e", {"length": "long"}, "the field 'length' must be a number"),
    ],
)
def test_bad_rows_are_named(data, name, version, bad, message):
    good = {"answers": ["Paragraph 2"]} if name in ("passage_retrieval_en",) else {}
    file = data / "longbench" / (f"{name}_e.jsonl" if version == "e" else f"{name}.jsonl")
    write(file, row(1, **good), row(2, **bad), row(3, **good))
    some = task(data, name, version=version)
    assert [sample.id for sample in some.samples(TOKENIZER)] == ["id1", "id3"]
    assert len(some.left_out) == 1 and f"{file}, row 2: " in some.left_out[0] and message in some.left_out[0]
    with pytest.raises(SettingError, match=f"row 2: .*{message.split('(')[0]}"):
        task(data, name, version=version, bad_rows="stop").data_hash()


def test_bad_rows_of_the_other_versions(data):
    file = data / "longbench_v2" / "data.json"
    file.write_text(json.dumps([v2_row(0), v2_row(1, answer="E"), v2_row(2, choice_C=None), v2_row(2, choice_A=3, _id="z")]))
    v2 = task(data, version="v2")
    assert len(v2.samples(TOKENIZER)) == 1
    assert [line.split("row ")[1] for line in v2.left_out] == [
        "2: 'answer' is 'E', and the choices are A, B, C and D",
        v2.left_out[1].split("row ")[1],
        "4: 'choice_A' must be text",
    ]
    assert "row 3: the field 'choice_C' is missing" in v2.left_out[1]
    file = data / "minilongbench" / "MiniLongBench_trec.json"
    rows = json.loads(file.read_text())
    rows |= {
        "8": {"gold": rows["0"]["gold"]},
        "9": {"origin_prompt": "x"},
        "10": 3,
        "11": {**rows["0"], "origin_prompt": [1, 2]},
    }
    file.write_text(json.dumps(rows))
    mini = task(data, "trec", version="mini")
    assert len(mini.samples(TOKENIZER)) == 3
    wanted = (
        "row 4: the field 'origin_prompt'",
        "row 5: the field 'gold'",
        "row 6: no JSON object",
        "row 7: 'origin_prompt' must",
    )
    assert all(want in line for want, line in zip(wanted, mini.left_out, strict=True))


def test_files_that_cannot_be(data, tmp_path):
    file = data / "longbench" / "qasper.jsonl"
    file.write_text("")
    with pytest.raises(SettingError, match="qasper.jsonl has no rows"):
        task(data, "qasper").data_hash()
    write(file, row(1), row(1))
    with pytest.raises(SettingError, match=r"row 2: its id 'id1' is that of row 1 too"):
        task(data, "qasper").data_hash()
    mini = data / "minilongbench" / "MiniLongBench_trec.json"
    for text, message in (("", "has no rows"), ("[1]", "hold an object of rows"), ("{", "no JSON that can be read")):
        mini.write_text(text)
        with pytest.raises(SettingError, match=message):
            mini_rows(mini)
    write(file, row(1))
    (data / "longbench" / PROMPTS).write_text(json.dumps({"qasper": "no context"}))
    with pytest.raises(SettingError, match="no template of qasper with {context} in .*task.prompt_file"):
        task(data, "qasper").data_hash()
    (data / "longbench" / PROMPTS).write_text("{")
    with pytest.raises(SettingError, match="can't be read as LongBench's dataset2prompt.json"):
        task(data, "qasper").data_hash()
    with pytest.raises(SettingError, match="MiniLongBench_lcc.json isn't there: get pred_data/"):
        task(data, "lcc", version="mini").data_hash()
    with pytest.raises(SettingError, match="task.data_dir=.*no such folder"):
        task(tmp_path / "none", "qasper").data_hash()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "task.tasks must be given"),
        ({"tasks": ("qaper",)}, "no dataset 'qaper' .did you mean qasper"),
        ({"tasks": ("musique",), "version": "e"}, "no dataset 'musique'"),
        ({"tasks": ("trec",), "version": "v2"}, "LongBench v2 is one dataset"),
        (
            {"tasks": ("trec",), "version": "mini", "prompt_file": "x.json"},
            "task.prompt_file: MiniLongBench's prompts are whole",
        ),
        ({"tasks": ("trec",), "max_length": 1}, "task.max_length=1: use at least 2"),
        ({"tasks": ("trec",), "new_tokens": 0}, "use at least 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(SettingError, match=message):
        LongBench(**settings)


def test_rows_come_from_the_hub_where_there_are_none(data, tmp_path, monkeypatch):
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(data / "longbench" / "qasper.jsonl", "data/qasper.jsonl")
    (data / "longbench" / "qasper.jsonl").unlink()
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SettingError, match=r"qasper.jsonl isn't there, and THUDM/LongBench can't be had from the hub \("):
        task(data, "qasper").data_hash()
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names, **more: asked.append(names) or str(archive))
    assert len(task(data, "qasper").samples(TOKENIZER)) == 3 and asked == [("THUDM/LongBench", "data.zip")]
    with pytest.raises(SettingError, match="can't be had from the hub"):
        task(data, "hotpotqa").data_hash()


def test_a_missing_package_is_named(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(SettingError, match=r"need the package rapidfuzz: pip install 'kvlab\[evals\]'"):
        task(data, "lcc").data_hash()
    task(data, "qasper").data_hash()


# -------------------------------------------------------------------------------------------------------------- generation


def naive_generate(prompt, new_tokens, ends):
    """Greedy, by whole forward passes; an end can't come first, and isn't part of the output."""
    ids = list(prompt)
    for step in range(new_tokens):
        logits = shared_model("llama")(torch.tensor([ids]), use_cache=False).logits[0, -1]
        if not step:
            logits[ends] = -torch.inf
        token = logits.argmax().item()
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_samsums_end_cannot_come_first(data):
    prompts = [TOKENIZER(text).input_ids for text in ("Some dialogue here.", "Another one: who said what?")]
    free = [naive_generate(prompt, 8, [2]) for prompt in prompts]
    assert task(data, "samsum").generation(TOKENIZER) == {"min_new_tokens": 1, "ends": [3 + ord("\n")]}
    assert task(data, "qasper").generation(TOKENIZER) == {}
    shortened = 0
    for end in {free[0][0], free[0][3], free[1][0]}:
        with attach(shared_model("llama"), make_policy("full")) as session:
            reading = Reader(session, PromptProtocol()).read([Prompt(tuple(prompt)) for prompt in prompts])
            found = reading.generate(8, TOKENIZER, ends=[end], min_new_tokens=1)
        assert found == [naive_generate(prompt, 8, [2, end]) for prompt in prompts]
        shortened += sum(len(one) < 8 for one in found)
    assert shortened, "an end came"


# -------------------------------------------------------------------------------------------------------------- whole runs


def arguments(data, out, *more):
    return [*TINY, "task=longbench", f"task.data_dir={data}", f"output_dir={out}", "runtime.batch_size=2", *more]


def test_a_run_writes_the_benchmarks_own_files(data, tmp_path, capsys):
    run = arguments(data, tmp_path / "out", "task.tasks=[trec,samsum]", "policy=full,snapkv", "protocol.hold_back=1")
    assert kvlab("run", *run) == 0
    told = capsys.readouterr()
    assert "longbench-trec" in told.out and "longbench-samsum" in told.out
    folders = sorted((tmp_path / "out" / "debug" / "longbench" / "pred").iterdir())
    assert [folder.name.rsplit("-", 1)[0] for folder in folders] == ["tiny-llama--full--no_limit", "tiny-llama--snapkv--20pct"]
    for folder in folders:
        assert sorted(file.name for file in folder.glob("[a-z]*")) == ["result.json", "samsum.jsonl", "trec.jsonl"]
        lines = [json.loads(line) for line in (folder / "trec.jsonl").read_text().splitlines()]
        assert [list(line) for line in lines] == 3 * [["pred", "answers", "all_classes", "length"]]
        scores = json.loads((folder / "result.json").read_text())
        for name, value in scores.items():
            rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            each = [metrics.score(name, one["pred"], one["answers"], one["all_classes"]) for one in rows]
            assert value == round(100 * sum(each) / len(each), 2)
    cells = {path: result for path, result in results(tmp_path / "out").items() if "schema" in result}
    assert len(cells) == 4 and all("rapidfuzz" in cell["provenance"]["versions"] for cell in cells.values())
    assert {cell["query_aware"] for cell in cells.values()} == {True}
    assert kvlab("table", str(tmp_path / "out")) == 0
    assert "left out" not in capsys.readouterr().out, "the benchmark's result.json is no cell's"
    code, out, _ = kvlab("score", "longbench", str(folders[0]), capsys=capsys)
    assert code == 0 and "mean of datasets" in out
    assert {line.split()[0] for line in out.splitlines()} == {"dataset", "trec", "samsum", "mean"}


def test_longbench_e_scores_by_length(data, tmp_path, capsys):
    run = arguments(data, tmp_path / "out", "task.tasks=[qasper,lcc]", "task.version=e")
    assert kvlab("run", *run) == 0
    (folder,) = (tmp_path / "out" / "debug" / "longbench" / "pred_e").iterdir()
    found = json.loads((folder / "result.json").read_text())
    cells = {result["task"]: result for result in results(tmp_path / "out").values() if "schema" in result}
    assert set(cells) == {"longbench_e-qasper", "longbench_e-lcc"}
    for name, scores in found.items():
        own = cells[f"longbench_e-{name}"]["metrics"]
        assert list(scores) == ["0-4k", "4-8k", "8k+"]
        assert {part: own[f"score_{part}"]["n"] for part in scores} == {"0-4k": 1, "4-8k": 1, "8k+": 1}
        assert scores == {part: round(100 * own[f"score_{part}"]["value"], 2) for part in scores}
    capsys.readouterr()
    code, out, _ = kvlab("score", "longbench", str(folder), capsys=capsys)
    assert code == 0 and out.splitlines()[0].split() == ["dataset", "metric", "rows", "score", "0-4k", "4-8k", "8k+"]
    assert kvlab("table", str(tmp_path / "out"), "--by", "bucket") == 0


def test_a_run_of_longbench_v2(data, tmp_path, capsys):
    assert kvlab("run", *arguments(data, tmp_path / "out", "task.version=v2", "task.new_tokens=5")) == 0
    (folder,) = (tmp_path / "out" / "debug" / "longbench" / "pred_v2").iterdir()
    rows = [json.loads(line) for line in (folder / "v2.jsonl").read_text().splitlines()]
    assert [(one["_id"], one["pred"], one["judge"], len(one["context"])) for one in rows] == [
        (f"v{number}", None, False, 1000) for number in range(3)
    ]
    assert {"response", "question", "choice_A", "answer", "difficulty", "length"} < set(rows[0])
    judged = [{**one, "judge": number > 0} for number, one in enumerate(rows)]
    assert v2_totals(judged) == {"overall": 66.7, "easy": 0.0, "hard": 100.0, "short": 50.0, "medium": None, "long": 100.0}
    capsys.readouterr()
    code, out, _ = kvlab("score", "longbench", str(folder), capsys=capsys)
    assert code == 0 and out.splitlines()[0].split()[3:] == ["overall", "easy", "hard", "short", "medium", "long"]


def test_an_interrupted_run_ends_like_another(data, tmp_path, monkeypatch):
    run = ["task.tasks=[qasper]", "policy=h2o", "runtime.batch_size=1"]
    assert kvlab("run", *arguments(data, tmp_path / "whole", *run)) == 0
    done, evaluate = [], LongBench.evaluate

    def interrupted(self, reading, samples, tokenizer):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(samples)
        return evaluate(self, reading, samples, tokenizer)

    monkeypatch.setattr(LongBench, "evaluate", interrupted)
    assert kvlab("run", *arguments(data, tmp_path / "parts", *run)) == 130
    (lines,) = sample_lines(tmp_path / "parts").values()
    assert len(lines) == 2
    monkeypatch.setattr(LongBench, "evaluate", evaluate)
    assert kvlab("run", *arguments(data, tmp_path / "parts", *run)) == 0
    files = [sorted((tmp_path / part / "debug" / "longbench").rglob("[a-z]*.json*")) for part in ("whole", "parts")]
    assert [file.read_text() for file in files[0]] == [file.read_text() for file in files[1]] and len(files[0]) == 2
    scores = [
        next(result["metrics"]["score"] for result in results(tmp_path / part).values() if "schema" in result)
        for part in ("whole", "parts")
    ]
    assert scores[0] == scores[1]


def test_predictions_that_cannot_be_scored(data, tmp_path, capsys):
    def told(*arguments):
        code, _, err = kvlab("score", "longbench", *map(str, arguments), capsys=capsys)
        assert code == 2 and err.count("\n") == 1
        return err

    write(tmp_path / "trec.jsonl", {"pred": "x", "answers": ["Food"], "all_classes": CLASSES}, {"answers": ["Food"]})
    assert "trec.jsonl, row 2: the field 'pred' is missing" in told(tmp_path / "trec.jsonl")
    write(tmp_path / "lcc.jsonl", {"pred": "x", "answers": ["x"]})
    assert "row 1: no field 'length'" in told(tmp_path / "lcc.jsonl", "-o", "by=length")
    assert "-o by=size: for longbench there is by=length" in told(tmp_path / "lcc.jsonl", "-o", "by=size")
    assert "-o by: use NAME=VALUE" in told(tmp_path, "-o", "by")
    write(tmp_path / "mine.jsonl", {"pred": "x"})
    assert "has the field 'judge'" in told(tmp_path / "mine.jsonl")
    write(tmp_path / "mine.jsonl", {"judge": True}, {"judge": "yes"})
    assert "mine.jsonl, row 2: a prediction of LongBench v2 has the field 'judge', true or false" in told(
        tmp_path / "mine.jsonl"
    )
    write(tmp_path / "qmsum.jsonl", {"pred": "x", "answers": ["x"], "length": "5000"})
    assert "row 1: 'length' is '5000', and must be a number" in told(tmp_path / "qmsum.jsonl", "-o", "by=length")
    assert "no such file or folder" in told(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "holds no predictions" in told(tmp_path / "empty")
    assert kvlab("score", "longbnch", str(tmp_path)) == 2
    assert "did you mean longbench" in capsys.readouterr().err


@pytest.mark.skipif(not DATA or not (Path(DATA) / "longbench").is_dir(), reason="no longbench in KVLAB_DATA_DIR")
def test_real_files(tmp_path):
    for name, new_tokens in (("multi_news", 512), ("passage_retrieval_zh", 32)):
        real = LongBench(tasks=(name,), data_dir=DATA, limit=3, max_length=1000)
        samples = real.samples(TOKENIZER)
        assert len(samples) == 3 and not real.left_out and samples[0].new_tokens == new_tokens
        assert samples[0].fields["truncated"], "a half may begin or end inside a character, so lengths aren't exact"
        assert real.grade(samples[0], samples[0].answers[0])["score"] == pytest.approx(1)
    for name in DATASETS:
        mini = LongBench(tasks=(name,), version="mini", data_dir=DATA, limit=2, max_length=300)
        samples = mini.samples(TOKENIZER)
        assert len(samples) == 2 and not mini.left_out
        assert mini.grade(samples[0], samples[0].answers[0])["score"] == pytest.approx(1, abs=1e-6)
