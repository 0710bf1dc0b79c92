"""`python -m tools.evals`: sends held-back questions to a running cluster and scores the answers.

Every answer is known, so that a wrong KV block, a lost token or a wrong position lowers the score.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire.cli.connection import add_address, client_of
from quire.client import Client
from quire.flags.setting_flags import human_int
from quire.outputs import ToolCall
from quire.params import SamplingParams
from tools import program
from tools.evals import SKILLS, Item, Verdict, check, held_back_items
from tools.evals.registry import PICTURE_SKILLS
from tools.evals.tools import spell_call

ALL_PICTURES = "pictures"


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """The score of one size class of a skill."""

    name: str
    items: int
    valid: float
    right: float


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the address, the questions to ask, the required share, and the output."""
    add_address(parser)
    parser.add_argument("--per-size", type=human_int, default=20, help="questions per skill and size class")
    parser.add_argument(
        "--skills",
        default=",".join(SKILLS),
        metavar="A,B,...",
        help=f"skills to evaluate (default: all of text); {ALL_PICTURES}: {', '.join(PICTURE_SKILLS)}",
    )
    parser.add_argument("--concurrency", type=human_int, default=32, help="questions in flight")
    parser.add_argument(
        "--min-right", type=float, default=0.0, help="fail if the share of right answers is lower, 0 to 1"
    )
    parser.add_argument("--show-wrong", type=human_int, default=0, help="number of wrong answers to print")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Asks the questions, prints scores and wrong answers, and returns 1 if fewer than --min-right are right."""
    items = held_back_items(arguments.per_size, skill_names(arguments.skills))
    with client_of(arguments) as client:
        answers = ask(client, items, arguments.concurrency)
    verdicts = [check(item, answer) for item, answer in zip(items, answers, strict=True)]
    rows = list(score(items, verdicts))
    print(as_json(rows) if arguments.json else table(rows))
    wrong = [(item, answer) for item, answer, v in zip(items, answers, verdicts, strict=True) if not v.right]
    for item, answer in wrong[: arguments.show_wrong]:
        print(f"\n{item.skill}/{item.size} {item.key}\n  expected {item.expected!r}\n  answered {answer!r}")
    return 0 if rows[-1].right >= arguments.min_right else 1


def skill_names(given: str) -> list[str]:
    """Returns the skills that a list with commas names; ALL_PICTURES names every one with pictures."""
    return [name for word in given.split(",") for name in (PICTURE_SKILLS if word == ALL_PICTURES else (word,))]


def ask(client: Client, items: Sequence[Item], concurrency: int) -> list[str]:
    """Returns the greedy answers, with tool calls in the model's own format."""

    def answer(item: Item) -> str:
        params = SamplingParams(temperature=0, max_tokens=item.max_tokens)
        sample = client.chat(item.messages, params, tools=item.tools)[0].outputs[0]
        return sample.text + "".join(_spelled(call) for call in sample.tool_calls)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, items))


def _spelled(call: ToolCall) -> str:
    """Returns a call's text; arguments that are not JSON count as a wrong answer."""
    try:
        return spell_call({"name": call.name, "arguments": json.loads(call.arguments)})
    except ValueError:
        return call.arguments


def score(items: Sequence[Item], verdicts: Sequence[Verdict]) -> Iterator[ScoreRow]:
    """Yields one row per skill and size class, then a row for all items."""
    classes: dict[str, list[Verdict]] = defaultdict(list)
    for item, verdict in zip(items, verdicts, strict=True):
        classes[f"{item.skill}/{item.size}"].append(verdict)
    for name, members in classes.items():
        yield _row(name, members)
    yield _row("all", verdicts)


def _row(name: str, verdicts: Sequence[Verdict]) -> ScoreRow:
    count = len(verdicts)
    return ScoreRow(name, count, sum(v.valid for v in verdicts) / count, sum(v.right for v in verdicts) / count)


def table(rows: Sequence[ScoreRow]) -> str:
    """Returns the scores as aligned lines, with the shares of valid and right answers."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'SKILL':<{width}}  ITEMS   VALID   RIGHT"]
    lines += [f"{row.name:<{width}}  {row.items:5}  {row.valid:6.1%}  {row.right:6.1%}" for row in rows]
    return "\n".join(lines)


def as_json(rows: Sequence[ScoreRow]) -> str:
    return json.dumps({row.name: {"items": row.items, "valid": row.valid, "right": row.right} for row in rows})


if __name__ == "__main__":
    text = "score the bundled model's skills through a cluster"
    sys.exit(program.main("python -m tools.evals", text, configure, run))
