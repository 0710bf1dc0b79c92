"""GRPO (Shao et al. 2024) of sums in words that quire-tiny has never seen: `python -m tools.training.grpo [ADDRESS]`

An engine, or the cluster of the frontend at ADDRESS on this machine, samples, and takes the weights after each step."""

import sys
from random import Random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoTokenizer

from quire import Client, CompletionOutput, LLMEngine, SamplingParams, bundled
from quire.rl import logprobs_from_logits

NUM_STEPS, BATCH, GROUP, LR, CLIP, NUM_HELD_BACK = 10, 12, 8, 3e-5, 0.2, 100


def loss_of(model: torch.nn.Module, group: list[CompletionOutput], prompt: list[int], right: str) -> torch.Tensor:
    """Computes the loss that makes better answers of a group likelier and worse ones less likely, each by at most
    CLIP."""
    rewards = torch.tensor([float(sample.text == right) for sample in group])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    tokens = pad_sequence([torch.tensor(prompt + sample.token_ids) for sample in group], batch_first=True)
    ours = logprobs_from_logits(model(tokens).logits[:, len(prompt) - 1 : -1], tokens[:, len(prompt) :])
    theirs = pad_sequence([torch.tensor(sample.rollout_log_probs) for sample in group], batch_first=True)
    ratio = (ours - theirs).exp()  # relative to the sampling policy
    gains = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    mask = pad_sequence([torch.ones(len(sample.token_ids)) for sample in group], batch_first=True)
    return -(gains * mask).sum() / mask.sum()


def train(num_steps: int = NUM_STEPS, seed: int = 1, address: str = "") -> tuple[float, float]:
    """Trains; returns the share of right answers to held-back questions before and after."""
    rng, tokenizer = Random(seed), AutoTokenizer.from_pretrained(bundled.FOLDER)
    model = AutoModelForImageTextToText.from_pretrained(bundled.FOLDER, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chats = [[{"role": "user", "content": f"{a} and {b} together"}] for a, b in sums]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    asked = rng.sample([(prompt, str(a + b)) for prompt, (a, b) in zip(prompts, sums, strict=True)], len(sums))

    def sampled(asked: list[tuple[list[int], str]], **params: float) -> tuple[list[list[CompletionOutput]], float]:
        groups = [each.outputs for each in engine.generate([ids for ids, _ in asked], SamplingParams(**params))]
        hits = [sample.text == right for group, (_, right) in zip(groups, asked, strict=True) for sample in group]
        return groups, sum(hits) / len(hits)

    with Client(address) if address else LLMEngine(dtype="float32") as engine:
        _, before = sampled(asked[:NUM_HELD_BACK], temperature=0, max_tokens=8)
        for step in range(1, num_steps + 1):
            questions = rng.sample(asked[NUM_HELD_BACK:], BATCH)
            groups, share = sampled(questions, temperature=1, max_tokens=8, n=GROUP, seed=step, logprobs=0)
            optimizer.zero_grad()
            sum(loss_of(model, group, *one) / BATCH for group, one in zip(groups, questions, strict=True)).backward()
            optimizer.step()
            engine.update_weights_from_tensor(model.state_dict().items(), f"step-{step}")
            print(f"step {step}: {share:.0%} right", flush=True)
        return before, sampled(asked[:NUM_HELD_BACK], temperature=0, max_tokens=8)[1]


if __name__ == "__main__":
    print("right before and after: {:.0%}, {:.0%}".format(*train(address="".join(sys.argv[1:]))))
