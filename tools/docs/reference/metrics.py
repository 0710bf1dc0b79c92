"""Page of the metrics, from the catalogues that the services register."""

from __future__ import annotations

from itertools import groupby

from tests.metrics.catalogue import PROCESS_WIDE, families
from tools.docs.reference.markdown import cell, code, table

HEAD = """# Metrics

Every service serves `/metrics`: frontends on their HTTP port (8000), schedulers on 9102, workers on 9103. `quire up`
serves one page for all of its services on 9101. Names that begin with `vllm:` mean what they mean in vLLM, so existing
dashboards and autoscalers read them. Names that begin with `quire_` are Quire's own. Durations are in seconds.
[Monitoring](../operations/monitoring.md) explains which of them to watch.
"""


def page() -> str:
    """Returns the page: a table of metrics per service, without those of the process."""
    parts = [HEAD]
    for service, group in groupby(families(), key=lambda family: family.service):
        rows = [
            (code(family.name), family.type, ", ".join(family.labels), cell(family.text))
            for family in group
            if not family.name.startswith(PROCESS_WIDE)
        ]
        parts.append(f"## {service.capitalize()}\n\n" + table(("Name", "Type", "Labels", "Meaning"), rows))
    return "\n".join(parts)
