"""push_to_hub through the real client against the loopback server of hub_server.py."""

import ast
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from hub_server import HubServer
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from hf_lgelu import anneal_hardness
from hf_lgelu.export.hub.push import files_to_push, push_to_hub
from hf_lgelu.export.plain import export_relu
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "secretForThisTestOnly1234567890"
REPOSITORY = "someone/small-relu"
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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The server, and a client in this process that talks to it without Xet and without waiting between retries."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    huggingface_hub.close_session()  # an earlier one may have been made offline
    with HubServer(TOKEN) as server:
        yield server
    huggingface_hub.close_session()


def push(folder, hub, **options):
    return push_to_hub(folder, REPOSITORY, **{"token": TOKEN, "endpoint": hub.url, **options})


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_everything_arrives_in_one_commit(folder, hub):
    (folder / "training_args.bin").write_bytes(b"pickle")
    (folder / ".secret").write_text("hidden")
    expected = {name: content for name, content in contents(folder).items() if name[0] not in "t."}
    commit = push(folder, hub, private=True, commit_message="First")
    repository = hub.repositories[REPOSITORY]
    assert repository.files == expected
    assert set(expected) == {"config.json", "model.safetensors", "README.md"}
    assert len(repository.commits) == 2  # the empty one, and this
    assert commit.oid == repository.head
    assert repository.private is True
    assert ("POST", f"/{REPOSITORY}.git/info/lfs/objects/batch") in hub.requests  # weights went as a large file


def test_second_push_replaces_and_keeps(folder, hub):
    push(folder, hub)
    first = hub.repositories[REPOSITORY].head
    (folder / "README.md").write_text(CARD + "More.\n")
    push(folder, hub)
    repository = hub.repositories[REPOSITORY]
    assert repository.files == contents(folder)
    assert repository.head != first
    assert len(repository.commits) == 3


def test_weights_of_before_do_not_stay_where_they_would_be_loaded(folder, hub, caplog):
    """transformers looks for model.safetensors before the index of shards, and puts an adapter on top."""
    push(folder, hub)
    repository = hub.repositories[REPOSITORY]
    others = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a", "pytorch_model.bin": b"b"}
    stay = {"onnx/model.onnx": b"smooth", "notes.txt": b"mine", "onnx/model.safetensors": b"c"}
    repository.files.update({**others, **stay})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with caplog.at_level(logging.WARNING):
        push(folder, hub)
    assert repository.files == contents(folder) | stay
    assert len(repository.commits) == 3  # in the one commit
    assert "weights that are not of this push and stay: onnx/model.onnx, onnx/model.safetensors" in caplog.text


def test_a_public_repository_is_not_pushed_to_as_a_private_one(folder, hub):
    push(folder, hub, private=False)
    before = dict(hub.repositories[REPOSITORY].files)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nanother")
    with pytest.raises(ValueError, match=f"{REPOSITORY} is there and is public"):
        push(folder, hub, private=True)
    assert hub.repositories[REPOSITORY].files == before


@pytest.mark.parametrize("endpoint", ["preupload", "batch", "put", "verify", "commit"])
def test_push_cut_off_leaves_the_remote_as_it_was_and_can_be_repeated(folder, hub, endpoint):
    push(folder, hub)
    repository = hub.repositories[REPOSITORY]
    before, files = repository.head, dict(repository.files)

    torch.manual_seed(1)
    MLPForClassification(
        MLPConfig(num_features=5, hidden_size=64, num_hidden_layers=2, hidden_act="relu")
    ).save_pretrained(folder)
    (folder / "README.md").write_text(CARD + "Second.\n")
    hub.break_at = endpoint
    with pytest.raises(ConnectionError, match=r"was cut off .* push again") as failure:
        push(folder, hub)
    assert TOKEN not in str(failure.value)
    assert hub.repositories[REPOSITORY].head == before
    assert hub.repositories[REPOSITORY].files == files
    assert len(repository.commits) == 2

    hub.break_at = None
    push(folder, hub)
    assert repository.files == contents(folder) != files
    assert len(repository.commits) == 3


def test_wrong_token_is_refused_without_being_shown(folder, hub, caplog):
    wrong = "hf_" + "wrong" * 7
    with pytest.raises(
        PermissionError, match=r"does not let this token write to someone/small-relu \(status 401\)"
    ) as no:
        push(folder, hub, token=wrong)
    assert "hf auth login" in str(no.value)
    assert wrong not in str(no.value) + str(no.value.__cause__)
    assert hub.repositories == {}


def test_token_is_in_no_log_and_no_file(folder, hub, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    for name in ("huggingface_hub", "hf_lgelu", "httpx2", "httpcore2", "httpx", "httpcore"):
        logger = logging.getLogger(name)
        caplog.set_level(logging.DEBUG, logger=name)
        logger.addHandler(caplog.handler)  # huggingface_hub's does not propagate
    try:
        push(folder, hub)
        hub.break_at = "commit"
        (folder / "README.md").write_text(CARD + "Second.\n")
        with pytest.raises(ConnectionError):
            push(folder, hub)
    finally:
        for name in ("huggingface_hub", "hf_lgelu", "httpx2", "httpcore2", "httpx", "httpcore"):
            logging.getLogger(name).removeHandler(caplog.handler)
    out, err = capfd.readouterr()
    assert "preupload" in caplog.text or "About to commit" in caplog.text  # the client's debug lines were seen
    assert TOKEN not in caplog.text + out + err
    assert all(TOKEN.encode() not in content for content in hub.repositories[REPOSITORY].files.values())


@pytest.mark.parametrize("token", [TOKEN, "a-token-of-another-shape"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "LICENSE"])
def test_token_in_a_file_stops_the_push(folder, hub, token, name):
    (folder / name).write_text(json.dumps({"token": token}))
    with pytest.raises(ValueError, match=rf"^{name} holds what looks like an access token") as refusal:
        push(folder, hub, token=token)
    assert token not in str(refusal.value)
    assert hub.requests == []


def test_the_environments_token_in_a_file_stops_the_push(folder, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-shape")
    (folder / "notes.txt").write_text("my a-token-of-another-shape")
    with pytest.raises(ValueError, match=r"^notes.txt holds what looks like an access token"):
        push(folder, hub, token=None)
    assert hub.requests == []


def test_every_option_reaches_the_client(folder, monkeypatch):
    seen = {}

    def made(self, repo_id, **options):
        seen.update(options, to=repo_id)
        return SimpleNamespace(repo_id=repo_id)

    def found(self, repo_id, *, revision):
        assert (repo_id, revision) == (REPOSITORY, "soft")
        return SimpleNamespace(siblings=[], private=False, id=repo_id)

    monkeypatch.setattr(HfApi, "create_repo", made)
    monkeypatch.setattr(HfApi, "model_info", found)
    monkeypatch.setattr(HfApi, "create_commit", lambda self, repo_id, operations, **options: seen.update(options))
    options = {"commit_message": "First", "revision": "soft", "create_pr": True}
    push_to_hub(folder, REPOSITORY, private=False, **options)
    assert seen == {"to": REPOSITORY, "private": False, "exist_ok": True, **options}


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


def calls_that_could_run_code(source):
    """What in a file could run code of a checkpoint: trust_remote_code=…, torch.load, pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [] if ast.unparse(node.value) == "False" else ["trust_remote_code"]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in modules if name.partition(".")[0] in ("pickle", "cloudpickle", "dill", "joblib")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            only = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("weights_only")
            found += [] if only == "True" else ["torch.load"]
    return found


def test_nothing_we_load_can_run_code():
    files = [*sorted((ROOT / "hf_lgelu").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]
    assert len(files) > 50
    for path in files:
        assert calls_that_could_run_code(path.read_text(encoding="utf-8")) == [], path


def test_a_token_in_the_clients_own_error_is_not_repeated(folder, monkeypatch):
    def cut_off(self, repo_id, **options):
        raise HTTPError(f"connection to https://user:{TOKEN}@hub lost")

    monkeypatch.setattr(HfApi, "create_repo", cut_off)
    with pytest.raises(ConnectionError, match="https://user:hf_…@hub lost") as failure:
        push_to_hub(folder, REPOSITORY)
    assert TOKEN not in str(failure.value)
