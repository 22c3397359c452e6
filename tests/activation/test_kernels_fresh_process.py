"""What only a new process shows: the environment's kernel, and a machine without Triton."""

import os

from fresh_process import run_fresh

CODE = """
import os, sys
import torch
# What the process was made with: Triton is to be missing, and the others would be registered in at every new import.
for name in [name for name in sys.modules if name.split(".")[0] in ("triton", "transformers", "timm", "accelerate")]:
    del sys.modules[name]
sys.modules["triton"] = None  # torch looks for it where it is imported; it is hidden from us alone

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "hf_lgelu"]:
        del sys.modules[name]

import hf_lgelu
os.environ["LGELU_KERNEL"] = "fastest"
try:
    hf_lgelu.lambda_gelu
except ValueError as error:
    print("unknown:", error)
forget()
os.environ["LGELU_KERNEL"] = "eager"
import hf_lgelu
from hf_lgelu.activation.kernels import use_kernel
from hf_lgelu.activation.report import kernel_report
print("named:", kernel_report().splitlines()[0])
with use_kernel(None):
    print("automatic:", kernel_report().splitlines()[0])
del os.environ["LGELU_KERNEL"]
print("built:", *(hf_lgelu.lambda_gelu(torch.ones(3), 1.0, kernel="cpu").tolist()))
from hf_lgelu.activation import kernels
print("triton's:", "hf_lgelu.activation.kernels.triton" in sys.modules)
class OnCuda:
    is_cuda = True
del sys.modules["triton"]
sys.path.insert(0, os.environ["BROKEN"])
print("broken:", kernels._triton_refusal(OnCuda, None))
"""


def test_a_new_process(tmp_path, monkeypatch):
    broken = tmp_path / "broken" / "triton"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtriton.so: no such file')")
    for name in [name for name in os.environ if name.startswith("LGELU_KERNEL")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BROKEN", str(broken.parent))
    (tmp_path / "program.py").write_text(CODE)
    done = run_fresh(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["unknown"].startswith("the environment variable LGELU_KERNEL must be one of cpu, ")
    assert said["unknown"].endswith("got 'fastest'")
    assert "choice: eager (use_kernel or LGELU_KERNEL)" in said["named"]
    assert said["automatic"].endswith("choice: automatic")
    assert [round(float(word), 4) for word in said["built"].split()] == [0.8413] * 3  # Φ(1)
    assert said["triton's"] == "False"  # imported where there is a device
    assert said["broken"].startswith("Triton cannot be imported (libtriton.so: no such file); pip install triton")
    assert done.stderr == ""
