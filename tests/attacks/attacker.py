"""A process of the attacker's own: makes what it sends, says that it is ready, sends it all at once, tells the answers.

NAME HTTP GRPC on the command line, a line on stdin to begin, JSON on stdout. It yields the processors to the services:
what it costs to send is a machine of the attacker's own elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter

from tests.attacks.calls import Target
from tests.attacks.table import ATTACKS


async def attack(name: str, target: Target) -> None:
    calls = ATTACKS[name]()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    started_s = time.monotonic()
    statuses = await asyncio.gather(*(call.send(target) for call in calls))
    outcome = {
        "statuses": Counter(statuses),
        "bytes": sum(call.num_bytes for call in calls),
        "seconds": time.monotonic() - started_s,
    }
    print(json.dumps(outcome), flush=True)


NICENESS = 10


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(attack(sys.argv[1], Target(*sys.argv[2:4])))
