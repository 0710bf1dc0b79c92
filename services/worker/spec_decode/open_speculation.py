"""Builds a worker's speculation from its settings; rejects combinations that cannot work, naming the setting."""

from __future__ import annotations

import functools

from quire.services.worker.heads.features import FeaturesHead
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.runner.model_runner import ModelRunner
from quire.services.worker.sampling.accept import REJECTION_METHODS
from quire.services.worker.spec_decode import config as speculative_config
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.drafter import Drafter, DrafterWorker, DraftTarget
from quire.services.worker.spec_decode.history import TokenHistory
from quire.services.worker.spec_decode.methods.grammar import JumpForward
from quire.services.worker.spec_decode.registry import open_drafter
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable
from quire.services.worker.spec_decode.speculation import Speculation
from quire.services.worker.spec_decode.trees.token_tree import TokenTree
from quire.services.worker.step.step_inputs import StepInputs
from quire.services.worker.structured.backends import backend_selection
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings

FEW_ROWS = 64  # rows of a step; with more, the drafter's cost of processing prompts is noticeable


def read_speculative_config(settings: WorkerSettings, config: DecoderConfig) -> SpeculativeConfig | None:
    """Parses and checks the setting. Raises InvalidArgument, also for a grammar library that is not installed, or that
    finds no forced tokens although the method drafts those."""
    drafting = speculative_config.parse_for(config, settings.speculative_config)
    names = backend_selection.library_names(settings.structured_output_backend)
    if drafting is not None and drafting.method == "grammar" and backend_selection.FORCE_TOKENS.isdisjoint(names):
        text = (
            f"structured_output_backend: {names[0]} cannot determine forced tokens, which speculative_config's method"
        )
        raise InvalidArgument(f"{text} grammar drafts; use another backend or method", field=backend_selection.FIELD)
    tree = speculative_config.tree_of(drafting)
    if tree is not None:
        _check_trees(tree, settings, config)
    return drafting


def _check_trees(tree: TokenTree, settings: WorkerSettings, config: DecoderConfig) -> None:
    """Raises InvalidArgument if token trees cannot work with these settings; attention/backends.py checks the
    backend."""
    most = max(max(path) for path in tree.paths)
    if settings.num_ranks > 1:
        raise _tree_error(f"num_ranks is {settings.num_ranks}: several ranks support chains only")
    if settings.batch_invariant:
        raise _tree_error(
            "batch_invariant supports chains only: tokens of a branch move, which changes how sums are split"
        )
    if config.latent is not None or config.recurrent is not None:
        raise _tree_error("latent attention and recurrent states support chains only")
    if most >= config.vocab_size:
        raise _tree_error(f"rank {most} of a vocabulary of {config.vocab_size} tokens")


def _tree_error(reason: str) -> InvalidArgument:
    """Returns an InvalidArgument about speculative_config.speculative_token_tree with this reason, to be raised."""
    field = speculative_config.SETTING
    return InvalidArgument(f"{field}.speculative_token_tree: {reason}", field=field)


def create_drafter(drafting: SpeculativeConfig | None, target: DraftTarget, limits: WorkerLimits) -> Drafter | None:
    """Creates the drafter of the configured method, which loads its weights; None if there is none. Raises
    InvalidArgument if it needs every token's KV, or trees, and the model's layers keep only a window or a state."""
    drafter = open_drafter(drafting, target) if drafting else None
    if drafter is not None and drafter.block_bytes and limits.layout.windows:
        raise InvalidArgument(
            "speculative_config: this method needs the KV of every token, and some of this model's layers keep a "
            "window or a "
            "state only; use ngram, suffix, medusa or grammar",
            field="speculative_config",
        )
    if speculative_config.tree_of(drafting) is not None and limits.layout.windows:
        raise _tree_error("sliding windows support chains only")
    return drafter


def start_speculation(
    config: SpeculativeConfig, drafter: Drafter, runner: ModelRunner, table: DraftingSlotTable, fitting: WorkerLimits
) -> Speculation:
    """Builds the Speculation once memory is measured: starts the drafter's proposer with a new history, lets forced
    tokens precede its drafts, and adds the features head and the rejection method to the runner's heads."""
    history = TokenHistory(fitting)
    other = drafter.start(DrafterWorker(config, history, table, runner.sampler, fitting))
    proposer = JumpForward(runner.sampler.grammar_masks, other)
    runner.heads.sampling.choose_tokens = REJECTION_METHODS[config.rejection_sample_method]
    runner.heads.use_features(FeaturesHead(functools.partial(_wants_features, drafter, table)))
    forced_only = config.method == "grammar"
    adaptive = config.adaptive_length and not forced_only
    return Speculation(
        proposer,
        history,
        table,
        fitting,
        adaptive=adaptive,
        constrained_only=forced_only,
        trees=config.tree is not None,
    )


def _wants_features(drafter: Drafter, table: DraftingSlotTable, inputs: StepInputs) -> bool:
    """Returns whether a step computes features for the drafter: steps with drafts if it reads them at all; with few
    rows also prompts of steps without drafts, which some drafters need in order to start."""
    if table.num_draft_tokens > 0:
        return drafter.needs_features
    return drafter.needs_prompts and inputs.num_rows <= FEW_ROWS and inputs.num_tokens > inputs.num_rows
