"""Command lines that can't be: one line that says what to change, exit code 2, and no model loaded."""

import pytest

from running import kvlab

FILES = {
    "empty.txt": "",
    "short.txt": "Only a few words.",
    "binary.txt": b"\xff\xfe\x00caf\xe9",
    "no_prompt.jsonl": '{"prompt": "What is this?"}\n{"promt": "And this?"}\n',
    "other.jsonl": '{"text": "What is this?"}\n',
    "mine/experiment/bare.yaml": "policy: tova\n",
    "mine/experiment/list.yaml": "# @package _global_\npolicy: full,tova\n",
    "broken.jsonl": '{"prompt": "What is this?"}\n{"prompt": "And\n',
    "no_object.jsonl": '"just text"\n',
    "no_list.json": '{"prompt": "one"}',
    "twice.jsonl": '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n',
    "choice.jsonl": '{"prompt": "a", "choices": ["x", "y"], "answer": 2}\n',
    "mixed.jsonl": '{"prompt": "a", "answer": "x"}\n{"prompt": "b"}\n',
    "blank.jsonl": '{"prompt": "  "}\n',
    "long.jsonl": '{"prompt": "' + "word " * 2000 + '"}\n',
    "column.csv": "title,body\na,b\n",
    "model/broken.yaml": "name: broken\npath: nowhere/at-all/here\n",
}

CASES = {
    # typos
    "setting": (["polcy=h2o"], "polcy: there is no such setting (did you mean policy?)"),
    "policy": (["policy=h2"], "policy=h2: there is no such choice (did you mean h2o?)"),
    "task": (["task=perplexty"], "did you mean perplexity"),
    "model": (["model=smollm"], "did you mean smollm2-135m"),
    "protocol": (["protocol=steam"], "did you mean stream"),
    "codec": (["codec=kivi3"], "codec=kivi3: there is no such choice (did you mean kivi"),
    "setting of a codec": (["policy=full", "codec=kivi2", "codec.kivi2.residul=32"], "did you mean residual"),
    "setting beside a codec": (["policy=full", "codec=kivi2", "codec.residual=32"], "codec.kivi2.residual=..."),
    "setting of another codec": (["policy=full", "codec=kivi2", "codec.int4.bit=8"], "codec.int4.bit goes with codec=int4"),
    "setting below a preset": (["policy=full", "codec=kivi2", "codec.kivi.residual=32"], "codec.kivi2.residual=..."),
    "setting of one of two codecs": (
        ["policy=full", "codec=none,kivi2", "codec.kivi2.residual=32"],
        "codec.kivi2.residual goes with codec=kivi2 alone",
    ),
    "two codecs": (["policy=full", "codec=[kivi2,int4]"], "can't be chained"),
    "a list without its key": (["policy=full", "[think,kivi2]"], "[think,kivi2]: not of the form KEY=VALUE"),
    "no name": (["policy=full", "codec="], "codec=: there is no such choice; choices: decoquant"),
    "type of a codec's setting": (
        ["policy=full", "codec=think", "codec.think.drop=40%"],
        "codec.think.drop='40%': use a number",
    ),
    "type of a setting of sharing": (["share=kvsharer", "share.drop=some"], "share.drop='some': use a number"),
    "order, before anything is measured": (["policy=full", "codec=[int4,eigen]"], "codec=[eigen,int4]"),
    "policy, before anything is measured": (["policy=h2o", "codec=[eigen,kivi2]"], "(codec=[eigen,int4])"),
    "codecs in the wrong order": (["policy=full", "codec=[kivi2,think]"], "codec=[think,kivi2]"),
    "setting of a codec in a row": (["policy=full", "codec=[think,kivi2]", "codec.think.dop=0.5"], "did you mean drop"),
    "share of channels": (["policy=full", "codec=think", "codec.think.drop=1"], "codec.think.drop=1.0: use a share from 0"),
    "channels without a prompt": (["policy=full", "codec=[think,int4]", "protocol=stream"], "use protocol=prompt"),
    "channels of rolling keys": (["policy=streaming_llm_paper", "codec=[think,int4]"], "policy.rolling=false"),
    "codec that can't lose tokens": (["policy=h2o", "codec=kivi2"], "codec=int4"),
    "codec that can't lose tokens of a chunk": (
        ["policy=snapkv_paper", "codec=kivi2", "protocol=chunked"],
        "use protocol=prompt",
    ),
    "no process": (["launcher=processes", "launcher.jobs=0"], "launcher.jobs=0: use at least 1"),
    "way of sharing": (["share=kvsharr"], "share=kvsharr: there is no such choice (did you mean kvsharer?)"),
    "setting of sharing": (["share=kvsharer", "share.dorp=0.3"], "did you mean drop"),
    "setting of no sharing": (["share.drop=0.3"], "share.drop goes with share=kvsharer; share=none has no settings"),
    "more than can be shared": (["share=kvsharer", "share.drop=0.6"], "share.drop=0.6: use a share from 0 to 0.5"),
    "sharing that nobody looked for": (["share=kvsharer"], "make one with `kvlab calibrate kvsharer --model tiny-llama`"),
    "sharing in another order": (
        ["share=kvsharer", "share.order=similar"],
        "make one with `kvlab calibrate kvsharer --model tiny-llama -o order=similar`",
    ),
    "artefact that isn't there": (["share=kvsharer", "share.artefact=0123"], "there is no kvsharer artefact 0123 in"),
    "sharing of masks": (["share=kvsharer", "policy=h2o", "protocol=simulate"], "holds nothing to share; use share=none"),
    "setting of a policy": (["policy=h2o", "policy.hevy_share=0.3"], "did you mean heavy_share"),
    "setting of a task": (["task.window=3"], "did you mean windows"),
    "exact": (["protocol.exact=fast"], "protocol.exact='fast': use one of scan, step"),
    "kernels": (["runtime.kernels=fast"], "runtime.kernels='fast': use one of auto, reference, cpu, gpu"),
    "setting of the runtime": (["runtime.bach_size=3"], "did you mean batch_size"),
    "setting of another policy": (["policy=full,h2o", "policy.heavy_share=0.3"], "no setting 'heavy_share'"),
    "new key": (["+foo=1"], "foo: there is no such setting"),
    "new key of a policy": (["policy=h2o", "+policy.foo=1"], "policy h2o has no setting 'foo'"),
    "no value": (["policy"], "policy: not of the form KEY=VALUE"),
    "group without choice": (["policy=null"], "policy=null: choose one of adakv"),
    "setting that one of two lacks": (
        ["policy=snapkv,h2o", "policy.obs_window=4"],
        "policy=h2o has no setting 'obs_window', and others",
    ),
    "number for a group": (["budget=128"], "budget=128: choose one of bytes, none, ratio, tokens; for a number: budget=tokens"),
    "trailing comma": (["budget.ratio=0.1,"], "budget.ratio=0.1,: not of the form KEY=VALUE"),
    "path for a model": (["model=./mine"], "model=path model.path=./mine"),
    "experiment without package": (["--config-dir", "mine", "experiment=bare"], "first line must be `# @package _global_`"),
    "experiment with a list": (["--config-dir", "mine", "experiment=list"], "several under hydra.sweeper.params"),
    "dashes": (["--policy=h2o"], "--policy=h2o: there is no such option"),
    "hold_back under stream": (["protocol=stream", "protocol.hold_back=3"], "protocol=stream has no setting 'hold_back'"),
    "no place": (["output_dir=/dev/null/x"], "output_dir=/dev/null/x can't be written"),
    "unbalanced": (["task.lengths=[1"], "not of the form KEY=VALUE"),
    "command": (["--dryrun"], "--dryrun"),
    # wrong types and values
    "text for a number": (["task.windows=many"], "task.windows='many': use a whole number"),
    "negative": (["task.windows=-1"], "task.windows=-1: use a whole number of at least 0"),
    "zero batch": (["runtime.batch_size=0"], "runtime.batch_size=0: use at least 1"),
    "number for a list": (["task=needle", "task.lengths=500"], "task.lengths=500: use a list, such as [1,2]"),
    "unknown kind": (["task=needle", "task.kind=passky"], "did you mean passkey"),
    "depth": (["task=needle", "task.depths=[1.5]", "model=tiny-llama"], "depth"),
    "dtype": (["runtime.dtype=float8"], "float8"),
    "device": (["runtime.device=cuda:99"], "cuda:99"),
    "seed": (["seed=-1"], "seed=-1: use a whole number"),
    "name": (["name=../up"], "name='../up'"),
    "logger": (["logger=wandb", "logger.mode=sometimes"], "logger.mode='sometimes': use one of auto, online, offline"),
    "share": (["policy=h2o", "policy.heavy_share=2"], "heavy_share=2"),
    # budgets
    "ratio 0": (["budget.ratio=0"], "budget.ratio=0.0: use a number above 0 and at most 1"),
    "ratio 1.5": (["policy=h2o", "budget.ratio=1.5"], "budget.ratio=1.5: use a number above 0 and at most 1"),
    "tokens without their group": (["budget.tokens=64"], "budget=tokens budget.tokens=64"),
    "no tokens": (["budget=tokens", "budget.tokens=0"], "budget.tokens=0: use a whole number of at least 1"),
    "fewer than sinks": (
        ["policy=streaming_llm", "policy.num_sink=8", "policy.recent_window=8", "budget=tokens", "budget.tokens=15"],
        "the budget holds 15 tokens per head, fewer than streaming_llm protects (num_sink=8, recent_window=8)",
    ),
    "ratio below sinks": (["policy=streaming_llm", "budget.ratio=0.05"], "holds 2 of the shortest prompt's 48 tokens"),
    "bytes below a token": (["policy=h2o", "budget=bytes", "budget.bytes=99"], "one token in every layer takes 512 bytes"),
    # combinations
    "prompt end under stream": (["policy=snapkv", "protocol=stream"], "protocol=prompt"),
    "rolling without rotation": (["policy=streaming_llm", "policy.rolling=true", "model=tiny-opt"], "rolling=false"),
    "nothing held back": (["protocol.hold_back=0"], "protocol.hold_back=0: use at least 1"),
    "chat without a template": (["task=passkey", "task.chat=true"], "no chat template"),
    # data
    "dataset that cannot be had": (["task.dataset=no/such"], "task.dataset=no/such"),
    "missing file": (["task.file=gone.txt"], "task.file=gone.txt: there is no such file"),
    "empty file": (["task.file=empty.txt"], "the file is empty"),
    "short file": (["task.file=short.txt"], "fewer than a window of 64"),
    "no text": (["task.file=binary.txt"], "no UTF-8 text"),
    "no column": (["task.file=column.csv"], "column.csv: no row has a field 'text'; it has: title, body"),
    "no file given": (["task=prompts"], "task.file must be given"),
    "missing field": (
        ["task=prompts", "task.file=no_prompt.jsonl", "task.bad_rows=stop"],
        "no_prompt.jsonl, row 2: there is no field 'promt' (did you mean prompt?)",
    ),
    "neither prompt nor context": (["task=prompts", "task.file=other.jsonl"], "row 1: give either 'prompt', or 'context'"),
    "broken row": (["task=prompts", "task.file=broken.jsonl", "task.bad_rows=stop"], "broken.jsonl, row 2: no JSON"),
    "row that is no object": (["task=prompts", "task.file=no_object.jsonl"], "no_object.jsonl, row 1: no JSON object"),
    "unreadable rows": (["task=prompts", "task.file=binary.txt"], "binary.txt: rows are read from .jsonl"),
    "no new tokens": (["task=prompts", "task.file=blank.jsonl", "task.new_tokens=0"], "task.new_tokens=0: use at least 1"),
    "no list": (["task=prompts", "task.file=no_list.json"], "holds no list of rows"),
    "same id": (["task=prompts", "task.file=twice.jsonl"], "two rows have the id 'x'"),
    "wrong choice": (["task=prompts", "task.file=choice.jsonl"], "row 1: 'answer' must be one of the choices"),
    "mixed rows": (["task=prompts", "task.file=mixed.jsonl"], "row 2 is of kind open"),
    "blank prompt": (["task=prompts", "task.file=blank.jsonl"], "row 1: 'prompt' must be text"),
    "prompt too long": (["task=prompts", "task.file=long.jsonl"], "has a context of"),
    "needle too long": (["task=passkey", "task.lengths=[50000]"], "has a context of"),
    "needle too short": (["task=passkey", "task.lengths=[20]"], "too short"),
    "no such folder": (
        ["task=needle", "task.haystack=folder", "task.folder=gone"],
        "task.folder=gone: there is no such folder",
    ),
    # models, modules, folders
    "no path": (["model=path"], "model.path must be given"),
    "no such model folder": (["model=path", "model.path=./gone"], "gone"),
    "config dir": (["--config-dir", "gone"], "--config-dir gone: there is no such folder"),
    "module": (["--import", "no_such_module"], "no_such_module"),
}


@pytest.fixture
def no_model(monkeypatch, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kvlab.workbench.load_spec", lambda spec: pytest.fail("loads a model"))
    monkeypatch.setattr("kvlab.outline.embedded.fetch_embedded", lambda: pytest.fail("fetches a model"))


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_run_says_what_to_change(case, no_model, capsys, tmp_path):
    arguments, says = CASES[case]
    settles = any(argument.startswith("model=") for argument in arguments)
    task = [] if any(a.startswith("task=") for a in arguments) else ["task.context=48", "task.scored=16"]
    # What can be known without a model comes first, so the cases on models and data use one that is made here.
    base = [] if settles or case == "model" else ["model=tiny-llama"]
    code, out, err = kvlab("run", "logger=none" if "logger" not in case else "name=x", *base, *task, *arguments, capsys=capsys)
    lines = err.strip().splitlines()
    assert code == 2, (code, out, err)
    assert says in lines[-1] and (len(lines) == 1 or lines[0].startswith("usage:")), err
    assert out == "" and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["table", "nothing/here"], "nothing/here"),
        (["table", "--format", "pdf"], "pdf"),
        (["table", "--wher"], "--wher"),
        (["list", "polices"], "polices"),
        (["runn"], "runn"),
        (["bench", "decod"], "did you mean decode"),
        (["bench", "--batch", "0"], "'0': use a whole number of at least 1"),
        (["bench", "--ratio", "2"], "'2': use a number above 0"),
        (["bench", "--model", "no-model"], "no-model"),
        (["list", "artefact"], "artefact"),
        (["calibrate", "kvsharr"], "did you mean kvsharer"),
        (["calibrate", "kvsharer", "-o", "ordr=similar"], "calibrate kvsharer has no setting 'ordr' (did you mean order?)"),
        (["calibrate", "kvsharer", "-o", "order=worst"], "calibrate kvsharer.order='worst': use one of dissimilar, similar"),
        (["calibrate", "kvsharer", "-o", "threshold=high"], "calibrate kvsharer.threshold='high': use a number"),
        (["calibrate", "kvsharer", "-o", "threshold"], "-o threshold: use NAME=VALUE"),
        (["calibrate", "kvsharer", "-o", "threshold=1"], "calibrate kvsharer.threshold=1.0: use a cosine"),
        (["calibrate", "kvsharer", "order=similar"], "order=similar (settings: -o order=similar)"),
        (["calibrate", "eigen", "-o", "floor=2"], "calibrate eigen.floor=2.0: use a share"),
        (["calibrate", "eigen", "-o", "basis=["], "-o basis=[: a value isn't YAML"),
    ],
)
def test_other_wrong_commands(arguments, says, no_model, capsys):
    code, out, err = kvlab(*arguments, capsys=capsys)
    assert code == 2 and says in err.strip().splitlines()[-1] and out == ""


def test_in_a_sweep_the_cell_is_named(no_model, capsys):
    sweep = ["run", "-m", "model=tiny-llama", "logger=none", "policy=h2o,streaming_llm", "budget.ratio=0.5,0.01"]
    code, _, err = kvlab(*sweep, "task.context=48", "task.scored=16", capsys=capsys)
    assert code == 2 and err.startswith("kvlab: cell 4 of 4 (streaming_llm 1 %, perplexity): budget.ratio=0.01 holds 1 of")
