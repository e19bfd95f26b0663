"""Runs of the task `helm` on a tiny model: records, HELM's files, robustness and calibration, interruptions, the report."""

import json
import math
from pathlib import Path

import pytest
import torch

from conftest import shared_model
from kvlab import Budget, attach, make_policy
from kvlab.evals.helm import Helm
from kvlab.evals.helm.metrics import calibration
from kvlab.evals.helm.scenarios import SCENARIOS
from kvlab.helm_report import helm_report
from kvlab.protocol import PromptProtocol, Reader
from kvlab.settings import SettingError
from kvlab.tiny import tiny_tokenizer
from running import kvlab, results, sample_lines
from test_helm import copa_row, lines

TOKENIZER = tiny_tokenizer()
THINGS = ["Lamp", "Glass", "Clock", "Plate", "Mirror", "Window"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path):
    """Few rows of COPA and BoolQ, made up."""
    floor = "The {} will not work and it is on the floor."
    rows = [copa_row(n, premise=floor.format(name), label=n % 2) for n, name in enumerate(THINGS)]
    lines(tmp_path / "data" / SCENARIOS["copa"].file, *rows)
    boolq = [{"question": f"is {n} old", "passage": f"{n} is not new.", "label": n < "M"} for n in THINGS]
    lines(tmp_path / "data" / SCENARIOS["boolq"].file, *boolq)
    lines(tmp_path / "data" / SCENARIOS["boolq"].train, *boolq[:2])
    return str(tmp_path / "data")


def evaluated(task, policy="full", **budget):
    samples = task.samples(TOKENIZER)
    with attach(shared_model("llama"), make_policy(policy), Budget(**budget) if budget else None) as session:
        reading = Reader(session, PromptProtocol()).read([sample.prompt for sample in samples])
        return samples, task.evaluate(reading, samples, TOKENIZER)


def logprobs_of(prompt, ids):
    """Log-probabilities of a continuation by a plain forward pass."""
    logits = shared_model("llama")(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return logits[-len(ids) :].gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_choices_are_scored_by_the_mean_over_their_tokens(data):
    samples, records = evaluated(Helm(scenarios=("copa",), data_dir=data))
    for sample, record in zip(samples, records, strict=True):
        text = TOKENIZER.decode(sample.prompt.ids, skip_special_tokens=True)
        assert text.endswith("it is on the floor therefore")
        means = []
        for reference in sample.instance.references:
            found = logprobs_of(sample.prompt.ids, TOKENIZER(f" {reference.text}", add_special_tokens=False).input_ids)
            means.append(sum(found) / len(found))
        best = means.index(max(means))
        assert record["choice"] == best and record["values"]["exact_match"] == float(sample.instance.references[best].correct)
        assert record["values"]["max_prob"] == pytest.approx(math.exp(max(means)) / sum(map(math.exp, means)), abs=1e-4)
        assert record["values"]["gold_logprob"] == pytest.approx(means[sample.gold_choice], abs=1e-4)
        for pieces, mean in zip(record["references"], means, strict=True):
            assert sum(logprob for _, logprob in pieces) / len(pieces) == pytest.approx(mean, abs=1e-4)


def test_answers_get_the_probability_of_what_was_generated(data):
    task = Helm(scenarios=("boolq",), data_dir=data, max_train_instances=2, max_tokens=4)
    samples, records = evaluated(task)
    for sample, record in zip(samples, records, strict=True):
        whole = [TOKENIZER.decode(record["trace"][:n], skip_special_tokens=True) for n in range(len(record["trace"]) + 1)]
        kept = next((n for n, text in enumerate(whole) if text.startswith(record["output"])), 0)
        said = record["trace"][: max(1, kept)] or [TOKENIZER.eos_token_id]
        assert record["values"]["max_prob"] == pytest.approx(math.exp(sum(logprobs_of(sample.prompt.ids, said))), rel=1e-3)
        assert TOKENIZER.decode(sample.gold) == f" {sample.answers[0]}" and len(record["trace"]) <= 4
        gold = logprobs_of(sample.prompt.ids, sample.gold)
        assert record["values"]["gold_logprob"] == pytest.approx(sum(gold) / len(gold), abs=1e-4)
    assert task.grade(samples[0], " Yes\n") == dict.fromkeys(SCENARIOS["boolq"].metrics, 1.0)


def test_a_letter_stands_for_its_choice(data):
    task = Helm(scenarios=("copa",), data_dir=data, method="multiple_choice_joint", max_train_instances=0)
    samples, records = evaluated(task)
    sample = samples[1]
    assert sample.mapping == {"A": "it broke.", "B": "it sang."} and TOKENIZER.decode(sample.gold) == " B"
    assert [task.grade(sample, output)["exact_match"] for output in (" B", "B", " A", "C", "it sang.")] == [1, 1, 0, 0, 0]
    assert sample.new_tokens == 2, "this tokenizer has a token for the space"
    assert all(len(record["trace"]) <= 2 for record in records)


def test_a_policy_moves_log_probabilities(data):
    task = Helm(scenarios=("boolq",), data_dir=data, max_train_instances=2, max_tokens=4)
    cells = evaluated(task), evaluated(task, "h2o", ratio=0.3)
    values = [[record["values"]["gold_logprob"] for record in records] for _, records in cells]
    assert max(abs(a - b) for a, b in zip(*values, strict=True)) > 1e-3


def run(data, out, *settings):
    command = ["model=tiny-llama", "task=helm", f"task.data_dir={data}", "logger=none"]
    command += ["runtime.threads=1", "runtime.batch_size=4"]
    return kvlab("run", *command, f"output_dir={out}", "--no-table", *settings)


PERTURBED = "task.perturbations=[typos,contractions,lowercase]"


def test_robustness_and_calibration_are_over_all_records(data, tmp_path):
    assert run(data, tmp_path / "out", "task.scenarios=[copa]", PERTURBED) == 0
    ((path, result),) = results(tmp_path / "out").items()
    records = {record["id"]: record for record in map(json.loads, sample_lines(tmp_path / "out")[path])}
    assert path.startswith("runs/tiny-llama/helm-copa/") and result["main_metric"] == "exact_match"
    assert {name.partition("/")[2] for name in records} == {"", "typos", "contractions", "lowercase"}
    originals = [record for name, record in records.items() if "/" not in name]
    worst = []
    for record in originals:
        mine = [other["values"] for name, other in records.items() if name.split("/")[0] == record["id"]]
        kinds = ("", "/typos", "/contractions", "/lowercase")
        worst.append(min(values[f"exact_match{kind}"] for values in mine for kind in kinds if f"exact_match{kind}" in values))
        assert record["values"]["exact_match/robustness"] == worst[-1]
    metrics = result["metrics"]
    assert metrics["exact_match/robustness"]["value"] == pytest.approx(sum(worst) / 6)
    assert metrics["exact_match"]["n"] == 6 and metrics["exact_match"]["some"] and metrics["exact_match"]["chance"] == 0.5
    assert metrics["exact_match/typos"]["n"] == sum(name.endswith("/typos") for name in records)
    found = calibration([r["values"]["max_prob"] for r in originals], [r["values"]["exact_match"] for r in originals])
    assert metrics["ece_10_bin"]["value"] == pytest.approx(sum(one["ece_10_bin"] for one in found) / 6)
    assert (metrics["ece_10_bin"]["better"], metrics["selective_acc@10"]["n"], metrics["gold_logprob"]["n"]) == ("lower", 1, 6)


FILES = {"run_spec", "scenario", "scenario_state", "per_instance_stats", "stats"}


def test_five_files_are_written_in_helms_form(data, tmp_path):
    settings = ["task.scenarios=[copa,boolq]", "task.max_train_instances=0", "task.max_tokens=3", PERTURBED]
    assert run(data, tmp_path / "out", *settings, "policy=h2o", "budget.ratio=0.5") == 0
    folders = sorted((tmp_path / "out/runs/helm/runs/runs").iterdir())
    assert [folder.name.split(",run=")[0] for folder in folders] == [
        f"{name}:model=tiny-llama,policy=h2o,budget=50pct,protocol=prompt" for name in ("boolq", "copa")
    ]
    for folder, method in zip(folders, ("generation", "multiple_choice_separate_original"), strict=True):
        content = {file.stem: json.loads(file.read_text()) for file in folder.iterdir()}
        assert content.keys() == FILES and content["run_spec"]["name"] == folder.name
        assert content["run_spec"]["adapter_spec"] == content["scenario_state"]["adapter_spec"]
        assert content["run_spec"]["adapter_spec"]["method"] == method
        check_states(content["scenario_state"]["request_states"], method)
        check_stats(content["stats"], content["per_instance_stats"])


def check_states(states, method):
    for state in states:
        request, (completion,) = state["request"], state["result"]["completions"]
        correct = [r["output"]["text"] for r in state["instance"]["references"] if "correct" in r["tags"]]
        assert len(correct) == 1 and state["instance"]["split"] == "test" and request["model"] == "kvlab/tiny-llama"
        assert completion["logprob"] == pytest.approx(sum(token["logprob"] for token in completion["tokens"]))
        if method == "generation":
            assert request["prompt"].endswith(state["instance"]["input"]["text"] + "\nAnswer:") and request["max_tokens"] == 3
        else:
            reference = state["instance"]["references"][state["reference_index"]]["output"]["text"]
            assert request["prompt"] == f"{state['instance']['input']['text']} {reference}" and request["echo_prompt"]
            assert "".join(token["text"] for token in completion["tokens"]) == f" {reference}"
    kinds = {state["instance"].get("perturbation", {}).get("name") for state in states}
    assert kinds == {None, "typos", "contraction", "lowercase"}


def check_stats(stats, instances):
    """Means over instances, and for perturbations the lower of the original and the changed version."""
    whole = {json.dumps(stat["name"], sort_keys=True): stat for stat in stats}
    assert len(whole) == len(stats)
    by = {}  # (instance, perturbation) -> {statistic: value}
    for entry in instances:
        name = entry.get("perturbation", {}).get("name")
        by[entry["instance_id"], name] = {stat["name"]["name"]: stat["mean"] for stat in entry["stats"]}
        assert all(stat["name"].get("perturbation") == entry.get("perturbation") for stat in entry["stats"])
    typos = next(entry["perturbation"] for entry in instances if entry.get("perturbation", {}).get("name") == "typos")
    assert typos == {"name": "typos", "robustness": True, "fairness": False, "computed_on": "perturbed", "prob": 0.1}

    def mean_of(perturbation, metric="exact_match"):
        name = {"name": metric, "split": "test", **({"perturbation": perturbation} if perturbation else {})}
        return whole[json.dumps(name, sort_keys=True)]["mean"]

    def average(values):
        values = list(values)
        return pytest.approx(sum(values) / len(values))

    originals = {name: values for (name, kind), values in by.items() if kind is None}
    changed = {name: values for (name, kind), values in by.items() if kind == "typos"}
    assert mean_of(None) == average(values["exact_match"] for values in originals.values())
    assert mean_of(typos) == average(values["exact_match"] for values in changed.values())
    assert mean_of({**typos, "computed_on": "original"}) == average(originals[name]["exact_match"] for name in changed)
    lower = [min(values["exact_match"], originals[name]["exact_match"]) for name, values in changed.items()]
    assert mean_of({**typos, "computed_on": "worst"}) == average(lower)
    robustness = {"name": "robustness", "robustness": True, "fairness": False, "computed_on": "worst"}
    assert mean_of(robustness) == average(min(v["exact_match"] for (n, _), v in by.items() if n == name) for name in originals)
    for kind, mine in ((None, originals), (typos, changed)):
        added = calibration([v["max_prob"] for v in mine.values()], [v["exact_match"] for v in mine.values()])
        assert mean_of(kind, "ece_10_bin") == average(one["ece_10_bin"] for one in added)
        assert mean_of(kind, "selective_acc@10") == average(one["selective_acc@10"] for one in added if len(one) == 4)
    names = {stat["name"]["name"] for stat in stats}
    assert {"num_instances", "kv_bytes", "prefill_seconds", "inference_runtime", "decode_tokens_per_s"} <= names


def test_an_interrupted_cell_ends_as_an_uninterrupted_one(data, tmp_path, monkeypatch):
    settings = [
        "task.scenarios=[boolq]",
        "task.max_tokens=4",
        "task.max_train_instances=1",
        PERTURBED,
        "policy=h2o",
        "budget.ratio=0.5",
    ]
    assert run(data, tmp_path / "whole", *settings) == 0
    evaluate, calls = Helm.evaluate, []

    def interrupted(self, reading, samples, tokenizer):
        calls.append(samples)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(self, reading, samples, tokenizer)

    monkeypatch.setattr(Helm, "evaluate", interrupted)
    assert run(data, tmp_path / "out", *settings) not in (0, None)
    (begun,) = sample_lines(tmp_path / "out").values()
    assert len(begun) == 8 and not results(tmp_path / "out")
    assert run(data, tmp_path / "out", *settings) == 0
    whole, again = (next(iter(results(tmp_path / name).values())) for name in ("whole", "out"))
    assert again["metrics"] == whole["metrics"]
    assert sum(map(len, calls[3:])) == whole["prompts"]["samples"] - len(begun), "no finished sample is repeated"
    one, two = (next((tmp_path / name).rglob("scenario_state.json")) for name in ("whole", "out"))
    assert without_times(one) == without_times(two)


def without_times(path):
    states = json.loads(path.read_text())["request_states"]
    return [{**state, "result": state["result"]["completions"]} for state in states]


def test_the_report_has_scenarios_policies_and_win_rates(data, tmp_path):
    settings = ["task.scenarios=[copa,boolq]", "task.max_tokens=3", "task.max_train_instances=0"]
    assert run(data, tmp_path / "out", "-m", *settings, "task.perturbations=[lowercase]", "policy=full,h2o") == 0
    shown = helm_report([str(tmp_path / "out")]).split("\n")
    assert shown[0] == "tiny-llama · prompt · values with 95 % bootstrap intervals"
    assert shown[1].split() == ["scenario", "metric", "full", "h2o,", "20", "%"]
    assert [line.split("  ")[0] for line in shown[3:9]] == ["boolq (n = 6)"] * 3 + ["copa (n = 6)"] * 3
    rates = [line.split()[3:] for line in shown[9:]]
    assert [name for name, *_ in rates] == ["accuracy", "robustness", "calibration"]
    assert all(sum(map(float, values)) == pytest.approx(1) for _, *values in rates), "of two policies"
    value = next(r["metrics"]["exact_match"]["value"] for p, r in results(tmp_path / "out").items() if "copa/prompt/full" in p)
    assert f"{value:.3f} [" in shown[6]
    assert "gold_logprob" in helm_report([str(tmp_path / "out")], {"metric": "gold_logprob"})
    calibrated = helm_report([str(tmp_path / "out")], {"metric": "ece_10_bin"}).split("\n")
    assert [line.split()[0] for line in calibrated[3:]] == ["boolq", "copa", "mean"]
    with pytest.raises(SettingError, match="-o metric=rouge_9: no scenario has it.*exact_match"):
        helm_report([str(tmp_path / "out")], {"metric": "rouge_9"})
    with pytest.raises(SettingError, match="did you mean metric"):
        helm_report([str(tmp_path / "out")], {"metrics": "x"})
    assert run(data, tmp_path / "out", "task.scenarios=[copa]", "protocol.hold_back=3") == 0
    both = helm_report([str(tmp_path / "out")])
    assert "boolq (n = 6)" in both and "copa, runs, protocol.hold_back=3" in both, "what differs is told apart"
    assert kvlab("run", "debug=smoke", f"output_dir={tmp_path}/other", "--no-table") == 0
    with pytest.raises(SettingError, match="no finished results of task=helm"):
        helm_report([str(tmp_path / "other")])


def test_a_question_too_long_for_the_context_is_left_out_and_named(data, tmp_path, capsys):
    boolq = [{"question": f"is {text} old", "passage": "It is new.", "label": True} for text in ("x", "a " * 900)]
    lines(tmp_path / "data" / SCENARIOS["boolq"].file, *boolq)
    settings = ["task.scenarios=[boolq]", "task.max_train_instances=0", "task.context=300"]
    assert run(data, tmp_path / "out", *settings) == 0
    ((_, result),) = results(tmp_path / "out").items()
    assert result["prompts"]["samples"] == 1 and result["left_out"]["rows"] == 1
    assert "val.jsonl, row 2: the question alone has" in result["left_out"]["why"][0]
    capsys.readouterr()
    assert run(data, tmp_path / "out", *settings, "task.bad_rows=stop") == 2
    assert "val.jsonl, row 2: the question alone has" in capsys.readouterr().err


def test_summaries_are_run_and_long_articles_cut(tmp_path):
    row = {"article": "###\nArticle: {}\n\nSummarize the above article in 1 sentence.\n", "summary_gt": "A short sentence."}
    rows = [{**row, "article": row["article"].format(text)} for text in ("Some words. " * 9, "More words. " * 300)]
    lines(tmp_path / "data" / SCENARIOS["xsum"].file, *rows)
    assert run(tmp_path / "data", tmp_path / "out", "task.scenarios=[xsum]", "task.max_tokens=8") == 0
    ((_, result),) = results(tmp_path / "out").items()
    assert result["main_metric"] == "rouge_2" and set(result["metrics"]) == {"rouge_2", "rouge_1", "rouge_l", "gold_logprob"}
    (file,) = Path(tmp_path / "out").rglob("scenario_state.json")
    short, long = json.loads(file.read_text())["request_states"]
    assert (short["prompt_truncated"], long["prompt_truncated"]) == (False, True)
    assert short["request"]["prompt"] == rows[0]["article"] and short["request"]["stop_sequences"] == ["###"]
    assert long["request"]["prompt"].endswith("\n\nSummarize the above article in 1 sentence.\n")
    assert result["left_out"]["rows"] == 0
