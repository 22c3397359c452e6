"""A checkpoint of sentence-transformers: a folder of modules, of which one is an encoder of transformers.

What is converted is the encoder. Everything else in the folder (pooling, dense layers, prompts, the tokenizer) goes
along byte for byte, and networks are compared by their embeddings.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import CONFIG_NAME, REPOCARD_NAME
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.push import MODULES_FILE
from hf_lgelu.extras import require
from hf_lgelu.models.checkpoint import load_checkpoint, save_checkpoint
from hf_lgelu.models.links import require_inside
from hf_lgelu.models.sentence_embedder import SentenceEmbedder, embedder_of

# Of the encoder, written anew; and other forms of the whole network, which would still be the smooth one.
_ENCODERS_OWN = (CONFIG_NAME, "model*.safetensors", "model.safetensors.index.json", "pytorch_model*")
_OTHER_FORMS = ("onnx", "openvino", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "coreml")


@dataclass(frozen=True)
class SentenceFolder:
    """The folder, and where in it the encoder lies ("" where that is the folder itself)."""

    path: Path
    encoder: str

    @property
    def encoder_path(self) -> Path:
        """Folder of the encoder's config, weights and tokenizer."""
        return self.path / self.encoder

    def load(self) -> SentenceEmbedder:
        """The network as it lies there. Raises ImportError without sentence-transformers."""
        package = require("sentence_transformers", "sentence-transformers")
        whole = package.SentenceTransformer(str(self.path), device="cpu", trust_remote_code=False)
        return SentenceEmbedder(load_checkpoint(self.encoder_path), list(embedder_of(whole).behind)).eval()

    def copy_rest(self, target: Path) -> None:
        """Copy all but the encoder's own files, the card and other forms of the weights into `target`.

        Raises ValueError for a link that leads out of the folder.
        """
        left_out = {
            *(path for pattern in _ENCODERS_OWN for path in self.encoder_path.glob(pattern)),
            *(self.path / name for name in (*_OTHER_FORMS, REPOCARD_NAME)),
        }
        for file in sorted(self.path.rglob("*")):
            place = file.relative_to(self.path)
            if any(part.startswith(".") for part in place.parts) or left_out & {file, *file.parents}:
                continue
            require_inside(file, self.path)
            if file.is_symlink() and file.is_dir():
                raise ValueError(f"{place} in {self.path} is a link to a folder; put the folder itself in its place")
            if file.is_file():
                (target / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target / place)

    def save(self, encoder: PreTrainedModel, target: Path) -> None:
        """Write the folder anew, with another encoder. Raises what `save_checkpoint` and `copy_rest` raise."""
        self.copy_rest(target)
        save_checkpoint(encoder, target / self.encoder)


def find_sentence_folder(name: str) -> SentenceFolder | None:
    """The folder or Hub id `name` as one of sentence-transformers; None if it is not.

    Raises ValueError for one whose first module is no encoder of transformers.
    """
    path = local(name)
    if path is None:
        path = _downloaded(name)
    if path is None or not (path / MODULES_FILE).is_file():
        return None
    modules = json.loads((path / MODULES_FILE).read_text(encoding="utf-8"))
    first = modules[0]["path"] if isinstance(modules, list) and modules and "path" in modules[0] else None
    if first is None or not (path / first / CONFIG_NAME).is_file():
        raise ValueError(
            f"{name} is a checkpoint of sentence-transformers whose first module is no encoder of transformers "
            "(static embeddings, a router): there are no gates in it to exchange"
        )
    return SentenceFolder(path, first)


def _downloaded(name: str) -> Path | None:
    try:
        hf_hub_download(name, MODULES_FILE)
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None
    forms = [f"{form}*" for form in _OTHER_FORMS]
    return Path(snapshot_download(name, ignore_patterns=[*forms, "*.bin", "*.h5", "*.msgpack", "*.ot"]))
