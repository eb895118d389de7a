"""How claims are served: one frozen object, read from vLLM's `additional_config` and environment.

    --additional-config '{"kvclaims": {"quotas": {"team-a": 40}, "hard_share": 0.5}}'
    KVCLAIMS_SETTINGS='{"trace": "/var/log/kvclaims/trace.jsonl"}'

Keys given to vLLM win over those of the environment.  Secrets are named by their SHA-256 only:
vLLM prints its configuration.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

SETTINGS_KEY: Final = "kvclaims"
"""Key in vLLM's `additional_config`."""

ENVIRONMENT: Final = "KVCLAIMS_SETTINGS"
"""Environment: the same object as JSON."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
NAME: Final = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
"""What owners and claims may be called."""


class BadSettings(ValueError):
    """Settings that cannot be meant; the engine does not start with them."""


@dataclass(frozen=True)
class Settings:
    """All sizes are in blocks unless said; times are in seconds."""

    run_id: str = "server"
    defer_limit: int = 1
    """Steps that a request blocked by claims alone waits before it is refused (F4)."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Hard blocks that an owner may be granted at a time (Q2)."""
    default_quota: int | None = None
    """For owners without an entry; None for no quota, 0 for no hard claims."""
    hard_share: float = 1.0
    """Of the usable blocks, how much all hard claims together may be granted (Q2)."""
    tier_quotas: Mapping[str, int] = field(default_factory=dict)
    """Blocks in the tier that an owner may be promised at a time, by offloadable claims."""
    default_tier_quota: int | None = None
    """For owners without an entry; None for no quota."""
    claims_per_owner: int = 10_000
    """Claims in force that an owner may have at a time, of any protection."""
    remember: int = 10_000
    """Ended claims that stay visible; of older ones only the generation is known."""
    trace: str = ""
    """File that events go to; empty for none."""
    trace_bytes: int = 64 * 1024 * 1024
    """Size at which a trace file is put aside and a new one begun."""
    trace_files: int = 8
    """Files put aside that are kept, the youngest; 0 for all."""
    trace_tables: bool = False
    """Whether the trace has each request's table of blocks whenever it grew: from these an audit
    derives every refusal and its blame anew (T2), and they are most of a long request's trace."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Owner → SHA-256 of its API key.  Empty: owners are believed."""
    operator_sha256: str = ""
    """SHA-256 of the operator's token; empty for no operator."""
    retry_after: int = 30
    """What a refused client is told to wait where the blocking claims have no end."""
    max_body: int = 4 * 1024 * 1024
    """Largest body of a claim request, in bytes."""
    metrics_names: bool = False
    """Whether `/metrics` names claims and owners; else opaque ids (Q3)."""

    def __post_init__(self) -> None:
        whole: dict[str, tuple[Any, int]] = {
            "defer_limit": (self.defer_limit, 0),
            "claims_per_owner": (self.claims_per_owner, 1),
            "remember": (self.remember, 0),
            "trace_bytes": (self.trace_bytes, 1024),
            "trace_files": (self.trace_files, 0),
            "retry_after": (self.retry_after, 1),
            "max_body": (self.max_body, 1024),
            **{f"quotas.{owner}": (quota, 0) for owner, quota in self.quotas.items()},
            **{f"tier_quotas.{owner}": (quota, 0) for owner, quota in self.tier_quotas.items()},
        }
        for name in ("default_quota", "default_tier_quota"):
            if getattr(self, name) is not None:
                whole[name] = (getattr(self, name), 0)
        for name, (value, least) in whole.items():
            if type(value) is not int or value < least:
                raise BadSettings(f"{name} is a whole number from {least}, not {value!r}")
        share: Any = self.hard_share
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise BadSettings(f"hard_share lies between 0 and 1, not at {share!r}")
        if type(self.trace) is not str:
            raise BadSettings("trace is a path")
        for name in ("metrics_names", "trace_tables"):
            if type(getattr(self, name)) is not bool:
                raise BadSettings(f"{name} is true or false")
        for owner, digest in {**self.owners, "operator_sha256": self.operator_sha256}.items():
            if digest and not _DIGEST.fullmatch(str(digest)):
                raise BadSettings(f"{owner}: give the SHA-256 of the secret in hexadecimal")
        for owner in (*self.quotas, *self.tier_quotas, *self.owners):
            if not NAME.fullmatch(owner):
                raise BadSettings(f"no owner can be called {owner!r}")

    def voucher(self, owner: str) -> str:
        """What stands for the owner's key beside a request inside the engine: whoever makes it
        knows the key or these settings.  Empty for an owner without a key."""
        digest = self.owners.get(owner, "")
        return digest and hmac.new(digest.encode(), b"kvclaims", hashlib.sha256).hexdigest()

    def cap(self, usable: int) -> int:
        """Hard blocks that all owners together may be granted."""
        return int(self.hard_share * usable)


def read_settings(
    additional: Any, environment: Mapping[str, str] | None = None, default: bool = False
) -> Settings | None:
    """The settings in force; None where neither source has any, unless `default` asks for plain
    ones.  Raises `BadSettings` for unknown keys and values that cannot be meant."""
    text = (os.environ if environment is None else environment).get(ENVIRONMENT, "").strip()
    given = additional.get(SETTINGS_KEY) if isinstance(additional, Mapping) else None
    if given is None and not default:
        return None
    try:
        merged = {**(json.loads(text) if text else {}), **(given or {})}
    except (ValueError, TypeError) as error:
        raise BadSettings(f"{ENVIRONMENT} and {SETTINGS_KEY} are JSON objects: {error}") from None
    unknown = sorted(set(merged) - {f.name for f in fields(Settings)})
    if unknown:
        raise BadSettings(f"unknown settings of claims: {', '.join(unknown)}")
    return Settings(**merged)
