"""push_to_hub: what arrives, what old weights go, and what is said where the Hub does not take them."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from hf_lgelu.export.push import push_to_hub

ROOT = Path(__file__).parents[2]
REPOSITORY = "someone/small-relu"


@pytest.fixture
def folder(tmp_path):
    """A folder as exports write it, with what a training may have left there."""
    for name in ("config.json", "model.safetensors", "README.md", "1_Pooling/config.json", "LICENSE"):
        (tmp_path / "relu" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "relu" / name).write_text(name)
    for name in ("training_args.bin", "optimizer.pt", ".secret", "1_Pooling/.b", "checkpoint-1/model.safetensors"):
        (tmp_path / "relu" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "relu" / name).write_text("stays")
    return tmp_path / "relu"


GOES = {"config.json", "model.safetensors", "README.md", "1_Pooling/config.json", "LICENSE"}


class Hub:
    """The calls of HfApi, in memory; patterns are those of a shell."""

    def __init__(self):
        self.files, self.private, self.broken = set(), None, None

    def create_repo(self, api, repo_id, *, private, exist_ok):
        if self.broken is not None:
            raise self.broken
        self.private = bool(private) if self.private is None else self.private
        return SimpleNamespace(repo_id=repo_id)

    def model_info(self, api, repo_id):
        return SimpleNamespace(private=self.private)

    def upload_folder(self, api, *, folder_path, ignore_patterns, delete_patterns, **options):
        def match(name, patterns):
            return any(fnmatch(name, pattern) for pattern in patterns)

        found = {file.relative_to(folder_path).as_posix() for file in folder_path.rglob("*") if file.is_file()}
        self.files = {name for name in self.files if not match(name, delete_patterns)}
        self.files |= {name for name in found if not match(name, ignore_patterns)}
        self.options = options


@pytest.fixture
def hub(monkeypatch):
    found = Hub()
    for name in ("create_repo", "model_info", "upload_folder"):
        answer = getattr(found, name)
        monkeypatch.setattr(HfApi, name, lambda api, *given, answer=answer, **options: answer(api, *given, **options))
    return found


def test_the_model_arrives_and_the_training_stays(folder, hub):
    push_to_hub(folder, REPOSITORY, private=True)
    assert hub.files == GOES
    assert hub.private
    assert hub.options == {"repo_id": REPOSITORY, "commit_message": "Upload model with hf_lgelu"}


def test_weights_of_before_do_not_stay_where_they_would_be_loaded(folder, hub):
    """transformers looks for model.safetensors before the index of shards, and puts an adapter on top."""
    others = {
        "adapter_config.json",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
    }
    stay = {"onnx/model.onnx", "onnx/model.safetensors", "notes.txt"}
    hub.files |= others | stay
    push_to_hub(folder, REPOSITORY)
    assert hub.files == GOES | stay


def test_a_public_repository_is_not_pushed_to_as_a_private_one(folder, hub):
    push_to_hub(folder, REPOSITORY, private=False)
    hub.files.clear()
    with pytest.raises(ValueError, match=f"{REPOSITORY}.*public"):
        push_to_hub(folder, REPOSITORY, private=True)
    assert not hub.files


@pytest.mark.parametrize("broken", [HTTPError("no route"), OfflineModeIsEnabled("offline"), RuntimeError("cut off")])
def test_a_push_without_a_network_says_how_to_push_later(folder, hub, broken):
    hub.broken = broken
    with pytest.raises(ConnectionError) as failure:
        push_to_hub(folder, REPOSITORY, private=True)
    later = str(failure.value).rpartition("hf_lgelu.")[2]
    hub.broken = None
    arguments = ast.parse(later, mode="eval").body
    given = [ast.literal_eval(each) for each in arguments.args]
    push_to_hub(Path(given[0]), given[1], **{each.arg: ast.literal_eval(each.value) for each in arguments.keywords})
    assert (hub.files, hub.private) == (GOES, True)


PASSED_ON = ("False", "trust_remote_code", "checkpoint.trust_remote_code")


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
    assert found
    assert {name: calls for name, calls in found.items() if calls} == {}
