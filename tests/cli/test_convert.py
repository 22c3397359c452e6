"""hf-lgelu convert end to end: files, texts and sentences as inputs, what lies in the folder, what is refused."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import datasets
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from word_tokenizer import word_tokenizer

import hf_lgelu
from hf_lgelu.cli import checkpoint
from hf_lgelu.cli import convert as module
from hf_lgelu.cli.command import main
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

FILES = {"config.json", "model.safetensors", "README.md", "report.json"}


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_folder_has_a_relu_model_with_report_and_card(converted, place):
    assert {path.name for path in converted.iterdir()} == FILES
    assert [path.name for path in converted.parent.iterdir()] == ["relu"]
    model = load_checkpoint(converted)
    assert model.config.hidden_act == "relu"
    assert [type(layer.activation) for layer in model.layers] == [nn.ReLU] * 2
    original = load_checkpoint(place / "gelu").state_dict()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, original[name])}
    assert changed.isdisjoint({"layers.0.linear.weight", "layers.0.linear.bias"})  # nothing is in front of it


def test_there_is_a_line_a_layer_unless_none_is_wanted(place, tmp_path, call):
    words = ["convert", place / "gelu", "--data", place / "rows.csv"]
    status, _, errors = call(*words, "--output_dir", tmp_path / "relu")
    assert status == 0
    assert [line.split()[0] for line in errors.splitlines()] == ["refit:", "1/2", "2/2"]
    assert call(*words, "--output_dir", tmp_path / "quiet", "--disable_tqdm")[2] == ""


def test_scores_of_the_report_are_those_of_the_loaded_models(converted, place, test_rows):
    features, labels = test_rows
    evaluation = report_of(converted)["report"]["evaluation"]
    assert evaluation["samples"] == 100
    for folder, metrics in (
        (place / "gelu", evaluation["original_metrics"]),
        (converted, evaluation["refitted"]["metrics"]),
    ):
        correct = (load_checkpoint(folder)(features).logits.argmax(-1) == labels).double().mean().item()
        assert metrics == {"accuracy": pytest.approx(correct)}
    assert evaluation["refitted"]["kl"] < evaluation["direct"]["kl"]


OWN_CODE = """
import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

class OwnConfig(PreTrainedConfig):
    model_type = "own_code"

class Own(PreTrainedModel):
    config_class, main_input_name = OwnConfig, "features"

    def __init__(self, config):
        super().__init__(config)
        self.first, self.second, self.last = (torch.nn.Linear(*size) for size in ((5, 9), (9, 9), (9, 3)))
        self.act = torch.nn.GELU()
        self.post_init()

    def forward(self, features):
        return SequenceClassifierOutput(logits=self.last(F.silu(self.second(self.act(self.first(features))))))
"""


@pytest.fixture
def own_code(place, tmp_path, monkeypatch):
    """A folder with code of its own, which calls one gate and has another as a module, and no key for them."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "modeling_own.py").write_text(OWN_CODE)
    code = importlib.import_module("modeling_own")
    code.OwnConfig.register_for_auto_class()
    code.Own.register_for_auto_class("AutoModel")
    torch.manual_seed(0)
    model = code.Own(code.OwnConfig())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    model.save_pretrained(tmp_path / "own")
    del sys.modules["modeling_own"]
    return tmp_path / "own"


def test_a_folder_with_code_of_its_own_is_converted_where_that_is_asked_for(own_code, place, tmp_path, capsys):
    words = ["convert", str(own_code), "--data", str(place / "rows.csv"), "--output_dir", str(tmp_path / "relu")]
    assert main(words) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert main([*words, "--trust_remote_code"]) == 0
    assert "without an error, unless the folder was saved with variant='needs_hf" in capsys.readouterr().out
    assert report_of(tmp_path / "relu")["report"]["gates"].keys() == {"act", "called.0"}
    loaded = hf_lgelu.from_pretrained(transformers.AutoModel, tmp_path / "relu", trust_remote_code=True).eval()
    state, x = load_file(tmp_path / "relu" / "model.needs_hf_lgelu.safetensors"), torch.linspace(-2, 2, 40).view(8, 5)
    given = x
    for number, name in enumerate(("first", "second", "last")):
        x = nn.functional.linear(x.relu() if number else x, state[f"{name}.weight"], state[f"{name}.bias"])
    torch.testing.assert_close(loaded(given).logits, x)


def test_report_and_card_say_from_what_it_was_made(converted):
    provenance = report_of(converted)["provenance"]
    assert (provenance["samples"], provenance["seed"]) == (200, 0)
    assert (provenance["model"], provenance["model_is_on_hub"]) == ("gelu", False)
    assert {"torch", "hf-lgelu", "transformers"} <= provenance["versions"].keys()
    card = ModelCard.load(converted / "README.md")
    assert "200 of rows.csv, chosen with seed 0" in card.text
    assert "test.csv" in card.text
    assert card.data.license is None


def test_no_local_path_is_in_what_is_pushed(converted, place):
    for path in converted.iterdir():
        if path.suffix in (".md", ".json"):
            assert str(place) not in path.read_text(), path.name


def test_a_gate_is_kept_and_fewer_rows_and_no_second_set_are_said(place, tmp_path, call):
    words = (
        "convert",
        place / "gelu",
        "--data",
        place / "rows.csv",
        "--keep",
        "layers.0.activation",
        "--max_samples",
        40,
    )
    status, said, errors = call(*words, "--output_dir", tmp_path / "relu", "--disable_tqdm")
    assert (status, errors) == (0, "")
    assert "gates that stayed smooth: `" in said
    assert {path.name for path in (tmp_path / "relu").iterdir()} == FILES
    document = report_of(tmp_path / "relu")
    report = document["report"]
    assert (report["samples"], report["held_out"], report["evaluation"]) == (40, None, None)
    (kept,) = report["kept"]
    model = load_checkpoint(tmp_path / "relu")
    assert type(model.get_submodule(kept)) is not nn.ReLU
    assert sorted(type(layer.activation) is nn.ReLU for layer in model.layers) == [False, True]
    card = (tmp_path / "relu" / "README.md").read_text()
    assert "not measured on a second set" in card
    assert "Without hf_lgelu" not in card
    assert "hf_lgelu.from_pretrained(MLPForClassification" in card


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(place, test_rows, tmp_path, call):
    features = test_rows[0][:60]  # of so few, none is held out: the plain swap is measured on all
    lines = [",".join("abcde"), *(",".join(map(str, row)) for row in features.tolist())]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    (tmp_path / "relu").mkdir()
    (tmp_path / "relu" / "mine").write_text("x")
    words = ("--data", tmp_path / "rows.csv", "--output_dir", tmp_path / "relu", "--dry_run", "--disable_tqdm")
    status, said, errors = call("convert", place / "gelu", *words)
    assert (status, errors) == (0, "")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["relu", "mine", "rows.csv"]
    assert "MLPForClassification, GELUActivation × 2" in said
    assert "2 of 2 gates would be converted with a refit of 2 linear maps" in said
    assert "`width` 1.25" in said
    model = load_checkpoint(place / "gelu")
    x, smooth = features, model(features).logits.double().log_softmax(-1)
    for layer in model.layers:
        x = layer.linear(x).relu()
    swapped = model.classifier(x).double().log_softmax(-1)
    kl = (smooth.exp() * (smooth - swapped)).sum(-1).mean().item()
    (line,) = [line for line in said.splitlines() if "plain swap" in line]
    assert float(line.split()[2]) == pytest.approx(kl, rel=0.01)


def test_a_dry_run_names_what_is_not_refitted_and_what_stays_smooth(tmp_path, call):
    """The map after the second gate is tied, and a smooth pooler is no gate."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    texts = [" ".join(f"w{number}" for number in row) for row in torch.randint(1, 20, (40, 8)).tolist()]
    (tmp_path / "rows.txt").write_text("\n".join(texts))
    for kind in (transformers.BertForMaskedLM, transformers.BertForSequenceClassification):
        kind(transformers.BertConfig(vocab_size=20, **sizes)).save_pretrained(tmp_path / kind.__name__)
        word_tokenizer([f"w{number}" for number in range(1, 20)], 16).save_pretrained(tmp_path / kind.__name__)
    words = ("--data", tmp_path / "rows.txt", "--output_dir", tmp_path / "relu", "--dry_run", "--disable_tqdm")
    status, said, _ = call("convert", tmp_path / "BertForMaskedLM", *words)
    assert status == 0
    assert "1 of 2 gates would be converted" in said
    assert "bert.embeddings.word_embeddings.weight is tied: several modules hold it" in said
    _, said, _ = call("convert", tmp_path / "BertForSequenceClassification", *words)
    assert "still smooth: bert.pooler.activation (Tanh): tanh × 1" in said  # the classifier reads it
    assert not (tmp_path / "relu").exists()


def test_what_is_far_from_the_original_is_refused_where_that_is_asked_for(place, tmp_path, call):
    words = ("convert", place / "gelu", "--data", place / "rows.csv", "--max_kl", 1e-9, "--disable_tqdm")
    status, _, errors = call(*words, "--output_dir", tmp_path / "strict", "--strict")
    assert status == 1
    assert "max_kl = 1e-09" in errors
    assert not (tmp_path / "strict").exists()
    status, said, _ = call(*words, "--output_dir", tmp_path / "relu")
    assert status == 0
    assert "warning: " in said
    assert any("1e-09" in warning for warning in report_of(tmp_path / "relu")["report"]["warnings"])


def test_a_folder_that_is_half_written_or_loads_as_another_model_is_not_left(place, tmp_path, monkeypatch, call):
    save = checkpoint.save_checkpoint

    def broken(stops, model, folder, **options):
        save(model if stops else type(model)(model.config), folder, **options)  # with random weights
        if stops:
            raise KeyboardInterrupt

    words = ("convert", place / "gelu", "--data", place / "rows.csv", "--output_dir", tmp_path / "relu")
    told = {130: "interrupted\n", 1: "loaded again, has another classifier"}
    for stops, status in ((True, 130), (False, 1)):
        monkeypatch.setattr(checkpoint, "save_checkpoint", partial(broken, stops))
        found, _, errors = call(*words, "--disable_tqdm")
        assert (found, list(tmp_path.iterdir())) == (status, [])
        assert told[status] in errors


def test_a_folder_that_is_taken_is_known_before_any_work(place, converted, monkeypatch, call):
    monkeypatch.setattr(module, "read_checkpoint", lambda *_, **__: pytest.fail("work before the check"))
    before = sorted(path.name for path in place.iterdir())
    for output, reason in (
        (converted, "is not empty; give another folder, or replace this one with `overwrite`"),
        (f"{place}/gelu/.", "is the checkpoint itself"),
        (place, "holds the checkpoint, which would be lost"),
    ):
        overwrite = () if output == converted else ("--overwrite",)
        words = ("convert", place / "gelu", "--data", place / "rows.csv", "--output_dir", output, *overwrite)
        status, _, errors = call(*words)
        assert status == 1
        assert reason in errors
        assert errors.count("\n") == 1
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize("option", ["--data", "--evaluation"])
def test_data_in_the_folder_that_is_replaced_are_not_lost(option, place, tmp_path, call):
    out = tmp_path / "out"
    shutil.copytree(place / "gelu", out)  # an earlier model, and rows in its folder
    shutil.copyfile(place / "rows.csv", out / "mine.csv")
    sets = {"--data": place / "rows.csv", "--evaluation": "none", option: out / "mine.csv"}
    words = [word for pair in sets.items() for word in pair]
    status, _, errors = call("convert", place / "gelu", *words, "--output_dir", out, "--overwrite", "--disable_tqdm")
    assert status == 1
    assert f"{out} holds the data set {out / 'mine.csv'}, which would be lost; give another" in errors
    assert (out / "mine.csv").read_bytes() == (place / "rows.csv").read_bytes()


@pytest.mark.parametrize(
    ("model", "words", "reason"),
    [
        ("gelu", ("--max_samples", 15), "at least 16 different rows"),
        ("gelu", ("--data_split", "trian"), "has no split 'trian'; it has train"),
        ("gelu", ("--label_column", "lable"), "has no column 'lable'; its columns are a (number)"),
        ("gelu", ("--evaluation", "DATA"), "must be other rows than --data, split 'train'; give another --ev"),
        ("gelu", ("--max_eval_samples", 9), "must be other rows than --data, split 'train'"),
        ("gelu", ("--evaluation", "./linked.csv"), "must be other rows than --data, split 'train'"),
        ("gelu", ("--evaluation", "~/gelu/../rows.csv"), "must be other rows than --data, split 'train'"),
        ("gelu", ("--evaluation", "EMPTY"), "empty.csv cannot be read as a data set (it has no rows)"),
        ("gleu", (), "there is no folder or file gleu"),
        ("runs/gelu", (), "The Hub says: no network"),
        ("./nothing", (), "there is no folder or file ./nothing; give the folder of a checkpoint"),
        ("gelu/model.safetensors", (), "is no checkpoint, but a file, and has no config.json"),
        ("adapter", (), "merge_and_unload"),
        ("relu", (), "has no gate that conversion takes (it has ReLU): nothing in it is smooth"),
        ("narrow", (), "has 5 columns of numbers, and the model takes 7 features. Give the columns"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(model, words, reason, place, tmp_path, monkeypatch, call, offline):
    (tmp_path / "empty.csv").write_text("a,b,c,d,e,label\n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "gelu").symlink_to(place / "gelu")
    (tmp_path / "linked.csv").symlink_to(place / "rows.csv")
    monkeypatch.setenv("HOME", str(place))
    MLPForClassification(MLPConfig(num_features=5, hidden_act="relu", num_hidden_layers=2)).save_pretrained(
        tmp_path / "relu"
    )
    MLPForClassification(MLPConfig(num_features=7, hidden_act="gelu")).save_pretrained(tmp_path / "narrow")
    monkeypatch.chdir(tmp_path)
    data = str(place / "rows.csv")
    words = [{"DATA": data, "EMPTY": "empty.csv"}.get(word, word) for word in words]
    before = sorted(path.name for path in tmp_path.iterdir())
    status, _, errors = call("convert", model, "--data", data, "--output_dir", "out", "--disable_tqdm", *words)
    assert status == 1
    assert reason in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert offline == (["runs/gelu"] if model == "runs/gelu" else ["gleu"] if model == "gleu" else [])


@pytest.fixture
def offline(monkeypatch):
    """The ids of which the Hub, out of reach, is asked: each once, where its libraries would try five times."""
    asked = []

    def out_of_reach(self, name, **_):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("hf_lgelu.files.HfApi.repo_info", out_of_reach)
    monkeypatch.setattr("hf_lgelu.files.constants.HF_HUB_OFFLINE", False)
    return asked


def test_push_sends_the_folder_and_the_licence_is_the_originals(place, tmp_path, pushed, call):
    load_checkpoint(place / "gelu").save_pretrained(tmp_path / "original")
    (tmp_path / "original" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    words = ("--data", place / "rows.csv", "--disable_tqdm")
    options = ("--push_to_hub", "me/rows", "--private")
    _, said, _ = call("convert", tmp_path / "original", *words, "--output_dir", tmp_path / "a", *options)
    assert pushed == [(sorted(FILES), "me/rows", True)]
    assert said.endswith("Pushed: http://hub/commit/1\n")
    card = ModelCard.load(tmp_path / "a" / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert 'from_pretrained(MLPForClassification, "me/rows")' in card.text


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """(folder of a small GPT-2 with its tokenizer, folder of a data set of texts)."""
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "a", "cat", "dog", "saw", "ate", "big", "small", "red", "green", "and", "then", "slept", "ran"]
    generator = torch.Generator().manual_seed(0)
    lines = [
        " ".join(words[i] for i in torch.randint(len(words), (12,), generator=generator).tolist()) for _ in range(600)
    ]
    tokenizer = word_tokenizer(words, 16)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=15, n_positions=16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far enough from 0 that GELU and ReLU differ
    for part in (model, tokenizer):
        part.save_pretrained(folder / "gpt2")
    (folder / "texts").mkdir()
    for name, texts in {"train": lines[:500], "validation": lines[500:]}.items():
        datasets.Dataset.from_dict({"text": texts}).to_json(folder / "texts" / f"{name}.jsonl")
    return folder / "gpt2", folder / "texts"


def test_a_language_model_without_data_samples_text(language_model, tmp_path, call):
    folder = tmp_path / "gpt2"
    shutil.copytree(language_model[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))
    status, said, errors = call("convert", folder, "--max_samples", 40, "--output_dir", tmp_path / "relu")
    assert status == 0, errors
    assert "warning: no data were given: the model sampled 640 tokens of text itself" in said
    assert report_of(tmp_path / "relu")["provenance"]["data"] == "text that the model sampled itself"
    status, _, errors = call("convert", language_model[0], "--output_dir", tmp_path / "none")  # no start token
    assert status != 0
    assert "give `data`: " in errors


def test_a_language_model_on_the_texts_of_a_folder(language_model, tmp_path, call, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    model, texts = language_model
    words = ("convert", model, "--data", texts, "--max_samples", 64, "--output_dir", tmp_path / "relu")
    status, said, errors = call(*words)
    assert status == 0, errors
    assert "second set" in said
    for bar in ("inputs:", "refit:", "second set:"):
        assert bar in errors  # progress on every long step
    report = report_of(tmp_path / "relu")
    assert report["provenance"]["evaluation"] == "texts, split validation"
    assert report["report"]["samples"] == 64
    assert (tmp_path / "relu" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "relu")
    assert reloaded.config.activation_function == "relu"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "relu")
    lines = [json.loads(line)["text"] for line in (texts / "validation.jsonl").read_text().splitlines()]
    tokens = torch.tensor([token for line in lines for token in tokenizer(line)["input_ids"]])
    blocks = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        log_probabilities = reloaded(blocks).logits.double().log_softmax(-1)[:, :-1]
    losses = -log_probabilities.gather(2, blocks[:, 1:, None])
    reported = report["report"]["evaluation"]["refitted"]["metrics"]["perplexity"]
    assert reported == pytest.approx(losses.mean().exp().item(), rel=1e-4)


def test_a_sentence_transformers_folder_keeps_its_pooling(sentence_folder, tmp_path, call):
    import sentence_transformers

    model, texts = sentence_folder
    words = ("convert", model, "--data", texts, "--max_samples", 100, "--output_dir", tmp_path / "relu")
    status, said, errors = call(*words, "--disable_tqdm")
    assert status == 0, errors
    assert (tmp_path / "relu" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    before, after = (
        sentence_transformers.SentenceTransformer(str(path), device="cpu") for path in (model, tmp_path / "relu")
    )
    assert after[1].get_config_dict()["pooling_mode"] == "cls"
    assert {type(layer.intermediate.intermediate_act_fn) for layer in after[0].auto_model.encoder.layer} == {nn.ReLU}
    lines = texts.read_text().splitlines()[:20]
    old, new = (torch.tensor(network.encode(lines)) for network in (before, after))
    cosine = nn.functional.cosine_similarity(old, new, dim=-1)
    assert cosine.min() > 0.99
    assert said.startswith("SentenceTransformer: 2 gates (GELUActivation) became ReLU\n  On the inputs held out of the")
    assert said.count("cosine to the original") == 1  # of the embeddings
    card = ModelCard.load(tmp_path / "relu" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert "from sentence_transformers import SentenceTransformer" in card.text
    assert "| network | cosine to the original | least cosine | same nearest neighbour among these |\n" in card.text
    assert report_of(tmp_path / "relu")["report"]["held_out"]["rows"] <= 20  # an embedding a text, not a token


def test_a_gate_of_a_sentence_encoder_is_kept(sentence_folder, tmp_path, call):
    """No key of the config says it: the folder needs hf_lgelu, and says so."""
    import sentence_transformers

    model, texts = sentence_folder
    network = sentence_transformers.SentenceTransformer(str(model), device="cpu")
    gate = next(name for name, _ in network.named_modules() if name.endswith("intermediate_act_fn"))
    words = ("convert", model, "--data", texts, "--keep", gate, "--output_dir", tmp_path / "relu", "--disable_tqdm")
    status, said, errors = call(*words)
    assert status == 0, errors
    assert "load it by hf_lgelu.from_pretrained(SentenceTransformer, folder)" in said
    with pytest.raises(RuntimeError, match=r"hf_lgelu\.from_pretrained"):
        sentence_transformers.SentenceTransformer(str(tmp_path / "relu"), device="cpu")
    loaded = hf_lgelu.from_pretrained(sentence_transformers.SentenceTransformer, str(tmp_path / "relu"), device="cpu")
    gates = [layer.intermediate.intermediate_act_fn for layer in loaded[0].auto_model.encoder.layer]
    assert [type(gate) is nn.ReLU for gate in gates].count(True) == 1
    assert "Without hf_lgelu" not in (tmp_path / "relu" / "README.md").read_text()


@pytest.mark.slow
def test_two_processes_write_one_folder_with_the_same_network(place, converted, tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "hf_lgelu.cli"),
        *("convert", place / "gelu", "--data", place / "rows.csv", "--evaluation", place / "test.csv"),
        *("--output_dir", tmp_path / "relu", "--disable_tqdm"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("Saved in") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["relu"]
    document, alone = report_of(tmp_path / "relu"), report_of(converted)
    assert document["provenance"]["hardware"]["processes"] == 2
    assert document["report"]["distinct_samples"] == alone["report"]["distinct_samples"]
    here, there = (load_file(folder / "model.safetensors") for folder in (converted, tmp_path / "relu"))
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=1e-4)


def test_processes_that_do_not_know_of_each_other_are_refused(place, tmp_path, monkeypatch, call):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("convert", place / "gelu", "--data", place / "rows.csv", "--output_dir", tmp_path / "relu")
    status, _, errors = call(*words)
    assert status == 1
    assert "2 processes were started, but accelerate knows of 1" in errors
    assert list(tmp_path.iterdir()) == []
