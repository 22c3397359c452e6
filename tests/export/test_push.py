"""push_to_hub: which files go, in one commit, and what is said where the Hub does not take them."""

import ast
import json
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from hf_lgelu import anneal_hardness
from hf_lgelu.export.hub.push import files_to_push, push_to_hub
from hf_lgelu.export.plain import export_relu
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "secretForThisTestOnly1234567890"
REPOSITORY = "someone/small-relu"
RESPONSE = SimpleNamespace(status_code=401, headers={}, request=None)
CARD = "---\nlicense: mit\n---\n\n# small\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder as export_relu writes it, with a card; not to be changed."""
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=5, hidden_size=64, num_hidden_layers=2))
    anneal_hardness(model, 1.0)
    folder = tmp_path_factory.mktemp("exported") / "relu"
    export_relu(model, folder)
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture
def folder(exported, tmp_path):
    """A copy that a test may change."""
    copy = tmp_path / "relu"
    copy.mkdir()
    for file in exported.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


class Hub:
    """What a push asks of HfApi, in memory: a repository holds its commits, each {file: content}, the newest last."""

    def __init__(self):
        self.commits, self.private, self.requests, self.broken = {}, {}, [], None

    def answer(self, name, api, repo_id, *arguments, **options):
        self.requests.append(name)
        if api.token != TOKEN:
            raise HfHubHTTPError("Invalid credentials", response=RESPONSE)
        if name == self.broken:
            error = HTTPError if name == "create_repo" else RuntimeError  # of a large file, in a thread of the client
            raise error(f"connection to https://user:{TOKEN}@hub lost")
        return getattr(self, name)(repo_id, *arguments, **options)

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        self.private.setdefault(repo_id, private)
        self.commits.setdefault(repo_id, [{}])
        return SimpleNamespace(repo_id=repo_id)

    def model_info(self, repo_id, *, revision):
        self.options = {"revision": revision}
        siblings = [SimpleNamespace(rfilename=name) for name in self.commits[repo_id][-1]]
        return SimpleNamespace(siblings=siblings, private=self.private[repo_id], id=repo_id)

    def create_commit(self, repo_id, operations, **options):
        files = dict(self.commits[repo_id][-1])
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                files[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()
            else:
                del files[operation.path_in_repo]
        assert self.options["revision"] == options["revision"]
        self.options = options
        self.commits[repo_id].append(files)
        return SimpleNamespace(oid=len(self.commits[repo_id]))


@pytest.fixture
def hub(monkeypatch):
    found = Hub()
    for name in ("create_repo", "model_info", "create_commit"):
        answer = partial(found.answer, name)
        monkeypatch.setattr(HfApi, name, lambda api, *given, answer=answer, **options: answer(api, *given, **options))
    return found


def push(folder, hub, **options):
    return push_to_hub(folder, REPOSITORY, **{"token": TOKEN, **options})


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_everything_arrives_in_one_commit(folder, hub):
    (folder / "training_args.bin").write_bytes(b"pickle")
    (folder / ".secret").write_text("hidden")
    expected = {name: content for name, content in contents(folder).items() if name[0] not in "t."}
    push(folder, hub, private=True, commit_message="First")
    assert hub.commits == {REPOSITORY: [{}, expected]}
    assert set(expected) == {"config.json", "model.safetensors", "README.md"}
    assert hub.private[REPOSITORY] is True
    (folder / "README.md").write_text(CARD + "More.\n")
    options = {"commit_message": "Second", "revision": "soft", "create_pr": True}
    push(folder, hub, **options)
    assert hub.options == options
    assert len(hub.commits[REPOSITORY]) == 3
    assert hub.commits[REPOSITORY][-1] == {name: contents(folder)[name] for name in expected}


def test_weights_of_before_do_not_stay_where_they_would_be_loaded(folder, hub, caplog):
    """transformers looks for model.safetensors before the index of shards, and puts an adapter on top."""
    push(folder, hub)
    commits = hub.commits[REPOSITORY]
    others = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a", "pytorch_model.bin": b"b"}
    stay = {"onnx/model.onnx": b"smooth", "notes.txt": b"mine", "onnx/model.safetensors": b"c"}
    commits[-1].update({**others, **stay})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with caplog.at_level(logging.WARNING):
        push(folder, hub)
    assert commits[-1] == contents(folder) | stay
    assert len(commits) == 3  # in the one commit
    assert "weights that are not of this push and stay: onnx/model.onnx, onnx/model.safetensors" in caplog.text


def test_a_public_repository_is_not_pushed_to_as_a_private_one(folder, hub):
    push(folder, hub, private=False)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nanother")
    with pytest.raises(ValueError, match=f"{REPOSITORY} is there and is public"):
        push(folder, hub, private=True)
    assert len(hub.commits[REPOSITORY]) == 2


@pytest.mark.parametrize("call", ["create_repo", "model_info", "create_commit"])
def test_push_cut_off_leaves_the_remote_as_it_was_and_can_be_repeated(folder, hub, call, caplog):
    push(folder, hub)
    (folder / "README.md").write_text(CARD + "Second.\n")
    hub.broken = call
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(ConnectionError, match=r"was cut off .*hf_…@hub lost.* push again") as failure,
    ):
        push(folder, hub)
    assert TOKEN not in str(failure.value) + caplog.text
    assert len(hub.commits[REPOSITORY]) == 2
    hub.broken = None
    push(folder, hub)
    assert hub.commits[REPOSITORY][-1] == contents(folder) != hub.commits[REPOSITORY][-2]


def test_wrong_token_is_refused_without_being_shown(folder, hub):
    wrong = "hf_" + "wrong" * 7
    with pytest.raises(
        PermissionError, match=r"does not let this token write to someone/small-relu \(status 401\)"
    ) as no:
        push(folder, hub, token=wrong)
    assert "hf auth login" in str(no.value)
    assert wrong not in str(no.value) + str(no.value.__cause__)
    assert hub.commits == {}


@pytest.mark.parametrize("token", [TOKEN, "a-token-of-another-shape"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "LICENSE"])
@pytest.mark.parametrize("is_given", [True, False])
def test_token_in_a_file_stops_the_push(folder, hub, token, name, is_given, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "" if is_given else token)
    (folder / name).write_text(json.dumps({"token": token}))
    with pytest.raises(ValueError, match=rf"^{name} holds what looks like an access token") as refusal:
        push(folder, hub, token=token if is_given else None)
    assert token not in str(refusal.value)
    assert hub.requests == []


REFUSED = [  # (file, its content or None to remove it, what is said)
    *((name, "x", rf"holds {name}: pickles can run code") for name in ("pytorch_model.bin", "weights.pt", "extra.PKL")),
    ("config.json", None, "no config.json"),
    ("README.md", None, "no README.md"),
    ("model.safetensors", None, "no weights"),
]


@pytest.mark.parametrize(("name", "content", "told"), REFUSED)
def test_folders_that_are_not_fit_to_be_pushed(folder, name, content, told):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=told):
        files_to_push(folder)
    with pytest.raises(NotADirectoryError, match="is no folder"):
        files_to_push(folder / "nothing")


@pytest.mark.parametrize("name", ["vocab.txt", "README.md", "figures/a.png"])
def test_links_out_of_the_folder_are_refused(folder, tmp_path, name):
    (tmp_path / "secret").write_text("mine")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=rf"{name} in .* is a link that leads out of the folder"):
        files_to_push(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "config.json")
    assert name in files_to_push(folder)


def test_what_goes_and_what_stays(folder):
    stays = [
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "trainer_state.json",
        "record.json",
        "notes.py",
        "a.log",
    ]
    goes = [
        "tokenizer.json",
        "merges.txt",
        "hardness.png",
        "LICENSE",
        "figures/a.png",
        "additional_chat_templates/b.jinja",
    ]
    goes += ["model.onnx", "model.onnx.data", "source.spm", "bpe.codes"]
    for name in [*stays, *goes, "checkpoint-1/model.safetensors", ".git/config", "figures/.c.png"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert files_to_push(folder) == sorted([*goes, "config.json", "model.safetensors", "README.md"])
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "notes.Model", "AutoConfig": "other/repository--far.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "notes.py" in files_to_push(folder)


PASSED_ON = ("False", "trust_remote_code", "self.given.trust_remote_code")


def calls_that_could_run_code(source):
    """What in a file could run code of a checkpoint: trust_remote_code=…, torch.load, pickle."""
    found = re.findall(r"trust_remote_code: bool(?! = False| = _input)", source)  # passed on, it is False by default
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [] if ast.unparse(node.value) in PASSED_ON else ["trust_remote_code"]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in modules if name.partition(".")[0] in ("pickle", "cloudpickle", "dill", "joblib")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            only = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("weights_only")
            found += [] if only == "True" else ["torch.load"]
    return found


def test_nothing_we_load_can_run_code():
    found = {}
    for path in [*(ROOT / "hf_lgelu").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        if re.search(r"trust_remote_code|torch\.load|pickle|dill|joblib", source):  # or nothing is there to parse
            found[path.name] = calls_that_could_run_code(source)
    assert len(found) > 3
    assert {name: calls for name, calls in found.items() if calls} == {
        "batches.py": ["pickle"]  # of objects that hold tensors, never of a file
    }
