"""Metrics of prompts and samples; they count what the client was sent."""

from __future__ import annotations

from collections.abc import Iterable

from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.output_processor.sample import Sample
from quire.services.frontend.request.outcome import Finish
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason

FINISHED_REASON: dict[FinishReason, str] = {
    finish_pb2.FINISH_REASON_STOP: "stop",
    finish_pb2.FINISH_REASON_LENGTH: "length",
    finish_pb2.FINISH_REASON_CANCELLED: "abort",
    finish_pb2.FINISH_REASON_DEADLINE: "abort",
    finish_pb2.FINISH_REASON_ERROR: "error",
    finish_pb2.FINISH_REASON_REPETITION: "repetition",
}

TOOL_CALLS = "tool_calls"  # finish reason of samples that called tools
REASON_NAMES = {reason: name.removeprefix("FINISH_REASON_").lower() for name, reason in finish_pb2.FinishReason.items()}


def finish_reason_name(finish: Finish | None, *, called: bool = False) -> str:
    """Returns the finish reason for the log; "cancelled" for a sample that did not finish by itself. `called`: it
    called tools that the client did not force by name."""
    if called and finish is not None and finish.reason == finish_pb2.FINISH_REASON_STOP:
        return TOOL_CALLS
    return "cancelled" if finish is None else REASON_NAMES[finish.reason]


def prompt_started(metrics: FrontendMetrics, prompt: PreparedPrompt, num_cached_tokens: int) -> None:
    """Counts a prompt's tokens, cached and computed, once whatever n is, as in usage."""
    metrics.prompt_tokens.inc(prompt.num_tokens)
    metrics.cached_tokens.inc(num_cached_tokens)
    metrics.request_computed_tokens.observe(prompt.num_tokens - num_cached_tokens)


def sample_ended(metrics: FrontendMetrics, sample: Sample, reason: FinishReason, arrival_s: float, now: float) -> None:
    """Records the end, token count and phase durations of one sample. `arrival_s`, `now`: on the event loop's clock;
    phases that were not reached are left out."""
    metrics.request_success[FINISHED_REASON[reason]].inc()
    metrics.e2e_latency.observe(now - arrival_s)
    metrics.request_generation_tokens.observe(sample.num_tokens)
    if sample.num_tokens and sample.started_s:
        metrics.prefill_time.observe(sample.first_token_s - sample.started_s)
        metrics.decode_time.observe(sample.last_token_s - sample.first_token_s)
        metrics.inference_time.observe(sample.last_token_s - sample.started_s)
    if sample.num_tokens > 1:
        metrics.time_per_output_token.observe((sample.last_token_s - sample.first_token_s) / (sample.num_tokens - 1))


def tools_offered(metrics: FrontendMetrics, *, streamed: bool, called: bool) -> None:
    """Counts each sample that could have called a tool."""
    mode, outcome = "streaming" if streamed else "non_streaming", "tool_call" if called else "no_tool_call"
    metrics.tool_parser[mode, outcome].inc()


def prompt_ended(metrics: FrontendMetrics, prompt: PreparedPrompt, samples: Iterable[Sample]) -> None:
    """Observes a prompt's parameters and the token counts of its samples, all of which have ended."""
    lengths = [sample.num_tokens for sample in samples]
    metrics.request_prompt_tokens.observe(prompt.num_tokens)
    metrics.request_params_n.observe(len(lengths))
    metrics.request_params_max_tokens.observe(prompt.prompt_request.sampling.max_tokens)
    metrics.request_max_num_generation_tokens.observe(max(lengths))
