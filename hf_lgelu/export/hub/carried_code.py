"""The MLP's own source beside its weights, for `AutoModel` on a machine without this package."""

import json
import os
import shutil
from pathlib import Path

from hf_lgelu.models import mlp

CODE_FILE = "mlp.py"
_AUTO_MAP = {"AutoConfig": f"mlp.{mlp.MLPConfig.__name__}", "AutoModel": f"mlp.{mlp.MLPForClassification.__name__}"}


def attach_model_code(folder: str | os.PathLike) -> Path:
    """Put mlp.py, which needs torch and transformers alone, into an MLP's folder, and name it in config.json.

    Who loads the folder without hf_lgelu says so: `AutoModel.from_pretrained(folder, trust_remote_code=True)` runs
    that file. With hf_lgelu the installed class is taken and nothing is run; nor is anything needed to read the
    tensors into `torch.nn.Sequential`, as the model card shows. Transformers' `register_for_auto_class` would do the
    same to every MLP that this process saves from then on.

    Args:
        folder: an `MLPForClassification` checkpoint with an activation of transformers, such as ReLU.

    Returns:
        The path of the copied file.

    Raises:
        ValueError: another model, or one with λ-GELU, which the file alone cannot build.
        FileNotFoundError: there is no config.json.
    """
    folder = Path(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != mlp.MLPConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')!r}; only {mlp.MLPConfig.model_type!r} has code "
            "to carry, the others are in transformers or timm"
        )
    if config["hidden_act"] == "lambda_gelu":
        raise ValueError(
            f"{folder} has hidden_act 'lambda_gelu', which is built by hf_lgelu; export the model with export_relu or "
            "export_gelu first"
        )
    config["auto_map"] = _AUTO_MAP
    shutil.copyfile(mlp.__file__, folder / CODE_FILE)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder / CODE_FILE
