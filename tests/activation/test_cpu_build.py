"""Building the C++ kernel: found again, built by several at once, and what happens where it cannot be."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expectations import random

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.kernels import cpu
from hf_lgelu.activation.kernels import cpu_build as build

FAST_COMPILER = """#!/bin/sh
# Takes the last argument for the output, as the real command puts it.
for last; do :; done
echo built > "$last"
echo called >> "{log}"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in for the compiler, which writes a line for every call; gives the file with the lines."""
    log, script = tmp_path / "calls", tmp_path / "compiler"
    script.write_text(FAST_COMPILER.format(log=log))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} --option")
    return log


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LGELU_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def calls(log):
    return log.read_text().count("called") if log.exists() else 0


def kept(cache):
    """Names in this user's folder of the cache, which is all that the cache holds."""
    (folder,) = cache.iterdir()
    return {path.name for path in folder.iterdir()}


def test_a_second_build_finds_the_first(compiler, cache):
    first = build.build_library("lambda_gelu")
    assert (build.build_library("lambda_gelu"), calls(compiler)) == (first, 1)
    assert kept(cache) == {first.name}


def test_another_source_command_compiler_or_processor_is_another_library(compiler, tmp_path, monkeypatch):
    found = set()
    found.add(build.build_library("lambda_gelu"))
    source = tmp_path / "other.cpp"
    source.write_text(build.SOURCE.read_text() + "\n// changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(build, "SOURCE", source)
        found.add(build.build_library("lambda_gelu"))
    with monkeypatch.context() as patch:
        patch.setattr(build, "_processor", lambda: "another")
        found.add(build.build_library("lambda_gelu"))
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(tmp_path / "compiler"))
        found.add(build.build_library("lambda_gelu"))
    script = tmp_path / "compiler"
    script.write_text(script.read_text() + "# a newer release\n")
    found.add(build.build_library("lambda_gelu"))
    assert len(found) == 5
    assert calls(compiler) == 5


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("LGELU_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "hf_lgelu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "hf_lgelu"
    monkeypatch.setenv("LGELU_CACHE_DIR", "~/kernels")
    assert build.cache_folder() == Path.home() / "kernels"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", r"c\+\+, g\+\+, clang\+\+"),
        ("no-such-compiler -O1", "CXX.*'no-such-compiler -O1'"),
        ("  ", "CXX .*not there: '  '"),
        ("true", r"compiler failed \(0\)"),
    ],
)
def test_a_compiler_that_does_not_compile(command, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", command)
    if not command:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=reason):
        build.build_library("lambda_gelu")


@pytest.mark.kernels
@pytest.mark.parametrize("flags", ["-ffast-math", "-Ofast"])
def test_fast_math_in_cxx_neither_changes_results_nor_flushes_subnormals(flags, environment, tmp_path):
    code = (
        "import torch, hf_lgelu; print(hf_lgelu.lambda_gelu(torch.tensor([1.0, 1e-40]), 2.0, kernel='cpu').tolist());"
        "print((torch.tensor([1e-40]) * 2 > 0).item(), hf_lgelu.lambda_gelu(torch.tensor([torch.nan]), 2.0).tolist())"
    )
    environment = environment | {"LGELU_CACHE_DIR": str(tmp_path), "CXX": f"{build.find_compiler()[0]} {flags}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.startswith("[0.97724"), done.stderr
    assert done.stdout.endswith("True [nan]\n")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(monkeypatch, tmp_path, cache):
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho 'cannot do this' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(RuntimeError, match=r"\(3\): cannot do this\n"):
        build.build_library("lambda_gelu")
    assert kept(cache) == set()


def test_a_cache_that_cannot_be_written(compiler, cache):
    cache.write_text("")
    with pytest.raises(RuntimeError, match=r"cache.*LGELU_CACHE_DIR"):
        build.build_library("lambda_gelu")


@pytest.fixture
def not_loaded():
    """As in a process that has not asked for the kernel yet."""
    cpu.load_library.cache_clear()
    yield
    cpu.load_library.cache_clear()


def test_without_it_the_choice_goes_on_and_says_so_once(not_loaded, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    x, hardness = random(100, seed=1), torch.tensor([2.0])
    with caplog.at_level(logging.WARNING):
        values = [lambda_gelu(x, hardness) for _ in range(3)]
    assert torch.equal(values[0], lambda_gelu(x, hardness, kernel="aten"))
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "their C++ kernel is not to be had: CXX names a compiler that is not there" in record.getMessage()
    with pytest.raises(RuntimeError, match=r"'cpu'.*CXX"):
        lambda_gelu(x, hardness, kernel="cpu")


def test_a_library_that_cannot_be_loaded_names_the_file_to_delete(not_loaded, compiler, cache):
    failure = cpu.load_library("lambda_gelu")
    (path,) = cache.glob("*/*.so")
    assert f"delete {path} to build it anew" in failure


# What the cache holds is checked before it is loaded


NOT_OURS = {
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: path.rename(path.with_suffix(".moved")) and path.symlink_to(path.with_suffix(".moved")),
    "writable for all": lambda path: path.chmod(0o777),
    "cut off": lambda path: os.truncate(path, 3),
    "changed": lambda path: path.write_text("bui1t\n"),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_what_is_not_as_it_was_built_is_built_anew(compiler, what):
    path = build.build_library("lambda_gelu")
    NOT_OURS[what](path)
    if what == "a folder":  # which no rename replaces
        with pytest.raises(RuntimeError, match="cannot be kept in"):
            build.build_library("lambda_gelu")
        return
    assert build.build_library("lambda_gelu") == path
    assert calls(compiler) == 2
    assert path.read_text() == "built\n"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o700
    assert build.build_library("lambda_gelu") == path
    assert calls(compiler) == 2


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_another_users_library_is_not_loaded(compiler):
    path = build.build_library("lambda_gelu")
    os.chown(path, 12345, 12345)
    assert build.build_library("lambda_gelu") == path
    assert calls(compiler) == 2
    assert path.stat().st_uid == os.getuid()
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(RuntimeError, match="is no folder of this user's"):
        build.build_library("lambda_gelu")


def test_a_folder_that_others_may_write_is_closed(compiler):
    path = build.build_library("lambda_gelu")
    path.parent.chmod(0o777)
    build.build_library("lambda_gelu")
    assert path.parent.stat().st_mode & 0o777 == 0o700
