"""task=alpaca: verdicts against plain forward passes, both orders, resuming, a real endpoint, AlpacaEval's files."""

import csv
import json
import math
import statistics
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from conftest import shared_model
from kvlab.evals import task_class
from kvlab.evals.alpaca import judges
from kvlab.evals.alpaca.endpoint import EndpointJudge
from kvlab.evals.alpaca.files import Output
from kvlab.evals.alpaca.judges import LocalJudge, Verdict, compare, model_first
from kvlab.evals.alpaca.task import Alpaca
from kvlab.evals.alpaca.verdicts import FILE, Annotations, Pair, annotate, doubts
from kvlab.settings import SettingError, build
from kvlab.tiny import tiny_tokenizer
from running import kvlab, results, sample_lines

TOKENIZER = tiny_tokenizer()
TEXTS = [f"Say something about {thing}." for thing in ("stones", "rain", "salt", "the moon", "glass")]


# ---------------------------------------------------------------------------------------------------------- judges


class Scripted:
    """Likes the longer output and the first position."""

    name, identity, parameters = "scripted", "scripted 1", 5

    def __init__(self, silent=()):
        self.asked, self.silent = [], silent

    def ask(self, instruction, first, second):
        self.asked.append((instruction, first, second))
        if (first, second) in self.silent:
            return Verdict(None, "?")
        return Verdict(0.5 + (0.2 if len(second) > len(first) else -0.2) - 0.1, f"{first}|{second}")


def test_both_orders_count_alike_and_the_bias_is_told_apart():
    judge = Scripted()
    found = compare(judge, "x", "short", "much longer")
    assert {pair[1:] for pair in judge.asked} == {("short", "much longer"), ("much longer", "short")}
    # Reference first: 0.6 for the model; model first: 0.2 for the reference, so 0.8 for the model.
    assert found.preference == pytest.approx(1 + (0.6 + 0.8) / 2)
    # The first position got 0.4 and 0.8.
    assert found.first == pytest.approx((0.4 + 0.8) / 2 - 0.5) == pytest.approx(0.1)
    assert found.raw == {"reference_first": "short|much longer", "model_first": "much longer|short"}


def test_the_order_of_one_is_a_coin_thrown_by_the_instruction():
    coins = [model_first(f"instruction {n}") for n in range(400)]
    assert coins == [model_first(f"instruction {n}") for n in range(400)] and 150 < sum(coins) < 250
    for text in TEXTS:
        judge = Scripted()
        found = compare(judge, text, "ref", "output", "one")
        assert len(judge.asked) == 1 and (judge.asked[0][1] == "output") == model_first(text)
        assert found.preference == pytest.approx(1.8 if model_first(text) else 1.6)


def test_equal_outputs_are_a_tie_and_a_missing_order_leaves_no_verdict():
    judge = Scripted(silent={("a", "bb")})
    assert compare(judge, "x", "same", "same").preference == 1.5 and not judge.asked
    found = compare(judge, "x", "a", "bb")
    assert found.preference is None and found.first is None and found.raw["reference_first"] == "?"


@pytest.mark.parametrize("chat", [False, True])
def test_a_local_verdict_is_what_a_plain_forward_says(chat):
    tokenizer = tiny_tokenizer()
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
        )
    model = shared_model("llama")
    judge = LocalJudge(lambda: (model, tokenizer), "tiny")
    found = judge.ask("Say x.", "one", "two")
    text = judges.QUESTION.format(instruction="Say x.", first="one", second="two")
    text = f"<user>{text}\n<a>" if chat else text + "\n\n"
    ids = tokenizer(text + judges.ANSWER_START + " ", add_special_tokens=not chat).input_ids
    row = model(torch.tensor([ids])).logits[0, -1].double()
    one, two = (row[tokenizer(label, add_special_tokens=False).input_ids[-1]].item() for label in "12")
    assert found.second == pytest.approx(math.exp(two) / (math.exp(one) + math.exp(two)), rel=1e-5)
    assert sum(found.raw.values()) < 1 and judge.parameters == sum(p.numel() for p in model.parameters())
    assert found.second == pytest.approx(found.raw["2"] / (found.raw["1"] + found.raw["2"]))


def test_a_question_beyond_the_judges_context_has_no_verdict():
    judge = LocalJudge(lambda: (shared_model("llama"), TOKENIZER), "tiny")
    assert judge.ask("x", "word " * 600, "y").second is None
    found = compare(judge, "x", "word " * 600, "y")
    assert found.preference is None and "the judge's context 2048" in found.raw["model_first"]


def test_a_tokenizer_without_labels_can_not_judge():
    class Blind:
        chat_template, bos_token_id, eos_token_id = None, 0, 1

        def __call__(self, text, add_special_tokens=True):
            return type("Ids", (), {"input_ids": [3] * len(text.split())})()

    with pytest.raises(SettingError, match="tell 1 from 2"):
        LocalJudge(lambda: (shared_model("llama"), Blind()), "blind").ask("x", "a", "b")


# -------------------------------------------------------------------------------------------------------- endpoint


@contextmanager
def endpoint(*answers):
    """A server that gives these answers (code, body) in turn, the last one for ever; its address, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, dict(self.headers), json.loads(body)))
            code, reply, *headers = answers[min(len(asked), len(answers)) - 1]
            self.send_response(code)
            for header in headers:
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def says(text, *places):
    logprobs = {"content": [{"token": token, "top_logprobs": top} for token, top in places]} if places else None
    return 200, {"choices": [{"message": {"content": text}, "logprobs": logprobs}]}


def tops(**shares):
    return [{"token": name.replace("_", " "), "logprob": math.log(share)} for name, share in shares.items()]


def endpoint_judge(url, retries=2, timeout_s=5.0):
    return EndpointJudge(url, "big", "KVLAB_TEST_KEY", timeout_s, retries, wait_s=0.01)


def test_an_endpoints_probabilities_are_taken_where_it_says_the_label(monkeypatch):
    monkeypatch.setenv("KVLAB_TEST_KEY", "secret")
    top = [{"token": "1", "logprob": math.log(0.6)}, {"token": " 2", "logprob": math.log(0.2)}, {"token": "x", "logprob": -3.0}]
    with endpoint(says(" 1", (" ", tops(_=0.9)), ("1", top))) as (url, asked):
        found = endpoint_judge(url + "/").ask("Say x.", "one", "two")
    assert found.second == pytest.approx(0.25) and found.raw == pytest.approx({"1": 0.6, "2": 0.2})
    path, headers, body = asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["temperature"] == 0 and body["logprobs"] is True and body["model"] == "big"
    assert body["messages"] == [{"role": "user", "content": judges.question("Say x.", "one", "two")}]


@pytest.mark.parametrize(
    ("text", "second"), [("2", 1.0), ("Answer 1.", 0.0), ("**2** of them", 1.0), ("neither", None), ("12", None), (None, None)]
)
def test_an_endpoints_text_is_read_where_it_gives_no_probabilities(text, second):
    with endpoint(says(text)) as (url, asked):
        assert endpoint_judge(url).ask("x", "a", "b").second == second
    assert "Authorization" not in asked[0][1]


def test_an_endpoint_that_knows_no_log_probabilities_is_asked_without():
    refused = (400, {"error": {"message": "logprobs are not supported"}})
    with endpoint(refused, says("2")) as (url, asked):
        judge = endpoint_judge(url)
        assert [judge.ask("x", "a", "b").second for _ in range(2)] == [1.0, 1.0]
    assert ["logprobs" in body for _, _, body in asked] == [True, False, False]


def test_a_busy_endpoint_is_asked_again():
    busy = (429, {"error": {"message": "slow down"}}, ("Retry-After", "0"))
    with endpoint(busy, (503, b"<html>"), says("1")) as (url, asked):
        assert endpoint_judge(url).ask("x", "a", "b").second == 0.0
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "message", "attempts"),
    [
        ((401, {"error": {"message": "bad key"}}), "401 bad key; set the environment variable KVLAB_TEST_KEY", 1),
        ((404, {"error": {"message": "no model big"}}), "404 no model big", 1),
        ((500, b"oops"), r"no answer in 3 attempts \(500 oops\); what was judged is kept", 3),
        ((200, b"no json"), r"no answer in 3 attempts \(the reply is no JSON\)", 3),
        ((200, {"what": 1}), "isn't that of an OpenAI-compatible endpoint", 1),
    ],
)
def test_an_endpoint_that_fails_says_why_in_one_line(answer, message, attempts):
    with endpoint(answer) as (url, asked), pytest.raises(SettingError, match=message) as error:
        endpoint_judge(url).ask("x", "a", "b")
    assert len(asked) == attempts and "\n" not in str(error.value) and "judge_url=http" in str(error.value)


def test_a_reply_that_breaks_off_is_asked_for_again(monkeypatch):
    monkeypatch.setenv("KVLAB_TEST_KEY", "secret\n")
    broken = (200, b'{"choices": [', ("Content-Length", "999"))
    with endpoint(broken, says("2")) as (url, asked):
        assert endpoint_judge(url).ask("x", "a", "b").second == 1.0
    assert len(asked) == 2 and asked[0][1]["Authorization"] == "Bearer secret"
    with endpoint(broken) as (url, _), pytest.raises(SettingError, match=r"no answer in 3 attempts \(IncompleteRead"):
        endpoint_judge(url).ask("x", "a", "b")
    with pytest.raises(SettingError, match="judge_url=http://localhost:80a.*port"):
        endpoint_judge("http://localhost:80a").ask("x", "a", "b")


def test_no_endpoint_at_all():
    with endpoint(says("1")) as (url, _):
        pass
    with pytest.raises(SettingError, match="no answer in 1 attempts.*refused"):
        endpoint_judge(url, retries=0).ask("x", "a", "b")


# -------------------------------------------------------------------------------------------------------- verdicts


def pairs(n=4):
    return [Pair(f"{i}", TEXTS[i % 5], "d", f"out {i}", Output("the reference", "base")) for i in range(n)]


def test_verdicts_are_asked_for_once(tmp_path):
    judge = Scripted()
    first = annotate(tmp_path, pairs(3), judge, "both")
    assert len(judge.asked) == 6 and list(first) == ["0", "1", "2"]
    torn = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(torn[:-20])  # the last line was being written
    judge = Scripted()
    again = annotate(tmp_path, pairs(4), judge, "both")
    assert {pair[0] for pair in judge.asked} == {TEXTS[2], TEXTS[3]} and len(judge.asked) == 4
    assert {name: again[name] for name in first} == first and len(again) == 4
    assert annotate(tmp_path, pairs(4), Scripted(), "both") == again
    for change in ({"identity": "scripted 2"}, {}):
        other = Scripted()
        for name, value in change.items():
            setattr(other, name, value)
        annotate(tmp_path, pairs(4), other, "both" if change else "one")
        assert other.asked, "another judge, or another order, is another verdict"
    assert Annotations(tmp_path / FILE).get("no such key") is None


def test_doubts_about_a_judge():
    row = {"parameters": 135_000_000, "preference": 1.5, "first": 0.3}
    told = doubts([row, {"parameters": None, "preference": None, "first": None}], "smol", "h2o, 20 %")
    assert told[0] == "mechanics only: the judge smol has 135M parameters, too few to tell good answers from bad ones"
    assert "h2o, 20 %: no verdict on 1 of 2" in told[1] and "whichever stands first by 0.30" in told[2]
    assert doubts([{"parameters": 8_000_000_000, "preference": 1.2, "first": -0.05}], "big", "x") == []


# ------------------------------------------------------------------------------------------------------ whole runs


def instructions(tmp_path, rows=None, name="tasks.json"):
    rows = (
        [{"instruction": text, "dataset": "made_up", "output": "", "generator": "x"} for text in TEXTS]
        if rows is None
        else rows
    )
    (tmp_path / name).write_text(json.dumps(rows))
    return tmp_path / name


def command(tmp_path, file, *more, policy="full,h2o"):
    start = ["run", "model=tiny-llama", "task=alpaca", f"task.file={file}", "task.new_tokens=6", f"policy={policy}"]
    return [*start, "budget.ratio=0.3", "logger=none", "runtime.threads=1", f"output_dir={tmp_path}/out", *more]


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVLAB_DATA_DIR", raising=False)


def cells(tmp_path):
    """Results and records by policy."""
    out = tmp_path / "out"
    found, lines = results(out), sample_lines(out)
    return {r["policy"]: (r, [json.loads(line) for line in lines.get(path, [])], out / path) for path, r in found.items()}


MANY = [{"instruction": f"{text} {n}", "dataset": "made_up"} for n in range(3) for text in TEXTS][:12]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A folder with a finished run of full and h2o."""
    folder = tmp_path_factory.mktemp("judged")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KVLAB_DATA_DIR", raising=False)
        assert kvlab(*command(folder, instructions(folder, MANY))) == 0
    return folder


def test_a_policy_is_judged_against_its_own_full_cache(judged, capsys):
    assert kvlab("table", str(judged / "out")) == 0
    told = capsys.readouterr().out
    assert "mechanics only: the judge tiny-llama" in told and "win_rate" in told
    (full, full_records, _), (result, records, folder) = cells(judged)["full"], cells(judged)["h2o"]
    assert full["metrics"]["win_rate"]["value"] == 0.5 and full["metrics"]["win_rate"]["stderr"] == 0
    assert full["notes"] == [] and full["metrics"]["length_controlled_minimal"]["value"] == 0.5
    judge = LocalJudge(lambda: (shared_model("llama"), TOKENIZER), "tiny-llama")  # as if no policy had ever been attached
    wins, biases = [], []
    for ours, theirs in zip(records, full_records, strict=True):
        instruction = MANY[int(ours["id"]) - 1]["instruction"]
        found = compare(judge, instruction, theirs["output"], ours["output"])
        assert ours["values"]["win"] == pytest.approx(found.preference - 1, abs=1e-6)
        wins.append(found.preference - 1)
        biases.append(found.first)
    assert result["metrics"]["win_rate"]["value"] == pytest.approx(statistics.fmean(wins), abs=1e-6)
    assert result["metrics"]["win_rate"]["stderr"] == pytest.approx(statistics.stdev(wins) / 12**0.5, abs=1e-6)
    assert result["metrics"]["position_bias"]["value"] == pytest.approx(statistics.fmean(biases), abs=1e-6)
    controlled = result["metrics"]["length_controlled_minimal"]
    assert result["main_metric"] == "win_rate" and controlled["n"] == 12 and controlled["stderr"] > 0
    says_nothing = any("the fit's penalty left no weights" in note for note in result["notes"])
    assert says_nothing == (controlled["value"] == pytest.approx(0.5, abs=1e-9)), "few comparisons, pulled to 50 %"
    assert len((folder / FILE).read_text().splitlines()) == 12


def test_alpaca_evals_files_are_written(judged, tmp_path):
    (exported,) = (judged / "out/runs/alpaca").glob("tiny-llama--h2o--30_*")
    outputs = json.loads((exported / "model_outputs.json").read_text())
    annotations = json.loads((exported / "annotations.json").read_text())
    assert [row["instruction"] for row in outputs] == [row["instruction"] for row in MANY]
    assert set(outputs[0]) == {"instruction", "output", "generator", "dataset"}
    result, records, _ = cells(judged)["h2o"]
    assert [row["output"] for row in outputs] == [record["output"] for record in records]
    names = {"instruction", "output_1", "output_2", "generator_1", "generator_2", "dataset", "annotator", "preference"}
    assert set(annotations[0]) == names | {"raw_completion"} and annotations[0]["generator_2"] == "tiny-llama--h2o--30 %"
    assert [row["preference"] - 1 for row in annotations] == pytest.approx([record["values"]["win"] for record in records])
    (line,) = csv.DictReader((exported / "leaderboard.csv").open())
    assert float(line["win_rate"]) == pytest.approx(100 * result["metrics"]["win_rate"]["value"])
    assert int(line["n_total"]) == 12 and line["length_controlled_winrate"] == "", "it is a minimal one"
    controlled = result["metrics"]["length_controlled_minimal"]
    assert float(line["length_controlled_minimal_winrate"]) == pytest.approx(100 * controlled["value"])
    assert int(line["avg_length"]) == int(statistics.fmean(len(row["output"]) for row in outputs))
    (alone,) = (judged / "out/runs/alpaca").glob("tiny-llama--full*")
    assert {path.name for path in alone.iterdir()} == {"model_outputs.json"}
    # What was written is a reference for another run.
    more = f"task.reference='{exported}/model_outputs.json'"
    assert kvlab(*command(tmp_path, judged / "tasks.json", more, policy="full")) == 0
    flipped = cells(tmp_path)["full"][1]
    assert [r["values"]["win"] for r in flipped] == pytest.approx([1 - r["values"]["win"] for r in records], abs=1e-6)


def test_an_interrupted_judging_goes_on_where_it_was(judged, tmp_path, monkeypatch):
    file, asked = judged / "tasks.json", []
    real = LocalJudge.ask

    def ask(self, *args):
        asked.append(args[0])
        if len(asked) == 6:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(LocalJudge, "ask", ask)
    assert kvlab(*command(tmp_path, file)) == 130
    texts = [row["instruction"] for row in MANY]
    assert len((next((tmp_path / "out").rglob(FILE))).read_text().splitlines()) == 2, "of the third pair one order was asked"
    assert "h2o" not in cells(tmp_path)
    monkeypatch.setattr(LocalJudge, "ask", lambda self, *args: asked.append(args[0]) or real(self, *args))
    assert kvlab(*command(tmp_path, file)) == 0
    assert asked[6:] == [text for text in texts[2:] for _ in range(2)]
    interrupted, whole = (cells(folder)["h2o"][0] for folder in (tmp_path, judged))
    assert interrupted["metrics"] == whole["metrics"]


def test_without_a_full_cache_there_is_nothing_to_judge_against(tmp_path, capsys):
    file = instructions(tmp_path)
    assert kvlab(*command(tmp_path, file, policy="h2o")) == 1
    assert "run policy=full with the same settings first, or along: policy=full,h2o" in capsys.readouterr().err
    assert len(cells(tmp_path)["h2o"][1]) == 5, "what was generated stays"
    assert kvlab(*command(tmp_path, file)) == 0
    assert "win_rate" in cells(tmp_path)["h2o"][0]["metrics"]


def test_an_endpoint_judges_a_run(tmp_path, capsys):
    file = instructions(tmp_path)
    more = ["task.judged_by=openai", "task.judge_model=big", "task.judge_retries=0"]
    with endpoint(says("1"), says("2"), (500, b"")) as (url, asked):
        assert kvlab(*command(tmp_path, file, *more, f"task.judge_url={url}")) == 1
        assert "no answer in 1 attempts" in capsys.readouterr().err and len(asked) == 3
    answers = [says("2"), says("neither"), says("2"), says("1"), says("2"), says("1"), says("2"), says("1")]
    with endpoint(*answers) as (url, asked):
        file_out = next((tmp_path / "out").rglob(FILE))
        assert len(file_out.read_text().splitlines()) == 1
        assert kvlab(*command(tmp_path, file, *more, f"task.judge_url={url}", "task.orders=one", "name=b")) == 0
    assert "no verdict on 1 of 5 outputs" in capsys.readouterr().out
    result = next(r for r in results(tmp_path / "out/b").values() if r["policy"] == "h2o")
    assert result["metrics"]["win_rate"]["n"] == 4 and not any("mechanics" in note for note in result["notes"])


def test_outputs_alone(tmp_path):
    assert kvlab(*command(tmp_path, instructions(tmp_path), "task.judged_by=none", policy="h2o")) == 0
    result = cells(tmp_path)["h2o"][0]
    assert set(result["metrics"]) == {"words", "length"} and result["notes"] == []
    (exported,) = (tmp_path / "out/runs/alpaca").iterdir()
    assert [path.name for path in exported.iterdir()] == ["model_outputs.json"]


def test_bad_instructions_are_left_out_and_named(tmp_path, capsys):
    rows = [{"instruction": TEXTS[0]}, {"instrution": "misspelt"}, {"instruction": "  "}, 7, {"instruction": TEXTS[1]}]
    file = instructions(tmp_path, rows)
    reference = instructions(tmp_path, [{"instruction": TEXTS[1], "output": "Rain falls.", "generator": "them"}], "ref.json")
    assert kvlab(*command(tmp_path, file, policy="full")) == 0
    told = capsys.readouterr().err
    assert "3 rows of task alpaca left out" in told and "tasks.json, row 2: the field 'instruction' is missing" in told
    assert [record["id"] for record in cells(tmp_path)["full"][1]] == ["00001", "00005"]
    more = [f"task.reference={reference}", "name=b"]
    assert kvlab(*command(tmp_path, file, *more, policy="full")) == 0
    (result,) = results(tmp_path / "out/b").values()
    assert (
        "row 1: task.reference=" in result["left_out"]["why"][0]
        and "no output for this instruction" in result["left_out"]["why"][0]
    )
    assert result["left_out"]["rows"] == 4 and result["metrics"]["win_rate"]["n"] == 1
    with pytest.raises(SettingError, match="row 2: the field 'instruction' is missing"):
        Alpaca(file=str(file), bad_rows="stop").data_hash()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give task.file, or set KVLAB_DATA_DIR"),
        ({"limit": 0}, "task.limit=0"),
        ({"new_tokens": 0}, "task.new_tokens=0"),
        ({"judged_by": "openai"}, "needs task.judge_url and task.judge_model"),
        ({"judge_url": "http://x"}, "use task.judged_by=openai"),
        ({"judged_by": "openai", "judge_url": "localhost", "judge_model": "m"}, "such as http://localhost:8000/v1"),
        ({"judged_by": "none", "judge_model": "m"}, "leave it out"),
        ({"judged_by": "oracle"}, "one of local, openai, none"),
        ({"judge_timeout": 0.0}, "judge_timeout"),
        ({"data_dir": "/nowhere"}, "no such folder"),
        ({"file": "/nowhere.json"}, "task.file=/nowhere.json: there is no such file"),
        ({"reference": "/nowhere.json"}, "task.reference=/nowhere.json: there is no such file"),
    ],
)
def test_settings_that_can_not_be(tmp_path, settings, message):
    given = {"file": str(instructions(tmp_path))} | settings if settings else {}
    with pytest.raises(SettingError, match=message):
        build(task_class("alpaca"), given, "task").data_hash()


def test_files_that_can_not_be_used(tmp_path):
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(SettingError, match="the file is empty"):
        Alpaca(file=str(tmp_path / "empty.json")).data_hash()
    file = str(instructions(tmp_path))
    twice = [{"instruction": TEXTS[0], "output": "a"}, {"instruction": TEXTS[0], "output": "b"}]
    with pytest.raises(SettingError, match=r"ref.json, row 2: another row has the same instruction"):
        Alpaca(file=file, reference=str(instructions(tmp_path, twice, "ref.json"))).data_hash()


def test_length_control_without_scikit_learn_is_said_before_anything_runs(tmp_path, monkeypatch):
    file = str(instructions(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(SettingError, match="task.length_controlled=false"):
        Alpaca(file=file).data_hash()
    assert Alpaca(file=file, length_controlled=False).data_hash() and Alpaca(file=file, judged_by="none").data_hash()


def test_what_a_run_is_identified_by(tmp_path):
    data = tmp_path / "alpaca_eval"
    data.mkdir()
    instructions(data, name="model_outputs_text_davinci_003.json")
    (tmp_path / "moved.json").write_bytes((data / "model_outputs_text_davinci_003.json").read_bytes())
    one, two = Alpaca(data_dir=str(tmp_path)), Alpaca(file=str(tmp_path / "moved.json"))
    assert one.data_hash() == two.data_hash(), "moved data is the same data"
    known = [{"instruction": text, "instruction_difficulty": 0.5} for text in TEXTS]
    instructions(data, known, "instruction_difficulty_recovered.json")
    hard = Alpaca(data_dir=str(tmp_path))
    assert hard.data_hash() != one.data_hash(), "difficulties change the length-controlled win rate"
    assert Alpaca(data_dir=str(tmp_path), length_controlled=False).data_hash() == one.data_hash()
    reference = instructions(tmp_path, [{"instruction": text, "output": "x"} for text in TEXTS], "ref.json")
    assert Alpaca(file=str(tmp_path / "moved.json"), reference=str(reference)).data_hash() != two.data_hash()
    ids = [sample.id for sample in Alpaca(data_dir=str(tmp_path), limit=2).samples(TOKENIZER)]
    assert ids == ["00001", "00002"]
