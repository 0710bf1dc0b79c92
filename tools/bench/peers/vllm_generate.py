"""Runs vLLM's `LLM.generate` on token ids, without detokenization, as the rival of `quire bench throughput --beside`.

    PYTHON-OF-VLLM tools/bench/peers/vllm_generate.py MODEL [--dtype bfloat16] [--load-format dummy] [...]

The flags are vLLM's. It prints {} when ready. Every line on standard input is a load, {"prompts": [[id, ...], ...],
"num_output": [count, ...], "temperature": t, "forget": whether to reset the prefix cache first}, and every line on
standard output its result, {"seconds": s, "num_output": [count, ...]}. Nothing of Quire is imported.
"""

import dataclasses
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answers every line of stdin, a load as JSON, with a line of results; an empty object reports that the engine
    is ready."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps the engine's own output out of the results
    llm = open_llm()
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(generate(llm, json.loads(line))) + "\n")


def open_llm() -> Any:
    """Creates vLLM's engine from the command line, with vLLM's own flags and no tokenizer."""
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("path")
    arguments = parser.parse_args()
    names = {field.name for field in dataclasses.fields(EngineArgs)} & vars(arguments).keys()
    flags = {name: getattr(arguments, name) for name in names}
    return LLM(**{**flags, "model": arguments.path, "skip_tokenizer_init": True})


def generate(llm: Any, load: dict[str, Any]) -> dict[str, Any]:
    """Generates the load's answers; returns the seconds and the number of output tokens of each prompt."""
    from vllm import SamplingParams

    if load["forget"]:
        llm.reset_prefix_cache()
    same = {"temperature": load["temperature"], "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(max_tokens=count, **same) for count in load["num_output"]]
    prompts = [{"prompt_token_ids": prompt} for prompt in load["prompts"]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "num_output": [len(output.outputs[0].token_ids) for output in outputs]}


if __name__ == "__main__":
    main()
