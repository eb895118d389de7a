"""What this machine can check: Python, solver, engines, devices, and how to get what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Final

from packaging.requirements import Requirement

from kvclaims.checker import engines
from kvclaims.checker.promela import spin
from kvclaims.checker.tla import JAR, tla2tools
from kvclaims.spec.interface import EngineMissing
from kvclaims.spec.vocabulary import Verdict

OPTIONAL: Final = {
    "cvc5": "a second solver (prove --solver both)",
    "dd": "exploration by BDDs (explore --by symbolic)",
    "ray": "work on many processes and machines (--workers ray:N)",
    "prometheus-client": "metrics (watch URL)",
    "pyzmq": "KV events live (audit tcp://HOST:PORT)",
    "msgspec": "KV events live (audit tcp://HOST:PORT)",
    "playwright": "tests of report.html in a browser",
}
"""Packages that a part of the commands needs, and what for."""

PROGRAMS: Final = {
    "chromium": ("chromium", "tests of report.html in a browser"),
}
"""Programs of the system: the Debian package, and what for."""

INSTALL: Final = "pip install "


@dataclass(frozen=True)
class Finding:
    """One thing looked for: found (what), or missing (why, and the command that installs it)."""

    name: str
    found: bool
    detail: str
    install: str = ""
    needed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "found": self.found,
            "detail": self.detail,
            "install": self.install or None,
            "needed": self.needed,
        }


@dataclass(frozen=True)
class DoctorReport:
    """HOLDS when everything that the package itself needs is there; engines are optional."""

    findings: tuple[Finding, ...]

    @property
    def lacks_needed(self) -> bool:
        """Then the command ends with exit code 2."""
        return any(finding.needed and not finding.found for finding in self.findings)

    @property
    def verdict(self) -> Verdict:
        return Verdict.UNKNOWN if self.lacks_needed else Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {"findings": [finding.to_json() for finding in self.findings]}

    def lines(self) -> Iterator[str]:
        for finding in self.findings:
            sign = "found" if finding.found else "missing"
            hint = f" (install: {finding.install})" if finding.install else ""
            yield f"{finding.name:20} {sign:8} {finding.detail}{hint}"


def doctor() -> DoctorReport:
    """Look around; nothing is changed and nothing heavy imported but the engines."""
    return DoctorReport(
        (
            _python(),
            *(_package(name) for name in needed()),
            *(_engine(name) for name in engines.names()),
            *(_optional(name, use) for name, use in OPTIONAL.items()),
            *(_program(name, *told) for name, told in PROGRAMS.items()),
            _torch(),
            _gpu(),
            _spin(),
            _tlc(),
            Finding("cores", True, str(_cores())),
            _memory(),
        )
    )


def needed() -> list[str]:
    """The packages that this one declares to depend on, without its extras."""
    declared = [Requirement(text) for text in requires("kvclaims") or ()]
    return sorted(r.name for r in declared if r.marker is None or "extra" not in str(r.marker))


def _python() -> Finding:
    new_enough = sys.version_info >= (3, 11)
    hint = "" if new_enough else "a Python of at least 3.11"
    where = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", new_enough, where, hint, needed=True)


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, version(name), needed=True)
    except PackageNotFoundError:
        return Finding(name, False, "not installed", INSTALL + name, needed=True)


def _optional(name: str, use: str) -> Finding:
    try:
        return Finding(name, True, f"{version(name)}: {use}")
    except PackageNotFoundError:
        return Finding(name, False, f"not installed: {use}", INSTALL + name)


def _program(name: str, package: str, use: str) -> Finding:
    found = shutil.which(name)
    if found is None:
        return Finding(name, False, f"not on the path: {use}", f"apt-get install {package}")
    return Finding(name, True, f"{found}: {use}")


def _engine(name: str) -> Finding:
    title = f"engine {name}"
    try:
        _, info = engines.ready(name)
    except EngineMissing as error:
        return Finding(title, False, engines.first_line(error))
    return Finding(title, True, f"{info.version} in {info.path}")


def _torch() -> Finding:
    try:
        return Finding("torch", True, version("torch"))
    except PackageNotFoundError:
        return Finding("torch", False, "not installed", INSTALL + "torch")


def _gpu() -> Finding:
    """What the NVIDIA driver lists; asking torch would take seconds and start CUDA."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("gpu", False, "no NVIDIA driver here")
    asked = subprocess.run(
        [command, "--query-gpu=name,memory.total", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    devices = asked.stdout.strip().splitlines() if asked.returncode == 0 else []
    if not devices:
        return Finding("gpu", False, "the NVIDIA driver lists none")
    return Finding("gpu", True, "; ".join(devices))


def _spin() -> Finding:
    """Counts the states of an instance a second time (`explore --export promela`)."""
    where = spin()
    hint = "" if where else "apt install spin gcc"
    return Finding("spin", where is not None, where or "no SPIN with gcc here", hint)


def _tlc() -> Finding:
    """The same for TLA+ (`explore --export tla`); its jar is never downloaded."""
    jar = tla2tools()
    found = str(jar) if jar else f"no Java, or no {JAR}"
    hint = "" if jar else f"apt install default-jre-headless; {JAR} into the home folder"
    return Finding("tlc", jar is not None, found, hint)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return Finding("memory", False, "this system does not say")
    return Finding("memory", True, f"{total / 2**30:.1f} GiB")
