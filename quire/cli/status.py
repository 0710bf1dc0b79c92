"""`quire status`: all services of a cluster as a table or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from quire.cli.connection import add_admin, client_of
from quire.shared.pb.admin.v1 import admin_pb2 as pb

COLUMNS = (
    "ROLE",
    "ID",
    "PID",
    "ADDRESS",
    "STATE",
    "STEP AGE",
    "RUN",
    "WAIT",
    "BLOCKS used/cached/free",
    "HITS",
    "TOK/S",
)

GIB = 1 << 30
EPILOG = "With --address of a worker, only that worker is shown, also while it loads its weights."


def configure(parser: argparse.ArgumentParser) -> None:
    add_admin(parser)
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints the status of all services, as JSON or as a table; returns 0."""
    with client_of(arguments) as client:
        services = client.status()
    print(json.dumps({"services": [as_dict(service) for service in services]}) if arguments.json else table(services))
    return 0


def as_dict(service: pb.ServiceStatus) -> dict[str, Any]:
    """Returns a service's status as JSON values; fields that do not apply to its role are None."""
    has_blocks, blocks = service.HasField("blocks"), service.blocks
    return {
        "role": _word(pb.Role.Name(service.role)),
        "worker_role": service.worker_role or None,
        "id": service.id,
        "pid": service.pid,
        "address": service.address,
        "state": _word(pb.State.Name(service.state)),
        "epoch": service.epoch,
        "weights": {"loaded": service.loaded_bytes, "total": service.weight_bytes} if service.weight_bytes else None,
        "ranks": service.num_ranks or 1,
        "stages": service.num_stages or 1,
        "contexts": service.num_contexts or 1,
        "last_step_age_s": round(service.last_step_age_s, 3) if service.HasField("last_step_age_s") else None,
        "running": service.running,
        "waiting": service.waiting,
        "blocks": {name: getattr(blocks, name) for name in ("total", "free", "cached", "used")} if has_blocks else None,
        "work": _work(service.work) if service.HasField("work") else None,
        "drafts": _drafts(service.drafts) if service.HasField("drafts") else None,
        "version": service.version,
        "sequences_moved": service.sequences_moved if service.role == pb.ROLE_SCHEDULER else None,
        "oldest_calls": [_call(call) for call in service.oldest_calls],
    }


def table(services: Sequence[pb.ServiceStatus]) -> str:
    """Returns the services' statuses as aligned lines with a header."""
    rows = [COLUMNS, *(_row(service) for service in services)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _row(service: pb.ServiceStatus) -> tuple[str, ...]:
    """Returns a service's cells in the order of COLUMNS; "-" where it reports nothing."""
    blocks, work = service.blocks, service.work
    hits = f"{100 * work.cached_tokens / work.prompt_tokens:.0f} %" if work.prompt_tokens else "-"
    return (
        _role(service),
        service.id,
        str(service.pid or "-"),
        service.address,
        _word(pb.State.Name(service.state)) + _loaded(service) + _ranks(service),
        f"{service.last_step_age_s:.1f} s" if service.HasField("last_step_age_s") else "-",
        str(service.running),
        str(service.waiting),
        f"{blocks.used}/{blocks.cached}/{blocks.free} of {blocks.total}" if service.HasField("blocks") else "-",
        hits,
        f"{work.tokens_per_s:,.0f}" if service.HasField("work") else "-",
    )


def _role(service: pb.ServiceStatus) -> str:
    """Returns the kind of a service, and the role of a worker that has one."""
    kind = _word(pb.Role.Name(service.role))
    return f"{kind} ({service.worker_role})" if service.worker_role else kind


def _loaded(service: pb.ServiceStatus) -> str:
    if not service.weight_bytes:
        return ""
    return f", {service.loaded_bytes / GIB:.1f} of {service.weight_bytes / GIB:.1f} GiB of weights"


def _ranks(service: pb.ServiceStatus) -> str:
    """Returns the number of ranks with stages and contexts for the state column; "" for a single rank."""
    if service.num_ranks <= 1:
        return ""
    groups = {"stages": service.num_stages, "contexts": service.num_contexts}
    return f", {service.num_ranks} ranks" + "".join(f" in {n} {kind}" for kind, n in groups.items() if n > 1)


def _call(call: pb.CallStatus) -> dict[str, Any]:
    """Returns one of the oldest calls as JSON values."""
    return {
        "request_id": call.request_id,
        "tenant": call.tenant,
        "age_s": round(call.age_s, 3),
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
    }


def _work(work: pb.WorkCounts) -> dict[str, float]:
    return {field.name: getattr(work, field.name) for field in pb.WorkCounts.DESCRIPTOR.fields}


def _drafts(drafts: pb.DraftCounts) -> dict[str, Any]:
    """Returns the counts of speculative decoding since the start as JSON values."""
    return {
        "length": drafts.length,
        "num_drafts": drafts.num_drafts,
        "num_draft_tokens": drafts.num_draft_tokens,
        "num_accepted_tokens": drafts.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(drafts.num_accepted_tokens_per_pos),
    }


def _word(name: str) -> str:
    """Converts ROLE_FRONTEND to frontend."""
    return name.split("_", 1)[1].lower()
