"""Compilation of the C++ sources for this processor, once per gate, into the user's own folder in the cache.

A library is loaded only if this user owns it, nobody else may write to it, and it is as it was built: its name ends in
a digest of its content.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("gate.cpp")
HEADER = SOURCE.with_name("formulas.h")

CACHE_VARIABLE = "LGELU_CACHE_DIR"
"""Environment variable with the folder for compiled kernels; the default is ~/.cache/hf_lgelu (XDG_CACHE_HOME)."""

_COMPILERS = ("c++", "g++", "clang++")

# Never -ffast-math, even if CXX has it. Linked into a library, it flushes subnormals to zero in the whole process, and
# it lets the compiler undo the rounding by which formulas.h splits an exponent.
_FLAGS = (
    *("-fno-fast-math", "-fno-unsafe-math-optimizations"),
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-fopenmp", "-shared", "-fPIC"),
)


def build_library(name: str) -> Path:
    """The shared library of the gate `name`, a struct of formulas.h; it is compiled unless the cache has it.

    Each of several processes that need a file puts it in its place whole. A file that others may write, or that has
    changed since it was built, is built anew. Raises RuntimeError where there is no C++ compiler, the compiler fails,
    the source cannot be read or the cache cannot be written. The message says which, with the compiler's own words.
    """
    machine, processor = platform.machine().lower(), _processor()
    native = ["-mcpu=native"] if machine in ("aarch64", "arm64") else []
    if machine in ("x86_64", "amd64"):
        # By default, gcc uses half of AVX-512's width.
        native = ["-march=native", *(["-mprefer-vector-width=512"] if "avx512f" in processor else [])]
    command = [*find_compiler(), *_FLAGS, f"-DLGELU_GATE={name}", *native]
    user = os.getuid() if hasattr(os, "getuid") else 0
    # The cache may be shared by several users; none of them can put a library there for another.
    folder = cache_folder() / f"kernels-{user}"
    try:
        # All that the library depends on: a home folder may be shared by machines of several kinds.
        compiler = Path(shutil.which(command[0]) or command[0]).resolve()
        sources = [path.read_text(encoding="utf-8") for path in (SOURCE, HEADER)]
        parts = (*sources, *command, str(compiler.stat().st_mtime_ns), processor)
        name = f"{name}-{_digest(chr(0).join(parts).encode())}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
            raise RuntimeError(
                f"{folder} is no folder of this user's; remove it, or set {CACHE_VARIABLE} to another place"
            )
        if found.st_mode & 0o022:
            folder.chmod(0o700)
        for library in folder.glob(f"{name}-*.so"):
            kept = library.lstat()
            is_own = stat.S_ISREG(kept.st_mode) and kept.st_uid == user and not kept.st_mode & 0o022
            # The system ends a process that loads an incomplete library.
            if is_own and library.stem == f"{name}-{_digest(library.read_bytes())}":
                return library
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as building:
            fresh = Path(building) / f"{name}.so"
            command += [str(SOURCE), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode != 0 or not fresh.exists():
                words = done.stderr.strip() or "it said nothing"
                # Only the first line is logged.
                raise RuntimeError(f"the compiler failed ({done.returncode}): {words[-2000:]}\n{shlex.join(command)}")
            fresh.chmod(0o700)
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            library = folder / f"{name}-{_digest(fresh.read_bytes())}.so"
            os.replace(fresh, library)
    except OSError as error:
        raise RuntimeError(
            f"the compiled kernel cannot be kept in {folder} ({error}); "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return library


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def find_compiler() -> list[str]:
    """The C++ compiler's command: the environment variable CXX, else the first of c++, g++, clang++ on the path."""
    if named := os.environ.get("CXX"):
        command = named.split()
        if not command or shutil.which(command[0]) is None:
            raise RuntimeError(f"CXX names a compiler that is not there: {named!r}")
        return command
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise RuntimeError(f"no C++ compiler was found ({', '.join(_COMPILERS)}); install one or set CXX")


def cache_folder() -> Path:
    """The folder for compiled kernels."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_lgelu"


def _processor() -> str:
    """The processor's model and instruction sets."""
    wanted = ("model name", "flags", "cpu implementer", "cpu part", "features")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.lower().startswith(wanted)}))
