"""Group relative policy optimization (GRPO, Shao et al. 2024) with an engine that samples: `python -m training.grpo`

quire-tiny adds well where it is asked as it was trained. Asked in words that it has never seen it is right one time in
five, and learns from rewards alone. The trainer is the model as transformers has it; the engine takes its weights after
every step. So does a cluster (`--address HOST:PORT`, of a frontend of one's own on this machine), as a stream.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from random import Random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import Client, LLMEngine, SamplingParams, bundled
from quire.outputs import CompletionOutput

NUM_STEPS, NUM_QUESTIONS, GROUP, LR, CLIP = 10, 12, 8, 3e-5, 0.2
NUM_HELD_BACK = 100
Asked = tuple[list[int], str]  # prompt, right answer


def all_sums(rng: Random, tokenizer: Any) -> list[Asked]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    chats = [[{"role": "user", "content": f"{a} and {b} together"}] for a, b in pairs]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return [(prompt, str(a + b)) for prompt, (a, b) in zip(prompts, pairs, strict=True)]


def answers(engine: LLMEngine | Client, asked: list[Asked], params: SamplingParams) -> list[list[CompletionOutput]]:
    """Of each question all samples."""
    if isinstance(engine, Client):
        return [output.outputs for output in engine.generate([{"prompt_token_ids": ids} for ids, _ in asked], params)]
    done = {}
    for number, (prompt, _) in enumerate(asked):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        done.update({output.request_id: output.outputs for output in engine.step() if output.finished})
    return [done[str(number)] for number in range(len(asked))]


def share_right(engine: LLMEngine | Client, asked: list[Asked]) -> float:
    found = answers(engine, asked, SamplingParams(temperature=0, max_tokens=8))
    return sum(samples[0].text == right for (_, right), samples in zip(asked, found, strict=True)) / len(asked)


def loss_of(model: torch.nn.Module, prompt: list[int], samples: list[CompletionOutput], right: str) -> torch.Tensor:
    """Better than the rest of its group is made likelier, worse unlikelier, neither by more than CLIP at a time."""
    rewards = torch.tensor([float(sample.text == right) for sample in samples])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    tokens = pad_sequence([torch.tensor(prompt + sample.token_ids) for sample in samples], batch_first=True)
    chances = model(tokens).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    ours = chances.gather(2, tokens[:, len(prompt) :, None])[:, :, 0]
    theirs = pad_sequence([torch.tensor([each.logprob for each in sample.logprobs or ()]) for sample in samples], True)
    ratio = (ours - theirs).exp()  # to the policy that sampled
    gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    return -(gains * (torch.arange(tokens.shape[1] - len(prompt)) < lengths[:, None])).sum() / lengths.sum()


def train(num_steps: int = NUM_STEPS, seed: int = 1, address: str = "") -> tuple[float, float]:
    """The share of right answers to held-back questions, before and after. `address`: of a cluster that samples."""
    rng = Random(seed)
    model = AutoModelForCausalLM.from_pretrained(bundled.FOLDER, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    engine = Client(address) if address else LLMEngine(dtype="float32")
    with closing(engine):
        sums = all_sums(rng, AutoTokenizer.from_pretrained(bundled.FOLDER))
        held_back, sums = sums[:NUM_HELD_BACK], sums[NUM_HELD_BACK:]
        before = share_right(engine, held_back)
        for step in range(num_steps):
            asked = rng.sample(sums, NUM_QUESTIONS)
            params = SamplingParams(temperature=1, max_tokens=8, n=GROUP, seed=step, logprobs=0)
            found = answers(engine, asked, params)
            optimizer.zero_grad()
            for (prompt, right), samples in zip(asked, found, strict=True):
                (loss_of(model, prompt, samples, right) / NUM_QUESTIONS).backward()
            optimizer.step()
            engine.update_weights_from_tensor(model.state_dict().items(), f"step-{step + 1}")
            share = sum(s.text == right for (_, right), samples in zip(asked, found, strict=True) for s in samples)
            print(f"step {step + 1}: right {share / NUM_QUESTIONS / GROUP:.0%}", flush=True)
        return before, share_right(engine, held_back)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m training.grpo")
    parser.add_argument("--address", default="", help="of a cluster's frontend, in place of an engine in this program")
    print("right before and after: {:.0%}, {:.0%}".format(*train(address=parser.parse_args().address)))
