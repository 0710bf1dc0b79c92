"""Scores a model folder on held-back items, in bfloat16 and in float32.

Run as `python -m tools.training.evaluate --model DIR --out FILE`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.evals import Item, check, held_back_items
from tools.training.chat import prompt
from tools.training.decode import GreedyDecoder
from tools.training.export import BUNDLED, END, END_OF_TEXT, load_network
from tools.training.tokenizer import load_tokenizer

CLOSE = 0.5
"""An answer one of whose tokens led the next best by a smaller logit than this is a close call.

Rounding to bfloat16 moves this model's logits by about a tenth of it.
"""


class GreedyAnswer(NamedTuple):
    """A greedy answer and its smallest lead (see Continuation)."""

    text: str
    lead: float


Answers = list[GreedyAnswer]


def answer_all(folder: Path, items: list[Item], dtype: torch.dtype, device: torch.device, batch_tokens: int) -> Answers:
    """The greedy answer to every item. Items of about one length are decoded together, up to `batch_tokens` at once."""
    tokenizer = load_tokenizer(folder)
    decoder = GreedyDecoder(load_network(folder, device).to(dtype), (END, END_OF_TEXT))
    prompts = [tokenizer.encode(prompt(i.messages, i.tools), add_special_tokens=False).ids for i in items]
    answers = [GreedyAnswer("", 0.0)] * len(items)
    order = sorted(range(len(items)), key=lambda n: (items[n].max_tokens > 128, len(prompts[n]) + items[n].max_tokens))
    for batch in _batches(order, [len(p) + i.max_tokens for p, i in zip(prompts, items, strict=True)], batch_tokens):
        limit = max(items[n].max_tokens for n in batch)
        for n, (tokens, lead) in zip(batch, decoder.generate([prompts[n] for n in batch], limit), strict=True):
            text = tokenizer.decode(tokens[: items[n].max_tokens], skip_special_tokens=True)
            answers[n] = GreedyAnswer(text, lead)
    return answers


def _batches(order: list[int], sizes: list[int], batch_tokens: int) -> list[list[int]]:
    """The order cut into runs whose longest size times count stays within `batch_tokens`."""
    batches: list[list[int]] = []
    longest = 0
    for n in order:
        longest = max(longest, sizes[n])
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = sizes[n]
        batches[-1].append(n)
    return batches


def score(items: list[Item], answers: Answers) -> dict[str, dict[str, float]]:
    """Returns items, share valid and share right for each `skill/size` and each whole skill."""
    verdicts: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for item, answer in zip(items, answers, strict=True):
        verdict = check(item, answer.text)
        verdicts[item.skill].append((verdict.valid, verdict.right))
        verdicts[f"{item.skill}/{item.size}"].append((verdict.valid, verdict.right))
    return {
        name: {
            "items": len(found),
            "valid": round(sum(valid for valid, _ in found) / len(found), 4),
            "right": round(sum(right for _, right in found) / len(found), 4),
        }
        for name, found in verdicts.items()
    }


def mistakes(items: list[Item], answers: Answers, most: int) -> list[dict[str, str]]:
    """Returns the first `most` wrong answers, shortened, for inspection."""
    wrong = [(i, a.text) for i, a in zip(items, answers, strict=True) if not check(i, a.text).right]
    return [
        {
            "skill": f"{item.skill}/{item.size}",
            "question": item.messages[-1]["content"][-120:],
            "expected": item.expected[:200],
            "answer": text[:200],
        }
        for item, text in wrong[:most]
    ]


def evaluate(folder: Path, per_size: int, device: torch.device) -> dict[str, Any]:
    """Score the folder's model in both dtypes and say how many answers are the same, character for character."""
    items = held_back_items(per_size)
    batch_tokens = 500_000 if device.type == "cuda" else 64_000
    result: dict[str, Any] = {"device": _device_name(device), "per_size": per_size, "items": len(items)}
    answers = {}
    for dtype in (torch.bfloat16, torch.float32):
        started = time.monotonic()
        name = str(dtype).removeprefix("torch.")
        answers[name] = answer_all(folder, items, dtype, device, batch_tokens)
        result[name] = score(items, answers[name])
        result[f"{name}_seconds"] = round(time.monotonic() - started, 1)
    pairs = list(zip(items, answers["bfloat16"], answers["float32"], strict=True))
    result["same_text_in_both"] = round(sum(a.text == b.text for _, a, b in pairs) / len(pairs), 5)
    result["different_text"] = [f"{i.skill}/{i.size}: {i.key}" for i, a, b in pairs if a.text != b.text]
    result["close_calls"] = [f"{i.skill}/{i.size}: {i.key}" for i, a, b in pairs if min(a.lead, b.lead) < CLOSE]
    result["mistakes"] = mistakes(items, answers["bfloat16"], 40)
    return result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def table(result: dict[str, Any]) -> str:
    """Returns the scores of a result as a Markdown table, with the share of right answers in float32."""
    lines = ["| skill | items | valid | right | right in float32 |", "|---|---|---|---|---|"]
    for name, row in result["bfloat16"].items():
        wide = result["float32"][name]["right"]
        lines.append(f"| {name} | {row['items']} | {row['valid']:.1%} | {row['right']:.1%} | {wide:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Evaluates a model folder from the command line, writes the result as JSON, and prints its scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--per-size", type=int, default=200, help="held-back items of every size class")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    result = evaluate(arguments.model, arguments.per_size, torch.device(arguments.device))
    arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))
    print("same text in bfloat16 and float32:", result["same_text_in_both"], "close calls:", len(result["close_calls"]))


if __name__ == "__main__":
    main()
