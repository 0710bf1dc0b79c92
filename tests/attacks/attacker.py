"""Attacker process: prepares the requests, reports that it is ready, sends all at once, and reports the answers.

Arguments: NAME HTTP GRPC; a line on stdin starts it, and it prints JSON. It runs at low priority, since a real attacker
would use another machine.
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
