"""Workloads on which Quire and other engines are compared: token ids in, a fixed number of tokens out.

`mixed` is the workload of nano-vllm's published benchmark; each of the others stresses one aspect. Those named cpu_
suit a machine with two cores. All are drawn from fixed seeds: the same numbers everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from quire.bench.workload.noise import NoiseMedia
from quire.shared.errors import InvalidArgument

LARGEST_ID = 10_000
CPU_LARGEST_ID = 4_000  # within the bundled model's vocabulary
SAMPLED = 0.6  # temperature


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload."""

    prompt: tuple[int, ...]
    num_output: int
    json_schema: str = ""  # schema of the answer; empty: unconstrained
    adapter: str = ""  # LoRA adapter; empty: none
    media: NoiseMedia | None = None  # pictures or sound sent with the prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of requests; `load` is the default arrival pattern: see quire.bench.load_client.arrivals."""

    name: str
    items: tuple[BenchRequest, ...]
    load: str = "burst"
    temperature: float = SAMPLED
    is_new: bool = False  # the media of each run have other contents

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.num_output for item in self.items)

    def within(self, vocab_size: int) -> Workload:
        """Returns the workload for a smaller vocabulary: ids wrap around."""
        if vocab_size > LARGEST_ID:
            return self
        wrapped = (replace(item, prompt=tuple(i % vocab_size for i in item.prompt)) for item in self.items)
        return replace(self, items=tuple(wrapped))

    def in_run(self, number: int) -> Workload:
        """Returns the workload of one run: with media of its own if the workload is new in each."""
        if not self.is_new:
            return self
        items = (replace(item, media=item.media and item.media.in_run(number)) for item in self.items)
        return replace(self, items=tuple(items))

    def sampled_at(self, temperature: float) -> Workload:
        return replace(self, temperature=temperature)

    def without_schemas(self) -> Workload:
        return replace(self, items=tuple(replace(item, json_schema="") for item in self.items))

    def first(self, count: int) -> Workload:
        """Returns `count` requests, repeating the workload if it has fewer; 0: all."""
        return replace(self, items=tuple(islice(cycle(self.items), count))) if count else self


def mixed(count: int = 256, low: int = 100, high: int = 1024) -> Workload:
    """Prompt and output lengths uniform in [low, high]; 133,966 output tokens by default."""
    draw = random.Random(0)
    prompts = [_ids(draw, draw.randint(low, high)) for _ in range(count)]
    return Workload("mixed", tuple(BenchRequest(prompt, draw.randint(low, high)) for prompt in prompts))


def single() -> Workload:
    """A single stream, for latency."""
    return Workload("single", (BenchRequest(_ids(random.Random(1), 512), 256),), load="1")


def shared_prefix() -> Workload:
    """256 requests that share a long system prompt."""
    return _behind_prefix("shared_prefix", seed=2, count=256, shared=2048, own=64, num_output=64)


def prefill() -> Workload:
    """Prompt processing only."""
    return _equal("prefill", seed=3, count=64, prompt=4096, num_output=1)


def decode() -> Workload:
    """Steady decoding with a fixed batch."""
    return _equal("decode", seed=4, count=256, prompt=128, num_output=512)


def long32k() -> Workload:
    """Eight prompts of nearly 32k tokens."""
    return _equal("long32k", seed=8, count=8, prompt=32_768, num_output=128)


def long120k() -> Workload:
    """Two prompts that nearly fill a 128k context."""
    return _equal("long120k", seed=9, count=2, prompt=120_000, num_output=128)


def beside_long() -> Workload:
    """Eight streams together with a prompt that nearly fills a 128k context."""
    draw = random.Random(12)
    streams = tuple(BenchRequest(_ids(draw, 128), 2048) for _ in range(8))
    return Workload("beside_long", (*streams, BenchRequest(_ids(draw, 120_000), 8)))


def returning() -> Workload:
    """64 prompts of 4,096 tokens that recur in turn: more than the device keeps with a small `--num-blocks`."""
    return _in_turn("returning", seed=10, count=64, prompt=4096, load="8")


def cpu_returning() -> Workload:
    """8 prompts of 768 tokens that recur in turn, one at a time."""
    return replace(_in_turn("cpu_returning", seed=11, count=8, prompt=768, load="1"), temperature=0.0)


def long_prompts() -> Workload:
    """128 requests with prompts of 2,048 to 8,192 tokens and answers of 128 to 256: prefills delay decodes."""
    return _long_prompts("long_prompts", seed=12, count=128, prompt=(2048, 8192), num_output=(128, 256), load="4/s")


def cpu_long_prompts() -> Workload:
    """24 requests with prompts of 512 to 1,536 tokens and answers of 64 to 128."""
    work = _long_prompts("cpu_long_prompts", seed=13, count=24, prompt=(512, 1536), num_output=(64, 128), load="2/s")
    return replace(work, temperature=0.0)


def cpu_batch() -> Workload:
    """32 simultaneous requests with prompts of 32 to 128 tokens."""
    draw = random.Random(5)
    items = tuple(BenchRequest(_ids(draw, draw.randint(32, 128), CPU_LARGEST_ID), 64) for _ in range(32))
    return Workload("cpu_batch", items, temperature=0.0)


def cpu_single() -> Workload:
    """A single stream on a CPU."""
    item = BenchRequest(_ids(random.Random(6), 128, CPU_LARGEST_ID), 64)
    return Workload("cpu_single", (item,), load="1", temperature=0.0)


def cpu_prefix() -> Workload:
    """32 requests that share a prefix of 512 tokens."""
    work = _behind_prefix("cpu_prefix", seed=7, count=32, shared=512, own=16, num_output=16, largest=CPU_LARGEST_ID)
    return replace(work, temperature=0.0)


def cpu_stream8() -> Workload:
    """8 clients with 4 requests each, as many tokens as in cpu_batch."""
    return replace(cpu_batch(), name="cpu_stream8", load="8")


WORKLOADS: dict[str, Callable[[], Workload]] = {
    make.__name__: make
    for make in (
        *(mixed, single, shared_prefix, prefill, decode, long32k, long120k, beside_long, returning, long_prompts),
        *(cpu_batch, cpu_single, cpu_prefix, cpu_stream8, cpu_returning, cpu_long_prompts),
    )
}
SETS: dict[str, Sequence[str]] = {
    "gpu": ("single", "decode", "mixed", "shared_prefix", "prefill"),
    "long": ("long32k", "long120k"),
    "cpu": ("cpu_batch", "cpu_single", "cpu_prefix", "cpu_stream8"),
}


def add(made: Mapping[str, Callable[[], Workload]], set_name: str) -> None:
    """Registers further workloads under the name of a set."""
    WORKLOADS.update(made)
    SETS[set_name] = tuple(made)


def named(names: str) -> list[Workload]:
    """Parses a list such as `mixed,single`; `gpu`, `long` and `cpu` name sets. Raises InvalidArgument for an unknown
    name."""
    wanted = [name for word in names.split(",") for name in SETS.get(word, (word,))]
    for name in wanted:
        if name not in WORKLOADS:
            known = ", ".join((*WORKLOADS, *SETS))
            raise InvalidArgument(f"work: {name!r} does not exist; available: {known}", field="work")
    return [WORKLOADS[name]() for name in wanted]


def _ids(draw: random.Random, count: int, largest: int = LARGEST_ID) -> tuple[int, ...]:
    return tuple(draw.randint(0, largest) for _ in range(count))


def _equal(name: str, *, seed: int, count: int, prompt: int, num_output: int) -> Workload:
    draw = random.Random(seed)
    return Workload(name, tuple(BenchRequest(_ids(draw, prompt), num_output) for _ in range(count)))


def _long_prompts(
    name: str, *, seed: int, count: int, prompt: tuple[int, int], num_output: tuple[int, int], load: str
) -> Workload:
    """Builds a workload with random prompts; lengths are drawn from the closed ranges `prompt` and `num_output`, in
    tokens."""
    draw = random.Random(seed)
    items = (
        BenchRequest(_ids(draw, draw.randint(*prompt), CPU_LARGEST_ID), draw.randint(*num_output)) for _ in range(count)
    )
    return Workload(name, tuple(items), load=load)


def _in_turn(name: str, *, seed: int, count: int, prompt: int, load: str) -> Workload:
    draw = random.Random(seed)
    items = [BenchRequest(_ids(draw, prompt, CPU_LARGEST_ID), 8) for _ in range(count)]
    return Workload(name, (*items, *items, *items), load=load)


def _behind_prefix(
    name: str, *, seed: int, count: int, shared: int, own: int, num_output: int, largest: int = LARGEST_ID
) -> Workload:
    """Builds a workload whose prompts share their first `shared` tokens and have `own` different ones."""
    draw = random.Random(seed)
    head = _ids(draw, shared, largest)
    return Workload(name, tuple(BenchRequest(head + _ids(draw, own, largest), num_output) for _ in range(count)))
